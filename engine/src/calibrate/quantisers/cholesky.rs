//! The factor that GPTQ walks along: upper triangular `U` with `Uᵀ U = H⁻¹`, in f64. Pure.
//!
//! With the order of rows and columns turned round, `H = R Rᵀ` with an upper `R`, and `U = R⁻¹`: one Cholesky factorisation and one triangular
//! inverse, and the inverse of `H` itself is never formed. Work is cut into fixed pieces, so the result does not depend on threads.

use rayon::prelude::*;

/// Columns that are finished together.
const PANEL: usize = 64;

/// `U` of a symmetric `[n, n]` matrix, or nothing when the matrix is not positive definite.
pub fn inverse_factor(matrix: &[f64], n: usize) -> Option<Vec<f64>> {
    let turned: Vec<f64> = matrix.iter().rev().copied().collect();
    let lower = cholesky(turned, n)?;
    let mut inverse = lower_inverse(&lower, n);
    inverse.reverse();
    Some(inverse)
}

/// Lower `L` with `L Lᵀ = A`.
fn cholesky(mut a: Vec<f64>, n: usize) -> Option<Vec<f64>> {
    for first in (0..n).step_by(PANEL) {
        let end = n.min(first + PANEL);
        for row in first..end {
            let (done, rest) = a.split_at_mut(row * n);
            finish_row(done, &mut rest[..n], n, first..row);
            let square = rest[row] - dot(&rest[..row], &rest[..row]);
            if !(square.is_finite() && square > 0.0) {
                return None;
            }
            rest[row] = square.sqrt();
            rest[row + 1..n].fill(0.0);
        }
        let (done, rest) = a.split_at_mut(end * n);
        let done = &*done;
        rest.par_chunks_exact_mut(n)
            .enumerate()
            .for_each(|(index, row)| {
                // The upper half still holds the matrix; it is cleared when its row is finished.
                debug_assert!(index + end < n);
                finish_row(done, row, n, first..end);
            });
    }
    Some(a)
}

/// The columns `columns` of one row, the columns before being finished.
fn finish_row(done: &[f64], row: &mut [f64], n: usize, columns: std::ops::Range<usize>) {
    for column in columns {
        let other = &done[column * n..=column * n + column];
        row[column] = (row[column] - dot(&row[..column], &other[..column])) / other[column];
    }
}

/// The inverse of a lower triangular matrix.
fn lower_inverse(lower: &[f64], n: usize) -> Vec<f64> {
    let panels: Vec<Vec<f64>> = (0..n)
        .into_par_iter()
        .step_by(PANEL)
        .map(|first| inverse_columns(lower, n, first..n.min(first + PANEL)))
        .collect();
    let mut inverse = vec![0.0; n * n];
    for (panel, columns) in panels.iter().enumerate() {
        let first = panel * PANEL;
        let width = n.min(first + PANEL) - first;
        for (row, values) in columns.chunks_exact(width).enumerate() {
            inverse[row * n + first..row * n + first + width].copy_from_slice(values);
        }
    }
    inverse
}

/// Some columns of it, `[n, width]`: row by row, each from the rows above.
fn inverse_columns(lower: &[f64], n: usize, columns: std::ops::Range<usize>) -> Vec<f64> {
    let width = columns.len();
    let mut inverse = vec![0.0; n * width];
    for row in columns.start..n {
        let (above, own) = inverse.split_at_mut(row * width);
        let own = &mut own[..width];
        if columns.contains(&row) {
            own[row - columns.start] = 1.0;
        }
        for (k, above) in above.chunks_exact(width).enumerate().skip(columns.start) {
            let factor = lower[row * n + k];
            own.iter_mut()
                .zip(above)
                .for_each(|(own, above)| *own -= factor * above);
        }
        let diagonal = lower[row * n + row];
        for own in own {
            *own /= diagonal;
        }
    }
    inverse
}

/// Eight sums side by side, which the compiler turns into vectors; the order is fixed.
fn dot(one: &[f64], two: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (ones, one_rest) = one.as_chunks::<8>();
    let (twos, two_rest) = two.as_chunks::<8>();
    for (one, two) in ones.iter().zip(twos) {
        for lane in 0..8 {
            sums[lane] += one[lane] * two[lane];
        }
    }
    let rest: f64 = one_rest.iter().zip(two_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn the_factor_gives_the_inverse(n in 1_usize..150, seed in proptest::collection::vec(-1.0_f64..1.0, 600)) {
            // A Gram matrix of more rows than columns, with something on the diagonal.
            let rows: Vec<f64> = (0..n * (n + 3)).map(|i| seed[(i * 7 + i / n * 13) % seed.len()]).collect();
            let mut h = vec![0.0; n * n];
            for row in rows.chunks_exact(n) {
                for i in 0..n {
                    for j in 0..n {
                        h[i * n + j] += row[i] * row[j];
                    }
                }
            }
            for i in 0..n {
                h[i * (n + 1)] += 1.0;
            }
            let u = inverse_factor(&h, n).unwrap();
            for i in 0..n {
                for j in 0..i {
                    prop_assert!(u[i * n + j].abs() < f64::MIN_POSITIVE, "upper");
                }
            }
            // Uᵀ U H = 1.
            for i in 0..n {
                let row: Vec<f64> = (0..n).map(|j| (0..=i.min(j)).map(|k| u[k * n + i] * u[k * n + j]).sum()).collect();
                for j in 0..n {
                    let product: f64 = (0..n).map(|k| row[k] * h[k * n + j]).sum();
                    let expected = if i == j { 1.0 } else { 0.0 };
                    prop_assert!((product - expected).abs() < 1e-7, "{i} {j}: {product}");
                }
            }
        }
    }

    #[test]
    fn a_matrix_that_is_not_positive_definite_is_told() {
        assert!(inverse_factor(&[1.0, 2.0, 2.0, 1.0], 2).is_none());
        assert!(inverse_factor(&[0.0], 1).is_none());
        assert!(inverse_factor(&[f64::NAN], 1).is_none());
    }
}
