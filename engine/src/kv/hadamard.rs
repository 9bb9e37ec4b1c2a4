//! The rotation of keys before they are quantised: it spreads a channel's outlier over all channels and leaves `query · key` as it is when the
//! query is rotated too.

/// Multiplies a row by the normalised Hadamard matrix of the largest power of two that divides its length, run by run. It is its own inverse.
pub(crate) fn rotate(row: &mut [f32]) {
    let size = 1 << row.len().trailing_zeros();
    #[expect(
        clippy::cast_precision_loss,
        reason = "a head has at most 1,024 channels"
    )]
    let norm = 1.0 / (size as f32).sqrt();
    for run in row.chunks_exact_mut(size) {
        let mut half = 1;
        while half < size {
            for pair in run.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for value in run {
            *value *= norm;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    proptest! {
        #[test]
        fn rotating_twice_gives_the_row_back(row in proptest::collection::vec(-4.0_f32..4.0, 1..130)) {
            let mut twice = row.clone();
            rotate(&mut twice);
            rotate(&mut twice);
            for (a, b) in row.iter().zip(&twice) {
                prop_assert!((a - b).abs() < 1e-5);
            }
        }

        #[test]
        fn rotating_both_keeps_their_product(a in proptest::collection::vec(-4.0_f32..4.0, 64), b in proptest::collection::vec(-4.0_f32..4.0, 64)) {
            let plain = dot(&a, &b);
            let (mut a, mut b) = (a, b);
            rotate(&mut a);
            rotate(&mut b);
            prop_assert!((dot(&a, &b) - plain).abs() < 1e-3);
        }
    }

    #[test]
    fn an_outlier_is_spread_over_all_channels() {
        let mut row = [0.0; 64];
        row[7] = 8.0;
        rotate(&mut row);
        assert!(row.iter().all(|value| (value.abs() - 1.0).abs() < 1e-6));
    }
}
