//! Checkpoints that no file holds: random weights of a shape, and another checkpoint's weights in another scheme. `bench` measures on them.
//!
//! Values do not change how long a product takes, so random ones repeat a pool that is small enough to be made at once.

use half::bf16;
use memmap2::Mmap;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{Checkpoint, Stored};
use crate::Result;
use crate::model::halves::Halves;
use crate::model::tensor::{Storage, Tensor};
use crate::model::weight::Weight;
use crate::quant::{Codes, QuantisedWeight, WeightFormat, round_to_nearest};

/// Values of the pool: a prime, so that rows do not repeat each other.
const POOL: usize = 1_000_003;
/// Weights are uniform within this, which is a standard deviation of 0.02.
const LARGEST: f32 = 0.035;

/// The values that 4-bit codes of tables stand for, in units of [`LARGEST`].
const TABLE_VALUES: [f32; 16] = [
    -1.0, -0.8, -0.65, -0.5, -0.38, -0.27, -0.17, -0.06, 0.06, 0.17, 0.27, 0.38, 0.5, 0.65, 0.8,
    1.0,
];

/// Random weights.
pub(in crate::model) struct Random {
    weights: Option<WeightFormat>,
    values: Vec<bf16>,
    bytes: Vec<u8>,
}

/// Another checkpoint, its block linears rounded to nearest.
pub(in crate::model) struct Requantised<'a> {
    pub(in crate::model) stored: &'a dyn Checkpoint,
    pub(in crate::model) weights: WeightFormat,
}

fn random_bytes() -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(1);
    (0..POOL).map(|_| random.random()).collect()
}

/// The pool of weights.
pub(crate) fn random_values() -> Vec<bf16> {
    let value = |byte: u8| bf16::from_f32((f32::from(byte) / 127.5 - 1.0) * LARGEST);
    random_bytes().into_iter().map(value).collect()
}

/// Whether a scheme speaks of this linear: embedding and head stay precise.
fn in_a_block(name: &str) -> bool {
    name.starts_with("model.layers.")
}

impl Random {
    /// Block linears in BF16, or as `weights` says.
    pub(in crate::model) fn new(weights: Option<WeightFormat>) -> Self {
        Self {
            weights,
            values: random_values(),
            bytes: random_bytes(),
        }
    }

    fn bytes(&self, count: usize) -> Vec<u8> {
        self.bytes.iter().copied().cycle().take(count).collect()
    }

    fn quantised(
        &self,
        [out_features, in_features]: [usize; 2],
        format: WeightFormat,
    ) -> QuantisedWeight {
        let (count, group) = (out_features * in_features, format.group(in_features));
        let nibbles = || self.bytes(out_features * QuantisedWeight::nibble_row(in_features));
        let (codes, scale) = match format {
            WeightFormat::Int8 => {
                let codes = self.bytes(count).into_iter().map(u8::cast_signed);
                (Codes::Int8(codes.collect()), LARGEST / 128.0)
            }
            WeightFormat::Int4 { .. } => (Codes::Int4(nibbles()), LARGEST / 8.0),
            WeightFormat::Fp8 => {
                // Exponents up to 1, so no NaN and nothing that outweighs the rest.
                let codes = self.bytes(count).into_iter().map(|byte| byte & 0xbf);
                (Codes::Fp8(codes.collect()), LARGEST / 2.0)
            }
            WeightFormat::Lut4 => {
                let table = TABLE_VALUES;
                let tables = vec![table; out_features];
                (
                    Codes::Lut4 {
                        codes: nibbles(),
                        tables,
                    },
                    LARGEST,
                )
            }
        };
        let blocks = out_features * in_features.div_ceil(group);
        let symmetric = !matches!(
            format,
            WeightFormat::Int4 {
                symmetric: false,
                ..
            }
        );
        QuantisedWeight {
            out_features,
            in_features,
            codes,
            row_block: 1,
            group,
            scales: vec![scale; blocks],
            zeros: (!symmetric).then(|| vec![7.0; blocks]),
            input_order: None,
        }
    }
}

impl Checkpoint for Random {
    fn has_linear(&self, name: &str) -> bool {
        name.ends_with("_proj") && !name.ends_with("qkv_proj") && !name.ends_with("gate_up_proj")
            || name == "lm_head"
    }

    /// Vectors are norms: ones.
    fn tensor(&self, _name: &str, shape: &[usize]) -> Result<Tensor> {
        let count = shape.iter().product();
        let storage = match shape.len() {
            1 => Storage::F32(vec![1.0; count]),
            _ => Storage::Bf16(Halves::fill(count, POOL, |_, dst| {
                dst.copy_from_slice(&self.values[..dst.len()]);
            })),
        };
        Ok(Tensor::new(storage, shape.to_vec()))
    }

    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        match self.weights.filter(|_| in_a_block(name)) {
            Some(format) => Ok(Stored::Quantised(self.quantised(shape, format))),
            None => self.tensor(name, &shape).map(Stored::Dense),
        }
    }

    fn rows(&self, _name: &str) -> Option<usize> {
        None
    }

    fn files(&self) -> Vec<(&str, &Mmap)> {
        Vec::new()
    }

    fn format(&self) -> String {
        "random weights".to_owned()
    }
}

impl Checkpoint for Requantised<'_> {
    fn has_linear(&self, name: &str) -> bool {
        self.stored.has_linear(name)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.stored.tensor(name, shape)
    }

    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        let stored = self.stored.linear(name, shape)?;
        if !in_a_block(name) {
            return Ok(stored);
        }
        let rows = Weight::new(name, stored)?.stored_rows(0..shape[0]);
        Ok(Stored::Quantised(round_to_nearest(
            &rows,
            shape[1],
            self.weights,
        )))
    }

    fn rows(&self, name: &str) -> Option<usize> {
        self.stored.rows(name)
    }

    fn files(&self) -> Vec<(&str, &Mmap)> {
        self.stored.files()
    }

    fn format(&self) -> String {
        self.stored.format()
    }
}
