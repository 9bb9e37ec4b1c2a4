//! The oracle: the obvious loops, from the definitions. Never optimised.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "the oracle sums in f64 and rounds once; integers are small"
)]

use std::ops::Range;

use half::bf16;

use super::packed::{BLOCK, Int8Rows, Integers};
use super::{Backend, Matrix, Rotation, Strided, Values, check_integers, check_weighted};

/// See the file's comment.
#[derive(Debug)]
pub struct Naive;

impl Backend for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn matmul(&self, x: &[f32], w: Matrix<'_>, stride: usize, dst: &mut [f32]) {
        w.check(x, stride, dst);
        let weight = |index: usize| match w.values {
            Values::F32(values) => f64::from(values[index]),
            Values::Bf16(values) => values[index].to_f64(),
        };
        for (m, row) in x.chunks_exact(w.columns).enumerate() {
            for n in 0..w.rows {
                let sum: f64 = row
                    .iter()
                    .enumerate()
                    .map(|(i, x)| f64::from(*x) * weight(n * w.columns + i))
                    .sum();
                dst[m * stride + n] = sum as f32;
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
        check_integers(&x, w, &channels, stride, dst);
        let (groups, offset) = (w.groups(), i32::from(w.bits().offset()));
        for m in 0..x.rows() {
            for (n, channel) in channels.clone().enumerate() {
                let mut sum = 0.0;
                for group in 0..groups.count() {
                    let factors = m * groups.count() + group;
                    let products: i32 = groups
                        .range(group)
                        .map(|column| {
                            i32::from(x.row(m)[groups.index(column)])
                                * i32::from(w.stored(channel, column))
                        })
                        .sum();
                    let mut t = (products - offset * x.sums[factors]) as f32;
                    let own = channel % BLOCK;
                    if let Some(zeros) = w.zeros(channel / BLOCK, group) {
                        t = (-zeros.to_f32()[own]).mul_add(x.sums[factors] as f32, t);
                    }
                    let scale = w.scales(channel / BLOCK, group).to_f32()[own];
                    sum = t.mul_add(x.scales[factors] * scale, sum);
                }
                dst[m * stride + n] = sum;
            }
        }
    }

    fn weighted_sum(
        &self,
        weights: Strided<'_>,
        values: &[f32],
        columns: usize,
        stride: usize,
        dst: &mut [f32],
    ) {
        let terms = check_weighted(weights, values, columns, stride, dst);
        for m in 0..weights.rows {
            for c in 0..columns {
                let weight = |n: usize| f64::from(weights.values[m * weights.step + n]);
                let sum: f64 = (0..terms)
                    .map(|n| weight(n) * f64::from(values[n * columns + c]))
                    .sum();
                dst[m * stride + c] = sum as f32;
            }
        }
    }

    fn softmax(&self, row: &mut [f32]) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = row.iter().map(|x| f64::from(*x - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        for (x, power) in row.iter_mut().zip(powers) {
            *x = (power / sum) as f32;
        }
    }

    fn rms_norm(&self, x: &[f32], weight: &[f32], epsilon: f32, dst: &mut [f32]) {
        let mean: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
        for ((dst, x), weight) in dst.iter_mut().zip(x).zip(weight) {
            *dst = (f64::from(*x) * scale * f64::from(*weight)) as f32;
        }
    }

    fn rope(&self, row: &mut [f32], rotation: Rotation<'_>) {
        let half = rotation.cos.len();
        for head in row.chunks_exact_mut(2 * half) {
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * rotation.cos[i] - b * rotation.sin[i];
                head[i + half] = b * rotation.cos[i] + a * rotation.sin[i];
            }
        }
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            let x = f64::from(*gate);
            *gate = (x / (1.0 + (-x).exp()) * f64::from(*up)) as f32;
        }
    }

    fn narrow(&self, values: &[f32], dst: &mut [bf16]) {
        for (dst, value) in dst.iter_mut().zip(values) {
            *dst = bf16::from_f32(*value);
        }
    }

    fn quantise_row(&self, x: &[f32], dst: &mut [i8]) -> (f32, i32) {
        if x.iter().any(|x| !x.is_finite()) {
            dst.fill(0);
            return (f32::NAN, 0);
        }
        let largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let steps = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        dst.fill(0);
        for (dst, x) in dst.iter_mut().zip(x) {
            *dst = (x * steps).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
        (largest / 127.0, dst.iter().map(|q| i32::from(*q)).sum())
    }
}
