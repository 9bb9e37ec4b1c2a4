//! Rounding to nearest (RTN): dense weights to [`QuantisedWeight`], and activations through their format.
//!
//! It needs no data, so it is what `--quantize` does at load and what every other quantiser is compared with.

use rayon::prelude::*;

use super::affine::{Affine, Grid, range, short_scale};
use super::fp8::{FP8_MAX, f32_to_fp8, fp8_to_f32};
use super::lut;
use super::scheme::{ActivationFormat, WeightFormat};
use super::weight::{Codes, QuantisedWeight};

impl WeightFormat {
    /// The grid of its integers; FP8 and tables have none.
    pub const fn grid(self) -> Option<Grid> {
        match self {
            Self::Int8 => Some(Grid::INT8),
            Self::Int4 {
                symmetric: true, ..
            } => Some(Grid::INT4),
            Self::Int4 {
                symmetric: false, ..
            } => Some(Grid::INT4_ASYMMETRIC),
            Self::Fp8 | Self::Lut4 => None,
        }
    }

    /// Columns that share a scale, of a linear with so many.
    pub const fn group(self, in_features: usize) -> usize {
        match self {
            Self::Int4 {
                group: Some(group), ..
            } if group < in_features => group,
            _ => in_features,
        }
    }
}

/// Rounds row-major `[out, in]` weights to nearest.
pub fn round_to_nearest(rows: &[f32], in_features: usize, format: WeightFormat) -> QuantisedWeight {
    match format {
        WeightFormat::Fp8 => fp8(rows, in_features),
        WeightFormat::Lut4 => lut::fit(rows, in_features, &vec![1.0; in_features]),
        WeightFormat::Int8 | WeightFormat::Int4 { .. } => {
            let grid = format.grid().expect("integers have a grid");
            let group = format.group(in_features);
            let blocks: Vec<Affine> = rows
                .par_chunks_exact(in_features)
                .flat_map_iter(|row| {
                    row.chunks(group).map(move |values| {
                        let (low, high) = range(values);
                        grid.fit(low, high)
                    })
                })
                .collect();
            with_blocks(rows, in_features, format, &blocks)
        }
    }
}

/// Rounds to nearest with given scales and zeros, `[out, groups]`.
pub fn with_blocks(
    rows: &[f32],
    in_features: usize,
    format: WeightFormat,
    blocks: &[Affine],
) -> QuantisedWeight {
    let grid = format.grid().expect("integers have a grid");
    let group = format.group(in_features);
    let mut codes = vec![0_i8; rows.len()];
    codes
        .par_chunks_exact_mut(in_features)
        .zip(rows.par_chunks_exact(in_features))
        .zip(blocks.par_chunks_exact(in_features.div_ceil(group)))
        .for_each(|((codes, row), blocks)| {
            let groups = codes.chunks_mut(group).zip(row.chunks(group));
            for ((codes, values), affine) in groups.zip(blocks) {
                grid.codes(values, *affine, codes);
            }
        });
    from_codes(codes, in_features, format, blocks)
}

/// Puts integers of a grid into their stored form; `codes` is `[out, in]`, `blocks` `[out, groups]`.
pub fn from_codes(
    codes: Vec<i8>,
    in_features: usize,
    format: WeightFormat,
    blocks: &[Affine],
) -> QuantisedWeight {
    let out_features = codes.len() / in_features;
    let stored = match format {
        WeightFormat::Int8 => Codes::Int8(codes),
        _ => Codes::Int4(pack_nibbles(
            codes.into_iter().map(i8::cast_unsigned),
            in_features,
        )),
    };
    let symmetric = format.grid().is_some_and(|grid| grid.symmetric);
    QuantisedWeight {
        out_features,
        in_features,
        codes: stored,
        row_block: 1,
        group: format.group(in_features),
        scales: blocks.iter().map(|block| block.scale).collect(),
        zeros: (!symmetric).then(|| blocks.iter().map(|block| block.zero).collect()),
        input_order: None,
    }
}

/// Rows of 4-bit codes, two a byte, the even column low; each row begins a byte.
pub fn pack_nibbles(codes: impl IntoIterator<Item = u8>, in_features: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (index, code) in codes.into_iter().enumerate() {
        if (index % in_features).is_multiple_of(2) {
            bytes.push(code);
        } else if let Some(last) = bytes.last_mut() {
            *last |= code << 4;
        }
    }
    bytes
}

fn fp8(rows: &[f32], in_features: usize) -> QuantisedWeight {
    let scales: Vec<f32> = rows
        .chunks_exact(in_features)
        .map(|row| short_scale(fp8_scale(row)))
        .collect();
    let codes = rows
        .par_chunks_exact(in_features)
        .zip(&scales)
        .flat_map_iter(|(row, scale)| row.iter().map(move |value| f32_to_fp8(value / scale)))
        .collect();
    QuantisedWeight {
        out_features: scales.len(),
        in_features,
        codes: Codes::Fp8(codes),
        row_block: 1,
        group: in_features,
        scales,
        zeros: None,
        input_order: None,
    }
}

fn fp8_scale(values: &[f32]) -> f32 {
    let (low, high) = range(values);
    let largest = high.max(-low);
    if largest > 0.0 {
        (largest / FP8_MAX).max(f32::MIN_POSITIVE)
    } else {
        1.0
    }
}

impl ActivationFormat {
    /// Rounds rows of activations in place, one scale a token (row).
    pub fn round(self, rows: &mut [f32], columns: usize) {
        rows.par_chunks_exact_mut(columns)
            .for_each(|row| match self {
                Self::Bf16 => {
                    for value in row {
                        *value = half::bf16::from_f32(*value).to_f32();
                    }
                }
                Self::Int8 => {
                    let (low, high) = range(row);
                    let affine = Grid::INT8_ACTIVATIONS.fit(low, high);
                    for value in row {
                        *value = affine.value(Grid::INT8_ACTIVATIONS.code(*value, affine));
                    }
                }
                Self::Fp8 => {
                    let scale = fp8_scale(row);
                    for value in row {
                        *value = scale * fp8_to_f32(f32_to_fp8(*value / scale));
                    }
                }
            });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FORMATS: [WeightFormat; 5] = [
        WeightFormat::Int8,
        WeightFormat::Int4 {
            group: Some(32),
            symmetric: true,
        },
        WeightFormat::Int4 {
            group: Some(64),
            symmetric: false,
        },
        WeightFormat::Int4 {
            group: None,
            symmetric: true,
        },
        WeightFormat::Fp8,
    ];

    proptest! {
        #[test]
        fn weights_are_read_back_within_half_a_step_of_their_group(
            in_features in 1_usize..150,
            seed in proptest::collection::vec(-1.0_f32..1.0, 450),
        ) {
            let rows = &seed[..in_features * 3];
            for format in FORMATS {
                let weight = round_to_nearest(rows, in_features, format);
                weight.check("x").unwrap();
                for (index, (read, value)) in weight.dequantise().iter().zip(rows).enumerate() {
                    let block = index / in_features * weight.groups() + index % in_features / weight.group;
                    let bound = match format {
                        // Half a unit in the last of three places, and half a step of the subnormals.
                        WeightFormat::Fp8 => (value.abs() / 16.0).max(weight.scales[block] / 1024.0) * 1.001,
                        _ => weight.scales[block] * 0.5001,
                    };
                    prop_assert!((read - value).abs() <= bound, "{format:?}: {value} was read back as {read}");
                }
            }
        }

        #[test]
        fn activations_are_read_back_within_half_a_step_of_their_token(
            values in proptest::collection::vec(-30.0_f32..30.0, 40),
        ) {
            for (format, relative, steps) in [
                (ActivationFormat::Int8, 0.0, 0.5 / 127.0),
                (ActivationFormat::Bf16, 1.0 / 256.0, 0.0),
                (ActivationFormat::Fp8, 1.0 / 16.0, 1.0 / 448.0 / 1024.0),
            ] {
                let mut rounded = values.clone();
                format.round(&mut rounded, 20);
                for (row, (rounded, values)) in rounded.chunks(20).zip(values.chunks(20)).enumerate() {
                    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                    for (rounded, value) in rounded.iter().zip(values) {
                        let bound = (value.abs() * relative).max(largest * steps) * 1.001;
                        prop_assert!((rounded - value).abs() <= bound, "{format:?} row {row}: {value} became {rounded}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_group_longer_than_the_row_is_one_scale_a_channel() {
        let format = WeightFormat::Int4 {
            group: Some(128),
            symmetric: true,
        };
        let weight = round_to_nearest(&[1.0, -1.0, 0.5], 3, format);
        assert_eq!((weight.group, weight.scales.len()), (3, 1));
    }
}
