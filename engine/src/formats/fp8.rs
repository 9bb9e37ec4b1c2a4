//! `fp8` checkpoints (Hugging Face's fine-grained FP8, `AutoFP8`): E4M3 weights with their scales.
//!
//! `weight` `F8_E4M3` `[out, in]`; `weight_scale_inv` `[ceil(out / rows), ceil(in / columns)]` where `weight_block_size` is given, else
//! `weight_scale` with one scale a tensor or channel. Both multiply, the name of the first notwithstanding. Scales of activations are not
//! used: activations are rounded with the range that they have.

use safetensors::Dtype;
use serde_json::Value;

use super::grid::Strategy;
use super::stored::{Stored, Tensors, is_dense, need};
use super::{refuse, shown, text, texts};
use crate::quant::weight::{Codes, QuantisedWeight};
use crate::{Error, Result};

/// What `quantization_config` says.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows and columns of a block.
    block: Option<(usize, usize)>,
    /// A linear of this name, or below it, is not quantised.
    unquantised: Vec<String>,
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    /// A variant that cannot be loaded, by name.
    pub fn parse(config: &Value) -> Result<Self> {
        if let Some(other) = text(config, "fmt").filter(|fmt| *fmt != "e4m3") {
            return Err(refuse(&format!(
                "fmt {} is not supported: supported is e4m3",
                shown(other)
            )));
        }
        let block = match config.get("weight_block_size") {
            None | Some(Value::Null) => None,
            Some(value) => Some(block_size(value).ok_or_else(|| {
                refuse("weight_block_size must be two numbers above 0, such as [128, 128]")
            })?),
        };
        let mut unquantised = texts(config, "modules_to_not_convert")?;
        unquantised.extend(texts(config, "ignored_layers")?);
        Ok(Self { block, unquantised })
    }

    /// For people.
    pub fn name(&self) -> String {
        match self.block {
            Some((rows, columns)) => format!("fp8, {}", Strategy::Block(rows, columns).name()),
            None => "fp8".into(),
        }
    }

    /// Reads one linear; `None` when it is not quantised.
    ///
    /// # Errors
    /// The tensor that is missing, damaged or of another layout.
    pub fn read(
        &self,
        tensors: &dyn Tensors,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Option<QuantisedWeight>> {
        let below = |parent: &String| {
            name.strip_prefix(parent.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if self.unquantised.iter().any(below) || is_dense(tensors, name) {
            return Ok(None);
        }
        let scale = ["weight_scale_inv", "weight_scale"].map(|suffix| format!("{name}.{suffix}"));
        let scale = scale
            .iter()
            .find(|scale| tensors.find(scale).is_some())
            .unwrap_or(&scale[0]);
        let stored = need(tensors, scale)?;
        let strategy = match self.block {
            Some((rows, columns)) => Strategy::Block(rows, columns),
            None if stored.bytes.len() == stored.dtype.bitsize() / 8 => Strategy::Tensor,
            None => Strategy::Channel,
        };
        read(tensors, name, shape, strategy, (scale, &stored)).map(Some)
    }
}

/// `[rows, columns]` of a block.
pub(super) fn block_size(value: &Value) -> Option<(usize, usize)> {
    let sizes: Vec<usize> = value
        .as_array()?
        .iter()
        .map(|size| size.as_u64().and_then(|size| usize::try_from(size).ok()))
        .collect::<Option<_>>()?;
    match sizes[..] {
        [rows, columns] if rows > 0 && columns > 0 => Some((rows, columns)),
        _ => None,
    }
}

/// E4M3 bytes and their scales.
pub(super) fn read(
    tensors: &dyn Tensors,
    name: &str,
    shape: [usize; 2],
    strategy: Strategy,
    (scale_name, scale): (&str, &Stored<'_>),
) -> Result<QuantisedWeight> {
    let weight = format!("{name}.weight");
    let stored = need(tensors, &weight)?
        .of_type(&weight, Dtype::F8_E4M3)?
        .of_shape(&weight, &shape)?;
    if let Some(index) = stored.bytes.iter().position(|byte| byte & 0x7f == 0x7f) {
        return Err(Error::model(format!(
            "tensor {weight}: number {index} is NaN: the file is damaged, download the model again"
        )));
    }
    let grid = strategy.grid(shape);
    Ok(QuantisedWeight {
        out_features: shape[0],
        in_features: shape[1],
        codes: Codes::Fp8(stored.bytes.to_vec()),
        row_block: grid.row_block,
        group: grid.group,
        scales: grid.scales(shape, scale_name, scale)?,
        zeros: None,
        input_order: None,
    })
}
