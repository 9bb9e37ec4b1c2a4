//! Counts between bounds, and the quantiles that they tell with confidence bounds. Pure; filled by `scrape`, read by `judge`.

use serde::{Deserialize, Serialize};

use crate::bounds::{as_f64, bound_ranks, nearest_rank};

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

    /// Whether `after` may be a later reading of the same counters.
    pub fn continues(&self, after: &Self) -> bool {
        self.bounds == after.bounds
            && self
                .counts
                .iter()
                .zip(&after.counts)
                .all(|(before, after)| before <= after)
    }

    /// Adds what was counted from `baseline` to `newest`; `false`, and nothing is added, when the buckets are others.
    pub fn add(&mut self, baseline: &Self, newest: &Self) -> bool {
        if self.bounds.is_empty() {
            self.bounds.clone_from(&newest.bounds);
            self.counts = vec![0; newest.counts.len()];
        }
        let same = self.bounds == newest.bounds && baseline.counts.len() == newest.counts.len();
        if same {
            let spans = baseline.counts.iter().zip(&newest.counts);
            for (sum, (before, after)) in self.counts.iter_mut().zip(spans) {
                *sum = sum.saturating_add(after.saturating_sub(*before));
            }
        }
        same
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
