//! BF16 activations, as products of BF16 weights take them, and BF16 read as FP32.
//!
//! The model rounds its rows once and asks the backend how it wants them laid out; kernels only read. The layout never changes a result.

use std::cell::RefCell;

use half::bf16;

use super::{Matrix, Values};

/// Inputs of a step: two in each of 16 lanes.
pub const STEP: usize = 32;
/// From so many rows of activations on, it pays to prepare weights for them: to widen them, or to lay them out anew.
pub const MANY_ROWS: usize = 16;
/// Weights that are widened at once: with 2,048 inputs 256 KiB, which stays in the second-level cache.
const PANEL: usize = 32;

/// How a row's values lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// As they are.
    Rows,
    /// Padded with zeros to whole steps, and one lane's pairs behind each other: `[lane][step][2]`, lanes in the order of [`LANES`].
    Lanes,
}

/// Sums of 16 lanes are folded `((l + l+2) + (l+1 + l+3))` in each quarter, then quarter 0 with 2 and 1 with 3, then both: a balanced tree whose
/// leaves from left to right are these. A kernel that takes the lanes in this order can fold while it goes on.
pub const LANES: [usize; 16] = [0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15];

/// Rows of BF16 activations.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Rows<'a> {
    /// `[rows, row_len]`.
    pub values: &'a [bf16],
    /// Inputs of a row; above 0.
    pub columns: usize,
    /// How each row lies.
    pub layout: Layout,
}

impl Layout {
    /// Values of a row of so many columns.
    pub const fn row_len(self, columns: usize) -> usize {
        match self {
            Self::Rows => columns,
            Self::Lanes => columns.next_multiple_of(STEP),
        }
    }

    /// Lays out one row; `dst` is `[row_len]`.
    pub fn arrange(self, row: &[bf16], dst: &mut [bf16]) {
        match self {
            Self::Rows => dst.copy_from_slice(row),
            Self::Lanes => {
                let steps = dst.len() / STEP;
                let (pairs, _) = dst.as_chunks_mut::<2>();
                let (whole, rest) = row.as_chunks::<STEP>();
                let mut last = [bf16::ZERO; STEP];
                last[..rest.len()].copy_from_slice(rest);
                let all = whole.iter().chain((!rest.is_empty()).then_some(&last));
                for (step, values) in all.enumerate() {
                    for (position, lane) in LANES.iter().enumerate() {
                        pairs[position * steps + step] = [values[2 * lane], values[2 * lane + 1]];
                    }
                }
            }
        }
    }
}

impl Bf16Rows<'_> {
    /// How many.
    pub fn rows(&self) -> usize {
        self.values.len() / self.layout.row_len(self.columns)
    }

    /// Some of the rows.
    #[must_use]
    pub fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        let len = self.layout.row_len(self.columns);
        Self {
            values: &self.values[rows.start * len..rows.end * len],
            ..*self
        }
    }

    /// One row as FP32, in the order of the columns; `dst` is `[columns]`.
    fn widen_row(&self, row: usize, dst: &mut [f32]) {
        let len = self.layout.row_len(self.columns);
        let row = &self.values[row * len..(row + 1) * len];
        match self.layout {
            Layout::Rows => widen(row, dst),
            Layout::Lanes => {
                let (pairs, steps) = (row.as_chunks::<2>().0, len / STEP);
                for (position, lane) in LANES.iter().enumerate() {
                    for step in 0..steps {
                        let first = step * STEP + 2 * lane;
                        for (dst, value) in dst[first.min(self.columns)..]
                            .iter_mut()
                            .zip(pairs[position * steps + step])
                        {
                            *dst = value.to_f32();
                        }
                    }
                }
            }
        }
    }
}

/// BF16 to FP32, exact; both slices are of one length.
pub fn widen(values: &[bf16], dst: &mut [f32]) {
    for (dst, value) in dst.iter_mut().zip(values) {
        *dst = f32::from_bits(u32::from(value.to_bits()) << 16);
    }
}

/// Calls `multiply(weights, first row of them)` for BF16 weights widened panel by panel; FP32 ones are passed on whole.
pub fn widened_panels(w: Matrix<'_>, mut multiply: impl FnMut(Matrix<'_>, usize)) {
    thread_local! {
        static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let Values::Bf16(_) = w.values else {
        return multiply(w, 0);
    };
    WIDENED.with_borrow_mut(|panel| {
        for start in (0..w.rows).step_by(PANEL) {
            let part = w.slice(start, w.rows.min(start + PANEL));
            panel.resize(part.rows * w.columns, 0.0);
            if let Values::Bf16(values) = part.values {
                widen(values, panel);
            }
            let values = Values::F32(panel);
            multiply(Matrix { values, ..part }, start);
        }
    });
}

/// A product of BF16 by one of FP32: `multiply(x, weights, first row of them)`. Widening is exact, so the result is too.
pub(super) fn multiply_widened(
    x: Bf16Rows<'_>,
    w: Matrix<'_>,
    mut multiply: impl FnMut(&[f32], Matrix<'_>, usize),
) {
    thread_local! {
        static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    ROWS.with_borrow_mut(|rows| {
        rows.resize(x.rows() * x.columns, 0.0);
        for (row, dst) in rows.chunks_exact_mut(x.columns).enumerate() {
            x.widen_row(row, dst);
        }
        if x.rows() < MANY_ROWS {
            multiply(rows, w, 0);
        } else {
            widened_panels(w, |w, first| multiply(rows, w, first));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_in_lanes_read_back_as_they_were() {
        for columns in [1, 2, 31, 32, 33, 64, 100] {
            let row: Vec<bf16> = (1..=columns)
                .map(|i| bf16::from_f32(f32::from(u8::try_from(i).unwrap())))
                .collect();
            let len = Layout::Lanes.row_len(columns);
            let mut values = vec![bf16::ONE; len];
            Layout::Lanes.arrange(&row, &mut values);
            let mut back = vec![0.0; columns];
            let rows = Bf16Rows {
                values: &values,
                columns,
                layout: Layout::Lanes,
            };
            rows.widen_row(0, &mut back);
            assert!(
                back.iter().zip(&row).all(|(a, b)| bf16::from_f32(*a) == *b),
                "{columns}"
            );
            let kept = values.iter().filter(|value| **value != bf16::ZERO).count();
            assert_eq!(kept, columns, "what pads is zero");
        }
    }
}
