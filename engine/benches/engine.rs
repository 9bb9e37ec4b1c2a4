//! Tokens a second and GB a second beside what the machine can do: `cargo bench -p mixquant-engine [-- kernels|model]`.
//!
//! One thread; times are seconds of computing, the best of several runs, so that other load on the machine disturbs them least.
#![expect(clippy::print_stdout, reason = "a bench prints its numbers")]
#![expect(clippy::cast_precision_loss, reason = "counts are small")]

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use half::bf16;
use mixquant_crds::{DecodeScheme, KvPrecision, PrecisionPlan, PrefillScheme};
use mixquant_engine::kernels::{self, Activations, Int8Rows, Matrix, Packed, Values};
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};
use mixquant_engine::quant::{WeightFormat, round_to_nearest};

const PROMPT: usize = 1000;
const SAMPLES: usize = 5;
const SAMPLE: Duration = Duration::from_millis(500);

/// Nanoseconds that all threads of this process have computed so far (Linux; 0 elsewhere).
fn cpu_nanoseconds() -> u64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return 0;
    };
    let of = |path: &Path| {
        std::fs::read_to_string(path.join("schedstat"))
            .ok()?
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    };
    threads
        .flatten()
        .filter_map(|thread| of(&thread.path()))
        .sum()
}

/// Seconds of one run: the fastest of several samples, each long enough for the system's clock of computing time to be exact to a
/// percent. Computing time counts where the system tells it, so that other load on the machine does not.
fn best(mut run: impl FnMut()) -> f64 {
    let mut sample = || {
        let (start, computed) = (Instant::now(), cpu_nanoseconds());
        let mut runs = 0.0;
        while start.elapsed() < SAMPLE {
            run();
            runs += 1.0;
        }
        let elapsed = start.elapsed().as_secs_f64();
        let computed = (cpu_nanoseconds() - computed) as f64 / 1e9;
        if computed > 0.0 {
            computed / runs
        } else {
            elapsed / runs
        }
    };
    (0..SAMPLES).map(|_| sample()).fold(f64::INFINITY, f64::min)
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count)
        .map(|i| u32::try_from(8 + (i * i * 37 + i * 101) % 4000).unwrap_or(8))
        .collect()
}

/// Tokens a second of a prompt of [`PROMPT`] tokens in one chunk.
fn prefill(model: &Model, pass: Pass) -> f64 {
    let (tokens, mut workspace) = (tokens(PROMPT), Workspace::default());
    let seconds = best(|| {
        let mut cache = model.new_cache(PROMPT);
        let chunk = Chunk {
            tokens: &tokens,
            cache: &mut cache,
            logits: LogitRows::Last,
        };
        black_box(
            model
                .forward(pass, &mut [chunk], &mut workspace, None)
                .expect("the prompt fits"),
        );
    });
    PROMPT as f64 / seconds
}

/// Tokens a second of one sequence after a prompt of `context` tokens.
fn decode(model: &Model, context: usize) -> f64 {
    const STEPS: usize = 20;
    let (tokens, mut workspace) = (tokens(context + STEPS), Workspace::default());
    let mut prompt = model.new_cache(context + STEPS);
    let chunk = Chunk {
        tokens: &tokens[..context],
        cache: &mut prompt,
        logits: LogitRows::None,
    };
    model
        .forward(Pass::Precise, &mut [chunk], &mut workspace, None)
        .expect("the prompt fits");
    let seconds = best(|| {
        let mut cache = prompt.clone();
        for token in tokens[context..].chunks(1) {
            let chunk = Chunk {
                tokens: token,
                cache: &mut cache,
                logits: LogitRows::Last,
            };
            black_box(
                model
                    .forward(Pass::Precise, &mut [chunk], &mut workspace, None)
                    .expect("the answer fits"),
            );
        }
    });
    STEPS as f64 / seconds
}

/// GB a second of reading 256 MB, the roof of decode.
fn memory_bandwidth() -> f64 {
    let data = vec![1_u64; 32 << 20];
    let seconds = best(|| {
        let mut sums = [0_u64; 16];
        for chunk in data.chunks_exact(16) {
            sums.iter_mut()
                .zip(chunk)
                .for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
        }
        black_box(sums);
    });
    size_of_val(&data[..]) as f64 / seconds / 1e9
}

fn kernels_of(backend: &dyn kernels::Backend) {
    // BF16 weights of 128 MB, one row of activations: the decode of a large model.
    let (n, k) = (32 << 10, 2048);
    let weights = vec![bf16::from_f32(0.5); n * k];
    let (x, mut dst) = (vec![0.25; k], vec![0.0; n]);
    let matrix = Matrix {
        values: Values::Bf16(&weights),
        rows: n,
        columns: k,
    };
    let gemv = best(|| backend.matmul(black_box(&x), matrix, n, &mut dst));
    let gemv = (n * k * 2) as f64 / gemv / 1e9;
    // A prompt's product: 128 rows, 1024 x 1024.
    let (m, n, k) = (128, 1024, 1024);
    let (x, w, mut dst) = (vec![0.25; m * k], vec![0.5; n * k], vec![0.0; m * n]);
    let matrix = Matrix {
        values: Values::F32(&w),
        rows: n,
        columns: k,
    };
    let float = best(|| backend.matmul(black_box(&x), matrix, n, &mut dst));
    let packed = Packed::new("w", &round_to_nearest(&w, k, WeightFormat::Int8))
        .expect("the linear is whole");
    let (values, scales, sums) = (vec![3_i8; m * k], vec![0.5; m], vec![3 * 1024; m]);
    let rows = Activations::Int8(Int8Rows {
        values: &values,
        scales: &scales,
        sums: &sums,
        groups: packed.groups().expect("integers take INT8 rows"),
    });
    let int8 = best(|| backend.matmul_packed(black_box(rows), &packed, 0..n, n, &mut dst));
    let operations = (2 * m * n * k) as f64 / 1e9;
    println!(
        "{:8} GEMV BF16 {gemv:6.1} GB/s   GEMM FP32 {:7.1} GFLOP/s   GEMM INT8 {:7.1} GOP/s",
        backend.name(),
        operations / float,
        operations / int8
    );
}

fn models() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m");
    let mut model = Model::open(&directory).expect("the shipped model opens");
    println!("kube-llama-10m, one thread, prompts of {PROMPT} tokens, tokens/s:");
    let print = |name: &str, model: &Model, pass: Pass| {
        let (prefill, near, far) = (
            prefill(model, pass),
            decode(model, 16),
            decode(model, PROMPT - 20),
        );
        println!(
            "  {name:16} prefill {prefill:6.0}   decode {near:5.0} at 16 tokens, {far:5.0} at {}",
            PROMPT - 20
        );
    };
    for scheme in [DecodeScheme::FP32, DecodeScheme::BF16] {
        model
            .set_plan(PrecisionPlan::precise(scheme))
            .expect("nothing is needed for it");
        print(&format!("{scheme:?}"), &model, Pass::Precise);
    }
    let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
    plan.prefill.scheme = PrefillScheme::W8A8;
    (plan.kv_cache.default, plan.kv_cache.important) = (KvPrecision::INT4, KvPrecision::INT4);
    plan.kv_cache.recent_tokens = 64;
    let quantised = model.quantise_linears();
    model
        .attach(quantised, None, plan)
        .expect("the copy fits its own model");
    print("W8A8, INT4 KV", &model, Pass::Prefill);
}

fn main() {
    kernels::threads::configure(Some(1)).expect("the pool is built once");
    let wanted = |name: &str| {
        std::env::args()
            .skip(1)
            .filter(|word| !word.starts_with('-'))
            .all(|word| word == name)
    };
    if wanted("kernels") {
        println!("memory read {:.1} GB/s", memory_bandwidth());
        let fast = kernels::available()
            .into_iter()
            .filter(|backend| backend.name() != "naive");
        fast.for_each(kernels_of);
    }
    if wanted("model") {
        models();
    }
}
