//! The attention thresholds of calibration: from which normalised attention on a key is important (`attention.json`).

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// One threshold a layer and KV head, on the attention that a key received from the queries that could see it: the mean of softmax weight
/// times visible keys, so that 1 is a key like any other and a threshold means the same in texts of every length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Importance {
    /// `[layer][kv_head]`, each finite and at least 0: a key at or above it is important.
    pub thresholds: Vec<Vec<f32>>,
}

impl Importance {
    /// Checks that the thresholds fit a model of this shape.
    ///
    /// # Errors
    /// Another number of layers or heads, or a threshold that is negative or not finite.
    pub fn check(&self, layers: usize, kv_heads: usize) -> Result<()> {
        if self.thresholds.len() != layers
            || self.thresholds.iter().any(|heads| heads.len() != kv_heads)
        {
            return Err(Error::artifact(format!(
                "attention.json has thresholds for another shape than {layers} layers of {kv_heads} KV heads: calibrate this model"
            )));
        }
        match self
            .thresholds
            .iter()
            .flatten()
            .find(|threshold| !(threshold.is_finite() && **threshold >= 0.0))
        {
            Some(threshold) => Err(Error::artifact(format!(
                "attention.json has the threshold {threshold}, which is no finite number of at least 0: calibrate again"
            ))),
            None => Ok(()),
        }
    }
}
