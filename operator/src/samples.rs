//! Latency samples as histograms: difference, merge and quantiles with confidence bounds. Filled by `scrape.rs`, read by `judge.rs`.
//!
//! Samples are soft state. Losing them may only make a verdict Inconclusive, never Pass.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// What the pods of both tracks measured inside one window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Samples {
    /// When the window began: the newest of its pods' baselines may be later, none is earlier. `None` before the first scrape.
    pub since: Option<Timestamp>,
    /// When the newest scrape ended.
    pub taken_at: Option<Timestamp>,
    /// By revision.
    #[serde(default)]
    pub tracks: BTreeMap<String, TrackSamples>,
}

/// One track's part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrackSamples {
    /// Time per output token, seconds, one observation a request; merged over the pods.
    pub tpot: Histogram,
    /// Pods that answered the newest scrape.
    pub pods: u32,
    /// Pods that did not, or whose answer was no number, with the reason.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// Counts between bounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Histogram {
    /// Upper bounds, rising, finite, in the metric's unit.
    pub bounds: Vec<f64>,
    /// Observations in each bucket (not cumulative), one more than `bounds`: the last is above all of them. Empty with no bounds.
    pub counts: Vec<u64>,
}

/// A quantile and how far the samples can tell it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantile {
    /// The nearest-rank estimate.
    pub value: f64,
    /// With the asked confidence the true quantile is not below this; 0 when the samples are too few to say.
    pub lower: f64,
    /// With the asked confidence the true quantile is not above this; infinite when the samples are too few to say.
    pub upper: f64,
}

impl Histogram {
    /// Observations in all buckets.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The `q` quantile with one-sided bounds of `confidence` each, both in (0, 1); `None` without observations or with buckets that
    /// are no histogram.
    ///
    /// The bounds are order statistics: whatever the distribution, the number of observations below its `q` quantile is binomial
    /// with `n` and `q`, so the ranks between which the quantile lies follow exactly. Inside a bucket a rank is placed by
    /// interpolation, which adds at most the bucket's ratio (1.05 for TPOT) as error.
    pub fn quantile(&self, q: f64, confidence: f64) -> Option<Quantile> {
        let n = self.count();
        let well_formed = self.counts.len() == self.bounds.len() + 1
            && self
                .bounds
                .iter()
                .all(|bound| bound.is_finite() && *bound > 0.0)
            && self.bounds.windows(2).all(|pair| pair[0] < pair[1]);
        if n == 0 || !well_formed {
            return None;
        }
        let (lower, upper) = bound_ranks(n, q, confidence);
        let value = self.at_rank(nearest_rank(n, q), f64::INFINITY);
        let last = self.bounds.last().copied().unwrap_or(0.0);
        Some(Quantile {
            value,
            lower: lower.map_or(0.0, |rank| self.at_rank(rank, last)),
            upper: upper.map_or(f64::INFINITY, |rank| self.at_rank(rank, f64::INFINITY)),
        })
    }

    /// The observation of a rank from 1, placed inside its bucket; `beyond` when it lies above all bounds.
    fn at_rank(&self, rank: u64, beyond: f64) -> f64 {
        let mut before = 0_u64;
        for (index, (upper, count)) in self.bounds.iter().zip(&self.counts).enumerate() {
            if before.saturating_add(*count) >= rank {
                let lower = index.checked_sub(1).map_or(0.0, |below| self.bounds[below]);
                let place = (as_f64(rank - before) - 0.5) / as_f64(*count);
                return lower + (upper - lower) * place;
            }
            before = before.saturating_add(*count);
        }
        beyond
    }
}

/// `ceil(q n)`, in 1..=n.
fn nearest_rank(n: u64, q: f64) -> u64 {
    let mut rank = 1;
    // Bisection instead of a cast back from floating point.
    let mut above = n;
    while rank < above {
        let middle = rank + (above - rank) / 2;
        if as_f64(middle) >= q * as_f64(n) - 1e-9 {
            above = middle;
        } else {
            rank = middle + 1;
        }
    }
    rank
}

/// So many observations say all that a verdict needs; the bounds of more are as wide as theirs.
const ENOUGH: u64 = 200_000;

/// The largest rank that is below the quantile, and the smallest that is above it, each with `confidence`; `None` when no rank is.
fn bound_ranks(n: u64, q: f64, confidence: f64) -> (Option<u64>, Option<u64>) {
    if n > ENOUGH {
        let (lower, upper) = bound_ranks(ENOUGH, q, confidence);
        // Rounded away from the quantile on both sides.
        let scaled = u128::from(n);
        let down = |rank: u64| u128::from(rank) * scaled / u128::from(ENOUGH);
        let up = |rank: u64| (u128::from(rank) * scaled).div_ceil(u128::from(ENOUGH));
        let rank = |wide: u128| u64::try_from(wide).unwrap_or(n).clamp(1, n);
        return (
            lower.map(|lower| rank(down(lower))),
            upper.map(|upper| rank(up(upper))),
        );
    }
    let mut lower = None;
    let mut cumulative = 0.0;
    let mut log_probability = as_f64(n) * (1.0 - q).ln();
    let log_odds = q.ln() - (1.0 - q).ln();
    // `cumulative` is P(Bin(n, q) <= rank - 1) where it is compared: the true quantile lies at or above the observation of `rank` when
    // at least `rank` observations lie below it.
    for rank in 1..=n {
        cumulative += log_probability.exp();
        if cumulative <= 1.0 - confidence {
            lower = Some(rank);
        }
        if cumulative >= confidence {
            return (lower, Some(rank));
        }
        log_probability += (as_f64(n - rank + 1) / as_f64(rank)).ln() + log_odds;
    }
    (lower, None)
}

/// Counts as floating point: exact up to 2^53, far above any window.
#[expect(
    clippy::cast_precision_loss,
    reason = "a count above 2^53 would take centuries"
)]
fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Buckets of ratio 1.05 from 1 ms to 2 s.
    fn fine(observations: &[f64]) -> Histogram {
        let mut bounds = vec![0.001];
        while bounds[bounds.len() - 1] < 2.0 {
            bounds.push(bounds[bounds.len() - 1] * 1.05);
        }
        let mut counts = vec![0; bounds.len() + 1];
        for observation in observations {
            counts[bounds.partition_point(|bound| bound < observation)] += 1;
        }
        Histogram { bounds, counts }
    }

    /// Known tables of distribution-free bounds: 59 is the least n whose maximum bounds the 95th percentile at 95 %.
    #[test]
    fn ranks_are_those_of_the_binomial_distribution() {
        assert_eq!(bound_ranks(58, 0.95, 0.95).1, None);
        assert_eq!(bound_ranks(59, 0.95, 0.95).1, Some(59));
        assert_eq!(bound_ranks(29, 0.90, 0.95).1, Some(29));
        assert_eq!(bound_ranks(28, 0.90, 0.95).1, None);
        // The median of 20: ranks 6 and 15 (two-sided 95.86 %), one-sided at 97.5 %.
        assert_eq!(bound_ranks(20, 0.5, 0.975), (Some(6), Some(15)));
        assert_eq!(bound_ranks(1, 0.5, 0.95), (None, None));
    }

    #[test]
    fn many_observations_keep_their_precision() {
        let (lower, upper) = bound_ranks(200_000, 0.95, 0.95);
        // 1.645 standard deviations of Bin(200000, 0.95) are 160.
        assert!(lower.unwrap().abs_diff(190_000 - 160) < 5, "{lower:?}");
        assert!(upper.unwrap().abs_diff(190_000 + 160) < 5, "{upper:?}");
        let (lower, upper) = bound_ranks(u64::MAX, 0.95, 0.95);
        let nines = u64::MAX / 100 * 95;
        assert!(lower.unwrap() < nines && nines < upper.unwrap());
    }

    #[test]
    fn bounds_of_any_number_of_observations_lie_close_around_the_quantile() {
        for n in [
            200_001,
            216_000,
            300_000,
            399_999,
            400_000,
            1_000_003,
            1 << 40,
        ] {
            for q in [0.5, 0.9, 0.95, 0.99] {
                let (lower, upper) = bound_ranks(n, q, 0.95);
                let expected = q * as_f64(n);
                for rank in [lower, upper].map(|rank| as_f64(rank.unwrap())) {
                    let off = (rank / expected - 1.0).abs();
                    assert!(off < 0.005, "{rank} of {n} for {q}");
                }
                assert!(as_f64(lower.unwrap()) < expected && expected < as_f64(upper.unwrap()));
            }
        }
    }

    #[test]
    fn no_observations_have_no_quantile() {
        assert_eq!(Histogram::default().quantile(0.9, 0.95), None);
        assert_eq!(fine(&[]).quantile(0.9, 0.95), None);
    }

    #[test]
    fn buckets_that_are_no_histogram_have_no_quantile() {
        let broken = [
            (vec![1.0, 1.0], vec![1, 1, 1]),
            (vec![2.0, 1.0], vec![1, 1, 1]),
            (vec![1.0, f64::NAN], vec![1, 1, 1]),
            (vec![1.0], vec![1]),
            (vec![-1.0], vec![1, 1]),
        ];
        for (bounds, counts) in broken {
            let histogram = Histogram { bounds, counts };
            assert_eq!(histogram.quantile(0.9, 0.95), None, "{histogram:?}");
        }
    }

    #[test]
    fn an_observation_above_all_bounds_is_no_number_but_a_lower_bound() {
        let all_slow = Histogram {
            bounds: vec![1.0],
            counts: vec![0, 100],
        };
        let quantile = all_slow.quantile(0.9, 0.95).unwrap();
        assert!((quantile.lower - 1.0).abs() < f64::EPSILON);
        assert!(quantile.value.is_infinite() && quantile.upper.is_infinite());
    }

    proptest! {
        /// The estimate is the order statistic to within a bucket, and its bounds hold it.
        #[test]
        fn the_estimate_lies_between_its_bounds_and_near_the_order_statistic(
            mut observations in prop::collection::vec(0.0011_f64..1.9, 1..400),
            q in 0.5_f64..0.99,
        ) {
            let quantile = fine(&observations).quantile(q, 0.95).unwrap();
            observations.sort_by(f64::total_cmp);
            let rank = usize::try_from(nearest_rank(observations.len() as u64, q)).unwrap();
            let exact = observations[rank - 1];
            prop_assert!(quantile.lower <= quantile.value && quantile.value <= quantile.upper);
            prop_assert!((quantile.value / exact - 1.0).abs() < 0.0501, "{} {}", quantile.value, exact);
        }

        #[test]
        fn no_histogram_panics(
            bounds in prop::collection::vec(prop::num::f64::ANY, 0..6),
            counts in prop::collection::vec(0_u64..50, 0..8),
            q in 0.5_f64..0.99,
        ) {
            let _ = Histogram { bounds, counts }.quantile(q, 0.95);
        }
    }
}
