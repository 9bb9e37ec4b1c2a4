//! GPTQ checkpoints (`AutoGPTQ`, `GPTQModel`): `qweight`, `qzeros`, `scales`, `g_idx` for each linear.
//!
//! ```text
//! qweight  I32 [in * bits / 32, out]          codes of one output channel, along the inputs, the lowest bits first
//! qzeros   I32 [groups, out * bits / 32]      zeros along the outputs; version 1 stores zero - 1, version 2 the zero itself
//! scales   F16 [groups, out]                  w[o][i] = scale[g][o] * (code[i][o] - zero[g][o])   with g = g_idx[i]
//! g_idx    I32 [in]                           the group of each input (act-order); i / group_size where it is absent
//! ```

use serde_json::{Map, Value};

use super::grid::{Strategy, sort_by_group, zeros_unless};
use super::names::Rule;
use super::stored::{Tensors, Words, is_dense, need};
use super::{flag, group_size, refuse, shown, text, whole};
use crate::Result;
use crate::quant::weight::{Codes, QuantisedWeight};

/// What `quantization_config` (or `quantize_config.json`) says.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    scheme: Scheme,
    /// The first rule that means a linear changes its scheme.
    dynamic: Vec<(Rule, Override)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Scheme {
    bits: usize,
    group_size: Option<usize>,
    symmetric: bool,
    version: Version,
}

/// Whether `qzeros` are one less than the zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

#[derive(Debug, Clone, PartialEq)]
enum Override {
    /// Not quantised.
    Skip,
    Scheme(Scheme),
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    /// A layout that cannot be loaded, by name, with what would make it load.
    pub fn parse(config: &Value) -> Result<Self> {
        let version = match text(config, "checkpoint_format") {
            None | Some("gptq") => Version::One,
            Some("gptq_v2") => Version::Two,
            Some(other) => {
                return Err(refuse(&format!(
                    "checkpoint_format {} is not supported: supported are gptq and gptq_v2; quantise with GPTQModel's format=gptq",
                    shown(other)
                )));
            }
        };
        if flag(config, "is_marlin_format", false)? {
            return Err(refuse(
                "is_marlin_format is true: weights repacked for Marlin are not read, use the checkpoint in the gptq layout",
            ));
        }
        if let Some(other) = text(config, "pack_dtype").filter(|dtype| *dtype != "int32") {
            return Err(refuse(&format!(
                "pack_dtype {} is not supported: supported is int32",
                shown(other)
            )));
        }
        if config.get("bits").is_none() {
            return Err(refuse("bits is missing: download the model again"));
        }
        let scheme = Scheme {
            bits: 4,
            group_size: None,
            symmetric: true,
            version,
        }
        .changed_by(config)?;
        let dynamic = match config.get("dynamic") {
            None | Some(Value::Null | Value::Bool(false)) => Vec::new(),
            Some(Value::Object(rules)) => dynamic(rules, scheme)?,
            Some(_) => return Err(refuse("dynamic must map patterns to overrides")),
        };
        Ok(Self { scheme, dynamic })
    }

    /// For people.
    pub fn name(&self) -> String {
        let strategy = self
            .scheme
            .group_size
            .map_or(Strategy::Channel, Strategy::Group);
        format!("gptq {}-bit, {}", self.scheme.bits, strategy.name())
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
        let rule = self.dynamic.iter().find(|(rule, _)| rule.means(name));
        let scheme = match rule {
            Some((_, Override::Skip)) => return Ok(None),
            Some((_, Override::Scheme(scheme))) => *scheme,
            None => self.scheme,
        };
        let packed = format!("{name}.qweight");
        if tensors.find(&packed).is_none() && is_dense(tensors, name) {
            return Ok(None);
        }
        scheme.read(tensors, name, shape).map(Some)
    }
}

/// `{"+:pattern": overrides, "-:pattern": {}}`; a pattern without a sign overrides too.
fn dynamic(rules: &Map<String, Value>, scheme: Scheme) -> Result<Vec<(Rule, Override)>> {
    let rule = |(key, value): (&String, &Value)| {
        if let Some(pattern) = key.strip_prefix("-:") {
            return Ok((Rule::pattern("dynamic", pattern)?, Override::Skip));
        }
        let pattern = key.strip_prefix("+:").unwrap_or(key);
        let changed = Override::Scheme(scheme.changed_by(value)?);
        Ok((Rule::pattern("dynamic", pattern)?, changed))
    };
    rules.iter().map(rule).collect()
}

impl Scheme {
    fn changed_by(self, config: &Value) -> Result<Self> {
        let bits = whole(config, "bits", self.bits.try_into().unwrap_or(4))?;
        let own = self
            .group_size
            .map_or(-1, |size| i64::try_from(size).unwrap_or(i64::MAX));
        match bits {
            4 | 8 => Ok(Self {
                bits: usize::try_from(bits).expect("4 or 8"),
                group_size: group_size(config, "group_size", own)?,
                symmetric: flag(config, "sym", self.symmetric)?,
                version: self.version,
            }),
            other => Err(refuse(&format!(
                "bits {other} is not supported: supported are 4 and 8; quantise to one of them"
            ))),
        }
    }

    fn read(
        self,
        tensors: &dyn Tensors,
        name: &str,
        [out_features, in_features]: [usize; 2],
    ) -> Result<QuantisedWeight> {
        let per_word = 32 / self.bits;
        if !in_features.is_multiple_of(per_word) || !out_features.is_multiple_of(per_word) {
            return Err(refuse(&format!(
                "bits {} cannot pack {name} of the shape [{out_features}, {in_features}]: both must be multiples of {per_word}",
                self.bits
            )));
        }
        let strategy = self.group_size.map_or(Strategy::Channel, Strategy::Group);
        let grid = strategy.grid([out_features, in_features]);
        let [_, groups] = grid.blocks([out_features, in_features]);
        let packed = format!("{name}.qweight");
        let words =
            need(tensors, &packed)?.words(&packed, [in_features / per_word, out_features])?;
        let scales = format!("{name}.scales");
        let scales = need(tensors, &scales)?
            .of_shape(&scales, &[groups, out_features])?
            .floats(&scales)?;
        let zeros = format!("{name}.qzeros");
        let zeros = need(tensors, &zeros)?.words(&zeros, [groups, out_features / per_word])?;
        let weight = QuantisedWeight {
            out_features,
            in_features,
            codes: self.codes(words, out_features, in_features),
            row_block: 1,
            group: grid.group,
            scales: transposed(&scales, groups, out_features),
            zeros: self.zeros(zeros, groups, out_features),
            input_order: None,
        };
        let index = format!("{name}.g_idx");
        match tensors.find(&index) {
            None => Ok(weight),
            Some(stored) => sort_by_group(&index, &stored.ints(&index, in_features)?, weight),
        }
    }

    /// A word's bytes are codes in the order of the inputs already.
    fn codes(self, words: Words<'_>, out_features: usize, in_features: usize) -> Codes {
        let row_len = in_features * self.bits / 8;
        let mut bytes = vec![0; out_features * row_len];
        for row in 0..row_len / 4 {
            for channel in 0..out_features {
                bytes[channel * row_len + row * 4..][..4]
                    .copy_from_slice(&words.bytes(row, channel));
            }
        }
        codes_of(self.bits, bytes)
    }

    /// `[out, groups]` zeros; eight-bit ones are moved as the codes are.
    fn zeros(self, words: Words<'_>, groups: usize, out_features: usize) -> Option<Vec<f32>> {
        let per_word = 32 / self.bits;
        let stored = |group: usize, channel: usize| {
            words.code(group, channel / per_word, channel % per_word, self.bits)
        };
        let each = || (0..out_features).flat_map(|c| (0..groups).map(move |g| (g, c)));
        let middle = 1_u8 << (self.bits - 1);
        // A symmetric scheme has its zero in the middle: the data tell the version, and they are right where the configuration is not.
        let all = |value: u8| self.symmetric && each().all(|(g, c)| stored(g, c) == value);
        let version = match (all(middle - 1), all(middle)) {
            (true, _) => Version::One,
            (_, true) => Version::Two,
            (false, false) => self.version,
        };
        let mask = u8::MAX >> (8 - self.bits);
        let zero = |(g, c)| {
            let zero = match version {
                Version::One => stored(g, c).wrapping_add(1) & mask,
                Version::Two => stored(g, c),
            };
            f32::from(zero) - offset(self.bits)
        };
        let symmetric = f32::from(middle) - offset(self.bits);
        zeros_unless(symmetric, each().map(zero).collect())
    }
}

/// What is taken off unsigned 8-bit codes (and their zeros), so that they are signed bytes.
pub(super) const fn offset(bits: usize) -> f32 {
    if bits == 8 { 128.0 } else { 0.0 }
}

/// Codes from packed bytes, row by row: nibbles as they are, bytes moved to the signed range.
pub(super) fn codes_of(bits: usize, bytes: Vec<u8>) -> Codes {
    if bits == 4 {
        return Codes::Int4(bytes);
    }
    let mut bytes = bytes;
    for byte in &mut bytes {
        *byte ^= 0x80;
    }
    Codes::Int8(bytemuck::allocation::cast_vec(bytes))
}

/// `[groups, out]` to `[out, groups]`.
pub(super) fn transposed(values: &[f32], groups: usize, out_features: usize) -> Vec<f32> {
    (0..out_features)
        .flat_map(|channel| (0..groups).map(move |group| values[group * out_features + channel]))
        .collect()
}
