//! The forms of the weights that a plan keeps in memory, and the one that is made while a prompt is read.

use mixquant_crds::{PrecisionPlan, WeightCopies};
use rayon::prelude::*;

use super::weight::Weight;
use super::weights::{Layer, Linear, Weights};
use crate::kernels::Packed;
use crate::quant::{Codes, QuantisedLinear, QuantisedWeight};

/// Rows that one thread rounds to INT8 at once: so much of a linear is FP32 at a time.
const QUANTISED_ROWS: usize = 64;

impl Linear {
    /// Rounds to INT8, part by part, so that no whole matrix is ever widened.
    pub(super) fn quantise(&self) -> QuantisedLinear {
        let width = self.in_features;
        let mut codes = vec![0_i8; self.out_features * width];
        let mut scales = vec![0.0; self.out_features];
        codes
            .par_chunks_mut(QUANTISED_ROWS * width)
            .zip(scales.par_chunks_mut(QUANTISED_ROWS))
            .enumerate()
            .for_each(|(part, (codes, scales))| {
                let first = part * QUANTISED_ROWS;
                let rows = self.weight.stored_rows(first..first + scales.len());
                let part = QuantisedLinear::from_rows(String::new(), &rows, scales.len(), width);
                if let Codes::Int8(part) = &part.weight.codes {
                    codes.copy_from_slice(part);
                }
                scales.copy_from_slice(&part.weight.scales);
            });
        QuantisedLinear {
            name: self.name.clone(),
            weight: QuantisedWeight {
                out_features: self.out_features,
                in_features: width,
                codes: Codes::Int8(codes),
                row_block: 1,
                group: width,
                scales,
                zeros: None,
                input_order: None,
            },
            input_scale: None,
        }
    }

    /// The quantised form as the kernels read it, made now. The same bits as an attached copy that was rounded to nearest.
    pub(super) fn packed(&self) -> Packed {
        let linear = self.quantise();
        Packed::new(&linear.name, &linear.weight)
            .expect("weights rounded to nearest are whole, and no linear of a checked configuration is too wide")
    }
}

/// Which matrices are wanted in BF16.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounded {
    pub(super) linears: bool,
    /// Embedding and head.
    pub(super) others: bool,
}

/// Bytes of weights in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// Embedding, norms and head, and the precise block linears where the plan uses them.
    pub precise: usize,
    /// The quantised copy of the block linears.
    pub quantised: usize,
    /// At most, while a prompt is read and its quantised linears are made on the way.
    pub scratch: usize,
}

impl Layer {
    fn norms(&self) -> impl Iterator<Item = &Vec<f32>> {
        let heads = self
            .head_norms
            .iter()
            .flat_map(|norms| [&norms.query, &norms.key]);
        let post = self.attention_post_norm.iter().chain(&self.mlp_post_norm);
        [&self.input_norm, &self.mlp_norm]
            .into_iter()
            .chain(heads)
            .chain(post)
    }
}

impl Weights {
    /// What one token reads: the head and one copy of the block linears.
    pub(super) fn read_bytes(&self, quantised: bool) -> usize {
        let linear = |linear: &Linear| match &linear.quantised {
            Some(copy) if quantised => copy.bytes(),
            _ => linear.weight.read_bytes(),
        };
        self.head().read_bytes() + self.linears().map(linear).sum::<usize>()
    }

    /// What the plan keeps in memory.
    pub(super) fn bytes(&self, plan: &PrecisionPlan) -> WeightBytes {
        let norms: usize = self
            .layers
            .iter()
            .flat_map(Layer::norms)
            .map(Vec::len)
            .sum();
        let tables = self.embedding.bytes() + self.head.as_ref().map_or(0, Weight::bytes);
        let others = 4 * (norms + self.norm.len()) + tables;
        let linears = if plan.weight_copies == WeightCopies::Single {
            0
        } else {
            self.linears().map(|linear| linear.weight.bytes()).sum()
        };
        let copies = self
            .linears()
            .filter_map(|linear| linear.quantised.as_ref());
        let int8 = |linear: &Linear| linear.out_features * (linear.in_features + size_of::<f32>());
        // The rounded linear and its packed form, for one linear at a time.
        let scratch = match plan.weight_copies {
            WeightCopies::OnTheFly => 2 * self.linears().map(int8).max().unwrap_or(0),
            WeightCopies::Dual | WeightCopies::Single => 0,
        };
        WeightBytes {
            precise: others + linears,
            quantised: copies.map(Packed::bytes).sum(),
            scratch,
        }
    }
}
