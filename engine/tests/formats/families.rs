//! Every family's logits and greedy token ids, against transformers in FP32 on small random checkpoints.

use std::fs;
use std::path::Path;

use mixquant_crds::PrecisionPlan;
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::golden;

/// Logits are about 1; sums are made in another order.
const TOLERANCE: f32 = 1e-4;

#[derive(Deserialize)]
struct Golden {
    prompt_ids: Vec<u32>,
    logits: Vec<f32>,
    output_ids: Vec<u32>,
}

fn last_logits(model: &Model, chunks: &[&[u32]]) -> Vec<f32> {
    let (mut cache, mut workspace) = (model.new_cache(64), Workspace::default());
    let mut logits = Vec::new();
    for tokens in chunks {
        let mut chunk = [Chunk {
            tokens,
            cache: &mut cache,
            logits: LogitRows::Last,
        }];
        let row = model.forward(Pass::Precise, &mut chunk, &mut workspace, None);
        logits = row.unwrap().to_vec();
    }
    logits
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
    u32::try_from(best.unwrap()).unwrap()
}

fn read(folder: &Path) -> Golden {
    serde_json::from_str(&fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap()
}

/// The largest distance between the logits of a checkpoint under a plan and those of its golden.
pub(crate) fn distance(folder: &Path, plan: PrecisionPlan) -> f32 {
    let golden = read(folder);
    let mut model = Model::open(folder).unwrap();
    model.set_plan(plan).unwrap();
    let logits = last_logits(&model, &[&golden.prompt_ids]);
    assert_eq!(logits.len(), golden.logits.len(), "{}", folder.display());
    logits
        .iter()
        .zip(&golden.logits)
        .map(|(own, theirs)| (own - theirs).abs())
        .fold(0.0, f32::max)
}

/// Compares a checkpoint with its golden.
pub(crate) fn compare(folder: &Path, tolerance: f32) {
    let name = folder.display();
    let apart = distance(folder, PrecisionPlan::baseline());
    assert!(apart <= tolerance, "{name}: logits are {apart} apart");
    let golden = read(folder);
    let mut model = Model::open(folder).unwrap();
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    let (mut chunks, mut ids) = (vec![golden.prompt_ids.clone()], Vec::new());
    for _ in &golden.output_ids {
        let parts: Vec<&[u32]> = chunks.iter().map(Vec::as_slice).collect();
        let next = argmax(&last_logits(&model, &parts));
        ids.push(next);
        chunks.push(vec![next]);
    }
    assert_eq!(ids, golden.output_ids, "{name}");
}

#[test]
fn every_family_answers_as_transformers_does() {
    for family in [
        "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3",
    ] {
        compare(&golden(family), TOLERANCE);
    }
}

#[test]
fn a_window_counts_from_the_cache_as_it_does_in_one_chunk() {
    for family in ["mistral", "gemma3"] {
        let mut model = Model::open(&golden(family)).unwrap();
        model.set_plan(PrecisionPlan::baseline()).unwrap();
        let ids: Vec<u32> = (1..21).collect();
        let whole = last_logits(&model, &[&ids]);
        let parts = last_logits(&model, &[&ids[..3], &ids[3..11], &ids[11..12], &ids[12..]]);
        assert_eq!(whole, parts, "{family}");
    }
}

/// A copy of a golden with another `config.json`.
pub(crate) fn reconfigured(family: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "golden.json"] {
        fs::copy(golden(family).join(file), folder.path().join(file)).unwrap();
    }
    let text = fs::read_to_string(golden(family).join("config.json")).unwrap();
    let mut config = serde_json::from_str(&text).unwrap();
    change(&mut config);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn configurations_of_older_releases_mean_the_same() {
    for family in ["qwen2", "gemma2"] {
        let folder = reconfigured(family, |config| {
            config.as_object_mut().unwrap().remove("layer_types");
            config["rope_theta"] = config["rope_parameters"]["rope_theta"].take();
            config.as_object_mut().unwrap().remove("rope_parameters");
        });
        compare(folder.path(), TOLERANCE);
    }
    for pattern in ["sliding_window_pattern", "_sliding_window_pattern"] {
        let folder = reconfigured("gemma3", |config| {
            let fields = config.as_object_mut().unwrap();
            for newer in ["layer_types", "rope_parameters", "_sliding_window_pattern"] {
                fields.remove(newer);
            }
            config[pattern] = json!(2);
            config["rope_theta"] = json!(1e6);
            config["rope_local_base_freq"] = json!(1e4);
            config["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
        });
        compare(folder.path(), TOLERANCE);
    }
}

#[test]
fn fields_that_families_add_are_refused_by_name() {
    for (family, field, value, expected) in [
        (
            "gemma2",
            "query_pre_attn_scalar",
            json!(0),
            "query_pre_attn_scalar is 0",
        ),
        (
            "gemma2",
            "attn_logit_softcapping",
            json!(-1.0),
            "attn_logit_softcapping is -1",
        ),
        (
            "gemma2",
            "layer_types",
            json!(["full_attention"]),
            "layer_types has 1 entries for 2 layers",
        ),
        (
            "gemma2",
            "layer_types",
            json!(["full_attention", "chunked_attention"]),
            "layer_types has chunked_attention: supported are",
        ),
        (
            "gemma2",
            "sliding_window",
            json!(null),
            "sliding_window is missing",
        ),
        (
            "gemma3",
            "use_bidirectional_attention",
            json!(true),
            "use_bidirectional_attention is true",
        ),
        (
            "gemma3",
            "architectures",
            json!(["Gemma3ForConditionalGeneration"]),
            "saved as Gemma3ForCausalLM, would load",
        ),
        ("mistral", "sliding_window", json!(0), "sliding_window is 0"),
        (
            "phi3",
            "partial_rotary_factor",
            json!(0.75),
            "partial_rotary_factor 0.75 is not supported",
        ),
        (
            "phi3",
            "rope_scaling",
            json!({"type": "longrope"}),
            "rope_scaling type longrope is not supported",
        ),
        ("qwen3", "num_hidden_layers", json!(3), "model.layers.2."),
    ] {
        let folder = reconfigured(family, |config| {
            if field == "rope_scaling" {
                config.as_object_mut().unwrap().remove("rope_parameters");
            }
            config[field] = value;
        });
        let Err(error) = Model::open(folder.path()) else {
            panic!("{family}: {expected}")
        };
        assert!(error.message.contains(expected), "{family}: {error}");
    }
}
