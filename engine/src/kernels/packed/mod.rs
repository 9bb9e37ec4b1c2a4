//! A linear's quantised weights in the layout that kernels read, made once from [`QuantisedWeight`].
//!
//! Called by the model for every copy of a linear that is not dense. Nothing is rounded here but fractions of a
//! 4-bit code's zero, by less than a millionth of a step: else [`Packed::dequantise_row`] gives back exactly what the logical form says. A packed linear also says how it wants its inputs ([`Packed::groups`], [`Packed::order`]), so that the model
//! prepares each input once for all linears that read it.

mod integers;
mod memory;
mod rows;
mod table;

pub use self::integers::{BLOCK, Bits, Factor16, Integers, Line};
pub use self::memory::Lines;
pub use self::rows::{Activations, Groups, Int8Rows};
pub use self::table::Table;
use crate::quant::{Codes, QuantisedWeight};
use crate::{Error, Result};

/// A sum of so many products of a byte and a byte stays within 32 bits.
const MAX_INPUTS: usize = 1 << 16;

/// See the file's comment.
#[derive(Debug, Clone)]
pub struct Packed {
    kind: Kind,
    order: Option<Vec<u32>>,
}

/// The arithmetic of a packed linear.
#[derive(Debug, Clone)]
pub enum Kind {
    /// Integers on a grid, times INT8 activations.
    Integers(Integers),
    /// Codes that stand for values of a table (FP8, LUT4), times FP32 activations.
    Table(Table),
}

impl Packed {
    /// Packs a linear called `name`.
    ///
    /// # Errors
    /// What [`QuantisedWeight::check`] refuses, and rows that are too long for 32-bit sums.
    pub fn new(name: &str, weight: &QuantisedWeight) -> Result<Self> {
        weight.check(name)?;
        if weight.in_features > MAX_INPUTS {
            return Err(Error::model(format!(
                "{name}: {} inputs are more than {MAX_INPUTS}: this engine cannot compute so wide a linear",
                weight.in_features
            )));
        }
        let kind = match weight.codes {
            Codes::Int8(_) | Codes::Int4(_) => Kind::Integers(Integers::pack(weight)),
            Codes::Fp8(_) | Codes::Lut4 { .. } => Kind::Table(Table::pack(weight)),
        };
        Ok(Self {
            kind,
            order: weight.input_order.clone(),
        })
    }

    /// What the kernels compute with.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// Column `j` of the prepared input is input `order[j]`; absent means `j`.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    /// How INT8 inputs are grouped; `None` when the input stays FP32.
    pub fn groups(&self) -> Option<Groups> {
        match &self.kind {
            Kind::Integers(integers) => Some(integers.groups()),
            Kind::Table(_) => None,
        }
    }

    /// Output channels.
    pub fn out_features(&self) -> usize {
        match &self.kind {
            Kind::Integers(integers) => integers.out_features(),
            Kind::Table(table) => table.out_features(),
        }
    }

    /// Inputs.
    pub fn in_features(&self) -> usize {
        match &self.kind {
            Kind::Integers(integers) => integers.groups().columns(),
            Kind::Table(table) => table.in_features(),
        }
    }

    /// Bytes of memory: codes, scales, zeros and tables.
    pub fn bytes(&self) -> usize {
        let order = self.order.as_ref().map_or(0, |order| 4 * order.len());
        order
            + match &self.kind {
                Kind::Integers(integers) => integers.bytes(),
                Kind::Table(table) => table.bytes(),
            }
    }

    /// One output channel's weights in the order of the inputs; `dst` is `[in_features]`.
    pub fn dequantise_row(&self, row: usize, dst: &mut [f32]) {
        assert_eq!(
            dst.len(),
            self.in_features(),
            "a row of weights has one value an input"
        );
        let value = |column: usize| match &self.kind {
            Kind::Integers(integers) => integers.value(row, column),
            Kind::Table(table) => table.value(row, column),
        };
        match &self.order {
            None => dst
                .iter_mut()
                .enumerate()
                .for_each(|(j, dst)| *dst = value(j)),
            Some(order) => {
                for (column, input) in order.iter().enumerate() {
                    dst[*input as usize] = value(column);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quant::weight::TABLE;

    /// Shapes with tails in every direction, groups that do not divide the row, all kinds of codes.
    pub(crate) fn weights() -> impl Strategy<Value = QuantisedWeight> {
        let shape = (1_usize..40, 1_usize..80, 1_usize..90, 1_usize..4);
        (shape, 0_usize..4, any::<[bool; 2]>(), any::<u64>()).prop_map(
            |((out_features, in_features, group, row_block), kind, choices, seed)| {
                make(
                    (out_features, in_features),
                    group,
                    row_block,
                    kind,
                    choices,
                    seed,
                )
            },
        )
    }

    fn make(
        (out_features, in_features): (usize, usize),
        group: usize,
        row_block: usize,
        kind: usize,
        [zeros, order]: [bool; 2],
        seed: u64,
    ) -> QuantisedWeight {
        let mut state = seed | 1;
        let mut byte = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        };
        let mut bytes = |count: usize| (0..count).map(|_| byte()).collect::<Vec<u8>>();
        let nibbles = out_features * QuantisedWeight::nibble_row(in_features);
        let codes = match kind {
            0 => Codes::Int8(
                bytes(out_features * in_features)
                    .into_iter()
                    .map(u8::cast_signed)
                    .collect(),
            ),
            1 => Codes::Int4(bytes(nibbles)),
            2 => Codes::Fp8(
                bytes(out_features * in_features)
                    .into_iter()
                    .map(|b| b & 0xf7)
                    .collect(),
            ),
            _ => Codes::Lut4 {
                codes: bytes(nibbles),
                tables: (0..out_features)
                    .map(|_| std::array::from_fn(|i| f32::from(bytes(TABLE)[i]) / 64.0 - 2.0))
                    .collect(),
            },
        };
        let blocks = out_features.div_ceil(row_block) * in_features.div_ceil(group);
        // Some scales fit 16 bits, some do not.
        let scales = bytes(blocks)
            .into_iter()
            .map(|b| (f32::from(b) + 1.0) / if seed.is_multiple_of(2) { 256.0 } else { 255.0 });
        QuantisedWeight {
            out_features,
            in_features,
            codes,
            row_block,
            group,
            scales: scales.collect(),
            zeros: zeros.then(|| {
                bytes(blocks)
                    .into_iter()
                    .map(|b| f32::from(b % 16) + if seed.is_multiple_of(3) { 0.3 } else { 0.0 })
                    .collect()
            }),
            input_order: order.then(|| (0..u32::try_from(in_features).unwrap()).rev().collect()),
        }
    }

    proptest! {
        #[test]
        fn packing_loses_nothing(weight in weights()) {
            let packed = Packed::new("w", &weight).unwrap();
            prop_assert_eq!((packed.out_features(), packed.in_features()), (weight.out_features, weight.in_features));
            let (mut row, mut expected) = (vec![0.0; weight.in_features], vec![0.0; weight.in_features]);
            for index in 0..weight.out_features {
                packed.dequantise_row(index, &mut row);
                weight.dequantise_row(index, &mut expected);
                let fraction = weight.zeros.iter().flatten().any(|zero| zero.fract() != 0.0);
                for (a, b) in row.iter().zip(&expected) {
                    let bound = if fraction { 1e-6 } else { 0.0 };
                    prop_assert!((a - b).abs() <= bound, "row {}: {} for {}", index, a, b);
                }
            }
        }
    }

    #[test]
    fn what_is_broken_or_too_wide_is_refused_by_name() {
        let good = make((2, 8), 4, 1, 0, [false; 2], 1);
        let short = QuantisedWeight {
            scales: vec![1.0],
            ..good.clone()
        };
        assert!(
            Packed::new("layer.q", &short)
                .unwrap_err()
                .message
                .contains("layer.q")
        );
        let wide = make((1, MAX_INPUTS + 1), 128, 1, 1, [false; 2], 1);
        assert!(
            Packed::new("layer.q", &wide)
                .unwrap_err()
                .message
                .contains("65537 inputs")
        );
    }
}
