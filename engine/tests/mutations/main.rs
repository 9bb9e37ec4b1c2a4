//! Damaged files of every kind that is loaded: none makes the loader panic, none makes it hold more memory than twice the file and a constant.
//!
//! The same functions and seeds as the `cargo fuzz` targets (`../fuzz`), without a nightly toolchain. A fixed number of mutations by default, the
//! same on every machine; `MUTATION_SECONDS` goes on for so long (`make test` gives 60).
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test panics where it fails and prints what it did"
)]

mod allocation;
#[expect(unreachable_pub, reason = "it is the library of the fuzz targets too")]
#[path = "../../fuzz/entries.rs"]
mod entries;
mod mutate;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use self::entries::{ENTRIES, Entry};

/// Mutations of each seed by default; `MUTATIONS` asks for more, and `MUTATION_SECONDS` ends them earlier. They are the same in every run, so
/// that a machine that is faster finds nothing else.
const MUTATIONS: u64 = 300;
/// Mutations that longer runs found something with.
const ALSO: [u64; 1] = [24_042];
/// Held beside what grows with the file: a model's structures, regular expressions, the buffers of the filesystem.
const CONSTANT: usize = 4 << 20;
/// What the `tokenizers` crate holds for a byte of `tokenizer.json`, with room: a vocabulary in several maps, twice (with and without control tokens).
const TOKENIZER_FACTOR: usize = 24;

/// The allocator counts for the process: one entry at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn run(name: &str) {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    // The library behind tokenizers panics over some files, which ends in an error. A backtrace of it would hold 60 MB of symbols.
    set_hook(Box::new(|panic| eprintln!("{panic}")));
    let (_, seeds, work): &Entry = ENTRIES.iter().find(|entry| entry.0 == name).unwrap();
    let factor = if name == "tokenizer_json" {
        TOKENIZER_FACTOR
    } else {
        2
    };
    let seconds = std::env::var("MUTATION_SECONDS")
        .ok()
        .map(|text| text.parse().unwrap());
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let count = std::env::var("MUTATIONS").map_or(MUTATIONS, |text| text.parse().unwrap());
    let (mut done, mut most) = (0, 0);
    let seeds: Vec<Vec<u8>> = seeds
        .iter()
        .map(|seed| fs::read(entries::path(seed)).unwrap())
        .collect();
    for number in (0..count).chain(ALSO) {
        if until.is_some_and(|until| Instant::now() >= until) {
            break;
        }
        for seed in &seeds {
            let file = if number == 0 {
                seed.clone()
            } else {
                mutate::damage(seed, number)
            };
            let held = allocation::most_held(|| {
                let outcome = catch_unwind(AssertUnwindSafe(|| work(&file)));
                assert!(
                    outcome.is_ok(),
                    "{name}: mutation {number} of a seed of {} bytes panics",
                    seed.len()
                );
            });
            let bound = factor * file.len() + CONSTANT;
            assert!(
                held <= bound,
                "{name}: mutation {number} holds {held} bytes for a file of {}",
                file.len()
            );
            most = most.max(held);
            done += 1;
        }
    }
    println!("{name}: {done} files, at most {most} bytes held");
}

#[test]
fn damaged_safetensors_do_no_harm() {
    run("safetensors");
}

#[test]
fn damaged_gguf_files_do_no_harm() {
    run("gguf");
}

#[test]
fn damaged_quantization_configs_do_no_harm() {
    run("quantization_config");
}

#[test]
fn damaged_tokenizers_do_no_harm() {
    run("tokenizer_json");
}

#[test]
fn damaged_manifests_do_no_harm() {
    run("artifact_manifest");
}
