//! A quantised copy as safetensors files, after compressed-tensors' names: a linear's tensors are its name with one of the endings below.
//!
//! | ending | type and shape | of |
//! | --- | --- | --- |
//! | `.weight` | I8 or `F8_E4M3` `[out, in]` | INT8, FP8 |
//! | `.weight_packed` | U8 `[out, ceil(in / 2)]`, even columns low | INT4, tables |
//! | `.weight_shape` | I64 `[2]`: out, in | INT4, tables |
//! | `.weight_table` | F32 `[out, 16]` | tables |
//! | `.weight_scale`, `.weight_zero_point` | F32 `[out / rows, in / columns]`, rounded up | all; fitted zeros |
//! | `.weight_block` | I64 `[2]`: rows and columns that share a scale | all but one scale a channel |
//! | `.weight_order` | U32 `[in]` | columns sorted by group |
//! | `.input_smoothing` | F32 `[in]` | what inputs are divided by |
//!
//! Pure: bytes in, tensors out and back. Shapes against a model are checked where the copy is attached to one.

use std::collections::BTreeMap;

use bytemuck::cast_slice;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::quant::weight::TABLE;
use crate::quant::{Codes, QuantisedLinear, QuantisedLinears, QuantisedWeight};

/// A file is closed once its weights reach so many bytes, so that neither side holds much more than one file beside the copy itself.
const SHARD_BYTES: usize = 256 << 20;

const WEIGHT: &str = "weight";
const PACKED: &str = "weight_packed";
const SHAPE: &str = "weight_shape";
const TABLES: &str = "weight_table";
const SCALE: &str = "weight_scale";
const ZERO: &str = "weight_zero_point";
const BLOCK: &str = "weight_block";
const ORDER: &str = "weight_order";
const SMOOTHING: &str = "input_smoothing";
const ENDINGS: [&str; 9] = [
    WEIGHT, PACKED, SHAPE, TABLES, SCALE, ZERO, BLOCK, ORDER, SMOOTHING,
];

/// The linears of each file, in the model's order.
pub fn shards(linears: &QuantisedLinears) -> Vec<Vec<&QuantisedLinear>> {
    let mut shards: Vec<Vec<&QuantisedLinear>> = Vec::new();
    let mut bytes = SHARD_BYTES;
    for linear in linears {
        if bytes >= SHARD_BYTES {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += linear.weight.bytes();
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
        .map(|linear| (linear.weight.bytes() + HEADER) as u64)
        .sum()
}

/// A tensor that is about to be written.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its numbers, little-endian, row-major.
    pub data: Vec<u8>,
}

/// One file. The same tensors give the same bytes.
pub fn encode(shard: &[&QuantisedLinear]) -> Vec<u8> {
    serialise(
        &shard
            .iter()
            .flat_map(|linear| tensors(linear))
            .collect::<Vec<_>>(),
    )
}

/// A safetensors file.
///
/// # Panics
/// When a tensor's data does not fit its shape.
pub fn serialise(tensors: &[Tensor]) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data);
        (
            tensor.name.as_str(),
            view.expect("a linear's data fits its shape"),
        )
    });
    safetensors::serialize(views, None).expect("tensors of one model have a small header")
}

fn tensors(linear: &QuantisedLinear) -> Vec<Tensor> {
    let weight = &linear.weight;
    let (out, inputs, groups) = (weight.out_features, weight.in_features, weight.groups());
    let mut tensors = Vec::new();
    let mut add = |ending: &str, dtype, shape: &[usize], data: Vec<u8>| {
        tensors.push(Tensor {
            name: format!("{}.{ending}", linear.name),
            dtype,
            shape: shape.to_vec(),
            data,
        });
    };
    let nibbles = [out, QuantisedWeight::nibble_row(inputs)];
    match &weight.codes {
        Codes::Int8(codes) => add(
            WEIGHT,
            Dtype::I8,
            &[out, inputs],
            cast_slice(codes).to_vec(),
        ),
        Codes::Fp8(codes) => add(WEIGHT, Dtype::F8_E4M3, &[out, inputs], codes.clone()),
        Codes::Int4(codes) => add(PACKED, Dtype::U8, &nibbles, codes.clone()),
        Codes::Lut4 { codes, tables } => {
            add(PACKED, Dtype::U8, &nibbles, codes.clone());
            add(
                TABLES,
                Dtype::F32,
                &[out, TABLE],
                floats(tables.as_flattened()),
            );
        }
    }
    if matches!(weight.codes, Codes::Int4(_) | Codes::Lut4 { .. }) {
        add(SHAPE, Dtype::I64, &[2], integers([out, inputs]));
    }
    let blocks = [out.div_ceil(weight.row_block), groups];
    add(SCALE, Dtype::F32, &blocks, floats(&weight.scales));
    if let Some(zeros) = &weight.zeros {
        add(ZERO, Dtype::F32, &blocks, floats(zeros));
    }
    if (weight.row_block, weight.group) != (1, inputs) {
        let sizes = integers([weight.row_block, weight.group]);
        add(BLOCK, Dtype::I64, &[2], sizes);
    }
    if let Some(order) = &weight.input_order {
        let order = order.iter().flat_map(|index| index.to_le_bytes()).collect();
        add(ORDER, Dtype::U32, &[inputs], order);
    }
    if let Some(scale) = &linear.input_scale {
        add(SMOOTHING, Dtype::F32, &[inputs], floats(scale));
    }
    tensors
}

/// Little-endian numbers.
pub fn floats(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn integers(values: [usize; 2]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| (*value as u64).to_le_bytes())
        .collect()
}

/// The linears of one file.
///
/// # Errors
/// What is wrong with which tensor, without the file's name.
pub fn decode(bytes: &[u8]) -> Result<Vec<QuantisedLinear>, String> {
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| format!("not a whole safetensors file ({error})"))?;
    let mut linears: BTreeMap<String, Parts<'_>> = BTreeMap::new();
    for (name, view) in file.iter() {
        let known = name
            .rsplit_once('.')
            .filter(|(_, ending)| ENDINGS.contains(ending));
        let Some((linear, ending)) = known else {
            return Err(format!(
                "the tensor {} is no part of a quantised linear",
                shorten(name)
            ));
        };
        let parts = linears.entry(linear.to_owned()).or_insert_with(|| Parts {
            name: linear.to_owned(),
            tensors: BTreeMap::new(),
        });
        parts.tensors.insert(ending.to_owned(), view);
    }
    linears.into_values().map(Parts::linear).collect()
}

/// The tensors of one linear, by ending; what is read is taken out.
struct Parts<'a> {
    name: String,
    tensors: BTreeMap<String, TensorView<'a>>,
}

impl Parts<'_> {
    fn linear(mut self) -> Result<QuantisedLinear, String> {
        let (codes, out_features, in_features) = self.codes()?;
        let [row_block, group] = match self.pair(BLOCK)? {
            Some(sizes) if sizes.iter().all(|size| *size > 0) => sizes,
            Some(_) => return Err(self.complain(BLOCK, "has a size of 0")),
            None => [1, in_features],
        };
        let blocks = [
            out_features.div_ceil(row_block),
            in_features.div_ceil(group.max(1)),
        ];
        let Some(scales) = self.floats(SCALE, &blocks)? else {
            return Err(self.complain(SCALE, "is missing"));
        };
        let zeros = self.floats(ZERO, &blocks)?;
        let input_order = self.take(ORDER, Dtype::U32, &[in_features])?.map(|data| {
            let (words, _) = data.as_chunks::<4>();
            words.iter().map(|word| u32::from_le_bytes(*word)).collect()
        });
        let input_scale = self.floats(SMOOTHING, &[in_features])?;
        if let Some(ending) = self.tensors.keys().next() {
            return Err(self.complain(ending, "does not go with its other tensors"));
        }
        Ok(QuantisedLinear {
            weight: QuantisedWeight {
                out_features,
                in_features,
                codes,
                row_block,
                group,
                scales,
                zeros,
                input_order,
            },
            name: self.name,
            input_scale,
        })
    }

    /// The codes and the shape `[out, in]`.
    fn codes(&mut self) -> Result<(Codes, usize, usize), String> {
        if let Some(weight) = self.tensors.remove(WEIGHT) {
            let &[out, inputs] = weight.shape() else {
                return Err(self.complain(
                    WEIGHT,
                    &format!("has the shape {:?}, not [out, in]", weight.shape()),
                ));
            };
            let codes = match weight.dtype() {
                Dtype::I8 => Codes::Int8(cast_slice(weight.data()).to_vec()),
                Dtype::F8_E4M3 => Codes::Fp8(weight.data().to_vec()),
                other => {
                    return Err(self.complain(WEIGHT, &format!("is {other:?}, not I8 or F8_E4M3")));
                }
            };
            return Ok((codes, out, inputs));
        }
        let Some([out, inputs]) = self.pair(SHAPE)? else {
            return Err(self.complain(WEIGHT, "is missing, and so is its shape"));
        };
        let row = QuantisedWeight::nibble_row(inputs);
        let Some(codes) = self.take(PACKED, Dtype::U8, &[out, row])? else {
            return Err(self.complain(PACKED, "is missing"));
        };
        let codes = match self.floats(TABLES, &[out, TABLE])? {
            Some(tables) => Codes::Lut4 {
                codes,
                tables: tables.as_chunks::<TABLE>().0.to_vec(),
            },
            None => Codes::Int4(codes),
        };
        Ok((codes, out, inputs))
    }

    /// The bytes of a tensor that must have this type and shape when it is there.
    fn take(
        &mut self,
        ending: &str,
        dtype: Dtype,
        shape: &[usize],
    ) -> Result<Option<Vec<u8>>, String> {
        let Some(view) = self.tensors.remove(ending) else {
            return Ok(None);
        };
        if view.dtype() != dtype || view.shape() != shape {
            let what = format!(
                "is {:?} {:?}, not {dtype:?} {shape:?}",
                view.dtype(),
                view.shape()
            );
            return Err(self.complain(ending, &what));
        }
        Ok(Some(view.data().to_vec()))
    }

    fn floats(&mut self, ending: &str, shape: &[usize]) -> Result<Option<Vec<f32>>, String> {
        let data = self.take(ending, Dtype::F32, shape)?;
        Ok(data.map(|data| {
            let (words, _) = data.as_chunks::<4>();
            words.iter().map(|word| f32::from_le_bytes(*word)).collect()
        }))
    }

    fn pair(&mut self, ending: &str) -> Result<Option<[usize; 2]>, String> {
        let Some(data) = self.take(ending, Dtype::I64, &[2])? else {
            return Ok(None);
        };
        let (words, _) = data.as_chunks::<8>();
        let number = |word: &[u8; 8]| usize::try_from(i64::from_le_bytes(*word)).ok();
        match words
            .iter()
            .map(number)
            .collect::<Option<Vec<_>>>()
            .as_deref()
        {
            Some(&[one, two]) => Ok(Some([one, two])),
            _ => Err(self.complain(ending, "has a negative size")),
        }
    }

    fn complain(&self, ending: &str, what: &str) -> String {
        format!("{}.{ending} {what}", shorten(&self.name))
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
    use crate::quant::{Scheme, round_to_nearest};

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
    fn every_kind_of_codes_survives_a_file() {
        let rows: Vec<f32> = (0..33_u8).map(|value| f32::from(value) - 16.0).collect();
        let formats = ["W8A8", "W4A16-g32", "W4A16-asym", "FP8", "LUT4"];
        let mut linears: Vec<QuantisedLinear> = formats
            .iter()
            .map(|name| QuantisedLinear {
                name: format!("model.layers.0.{name}"),
                weight: round_to_nearest(&rows, 11, name.parse::<Scheme>().unwrap().weights),
                input_scale: Some(vec![2.0; 11]),
            })
            .collect();
        linears[1].weight.input_order = Some((0..11).rev().collect());
        linears[0].weight.group = 4;
        linears[0].weight.scales = vec![1.0; 9];
        let mut read = decode(&encode(&linears.iter().collect::<Vec<_>>())).unwrap();
        read.sort_by_key(|linear| formats.iter().position(|name| linear.name.ends_with(name)));
        assert_eq!(read, linears);
        QuantisedLinears::from_tensors(read).unwrap();
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
            (
                "x.weight",
                Dtype::I8,
                vec![2, 2],
                "x.weight_scale is missing",
            ),
            (
                "x.weight_scale",
                Dtype::U8,
                vec![4, 1],
                "x.weight is missing",
            ),
            ("x.weight", Dtype::U8, vec![2, 2], "x.weight is U8, not I8"),
            ("x.weight_packed", Dtype::U8, vec![2, 2], "so is its shape"),
            ("x.bias", Dtype::I8, vec![4], "x.bias is no part"),
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
