//! GPTQ (arXiv 2210.17323): rounds column by column and lets the columns that are left make up for each error.
//!
//! Rows are independent of each other given the inputs' second moments, so they are worked on in pieces by all threads with one result.

mod order;

use rayon::prelude::*;

pub use self::order::ActOrder;
use self::order::{order, permuted};
use super::cholesky::inverse_factor;
use crate::calibrate::statistics::{Statistics, output_error};
use crate::kernels::{Matrix, Values, detect};
use crate::quant::affine::{Affine, Grid, range};
use crate::quant::round::from_codes;
use crate::quant::{QuantisedWeight, WeightFormat};
use crate::{Error, Result};

/// Columns between two updates of all columns behind; a multiple of every group size.
const BLOCK: usize = 128;
/// Rows of one piece of work.
const ROWS: usize = 16;
/// Shares of a range that are tried: 1, 0.975 … 0.7.
const RATIOS: u16 = 12;

/// How it goes about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gptq {
    /// What is added to the diagonal, as a share of its mean.
    pub damp: f64,
    /// In which order columns are rounded.
    pub act_order: ActOrder,
    /// A layer's linears one place after another, each seeing the inputs that the rounded ones before it give.
    pub true_sequential: bool,
}

impl Default for Gptq {
    fn default() -> Self {
        Self {
            damp: 0.01,
            act_order: ActOrder::Weight,
            true_sequential: true,
        }
    }
}

/// Quantises `[out, in]` weights whose inputs have the given statistics.
///
/// # Errors
/// Moments that are not finite; a format without a grid.
pub fn quantise(
    name: &str,
    rows: &[f32],
    statistics: &Statistics,
    format: WeightFormat,
    gptq: Gptq,
) -> Result<QuantisedWeight> {
    let ordered = rounded(name, rows, statistics, format, gptq)?;
    if gptq.act_order != ActOrder::Weight {
        return Ok(ordered);
    }
    let plain = Gptq {
        act_order: ActOrder::No,
        ..gptq
    };
    let plain = rounded(name, rows, statistics, format, plain)?;
    let moments = statistics.moments();
    let error = |weight: &QuantisedWeight| {
        let mut delta = weight.dequantise();
        delta.iter_mut().zip(rows).for_each(|(w, row)| *w -= row);
        output_error(&delta, &moments, statistics.inputs)
    };
    Ok(if error(&plain) < error(&ordered) {
        plain
    } else {
        ordered
    })
}

/// The same in one order.
fn rounded(
    name: &str,
    rows: &[f32],
    statistics: &Statistics,
    format: WeightFormat,
    gptq: Gptq,
) -> Result<QuantisedWeight> {
    let inputs = statistics.inputs;
    let grid = format.grid().ok_or_else(|| {
        Error::plan(format!(
            "GPTQ rounds to integers of 4 or 8 bits, which {format:?} is not: choose a W4 or W8 scheme"
        ))
    })?;
    let order = order(statistics, gptq.act_order);
    let factor = damped_factor(name, statistics, &order, gptq.damp)?;
    // An error in a column costs its square over that of the factor's diagonal.
    let importance: Vec<f32> = (0..inputs)
        .map(|index| factor[index * (inputs + 1)].powi(-2))
        .collect();
    let group = format.group(inputs);
    // A scale for more columns than are updated at once is that of the stored weights, too.
    let stored = group > BLOCK || gptq.act_order == ActOrder::Weight;
    let mut work = Work {
        weights: permuted(rows, inputs, &order),
        inputs,
        grid,
        group,
        blocks: stored.then(|| {
            let mut natural = vec![0.0; inputs];
            for (column, importance) in order.iter().zip(&importance) {
                natural[*column] = *importance;
            }
            stored_blocks(rows, &natural, group, grid)
        }),
        block_of: (0..inputs)
            .map(|place| if stored { order[place] } else { place } / group)
            .collect(),
        factor: &factor,
        importance: &importance,
    };
    let (codes, blocks) = work.run();
    Ok(assemble(codes, &blocks, inputs, format, &order, gptq))
}

/// The blocks of the weights as they are stored, `[out, groups]`.
fn stored_blocks(rows: &[f32], importance: &[f32], group: usize, grid: Grid) -> Vec<Affine> {
    rows.par_chunks_exact(importance.len())
        .flat_map_iter(|row| {
            let groups = row.chunks(group).zip(importance.chunks(group));
            groups.map(move |(values, importance)| fit(grid, values, importance))
        })
        .collect()
}

/// The inverse's factor in the given order. Where rounding errors beat the damping, ten times more is tried.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "FP32 is what the updates are computed in; a number of inputs is far below 2^53"
)]
fn damped_factor(
    name: &str,
    statistics: &Statistics,
    order: &[usize],
    damp: f64,
) -> Result<Vec<f32>> {
    let n = statistics.inputs;
    let mean = (0..n).map(|i| statistics.hessian[i * (n + 1)]).sum::<f64>() / n as f64;
    if !mean.is_finite() {
        return Err(Error::model(format!(
            "{name}: its inputs over the calibration texts are not finite: the model's weights are damaged"
        )));
    }
    let mut damp = damp;
    for _ in 0..6 {
        let mut matrix = vec![0.0; n * n];
        matrix
            .par_chunks_exact_mut(n)
            .enumerate()
            .for_each(|(i, dst)| {
                let row = &statistics.hessian[order[i] * n..(order[i] + 1) * n];
                for (dst, column) in dst.iter_mut().zip(order) {
                    *dst = row[*column];
                }
                // An input that was never seen has nothing to make up for.
                dst[i] = if dst[i] > 0.0 { dst[i] } else { mean.max(1.0) } + damp * mean;
            });
        if let Some(factor) = inverse_factor(&matrix, n) {
            return Ok(factor.iter().map(|value| *value as f32).collect());
        }
        damp = (damp * 10.0).max(1e-6);
    }
    Err(Error::data(format!(
        "{name}: the calibration texts leave its inputs' moments without an inverse: use more texts or a larger --damp"
    )))
}

/// One linear being rounded.
struct Work<'a> {
    /// `[out, in]` in the order of rounding; the columns behind the current one carry the errors before.
    weights: Vec<f32>,
    inputs: usize,
    grid: Grid,
    group: usize,
    /// Scales that are known before, `[out, groups]`; otherwise each group's is fitted when rounding reaches it.
    blocks: Option<Vec<Affine>>,
    /// The block of each column, in the order of rounding.
    block_of: Vec<usize>,
    /// Upper triangular `[in, in]`.
    factor: &'a [f32],
    /// What a squared error costs in each column, in the order of rounding.
    importance: &'a [f32],
}

impl Work<'_> {
    /// Codes `[out, in]` and blocks `[out, groups]`.
    fn run(&mut self) -> (Vec<i8>, Vec<Affine>) {
        let (inputs, grid, group) = (self.inputs, self.grid, self.group);
        let (factor, importance) = (self.factor, self.importance);
        let groups = inputs.div_ceil(group);
        let out = self.weights.len() / inputs;
        let mut codes = vec![0_i8; out * inputs];
        let nothing = Affine {
            scale: 1.0,
            zero: 0.0,
        };
        let fitted = self.blocks.is_none();
        let mut blocks = self
            .blocks
            .take()
            .unwrap_or_else(|| vec![nothing; out * groups]);
        let block_of = &self.block_of;
        let backend = detect();
        for first in (0..inputs).step_by(BLOCK) {
            let end = inputs.min(first + BLOCK);
            let behind = columns_of(factor, inputs, first..end);
            let matrix = Matrix {
                values: Values::F32(&behind),
                rows: inputs - end,
                columns: end - first,
            };
            self.weights
                .par_chunks_mut(ROWS * inputs)
                .zip(codes.par_chunks_mut(ROWS * inputs))
                .zip(blocks.par_chunks_mut(ROWS * groups))
                .for_each(|((weights, codes), blocks)| {
                    let mut errors = vec![0.0; weights.len() / inputs * (end - first)];
                    let rows = weights
                        .chunks_exact_mut(inputs)
                        .zip(codes.chunks_exact_mut(inputs))
                        .zip(blocks.chunks_exact_mut(groups))
                        .zip(errors.chunks_exact_mut(end - first));
                    for (((weights, codes), blocks), errors) in rows {
                        let row = Row {
                            grid,
                            group: fitted.then_some(group),
                            block_of,
                            factor,
                            importance,
                            weights,
                            codes,
                            blocks,
                        };
                        row.round(first..end, errors);
                    }
                    if end == inputs {
                        return;
                    }
                    let mut update = vec![0.0; weights.len() / inputs * (inputs - end)];
                    backend.matmul(&errors, matrix, inputs - end, &mut update);
                    for (weights, update) in weights
                        .chunks_exact_mut(inputs)
                        .zip(update.chunks_exact(inputs - end))
                    {
                        weights[end..]
                            .iter_mut()
                            .zip(update)
                            .for_each(|(weight, update)| *weight -= update);
                    }
                });
        }
        (codes, blocks)
    }
}

/// One row of [`Work`].
struct Row<'a> {
    grid: Grid,
    /// The group size, when groups are fitted on the way.
    group: Option<usize>,
    block_of: &'a [usize],
    factor: &'a [f32],
    importance: &'a [f32],
    weights: &'a mut [f32],
    codes: &'a mut [i8],
    blocks: &'a mut [Affine],
}

impl Row<'_> {
    /// Rounds some columns, each error spread over those behind it in the block.
    fn round(self, columns: std::ops::Range<usize>, errors: &mut [f32]) {
        let inputs = self.weights.len();
        for column in columns.clone() {
            if let Some(group) = self.group.filter(|group| column.is_multiple_of(*group)) {
                let end = inputs.min(column + group);
                self.blocks[column / group] = fit(
                    self.grid,
                    &self.weights[column..end],
                    &self.importance[column..end],
                );
            }
            let affine = self.blocks[self.block_of[column]];
            let weight = self.weights[column];
            let code = self.grid.code(weight, affine);
            self.codes[column] = code;
            let factor = &self.factor[column * inputs..(column + 1) * inputs];
            let error = (weight - affine.value(code)) / factor[column];
            errors[column - columns.start] = error;
            self.weights[column + 1..columns.end]
                .iter_mut()
                .zip(&factor[column + 1..columns.end])
                .for_each(|(weight, factor)| *weight -= error * factor);
        }
    }
}

/// The share of the values' range that costs least; the whole range is among the candidates.
fn fit(grid: Grid, values: &[f32], importance: &[f32]) -> Affine {
    let (low, high) = range(values);
    let mut best = (f32::INFINITY, grid.fit(low, high));
    for step in 0..=RATIOS {
        let ratio = 1.0 - 0.025 * f32::from(step);
        let affine = grid.fit(low * ratio, high * ratio);
        let cost = values
            .iter()
            .zip(importance)
            .map(|(value, importance)| {
                let error = affine.value(grid.code(*value, affine)) - value;
                importance * error * error
            })
            .sum();
        if cost < best.0 {
            best = (cost, affine);
        }
    }
    best.1
}

/// What the rounded columns `rows` of the factor mean to each column behind them: `[in - end, rows]`.
fn columns_of(factor: &[f32], inputs: usize, rows: std::ops::Range<usize>) -> Vec<f32> {
    (rows.end..inputs)
        .into_par_iter()
        .flat_map_iter(|column| rows.clone().map(move |row| factor[row * inputs + column]))
        .collect()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a linear has far fewer than 2^32 inputs"
)]
fn assemble(
    codes: Vec<i8>,
    blocks: &[Affine],
    inputs: usize,
    format: WeightFormat,
    order: &[usize],
    gptq: Gptq,
) -> QuantisedWeight {
    let ordered = gptq.act_order == ActOrder::Group && format.group(inputs) < inputs;
    if ordered || gptq.act_order == ActOrder::No {
        return QuantisedWeight {
            input_order: ordered.then(|| order.iter().map(|column| *column as u32).collect()),
            ..from_codes(codes, inputs, format, blocks)
        };
    }
    // Neighbours share a scale, or the whole channel does: the columns go home.
    let mut home = vec![0_i8; codes.len()];
    for (home, codes) in home
        .chunks_exact_mut(inputs)
        .zip(codes.chunks_exact(inputs))
    {
        for (code, column) in codes.iter().zip(order) {
            home[*column] = *code;
        }
    }
    from_codes(home, inputs, format, blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::quantisers::tests::{error_of, example};
    use crate::quant::round_to_nearest;

    const FORMATS: [WeightFormat; 4] = [
        WeightFormat::Int4 {
            group: Some(32),
            symmetric: true,
        },
        WeightFormat::Int4 {
            group: None,
            symmetric: true,
        },
        WeightFormat::Int4 {
            group: Some(64),
            symmetric: false,
        },
        WeightFormat::Int8,
    ];

    #[test]
    fn outputs_are_nearer_than_with_rounding_to_nearest() {
        let (rows, statistics) = example(24, 200, 7);
        for format in FORMATS {
            let plain = error_of(&rows, &round_to_nearest(&rows, 200, format), &statistics);
            for act_order in [ActOrder::No, ActOrder::Weight, ActOrder::Group] {
                let gptq = Gptq {
                    act_order,
                    ..Gptq::default()
                };
                let weight = quantise("x", &rows, &statistics, format, gptq).unwrap();
                weight.check("x").unwrap();
                let error = error_of(&rows, &weight, &statistics);
                assert!(
                    error < 0.6 * plain,
                    "{format:?}, {act_order:?}: {error} of {plain}"
                );
            }
        }
    }

    #[test]
    fn with_inputs_that_have_nothing_in_common_each_weight_goes_to_its_nearest_code() {
        let (rows, mut statistics) = example(8, 40, 3);
        for i in 0..40 {
            for j in 0..40 {
                statistics.hessian[i * 40 + j] = if i == j { 2.0 } else { 0.0 };
            }
        }
        for format in FORMATS {
            let gptq = Gptq {
                act_order: ActOrder::No,
                ..Gptq::default()
            };
            let weight = quantise("x", &rows, &statistics, format, gptq).unwrap();
            for (row, stored) in rows.chunks_exact(40).enumerate() {
                for (column, value) in stored.iter().enumerate() {
                    let block = row * weight.groups() + column / weight.group;
                    let zero = weight
                        .zeros
                        .as_ref()
                        .map_or(format.grid().unwrap().symmetric_zero(), |zeros| {
                            zeros[block]
                        });
                    let block = Affine {
                        scale: weight.scales[block],
                        zero,
                    };
                    let code = format.grid().unwrap().code(*value, block);
                    #[expect(clippy::cast_possible_truncation, reason = "a code")]
                    let own = weight.code(row, column) as i8;
                    assert_eq!(own, code, "{format:?}: nothing is moved to other columns");
                }
            }
        }
    }

    #[test]
    fn inputs_that_were_never_seen_do_no_harm() {
        let (rows, mut statistics) = example(8, 40, 3);
        for i in 0..40 {
            statistics.hessian[i * 40 + 5] = 0.0;
            statistics.hessian[5 * 40 + i] = 0.0;
        }
        let weight = quantise("x", &rows, &statistics, FORMATS[0], Gptq::default()).unwrap();
        weight.check("x").unwrap();
        let all_zero = Statistics::new(40);
        quantise("x", &rows, &all_zero, FORMATS[0], Gptq::default()).unwrap();
    }

    #[test]
    fn moments_that_are_not_finite_and_formats_without_a_grid_are_refused() {
        let (rows, mut statistics) = example(8, 40, 3);
        let error = |statistics: &Statistics, format| {
            quantise("layer.q", &rows, statistics, format, Gptq::default())
                .unwrap_err()
                .message
        };
        assert!(error(&statistics, WeightFormat::Lut4).contains("choose a W4 or W8 scheme"));
        statistics.hessian[0] = f64::NAN;
        assert!(error(&statistics, FORMATS[0]).contains("layer.q: its inputs"));
    }
}
