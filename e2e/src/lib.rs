//! What the repository's tests on a real apiserver and a real cluster share: the means, the cluster, a namespace for each scenario, the load.
//!
//! Nothing here decides whether the product is right; that is the tests' part. A test whose means are missing says so and is skipped,
//! unless `MIXQUANT_REQUIRE_CLUSTER` is set, as `make test` does: then it fails.
#![forbid(unsafe_code)]

pub mod apiserver;
pub mod audit;
pub mod cluster;
pub mod kubectl;
pub mod load;
pub mod means;
pub mod monitoring;
pub mod namespace;
pub mod operator;
pub mod plugin;
pub mod program;
pub mod prompts;
pub mod service;
pub mod sieve;
