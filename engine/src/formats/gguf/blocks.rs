//! GGUF's block-quantised rows: what a block's bytes stand for, as [`QuantisedWeight`]s.
//!
//! ```text
//! Q8_0   32 weights, 34 bytes    f16 d; 32 i8 q                                    d q
//! Q4_0   32, 18    f16 d; nibbles, the low ones first                              d (q - 8)
//! Q4_1   32, 20    f16 d, f16 m; nibbles                                           d q + m
//! Q5_0   32, 22    f16 d; u32 of fifth bits; nibbles                               d (q - 16)
//! Q5_1   32, 24    f16 d, f16 m; u32 of fifth bits; nibbles                        d q + m
//! Q4_K   256, 144  f16 d, f16 e; 12 bytes of eight 6-bit (s, m); nibbles           d s q - e m     for each 32
//! Q5_K   256, 176  f16 d, f16 e; the 12 bytes; 32 bytes of fifth bits; nibbles     d s q - e m     for each 32
//! Q6_K   256, 210  128 bytes of low nibbles; 64 of high bit pairs; 16 i8 s; f16 d  d s (q - 32)    for each 16
//! ```
//!
//! Weights of five and six bits become bytes.

use half::f16;

use crate::quant::weight::{Codes, QuantisedWeight};

/// How a tensor's numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the file's comment has them all")]
#[expect(non_camel_case_types, reason = "llama.cpp's names")]
pub enum Kind {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// One group of weights: `scale * (code - zero)`.
struct Group {
    scale: f32,
    /// `None` for the codes' symmetric zero.
    zero: Option<f32>,
}

impl Kind {
    /// For messages.
    pub(super) const SUPPORTED: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K";

    /// By the number in the file; the name of one that is not supported.
    pub(super) fn of(number: u32) -> Result<Self, String> {
        Ok(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::BF16,
            10 => return Err("Q2_K".into()),
            11 => return Err("Q3_K".into()),
            16..=23 | 29 => return Err("an IQ type".into()),
            other => return Err(format!("type {other}")),
        })
    }

    /// Weights and bytes of a block.
    const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
        }
    }

    /// Weights that share a scale.
    const fn group(self) -> usize {
        match self {
            Self::Q6_K => 16,
            _ => 32,
        }
    }

    /// Bytes of a tensor of this shape; `None` when rows are not whole blocks, or the product overflows.
    pub(super) fn bytes(self, shape: &[usize]) -> Option<usize> {
        let (weights, bytes) = self.block();
        let columns = shape
            .last()
            .filter(|columns| columns.is_multiple_of(weights))?;
        let rows = shape[..shape.len() - 1]
            .iter()
            .try_fold(1_usize, |product, size| product.checked_mul(*size))?;
        rows.checked_mul(columns / weights)?.checked_mul(bytes)
    }

    /// The rows as quantised weights; `None` for floating-point kinds. `bytes` fits the shape.
    pub fn read(
        self,
        bytes: &[u8],
        [out_features, in_features]: [usize; 2],
    ) -> Option<QuantisedWeight> {
        if matches!(self, Self::F32 | Self::F16 | Self::BF16) {
            return None;
        }
        let (per_block, block_len) = self.block();
        let weights = out_features * in_features;
        let four = matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q4_K);
        let mut codes = Vec::with_capacity(if four { weights / 2 } else { weights });
        let mut scales = Vec::with_capacity(weights / self.group());
        let mut zeros = Vec::with_capacity(if self.is_affine() {
            scales.capacity()
        } else {
            0
        });
        let mut block_codes = [0; 256];
        for block in bytes.chunks_exact(block_len) {
            self.unpack(block, &mut block_codes);
            let groups = block_codes[..per_block].chunks_exact_mut(self.group());
            for (index, codes) in groups.enumerate() {
                let group = self.scale(block, index, codes);
                scales.push(group.scale);
                zeros.extend(group.zero);
            }
            let block_codes = &block_codes[..per_block];
            if four {
                let pairs = block_codes.as_chunks::<2>().0.iter();
                codes.extend(
                    pairs.map(|[even, odd]| even.cast_unsigned() | odd.cast_unsigned() << 4),
                );
            } else {
                codes.extend(block_codes.iter().map(|code| code.cast_unsigned()));
            }
        }
        let codes = if four {
            Codes::Int4(codes)
        } else {
            Codes::Int8(bytemuck::allocation::cast_vec(codes))
        };
        Some(QuantisedWeight {
            out_features,
            in_features,
            codes,
            row_block: 1,
            group: self.group(),
            scales,
            zeros: self.is_affine().then_some(zeros),
            input_order: None,
        })
    }

    /// Whether a group has a minimum.
    const fn is_affine(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q4_K | Self::Q5_K)
    }

    /// The codes of one block, in the order of the columns, around zero where the kind is symmetric (but for 4 bits: 0 to 15).
    fn unpack(self, block: &[u8], codes: &mut [i8; 256]) {
        let nibble = |byte: u8, high: bool| {
            let code = if high { byte >> 4 } else { byte & 15 };
            code.cast_signed()
        };
        match self {
            Self::F32 | Self::F16 | Self::BF16 => {}
            Self::Q8_0 => {
                for (code, byte) in codes.iter_mut().zip(&block[2..]) {
                    *code = byte.cast_signed();
                }
            }
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => {
                let nibbles = &block[block.len() - 16..];
                for (index, code) in codes[..32].iter_mut().enumerate() {
                    *code = nibble(nibbles[index % 16], index >= 16);
                }
                if matches!(self, Self::Q5_0 | Self::Q5_1) {
                    let fifth = &block[block.len() - 20..];
                    for (index, code) in codes[..32].iter_mut().enumerate() {
                        *code |= (fifth[index / 8] >> (index % 8) & 1).cast_signed() << 4;
                    }
                }
                if self == Self::Q5_0 {
                    codes[..32].iter_mut().for_each(|code| *code -= 16);
                }
            }
            Self::Q4_K | Self::Q5_K => {
                let nibbles = &block[block.len() - 128..];
                for (index, code) in codes.iter_mut().enumerate() {
                    let (chunk, place) = (index / 32, index % 32);
                    *code = nibble(nibbles[chunk / 2 * 32 + place], chunk % 2 == 1);
                    if self == Self::Q5_K {
                        *code |= (block[16 + place] >> chunk & 1).cast_signed() << 4;
                    }
                }
            }
            Self::Q6_K => {
                for (index, code) in codes.iter_mut().enumerate() {
                    let (half, chunk, place) = (index / 128, index / 32 % 4, index % 32);
                    let low = nibble(block[half * 64 + chunk % 2 * 32 + place], chunk >= 2);
                    let high = block[128 + half * 32 + place] >> (2 * chunk) & 3;
                    *code = (low | high.cast_signed() << 4) - 32;
                }
            }
        }
    }

    /// Scale and zero of one group of a block.
    fn scale(self, block: &[u8], group: usize, codes: &mut [i8]) -> Group {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let symmetric = |scale| Group { scale, zero: None };
        match self {
            Self::F32 | Self::F16 | Self::BF16 => symmetric(1.0),
            Self::Q8_0 | Self::Q4_0 | Self::Q5_0 => symmetric(half(0)),
            Self::Q4_1 | Self::Q5_1 => affine(half(0), -half(2), codes),
            Self::Q4_K | Self::Q5_K => {
                let (scale, minimum) = six_bits(&block[4..16], group);
                affine(half(0) * scale, half(2) * minimum, codes)
            }
            Self::Q6_K => symmetric(half(208) * f32::from(block[192 + group].cast_signed())),
        }
    }
}

/// `scale * code - minimum` as `scale * (code - zero)`. Where the scale is 0, all weights are the minimum, and it becomes the scale.
fn affine(scale: f32, minimum: f32, codes: &mut [i8]) -> Group {
    if scale == 0.0 {
        codes.fill(0);
        return Group {
            scale: minimum,
            zero: Some(1.0),
        };
    }
    Group {
        scale,
        zero: Some(minimum / scale),
    }
}

/// The `index`-th of eight pairs of 6-bit numbers in 12 bytes: the lower six bits of the first four of each lie in a byte of their own, the
/// others are four low bits in the last bytes and two high bits on top of the first.
fn six_bits(bytes: &[u8], index: usize) -> (f32, f32) {
    let (scale, minimum) = if index < 4 {
        (bytes[index] & 63, bytes[index + 4] & 63)
    } else {
        (
            bytes[index + 4] & 15 | bytes[index - 4] >> 6 << 4,
            bytes[index + 4] >> 4 | bytes[index] >> 6 << 4,
        )
    };
    (scale.into(), minimum.into())
}
