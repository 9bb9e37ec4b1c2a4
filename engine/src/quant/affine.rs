//! Affine quantisation: `x ≈ scale * (code - zero)`, and the one place that decides scale and zero of a range of values.
//!
//! Formulas and bounds are in `docs/quantisation.md`; the properties below check them. What shares a scale (tensor, channel, group, token,
//! block) is the caller's choice: it hands over the values that share one. Called by the quantisers and by simulated activations.

use half::bf16;

/// The integers of a grid and what scales it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// The smallest code.
    pub low: i32,
    /// The largest code.
    pub high: i32,
    /// Whether the zero is fixed (symmetric) or fitted to the range.
    pub symmetric: bool,
    /// Whether scales are BF16 values, so that 16-bit file formats hold them exactly; otherwise FP32.
    pub short_scales: bool,
}

/// One range's step and zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Affine {
    /// The size of a step; finite and above 0.
    pub scale: f32,
    /// The code of 0; a whole number inside the grid.
    pub zero: f32,
}

impl Grid {
    /// -127 to 127 around 0: -128 is left out so that a negated weight is representable too.
    pub const INT8: Self = Self {
        low: -127,
        high: 127,
        symmetric: true,
        short_scales: true,
    };
    /// The same for activations, whose scales never reach a file.
    pub const INT8_ACTIVATIONS: Self = Self {
        short_scales: false,
        ..Self::INT8
    };
    /// 0 to 15 around 8.
    pub const INT4: Self = Self {
        low: 0,
        high: 15,
        symmetric: true,
        short_scales: true,
    };
    /// 0 to 15 around a fitted zero.
    pub const INT4_ASYMMETRIC: Self = Self {
        low: 0,
        high: 15,
        symmetric: false,
        short_scales: true,
    };

    /// The code of 0 where it is fixed.
    #[expect(clippy::cast_precision_loss, reason = "grids have at most 256 codes")]
    pub const fn symmetric_zero(self) -> f32 {
        ((self.low + self.high + 1) / 2) as f32
    }

    /// The smallest step whose grid spans `[low, high]`, 0 included: every value in the range is then read back within half a step.
    #[expect(clippy::cast_precision_loss, reason = "grids have at most 256 codes")]
    pub fn fit(self, low: f32, high: f32) -> Affine {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let scale = if self.symmetric {
            // With an even number of codes, half a step beyond the outer ones still rounds to them within half a step.
            let (zero, half) = (self.symmetric_zero(), self.codes_are_even());
            (-low / (zero - self.low as f32 + half)).max(high / (self.high as f32 - zero + half))
        } else {
            (high - low) / (self.high - self.low) as f32
        };
        let scale = self.representable(scale);
        let zero = if self.symmetric {
            self.symmetric_zero()
        } else {
            (self.low as f32 - low / scale)
                .round_ties_even()
                .clamp(self.low as f32, self.high as f32)
        };
        Affine { scale, zero }
    }

    /// Half a step for grids that cannot be centred on their zero.
    const fn codes_are_even(self) -> f32 {
        if (self.high - self.low) % 2 == 1 {
            0.5
        } else {
            0.0
        }
    }

    /// The smallest usable scale that is not below `scale`. A range of zeros gets 1: any scale reads back zeros, and 0 would look like damage.
    fn representable(self, scale: f32) -> f32 {
        if scale <= 0.0 {
            1.0
        } else if self.short_scales {
            short_scale(scale)
        } else {
            scale.max(f32::MIN_POSITIVE)
        }
    }

    /// The nearest code, ties to even, saturating; NaN becomes the zero. Only comparisons and additions, which the compiler turns into
    /// operations on whole registers: every weight of a model comes by here while it loads.
    #[expect(clippy::cast_precision_loss, reason = "grids have at most 256 codes")]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the value is clamped to the grid first, and a grid's codes fit a byte"
    )]
    #[inline]
    pub fn code(self, value: f32, affine: Affine) -> i8 {
        /// 1.5 * 2^23: added to a small number, it leaves the nearest integer, ties to even, in the low bits.
        const ROUND: f32 = 12_582_912.0;
        // The zero is a whole number in the grid, so clamping before rounding changes no code.
        let (low, high) = (
            self.low as f32 - affine.zero,
            self.high as f32 - affine.zero,
        );
        let steps = value / affine.scale;
        let steps = if steps < low { low } else { steps };
        let steps = if steps > high { high } else { steps };
        let steps = if steps.is_nan() { 0.0 } else { steps };
        let whole = (steps + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
        whole.wrapping_add((affine.zero as i32).cast_unsigned()) as i8
    }

    /// The codes of values that share a scale.
    pub fn codes(self, values: &[f32], affine: Affine, dst: &mut [i8]) {
        assert_eq!(values.len(), dst.len(), "a value has one code");
        for (dst, value) in dst.iter_mut().zip(values) {
            *dst = self.code(*value, affine);
        }
    }
}

impl Affine {
    /// What a code stands for.
    pub fn value(self, code: i8) -> f32 {
        self.scale * (f32::from(code) - self.zero)
    }
}

/// The smallest BF16 value that is not below `scale` and that FP16 holds exactly too.
pub fn short_scale(scale: f32) -> f32 {
    let short = bf16::from_f32(scale);
    let up = if short.to_f32() < scale {
        bf16::from_bits(short.to_bits() + 1)
    } else {
        short
    };
    up.to_f32().max(2f32.powi(-14))
}

/// The smallest and largest of some values and 0; NaN is ignored.
pub fn range(values: &[f32]) -> (f32, f32) {
    /// Running ranges side by side: one alone would wait for itself at every value.
    const LANES: usize = 16;
    let (mut low, mut high) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let (whole, rest) = values.as_chunks::<LANES>();
    for values in whole {
        for lane in 0..LANES {
            let value = values[lane];
            low[lane] = if value < low[lane] { value } else { low[lane] };
            high[lane] = if value > high[lane] {
                value
            } else {
                high[lane]
            };
        }
    }
    let all = |lanes: [f32; LANES], join: fn(f32, f32) -> f32| {
        lanes
            .into_iter()
            .chain(rest.iter().copied())
            .fold(0.0, join)
    };
    (all(low, f32::min), all(high, f32::max))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRIDS: [Grid; 5] = [
        Grid::INT8,
        Grid::INT8_ACTIVATIONS,
        Grid::INT4,
        Grid::INT4_ASYMMETRIC,
        Grid {
            low: -128,
            high: 127,
            symmetric: false,
            short_scales: false,
        },
    ];

    proptest! {
        #[test]
        fn every_value_is_read_back_within_half_a_step(
            values in proptest::collection::vec(-8.0_f32..8.0, 1..64),
            exponent in -12_i32..12,
            shift in -8.0_f32..8.0,
        ) {
            let factor = 2f32.powi(exponent);
            let values: Vec<f32> = values.iter().map(|value| (value + shift) * factor).collect();
            for grid in GRIDS {
                let (low, high) = range(&values);
                let affine = grid.fit(low, high);
                prop_assert!(affine.scale.is_finite() && affine.scale > 0.0);
                for value in &values {
                    let code = grid.code(*value, affine);
                    prop_assert!((grid.low..=grid.high).contains(&i32::from(code)));
                    let error = (affine.value(code) - value).abs();
                    prop_assert!(error <= affine.scale * 0.5001, "{value} was read back {error} off at step {} of {grid:?}", affine.scale);
                }
            }
        }

        #[test]
        #[expect(clippy::cast_precision_loss, reason = "grids have at most 256 codes")]
        #[expect(clippy::cast_possible_truncation, reason = "codes are whole")]
        fn codes_are_rounded_shifted_and_clamped(value in any::<f32>(), steps in -600_i16..600, high in 0.01_f32..9.0) {
            for grid in GRIDS {
                let affine = grid.fit(-0.3 * high, high);
                // Any float at all, and exact halves of a step, where ties go to the even code.
                for value in [value, f32::from(steps) / 2.0 * affine.scale] {
                    let code = (value / affine.scale).round_ties_even() + affine.zero;
                    let code = if code.is_nan() { affine.zero } else { code };
                    let code = code.clamp(grid.low as f32, grid.high as f32) as i32;
                    prop_assert_eq!(i32::from(grid.code(value, affine)), code, "{} on {:?}", value, grid);
                }
            }
        }

        #[test]
        fn zero_is_always_read_back_exactly(low in -9.0_f32..9.0, width in 0.0_f32..9.0) {
            for grid in GRIDS {
                let affine = grid.fit(low, low + width);
                prop_assert_eq!(affine.value(grid.code(0.0, affine)).abs().to_bits(), 0);
            }
        }

        #[test]
        fn a_fitted_zero_halves_the_step_of_a_range_on_one_side(high in 0.01_f32..9.0) {
            let (fixed, fitted) = (Grid::INT4.fit(0.0, high), Grid::INT4_ASYMMETRIC.fit(0.0, high));
            prop_assert!(fitted.scale <= 0.51 * fixed.scale);
        }

        #[test]
        fn short_scales_are_exact_in_both_16_bit_formats(high in 1e-6_f32..1e4) {
            let scale = Grid::INT4.fit(0.0, high).scale;
            prop_assert_eq!(bf16::from_f32(scale).to_f32().to_bits(), scale.to_bits());
            prop_assert_eq!(half::f16::from_f32(scale).to_f32().to_bits(), scale.to_bits());
        }
    }

    #[test]
    fn what_lies_outside_saturates_and_a_nan_becomes_zero() {
        let affine = Grid::INT4.fit(-1.0, 1.0);
        assert_eq!(Grid::INT4.code(9.0, affine), 15);
        assert_eq!(Grid::INT4.code(f32::NEG_INFINITY, affine), 0);
        assert_eq!(Grid::INT4.code(f32::NAN, affine), 8);
        assert_eq!(range(&[]), (0.0, 0.0));
        assert_eq!(range(&[f32::NAN, 2.0, -1.0]), (-1.0, 2.0));
        assert_eq!(Grid::INT8.fit(0.0, 0.0).scale.to_bits(), 1f32.to_bits());
    }
}
