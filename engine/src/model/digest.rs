//! The model's digest: over every file that the engine reads from the directory.

use std::path::Path;

use memmap2::Mmap;
use mixquant_crds::Digest;
use sha2::{Digest as _, Sha256};

use super::checkpoint::Checkpoint;
use super::checkpoint::mmap::release;
use super::config::Config;
use crate::tokenizer::MAX_FILE_BYTES;
use crate::{Error, Result, files};

/// Read when they exist; weights are added.
pub(crate) const FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// SHA-256 over the sorted lines `<hex sha256>  <file name>\n`. `path` is the model's directory, or its only file of weights.
pub(super) fn of_model(path: &Path, checkpoint: &dyn Checkpoint) -> Result<Digest> {
    let directory = if path.is_file() {
        path.parent().unwrap_or(Path::new("."))
    } else {
        path
    };
    let mut lines = Vec::new();
    for name in FILES {
        match files::read(&directory.join(name), MAX_FILE_BYTES) {
            Ok(bytes) => lines.push(line(&Sha256::digest(&bytes), name)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(Error::model(format!(
                    "{name}: cannot be read ({error}): check its permissions"
                )));
            }
        }
    }
    for (name, file) in checkpoint.files() {
        lines.push(line(&hash(file), name));
    }
    lines.sort_unstable();
    Ok(Digest::of_bytes(lines.concat().as_bytes()))
}

/// What stands for the digest of weights that no file holds: no file has it, for files are hashed by lines with their names.
pub(super) fn of_no_file(config: &Config) -> Digest {
    Digest::of_bytes(format!("{config:?}").as_bytes())
}

/// Reads a file once from front to back and keeps nothing of it in memory.
fn hash(file: &Mmap) -> Vec<u8> {
    /// Bytes that are in memory at a time.
    const PART: usize = 16 << 20;
    let mut hasher = Sha256::new();
    for start in (0..file.len()).step_by(PART) {
        let range = start..file.len().min(start + PART);
        hasher.update(&file[range.clone()]);
        release(file, range);
    }
    hasher.finalize().to_vec()
}

fn line(hash: &[u8], name: &str) -> String {
    format!("{}  {name}\n", Digest::from_hash(hash).hex())
}
