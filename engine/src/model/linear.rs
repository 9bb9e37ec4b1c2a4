//! Matrix products of a forward, split over threads.
//!
//! A piece of work is a fixed block of rows or columns, never a share of the threads; and no kernel's result depends on the piece around it.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::weights::Linear;
use crate::kernels::{Backend, Matrix, Values};
use crate::quant::Int8Rows;

/// From so many rows on, BF16 weights are widened panel by panel and work is split by rows.
const MANY_ROWS: usize = 16;
/// Rows of one piece.
const ROWS: usize = 128;
/// Output channels of one piece; a multiple of [`PackedInt8::BLOCK`](crate::quant::PackedInt8::BLOCK).
const COLUMNS: usize = 64;
/// Output channels that are widened at once: with 2,048 inputs 256 KiB, which stays in the second-level cache.
const PANEL: usize = 32;

thread_local! {
    /// The widened panel.
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The input of a linear, prepared for the pass.
#[derive(Clone, Copy)]
pub(super) enum Input<'a> {
    /// FP32 values (rounded to BF16 when the scheme says so).
    Precise(&'a [f32]),
    /// INT8 rows.
    Int8(Int8Rows<'a>),
}

/// `dst = linear(input)`, `dst` being `[rows, out_features]`. `scratch` holds columns of small batches.
pub(super) fn linear(
    backend: &dyn Backend,
    linear: &Linear,
    input: Input<'_>,
    scratch: &mut Vec<f32>,
    dst: &mut [f32],
) {
    match input {
        Input::Precise(x) => matmul(backend, linear.weight.matrix(), x, scratch, dst),
        Input::Int8(x) => {
            let weights = linear
                .quantised
                .as_ref()
                .expect("INT8 input is prepared only where the INT8 weights are attached");
            split(
                x.rows(),
                linear.out_features,
                scratch,
                dst,
                |rows, columns, stride, dst| {
                    let bytes = rows.start * x.row_len..rows.end * x.row_len;
                    let rows = Int8Rows {
                        values: &x.values[bytes],
                        scale: &x.scale[rows.clone()],
                        sum: &x.sum[rows],
                        row_len: x.row_len,
                    };
                    backend.matmul_int8(rows, weights, columns, stride, dst);
                },
            );
        }
    }
    if let Some(bias) = &linear.bias {
        for row in dst.chunks_exact_mut(bias.len()) {
            row.iter_mut()
                .zip(bias)
                .for_each(|(dst, bias)| *dst += bias);
        }
    }
}

/// `dst = x · wᵀ`, `dst` being `[rows, w.rows]`.
pub(super) fn matmul(
    backend: &dyn Backend,
    w: Matrix<'_>,
    x: &[f32],
    scratch: &mut Vec<f32>,
    dst: &mut [f32],
) {
    let k = w.columns;
    split(
        x.len() / k,
        w.rows,
        scratch,
        dst,
        |rows, columns, stride, dst| {
            let x = &x[rows.start * k..rows.end * k];
            match w.values {
                Values::Bf16(_) if rows.len() >= MANY_ROWS => {
                    widened(backend, w.slice(columns.start, columns.end), x, stride, dst);
                }
                _ => backend.matmul(x, w.slice(columns.start, columns.end), stride, dst),
            }
        },
    );
}

/// The same, after widening the weights panel by panel: the widening is exact, so the result is the same too.
fn widened(backend: &dyn Backend, w: Matrix<'_>, x: &[f32], stride: usize, dst: &mut [f32]) {
    WIDENED.with_borrow_mut(|panel| {
        panel.resize(PANEL * w.columns, 0.0);
        for start in (0..w.rows).step_by(PANEL) {
            let rows = PANEL.min(w.rows - start);
            let part = w.slice(start, start + rows);
            let panel = &mut panel[..rows * w.columns];
            if let Values::Bf16(values) = part.values {
                backend.widen(values, panel);
            }
            backend.matmul(
                x,
                Matrix {
                    values: Values::F32(panel),
                    ..part
                },
                stride,
                &mut dst[start..],
            );
        }
    });
}

/// Calls `work(rows, columns, stride, dst)` for pieces of a `[rows, columns]` result: by rows when there are many, else by columns.
fn split(
    rows: usize,
    columns: usize,
    scratch: &mut Vec<f32>,
    dst: &mut [f32],
    work: impl Fn(Range<usize>, Range<usize>, usize, &mut [f32]) + Sync,
) {
    if rows >= MANY_ROWS {
        dst.par_chunks_mut(ROWS * columns)
            .enumerate()
            .for_each(|(piece, dst)| {
                let start = piece * ROWS;
                work(start..start + dst.len() / columns, 0..columns, columns, dst);
            });
        return;
    }
    let by_columns = |(piece, dst): (usize, &mut [f32])| {
        let (start, width) = (piece * COLUMNS, dst.len() / rows);
        work(0..rows, start..start + width, width, dst);
    };
    if rows == 1 {
        dst.par_chunks_mut(COLUMNS).enumerate().for_each(by_columns);
        return;
    }
    scratch.resize(rows * columns, 0.0);
    scratch
        .par_chunks_mut(COLUMNS * rows)
        .enumerate()
        .for_each(by_columns);
    for (piece, part) in scratch.chunks(COLUMNS * rows).enumerate() {
        let width = part.len() / rows;
        for (row, part) in part.chunks_exact(width).enumerate() {
            dst[row * columns + piece * COLUMNS..][..width].copy_from_slice(part);
        }
    }
}
