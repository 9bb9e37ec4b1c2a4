//! The quantisers: what each makes of the linears that read one input, given what is known of that input. Pure.
//!
//! `calibrate::quantise` feeds them layer by layer. All of them leave the precise weights alone: a scale that a quantiser moves from an input into
//! weights is a power of two, stands beside the weights, and can be folded into what comes before without any rounding.

pub mod awq;
pub mod cholesky;
pub mod gptq;
pub mod smoothquant;

use std::fmt;
use std::str::FromStr;

use self::awq::Awq;
use self::gptq::Gptq;
use super::statistics::Statistics;
use crate::quant::{
    ActivationFormat, QuantisedWeight, Scheme, WeightFormat, lut, round_to_nearest,
};
use crate::{Error, Result};

/// Which quantiser, with its settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantiser {
    /// Rounds to nearest; needs no data.
    Rtn,
    /// Evens activations out before rounding them.
    SmoothQuant,
    /// Makes up for each error in the columns that follow.
    Gptq(Gptq),
    /// Scales and clips by what activations say.
    Awq(Awq),
    /// Fits tables to weights, counted by sensitivity.
    Lut,
}

/// A scheme and how its weights are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// What is made.
    pub scheme: Scheme,
    /// How.
    pub quantiser: Quantiser,
}

/// Linears that read the same input.
#[derive(Debug)]
pub struct Place<'a> {
    /// Their names, for errors.
    pub names: Vec<&'a str>,
    /// `[out, in]` each.
    pub weights: Vec<&'a [f32]>,
    /// Of the input.
    pub statistics: &'a Statistics,
    /// Which inputs must share a scale for it to be movable.
    pub tied: Tied,
}

/// Inputs that come from the same earlier output: with grouped queries, a channel of v feeds several inputs of o.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tied {
    /// None.
    No,
    /// Input `(kv * group + g) * head_dim + c` for all `g` of a group.
    Heads {
        /// Query heads a KV head.
        group: usize,
        /// Channels of a head.
        head_dim: usize,
    },
}

impl<'a> Place<'a> {
    /// One linear with an input of its own.
    pub fn alone(weights: &'a [f32], statistics: &'a Statistics) -> Self {
        Self {
            names: vec!["linear"],
            weights: vec![weights],
            statistics,
            tied: Tied::No,
        }
    }
}

impl Quantiser {
    /// What makes a scheme best without being told.
    pub fn suiting(scheme: Scheme) -> Self {
        match (scheme.weights, scheme.activations) {
            (WeightFormat::Int4 { .. }, _) => Self::Gptq(Gptq::default()),
            (WeightFormat::Lut4, _) => Self::Lut,
            (WeightFormat::Int8, ActivationFormat::Int8) => Self::SmoothQuant,
            (WeightFormat::Int8 | WeightFormat::Fp8, _) => Self::Rtn,
        }
    }

    /// Whether it looks at activations.
    pub const fn needs_data(self) -> bool {
        !matches!(self, Self::Rtn)
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rtn => "rtn",
            Self::SmoothQuant => "smoothquant",
            Self::Gptq(_) => "gptq",
            Self::Awq(_) => "awq",
            Self::Lut => "lut",
        }
    }
}

impl FromStr for Quantiser {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "rtn" => Self::Rtn,
            "smoothquant" => Self::SmoothQuant,
            "gptq" => Self::Gptq(Gptq::default()),
            "awq" => Self::Awq(Awq::default()),
            "lut" => Self::Lut,
            _ => {
                return Err("not a quantiser: write rtn, smoothquant, gptq, awq or lut".into());
            }
        })
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.scheme, self.quantiser.name())
    }
}

impl Recipe {
    /// Refuses a quantiser that has nothing to do for the scheme.
    ///
    /// # Errors
    /// What to write instead.
    pub fn check(&self) -> Result<()> {
        let Self { scheme, quantiser } = self;
        let fits = match quantiser {
            Quantiser::Rtn => true,
            Quantiser::SmoothQuant => scheme.activations != ActivationFormat::Bf16,
            Quantiser::Gptq(_) | Quantiser::Awq(_) => scheme.weights.grid().is_some(),
            Quantiser::Lut => scheme.weights == WeightFormat::Lut4,
        };
        if fits {
            return Ok(());
        }
        let known = match quantiser {
            Quantiser::Rtn => "every scheme",
            Quantiser::SmoothQuant => "W8A8 and FP8, which round activations",
            Quantiser::Gptq(_) | Quantiser::Awq(_) => "W4A16, W8A16 and W8A8",
            Quantiser::Lut => "LUT4",
        };
        Err(Error::plan(format!(
            "the quantiser {} cannot make {scheme}: it makes {known}",
            quantiser.name()
        )))
    }

    /// Makes the weights of a place, and what its input is divided by.
    ///
    /// # Errors
    /// Statistics that are not finite.
    pub fn quantise(&self, place: &Place<'_>) -> Result<(Vec<QuantisedWeight>, Option<Vec<f32>>)> {
        let Scheme {
            weights: format,
            activations,
        } = self.scheme;
        let inputs = place.statistics.inputs;
        let each = place.weights.iter();
        Ok(match self.quantiser {
            Quantiser::Rtn => (
                each.map(|rows| round_to_nearest(rows, inputs, format))
                    .collect(),
                None,
            ),
            Quantiser::Lut => {
                let sensitivity = place.statistics.mean_squares();
                (
                    each.map(|rows| lut::fit(rows, inputs, &sensitivity))
                        .collect(),
                    None,
                )
            }
            Quantiser::Gptq(gptq) => {
                let weights = each
                    .zip(&place.names)
                    .map(|(rows, name)| gptq::quantise(name, rows, place.statistics, format, gptq));
                (weights.collect::<Result<_>>()?, None)
            }
            Quantiser::Awq(awq) => awq::quantise(place, format, activations, awq),
            Quantiser::SmoothQuant => smoothquant::quantise(place, format, activations),
        })
    }
}

/// Each column of the weights times the input's scale.
fn scaled(rows: &[f32], scale: Option<&[f32]>) -> Vec<f32> {
    let mut rows = rows.to_vec();
    if let Some(scale) = scale {
        for row in rows.chunks_exact_mut(scale.len()) {
            row.iter_mut().zip(scale).for_each(|(w, s)| *w *= s);
        }
    }
    rows
}

/// The nearest powers of two around a geometric mean of 1; inputs that are tied get one, of their geometric mean. What is not a positive number
/// gets 1.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "exponents between -20 and 20; a number of inputs is far below 2^53"
)]
fn powers_of_two(magnitudes: &[f64], tied: Tied) -> Vec<f32> {
    let mut logs: Vec<Option<f64>> = magnitudes
        .iter()
        .map(|magnitude| Some(magnitude.log2()).filter(|log| log.is_finite()))
        .collect();
    if let Tied::Heads { group, head_dim } = tied {
        for heads in logs.chunks_exact_mut(group * head_dim) {
            for channel in 0..head_dim {
                let tied: Vec<f64> = (0..group)
                    .filter_map(|g| heads[g * head_dim + channel])
                    .collect();
                let mean = tied.iter().sum::<f64>() / tied.len().max(1) as f64;
                for g in 0..group {
                    heads[g * head_dim + channel] = (!tied.is_empty()).then_some(mean);
                }
            }
        }
    }
    let known = logs.iter().flatten();
    let mean = known.clone().sum::<f64>() / known.count().max(1) as f64;
    logs.iter()
        .map(|log| {
            let exponent = log.map_or(0.0, |log| (log - mean).round_ties_even());
            2f32.powi(exponent.clamp(-20.0, 20.0) as i32)
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::calibrate::statistics::output_error;

    fn random(seed: u64) -> impl FnMut() -> f32 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            f32::from(u16::try_from(state >> 48).unwrap()) / 32768.0 - 1.0
        }
    }

    /// Weights `[out, inputs]` and the statistics of inputs that have much in common.
    pub(in crate::calibrate) fn example(
        out: usize,
        inputs: usize,
        seed: u64,
    ) -> (Vec<f32>, Statistics) {
        loud(out, inputs, seed, 1.0)
    }

    /// The same with one input `outlier` times as large as the others.
    pub(in crate::calibrate) fn loud(
        out: usize,
        inputs: usize,
        seed: u64,
        outlier: f32,
    ) -> (Vec<f32>, Statistics) {
        let mut next = random(seed);
        let rows = (0..out * inputs).map(|_| next() * next()).collect();
        let tokens = 4 * inputs;
        let mix: Vec<f32> = (0..inputs * 8).map(|_| next()).collect();
        let mut samples = Vec::with_capacity(tokens * inputs);
        for _ in 0..tokens {
            let common: Vec<f32> = (0..8).map(|_| next()).collect();
            for input in 0..inputs {
                let shared: f32 = common
                    .iter()
                    .zip(&mix[input * 8..])
                    .map(|(c, m)| c * m)
                    .sum();
                let factor = if input == inputs / 3 { outlier } else { 1.0 };
                samples.push((shared + 0.3 * next()) * factor);
            }
        }
        let mut statistics = Statistics::new(inputs);
        statistics.add(&samples, 4);
        (rows, statistics)
    }

    pub(in crate::calibrate) fn error_of(
        rows: &[f32],
        weight: &QuantisedWeight,
        statistics: &Statistics,
    ) -> f64 {
        error_of_scaled(rows, weight, None, statistics)
    }

    pub(in crate::calibrate) fn error_of_scaled(
        rows: &[f32],
        weight: &QuantisedWeight,
        scale: Option<&[f32]>,
        statistics: &Statistics,
    ) -> f64 {
        let mut delta = weight.dequantise();
        for (index, (delta, row)) in delta.iter_mut().zip(rows).enumerate() {
            *delta = *delta / scale.map_or(1.0, |scale| scale[index % scale.len()]) - row;
        }
        output_error(&delta, &statistics.moments(), statistics.inputs)
    }

    #[test]
    fn a_quantiser_that_cannot_make_the_scheme_is_refused_with_what_it_makes() {
        let check = |scheme: &str, quantiser: &str| {
            Recipe {
                scheme: scheme.parse().unwrap(),
                quantiser: quantiser.parse().unwrap(),
            }
            .check()
            .map_err(|error| error.message)
        };
        for (scheme, quantiser) in [
            ("W8A8", "rtn"),
            ("W8A8", "smoothquant"),
            ("W8A16", "gptq"),
            ("W4A16-g64", "awq"),
            ("W8A8", "awq"),
            ("LUT4", "lut"),
            ("FP8", "rtn"),
        ] {
            assert_eq!(check(scheme, quantiser), Ok(()));
        }
        for (scheme, quantiser, wanted) in [
            ("W4A16", "smoothquant", "cannot make W4A16: it makes W8A8"),
            ("FP8", "gptq", "it makes W4A16, W8A16"),
            ("FP8", "awq", "it makes W4A16, W8A16"),
            ("W8A8", "lut", "it makes LUT4"),
        ] {
            assert!(check(scheme, quantiser).unwrap_err().contains(wanted));
        }
        assert!(
            "GPTQ"
                .parse::<Quantiser>()
                .unwrap_err()
                .contains("write rtn")
        );
    }

    #[test]
    fn tied_inputs_share_a_scale_around_a_mean_of_one() {
        let tied = Tied::Heads {
            group: 2,
            head_dim: 2,
        };
        let magnitudes = [16.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 0.0];
        let scale = powers_of_two(&magnitudes, tied);
        for (one, two) in [(0, 2), (4, 6), (1, 3)] {
            assert_eq!(scale[one].to_bits(), scale[two].to_bits());
        }
        assert!(scale[0] > scale[4] && scale[4] >= scale[1]);
        assert_eq!(powers_of_two(&[0.0, f64::NAN], Tied::No), [1.0, 1.0]);
    }
}
