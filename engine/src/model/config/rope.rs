//! The rotary parameters of `config.json`, in its older and newer places.

use super::raw::{RawConfig, RawRope, RawRopes};
use super::{bad, shown};
use crate::Result;

/// The angles of one kind of layer.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeParameters {
    /// The base of the angles.
    pub theta: f64,
    /// How the angles are stretched for contexts longer than those of pre-training.
    pub scaling: RopeScaling,
}

/// Changes to the rotary angles.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// All positions are divided by `factor`.
    Linear {
        /// Above 0.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between are interpolated.
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled whole.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept; above `low_freq_factor`.
        high_freq_factor: f64,
        /// The context of pre-training, in tokens.
        original_max_position_embeddings: f64,
    },
    /// GGUF: the frequency of each pair is divided by its own factor; `[head_dim / 2]`, above 0.
    Factors(Vec<f32>),
}

/// Theta where `config.json` gives none.
const DEFAULT_THETA: f64 = 10_000.0;
/// Gemma 3's, of layers with a window.
const LOCAL_THETA: f64 = 10_000.0;
/// Kinds of layers in `rope_parameters`.
const GLOBAL: &str = "full_attention";
const LOCAL: &str = "sliding_attention";

/// The angles of layers that see the whole context, and of those with a window where they are others.
pub(super) fn check(
    raw: &RawConfig,
    own_local: bool,
) -> Result<(RopeParameters, Option<RopeParameters>)> {
    let kind = |name: &str| match &raw.rope_parameters {
        Some(RawRopes::All(rope)) => Some(rope.clone()),
        Some(RawRopes::Each(kinds)) => kinds.get(name).cloned(),
        None => None,
    };
    let global = kind(GLOBAL).or_else(|| raw.rope_scaling.clone());
    let theta = raw
        .rope_theta
        .or(global.as_ref().and_then(|rope| rope.rope_theta));
    let partial = raw
        .partial_rotary_factor
        .or(global.as_ref().and_then(|rope| rope.partial_rotary_factor));
    if let Some(factor) = partial.filter(|factor| (factor - 1.0).abs() > f64::EPSILON) {
        return Err(bad(&format!(
            "partial_rotary_factor {factor} is not supported: models whose whole heads are rotated are"
        )));
    }
    let global = RopeParameters {
        theta: check_theta("rope_theta", theta.unwrap_or(DEFAULT_THETA))?,
        scaling: check_scaling(global.as_ref())?,
    };
    if !own_local {
        return Ok((global, None));
    }
    let local = match &raw.rope_parameters {
        Some(RawRopes::Each(_)) => kind(LOCAL),
        Some(RawRopes::All(_)) | None => None,
    };
    let theta = raw
        .rope_local_base_freq
        .or(local.as_ref().and_then(|rope| rope.rope_theta))
        .unwrap_or(LOCAL_THETA);
    let local = RopeParameters {
        theta: check_theta("rope_local_base_freq", theta)?,
        scaling: check_scaling(local.as_ref())?,
    };
    Ok((global, Some(local)))
}

fn check_theta(name: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(bad(&format!(
            "{name} is {value}: it must be a finite number above 0, such as 10000"
        )))
    }
}

fn check_scaling(raw: Option<&RawRope>) -> Result<RopeScaling> {
    let Some(raw) = raw else {
        return Ok(RopeScaling::Default);
    };
    let positive = |name: &str, value: Option<f64>| match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(bad(&format!(
            "rope_scaling.{name} is {value}: it must be a finite number above 0"
        ))),
        None => Err(bad(&format!(
            "rope_scaling.{name} is missing: download the model again"
        ))),
    };
    match raw.rope_type.as_deref().or(raw.old_type.as_deref()) {
        None | Some("default") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: positive("factor", raw.factor)?,
        }),
        Some("llama3") => {
            let low_freq_factor = positive("low_freq_factor", raw.low_freq_factor)?;
            let high_freq_factor = positive("high_freq_factor", raw.high_freq_factor)?;
            if high_freq_factor <= low_freq_factor {
                return Err(bad(
                    "rope_scaling.high_freq_factor must be above low_freq_factor: download the model again",
                ));
            }
            Ok(RopeScaling::Llama3 {
                factor: positive("factor", raw.factor)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: positive(
                    "original_max_position_embeddings",
                    raw.original_max_position_embeddings,
                )?,
            })
        }
        Some(other) => Err(bad(&format!(
            "rope_scaling type {} is not supported: supported are default, linear, llama3",
            shown(other)
        ))),
    }
}
