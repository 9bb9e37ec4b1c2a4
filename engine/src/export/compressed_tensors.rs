//! The compressed-tensors layout: `int-quantized` for W8A8, `float-quantized` for FP8, `pack-quantized` for weights in integers only.

use std::collections::BTreeMap;

use bytemuck::cast_slice;
use half::bf16;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{Exported, pack_words, words_to_bytes};
use crate::artifact::weights::Tensor;
use crate::calibrate::quantisers::gptq::ActOrder;
use crate::calibrate::quantisers::{Quantiser, Recipe};
use crate::error::{Error, Result};
use crate::quant::{ActivationFormat, Codes, QuantisedWeight, Scheme, WeightFormat};

/// Refuses a recipe that the layout cannot hold.
///
/// # Errors
/// What to write instead.
pub fn check(recipe: Recipe) -> Result<()> {
    if matches!(recipe.quantiser, Quantiser::Gptq(gptq) if gptq.act_order == ActOrder::Group) {
        return Err(Error::plan(
            "compressed-tensors no longer holds columns sorted by group: use --act-order weight, or the layout gptq",
        ));
    }
    format(recipe.scheme).map(|_| ())
}

/// `quantization_config`: one group of targets a scheme.
///
/// # Errors
/// A scheme that the layout cannot hold.
pub fn config(linears: &BTreeMap<String, Exported>) -> Result<Value> {
    let mut groups: Vec<(Scheme, Vec<&str>)> = Vec::new();
    for (name, exported) in linears {
        match groups
            .iter_mut()
            .find(|(scheme, _)| *scheme == exported.scheme)
        {
            Some((_, names)) => names.push(name),
            None => groups.push((exported.scheme, vec![name])),
        }
    }
    let formats: Vec<&str> = groups
        .iter()
        .map(|(scheme, ..)| format(*scheme))
        .collect::<Result<_>>()?;
    let uniform = groups.len() == 1;
    let config_groups: serde_json::Map<String, Value> = groups
        .iter()
        .enumerate()
        .map(|(index, (scheme, names))| {
            let targets = if uniform {
                json!(["Linear"])
            } else {
                json!(names)
            };
            let group = json!({
                "targets": targets,
                "format": formats[index],
                "weights": weights(*scheme),
                "input_activations": activations(scheme.activations),
                "output_activations": null,
            });
            (format!("group_{index}"), group)
        })
        .collect();
    let same = formats.iter().all(|format| *format == formats[0]);
    Ok(json!({
        "quant_method": "compressed-tensors",
        "format": if same { formats[0] } else { "mixed-precision" },
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "ignore": ["lm_head"],
        "config_groups": config_groups,
    }))
}

fn format(scheme: Scheme) -> Result<&'static str> {
    match (scheme.weights, scheme.activations) {
        (WeightFormat::Lut4, _) => Err(Error::plan(
            "compressed-tensors has no tables: export LUT4 as W4A16-g128 instead",
        )),
        (WeightFormat::Fp8, _) => Ok("float-quantized"),
        (WeightFormat::Int8, ActivationFormat::Int8) => Ok("int-quantized"),
        (WeightFormat::Int8 | WeightFormat::Int4 { .. }, _) => Ok("pack-quantized"),
    }
}

fn weights(scheme: Scheme) -> Value {
    let (bits, kind, group, symmetric) = match scheme.weights {
        WeightFormat::Int4 { group, symmetric } => (4, "int", group, symmetric),
        WeightFormat::Fp8 => (8, "float", None, true),
        WeightFormat::Int8 | WeightFormat::Lut4 => (8, "int", None, true),
    };
    json!({
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": if group.is_some() { "group" } else { "channel" },
        "group_size": group,
        "block_structure": null,
        "actorder": null,
        "dynamic": false,
        "observer": "minmax",
        "observer_kwargs": {},
    })
}

fn activations(format: ActivationFormat) -> Value {
    let kind = match format {
        ActivationFormat::Bf16 => return Value::Null,
        ActivationFormat::Int8 => "int",
        ActivationFormat::Fp8 => "float",
    };
    json!({
        "num_bits": 8,
        "type": kind,
        "symmetric": true,
        "strategy": "token",
        "group_size": null,
        "block_structure": null,
        "actorder": null,
        "dynamic": true,
        "observer": null,
        "observer_kwargs": {},
    })
}

/// The tensors of one linear.
///
/// # Errors
/// A scheme that the layout cannot hold.
pub fn tensors(exported: &Exported) -> Result<Vec<Tensor>> {
    let weight = &exported.linear.weight;
    let shape = vec![weight.out_features, weight.in_features];
    let mut tensors = Vec::new();
    let mut add = |ending: &str, dtype, shape, data| {
        let name = format!("{}.{ending}", exported.linear.name);
        tensors.push(Tensor {
            name,
            dtype,
            shape,
            data,
        });
    };
    match (format(exported.scheme)?, &weight.codes) {
        ("int-quantized", Codes::Int8(codes)) => {
            add("weight", Dtype::I8, shape, cast_slice(codes).to_vec());
        }
        ("float-quantized", Codes::Fp8(codes)) => {
            add("weight", Dtype::F8_E4M3, shape, codes.clone());
        }
        _ => {
            let bits = if matches!(weight.codes, Codes::Int8(_)) {
                8
            } else {
                4
            };
            let words = packed(weight, bits);
            let columns = words.len() / weight.out_features;
            let packed_shape = vec![weight.out_features, columns];
            add(
                "weight_packed",
                Dtype::I32,
                packed_shape,
                words_to_bytes(&words),
            );
            let shape = shape.iter().flat_map(|size| (*size as u64).to_le_bytes());
            add("weight_shape", Dtype::I64, vec![2], shape.collect());
            if let Some(zeros) = &weight.zeros {
                let words = packed_zeros(zeros, weight.groups(), bits);
                let rows = words.len() / weight.groups();
                add(
                    "weight_zero_point",
                    Dtype::I32,
                    vec![rows, weight.groups()],
                    words_to_bytes(&words),
                );
            }
        }
    }
    let scales = weight
        .scales
        .iter()
        .flat_map(|scale| bf16::from_f32(*scale).to_le_bytes());
    add(
        "weight_scale",
        Dtype::BF16,
        vec![weight.out_features, weight.groups()],
        scales.collect(),
    );
    Ok(tensors)
}

/// Codes as unsigned numbers along the inputs' own order, each row in whole words.
fn packed(weight: &QuantisedWeight, bits: u32) -> Vec<i32> {
    let mut row_codes = vec![0_u32; weight.in_features];
    (0..weight.out_features)
        .flat_map(|row| {
            for column in 0..weight.in_features {
                let input = input_of(weight, column);
                row_codes[input] = unsigned(weight, row, column);
            }
            pack_words(row_codes.iter().copied(), bits)
        })
        .collect()
}

/// The input that a column of the codes multiplies.
pub(super) fn input_of(weight: &QuantisedWeight, column: usize) -> usize {
    weight
        .input_order
        .as_ref()
        .map_or(column, |order| order[column] as usize)
}

/// A code counted from 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "codes of 4 and 8 bits"
)]
pub(super) fn unsigned(weight: &QuantisedWeight, row: usize, column: usize) -> u32 {
    let code = weight.code(row, column) as i32;
    match weight.codes {
        Codes::Int8(_) => (code + 128) as u32,
        _ => code as u32,
    }
}

/// The group of each input, when columns were sorted.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a linear has far fewer than 2^31 groups"
)]
pub(super) fn group_index(weight: &QuantisedWeight) -> Option<Vec<i32>> {
    let order = weight.input_order.as_ref()?;
    let mut groups = vec![0; weight.in_features];
    for (column, input) in order.iter().enumerate() {
        groups[*input as usize] = (column / weight.group) as i32;
    }
    Some(groups)
}

/// Zeros are packed along the outputs: `[ceil(out * bits / 32), groups]`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "zeros of 4 bits"
)]
fn packed_zeros(zeros: &[f32], groups: usize, bits: u32) -> Vec<i32> {
    let columns: Vec<Vec<i32>> = (0..groups)
        .map(|group| {
            let column = zeros.iter().skip(group).step_by(groups);
            pack_words(column.map(|zero| *zero as u32), bits)
        })
        .collect();
    let rows = columns[0].len();
    (0..rows)
        .flat_map(|row| columns.iter().map(move |column| column[row]))
        .collect()
}
