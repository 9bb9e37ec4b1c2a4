//! Matrix products of a forward, split over threads.
//!
//! A piece of work is a fixed block of rows or columns, never a share of the threads; and no kernel's result depends on the piece around it.
//! An [`Input`] prepares its rows once for all linears that want them in the same form.

use std::cell::RefCell;

use half::bf16;
use rayon::prelude::*;

use super::weight::Weight;
use super::weights::Linear;
use crate::kernels::bf16::{MANY_ROWS, widened_panels};
use crate::kernels::{
    Activations, Backend, Bf16Rows, Groups, Int8Rows, Layout, Matrix, Packed, Values, pieces,
};

/// Rows of one piece: their inputs stay in the last-level cache while the weights pass by.
const ROWS: usize = 512;
/// Output channels of one piece; a multiple of [`BLOCK`](crate::kernels::packed::BLOCK).
const COLUMNS: usize = 64;
/// Output channels that are read to FP32 at once: with 2,048 inputs 256 KiB, which stays in the second-level cache.
const PANEL: usize = 32;
/// Rows that one thread prepares at once.
const PREPARED_ROWS: usize = 16;

/// How dense linears take their inputs, and which copy of the weights computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetic {
    /// The precise weights; dense ones with FP32 inputs.
    Fp32,
    /// The precise weights; dense ones with inputs rounded to BF16.
    Bf16,
    /// The prefill copy.
    Prefill,
    /// The decode copy.
    Decode,
}

/// The rows that come into one or several linears.
pub(super) struct Input<'a> {
    arithmetic: Arithmetic,
    x: &'a [f32],
    columns: usize,
    prepared: &'a mut Prepared,
}

/// The forms of an input that linears asked for. Buffers grow and are reused.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    /// Rounded to BF16 and laid out as the backend wants it.
    halves: Vec<bf16>,
    layout: Option<Layout>,
    /// Columns in another order, or divided by what quantised weights were multiplied with.
    arranged: Vec<f32>,
    int8: Option<(Groups, Option<Vec<u32>>)>,
    values: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl<'a> Input<'a> {
    /// `x` is `[rows, columns]`.
    pub(super) fn new(
        arithmetic: Arithmetic,
        x: &'a [f32],
        columns: usize,
        prepared: &'a mut Prepared,
    ) -> Self {
        (prepared.int8, prepared.layout) = (None, None);
        Self {
            arithmetic,
            x,
            columns,
            prepared,
        }
    }

    fn rows(&self) -> usize {
        self.x.len() / self.columns
    }

    /// The rows rounded to BF16.
    fn rounded(&mut self, backend: &dyn Backend) -> Bf16Rows<'_> {
        let (x, columns, rows) = (self.x, self.columns, self.rows());
        let prepared = &mut *self.prepared;
        let layout = *prepared.layout.get_or_insert_with(|| {
            let layout = backend.bf16_layout(rows);
            let len = layout.row_len(columns);
            prepared.halves.resize(rows * len, bf16::ZERO);
            let parts = prepared.halves.par_chunks_mut(PREPARED_ROWS * len);
            let parts = parts.zip(x.par_chunks(PREPARED_ROWS * columns));
            parts.for_each_init(
                || vec![bf16::ZERO; columns],
                |row, (dst, x)| {
                    for (dst, x) in dst.chunks_exact_mut(len).zip(x.chunks_exact(columns)) {
                        backend.narrow(x, row);
                        layout.arrange(row, dst);
                    }
                },
            );
            layout
        });
        Bf16Rows {
            values: &prepared.halves,
            columns,
            layout,
        }
    }

    /// The rows as packed weights take them.
    fn packed(
        &mut self,
        backend: &dyn Backend,
        (weights, scale): (&Packed, Option<&[f32]>),
    ) -> Activations<'_> {
        let (x, columns, order) = (self.x, self.columns, weights.order());
        let prepared = &mut *self.prepared;
        let Some(groups) = weights.groups() else {
            return Activations::Fp32(arranged(x, columns, (order, scale), &mut prepared.arranged));
        };
        let ready = matches!(&prepared.int8, Some((own, own_order)) if *own == groups && own_order.as_deref() == order);
        if !ready {
            let x = arranged(x, columns, (order, scale), &mut prepared.arranged);
            let rows = x.len() / columns;
            prepared.values.resize(rows * groups.row_len(), 0);
            prepared.scales.resize(rows * groups.count(), 0.0);
            prepared.sums.resize(rows * groups.count(), 0);
            let parts = x
                .par_chunks(PREPARED_ROWS * columns)
                .zip(
                    prepared
                        .values
                        .par_chunks_mut(PREPARED_ROWS * groups.row_len()),
                )
                .zip(
                    prepared
                        .scales
                        .par_chunks_mut(PREPARED_ROWS * groups.count()),
                )
                .zip(prepared.sums.par_chunks_mut(PREPARED_ROWS * groups.count()));
            parts.for_each(|(((x, values), scales), sums)| {
                quantise(backend, x, groups, values, scales, sums);
            });
            prepared.int8 = Some((groups, order.map(<[u32]>::to_vec)));
        }
        Activations::Int8(Int8Rows {
            values: &prepared.values,
            scales: &prepared.scales,
            sums: &prepared.sums,
            groups,
        })
    }
}

/// Rounds whole rows group by group.
fn quantise(
    backend: &dyn Backend,
    x: &[f32],
    groups: Groups,
    values: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let rows = x
        .chunks_exact(groups.columns())
        .zip(values.chunks_exact_mut(groups.row_len()))
        .zip(
            scales
                .chunks_exact_mut(groups.count())
                .zip(sums.chunks_exact_mut(groups.count())),
        );
    for ((x, values), (scales, sums)) in rows {
        for (group, values) in values.chunks_exact_mut(groups.padded()).enumerate() {
            (scales[group], sums[group]) = backend.quantise_row(&x[groups.range(group)], values);
        }
    }
}

/// The rows as packed weights take them: column `j` is column `order[j]` of `x`, after each column was divided by its scale. Linears that read
/// one input have one scale, so INT8 rows are shared by order alone.
fn arranged<'a>(
    x: &'a [f32],
    columns: usize,
    (order, scale): (Option<&[u32]>, Option<&[f32]>),
    dst: &'a mut Vec<f32>,
) -> &'a [f32] {
    if order.is_none() && scale.is_none() {
        return x;
    }
    dst.clear();
    for row in x.chunks_exact(columns) {
        let value = |input: usize| row[input] / scale.map_or(1.0, |scale| scale[input]);
        match order {
            Some(order) => dst.extend(order.iter().map(|input| value(*input as usize))),
            None => dst.extend((0..columns).map(value)),
        }
    }
    dst
}

/// `dst = linear(input)`, `dst` being `[rows, out_features]`.
pub(super) fn linear(
    backend: &dyn Backend,
    linear: &Linear,
    input: &mut Input<'_>,
    dst: &mut [f32],
) {
    if let Some(copy) = linear.copy(input.arithmetic) {
        let scale = copy.input_scale.as_deref();
        matmul_packed(backend, (&copy.weights, scale), input, dst);
    } else if input.arithmetic == Arithmetic::Prefill {
        // Gone again with the product: one linear's form is all that is ever made.
        matmul_packed(backend, (&linear.packed(), None), input, dst);
    } else if let Some(simulated) = &linear.simulated {
        simulated.run(backend, input.x, dst);
    } else {
        product(backend, &linear.weight, input, dst);
    }
    if let Some(bias) = &linear.bias {
        for row in dst.chunks_exact_mut(bias.len()) {
            row.iter_mut()
                .zip(bias)
                .for_each(|(dst, bias)| *dst += bias);
        }
    }
}

/// `dst = x · wᵀ` for weights of the checkpoint, `dst` being `[rows, out]`. The baseline reads quantised ones to FP32 and rounds no input.
pub(super) fn product(
    backend: &dyn Backend,
    weight: &Weight,
    input: &mut Input<'_>,
    dst: &mut [f32],
) {
    match weight {
        Weight::Dense(tensor) => matmul(backend, tensor.matrix(), input, dst),
        Weight::Packed(packed) if input.arithmetic == Arithmetic::Fp32 => {
            matmul_read(backend, packed, input, dst);
        }
        Weight::Packed(packed) => matmul_packed(backend, (packed, None), input, dst),
    }
}

/// Packed weights, read panel by panel, times FP32 inputs.
fn matmul_read(backend: &dyn Backend, w: &Packed, input: &Input<'_>, dst: &mut [f32]) {
    thread_local! {
        static READ: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let (k, x) = (input.columns, input.x);
    let shape = (input.rows(), w.out_features());
    pieces::compute(dst, shape, (ROWS, COLUMNS), |rows, columns, dst| {
        let x = &x[rows.start * k..rows.end * k];
        READ.with_borrow_mut(|panel| {
            for first in columns.clone().step_by(PANEL) {
                let rows = PANEL.min(columns.end - first);
                panel.resize(rows * k, 0.0);
                for (row, dst) in (first..).zip(panel.chunks_exact_mut(k)) {
                    w.dequantise_row(row, dst);
                }
                let matrix = Matrix {
                    values: Values::F32(panel),
                    rows,
                    columns: k,
                };
                backend.matmul(x, matrix, columns.len(), &mut dst[first - columns.start..]);
            }
        });
    });
}

/// `dst = (x / scale) · wᵀ` for packed weights, `dst` being `[rows, w.out_features()]`.
pub(super) fn matmul_packed(
    backend: &dyn Backend,
    (w, scale): (&Packed, Option<&[f32]>),
    input: &mut Input<'_>,
    dst: &mut [f32],
) {
    let (rows, k) = (input.rows(), input.columns);
    let x = input.packed(backend, (w, scale));
    let shape = (rows, w.out_features());
    pieces::compute(dst, shape, (ROWS, COLUMNS), |rows, columns, dst| {
        let width = columns.len();
        backend.matmul_packed(x.slice(rows, k), w, columns, width, dst);
    });
}

/// `dst = x · wᵀ` for dense weights, `dst` being `[rows, w.rows]`.
pub(super) fn matmul(backend: &dyn Backend, w: Matrix<'_>, input: &mut Input<'_>, dst: &mut [f32]) {
    let (k, shape) = (w.columns, (input.rows(), w.rows));
    let size = (ROWS, COLUMNS);
    if input.arithmetic == Arithmetic::Bf16 {
        let x = input.rounded(backend);
        return pieces::compute(dst, shape, size, |rows, columns, dst| {
            let w = w.slice(columns.start, columns.end);
            backend.matmul_bf16(x.slice(rows), w, columns.len(), dst);
        });
    }
    let x = input.x;
    pieces::compute(dst, shape, size, |rows, columns, dst| {
        let (width, x) = (columns.len(), &x[rows.start * k..rows.end * k]);
        let w = w.slice(columns.start, columns.end);
        if rows.len() < MANY_ROWS {
            backend.matmul(x, w, width, dst);
        } else {
            widened_panels(w, |w, first| backend.matmul(x, w, width, &mut dst[first..]));
        }
    });
}
