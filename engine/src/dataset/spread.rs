//! Which windows of a file are read: spread evenly over it, and others in each round. Pure.

use super::Window;
use crate::error::{Error, Result};

/// `count` of `windows`, spread evenly so that a small sample sees each part of the file, and those left over, both in the file's order.
///
/// # Errors
/// Fewer windows than asked for: says how many there are.
pub fn sample(
    name: &str,
    windows: Vec<Window>,
    count: usize,
) -> Result<(Vec<Window>, Vec<Window>)> {
    sample_of_round(name, windows, count, 0)
}

/// The same, each round moved on by one window: where there are more than `count`, every round but the first reads others.
///
/// # Errors
/// As [`sample`].
pub fn sample_of_round(
    name: &str,
    windows: Vec<Window>,
    count: usize,
    round: usize,
) -> Result<(Vec<Window>, Vec<Window>)> {
    let total = windows.len();
    if count == 0 {
        return Err(Error::data("0 samples measure nothing: take at least 1"));
    }
    if count > total {
        return Err(Error::data(format!(
            "{name} gives only {total} samples and {count} were asked for: ask for at most {total} or add data"
        )));
    }
    // The k-th sample stands at floor(k * total / count).
    let mut is_chosen = vec![false; total];
    for sample in 0..count {
        is_chosen[(sample * total / count + round % total) % total] = true;
    }
    let (mut chosen, mut rest) = (Vec::with_capacity(count), Vec::with_capacity(total - count));
    for (window, is_chosen) in windows.into_iter().zip(is_chosen) {
        if is_chosen {
            chosen.push(window);
        } else {
            rest.push(window);
        }
    }
    Ok((chosen, rest))
}
