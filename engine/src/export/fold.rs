//! Moves what inputs are divided by into what makes these inputs: the norm before, or the rows of the linear before.
//!
//! q, k, v read a norm's output, gate and up another's; o reads v's channels through attention, down reads up's through the product with gate. All
//! four commute with a scale a channel.

use std::collections::BTreeMap;

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::Value;

use crate::artifact::weights::Tensor;
use crate::error::{Error, Result};
use crate::quant::{Codes, QuantisedLinear, QuantisedLinears};

/// What stays unquantised and must be divided, by tensor name.
pub type Divisors = BTreeMap<String, Vec<f32>>;

/// What makes the input of a linear.
enum Source {
    Norm(&'static str),
    Rows(&'static str),
}

const SOURCES: [(&str, Source); 7] = [
    ("self_attn.q_proj", Source::Norm("input_layernorm.weight")),
    ("self_attn.k_proj", Source::Norm("input_layernorm.weight")),
    ("self_attn.v_proj", Source::Norm("input_layernorm.weight")),
    ("self_attn.o_proj", Source::Rows("self_attn.v_proj")),
    (
        "mlp.gate_proj",
        Source::Norm("post_attention_layernorm.weight"),
    ),
    (
        "mlp.up_proj",
        Source::Norm("post_attention_layernorm.weight"),
    ),
    ("mlp.down_proj", Source::Rows("mlp.up_proj")),
];

/// The linears with nothing beside their weights, and what else must be divided.
///
/// # Errors
/// Scales in a model whose blocks do not commute with them.
pub fn fold(
    linears: &QuantisedLinears,
    config: &Value,
) -> Result<(Vec<QuantisedLinear>, Divisors)> {
    let mut linears: BTreeMap<String, QuantisedLinear> = linears
        .iter()
        .map(|linear| (linear.name.clone(), linear.clone()))
        .collect();
    let mut divisors = Divisors::new();
    if linears.values().all(|linear| linear.input_scale.is_none()) {
        return Ok((linears.into_values().collect(), divisors));
    }
    let family = config["model_type"].as_str().unwrap_or_default();
    if !["llama", "mistral", "qwen2", "qwen3"].contains(&family) {
        return Err(Error::model(format!(
            "input scales cannot be folded into the norms of a {family} model: use the quantiser gptq or rtn"
        )));
    }
    let names: Vec<String> = linears.keys().cloned().collect();
    for name in names {
        let Some(scale) = linears
            .get_mut(&name)
            .and_then(|linear| linear.input_scale.take())
        else {
            continue;
        };
        let known = SOURCES
            .iter()
            .find_map(|(ending, source)| Some((name.strip_suffix(ending)?, source)));
        let Some((block, source)) = known else {
            return Err(Error::model(format!(
                "{name}: what makes its input is not known: use the quantiser gptq or rtn"
            )));
        };
        match source {
            Source::Norm(norm) => {
                divisors.insert(format!("{block}{norm}"), scale);
            }
            Source::Rows(rows) => {
                let rows = format!("{block}{rows}");
                let Some(linear) = linears.get_mut(&rows) else {
                    return Err(Error::model(format!(
                        "{rows} is missing: quantise all linears of a block"
                    )));
                };
                let by = by_row(&scale, linear.weight.out_features, config)?;
                divide_rows(linear, &by);
                divisors.insert(format!("{rows}.bias"), by);
            }
        }
    }
    Ok((linears.into_values().collect(), divisors))
}

/// The scale of each output of the linear before: its own, or the one that all query heads of its group share.
fn by_row(scale: &[f32], rows: usize, config: &Value) -> Result<Vec<f32>> {
    if scale.len() == rows {
        return Ok(scale.to_vec());
    }
    let number = |field: &str| config[field].as_u64().and_then(|n| usize::try_from(n).ok());
    let heads = number("num_attention_heads").unwrap_or(1).max(1);
    let head_dim = number("head_dim").unwrap_or(scale.len() / heads).max(1);
    let group = scale.len() / rows;
    let by: Vec<f32> = (0..rows)
        .map(|row| scale[row / head_dim * group * head_dim + row % head_dim])
        .collect();
    let tied = scale.iter().enumerate().all(|(input, scale)| {
        let row = input / (group * head_dim) * head_dim + input % head_dim;
        by[row].to_bits() == scale.to_bits()
    });
    if tied {
        Ok(by)
    } else {
        Err(Error::model(
            "query heads of one group divide their common value differently: quantise again",
        ))
    }
}

fn divide_rows(linear: &mut QuantisedLinear, by: &[f32]) {
    let groups = linear.weight.groups();
    if let Codes::Lut4 { tables, .. } = &mut linear.weight.codes {
        for (table, by) in tables.iter_mut().zip(by) {
            for value in table {
                *value /= by;
            }
        }
        return;
    }
    for (scales, by) in linear.weight.scales.chunks_exact_mut(groups).zip(by) {
        for scale in scales {
            *scale /= by;
        }
    }
}

/// A stored tensor, divided when something was folded into it.
///
/// # Errors
/// A tensor of another shape or type than the model's floats.
pub fn divide(mut tensor: Tensor, divisors: &Divisors) -> Result<Tensor> {
    let Some(by) = divisors.get(&tensor.name) else {
        return Ok(tensor);
    };
    if tensor.shape != [by.len()] {
        return Err(Error::model(format!(
            "{}: has the shape {:?}, not [{}]",
            tensor.name,
            tensor.shape,
            by.len()
        )));
    }
    // Divisors are powers of two: exact in every type unless it underflows.
    tensor.data = match tensor.dtype {
        Dtype::BF16 => each(
            &tensor.data,
            by,
            |bytes| bf16::from_le_bytes(bytes).to_f32(),
            |value| bf16::from_f32(value).to_le_bytes(),
        ),
        Dtype::F16 => each(
            &tensor.data,
            by,
            |bytes| f16::from_le_bytes(bytes).to_f32(),
            |value| f16::from_f32(value).to_le_bytes(),
        ),
        Dtype::F32 => each(&tensor.data, by, f32::from_le_bytes, f32::to_le_bytes),
        other => {
            return Err(Error::model(format!(
                "{}: is {other:?}, not BF16, F16 or F32",
                tensor.name
            )));
        }
    };
    Ok(tensor)
}

fn each<const N: usize>(
    data: &[u8],
    by: &[f32],
    read: impl Fn([u8; N]) -> f32,
    write: impl Fn(f32) -> [u8; N],
) -> Vec<u8> {
    let (numbers, _) = data.as_chunks::<N>();
    numbers
        .iter()
        .zip(by)
        .flat_map(|(bytes, by)| write(read(*bytes) / by))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn linear(name: &str, out: usize, inputs: usize, scale: Option<Vec<f32>>) -> QuantisedLinear {
        QuantisedLinear {
            input_scale: scale,
            ..QuantisedLinear::from_rows(name.into(), &vec![1.0; out * inputs], out, inputs)
        }
    }

    #[test]
    fn scales_move_into_norms_and_rows() {
        let linears = QuantisedLinears::from_tensors(vec![
            linear("b.self_attn.q_proj", 4, 2, Some(vec![2.0, 4.0])),
            linear("b.self_attn.v_proj", 2, 2, Some(vec![2.0, 4.0])),
            linear("b.self_attn.o_proj", 2, 4, Some(vec![0.5, 8.0, 0.5, 8.0])),
        ])
        .unwrap();
        let config = json!({"model_type": "llama", "num_attention_heads": 2, "head_dim": 2});
        let (folded, divisors) = fold(&linears, &config).unwrap();
        assert!(folded.iter().all(|linear| linear.input_scale.is_none()));
        assert_eq!(divisors["b.input_layernorm.weight"], [2.0, 4.0]);
        assert_eq!(divisors["b.self_attn.v_proj.bias"], [0.5, 8.0]);
        let v = folded
            .iter()
            .find(|linear| linear.name.ends_with("v_proj"))
            .unwrap();
        let before = linear("v", 2, 2, None).weight.scales;
        assert_eq!(v.weight.scales, [before[0] / 0.5, before[1] / 8.0]);
        let norm = Tensor {
            name: "b.input_layernorm.weight".into(),
            dtype: Dtype::BF16,
            shape: vec![2],
            data: [3.0, 3.0]
                .iter()
                .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                .collect(),
        };
        let divided = divide(norm, &divisors).unwrap();
        let expected: Vec<u8> = [1.5, 0.75]
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect();
        assert_eq!(divided.data, expected);
    }

    #[test]
    fn what_cannot_be_folded_is_refused_with_the_fix() {
        let scaled = linear("b.self_attn.q_proj", 4, 2, Some(vec![2.0, 4.0]));
        let linears = QuantisedLinears::from_tensors(vec![scaled]).unwrap();
        let error = fold(&linears, &json!({"model_type": "gemma2"})).unwrap_err();
        assert!(
            error.message.contains("gemma2") && error.message.contains("gptq"),
            "{error}"
        );
        let untied = vec![
            linear("b.self_attn.v_proj", 2, 2, None),
            linear("b.self_attn.o_proj", 2, 4, Some(vec![0.5, 8.0, 0.5, 4.0])),
        ];
        let config = json!({"model_type": "llama", "num_attention_heads": 2, "head_dim": 2});
        let error = fold(&QuantisedLinears::from_tensors(untied).unwrap(), &config).unwrap_err();
        assert!(error.message.contains("differently"), "{error}");
    }
}
