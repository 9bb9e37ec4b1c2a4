//! `mixquant-engine quality`: reads its arguments, measures and prints the quality table in Markdown or as JSON.

use std::path::PathBuf;

use clap::Args;

use crate::calibrate::quantisers::{Quantiser, Recipe};
use crate::error::{Error, Result};
use crate::job;
use crate::kernels::threads;
use crate::quality::{self, Row};
use crate::quant::Scheme;

/// What `quality` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory: config.json, tokenizer.json, safetensors.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Texts whose tokens are predicted.
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Tokens of a window of them.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    pub window: usize,
    /// Windows, spread over the texts; all by default.
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Questions with exact answers: JSON lines with `prompt` and `answer`.
    #[arg(long, value_name = "FILE")]
    pub tasks: Option<PathBuf>,
    /// Questions, spread over the file; all by default.
    #[arg(long, value_name = "N")]
    pub task_samples: Option<usize>,
    /// Texts that quantisers read.
    #[arg(long, value_name = "FILE")]
    pub calibration: PathBuf,
    /// How many of them.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub calibration_samples: usize,
    /// Tokens of each at most.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub sequence_length: usize,
    /// Only these rows, such as `W4A16-g128/gptq`; every scheme with every quantiser that suits it by default.
    #[arg(long, value_name = "SCHEME/QUANTISER", value_parser = parse_row)]
    pub row: Vec<Row>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Worker threads; the CPU limit by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

fn parse_row(text: &str) -> Result<Row, String> {
    let (scheme, quantiser) = text
        .split_once('/')
        .ok_or("write a scheme and a quantiser, such as W4A16-g128/gptq")?;
    let recipe = Recipe {
        scheme: scheme.parse::<Scheme>()?,
        quantiser: quantiser.parse::<Quantiser>()?,
    };
    recipe.check().map_err(|error: Error| error.message)?;
    Ok(Row::Uniform(recipe))
}

/// Measures and prints.
///
/// # Errors
/// Whatever kept the table from being made.
pub fn run(arguments: &Arguments) -> Result<()> {
    let options = quality::Options {
        model: arguments.model.clone(),
        data: arguments.data.clone(),
        window: arguments.window,
        samples: arguments.samples,
        tasks: arguments.tasks.clone(),
        task_samples: arguments.task_samples,
        calibration: arguments.calibration.clone(),
        calibration_samples: arguments.calibration_samples,
        sequence_length: arguments.sequence_length,
        rows: if arguments.row.is_empty() {
            Row::all()
        } else {
            arguments.row.clone()
        },
    };
    threads::configure(arguments.threads)?;
    let rows = quality::run(&options, &job::progress())?;
    job::print(&if arguments.json {
        serde_json::to_string(&rows).expect("rows hold only strings and numbers")
    } else {
        quality::table(&rows)
    })
}
