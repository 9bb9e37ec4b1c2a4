//! What a folder is: a model (architecture, parameters, bytes, digest) or an artifact (plan, files, the report's numbers).
//!
//! It opens the folder exactly as serving would, so a folder that it describes can be served.

use std::path::Path;

use mixquant_crds::names::{ARTIFACT_MANIFEST, ARTIFACT_REPORT};
use mixquant_crds::{CalibrationReport, Digest, PrecisionPlan};
use serde::Serialize;

use crate::artifact::manifest::FileEntry;
use crate::artifact::{Artifact, Check, MAX_JSON_BYTES};
use crate::error::{Error, Result};
use crate::files;
use crate::model::{Config, Model};

/// A folder, described.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Description {
    /// A Hugging Face directory or a GGUF file.
    Model(ModelFacts),
    /// What calibration made.
    Artifact(Box<ArtifactFacts>),
}

/// A model's facts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFacts {
    /// As config.json names it.
    pub architecture: String,
    /// How its weights are stored, such as `safetensors BF16` or `gptq 4-bit, groups of 128`.
    pub format: String,
    /// Numbers in its tensors.
    pub parameters: u64,
    /// Bytes of the files of its weights.
    pub bytes: u64,
    /// Tokens of its context.
    pub context_tokens: usize,
    /// Entries of its vocabulary.
    pub vocab_size: usize,
    /// Blocks.
    pub layers: usize,
    /// Key and value heads of a block.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Over every file that the engine reads.
    pub digest: Digest,
}

/// An artifact's facts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ArtifactFacts {
    /// Its digest.
    pub digest: Digest,
    /// The model that it is for.
    pub model_digest: Digest,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its plan.
    pub plan: PrecisionPlan,
    /// Its files.
    pub files: Vec<FileEntry>,
    /// What verification measured; absent while that has not finished.
    pub report: Option<CalibrationReport>,
}

impl Description {
    /// One JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("facts are strings and numbers")
    }

    /// For people: one fact a line, nested names joined with dots.
    pub fn table(&self) -> String {
        let value = serde_json::to_value(self).expect("facts are strings and numbers");
        let mut lines = Vec::new();
        flatten("", &value, &mut lines);
        let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        lines
            .iter()
            .map(|(name, fact)| format!("{name:<width$}  {fact}"))
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// Describes the folder.
///
/// # Errors
/// A folder that is neither a model nor an artifact, or a damaged one.
pub fn describe(directory: &Path) -> Result<Description> {
    if directory.join(ARTIFACT_MANIFEST).exists() {
        return artifact(directory).map(|facts| Description::Artifact(Box::new(facts)));
    }
    if crate::model::is_model(directory) {
        return model(directory).map(Description::Model);
    }
    Err(Error::model(format!(
        "{} has neither config.json or a GGUF file (a model) nor {ARTIFACT_MANIFEST} (an artifact)",
        directory.display()
    )))
}

fn model(directory: &Path) -> Result<ModelFacts> {
    let model = Model::open(directory)?;
    let config = model.config();
    Ok(ModelFacts {
        architecture: config.architecture.clone(),
        format: model.stored().format.clone(),
        parameters: parameters(config),
        bytes: model.stored().bytes,
        context_tokens: config.max_position_embeddings,
        vocab_size: config.vocab_size,
        layers: config.num_hidden_layers,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        digest: model.digest().clone(),
    })
}

fn artifact(directory: &Path) -> Result<ArtifactFacts> {
    let artifact = Artifact::open(directory, Check::Digests)?;
    let path = directory.join(ARTIFACT_REPORT);
    let report = match files::read(&path, MAX_JSON_BYTES) {
        Ok(text) => Some(serde_json::from_slice(&text).map_err(|error| {
            Error::artifact(format!(
                "{} is damaged: {error}; calibrate again",
                path.display()
            ))
        })?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => {
            return Err(Error::artifact(format!(
                "cannot read {}: {error}",
                path.display()
            )));
        }
    };
    let manifest = artifact.manifest();
    Ok(ArtifactFacts {
        digest: artifact.digest().clone(),
        model_digest: manifest.model_digest.clone(),
        bytes: manifest.bytes(),
        plan: artifact.plan().clone(),
        files: manifest.files.clone(),
        report,
    })
}

/// The numbers in a model of this shape; opening it has checked that its tensors have it.
fn parameters(config: &Config) -> u64 {
    let (hidden, query, kv, ffn) = (
        config.hidden_size,
        config.query_width(),
        config.kv_width(),
        config.intermediate_size,
    );
    let attention = hidden * (query + 2 * kv)
        + query * hidden
        + if config.qkv_bias { query + 2 * kv } else { 0 }
        + if config.output_bias { hidden } else { 0 }
        + if config.qk_norm {
            2 * config.head_dim
        } else {
            0
        };
    let norms = if config.post_norms { 4 } else { 2 } * hidden;
    let mlp = 3 * hidden * ffn + if config.mlp_bias { 2 * ffn + hidden } else { 0 };
    let embeddings = config.vocab_size * hidden * if config.tie_word_embeddings { 1 } else { 2 };
    (embeddings + config.num_hidden_layers * (attention + mlp + norms) + hidden) as u64
}

fn flatten(name: &str, value: &serde_json::Value, lines: &mut Vec<(String, String)>) {
    let below = |part: &str| {
        if name.is_empty() {
            part.to_owned()
        } else {
            format!("{name}.{part}")
        }
    };
    match value {
        serde_json::Value::Object(fields) => fields
            .iter()
            .for_each(|(part, value)| flatten(&below(part), value, lines)),
        serde_json::Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, value)| flatten(&below(&index.to_string()), value, lines)),
        serde_json::Value::String(text) => lines.push((name.to_owned(), text.clone())),
        other => lines.push((name.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_neither_is_refused_with_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let message = describe(folder.path()).unwrap_err().message;
        assert!(
            message.contains("config.json") && message.contains("manifest.json"),
            "{message}"
        );
    }

    #[test]
    fn nested_facts_become_one_line_each() {
        let mut lines = Vec::new();
        flatten(
            "",
            &serde_json::json!({"a": {"b": 1, "c": ["x"]}, "d": "y"}),
            &mut lines,
        );
        let text: Vec<String> = lines
            .iter()
            .map(|(name, fact)| format!("{name}={fact}"))
            .collect();
        assert_eq!(text, ["a.b=1", "a.c.0=x", "d=y"]);
    }
}
