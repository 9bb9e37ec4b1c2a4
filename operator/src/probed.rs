//! What probes have answered inside one window, and which answers may be compared. Pure; fed by `probe` with pods' answers, read by `judge`.
//!
//! An answer counts only where both tracks have given it to the same text with the same number of tokens, and every number is plainly one.
//! Whatever is wrong is a problem with a reason: it may make a verdict Inconclusive, never Pass.

use std::collections::BTreeMap;

use jiff::Timestamp;
use mixquant_crds::probe::{MAX_TEXTS, ProbeAnswer};
use serde::{Deserialize, Serialize};

/// More nats a token than this are no likelihood of a text.
const MAX_NATS: f64 = 1000.0;

/// The probes of a window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Probed {
    /// The window that they belong to: when it began.
    pub since: Option<Timestamp>,
    /// Rounds that were begun.
    pub rounds: u32,
    /// When the newest of them was.
    pub began_at: Option<Timestamp>,
    /// It has not ended.
    pub running: bool,
    /// Texts that the artifact keeps, once a pod has said it.
    pub texts: Option<u32>,
    /// By text: what both tracks say of its answer.
    #[serde(default)]
    pub pairs: BTreeMap<u32, Pair>,
    /// Why answers of the newest round are missing or cannot be compared.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Why a pod left texts of it out; that is no problem.
    #[serde(default)]
    pub left_out: Option<String>,
}

/// The negative log-likelihood of one answer, nats a token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pair {
    /// Stable's.
    pub stable: f64,
    /// The canary's.
    pub canary: f64,
}

/// A pod's answer to a round, or why there is none.
pub type Answered = Result<ProbeAnswer, String>;

impl Probed {
    /// No probe yet in the window that began then.
    pub fn new(since: Timestamp) -> Self {
        Self {
            since: Some(since),
            ..Self::default()
        }
    }

    /// A round begins.
    pub fn begin(&mut self, now: Timestamp) {
        self.rounds = self.rounds.saturating_add(1);
        self.began_at = Some(now);
        self.running = true;
    }

    /// It ends with these answers; `stable` is `None` where nothing is compared.
    pub fn end(&mut self, stable: Option<Answered>, canary: Answered) {
        self.running = false;
        self.problems.clear();
        self.left_out = None;
        let compares = stable.is_some();
        let mut tracks = Vec::new();
        for (track, answer) in [("stable", stable), ("canary", Some(canary))] {
            let Some(answer) = answer else { continue };
            match answer.and_then(|answer| nats(&answer).map(|nats| (answer, nats))) {
                Ok((answer, nats)) => {
                    let stopped = answer.stopped.map(|why| format!("{track}: {why}"));
                    self.left_out = self.left_out.take().or(stopped);
                    tracks.push((answer.texts, nats));
                }
                Err(why) => self.problems.push(format!("{track}: {why}")),
            }
        }
        let [(texts, stable), (of_canary, canary)] = tracks.as_slice() else {
            if let (false, [(texts, _)]) = (compares, tracks.as_slice()) {
                self.texts = Some(*texts);
            }
            return;
        };
        if texts != of_canary || self.texts.is_some_and(|known| known != *texts) {
            let why = format!("stable has {texts} texts and the canary {of_canary}");
            self.problems.push(why);
            return;
        }
        self.texts = Some(*texts);
        for (text, (tokens, nats)) in stable {
            let Some((of_canary, canary)) = canary.get(text) else {
                continue;
            };
            if tokens != of_canary {
                let why = format!(
                    "text {text} has {tokens} tokens for stable and {of_canary} for the canary"
                );
                self.problems.push(why);
                continue;
            }
            let pair = Pair {
                stable: *nats,
                canary: *canary,
            };
            self.pairs.insert(*text, pair);
        }
    }

    /// Whether both tracks have answered every text.
    pub fn is_whole(&self) -> bool {
        let pairs = u32::try_from(self.pairs.len()).unwrap_or(u32::MAX);
        self.problems.is_empty() && self.texts.is_some_and(|texts| pairs >= texts)
    }
}

/// Tokens and nats a token, by text.
fn nats(answer: &ProbeAnswer) -> Result<BTreeMap<u32, (u32, f64)>, String> {
    if !(1..=MAX_TEXTS).contains(&answer.texts) {
        return Err(format!("{} texts are none to compare", answer.texts));
    }
    let mut nats = BTreeMap::new();
    for text in &answer.answers {
        let of_token = text.nll / f64::from(text.tokens);
        // NaN is in no range.
        if text.text >= answer.texts || !(0.0..=MAX_NATS).contains(&of_token) {
            return Err(format!(
                "{} nats for {} tokens of text {} are no likelihood",
                text.nll, text.tokens, text.text
            ));
        }
        nats.insert(text.text, (text.tokens, of_token));
    }
    Ok(nats)
}

#[cfg(test)]
mod tests {
    use mixquant_crds::probe::ProbedText;

    use super::*;

    fn answer(texts: u32, nats: &[(u32, u32, f64)]) -> ProbeAnswer {
        ProbeAnswer {
            texts,
            answers: nats
                .iter()
                .map(|(text, tokens, nll)| ProbedText {
                    text: *text,
                    tokens: *tokens,
                    nll: *nll,
                })
                .collect(),
            stopped: None,
        }
    }

    fn ended(stable: Option<Answered>, canary: Answered) -> Probed {
        let mut probed = Probed::new(Timestamp::UNIX_EPOCH);
        probed.begin(Timestamp::UNIX_EPOCH);
        assert!(probed.running);
        probed.end(stable, canary);
        assert!(!probed.running);
        probed
    }

    #[test]
    fn only_texts_that_both_tracks_have_answered_are_pairs() {
        let stable = answer(3, &[(0, 4, 8.0), (1, 4, 4.0)]);
        let canary = answer(3, &[(1, 4, 6.0), (2, 4, 4.0)]);
        let mut probed = ended(Some(Ok(stable.clone())), Ok(canary.clone()));
        let pair = Pair {
            stable: 1.0,
            canary: 1.5,
        };
        assert_eq!(probed.pairs, BTreeMap::from([(1, pair)]));
        assert!(probed.problems.is_empty() && !probed.is_whole());
        probed.end(Some(Ok(canary)), Ok(stable));
        assert_eq!(probed.pairs.len(), 1, "the newest answers stand");
        let rest = answer(3, &[(0, 4, 1.0), (2, 4, 1.0)]);
        probed.end(Some(Ok(rest.clone())), Ok(rest));
        assert!(probed.is_whole());
        probed.end(Some(Err("no answer".into())), Ok(answer(3, &[])));
        assert!(!probed.is_whole(), "a problem is looked at again");
        assert_eq!(probed.problems, ["stable: no answer"]);
    }

    #[test]
    fn what_is_not_plainly_a_likelihood_of_the_same_answer_is_a_problem_and_no_pair() {
        let good = answer(2, &[(0, 4, 8.0)]);
        for (wrong, why) in [
            (Err("status 503".into()), "status 503"),
            (Ok(answer(2, &[(0, 4, f64::NAN)])), "no likelihood"),
            (Ok(answer(2, &[(0, 4, f64::INFINITY)])), "no likelihood"),
            (Ok(answer(2, &[(0, 4, -1.0)])), "no likelihood"),
            (Ok(answer(2, &[(0, 0, 1.0)])), "no likelihood"),
            (Ok(answer(2, &[(2, 4, 1.0)])), "no likelihood"),
            (Ok(answer(2, &[(0, 5, 8.0)])), "tokens for stable"),
            (Ok(answer(3, &[(0, 4, 8.0)])), "texts and the canary"),
            (Ok(answer(0, &[])), "0 texts"),
            (Ok(answer(33, &[(0, 4, 8.0)])), "33 texts"),
        ] {
            for swapped in [false, true] {
                let (stable, canary) = if swapped {
                    (wrong.clone(), Ok(good.clone()))
                } else {
                    (Ok(good.clone()), wrong.clone())
                };
                let probed = ended(Some(stable), canary);
                assert!(probed.pairs.is_empty(), "{why}");
                assert!(
                    probed.problems.join(";").contains(why),
                    "{:?}",
                    probed.problems
                );
            }
        }
    }

    #[test]
    fn a_busy_pod_leaves_texts_out_and_is_no_problem() {
        let busy = ProbeAnswer {
            stopped: Some("users came to wait".into()),
            ..answer(2, &[])
        };
        let probed = ended(Some(Ok(busy)), Ok(answer(2, &[(0, 4, 8.0)])));
        assert_eq!((probed.pairs.len(), probed.problems.len()), (0, 0));
        assert_eq!(
            probed.left_out.as_deref(),
            Some("stable: users came to wait")
        );
    }

    #[test]
    fn a_canary_alone_is_probed_and_compared_with_nothing() {
        let probed = ended(None, Ok(answer(2, &[(0, 4, 8.0)])));
        assert_eq!((probed.pairs.len(), probed.texts), (0, Some(2)));
    }
}
