//! `mixquant-engine bench`: reads what to measure, prints the table or JSON.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::bench::{self, Copies, Shape, Source, Storage};
use crate::error::{Error, Result};
use crate::job;
use crate::kernels::threads;

/// What `bench` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// A Hugging Face directory or GGUF file; its linears are rounded to nearest for each scheme.
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    pub model: Option<PathBuf>,
    /// A shape with random weights, made in memory: llama-3.2-1b, kube-llama or micro.
    #[arg(long, value_name = "NAME", default_value = "kube-llama")]
    pub shape: Shape,
    /// Schemes of the block linears; INT8 and INT4 weights meet INT8 activations in both phases, as when they serve.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "BF16,W8A8,W4A16-g128,FP8,LUT4"
    )]
    pub schemes: Vec<Storage>,
    /// Lengths of prompts, tokens.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512,2048"
    )]
    pub prefill: Vec<usize>,
    /// Tokens in front of those that are decoded.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub context: usize,
    /// Tokens that are decoded in one run.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub steps: usize,
    /// How often everything is measured, schemes in turn.
    #[arg(long, value_name = "N", default_value_t = 7)]
    pub rounds: usize,
    /// How long one sample takes at least.
    #[arg(long, value_name = "MS", default_value_t = 300)]
    pub sample_milliseconds: u64,
    /// Worker threads; the CPU limit by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Instead of so many rounds: one at each line on standard input, answered by the seconds of its samples as a line of JSON.
    #[arg(long, conflicts_with_all = ["rounds", "json"])]
    pub on_request: bool,
    /// Instead: how long --model takes to its first answer, and the memory it takes; what is kept is BF16, Dual, `OnTheFly` or Single.
    #[arg(long, value_name = "COPIES", requires = "model")]
    pub load: Option<Copies>,
    /// Instead: write the shape's random weights as a checkpoint.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["model", "load"])]
    pub write: Option<PathBuf>,
}

/// Measures and prints.
///
/// # Errors
/// What kept it from being measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(directory) = &arguments.write {
        return bench::write(arguments.shape, directory);
    }
    threads::configure(arguments.threads)?;
    if let (Some(model), Some(copies)) = (&arguments.model, arguments.load) {
        let load = bench::load(model, copies)?;
        return print(arguments.json, &load);
    }
    let options = bench::Options {
        source: match &arguments.model {
            Some(path) => Source::Directory(path.clone()),
            None => Source::Shape(arguments.shape),
        },
        schemes: arguments.schemes.clone(),
        prefill: arguments.prefill.clone(),
        context: arguments.context,
        steps: arguments.steps,
        rounds: arguments.rounds,
        sample: Duration::from_millis(arguments.sample_milliseconds),
    };
    if arguments.on_request {
        return bench::on_request(&options, std::io::stdin().lock(), std::io::stdout().lock());
    }
    let report = bench::run(&options, &job::progress())?;
    print(arguments.json, &report)
}

fn print(as_json: bool, report: &(impl Serialize + ToString)) -> Result<()> {
    if !as_json {
        return job::print(&report.to_string());
    }
    let text = serde_json::to_string_pretty(report)
        .map_err(|error| Error::internal(format!("cannot write the report as JSON: {error}")))?;
    job::print(&text)
}
