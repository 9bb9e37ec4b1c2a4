//! The operator: `observe -> validate -> scrape -> judge -> plan -> build -> apply -> report`.
//!
//! The middle is pure: no client, no runtime, no clock. `apply` alone writes to the API; `clock` alone reads the time.
#![forbid(unsafe_code)]

pub mod action;
pub mod apply;
pub mod bounds;
pub mod build;
pub mod canary;
pub mod capacity;
pub mod cli;
pub mod clock;
pub mod compare;
pub mod context;
pub mod controller;
pub mod counted;
pub mod error;
pub mod histogram;
pub mod judge;
pub mod known;
pub mod lease;
pub mod load;
pub mod metrics;
pub mod observe;
pub mod observed;
pub mod places;
pub mod plan;
pub mod pod_http;
pub mod probe;
pub mod probed;
pub mod prometheus_text;
pub mod read;
pub mod refused;
pub mod replay;
pub mod revision;
pub mod samples;
pub mod scaling;
pub mod scrape;
pub mod server;
pub mod status;
pub mod stored;
pub mod telemetry;
pub mod validate;
pub mod watches;
