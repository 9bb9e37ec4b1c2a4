//! OCP FP8 E4M3: rounding to it and reading it. 4 bits of exponent (bias 7), 3 of mantissa, no infinities, largest value 448.
//!
//! A value of at least 2^-6 in magnitude is read back within 1/16 of itself, a smaller one within 2^-10 (`docs/quantisation.md`).

/// The largest value.
pub const FP8_MAX: f32 = 448.0;

const NAN: u8 = 0x7f;

/// The value of a byte.
pub fn fp8_to_f32(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((exponent - 7 + 127).cast_unsigned() << 23),
    };
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The nearest byte, ties to even, saturating at ±448 (infinities too); NaN stays NaN.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "codes lie in 0..=0x7e"
)]
pub fn f32_to_fp8(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | NAN;
    }
    let magnitude = magnitude.min(FP8_MAX);
    // The exponent of the value, but at least that of the smallest normal: below it steps no longer shrink.
    let exponent = ((magnitude.to_bits() >> 23).cast_signed() - 127).max(-6);
    let step = f32::from_bits((exponent - 3 + 127).cast_unsigned() << 23);
    // Exact: a division by a power of two. 16 steps are the next exponent's 8, and the codes follow one another across it.
    let steps = (magnitude / step).round_ties_even() as i32;
    let code = (exponent + 6) * 8 + steps;
    sign | (code.min(0x7e) as u8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn finite() -> impl Iterator<Item = u8> {
        (0..=u8::MAX).filter(|byte| byte & 0x7f != NAN)
    }

    #[test]
    fn bytes_have_the_values_of_the_ocp_table() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 1.0 / 512.0),
            (0x08, 1.0 / 64.0),
            (0x38, 1.0),
            (0xb8, -1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(fp8_to_f32(byte).to_bits(), f32::to_bits(value), "{byte:#x}");
        }
        assert!(fp8_to_f32(0x7f).is_nan() && fp8_to_f32(0xff).is_nan());
    }

    #[test]
    fn every_byte_survives_reading_and_rounding() {
        for byte in finite() {
            assert_eq!(f32_to_fp8(fp8_to_f32(byte)), byte, "{byte:#x}");
        }
        assert!(fp8_to_f32(f32_to_fp8(f32::NAN)).is_nan());
    }

    #[test]
    fn halfway_values_go_to_the_even_neighbour() {
        for byte in 0..0x7e_u8 {
            let middle = f32::midpoint(fp8_to_f32(byte), fp8_to_f32(byte + 1));
            let even = byte + byte % 2;
            assert_eq!(f32_to_fp8(middle), even, "between {byte:#x} and the next");
            assert_eq!(f32_to_fp8(-middle), even | 0x80);
        }
    }

    proptest! {
        #[test]
        fn rounding_finds_the_nearest_of_all_values(value in -500.0_f32..500.0, exponent in -12_i32..1) {
            let value = value * 2f32.powi(exponent);
            let rounded = fp8_to_f32(f32_to_fp8(value));
            let nearest = finite().map(|byte| (fp8_to_f32(byte) - value).abs()).fold(f32::INFINITY, f32::min);
            prop_assert_eq!((rounded - value).abs().to_bits(), nearest.to_bits());
            if value.abs() <= FP8_MAX {
                prop_assert!((rounded - value).abs() <= (value.abs() / 16.0).max(2f32.powi(-10)));
            } else {
                prop_assert_eq!(rounded.abs().to_bits(), FP8_MAX.to_bits());
            }
        }
    }
}
