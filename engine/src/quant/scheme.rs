//! A weight scheme's name, such as `W4A16-g128`: what is stored of a linear and how its activations are rounded.
//!
//! The command line and reports speak it. Names are upper case as in the field; anything else is refused with what is understood.

use std::fmt;
use std::str::FromStr;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// Symmetric INT8, one scale an output channel.
    Int8,
    /// 4-bit integers.
    Int4 {
        /// Columns that share a scale; nothing for one scale an output channel.
        group: Option<usize>,
        /// Whether the zero is fixed at 8.
        symmetric: bool,
    },
    /// FP8 E4M3, one scale an output channel.
    Fp8,
    /// 16 values an output channel, as the weights lie.
    Lut4,
}

/// How the inputs of a linear are rounded before the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationFormat {
    /// BF16.
    Bf16,
    /// Symmetric INT8, one dynamic scale a token.
    Int8,
    /// FP8 E4M3, one dynamic scale a token.
    Fp8,
}

/// Both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// What is stored.
    pub weights: WeightFormat,
    /// What it is multiplied by.
    pub activations: ActivationFormat,
}

/// The group sizes that kernels and file formats have in common.
const GROUPS: [usize; 3] = [32, 64, 128];
const KNOWN: &str = "W8A8, W8A16, W4A16, W4A16-g32, W4A16-g64, W4A16-g128 (each W4A16 also with -asym), FP8 or LUT4";

impl Scheme {
    /// INT8 weights and activations.
    pub const W8A8: Self = Self {
        weights: WeightFormat::Int8,
        activations: ActivationFormat::Int8,
    };
    /// INT8 weights.
    pub const W8A16: Self = Self {
        weights: WeightFormat::Int8,
        activations: ActivationFormat::Bf16,
    };
    /// FP8 weights and activations.
    pub const FP8: Self = Self {
        weights: WeightFormat::Fp8,
        activations: ActivationFormat::Fp8,
    };
    /// A table of 16 values an output channel.
    pub const LUT4: Self = Self {
        weights: WeightFormat::Lut4,
        activations: ActivationFormat::Bf16,
    };

    /// Symmetric 4-bit weights in groups.
    pub const fn w4a16(group: usize) -> Self {
        Self {
            weights: WeightFormat::Int4 {
                group: Some(group),
                symmetric: true,
            },
            activations: ActivationFormat::Bf16,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.weights, self.activations) {
            (WeightFormat::Int8, ActivationFormat::Int8) => f.write_str("W8A8"),
            (WeightFormat::Int8, _) => f.write_str("W8A16"),
            (WeightFormat::Fp8, _) => f.write_str("FP8"),
            (WeightFormat::Lut4, _) => f.write_str("LUT4"),
            (WeightFormat::Int4 { group, symmetric }, _) => {
                f.write_str("W4A16")?;
                if let Some(group) = group {
                    write!(f, "-g{group}")?;
                }
                f.write_str(if symmetric { "" } else { "-asym" })
            }
        }
    }
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "W8A8" => return Ok(Self::W8A8),
            "W8A16" => return Ok(Self::W8A16),
            "FP8" => return Ok(Self::FP8),
            "LUT4" => return Ok(Self::LUT4),
            _ => {}
        }
        let unknown = || {
            let shown: String = text.chars().take(40).filter(|c| !c.is_control()).collect();
            format!("the scheme `{shown}` is not known: write {KNOWN}")
        };
        let rest = text.strip_prefix("W4A16").ok_or_else(unknown)?;
        let (rest, symmetric) = match rest.strip_suffix("-asym") {
            Some(rest) => (rest, false),
            None => (rest, true),
        };
        let group = match rest.strip_prefix("-g") {
            None if rest.is_empty() => None,
            None => return Err(unknown()),
            Some(number) => {
                let group = number.parse().map_err(|_| unknown())?;
                if !GROUPS.contains(&group) {
                    return Err(format!(
                        "the group size of `W4A16-g{group}` is {group}: write 32, 64 or 128"
                    ));
                }
                Some(group)
            }
        };
        Ok(Self {
            weights: WeightFormat::Int4 { group, symmetric },
            activations: ActivationFormat::Bf16,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_and_written_alike() {
        for name in [
            "W8A8",
            "W8A16",
            "W4A16",
            "W4A16-g32",
            "W4A16-g64",
            "W4A16-g128",
            "W4A16-g128-asym",
            "W4A16-asym",
            "FP8",
            "LUT4",
        ] {
            assert_eq!(name.parse::<Scheme>().unwrap().to_string(), name);
        }
        assert_eq!("W4A16-g64".parse(), Ok(Scheme::w4a16(64)));
    }

    #[test]
    fn what_is_not_a_scheme_is_refused_with_what_is() {
        for (text, wanted) in [
            ("", "write W8A8"),
            ("w8a8", "the scheme `w8a8` is not known"),
            ("W4A16-", "is not known"),
            ("W4A16-g", "is not known"),
            ("W4A16-g-32", "is not known"),
            ("W4A16-g99999999999999999999999", "is not known"),
            (
                "W4A16-g16",
                "the group size of `W4A16-g16` is 16: write 32, 64 or 128",
            ),
            ("W4A16-g0", "is 0: write"),
            ("W2A16", "is not known"),
            ("INT8\n", "the scheme `INT8` is not known"),
        ] {
            let error = text.parse::<Scheme>().unwrap_err();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
    }
}
