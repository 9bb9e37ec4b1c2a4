//! The attention thresholds of calibration: from which normalised attention on a key is important (`attention.json`).

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// One threshold a layer and KV head, on the mean softmax weight that a key received from the queries that could see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Importance {
    /// `[layer][kv_head]`, each in `[0, 1]`: a key at or above it is important.
    pub thresholds: Vec<Vec<f32>>,
}

impl Importance {
    /// Checks that the thresholds fit a model of this shape.
    ///
    /// # Errors
    /// Another number of layers or heads, or a threshold outside `[0, 1]`.
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
            .find(|threshold| !(0.0..=1.0).contains(*threshold))
        {
            Some(threshold) => Err(Error::artifact(format!(
                "attention.json has the threshold {threshold}, outside 0 to 1: calibrate again"
            ))),
            None => Ok(()),
        }
    }
}
