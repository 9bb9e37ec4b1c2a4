//! The order in which GPTQ rounds columns. Pure.

use std::str::FromStr;

use rayon::prelude::*;

use crate::calibrate::statistics::Statistics;

/// The order of rounding, and what it means for groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActOrder {
    /// As the columns stand.
    No,
    /// Columns with the largest inputs first; groups are of neighbours, with the scales of the stored weights. Every layout holds it. A linear whose
    /// outputs are nearer without it keeps its columns as they stand: there, scales are fitted to what rounding so far made of a group.
    Weight,
    /// Columns with the largest inputs first, and groups of columns in that order: inputs must be permuted to compute with it.
    Group,
}

impl FromStr for ActOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "no" => Ok(Self::No),
            "weight" => Ok(Self::Weight),
            "group" => Ok(Self::Group),
            _ => Err("not an order: write no, weight or group".into()),
        }
    }
}

/// The order in which columns are rounded.
pub(super) fn order(statistics: &Statistics, act_order: ActOrder) -> Vec<usize> {
    let inputs = statistics.inputs;
    let mut order: Vec<usize> = (0..inputs).collect();
    if act_order != ActOrder::No {
        let diagonal = |index: usize| statistics.hessian[index * (inputs + 1)];
        order.sort_by(|one, two| diagonal(*two).total_cmp(&diagonal(*one)));
    }
    order
}

/// Each row of `[out, inputs]` in the given order of columns.
pub(super) fn permuted(rows: &[f32], inputs: usize, order: &[usize]) -> Vec<f32> {
    rows.par_chunks_exact(inputs)
        .flat_map_iter(|row| order.iter().map(move |column| row[*column]))
        .collect()
}
