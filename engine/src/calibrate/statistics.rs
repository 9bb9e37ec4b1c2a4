//! What quantisers know of a linear's inputs: second moments, magnitudes and some of the rows themselves.
//!
//! Gathered over the calibration texts by [`Gatherer`], a [`Tap`]. Sums do not depend on the number of threads.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::kernels::{Backend, Matrix, Values, detect};
use crate::model::{LinearInput, Tap};

/// Rows kept of all inputs, spread over the texts.
const SAMPLE_ROWS: usize = 256;
/// Rows of one product.
const ROWS: usize = 64;

/// The inputs of the linears at one place of a block.
#[derive(Debug, Clone)]
pub struct Statistics {
    /// Columns.
    pub inputs: usize,
    /// Rows seen.
    pub tokens: usize,
    /// `Σ x xᵀ`, `[inputs, inputs]`: up to a factor the Hessian of a linear's squared output error.
    pub hessian: Vec<f64>,
    /// `Σ |x|`.
    pub sum_abs: Vec<f64>,
    /// The largest `|x|`.
    pub max_abs: Vec<f32>,
    /// Some of the rows, `[rows, inputs]`.
    pub samples: Vec<f32>,
}

impl Statistics {
    /// Of nothing yet.
    pub fn new(inputs: usize) -> Self {
        Self {
            inputs,
            tokens: 0,
            hessian: vec![0.0; inputs * inputs],
            sum_abs: vec![0.0; inputs],
            max_abs: vec![0.0; inputs],
            samples: Vec::new(),
        }
    }

    /// Adds `[tokens, inputs]` rows and keeps every `stride`-th of them.
    pub fn add(&mut self, rows: &[f32], stride: usize) {
        let tokens = rows.len() / self.inputs;
        for (index, row) in rows.chunks_exact(self.inputs).enumerate() {
            for ((sum, max), value) in self.sum_abs.iter_mut().zip(&mut self.max_abs).zip(row) {
                *sum += f64::from(value.abs());
                *max = max.max(value.abs());
            }
            if (self.tokens + index).is_multiple_of(stride) {
                self.samples.extend_from_slice(row);
            }
        }
        self.tokens += tokens;
        let columns = transposed(rows, self.inputs);
        let all = Matrix {
            values: Values::F32(&columns),
            rows: self.inputs,
            columns: tokens,
        };
        let backend = detect();
        let inputs = self.inputs;
        self.hessian
            .par_chunks_mut(ROWS * inputs)
            .zip(columns.par_chunks(ROWS * tokens))
            .for_each(|(hessian, columns)| {
                let mut product = vec![0.0; hessian.len()];
                backend.matmul(columns, all, inputs, &mut product);
                hessian
                    .iter_mut()
                    .zip(&product)
                    .for_each(|(sum, product)| *sum += f64::from(*product));
            });
    }

    /// The mean second moments as FP32, for products.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "means of FP32 products over far fewer than 2^53 tokens"
    )]
    pub fn moments(&self) -> Vec<f32> {
        let tokens = self.tokens.max(1) as f64;
        self.hessian
            .iter()
            .map(|sum| (sum / tokens) as f32)
            .collect()
    }

    /// `E[x²]` of each input.
    pub fn mean_squares(&self) -> Vec<f32> {
        let moments = self.moments();
        (0..self.inputs)
            .map(|index| moments[index * (self.inputs + 1)])
            .collect()
    }
}

/// `[columns, rows]` of `[rows, columns]`.
pub fn transposed(rows: &[f32], columns: usize) -> Vec<f32> {
    let count = rows.len() / columns;
    let mut turned = vec![0.0; rows.len()];
    turned
        .par_chunks_mut(count.max(1))
        .enumerate()
        .for_each(|(column, dst)| {
            for (dst, row) in dst.iter_mut().zip(rows.chunks_exact(columns)) {
                *dst = row[column];
            }
        });
    turned
}

/// The mean squared error of a linear's outputs over the texts: `Σ_rows Δ M Δᵀ / out`, with `Δ` the error of its weights `[out, in]` and `M`
/// the inputs' mean second moments.
#[expect(
    clippy::cast_precision_loss,
    reason = "a number of rows far below 2^53"
)]
pub fn output_error(delta: &[f32], moments: &[f32], inputs: usize) -> f64 {
    let matrix = Matrix {
        values: Values::F32(moments),
        rows: inputs,
        columns: inputs,
    };
    let backend = detect();
    // Collected in order, so that the sum does not depend on threads.
    let parts: Vec<f64> = delta
        .par_chunks(ROWS * inputs)
        .map(|delta| part_error(backend, delta, matrix))
        .collect();
    parts.iter().sum::<f64>() / (delta.len() / inputs) as f64
}

fn part_error(backend: &dyn Backend, delta: &[f32], moments: Matrix<'_>) -> f64 {
    let mut product = vec![0.0; delta.len()];
    backend.matmul(delta, moments, moments.rows, &mut product);
    delta
        .iter()
        .zip(&product)
        .map(|(delta, product)| f64::from(*delta) * f64::from(*product))
        .sum()
}

/// Gathers the inputs of some places of one layer.
#[derive(Debug)]
pub struct Gatherer {
    stride: usize,
    places: BTreeMap<LinearInput, Statistics>,
}

impl Gatherer {
    /// For these places with their widths, over so many tokens in all.
    pub fn new(places: &[(LinearInput, usize)], tokens: usize) -> Self {
        Self {
            stride: tokens.div_ceil(SAMPLE_ROWS).max(1),
            places: places
                .iter()
                .map(|(place, inputs)| (*place, Statistics::new(*inputs)))
                .collect(),
        }
    }

    /// What was gathered.
    pub fn into_places(self) -> BTreeMap<LinearInput, Statistics> {
        self.places
    }
}

impl Tap for Gatherer {
    fn watches_attention(&self) -> bool {
        false
    }

    fn linear_input(&mut self, _layer: usize, input: LinearInput, rows: &[f32], _columns: usize) {
        if let Some(statistics) = self.places.get_mut(&input) {
            statistics.add(rows, self.stride);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_rows() {
        let rows = [1.0, 2.0, 3.0, -1.0, 0.5, 4.0];
        let mut statistics = Statistics::new(3);
        statistics.add(&rows[..3], 2);
        statistics.add(&rows[3..], 2);
        assert_eq!(statistics.tokens, 2);
        assert_eq!(statistics.max_abs, [1.0, 2.0, 4.0]);
        assert_eq!(statistics.sum_abs, [2.0, 2.5, 7.0]);
        assert_eq!(statistics.samples, rows[..3]);
        for i in 0..3 {
            for j in 0..3 {
                let expected = rows[i] * rows[j] + rows[3 + i] * rows[3 + j];
                assert!((statistics.hessian[i * 3 + j] - f64::from(expected)).abs() < 1e-6);
            }
        }
        assert_eq!(statistics.mean_squares(), [1.0, 2.125, 12.5]);
    }

    #[test]
    fn the_output_error_is_what_the_rows_would_show() {
        let rows = [1.0, 2.0, 3.0, -1.0, 0.5, 4.0];
        let mut statistics = Statistics::new(3);
        statistics.add(&rows, 1);
        let delta = [0.5, -0.25, 0.125, 1.0, 0.0, -0.5];
        let mut expected = 0.0;
        for row in rows.chunks(3) {
            for delta in delta.chunks(3) {
                let output: f32 = row.iter().zip(delta).map(|(x, w)| x * w).sum();
                expected += f64::from(output * output) / 4.0;
            }
        }
        let error = output_error(&delta, &statistics.moments(), 3);
        assert!((error - expected).abs() < 1e-6, "{error} {expected}");
    }
}
