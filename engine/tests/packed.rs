//! Packed linears on every implementation of the kernels that this machine can run, against the oracle, over odd shapes, groups and tails.
//!
//! Integers must agree to the last bit; tables differ by rounding only.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use mixquant_engine::kernels::{Activations, Backend, Groups, Int8Rows, Naive, Packed, available};
use mixquant_engine::quant::{Codes, QuantisedWeight};
use proptest::prelude::*;

/// A generator of bytes that look random, the same in every run.
struct Bytes(u64);

impl Bytes {
    fn next(&mut self) -> u8 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 56) as u8
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next()).collect()
    }

    /// Numbers in -1..1.
    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| f32::from(self.next()) / 128.0 - 1.0 + f32::from(self.next()) / 65_536.0)
            .collect()
    }
}

/// What a linear may be.
#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    outputs: usize,
    inputs: usize,
    group: usize,
    row_block: usize,
    kind: usize,
    zeros: bool,
    seed: u64,
}

impl Case {
    fn weight(&self) -> QuantisedWeight {
        let (mut bytes, count) = (Bytes(self.seed | 1), self.outputs * self.inputs);
        let nibbles = self.outputs * QuantisedWeight::nibble_row(self.inputs);
        let codes = match self.kind {
            0 => Codes::Int8(bytes.take(count).into_iter().map(u8::cast_signed).collect()),
            1 => Codes::Int4(bytes.take(nibbles)),
            // No NaN.
            2 => Codes::Fp8(
                bytes
                    .take(count)
                    .into_iter()
                    .map(|byte| byte & 0xb7)
                    .collect(),
            ),
            _ => Codes::Lut4 {
                codes: bytes.take(nibbles),
                tables: (0..self.outputs)
                    .map(|_| bytes.numbers(16).try_into().unwrap())
                    .collect(),
            },
        };
        let blocks = self.outputs.div_ceil(self.row_block) * self.inputs.div_ceil(self.group);
        // Scales that fit 16 bits, and scales that do not.
        let unit = if self.seed.is_multiple_of(2) {
            256.0
        } else {
            255.0
        };
        let scales = bytes
            .take(blocks)
            .into_iter()
            .map(|byte| (f32::from(byte) + 1.0) / unit)
            .collect();
        let fraction = if self.seed.is_multiple_of(3) {
            0.3
        } else {
            0.0
        };
        QuantisedWeight {
            out_features: self.outputs,
            in_features: self.inputs,
            codes,
            row_block: self.row_block,
            group: self.group,
            scales,
            zeros: self.zeros.then(|| {
                bytes
                    .take(blocks)
                    .into_iter()
                    .map(|byte| f32::from(byte % 16) + fraction)
                    .collect()
            }),
            input_order: None,
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let group = prop_oneof![Just(8_usize), Just(32), Just(64), Just(128), 1_usize..300];
    let shape = (1_usize..20, 1_usize..150, 1_usize..300, group, 1_usize..4);
    (shape, 0_usize..4, any::<bool>(), any::<u64>()).prop_map(
        |((rows, outputs, inputs, group, row_block), kind, zeros, seed)| Case {
            rows,
            outputs,
            inputs,
            group,
            row_block,
            kind,
            zeros,
            seed,
        },
    )
}

/// INT8 rows with memory of their own.
struct Rounded {
    values: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    groups: Groups,
}

impl Rounded {
    fn new(x: &[f32], groups: Groups) -> Self {
        let mut rounded = Self {
            values: Vec::new(),
            scales: Vec::new(),
            sums: Vec::new(),
            groups,
        };
        for x in x.chunks_exact(groups.columns()) {
            for group in 0..groups.count() {
                let mut values = vec![0; groups.padded()];
                let (scale, sum) = Naive.quantise_row(&x[groups.range(group)], &mut values);
                rounded.values.extend(values);
                rounded.scales.push(scale);
                rounded.sums.push(sum);
            }
        }
        rounded
    }

    fn rows(&self) -> Int8Rows<'_> {
        Int8Rows {
            values: &self.values,
            scales: &self.scales,
            sums: &self.sums,
            groups: self.groups,
        }
    }
}

fn product(
    backend: &dyn Backend,
    x: &[f32],
    packed: &Packed,
    channels: std::ops::Range<usize>,
    stride: usize,
) -> Vec<f32> {
    let rows = x.len() / packed.in_features();
    let mut dst = vec![7.0; rows * stride];
    let rounded = packed.groups().map(|groups| Rounded::new(x, groups));
    let x = rounded.as_ref().map_or(Activations::Fp32(x), |rounded| {
        Activations::Int8(rounded.rows())
    });
    backend.matmul_packed(x, packed, channels, stride, &mut dst);
    dst
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn packed_products_equal_the_oracle(case in cases()) {
        let packed = Packed::new("w", &case.weight()).unwrap();
        let x = Bytes(case.seed ^ 5).numbers(case.rows * case.inputs);
        let expected = product(&Naive, &x, &packed, 0..case.outputs, case.outputs + 1);
        for backend in available() {
            let result = product(backend, &x, &packed, 0..case.outputs, case.outputs + 1);
            if packed.groups().is_some() {
                prop_assert_eq!(bits(&result), bits(&expected), "{}", backend.name());
            } else {
                // Every product is at most 20 in magnitude.
                let bound = 2e-6 * 20.0 * f32::from(u16::try_from(case.inputs).unwrap());
                for (a, b) in result.iter().zip(&expected) {
                    prop_assert!((a - b).abs() <= bound, "{}: {} for {}", backend.name(), a, b);
                }
            }
        }
    }

    /// The property that makes answers independent of batches, chunks and threads.
    #[test]
    fn a_packed_output_has_the_same_bits_whatever_is_computed_beside_it(case in cases(), block in 0_usize..8, row in 0_usize..20) {
        let packed = Packed::new("w", &case.weight()).unwrap();
        let x = Bytes(case.seed ^ 5).numbers(case.rows * case.inputs);
        let (first, row) = (block * 16 % case.outputs / 16 * 16, row % case.rows);
        let channels = first..case.outputs.min(first + 16);
        for backend in available() {
            let all = product(backend, &x, &packed, 0..case.outputs, case.outputs);
            let one = product(backend, &x[row * case.inputs..][..case.inputs], &packed, channels.clone(), channels.len());
            prop_assert_eq!(bits(&one), bits(&all[row * case.outputs..][channels.clone()]), "{}", backend.name());
        }
    }

    /// The packed arithmetic is the logical weights times the rounded activations.
    #[test]
    fn integer_products_are_the_dequantised_ones(case in cases().prop_filter("integers", |case| case.kind < 2)) {
        let weight = case.weight();
        let packed = Packed::new("w", &weight).unwrap();
        let x = Bytes(case.seed ^ 5).numbers(case.rows * case.inputs);
        let result = product(&Naive, &x, &packed, 0..case.outputs, case.outputs);
        let rounded = Rounded::new(&x, packed.groups().unwrap());
        let mut row = vec![0.0; case.inputs];
        for channel in 0..case.outputs {
            weight.dequantise_row(channel, &mut row);
            for m in 0..case.rows {
                let groups = rounded.groups;
                let terms = row.iter().enumerate().map(|(column, w)| {
                    let scale = rounded.scales[m * groups.count() + column / groups.group()];
                    let x = rounded.rows().row(m)[groups.index(column)];
                    f64::from(*w) * f64::from(scale) * f64::from(x)
                });
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, magnitude), term: f64| (sum + term, magnitude + term.abs()));
                let error = (f64::from(result[m * case.outputs + channel]) - sum).abs();
                prop_assert!(error <= 1e-5 * magnitude + 1e-6, "{channel}: off by {error} of {magnitude}");
            }
        }
    }
}

/// The largest sums that the layout allows: nothing may saturate on the way (`vpmaddubsw` would).
#[test]
fn products_of_extreme_values_do_not_saturate() {
    for backend in available() {
        for code in [-127, 127] {
            let (n, k) = (17, 4096);
            let weight = QuantisedWeight {
                out_features: n,
                in_features: k,
                codes: Codes::Int8(vec![code; n * k]),
                row_block: 1,
                group: k,
                scales: vec![1.0; n],
                zeros: None,
                input_order: None,
            };
            let packed = Packed::new("w", &weight).unwrap();
            let x = vec![-1.0; k];
            let result = product(backend, &x, &packed, 0..n, n);
            assert_eq!(
                result,
                product(&Naive, &x, &packed, 0..n, n),
                "{}",
                backend.name()
            );
            assert!((result[0] + f32::from(code) * 4096.0).abs() < 1.0);
        }
    }
}
