//! AWQ (arXiv 2306.00978): inputs that matter are scaled down and their weights up before rounding, then ranges are clipped where that helps.
//!
//! Both searches minimise the squared error of the outputs, from the inputs' second moments. Exponent 0 (no scaling) and ratio 1 (no clipping)
//! are among the candidates, so by this measure it is never worse than rounding to nearest.

use std::ops::RangeInclusive;

use rayon::prelude::*;

use super::smoothquant::Outputs;
use super::{Place, powers_of_two, scaled};
use crate::calibrate::statistics::output_error;
use crate::quant::affine::{Affine, Grid, range};
use crate::quant::round::{round_to_nearest, with_blocks};
use crate::quant::{ActivationFormat, QuantisedWeight, WeightFormat};

/// Exponents of the mean magnitude: 0, 1/20 … 1.
const EXPONENTS: u16 = 20;
/// Shares of the range that are tried: 1.05, 1.0375 … 0.5.
const RATIOS: u16 = 44;
/// The one that is the whole range.
const WHOLE: u16 = 4;
/// How often a row's groups are gone through: first with all shares, then with those around the one that was best.
const SWEEPS: usize = 4;
const AROUND: u16 = 4;

/// How it goes about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awq {
    /// Whether ranges are clipped.
    pub clip: bool,
}

impl Default for Awq {
    fn default() -> Self {
        Self { clip: true }
    }
}

/// Quantises linears that read the same input. Returns them and what the input is divided by, nothing when no division helps.
pub fn quantise(
    place: &Place<'_>,
    format: WeightFormat,
    activations: ActivationFormat,
    awq: Awq,
) -> (Vec<QuantisedWeight>, Option<Vec<f32>>) {
    let moments = damped(place.statistics.moments());
    let scale = best_scale(place, &moments, format, activations);
    let moments = match &scale {
        Some(scale) => divided(&moments, scale),
        None => moments,
    };
    let weights = place.weights.iter().map(|rows| {
        let rows = scaled(rows, scale.as_deref());
        match format.grid() {
            // With 256 codes there is nothing to win by clipping.
            Some(grid) if awq.clip && format != WeightFormat::Int8 => {
                clipped(&rows, &moments, format, grid)
            }
            _ => round_to_nearest(&rows, place.statistics.inputs, format),
        }
    });
    (weights.collect(), scale)
}

/// A hundredth of the mean on the diagonal: what the texts do not show is not trusted to cancel out.
#[expect(
    clippy::cast_precision_loss,
    reason = "a number of inputs is far below 2^24"
)]
fn damped(mut moments: Vec<f32>) -> Vec<f32> {
    let inputs = moments.len().isqrt();
    let diagonal = |index: usize| index * (inputs + 1);
    let mean = (0..inputs)
        .map(|index| moments[diagonal(index)])
        .sum::<f32>()
        / inputs as f32;
    for index in 0..inputs {
        moments[diagonal(index)] += 0.01 * mean;
    }
    moments
}

/// The input scale whose rounded weights miss the outputs least. Where activations are rounded too, so they are in the comparison: a scale that
/// suits the weights alone may leave activations with outliers.
fn best_scale(
    place: &Place<'_>,
    moments: &[f32],
    format: WeightFormat,
    activations: ActivationFormat,
) -> Option<Vec<f32>> {
    let inputs = place.statistics.inputs;
    let outputs = (activations != ActivationFormat::Bf16).then(|| Outputs::new(place, activations));
    let mut best = (f64::INFINITY, None);
    for step in 0..=EXPONENTS {
        let exponent = f64::from(step) / f64::from(EXPONENTS);
        let magnitudes: Vec<f64> = place
            .statistics
            .sum_abs
            .iter()
            .map(|sum| sum.powf(exponent))
            .collect();
        let scale = powers_of_two(&magnitudes, place.tied);
        let weights: Vec<QuantisedWeight> = place
            .weights
            .iter()
            .map(|rows| round_to_nearest(&scaled(rows, Some(&scale)), inputs, format))
            .collect();
        let error = match &outputs {
            Some(outputs) => outputs.missed(&weights, Some(&scale)),
            None => (place.weights.iter().zip(&weights))
                .map(|(rows, weight)| {
                    output_error(&error_of(rows, weight, &scale), moments, inputs)
                        * f64::from(u32::try_from(rows.len()).unwrap_or(u32::MAX))
                })
                .sum(),
        };
        if error < best.0 {
            best = (error, (step > 0).then_some(scale));
        }
    }
    best.1
}

/// What is wrong with each weight after its scale is taken off again.
fn error_of(rows: &[f32], weight: &QuantisedWeight, scale: &[f32]) -> Vec<f32> {
    let mut delta = weight.dequantise();
    for (delta, rows) in delta
        .chunks_exact_mut(scale.len())
        .zip(rows.chunks_exact(scale.len()))
    {
        for ((delta, row), scale) in delta.iter_mut().zip(rows).zip(scale) {
            *delta = *delta / scale - row;
        }
    }
    delta
}

/// The moments of the divided inputs.
fn divided(moments: &[f32], scale: &[f32]) -> Vec<f32> {
    moments
        .par_chunks_exact(scale.len())
        .zip(scale)
        .flat_map_iter(|(row, own)| {
            row.iter()
                .zip(scale)
                .map(move |(moment, scale)| moment / (own * scale))
        })
        .collect()
}

/// Rounds with the share of each group's range that leaves the least output error, given the errors of the row's other groups.
fn clipped(rows: &[f32], moments: &[f32], format: WeightFormat, grid: Grid) -> QuantisedWeight {
    let inputs = moments.len().isqrt();
    let group = format.group(inputs);
    let blocks: Vec<Affine> = rows
        .par_chunks_exact(inputs)
        .flat_map_iter(|row| Clipping::new(row, moments, group, grid).run())
        .collect();
    with_blocks(rows, inputs, format, &blocks)
}

/// The search of one row: group by group, the error of all others standing.
struct Clipping<'a> {
    row: &'a [f32],
    moments: &'a [f32],
    group: usize,
    grid: Grid,
    blocks: Vec<Affine>,
    /// The share that each block is made with.
    steps: Vec<u16>,
    /// What is wrong with each weight.
    delta: Vec<f32>,
    /// Half the gradient of the output error: the moments times `delta`.
    gradient: Vec<f32>,
}

impl<'a> Clipping<'a> {
    fn new(row: &'a [f32], moments: &'a [f32], group: usize, grid: Grid) -> Self {
        let blocks: Vec<Affine> = row
            .chunks(group)
            .map(|values| shrunk(grid, values, WHOLE))
            .collect();
        let delta: Vec<f32> = row
            .chunks(group)
            .zip(&blocks)
            .flat_map(|(values, block)| values.iter().map(|value| error(grid, *block, *value)))
            .collect();
        let gradient = moments
            .chunks_exact(row.len())
            .map(|moments| dot(moments, &delta))
            .collect();
        Self {
            row,
            moments,
            group,
            grid,
            steps: vec![WHOLE; blocks.len()],
            blocks,
            delta,
            gradient,
        }
    }

    fn run(mut self) -> Vec<Affine> {
        for sweep in 0..SWEEPS {
            let mut changed = false;
            for group in 0..self.blocks.len() {
                let tried = if sweep == 0 {
                    0..=RATIOS
                } else {
                    let step = self.steps[group];
                    step.saturating_sub(AROUND)..=RATIOS.min(step + AROUND)
                };
                changed |= self.improve(group, tried);
            }
            if !changed {
                break;
            }
        }
        self.blocks
    }

    /// Takes the best range of one group. Says whether that is another one than before.
    fn improve(&mut self, index: usize, tried: RangeInclusive<u16>) -> bool {
        let first = index * self.group;
        let end = self.row.len().min(first + self.group);
        let values = &self.row[first..end];
        let mut best: (f32, Option<(u16, Affine, Vec<f32>)>) = (0.0, None);
        for step in tried {
            let block = shrunk(self.grid, values, step);
            let change: Vec<f32> = values
                .iter()
                .zip(&self.delta[first..end])
                .map(|(value, delta)| error(self.grid, block, *value) - delta)
                .collect();
            // The output error grows by 2 g·c + c·M·c.
            let growth: f32 = change
                .iter()
                .enumerate()
                .map(|(offset, own)| {
                    let row = &self.moments[(first + offset) * self.row.len()..][first..end];
                    own * (2.0 * self.gradient[first + offset] + dot(row, &change))
                })
                .sum();
            if growth < best.0 {
                best = (growth, Some((step, block, change)));
            }
        }
        let (_, Some((step, block, change))) = best else {
            return false;
        };
        self.steps[index] = step;
        self.blocks[index] = block;
        for (offset, change) in change.iter().enumerate() {
            self.delta[first + offset] += change;
            let column = &self.moments[(first + offset) * self.row.len()..][..self.row.len()];
            self.gradient
                .iter_mut()
                .zip(column)
                .for_each(|(gradient, moment)| *gradient += change * moment);
        }
        true
    }
}

/// The grid over a share of the values' range.
fn shrunk(grid: Grid, values: &[f32], step: u16) -> Affine {
    let (low, high) = range(values);
    let ratio = 1.05 - 0.0125 * f32::from(step);
    grid.fit(low * ratio, high * ratio)
}

fn error(grid: Grid, block: Affine, value: f32) -> f32 {
    block.value(grid.code(value, block)) - value
}

/// Sixteen sums side by side in a fixed order.
fn dot(one: &[f32], two: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    let (ones, one_rest) = one.as_chunks::<16>();
    let (twos, two_rest) = two.as_chunks::<16>();
    for (one, two) in ones.iter().zip(twos) {
        for lane in 0..16 {
            sums[lane] += one[lane] * two[lane];
        }
    }
    let rest: f32 = one_rest.iter().zip(two_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::quantisers::tests::{error_of_scaled, example, loud};

    const BF16: ActivationFormat = ActivationFormat::Bf16;

    #[test]
    fn it_is_never_worse_than_rounding_to_nearest_and_much_better_with_outliers() {
        for (seed, outlier, bound) in [(3, 1.0, 1.0), (4, 50.0, 0.7)] {
            let (rows, statistics) = loud(24, 96, seed, outlier);
            let place = Place::alone(&rows, &statistics);
            for group in [Some(32), None] {
                let format = WeightFormat::Int4 {
                    group,
                    symmetric: true,
                };
                let plain = round_to_nearest(&rows, 96, format);
                let plain = error_of_scaled(&rows, &plain, None, &statistics);
                let (weights, scale) = quantise(&place, format, BF16, Awq::default());
                let error = error_of_scaled(&rows, &weights[0], scale.as_deref(), &statistics);
                assert!(
                    error <= bound * plain,
                    "outlier {outlier}, {group:?}: {error} of {plain}"
                );
            }
        }
    }

    #[test]
    fn scales_are_powers_of_two_so_that_moving_them_is_exact() {
        let (rows, statistics) = loud(24, 96, 5, 30.0);
        let format = WeightFormat::Int4 {
            group: None,
            symmetric: true,
        };
        let (_, scale) = quantise(
            &Place::alone(&rows, &statistics),
            format,
            BF16,
            Awq::default(),
        );
        let scale = scale.expect("an outlier is worth a scale");
        assert!(
            scale
                .iter()
                .all(|scale| scale.to_bits().trailing_zeros() >= 23)
        );
    }

    #[test]
    fn inputs_that_were_never_seen_do_no_harm() {
        let (rows, mut statistics) = example(8, 40, 3);
        statistics.sum_abs.fill(0.0);
        statistics.hessian.fill(0.0);
        let format = WeightFormat::Int4 {
            group: Some(32),
            symmetric: false,
        };
        let (weights, _) = quantise(
            &Place::alone(&rows, &statistics),
            format,
            BF16,
            Awq::default(),
        );
        weights[0].check("x").unwrap();
    }
}
