//! One matrix of a model: dense as the checkpoint stores it, or packed for the kernels from quantised weights.
//!
//! Linears, embedding and head are such matrices; what they compute is in [`super::linear`].

use std::ops::Range;

use super::checkpoint::Stored;
use super::tensor::Tensor;
use crate::Result;
use crate::kernels::{Packed, Values};

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

    /// See [`Tensor::hold`]; packed weights lie in memory of their own already.
    pub(super) fn hold(&mut self, wanted: bool) {
        match self {
            Self::Dense(tensor) => tensor.hold(wanted),
            Self::Packed(_) => {}
        }
    }

    /// Bytes in memory, see [`Tensor::bytes`].
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.bytes(),
            Self::Packed(packed) => packed.bytes(),
        }
    }

    /// See [`Tensor::release`]; packed weights have nothing to let go of.
    pub(super) fn release(&self) {
        if let Self::Dense(tensor) = self {
            tensor.release();
        }
    }

    /// Bytes that a product reads.
    pub(super) fn read_bytes(&self) -> usize {
        match self {
            Self::Dense(tensor) => match tensor.matrix().values {
                Values::F32(values) => size_of_val(values),
                Values::Bf16(values) => size_of_val(values),
            },
            Self::Packed(packed) => packed.bytes(),
        }
    }

    /// Some rows as FP32, as stored.
    pub(super) fn stored_rows(&self, rows: Range<usize>) -> Vec<f32> {
        match self {
            Self::Dense(tensor) => tensor.stored_rows(rows),
            Self::Packed(packed) => {
                let width = packed.in_features();
                let mut read = vec![0.0; rows.len() * width];
                for (row, dst) in rows.zip(read.chunks_exact_mut(width)) {
                    packed.dequantise_row(row, dst);
                }
                read
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
