//! Every weight of one linear in each quantised layout, against what the layout's own tool (or an independent script) reads.

use std::fs;

use mixquant_engine::formats::{Format, Tensors};
use mixquant_engine::quant::weight::{Codes, QuantisedWeight};
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use crate::golden;

const SHAPE: [usize; 2] = [24, 64];

pub(crate) fn configs() -> Map<String, Value> {
    serde_json::from_str(&fs::read_to_string(golden("layouts.json")).unwrap()).unwrap()
}

fn read(tensors: &dyn Tensors, config: &Value, case: &str) -> QuantisedWeight {
    let format = Format::parse(config).unwrap();
    format.read(tensors, case, SHAPE).unwrap().unwrap()
}

fn rows(weight: &QuantisedWeight) -> Vec<f32> {
    let mut rows = vec![0.0; weight.out_features * weight.in_features];
    for (row, dst) in rows.chunks_exact_mut(weight.in_features).enumerate() {
        weight.dequantise_row(row, dst);
    }
    rows
}

#[test]
fn every_weight_of_every_layout_is_what_its_own_tool_reads() {
    let bytes = fs::read(golden("layouts.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let configs = configs();
    assert!(configs.len() >= 20, "{} cases", configs.len());
    for (case, config) in &configs {
        let weights = rows(&read(&tensors, config, case));
        let expected = tensors.tensor(&format!("{case}.expected")).unwrap();
        let expected = expected.data().as_chunks::<4>().0;
        assert_eq!(weights.len(), expected.len(), "{case}");
        for (index, (weight, expected)) in weights.iter().zip(expected).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert_eq!(
                weight.to_bits(),
                expected.to_bits(),
                "{case}: weight {index} is {weight}, not {expected}"
            );
        }
    }
}

#[test]
fn weights_keep_the_bits_that_their_layout_has() {
    let bytes = fs::read(golden("layouts.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let configs = configs();
    let of = |case: &str| read(&tensors, &configs[case], case);
    for case in [
        "ct-w4a16",
        "gptq-v1",
        "gptq-v2-that-says-v1",
        "gptq-v1-that-says-v2",
    ] {
        let weight = of(case);
        assert!(
            matches!(weight.codes, Codes::Int4(_)) && weight.zeros.is_none() && weight.group == 32,
            "{case}"
        );
    }
    for case in ["ct-w4a16-asym", "gptq-v1-asym", "gptq-v2-asym", "awq"] {
        assert!(of(case).zeros.is_some(), "{case}");
    }
    for case in [
        "ct-w4a16-act-order",
        "gptq-act-order",
        "gptq-act-order-asym-8-bit",
    ] {
        assert!(of(case).input_order.is_some(), "{case}");
    }
    assert!(of("gptq-v1").input_order.is_none());
    assert!(matches!(of("ct-w8a8").codes, Codes::Int8(_)));
    assert!(matches!(of("ct-fp8-block").codes, Codes::Fp8(_)));
    assert_eq!(
        (of("ct-fp8-block").row_block, of("ct-fp8-block").group),
        (8, 16)
    );
}

#[test]
fn the_most_specific_target_decides_and_ignored_linears_stay_as_they_are() {
    let bytes = fs::read(golden("layouts.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let eight = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
    let four = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
    let format = Format::parse(&json!({
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": eight, "format": "int-quantized"},
            "group_1": {"targets": ["re:.*w4a16$"], "weights": four, "format": "pack-quantized"},
        },
        "ignore": ["re:awq"],
    }));
    let format = format.unwrap();
    let codes = |case| {
        let weight = format.read(&tensors, case, SHAPE).unwrap();
        weight.map(|weight| weight.codes)
    };
    assert!(matches!(codes("ct-w8a8"), Some(Codes::Int8(_))));
    assert!(matches!(codes("ct-w4a16"), Some(Codes::Int4(_))));
    assert_eq!(codes("awq"), None);
    let error = format.read(&tensors, "gptq-v1", SHAPE).unwrap_err();
    assert!(
        error.message.contains("gptq-v1.weight_scale is missing"),
        "{error}"
    );
}
