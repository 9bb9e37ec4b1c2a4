//! Simulated quantisation: a linear that computes with dequantised weights and rounded activations, in FP32 sums.
//!
//! Quantisers and quality measurements use it: any scheme can be judged before there is a kernel for it, through the forward that serves. What it
//! leaves out is only the order of sums. Serving never does.

use super::linear::{Arithmetic, Input, Prepared, matmul};
use crate::kernels::{Backend, Matrix, Values};
use crate::quant::{ActivationFormat, QuantisedLinear};

/// What computes instead of a linear's own weights.
#[derive(Debug, Clone)]
pub(super) struct Simulated {
    /// `[out, in]`.
    weights: Vec<f32>,
    in_features: usize,
    input_scale: Option<Vec<f32>>,
    activations: ActivationFormat,
}

impl Simulated {
    pub(super) fn new(linear: &QuantisedLinear, activations: ActivationFormat) -> Self {
        Self {
            weights: linear.weight.dequantise(),
            in_features: linear.weight.in_features,
            input_scale: linear.input_scale.clone(),
            activations,
        }
    }

    /// `dst = W · round(x / input_scale)`.
    pub(super) fn run(&self, backend: &dyn Backend, x: &[f32], dst: &mut [f32]) {
        let mut x = x.to_vec();
        if let Some(scale) = &self.input_scale {
            for row in x.chunks_exact_mut(scale.len()) {
                row.iter_mut().zip(scale).for_each(|(x, scale)| *x /= scale);
            }
        }
        self.activations.round(&mut x, self.in_features);
        let matrix = Matrix {
            values: Values::F32(&self.weights),
            rows: self.weights.len() / self.in_features,
            columns: self.in_features,
        };
        let mut prepared = Prepared::default();
        let mut input = Input::new(Arithmetic::Fp32, &x, self.in_features, &mut prepared);
        matmul(backend, matrix, &mut input, dst);
    }
}
