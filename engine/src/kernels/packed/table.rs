//! Codes that stand for values: FP8 bytes (one table for all) and 4-bit codes into a table a row. Row-major, read back to FP32 and multiplied.

use std::sync::LazyLock;

use crate::quant::fp8_to_f32;
use crate::quant::weight::TABLE;
use crate::quant::{Codes, QuantisedWeight};

/// See the file's comment.
#[derive(Debug, Clone)]
pub struct Table {
    /// The logical form without its order, which the input takes on.
    weight: QuantisedWeight,
}

/// The value of each FP8 byte.
static FP8: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|byte| fp8_to_f32(u8::try_from(byte).expect("256 bytes")))
});

impl Table {
    pub(super) fn pack(weight: &QuantisedWeight) -> Self {
        Self {
            weight: QuantisedWeight {
                input_order: None,
                ..weight.clone()
            },
        }
    }

    pub(super) fn out_features(&self) -> usize {
        self.weight.out_features
    }

    pub(in crate::kernels) fn in_features(&self) -> usize {
        self.weight.in_features
    }

    pub(super) fn bytes(&self) -> usize {
        let codes = match &self.weight.codes {
            Codes::Fp8(codes) => codes.len(),
            Codes::Lut4 { codes, tables } => codes.len() + size_of_val(&tables[..]),
            Codes::Int8(_) | Codes::Int4(_) => unreachable!("integers are packed as integers"),
        };
        let zeros = self.weight.zeros.as_ref().map_or(0, Vec::len);
        codes + 4 * (self.weight.scales.len() + zeros)
    }

    pub(super) fn value(&self, row: usize, column: usize) -> f32 {
        let weight = &self.weight;
        let block = row / weight.row_block * weight.groups() + column / weight.group;
        let zero = weight.zeros.as_ref().map_or(0.0, |zeros| zeros[block]);
        weight.scales[block] * (weight.code(row, column) - zero)
    }

    /// The weights of a row, columns in the order of the codes; `dst` is `[in_features]`.
    pub fn read_row(&self, row: usize, dst: &mut [f32]) {
        let (weight, columns) = (&self.weight, self.weight.in_features);
        match &weight.codes {
            Codes::Fp8(codes) => {
                let table = &*FP8;
                for (dst, code) in dst.iter_mut().zip(&codes[row * columns..]) {
                    *dst = table[usize::from(*code)];
                }
            }
            Codes::Lut4 { codes, tables } => {
                let (len, table) = (QuantisedWeight::nibble_row(columns), &tables[row]);
                for (dst, byte) in dst.chunks_mut(2).zip(&codes[row * len..]) {
                    dst[0] = table[usize::from(byte & 15) % TABLE];
                    if let Some(dst) = dst.get_mut(1) {
                        *dst = table[usize::from(byte >> 4) % TABLE];
                    }
                }
            }
            Codes::Int8(_) | Codes::Int4(_) => unreachable!("integers are packed as integers"),
        }
        let first = row / weight.row_block * weight.groups();
        for (group, dst) in dst[..columns].chunks_mut(weight.group).enumerate() {
            let scale = weight.scales[first + group];
            let zero = weight
                .zeros
                .as_ref()
                .map_or(0.0, |zeros| zeros[first + group]);
            for dst in dst {
                *dst = scale * (*dst - zero);
            }
        }
    }
}
