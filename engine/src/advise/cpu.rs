//! This machine as a device: its memory from the cgroup or the system, its rates from short measurements with the kernels that serve.
//!
//! What is measured is what is reached, so both shares are 1. The figures move with the machine's other work.

use std::fs;
use std::time::{Duration, Instant};

use half::bf16;
use rayon::prelude::*;

use super::Device;
use crate::kernels::{self, Activations, Groups, Int8Rows, Matrix, Packed, Values};
use crate::quant::QuantisedLinear;

/// More than the caches of any one socket hold.
const STREAM_BYTES: usize = 512 << 20;
/// How long each rate is measured.
const TIME: Duration = Duration::from_millis(300);

/// Measures this machine for a second.
pub fn measure() -> Device {
    let threads = rayon::current_num_threads();
    Device {
        name: format!(
            "this machine ({threads} threads, {})",
            kernels::detect().name()
        ),
        memory_bytes: memory(),
        bandwidth_bytes_per_second: bandwidth(),
        bf16_ops_per_second: bf16_rate(),
        int8_ops_per_second: Some(int8_rate()),
        fp8_ops_per_second: None,
        prefill_reach: 1.0,
        decode_reach: 1.0,
    }
}

/// The smaller of the cgroup's limit and the system's memory, bytes.
fn memory() -> f64 {
    let system = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let limits = [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ];
    let limits = limits
        .iter()
        .filter_map(|path| limit(&fs::read_to_string(path).ok()?));
    limits.fold(total(&system).unwrap_or(0.0), f64::min)
}

/// `MemTotal` of `/proc/meminfo`, bytes.
fn total(meminfo: &str) -> Option<f64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

/// A cgroup's limit, bytes; nothing for `max`.
fn limit(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

/// The best rate of `work`, which does `units` a call.
fn best_rate(units: f64, mut work: impl FnMut()) -> f64 {
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    work();
    loop {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
        if begin.elapsed() >= TIME {
            return units / best.max(f64::MIN_POSITIVE);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate has three digits")]
fn bandwidth() -> f64 {
    let data = vec![1_u64; STREAM_BYTES / 8];
    let mut sum = 0_u64;
    let rate = best_rate(STREAM_BYTES as f64, || {
        let parts = data.par_chunks(1 << 16);
        sum = sum.wrapping_add(parts.map(|part| part.iter().sum::<u64>()).sum::<u64>());
    });
    std::hint::black_box(sum);
    rate
}

/// Sizes of a product that stays in the second-level cache, as the blocks of a prefill do.
const ROWS: usize = 64;
const WIDTH: usize = 512;

/// Operations of one product on every thread.
#[expect(clippy::cast_precision_loss, reason = "a rate has three digits")]
fn operations(threads: usize) -> f64 {
    (2 * ROWS * WIDTH * WIDTH * threads) as f64
}

fn bf16_rate() -> f64 {
    let (backend, threads) = (kernels::detect(), rayon::current_num_threads());
    let weights = vec![bf16::ONE; WIDTH * WIDTH];
    let matrix = Matrix {
        values: Values::Bf16(&weights),
        rows: WIDTH,
        columns: WIDTH,
    };
    let x = vec![1.0_f32; ROWS * WIDTH];
    let mut dst = vec![0.0_f32; threads * ROWS * WIDTH];
    best_rate(operations(threads), || {
        dst.par_chunks_mut(ROWS * WIDTH)
            .for_each(|dst| backend.matmul(&x, matrix, WIDTH, dst));
    })
}

fn int8_rate() -> f64 {
    let (backend, threads) = (kernels::detect(), rayon::current_num_threads());
    let linear = QuantisedLinear::from_rows(String::new(), &vec![1.0; WIDTH * WIDTH], WIDTH, WIDTH);
    let weights =
        Packed::new("measured", &linear.weight).expect("whole weights of a width that fits");
    let (values, scales, sums) = (vec![1_i8; ROWS * WIDTH], vec![1.0; ROWS], vec![512; ROWS]);
    let x = Activations::Int8(Int8Rows {
        values: &values,
        scales: &scales,
        sums: &sums,
        groups: Groups::new(WIDTH, WIDTH),
    });
    let mut dst = vec![0.0_f32; threads * ROWS * WIDTH];
    best_rate(operations(threads), || {
        dst.par_chunks_mut(ROWS * WIDTH)
            .for_each(|dst| backend.matmul_packed(x, &weights, 0..WIDTH, WIDTH, dst));
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_the_smaller_of_system_and_cgroup() {
        assert_eq!(
            total("MemFree: 1 kB\nMemTotal:       2048 kB\n"),
            Some(2_097_152.0)
        );
        assert_eq!(total("nothing"), None);
        assert_eq!(limit("1048576\n"), Some(1_048_576.0));
        assert_eq!(limit("max\n"), None);
        let measured = memory();
        assert!(measured > 1e8, "{measured}");
    }

    #[test]
    fn this_machine_has_rates_above_nothing() {
        let device = measure();
        let rates = [
            device.bandwidth_bytes_per_second,
            device.bf16_ops_per_second,
            device.int8_ops_per_second.unwrap(),
        ];
        assert!(
            rates.iter().all(|rate| *rate > 1e6 && rate.is_finite()),
            "{rates:?}"
        );
    }
}
