//! A GGUF file as a checkpoint: names and rows as Hugging Face has them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::Dtype;

use super::{Checkpoint, Stored, joined, missing, mmap, select_rows, wrong_shape};
use crate::formats::gguf::{self, Header, Info, Kind};
use crate::model::config::{Config, RopeScaling};
use crate::model::tensor::{Storage, Tensor};
use crate::{Error, Result};

/// Factors of the rotary frequencies.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// An open GGUF file.
pub(in crate::model) struct GgufFile {
    name: String,
    file: Arc<Mmap>,
    header: Header,
    head_dim: usize,
}

impl GgufFile {
    /// The GGUF file that a path means: itself, or the only one of a directory without `config.json`.
    pub(in crate::model) fn find(path: &Path) -> Result<Option<PathBuf>> {
        let is_gguf = |path: &Path| {
            path.extension()
                .is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
        };
        if path.is_file() {
            return Ok(is_gguf(path).then(|| path.to_owned()));
        }
        if path.join("config.json").exists() {
            return Ok(None);
        }
        let Ok(entries) = std::fs::read_dir(path) else {
            return Ok(None);
        };
        let mut files: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| is_gguf(path))
            .collect();
        files.sort();
        match &files[..] {
            [] => Ok(None),
            [file] => Ok(Some(file.clone())),
            [_, _, ..] => Err(Error::model(format!(
                "{}: has {} GGUF files: point at the file itself; a model in several files is joined by llama.cpp's gguf-split --merge",
                path.display(),
                files.len()
            ))),
        }
    }

    /// Maps the file and reads its head.
    pub(in crate::model) fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().map_or_else(
            || path.display().to_string(),
            |name| name.to_string_lossy().into_owned(),
        );
        let file = mmap::map(path)?;
        let header =
            Header::parse(&file).map_err(|what| Error::model(format!("{name}: {what}")))?;
        Ok(Self {
            name,
            file: Arc::new(file),
            header,
            head_dim: 1,
        })
    }

    /// The configuration that the metadata hold.
    pub(in crate::model) fn config(&mut self) -> Result<Config> {
        let own = |error: Error| Error::model(error.message.replacen("config.json", &self.name, 1));
        let fields = gguf::config_json(&self.header)
            .map_err(|what| Error::model(format!("{}: {what}", self.name)))?;
        let mut config = Config::of_fields(fields).map_err(own)?;
        // llama.cpp's converter has added the offset already.
        config.norm_offset = 0.0;
        if let Some(info) = self.header.tensor(ROPE_FACTORS) {
            let shape = [config.head_dim / 2];
            let factors = self.dense(ROPE_FACTORS, info, &shape)?.to_f32();
            if !factors
                .iter()
                .all(|factor| factor.is_normal() && *factor > 0.0)
            {
                return Err(Error::model(format!(
                    "{}: tensor {ROPE_FACTORS} has factors that are not above 0: the file is damaged",
                    self.name
                )));
            }
            config.rope.scaling = RopeScaling::Factors(factors);
        }
        self.head_dim = config.head_dim;
        Ok(config)
    }

    /// The tokenizer's files as they were before conversion.
    pub(super) fn tokenizer_files(&self) -> Result<gguf::TokenizerFiles> {
        gguf::tokenizer_files(&self.header, &self.file)
            .map_err(|what| Error::model(format!("{}: {what}", self.name)))
    }

    fn locate(&self, name: &str) -> Option<(gguf::Stored, &Info)> {
        let architecture = self.header.architecture()?;
        let stored = gguf::locate(name, architecture)?;
        let info = self.header.tensor(&stored.name)?;
        Some((stored, info))
    }

    fn dense(&self, name: &str, info: &Info, shape: &[usize]) -> Result<Tensor> {
        if info.shape != shape {
            return Err(wrong_shape(&self.name, name, &info.shape, shape));
        }
        let dtype = match info.kind {
            Kind::F32 => Some(Dtype::F32),
            Kind::F16 => Some(Dtype::F16),
            Kind::BF16 => Some(Dtype::BF16),
            _ => None,
        };
        let storage = dtype
            .and_then(|dtype| Storage::mapped(Arc::clone(&self.file), info.range.clone(), dtype));
        let Some(storage) = storage else {
            return Err(Error::model(format!(
                "{}: tensor {name} has the type {:?}: it must be F32, F16 or BF16; convert the model again",
                self.name, info.kind
            )));
        };
        Ok(Tensor::new(storage, shape.to_vec()))
    }

    /// Where each row of the Hugging Face checkpoint lies here.
    fn interleaved(&self, rows: usize) -> Vec<usize> {
        let half = self.head_dim / 2;
        (0..rows)
            .map(|row| {
                let (head, place) = (row / self.head_dim, row % self.head_dim);
                head * self.head_dim + place % half * 2 + place / half
            })
            .collect()
    }
}

impl Checkpoint for GgufFile {
    fn has_linear(&self, name: &str) -> bool {
        self.locate(&format!("{name}.weight")).is_some()
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let (stored, info) = self.locate(name).ok_or_else(|| missing(name))?;
        let tensor = self.dense(&stored.name, info, shape)?;
        Ok(if stored.interleaved {
            tensor.select(&self.interleaved(shape[0]))
        } else {
            tensor
        })
    }

    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        let weight = format!("{name}.weight");
        let (stored, info) = self.locate(&weight).ok_or_else(|| missing(&weight))?;
        if info.shape != shape {
            return Err(wrong_shape(&self.name, &stored.name, &info.shape, &shape));
        }
        let Some(quantised) = info.kind.read(&self.file[info.range.clone()], shape) else {
            return self.tensor(&weight, &shape).map(Stored::Dense);
        };
        mmap::release(&self.file, info.range.clone());
        quantised.check(&format!("{}: tensor {}", self.name, stored.name))?;
        Ok(Stored::Quantised(if stored.interleaved {
            select_rows(&quantised, &self.interleaved(shape[0]))
        } else {
            quantised
        }))
    }

    fn rows(&self, name: &str) -> Option<usize> {
        let (_, info) = self.locate(name)?;
        info.shape.first().copied()
    }

    fn files(&self) -> Vec<(&str, &Mmap)> {
        vec![(&self.name, &self.file)]
    }

    fn format(&self) -> String {
        let kinds = self
            .header
            .tensors()
            .map(|(_, info)| format!("{:?}", info.kind));
        format!("gguf {}", joined(kinds))
    }
}
