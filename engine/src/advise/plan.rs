//! The recommendation: the first scheme that fits and gains, as YAML for `spec.precision`, and the reasons in plain sentences.
//!
//! The order is the safe start first: INT8 prefill with a precise decode where both copies fit, then without a second copy, then INT8
//! alone. Four bits are recommended for weights only where nothing else fits, and for keys and values only where INT8 does not; neither
//! where the task cannot bear it.

use mixquant_crds::WeightCopies;
use serde::Serialize;

use super::quality::{Class, of_kv};
use super::report::bytes;
use super::roofline::break_even;
use super::scheme::{Kv, Prefill, SCHEMES, Scheme, Served};
use super::{Device, HEADROOM, Load, ModelFacts, Row, kv_bytes};

/// A prefill that is not at least so much faster is not worth a second arithmetic.
const WORTHWHILE: f64 = 1.1;

/// One plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Recommendation {
    /// The scheme's name.
    pub scheme: &'static str,
    /// How keys and values are kept.
    pub kv: Kv,
    /// Ready to stand under `spec.precision`.
    pub yaml: String,
}

/// How keys and values would be kept: the most precise that the task bears and that fits beside INT8 weights, or, where nothing does, beside
/// 4-bit ones.
pub(super) fn kv_for(model: &ModelFacts, device: &Device, load: &Load) -> Kv {
    let lightest = |four_bits: bool| {
        SCHEMES
            .iter()
            .filter(|scheme| scheme.served.is_some() && scheme.can_run(device))
            .filter(|scheme| four_bits || scheme.served != Some(Served::FourBits))
            .map(|scheme| scheme.weight_bytes(model))
            .fold(f64::INFINITY, f64::min)
    };
    let bears_mixed = of_kv(Kv::Mixed, load.task).class != Class::Unsafe;
    for weights in [lightest(false), lightest(true)] {
        let fits = |kv| HEADROOM * (weights + kv_bytes(model, load, kv)) <= device.memory_bytes;
        // BF16 is left to those who ask for it: 8 bits lose next to nothing and halve what decode reads.
        if fits(Kv::Int8) {
            return Kv::Int8;
        }
        if bears_mixed && fits(Kv::Mixed) {
            return Kv::Mixed;
        }
    }
    if bears_mixed { Kv::Mixed } else { Kv::Int8 }
}

fn find(rows: &[Row], served: Served) -> Option<&Row> {
    rows.iter().find(|row| row.scheme.served == Some(served))
}

fn fits(row: &Row, kv: Kv) -> bool {
    row.kv.iter().any(|fit| fit.kv == kv && fit.fits)
}

/// Whether the device reads prompts clearly faster with INT8 than with BF16.
fn gains(rows: &[Row]) -> bool {
    match (
        find(rows, Served::Precise),
        find(rows, Served::Quantised(WeightCopies::Dual)),
    ) {
        (Some(precise), Some(dual)) => precise.ttft_seconds >= WORTHWHILE * dual.ttft_seconds,
        _ => false,
    }
}

pub(super) fn recommend(
    rows: &[Row],
    model: &ModelFacts,
    device: &Device,
    load: &Load,
) -> Option<Recommendation> {
    let kv = kv_for(model, device, load);
    let [dual, made, single] = [
        WeightCopies::Dual,
        WeightCopies::OnTheFly,
        WeightCopies::Single,
    ]
    .map(Served::Quantised);
    let order: &[Served] = if gains(rows) {
        &[dual, made, Served::Precise, single, Served::FourBits]
    } else {
        &[Served::Precise, single, Served::FourBits]
    };
    // A copy that is made anew for each prompt must still pay.
    let pays = |row: &Row| {
        !row.scheme.scratch || break_even(row.scheme, &SCHEMES[0], model, device).is_some()
    };
    let row = order
        .iter()
        .filter_map(|served| find(rows, *served))
        .find(|row| fits(row, kv) && pays(row) && row.quality.class != Class::Unsafe)?;
    Some(Recommendation {
        scheme: row.scheme.name,
        kv,
        yaml: yaml(row.scheme.served?, kv, load),
    })
}

/// The YAML of `spec.precision`.
fn yaml(served: Served, kv: Kv, load: &Load) -> String {
    let (prefill, decode, copies) = match served {
        Served::Precise => ("{scheme: Precise}", "BF16", None),
        Served::Quantised(WeightCopies::Single) => ("{scheme: W8A8}", "W8A8", Some("Single")),
        Served::Quantised(WeightCopies::OnTheFly) => (SWITCHED, "BF16", Some("OnTheFly")),
        Served::Quantised(WeightCopies::Dual) => (SWITCHED, "BF16", Some("Dual")),
        Served::FourBits => ("{scheme: Precise}", "W4A8", None),
    };
    let mut lines = vec![
        format!("prefill: {prefill}"),
        format!("decode: {{scheme: {decode}}}"),
    ];
    if let Some(copies) = copies {
        lines.push(format!("weightCopies: {copies}"));
        if copies != "Single" {
            // An exact task has no use for an answer that is only likely the same.
            let max_kl = if load.task.is_exact() { "0.02" } else { "0.05" };
            lines.push(format!(
                "safetyValve: {{maxKl: \"{max_kl}\", minMargin: \"0.5\", shadowAuditPercent: 1}}"
            ));
        }
    }
    lines.push("kvCache:".to_owned());
    match kv {
        Kv::Bf16 | Kv::Int8 => {
            lines.push(format!("  {{mode: Uniform, default: {}}}", kv.name()));
        }
        Kv::Mixed => lines.extend(
            [
                "  mode: AttentionMixedPrecision",
                "  default: INT4",
                "  important: INT8",
                "  importance: {quantile: \"0.90\", sinkTokens: 4, recentTokens: 64}",
            ]
            .map(str::to_owned),
        ),
    }
    lines.join("\n")
}

/// The threshold is measured by the calibration Job.
const SWITCHED: &str = "{scheme: W8A8, minPromptTokens: Auto}";

pub(super) fn why(
    rows: &[Row],
    recommendation: Option<&Recommendation>,
    model: &ModelFacts,
    device: &Device,
    load: &Load,
) -> Vec<String> {
    let mut why = Vec::new();
    let kv = kv_for(model, device, load);
    for row in rows.iter().filter(|row| !fits(row, kv)) {
        let needed = row.kv.iter().find(|fit| fit.kv == kv);
        let needed = needed.map_or(0.0, |fit| fit.needed_bytes);
        why.push(format!(
            "{} does not fit: it needs {} with {} keys and values, {} has {}",
            row.scheme.name,
            bytes(needed),
            kv.name(),
            device.name,
            bytes(device.memory_bytes)
        ));
    }
    why.extend(speed(rows, model, device));
    why.extend(quality(rows, kv, load));
    let only_unsafe = recommendation.is_none()
        && rows
            .iter()
            .any(|row| row.scheme.served.is_some() && fits(row, kv));
    why.push(if only_unsafe {
        format!(
            "only 4 bits fit {}, which {} does not bear: take a smaller model, fewer or shorter sequences, or a device with more memory",
            device.name,
            load.task.word()
        )
    } else {
        chosen(recommendation, device)
    });
    why
}

fn speed(rows: &[Row], model: &ModelFacts, device: &Device) -> Vec<String> {
    let mut why = Vec::new();
    if let Some(dual) = find(rows, Served::Quantised(WeightCopies::Dual)) {
        why.push(match break_even(dual.scheme, &SCHEMES[0], model, device) {
            Some(tokens) if gains(rows) => format!(
                "INT8 reads prompts faster here, from about {tokens} tokens on where a switch pays for its safety valve; minPromptTokens Auto measures that"
            ),
            _ => "INT8 reads prompts hardly faster than BF16 here: no switch".to_owned(),
        });
    } else {
        why.push(format!("{} has no INT8 arithmetic: no switch", device.name));
    }
    why.push("W4A16 never for prefill speed: 4-bit weights are widened to BF16 for every product, 0.96x of BF16 (Mix-Quant, Fig. 1)".to_owned());
    if rows.iter().any(|row| row.scheme.prefill == Prefill::Fp8) {
        why.push("FP8 is listed for comparison: this engine's plans quantise to INT8".to_owned());
    }
    why
}

fn quality(rows: &[Row], kv: Kv, load: &Load) -> Vec<String> {
    let mut why = Vec::new();
    let unsafe_rows = rows
        .iter()
        .filter(|row| row.quality.class == Class::Unsafe)
        .map(|row| row.scheme.name);
    for name in unsafe_rows {
        why.push(format!(
            "{} not at 4 bits: {name} is left out",
            load.task.word()
        ));
    }
    let mixed = of_kv(Kv::Mixed, load.task);
    if kv == Kv::Int8 && mixed.class == Class::Unsafe {
        why.push(format!(
            "keys and values at INT8, not INT4: {}",
            mixed.source
        ));
    }
    why
}

fn chosen(recommendation: Option<&Recommendation>, device: &Device) -> String {
    let served = |scheme: &Scheme| recommendation.is_some_and(|found| found.scheme == scheme.name);
    match SCHEMES
        .iter()
        .find(|scheme| served(scheme))
        .and_then(|scheme| scheme.served)
    {
        None => format!(
            "nothing fits {}: take a smaller model, fewer or shorter sequences, or a device with more memory",
            device.name
        ),
        Some(Served::Precise) => "BF16 is recommended: it fits and nothing here is faster by enough".to_owned(),
        Some(Served::Quantised(WeightCopies::Dual)) => {
            "INT8 for prompts beside BF16 for tokens is the safe start: both copies fit, every token is generated precisely, and the valve guards the switch".to_owned()
        }
        Some(Served::Quantised(WeightCopies::OnTheFly)) => {
            "two copies do not fit: the INT8 form of a layer is made while the prompt is read".to_owned()
        }
        Some(Served::Quantised(WeightCopies::Single)) => {
            "only one INT8 copy fits: it serves prompts and tokens, so there is no precise pass for a safety valve to compare with; verification and the rollout's gates judge it".to_owned()
        }
        Some(Served::FourBits) => {
            "only 4 bits fit: W4A8 reads prompts and generates tokens from one 4-bit copy that calibration makes, so there is no precise pass for a safety valve to compare with; some inputs lose visibly: verification and the rollout's gates judge it, and a smaller model at INT8 may answer better".to_owned()
        }
    }
}
