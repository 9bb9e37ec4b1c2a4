//! Checkpoint formats: how quantised weights lie in files, and which of a checkpoint's linears are stored so.
//!
//! Bytes in, [`QuantisedWeight`]s out. The model's loader calls it, and exporters are tested by reading back what they wrote. It opens no file,
//! computes no product, and takes nothing that it reads on trust: every length is checked against the shape that the model asks for.

pub mod awq;
pub mod compressed_tensors;
pub mod fp8;
pub mod gguf;
pub mod gptq;
mod grid;
mod names;
mod stored;

use serde_json::Value;

pub use self::stored::{Stored, Tensors};
use crate::quant::weight::QuantisedWeight;
use crate::{Error, Result};

/// How a checkpoint stores its quantised linears, by its `quantization_config`.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// `compressed-tensors`: int-quantized, pack-quantized, float-quantized.
    CompressedTensors(compressed_tensors::Config),
    /// GPTQ, versions 1 and 2 of the zero points.
    Gptq(gptq::Config),
    /// AWQ in the GEMM layout.
    Awq(awq::Config),
    /// `fp8`: E4M3 weights with one scale a tensor, channel or block.
    Fp8(fp8::Config),
}

impl Format {
    /// Reads `quantization_config`.
    ///
    /// # Errors
    /// A method or layout that cannot be loaded, by name, with what would make it load.
    pub fn parse(config: &Value) -> Result<Self> {
        let Some(method) = text(config, "quant_method") else {
            return Err(refuse("quant_method is missing: download the model again"));
        };
        match method {
            "compressed-tensors" => {
                compressed_tensors::Config::parse(config).map(Self::CompressedTensors)
            }
            "gptq" => gptq::Config::parse(config).map(Self::Gptq),
            "awq" => awq::Config::parse(config).map(Self::Awq),
            "fp8" => fp8::Config::parse(config).map(Self::Fp8),
            other => Err(refuse(&format!(
                "quant_method {} is not supported: supported are compressed-tensors, gptq, awq, fp8; convert the model to one of them, or use its unquantised checkpoint",
                shown(other)
            ))),
        }
    }

    /// The format for people, such as `gptq 4-bit, groups of 128`.
    pub fn name(&self) -> String {
        match self {
            Self::CompressedTensors(config) => config.name(),
            Self::Gptq(config) => config.name(),
            Self::Awq(config) => config.name(),
            Self::Fp8(config) => config.name(),
        }
    }

    /// Reads the linear `name` (without `.weight`) of the shape `[out, in]`. `None` when the checkpoint keeps it unquantised.
    ///
    /// # Errors
    /// The tensor that is missing, damaged or of another layout.
    pub fn read(
        &self,
        tensors: &dyn Tensors,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Option<QuantisedWeight>> {
        let weight = match self {
            Self::CompressedTensors(config) => config.read(tensors, name, shape),
            Self::Gptq(config) => config.read(tensors, name, shape),
            Self::Awq(config) => config.read(tensors, name, shape),
            Self::Fp8(config) => config.read(tensors, name, shape),
        }?;
        if let Some(weight) = &weight {
            weight.check(name)?;
        }
        Ok(weight)
    }
}

/// An error about `quantization_config`.
fn refuse(message: &str) -> Error {
    Error::model(format!("config.json: quantization_config.{message}"))
}

/// A text of a file, fit for one line of an error.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

/// A field that holds text.
fn text<'a>(config: &'a Value, field: &str) -> Option<&'a str> {
    config.get(field).and_then(Value::as_str)
}

/// A field that is a whole number, `default` where it is absent or null.
fn whole(config: &Value, field: &str, default: i64) -> Result<i64> {
    match config.get(field) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => value.as_i64().ok_or_else(|| {
            refuse(&format!(
                "{field} is {}: it must be a whole number",
                shown(&value.to_string())
            ))
        }),
    }
}

/// A field that is true or false, `default` where it is absent or null.
fn flag(config: &Value, field: &str, default: bool) -> Result<bool> {
    match config.get(field) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| {
            refuse(&format!(
                "{field} is {}: it must be true or false",
                shown(&value.to_string())
            ))
        }),
    }
}

/// A field that lists texts; empty where it is absent or null.
fn texts(config: &Value, field: &str) -> Result<Vec<String>> {
    let wrong = || refuse(&format!("{field} must be a list of texts"));
    match config.get(field) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong))
            .collect(),
        Some(_) => Err(wrong()),
    }
}

/// A group size: -1 (one group) is the whole width, like `null`.
fn group_size(config: &Value, field: &str, default: i64) -> Result<Option<usize>> {
    match whole(config, field, default)? {
        -1 => Ok(None),
        size => match usize::try_from(size) {
            Ok(size) if size > 0 => Ok(Some(size)),
            _ => Err(refuse(&format!(
                "{field} is {size}: it must be -1 or above 0"
            ))),
        },
    }
}
