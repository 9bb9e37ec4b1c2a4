//! Writes a quantised checkpoint in a layout that other engines load: compressed-tensors or GPTQ.
//!
//! What a quantiser moved from activations into weights is folded into the norm, or the rows of the linear, that makes the activations: scales are
//! powers of two, so no number changes by it. The folder is written beside its place and renamed. `cli::export` calls it.

pub mod compressed_tensors;
pub mod fold;
pub mod gptq;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::artifact::MAX_JSON_BYTES;
use crate::artifact::weights::{Tensor, floats, serialise};
use crate::calibrate::checkpoint::Checkpoints;
use crate::calibrate::quantise::{Assignment, quantise};
use crate::calibrate::quantisers::Recipe;
use crate::calibrate::sensitivity;
use crate::dataset::{Dataset, Window, sample};
use crate::error::{Error, Result};
use crate::files;
use crate::model::{self, Model};
use crate::progress::Progress;
use crate::quality::bits_per_weight;
use crate::quant::{QuantisedLinear, QuantisedLinears, Scheme};
use crate::tokenizer::Tokenizer;
use crate::verify::check_window;

/// A file is closed once its tensors reach so many bytes.
const SHARD_BYTES: usize = 1 << 30;

/// Everything that `export` is told.
#[derive(Debug, Clone)]
pub struct Options {
    /// The Hugging Face directory of the unquantised model.
    pub model: PathBuf,
    /// The new folder.
    pub out: PathBuf,
    /// What is made, and how.
    pub recipe: Recipe,
    /// Spend so many bits a weight by loss instead of the recipe's scheme.
    pub budget_bits_per_weight: Option<f64>,
    /// The layout.
    pub layout: Layout,
    /// The calibration texts.
    pub data: Option<PathBuf>,
    /// Texts to read.
    pub samples: usize,
    /// Tokens of a text at most.
    pub sequence_length: usize,
}

/// Quantises the model and writes it. Returns what was made, for people.
///
/// # Errors
/// Model, data or settings that cannot be used, a full disk, a signal to stop.
pub fn run(options: &Options, progress: &Progress) -> Result<Vec<String>> {
    refuse_existing(&options.out)?;
    options.layout.check(options.recipe)?;
    let mut model = Model::open(&options.model)?;
    let texts = texts(options, &model)?;
    let mut assignment = Assignment::uniform(options.recipe);
    let mut lines = Vec::new();
    if let Some(bits) = options.budget_bits_per_weight {
        let sensitivities = sensitivity::measure(&mut model, &texts, progress)?;
        assignment = sensitivity::assign(&sensitivities, bits, options.recipe)?;
        lines = sensitivity::describe(&assignment, model.config().num_hidden_layers);
    }
    let parent = parent(&options.out);
    let saved = Checkpoints::open(parent, model.digest(), &texts, &assignment)?;
    let linears = quantise(&mut model, &texts, &assignment, Some(&saved), progress)?;
    let schemes: BTreeMap<String, Scheme> = model
        .stored_linears()
        .into_iter()
        .map(|linear| {
            let scheme = assignment.recipe(linear.layer, linear.input).scheme;
            (linear.name, scheme)
        })
        .collect();
    write(
        &options.model,
        &options.out,
        &linears,
        &schemes,
        options.layout,
    )?;
    saved.finish();
    lines.push(format!(
        "{} {:.3} bits a weight",
        options.out.display(),
        bits_per_weight(&linears)
    ));
    Ok(lines)
}

/// The calibration texts, where they are needed.
fn texts(options: &Options, model: &Model) -> Result<Vec<Window>> {
    let needed = options.recipe.quantiser.needs_data() || options.budget_bits_per_weight.is_some();
    let Some(path) = &options.data else {
        return if needed {
            Err(Error::data(format!(
                "the quantiser {} reads calibration texts: give --data, or --quantiser rtn",
                options.recipe.quantiser.name()
            )))
        } else {
            Ok(Vec::new())
        };
    };
    check_window(model, "--sequence-length", options.sequence_length)?;
    let data = Dataset::read(path)?;
    let windows = data.windows(&Tokenizer::open(&options.model)?, options.sequence_length)?;
    Ok(sample(data.name(), windows, options.samples)?.0)
}

/// Whose layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// vLLM's and llm-compressor's `compressed-tensors`.
    CompressedTensors,
    /// `AutoGPTQ`'s and `GPTQModel`'s, version 1.
    Gptq,
    /// FP32 weights that hold the quantised values: every engine reads it, to compare or to evaluate.
    Dequantised,
}

impl Layout {
    /// Refuses what the layout cannot hold, before anything is computed.
    ///
    /// # Errors
    /// What to write instead.
    fn check(self, recipe: Recipe) -> Result<()> {
        match self {
            Self::CompressedTensors => compressed_tensors::check(recipe),
            Self::Gptq => gptq::check(recipe),
            Self::Dequantised => Ok(()),
        }
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "compressed-tensors" => Ok(Self::CompressedTensors),
            "gptq" => Ok(Self::Gptq),
            "dequantised" => Ok(Self::Dequantised),
            _ => Err("not a layout: write compressed-tensors, gptq or dequantised".into()),
        }
    }
}

/// A linear with the scheme that it was made in.
#[derive(Debug)]
pub struct Exported {
    /// The linear, with nothing left beside its weights.
    pub linear: QuantisedLinear,
    /// Its scheme.
    pub scheme: Scheme,
}

/// Writes `model` with these linears to the new folder `out`.
///
/// # Errors
/// A folder that is there already, a scheme that the layout cannot hold, a model that scales cannot be folded into, a full disk.
pub fn write(
    model: &Path,
    out: &Path,
    linears: &QuantisedLinears,
    schemes: &BTreeMap<String, Scheme>,
    layout: Layout,
) -> Result<()> {
    refuse_existing(out)?;
    let config = read_config(model)?;
    let (linears, divisors) = fold::fold(linears, &config)?;
    let mut exported = BTreeMap::new();
    for linear in linears {
        let scheme = schemes[&linear.name];
        exported.insert(linear.name.clone(), Exported { linear, scheme });
    }
    let quantisation = match layout {
        Layout::CompressedTensors => Some(compressed_tensors::config(&exported)?),
        Layout::Gptq => Some(gptq::config(&exported)?),
        Layout::Dequantised => None,
    };
    let parent = parent(out);
    let draft = fs::create_dir_all(parent)
        .and_then(|()| {
            tempfile::Builder::new()
                .prefix(".export-")
                .tempdir_in(parent)
        })
        .map_err(|error| failed(out, &error))?;
    copy_files(model, draft.path()).map_err(|error| failed(out, &error))?;
    let mut writer = Writer::new(draft.path());
    let mut written = 0;
    for_each_tensor(model, |tensor| {
        let name = tensor.name.strip_suffix(".weight");
        match name.and_then(|name| exported.get(name)) {
            Some(linear) => {
                written += 1;
                let tensors = match layout {
                    Layout::CompressedTensors => compressed_tensors::tensors(linear)?,
                    Layout::Gptq => gptq::tensors(linear)?,
                    Layout::Dequantised => vec![dequantised(tensor.name, linear)],
                };
                tensors
                    .into_iter()
                    .try_for_each(|tensor| writer.add(tensor))
            }
            None => writer.add(fold::divide(tensor, &divisors)?),
        }
    })?;
    if written != exported.len() {
        return Err(Error::model(format!(
            "{}: {written} of {} linears are stored by themselves: export from a checkpoint whose projections are not fused",
            model.display(),
            exported.len()
        )));
    }
    writer.finish()?;
    finish_config(config, quantisation, draft.path(), layout)
        .and_then(|()| {
            fs::set_permissions(
                draft.path(),
                std::os::unix::fs::PermissionsExt::from_mode(0o755),
            )?;
            fs::rename(draft.path(), out)
        })
        .map_err(|error| failed(out, &error))?;
    let _renamed = draft.keep();
    Ok(())
}

fn refuse_existing(out: &Path) -> Result<()> {
    if out.exists() {
        return Err(Error::storage(format!(
            "{} exists: give --out a folder that does not",
            out.display()
        )));
    }
    Ok(())
}

fn parent(out: &Path) -> &Path {
    out.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

fn read_config(model: &Path) -> Result<Value> {
    let path = model.join("config.json");
    let text = files::read(&path, MAX_JSON_BYTES)
        .map_err(|error| Error::model(format!("cannot read {}: {error}", path.display())))?;
    let config: Value = serde_json::from_slice(&text)
        .map_err(|error| Error::model(format!("{} is not JSON: {error}", path.display())))?;
    if config.get("quantization_config").is_some() {
        return Err(Error::model(format!(
            "{} is quantised already: export from the unquantised model",
            model.display()
        )));
    }
    Ok(config)
}

fn dequantised(name: String, linear: &Exported) -> Tensor {
    let weight = &linear.linear.weight;
    Tensor {
        name,
        dtype: Dtype::F32,
        shape: vec![weight.out_features, weight.in_features],
        data: floats(&weight.dequantise()),
    }
}

fn finish_config(
    mut config: Value,
    quantisation: Option<Value>,
    folder: &Path,
    layout: Layout,
) -> io::Result<()> {
    if let Some(quantisation) = quantisation {
        if layout == Layout::Gptq {
            write_file(&folder.join("quantize_config.json"), &pretty(&quantisation))?;
        }
        config["quantization_config"] = quantisation;
    }
    write_file(&folder.join("config.json"), &pretty(&config))
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Everything that is neither weights nor the configuration: tokenizer, template, licence.
fn copy_files(model: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(model)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        let text = name.to_string_lossy();
        if path.is_file() && !text.contains(".safetensors") && text != "config.json" {
            io::copy(&mut files::open(&path)?, &mut File::create(to.join(name))?)?;
        }
    }
    Ok(())
}

/// Calls `each` with every tensor of the checkpoint, files and names in order.
fn for_each_tensor(model: &Path, mut each: impl FnMut(Tensor) -> Result<()>) -> Result<()> {
    let cannot = |path: &Path, why: &dyn std::fmt::Display| {
        Error::model(format!("cannot read {}: {why}", path.display()))
    };
    let entries = fs::read_dir(model).map_err(|error| cannot(model, &error))?;
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "safetensors")
        })
        .collect();
    paths.sort();
    for path in paths {
        let map = model::map(&path)?;
        let tensors = SafeTensors::deserialize(&map).map_err(|error| cannot(&path, &error))?;
        let mut names = tensors.names();
        names.sort_unstable();
        for name in names {
            let view = tensors
                .tensor(name)
                .map_err(|error| cannot(&path, &error))?;
            each(Tensor {
                name: name.to_owned(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                data: view.data().to_vec(),
            })?;
        }
    }
    Ok(())
}

/// Collects tensors into files and remembers where they went.
struct Writer<'a> {
    folder: &'a Path,
    pending: Vec<Tensor>,
    bytes: usize,
    files: Vec<Vec<String>>,
    total: usize,
}

impl<'a> Writer<'a> {
    const fn new(folder: &'a Path) -> Self {
        Self {
            folder,
            pending: Vec::new(),
            bytes: 0,
            files: Vec::new(),
            total: 0,
        }
    }

    fn add(&mut self, tensor: Tensor) -> Result<()> {
        self.bytes += tensor.data.len();
        self.total += tensor.data.len();
        self.pending.push(tensor);
        if self.bytes >= SHARD_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let name = format!("part-{}", self.files.len());
        write_file(&self.folder.join(name), &serialise(&self.pending))
            .map_err(|error| failed(self.folder, &error))?;
        let names = self.pending.drain(..).map(|tensor| tensor.name);
        self.files.push(names.collect());
        self.bytes = 0;
        Ok(())
    }

    /// Gives the files their final names and writes the index when there is more than one.
    fn finish(mut self) -> Result<()> {
        if !self.pending.is_empty() {
            self.flush()?;
        }
        let count = self.files.len();
        let mut map = serde_json::Map::new();
        for (index, tensors) in self.files.iter().enumerate() {
            let name = if count == 1 {
                "model.safetensors".to_owned()
            } else {
                format!("model-{:05}-of-{count:05}.safetensors", index + 1)
            };
            fs::rename(
                self.folder.join(format!("part-{index}")),
                self.folder.join(&name),
            )
            .map_err(|error| failed(self.folder, &error))?;
            for tensor in tensors {
                map.insert(tensor.clone(), Value::from(name.clone()));
            }
        }
        if count < 2 {
            return Ok(());
        }
        let index = json!({"metadata": {"total_size": self.total}, "weight_map": map});
        write_file(
            &self.folder.join("model.safetensors.index.json"),
            &pretty(&index),
        )
        .map_err(|error| failed(self.folder, &error))
    }
}

fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn failed(out: &Path, error: &io::Error) -> Error {
    Error::storage(format!(
        "cannot write the checkpoint {}: {error}; free space or check the volume",
        out.display()
    ))
}

/// 32-bit words of `bits`-bit codes, the first in the lowest bits; the last word is filled up with zeros.
fn pack_words(codes: impl IntoIterator<Item = u32>, bits: u32) -> Vec<i32> {
    let per_word = (32 / bits) as usize;
    let mut words = Vec::new();
    for (index, code) in codes.into_iter().enumerate() {
        let place = index % per_word;
        if place == 0 {
            words.push(0_u32);
        }
        if let Some(word) = words.last_mut() {
            *word |= code << (u32::try_from(place).unwrap_or(0) * bits);
        }
    }
    words.into_iter().map(u32::cast_signed).collect()
}

fn words_to_bytes(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_hold_the_first_code_lowest() {
        let words = pack_words([1, 2, 3, 4, 5, 6, 7, 8, 9], 4);
        assert_eq!(words, [0x8765_4321_u32.cast_signed(), 9]);
        assert_eq!(pack_words([0xaa, 1], 8), [0x01aa]);
    }

    #[test]
    fn a_layout_has_one_name() {
        assert_eq!("gptq".parse(), Ok(Layout::Gptq));
        assert!(
            "awq"
                .parse::<Layout>()
                .unwrap_err()
                .contains("write compressed-tensors, gptq or dequantised")
        );
    }
}
