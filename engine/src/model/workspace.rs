//! The buffers of a forward: they grow to the largest chunk and are then reused.

use super::linear::Input;
use crate::kernels::Backend;
use crate::quant::{Int8Rows, PackedInt8};

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
    /// Columns of small batches.
    pub(super) scratch: Vec<f32>,
    pub(super) int8: Int8Buffer,
    pub(super) logits: Vec<f32>,
}

/// INT8 activations.
#[derive(Debug, Default)]
pub(super) struct Int8Buffer {
    values: Vec<i8>,
    scale: Vec<f32>,
    sum: Vec<i32>,
}

impl Int8Buffer {
    /// Rounds rows of `columns` values.
    pub(super) fn quantise(
        &mut self,
        backend: &dyn Backend,
        x: &[f32],
        columns: usize,
    ) -> Input<'_> {
        let (rows, row_len) = (x.len() / columns, PackedInt8::row_len(columns));
        self.values.resize(rows * row_len, 0);
        self.scale.resize(rows, 0.0);
        self.sum.resize(rows, 0);
        for (row, x) in x.chunks_exact(columns).enumerate() {
            let dst = &mut self.values[row * row_len..(row + 1) * row_len];
            (self.scale[row], self.sum[row]) = backend.quantise_row(x, dst);
        }
        Input::Int8(Int8Rows {
            values: &self.values,
            scale: &self.scale,
            sum: &self.sum,
            row_len,
        })
    }
}
