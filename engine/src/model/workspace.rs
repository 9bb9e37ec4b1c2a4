//! The buffers of a forward: they grow to the largest chunk and are then reused.

use super::linear::Prepared;

/// One engine worker has one. Contents mean nothing between forwards, except the logits that the last one returned.
#[derive(Debug, Default)]
pub struct Workspace {
    /// The residual stream, `[tokens, hidden_size]`.
    pub(super) x: Vec<f32>,
    /// The input of the next linear.
    pub(super) input: Vec<f32>,
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
    pub(super) value: Vec<f32>,
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    /// What a block adds to the residual stream.
    pub(super) update: Vec<f32>,
    /// Attention's answers, one KV head of a chunk after another.
    pub(super) heads: Vec<f32>,
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    pub(super) prepared: Prepared,
    pub(super) logits: Vec<f32>,
}

impl Workspace {
    /// The wanted rows of the last forward, see [`Model::forward`](super::Model::forward).
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }
}
