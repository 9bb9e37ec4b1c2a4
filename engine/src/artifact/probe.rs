//! `probe.json`: texts of calibration with the answers that stand in them, for probes of a canary and of stable on the same texts.
//!
//! Calibration writes it, `server::probe` answers it through the serving path. It never decides how good an answer is: the operator does.

use std::path::Path;

use mixquant_crds::Digest;
use mixquant_crds::names::ARTIFACT_PROBE;
use mixquant_crds::probe::{ANSWER_TOKENS, MAX_TEXTS};
use serde::{Deserialize, Serialize};

use super::{Check, Folder, manifest_of};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// A text is at least so long: shorter ones say nothing.
const MIN_TOKENS: usize = 8;

/// The texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Probes {
    /// [`Tokenizer::digest`]: ids mean the same, and likelihoods can be compared, only where it is the same.
    pub vocabulary: Digest,
    /// At most [`MAX_TEXTS`].
    pub texts: Vec<Text>,
}

/// A text in two parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Text {
    /// What is read.
    pub prompt: Vec<u32>,
    /// What follows, at most [`ANSWER_TOKENS`].
    pub answer: Vec<u32>,
}

impl Probes {
    /// Some of these texts, spread over all of them.
    pub fn of(tokenizer: &Tokenizer, texts: &[&[u32]]) -> Self {
        let long: Vec<_> = texts
            .iter()
            .filter(|text| text.len() >= MIN_TOKENS)
            .collect();
        let count = long.len().min(MAX_TEXTS as usize);
        let texts = (0..count).map(|index| {
            let text = long[index * long.len() / count];
            let answer = (text.len() / 2).min(ANSWER_TOKENS as usize);
            let (prompt, answer) = text.split_at(text.len() - answer);
            Text {
                prompt: prompt.to_vec(),
                answer: answer.to_vec(),
            }
        });
        Self {
            vocabulary: tokenizer.digest(),
            texts: texts.collect(),
        }
    }

    /// Reads the texts of the artifact in `directory` and nothing else of it, for an engine with this vocabulary.
    ///
    /// # Errors
    /// An artifact that is missing or damaged, that keeps no texts, or whose ids mean something else here.
    pub fn open(directory: &Path, vocabulary: &Digest, vocab_size: usize) -> Result<Self> {
        let manifest = manifest_of(directory, Check::Digests)?;
        let folder = Folder {
            directory,
            check: Check::Digests,
        };
        let Some(probes) = folder.json_if_listed::<Self>(&manifest, ARTIFACT_PROBE)? else {
            return Err(Error::artifact(format!(
                "{} keeps no texts for probes: an engine without probes made it, calibrate again",
                directory.display()
            )));
        };
        if probes.vocabulary != *vocabulary {
            return Err(Error::artifact(
                "the texts for probes are of another vocabulary than this engine's: likelihoods of different tokens cannot be compared",
            ));
        }
        probes.check(vocab_size).map_err(|why| {
            Error::artifact(format!(
                "{ARTIFACT_PROBE} is damaged: {why}; calibrate again"
            ))
        })?;
        Ok(probes)
    }

    fn check(&self, vocab_size: usize) -> Result<(), String> {
        if self.texts.is_empty() || self.texts.len() > MAX_TEXTS as usize {
            return Err(format!("{} texts", self.texts.len()));
        }
        for (index, text) in self.texts.iter().enumerate() {
            let mut ids = text.prompt.iter().chain(&text.answer);
            if text.prompt.is_empty()
                || text.answer.is_empty()
                || text.answer.len() > ANSWER_TOKENS as usize
                || ids.any(|id| *id as usize >= vocab_size)
            {
                return Err(format!("text {index} is no text of this model"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probes(texts: &[(usize, usize)]) -> Probes {
        let ids = |count| vec![1; count];
        Probes {
            vocabulary: Digest::of_bytes(b"words"),
            texts: texts
                .iter()
                .map(|(prompt, answer)| Text {
                    prompt: ids(*prompt),
                    answer: ids(*answer),
                })
                .collect(),
        }
    }

    #[test]
    fn texts_that_could_not_be_answered_are_damage() {
        assert_eq!(probes(&[(5, 2), (1, 32)]).check(2), Ok(()));
        for wrong in [
            probes(&[]),
            probes(&[(0, 2)]),
            probes(&[(5, 0)]),
            probes(&[(5, 33)]),
            probes(&[(1, 1); 33]),
        ] {
            assert!(wrong.check(2).is_err(), "{wrong:?}");
        }
        assert!(probes(&[(5, 2)]).check(1).is_err(), "beyond the vocabulary");
    }
}
