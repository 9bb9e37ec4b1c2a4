//! What the Jobs hand back: the verification report, the calibration report and the failure, as JSON of at most 4 KiB.
//!
//! A Job prints one [`JobMessage`] to its termination message; the operator reads it from the pod. Digests and distances only, no tensors, no text.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Kubernetes keeps this many bytes of a termination message.
pub const MAX_MESSAGE_BYTES: usize = 4096;

/// Upper bounds, in tokens, of the lengths that prompts are counted by; one count more holds the longer ones.
pub const PROMPT_LENGTHS: [u32; 13] = [
    32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072,
];

/// The count that a prompt of so many tokens belongs to.
pub fn prompt_length(tokens: usize) -> usize {
    let longer = |bound: &u32| usize::try_from(*bound).is_ok_and(|bound| tokens > bound);
    PROMPT_LENGTHS.partition_point(longer)
}

/// One part of the evaluation data and how far it is from the baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub struct Slice {
    /// The JSONL field `kind` or `task`; for plain text the quarter of the window, `position-1` to `position-4`.
    pub name: String,
    /// Perplexity of the plan over the baseline's, minus 1, in percent.
    pub perplexity_increase_percent: f64,
    /// Mean KL divergence from the baseline, nats a token.
    pub kl_mean: f64,
    /// Share of tokens whose most likely token is the baseline's, in percent.
    pub top1_agreement_percent: f64,
    /// Scored tokens.
    pub tokens: u64,
}

/// How far a plan's answers are from the unquantised baseline's, over teacher-forced windows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub struct VerifyReport {
    /// exp(mean negative log-likelihood) of FP32 arithmetic on the stored weights.
    pub baseline_perplexity: f64,
    /// The same of the plan.
    pub perplexity: f64,
    /// `perplexity / baseline_perplexity - 1`, in percent.
    pub perplexity_increase_percent: f64,
    /// Mean KL(baseline ‖ plan), nats a token.
    pub kl_mean: f64,
    /// Its 99th percentile.
    pub kl_p99: f64,
    /// Share of tokens where both agree on the most likely token, in percent.
    pub top1_agreement_percent: f64,
    /// The slice with the largest perplexity increase.
    pub worst_slice: Option<Slice>,
    /// Scored tokens.
    pub tokens: u64,
    /// Absent when the plan has no artifact.
    pub artifact_digest: Option<Digest>,
}

/// What a calibration Job measured and made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub struct CalibrationReport {
    /// Over every file of the model that the engine reads.
    pub model_digest: Digest,
    /// Over manifest, plan and tensors of the artifact; its folder's name.
    pub artifact_digest: Digest,
    /// Tokens that calibration read.
    pub calibration_tokens: u64,
    /// The texts that it read by their tokens, in the lengths of [`PROMPT_LENGTHS`]. Artifacts made before they were counted have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 14)))]
    pub prompt_lengths: Vec<u64>,
    /// The distance from the baseline.
    pub verify: VerifyReport,
}

/// Why a Job failed, as a word that conditions and metrics can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureReason {
    /// The model directory is missing, truncated, of an unknown architecture or otherwise unreadable.
    ModelInvalid,
    /// The model is not the one that `spec.model.digest` or the artifact names.
    DigestMismatch,
    /// The calibration or evaluation data is empty, too short or not what it claims to be.
    DataInvalid,
    /// The artifact is missing, damaged or for something else.
    ArtifactInvalid,
    /// The volume for artifacts is full or not writable.
    StorageFailed,
    /// The model's source says no: it does not exist, access is denied, or the URI names no model.
    SourceRefused,
    /// The model's source does not answer, or broke off; another try goes on.
    SourceUnavailable,
    /// The plan cannot work.
    PlanInvalid,
    /// Anything else.
    Internal,
}

/// A failed Job's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobFailure {
    /// The kind of failure.
    pub reason: FailureReason,
    /// One line that names the thing and the fix.
    pub message: String,
}

/// A Job's termination message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum JobMessage {
    /// `calibrate` made and verified an artifact.
    Calibrated(CalibrationReport),
    /// `verify` measured an artifact that exists.
    Verified(VerifyReport),
    /// Neither.
    Failed(JobFailure),
}

impl JobMessage {
    /// The message as JSON of at most [`MAX_MESSAGE_BYTES`]; a failure's text is shortened until it fits.
    pub fn to_termination_message(&self) -> String {
        let text = serde_json::to_string(self).expect("a report holds only strings and numbers");
        match self {
            Self::Failed(failure) if text.len() > MAX_MESSAGE_BYTES => {
                let message: String = failure.message.chars().take(500).collect();
                Self::Failed(JobFailure {
                    reason: failure.reason,
                    message,
                })
                .to_termination_message()
            }
            _ => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_belongs_to_the_first_length_that_holds_it() {
        for (tokens, index) in [
            (0, 0),
            (32, 0),
            (33, 1),
            (1024, 5),
            (131_072, 12),
            (131_073, 13),
        ] {
            assert_eq!(prompt_length(tokens), index, "{tokens}");
        }
    }
}
