//! The quality table: what each scheme and quantiser costs on one model, beside each other and against FP32 on the stored weights.
//!
//! Schemes are simulated through the forward that serves: dequantised weights and rounded activations. `cli::quality` prints it; it decides nothing.

pub mod tasks;

use std::path::{Path, PathBuf};

use mixquant_crds::{DecodeScheme, PrecisionPlan, VerifyReport};
use rayon::prelude::*;
use serde::Serialize;

use self::tasks::Task;
use crate::calibrate::quantise::{Assignment, quantise};
use crate::calibrate::quantisers::awq::Awq;
use crate::calibrate::quantisers::gptq::Gptq;
use crate::calibrate::quantisers::{Quantiser, Recipe};
use crate::dataset::{Dataset, Window, sample};
use crate::error::{Error, Result};
use crate::model::{Chunk, KvCache, LogitRows, Model, Pass, Workspace};
use crate::progress::Progress;
use crate::quant::{QuantisedLinears, Scheme};
use crate::tokenizer::Tokenizer;
use crate::verify::check_window;
use crate::verify::divergence::{Divergence, distance};

/// Everything that the table depends on.
#[derive(Debug, Clone)]
pub struct Options {
    /// The Hugging Face directory.
    pub model: PathBuf,
    /// Texts whose tokens are predicted.
    pub data: PathBuf,
    /// Tokens of a window of them.
    pub window: usize,
    /// Windows, spread over the texts; all without a number.
    pub samples: Option<usize>,
    /// Questions with exact answers.
    pub tasks: Option<PathBuf>,
    /// Questions, spread over the file; all without a number.
    pub task_samples: Option<usize>,
    /// Texts that quantisers read.
    pub calibration: PathBuf,
    /// How many of them.
    pub calibration_samples: usize,
    /// Tokens of each at most.
    pub sequence_length: usize,
    /// The rows.
    pub rows: Vec<Row>,
}

/// What a row of the table computes with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Row {
    /// BF16 weights and activations.
    Bf16,
    /// One scheme for prompt and answer.
    Uniform(Recipe),
    /// The scheme for the first half of a window or for the prompt, BF16 behind it.
    Prefill(Recipe),
}

/// A row, measured.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// What it computed with.
    pub scheme: String,
    /// How its weights were made.
    pub quantiser: String,
    /// Bits a weight of the block linears.
    pub bits_per_weight: f64,
    /// The distances from FP32.
    pub distance: VerifyReport,
    /// Questions answered exactly, in percent.
    pub tasks_percent: Option<f64>,
}

impl Row {
    /// The rows of the documentation.
    pub fn all() -> Vec<Self> {
        let recipe = |scheme, quantiser| Recipe { scheme, quantiser };
        let (gptq, awq) = (
            Quantiser::Gptq(Gptq::default()),
            Quantiser::Awq(Awq::default()),
        );
        let mut rows = vec![
            Self::Bf16,
            Self::Prefill(recipe(Scheme::W8A8, Quantiser::Rtn)),
            Self::Uniform(recipe(Scheme::W8A8, Quantiser::Rtn)),
            Self::Uniform(recipe(Scheme::W8A8, Quantiser::SmoothQuant)),
            Self::Uniform(recipe(Scheme::W8A16, Quantiser::Rtn)),
            Self::Uniform(recipe(Scheme::FP8, Quantiser::Rtn)),
        ];
        for group in [128, 64, 32] {
            for quantiser in [Quantiser::Rtn, awq, gptq] {
                rows.push(Self::Uniform(recipe(Scheme::w4a16(group), quantiser)));
            }
        }
        rows.push(Self::Uniform(recipe(Scheme::LUT4, Quantiser::Lut)));
        rows
    }

    const fn recipe(self) -> Option<Recipe> {
        match self {
            Self::Bf16 => None,
            Self::Uniform(recipe) | Self::Prefill(recipe) => Some(recipe),
        }
    }

    fn names(self) -> (String, String) {
        match self {
            Self::Bf16 => ("BF16".into(), String::new()),
            Self::Uniform(recipe) => (recipe.scheme.to_string(), recipe.quantiser.name().into()),
            Self::Prefill(recipe) => (
                format!("{} prefill, BF16 decode", recipe.scheme),
                recipe.quantiser.name().into(),
            ),
        }
    }
}

/// Measures all rows.
///
/// # Errors
/// A model, texts or questions that cannot be used.
pub fn run(options: &Options, progress: &Progress) -> Result<Vec<Measured>> {
    let mut models = Models::open(&options.model)?;
    let tokenizer = Tokenizer::open(&options.model)?;
    check_window(&models.precise, "--window", options.window)?;
    check_window(
        &models.precise,
        "--sequence-length",
        options.sequence_length,
    )?;
    let windows = |path: &PathBuf, tokens, count: Option<usize>| {
        let data = Dataset::read(path)?;
        let windows = data.windows(&tokenizer, tokens)?;
        let count = count.unwrap_or(windows.len());
        sample(data.name(), windows, count).map(|(chosen, _)| chosen)
    };
    let texts = windows(
        &options.calibration,
        options.sequence_length,
        Some(options.calibration_samples),
    )?;
    let evaluation = windows(&options.data, options.window, options.samples)?;
    let questions = match &options.tasks {
        Some(path) => tasks::read(path, options.task_samples)?,
        None => Vec::new(),
    };
    let rows = options
        .rows
        .iter()
        .map(|row| Candidate::new(&mut models.simulated, &texts, *row, progress))
        .collect::<Result<Vec<_>>>()?;
    let distances = models.distances(&rows, &evaluation, progress)?;
    let mut measured = Vec::with_capacity(rows.len());
    let mut stage = progress.stage("answering", rows.len() * questions.len());
    for (row, distance) in rows.iter().zip(distances) {
        let (scheme, quantiser) = row.row.names();
        let mut right = 0;
        models.prepare(row)?;
        for question in &questions {
            right += usize::from(models.answers(row, question, &tokenizer)?);
            stage.advance()?;
        }
        measured.push(Measured {
            scheme,
            quantiser,
            bits_per_weight: row.bits_per_weight(),
            distance,
            tasks_percent: percent(right, questions.len()),
        });
    }
    Ok(measured)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "numbers of questions are far below 2^53"
)]
fn percent(right: usize, of: usize) -> Option<f64> {
    (of > 0).then(|| 100.0 * right as f64 / of as f64)
}

/// A row with its weights.
#[derive(Debug)]
pub struct Candidate {
    row: Row,
    linears: Option<QuantisedLinears>,
}

impl Candidate {
    /// Quantises the model's linears as the row says. The model is left as it was.
    ///
    /// # Errors
    /// A quantiser that does not fit the scheme; weights or texts that cannot be used.
    pub fn new(model: &mut Model, texts: &[Window], row: Row, progress: &Progress) -> Result<Self> {
        let linears = row.recipe().map(|recipe| {
            progress.note(&recipe.to_string());
            quantise(model, texts, &Assignment::uniform(recipe), None, progress)
        });
        Ok(Self {
            row,
            linears: linears.transpose()?,
        })
    }

    fn bits_per_weight(&self) -> f64 {
        self.linears.as_ref().map_or(16.0, bits_per_weight)
    }
}

/// Bits stored for a weight, on average.
#[expect(
    clippy::cast_precision_loss,
    reason = "numbers of weights are far below 2^53"
)]
pub fn bits_per_weight(linears: &QuantisedLinears) -> f64 {
    let (mut bits, mut weights) = (0.0, 0.0);
    for linear in linears {
        let count = (linear.weight.out_features * linear.weight.in_features) as f64;
        bits += count * linear.weight.bits_per_weight();
        weights += count;
    }
    bits / weights
}

/// The same checkpoint twice: as stored, and with a row's weights in place of the linears.
#[derive(Debug)]
pub struct Models {
    precise: Model,
    simulated: Model,
}

impl Models {
    /// Opens a Hugging Face directory.
    ///
    /// # Errors
    /// The file or tensor that cannot be used.
    pub fn open(directory: &Path) -> Result<Self> {
        Ok(Self {
            precise: Model::open(directory)?,
            simulated: Model::open(directory)?,
        })
    }

    /// The distances of all rows from FP32. A window's baseline is computed once.
    ///
    /// # Errors
    /// Logits that are not finite, or no window.
    pub fn distances(
        &mut self,
        rows: &[Candidate],
        windows: &[Window],
        progress: &Progress,
    ) -> Result<Vec<VerifyReport>> {
        let mut all: Vec<Divergence> = rows.iter().map(|_| Divergence::default()).collect();
        let mut stage = progress.stage("measuring", rows.len() * windows.len());
        let mut workspace = Workspace::default();
        for window in windows {
            let inputs = &window.ids[..window.ids.len() - 1];
            self.precise.set_plan(PrecisionPlan::baseline())?;
            let mut cache = self.precise.new_cache(inputs.len());
            let baseline = forward(&self.precise, inputs, &mut cache, &mut workspace)?.to_vec();
            for (row, divergence) in rows.iter().zip(&mut all) {
                self.prepare(row)?;
                let logits = self.logits(row, inputs, &mut workspace)?;
                score(
                    window,
                    &baseline,
                    &logits,
                    self.precise.config().vocab_size,
                    divergence,
                )?;
                stage.advance()?;
            }
        }
        all.into_iter()
            .map(|divergence| {
                let report = divergence.report(None);
                report.ok_or_else(|| Error::data("there is no window to measure: give data"))
            })
            .collect()
    }

    /// Both models compute as the row says.
    fn prepare(&mut self, row: &Candidate) -> Result<()> {
        let plan = PrecisionPlan::precise(DecodeScheme::BF16);
        self.precise.set_plan(plan.clone())?;
        self.simulated.set_plan(plan)?;
        self.simulated.stop_simulating();
        if let (Some(recipe), Some(linears)) = (row.row.recipe(), &row.linears) {
            let linears: Vec<_> = linears.iter().cloned().collect();
            self.simulated
                .simulate(&linears, recipe.scheme.activations)?;
        }
        Ok(())
    }

    fn logits(
        &self,
        row: &Candidate,
        inputs: &[u32],
        workspace: &mut Workspace,
    ) -> Result<Vec<f32>> {
        let mut cache = self.simulated.new_cache(inputs.len());
        let prompt = match row.row {
            Row::Prefill(_) => inputs.len() / 2,
            Row::Bf16 | Row::Uniform(_) => inputs.len(),
        };
        let (prompt, rest) = inputs.split_at(prompt);
        let mut logits = forward(&self.simulated, prompt, &mut cache, workspace)?.to_vec();
        if !rest.is_empty() {
            logits.extend_from_slice(forward(&self.precise, rest, &mut cache, workspace)?);
        }
        Ok(logits)
    }

    /// Whether a question is answered exactly.
    fn answers(&self, row: &Candidate, question: &Task, tokenizer: &Tokenizer) -> Result<bool> {
        let decoding = match row.row {
            Row::Prefill(_) => &self.precise,
            Row::Bf16 | Row::Uniform(_) => &self.simulated,
        };
        let answer = tasks::answer(&self.simulated, decoding, tokenizer, question)?;
        Ok(answer == question.answer)
    }
}

fn forward<'w>(
    model: &Model,
    tokens: &[u32],
    cache: &mut KvCache,
    workspace: &'w mut Workspace,
) -> Result<&'w [f32]> {
    let chunk = Chunk {
        tokens,
        cache,
        logits: LogitRows::All,
    };
    model.forward(Pass::Precise, &mut [chunk], workspace, None)
}

fn score(
    window: &Window,
    baseline: &[f32],
    logits: &[f32],
    vocab_size: usize,
    divergence: &mut Divergence,
) -> Result<()> {
    // Collected in order: the sums do not depend on threads.
    let distances: Vec<_> = baseline
        .par_chunks_exact(vocab_size)
        .zip(logits.par_chunks_exact(vocab_size))
        .zip(&window.ids[1..])
        .map(|((baseline, logits), target)| distance(baseline, logits, *target))
        .collect();
    for distance in distances {
        let distance = distance.map_err(|_| {
            Error::model("logits are not finite: the model's weights are damaged or the scheme cannot hold them")
        })?;
        divergence.add(window.slice.as_deref().unwrap_or("text"), distance);
    }
    Ok(())
}

/// The table in Markdown.
pub fn table(rows: &[Measured]) -> String {
    let mut lines = vec![
        "| scheme | quantiser | bits a weight | perplexity | increase | KL mean | KL p99 | top-1 | exact answers |".to_owned(),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |".to_owned(),
    ];
    for row in rows {
        let distance = &row.distance;
        let tasks = row
            .tasks_percent
            .map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1} %"));
        lines.push(format!(
            "| {} | {} | {:.3} | {:.4} | {:+.3} % | {:.6} | {:.5} | {:.2} % | {tasks} |",
            row.scheme,
            if row.quantiser.is_empty() {
                "-"
            } else {
                &row.quantiser
            },
            row.bits_per_weight,
            distance.perplexity,
            distance.perplexity_increase_percent,
            distance.kl_mean,
            distance.kl_p99,
            distance.top1_agreement_percent,
        ));
    }
    lines.join("\n")
}
