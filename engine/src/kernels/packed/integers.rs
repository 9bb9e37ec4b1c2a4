//! Integers on a grid, 8 or 4 bits, in blocks of 16 output channels: what `vpdpbusd` reads.
//!
//! A line of 64 bytes holds 4 inputs of each of 16 channels (8 bits), or 8 (4 bits: the low nibbles are the first 4 inputs):
//!
//! ```text
//! c0i0 c0i1 c0i2 c0i3  c1i0 c1i1 c1i2 c1i3  …  c15i0 … c15i3
//! ```
//!
//! so that four broadcast activation bytes meet 16 channels at once. Lines follow the inputs, groups follow each other, blocks follow the
//! channels. Codes are unsigned, `code + offset`, because VNNI multiplies unsigned by signed. With `x` and `s` the integers and the scale of
//! a row's activations, one output is the sum over the groups, in their order and from 0, of
//!
//! ```text
//! t = f32(Σ x · stored - offset · Σ x);   with zeros: t = fma(-zero', f32(Σ x), t);   sum = fma(t, s · scale, sum)
//! ```
//!
//! where `zero'` is the zero less what the offset already takes off. Sums of integers are exact in any order, so every kernel agrees to the last bit.

use half::f16;
use rayon::prelude::*;

use super::memory::Lines;
use super::rows::Groups;
use crate::quant::{Codes, QuantisedWeight};

/// Output channels of a block.
pub const BLOCK: usize = 16;

/// One register of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

/// Bits of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bits {
    /// Offset 8.
    Four,
    /// Offset 128.
    Eight,
}

/// See the file's comment.
#[derive(Debug, Clone)]
pub struct Integers {
    out_features: usize,
    bits: Bits,
    groups: Groups,
    lines: Lines,
    scales: Factors,
    /// `zero'`; absent when all are 0.
    zeros: Option<Factors>,
}

/// One factor a group and channel, `[block][group][16]`: 16 bits where that loses nothing.
#[derive(Debug, Clone)]
enum Factors {
    F16(Vec<f16>),
    F32(Vec<f32>),
}

/// The factors of a group for the 16 channels of a block.
#[derive(Debug, Clone, Copy)]
pub enum Factor16<'a> {
    /// Exact in 16 bits.
    F16(&'a [f16; BLOCK]),
    /// Not exact in 16 bits.
    F32(&'a [f32; BLOCK]),
}

impl Bits {
    /// What is added to a signed code.
    pub const fn offset(self) -> u8 {
        match self {
            Self::Four => 8,
            Self::Eight => 128,
        }
    }

    /// Inputs of a line.
    pub const fn inputs(self) -> usize {
        match self {
            Self::Four => 8,
            Self::Eight => 4,
        }
    }
}

impl Factors {
    fn new(values: Vec<f32>) -> Self {
        let exact = |x: &f32| f16::from_f32(*x).to_f32().to_bits() == x.to_bits();
        if values.par_iter().all(exact) {
            Self::F16(values.into_par_iter().map(f16::from_f32).collect())
        } else {
            Self::F32(values)
        }
    }

    fn at(&self, start: usize) -> Factor16<'_> {
        const WHOLE: &str = "factors come in blocks of 16";
        match self {
            Self::F16(all) => Factor16::F16(all[start..start + BLOCK].try_into().expect(WHOLE)),
            Self::F32(all) => Factor16::F32(all[start..start + BLOCK].try_into().expect(WHOLE)),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F16(all) => size_of_val(&all[..]),
            Self::F32(all) => size_of_val(&all[..]),
        }
    }
}

impl Factor16<'_> {
    /// As FP32.
    pub fn to_f32(self) -> [f32; BLOCK] {
        match self {
            Self::F16(all) => all.map(f16::to_f32),
            Self::F32(all) => *all,
        }
    }
}

impl Integers {
    /// Packs checked weights of 8 or 4 bits.
    pub(super) fn pack(weight: &QuantisedWeight) -> Self {
        let groups = Groups::new(weight.in_features, weight.group);
        let (bits, row) = match &weight.codes {
            Codes::Int8(codes) => (Bits::Eight, Row::Int8(codes)),
            Codes::Int4(codes) => (Bits::Four, Row::Int4(codes)),
            Codes::Fp8(_) | Codes::Lut4 { .. } => unreachable!("tables are packed as tables"),
        };
        // The logical zero of a 4-bit code counts from 0, the one of an 8-bit code from the middle already.
        let middle = if bits == Bits::Four { 8.0 } else { 0.0 };
        let spread = |values: &[f32], middle: f32| {
            let count = groups.count();
            let mut all = vec![0.0; weight.out_features.div_ceil(BLOCK) * BLOCK * count];
            for (channel, group) in
                (0..weight.out_features).flat_map(|c| (0..count).map(move |g| (c, g)))
            {
                all[(channel / BLOCK * count + group) * BLOCK + channel % BLOCK] =
                    values[channel / weight.row_block * count + group] - middle;
            }
            all
        };
        let zeros = weight.zeros.as_ref().map(|zeros| spread(zeros, middle));
        Self {
            out_features: weight.out_features,
            bits,
            groups,
            lines: lines(weight.out_features, bits, groups, row),
            scales: Factors::new(spread(&weight.scales, 0.0)),
            zeros: zeros
                .filter(|zeros| zeros.iter().any(|zero| *zero != 0.0))
                .map(Factors::new),
        }
    }

    /// Output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bits of a code.
    pub fn bits(&self) -> Bits {
        self.bits
    }

    /// How the inputs lie.
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// Lines of a group of a block.
    pub fn group_lines(&self) -> usize {
        self.groups.padded() / self.bits.inputs()
    }

    /// The lines of a block, group after group.
    pub fn block(&self, block: usize) -> &[Line] {
        let len = self.groups.count() * self.group_lines();
        &self.lines.all()[block * len..(block + 1) * len]
    }

    /// The scales of a block's channels.
    pub fn scales(&self, block: usize, group: usize) -> Factor16<'_> {
        self.scales
            .at((block * self.groups.count() + group) * BLOCK)
    }

    /// The zeros of a block's channels, less the offset; `None` when all are 0.
    pub fn zeros(&self, block: usize, group: usize) -> Option<Factor16<'_>> {
        let start = (block * self.groups.count() + group) * BLOCK;
        self.zeros.as_ref().map(|zeros| zeros.at(start))
    }

    /// The code as stored, `code + offset`.
    pub fn stored(&self, channel: usize, column: usize) -> u8 {
        let index = self.groups.index(column);
        let inputs = self.bits.inputs();
        let line = &self.block(channel / BLOCK)[index / inputs];
        let byte = line.0[channel % BLOCK * 4 + index % 4];
        match (self.bits, index % inputs / 4) {
            (Bits::Eight, _) => byte,
            (Bits::Four, 0) => byte & 15,
            (Bits::Four, _) => byte >> 4,
        }
    }

    /// The weight as a number.
    pub(super) fn value(&self, channel: usize, column: usize) -> f32 {
        let (block, group) = (channel / BLOCK, column / self.groups.group());
        let code = f32::from(self.stored(channel, column)) - f32::from(self.bits.offset());
        let zero = self
            .zeros(block, group)
            .map_or(0.0, |zeros| zeros.to_f32()[channel % BLOCK]);
        self.scales(block, group).to_f32()[channel % BLOCK] * (code - zero)
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.lines.all())
            + self.scales.bytes()
            + self.zeros.as_ref().map_or(0, Factors::bytes)
    }
}

/// Row-major codes.
#[derive(Clone, Copy)]
enum Row<'a> {
    Int8(&'a [i8]),
    Int4(&'a [u8]),
}

impl Row<'_> {
    /// The stored codes of the columns `range` of a row.
    fn read(self, row: usize, columns: usize, range: std::ops::Range<usize>, dst: &mut [u8]) {
        match self {
            Self::Int8(codes) => {
                let codes = &codes[row * columns..][range];
                for (dst, code) in dst.iter_mut().zip(codes) {
                    *dst = code.cast_unsigned() ^ 0x80;
                }
            }
            Self::Int4(codes) => {
                let len = QuantisedWeight::nibble_row(columns);
                let codes = &codes[row * len..(row + 1) * len];
                for (dst, column) in dst.iter_mut().zip(range) {
                    *dst = codes[column / 2] >> (column % 2 * 4) & 15;
                }
            }
        }
    }
}

/// All lines; what pads channels and groups is the offset, a weight of 0.
fn lines(out_features: usize, bits: Bits, groups: Groups, codes: Row<'_>) -> Lines {
    /// Bytes between the rows of a block: rows a power of two apart share sets of the first-level cache.
    const APART: usize = 64;
    let (inputs, len) = (bits.inputs(), groups.row_len());
    let blocks = out_features.div_ceil(BLOCK);
    let mut lines = Lines::zeros(blocks * (len / inputs));
    lines
        .all_mut()
        .par_chunks_mut(len / inputs)
        .enumerate()
        .for_each_init(
            || vec![0_u8; BLOCK * (len + APART)],
            |stored, (block, lines)| {
                stored.fill(bits.offset());
                for (channel, stored) in stored.chunks_exact_mut(len + APART).enumerate() {
                    let row = block * BLOCK + channel;
                    for group in (0..groups.count()).filter(|_| row < out_features) {
                        let range = groups.range(group);
                        let dst = &mut stored[group * groups.padded()..][..range.len()];
                        codes.read(row, groups.columns(), range, dst);
                    }
                }
                for (index, line) in lines.iter_mut().enumerate() {
                    let channels = stored.chunks_exact(len + APART);
                    for (dst, codes) in line.0.as_chunks_mut::<4>().0.iter_mut().zip(channels) {
                        let codes = &codes[index * inputs..][..inputs];
                        dst.copy_from_slice(&codes[..4]);
                        for (dst, high) in dst.iter_mut().zip(&codes[4..]) {
                            *dst |= high << 4;
                        }
                    }
                }
            },
        );
    lines
}
