//! The gate on answers: how much less likely the canary finds the answers of probes than stable does, on the same texts.
//!
//! Both tracks score the same texts, so what texts differ in falls out: one observation is a text's difference, and the bound is Student's
//! for their mean. A text that is asked again says nothing new, so looks are counted by texts and not by time. What is missing, wrong
//! or of another window is Inconclusive.

use mixquant_crds::status::Outcome;

use super::words::{amount, name};
use super::{Confidence, FAIL_BUDGET, Gate, Look, Verdict, without};
use crate::bounds;
use crate::judge::reading::Blank;

/// What the gate says of the canary.
pub(super) fn increase(gate: &Gate, look: &Look<'_>) -> Verdict {
    let unseen = |why: String| {
        let why = format!("{}: {why}", name(gate));
        Verdict::plain(Outcome::Inconclusive, why)
    };
    if look.alone {
        return unseen("nothing runs beside the canary to compare its answers with".into());
    }
    let probed = &look.samples.probed;
    if probed.since != Some(look.window.since) {
        return unseen("no probe was answered in this step yet".into());
    }
    if let Some(problem) = probed.problems.first() {
        return unseen(format!("probes: {problem}"));
    }
    let pairs = probed.pairs.values();
    let increases: Vec<f64> = pairs.map(|pair| pair.canary - pair.stable).collect();
    let count = increases.len() as u64;
    let few = || {
        let of = probed.texts.map_or(String::new(), |texts| {
            format!(", the artifact keeps {texts}")
        });
        let why = probed.left_out.as_ref();
        let why = why.map_or(String::new(), |why| format!(", {why}"));
        let needed = gate.min_samples;
        Blank::Few(format!(
            "both tracks have answered {count} texts of {needed} needed{of}{why}"
        ))
    };
    if count < gate.min_samples {
        return without(gate, "probes", few());
    }
    let looks = count / gate.min_samples.max(1);
    // Every step asks the same texts, so luck that passes one passes all: a Pass may spend no more than a Fail.
    let confidence = Confidence::after(FAIL_BUDGET, looks).single;
    let mean = bounds::mean(&increases, confidence);
    let (Some((mean, (low, high))), Some(limit)) = (mean, gate.max) else {
        return without(gate, "probes", few());
    };
    let told = |value| amount(gate.metric, value);
    let (outcome, says) = if low > limit {
        (Outcome::Fail, format!("above limit {}", told(limit)))
    } else if high <= limit {
        (Outcome::Pass, "within the limits".to_owned())
    } else {
        let why = format!("too few texts to decide on limit {}", told(limit));
        (Outcome::Inconclusive, why)
    };
    let [stable, canary] = &look.window.revisions;
    Verdict {
        outcome,
        message: format!(
            "{} {says}: canary {canary} {} [{low:.4}, {high:.4}] above stable {stable} on the same {count} texts",
            name(gate),
            told(mean),
        ),
        stable: None,
        canary: Some(mean),
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use mixquant_crds::rollout::{GateMetric, NoData, OnFailure};

    use super::*;
    use crate::action::Window;
    use crate::judge;
    use crate::probed::{Pair, Probed};
    use crate::samples::Samples;

    fn answers() -> Gate {
        Gate {
            name: "answers".into(),
            metric: GateMetric::NllIncrease,
            quantile: None,
            max: Some(0.05),
            max_ratio: None,
            min_samples: 8,
            no_data: NoData::Hold,
            on_failure: OnFailure::Rollback,
        }
    }

    fn since() -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    /// Texts that lie far apart, of which the canary's answers are so much less likely.
    fn probed(increases: &[f64]) -> Probed {
        let pairs = (0_u32..).zip(increases).map(|(text, increase)| {
            let stable = 1.0 + f64::from(text);
            let canary = stable + increase;
            (text, Pair { stable, canary })
        });
        Probed {
            pairs: pairs.collect(),
            texts: Some(32),
            ..Probed::new(since())
        }
    }

    fn judged(gate: &Gate, probed: Probed, alone: bool) -> Verdict {
        let samples = Samples {
            probed,
            ..Samples::default()
        };
        let window = Window {
            since: since(),
            revisions: ["a".into(), "b".into()],
        };
        let look = Look {
            window: &window,
            interval: 15,
            samples: &samples,
            killed: 0,
            alone,
            now: since(),
        };
        judge::gate(gate, &look)
    }

    fn outcome(increases: &[f64]) -> Outcome {
        judged(&answers(), probed(increases), false).outcome
    }

    #[test]
    fn worse_answers_fail_the_same_pass_and_what_the_texts_cannot_tell_is_open() {
        assert_eq!(outcome(&[0.0; 16]), Outcome::Pass, "the same");
        assert_eq!(outcome(&[-0.3; 16]), Outcome::Pass, "better");
        assert_eq!(outcome(&[0.3; 16]), Outcome::Fail, "worse");
        let noisy = |middle: f64, noise: f64| -> Vec<f64> {
            let sides = [middle - noise, middle + noise];
            sides.into_iter().cycle().take(32).collect()
        };
        assert_eq!(outcome(&noisy(0.0, 0.05)), Outcome::Pass);
        assert_eq!(outcome(&noisy(0.0, 0.5)), Outcome::Inconclusive);
        assert_eq!(outcome(&noisy(0.045, 0.05)), Outcome::Inconclusive);
        assert_eq!(outcome(&noisy(0.1, 0.05)), Outcome::Fail);
        assert_eq!(outcome(&noisy(0.1, 0.5)), Outcome::Inconclusive);
    }

    #[test]
    fn the_verdict_tells_both_revisions_the_bounds_and_the_number_of_texts() {
        let verdict = judged(&answers(), probed(&[0.3; 16]), false);
        assert_eq!(
            verdict.message,
            "NLL increase above limit 0.0500 nats a token: canary b 0.3000 nats a token [0.3000, 0.3000] above stable a on the same 16 texts"
        );
    }

    #[test]
    fn too_few_texts_say_what_no_data_says_and_why_they_are_few() {
        for (no_data, expected) in [
            (NoData::Hold, Outcome::Inconclusive),
            (NoData::Fail, Outcome::Fail),
            (NoData::Pass, Outcome::Pass),
        ] {
            let gate = Gate {
                no_data,
                ..answers()
            };
            let busy = Probed {
                left_out: Some("stable: users came to wait".into()),
                ..probed(&[0.0; 7])
            };
            let verdict = judged(&gate, busy, false);
            assert_eq!(verdict.outcome, expected);
            for part in ["7 texts of 8", "keeps 32", "users came to wait"] {
                assert!(verdict.message.contains(part), "{}", verdict.message);
            }
        }
    }

    #[test]
    fn answers_that_are_missing_wrong_or_of_another_step_are_inconclusive_whatever_no_data_says() {
        let gate = Gate {
            no_data: NoData::Pass,
            ..answers()
        };
        let failed = Probed {
            problems: vec!["canary: pod x: status 500".into()],
            ..probed(&[0.0; 16])
        };
        let earlier = Probed {
            since: Some(Timestamp::MIN),
            ..probed(&[0.0; 16])
        };
        for (probed, alone, why) in [
            (failed, false, "status 500"),
            (earlier, false, "no probe was answered"),
            (Probed::default(), false, "no probe was answered"),
            (probed(&[0.0; 16]), true, "nothing runs beside"),
        ] {
            let verdict = judged(&gate, probed, alone);
            assert_eq!(verdict.outcome, Outcome::Inconclusive, "{why}");
            assert!(verdict.message.contains(why), "{}", verdict.message);
        }
    }
}
