//! Drift: how much of what serving reads lies beyond what calibration saw. [`Seen`] gathers it, [`Ranges`] keeps it, [`Watch`] counts against it.
//!
//! INT8 activations take their scale from each token and KV scales from each block, so nothing is clipped by a value that is too large. It
//! predicts loss all the same: the largest value of a row is its scale, and so the step that every other value of the row is rounded to; the
//! quantiser's choices (smoothing, GPTQ's columns, the thresholds of attention) rest on the rows that calibration saw; and `verify` measured
//! those. Counted is therefore the share of rows whose largest magnitude is beyond the calibrated one. Nothing here changes an answer.

mod ranges;
mod watch;

pub use ranges::{QUANTILE, Ranges, Seen};
pub use watch::{Counts, Share, Watch};

use rayon::prelude::*;

use crate::kv::hadamard;
use crate::model::LinearInput;

/// The places of a block whose inputs are counted, in the order of `ranges.json`.
pub const INPUTS: [LinearInput; 4] = [
    LinearInput::Attention,
    LinearInput::Output,
    LinearInput::FeedForward,
    LinearInput::Down,
];

/// Rows that one thread looks at at once.
const ROWS: usize = 16;

/// The largest magnitude of each row but a sequence's first: its first token often draws attention as a sink with activations a thousand
/// times as large as any other's, which would hide what becomes of the rest.
fn largest_of_inputs(rows: &[f32], columns: usize) -> Vec<f32> {
    let rows = rows.get(columns..).unwrap_or_default();
    rows.par_chunks_exact(columns)
        .with_min_len(ROWS)
        .map(largest)
        .collect()
}

/// The same of each KV head's keys, rotated as the cache stores them, `[rows, heads]`.
fn largest_of_keys(rows: &[f32], heads: usize, width: usize) -> Vec<f32> {
    let head_dim = width / heads;
    let rows = rows.get(width..).unwrap_or_default();
    rows.par_chunks_exact(head_dim)
        .with_min_len(ROWS * heads)
        .map_init(Vec::new, |key, row| {
            key.clear();
            key.extend_from_slice(row);
            hadamard::rotate(key);
            largest(key)
        })
        .collect()
}

/// And of its values.
fn largest_of_values(rows: &[f32], heads: usize, width: usize) -> Vec<f32> {
    let rows = rows.get(width..).unwrap_or_default();
    rows.par_chunks_exact(width / heads)
        .with_min_len(ROWS * heads)
        .map(largest)
        .collect()
}

/// By its bits, which order magnitudes as numbers do and put what is no number above all.
fn largest(row: &[f32]) -> f32 {
    let bits = row.iter().map(|x| x.to_bits() & 0x7fff_ffff);
    f32::from_bits(bits.fold(0, u32::max))
}
