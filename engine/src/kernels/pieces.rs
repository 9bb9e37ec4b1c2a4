//! Splits a result into rectangles that threads compute, each taking the next one when it is done.
//!
//! A piece is of a fixed size, never a share of the threads: a thread that is slow, because its core is busy elsewhere, keeps nobody waiting for
//! more than one piece. The model calls it; no kernel's result depends on the piece around it.
#![expect(
    unsafe_code,
    reason = "rectangles of one buffer are written by several threads, and never overlap"
)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

/// A row-major result that pieces are written into.
struct Shared<'a> {
    start: *mut f32,
    columns: usize,
    result: PhantomData<&'a mut [f32]>,
}

// SAFETY: `compute` writes each rectangle once, and rectangles of its grid do not overlap.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    /// Writes the dense `part`.
    ///
    /// # Safety
    /// The rectangle lies in the result, and nobody else touches it meanwhile.
    unsafe fn write(&self, rows: Range<usize>, columns: &Range<usize>, part: &[f32]) {
        let width = columns.len();
        for (row, part) in rows.zip(part.chunks_exact(width)) {
            // SAFETY: by the contract; a row of `part` has `width` values.
            unsafe {
                let dst = self.start.add(row * self.columns + columns.start);
                dst.copy_from_nonoverlapping(part.as_ptr(), width);
            }
        }
    }
}

/// Calls `work(rows, columns, part)` for the pieces of `[rows, columns]`, each at most `size` large; `part` is that piece, dense, and then goes
/// into `dst`.
pub fn compute(
    dst: &mut [f32],
    (rows, columns): (usize, usize),
    size: (usize, usize),
    work: impl Fn(Range<usize>, Range<usize>, &mut [f32]) + Sync,
) {
    thread_local! {
        static PART: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    assert_eq!(dst.len(), rows * columns, "the result is whole");
    if rows == 1 {
        dst.par_chunks_mut(size.1)
            .enumerate()
            .for_each(|(piece, dst)| {
                let first = piece * size.1;
                work(0..1, first..first + dst.len(), dst);
            });
        return;
    }
    let across = columns.div_ceil(size.1);
    let shared = Shared {
        start: dst.as_mut_ptr(),
        columns,
        result: PhantomData,
    };
    let piece = |index: usize| {
        let (down, right) = (index / across * size.0, index % across * size.1);
        let (rows, columns) = (
            down..rows.min(down + size.0),
            right..columns.min(right + size.1),
        );
        PART.with_borrow_mut(|part| {
            part.resize(rows.len() * columns.len(), 0.0);
            work(rows.clone(), columns.clone(), part);
            // SAFETY: the rectangle was cut to the result, and each index has a rectangle of its own.
            unsafe { shared.write(rows, &columns, part) };
        });
    };
    (0..rows.div_ceil(size.0) * across)
        .into_par_iter()
        .with_max_len(1)
        .for_each(piece);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_written_once_whatever_the_pieces_are() {
        for shape in [(1, 1), (1, 130), (3, 5), (17, 64), (40, 129)] {
            for size in [(1, 1), (16, 64), (7, 10), (100, 200)] {
                let mut dst = vec![-1.0; shape.0 * shape.1];
                compute(&mut dst, shape, size, |rows, columns, part| {
                    let width = columns.len();
                    for (row, part) in rows.zip(part.chunks_exact_mut(width)) {
                        for (column, value) in columns.clone().zip(part) {
                            *value = f32::from(u16::try_from(row * shape.1 + column).unwrap());
                        }
                    }
                });
                let expected = (0..dst.len()).map(|i| f32::from(u16::try_from(i).unwrap()));
                assert!(dst.iter().copied().eq(expected), "{shape:?} {size:?}");
            }
        }
    }
}
