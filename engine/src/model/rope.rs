//! Rotary positions: the angles of each position, with the scalings of the Llama family.

use super::config::{RopeParameters, RopeScaling};

/// `[head_dim / 2]` angles a position step, as Hugging Face computes them (in FP32).
#[derive(Debug)]
pub(super) struct Rope {
    frequencies: Vec<f32>,
}

impl Rope {
    pub(super) fn new(parameters: &RopeParameters, head_dim: usize) -> Self {
        let frequencies = (0..head_dim / 2)
            .map(|pair| {
                let plain = frequency(parameters.theta, pair, head_dim);
                scale(plain, pair, &parameters.scaling)
            })
            .collect();
        Self { frequencies }
    }

    /// Writes the cosines and sines of one position.
    #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
    pub(super) fn angles(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
            (*sin, *cos) = (position as f32 * frequency).sin_cos();
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "small sizes; the reference keeps frequencies in FP32"
)]
fn frequency(theta: f64, pair: usize, head_dim: usize) -> f32 {
    (1.0 / theta.powf(2.0 * pair as f64 / head_dim as f64)) as f32
}

/// Formulas: `transformers/modeling_rope_utils.py`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the reference keeps frequencies in FP32"
)]
fn scale(frequency: f32, pair: usize, scaling: &RopeScaling) -> f32 {
    let plain = f64::from(frequency);
    let scaled = match *scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Factors(ref factors) => plain / f64::from(factors[pair]),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let turns = original_max_position_embeddings * plain / std::f64::consts::TAU;
            if turns < low_freq_factor {
                plain / factor
            } else if turns > high_freq_factor {
                plain
            } else {
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * plain / factor + smooth * plain
            }
        }
    };
    scaled as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_scaling_stretches_every_angle() {
        assert!((scale(0.5, 0, &RopeScaling::Linear { factor: 4.0 }) - 0.125).abs() < 1e-9);
    }

    #[test]
    fn factors_divide_each_pair_by_its_own() {
        let factors = RopeScaling::Factors(vec![1.0, 4.0]);
        assert!((scale(0.5, 0, &factors) - 0.5).abs() < 1e-9);
        assert!((scale(0.5, 1, &factors) - 0.125).abs() < 1e-9);
    }

    #[test]
    fn llama3_scaling_keeps_high_and_stretches_low_frequencies() {
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        // 8192 / (2 pi / f) turns: 1303.8 at f = 1 (kept), 0.13 at f = 1e-4 (divided), 2 at f = 0.001534 (one third of the way).
        assert!((scale(1.0, 0, &llama3) - 1.0).abs() < 1e-7);
        assert!((scale(1e-4, 0, &llama3) - 1.25e-5).abs() < 1e-10);
        let f = 2.0 * std::f32::consts::TAU / 8192.0;
        let expected = f * (2.0 / 3.0 / 8.0 + 1.0 / 3.0);
        assert!((scale(f, 0, &llama3) - expected).abs() < 1e-8);
    }
}
