//! The W8A8 copy as safetensors files with compressed-tensors names (`int-quantized`): `<linear>.weight` I8 `[out, in]`, `<linear>.weight_scale` F32 `[out, 1]`.
//!
//! Pure: bytes in, tensors out and back. Shapes against a model are checked where the copy is attached to one.

use std::collections::BTreeMap;

use bytemuck::cast_slice;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::quant::{QuantisedLinear, QuantisedLinears};

/// A file is closed once its weights reach so many bytes, so that neither side holds much more than one file beside the copy itself.
const SHARD_BYTES: usize = 256 << 20;

const WEIGHT: &str = ".weight";
const SCALE: &str = ".weight_scale";

/// The linears of each file, in the model's order.
pub fn shards(linears: &QuantisedLinears) -> Vec<Vec<&QuantisedLinear>> {
    let mut shards: Vec<Vec<&QuantisedLinear>> = Vec::new();
    let mut bytes = SHARD_BYTES;
    for linear in linears {
        if bytes >= SHARD_BYTES {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += linear.weight.len();
        shards
            .last_mut()
            .expect("the first round pushes one")
            .push(linear);
    }
    shards
}

/// What all files together take, nearly.
pub fn expected_bytes(linears: &QuantisedLinears) -> u64 {
    const HEADER: usize = 256;
    linears
        .iter()
        .map(|linear| (linear.weight.len() + 4 * linear.scale.len() + HEADER) as u64)
        .sum()
}

/// One file. The same tensors give the same bytes.
pub fn encode(shard: &[&QuantisedLinear]) -> Vec<u8> {
    let scales: Vec<Vec<u8>> = shard
        .iter()
        .map(|linear| {
            linear
                .scale
                .iter()
                .flat_map(|scale| scale.to_le_bytes())
                .collect()
        })
        .collect();
    let tensors = shard.iter().zip(&scales).flat_map(|(linear, scale)| {
        let weight = TensorView::new(
            Dtype::I8,
            vec![linear.out_features, linear.in_features],
            cast_slice(&linear.weight),
        );
        let scale = TensorView::new(Dtype::F32, vec![linear.out_features, 1], scale);
        [(WEIGHT, weight), (SCALE, scale)].map(|(suffix, view)| {
            (
                format!("{}{suffix}", linear.name),
                view.expect("a linear's data fits its shape"),
            )
        })
    });
    safetensors::serialize(tensors, None).expect("tensors of one model have a small header")
}

/// The linears of one file.
///
/// # Errors
/// What is wrong with which tensor, without the file's name.
pub fn decode(bytes: &[u8]) -> Result<Vec<QuantisedLinear>, String> {
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| format!("not a whole safetensors file ({error})"))?;
    let mut scales: BTreeMap<String, TensorView<'_>> = BTreeMap::new();
    let mut weights: BTreeMap<String, TensorView<'_>> = BTreeMap::new();
    for (name, view) in file.iter() {
        if let Some(linear) = name.strip_suffix(SCALE) {
            scales.insert(linear.to_owned(), view);
        } else if let Some(linear) = name.strip_suffix(WEIGHT) {
            weights.insert(linear.to_owned(), view);
        } else {
            return Err(format!(
                "the tensor {} is neither a weight nor a scale",
                shorten(name)
            ));
        }
    }
    let linears = weights.into_iter().map(|(name, weight)| {
        let scale = scales
            .remove(&name)
            .ok_or_else(|| format!("{}{WEIGHT} has no scale", shorten(&name)))?;
        linear(name, &weight, &scale)
    });
    let linears = linears.collect::<Result<Vec<_>, String>>()?;
    match scales.keys().next() {
        Some(name) => Err(format!("{}{SCALE} has no weight", shorten(name))),
        None => Ok(linears),
    }
}

/// Layer by layer, and in a layer as the computation goes: the order that the model quantises in.
pub fn model_order(linears: &mut [QuantisedLinear]) {
    const WITHIN: [&str; 7] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];
    linears.sort_by_cached_key(|linear| {
        let layer = linear
            .name
            .split('.')
            .find_map(|part| part.parse::<usize>().ok());
        let place = WITHIN
            .iter()
            .position(|suffix| linear.name.ends_with(suffix));
        (layer, place, linear.name.clone())
    });
}

fn linear(
    name: String,
    weight: &TensorView<'_>,
    scale: &TensorView<'_>,
) -> Result<QuantisedLinear, String> {
    let &[out_features, in_features] = weight.shape() else {
        return Err(format!(
            "{}{WEIGHT} has the shape {:?}, not [out, in]",
            shorten(&name),
            weight.shape()
        ));
    };
    if weight.dtype() != Dtype::I8 {
        return Err(format!(
            "{}{WEIGHT} is {:?}, not I8",
            shorten(&name),
            weight.dtype()
        ));
    }
    if scale.dtype() != Dtype::F32 || scale.shape() != [out_features, 1] {
        return Err(format!(
            "{}{SCALE} is {:?} {:?}, not F32 [{out_features}, 1]",
            shorten(&name),
            scale.dtype(),
            scale.shape()
        ));
    }
    let (scales, _) = scale.data().as_chunks::<4>();
    Ok(QuantisedLinear {
        name,
        out_features,
        in_features,
        weight: cast_slice(weight.data()).to_vec(),
        scale: scales
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect(),
    })
}

/// Names come from a file that nobody vouches for.
fn shorten(name: &str) -> String {
    name.chars()
        .take(100)
        .filter(|character| !character.is_control())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Vec<QuantisedLinear> {
        [
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.mlp.down_proj",
            "model.layers.10.self_attn.q_proj",
        ]
        .map(|name| {
            QuantisedLinear::from_rows(name.into(), &[1.0, -2.0, 3.0, 0.5, 0.25, -0.125], 2, 3)
        })
        .into()
    }

    #[test]
    fn what_is_encoded_is_decoded_in_the_models_order() {
        let linears = QuantisedLinears::from_tensors(example()).unwrap();
        let shards = shards(&linears);
        assert_eq!(shards.len(), 1);
        let mut read = decode(&encode(&shards[0])).unwrap();
        model_order(&mut read);
        assert_eq!(read, example());
    }

    #[test]
    fn a_file_that_is_cut_or_has_other_tensors_is_refused() {
        let example = example();
        let bytes = encode(&example.iter().collect::<Vec<_>>());
        for length in [0, 4, 8, 20, bytes.len() - 1] {
            assert!(
                decode(&bytes[..length])
                    .unwrap_err()
                    .contains("not a whole safetensors file")
            );
        }
        for (name, dtype, shape, wanted) in [
            ("x.weight", Dtype::I8, vec![2, 2], "x.weight has no scale"),
            (
                "x.weight_scale",
                Dtype::U8,
                vec![4, 1],
                "x.weight_scale has no weight",
            ),
            ("x.bias", Dtype::I8, vec![4], "x.bias is neither"),
        ] {
            let view = TensorView::new(dtype, shape, &[1, 2, 3, 4]).unwrap();
            let file = safetensors::serialize([(name, view)], None).unwrap();
            assert!(decode(&file).unwrap_err().contains(wanted));
        }
        let (weight, scale) = (
            TensorView::new(Dtype::I8, vec![4], &[1; 4]).unwrap(),
            TensorView::new(Dtype::F32, vec![1], &[1; 4]).unwrap(),
        );
        let file = safetensors::serialize([("x.weight", weight), ("x.weight_scale", scale)], None)
            .unwrap();
        assert!(decode(&file).unwrap_err().contains("not [out, in]"));
    }
}
