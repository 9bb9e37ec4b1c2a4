//! One matrix of a model: dense as the checkpoint stores it, or packed for the kernels from quantised weights.
//!
//! Linears, embedding and head are such matrices; what they compute is in [`super::linear`].

use super::checkpoint::Stored;
use super::tensor::Tensor;
use crate::Result;
use crate::kernels::Packed;

/// See the file's comment.
#[derive(Debug)]
pub(super) enum Weight {
    Dense(Tensor),
    Packed(Packed),
}

impl Weight {
    /// Takes what the checkpoint stores for the linear `name`.
    pub(super) fn new(name: &str, stored: Stored) -> Result<Self> {
        match stored {
            Stored::Dense(tensor) => Ok(Self::Dense(tensor)),
            Stored::Quantised(weight) => Packed::new(name, &weight).map(Self::Packed),
        }
    }

    /// See [`Tensor::round`]; quantised weights are never rounded again.
    pub(super) fn round(&mut self, wanted: bool) {
        match self {
            Self::Dense(tensor) => tensor.round(wanted),
            Self::Packed(_) => {}
        }
    }

    /// All numbers as FP32, `[out, in]`.
    pub(super) fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::Dense(tensor) => tensor.to_f32(),
            Self::Packed(packed) => {
                let width = packed.in_features();
                let mut rows = vec![0.0; packed.out_features() * width];
                for (row, dst) in rows.chunks_exact_mut(width).enumerate() {
                    packed.dequantise_row(row, dst);
                }
                rows
            }
        }
    }

    /// One row as FP32.
    pub(super) fn copy_row(&self, row: usize, dst: &mut [f32]) {
        match self {
            Self::Dense(tensor) => tensor.copy_row(row, dst),
            Self::Packed(packed) => packed.dequantise_row(row, dst),
        }
    }
}
