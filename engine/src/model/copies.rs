//! The forms of the weights that a plan keeps in memory, and the one that is made while a prompt is read.
//!
//! Quantised copies are attached here, checked against the model and the plan's schemes; which one computes is decided in [`super::forward`].

use std::collections::HashMap;

use mixquant_crds::{DecodePlan, DecodeScheme, PrecisionPlan, WeightCopies};
use rayon::prelude::*;

use super::linear::Arithmetic;
use super::weight::Weight;
use super::weights::{Layer, Linear, PackedCopy, Weights};
use crate::kernels::Packed;
use crate::quant::{
    Codes, QuantisedLinear, QuantisedLinears, QuantisedWeight, Scheme, round_to_nearest,
};
use crate::{Error, Result};

/// Rows that one thread rounds to INT8 at once: so much of a linear is FP32 at a time.
const QUANTISED_ROWS: usize = 64;

/// The quantised copies of the block linears, each whole or empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Copies {
    /// W8A8, for prefill.
    pub prefill: QuantisedLinears,
    /// In the plan's decode scheme.
    pub decode: QuantisedLinears,
}

impl From<QuantisedLinears> for Copies {
    /// A prefill copy alone.
    fn from(prefill: QuantisedLinears) -> Self {
        Self {
            prefill,
            decode: QuantisedLinears::none(),
        }
    }
}

impl Copies {
    /// None.
    pub fn none() -> Self {
        QuantisedLinears::none().into()
    }
}

/// Which copies a model has.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attached {
    pub(super) prefill: bool,
    /// The scheme that decode's copy was made for.
    pub(super) decode: Option<DecodeScheme>,
}

impl Attached {
    pub(super) fn of(copies: &Copies, decode: DecodeScheme) -> Self {
        Self {
            prefill: !copies.prefill.is_empty(),
            decode: (!copies.decode.is_empty()).then_some(decode),
        }
    }
}

/// What decode's copy is made of where no budget says otherwise.
pub const fn decode_scheme(scheme: DecodeScheme) -> Option<Scheme> {
    match scheme {
        DecodeScheme::W4A8 => Some(Scheme::w4a16(128)),
        DecodeScheme::LUT4 => Some(Scheme::LUT4),
        DecodeScheme::BF16 | DecodeScheme::FP32 | DecodeScheme::W8A8 => None,
    }
}

/// Refuses weights that are not what the scheme says.
fn check_form(name: &str, weight: &QuantisedWeight, decode: Option<&DecodePlan>) -> Result<()> {
    let (fits, needs) = match (decode, &weight.codes) {
        (None, _) => (
            weight.is_w8(),
            "symmetric INT8 with one scale an output channel, which W8A8 needs",
        ),
        (Some(plan), codes) => match (plan.scheme, codes) {
            (DecodeScheme::LUT4, codes) => (
                matches!(codes, Codes::Lut4 { .. }),
                "a table an output channel, which LUT4 needs",
            ),
            (_, Codes::Int8(_)) => (
                plan.bits_per_weight.is_some() && weight.is_w8(),
                "INT4, or with a budget symmetric INT8 with one scale an output channel, which W4A8 needs",
            ),
            (_, codes) => (matches!(codes, Codes::Int4(_)), "INT4, which W4A8 needs"),
        },
    };
    if fits {
        return Ok(());
    }
    Err(Error::artifact(format!(
        "{name}: is not {needs}: calibrate again"
    )))
}

impl Linear {
    /// Rounds to INT8, part by part, so that no whole matrix is ever widened.
    fn quantise(&self) -> QuantisedLinear {
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

    /// The copy that computes with this arithmetic, where it is attached.
    pub(super) fn copy(&self, arithmetic: Arithmetic) -> Option<&PackedCopy> {
        match arithmetic {
            Arithmetic::Prefill => self.prefill.as_ref(),
            Arithmetic::Decode => self.decode.as_ref(),
            Arithmetic::Fp32 | Arithmetic::Bf16 => None,
        }
    }

    /// The quantised form as the kernels read it, made now. The same bits as an attached copy that was rounded to nearest.
    pub(super) fn packed(&self) -> Packed {
        let linear = self.quantise();
        Packed::new(&linear.name, &linear.weight)
            .expect("weights rounded to nearest are whole, and no linear of a checked configuration is too wide")
    }
}

/// Which matrices a plan computes with in BF16.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) linears: bool,
    /// Embedding and head.
    pub(super) others: bool,
}

impl Wanted {
    pub(super) fn by(decode: DecodeScheme) -> Self {
        Self {
            linears: decode == DecodeScheme::BF16,
            others: decode != DecodeScheme::FP32,
        }
    }
}

/// Bytes of weights in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// Embedding, norms and head, and the precise block linears where the plan uses them.
    pub precise: usize,
    /// The prefill copy of the block linears.
    pub quantised: usize,
    /// The decode copy of the block linears.
    pub decode: usize,
    /// At most, while a prompt is read and its quantised linears are made on the way.
    pub scratch: usize,
}

impl WeightBytes {
    /// All of them, at most.
    pub const fn total(&self) -> usize {
        self.precise + self.quantised + self.decode + self.scratch
    }
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
    /// Rounds every block linear to nearest: symmetric INT8, one scale an output channel.
    pub(super) fn quantise(&self) -> QuantisedLinears {
        self.rounded(Linear::quantise)
    }

    /// Rounds every block linear to nearest as the scheme stores it.
    pub(super) fn quantise_as(&self, scheme: Scheme) -> QuantisedLinears {
        self.rounded(|linear| {
            let rows = linear.weight.stored_rows(0..linear.out_features);
            QuantisedLinear {
                name: linear.name.clone(),
                weight: round_to_nearest(&rows, linear.in_features, scheme.weights),
                input_scale: None,
            }
        })
    }

    fn rounded(&self, round: impl Fn(&Linear) -> QuantisedLinear) -> QuantisedLinears {
        let linears = self.linears().map(|linear| {
            let quantised = round(linear);
            // A plan that keeps the precise weights too reads them again; one that does not has them in memory no longer.
            linear.weight.release();
            quantised
        });
        QuantisedLinears::from_tensors(linears.collect())
            .expect("rounding finite weights gives whole tensors with positive scales")
    }

    /// Takes the copies: each of exactly the block linears of this model, or of none at all.
    pub(super) fn attach(&mut self, copies: Copies, plan: &DecodePlan) -> Result<()> {
        let prefill = self.pack(copies.prefill, None)?;
        let decode = self.pack(copies.decode, Some(plan))?;
        let (mut prefill, mut decode) = (prefill.into_iter(), decode.into_iter());
        for linear in self.layers.iter_mut().flat_map(Layer::linears_mut) {
            (linear.prefill, linear.decode) = (prefill.next(), decode.next());
        }
        Ok(())
    }

    /// One copy as the kernels read it, in the model's order; `decode` is the plan that it has to fit, or none for prefill's.
    fn pack(
        &self,
        quantised: QuantisedLinears,
        decode: Option<&DecodePlan>,
    ) -> Result<Vec<PackedCopy>> {
        let mut tensors: HashMap<String, QuantisedLinear> = HashMap::new();
        for tensor in quantised.into_tensors() {
            if let Some(twice) = tensors.insert(tensor.name.clone(), tensor) {
                return Err(Error::artifact(format!(
                    "{}: is in the artifact twice: calibrate again",
                    twice.name
                )));
            }
        }
        let attached = !tensors.is_empty();
        let mut packed = Vec::new();
        for linear in self.linears().filter(|_| attached) {
            let Some(tensor) = tensors.remove(&linear.name) else {
                return Err(Error::artifact(format!(
                    "{}: is missing from the artifact: calibrate this model",
                    linear.name
                )));
            };
            linear.check_shape(&tensor.weight)?;
            check_form(&linear.name, &tensor.weight, decode)?;
            packed.push(PackedCopy {
                weights: Packed::new(&tensor.name, &tensor.weight)?,
                input_scale: tensor.input_scale,
            });
        }
        if let Some(name) = tensors.keys().min() {
            return Err(Error::artifact(format!(
                "{name}: is in the artifact but not in the model: calibrate this model"
            )));
        }
        check_shared(&packed)?;
        Ok(packed)
    }

    /// What one token reads: the head and one form of the block linears.
    pub(super) fn read_bytes(&self, blocks: Arithmetic) -> usize {
        let linear = |linear: &Linear| match linear.copy(blocks) {
            Some(copy) => copy.weights.bytes(),
            None => linear.weight.read_bytes(),
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
        let linears = if plan.keeps_precise_linears() {
            self.linears().map(|linear| linear.weight.bytes()).sum()
        } else {
            0
        };
        let copies = |copy: fn(&Linear) -> Option<&PackedCopy>| -> usize {
            let copies = self.linears().filter_map(copy);
            copies.map(|copy| copy.weights.bytes()).sum()
        };
        let int8 = |linear: &Linear| linear.out_features * (linear.in_features + size_of::<f32>());
        // The rounded linear and its packed form, for one linear at a time.
        let scratch = match plan.weight_copies {
            WeightCopies::OnTheFly => 2 * self.linears().map(int8).max().unwrap_or(0),
            WeightCopies::Dual | WeightCopies::Single => 0,
        };
        WeightBytes {
            precise: others + linears,
            quantised: copies(|linear| linear.prefill.as_ref()),
            decode: copies(|linear| linear.decode.as_ref()),
            scratch,
        }
    }
}

/// Linears that read the same input get it divided once.
fn check_shared(packed: &[PackedCopy]) -> Result<()> {
    for layer in packed.chunks_exact(7) {
        let shares = |one: usize, two: usize| layer[one].input_scale == layer[two].input_scale;
        if !(shares(0, 1) && shares(0, 2) && shares(4, 5)) {
            return Err(Error::artifact(
                "q, k and v, or gate and up, of one layer divide their common input differently: calibrate again",
            ));
        }
    }
    Ok(())
}
