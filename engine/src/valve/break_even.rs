//! From which prompt length on a quantised prefill pays: measured, then decided by a pure function.
//!
//! Calibration measures it once and pins it in the plan, since two pods must answer alike; `serve` measures it only where there is no
//! artifact. The only file of the valve that reads a clock.

use std::str::FromStr;
use std::time::Instant;

use mixquant_crds::{PrecisionPlan, PrefillScheme};

use super::read::{Settings, Valve};
use crate::model::{Chunk, LogitRows, Model, Pass, Workspace};
use crate::{Error, Result};

/// The shortest prompt that is timed.
const SHORTEST: usize = 8;
/// The longest: what pays there pays beyond it too, since only attention grows faster, and it is the same in both passes.
const LONGEST: usize = 1024;
/// Each length is timed so often, both passes in turn; the best counts, since noise only adds.
const ROUNDS: usize = 3;

/// What `minPromptTokens` may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threshold {
    /// So many tokens.
    Tokens(u32),
    /// The measured break-even.
    Auto,
}

impl FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u32>() {
            Ok(tokens @ 1..) => Ok(Self::Tokens(tokens)),
            _ if text.eq_ignore_ascii_case("auto") => Ok(Self::Auto),
            _ => Err("give a whole number from 1, or auto".to_owned()),
        }
    }
}

/// One length's times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Seconds of the quantised prefill with the valve's step.
    pub quantised: f64,
    /// Seconds of the precise one.
    pub precise: f64,
}

/// The length from which on the quantised prefill is faster at every longer one that was timed, between two timed lengths on the
/// straight line. Nothing when the longest is not faster.
pub fn break_even(timings: &[Timing]) -> Option<usize> {
    let gain = |timing: &Timing| timing.precise - timing.quantised;
    let losing = timings
        .iter()
        .rposition(|timing| gain(timing).is_nan() || gain(timing) <= 0.0);
    let Some(losing) = losing else {
        return timings.first().map(|first| first.tokens);
    };
    let (below, above) = (&timings[losing], timings.get(losing + 1)?);
    let (loss, gained) = (-gain(below), gain(above));
    if !(loss.is_finite() && gained.is_finite()) {
        return Some(above.tokens);
    }
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share in [0, 1] of at most some thousand tokens"
    )]
    let step = ((above.tokens - below.tokens) as f64 * loss / (loss + gained)).ceil() as usize;
    Some((below.tokens + step).clamp(below.tokens + 1, above.tokens))
}

/// Times both passes of a model with these copies and says from which length on the quantised one pays; nothing where it never does.
/// The model has the plan that was timed afterwards.
///
/// # Errors
/// A forward that fails.
pub fn measure(model: &mut Model, planned: &PrecisionPlan) -> Result<Option<u32>> {
    let mut plan = PrecisionPlan::precise(planned.decode.scheme);
    plan.prefill.scheme = PrefillScheme::W8A8;
    plan.weight_copies = planned.weight_copies;
    // The cache takes the same time in both passes, so it is timed as it came.
    model.attach(model.linears_of(&plan), None, plan)?;
    let timings = time(model)?;
    for timing in &timings {
        tracing::info!(
            tokens = timing.tokens,
            quantised_ms = 1e3 * timing.quantised,
            precise_ms = 1e3 * timing.precise,
            "prefill timed"
        );
    }
    let found = break_even(&timings).and_then(|tokens| u32::try_from(tokens).ok());
    if let Some(tokens) = found {
        tracing::info!(tokens, "break-even of the quantised prefill");
    } else {
        tracing::warn!("the quantised prefill pays at no length here");
    }
    Ok(found)
}

/// The plan with its threshold: as it is, with another number, or with the measured break-even. Where a quantised prefill never pays, the
/// plan is left without one.
///
/// # Errors
/// A plan without a switch that is to be measured, or a forward that fails.
pub fn resolve(
    plan: &PrecisionPlan,
    threshold: Option<Threshold>,
    model: &mut Model,
) -> Result<PrecisionPlan> {
    let mut plan = plan.clone();
    match threshold {
        None => {}
        Some(Threshold::Tokens(tokens)) => plan.prefill.min_prompt_tokens = tokens,
        Some(Threshold::Auto) if !plan.has_switch() => {
            return Err(Error::plan(
                "--min-prompt-tokens auto has nothing to measure: the plan reads prompts as it generates tokens",
            ));
        }
        Some(Threshold::Auto) => {
            if let Some(tokens) = measure(model, &plan)? {
                plan.prefill.min_prompt_tokens = tokens;
            } else {
                let precise = PrecisionPlan::precise(plan.decode.scheme);
                plan.prefill = precise.prefill;
                plan.weight_copies = precise.weight_copies;
            }
        }
    }
    Ok(plan)
}

fn time(model: &Model) -> Result<Vec<Timing>> {
    let longest = LONGEST.min(model.config().max_position_embeddings);
    let vocabulary = u32::try_from(model.config().vocab_size).unwrap_or(u32::MAX);
    // Any ids will do: the time does not depend on them.
    let ids: Vec<u32> = (0..vocabulary).cycle().take(longest).collect();
    let lengths = std::iter::successors(Some(SHORTEST), |tokens| Some(tokens * 2));
    let lengths = lengths
        .take_while(|tokens| *tokens < longest)
        .chain([longest]);
    let settings = Settings {
        shadow_audit_percent: 0.0,
        // Ids of no text may answer far apart: the valve's own step is what is timed, not what would follow a breach.
        limits: super::Limits {
            max_kl: f64::INFINITY,
            min_margin: f64::INFINITY,
        },
        ..Settings::default()
    };
    let (mut valve, mut workspace) = (Valve::new(settings), Workspace::default());
    let mut timings = Vec::new();
    for tokens in lengths {
        let prompt = &ids[..tokens];
        let mut timing = Timing {
            tokens,
            quantised: f64::INFINITY,
            precise: f64::INFINITY,
        };
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let prompt_rows = (prompt, LogitRows::Last);
            let reading = valve.read(model, prompt_rows, tokens, &mut workspace, None)?;
            timing.quantised = timing.quantised.min(start.elapsed().as_secs_f64());
            if reading.work.precise > 0 {
                return Err(Error::model(
                    "the model computes logits that are no finite numbers: its weights are damaged",
                ));
            }
            let mut cache = model.new_cache(tokens);
            let chunk = Chunk {
                tokens: prompt,
                cache: &mut cache,
                logits: LogitRows::Last,
            };
            let start = Instant::now();
            model.forward(Pass::Precise, &mut [chunk], &mut workspace, None)?;
            timing.precise = timing.precise.min(start.elapsed().as_secs_f64());
        }
        timings.push(timing);
    }
    Ok(timings)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn timings(list: &[(usize, f64, f64)]) -> Vec<Timing> {
        let list = list.iter();
        list.map(|&(tokens, quantised, precise)| Timing {
            tokens,
            quantised,
            precise,
        })
        .collect()
    }

    #[test]
    fn it_lies_where_the_lines_cross() {
        // A fixed cost of 10, then half the time: they cross at 20.
        let crossing = timings(&[
            (8, 14.0, 8.0),
            (16, 18.0, 16.0),
            (32, 26.0, 32.0),
            (64, 42.0, 64.0),
        ]);
        assert_eq!(break_even(&crossing), Some(20));
        assert_eq!(
            break_even(&crossing[2..]),
            Some(32),
            "always faster: from the first that was timed"
        );
        assert_eq!(break_even(&crossing[..2]), None);
        assert_eq!(break_even(&[]), None);
    }

    #[test]
    fn one_lucky_short_length_decides_nothing() {
        let noisy = timings(&[(8, 1.0, 2.0), (16, 9.0, 3.0), (32, 4.0, 8.0)]);
        assert!(break_even(&noisy).is_some_and(|tokens| tokens > 16 && tokens <= 32));
        let unknown = timings(&[(8, f64::NAN, 2.0), (16, 1.0, 3.0)]);
        assert_eq!(break_even(&unknown), Some(16));
    }

    #[test]
    fn a_threshold_is_a_number_or_auto() {
        assert_eq!("512".parse(), Ok(Threshold::Tokens(512)));
        assert_eq!("Auto".parse(), Ok(Threshold::Auto));
        for wrong in ["0", "-1", "many", ""] {
            assert!(wrong.parse::<Threshold>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn it_is_between_the_last_loss_and_the_first_gain(losses in proptest::collection::vec((0.1_f64..9.0, 0.1_f64..9.0), 1..8)) {
            let list: Vec<Timing> = losses.iter().enumerate().map(|(index, (quantised, precise))| Timing { tokens: 8 << index, quantised: *quantised, precise: *precise }).collect();
            if let Some(found) = break_even(&list) {
                let pays = |timing: &&Timing| timing.tokens >= found;
                prop_assert!(list.iter().filter(pays).all(|timing| timing.precise > timing.quantised));
                let last_loss = list.iter().rev().find(|timing| timing.precise <= timing.quantised);
                prop_assert!(last_loss.is_none_or(|timing| timing.tokens < found));
            } else {
                prop_assert!(list.last().is_some_and(|last| last.precise <= last.quantised));
            }
        }
    }
}
