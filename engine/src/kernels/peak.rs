//! What the machine could do if nothing but the arithmetic counted: loops that never leave the registers, and a plain read of memory.
//!
//! `bench` divides by these rates; nothing that serves calls them. A machine without an instruction has no peak of it, and then none is claimed.
#![expect(unsafe_code, reason = "instruction sets are chosen at run time")]

/// An instruction whose peak is asked for: multiply and add on each lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// `vpdpbusd`: 64 products of bytes.
    Int8,
    /// `vdpbf16ps`: 32 products of BF16.
    Bf16,
    /// `vfmadd231ps`: 16 products of FP32.
    Fp32,
}

/// Runs `rounds` rounds of independent multiply-adds on this thread. Returns the operations (two a product), or `None` without the instruction.
pub fn spin(unit: Unit, rounds: u32) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        x86::spin(unit, rounds)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (unit, rounds);
        None
    }
}

/// Reads all values once with the widest loads and returns their sum, which only keeps the reads from being left out. Whether fetching `ahead` of
/// them helps is the machine's secret: try both.
pub fn read(values: &[u64], ahead: bool) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature was seen.
        return unsafe {
            if ahead {
                x86::read::<true>(values)
            } else {
                x86::read::<false>(values)
            }
        };
    }
    let _ = ahead;
    values.iter().fold(0, |sum, value| sum.wrapping_add(*value))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_add_epi64, _mm512_castsi512_ps,
        _mm512_dpbf16_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_si512,
        _mm512_reduce_add_epi64, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512,
    };
    use std::hint::black_box;

    use super::Unit;

    /// Registers that sum: more than latency times issue width on every machine so far.
    const SUMS: usize = 24;
    /// Bytes that a read is fetched ahead.
    const AHEAD: usize = 2048;

    macro_rules! peak {
        ($name:ident, $features:literal, $start:expr, $one:expr, $step:expr) => {
            #[target_feature(enable = $features)]
            #[allow(
                unused_unsafe,
                reason = "some of the intrinsics are safe where the features are on"
            )]
            fn $name(rounds: u32) {
                // SAFETY: only registers are touched, and the features are on.
                unsafe {
                    let mut sums: [_; SUMS] = std::array::from_fn(|i| $start(i));
                    let (a, b) = (black_box($one), black_box($one));
                    for _ in 0..rounds {
                        for sum in &mut sums {
                            *sum = $step(*sum, a, b);
                        }
                    }
                    black_box(sums);
                }
            }
        };
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "a few dozen registers"
    )]
    const fn index(i: usize) -> i32 {
        i as i32
    }

    peak!(
        int8,
        "avx512f,avx512vnni",
        |i| _mm512_set1_epi32(index(i)),
        _mm512_set1_epi32(0x0101_0101),
        |sum, a, b| _mm512_dpbusd_epi32(sum, a, b)
    );
    /// BF16 pairs of any bits.
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs(lanes: __m512i) -> __m512bh {
        // SAFETY: both types are 64 bytes of any value.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(lanes) }
    }

    peak!(
        bf16,
        "avx512f,avx512bf16",
        |i| _mm512_castsi512_ps(_mm512_set1_epi32(index(i))),
        _mm512_set1_epi32(0x3f80_3f80),
        |sum, a, b| _mm512_dpbf16_ps(sum, pairs(a), pairs(b))
    );
    peak!(
        fp32,
        "avx512f",
        |i| _mm512_castsi512_ps(_mm512_set1_epi32(index(i))),
        _mm512_set1_ps(1.0),
        |sum, a, b| _mm512_fmadd_ps(a, b, sum)
    );

    pub(super) fn spin(unit: Unit, rounds: u32) -> Option<u64> {
        let lanes: u64 = match unit {
            Unit::Int8 if is_x86_feature_detected!("avx512vnni") => {
                // SAFETY: the feature was seen.
                unsafe { int8(rounds) };
                64
            }
            Unit::Bf16 if is_x86_feature_detected!("avx512bf16") => {
                // SAFETY: the feature was seen.
                unsafe { bf16(rounds) };
                32
            }
            Unit::Fp32 if is_x86_feature_detected!("avx512f") => {
                // SAFETY: the feature was seen.
                unsafe { fp32(rounds) };
                16
            }
            _ => return None,
        };
        Some(2 * lanes * SUMS as u64 * u64::from(rounds))
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn read<const FETCH: bool>(values: &[u64]) -> u64 {
        let (blocks, rest) = values.as_chunks::<64>();
        let mut sums = [_mm512_setzero_si512(); 8];
        for block in blocks {
            for (i, sum) in sums.iter_mut().enumerate() {
                let line = block[8 * i..].as_ptr();
                // SAFETY: a line of 8 values lies in the block; a prefetch reads nothing.
                unsafe {
                    if FETCH {
                        _mm_prefetch::<_MM_HINT_T0>(line.wrapping_byte_add(AHEAD).cast());
                    }
                    *sum = _mm512_add_epi64(*sum, _mm512_loadu_si512(line.cast()));
                }
            }
        }
        let all = sums.into_iter().reduce(|a, b| _mm512_add_epi64(a, b));
        let rest = rest
            .iter()
            .fold(0_u64, |sum, value| sum.wrapping_add(*value));
        all.map_or(0, |all| _mm512_reduce_add_epi64(all).cast_unsigned())
            .wrapping_add(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_sees_every_value_once() {
        for len in [0, 1, 63, 64, 65, 1000] {
            let values: Vec<u64> = (1..=len).collect();
            for ahead in [false, true] {
                assert_eq!(read(&values, ahead), len * (len + 1) / 2);
            }
        }
    }

    #[test]
    fn operations_grow_with_the_rounds() {
        for unit in [Unit::Int8, Unit::Bf16, Unit::Fp32] {
            let (one, two) = (spin(unit, 1), spin(unit, 2));
            assert_eq!(one.map(|one| 2 * one), two, "{unit:?}");
        }
    }
}
