//! How far two rows of logits are apart, and the sums of it over all tokens and slices. Pure; f64 throughout.
//!
//! The distances: negative log-likelihood of the true next token (perplexity), KL(baseline ‖ plan), and whether the most likely token is the same.

use std::collections::BTreeMap;

use mixquant_crds::{Digest, Slice, VerifyReport};

/// One scored token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    /// -ln p(target) of the baseline, nats.
    pub baseline_nll: f64,
    /// -ln p(target) of the plan, nats.
    pub nll: f64,
    /// KL(baseline ‖ plan), nats, at least 0.
    pub kl: f64,
    /// Both hold the same token most likely.
    pub agrees: bool,
}

/// Whose logits cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotFinite {
    /// The unquantised model's.
    Baseline,
    /// The plan's.
    Plan,
}

/// The distance of `plan` from `baseline` (vocabulary-long rows of logits), `target` being the token that came.
///
/// # Errors
/// A logit that is NaN or infinite.
pub fn distance(baseline: &[f32], plan: &[f32], target: u32) -> Result<Distance, NotFinite> {
    assert_eq!(baseline.len(), plan.len(), "both rows span the vocabulary");
    let baseline_top = top(baseline).ok_or(NotFinite::Baseline)?;
    let plan_top = top(plan).ok_or(NotFinite::Plan)?;
    let (baseline_max, plan_max) = (f64::from(baseline[baseline_top]), f64::from(plan[plan_top]));
    let (mut baseline_sum, mut plan_sum, mut weighted) = (0.0, 0.0, 0.0);
    for (&b, &p) in baseline.iter().zip(plan) {
        let (b, p) = (f64::from(b), f64::from(p));
        let weight = (b - baseline_max).exp();
        baseline_sum += weight;
        plan_sum += (p - plan_max).exp();
        weighted += weight * (b - p);
    }
    let baseline_logsumexp = baseline_max + baseline_sum.ln();
    let plan_logsumexp = plan_max + plan_sum.ln();
    let target = target as usize;
    Ok(Distance {
        baseline_nll: baseline_logsumexp - f64::from(baseline[target]),
        nll: plan_logsumexp - f64::from(plan[target]),
        kl: (weighted / baseline_sum + (plan_logsumexp - baseline_logsumexp)).max(0.0),
        agrees: baseline_top == plan_top,
    })
}

/// The first index of the largest logit, or nothing when one is not finite.
fn top(logits: &[f32]) -> Option<usize> {
    let mut best = 0;
    for (index, &logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return None;
        }
        if logit > logits[best] {
            best = index;
        }
    }
    (!logits.is_empty()).then_some(best)
}

/// Sums over scored tokens; the tokens' logits are gone by then.
#[derive(Debug, Default)]
pub struct Divergence {
    total: Sums,
    slices: BTreeMap<String, Sums>,
    /// For the percentile: one number a token.
    kls: Vec<f64>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    baseline_nll: f64,
    nll: f64,
    kl: f64,
    agreeing: u64,
    tokens: u64,
}

impl Divergence {
    /// Adds a token of the slice `name`.
    pub fn add(&mut self, name: &str, distance: Distance) {
        self.total.add(distance);
        if let Some(sums) = self.slices.get_mut(name) {
            sums.add(distance);
        } else {
            self.slices
                .entry(name.to_owned())
                .or_default()
                .add(distance);
        }
        self.kls.push(distance.kl);
    }

    /// The report over everything that was added, or nothing without a token.
    pub fn report(mut self, artifact_digest: Option<Digest>) -> Option<VerifyReport> {
        self.kls.sort_by(f64::total_cmp);
        // Nearest rank: the smallest value that 99 % of the tokens do not exceed.
        let rank = (self.kls.len() * 99).div_ceil(100);
        let kl_p99 = *self.kls.get(rank.checked_sub(1)?)?;
        let worst = self
            .slices
            .iter()
            .max_by(|(_, one), (_, two)| one.increase_percent().total_cmp(&two.increase_percent()));
        Some(VerifyReport {
            baseline_perplexity: self.total.mean(self.total.baseline_nll).exp(),
            perplexity: self.total.mean(self.total.nll).exp(),
            perplexity_increase_percent: self.total.increase_percent(),
            kl_mean: self.total.mean(self.total.kl),
            kl_p99,
            top1_agreement_percent: self.total.agreement_percent(),
            worst_slice: worst.map(|(name, sums)| Slice {
                name: name.clone(),
                perplexity_increase_percent: sums.increase_percent(),
                kl_mean: sums.mean(sums.kl),
                top1_agreement_percent: sums.agreement_percent(),
                tokens: sums.tokens,
            }),
            tokens: self.total.tokens,
            artifact_digest,
        })
    }
}

impl Sums {
    fn add(&mut self, distance: Distance) {
        self.baseline_nll += distance.baseline_nll;
        self.nll += distance.nll;
        self.kl += distance.kl;
        self.agreeing += u64::from(distance.agrees);
        self.tokens += 1;
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^53"
    )]
    fn mean(&self, sum: f64) -> f64 {
        sum / self.tokens as f64
    }

    /// From the difference of the means, so that a plan that changes nothing costs exactly 0.
    fn increase_percent(&self) -> f64 {
        self.mean(self.nll - self.baseline_nll).exp_m1() * 100.0
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^53"
    )]
    fn agreement_percent(&self) -> f64 {
        100.0 * self.agreeing as f64 / self.tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rows_are_at_distance_zero() {
        let row = [0.5, -3.0, 7.25, 100.0];
        let distance = distance(&row, &row, 2).unwrap();
        assert_eq!((distance.kl, distance.agrees), (0.0, true));
        assert_eq!(distance.nll.to_bits(), distance.baseline_nll.to_bits());
    }

    /// Two tokens, worked by hand: p = (3/4, 1/4), q = (1/2, 1/2).
    #[test]
    fn the_distance_is_that_of_the_definition() {
        let distance = distance(&[3f32.ln(), 0.0], &[5.0, 5.0], 1).unwrap();
        let kl = 0.75 * (0.75f64 / 0.5).ln() + 0.25 * (0.25f64 / 0.5).ln();
        assert!((distance.kl - kl).abs() < 1e-7, "{distance:?}");
        assert!(
            (distance.baseline_nll - 4f64.ln()).abs() < 1e-7,
            "{distance:?}"
        );
        assert!((distance.nll - 2f64.ln()).abs() < 1e-12, "{distance:?}");
        assert!(distance.agrees, "a tie goes to the first token");
    }

    #[test]
    fn logits_that_are_not_finite_are_refused_and_blamed() {
        assert_eq!(
            distance(&[f32::NAN, 0.0], &[0.0, 0.0], 0),
            Err(NotFinite::Baseline)
        );
        assert_eq!(
            distance(&[0.0, 0.0], &[0.0, f32::INFINITY], 0),
            Err(NotFinite::Plan)
        );
    }

    #[test]
    fn the_report_names_the_worst_slice_and_the_99th_percentile() {
        let mut divergence = Divergence::default();
        for token in 0..200 {
            let worse = token % 4 == 0;
            let kl = f64::from(token) / 100.0;
            divergence.add(
                if worse { "bad" } else { "good" },
                Distance {
                    baseline_nll: 2.0,
                    nll: if worse { 2.5 } else { 2.0 },
                    kl,
                    agrees: !worse,
                },
            );
        }
        let report = divergence.report(None).unwrap();
        assert_eq!(
            (report.tokens, report.kl_p99, report.top1_agreement_percent),
            (200, 1.97, 75.0)
        );
        assert!((report.perplexity - 2.125f64.exp()).abs() < 1e-12);
        assert!((report.perplexity_increase_percent - 100.0 * (0.125f64.exp() - 1.0)).abs() < 1e-9);
        let worst = report.worst_slice.unwrap();
        assert_eq!(
            (
                worst.name.as_str(),
                worst.tokens,
                worst.top1_agreement_percent
            ),
            ("bad", 50, 0.0)
        );
    }

    #[test]
    fn nothing_scored_is_no_report() {
        assert!(Divergence::default().report(None).is_none());
    }
}
