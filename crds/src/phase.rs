//! The phase of a service: what `kubectl get` prints. Derived from the conditions by the operator; no program may decide by it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where a service is, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Something that the spec names is not there yet.
    Pending,
    /// A Job measures the model.
    Calibrating,
    /// The first revision's pods start.
    Deploying,
    /// A canary is on trial.
    Canary,
    /// The canary passed and becomes stable.
    Promoting,
    /// The rollout stands still until a person or a pause's end lets it go on.
    Paused,
    /// The canary failed and leaves.
    RollingBack,
    /// The spec is what serves.
    Ready,
    /// Stable serves (or nothing does), and the newest spec failed.
    Degraded,
    /// The spec cannot work.
    Invalid,
}
