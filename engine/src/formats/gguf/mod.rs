//! GGUF files (llama.cpp): one file with metadata, vocabulary and tensors.
//!
//! `header` finds everything in the file, `blocks` turns block-quantised rows into [`QuantisedWeight`]s, `metadata` says what `config.json` would
//! say, `names` gives tensors their Hugging Face names, and `vocabulary` makes the tokenizer's files.

mod blocks;
mod header;
mod metadata;
mod names;
mod vocabulary;

pub use self::blocks::Kind;
pub use self::header::{Header, Info};
pub use self::metadata::config_json;
pub use self::names::{Stored, locate};
pub use self::vocabulary::{TokenizerFiles, tokenizer_files};

#[cfg(doc)]
use crate::quant::weight::QuantisedWeight;
