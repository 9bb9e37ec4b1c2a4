//! What attention needs on AVX-512: weighted sums of rows, which are its products of queries and keys and of weights and values, and transposing.
//!
//! Called by the AVX-512 backend alone. A sum goes from the first value to the last in one lane, so the tile around it never changes it.

#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics are many, named by their prefix; test builds do not lint it"
)]

use std::arch::x86_64::*;

use super::super::{Strided, check_weighted};

/// Lanes of a register.
const LANES: usize = 16;

/// `M` rows of weights times `C` registers of channels; the last register holds `tail` channels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile<const M: usize, const C: usize>(
    (weights, step): (*const f32, usize),
    (values, columns, terms): (*const f32, usize, usize),
    tail: u16,
    (dst, stride): (*mut f32, usize),
) {
    let mut sums = [[_mm512_setzero_ps(); C]; M];
    // SAFETY: the caller has checked `M` rows of `terms` weights, `terms` rows of `columns` values with `C` registers of channels (the
    // last one masked), and the same channels of `M` rows of `dst`.
    unsafe {
        let weights: [*const f32; M] = std::array::from_fn(|m| weights.add(m * step));
        let mut values = values;
        for n in 0..terms {
            let mut row = [_mm512_setzero_ps(); C];
            for c in 0..C {
                let keep = if c + 1 == C { tail } else { u16::MAX };
                row[c] = _mm512_maskz_loadu_ps(keep, values.add(c * LANES));
            }
            for m in 0..M {
                let weight = _mm512_set1_ps(*weights[m].add(n));
                for c in 0..C {
                    sums[m][c] = _mm512_fmadd_ps(weight, row[c], sums[m][c]);
                }
            }
            // Wrapping, because behind the last row there may be less than a row.
            values = values.wrapping_add(columns);
        }
        for m in 0..M {
            for c in 0..C {
                let keep = if c + 1 == C { tail } else { u16::MAX };
                _mm512_mask_storeu_ps(dst.add(m * stride + c * LANES), keep, sums[m][c]);
            }
        }
    }
}

/// See [`Backend::weighted_sum`](super::super::Backend::weighted_sum).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn weighted_sum(
    weights: Strided<'_>,
    values: &[f32],
    columns: usize,
    stride: usize,
    dst: &mut [f32],
) {
    let terms = check_weighted(weights, values, columns, stride, dst);
    let mut column = 0;
    while column < columns {
        let left = columns - column;
        let wide = left >= 4 * LANES;
        let width = if wide { 4 * LANES } else { left.min(LANES) };
        let tail = u16::MAX >> (LANES - width.min(LANES));
        let mut m = 0;
        while m < weights.rows {
            let rows = weights.rows - m;
            // SAFETY: `check_weighted` saw whole rows; each arm has at most the rows that are left, and `column + width <= columns`.
            unsafe {
                let weights = (weights.values.as_ptr().add(m * weights.step), weights.step);
                let values = (values.as_ptr().add(column), columns, terms);
                let dst = (dst.as_mut_ptr().add(m * stride + column), stride);
                m += match (rows, wide) {
                    (6.., true) => {
                        tile::<6, 4>(weights, values, tail, dst);
                        6
                    }
                    (4.., true) => {
                        tile::<4, 4>(weights, values, tail, dst);
                        4
                    }
                    (2.., true) => {
                        tile::<2, 4>(weights, values, tail, dst);
                        2
                    }
                    (_, true) => {
                        tile::<1, 4>(weights, values, tail, dst);
                        1
                    }
                    (4.., false) => {
                        tile::<4, 1>(weights, values, tail, dst);
                        4
                    }
                    (_, false) => {
                        tile::<1, 1>(weights, values, tail, dst);
                        1
                    }
                };
            }
        }
        column += width;
    }
}

/// See [`Backend::transpose`](super::super::Backend::transpose).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn transpose(values: &[f32], columns: usize, dst: &mut [f32]) {
    let rows = values.len() / columns;
    assert!(
        values.len() == rows * columns && dst.len() == values.len(),
        "the matrix is whole and fits"
    );
    for row in (0..rows).step_by(LANES) {
        let height = LANES.min(rows - row);
        let down = u16::MAX >> (LANES - height);
        for column in (0..columns).step_by(LANES) {
            let width = LANES.min(columns - column);
            let across = u16::MAX >> (LANES - width);
            let mut square = [_mm512_setzero_si512(); LANES];
            for (i, square) in square.iter_mut().enumerate().take(height) {
                // SAFETY: row `row + i` has `width` values from `column` on.
                *square = unsafe {
                    let from = values.as_ptr().add((row + i) * columns + column);
                    _mm512_maskz_loadu_epi32(across, from.cast())
                };
            }
            for (i, square) in super::floats::transpose(&square)
                .iter()
                .enumerate()
                .take(width)
            {
                // SAFETY: column `column + i` has `height` values from `row` on.
                unsafe {
                    let to = dst.as_mut_ptr().add((column + i) * rows + row);
                    _mm512_mask_storeu_epi32(to.cast(), down, *square);
                }
            }
        }
    }
}
