//! Plain Rust for every machine: the lanes are left to the compiler's baseline registers.

use std::ops::Range;

use half::bf16;

use super::packed::{BLOCK, Bits, Int8Rows, Integers, Line};
use super::{Backend, Matrix, Rotation, Strided, Values, check_integers, check_weighted, lanes};

const LANES: usize = 8;

/// See the file's comment.
#[derive(Debug)]
pub struct Scalar;

/// Eight running sums, then pairwise: the order depends on the length alone.
#[inline]
fn dot<T: Copy>(x: &[f32], w: &[T], read: impl Fn(T) -> f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (mut x_chunks, mut w_chunks) = (x.chunks_exact(LANES), w.chunks_exact(LANES));
    for (x, w) in (&mut x_chunks).zip(&mut w_chunks) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * read(w[lane]);
        }
    }
    for ((sum, x), w) in sums
        .iter_mut()
        .zip(x_chunks.remainder())
        .zip(w_chunks.remainder())
    {
        *sum += x * read(*w);
    }
    ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))
}

/// The sums of `x * stored` of one group for the 16 channels of a block.
fn products(bits: Bits, lines: &[Line], inputs: &[i8]) -> [i32; BLOCK] {
    let mut sums = [0_i32; BLOCK];
    let mut add = |inputs: &[i8], line: &Line, read: fn(u8) -> u8| {
        for (sum, codes) in sums.iter_mut().zip(line.0.as_chunks::<4>().0) {
            for (x, code) in inputs.iter().zip(codes) {
                *sum += i32::from(*x) * i32::from(read(*code));
            }
        }
    };
    for (line, inputs) in lines.iter().zip(inputs.chunks_exact(bits.inputs())) {
        match bits {
            Bits::Eight => add(inputs, line, |byte| byte),
            Bits::Four => {
                add(&inputs[..4], line, |byte| byte & 15);
                add(&inputs[4..], line, |byte| byte >> 4);
            }
        }
    }
    sums
}

impl Backend for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn matmul(&self, x: &[f32], w: Matrix<'_>, stride: usize, dst: &mut [f32]) {
        w.check(x, stride, dst);
        for n in 0..w.rows {
            let range = n * w.columns..(n + 1) * w.columns;
            for (m, x) in x.chunks_exact(w.columns).enumerate() {
                dst[m * stride + n] = match w.values {
                    Values::F32(values) => dot(x, &values[range.clone()], |w| w),
                    Values::Bf16(values) => dot(x, &values[range.clone()], |w| {
                        f32::from_bits(u32::from(w.to_bits()) << 16)
                    }),
                };
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
        let count = w.groups().count();
        for first in channels.clone().step_by(BLOCK) {
            let (block, width) = (first / BLOCK, BLOCK.min(channels.end - first));
            for m in 0..x.rows() {
                let mut totals = [0.0; BLOCK];
                let lines = w.block(block).chunks_exact(w.group_lines());
                let inputs = x.row(m).chunks_exact(w.groups().padded());
                for (group, (lines, inputs)) in lines.zip(inputs).enumerate() {
                    let (scale, sum) = (x.scales[m * count + group], x.sums[m * count + group]);
                    let products = products(w.bits(), lines, inputs);
                    lanes::scale_group(
                        &mut totals,
                        products.map(|products| products - i32::from(w.bits().offset()) * sum),
                        (scale, sum),
                        w.scales(block, group),
                        w.zeros(block, group),
                    );
                }
                dst[m * stride + first - channels.start..][..width]
                    .copy_from_slice(&totals[..width]);
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
            let dst = &mut dst[m * stride..][..columns];
            dst.fill(0.0);
            let weights = &weights.values[m * weights.step..][..terms];
            for (weight, values) in weights.iter().zip(values.chunks_exact(columns)) {
                for (dst, value) in dst.iter_mut().zip(values) {
                    *dst += weight * value;
                }
            }
        }
    }

    fn softmax(&self, row: &mut [f32]) {
        lanes::softmax(row);
    }

    fn rms_norm(&self, x: &[f32], weight: &[f32], epsilon: f32, dst: &mut [f32]) {
        lanes::rms_norm(x, weight, epsilon, dst);
    }

    fn rope(&self, row: &mut [f32], rotation: Rotation<'_>) {
        lanes::rope(row, rotation.cos, rotation.sin);
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        lanes::silu_mul(gate, up);
    }

    fn narrow(&self, values: &[f32], dst: &mut [bf16]) {
        lanes::narrow(values, dst);
    }

    fn quantise_row(&self, x: &[f32], dst: &mut [i8]) -> (f32, i32) {
        lanes::quantise_row(x, dst)
    }
}
