//! The server as its clients see it: real sockets, the demo model, the real worker.
//!
//! Each file has one kind of promise; `client.rs` is the plain HTTP/1.1 client that they share, `fixture.rs` starts servers.

#![expect(
    clippy::unwrap_used,
    reason = "a test's helper that cannot go on ends the test"
)]
#![expect(clippy::print_stdout, reason = "what is skipped says so")]

mod answers;
mod artifact;
mod client;
mod faults;
mod fixture;
#[path = "../jobs/mod.rs"]
mod jobs;
mod lifecycle;
mod probe;
mod refusals;
