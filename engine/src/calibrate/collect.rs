//! What attention leans on: gathers, while texts are read, how much attention each key received, and takes a quantile of it.
//!
//! Pure but for being called by the forward as its [`Tap`]. The numbers are those that the cache compares later, so both must count alike.

use mixquant_crds::KvCachePlan;

use crate::error::{Error, Result};
use crate::model::{Importance, Tap};

/// Normalised attention per layer and KV head. Takes 4 bytes a key, layer and KV head.
#[derive(Debug)]
pub struct Collector {
    sink_tokens: usize,
    recent_tokens: usize,
    /// `[layer][kv_head]`, one number a key that the cache would have had to decide on.
    attention: Vec<Vec<Vec<f32>>>,
}

impl Collector {
    /// For a model of so many layers and KV heads.
    pub fn new(plan: &KvCachePlan, layers: usize, kv_heads: usize) -> Self {
        let count = |tokens: u32| usize::try_from(tokens).unwrap_or(usize::MAX);
        Self {
            sink_tokens: count(plan.sink_tokens),
            recent_tokens: count(plan.recent_tokens),
            attention: vec![vec![Vec::new(); kv_heads]; layers],
        }
    }

    /// The thresholds: the `quantile` (in (0, 1)) of each layer and KV head.
    ///
    /// # Errors
    /// When no text was long enough to have a key that is neither a sink nor recent, or attention is not a number.
    pub fn thresholds(self, quantile: f64) -> Result<Importance> {
        let needed = self
            .sink_tokens
            .saturating_add(self.recent_tokens)
            .saturating_add(1);
        let one = |values: Vec<f32>| {
            self::quantile(values, quantile).ok_or_else(|| {
                Error::data(format!("no calibration text has {needed} tokens (kvCache.sinkTokens + recentTokens + 1): use longer texts or a larger --sequence-length"))
            })
        };
        let thresholds: Vec<Vec<f32>> = self
            .attention
            .into_iter()
            .map(|heads| heads.into_iter().map(one).collect())
            .collect::<Result<_>>()?;
        if thresholds
            .iter()
            .flatten()
            .any(|threshold| !threshold.is_finite())
        {
            return Err(Error::model(
                "attention over the calibration texts is not finite: the model's weights are damaged",
            ));
        }
        Ok(Importance { thresholds })
    }
}

impl Tap for Collector {
    fn attention(&mut self, layer: usize, kv_head: usize, received: &[f32], seen_by: &[f32]) {
        // Sinks are important anyway, and recent keys are not decided on yet: few queries saw them, which makes their mean a matter of chance.
        let end = received.len().saturating_sub(self.recent_tokens);
        let keys = received
            .iter()
            .zip(seen_by)
            .take(end)
            .skip(self.sink_tokens);
        self.attention[layer][kv_head].extend(
            keys.filter(|(_, seen_by)| **seen_by > 0.0)
                .map(|(received, seen_by)| received / seen_by),
        );
    }
}

/// The smallest value such that the share of values below it is at least about `quantile`; values at or above it are the important ones.
fn quantile(mut values: Vec<f32>, quantile: f64) -> Option<f32> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "between 0 and the number of values, which is far below 2^53"
    )]
    let rank = (quantile * values.len() as f64).floor() as usize;
    let rank = rank.min(values.len().checked_sub(1)?);
    let (_, value, _) = values.select_nth_unstable_by(rank, f32::total_cmp);
    Some(*value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixquant_crds::PrecisionPlan;

    fn plan(sink_tokens: u32, recent_tokens: u32) -> KvCachePlan {
        KvCachePlan {
            sink_tokens,
            recent_tokens,
            ..PrecisionPlan::baseline().kv_cache
        }
    }

    #[test]
    fn a_tenth_of_the_keys_is_at_or_above_the_ninth_decile() {
        let values: Vec<f32> = (0..1000u16).rev().map(f32::from).collect();
        let threshold = quantile(values.clone(), 0.9).unwrap();
        assert_eq!(
            values.iter().filter(|value| **value >= threshold).count(),
            100
        );
        assert_eq!(quantile(vec![1.0, 2.0], 0.999), Some(2.0));
        assert_eq!(quantile(vec![], 0.5), None);
    }

    #[test]
    fn sinks_and_recent_keys_do_not_count() {
        let mut collector = Collector::new(&plan(1, 2), 1, 1);
        collector.attention(
            0,
            0,
            &[90.0, 4.0, 3.0, 80.0, 70.0],
            &[9.0, 8.0, 6.0, 2.0, 1.0],
        );
        assert_eq!(collector.attention[0][0], [0.5, 0.5]);
    }

    #[test]
    fn texts_shorter_than_the_recent_window_are_refused_with_the_length_needed() {
        let mut collector = Collector::new(&plan(4, 64), 1, 1);
        collector.attention(0, 0, &[1.0; 68], &[1.0; 68]);
        assert!(
            collector
                .thresholds(0.9)
                .unwrap_err()
                .message
                .contains("no calibration text has 69 tokens")
        );
    }

    #[test]
    fn attention_that_is_not_a_number_blames_the_model() {
        let mut collector = Collector::new(&plan(0, 0), 1, 1);
        collector.attention(0, 0, &[f32::NAN; 3], &[1.0; 3]);
        assert!(
            collector
                .thresholds(0.5)
                .unwrap_err()
                .message
                .contains("weights are damaged")
        );
    }
}
