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
use mixquant_engine::kernels::{Backend, Matrix, Naive, Rotation, Values, available};

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
        ] {
            let (weights, values) = (numbers(rows * terms, 7), numbers(terms * columns, 8));
            let (mut result, mut expected) = (vec![7.0; rows * columns], vec![7.0; rows * columns]);
            backend.weighted_sum(&weights, &values, columns, &mut result);
            Naive.weighted_sum(&weights, &values, columns, &mut expected);
            assert_close(backend.name(), &result, &expected, bound(terms));
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
            let (mut result, mut expected) = (x.clone(), x.clone());
            backend.round_bf16(&mut result);
            Naive.round_bf16(&mut expected);
            assert_eq!(bits(&result), bits(&expected), "{}", backend.name());

            let halves: Vec<bf16> = x.iter().map(|value| bf16::from_f32(*value)).collect();
            backend.widen(&halves, &mut result);
            assert_eq!(bits(&result), bits(&expected), "{}", backend.name());

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
            let mut rounded = row.clone();
            backend.round_bf16(&mut rounded);
            assert!(rounded[position].is_nan(), "{}", backend.name());
            backend.softmax(&mut row);
            assert!(row.iter().all(|x| x.is_nan()), "{}", backend.name());
        }
    }
}
