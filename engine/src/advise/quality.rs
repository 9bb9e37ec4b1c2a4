//! What to expect of the answers by task, with the source of each expectation. Verification measures what is really lost.

use clap::ValueEnum;
use serde::Serialize;

use super::scheme::{Kv, Prefill, Scheme};

/// What the answers are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Task {
    /// Chat, summaries, classification.
    General,
    /// Answers from long prompts.
    Retrieval,
    /// Long chains of reasoning.
    Maths,
    /// Programs.
    Code,
    /// Tools that are called in many turns.
    Agents,
}

impl Task {
    /// Whether one wrong token spoils the rest.
    pub(super) fn is_exact(self) -> bool {
        matches!(self, Self::Maths | Self::Code | Self::Agents)
    }

    /// The word on the command line.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::General => "general",
            Self::Retrieval => "retrieval",
            Self::Maths => "maths",
            Self::Code => "code",
            Self::Agents => "agents",
        }
    }
}

/// How near the unquantised model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Class {
    /// It is the reference.
    Reference,
    /// Within a few percent at most.
    Near,
    /// Near on average, with known losses on some inputs: watch the gates.
    Watch,
    /// Known to lose much.
    Unsafe,
}

/// A class and who measured it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Expectation {
    /// The class.
    pub class: Class,
    /// Where it was measured.
    pub source: &'static str,
}

impl Class {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Near => "near",
            Self::Watch => "watch",
            Self::Unsafe => "unsafe",
        }
    }
}

/// Expected of a weight scheme.
pub(super) fn of_weights(scheme: &Scheme, task: Task) -> Expectation {
    let (class, source) = match (scheme.prefill, scheme.has_switch(), task) {
        (Prefill::Bf16, _, _) => (Class::Reference, "the model itself"),
        (Prefill::Int8 | Prefill::Fp8, true, Task::Retrieval | Task::Agents) => (
            Class::Watch,
            "arXiv 2605.20315: what a quantised prefill loses sits on long inputs",
        ),
        (Prefill::Int8 | Prefill::Fp8, true, _) => (
            Class::Near,
            "arXiv 2411.02355: INT8 1-3 %, FP8 nothing; decode is precise",
        ),
        (Prefill::Int8 | Prefill::Fp8, false, Task::Maths) => (
            Class::Near,
            "arXiv 2504.04823: W8A8 loses nothing on reasoning",
        ),
        (Prefill::Int8 | Prefill::Fp8, false, Task::Retrieval | Task::Agents) => {
            (Class::Watch, "arXiv 2605.20315, the all-quantised columns")
        }
        (Prefill::Int8 | Prefill::Fp8, false, _) => {
            (Class::Near, "arXiv 2411.02355: W8A8 INT8 loses 1-3 %")
        }
        (Prefill::W4A16, _, task) if task.is_exact() => (
            Class::Unsafe,
            "arXiv 2504.04823: 4 bits are the edge of what reasoning survives",
        ),
        (Prefill::W4A16, _, _) => (Class::Watch, "arXiv 2411.02355: W4A16 is near W8A8"),
    };
    Expectation { class, source }
}

/// Expected of a way to keep keys and values.
pub(super) fn of_kv(kv: Kv, task: Task) -> Expectation {
    let (class, source) = match (kv, task) {
        (Kv::Bf16, _) => (Class::Reference, "the model itself"),
        (Kv::Int8, _) => (
            Class::Near,
            "LMDeploy: GSM8K 70.13 -> 69.75 with INT8 keys and values",
        ),
        (Kv::Mixed, Task::Maths) => (
            Class::Unsafe,
            "SGLang: AIME25 75.3 -> 35.3 with 4-bit keys and values",
        ),
        (Kv::Mixed, Task::Code | Task::Agents) => (
            Class::Unsafe,
            "lmdeploy#4743: tool calls 0 of 6 with INT4, 5 of 6 with INT8",
        ),
        (Kv::Mixed, _) => (
            Class::Watch,
            "VQuant (OpenReview hAwi5LTsPN): near lossless with the important keys kept high",
        ),
    };
    Expectation { class, source }
}
