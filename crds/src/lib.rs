//! The contract between the operator and the engine: the custom resource, the plan, the reports and every shared name.
//!
//! Both sides depend on this crate and never on each other, so a change of the contract is a compile error instead of a surprise in a cluster.
//! It holds plain data, schemas and constants. It never reads a file, opens a socket or asks the time.
//!
//! The custom resource needs the `kube` feature; the engine builds without it.
#![forbid(unsafe_code)]

pub mod digest;
pub mod names;
pub mod precision;
pub mod probe;
pub mod report;
pub mod request;

#[cfg(feature = "kube")]
pub mod condition;
#[cfg(feature = "kube")]
pub mod drift;
#[cfg(feature = "kube")]
pub mod phase;
#[cfg(feature = "kube")]
pub mod rollout;
#[cfg(feature = "kube")]
pub mod scalars;
#[cfg(feature = "kube")]
pub mod scaling;
#[cfg(feature = "kube")]
pub mod service;
#[cfg(feature = "kube")]
pub mod source;
#[cfg(feature = "kube")]
pub mod status;
#[cfg(feature = "kube")]
pub mod traffic;

pub use digest::{Digest, DigestError};
pub use precision::{
    DecodePlan, DecodeScheme, KvCacheMode, KvCachePlan, KvPrecision, PrecisionPlan, PrefillPlan,
    PrefillScheme, WeightCopies,
};
pub use report::{CalibrationReport, FailureReason, JobFailure, JobMessage, Slice, VerifyReport};
pub use request::{Command, Request, RequestError};
#[cfg(feature = "kube")]
pub use scalars::{Decimal, PromptThreshold, Span};
#[cfg(feature = "kube")]
pub use service::{MixQuantService, MixQuantServiceSpec};
#[cfg(feature = "kube")]
pub use status::MixQuantServiceStatus;
