//! Splits a result into rectangles that threads compute, each taking the next one when it is done.
//!
//! A piece is of a fixed size, never a share of the threads: a thread that is slow, because its core is busy elsewhere, keeps nobody waiting for
//! more than one piece. Where that wait costs more than the thread helped, the caller computes alone for a while: see [`Company`]. The model calls
//! it; no kernel's result depends on the piece around it.
#![expect(
    unsafe_code,
    reason = "rectangles of one buffer are written by several threads, and never overlap"
)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A wait that is no loss: a thread that wakes up, an interrupt.
const USUAL: Duration = Duration::from_micros(50);
/// The caller computes alone for so many times what company cost it: so company never costs more than a sixteenth of the time.
const ALONE: u32 = 16;
/// And at most so long, so that a core that is free again is soon found.
const LONGEST: Duration = Duration::from_millis(100);

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
    let across = columns.div_ceil(size.1);
    let shared = Shared {
        start: dst.as_mut_ptr(),
        columns,
        result: PhantomData,
    };
    share_out(rows.div_ceil(size.0) * across, |index| {
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
    });
}

/// Calls `work` for each number below `pieces`, on as many threads as there are, or on this one where others are no help now.
fn share_out(pieces: usize, work: impl Fn(usize) + Sync) {
    static COMPANY: LazyLock<Company> = LazyLock::new(Company::default);
    let next = AtomicUsize::new(0);
    let take = || {
        let mut own = 0;
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= pieces {
                return own;
            }
            work(index);
            own += 1;
        }
    };
    let helpers = rayon::current_num_threads().min(pieces).saturating_sub(1);
    if helpers == 0 || COMPANY.is_avoided() {
        take();
        return;
    }
    let start = Instant::now();
    let ((own, end), ()) = rayon::join(|| (take(), Instant::now()), || help(helpers, &take));
    COMPANY.judge(Meeting {
        own,
        others: pieces - own,
        computed: end - start,
        waited: end.elapsed(),
    });
}

/// Takes pieces on so many threads, where there are as many that have nothing else to do.
fn help(helpers: usize, take: &(impl Fn() -> usize + Sync)) {
    if helpers > 1 {
        rayon::join(take, || help(helpers - 1, take));
    } else {
        take();
    }
}

/// One result that several threads computed, as the caller saw it.
#[derive(Debug, Clone, Copy)]
struct Meeting {
    /// Pieces of the caller.
    own: usize,
    /// Pieces of the others.
    others: usize,
    /// How long the caller computed.
    computed: Duration,
    /// And then waited for pieces that others held.
    waited: Duration,
}

impl Meeting {
    /// What the caller lost by not computing all of it alone.
    fn loss(self) -> Duration {
        let (Ok(own), Ok(others)) = (u32::try_from(self.own), u32::try_from(self.others)) else {
            return Duration::ZERO;
        };
        let saved = self.computed.checked_div(own).unwrap_or(self.waited) * others;
        self.waited.saturating_sub(saved + USUAL)
    }
}

/// Whether other threads are a help. On a core that another program uses, a thread is stopped for milliseconds in the middle of a piece; a token's
/// products take less, so the caller would wait for that piece longer than for all of them together.
#[derive(Debug)]
struct Company {
    start: Instant,
    /// Nanoseconds from the start until which the caller computes alone.
    avoided: AtomicU64,
}

impl Default for Company {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            avoided: AtomicU64::new(0),
        }
    }
}

impl Company {
    fn is_avoided(&self) -> bool {
        let until = self.avoided.load(Ordering::Relaxed);
        Duration::from_nanos(until) > self.start.elapsed()
    }

    fn judge(&self, meeting: Meeting) {
        let alone = (meeting.loss() * ALONE).min(LONGEST);
        if !alone.is_zero() {
            let until = (self.start.elapsed() + alone).as_nanos();
            let until = u64::try_from(until).unwrap_or(u64::MAX);
            self.avoided.store(until, Ordering::Relaxed);
        }
    }
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

    #[test]
    fn company_is_avoided_after_a_wait_that_cost_more_than_it_saved() {
        let meeting = |own, others, computed, waited| Meeting {
            own,
            others,
            computed: Duration::from_micros(computed),
            waited: Duration::from_micros(waited),
        };
        // Half of the work done by the other, and a wait as long as a piece.
        let good = meeting(16, 16, 160, 10);
        // A long product: the last piece is waited for, and 20 were saved.
        let worth_it = meeting(40, 20, 20_000, 3000);
        let held = meeting(31, 1, 310, 3000);
        assert_eq!(good.loss(), Duration::ZERO);
        assert_eq!(worth_it.loss(), Duration::ZERO);
        assert_eq!(held.loss(), Duration::from_micros(2940));
        assert_eq!(meeting(0, 2, 0, 900).loss(), Duration::ZERO);

        let company = Company::default();
        company.judge(good);
        assert!(!company.is_avoided());
        company.judge(meeting(1, 1, 1, 1_000_000_000));
        assert!(company.is_avoided());
        let until = Duration::from_nanos(company.avoided.load(Ordering::Relaxed));
        assert!(until <= company.start.elapsed() + LONGEST, "never for long");
    }
}
