//! The machine's own rates, measured between the rounds of a benchmark: what its instructions can do and how fast memory can be read.
//!
//! A roof is the best of all rounds, what is compared with it a median: a share of a roof is never flattered by noise.

use std::time::Duration;

use rayon::prelude::*;
use serde::Serialize;

use super::clock::{self, Seconds};
use crate::kernels::packed::{Line, Lines};
use crate::kernels::peak::{self, Unit};

/// More than the caches of any one socket hold.
const STREAM_BYTES: usize = 512 << 20;
/// Values of one piece of a read.
const PIECE: usize = 1 << 17;
/// Rounds of a peak's loop at once: under a millisecond.
const SPIN: u32 = 50_000;

/// A rate of all threads, a second on the wall and a second of one thread's computing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Rate {
    /// A second on the wall.
    pub wall: f64,
    /// A second of computing.
    pub cpu: f64,
}

/// What a benchmark is compared with; absent where the machine lacks the instruction.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Roofs {
    /// Operations (two a product) of INT8.
    pub int8_ops: Option<Rate>,
    /// Operations of BF16.
    pub bf16_ops: Option<Rate>,
    /// Operations of FP32.
    pub fp32_ops: Option<Rate>,
    /// Bytes read from memory by 1, 2, … threads.
    pub read_bytes: Vec<Rate>,
}

impl Rate {
    fn of(units: f64, seconds: Seconds) -> Self {
        Self {
            wall: units / seconds.wall,
            cpu: units / seconds.cpu,
        }
    }

    /// The better of both, clock by clock.
    fn max(self, other: Self) -> Self {
        Self {
            wall: self.wall.max(other.wall),
            cpu: self.cpu.max(other.cpu),
        }
    }
}

impl Roofs {
    /// The better of what was known and one more measurement, which takes about `4 * time`.
    #[must_use]
    pub fn or_better(&self, data: &Stream, time: Duration) -> Self {
        let better = |known: Option<Rate>, unit| {
            let now = peak_rate(unit, time);
            known.map_or(now, |known| now.map(|now| now.max(known)))
        };
        let threads = rayon::current_num_threads();
        let read = |count: usize| {
            let now = data.rate(count, time);
            let known = self.read_bytes.get(count - 1).copied();
            known.map_or(now, |known| now.max(known))
        };
        Self {
            int8_ops: better(self.int8_ops, Unit::Int8),
            bf16_ops: better(self.bf16_ops, Unit::Bf16),
            fp32_ops: better(self.fp32_ops, Unit::Fp32),
            read_bytes: (1..=threads).map(read).collect(),
        }
    }

    /// Bytes a second that all threads can read.
    pub fn read(&self) -> Rate {
        self.read_bytes.last().copied().unwrap_or_default()
    }
}

/// Every thread at once, so that clocks are as low as they are under load.
#[expect(clippy::cast_precision_loss, reason = "a rate has three digits")]
fn peak_rate(unit: Unit, time: Duration) -> Option<Rate> {
    let operations = peak::spin(unit, 1)? * u64::from(SPIN);
    let all = operations as f64 * rayon::current_num_threads() as f64;
    let seconds = clock::time(time, || {
        rayon::broadcast(|_| peak::spin(unit, SPIN));
        Ok::<(), ()>(())
    });
    seconds.ok().map(|seconds| Rate::of(all, seconds))
}

/// Memory to be read, as packed weights have it.
#[derive(Debug)]
pub struct Stream(Lines);

impl Stream {
    /// As much as is needed to leave every cache.
    pub fn new() -> Self {
        let mut lines = Lines::zeros(STREAM_BYTES / size_of::<Line>());
        lines.all_mut().fill(Line([1; 64]));
        Self(lines)
    }

    /// Bytes a second, read by so many threads, in the better of two ways to read.
    fn rate(&self, threads: usize, time: Duration) -> Rate {
        let [plain, ahead] = [false, true].map(|ahead| self.rate_of(threads, time / 2, ahead));
        plain.max(ahead)
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate has three digits")]
    fn rate_of(&self, threads: usize, time: Duration, ahead: bool) -> Rate {
        let values: &[u64] = bytemuck::cast_slice(self.0.all());
        // Pieces are dealt out in turn, so that no thread waits for another's share.
        let pieces = |thread: usize| values.chunks(PIECE).skip(thread).step_by(threads);
        let seconds = clock::time(time, || {
            let sum = (0..threads)
                .into_par_iter()
                .with_max_len(1)
                .map(|thread| {
                    let sums = pieces(thread).map(|piece| peak::read(piece, ahead));
                    sums.fold(0, u64::wrapping_add)
                })
                .reduce(|| 0, u64::wrapping_add);
            std::hint::black_box(sum);
            Ok::<(), ()>(())
        });
        seconds.map_or(Rate::default(), |seconds| {
            Rate::of(size_of_val(values) as f64, seconds)
        })
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}
