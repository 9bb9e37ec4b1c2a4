//! The operator: `observe -> validate -> scrape -> judge -> plan -> build -> apply -> report`.
//!
//! The middle is pure: no client, no runtime, no clock. `apply` alone writes to the API; `clock` alone reads the time.
#![forbid(unsafe_code)]

pub mod action;
pub mod canary;
pub mod judge;
pub mod observed;
pub mod plan;
pub mod revision;
pub mod samples;
pub mod status;
pub mod validate;
