//! `golden.json`: what a healthy engine answers first to a few texts, written by calibration and compared before serving.
//!
//! Digests prove that files are whole; this proves that what is in memory computes what calibration computed: loading, packing,
//! kernels and both copies of the weights.

use serde::{Deserialize, Serialize};

use crate::model::{Chunk, LogitRows, Model, Pass, Workspace};
use crate::valve::log::TopToken;
use crate::valve::most_likely;
use crate::{Error, Result};

/// Texts that are kept.
pub const TEXTS: usize = 4;
/// Tokens of each.
pub const TOKENS: usize = 48;
/// How far a log-probability may be from the kept one, nats: instruction sets add in other orders, and rounding to BF16 and INT8 widens
/// that to several hundredths. `engine/tests/damage.rs` prints how far they really are apart and keeps half of this free.
pub const TOLERANCE: f32 = 0.25;

/// The answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Golden {
    /// One a text.
    pub answers: Vec<Answer>,
}

/// The first token after a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Answer {
    /// The text.
    pub prompt: Vec<u32>,
    /// The most likely tokens of the quantised prefill; absent where the plan has none.
    pub quantised: Option<Vec<TopToken>>,
    /// The same of the precise pass.
    pub precise: Vec<TopToken>,
}

impl Golden {
    /// What `model` answers to the beginnings of these texts.
    ///
    /// # Errors
    /// Logits that are no numbers.
    pub fn of<'a>(model: &Model, texts: impl Iterator<Item = &'a [u32]>) -> Result<Self> {
        let answers = texts.filter(|text| !text.is_empty()).take(TEXTS);
        let answers = answers.map(|text| {
            let prompt = &text[..text.len().min(TOKENS)];
            Ok(Answer {
                prompt: prompt.to_vec(),
                quantised: model
                    .plan()
                    .has_switch()
                    .then(|| first_token(model, Pass::Prefill, prompt))
                    .transpose()?,
                precise: first_token(model, Pass::Precise, prompt)?,
            })
        });
        Ok(Self {
            answers: answers.collect::<Result<_>>()?,
        })
    }

    /// Compares with what `model` answers now. Returns the largest distance, nats.
    ///
    /// # Errors
    /// The pass that answers otherwise, and what to do.
    pub fn check(&self, model: &Model) -> Result<f32> {
        let mut largest = 0.0_f32;
        for (index, answer) in self.answers.iter().enumerate() {
            let vocabulary = model.config().vocab_size;
            if answer.prompt.is_empty()
                || answer.prompt.len() > TOKENS
                || answer.prompt.iter().any(|id| *id as usize >= vocabulary)
            {
                return Err(Error::artifact(format!(
                    "golden.json: text {index} is no text of this model: calibrate again"
                )));
            }
            let now = Self::of(model, std::iter::once(&answer.prompt[..]))?;
            let now = &now.answers[0];
            let passes = [
                (
                    "quantised",
                    answer.quantised.as_ref(),
                    now.quantised.as_ref(),
                ),
                ("precise", Some(&answer.precise), Some(&now.precise)),
            ];
            for (pass, kept, now) in passes {
                let (Some(kept), Some(now)) = (kept, now) else {
                    continue;
                };
                let apart = distance(kept, now);
                if apart > TOLERANCE {
                    return Err(Error::digest(format!(
                        "self-test: the {pass} weights answer text {index} of golden.json otherwise than at calibration (log-probabilities {apart:.3} nats apart, at most {TOLERANCE} allowed): they are damaged in memory, restart on another node, or calibrate again after an upgrade of the engine"
                    )));
                }
                largest = largest.max(apart);
            }
        }
        Ok(largest)
    }
}

fn first_token(model: &Model, pass: Pass, prompt: &[u32]) -> Result<Vec<TopToken>> {
    let mut cache = model.new_cache(prompt.len());
    let chunk = Chunk {
        tokens: prompt,
        cache: &mut cache,
        logits: LogitRows::Last,
    };
    let mut workspace = Workspace::default();
    let top = most_likely(model.forward(pass, &mut [chunk], &mut workspace, None)?);
    if top.is_empty() {
        return Err(Error::model(
            "self-test: the model computes logits that are no finite numbers: its weights are damaged, fetch them again",
        ));
    }
    let tokens = top.into_iter();
    Ok(tokens
        .map(|(token, logprob)| TopToken { token, logprob })
        .collect())
}

/// The largest difference of a log-probability, as far as two lists of the most likely tokens tell; endless where one is empty or holds
/// what is no number.
fn distance(kept: &[TopToken], now: &[TopToken]) -> f32 {
    one_way(kept, now).max(one_way(now, kept))
}

/// Over the tokens of `from`: one that `to` does not hold is at most as likely there as the last that it holds.
fn one_way(from: &[TopToken], to: &[TopToken]) -> f32 {
    let Some(last) = to.last() else {
        return f32::INFINITY;
    };
    from.iter().fold(0.0, |largest: f32, token| {
        let apart = match to.iter().find(|other| other.token == token.token) {
            Some(other) => (token.logprob - other.logprob).abs(),
            None => (token.logprob - last.logprob).max(0.0),
        };
        let number = token.logprob.is_finite() && !apart.is_nan();
        largest.max(if number { apart } else { f32::INFINITY })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(list: &[(u32, f32)]) -> Vec<TopToken> {
        let tokens = list.iter();
        tokens
            .map(|&(token, logprob)| TopToken { token, logprob })
            .collect()
    }

    #[test]
    fn the_distance_is_that_of_the_worst_token() {
        let kept = top(&[(1, -0.1), (2, -2.5), (3, -4.0)]);
        assert!(distance(&kept, &kept) < 1e-9);
        let moved = top(&[(1, -0.1), (2, -2.75), (3, -4.0)]);
        assert!((distance(&kept, &moved) - 0.25).abs() < 1e-6);
        // The third changed places with one as likely, or with one that was less likely than it and is more likely now.
        assert!(distance(&kept, &top(&[(1, -0.1), (2, -2.5), (9, -3.99)])) < 0.02);
        let overtaken = distance(&kept, &top(&[(1, -0.1), (2, -2.5), (9, -3.0)]));
        assert!((overtaken - 1.0).abs() < 1e-6, "{overtaken}");
        assert!(distance(&kept, &top(&[(7, -0.1), (2, -2.5), (3, -4.0)])) > 3.0);
        assert!(distance(&kept, &top(&[(1, f32::NAN)])).is_infinite());
        assert!(distance(&top(&[(1, f32::NAN)]), &kept).is_infinite());
        assert!(distance(&[], &kept).is_infinite());
    }
}
