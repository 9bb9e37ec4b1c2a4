//! One linear's quantised weights in logical form: what loaders read, quantisers make, exporters write and kernels pack.
//!
//! Every format and every quantiser meets here, so a new one never needs a kernel of its own. Nothing here is fast: [`QuantisedWeight::dequantise_row`]
//! is the definition that packed forms and kernels are tested against.

use rayon::prelude::*;

use super::fp8::fp8_to_f32;
use crate::{Error, Result};

/// Entries of a look-up table with 4-bit codes.
pub const TABLE: usize = 16;

/// The integers (or table entries) of `[out_features, in_features]` weights, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum Codes {
    /// One signed byte a weight.
    Int8(Vec<i8>),
    /// Unsigned 4-bit codes, two a byte, the even column in the low nibble; a row takes whole bytes.
    Int4(Vec<u8>),
    /// OCP FP8 E4M3 (no infinities; 0x7f and 0xff are NaN), one byte a weight.
    Fp8(Vec<u8>),
    /// 4-bit codes as in [`Codes::Int4`] into a table of values, one table a row.
    Lut4 {
        /// The codes.
        codes: Vec<u8>,
        /// `[out_features]` tables; a weight is `scale * table[code]`.
        tables: Vec<[f32; TABLE]>,
    },
}

/// Quantised weights `[out_features, in_features]`: `w = scale * (code - zero)`, with one scale (and zero) for each block of
/// `row_block` rows and `group` columns of the codes.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantisedWeight {
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// The codes, columns in the order of `input_order`.
    pub codes: Codes,
    /// Rows that share a scale: 1, but for FP8 blocks.
    pub row_block: usize,
    /// Columns that share a scale; `in_features` for one scale a channel.
    pub group: usize,
    /// `[ceil(out / row_block), ceil(in / group)]`, finite.
    pub scales: Vec<f32>,
    /// Like `scales`; absent means symmetric: 0, or 8 for [`Codes::Int4`]. Not always whole: GGUF's minima are fractions of a step.
    pub zeros: Option<Vec<f32>>,
    /// Column `j` of the codes multiplies input `input_order[j]` (GPTQ's act-order, sorted by group); absent means `j`.
    pub input_order: Option<Vec<u32>>,
}

impl QuantisedWeight {
    /// Bytes of one row of 4-bit codes.
    pub const fn nibble_row(in_features: usize) -> usize {
        in_features.div_ceil(2)
    }

    /// Scales in one row of blocks.
    pub const fn groups(&self) -> usize {
        self.in_features.div_ceil(self.group)
    }

    /// The code of one weight before scale and zero; FP8 and table entries as their value.
    pub fn code(&self, row: usize, column: usize) -> f32 {
        let nibble = |codes: &[u8]| {
            let byte = codes[row * Self::nibble_row(self.in_features) + column / 2];
            if column.is_multiple_of(2) {
                byte & 15
            } else {
                byte >> 4
            }
        };
        let index = row * self.in_features + column;
        match &self.codes {
            Codes::Int8(codes) => f32::from(codes[index]),
            Codes::Int4(codes) => f32::from(nibble(codes)),
            Codes::Fp8(codes) => fp8_to_f32(codes[index]),
            Codes::Lut4 { codes, tables } => tables[row][usize::from(nibble(codes))],
        }
    }

    /// The zero of codes without `zeros`.
    const fn symmetric_zero(&self) -> f32 {
        match self.codes {
            Codes::Int4(_) => 8.0,
            Codes::Int8(_) | Codes::Fp8(_) | Codes::Lut4 { .. } => 0.0,
        }
    }

    /// One output channel's weights in the order of the inputs; `dst` is `[in_features]`.
    pub fn dequantise_row(&self, row: usize, dst: &mut [f32]) {
        assert_eq!(
            dst.len(),
            self.in_features,
            "a row of weights has one value an input"
        );
        for column in 0..self.in_features {
            let block = row / self.row_block * self.groups() + column / self.group;
            let zero = self
                .zeros
                .as_ref()
                .map_or(self.symmetric_zero(), |zeros| zeros[block]);
            let input = self
                .input_order
                .as_ref()
                .map_or(column, |order| order[column] as usize);
            dst[input] = self.scales[block] * (self.code(row, column) - zero);
        }
    }

    /// All weights, `[out_features, in_features]`.
    pub fn dequantise(&self) -> Vec<f32> {
        let mut rows = vec![0.0; self.out_features * self.in_features];
        rows.par_chunks_exact_mut(self.in_features)
            .enumerate()
            .for_each(|(row, dst)| self.dequantise_row(row, dst));
        rows
    }

    /// Whether this is the weights' half of W8A8: symmetric INT8, one scale an output channel, columns in their own order.
    pub const fn is_w8(&self) -> bool {
        matches!(self.codes, Codes::Int8(_))
            && self.row_block == 1
            && self.group == self.in_features
            && self.zeros.is_none()
            && self.input_order.is_none()
    }

    /// Bytes of everything in it.
    pub fn bytes(&self) -> usize {
        let codes = match &self.codes {
            Codes::Int8(codes) => codes.len(),
            Codes::Fp8(codes) | Codes::Int4(codes) => codes.len(),
            Codes::Lut4 { codes, tables } => codes.len() + size_of_val(tables.as_slice()),
        };
        let words = self.scales.len()
            + self.zeros.as_ref().map_or(0, Vec::len)
            + self.input_order.as_ref().map_or(0, Vec::len);
        codes + 4 * words
    }

    /// Bits stored for one weight, scales (16 bits each) and zeros (as many bits as a code) included.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn bits_per_weight(&self) -> f64 {
        let weights = (self.out_features * self.in_features) as f64;
        let (code, table) = match &self.codes {
            Codes::Int8(_) | Codes::Fp8(_) => (8.0, 0.0),
            Codes::Int4(_) => (4.0, 0.0),
            Codes::Lut4 { tables, .. } => (4.0, tables.len() as f64 * TABLE as f64 * 16.0),
        };
        let zeros = self
            .zeros
            .as_ref()
            .map_or(0.0, |zeros| zeros.len() as f64 * code);
        code + (self.scales.len() as f64 * 16.0 + zeros + table) / weights
    }

    /// The first thing that is wrong, in the words of an error about the tensor `name`: kernels index by what is checked here.
    ///
    /// # Errors
    /// Lengths that do not fit the shape, a scale or zero that is not finite, an order that is not a permutation.
    pub fn check(&self, name: &str) -> Result<()> {
        let refuse = |what: String| {
            Err(Error::model(format!(
                "{name}: {what}: the file is damaged or of another layout"
            )))
        };
        let Some(weights) = self.out_features.checked_mul(self.in_features) else {
            return refuse("its shape is too large".into());
        };
        if weights == 0 || self.row_block == 0 || self.group == 0 {
            return refuse("it has no weights or an empty group".into());
        }
        let nibbles = self.out_features * Self::nibble_row(self.in_features);
        let (have, need) = match &self.codes {
            Codes::Int8(codes) => (codes.len(), weights),
            Codes::Fp8(codes) => (codes.len(), weights),
            Codes::Int4(codes) | Codes::Lut4 { codes, .. } => (codes.len(), nibbles),
        };
        if have != need {
            return refuse(format!(
                "{have} bytes of codes where its shape needs {need}"
            ));
        }
        if let Codes::Lut4 { tables, .. } = &self.codes
            && (tables.len() != self.out_features
                || !tables.iter().flatten().all(|value| value.is_finite()))
        {
            return refuse("its tables are not one of finite values a row".into());
        }
        let blocks = self.out_features.div_ceil(self.row_block) * self.groups();
        for (what, values) in [
            ("scales", Some(&self.scales)),
            ("zeros", self.zeros.as_ref()),
        ] {
            let Some(values) = values else { continue };
            if values.len() != blocks {
                return refuse(format!(
                    "{} {what} where its groups need {blocks}",
                    values.len()
                ));
            }
            if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                return refuse(format!("number {index} of its {what} is {}", values[index]));
            }
        }
        match &self.input_order {
            Some(order) if !is_permutation(order, self.in_features) => {
                refuse("its input order is not a permutation".into())
            }
            _ => Ok(()),
        }
    }
}

fn is_permutation(order: &[u32], len: usize) -> bool {
    let mut seen = vec![false; len];
    order.len() == len
        && order.iter().all(|index| {
            seen.get_mut(*index as usize)
                .is_some_and(|seen| !std::mem::replace(seen, true))
        })
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the values are exact in FP32")]
mod tests {
    use super::*;

    fn int4() -> QuantisedWeight {
        QuantisedWeight {
            out_features: 2,
            in_features: 4,
            codes: Codes::Int4(vec![0x98, 0x0f, 0x21, 0x43]),
            row_block: 1,
            group: 2,
            scales: vec![1.0, 0.5, 2.0, 4.0],
            zeros: None,
            input_order: None,
        }
    }

    #[test]
    fn symmetric_4_bit_codes_read_back_around_8_with_the_even_column_in_the_low_nibble() {
        let mut row = [0.0; 4];
        int4().dequantise_row(0, &mut row);
        assert_eq!(row, [0.0, 1.0, 3.5, -4.0]);
        int4().dequantise_row(1, &mut row);
        assert_eq!(row, [-14.0, -12.0, -20.0, -16.0]);
    }

    #[test]
    fn an_input_order_puts_each_column_at_its_input() {
        let mut row = [0.0; 4];
        let ordered = QuantisedWeight {
            input_order: Some(vec![3, 1, 0, 2]),
            ..int4()
        };
        ordered.check("x").unwrap();
        ordered.dequantise_row(0, &mut row);
        assert_eq!(row, [3.5, 1.0, -4.0, 0.0]);
    }

    #[test]
    fn what_does_not_fit_its_shape_is_refused_by_name() {
        int4().check("layer.q").unwrap();
        let broken = [
            QuantisedWeight {
                codes: Codes::Int4(vec![0; 3]),
                ..int4()
            },
            QuantisedWeight {
                scales: vec![1.0; 3],
                ..int4()
            },
            QuantisedWeight {
                scales: vec![1.0, f32::NAN, 1.0, 1.0],
                ..int4()
            },
            QuantisedWeight {
                zeros: Some(vec![8.0; 5]),
                ..int4()
            },
            QuantisedWeight {
                input_order: Some(vec![0, 1, 1, 2]),
                ..int4()
            },
            QuantisedWeight { group: 0, ..int4() },
            QuantisedWeight {
                out_features: usize::MAX,
                ..int4()
            },
        ];
        for weight in broken {
            assert!(
                weight
                    .check("layer.q")
                    .unwrap_err()
                    .message
                    .starts_with("layer.q: "),
                "{weight:?}"
            );
        }
    }
}
