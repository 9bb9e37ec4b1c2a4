//! compressed-tensors checkpoints (llm-compressor): one scheme for each group of targets.
//!
//! ```text
//! int-quantized    weight I8 [out, in]; weight_scale; weight_zero_point I8 when asymmetric
//! float-quantized  weight F8_E4M3 [out, in]; weight_scale
//! pack-quantized   weight_packed I32 [out, ceil(in * bits / 32)] of code + 2^(bits - 1), the lowest bits first; weight_scale;
//!                  weight_shape I64 [2]; weight_zero_point I32 [ceil(out * bits / 32), groups], packed along the outputs;
//!                  weight_g_idx I32 [in] with actorder "group"
//! ```
//!
//! `weight_scale` is `[1]`, `[out, 1]`, `[out, in / group]` or `[out / rows, in / columns]` by the strategy. Static scales of activations are
//! not used: activations are rounded with the range that they have.

use safetensors::Dtype;
use serde_json::Value;

use super::fp8;
use super::gptq::{codes_of, offset};
use super::grid::{Grid, Strategy, sort_by_group, zeros_unless};
use super::names::{Rule, rules};
use super::stored::{Stored, Tensors, is_dense, need};
use super::{flag, group_size, refuse, shown, text, texts, whole};
use crate::quant::weight::{Codes, QuantisedWeight};
use crate::{Error, Result};

/// What `quantization_config` says.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    groups: Vec<Group>,
    ignore: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq)]
struct Group {
    targets: Vec<Rule>,
    scheme: Scheme,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Scheme {
    layout: Layout,
    strategy: Strategy,
    symmetric: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Int8,
    Fp8,
    /// Codes of 4 or 8 bits in words.
    Packed(usize),
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    /// A layout that cannot be loaded, by name, with what would make it load.
    pub fn parse(config: &Value) -> Result<Self> {
        for (field, what) in [
            ("sparsity_config", "sparse weights are"),
            ("transform_config", "rotations at run time are"),
        ] {
            let nothing = match config.get(field) {
                None | Some(Value::Null) => true,
                Some(value) => {
                    value.as_object().is_some_and(serde_json::Map::is_empty)
                        || text(value, "format") == Some("dense")
                }
            };
            if !nothing {
                return Err(refuse(&format!(
                    "{field} is present: {what} not supported, quantise the model without"
                )));
            }
        }
        let default = text(config, "format").unwrap_or("");
        let Some(groups) = config.get("config_groups").and_then(Value::as_object) else {
            return Err(refuse("config_groups is missing: download the model again"));
        };
        let groups = groups
            .iter()
            .map(|(name, group)| Group::parse(name, group, default))
            .collect::<Result<_>>()?;
        Ok(Self {
            groups,
            ignore: rules("ignore", &texts(config, "ignore")?)?,
        })
    }

    /// For people.
    pub fn name(&self) -> String {
        let mut names: Vec<String> = Vec::new();
        for Group { scheme, .. } in &self.groups {
            let layout = match scheme.layout {
                Layout::Int8 => "int-quantized 8-bit".to_owned(),
                Layout::Fp8 => "float-quantized 8-bit".to_owned(),
                Layout::Packed(bits) => format!("pack-quantized {bits}-bit"),
            };
            let name = format!("compressed-tensors {layout}, {}", scheme.strategy.name());
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join("; ")
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
        if self.ignore.iter().any(|rule| rule.means(name)) {
            return Ok(None);
        }
        // The most specific target wins, as the package has it.
        let rules = self
            .groups
            .iter()
            .flat_map(|group| group.targets.iter().map(move |rule| (rule, group)));
        let group = rules
            .filter(|(rule, _)| rule.means(name))
            .min_by_key(|(rule, _)| rule.breadth())
            .map(|(_, group)| group);
        match group {
            Some(group) if !is_dense(tensors, name) => {
                group.scheme.read(tensors, name, shape).map(Some)
            }
            _ => Ok(None),
        }
    }
}

impl Group {
    fn parse(name: &str, group: &Value, default: &str) -> Result<Self> {
        let field = |rest: &str| format!("config_groups.{}.{rest}", shown(name));
        let Some(weights) = group.get("weights").filter(|weights| weights.is_object()) else {
            return Err(refuse(&format!(
                "{} is missing: a scheme without quantised weights is not supported",
                field("weights")
            )));
        };
        let layout_name = text(group, "format").unwrap_or(default);
        let kind = text(weights, "type").unwrap_or("int");
        let bits = whole(weights, "num_bits", 8)?;
        let layout = match (layout_name, kind, bits) {
            ("int-quantized" | "naive-quantized", "int", 8) => Layout::Int8,
            ("float-quantized" | "naive-quantized", "float", 8) => Layout::Fp8,
            ("pack-quantized", "int", 4) => Layout::Packed(4),
            ("pack-quantized", "int", 8) => Layout::Packed(8),
            _ => {
                return Err(refuse(&format!(
                    "format {} of {kind} weights with {bits} bits is not supported: supported are int-quantized int 8, pack-quantized int 4 and 8, float-quantized float 8; quantise with W8A8, W4A16 or FP8",
                    shown(layout_name),
                    kind = shown(kind),
                )));
            }
        };
        Ok(Self {
            targets: rules("targets", &texts(group, "targets")?)?,
            scheme: Scheme {
                layout,
                strategy: strategy(weights)?,
                symmetric: flag(weights, "symmetric", true)?,
            },
        })
    }
}

fn strategy(weights: &Value) -> Result<Strategy> {
    let group = group_size(weights, "group_size", -1)?;
    match (text(weights, "strategy"), group) {
        (Some("group") | None, Some(size)) => Ok(Strategy::Group(size)),
        (Some("group" | "channel"), _) => Ok(Strategy::Channel),
        (Some("tensor") | None, None) => Ok(Strategy::Tensor),
        (Some("block"), _) => weights
            .get("block_structure")
            .and_then(fp8::block_size)
            .map(|(rows, columns)| Strategy::Block(rows, columns))
            .ok_or_else(|| refuse("block_structure must be two numbers above 0")),
        (Some(other), _) => Err(refuse(&format!(
            "strategy {} of weights is not supported: supported are tensor, channel, group and block",
            shown(other)
        ))),
    }
}

impl Scheme {
    fn read(self, tensors: &dyn Tensors, name: &str, shape: [usize; 2]) -> Result<QuantisedWeight> {
        let scale_name = format!("{name}.weight_scale");
        let scale = need(tensors, &scale_name)?;
        let grid = self.strategy.grid(shape);
        match self.layout {
            Layout::Fp8 => fp8::read(tensors, name, shape, self.strategy, (&scale_name, &scale)),
            Layout::Int8 => {
                let weight = format!("{name}.weight");
                let stored = need(tensors, &weight)?
                    .of_type(&weight, Dtype::I8)?
                    .of_shape(&weight, &shape)?;
                let zeros = self.zeros(tensors, name, |zeros_name, stored| {
                    let [rows, columns] = grid.blocks(shape);
                    let stored = stored.of_type(zeros_name, Dtype::I8)?;
                    if stored.bytes.len() != rows * columns {
                        return stored
                            .of_shape(zeros_name, &[rows, columns])
                            .map(|_| Vec::new());
                    }
                    let zero = |byte: &u8| f32::from(byte.cast_signed());
                    Ok(stored.bytes.iter().map(zero).collect())
                })?;
                Ok(QuantisedWeight {
                    out_features: shape[0],
                    in_features: shape[1],
                    codes: Codes::Int8(bytemuck::allocation::cast_vec(stored.bytes.to_vec())),
                    row_block: grid.row_block,
                    group: grid.group,
                    scales: grid.scales(shape, &scale_name, &scale)?,
                    zeros: zeros.and_then(|zeros| zeros_unless(0.0, zeros)),
                    input_order: None,
                })
            }
            Layout::Packed(bits) => {
                self.read_packed(tensors, name, shape, (bits, grid), (&scale_name, &scale))
            }
        }
    }

    fn read_packed(
        self,
        tensors: &dyn Tensors,
        name: &str,
        shape: [usize; 2],
        (bits, grid): (usize, Grid),
        (scale_name, scale): (&str, &Stored<'_>),
    ) -> Result<QuantisedWeight> {
        let [out_features, in_features] = shape;
        let per_word = 32 / bits;
        let packed = format!("{name}.weight_packed");
        let columns = in_features.div_ceil(per_word);
        let words = need(tensors, &packed)?.words(&packed, [out_features, columns])?;
        let row_len = (in_features * bits).div_ceil(8);
        let mut bytes = Vec::with_capacity(out_features * row_len);
        for row in 0..out_features {
            let row_start = bytes.len();
            for column in 0..columns {
                let word = words.bytes(row, column);
                let left = row_len - (bytes.len() - row_start);
                bytes.extend_from_slice(&word[..left.min(4)]);
            }
        }
        let zeros = self.zeros(tensors, name, |zeros_name, stored| {
            let [rows, groups] = grid.blocks(shape);
            let words = stored.words(zeros_name, [rows.div_ceil(per_word), groups])?;
            let zero = |row: usize, group: usize| {
                f32::from(words.code(row / per_word, group, row % per_word, bits)) - offset(bits)
            };
            let each = (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group)));
            Ok(each.map(|(row, group)| zero(row, group)).collect())
        })?;
        let symmetric = if bits == 4 { 8.0 } else { 0.0 };
        let weight = QuantisedWeight {
            out_features,
            in_features,
            codes: codes_of(bits, bytes),
            row_block: grid.row_block,
            group: grid.group,
            scales: grid.scales(shape, scale_name, scale)?,
            zeros: zeros.and_then(|zeros| zeros_unless(symmetric, zeros)),
            input_order: None,
        };
        let index = format!("{name}.weight_g_idx");
        let Some(stored) = tensors.find(&index) else {
            return Ok(weight);
        };
        let groups = stored.ints(&index, in_features)?;
        // The tool writes -1 where the order was never used.
        if groups.iter().all(|group| *group == -1) {
            return Ok(weight);
        }
        sort_by_group(&index, &groups, weight)
    }

    /// The zeros of an asymmetric scheme.
    fn zeros(
        self,
        tensors: &dyn Tensors,
        name: &str,
        read: impl FnOnce(&str, Stored<'_>) -> Result<Vec<f32>>,
    ) -> Result<Option<Vec<f32>>> {
        if self.symmetric {
            return Ok(None);
        }
        let zeros_name = format!("{name}.weight_zero_point");
        let Some(stored) = tensors.find(&zeros_name) else {
            return Err(Error::model(format!(
                "tensor {zeros_name} is missing from the weights, its scheme is asymmetric: download the model again"
            )));
        };
        read(&zeros_name, stored).map(Some)
    }
}
