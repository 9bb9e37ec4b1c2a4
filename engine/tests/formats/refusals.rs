//! Layouts and settings that are not loaded: each is refused by name, with what would make it load.

use mixquant_engine::formats::Format;
use serde_json::{Value, json};

/// A configuration and what the error says.
type Case = (Value, &'static str);

fn gptq() -> Vec<Case> {
    let with = |field: &str, value: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4});
        config[field] = value;
        config
    };
    vec![
        (json!({"quant_method": "gptq"}), "bits is missing"),
        (
            with("bits", json!(3)),
            "bits 3 is not supported: supported are 4 and 8",
        ),
        (
            with("bits", json!("4")),
            "bits is \"4\": it must be a whole number",
        ),
        (
            with("group_size", json!(0)),
            "group_size is 0: it must be -1 or above 0",
        ),
        (with("sym", json!(1)), "sym is 1: it must be true or false"),
        (
            with("checkpoint_format", json!("gptq_p")),
            "checkpoint_format gptq_p is not supported: supported are gptq and gptq_v2",
        ),
        (
            with("is_marlin_format", json!(true)),
            "weights repacked for Marlin are not read",
        ),
        (
            with("pack_dtype", json!("int64")),
            "pack_dtype int64 is not supported",
        ),
        (
            with("dynamic", json!({"+:(": {}})),
            "dynamic has the regular expression (",
        ),
        (
            with("dynamic", json!({"+:a": {"bits": 2}})),
            "bits 2 is not supported",
        ),
        (
            with("dynamic", json!([])),
            "dynamic must map patterns to overrides",
        ),
    ]
}

fn awq_and_fp8() -> Vec<Case> {
    vec![
        (
            json!({"quant_method": "awq", "version": "gemv_fast"}),
            "version gemv_fast is a layout that is not read: quantise with AutoAWQ's version GEMM",
        ),
        (
            json!({"quant_method": "awq", "version": "LLM-AWQ"}),
            "version llm-awq is a layout",
        ),
        (
            json!({"quant_method": "awq", "bits": 8}),
            "bits is 8: AWQ's GEMM layout has 4",
        ),
        (
            json!({"quant_method": "awq", "zero_point": false}),
            "zero_point is false",
        ),
        (
            json!({"quant_method": "fp8", "fmt": "e5m2"}),
            "fmt e5m2 is not supported: supported is e4m3",
        ),
        (
            json!({"quant_method": "fp8", "weight_block_size": [128]}),
            "weight_block_size must be two numbers above 0",
        ),
        (
            json!({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}),
            "modules_to_not_convert must be a list of texts",
        ),
    ]
}

fn compressed_tensors() -> Vec<Case> {
    let group = |format: &str, weights: Value| {
        json!({
            "quant_method": "compressed-tensors", "format": format,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}
        })
    };
    let four = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
    let with = |field: &str, value: Value| {
        let mut config = group("pack-quantized", four.clone());
        config[field] = value;
        config
    };
    vec![
        (
            json!({"quant_method": "compressed-tensors"}),
            "config_groups is missing",
        ),
        (
            group(
                "nvfp4-pack-quantized",
                json!({"num_bits": 4, "type": "float"}),
            ),
            "format nvfp4-pack-quantized of float weights with 4 bits is not supported: supported are int-quantized",
        ),
        (
            group("marlin-24", four.clone()),
            "format marlin-24 of int weights with 4 bits is not supported",
        ),
        (
            group("pack-quantized", json!({"num_bits": 3, "type": "int"})),
            "pack-quantized of int weights with 3 bits is not supported",
        ),
        (
            group(
                "int-quantized",
                json!({"num_bits": 8, "type": "int", "strategy": "attn_head"}),
            ),
            "strategy attn_head of weights is not supported",
        ),
        (
            group("int-quantized", json!(null)),
            "config_groups.group_0.weights is missing",
        ),
        (
            with("sparsity_config", json!({"format": "sparse-24-bitmask"})),
            "sparsity_config is present: sparse weights are not supported",
        ),
        (
            with("transform_config", json!({"config_groups": {"u": {}}})),
            "transform_config is present: rotations at run time are not supported",
        ),
    ]
}

#[test]
fn layouts_that_are_not_loaded_are_refused_by_name() {
    let others = [
        (json!({}), "quant_method is missing"),
        (
            json!({"quant_method": "bitsandbytes"}),
            "quant_method bitsandbytes is not supported: supported are compressed-tensors, gptq, awq, fp8",
        ),
    ];
    let cases = [gptq(), awq_and_fp8(), compressed_tensors()].concat();
    for (config, expected) in cases.into_iter().chain(others) {
        let message = Format::parse(&config).unwrap_err().message;
        assert!(message.contains(expected), "{config}: {message}");
        assert!(
            message.starts_with("config.json: quantization_config.") && !message.contains('\n'),
            "{message}"
        );
    }
}
