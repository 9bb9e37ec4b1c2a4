//! What quantisers are worth on the shipped model, on a bounded sample; `make quality` prints the whole table.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests panic and print as tests do"
)]

#[path = "../jobs/mod.rs"]
mod jobs;

mod drift;
mod linears;
mod outliers;
mod texts;
mod whole;
