//! The nested integers of the KV cache: what 2, 4 and 8 bits of a channel mean.
//!
//! A group of up to 64 channels has one scale `s`, stored as F16. The planes are
//!
//! ```text
//! 4-bit plane   q = clamp(round(x / s), -8, 7)                     value s * q
//! refinement    r = clamp(round((x - s * q) * 16 / s), -8, 7)      value s * (q + r / 16)      (8 bits together)
//! 2-bit plane   q = clamp(floor(x / s), -2, 1)                     value s * (q + 1/2)         (a wider s of its own)
//! ```
//!
//! so that dropping the refinement of an 8-bit channel leaves exactly what 4 bits would have stored: precision is lost once, never rounded twice.
//! The 2-bit plane is the top of such a nest too: its cells are symmetric about 0, so it stands alone without the planes below.
#![expect(
    clippy::cast_possible_truncation,
    reason = "values are clamped before they become integers"
)]

use half::f16;

/// Channels that share a scale.
pub const GROUP: usize = 64;

/// Fractions of the largest magnitude tried as a 2-bit scale; the one with the smallest squared error is kept.
const INT2_SCALES: [f32; 6] = [0.30, 0.36, 0.42, 0.48, 0.56, 0.66];

fn largest(group: &[f32]) -> f32 {
    group
        .iter()
        .fold(0.0, |largest: f32, x| largest.max(x.abs()))
}

/// To the nearest F16 that is not infinite.
fn to_f16(scale: f32) -> f16 {
    f16::from_f32(scale.min(f16::MAX.to_f32()))
}

/// 1 / scale, 0 for a group of zeros (and of values that F16 cannot scale).
fn inverse(scale: f16) -> f32 {
    if scale > f16::ZERO {
        1.0 / scale.to_f32()
    } else {
        0.0
    }
}

/// The scale of the 4-bit plane.
pub fn int4_scale(group: &[f32]) -> f16 {
    to_f16(largest(group) / 7.0)
}

/// The 4-bit plane of one channel.
pub fn int4(x: f32, scale: f16) -> i8 {
    (x * inverse(scale)).round().clamp(-8.0, 7.0) as i8
}

/// The refinement of one channel whose 4-bit plane is `q`.
pub fn refinement(x: f32, q: i8, scale: f16) -> i8 {
    ((x - scale.to_f32() * f32::from(q)) * 16.0 * inverse(scale))
        .round()
        .clamp(-8.0, 7.0) as i8
}

/// The value of 4 bits.
pub fn int4_value(q: i8, scale: f32) -> f32 {
    scale * f32::from(q)
}

/// The value of 8 bits.
pub fn int8_value(q: i8, r: i8, scale: f32) -> f32 {
    scale * (f32::from(q) + f32::from(r) / 16.0)
}

/// The scale of the 2-bit plane: the candidate with the smallest squared error.
pub fn int2_scale(group: &[f32]) -> f16 {
    let largest = largest(group);
    let error = |scale: f16| -> f32 {
        group
            .iter()
            .map(|x| (x - int2_value(int2(*x, scale), scale.to_f32())).powi(2))
            .sum()
    };
    let candidates = INT2_SCALES.map(|fraction| to_f16(largest * fraction));
    let best = candidates
        .into_iter()
        .min_by(|a, b| error(*a).total_cmp(&error(*b)));
    best.expect("there are candidates")
}

/// The 2-bit plane of one channel.
pub fn int2(x: f32, scale: f16) -> i8 {
    (x * inverse(scale)).floor().clamp(-2.0, 1.0) as i8
}

/// The value of 2 bits.
pub fn int2_value(q: i8, scale: f32) -> f32 {
    scale * (f32::from(q) + 0.5)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn group() -> impl Strategy<Value = Vec<f32>> {
        (
            1e-3_f32..1e3,
            proptest::collection::vec(-1.0_f32..1.0, 1..=GROUP),
        )
            .prop_map(|(size, values)| values.into_iter().map(|value| value * size).collect())
    }

    proptest! {
        #[test]
        fn four_bits_are_within_half_a_step(group in group()) {
            let scale = int4_scale(&group);
            for x in &group {
                let error = (int4_value(int4(*x, scale), scale.to_f32()) - x).abs();
                prop_assert!(error <= scale.to_f32() * 0.501, "{x}: {error}, step {scale}");
            }
        }

        #[test]
        fn eight_bits_are_within_a_sixteenth_of_a_step(group in group()) {
            let scale = int4_scale(&group);
            for x in &group {
                let q = int4(*x, scale);
                let error = (int8_value(q, refinement(*x, q, scale), scale.to_f32()) - x).abs();
                prop_assert!(error <= scale.to_f32() / 16.0 * 1.01, "{x}: {error}, step {scale}");
            }
        }

        #[test]
        fn dropping_the_refinement_leaves_what_four_bits_store(group in group()) {
            // The refinement is made after the 4-bit plane and does not touch it: 8-bit storage holds the same `q` as 4-bit storage.
            let scale = int4_scale(&group);
            for x in &group {
                let q = int4(*x, scale);
                let (coarse, fine) = (int4_value(q, scale.to_f32()), int8_value(q, refinement(*x, q, scale), scale.to_f32()));
                prop_assert!((coarse - x).abs() + 1e-6 * scale.to_f32() >= (fine - x).abs() || (fine - x).abs() <= scale.to_f32() / 16.0);
            }
        }

        #[test]
        fn two_bits_are_within_a_step_and_a_half(group in group()) {
            let scale = int2_scale(&group);
            let bound = largest(&group);
            for x in &group {
                let error = (int2_value(int2(*x, scale), scale.to_f32()) - x).abs();
                prop_assert!(error <= bound, "{x}: {error}");
            }
        }
    }

    #[test]
    fn groups_of_zeros_and_of_unscalable_values_stay_finite() {
        for value in [0.0, 1e-30, 3e38, f32::INFINITY, f32::NAN] {
            let group = [value, 0.0];
            let scale = int4_scale(&group);
            let q = int4(value, scale);
            assert!(
                int8_value(q, refinement(value, q, scale), scale.to_f32()).is_finite(),
                "{value}"
            );
            let scale = int2_scale(&group);
            assert!(
                int2_value(int2(value, scale), scale.to_f32()).is_finite(),
                "{value}"
            );
        }
    }
}
