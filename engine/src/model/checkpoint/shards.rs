//! Finds a model's tensors in its safetensors files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::{Checkpoint, Stored, joined, missing, mmap, wrong_shape};
use crate::formats::{self, Format, Tensors};
use crate::model::config::{parse, read_small_file};
use crate::model::tensor::{Storage, Tensor};
use crate::{Error, Result};

pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SINGLE: &str = "model.safetensors";
/// Tensors of all models are far fewer; the bound keeps what headers make us hold near the size of the files.
const MAX_TENSORS: usize = 1 << 16;

/// The open files of a model.
#[derive(Debug)]
pub(in crate::model) struct Shards {
    files: Vec<(String, Arc<Mmap>)>,
    tensors: HashMap<String, Entry>,
    format: Option<Format>,
}

#[derive(Debug)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    start: usize,
    end: usize,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Shards {
    /// Maps the shards and reads their headers; linears are stored as `format` says.
    pub(in crate::model) fn open(directory: &Path, format: Option<Format>) -> Result<Self> {
        let index = read_index(directory)?;
        let names: BTreeSet<&str> = match &index {
            Some(index) => index.weight_map.values().map(String::as_str).collect(),
            None => BTreeSet::from([SINGLE]),
        };
        let mut checkpoint = Self {
            files: Vec::new(),
            tensors: HashMap::new(),
            format,
        };
        for name in names {
            checkpoint.add_shard(directory, name, index.is_some())?;
        }
        if let Some(index) = &index {
            checkpoint.check_index(index)?;
        }
        Ok(checkpoint)
    }

    fn add_shard(&mut self, directory: &Path, name: &str, indexed: bool) -> Result<()> {
        let path = shard_path(directory, name)?;
        if !indexed && !path.exists() {
            return Err(no_weights(directory));
        }
        let map = mmap::map(&path)?;
        let broken = |detail: &str| {
            Error::model(format!(
                "{name}: {detail}: the file is truncated or damaged, download the model again"
            ))
        };
        check_count(&map).map_err(|detail| broken(&detail))?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| broken(&format!("bad safetensors header ({error})")))?;
        let data = header + size_of::<u64>();
        // `read_metadata` has compared the header's last offset with nothing: the file may still be shorter or longer.
        if metadata.data_len().checked_add(data) != Some(map.len()) {
            return Err(broken(&format!(
                "the header promises {} bytes of tensors, the file has {}",
                metadata.data_len(),
                map.len() - data
            )));
        }
        let shard = self.files.len();
        for (tensor, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let entry = Entry {
                shard,
                dtype: info.dtype,
                shape: info.shape.clone(),
                start: data + start,
                end: data + end,
            };
            if self.tensors.insert(tensor.clone(), entry).is_some() {
                return Err(Error::model(format!(
                    "{name}: tensor {tensor} is in another shard too: download the model again"
                )));
            }
        }
        self.files.push((name.to_owned(), Arc::new(map)));
        Ok(())
    }

    /// Each tensor must be where the index says.
    fn check_index(&self, index: &Index) -> Result<()> {
        for (tensor, shard) in &index.weight_map {
            if self
                .tensors
                .get(tensor)
                .is_none_or(|entry| self.files[entry.shard].0 != *shard)
            {
                return Err(Error::model(format!(
                    "{INDEX}: {shard} does not hold tensor {tensor}: download the model again"
                )));
            }
        }
        Ok(())
    }
}

impl Tensors for Shards {
    fn find(&self, name: &str) -> Option<formats::Stored<'_>> {
        let entry = self.tensors.get(name)?;
        Some(formats::Stored {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            bytes: &self.files[entry.shard].1[entry.start..entry.end],
        })
    }
}

impl Checkpoint for Shards {
    fn has_linear(&self, name: &str) -> bool {
        ["weight", "weight_packed", "qweight"]
            .iter()
            .any(|suffix| self.tensors.contains_key(&format!("{name}.{suffix}")))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let entry = self.tensors.get(name).ok_or_else(|| missing(name))?;
        let file = &self.files[entry.shard].0;
        if entry.shape != shape {
            return Err(wrong_shape(file, name, &entry.shape, shape));
        }
        let map = Arc::clone(&self.files[entry.shard].1);
        let storage =
            Storage::mapped(map, entry.start..entry.end, entry.dtype).ok_or_else(|| {
                Error::model(format!(
                    "{file}: tensor {name} has the type {:?}: supported are BF16, F16 and F32",
                    entry.dtype
                ))
            })?;
        Ok(Tensor::new(storage, shape.to_vec()))
    }

    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        let quantised = match &self.format {
            Some(format) => format.read(self, name, shape)?,
            None => None,
        };
        match quantised {
            Some(weight) => {
                // The codes were copied: what they were read from is not needed again.
                for (_, map) in &self.files {
                    mmap::release(map, 0..map.len());
                }
                Ok(Stored::Quantised(weight))
            }
            None => self
                .tensor(&format!("{name}.weight"), &shape)
                .map(Stored::Dense),
        }
    }

    fn rows(&self, name: &str) -> Option<usize> {
        self.tensors
            .get(name)
            .and_then(|entry| entry.shape.first().copied())
    }

    fn files(&self) -> Vec<(&str, &Mmap)> {
        self.files
            .iter()
            .map(|(name, map)| (name.as_str(), &**map))
            .collect()
    }

    fn format(&self) -> String {
        if let Some(format) = &self.format {
            return format.name();
        }
        let types = self
            .tensors
            .values()
            .map(|entry| format!("{:?}", entry.dtype));
        format!("safetensors {}", joined(types))
    }
}

/// Refuses a header that describes more tensors than any model has, before it is parsed: each takes an opening brace.
fn check_count(file: &[u8]) -> Result<(), String> {
    let len = file.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
    let header = file.get(8..).unwrap_or_default();
    let header = &header[..usize::try_from(len).unwrap_or(usize::MAX).min(header.len())];
    let tensors = header.split(|byte| *byte == b'{').count();
    if tensors > MAX_TENSORS {
        return Err(format!("describes more than {MAX_TENSORS} tensors"));
    }
    Ok(())
}

fn read_index(directory: &Path) -> Result<Option<Index>> {
    let Some(text) = read_small_file(&directory.join(INDEX))? else {
        return Ok(None);
    };
    parse_index(&text).map(Some)
}

fn parse_index(text: &str) -> Result<Index> {
    let index: Index = parse(INDEX, text)?;
    if index.weight_map.is_empty() {
        return Err(Error::model(format!(
            "{INDEX}: names no tensors: download the model again"
        )));
    }
    Ok(index)
}

/// The names of the shards that an index lists, each a plain file name.
pub(crate) fn shards_of_index(text: &[u8]) -> Result<BTreeSet<String>> {
    let text = std::str::from_utf8(text)
        .map_err(|error| Error::model(format!("{INDEX}: is no text ({error})")))?;
    let names: BTreeSet<String> = parse_index(text)?.weight_map.into_values().collect();
    for name in &names {
        shard_path(Path::new(""), name)?;
    }
    Ok(names)
}

/// A shard is a plain file name: nothing outside the directory can be named.
fn shard_path(directory: &Path, name: &str) -> Result<PathBuf> {
    let mut components = Path::new(name).components();
    match (components.next(), components.next()) {
        (Some(Component::Normal(only)), None) if only.to_str() == Some(name) => {
            Ok(directory.join(name))
        }
        _ => {
            let shown: String = name.chars().filter(|c| !c.is_control()).take(100).collect();
            Err(Error::model(format!(
                "{INDEX}: `{shown}` is not a plain file name: a shard must lie in the model directory itself"
            )))
        }
    }
}

fn no_weights(directory: &Path) -> Error {
    let is_pickle = |name: &std::ffi::OsStr| {
        Path::new(name)
            .extension()
            .is_some_and(|e| e == "bin" || e == "pt" || e == "pth")
    };
    let pickled = std::fs::read_dir(directory)
        .is_ok_and(|entries| entries.flatten().any(|entry| is_pickle(&entry.file_name())));
    let fix = if pickled {
        "PyTorch .bin files are not read, convert them to safetensors"
    } else {
        "download the model again"
    };
    Error::model(format!(
        "{}: neither {SINGLE} nor {INDEX} is there: {fix}",
        directory.display()
    ))
}
