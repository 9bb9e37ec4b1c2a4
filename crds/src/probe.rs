//! What the operator and an engine say to each other about probes: a POST to [`PROBE_PATH`](crate::names::PROBE_PATH) of the admin port, and its
//! answer, as JSON.
//!
//! A probe is a text of an artifact that an engine answers as it would a user's prompt, except that the answer's tokens are given and their
//! likelihoods are what is wanted. The texts themselves never travel: an artifact names them. Plain data: nothing is decided here.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Texts that an artifact keeps at most.
pub const MAX_TEXTS: u32 = 32;
/// Tokens of an answer that is given.
pub const ANSWER_TOKENS: u32 = 32;
/// Texts that one request asks for at most.
pub const MAX_REQUESTS: u32 = 64;
/// Seconds that one request may take at most.
pub const MAX_SECONDS: u32 = 120;

/// Which texts to answer, one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProbeRequest {
    /// The artifact that keeps the texts; not always the one that the engine serves.
    pub artifact: Digest,
    /// The first of them; counted on from the beginning where there are fewer.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// After so many seconds what is not answered is left out.
    pub seconds: u32,
}

/// What an engine answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProbeAnswer {
    /// Texts that the artifact keeps.
    pub texts: u32,
    /// Those that were answered.
    pub answers: Vec<ProbedText>,
    /// Why they are fewer than were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
}

/// A text that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProbedText {
    /// Which, from 0.
    pub text: u32,
    /// Tokens of its answer.
    pub tokens: u32,
    /// The negative log-likelihood of all of them together, nats.
    pub nll: f64,
}
