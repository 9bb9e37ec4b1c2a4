//! AVX2 and FMA kernels: 8 lanes a register; what does not fill a register is added one by one.
//!
//! As in the AVX-512 kernels, a dot product has its own eight running sums and one fixed order of folding, whatever the tile around it.
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

    use super::super::packed::{BLOCK, Bits, Int8Rows, Integers, Line};
    use super::super::{
        Backend, Matrix, Rotation, Strided, Values, check_integers, check_weighted, lanes,
    };

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
    fn weighted_sum(
        weights: Strided<'_>,
        values: &[f32],
        columns: usize,
        stride: usize,
        dst: &mut [f32],
    ) {
        let terms = check_weighted(weights, values, columns, stride, dst);
        for m in 0..weights.rows {
            let dst = &mut dst[m * stride..][..columns];
            dst.fill(0.0);
            let weights = &weights.values[m * weights.step..][..terms];
            for (weight, values) in weights.iter().zip(values.chunks_exact(columns)) {
                for (dst, value) in dst.iter_mut().zip(values) {
                    *dst = weight.mul_add(*value, *dst);
                }
            }
        }
    }

    /// `x * code` of 8 channels and 4 inputs each, added in pairs and again in pairs: the pairs of `vpmaddubsw` must fit 16 bits.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn add_products(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        let pairs = _mm256_maddubs_epi16(unsigned, signed);
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    /// `M` rows of activations times one group of a block: INT32 sums of `x * code` (the offset is taken off).
    ///
    /// 8-bit weights are made signed and multiply as `|w| * (x with the sign of w)`, since an unsigned byte times a byte, twice, does not fit 16 bits.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn int8_tile<const M: usize>(
        x: *const i8,
        row_len: usize,
        bits: Bits,
        lines: &[Line],
    ) -> [[__m256i; 2]; M] {
        let mut sums = [[_mm256_setzero_si256(); 2]; M];
        for (index, line) in lines.iter().enumerate() {
            for half in 0..2 {
                // SAFETY: a line has 64 bytes; the caller has checked `M` rows of whole groups of activations.
                unsafe {
                    let codes = _mm256_load_si256(line.0.as_ptr().add(half * 32).cast());
                    for m in 0..M {
                        let inputs = x.add(m * row_len + index * bits.inputs()).cast::<i32>();
                        let first = _mm256_set1_epi32(inputs.read_unaligned());
                        let sum = sums[m][half];
                        sums[m][half] = if bits == Bits::Eight {
                            let codes = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
                            add_products(
                                sum,
                                _mm256_abs_epi8(codes),
                                _mm256_sign_epi8(first, codes),
                            )
                        } else {
                            let nibble = _mm256_set1_epi8(15);
                            let low = _mm256_and_si256(codes, nibble);
                            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
                            let second = _mm256_set1_epi32(inputs.add(1).read_unaligned());
                            add_products(add_products(sum, low, first), high, second)
                        };
                    }
                }
            }
        }
        sums
    }

    /// `M` rows from `m` on times one block.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn integers_rows<const M: usize>(
        x: &Int8Rows<'_>,
        m: usize,
        w: &Integers,
        block: usize,
    ) -> [[f32; BLOCK]; M] {
        let (groups, bits) = (w.groups(), w.bits());
        let mut totals = [[0.0; BLOCK]; M];
        for (group, lines) in w.block(block).chunks_exact(w.group_lines()).enumerate() {
            let inputs = &x.values[m * groups.row_len() + group * groups.padded()..];
            // SAFETY: `check_integers` saw rows of whole groups, and the caller `M` rows from `m` on.
            let sums = unsafe { int8_tile::<M>(inputs.as_ptr(), groups.row_len(), bits, lines) };
            for (row, sums) in sums.iter().enumerate() {
                let mut products = [0_i32; BLOCK];
                // SAFETY: `products` has room for two registers.
                unsafe {
                    _mm256_storeu_si256(products.as_mut_ptr().cast(), sums[0]);
                    _mm256_storeu_si256(products.as_mut_ptr().add(8).cast(), sums[1]);
                }
                let factors = (m + row) * groups.count() + group;
                // The sign trick has taken the offset of 8-bit weights off.
                let offset = if bits == Bits::Eight {
                    0
                } else {
                    i32::from(bits.offset())
                };
                lanes::scale_group(
                    &mut totals[row],
                    products.map(|products| products - offset * x.sums[factors]),
                    (x.scales[factors], x.sums[factors]),
                    w.scales(block, group),
                    w.zeros(block, group),
                );
            }
        }
        totals
    }

    #[target_feature(enable = "avx2,fma")]
    fn matmul_integers(
        x: Int8Rows<'_>,
        w: &Integers,
        channels: Range<usize>,
        stride: usize,
        dst: &mut [f32],
    ) {
        const ROWS: usize = 4;
        check_integers(&x, w, &channels, stride, dst);
        for first in channels.clone().step_by(BLOCK) {
            let (block, width) = (first / BLOCK, BLOCK.min(channels.end - first));
            let mut m = 0;
            while m < x.rows() {
                let rows = if m + ROWS <= x.rows() { ROWS } else { 1 };
                // SAFETY: `m + rows <= x.rows()` in both arms.
                let totals = unsafe {
                    if rows == ROWS {
                        integers_rows::<ROWS>(&x, m, w, block)
                    } else {
                        [integers_rows::<1>(&x, m, w, block)[0]; ROWS]
                    }
                };
                for (row, totals) in (m..m + rows).zip(&totals) {
                    dst[row * stride + first - channels.start..][..width]
                        .copy_from_slice(&totals[..width]);
                }
                m += rows;
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

        fn matmul_integers(
            &self,
            x: Int8Rows<'_>,
            w: &Integers,
            channels: Range<usize>,
            stride: usize,
            dst: &mut [f32],
        ) {
            // SAFETY: an `Avx2` exists, so its features were detected.
            unsafe { matmul_integers(x, w, channels, stride, dst) }
        }

        fn weighted_sum(
            &self,
            weights: Strided<'_>,
            values: &[f32],
            columns: usize,
            stride: usize,
            dst: &mut [f32],
        ) {
            // SAFETY: an `Avx2` exists, so its features were detected.
            unsafe { weighted_sum(weights, values, columns, stride, dst) }
        }

        lanes_methods!();
    }
}
