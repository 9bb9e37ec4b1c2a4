//! The operations that a forward is made of, behind one trait, with one implementation an instruction set.
//!
//! Every operation runs on the calling thread and writes to an argument; splitting work over threads is the caller's business. A result never
//! depends on how many rows or columns are asked for at once, so batches, chunks and threads cannot change an answer.
//! [`Naive`] is the oracle: the obvious loops that every other implementation is tested against.

mod lanes;
#[macro_use]
mod multiversion;
mod avx2;
mod avx512;
pub mod bf16;
mod naive;
pub mod packed;
pub mod peak;
pub mod pieces;
mod scalar;
pub mod threads;

use std::cell::RefCell;
use std::fmt::Debug;
use std::ops::Range;

use self::bf16::multiply_widened;
pub use self::bf16::{Bf16Rows, Layout};
pub use self::naive::Naive;
pub use self::packed::{Activations, Groups, Int8Rows, Packed};
use self::packed::{BLOCK, Integers, Kind, Table};
pub use self::scalar::Scalar;

/// Row-major weights as they are stored.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// The upper half of 32-bit floats: reading one as FP32 is exact.
    Bf16(&'a [half::bf16]),
}

/// A row-major matrix `[rows, columns]`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// `rows * columns` values.
    pub values: Values<'a>,
    /// Outputs of the linear.
    pub rows: usize,
    /// Inputs of the linear; above 0.
    pub columns: usize,
}

/// Rows that lie `step` values apart.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// From the first row's first value on.
    pub values: &'a [f32],
    /// How many.
    pub rows: usize,
    /// At least a row's length.
    pub step: usize,
}

/// The rotary pairs of one position: `cos` and `sin` of each pair's angle, half a head long.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

/// One instruction set's operations.
pub trait Backend: Debug + Send + Sync {
    /// The instruction set, for people.
    fn name(&self) -> &'static str;

    /// `dst[m * stride + n] = Σ x[m, i] * w[n, i]` in FP32, for `m` rows of `x` (`[m, w.columns]`) and all rows `n` of `w`.
    fn matmul(&self, x: &[f32], w: Matrix<'_>, stride: usize, dst: &mut [f32]);

    /// How BF16 activations should lie for [`matmul_bf16`](Self::matmul_bf16), when so many rows are computed at once.
    fn bf16_layout(&self, _rows: usize) -> Layout {
        Layout::Rows
    }

    /// The same for BF16 activations, of any layout; products are exact and summed in FP32.
    fn matmul_bf16(&self, x: Bf16Rows<'_>, w: Matrix<'_>, stride: usize, dst: &mut [f32]) {
        w.check_bf16(&x, stride, dst);
        multiply_widened(x, w, |x, w, first| {
            self.matmul(x, w, stride, &mut dst[first..]);
        });
    }

    /// The same for INT8 activations and weights on a grid, as [`packed`]'s `integers.rs` defines it to the last bit. Computes the output
    /// channels `channels`, which start at a multiple of 16; `dst[m * stride + n]` is channel `channels.start + n`.
    fn matmul_integers(
        &self,
        x: Int8Rows<'_>,
        w: &Integers,
        channels: Range<usize>,
        stride: usize,
        dst: &mut [f32],
    );

    /// The same for packed weights of any kind; `x` is prepared as `w` wants it.
    fn matmul_packed(
        &self,
        x: Activations<'_>,
        w: &Packed,
        channels: Range<usize>,
        stride: usize,
        dst: &mut [f32],
    ) {
        match (x, w.kind()) {
            (Activations::Int8(x), Kind::Integers(w)) => {
                self.matmul_integers(x, w, channels, stride, dst);
            }
            (Activations::Fp32(x), Kind::Table(table)) => {
                read_and_multiply(x, table, channels, |x, w, first| {
                    self.matmul(x, w, stride, &mut dst[first..]);
                });
            }
            (Activations::Int8(_), Kind::Table(_)) | (Activations::Fp32(_), Kind::Integers(_)) => {
                panic!("activations must be prepared as the weights want them")
            }
        }
    }

    /// `dst[m * stride + c] = Σ weights[m, n] * values[n, c]` for the rows of `weights`, `values` being `[n, columns]`. Sums go from the first
    /// value to the last.
    fn weighted_sum(
        &self,
        weights: Strided<'_>,
        values: &[f32],
        columns: usize,
        stride: usize,
        dst: &mut [f32],
    );

    /// `dst[c, n] = values[n, c]`, `values` being `[n, columns]`.
    fn transpose(&self, values: &[f32], columns: usize, dst: &mut [f32]) {
        let rows = values.len() / columns;
        for (n, row) in values.chunks_exact(columns).enumerate() {
            for (c, value) in row.iter().enumerate() {
                dst[c * rows + n] = *value;
            }
        }
    }

    /// Softmax of a row in place. A NaN makes the row NaN.
    fn softmax(&self, row: &mut [f32]);

    /// `dst = x / sqrt(mean(x²) + epsilon) * weight` for one row.
    fn rms_norm(&self, x: &[f32], weight: &[f32], epsilon: f32, dst: &mut [f32]);

    /// Rotates the heads of one row in place; channel `i` pairs with channel `i + head_dim / 2`.
    fn rope(&self, row: &mut [f32], rotation: Rotation<'_>);

    /// `gate = silu(gate) * up`.
    fn silu_mul(&self, gate: &mut [f32], up: &[f32]);

    /// `gate = gelu(gate) * up` by the tanh approximation: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    fn gelu_mul(&self, gate: &mut [f32], up: &[f32]) {
        /// The root of 2 / pi.
        const ROOT: f32 = 0.797_884_6;
        for (gate, up) in gate.iter_mut().zip(up) {
            let x = *gate;
            let bent = (ROOT * (x + 0.044_715 * x * x * x)).tanh();
            *gate = 0.5 * x * (1.0 + bent) * up;
        }
    }

    /// `x = cap * tanh(x / cap)`, `cap` above 0.
    fn soft_cap(&self, values: &mut [f32], cap: f32) {
        for value in values {
            *value = cap * (*value / cap).tanh();
        }
    }

    /// Rounds to the nearest BF16 value, ties to even; both slices are of one length.
    fn narrow(&self, values: &[f32], dst: &mut [half::bf16]);

    /// Rounds one row to symmetric INT8. Returns its scale and the sum of its integers; a NaN or an infinity makes the scale NaN.
    fn quantise_row(&self, x: &[f32], dst: &mut [i8]) -> (f32, i32);
}

impl<'a> Matrix<'a> {
    /// The rows `start..end`.
    #[must_use]
    pub fn slice(&self, start: usize, end: usize) -> Matrix<'a> {
        let (from, to) = (start * self.columns, end * self.columns);
        let values = match self.values {
            Values::F32(values) => Values::F32(&values[from..to]),
            Values::Bf16(values) => Values::Bf16(&values[from..to]),
        };
        Matrix {
            values,
            rows: end - start,
            columns: self.columns,
        }
    }

    /// The rows in parts that stay in the first-level cache while many rows of activations pass by, with the first row of each.
    fn cached_parts(self) -> impl Iterator<Item = (usize, Matrix<'a>)> {
        /// Values of a part: 32 KiB of FP32.
        const PART: usize = 8 << 10;
        let rows = (PART / self.columns / 4 * 4).max(4);
        (0..self.rows)
            .step_by(rows)
            .map(move |first| (first, self.slice(first, self.rows.min(first + rows))))
    }

    /// Panics when the operands of a product do not fit: every unsafe kernel relies on it.
    fn check(&self, x: &[f32], stride: usize, dst: &[f32]) {
        self.check_whole();
        assert!(
            x.len().is_multiple_of(self.columns),
            "the activations must be whole rows"
        );
        check_dst(x.len() / self.columns, self.rows, stride, dst);
    }

    /// The same for BF16 activations.
    fn check_bf16(&self, x: &Bf16Rows<'_>, stride: usize, dst: &[f32]) {
        self.check_whole();
        assert!(
            x.columns == self.columns && x.values.len().is_multiple_of(x.layout.row_len(x.columns)),
            "the activations must be whole rows"
        );
        check_dst(x.rows(), self.rows, stride, dst);
    }

    fn check_whole(&self) {
        let len = match self.values {
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
        };
        assert!(
            self.columns > 0 && len == self.rows * self.columns,
            "the weights must be whole"
        );
    }
}

fn check_dst(rows: usize, columns: usize, stride: usize, dst: &[f32]) {
    assert!(stride >= columns, "rows of the result must not overlap");
    assert!(
        rows == 0 || dst.len() >= (rows - 1) * stride + columns,
        "the result must fit"
    );
}

/// Panics when the operands do not fit: every unsafe kernel relies on it.
fn check_integers(
    x: &Int8Rows<'_>,
    w: &Integers,
    channels: &Range<usize>,
    stride: usize,
    dst: &[f32],
) {
    x.check(w.groups());
    assert!(
        channels.start.is_multiple_of(BLOCK) && channels.end <= w.out_features(),
        "channels must be whole blocks of the weights"
    );
    check_dst(x.rows(), channels.len(), stride, dst);
}

/// Reads the weights of a few channels at a time to FP32 and calls `multiply(x, weights, first channel)`.
fn read_and_multiply(
    x: &[f32],
    table: &Table,
    channels: Range<usize>,
    mut multiply: impl FnMut(&[f32], Matrix<'_>, usize),
) {
    /// Channels at once: with 2,048 inputs 128 KiB.
    const PANEL: usize = 16;
    thread_local! {
        static READ: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    READ.with_borrow_mut(|panel| {
        let columns = table.in_features();
        for first in channels.clone().step_by(PANEL) {
            let rows = PANEL.min(channels.end - first);
            panel.resize(rows * columns, 0.0);
            for (row, dst) in (first..).zip(panel.chunks_exact_mut(columns)) {
                table.read_row(row, dst);
            }
            let values = Values::F32(panel);
            multiply(
                x,
                Matrix {
                    values,
                    rows,
                    columns,
                },
                first - channels.start,
            );
        }
    });
}

/// Panics when the operands do not fit: every unsafe kernel relies on it. Returns how many values each row weighs.
fn check_weighted(
    weights: Strided<'_>,
    values: &[f32],
    columns: usize,
    stride: usize,
    dst: &[f32],
) -> usize {
    assert!(
        columns > 0 && values.len().is_multiple_of(columns),
        "values must be whole rows"
    );
    let terms = values.len() / columns;
    assert!(
        weights.step >= terms
            && (weights.rows == 0
                || weights.values.len() >= (weights.rows - 1) * weights.step + terms),
        "one weight a row and value"
    );
    check_dst(weights.rows, columns, stride, dst);
    terms
}

/// Every implementation that this machine can run, the fastest first, the oracle last.
pub fn available() -> Vec<&'static dyn Backend> {
    let mut all: Vec<&'static dyn Backend> = Vec::new();
    all.extend(avx512::detect());
    all.extend(avx2::detect());
    all.push(&Scalar);
    all.push(&Naive);
    all
}

/// The fastest implementation that this machine can run.
pub fn detect() -> &'static dyn Backend {
    available()[0]
}
