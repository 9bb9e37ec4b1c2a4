//! Products of INT8 activations and packed integers by VNNI: `vpdpbusd` adds 4 products of 16 channels at once.
//!
//! Called by the AVX-512 backend alone. Sums of integers are exact and the scales are applied group after group, so the tile around an output
//! never changes it. Few rows stream the weights from memory, block after block as they lie there; many rows go over a panel of weights that
//! stays in the cache.

#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics are many, named by their prefix; test builds do not lint it"
)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::check_integers;
use super::super::packed::{BLOCK, Bits, Factor16, Int8Rows, Integers, Line};
use super::floats::store;

/// Rows that go over the weights as one stream: what they add to a line of weights takes less time than the line from memory.
const FEW: usize = 4;
/// Bytes that the stream is fetched ahead of its use: what a core reads from memory while one line is on its way.
const AHEAD: usize = 4096;

/// The operands of one tile.
struct Tile<'a> {
    x: Int8Rows<'a>,
    w: &'a Integers,
    /// The first row.
    row: usize,
    /// The first block.
    block: usize,
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_factors(factors: Factor16<'_>) -> __m512 {
    // SAFETY: both arrays hold 16 factors.
    unsafe {
        match factors {
            Factor16::F16(all) => _mm512_cvtph_ps(_mm256_loadu_si256(all.as_ptr().cast())),
            Factor16::F32(all) => _mm512_loadu_ps(all.as_ptr()),
        }
    }
}

/// INT32 sums of `x * stored` over the lines of one group: `M` rows, `C` blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn products<const M: usize, const C: usize, const FOUR: bool>(
    rows: [*const i8; M],
    lines: [*const Line; C],
    count: usize,
) -> [[__m512i; C]; M] {
    let mut sums = [[_mm512_setzero_si512(); C]; M];
    let nibble = _mm512_set1_epi8(15);
    // SAFETY: the caller has checked `count` lines a block and the inputs that meet them in each row.
    unsafe {
        for step in 0..count {
            let mut low = [_mm512_setzero_si512(); C];
            let mut high = [_mm512_setzero_si512(); C];
            for c in 0..C {
                let line = lines[c].add(step);
                low[c] = _mm512_load_si512(line.cast());
                if FOUR {
                    high[c] = _mm512_and_si512(_mm512_srli_epi16::<4>(low[c]), nibble);
                    low[c] = _mm512_and_si512(low[c], nibble);
                }
            }
            for m in 0..M {
                let inputs = rows[m]
                    .cast::<i32>()
                    .add(if FOUR { 2 * step } else { step });
                let first = _mm512_set1_epi32(inputs.read_unaligned());
                for c in 0..C {
                    sums[m][c] = _mm512_dpbusd_epi32(sums[m][c], low[c], first);
                }
                if FOUR {
                    let second = _mm512_set1_epi32(inputs.add(1).read_unaligned());
                    for c in 0..C {
                        sums[m][c] = _mm512_dpbusd_epi32(sums[m][c], high[c], second);
                    }
                }
            }
        }
    }
    sums
}

/// The same of lines that come from memory: two at a time and the halves of a line apart, so that no sum waits for another.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn streamed<const M: usize, const C: usize, const FOUR: bool>(
    rows: [*const i8; M],
    lines: [*const Line; C],
    count: usize,
) -> [[__m512i; C]; M] {
    let mut sums = [[[[_mm512_setzero_si512(); 2]; C]; M]; 2];
    let nibble = _mm512_set1_epi8(15);
    let mut step = 0;
    while step < count {
        for sums in sums.iter_mut().take(count - step) {
            for c in 0..C {
                // SAFETY: the caller has checked `count` lines a block and the inputs that meet them in each row; what is fetched ahead may
                // lie outside, which a prefetch forgives.
                unsafe {
                    let line = lines[c].add(step);
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_byte_add(AHEAD).cast());
                    let codes = _mm512_load_si512(line.cast());
                    for m in 0..M {
                        let inputs = rows[m].add(step * if FOUR { 8 } else { 4 }).cast::<i32>();
                        let first = _mm512_set1_epi32(inputs.read_unaligned());
                        let sums = &mut sums[m][c];
                        if FOUR {
                            let second = _mm512_set1_epi32(inputs.add(1).read_unaligned());
                            let low = _mm512_and_si512(codes, nibble);
                            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
                            sums[0] = _mm512_dpbusd_epi32(sums[0], low, first);
                            sums[1] = _mm512_dpbusd_epi32(sums[1], high, second);
                        } else {
                            sums[0] = _mm512_dpbusd_epi32(sums[0], codes, first);
                        }
                    }
                }
            }
            step += 1;
        }
    }
    let mut all = [[_mm512_setzero_si512(); C]; M];
    for m in 0..M {
        for c in 0..C {
            let even = _mm512_add_epi32(sums[0][m][c][0], sums[0][m][c][1]);
            let odd = _mm512_add_epi32(sums[1][m][c][0], sums[1][m][c][1]);
            all[m][c] = _mm512_add_epi32(even, odd);
        }
    }
    all
}

/// The outputs of `M` rows and `C` blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<const M: usize, const C: usize, const FOUR: bool>(
    tile: &Tile<'_>,
) -> [[__m512; C]; M] {
    let Tile { x, w, row, block } = *tile;
    let (groups, group_lines) = (w.groups(), w.group_lines());
    let (count, row_len) = (groups.count(), groups.row_len());
    let offset = i32::from(w.bits().offset());
    let lines: [*const Line; C] = std::array::from_fn(|c| w.block(block + c).as_ptr());
    let mut totals = [[_mm512_setzero_ps(); C]; M];
    for group in 0..count {
        // SAFETY: `check_integers` saw whole rows and blocks; the caller has checked `M` rows and `C` blocks.
        let sums = unsafe {
            let rows = std::array::from_fn(|m| {
                x.values
                    .as_ptr()
                    .add((row + m) * row_len + group * groups.padded())
            });
            let lines = lines.map(|lines| lines.add(group * group_lines));
            if C == 1 {
                streamed::<M, C, FOUR>(rows, lines, group_lines)
            } else {
                products::<M, C, FOUR>(rows, lines, group_lines)
            }
        };
        for c in 0..C {
            let scales = load_factors(w.scales(block + c, group));
            let zeros = w.zeros(block + c, group).map(|zeros| load_factors(zeros));
            for m in 0..M {
                let factors = (row + m) * count + group;
                let sum = x.sums[factors];
                let mut t = _mm512_cvtepi32_ps(_mm512_sub_epi32(
                    sums[m][c],
                    _mm512_set1_epi32(offset * sum),
                ));
                if let Some(zeros) = zeros {
                    t = _mm512_fnmadd_ps(zeros, _mm512_cvtepi32_ps(_mm512_set1_epi32(sum)), t);
                }
                let scale = _mm512_mul_ps(_mm512_set1_ps(x.scales[factors]), scales);
                totals[m][c] = _mm512_fmadd_ps(t, scale, totals[m][c]);
            }
        }
    }
    totals
}

/// All rows over `C` blocks: tiles of `M` rows, then of 4, 2 and 1. The first channel of the blocks is column 0 of `dst`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn panel<const M: usize, const C: usize, const FOUR: bool>(
    (x, w, block): (Int8Rows<'_>, &Integers, usize),
    width: usize,
    stride: usize,
    dst: &mut [f32],
) {
    let mut row = 0;
    while row < x.rows() {
        let own = Tile { x, w, row, block };
        let left = x.rows() - row;
        // SAFETY: at least as many rows are left as the tile has; the caller's range of channels has `C` blocks from `block` on.
        let rows = unsafe {
            if left >= M {
                store(
                    &tile::<M, C, FOUR>(&own),
                    width,
                    stride,
                    &mut dst[row * stride..],
                )
            } else if left >= 4 {
                store(
                    &tile::<4, C, FOUR>(&own),
                    width,
                    stride,
                    &mut dst[row * stride..],
                )
            } else if left >= 2 {
                store(
                    &tile::<2, C, FOUR>(&own),
                    width,
                    stride,
                    &mut dst[row * stride..],
                )
            } else {
                store(
                    &tile::<1, C, FOUR>(&own),
                    width,
                    stride,
                    &mut dst[row * stride..],
                )
            }
        };
        row += rows;
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn matmul(
    x: Int8Rows<'_>,
    w: &Integers,
    channels: Range<usize>,
    stride: usize,
    dst: &mut [f32],
) {
    check_integers(&x, w, &channels, stride, dst);
    let mut first = channels.start;
    while first < channels.end {
        let (operands, left) = ((x, w, first / BLOCK), channels.end - first);
        let many = x.rows() > FEW && left >= 4 * BLOCK;
        let blocks = if many { 4 } else { 1 };
        let width = left.min(blocks * BLOCK);
        let dst = &mut dst[first - channels.start..];
        match (blocks, w.bits()) {
            (4, Bits::Eight) => panel::<6, 4, false>(operands, width, stride, dst),
            (4, Bits::Four) => panel::<6, 4, true>(operands, width, stride, dst),
            (_, Bits::Eight) => panel::<6, 1, false>(operands, width, stride, dst),
            (_, Bits::Four) => panel::<6, 1, true>(operands, width, stride, dst),
        }
        first += width;
    }
}
