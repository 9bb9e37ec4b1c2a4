//! `ranges.json`: what calibration saw, and the [`Tap`] that gathers it. Written by `calibrate`, checked when an artifact is attached.

use std::collections::BTreeMap;

use mixquant_crds::report::{PROMPT_LENGTHS, prompt_length};
use serde::{Deserialize, Serialize};

use super::{INPUTS, largest_of_inputs, largest_of_keys, largest_of_values};
use crate::error::{Error, Result};
use crate::model::{LinearInput, Tap};

/// The share of calibration's rows that lies within a range. Not all: the largest of all rows is a matter of chance, and one freak would
/// hide everything. Texts like those of calibration lie beyond it in one row of a thousand.
pub const QUANTILE: f64 = 0.999;

/// What calibration saw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ranges {
    /// `[layer]`, in the order of [`INPUTS`]: the [`QUANTILE`] of the rows' largest magnitudes.
    pub inputs: Vec<[f32; 4]>,
    /// `[layer][kv_head]`, of keys as the cache stores them: rotated.
    pub keys: Vec<Vec<f32>>,
    /// `[layer][kv_head]`.
    pub values: Vec<Vec<f32>>,
    /// The texts by their tokens, in the lengths of [`PROMPT_LENGTHS`] and one count more for longer ones.
    pub prompt_lengths: Vec<u64>,
}

impl Ranges {
    /// Checks that the ranges fit a model of this shape.
    ///
    /// # Errors
    /// Another shape, or a range that is negative or not finite.
    pub fn check(&self, layers: usize, kv_heads: usize) -> Result<()> {
        let heads =
            |of: &[Vec<f32>]| of.len() == layers && of.iter().all(|heads| heads.len() == kv_heads);
        if self.inputs.len() != layers
            || !heads(&self.keys)
            || !heads(&self.values)
            || self.prompt_lengths.len() != PROMPT_LENGTHS.len() + 1
        {
            return Err(Error::artifact(format!(
                "ranges.json is for another shape than {layers} layers of {kv_heads} KV heads: calibrate this model"
            )));
        }
        let heads = self.keys.iter().chain(&self.values).flatten();
        let mut all = self.inputs.iter().flatten().chain(heads);
        match all.find(|range| !(range.is_finite() && **range >= 0.0)) {
            Some(range) => Err(Error::artifact(format!(
                "ranges.json has the range {range}, which is no finite number of at least 0: calibrate again"
            ))),
            None => Ok(()),
        }
    }
}

/// Magnitudes by their upper 16 bits: a range is at most 0.8 % above the magnitude that it stands for, and takes no memory a row.
#[derive(Debug, Clone, Default)]
struct Magnitudes(BTreeMap<u32, u64>);

impl Magnitudes {
    fn add(&mut self, magnitude: f32) {
        *self.0.entry(magnitude.to_bits() >> 16).or_default() += 1;
    }

    /// The upper end of the bin that [`QUANTILE`] falls into; 0 of nothing.
    #[expect(clippy::cast_precision_loss, reason = "rows are far fewer than 2^53")]
    fn range(&self) -> f32 {
        let wanted = QUANTILE * self.0.values().sum::<u64>() as f64;
        let mut seen = 0;
        for (bin, count) in &self.0 {
            seen += count;
            if seen as f64 >= wanted {
                return f32::from_bits((bin + 1) << 16);
            }
        }
        0.0
    }
}

/// Gathers what calibration sees. Each forward must be one whole text.
#[derive(Debug)]
pub struct Seen {
    kv_heads: usize,
    inputs: Vec<[Magnitudes; 4]>,
    keys: Vec<Vec<Magnitudes>>,
    values: Vec<Vec<Magnitudes>>,
    prompt_lengths: Vec<u64>,
}

impl Seen {
    /// Of nothing yet, for a model of so many layers and KV heads.
    pub fn new(layers: usize, kv_heads: usize) -> Self {
        let heads = vec![vec![Magnitudes::default(); kv_heads]; layers];
        Self {
            kv_heads,
            inputs: vec![Default::default(); layers],
            keys: heads.clone(),
            values: heads,
            prompt_lengths: vec![0; PROMPT_LENGTHS.len() + 1],
        }
    }

    /// A text of so many tokens is read next.
    pub fn text(&mut self, tokens: usize) {
        self.prompt_lengths[prompt_length(tokens)] += 1;
    }

    /// What was seen.
    ///
    /// # Errors
    /// Activations that are no finite numbers.
    pub fn ranges(&self) -> Result<Ranges> {
        let heads = |of: &[Vec<Magnitudes>]| {
            let layers = of.iter();
            layers
                .map(|heads| heads.iter().map(Magnitudes::range).collect())
                .collect()
        };
        let ranges = Ranges {
            inputs: self
                .inputs
                .iter()
                .map(|places| places.each_ref().map(Magnitudes::range))
                .collect(),
            keys: heads(&self.keys),
            values: heads(&self.values),
            prompt_lengths: self.prompt_lengths.clone(),
        };
        ranges
            .check(self.inputs.len(), self.kv_heads)
            .map_err(|_| {
                Error::model(
                    "activations over the calibration texts are not finite: the model's weights are damaged",
                )
            })?;
        Ok(ranges)
    }
}

impl Tap for Seen {
    fn watches_attention(&self) -> bool {
        false
    }

    fn linear_input(&mut self, layer: usize, input: LinearInput, rows: &[f32], columns: usize) {
        if let Some(place) = INPUTS.iter().position(|own| *own == input) {
            let magnitudes = &mut self.inputs[layer][place];
            for magnitude in largest_of_inputs(rows, columns) {
                magnitudes.add(magnitude);
            }
        }
    }

    fn keys_and_values(&mut self, layer: usize, keys: &[f32], values: &[f32], width: usize) {
        let heads = self.kv_heads;
        for (magnitudes, largest) in [
            (&mut self.keys, largest_of_keys(keys, heads, width)),
            (&mut self.values, largest_of_values(values, heads, width)),
        ] {
            for (index, magnitude) in largest.into_iter().enumerate() {
                magnitudes[layer][index % heads].add(magnitude);
            }
        }
    }
}
