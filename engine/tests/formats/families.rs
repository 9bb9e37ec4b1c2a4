//! Every family's logits and greedy token ids, against transformers in FP32 on small random checkpoints.

use std::fs;
use std::path::Path;

use mixquant_crds::PrecisionPlan;
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};
use serde::Deserialize;

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
