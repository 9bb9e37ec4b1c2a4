//! The MixQuant engine: serves a language model with quantised prefill, precise decode and a mixed-precision KV cache.
//!
//! One worker thread owns model, cache and scheduler; the HTTP side only sends it commands. Kernels stand behind
//! [`kernels::Backend`], and `naive` is the oracle for every other implementation.

pub mod advise;
pub mod artifact;
pub mod bench;
pub mod calibrate;
pub mod chat;
pub mod cli;
pub mod dataset;
pub mod detokenize;
pub mod drift;
pub mod error;
pub mod export;
pub mod fetch;
mod files;
pub mod formats;
pub mod health;
pub mod inspect;
pub mod job;
pub mod kernels;
pub mod kv;
pub mod metrics;
pub mod model;
pub mod progress;
pub mod quality;
pub mod quant;
pub mod sample;
pub mod scheduler;
pub mod server;
pub mod telemetry;
pub mod tokenizer;
pub mod valve;
pub mod verify;
pub mod worker;

pub use error::{Error, Result};
