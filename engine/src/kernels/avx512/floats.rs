//! Products of BF16 activations and row-major BF16 weights by `vdpbf16ps`: two products of each of 16 lanes at once.
//!
//! Called by the AVX-512 backend where the machine has the instruction. An output's sum is defined by the dot product: lane `l` sums the pairs
//! `32 s + 2 l` over the steps `s`, then the lanes are folded as [`LANES`] says. Few rows compute just that, streaming the weights row
//! by row. Many rows lay 64 channels out anew, so that one register holds a pair of 16 channels, and go lane by lane, folding on the way: the
//! same sums in the same order, so the same bits, without a copy of the weights.

#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics are many, named by their prefix; test builds do not lint it"
)]

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use half::bf16;

use super::super::bf16::{Bf16Rows, LANES, Layout, STEP};
use super::super::packed::{BLOCK, Line, Lines};
use super::x86::fold4;

/// Weights of a row that are fetched ahead of their use: 2 KiB, where it helps. They go to the second-level cache: eight rows that lie a power of two apart fill
/// one set of the first-level cache, and what is fetched there too early pushes out what is needed now.
const AHEAD: usize = 1024;
/// Rows of a tile of many rows.
const TILE: usize = 6;
/// Blocks of channels of a tile of many rows.
const BLOCKS: usize = 4;
/// Levels of the tree that folds 16 lanes.
const LEVELS: usize = 5;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn dot(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: both types are 64 bytes of any value.
    unsafe {
        _mm512_dpbf16_ps(
            sum,
            std::mem::transmute::<__m512i, __m512bh>(a),
            std::mem::transmute::<__m512i, __m512bh>(b),
        )
    }
}

/// The values of a row from `i` on: 32, or zeros behind the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn load(row: *const bf16, i: usize, columns: usize) -> __m512i {
    // SAFETY: the caller has checked that the row has `columns` values; masked lanes are not read.
    unsafe {
        let values = row.add(i).cast::<i16>();
        if columns - i >= STEP {
            _mm512_loadu_si512(values.cast())
        } else {
            _mm512_maskz_loadu_epi16((1 << (columns - i)) - 1, values)
        }
    }
}

/// `M` rows of activations times four times `Q` rows of weights: element `[m][q]` holds four sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn dots<const M: usize, const Q: usize, const FETCH: bool>(
    x: *const bf16,
    w: *const bf16,
    columns: usize,
) -> [[__m128; Q]; M] {
    let mut sums = [[[_mm512_setzero_ps(); 4]; Q]; M];
    // SAFETY: the caller has checked `M` and `4 * Q` whole rows.
    let (inputs, weights): ([*const bf16; M], [[*const bf16; 4]; Q]) = unsafe {
        (
            std::array::from_fn(|m| x.add(m * columns)),
            std::array::from_fn(|q| std::array::from_fn(|n| w.add((4 * q + n) * columns))),
        )
    };
    let mut i = 0;
    while i < columns {
        // Behind the end of these rows come the rows of the next tile.
        let next = i + AHEAD;
        let next = if next < columns {
            next
        } else {
            next + (4 * Q - 1) * columns
        };
        // SAFETY: as above; a prefetch reads nothing.
        unsafe {
            // Loops and not `from_fn`: a closure that std calls is compiled without the features.
            let mut rows = [_mm512_setzero_si512(); M];
            for m in 0..M {
                rows[m] = load(inputs[m], i, columns);
            }
            for q in 0..Q {
                for n in 0..4 {
                    if FETCH {
                        let ahead = weights[q][n].wrapping_add(next);
                        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                    }
                    let w = load(weights[q][n], i, columns);
                    for m in 0..M {
                        sums[m][q][n] = dot(sums[m][q][n], rows[m], w);
                    }
                }
            }
        }
        i += STEP;
    }
    let mut folded = [[_mm_setzero_ps(); Q]; M];
    for m in 0..M {
        for q in 0..Q {
            let [a, b, c, d] = sums[m][q];
            folded[m][q] = fold4(a, b, c, d);
        }
    }
    folded
}

/// Whether four rows of weights that nobody fetches ahead come faster than eight that are fetched: it depends on how far the processor's own
/// prefetchers look (on Zen 5 the four win by a sixth, on Zen 4 the eight did), so both are tried once, on memory that no cache holds. The answer
/// never changes a result.
fn reads_ahead() -> bool {
    /// Values of a row, and rows: 64 MiB.
    const TRIED: (usize, usize) = (2048, 1 << 14);
    /// The best of so many counts, in turns: other programs only ever make a read slower.
    const TRIES: usize = 5;
    static ANSWER: LazyLock<bool> = LazyLock::new(|| {
        let mut lines = Lines::zeros(TRIED.0 * TRIED.1 / STEP);
        // Pages that were never written are all the same one.
        lines.all_mut().fill(Line([1; 64]));
        let w: &[bf16] = bytemuck::cast_slice(lines.all());
        let (x, mut dst) = (&w[..TRIED.0], vec![0.0; TRIED.1]);
        let mut best = [Duration::MAX; 2];
        for _ in 0..TRIES {
            for (fetch, best) in [false, true].into_iter().zip(&mut best) {
                let start = Instant::now();
                // SAFETY: only a machine with these features asks.
                unsafe {
                    if fetch {
                        few::<true>(x, w, TRIED.0, TRIED.1, &mut dst);
                    } else {
                        few::<false>(x, w, TRIED.0, TRIED.1, &mut dst);
                    }
                }
                *best = start.elapsed().min(*best);
            }
        }
        best[0] <= best[1]
    });
    *ANSWER
}

/// All rows of both, four rows of weights at a time, or eight where they are fetched ahead.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn few<const FETCH: bool>(x: &[bf16], w: &[bf16], columns: usize, stride: usize, dst: &mut [f32]) {
    let (rows, outputs) = (x.len() / columns, w.len() / columns);
    let mut put = |m: usize, n: usize, sums: __m128| {
        let dst = &mut dst[m * stride + n..];
        // SAFETY: `check_dst` saw that row `m` has all outputs, of which four lie from `n` on.
        unsafe { _mm_storeu_ps(dst[..4].as_mut_ptr(), sums) };
    };
    let mut n = 0;
    while n + 4 <= outputs {
        let eight = FETCH && rows == 1 && n + 8 <= outputs;
        let quads = if eight { 2 } else { 1 };
        let w = w[n * columns..].as_ptr();
        let mut m = 0;
        while m < rows {
            let left = rows - m;
            let x = x[m * columns..].as_ptr();
            // SAFETY: at least so many rows of both are left; `matmul` saw that they are whole.
            unsafe {
                if quads == 2 {
                    let [[low, high]] = dots::<1, 2, FETCH>(x, w, columns);
                    put(m, n, low);
                    put(m, n + 4, high);
                    m += 1;
                } else if left >= 4 {
                    for (i, [sums]) in dots::<4, 1, FETCH>(x, w, columns).into_iter().enumerate() {
                        put(m + i, n, sums);
                    }
                    m += 4;
                } else if left >= 2 {
                    for (i, [sums]) in dots::<2, 1, FETCH>(x, w, columns).into_iter().enumerate() {
                        put(m + i, n, sums);
                    }
                    m += 2;
                } else {
                    let [[sums]] = dots::<1, 1, FETCH>(x, w, columns);
                    put(m, n, sums);
                    m += 1;
                }
            }
        }
        n += 4 * quads;
    }
    for n in n..outputs {
        for m in 0..rows {
            // SAFETY: row `m` and row `n` are whole.
            dst[m * stride + n] = unsafe {
                single(
                    x[m * columns..].as_ptr(),
                    w[n * columns..].as_ptr(),
                    columns,
                )
            };
        }
    }
}

/// One output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn single(x: *const bf16, w: *const bf16, columns: usize) -> f32 {
    let (mut sum, mut i) = (_mm512_setzero_ps(), 0);
    while i < columns {
        // SAFETY: the caller has checked both rows.
        sum = unsafe { dot(sum, load(x, i, columns), load(w, i, columns)) };
        i += STEP;
    }
    _mm_cvtss_f32(fold4(sum, sum, sum, sum))
}

/// Columns of a 16 by 16 matrix of pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn transpose(rows: &[__m512i; 16]) -> [__m512i; 16] {
    let (mut pairs, mut quads, mut columns) = (*rows, *rows, *rows);
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        for half in 0..2 {
            let (a, b) = (pairs[4 * i + half], pairs[4 * i + 2 + half]);
            quads[4 * i + 2 * half] = _mm512_unpacklo_epi64(a, b);
            quads[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    for q in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x44>(quads[q], quads[4 + q]);
        let high = _mm512_shuffle_i32x4::<0xee>(quads[q], quads[4 + q]);
        let more_low = _mm512_shuffle_i32x4::<0x44>(quads[8 + q], quads[12 + q]);
        let more_high = _mm512_shuffle_i32x4::<0xee>(quads[8 + q], quads[12 + q]);
        columns[q] = _mm512_shuffle_i32x4::<0x88>(low, more_low);
        columns[4 + q] = _mm512_shuffle_i32x4::<0xdd>(low, more_low);
        columns[8 + q] = _mm512_shuffle_i32x4::<0x88>(high, more_high);
        columns[12 + q] = _mm512_shuffle_i32x4::<0xdd>(high, more_high);
    }
    columns
}

/// Lays `C` blocks of channels out as `[lane][step][block][channel]` pairs, lanes in the order of [`LANES`]; channels that do not exist are 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn lay_out<const C: usize>(w: &[bf16], columns: usize, panel: &mut [Line]) {
    let (outputs, steps) = (w.len() / columns, columns.div_ceil(STEP));
    assert_eq!(panel.len(), 16 * steps * C, "the panel holds all blocks");
    for block in 0..C {
        for step in 0..steps {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (channel, row) in rows.iter_mut().enumerate() {
                let channel = block * BLOCK + channel;
                if channel < outputs {
                    // SAFETY: the channel's row is whole.
                    *row = unsafe { load(w[channel * columns..].as_ptr(), step * STEP, columns) };
                }
            }
            let lanes = transpose(&rows);
            for (position, lane) in LANES.iter().enumerate() {
                let line: *mut Line = &raw mut panel[(position * steps + step) * C + block];
                // SAFETY: a line is one aligned register.
                unsafe { _mm512_store_si512(line.cast(), lanes[*lane]) };
            }
        }
    }
}

/// The outputs of `M` rows and `C` blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn tile<const M: usize, const C: usize>(
    x: *const i32,
    panel: *const Line,
    steps: usize,
) -> [[__m512; C]; M] {
    let mut tree = [[[_mm512_setzero_ps(); C]; M]; LEVELS];
    // SAFETY: the caller has checked `M` rows of 16 lanes of `steps` pairs.
    let rows: [*const i32; M] = std::array::from_fn(|m| unsafe { x.add(m * 16 * steps) });
    for lane in 0..16 {
        let mut sums = [[_mm512_setzero_ps(); C]; M];
        // SAFETY: as above, and as many lines of each block.
        unsafe {
            let first = lane * steps;
            let mut lines = panel.add(first * C);
            for pair in first..first + steps {
                let mut w = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    w[c] = _mm512_load_si512(lines.add(c).cast());
                }
                for m in 0..M {
                    let x = _mm512_set1_epi32(rows[m].add(pair).read_unaligned());
                    for c in 0..C {
                        sums[m][c] = dot(sums[m][c], x, w[c]);
                    }
                }
                lines = lines.add(C);
            }
        }
        // As in a binary counter: two sums of one level make one of the next.
        let mut level = 0;
        while lane >> level & 1 == 1 {
            for m in 0..M {
                for c in 0..C {
                    sums[m][c] = _mm512_add_ps(tree[level][m][c], sums[m][c]);
                }
            }
            level += 1;
        }
        tree[level] = sums;
    }
    tree[LEVELS - 1]
}

/// All rows times the channels of one panel of `C` blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn many<const C: usize>(
    x: Bf16Rows<'_>,
    w: &[bf16],
    panel: &mut Vec<Line>,
    stride: usize,
    dst: &mut [f32],
) {
    let (columns, rows) = (x.columns, x.rows());
    let (width, steps) = (w.len() / columns, columns.div_ceil(STEP));
    panel.resize(16 * steps * C, Line([0; 64]));
    lay_out::<C>(w, columns, panel);
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        let own = x.values[row * steps * STEP..].as_ptr().cast();
        let dst = &mut dst[row * stride..];
        // SAFETY: at least so many rows are left, each of `steps` whole steps; the panel was just laid out.
        row += unsafe {
            if left >= TILE {
                store(
                    &tile::<TILE, C>(own, panel.as_ptr(), steps),
                    width,
                    stride,
                    dst,
                )
            } else if left >= 3 {
                store(
                    &tile::<3, C>(own, panel.as_ptr(), steps),
                    width,
                    stride,
                    dst,
                )
            } else {
                store(
                    &tile::<1, C>(own, panel.as_ptr(), steps),
                    width,
                    stride,
                    dst,
                )
            }
        };
    }
}

/// Writes the first `width` channels of each row; returns the number of rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn store<const M: usize, const C: usize>(
    totals: &[[__m512; C]; M],
    width: usize,
    stride: usize,
    dst: &mut [f32],
) -> usize {
    for (m, totals) in totals.iter().enumerate() {
        let dst = &mut dst[m * stride..][..width];
        for (dst, totals) in dst.chunks_mut(BLOCK).zip(totals) {
            let keep = u16::MAX >> (BLOCK - dst.len());
            // SAFETY: the mask keeps as many lanes as the piece has values.
            unsafe { _mm512_mask_storeu_ps(dst.as_mut_ptr(), keep, *totals) };
        }
    }
    M
}

/// `x · wᵀ`; the caller has checked that all rows are whole and that the result fits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn matmul(x: Bf16Rows<'_>, w: &[bf16], stride: usize, dst: &mut [f32]) {
    thread_local! {
        static PANEL: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }
    if x.layout == Layout::Rows {
        if reads_ahead() {
            few::<false>(x.values, w, x.columns, stride, dst);
        } else {
            few::<true>(x.values, w, x.columns, stride, dst);
        }
        return;
    }
    PANEL.with_borrow_mut(|panel| {
        for (index, w) in w.chunks(BLOCKS * BLOCK * x.columns).enumerate() {
            let dst = &mut dst[index * BLOCKS * BLOCK..];
            if w.len() > BLOCK * x.columns {
                many::<BLOCKS>(x, w, panel, stride, dst);
            } else {
                many::<1>(x, w, panel, stride, dst);
            }
        }
    });
}
