//! AWQ checkpoints in the GEMM layout (AutoAWQ): `qweight`, `qzeros`, `scales` for each linear, always 4 bits.
//!
//! ```text
//! qweight  I32 [in, out / 8]        nibble n of word c is output channel 8c + ORDER[n]
//! qzeros   I32 [in / group, out / 8]   the same order, the zeros themselves
//! scales   F16 [in / group, out]    w[o][i] = scale[g][o] * (code[i][o] - zero[g][o])   with g = i / group
//! ```

use serde_json::Value;

use super::gptq::transposed;
use super::grid::{Strategy, zeros_unless};
use super::stored::{Tensors, is_dense, need};
use super::{flag, group_size, refuse, shown, text, texts, whole};
use crate::Result;
use crate::quant::weight::{Codes, QuantisedWeight};

/// The output channel, of eight, in each nibble of a word from the lowest bits on.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// What `quantization_config` says.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    group_size: Option<usize>,
    /// A linear whose name contains one of them is not quantised.
    unquantised: Vec<String>,
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    /// A layout that cannot be loaded, by name, with what would make it load.
    pub fn parse(config: &Value) -> Result<Self> {
        let version = text(config, "version").unwrap_or("gemm").to_lowercase();
        if version != "gemm" {
            return Err(refuse(&format!(
                "version {} is a layout that is not read: quantise with AutoAWQ's version GEMM",
                shown(&version)
            )));
        }
        let bits = whole(config, "bits", whole(config, "w_bit", 4)?)?;
        if bits != 4 {
            return Err(refuse(&format!(
                "bits is {bits}: AWQ's GEMM layout has 4, quantise with w_bit 4"
            )));
        }
        if !flag(config, "zero_point", true)? {
            return Err(refuse(
                "zero_point is false: AWQ's GEMM layout has zero points, quantise with zero_point true",
            ));
        }
        let field = if config.get("group_size").is_some() {
            "group_size"
        } else {
            "q_group_size"
        };
        Ok(Self {
            group_size: group_size(config, field, 128)?,
            unquantised: texts(config, "modules_to_not_convert")?,
        })
    }

    /// For people.
    pub fn name(&self) -> String {
        format!("awq 4-bit, {}", self.strategy().name())
    }

    fn strategy(&self) -> Strategy {
        self.group_size.map_or(Strategy::Channel, Strategy::Group)
    }

    /// Reads one linear; `None` when it is not quantised.
    ///
    /// # Errors
    /// The tensor that is missing, damaged or of another layout.
    pub fn read(
        &self,
        tensors: &dyn Tensors,
        name: &str,
        [out_features, in_features]: [usize; 2],
    ) -> Result<Option<QuantisedWeight>> {
        let skipped = self.unquantised.iter().any(|part| name.contains(part));
        let packed = format!("{name}.qweight");
        if skipped || tensors.find(&packed).is_none() && is_dense(tensors, name) {
            return Ok(None);
        }
        if !out_features.is_multiple_of(8) {
            return Err(refuse(&format!(
                "quant_method awq cannot pack {name}: its {out_features} outputs are no multiple of 8"
            )));
        }
        let grid = self.strategy().grid([out_features, in_features]);
        let [_, groups] = grid.blocks([out_features, in_features]);
        let words = need(tensors, &packed)?.words(&packed, [in_features, out_features / 8])?;
        let row_len = QuantisedWeight::nibble_row(in_features);
        let mut codes = vec![0; out_features * row_len];
        for input in 0..in_features {
            for column in 0..out_features / 8 {
                for (nibble, channel) in ORDER.iter().enumerate() {
                    let code = words.code(input, column, nibble, 4);
                    codes[(column * 8 + channel) * row_len + input / 2] |= code << (input % 2 * 4);
                }
            }
        }
        let zeros = format!("{name}.qzeros");
        let words = need(tensors, &zeros)?.words(&zeros, [groups, out_features / 8])?;
        let zero = |channel: usize, group: usize| {
            let nibble = ORDER.iter().position(|place| *place == channel % 8);
            let nibble = nibble.expect("the order has every channel of eight");
            f32::from(words.code(group, channel / 8, nibble, 4))
        };
        let zeros = (0..out_features).flat_map(|c| (0..groups).map(move |g| (c, g)));
        let zeros = zeros.map(|(channel, group)| zero(channel, group)).collect();
        let scales = format!("{name}.scales");
        let scales = need(tensors, &scales)?
            .of_shape(&scales, &[groups, out_features])?
            .floats(&scales)?;
        Ok(Some(QuantisedWeight {
            out_features,
            in_features,
            codes: Codes::Int4(codes),
            row_block: 1,
            group: grid.group,
            scales: transposed(&scales, groups, out_features),
            zeros: zeros_unless(8.0, zeros),
            input_order: None,
        }))
    }
}
