//! The safety valve over real models: healthy and damaged copies of the demo model, read as the worker reads them.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests panic and print as tests do"
)]

mod copies;
mod fixture;
mod healthy;
#[path = "../jobs/mod.rs"]
mod jobs;
mod reading;
mod serving;
