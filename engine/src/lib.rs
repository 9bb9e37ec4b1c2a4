//! The MixQuant engine: serves a language model with quantised prefill, precise decode and a mixed-precision KV cache.
//!
//! One worker thread owns model, cache and scheduler; the HTTP side only sends it commands. Kernels stand behind
//! `kernels::Backend`, and `naive` is the oracle for every other implementation.

pub mod chat;
pub mod cli;
pub mod error;
pub mod kv;
pub mod model;
pub mod quant;
pub mod telemetry;
pub mod tokenizer;

pub use error::{Error, Result};
