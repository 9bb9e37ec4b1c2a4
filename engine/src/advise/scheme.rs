//! The schemes that are compared: what each keeps in memory, reads for a token and computes prompts with.

use mixquant_crds::WeightCopies;
use serde::Serialize;

use super::{Device, ModelFacts, float};

/// The arithmetic of the block linears while a prompt is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Prefill {
    /// BF16 operands.
    Bf16,
    /// INT8 operands.
    Int8,
    /// FP8 operands.
    Fp8,
    /// 4-bit weights, widened before each product: BF16 operands and the widening.
    W4A16,
}

/// One way to keep and use the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Scheme {
    /// For the table.
    pub name: &'static str,
    /// How prompts are read.
    pub prefill: Prefill,
    /// Bits of a block linear's weight that stay in memory, all copies and scales together.
    pub kept_bits: f64,
    /// Bits of a block linear's weight that one token reads.
    pub read_bits: f64,
    /// Whether a layer's quantised form is made while a prompt is read.
    pub scratch: bool,
    /// The memory mode of `spec.precision`, where the engine serves this scheme by a plan.
    pub served: Option<Served>,
}

/// How `spec.precision` says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Served {
    /// No switch.
    Precise,
    /// A W8A8 prefill with these copies.
    Quantised(WeightCopies),
    /// One 4-bit copy for prompts and tokens.
    FourBits,
}

/// A scale of 16 bits a group of 128.
const GROUP_SCALE_BITS: f64 = 0.125;

/// All of them, the most precise first.
pub static SCHEMES: [Scheme; 6] = [
    Scheme {
        name: "BF16",
        prefill: Prefill::Bf16,
        kept_bits: 16.0,
        read_bits: 16.0,
        scratch: false,
        served: Some(Served::Precise),
    },
    Scheme {
        name: "W8A8 prefill, BF16 decode, Dual",
        prefill: Prefill::Int8,
        kept_bits: 24.0,
        read_bits: 16.0,
        scratch: false,
        served: Some(Served::Quantised(WeightCopies::Dual)),
    },
    Scheme {
        name: "W8A8 prefill, BF16 decode, OnTheFly",
        prefill: Prefill::Int8,
        kept_bits: 16.0,
        read_bits: 16.0,
        scratch: true,
        served: Some(Served::Quantised(WeightCopies::OnTheFly)),
    },
    Scheme {
        name: "FP8 prefill, BF16 decode",
        prefill: Prefill::Fp8,
        kept_bits: 24.0,
        read_bits: 16.0,
        scratch: false,
        served: None,
    },
    Scheme {
        name: "W8A8, Single",
        prefill: Prefill::Int8,
        kept_bits: 8.0,
        read_bits: 8.0,
        scratch: false,
        served: Some(Served::Quantised(WeightCopies::Single)),
    },
    Scheme {
        name: "W4A16 g128",
        prefill: Prefill::W4A16,
        kept_bits: 4.0 + GROUP_SCALE_BITS,
        read_bits: 4.0 + GROUP_SCALE_BITS,
        scratch: false,
        served: Some(Served::FourBits),
    },
];

impl Scheme {
    /// Whether the device has the arithmetic.
    pub fn can_run(&self, device: &Device) -> bool {
        match self.prefill {
            Prefill::Bf16 | Prefill::W4A16 => true,
            Prefill::Int8 => device.int8_ops_per_second.is_some(),
            Prefill::Fp8 => device.fp8_ops_per_second.is_some(),
        }
    }

    /// Bytes of all weights in memory.
    pub fn weight_bytes(&self, model: &ModelFacts) -> f64 {
        let layer = float(model.linear_weights) / float(model.layers.max(1));
        let scratch = if self.scratch { layer } else { 0.0 };
        float(model.linear_weights) * self.kept_bits / 8.0
            + scratch
            + 2.0 * float(model.other_weights)
    }

    /// Bytes of weights that one token reads: the embedding's other rows are not among them.
    pub fn read_bytes(&self, model: &ModelFacts) -> f64 {
        float(model.linear_weights) * self.read_bits / 8.0 + 2.0 * float(model.head_weights)
    }

    /// Whether prompts are read with fewer bits than tokens are generated with.
    pub fn has_switch(&self) -> bool {
        self.served.is_none_or(|served| {
            matches!(
                served,
                Served::Quantised(WeightCopies::Dual | WeightCopies::OnTheFly)
            )
        }) && matches!(self.prefill, Prefill::Int8 | Prefill::Fp8)
    }
}

/// One way to keep keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Kv {
    /// Nothing quantised.
    Bf16,
    /// All at 8 bits.
    Int8,
    /// One key in ten at 8 bits, the rest at 4.
    Mixed,
}

impl Kv {
    /// The most precise first.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Int8, Self::Mixed];

    /// Bits a channel with scales: a quarter of a bit for each quantised channel.
    pub fn bits(self) -> f64 {
        match self {
            Self::Bf16 => 16.0,
            Self::Int8 => 8.25,
            Self::Mixed => 0.9 * 4.0 + 0.1 * 8.0 + 0.25,
        }
    }

    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::Int8 => "INT8",
            Self::Mixed => "INT4/INT8",
        }
    }
}
