//! Verification: how far a plan's answers are from FP32 arithmetic on the stored weights, window by window.
//!
//! `calibrate` and `cli::verify` call it. It holds the logits of one window at a time and decides nothing: the operator compares with the gates.

pub mod divergence;

use std::path::PathBuf;

use mixquant_crds::{
    DecodeScheme, Digest, KvCacheMode, KvPrecision, PrecisionPlan, PrefillScheme, VerifyReport,
};
use rayon::prelude::*;

use self::divergence::{Distance, Divergence, NotFinite, distance};
use crate::artifact::{Artifact, Check};
use crate::dataset::{Dataset, Window, sample};
use crate::error::{Error, Result};
use crate::model::{Chunk, KvCache, LogitRows, Model, Pass, Workspace};
use crate::progress::Progress;
use crate::tokenizer::Tokenizer;

/// Everything that `verify` is told.
#[derive(Debug, Clone)]
pub struct Options {
    /// The Hugging Face directory.
    pub model: PathBuf,
    /// The artifact's folder.
    pub artifact: Option<PathBuf>,
    /// Whether its digests are checked.
    pub check: Check,
    /// The evaluation texts.
    pub data: PathBuf,
    /// Tokens of a window.
    pub window: usize,
    /// Windows to measure; all of them without a number.
    pub samples: Option<usize>,
    /// Measured instead of the artifact's plan.
    pub plan: Option<PrecisionPlan>,
    /// Refuse any other artifact.
    pub expected_artifact: Option<Digest>,
}

/// Measures what the options name.
///
/// # Errors
/// Model, artifact, plan or data that cannot be used.
pub fn run(options: &Options, progress: &Progress) -> Result<VerifyReport> {
    let mut model = Model::open(&options.model)?;
    let artifact_digest = prepare(&mut model, options)?;
    check_window(&model, "--window", options.window)?;
    let data = Dataset::read(&options.data)?;
    let windows = data.windows(&Tokenizer::open(&options.model)?, options.window)?;
    let count = options.samples.unwrap_or(windows.len());
    let (windows, _) = sample(data.name(), windows, count)?;
    measure(&mut model, &windows, artifact_digest, progress)
}

/// Gives the model what the plan needs.
fn prepare(model: &mut Model, options: &Options) -> Result<Option<Digest>> {
    let digest = match &options.artifact {
        Some(directory) => {
            let artifact = Artifact::open(directory, options.check)?;
            let digest = artifact.digest().clone();
            if let Some(expected) = options
                .expected_artifact
                .as_ref()
                .filter(|expected| **expected != digest)
            {
                return Err(Error::digest(format!(
                    "{} is the artifact {digest} and {expected} was expected: calibrate again or mount the other one",
                    directory.display()
                )));
            }
            artifact.attach_to(model)?;
            Some(digest)
        }
        None if options.expected_artifact.is_some() => {
            return Err(Error::artifact(
                "an artifact digest is expected and there is no artifact: give --artifact",
            ));
        }
        None => None,
    };
    let Some(plan) = options.plan.clone() else {
        return Ok(digest);
    };
    plan.check().map_err(Error::plan)?;
    if digest.is_some() {
        model.set_plan(plan)?;
    } else if plan.kv_cache.mode == KvCacheMode::AttentionMixedPrecision {
        return Err(Error::plan(
            "kvCache.mode AttentionMixedPrecision needs thresholds that calibration measures: give --artifact or use Uniform",
        ));
    } else if plan.decode.bits_per_weight.is_some() {
        return Err(Error::plan(
            "decode.bitsPerWeight is spent by calibration: give --artifact, or leave it out to measure 4 bits everywhere",
        ));
    } else {
        let linears = model.linears_of(&plan);
        model.attach(linears, None, plan)?;
    }
    Ok(digest)
}

/// Refuses a model other than the expected one.
///
/// # Errors
/// Both digests.
pub fn expect_model(model: &Model, expected: Option<&Digest>) -> Result<()> {
    match expected {
        Some(expected) if expected != model.digest() => Err(Error::digest(format!(
            "the model is {} and {expected} was expected: mount that model or change the digest in the spec",
            model.digest()
        ))),
        _ => Ok(()),
    }
}

/// Refuses windows that the model's context cannot hold.
///
/// # Errors
/// The option and the largest value that works.
pub fn check_window(model: &Model, option: &str, tokens: usize) -> Result<()> {
    let context = model.config().max_position_embeddings;
    if tokens > context {
        return Err(Error::data(format!(
            "{option} {tokens} is longer than the model's context: take at most {context}"
        )));
    }
    Ok(())
}

/// Measures the model's plan against FP32 arithmetic on its stored weights. The plan is in force again afterwards.
///
/// # Errors
/// Logits that are not finite, no windows, or a signal to stop.
pub fn measure(
    model: &mut Model,
    windows: &[Window],
    artifact_digest: Option<Digest>,
    progress: &Progress,
) -> Result<VerifyReport> {
    let plan = model.plan().clone();
    let route = Route::of(&plan);
    let mut used = Used::default();
    let mut divergence = Divergence::default();
    let (mut baseline_workspace, mut workspace) = (Workspace::default(), Workspace::default());
    let mut stage = progress.stage("verifying", windows.len());
    for window in windows {
        let inputs = &window.ids[..window.ids.len() - 1];
        model.set_plan(PrecisionPlan::baseline())?;
        let mut cache = model.new_cache(inputs.len());
        let baseline = forward(
            model,
            Pass::Precise,
            inputs,
            &mut cache,
            &mut baseline_workspace,
        )?;
        model.set_plan(plan.clone())?;
        let mut scorer = Scorer {
            window,
            baseline,
            vocab_size: model.config().vocab_size,
            divergence: &mut divergence,
        };
        used.add(score_window(model, route, &mut scorer, &mut workspace)?);
        stage.advance()?;
    }
    drop(stage);
    used.check(&plan)?;
    divergence
        .report(artifact_digest)
        .ok_or_else(|| Error::data("there is no window to measure: give data"))
}

/// How a window goes through the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// The plan is the baseline: the same single forward, so that the distance is exactly 0.
    Baseline,
    /// As in serving: a prompt, then tokens one block at a time over the cache as it is stored. Every prompt takes the plan's prefill scheme,
    /// whatever its length: short prompts that serving would read precisely must not thin out what the quantised pass costs.
    Serving,
}

impl Route {
    fn of(plan: &PrecisionPlan) -> Self {
        if plan.decode.scheme == DecodeScheme::FP32
            && plan.prefill.scheme == PrefillScheme::Precise
            && plan.kv_cache.default == KvPrecision::BF16
        {
            Self::Baseline
        } else {
            Self::Serving
        }
    }
}

/// Tokens that really went through what the plan changes: a gate must not pass on a number that never saw it.
#[derive(Debug, Clone, Copy, Default)]
struct Used {
    /// Read by the prefill pass.
    prefilled: usize,
    /// Kept in quantised blocks.
    quantised_keys: usize,
}

impl Used {
    fn add(&mut self, more: Self) {
        self.prefilled += more.prefilled;
        self.quantised_keys += more.quantised_keys;
    }

    /// Refuses a measurement that left a part of the plan out.
    fn check(self, plan: &PrecisionPlan) -> Result<()> {
        let kv = &plan.kv_cache;
        if plan.prefill.scheme != PrefillScheme::Precise && self.prefilled == 0 {
            return Err(Error::data(format!(
                "no window has {} tokens (2 blocks), so the quantised prefill was not measured: use longer texts or a larger window",
                2 * kv.block_size
            )));
        }
        if kv.default != KvPrecision::BF16 && self.quantised_keys == 0 {
            return Err(Error::data(format!(
                "no window has more than {} tokens (kvCache.recentTokens + 2 blocks), so no key was quantised and the cache was not measured: use longer texts or a larger window",
                kv.recent_tokens.saturating_add(2 * kv.block_size)
            )));
        }
        Ok(())
    }
}

/// The first half of the window, rounded down to a block.
fn prompt_tokens(plan: &PrecisionPlan, window: &Window) -> usize {
    let half = window.ids.len() / 2;
    half - half % block_tokens(plan)
}

fn block_tokens(plan: &PrecisionPlan) -> usize {
    usize::try_from(plan.kv_cache.block_size)
        .expect("a checked plan has a block size of at most 64")
}

/// Runs the window through the plan and scores every position. Returns what the plan's quantised parts did for it.
fn score_window(
    model: &Model,
    route: Route,
    scorer: &mut Scorer<'_>,
    workspace: &mut Workspace,
) -> Result<Used> {
    let inputs = &scorer.window.ids[..scorer.window.ids.len() - 1];
    let mut cache = model.new_cache(inputs.len());
    if route == Route::Baseline {
        let logits = forward(model, Pass::Precise, inputs, &mut cache, workspace)?;
        scorer.add(0, logits)?;
        return Ok(Used::default());
    }
    let (prompt, rest) =
        inputs.split_at(prompt_tokens(model.plan(), scorer.window).min(inputs.len()));
    if !prompt.is_empty() {
        let pass = match model.plan().prefill.scheme {
            PrefillScheme::W8A8 => Pass::Prefill,
            PrefillScheme::Precise => Pass::Precise,
        };
        scorer.add(0, forward(model, pass, prompt, &mut cache, workspace)?)?;
    }
    // The cache decides on its blocks at their edges only, so whole blocks are stored exactly as single tokens would be.
    let mut position = prompt.len();
    for chunk in rest.chunks(block_tokens(model.plan())) {
        scorer.add(
            position,
            forward(model, Pass::Precise, chunk, &mut cache, workspace)?,
        )?;
        position += chunk.len();
    }
    Ok(Used {
        prefilled: prompt.len(),
        quantised_keys: cache.quantised_tokens(),
    })
}

/// All logits of the next tokens of one sequence.
fn forward<'w>(
    model: &Model,
    pass: Pass,
    tokens: &[u32],
    cache: &mut KvCache,
    workspace: &'w mut Workspace,
) -> Result<&'w [f32]> {
    model.forward(
        pass,
        &mut [Chunk {
            tokens,
            cache,
            logits: LogitRows::All,
        }],
        workspace,
        None,
    )
}

/// Compares one window's logits with its baseline's.
struct Scorer<'a> {
    window: &'a Window,
    /// `[inputs, vocab_size]`.
    baseline: &'a [f32],
    vocab_size: usize,
    divergence: &'a mut Divergence,
}

impl Scorer<'_> {
    /// Adds the rows of the positions from `first` on.
    fn add(&mut self, first: usize, logits: &[f32]) -> Result<()> {
        let baseline = &self.baseline[first * self.vocab_size..][..logits.len()];
        let rows = baseline
            .par_chunks_exact(self.vocab_size)
            .zip(logits.par_chunks_exact(self.vocab_size))
            .enumerate();
        // Collected in order: the sums do not depend on threads.
        let distances: Vec<_> = rows
            .map(|(row, (baseline, plan))| {
                distance(baseline, plan, self.window.ids[first + row + 1])
            })
            .collect();
        for (row, distance) in distances.into_iter().enumerate() {
            let position = first + row;
            self.add_one(
                position,
                distance.map_err(|whose| not_finite(whose, position))?,
            );
        }
        Ok(())
    }

    fn add_one(&mut self, position: usize, distance: Distance) {
        const QUARTERS: [&str; 4] = ["position-1", "position-2", "position-3", "position-4"];
        let scored = self.window.ids.len() - 1;
        let name = self
            .window
            .slice
            .as_deref()
            .unwrap_or(QUARTERS[position * 4 / scored]);
        self.divergence.add(name, distance);
    }
}

fn not_finite(whose: NotFinite, position: usize) -> Error {
    match whose {
        NotFinite::Baseline => Error::model(format!(
            "the unquantised model's logits are not finite at position {position}: its weights are damaged"
        )),
        NotFinite::Plan => Error::plan(format!(
            "the plan's logits are not finite at position {position}: use a more precise plan or calibrate again"
        )),
    }
}
