//! AVX-512 kernels (F, BW, DQ, VL, VNNI for INT8, and BF16 where there is such a thing): 16 lanes a register, masks for tails.
//!
//! A dot product runs over one register of 16 running sums, whatever the tile around it, and is folded in one fixed order: so an output has
//! the same bits in a batch of any size.
#![expect(
    clippy::cast_ptr_alignment,
    reason = "what is read through such a pointer is read unaligned"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "tiles are unrolled over constant bounds"
)]
#![expect(
    unsafe_code,
    reason = "instruction sets are chosen at run time and tiles are read through pointers"
)]

#[cfg(target_arch = "x86_64")]
mod attention;
#[cfg(target_arch = "x86_64")]
mod floats;
#[cfg(target_arch = "x86_64")]
mod integers;

use super::Backend;

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn detect() -> Vec<&'static dyn Backend> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
pub(super) fn detect() -> Vec<&'static dyn Backend> {
    let all = x86::Avx512::detect();
    all.map(|backend| backend as &'static dyn Backend).collect()
}

#[cfg(target_arch = "x86_64")]
#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics are many, named by their prefix; test builds do not lint it"
)]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use half::bf16;

    use super::super::bf16::{Bf16Rows, Layout, MANY_ROWS, multiply_widened};
    use super::super::packed::{Int8Rows, Integers};
    use super::super::{Backend, Matrix, Rotation, Strided, Values, lanes};

    /// Exists only when the features were seen: the safety of every call below rests on that.
    #[derive(Debug)]
    pub(super) struct Avx512 {
        /// Whether BF16 is multiplied as such.
        bf16: bool,
    }

    impl Avx512 {
        /// With BF16 where the machine has it, and without.
        pub(super) fn detect() -> impl Iterator<Item = &'static Self> {
            static WITH: Avx512 = Avx512 { bf16: true };
            static WITHOUT: Avx512 = Avx512 { bf16: false };
            let all = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            let bf16 = all && is_x86_feature_detected!("avx512bf16");
            let found = [bf16.then_some(&WITH), all.then_some(&WITHOUT)];
            found.into_iter().flatten()
        }
    }

    /// Sums the 16 lanes of four registers, in one fixed order, into the four lanes of the result.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn fold4(a: __m512, b: __m512, c: __m512, d: __m512) -> __m128 {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let low = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
        let high = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
        let sums = _mm512_add_ps(low, high);
        let half = _mm256_add_ps(
            _mm512_castps512_ps256(sums),
            _mm512_extractf32x8_ps::<1>(sums),
        );
        _mm_add_ps(
            _mm256_castps256_ps128(half),
            _mm256_extractf128_ps::<1>(half),
        )
    }

    /// The first `count` (below 16) lanes.
    const fn mask(count: usize) -> u16 {
        (1 << count) - 1
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_f32(values: *const f32) -> __m512 {
        // SAFETY: the caller has checked that 16 values can be read.
        unsafe { _mm512_loadu_ps(values) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_tail_f32(values: *const f32, count: usize) -> __m512 {
        // SAFETY: masked lanes are not read; the caller has checked `count` values.
        unsafe { _mm512_maskz_loadu_ps(mask(count), values) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn widen16(half: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_bf16(values: *const bf16) -> __m512 {
        // SAFETY: the caller has checked that 16 values can be read.
        widen16(unsafe { _mm256_loadu_si256(values.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_tail_bf16(values: *const bf16, count: usize) -> __m512 {
        // SAFETY: masked lanes are not read; the caller has checked `count` values.
        widen16(unsafe { _mm256_maskz_loadu_epi16(mask(count), values.cast()) })
    }

    macro_rules! matmul {
        ($matmul:ident, $tile:ident, $element:ty, $load:ident, $load_tail:ident) => {
            /// `M` rows of `x` times `N` (at most 4) rows of `w`: element `[m]` holds the sums of row `m` in its first `N` lanes.
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn $tile<const M: usize, const N: usize>(
                x: *const f32,
                w: *const $element,
                columns: usize,
            ) -> [__m128; M] {
                let mut sums = [[_mm512_setzero_ps(); 4]; M];
                let whole = columns / 16 * 16;
                let mut i = 0;
                // SAFETY: the caller has checked that `M` rows of `x` and `N` rows of `w` have `columns` values.
                unsafe {
                    let x: [*const f32; M] = std::array::from_fn(|m| x.add(m * columns));
                    let w: [*const $element; N] = std::array::from_fn(|n| w.add(n * columns));
                    while i < whole {
                        let mut ws = [_mm512_setzero_ps(); N];
                        for n in 0..N {
                            ws[n] = $load(w[n].add(i));
                        }
                        for m in 0..M {
                            let xs = load_f32(x[m].add(i));
                            for n in 0..N {
                                sums[m][n] = _mm512_fmadd_ps(xs, ws[n], sums[m][n]);
                            }
                        }
                        i += 16;
                    }
                    if i < columns {
                        for m in 0..M {
                            let xs = load_tail_f32(x[m].add(i), columns - i);
                            for n in 0..N {
                                let ws = $load_tail(w[n].add(i), columns - i);
                                sums[m][n] = _mm512_fmadd_ps(xs, ws, sums[m][n]);
                            }
                        }
                    }
                }
                let mut folded = [_mm_setzero_ps(); M];
                for m in 0..M {
                    folded[m] = fold4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
                }
                folded
            }

            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn $matmul(x: &[f32], w: &[$element], columns: usize, stride: usize, dst: &mut [f32]) {
                let (m_end, n_end) = (x.len() / columns, w.len() / columns);
                let mut m = 0;
                while m < m_end {
                    let many = m + 4 <= m_end;
                    let rows = if many { 4 } else { 1 };
                    let x = x[m * columns..].as_ptr();
                    let mut n = 0;
                    while n < n_end {
                        let wide = n + 4 <= n_end;
                        let width = if wide { 4 } else { 1 };
                        let w = w[n * columns..].as_ptr();
                        // SAFETY: `Matrix::check` saw whole rows; `m + M <= m_end` and `n + N <= n_end` in each arm.
                        let tile = unsafe {
                            match (many, wide) {
                                (true, true) => $tile::<4, 4>(x, w, columns),
                                (true, false) => $tile::<4, 1>(x, w, columns),
                                (false, true) => [$tile::<1, 4>(x, w, columns)[0]; 4],
                                (false, false) => [$tile::<1, 1>(x, w, columns)[0]; 4],
                            }
                        };
                        for (row, sums) in tile.iter().enumerate().take(rows) {
                            let dst = &mut dst[(m + row) * stride + n..];
                            if wide {
                                // SAFETY: `check_dst` saw that row `m` has all `n_end` columns.
                                unsafe { _mm_storeu_ps(dst.as_mut_ptr(), *sums) };
                            } else {
                                dst[0] = _mm_cvtss_f32(*sums);
                            }
                        }
                        n += width;
                    }
                    m += rows;
                }
            }
        };
    }

    matmul!(matmul_f32, tile_f32, f32, load_f32, load_tail_f32);
    matmul!(matmul_bf16, tile_bf16, bf16, load_bf16, load_tail_bf16);

    lanes_for!("avx512f,avx512bw,avx512dq,avx512vl");

    impl Backend for Avx512 {
        fn name(&self) -> &'static str {
            if self.bf16 {
                "avx512"
            } else {
                "avx512 without bf16"
            }
        }

        fn matmul(&self, x: &[f32], w: Matrix<'_>, stride: usize, dst: &mut [f32]) {
            w.check(x, stride, dst);
            for (first, w) in w.cached_parts() {
                let dst = &mut dst[first..];
                // SAFETY: an `Avx512` exists, so its features were detected.
                unsafe {
                    match w.values {
                        Values::F32(values) => matmul_f32(x, values, w.columns, stride, dst),
                        Values::Bf16(values) => matmul_bf16(x, values, w.columns, stride, dst),
                    }
                }
            }
        }

        fn bf16_layout(&self, rows: usize) -> Layout {
            if self.bf16 && rows >= MANY_ROWS {
                Layout::Lanes
            } else {
                Layout::Rows
            }
        }

        fn matmul_bf16(&self, x: Bf16Rows<'_>, w: Matrix<'_>, stride: usize, dst: &mut [f32]) {
            w.check_bf16(&x, stride, dst);
            match w.values {
                // SAFETY: with `bf16` its feature was detected.
                Values::Bf16(values) if self.bf16 => unsafe {
                    super::floats::matmul(x, values, stride, dst);
                },
                _ => multiply_widened(x, w, |x, w, first| {
                    self.matmul(x, w, stride, &mut dst[first..]);
                }),
            }
        }

        fn matmul_integers(
            &self,
            x: Int8Rows<'_>,
            w: &Integers,
            channels: Range<usize>,
            stride: usize,
            dst: &mut [f32],
        ) {
            // SAFETY: an `Avx512` exists, so its features were detected.
            unsafe { super::integers::matmul(x, w, channels, stride, dst) }
        }

        fn weighted_sum(
            &self,
            weights: Strided<'_>,
            values: &[f32],
            columns: usize,
            stride: usize,
            dst: &mut [f32],
        ) {
            // SAFETY: an `Avx512` exists, so its features were detected.
            unsafe { super::attention::weighted_sum(weights, values, columns, stride, dst) }
        }

        fn transpose(&self, values: &[f32], columns: usize, dst: &mut [f32]) {
            // SAFETY: an `Avx512` exists, so its features were detected.
            unsafe { super::attention::transpose(values, columns, dst) }
        }

        lanes_methods!();
    }
}
