//! `SmoothQuant` (arXiv 2211.10438): large inputs are divided by a scale that their weights are multiplied with, so that both round well.
//!
//! `s_j = max|x_j|^α / max|w_j|^(1-α)`; the α of each place is the one whose rounded product misses some real outputs least. No scale at all is
//! among the candidates.

use rayon::prelude::*;

use super::{Place, powers_of_two, scaled};
use crate::kernels::{Matrix, Values, detect};
use crate::quant::round::round_to_nearest;
use crate::quant::{ActivationFormat, QuantisedWeight, WeightFormat};

/// The exponents that are tried, in tenths.
const TENTHS: std::ops::RangeInclusive<u8> = 2..=9;
const ROWS: usize = 16;

/// Quantises linears that read the same input. Returns them and what the input is divided by, nothing when no division helps.
pub fn quantise(
    place: &Place<'_>,
    format: WeightFormat,
    activations: ActivationFormat,
) -> (Vec<QuantisedWeight>, Option<Vec<f32>>) {
    let inputs = place.statistics.inputs;
    let outputs = Outputs::new(place, activations);
    let mut best = (f64::INFINITY, Vec::new(), None);
    let candidates = std::iter::once(None).chain(TENTHS.map(|tenths| {
        let exponent = f64::from(tenths) / 10.0;
        Some(powers_of_two(&migration(place, exponent), place.tied))
    }));
    for scale in candidates {
        let weights: Vec<QuantisedWeight> = place
            .weights
            .iter()
            .map(|rows| round_to_nearest(&scaled(rows, scale.as_deref()), inputs, format))
            .collect();
        let error = outputs.missed(&weights, scale.as_deref());
        if error < best.0 {
            best = (error, weights, scale);
        }
    }
    if best.1.is_empty() {
        // Errors that are not numbers compare as never smaller: the weights are damaged, and rounding shows it best.
        let weights = place.weights.iter();
        best.1 = weights
            .map(|rows| round_to_nearest(rows, inputs, format))
            .collect();
    }
    (best.1, best.2)
}

/// Some real outputs of a place's linears, to measure by how much a candidate misses them when activations are rounded too.
pub(super) struct Outputs<'a> {
    samples: &'a [f32],
    inputs: usize,
    activations: ActivationFormat,
    /// Of each linear, `[samples, out]`.
    wanted: Vec<Vec<f32>>,
}

impl<'a> Outputs<'a> {
    pub(super) fn new(place: &Place<'a>, activations: ActivationFormat) -> Self {
        let (samples, inputs) = (&place.statistics.samples, place.statistics.inputs);
        let weights = place.weights.iter();
        Self {
            samples,
            inputs,
            activations,
            wanted: weights.map(|rows| product(samples, rows, inputs)).collect(),
        }
    }

    /// The squared distance of what the weights give for inputs that are divided by the scale and rounded.
    pub(super) fn missed(&self, weights: &[QuantisedWeight], scale: Option<&[f32]>) -> f64 {
        let mut samples = self.samples.to_vec();
        if let Some(scale) = scale {
            for row in samples.chunks_exact_mut(self.inputs) {
                row.iter_mut().zip(scale).for_each(|(x, s)| *x /= s);
            }
        }
        self.activations.round(&mut samples, self.inputs);
        let linears = weights.iter().zip(&self.wanted);
        linears
            .map(|(weight, wanted)| {
                distance(
                    &product(&samples, &weight.dequantise(), self.inputs),
                    wanted,
                )
            })
            .sum()
    }
}

/// `max|x|^α / max|w|^(1-α)` of each input.
fn migration(place: &Place<'_>, exponent: f64) -> Vec<f64> {
    let inputs = place.statistics.inputs;
    let mut largest = vec![0.0_f32; inputs];
    for row in place
        .weights
        .iter()
        .flat_map(|rows| rows.chunks_exact(inputs))
    {
        largest
            .iter_mut()
            .zip(row)
            .for_each(|(largest, weight)| *largest = largest.max(weight.abs()));
    }
    let smallest = 1e-5;
    largest
        .iter()
        .zip(&place.statistics.max_abs)
        .map(|(weight, input)| {
            f64::from(*input).max(smallest).powf(exponent)
                / f64::from(*weight).max(smallest).powf(1.0 - exponent)
        })
        .collect()
}

/// `x · wᵀ`.
fn product(x: &[f32], weights: &[f32], inputs: usize) -> Vec<f32> {
    let matrix = Matrix {
        values: Values::F32(weights),
        rows: weights.len() / inputs,
        columns: inputs,
    };
    let backend = detect();
    let mut result = vec![0.0; x.len() / inputs * matrix.rows];
    result
        .par_chunks_mut(ROWS * matrix.rows)
        .zip(x.par_chunks(ROWS * inputs))
        .for_each(|(result, x)| backend.matmul(x, matrix, matrix.rows, result));
    result
}

fn distance(one: &[f32], two: &[f32]) -> f64 {
    one.iter()
        .zip(two)
        .map(|(one, two)| f64::from(one - two).powi(2))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::quantisers::tests::loud;

    fn error(
        rows: &[f32],
        samples: &[f32],
        weight: &QuantisedWeight,
        scale: Option<&[f32]>,
    ) -> f64 {
        let inputs = weight.in_features;
        let wanted = product(samples, rows, inputs);
        let mut samples = samples.to_vec();
        if let Some(scale) = scale {
            for row in samples.chunks_exact_mut(inputs) {
                row.iter_mut().zip(scale).for_each(|(x, s)| *x /= s);
            }
        }
        ActivationFormat::Int8.round(&mut samples, inputs);
        distance(&product(&samples, &weight.dequantise(), inputs), &wanted)
    }

    #[test]
    fn an_outlier_channel_costs_plain_w8a8_much_and_smoothed_w8a8_little() {
        let quiet = loud(24, 96, 9, 1.0);
        let plain = round_to_nearest(&quiet.0, 96, WeightFormat::Int8);
        let reference = error(&quiet.0, &quiet.1.samples, &plain, None);
        let (mut rows, statistics) = loud(24, 96, 9, 200.0);
        // The same function: what the input gained its weights lose.
        rows.iter_mut()
            .skip(96 / 3)
            .step_by(96)
            .for_each(|weight| *weight /= 200.0);
        let plain = round_to_nearest(&rows, 96, WeightFormat::Int8);
        let plain = error(&rows, &statistics.samples, &plain, None);
        let place = Place::alone(&rows, &statistics);
        let (weights, scale) = quantise(&place, WeightFormat::Int8, ActivationFormat::Int8);
        let smoothed = error(&rows, &statistics.samples, &weights[0], scale.as_deref());
        assert!(plain > 50.0 * reference, "{plain} of {reference}");
        assert!(smoothed < 8.0 * reference, "{smoothed} of {reference}");
    }

    #[test]
    fn weights_that_are_not_numbers_end_in_a_result() {
        let (mut rows, statistics) = loud(4, 32, 9, 1.0);
        rows[3] = f32::NAN;
        let place = Place::alone(&rows, &statistics);
        let (weights, scale) = quantise(&place, WeightFormat::Int8, ActivationFormat::Int8);
        assert_eq!((weights.len(), scale), (1, None));
    }
}
