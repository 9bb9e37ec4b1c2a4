//! The GPTQ layout, version 1: codes packed along the inputs, zeros along the outputs and stored one too small, FP16 scales, a group a row.

use std::collections::BTreeMap;

use half::f16;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::compressed_tensors::{group_index, input_of, unsigned};
use super::{Exported, pack_words, words_to_bytes};
use crate::artifact::weights::Tensor;
use crate::calibrate::quantisers::Recipe;
use crate::error::{Error, Result};
use crate::quant::{ActivationFormat, QuantisedWeight, Scheme, WeightFormat};

/// Refuses a recipe that the layout cannot hold.
///
/// # Errors
/// What to write instead.
pub fn check(recipe: Recipe) -> Result<()> {
    shape(recipe.scheme).map(|_| ())
}

/// `quantization_config`; linears of another scheme than the most common one are overridden by name.
///
/// # Errors
/// A scheme that the layout cannot hold.
pub fn config(linears: &BTreeMap<String, Exported>) -> Result<Value> {
    let mut counts: BTreeMap<(u32, i64), usize> = BTreeMap::new();
    let mut symmetric = None;
    for exported in linears.values() {
        let (bits, group, sym) = shape(exported.scheme)?;
        if symmetric.is_some_and(|symmetric| symmetric != sym) {
            return Err(Error::plan(
                "the GPTQ layout holds symmetric or asymmetric weights, not both: use compressed-tensors",
            ));
        }
        symmetric = Some(sym);
        *counts.entry((bits, group)).or_default() += 1;
    }
    let common = counts.iter().max_by_key(|(_, count)| **count);
    let (bits, group) = common.map_or((4, 128), |(shape, _)| *shape);
    let ordered = linears
        .values()
        .any(|exported| exported.linear.weight.input_order.is_some());
    let mut config = json!({
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric.unwrap_or(true),
        "desc_act": ordered,
        "true_sequential": true,
        "damp_percent": 0.01,
        "lm_head": false,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": [format!("mixquant:{}", env!("CARGO_PKG_VERSION"))]},
    });
    let mut dynamic = serde_json::Map::new();
    for (name, exported) in linears {
        let (own_bits, own_group, _) = shape(exported.scheme)?;
        if (own_bits, own_group) != (bits, group) {
            let pattern = format!("+:^{}$", name.replace('.', "\\."));
            dynamic.insert(pattern, json!({"bits": own_bits, "group_size": own_group}));
        }
    }
    if !dynamic.is_empty() {
        config["dynamic"] = Value::Object(dynamic);
    }
    Ok(config)
}

/// Bits, group size (-1 for one a channel) and symmetry.
fn shape(scheme: Scheme) -> Result<(u32, i64, bool)> {
    match (scheme.weights, scheme.activations) {
        (WeightFormat::Int4 { group, symmetric }, ActivationFormat::Bf16) => {
            let group = group.and_then(|group| i64::try_from(group).ok());
            Ok((4, group.unwrap_or(-1), symmetric))
        }
        (WeightFormat::Int8, ActivationFormat::Bf16) => Ok((8, -1, true)),
        _ => Err(Error::plan(format!(
            "the GPTQ layout cannot hold {scheme}: use compressed-tensors, or a W4A16 scheme or W8A16"
        ))),
    }
}

/// The tensors of one linear.
///
/// # Errors
/// A scheme or shape that the layout cannot hold.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a linear has far fewer than 2^31 groups"
)]
pub fn tensors(exported: &Exported) -> Result<Vec<Tensor>> {
    let (bits, _, _) = shape(exported.scheme)?;
    let (name, weight) = (&exported.linear.name, &exported.linear.weight);
    let (out, inputs, groups) = (weight.out_features, weight.in_features, weight.groups());
    let per_word = (32 / bits) as usize;
    if !out.is_multiple_of(per_word) || !inputs.is_multiple_of(per_word) {
        return Err(Error::model(format!(
            "{name}: [{out}, {inputs}] does not fill whole words of {per_word} codes, which the GPTQ layout needs: use compressed-tensors"
        )));
    }
    let order = group_index(weight).unwrap_or_else(|| {
        (0..inputs)
            .map(|input| (input / weight.group) as i32)
            .collect()
    });
    let scales = (0..groups).flat_map(|group| {
        (0..out)
            .flat_map(move |row| f16::from_f32(weight.scales[row * groups + group]).to_le_bytes())
    });
    let tensor = |ending: &str, dtype, shape, data| Tensor {
        name: format!("{name}.{ending}"),
        dtype,
        shape,
        data,
    };
    Ok(vec![
        tensor(
            "qweight",
            Dtype::I32,
            vec![inputs / per_word, out],
            words_to_bytes(&codes(weight, bits)),
        ),
        tensor(
            "qzeros",
            Dtype::I32,
            vec![groups, out / per_word],
            words_to_bytes(&zeros(weight, bits)),
        ),
        tensor("scales", Dtype::F16, vec![groups, out], scales.collect()),
        tensor("g_idx", Dtype::I32, vec![inputs], words_to_bytes(&order)),
    ])
}

/// `[in / codes a word, out]`.
fn codes(weight: &QuantisedWeight, bits: u32) -> Vec<i32> {
    let (out, inputs) = (weight.out_features, weight.in_features);
    let words = inputs / (32 / bits) as usize;
    let mut turned = vec![0; words * out];
    let mut row_codes = vec![0_u32; inputs];
    for row in 0..out {
        for column in 0..inputs {
            row_codes[input_of(weight, column)] = unsigned(weight, row, column);
        }
        for (index, word) in pack_words(row_codes.iter().copied(), bits)
            .into_iter()
            .enumerate()
        {
            turned[index * out + row] = word;
        }
    }
    turned
}

/// `[groups, out / codes a word]`, each zero one too small, as version 1 has it.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "zeros of 4 and 8 bits"
)]
fn zeros(weight: &QuantisedWeight, bits: u32) -> Vec<i32> {
    let groups = weight.groups();
    let middle = 1 << (bits - 1);
    let mask = (1_u32 << bits) - 1;
    (0..groups)
        .flat_map(|group| {
            let stored = (0..weight.out_features).map(|row| {
                let zero = weight
                    .zeros
                    .as_ref()
                    .map_or(middle, |zeros| zeros[row * groups + group] as u32);
                zero.wrapping_sub(1) & mask
            });
            pack_words(stored.collect::<Vec<_>>(), bits)
        })
        .collect()
}
