//! The quantised copy of a model's block linears as calibration makes it and an artifact stores it.
//!
//! The model packs it for its kernels when it is attached. The precise weights are never touched: what a quantiser moves from activations into
//! weights stands beside the weights as `input_scale`.

use super::round::round_to_nearest;
use super::scheme::WeightFormat;
use super::weight::QuantisedWeight;
use crate::{Error, Result};

/// One linear: `y = W · (x / input_scale)`, `W` being the quantised weights.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantisedLinear {
    /// The checkpoint's own name without `.weight`, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// `[out_features, in_features]`.
    pub weight: QuantisedWeight,
    /// What each input is divided by before it is rounded (`SmoothQuant`, AWQ); finite and greater than 0. Linears that read the same input
    /// (q, k, v; gate, up) have the same one.
    pub input_scale: Option<Vec<f32>>,
}

/// All block linears of a model (q, k, v, o, gate, up, down of each layer), in the model's order.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantisedLinears(Vec<QuantisedLinear>);

impl QuantisedLinear {
    /// Rounds a row-major `[out_features, in_features]` matrix to the nearest symmetric INT8, one scale a row.
    pub fn from_rows(name: String, rows: &[f32], out_features: usize, in_features: usize) -> Self {
        assert_eq!(
            rows.len(),
            out_features * in_features,
            "{name}: the matrix must be whole"
        );
        Self {
            name,
            weight: round_to_nearest(rows, in_features, WeightFormat::Int8),
            input_scale: None,
        }
    }

    /// The weights that this linear stands for, for inputs as they are: `[out_features, in_features]`.
    pub fn effective(&self) -> Vec<f32> {
        let mut rows = self.weight.dequantise();
        if let Some(scale) = &self.input_scale {
            for row in rows.chunks_exact_mut(scale.len()) {
                row.iter_mut().zip(scale).for_each(|(w, s)| *w /= s);
            }
        }
        rows
    }

    /// The first thing that is wrong with this tensor, if any.
    fn check(&self) -> Result<()> {
        let Self {
            name,
            weight,
            input_scale,
        } = self;
        weight
            .check(name)
            .map_err(|error| Error::artifact(error.message))?;
        if let Some(row) = weight.scales.iter().position(|scale| *scale <= 0.0) {
            return Err(Error::artifact(format!(
                "{name}: the scale of row {row} is {}, a scale is a finite number above 0: calibrate again",
                weight.scales[row]
            )));
        }
        let Some(scale) = input_scale else {
            return Ok(());
        };
        if scale.len() != weight.in_features
            || !scale.iter().all(|scale| scale.is_finite() && *scale > 0.0)
        {
            return Err(Error::artifact(format!(
                "{name}: its input scale is not one finite number above 0 for each of {} inputs: calibrate again",
                weight.in_features
            )));
        }
        Ok(())
    }
}

impl QuantisedLinears {
    /// Takes tensors that came from a file. Shapes against a model are checked when they are attached to it.
    ///
    /// # Errors
    /// A tensor whose data does not fit its shape, or with a scale that is not a finite number above 0.
    pub fn from_tensors(linears: Vec<QuantisedLinear>) -> Result<Self> {
        linears.iter().try_for_each(QuantisedLinear::check)?;
        Ok(Self(linears))
    }

    /// No copy.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Whether there is no copy.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The linears in the model's order.
    pub fn iter(&self) -> std::slice::Iter<'_, QuantisedLinear> {
        self.0.iter()
    }

    /// Gives the tensors up.
    pub fn into_tensors(self) -> Vec<QuantisedLinear> {
        self.0
    }
}

impl<'a> IntoIterator for &'a QuantisedLinears {
    type Item = &'a QuantisedLinear;
    type IntoIter = std::slice::Iter<'a, QuantisedLinear>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_weight_is_read_back_within_half_a_step(rows in proptest::collection::vec(-8.0_f32..8.0, 24)) {
            let linear = QuantisedLinear::from_rows("x".into(), &rows, 4, 6);
            for (index, value) in rows.iter().enumerate() {
                let scale = linear.weight.scales[index / 6];
                let read = linear.weight.code(index / 6, index % 6) * scale;
                prop_assert!((read - value).abs() <= scale * 0.5001, "{value} was read back as {read}");
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero_with_a_usable_scale() {
        let linear = QuantisedLinear::from_rows("x".into(), &[0.0; 6], 2, 3);
        assert_eq!(linear.effective(), [0.0; 6]);
        assert!(QuantisedLinears::from_tensors(vec![linear]).is_ok());
    }

    #[test]
    fn damaged_tensors_are_refused_by_name() {
        let good = QuantisedLinear::from_rows("layer.q".into(), &[1.0; 6], 2, 3);
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let mut bad = good.clone();
            bad.weight.scales[1] = scale;
            let error = QuantisedLinears::from_tensors(vec![bad]).unwrap_err();
            assert!(
                error.message.contains("layer.q") && error.message.contains("scale"),
                "{error}"
            );
            let bad = QuantisedLinear {
                input_scale: Some(vec![1.0, scale, 1.0]),
                ..good.clone()
            };
            let error = QuantisedLinears::from_tensors(vec![bad]).unwrap_err();
            assert!(error.message.contains("input scale"), "{error}");
        }
        let mut short = good;
        short.weight.scales.pop();
        assert!(
            QuantisedLinears::from_tensors(vec![short])
                .unwrap_err()
                .message
                .contains("1 scales")
        );
    }
}
