//! The engine's one error: a reason that the operator understands and one line that names the thing and the fix.
//!
//! Everything that the world can cause ends here; programmer errors are asserts.

use std::fmt;

use mixquant_crds::FailureReason;
use mixquant_crds::names::{EXIT_INPUT, EXIT_RETRY};

/// What went wrong, for a person (`message`) and for the operator (`reason`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The kind of failure.
    pub reason: FailureReason,
    /// One line: what is wrong with which thing, and what to do about it.
    pub message: String,
}

/// The engine's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failure of the given kind.
    pub fn new(reason: FailureReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }

    /// The model directory cannot be used.
    pub fn model(message: impl Into<String>) -> Self {
        Self::new(FailureReason::ModelInvalid, message)
    }

    /// A digest does not match.
    pub fn digest(message: impl Into<String>) -> Self {
        Self::new(FailureReason::DigestMismatch, message)
    }

    /// The calibration or evaluation data cannot be used.
    pub fn data(message: impl Into<String>) -> Self {
        Self::new(FailureReason::DataInvalid, message)
    }

    /// The artifact cannot be used.
    pub fn artifact(message: impl Into<String>) -> Self {
        Self::new(FailureReason::ArtifactInvalid, message)
    }

    /// A volume cannot be written.
    pub fn storage(message: impl Into<String>) -> Self {
        Self::new(FailureReason::StorageFailed, message)
    }

    /// The plan cannot work.
    pub fn plan(message: impl Into<String>) -> Self {
        Self::new(FailureReason::PlanInvalid, message)
    }

    /// Anything else.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(FailureReason::Internal, message)
    }

    /// The process's exit code: may another try help, or is the input wrong?
    pub fn exit_code(&self) -> i32 {
        match self.reason {
            FailureReason::StorageFailed
            | FailureReason::SourceUnavailable
            | FailureReason::Internal => EXIT_RETRY,
            FailureReason::ModelInvalid
            | FailureReason::DigestMismatch
            | FailureReason::DataInvalid
            | FailureReason::ArtifactInvalid
            | FailureReason::SourceRefused
            | FailureReason::PlanInvalid => EXIT_INPUT,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
