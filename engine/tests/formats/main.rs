//! Checkpoints as other programs write them: every layout's weights, every family's logits and token ids, and what is refused.
//!
//! The goldens beside (`../goldens`) are remade by `make golden`; they say which versions made them.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

mod families;
mod gguf;
mod layouts;
mod models;
mod refusals;

use std::path::{Path, PathBuf};

/// A golden's path.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/goldens")
        .join(name)
}
