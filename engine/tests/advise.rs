//! What `advise` says for known models on known devices. The texts are in `engine/tests/advise/`; `UPDATE_EXPECT=1` rewrites them.

use expect_test::expect_file;
use mixquant_engine::advise::{Advice, Device, Load, ModelFacts, Task, advise};
use proptest::prelude::*;

/// Sizes as the models' own configurations have them: layers, hidden, heads, KV heads, head width, MLP width, vocabulary.
fn model(
    name: &str,
    [layers, hidden, heads, kv_heads, head_dim, ffn, vocabulary]: [u64; 7],
) -> ModelFacts {
    let attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim;
    ModelFacts {
        name: name.to_owned(),
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        linear_weights: layers * (attention + 3 * hidden * ffn),
        other_weights: 2 * vocabulary * hidden + (2 * layers + 1) * hidden,
        head_weights: vocabulary * hidden,
        context: 131_072,
    }
}

fn llama_8b() -> ModelFacts {
    model("Llama-3.1-8B", [32, 4096, 32, 8, 128, 14_336, 128_256])
}

fn llama_13b() -> ModelFacts {
    ModelFacts {
        context: 4096,
        ..model("Llama-2-13B", [40, 5120, 40, 40, 128, 13_824, 32_000])
    }
}

fn llama_70b() -> ModelFacts {
    model("Llama-3.1-70B", [80, 8192, 64, 8, 128, 28_672, 128_256])
}

fn device(name: &str, memory: f64, bandwidth: f64, [bf16, int8, fp8]: [f64; 3]) -> Device {
    Device {
        name: name.to_owned(),
        memory_bytes: memory,
        bandwidth_bytes_per_second: bandwidth,
        bf16_ops_per_second: bf16,
        int8_ops_per_second: (int8 > 0.0).then_some(int8),
        fp8_ops_per_second: (fp8 > 0.0).then_some(fp8),
        prefill_reach: 0.6,
        decode_reach: 0.8,
    }
}

fn h200() -> Device {
    device("H200", 141e9, 4.8e12, [989e12, 1979e12, 1979e12])
}

fn a100_40() -> Device {
    device("A100 40 GB", 40e9, 1.555e12, [312e12, 624e12, 0.0])
}

fn a100_80() -> Device {
    device("A100 80 GB", 80e9, 2.039e12, [312e12, 624e12, 0.0])
}

fn rtx_3090() -> Device {
    device("RTX 3090", 24e9, 0.936e12, [71e12, 284e12, 0.0])
}

fn load(task: Task) -> Load {
    Load {
        prompt_tokens: 1024,
        sequence_length: 4096,
        concurrency: 8,
        task,
    }
}

fn scheme(advice: &Advice) -> &str {
    advice
        .recommendation
        .as_ref()
        .map_or("", |found| found.scheme)
}

#[test]
fn eight_billion_on_an_h200_keeps_both_copies() {
    let advice = advise(llama_8b(), h200(), load(Task::General));
    expect_file!["advise/llama-8b-h200.txt"].assert_eq(&advice.to_string());
    assert!(scheme(&advice).ends_with("Dual"));
}

#[test]
fn eight_billion_in_24_gigabytes_has_no_room_for_a_second_copy() {
    let advice = advise(llama_8b(), rtx_3090(), load(Task::General));
    expect_file!["advise/llama-8b-3090.txt"].assert_eq(&advice.to_string());
    assert!(scheme(&advice).ends_with("OnTheFly"));
}

#[test]
fn thirteen_billion_for_code_in_40_gigabytes_is_int8_with_int8_keys() {
    let advice = advise(llama_13b(), a100_40(), load(Task::Code));
    expect_file!["advise/llama-13b-a100.txt"].assert_eq(&advice.to_string());
    assert_eq!(scheme(&advice), "W8A8, Single");
    assert!(
        advice
            .why
            .iter()
            .any(|why| why.contains("code not at 4 bits")),
        "{:?}",
        advice.why
    );
}

#[test]
fn seventy_billion_does_not_fit_a_small_device_and_the_numbers_say_so() {
    let advice = advise(llama_70b(), rtx_3090(), load(Task::General));
    expect_file!["advise/llama-70b-3090.txt"].assert_eq(&advice.to_string());
    assert!(advice.recommendation.is_none());
    let large = advise(llama_70b(), h200(), load(Task::Maths));
    expect_file!["advise/llama-70b-h200.txt"].assert_eq(&large.to_string());
    assert_eq!(scheme(&large), "W8A8, Single");
}

#[test]
fn four_bits_are_recommended_where_nothing_else_fits_and_never_for_exact_tasks() {
    let advice = advise(llama_70b(), a100_80(), load(Task::General));
    expect_file!["advise/llama-70b-a100.txt"].assert_eq(&advice.to_string());
    assert_eq!(scheme(&advice), "W4A16 g128");
    let says = |advice: &Advice, what: &str| advice.why.iter().any(|why| why.contains(what));
    assert!(says(&advice, "only 4 bits fit"), "{:?}", advice.why);
    let exact = advise(llama_70b(), a100_80(), load(Task::Code));
    assert!(exact.recommendation.is_none());
    assert!(says(&exact, "which code does not bear"), "{:?}", exact.why);
}

/// The figures of the literature that the formulas must give again.
#[test]
fn keys_and_values_take_what_is_known() {
    let bytes = llama_8b().kv_bytes_per_token(16.0);
    assert!((bytes - 131_072.0).abs() < 1e-6, "{bytes}");
    let weights = llama_8b().linear_weights + llama_8b().other_weights;
    assert!(
        (8_020_000_000..8_040_000_000).contains(&weights),
        "{weights}"
    );
}

#[test]
fn a_device_without_int8_has_no_switch() {
    let old = device("old", 80e9, 1e12, [100e12, 0.0, 0.0]);
    let advice = advise(llama_8b(), old, load(Task::General));
    assert_eq!(scheme(&advice), "BF16");
    assert!(
        advice
            .rows
            .iter()
            .all(|row| !row.scheme.name.contains("W8A8"))
    );
}

proptest! {
    #[test]
    fn what_is_recommended_fits_and_more_memory_never_takes_it_away(memory in 1e9_f64..400e9, more in 1.0_f64..3.0, concurrency in 1_u64..64, sequence in 128_u64..32_768) {
        let load = Load { sequence_length: sequence, concurrency, ..load(Task::General) };
        let with = |memory| advise(llama_8b(), Device { memory_bytes: memory, ..h200() }, load);
        let (small, large) = (with(memory), with(memory * more));
        if let Some(found) = &small.recommendation {
            let row = small.rows.iter().find(|row| row.scheme.name == found.scheme).unwrap();
            prop_assert!(row.kv.iter().any(|fit| fit.kv == found.kv && fit.fits));
            prop_assert!(large.recommendation.is_some());
        }
    }
}
