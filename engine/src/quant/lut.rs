//! LUT4: 16 values an output channel, placed where the weights lie (the dense part of `SqueezeLLM`, arXiv 2306.07629).
//!
//! Each row is a one-dimensional k-means problem weighted by the inputs' sensitivity. In one dimension clusters are intervals of the sorted
//! weights, so dynamic programming finds the best table itself (Wu 1991): nothing is seeded and nothing depends on chance.

use half::bf16;
use rayon::prelude::*;

use super::round::pack_nibbles;
use super::weight::{Codes, QuantisedWeight, TABLE};

/// Fits a table to each row of `[out, in]` weights. An error in column `i` counts `sensitivity[i]` times; at least one must be above 0.
pub fn fit(rows: &[f32], in_features: usize, sensitivity: &[f32]) -> QuantisedWeight {
    assert_eq!(sensitivity.len(), in_features, "one sensitivity an input");
    let fitted: Vec<([f32; TABLE], Vec<u8>)> = rows
        .par_chunks_exact(in_features)
        .map(|row| {
            let table = table(row, sensitivity);
            let codes = row.iter().map(|value| nearest(&table, *value)).collect();
            (table, codes)
        })
        .collect();
    let codes = pack_nibbles(
        fitted.iter().flat_map(|(_, codes)| codes.iter().copied()),
        in_features,
    );
    QuantisedWeight {
        out_features: fitted.len(),
        in_features,
        codes: Codes::Lut4 {
            codes,
            tables: fitted.iter().map(|(table, _)| *table).collect(),
        },
        row_block: 1,
        group: in_features,
        scales: vec![1.0; fitted.len()],
        zeros: None,
        input_order: None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an index below 16")]
fn nearest(table: &[f32; TABLE], value: f32) -> u8 {
    let mut best = 0;
    for (index, entry) in table.iter().enumerate() {
        if (entry - value).abs() < (table[best] - value).abs() {
            best = index;
        }
    }
    best as u8
}

/// The table of one row: BF16 values, ascending.
#[expect(
    clippy::cast_possible_truncation,
    reason = "means of FP32 values, rounded to BF16 anyway"
)]
fn table(row: &[f32], sensitivity: &[f32]) -> [f32; TABLE] {
    let sums = Sums::of(row, sensitivity);
    let ends = best_ends(&sums);
    let mut table = [0.0; TABLE];
    let mut first = 0;
    for (entry, end) in table.iter_mut().zip(ends) {
        let mean = sums.mean(first, end.max(first + 1).min(sums.len()));
        *entry = bf16::from_f32(mean as f32).to_f32();
        first = end.min(sums.len() - 1);
    }
    table
}

/// Prefix sums over the sorted weights, so that the cost of any interval takes constant time.
struct Sums {
    weight: Vec<f64>,
    value: Vec<f64>,
    square: Vec<f64>,
}

impl Sums {
    fn of(row: &[f32], sensitivity: &[f32]) -> Self {
        let mut points: Vec<(f32, f32)> = row
            .iter()
            .copied()
            .zip(sensitivity.iter().copied())
            .collect();
        points.sort_by(|one, two| one.0.total_cmp(&two.0));
        let mut sums = Self {
            weight: vec![0.0],
            value: vec![0.0],
            square: vec![0.0],
        };
        // An input that never speaks still gets its place in the table.
        let floor = f64::from(sensitivity.iter().copied().fold(0.0, f32::max)) * 1e-9;
        let (mut weight, mut value, mut square) = (0.0, 0.0, 0.0);
        for (x, w) in points {
            let (x, w) = (f64::from(x), f64::from(w).max(floor).max(f64::MIN_POSITIVE));
            weight += w;
            value += w * x;
            square += w * x * x;
            sums.weight.push(weight);
            sums.value.push(value);
            sums.square.push(square);
        }
        sums
    }

    fn len(&self) -> usize {
        self.weight.len() - 1
    }

    fn mean(&self, first: usize, end: usize) -> f64 {
        (self.value[end] - self.value[first]) / (self.weight[end] - self.weight[first])
    }

    /// The weighted squared error of the points `first..end` around their mean.
    fn cost(&self, first: usize, end: usize) -> f64 {
        let weight = self.weight[end] - self.weight[first];
        if weight <= 0.0 {
            return 0.0;
        }
        let value = self.value[end] - self.value[first];
        (self.square[end] - self.square[first] - value * value / weight).max(0.0)
    }
}

/// The ends of the best clusters, at most [`TABLE`] of them.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a row has far fewer than 2^32 weights"
)]
fn best_ends(sums: &Sums) -> Vec<usize> {
    let points = sums.len();
    let clusters = TABLE.min(points);
    let mut cost: Vec<f64> = (0..=points).map(|end| sums.cost(0, end)).collect();
    let mut starts: Vec<Vec<u32>> = Vec::with_capacity(clusters);
    for cluster in 1..clusters {
        let mut next = vec![f64::INFINITY; points + 1];
        let mut start = vec![0_u32; points + 1];
        // The best start never moves left as the end moves right, so each half of the ends searches its own part of the starts.
        let mut work = vec![(cluster + 1, points, cluster, points)];
        while let Some((low, high, from, to)) = work.pop() {
            if low > high {
                continue;
            }
            let middle = usize::midpoint(low, high);
            let mut best = (f64::INFINITY, from);
            let last = to.min(middle - 1);
            for (candidate, before) in cost.iter().enumerate().take(last + 1).skip(from) {
                let total = before + sums.cost(candidate, middle);
                if total < best.0 {
                    best = (total, candidate);
                }
            }
            next[middle] = best.0;
            start[middle] = best.1 as u32;
            work.push((low, middle - 1, from, best.1));
            work.push((middle + 1, high, best.1, to));
        }
        cost = next;
        starts.push(start);
    }
    let mut ends = vec![points];
    for start in starts.iter().rev() {
        let end = ends[ends.len() - 1];
        ends.push(start[end] as usize);
    }
    ends.reverse();
    ends
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn loss(row: &[f32], sensitivity: &[f32], table: &[f32; TABLE]) -> f64 {
        row.iter()
            .zip(sensitivity)
            .map(|(value, weight)| {
                let read = table[usize::from(nearest(table, *value))];
                f64::from(*weight) * f64::from(read - value).powi(2)
            })
            .sum()
    }

    proptest! {
        #[test]
        fn no_evenly_spaced_grid_is_better(
            row in proptest::collection::vec(-1.0_f32..1.0, 20..200),
            sensitivity in proptest::collection::vec(0.01_f32..4.0, 200),
        ) {
            let sensitivity = &sensitivity[..row.len()];
            let fitted = table(&row, sensitivity);
            let largest = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let even: [f32; TABLE] = std::array::from_fn(|index| largest * (f32::from(u8::try_from(index).unwrap()) / 7.5 - 1.0));
            // The table is rounded to BF16 after it was fitted.
            prop_assert!(loss(&row, sensitivity, &fitted) <= loss(&row, sensitivity, &even) * 1.01 + 1e-6);
        }
    }

    #[test]
    fn sixteen_different_weights_are_kept_as_they_are() {
        let row: Vec<f32> = (0..32).map(|index| f32::from(index % 16_u8)).collect();
        let weight = fit(&row, 32, &[1.0; 32]);
        weight.check("x").unwrap();
        let mut read = vec![0.0; 32];
        weight.dequantise_row(0, &mut read);
        assert_eq!(read, row);
    }

    #[test]
    fn rows_shorter_than_the_table_and_rows_of_zeros_are_whole() {
        for row in [vec![0.5], vec![0.0; 40], vec![1.0, 2.0, 3.0]] {
            let weight = fit(&row, row.len(), &vec![1.0; row.len()]);
            weight.check("x").unwrap();
            let mut read = vec![9.0; row.len()];
            weight.dequantise_row(0, &mut read);
            assert_eq!(read, row);
        }
    }

    #[test]
    fn the_table_follows_the_sensitive_inputs() {
        // 40 different weights; the last 16 matter.
        let row: Vec<f32> = (0..40_u8).map(|index| f32::from(index) + 0.5).collect();
        let sensitivity: Vec<f32> = (0..40)
            .map(|index| if index < 24 { 1e-6 } else { 1.0 })
            .collect();
        let fitted = table(&row, &sensitivity);
        assert!(
            loss(&row[24..], &sensitivity[24..], &fitted) <= 1.01,
            "{fitted:?}"
        );
        let even = table(&row, &[1.0; 40]);
        assert!(
            loss(&row[24..], &sensitivity[24..], &fitted)
                < 0.5 * loss(&row[24..], &sensitivity[24..], &even)
        );
    }
}
