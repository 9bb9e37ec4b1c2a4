//! The engine's test of itself before it is ready: every pass of the plan must compute numbers, and those that calibration
//! kept must come out again.

use crate::artifact::golden::Golden;
use crate::error::Result;
use crate::model::{Chunk, LogitRows, Model, Pass, Workspace};
use crate::sample::{Sampler, Sampling};
use crate::tokenizer::Tokenizer;

/// Reads a short prompt with every pass that the plan uses and generates one token behind each; then compares the golden answers.
///
/// # Errors
/// When a pass fails, computes what is no number, or answers otherwise than at calibration.
pub fn self_test(model: &Model, tokenizer: &Tokenizer, golden: Option<&Golden>) -> Result<()> {
    let first = tokenizer.bos().unwrap_or(0);
    let quantised = model.plan().has_switch().then_some(Pass::Prefill);
    for pass in quantised.into_iter().chain([Pass::Precise]) {
        let mut workspace = Workspace::default();
        let mut cache = model.new_cache(8);
        let mut step = |pass, tokens: &[u32]| {
            let chunk = Chunk {
                tokens,
                cache: &mut cache,
                logits: LogitRows::Last,
            };
            let logits = model.forward(pass, &mut [chunk], &mut workspace, None)?;
            Sampler::new(Sampling::greedy()).next(logits, &[]).ok_or_else(|| {
                crate::Error::model("self-test: the model computes logits that are no finite numbers: its weights are damaged, fetch them again")
            })
        };
        let token = step(pass, &[first, first, first, first])?;
        step(Pass::Precise, &[token])?;
    }
    if let Some(golden) = golden {
        let apart = golden.check(model)?;
        tracing::info!(
            answers = golden.answers.len(),
            nats_apart = apart,
            "the golden answers came out again"
        );
    }
    Ok(())
}
