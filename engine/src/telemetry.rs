//! Logs: to stderr, as text on a terminal and as one JSON object a line elsewhere. `RUST_LOG` chooses, `info` by default.
//!
//! JSON escapes control characters, so that nothing a client sends can forge a line. Prompts and answers are never logged.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

/// Starts logging for the process. A second call changes nothing.
pub fn init() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr);
    // `try_init` fails only where a subscriber is there already, as in tests.
    let _ = if stderr().is_terminal() {
        builder.try_init()
    } else {
        builder.json().flatten_event(true).try_init()
    };
}
