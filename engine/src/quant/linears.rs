//! The W8A8 copy of a model's block linears as calibration makes it and an artifact stores it.
//!
//! Symmetric INT8, one FP32 scale an output channel, rounded to nearest. The model repacks it for its kernels when it is attached.

use crate::{Error, Result};

/// The largest stored magnitude: -128 is never used, so that a negated weight is representable too.
const INT8_MAX: f32 = 127.0;

/// One linear as symmetric INT8: `w[o][i] = weight[o * in_features + i] * scale[o]`.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantisedLinear {
    /// The checkpoint's own name without `.weight`, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// `[out_features, in_features]`, row-major.
    pub weight: Vec<i8>,
    /// `[out_features]`, finite and greater than 0.
    pub scale: Vec<f32>,
}

/// All block linears of a model (q, k, v, o, gate, up, down of each layer), in the model's order.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantisedLinears(Vec<QuantisedLinear>);

impl QuantisedLinear {
    /// Rounds a row-major `[out_features, in_features]` matrix to nearest, one scale a row.
    pub fn from_rows(name: String, rows: &[f32], out_features: usize, in_features: usize) -> Self {
        assert_eq!(
            rows.len(),
            out_features * in_features,
            "{name}: the matrix must be whole"
        );
        let mut weight = Vec::with_capacity(rows.len());
        let mut scale = Vec::with_capacity(out_features);
        for row in rows.chunks_exact(in_features) {
            let largest = row
                .iter()
                .fold(0.0_f32, |largest, value| largest.max(value.abs()));
            // A row of zeros keeps scale 1: any scale reads back zeros, and 0 would look like damage.
            let row_scale = if largest > 0.0 {
                largest / INT8_MAX
            } else {
                1.0
            };
            scale.push(row_scale);
            weight.extend(row.iter().map(|value| round_to_int8(value / row_scale)));
        }
        Self {
            name,
            out_features,
            in_features,
            weight,
            scale,
        }
    }

    /// The first thing that is wrong with this tensor, if any.
    fn check(&self) -> Result<()> {
        let Self {
            name,
            out_features,
            in_features,
            weight,
            scale,
        } = self;
        if out_features.checked_mul(*in_features) != Some(weight.len())
            || scale.len() != *out_features
        {
            return Err(Error::artifact(format!(
                "{name}: {} weights and {} scales do not fit the shape [{out_features}, {in_features}]: calibrate again",
                weight.len(),
                scale.len()
            )));
        }
        match scale.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
            Some(row) => Err(Error::artifact(format!(
                "{name}: the scale of row {row} is {}, a scale is a finite number above 0: calibrate again",
                scale[row]
            ))),
            None => Ok(()),
        }
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

/// Half away from zero, saturating at ±127; NaN becomes 0.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the value is clamped to ±127 first"
)]
fn round_to_int8(value: f32) -> i8 {
    value.round().clamp(-INT8_MAX, INT8_MAX) as i8
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
                let scale = linear.scale[index / 6];
                let read = f32::from(linear.weight[index]) * scale;
                prop_assert!((read - value).abs() <= scale * 0.5001, "{value} was read back as {read}");
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero_with_a_usable_scale() {
        let linear = QuantisedLinear::from_rows("x".into(), &[0.0; 6], 2, 3);
        assert_eq!(linear.weight, [0; 6]);
        assert!(QuantisedLinears::from_tensors(vec![linear]).is_ok());
    }

    #[test]
    fn damaged_tensors_are_refused_by_name() {
        let good = QuantisedLinear::from_rows("layer.q".into(), &[1.0; 6], 2, 3);
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let mut bad = good.clone();
            bad.scale[1] = scale;
            let error = QuantisedLinears::from_tensors(vec![bad]).unwrap_err();
            assert!(
                error.message.contains("layer.q") && error.message.contains("row 1"),
                "{error}"
            );
        }
        let mut short = good;
        short.weight.pop();
        assert!(
            QuantisedLinears::from_tensors(vec![short])
                .unwrap_err()
                .message
                .contains("shape [2, 3]")
        );
    }
}
