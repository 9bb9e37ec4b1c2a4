//! BF16 numbers in memory of their own: in pages of 2 MiB, as packed weights lie.
//!
//! A mapped file lies in pages of 4 KiB, wherever they were free when it was read. Decode reads every weight for every token, and the
//! processor's prefetchers stop where a page ends: the weights that a plan computes with are moved here, piece by piece.

use std::ops::Deref;

use half::bf16;
use rayon::prelude::*;

use crate::kernels::packed::{Line, Lines};

/// See the file's comment.
#[derive(Debug, Clone)]
pub(super) struct Halves {
    lines: Lines,
    len: usize,
}

impl Halves {
    /// So many numbers. `fill(first, piece)` writes those from `first` on, of which there are `piece` or, at the end, fewer; pieces are shared
    /// out among the threads.
    pub(super) fn fill(len: usize, piece: usize, fill: impl Fn(usize, &mut [bf16]) + Sync) -> Self {
        let mut lines = Lines::zeros(len.div_ceil(size_of::<Line>() / size_of::<bf16>()));
        let numbers: &mut [bf16] = bytemuck::cast_slice_mut(lines.all_mut());
        numbers[..len]
            .par_chunks_mut(piece)
            .enumerate()
            .for_each(|(index, dst)| fill(index * piece, dst));
        Self { lines, len }
    }
}

impl Deref for Halves {
    type Target = [bf16];

    fn deref(&self) -> &[bf16] {
        &bytemuck::cast_slice(self.lines.all())[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_filled_once_whatever_the_pieces_are() {
        let number = |at: usize| bf16::from_bits(u16::try_from(at).unwrap());
        for len in [1, 31, 32, 33, 1000] {
            for piece in [1, 7, 32, 2000] {
                let halves = Halves::fill(len, piece, |first, dst| {
                    for (at, dst) in (first..).zip(dst) {
                        *dst = number(at);
                    }
                });
                assert!(
                    halves.iter().copied().eq((0..len).map(number)),
                    "{len} {piece}"
                );
            }
        }
    }
}
