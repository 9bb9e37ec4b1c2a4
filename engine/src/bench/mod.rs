//! How fast this engine is on this machine, and how near to what the machine can do: prefill and decode by scheme, roofs of the same run, memory.
//!
//! All schemes are in memory at once and take turns: a slow minute of the machine meets them all. `cli::bench` reads the arguments and prints;
//! nothing that serves comes here.

mod clock;
mod load;
mod report;
mod roofs;
mod shape;

use std::io::{BufRead, Write};
use std::time::Duration;

use serde_json::json;

pub use self::clock::{Seconds, Spread};
pub use self::load::{Copies, Load, load, write};
pub use self::report::{Cell, Report, Row};
pub use self::roofs::{Rate, Roofs, Stream};
pub use self::shape::{Shape, Source, Storage};
use crate::kernels::{self, peak::Unit};
use crate::model::{Chunk, KvCache, LogitRows, Model, Pass, Workspace};
use crate::progress::Progress;
use crate::quant::WeightFormat;
use crate::{Error, Result};

/// What is measured.
#[derive(Debug, Clone)]
pub struct Options {
    /// The model.
    pub source: Source,
    /// Its linears, one row of the table each.
    pub schemes: Vec<Storage>,
    /// Lengths of prompts, tokens.
    pub prefill: Vec<usize>,
    /// Tokens in front of those that are decoded.
    pub context: usize,
    /// Tokens that are decoded in one run.
    pub steps: usize,
    /// How often everything is measured.
    pub rounds: usize,
    /// How long one sample takes at least, and each roof of a round.
    pub sample: Duration,
}

/// One scheme's model and what it is measured with.
struct Subject {
    storage: Storage,
    model: Model,
    /// A cache that holds the context.
    context: KvCache,
    workspace: Workspace,
    /// Samples of each prompt length, and of decode behind them.
    samples: Vec<Vec<Seconds>>,
}

/// Token ids that look random, the same in every run.
fn tokens(count: usize, vocabulary: usize) -> Vec<u32> {
    let id = |i: usize| u32::try_from((i * i * 37 + i * 101) % vocabulary).unwrap_or(0);
    (0..count).map(id).collect()
}

impl Subject {
    fn new(options: &Options, storage: Storage) -> Result<Self> {
        let model = options.source.model(storage)?;
        let decoded = options.context + options.steps;
        for length in options.prefill.iter().copied().chain([decoded]) {
            shape::check_length(model.config(), length)?;
        }
        let mut context = model.new_cache(decoded);
        let mut workspace = Workspace::default();
        let mut read = |cache: &mut KvCache, length| {
            let prompt = tokens(length, model.config().vocab_size);
            read_prompt(&model, &mut workspace, cache, &prompt)
        };
        // The longest prompt once, so that no sample waits for memory that is touched for the first time.
        if let Some(longest) = options.prefill.iter().copied().max() {
            read(&mut model.new_cache(longest), longest)?;
        }
        read(&mut context, options.context)?;
        Ok(Self {
            storage,
            model,
            context,
            workspace,
            samples: vec![Vec::new(); options.prefill.len() + 1],
        })
    }

    /// One sample of each cell.
    fn round(&mut self, options: &Options) -> Result<()> {
        let Self {
            model, workspace, ..
        } = self;
        let vocabulary = model.config().vocab_size;
        for (samples, length) in self.samples.iter_mut().zip(&options.prefill) {
            let prompt = tokens(*length, vocabulary);
            samples.push(clock::time(options.sample, || {
                read_prompt(model, workspace, &mut model.new_cache(*length), &prompt)
            })?);
        }
        let next = tokens(options.steps, vocabulary);
        let decode = clock::time(options.sample, || {
            let mut cache = self.context.clone();
            next.chunks(1)
                .try_for_each(|token| read_prompt(model, workspace, &mut cache, token))
        })?;
        self.samples[options.prefill.len()].push(decode);
        Ok(())
    }

    /// The instruction that does most of a product's work.
    fn unit(&self) -> Unit {
        match self.storage {
            Storage::Precise => Unit::Bf16,
            Storage::Quantised(scheme) => match scheme.weights {
                WeightFormat::Int8 | WeightFormat::Int4 { .. } => Unit::Int8,
                WeightFormat::Fp8 | WeightFormat::Lut4 => Unit::Fp32,
            },
        }
    }
}

/// Appends the tokens and computes the last one's logits.
fn read_prompt(
    model: &Model,
    workspace: &mut Workspace,
    cache: &mut KvCache,
    tokens: &[u32],
) -> Result<()> {
    let chunk = Chunk {
        tokens,
        cache,
        logits: LogitRows::Last,
    };
    let logits = model.forward(Pass::Precise, &mut [chunk], workspace, None)?;
    std::hint::black_box(logits);
    Ok(())
}

/// Refuses options by which nothing would be measured.
fn check(options: &Options) -> Result<()> {
    if options.schemes.is_empty() || options.rounds == 0 || options.steps == 0 {
        return Err(Error::data(
            "nothing is measured: give at least one scheme, one round and one step",
        ));
    }
    if options.context == 0 || options.prefill.contains(&0) {
        return Err(Error::data(
            "a prompt or a context of 0 tokens cannot be measured: give at least 1",
        ));
    }
    Ok(())
}

/// One round at each line of `requests`, answered by a line of JSON: the samples of each scheme, prefill by length and then decode. So a caller
/// lets several programs take turns.
///
/// # Errors
/// Those of [`run`], and a caller that is gone.
pub fn on_request(
    options: &Options,
    requests: impl BufRead,
    mut answers: impl Write,
) -> Result<()> {
    check(options)?;
    let subjects = options.schemes.iter();
    let mut subjects: Vec<Subject> = subjects
        .map(|storage| Subject::new(options, *storage))
        .collect::<Result<_>>()?;
    let mut answer = |value: serde_json::Value| {
        let written = writeln!(answers, "{value}").and_then(|()| answers.flush());
        written.map_err(|error| Error::internal(format!("nobody reads the answers ({error})")))
    };
    answer(json!({"ready": true}))?;
    for _ in requests.lines().map_while(std::io::Result::ok) {
        let mut samples = Vec::new();
        for subject in &mut subjects {
            subject.round(options)?;
            samples.extend(
                subject
                    .samples
                    .iter()
                    .filter_map(|cell| cell.last().copied()),
            );
        }
        answer(json!(samples))?;
    }
    Ok(())
}

/// Measures.
///
/// # Errors
/// A model that cannot be opened, a length that it has no context for, nothing to measure, or a signal.
pub fn run(options: &Options, progress: &Progress) -> Result<Report> {
    check(options)?;
    let mut loading = progress.stage("weights", options.schemes.len());
    let mut subjects = Vec::new();
    for storage in &options.schemes {
        subjects.push(Subject::new(options, *storage)?);
        loading.advance()?;
    }
    let (data, mut roofs) = (Stream::new(), Roofs::default());
    let mut stage = progress.stage("rounds", options.rounds * subjects.len());
    for _ in 0..options.rounds {
        roofs = roofs.or_better(&data, options.sample);
        for subject in &mut subjects {
            subject.round(options)?;
            stage.advance()?;
        }
    }
    roofs = roofs.or_better(&data, options.sample);
    Ok(Report {
        model: options.source.name(),
        backend: kernels::detect().name(),
        cpu: report::cpu_name(),
        threads: rayon::current_num_threads(),
        rounds: options.rounds,
        rows: subjects
            .iter()
            .map(|subject| report::row(subject, options, &roofs))
            .collect(),
        roofs,
        peak_memory_bytes: report::peak_memory(),
    })
}
