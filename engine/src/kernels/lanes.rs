//! Row operations written once over 16 lanes in plain Rust; each instruction set compiles them again with its own registers.
//!
//! Only additions and multiplications in a fixed order: the result is the same on every instruction set, to the last bit.
#![expect(
    clippy::inline_always,
    reason = "each instruction set must get its own copy"
)]

use half::bf16;

use super::packed::{BLOCK, Factor16};

const LANES: usize = 16;

/// `values` folded lane by lane, then pairwise; the tail goes to the first lanes.
#[inline(always)]
fn fold(
    values: &[f32],
    start: f32,
    step: impl Fn(f32, f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, *value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = step(*lane, *value);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// `maxps` semantics: NaN in `b` is ignored, which callers make up for elsewhere.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// e^x for x within ±87 (clamped), NaN stays NaN; relative error below 3e-7.
///
/// `2^n * e^r` with `n` the nearest integer to `x * log2(e)` and a polynomial of degree 6 (Taylor, |r| <= 0.35).
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 87.0 { 87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 720.0;
    for coefficient in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

#[inline(always)]
pub(super) fn softmax(row: &mut [f32]) {
    let largest = fold(row, f32::NEG_INFINITY, larger, larger);
    for x in row.iter_mut() {
        *x = exp(*x - largest);
    }
    let sum = fold(row, 0.0, |sum, x| sum + x, |a, b| a + b);
    let scale = 1.0 / sum;
    for x in row.iter_mut() {
        *x *= scale;
    }
}

#[inline(always)]
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, dst: &mut [f32]) {
    let sum = fold(x, 0.0, |sum, x| sum + x * x, |a, b| a + b);
    #[expect(
        clippy::cast_precision_loss,
        reason = "a row has at most 2^16 channels"
    )]
    let scale = 1.0 / (sum / x.len() as f32 + epsilon).sqrt();
    for ((dst, x), weight) in dst.iter_mut().zip(x).zip(weight) {
        *dst = x * scale * weight;
    }
}

#[inline(always)]
pub(super) fn rope(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    for head in row.chunks_exact_mut(2 * cos.len()) {
        let (a, b) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[inline(always)]
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

#[inline(always)]
pub(super) fn narrow(values: &[f32], dst: &mut [bf16]) {
    for (dst, value) in dst.iter_mut().zip(values) {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        *dst = if value.is_nan() {
            bf16::NAN
        } else {
            bf16::from_bits(rounded as u16)
        };
    }
}

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the low byte of the shifted float is the rounded integer"
)]
pub(super) fn quantise_row(x: &[f32], dst: &mut [i8]) -> (f32, i32) {
    const ROUND: f32 = 12_582_912.0;
    let largest = fold(x, 0.0, |largest, x| larger(largest, x.abs()), larger);
    // 0 for finite rows, NaN as soon as one value is NaN or infinite.
    let poison = fold(x, 0.0, |sum, x| sum + x * 0.0, |a, b| a + b);
    let steps = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    for (dst, x) in dst.iter_mut().zip(x) {
        *dst = (x * steps + ROUND).to_bits() as i8;
    }
    dst[x.len()..].fill(0);
    if poison.is_nan() {
        dst.fill(0);
    }
    (
        largest / 127.0 + poison,
        dst.iter().map(|q| i32::from(*q)).sum(),
    )
}

/// Adds one group to the running sums of a block's channels; `products` has the offset taken off already. See `packed/integers.rs`.
#[inline(always)]
#[expect(
    clippy::cast_precision_loss,
    reason = "the definition: a sum of integers is rounded to FP32 once"
)]
pub(super) fn scale_group(
    totals: &mut [f32; BLOCK],
    products: [i32; BLOCK],
    (scale, sum): (f32, i32),
    scales: Factor16<'_>,
    zeros: Option<Factor16<'_>>,
) {
    let (mut products, scales) = (products.map(|products| products as f32), scales.to_f32());
    if let Some(zeros) = zeros {
        for (products, zero) in products.iter_mut().zip(zeros.to_f32()) {
            *products = (-zero).mul_add(sum as f32, *products);
        }
    }
    for ((total, products), own) in totals.iter_mut().zip(products).zip(scales) {
        *total = products.mul_add(scale * own, *total);
    }
}
