//! From when live traffic is no longer what calibration saw, from `spec.drift`, in percent, prompts and seconds.

use mixquant_crds::drift::DriftAction;
use mixquant_crds::{Decimal, KvPrecision, MixQuantServiceSpec, PrefillScheme, WeightCopies};
use serde::Serialize;

use super::Problems;

/// What is watched.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Drift {
    /// Whether a crossed bound opens a recalibration.
    pub recalibrates: bool,
    /// Percent.
    pub max_activations: Option<f64>,
    /// Percent.
    pub max_kv: Option<f64>,
    /// Percent.
    pub max_fallbacks: Option<f64>,
    /// Percent.
    pub max_length_shift: Option<f64>,
    /// Fewer prompts say nothing.
    pub min_prompts: u64,
    /// Seconds of traffic that is looked at.
    pub window: u32,
    /// Seconds between recalibrations at least.
    pub cool_down: u32,
    /// Seconds between recalibrations at most.
    pub every: Option<u32>,
}

pub(super) fn drift(spec: &MixQuantServiceSpec, problems: &mut Problems) -> Option<Drift> {
    let drift = spec.drift.as_ref()?;
    let precision = &spec.precision;
    problems.require(
        drift.max_valve_fallback_percent.is_none()
            || (precision.prefill.scheme == PrefillScheme::W8A8
                && precision.weight_copies != Some(WeightCopies::Single)),
        "drift.maxValveFallbackPercent watches a quantised prefill in front of a precise decode: leave it out with prefill.scheme Precise and with weightCopies Single",
    );
    problems.require(
        drift.max_kv_beyond_range_percent.is_none()
            || precision.kv_cache.default != KvPrecision::BF16,
        "drift.maxKvBeyondRangePercent watches a quantised cache, and kvCache.default is BF16: leave it out",
    );
    let mut percent = |field: &str, text: &Option<Decimal>| {
        let text = text.as_ref();
        text.map(|text| problems.decimal(&format!("drift.{field}"), text))
    };
    let bounds = [
        percent(
            "maxActivationsBeyondRangePercent",
            &drift.max_activations_beyond_range_percent,
        ),
        percent(
            "maxKvBeyondRangePercent",
            &drift.max_kv_beyond_range_percent,
        ),
        percent("maxValveFallbackPercent", &drift.max_valve_fallback_percent),
        percent(
            "maxPromptLengthShiftPercent",
            &drift.max_prompt_length_shift_percent,
        ),
    ];
    let valid = Drift {
        recalibrates: drift.action == DriftAction::Recalibrate,
        max_activations: bounds[0],
        max_kv: bounds[1],
        max_fallbacks: bounds[2],
        max_length_shift: bounds[3],
        min_prompts: u64::try_from(drift.min_prompts).unwrap_or(0),
        window: problems.seconds("drift.window", &drift.window),
        cool_down: problems.seconds("drift.coolDown", &drift.cool_down),
        every: (drift.recalibrate_every.as_ref())
            .map(|span| problems.seconds("drift.recalibrateEvery", span)),
    };
    problems.require(
        valid.min_prompts >= 1 && valid.window >= 60,
        "drift needs minPrompts of at least 1 and a window of at least 1m",
    );
    problems.require(
        valid
            .every
            .is_none_or(|every| valid.recalibrates && every >= valid.cool_down),
        "drift.recalibrateEvery needs action Recalibrate and must not be shorter than drift.coolDown",
    );
    Some(valid)
}
