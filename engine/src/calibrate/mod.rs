//! Calibration: measures attention, quantises the copies for prefill and decode, writes the artifact and verifies it, in one run.
//!
//! The same model, data and plan give the same artifact digest, except that a threshold which is to be measured depends on the machine.
//! `cli::calibrate` calls it; it prints nothing.

pub mod allocate;
pub mod checkpoint;
pub mod collect;
pub mod quantise;
pub mod quantisers;
pub mod sensitivity;
pub mod statistics;

use std::path::{Path, PathBuf};

use mixquant_crds::names::{
    ARTIFACT_ATTENTION, ARTIFACT_GOLDEN, ARTIFACT_PLAN, ARTIFACT_PROBE, ARTIFACT_RANGES,
};
use mixquant_crds::{
    CalibrationReport, DecodeScheme, Digest, KvCacheMode, KvCachePlan, KvPrecision, PrecisionPlan,
    PrefillPlan, PrefillScheme, WeightCopies,
};
use serde::Serialize;

use self::checkpoint::Checkpoints;
use self::collect::Collector;
use self::quantise::{Assignment, quantise};
use self::quantisers::{Quantiser, Recipe};
use crate::artifact::golden::Golden;
use crate::artifact::manifest::Phase;
use crate::artifact::probe::Probes;
use crate::artifact::store::{self, Draft, Published, write_report};
use crate::artifact::{Artifact, Check, weights};
use crate::dataset::mix::{Mix, mixed};
use crate::dataset::{Dataset, Window, sample, sample_of_round};
use crate::drift::{Ranges, Seen};
use crate::error::{Error, Result};
use crate::model::{
    Chunk, Copies, Importance, LogitRows, Model, Pass, QuantisedLinears, Workspace, decode_scheme,
};
use crate::progress::Progress;
use crate::quant::Scheme;
use crate::tokenizer::Tokenizer;
use crate::valve::break_even::{Threshold, resolve};
use crate::verify;

/// Everything that `calibrate` is told.
#[derive(Debug, Clone)]
pub struct Options {
    /// The Hugging Face directory.
    pub model: PathBuf,
    /// The calibration texts.
    pub data: PathBuf,
    /// Where artifact folders go.
    pub out: PathBuf,
    /// What to make.
    pub plan: PrecisionPlan,
    /// Texts to read.
    pub samples: usize,
    /// How much of each kind of text; spread over the file without it.
    pub mix: Option<Mix>,
    /// Tokens of a text at most.
    pub sequence_length: usize,
    /// The evaluation texts. Without them the calibration texts that were not read are used.
    pub evaluation_data: Option<PathBuf>,
    /// Windows to verify on; without a number 16, or all where there are fewer.
    pub evaluation_samples: Option<usize>,
    /// Tokens of an evaluation window.
    pub evaluation_sequence_length: usize,
    /// How the prefill copy is made.
    pub quantiser: Quantiser,
    /// How decode's own copy is made; without a name as suits its scheme.
    pub decode_quantiser: Option<Quantiser>,
    /// Refuse any other model.
    pub expected_model: Option<Digest>,
    /// Which of the texts are read, where there are more than `samples`: 0, and one more with each recalibration.
    pub round: usize,
    /// The service that the artifact is made for.
    pub owner: Option<String>,
    /// Artifacts that this service needs no more.
    pub remove: Vec<Digest>,
    /// Instead of the plan's `minPromptTokens`: another number, or the break-even that is measured here and pinned in the plan.
    pub min_prompt_tokens: Option<Threshold>,
}

/// Windows that the artifact is verified on when nobody says how many.
const DEFAULT_EVALUATION_SAMPLES: usize = 16;

/// The plan when none is given: what the custom resource's defaults say.
pub fn default_plan() -> PrecisionPlan {
    PrecisionPlan {
        prefill: PrefillPlan {
            scheme: PrefillScheme::W8A8,
            min_prompt_tokens: 512,
        },
        decode: DecodeScheme::BF16.into(),
        weight_copies: WeightCopies::Dual,
        kv_cache: KvCachePlan {
            mode: KvCacheMode::AttentionMixedPrecision,
            default: KvPrecision::INT4,
            important: KvPrecision::INT8,
            quantile: 0.9,
            sink_tokens: 4,
            recent_tokens: 64,
            block_size: 16,
        },
    }
}

/// Makes the artifact and says how far it is from the baseline.
///
/// # Errors
/// Model, data, plan or volume that cannot be used; then nothing is left of this run.
pub fn run(options: &Options, progress: &Progress) -> Result<CalibrationReport> {
    options.plan.check().map_err(Error::plan)?;
    let mut model = Model::open(&options.model)?;
    verify::expect_model(&model, options.expected_model.as_ref())?;
    let (texts, evaluation) = read_data(options, &model)?;
    if let Some(owner) = &options.owner {
        // First, for room: a Job that fails later has removed nothing that anybody needs.
        store::remove(&options.out, owner, &options.remove)?;
    }
    let plan = resolve(&options.plan, options.min_prompt_tokens, &mut model)?;
    let (published, ranges) = make((options, &plan), &mut model, &texts, progress)?;
    // What is verified is what was written, read back as serving will read it.
    Artifact::open(&published.path, Check::Digests)?.attach_to(&mut model)?;
    let verified = verify::measure(
        &mut model,
        &evaluation,
        Some(published.digest.clone()),
        progress,
    )?;
    let report = CalibrationReport {
        model_digest: model.digest().clone(),
        artifact_digest: published.digest,
        calibration_tokens: texts.iter().map(|text| text.ids.len() as u64).sum(),
        prompt_lengths: ranges.prompt_lengths,
        verify: verified,
    };
    write_report(&published.path, &json(&report))?;
    Ok(report)
}

/// The calibration texts and the evaluation windows, disjoint.
fn read_data(options: &Options, model: &Model) -> Result<(Vec<Window>, Vec<Window>)> {
    let tokenizer = Tokenizer::open(&options.model)?;
    verify::check_window(model, "--sequence-length", options.sequence_length)?;
    verify::check_window(
        model,
        "--eval-sequence-length",
        options.evaluation_sequence_length,
    )?;
    let data = Dataset::read(&options.data)?;
    let windows = data.windows(&tokenizer, options.sequence_length)?;
    let (texts, rest) = match &options.mix {
        Some(mix) => mixed(data.name(), windows, options.samples, mix)?,
        None => sample_of_round(data.name(), windows, options.samples, options.round)?,
    };
    let (name, mut windows) = match &options.evaluation_data {
        Some(path) => {
            let evaluation = Dataset::read(path)?;
            if evaluation.same_content(&data) {
                return Err(Error::data(format!(
                    "{} holds the calibration texts: verify on texts that calibration has not seen",
                    path.display()
                )));
            }
            (
                evaluation.name().to_owned(),
                evaluation.windows(&tokenizer, options.evaluation_sequence_length)?,
            )
        }
        None if rest.is_empty() => {
            return Err(Error::data(format!(
                "--samples {} uses up {}: give --eval-data or fewer --samples",
                options.samples,
                data.name()
            )));
        }
        None => (data.name().to_owned(), rest),
    };
    if options.evaluation_data.is_none() {
        for window in &mut windows {
            window.ids.truncate(options.evaluation_sequence_length);
        }
    }
    let count = options
        .evaluation_samples
        .unwrap_or(DEFAULT_EVALUATION_SAMPLES.min(windows.len()));
    let (evaluation, _) = sample(&name, windows, count)?;
    Ok((texts, evaluation))
}

/// Writes the artifact and publishes it.
fn make(
    (options, plan): (&Options, &PrecisionPlan),
    model: &mut Model,
    texts: &[Window],
    progress: &Progress,
) -> Result<(Published, Ranges)> {
    let (prefill, saved_prefill) = prefill_copy((options, plan), model, texts, progress)?;
    let (decode, saved_decode) = decode_copy((options, plan), model, texts, progress)?;
    let copies = Copies { prefill, decode };
    let bytes = [&copies.prefill, &copies.decode].map(weights::expected_bytes);
    let draft = Draft::new(&options.out, bytes.iter().sum())?;
    let mut draft = draft.owned_by(options.owner.clone());
    // The weights come first: a volume that is too small shows before the long part.
    write_copy(&mut draft, Phase::Prefill, &copies.prefill, progress)?;
    write_copy(&mut draft, Phase::Decode, &copies.decode, progress)?;
    let (importance, ranges) = measure(model, plan, texts, progress)?;
    draft.write(ARTIFACT_ATTENTION, &json(&importance))?;
    draft.write(ARTIFACT_RANGES, &json(&ranges))?;
    draft.write(ARTIFACT_PLAN, &json(plan))?;
    model.attach(copies, Some(importance), plan.clone())?;
    let beginnings = texts.iter().map(|text| &text.ids[..]);
    draft.write(ARTIFACT_GOLDEN, &json(&Golden::of(model, beginnings)?))?;
    let probes = Probes::of(
        &Tokenizer::open(&options.model)?,
        &texts.iter().map(|text| &text.ids[..]).collect::<Vec<_>>(),
    );
    draft.write(ARTIFACT_PROBE, &json(&probes))?;
    let published = draft.publish(model.digest().clone())?;
    for saved in [saved_prefill, saved_decode].into_iter().flatten() {
        saved.finish();
    }
    Ok((published, ranges))
}

fn write_copy(
    draft: &mut Draft,
    phase: Phase,
    linears: &QuantisedLinears,
    progress: &Progress,
) -> Result<()> {
    let shards = weights::shards(linears);
    let mut stage = progress.stage("writing", shards.len());
    for (index, shard) in shards.iter().enumerate() {
        draft.write(&phase.path(index, shards.len()), &weights::encode(shard))?;
        stage.advance()?;
    }
    Ok(())
}

/// The prefill copy, and the finished layers that it may have been made from.
fn prefill_copy(
    (options, plan): (&Options, &PrecisionPlan),
    model: &mut Model,
    texts: &[Window],
    progress: &Progress,
) -> Result<(QuantisedLinears, Option<Checkpoints>)> {
    if !plan.keeps_prefill_copy() {
        if plan.has_switch() && options.quantiser.needs_data() {
            return Err(Error::plan(
                "weightCopies OnTheFly rounds to nearest while a prompt is read: use --quantiser rtn, or keep a copy with Dual",
            ));
        }
        return Ok((QuantisedLinears::none(), None));
    }
    let assignment = Assignment::uniform(Recipe {
        scheme: Scheme::W8A8,
        quantiser: options.quantiser,
    });
    copy_as(&assignment, &options.out, model, texts, progress)
}

/// Decode's own copy, likewise.
fn decode_copy(
    (options, plan): (&Options, &PrecisionPlan),
    model: &mut Model,
    texts: &[Window],
    progress: &Progress,
) -> Result<(QuantisedLinears, Option<Checkpoints>)> {
    let Some(scheme) = decode_scheme(plan.decode.scheme) else {
        if options.decode_quantiser.is_some() {
            return Err(Error::plan(
                "--decode-quantiser makes a copy for decode alone, and the plan's decode.scheme has none: use W4A8 or LUT4, or leave it out",
            ));
        }
        return Ok((QuantisedLinears::none(), None));
    };
    let quantiser = options.decode_quantiser;
    let recipe = Recipe {
        scheme,
        quantiser: quantiser.unwrap_or_else(|| Quantiser::suiting(scheme)),
    };
    recipe.check()?;
    let mut assignment = Assignment::uniform(recipe);
    if let Some(bits) = plan.decode.bits_per_weight {
        let sensitivities = sensitivity::measure(model, texts, progress)?;
        assignment = sensitivity::assign(&sensitivities, bits, recipe)?;
        for line in sensitivity::describe(&assignment, model.config().num_hidden_layers) {
            progress.note(&line);
        }
    }
    copy_as(&assignment, &options.out, model, texts, progress)
}

fn copy_as(
    assignment: &Assignment,
    out: &Path,
    model: &mut Model,
    texts: &[Window],
    progress: &Progress,
) -> Result<(QuantisedLinears, Option<Checkpoints>)> {
    let quantiser = assignment.recipe.quantiser;
    assignment.recipe.check()?;
    // Rounding to nearest takes less time than keeping layers would.
    let saved = quantiser
        .needs_data()
        .then(|| Checkpoints::open(out, model.digest(), texts, assignment))
        .transpose()?;
    let linears = quantise(model, texts, assignment, saved.as_ref(), progress)?;
    Ok((linears, saved))
}

/// Reads the texts in FP32: takes the plan's quantile of the attention that keys received, and the ranges of what was computed.
fn measure(
    model: &mut Model,
    plan: &PrecisionPlan,
    texts: &[Window],
    progress: &Progress,
) -> Result<(Importance, Ranges)> {
    model.set_plan(PrecisionPlan::baseline())?;
    let config = model.config();
    let (layers, heads) = (config.num_hidden_layers, config.num_key_value_heads);
    let collector = Collector::new(&plan.kv_cache, layers, heads);
    let mut taps = (collector, Seen::new(layers, heads));
    let mut workspace = Workspace::default();
    let mut stage = progress.stage("calibrating", texts.len());
    for text in texts {
        let mut cache = model.new_cache(text.ids.len());
        let chunk = Chunk {
            tokens: &text.ids,
            cache: &mut cache,
            logits: LogitRows::None,
        };
        taps.1.text(text.ids.len());
        model.forward(Pass::Precise, &mut [chunk], &mut workspace, Some(&mut taps))?;
        stage.advance()?;
    }
    let (collector, seen) = taps;
    Ok((
        collector.thresholds(plan.kv_cache.quantile)?,
        seen.ranges()?,
    ))
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value)
        .expect("plans, thresholds and reports hold only strings and numbers");
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_plan_can_work() {
        assert_eq!(default_plan().check(), Ok(()));
    }
}
