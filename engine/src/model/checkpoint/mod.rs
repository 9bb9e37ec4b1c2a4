//! A model's stored tensors, by their Hugging Face names, whatever kind of files they lie in.
//!
//! Every name, shape and offset is checked before a byte is used.

mod gguf;
mod made;
pub(super) mod mmap;
mod rows;
mod shards;

use std::collections::BTreeSet;
use std::path::Path;

use memmap2::Mmap;

pub(super) use self::gguf::GgufFile;
pub(crate) use self::made::random_values;
pub(super) use self::made::{Random, Requantised};
pub(crate) use self::mmap::map;
pub(super) use self::rows::select_rows;
pub(super) use self::shards::Shards;
pub(crate) use self::shards::{INDEX as SHARD_INDEX, SINGLE as SINGLE_SHARD, shards_of_index};
use super::config::Config;
use super::tensor::Tensor;
use crate::formats::gguf::TokenizerFiles;
use crate::quant::weight::QuantisedWeight;
use crate::{Error, Result};

/// A linear's weights as they are stored.
pub(super) enum Stored {
    /// In floating point.
    Dense(Tensor),
    /// Quantised.
    Quantised(QuantisedWeight),
}

/// Where a model's tensors are found.
pub(super) trait Checkpoint {
    /// Whether there is a linear of this name, without `.weight`.
    fn has_linear(&self, name: &str) -> bool;

    /// The floating-point tensor of this name, which must have this shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor>;

    /// The weights of the linear `name` (without `.weight`), which must be `[out, in]`.
    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Stored>;

    /// The rows of a two-dimensional tensor, for a message about the vocabulary.
    fn rows(&self, name: &str) -> Option<usize>;

    /// The files' names and bytes.
    fn files(&self) -> Vec<(&str, &Mmap)>;

    /// How the weights are stored, for people.
    fn format(&self) -> String;
}

/// Opens a model: a Hugging Face directory, a GGUF file, or a directory that holds one.
///
/// # Errors
/// The first thing that cannot work, by name, with the fix.
pub(super) fn open(path: &Path) -> Result<(Config, Box<dyn Checkpoint>)> {
    if let Some(file) = GgufFile::find(path)? {
        let mut gguf = GgufFile::open(&file)?;
        return Ok((gguf.config()?, Box::new(gguf)));
    }
    let config = Config::read(path)?;
    let shards = Shards::open(path, config.format.clone())?;
    Ok((config, Box::new(shards)))
}

/// The tokenizer's files that a GGUF file holds; `None` when `path` is no such model.
///
/// # Errors
/// A vocabulary that cannot be rebuilt.
pub(super) fn tokenizer_files(path: &Path) -> Result<Option<TokenizerFiles>> {
    match GgufFile::find(path)? {
        Some(file) => GgufFile::open(&file)?.tokenizer_files().map(Some),
        None => Ok(None),
    }
}

/// Names joined for people, each once.
fn joined(names: impl Iterator<Item = String>) -> String {
    let names: BTreeSet<String> = names.collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

/// An error about a shape that the configuration does not ask for.
fn wrong_shape(file: &str, tensor: &str, has: &[usize], wanted: &[usize]) -> Error {
    Error::model(format!(
        "{file}: tensor {tensor} has the shape {has:?}, config.json asks for {wanted:?}: config.json and weights are of different models"
    ))
}

/// An error about a tensor that is not there.
fn missing(tensor: &str) -> Error {
    Error::model(format!(
        "tensor {tensor} is missing from the weights: download the model again"
    ))
}
