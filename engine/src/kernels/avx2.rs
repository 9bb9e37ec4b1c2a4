//! AVX2 and FMA kernels: 8 lanes a register; what does not fill a register is added one by one.
//!
//! As in the AVX-512 kernels, a dot product has its own eight running sums and one fixed order of folding, whatever the tile around it.
#![expect(
    unsafe_code,
    reason = "instruction sets are chosen at run time and tiles are read through pointers"
)]

use super::Backend;

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn detect() -> Option<&'static dyn Backend> {
    None
}

#[cfg(target_arch = "x86_64")]
pub(super) fn detect() -> Option<&'static dyn Backend> {
    x86::Avx2::detect().map(|backend| backend as &'static dyn Backend)
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

    use super::super::{Backend, Matrix, Rotation, Values, check_int8, check_weighted, lanes};
    use crate::quant::{Int8Rows, PackedInt8};

    /// Exists only when the features were seen: the safety of every call below rests on that.
    #[derive(Debug)]
    pub(super) struct Avx2(());

    impl Avx2 {
        pub(super) fn detect() -> Option<&'static Self> {
            static BACKEND: Avx2 = Avx2(());
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
                .then_some(&BACKEND)
        }
    }

    /// Sums the 8 lanes of four registers, in one fixed order, into the four lanes of the result.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn fold4(a: __m256, b: __m256, c: __m256, d: __m256) -> __m128 {
        let sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_add_ps(
            _mm256_castps256_ps128(sums),
            _mm256_extractf128_ps::<1>(sums),
        )
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load_f32(values: *const f32) -> __m256 {
        // SAFETY: the caller has checked that 8 values can be read.
        unsafe { _mm256_loadu_ps(values) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load_bf16(values: *const bf16) -> __m256 {
        // SAFETY: the caller has checked that 8 values can be read.
        let half = unsafe { _mm_loadu_si128(values.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
    }

    macro_rules! matmul {
        ($matmul:ident, $tile:ident, $element:ty, $load:ident, $read:expr) => {
            /// `M` rows of `x` times `N` (at most 4) rows of `w`.
            #[inline]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn $tile<const M: usize, const N: usize>(
                x: *const f32,
                w: *const $element,
                columns: usize,
            ) -> [[f32; 4]; M] {
                let mut sums = [[_mm256_setzero_ps(); 4]; M];
                let mut results = [[0.0_f32; 4]; M];
                let whole = columns / 8 * 8;
                // SAFETY: the caller has checked that `M` rows of `x` and `N` rows of `w` have `columns` values.
                unsafe {
                    let x: [*const f32; M] = std::array::from_fn(|m| x.add(m * columns));
                    let w: [*const $element; N] = std::array::from_fn(|n| w.add(n * columns));
                    let mut i = 0;
                    while i < whole {
                        for n in 0..N {
                            let ws = $load(w[n].add(i));
                            for m in 0..M {
                                sums[m][n] = _mm256_fmadd_ps(load_f32(x[m].add(i)), ws, sums[m][n]);
                            }
                        }
                        i += 8;
                    }
                    for m in 0..M {
                        _mm_storeu_ps(
                            results[m].as_mut_ptr(),
                            fold4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]),
                        );
                        for n in 0..N {
                            for i in whole..columns {
                                results[m][n] += *x[m].add(i) * $read(*w[n].add(i));
                            }
                        }
                    }
                }
                results
            }

            #[target_feature(enable = "avx2,fma")]
            fn $matmul(x: &[f32], w: &[$element], columns: usize, stride: usize, dst: &mut [f32]) {
                let (m_end, n_end) = (x.len() / columns, w.len() / columns);
                let mut m = 0;
                while m < m_end {
                    let many = m + 2 <= m_end;
                    let rows = if many { 2 } else { 1 };
                    let x = x[m * columns..].as_ptr();
                    let mut n = 0;
                    while n < n_end {
                        let wide = n + 4 <= n_end;
                        let width = if wide { 4 } else { 1 };
                        let w = w[n * columns..].as_ptr();
                        // SAFETY: `Matrix::check` saw whole rows; `m + M <= m_end` and `n + N <= n_end` in each arm.
                        let tile = unsafe {
                            match (many, wide) {
                                (true, true) => $tile::<2, 4>(x, w, columns),
                                (true, false) => $tile::<2, 1>(x, w, columns),
                                (false, true) => [$tile::<1, 4>(x, w, columns)[0]; 2],
                                (false, false) => [$tile::<1, 1>(x, w, columns)[0]; 2],
                            }
                        };
                        for (row, sums) in tile.iter().enumerate().take(rows) {
                            dst[(m + row) * stride + n..][..width].copy_from_slice(&sums[..width]);
                        }
                        n += width;
                    }
                    m += rows;
                }
            }
        };
    }

    matmul!(matmul_f32, tile_f32, f32, load_f32, |value: f32| value);
    matmul!(matmul_bf16, tile_bf16, bf16, load_bf16, |value: bf16| {
        f32::from_bits(u32::from(value.to_bits()) << 16)
    });

    #[target_feature(enable = "avx2,fma")]
    fn weighted_sum(weights: &[f32], values: &[f32], columns: usize, dst: &mut [f32]) {
        let (_, terms) = check_weighted(weights, values, columns, dst);
        dst.fill(0.0);
        for (weights, dst) in weights
            .chunks_exact(terms.max(1))
            .zip(dst.chunks_exact_mut(columns))
        {
            for (weight, values) in weights.iter().zip(values.chunks_exact(columns)) {
                for (dst, value) in dst.iter_mut().zip(values) {
                    *dst = weight.mul_add(*value, *dst);
                }
            }
        }
    }

    /// One row of activations times one block of 16 channels: INT32 sums of `(w + 128) * x`. Bytes are widened to 16 bits first, because
    /// `vpmaddubsw` would saturate.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn int8_tile(
        x: *const i8,
        row_len: usize,
        block: *const u8,
    ) -> [i32; PackedInt8::BLOCK] {
        // Each register holds two partial sums of four channels.
        let mut sums = [_mm256_setzero_si256(); 4];
        for group in 0..row_len / PackedInt8::GROUP {
            // SAFETY: the caller has checked a row of `row_len` activations and a block of `16 * row_len` weights.
            unsafe {
                let inputs = x
                    .add(group * PackedInt8::GROUP)
                    .cast::<i32>()
                    .read_unaligned();
                let inputs = _mm256_cvtepi8_epi16(_mm_set1_epi32(inputs));
                for (quarter, sum) in sums.iter_mut().enumerate() {
                    let weights = _mm256_cvtepu8_epi16(_mm_loadu_si128(
                        block.add(group * 64 + quarter * 16).cast(),
                    ));
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(weights, inputs));
                }
            }
        }
        let mut result = [0; PackedInt8::BLOCK];
        for (sum, channels) in sums.iter().zip(result.chunks_exact_mut(4)) {
            let mut pairs = [0_i32; 8];
            // SAFETY: `pairs` has room for one register.
            unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), *sum) };
            for (channel, pair) in channels.iter_mut().zip(pairs.chunks_exact(2)) {
                *channel = pair[0] + pair[1];
            }
        }
        result
    }

    #[target_feature(enable = "avx2,fma")]
    #[expect(
        clippy::cast_precision_loss,
        reason = "the definition: the INT32 sum is rounded to FP32 once"
    )]
    fn matmul_int8(
        x: Int8Rows<'_>,
        w: &PackedInt8,
        channels: Range<usize>,
        stride: usize,
        dst: &mut [f32],
    ) {
        check_int8(&x, w, &channels, stride, dst);
        for first in channels.clone().step_by(PackedInt8::BLOCK) {
            let block =
                w.data()[first / PackedInt8::BLOCK * w.block_len()..][..w.block_len()].as_ptr();
            for m in 0..x.rows() {
                // SAFETY: `check_int8` saw whole rows and blocks.
                let sums = unsafe { int8_tile(x.row(m).as_ptr(), x.row_len, block) };
                for (channel, sum) in (first..channels.end).zip(sums) {
                    let sum = (sum - 128 * x.sum[m]) as f32;
                    dst[m * stride + channel - channels.start] =
                        sum * x.scale[m] * w.scale()[channel];
                }
            }
        }
    }

    lanes_for!("avx2,fma");

    impl Backend for Avx2 {
        fn name(&self) -> &'static str {
            "avx2"
        }

        fn matmul(&self, x: &[f32], w: Matrix<'_>, stride: usize, dst: &mut [f32]) {
            w.check(x, stride, dst);
            for (first, w) in w.cached_parts() {
                let dst = &mut dst[first..];
                // SAFETY: an `Avx2` exists, so its features were detected.
                unsafe {
                    match w.values {
                        Values::F32(values) => matmul_f32(x, values, w.columns, stride, dst),
                        Values::Bf16(values) => matmul_bf16(x, values, w.columns, stride, dst),
                    }
                }
            }
        }

        fn matmul_int8(
            &self,
            x: Int8Rows<'_>,
            w: &PackedInt8,
            channels: Range<usize>,
            stride: usize,
            dst: &mut [f32],
        ) {
            // SAFETY: an `Avx2` exists, so its features were detected.
            unsafe { matmul_int8(x, w, channels, stride, dst) }
        }

        fn weighted_sum(&self, weights: &[f32], values: &[f32], columns: usize, dst: &mut [f32]) {
            // SAFETY: an `Avx2` exists, so its features were detected.
            unsafe { weighted_sum(weights, values, columns, dst) }
        }

        lanes_methods!();
    }
}
