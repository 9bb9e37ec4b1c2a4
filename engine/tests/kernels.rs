//! Every implementation of the kernels that this machine can run, against the oracle, over odd shapes and tails.
//!
//! Floating sums may differ by rounding (the bound grows with the number of terms); integers, roundings and the independence from batch and
//! slice must be exact.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test panics where it fails and prints what it tested"
)]

use half::bf16;
use mixquant_engine::kernels::{
    Backend, Bf16Rows, Layout, Matrix, Naive, Rotation, Strided, Values, available,
};

const ROWS: [usize; 8] = [1, 2, 3, 4, 5, 8, 9, 17];
const OUTPUTS: [usize; 8] = [1, 3, 4, 5, 16, 31, 64, 65];
const INPUTS: [usize; 9] = [1, 7, 8, 15, 16, 17, 64, 172, 384];

/// Numbers that look random, in -1..1, the same in every run.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f32::from(i16::try_from(state >> 17).unwrap()) / 16_384.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn implementations() -> Vec<&'static dyn Backend> {
    let all = available();
    println!(
        "tested: {:?}",
        all.iter().map(|backend| backend.name()).collect::<Vec<_>>()
    );
    all
}

/// The largest error that rounding may make in a sum of `terms` products of numbers up to 1.
fn bound(terms: usize) -> f32 {
    1e-6 + 3e-7 * f32::from(u16::try_from(terms).unwrap())
}

fn assert_close(name: &str, result: &[f32], expected: &[f32], bound: f32) {
    for (index, (a, b)) in result.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= bound,
            "{name}: {index} is {a}, the oracle says {b}"
        );
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn matrix_products_equal_the_oracle() {
    for backend in implementations() {
        for (m, n, k) in ROWS.iter().flat_map(|m| {
            OUTPUTS
                .iter()
                .flat_map(move |n| INPUTS.iter().map(move |k| (*m, *n, *k)))
        }) {
            let (x, w) = (numbers(m * k, 1), numbers(n * k, 2));
            let halves: Vec<bf16> = w.iter().map(|value| bf16::from_f32(*value)).collect();
            for values in [Values::F32(&w), Values::Bf16(&halves)] {
                let w = Matrix {
                    values,
                    rows: n,
                    columns: k,
                };
                let stride = n + 3;
                let (mut result, mut expected) = (vec![7.0; m * stride], vec![7.0; m * stride]);
                backend.matmul(&x, w, stride, &mut result);
                Naive.matmul(&x, w, stride, &mut expected);
                assert_close(backend.name(), &result, &expected, bound(k));
            }
        }
    }
}

/// Rows rounded to BF16 and laid out as the backend wants so many.
fn halves(backend: &dyn Backend, x: &[f32], columns: usize) -> (Vec<bf16>, Layout) {
    let layout = backend.bf16_layout(x.len() / columns);
    let (mut row, mut all) = (vec![bf16::ZERO; columns], Vec::new());
    for x in x.chunks_exact(columns) {
        let mut dst = vec![bf16::ONE; layout.row_len(columns)];
        backend.narrow(x, &mut row);
        layout.arrange(&row, &mut dst);
        all.extend(dst);
    }
    (all, layout)
}

fn matmul_bf16(backend: &dyn Backend, x: &[f32], w: &[bf16], columns: usize) -> Vec<f32> {
    let (values, layout) = halves(backend, x, columns);
    let rows = Bf16Rows {
        values: &values,
        columns,
        layout,
    };
    let w = Matrix {
        values: Values::Bf16(w),
        rows: w.len() / columns,
        columns,
    };
    let (m, stride) = (x.len() / columns, w.rows + 3);
    let mut dst = vec![7.0; m * stride];
    backend.matmul_bf16(rows, w, stride, &mut dst);
    assert!(dst.chunks(stride).all(|row| row[w.rows..] == [7.0; 3]));
    let rows = dst.chunks(stride).flat_map(|row| &row[..w.rows]);
    rows.copied().collect()
}

#[test]
fn products_of_bf16_equal_the_oracle_in_every_layout() {
    for backend in implementations() {
        for (m, n, k) in ROWS.iter().chain(&[16, 22, 37]).flat_map(|m| {
            OUTPUTS.iter().chain(&[15, 17, 48, 130]).flat_map(move |n| {
                INPUTS
                    .iter()
                    .chain(&[31, 33, 96])
                    .map(move |k| (*m, *n, *k))
            })
        }) {
            let x = numbers(m * k, 20);
            let w: Vec<bf16> = numbers(n * k, 21).into_iter().map(bf16::from_f32).collect();
            let (result, expected) = (
                matmul_bf16(backend, &x, &w, k),
                matmul_bf16(&Naive, &x, &w, k),
            );
            assert_close(backend.name(), &result, &expected, bound(k));
        }
    }
}

/// Prefill and decode take different kernels: one row must not see it.
#[test]
fn a_row_of_bf16_has_the_same_bits_alone_and_among_many() {
    for backend in implementations() {
        for (m, n, k) in [(16, 64, 64), (17, 65, 172), (40, 130, 384), (23, 9, 33)] {
            let x = numbers(m * k, 22);
            let w: Vec<bf16> = numbers(n * k, 23).into_iter().map(bf16::from_f32).collect();
            let all = matmul_bf16(backend, &x, &w, k);
            for size in [1, 2, 3, 5, 15, 16] {
                let parts = x
                    .chunks(size * k)
                    .flat_map(|x| matmul_bf16(backend, x, &w, k));
                let parts: Vec<f32> = parts.collect();
                assert_eq!(bits(&all), bits(&parts), "{} by {size}", backend.name());
            }
            for (channel, w) in w.chunks(k).enumerate() {
                let own = matmul_bf16(backend, &x, w, k);
                let column: Vec<f32> = all.iter().copied().skip(channel).step_by(n).collect();
                assert_eq!(bits(&own), bits(&column), "{} at {channel}", backend.name());
            }
        }
    }
}

/// The property that makes answers independent of batches, chunks and threads.
#[test]
fn an_output_has_the_same_bits_whatever_is_computed_beside_it() {
    for backend in implementations() {
        for (m, n, k) in [(9, 13, 64), (5, 7, 172), (17, 65, 384), (4, 4, 15)] {
            let (x, w) = (numbers(m * k, 3), numbers(n * k, 4));
            let halves: Vec<bf16> = w.iter().map(|value| bf16::from_f32(*value)).collect();
            let widened: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
            let w = Matrix {
                values: Values::Bf16(&halves),
                rows: n,
                columns: k,
            };
            let mut all = vec![0.0; m * n];
            backend.matmul(&x, w, n, &mut all);
            let mut wide = vec![0.0; m * n];
            backend.matmul(
                &x,
                Matrix {
                    values: Values::F32(&widened),
                    ..w
                },
                n,
                &mut wide,
            );
            assert_eq!(
                bits(&all),
                bits(&wide),
                "{}: widened weights give another result",
                backend.name()
            );
            for row in 0..m {
                for column in 0..n {
                    let mut one = [0.0];
                    backend.matmul(
                        &x[row * k..(row + 1) * k],
                        w.slice(column, column + 1),
                        1,
                        &mut one,
                    );
                    assert_eq!(
                        one[0].to_bits(),
                        all[row * n + column].to_bits(),
                        "{} at {row}, {column}",
                        backend.name()
                    );
                }
            }
        }
    }
}

#[test]
fn weighted_sums_equal_the_oracle() {
    for backend in implementations() {
        for (rows, terms, columns) in [
            (1, 1, 8),
            (3, 5, 8),
            (4, 17, 64),
            (5, 100, 64),
            (9, 33, 80),
            (2, 300, 128),
            (1, 0, 8),
            (6, 2, 7),
            (13, 64, 64),
            (7, 40, 65),
        ] {
            let (weights, values) = (numbers(rows * terms, 7), numbers(terms * columns, 8));
            let (step, stride) = (terms, columns + 3);
            let weights = Strided {
                values: &weights,
                rows,
                step,
            };
            let (mut result, mut expected) = (vec![7.0; rows * stride], vec![7.0; rows * stride]);
            backend.weighted_sum(weights, &values, columns, stride, &mut result);
            Naive.weighted_sum(weights, &values, columns, stride, &mut expected);
            assert_close(backend.name(), &result, &expected, bound(terms));
            // Fewer values than a row has weights: the rest is not read.
            let half = terms / 2;
            let values = &values[..half * columns];
            backend.weighted_sum(weights, values, columns, stride, &mut result);
            Naive.weighted_sum(weights, values, columns, stride, &mut expected);
            assert_close(backend.name(), &result, &expected, bound(terms));
        }
    }
}

/// A score must be the same whether one query meets its key or many.
#[test]
fn a_weighted_sum_has_the_same_bits_whatever_is_summed_beside_it() {
    for backend in implementations() {
        let (rows, terms, columns) = (13, 33, 85);
        let (weights, values) = (numbers(rows * terms, 16), numbers(terms * columns, 17));
        let sum = |weights: &[f32], values: &[f32], columns: usize| {
            let mut dst = vec![0.0; weights.len() / terms * columns];
            let weights = Strided {
                values: weights,
                rows: weights.len() / terms,
                step: terms,
            };
            backend.weighted_sum(weights, values, columns, columns, &mut dst);
            bits(&dst)
        };
        let all = sum(&weights, &values, columns);
        let single = weights.chunks(terms);
        let single: Vec<u32> = single.flat_map(|row| sum(row, &values, columns)).collect();
        assert_eq!(all, single, "{}", backend.name());
        let mut turned = vec![0.0; values.len()];
        backend.transpose(&values, columns, &mut turned);
        for (column, own) in turned.chunks(terms).enumerate() {
            let expected: Vec<u32> = all.iter().copied().skip(column).step_by(columns).collect();
            assert_eq!(sum(&weights, own, 1), expected, "{}", backend.name());
        }
    }
}

#[test]
fn transposing_moves_every_value() {
    for backend in implementations() {
        for (rows, columns) in [(1, 1), (16, 16), (3, 64), (64, 80), (17, 33)] {
            let values = numbers(rows * columns, 18);
            let mut turned = vec![0.0; values.len()];
            backend.transpose(&values, columns, &mut turned);
            for (index, value) in values.iter().enumerate() {
                let (row, column) = (index / columns, index % columns);
                assert_eq!(turned[column * rows + row].to_bits(), value.to_bits());
            }
        }
    }
}

#[test]
fn row_operations_equal_the_oracle() {
    for backend in implementations() {
        for len in [1, 2, 15, 16, 17, 64, 172, 1023] {
            let (x, y) = (numbers(len, 9), numbers(len, 10));
            let (mut result, mut expected) = (vec![0.0; len], vec![0.0; len]);
            backend.rms_norm(&x, &y, 1e-5, &mut result);
            Naive.rms_norm(&x, &y, 1e-5, &mut expected);
            assert_close(backend.name(), &result, &expected, 1e-5);

            let large: Vec<f32> = x.iter().map(|x| x * 30.0).collect();
            (result, expected) = (large.clone(), large.clone());
            backend.softmax(&mut result);
            Naive.softmax(&mut expected);
            assert_close(backend.name(), &result, &expected, 1e-6);

            (result, expected) = (large.clone(), large);
            backend.silu_mul(&mut result, &y);
            Naive.silu_mul(&mut expected, &y);
            assert_close(backend.name(), &result, &expected, 1e-5);
        }
    }
}

#[test]
fn rotary_pairs_equal_the_oracle() {
    for backend in implementations() {
        for (heads, half) in [(1, 4), (3, 32), (2, 5)] {
            let (cos, sin) = (numbers(half, 11), numbers(half, 12));
            let mut result = numbers(heads * half * 2, 13);
            let mut expected = result.clone();
            let rotation = Rotation {
                cos: &cos,
                sin: &sin,
            };
            backend.rope(&mut result, rotation);
            Naive.rope(&mut expected, rotation);
            assert_close(backend.name(), &result, &expected, 1e-6);
        }
    }
}

#[test]
fn roundings_equal_the_oracle_to_the_last_bit() {
    for backend in implementations() {
        for len in [1, 3, 16, 33, 172] {
            let x = numbers(len, 14);
            let (mut result, mut expected) = (vec![bf16::ONE; len], vec![bf16::ZERO; len]);
            backend.narrow(&x, &mut result);
            Naive.narrow(&x, &mut expected);
            assert_eq!(result, expected, "{}", backend.name());

            let row_len = len.next_multiple_of(8);
            let (mut result, mut expected) = (vec![9; row_len], vec![9; row_len]);
            let sums = (
                backend.quantise_row(&x, &mut result),
                Naive.quantise_row(&x, &mut expected),
            );
            assert_eq!((sums.0, &result), (sums.1, &expected), "{}", backend.name());
        }
    }
}

#[test]
fn a_nan_is_never_hidden() {
    for backend in implementations() {
        for position in [0, 5, 16] {
            let mut row = numbers(17, 15);
            row[position] = f32::NAN;
            let mut quantised = [0; 24];
            assert!(
                backend.quantise_row(&row, &mut quantised).0.is_nan(),
                "{}",
                backend.name()
            );
            let mut normed = [0.0; 17];
            backend.rms_norm(&row, &[1.0; 17], 1e-5, &mut normed);
            assert!(normed.iter().all(|x| x.is_nan()), "{}", backend.name());
            let mut gate = row.clone();
            backend.silu_mul(&mut gate, &[1.0; 17]);
            assert!(gate[position].is_nan(), "{}", backend.name());
            let mut rounded = [bf16::ZERO; 17];
            backend.narrow(&row, &mut rounded);
            assert!(rounded[position].is_nan(), "{}", backend.name());
            let w = vec![bf16::ONE; 4 * 17];
            for rows in [1, 20] {
                let product = matmul_bf16(backend, &row.repeat(rows), &w, 17);
                assert!(product.iter().all(|x| x.is_nan()), "{}", backend.name());
            }
            backend.softmax(&mut row);
            assert!(row.iter().all(|x| x.is_nan()), "{}", backend.name());
        }
    }
}
