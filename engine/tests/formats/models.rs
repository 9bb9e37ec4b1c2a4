//! Whole checkpoints in quantised layouts: they answer as transformers does with the weights that they stand for, and name what is wrong with them.

use std::fs;
use std::path::Path;

use mixquant_crds::{DecodeScheme, FailureReason, PrecisionPlan};
use mixquant_engine::inspect::{Description, describe};
use mixquant_engine::model::Model;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::families::{compare, distance, reconfigured};
use crate::golden;

/// Each with the format that `inspect` names.
const MODELS: [(&str, &str); 5] = [
    (
        "model-ct-w8a8",
        "compressed-tensors int-quantized 8-bit, one scale a channel",
    ),
    (
        "model-ct-w4a16-fused",
        "compressed-tensors pack-quantized 4-bit, groups of 16",
    ),
    ("model-fp8-fused", "fp8, blocks of 16x16"),
    ("model-awq", "awq 4-bit, groups of 16"),
    ("model-gptq", "gptq 4-bit, groups of 16"),
];

#[test]
fn quantised_checkpoints_answer_as_transformers_does_with_their_weights() {
    for (model, format) in MODELS {
        compare(&golden(model), 1e-4);
        let Description::Model(facts) = describe(&golden(model)).unwrap() else {
            panic!("it is a model")
        };
        assert_eq!(facts.format, format);
    }
}

/// Logits of these models are about 1; serving rounds activations to BF16 or INT8.
const SERVED_TOLERANCE: f32 = 0.2;

#[test]
fn served_quantised_checkpoints_stay_near_the_baseline() {
    for (model, _) in MODELS {
        let apart = distance(&golden(model), PrecisionPlan::precise(DecodeScheme::BF16));
        println!("{model}: logits of the served plan are {apart} apart");
        assert!(
            apart > 1e-4 && apart <= SERVED_TOLERANCE,
            "{model}: {apart}"
        );
    }
}

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

/// Opens a copy of a golden whose tensors were changed.
fn changed(model: &str, change: impl FnOnce(&mut Tensors)) -> Result<Model, String> {
    let folder = tempfile::tempdir().unwrap();
    let copy = |file: &str| {
        let bytes = fs::read(golden(model).join(file)).unwrap();
        fs::write(folder.path().join(file), &bytes).unwrap();
        bytes
    };
    copy("config.json");
    let bytes = copy("model.safetensors");
    let whole = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors = whole
        .iter()
        .map(|(name, view)| {
            (
                name.to_owned(),
                view.dtype(),
                view.shape().to_vec(),
                view.data().to_vec(),
            )
        })
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (
            name.clone(),
            TensorView::new(*dtype, shape.clone(), bytes).unwrap(),
        )
    });
    let path: &Path = folder.path();
    safetensors::serialize_to_file(views, None, &path.join("model.safetensors")).unwrap();
    Model::open(path).map_err(|error| {
        assert_eq!(error.reason, FailureReason::ModelInvalid);
        assert!(!error.message.contains('\n'), "{error}");
        error.message
    })
}

fn find<'a>(tensors: &'a mut Tensors, name: &str) -> &'a mut (String, Dtype, Vec<usize>, Vec<u8>) {
    tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
}

#[test]
fn damaged_tensors_of_quantised_checkpoints_are_refused_by_name() {
    const QUERY: &str = "model.layers.0.self_attn.q_proj";
    let name = |part: &str| format!("{QUERY}.{part}");
    let error = |model, change: &dyn Fn(&mut Tensors)| changed(model, change).unwrap_err();
    let missing = error("model-gptq", &|tensors| {
        tensors.retain(|tensor| tensor.0 != name("qweight"));
    });
    assert!(
        missing.contains("self_attn.q_proj.qweight is missing"),
        "{missing}"
    );
    let missing = error("model-awq", &|tensors| {
        tensors.retain(|tensor| tensor.0 != name("scales"));
    });
    assert!(
        missing.contains("self_attn.q_proj.scales is missing"),
        "{missing}"
    );
    let order = error("model-gptq", &|tensors| {
        find(tensors, &name("g_idx")).3[..4].fill(0xff);
    });
    assert!(
        order.contains("q_proj.g_idx: the inputs are not cut into groups of 16"),
        "{order}"
    );
    let shape = error("model-gptq", &|tensors| {
        find(tensors, &name("qweight")).2.reverse();
    });
    assert!(
        shape.contains("q_proj.qweight has the shape [32, 4], config.json asks for [4, 32]"),
        "{shape}"
    );
    let kind = error("model-gptq", &|tensors| {
        find(tensors, &name("qweight")).1 = Dtype::F32;
    });
    assert!(
        kind.contains("q_proj.qweight has the type F32 where this format has I32"),
        "{kind}"
    );
    let scale = error("model-ct-w8a8", &|tensors| {
        find(tensors, &name("weight_scale")).3[..2].fill(0xff);
    });
    assert!(
        scale.contains("q_proj: number 0 of its scales is NaN"),
        "{scale}"
    );
    let nan = error("model-fp8-fused", &|tensors| {
        find(tensors, "model.layers.1.mlp.down_proj.weight").3[5] = 0x7f;
    });
    assert!(nan.contains("down_proj.weight: number 5 is NaN"), "{nan}");
}

#[test]
fn a_linear_that_stayed_in_floating_point_is_loaded_whatever_the_configuration_says() {
    let model = changed("model-ct-w8a8", |tensors| {
        tensors.retain(|tensor| tensor.0 != "model.layers.0.mlp.up_proj.weight_scale");
        let weight = find(tensors, "model.layers.0.mlp.up_proj.weight");
        weight.1 = Dtype::BF16;
        weight.3 = vec![0; 2 * weight.3.len()];
    });
    assert!(model.is_ok(), "{model:?}");
}

#[test]
fn configurations_in_files_of_their_own_are_read_as_those_in_config_json() {
    for (model, file) in [
        ("model-gptq", "quantize_config.json"),
        ("model-awq", "quant_config.json"),
    ] {
        let mut own = Value::Null;
        let folder = reconfigured(model, |config| {
            own = config["quantization_config"].take();
            own.as_object_mut().unwrap().remove("quant_method");
        });
        let message = Model::open(folder.path()).map(|_| ()).unwrap_err().message;
        assert!(message.contains("q_proj.weight is missing"), "{message}");
        fs::write(folder.path().join(file), own.to_string()).unwrap();
        compare(folder.path(), 1e-4);
        fs::write(folder.path().join(file), "[]").unwrap();
        let message = Model::open(folder.path()).map(|_| ()).unwrap_err().message;
        assert!(message.starts_with(file), "{message}");
    }
    let folder = reconfigured("llama", |_| ());
    fs::write(folder.path().join("hf_quant_config.json"), "{}").unwrap();
    let message = Model::open(folder.path()).map(|_| ()).unwrap_err().message;
    assert!(
        message.contains("ModelOpt's layouts are not supported"),
        "{message}"
    );
}
