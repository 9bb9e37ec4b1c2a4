//! `mixquant-engine advise`: reads a model's configuration and a device's description, prints what to run it with.

use std::path::PathBuf;

use clap::Args;

use crate::advise::{Device, Load, ModelFacts, Task, advise, cpu};
use crate::error::{Error, Result};
use crate::job::print;
use crate::model::Config;

/// What `advise` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory; only its config.json is read.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// A YAML or JSON file that describes the device, or `cpu` to measure this machine.
    #[arg(long, value_name = "FILE")]
    pub device: PathBuf,
    /// Tokens of a prompt.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = tokens)]
    pub prompt_tokens: u64,
    /// Tokens of prompt and answer together; the model's context, or 4096 where that is longer.
    #[arg(long, value_name = "N", value_parser = tokens)]
    pub sequence_length: Option<u64>,
    /// Sequences at once.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = tokens)]
    pub concurrency: u64,
    /// What the answers are for.
    #[arg(long, value_enum, default_value = "general")]
    pub task: Task,
    /// Everything as JSON.
    #[arg(long)]
    pub json: bool,
}

/// The sequence length when none is given and the model's context is longer.
const SEQUENCE: u64 = 4096;

fn tokens(text: &str) -> Result<u64, String> {
    match text.parse::<u32>() {
        Ok(number @ 1..=100_000_000) => Ok(u64::from(number)),
        _ => Err("give a whole number from 1 to 100000000".to_owned()),
    }
}

/// Prints the advice.
///
/// # Errors
/// A model or a device that cannot be read, or a load that the model cannot take.
pub fn run(arguments: &Arguments) -> Result<()> {
    let config = Config::read(&arguments.model)?;
    let name = super::serve::directory_name(&arguments.model);
    let model = ModelFacts::of(&name, &config);
    let sequence_length = arguments
        .sequence_length
        .unwrap_or(SEQUENCE.min(model.context));
    let load = Load {
        prompt_tokens: arguments.prompt_tokens.min(sequence_length),
        sequence_length,
        concurrency: arguments.concurrency,
        task: arguments.task,
    };
    if sequence_length > model.context {
        return Err(Error::data(format!(
            "--sequence-length {sequence_length} is longer than the model's context: take at most {}",
            model.context
        )));
    }
    let device = if arguments.device.as_os_str() == "cpu" {
        cpu::measure()
    } else {
        Device::read(&arguments.device)?
    };
    let advice = advise(model, device, load);
    if arguments.json {
        let text = serde_json::to_string_pretty(&advice).map_err(|error| {
            Error::internal(format!("cannot write the advice as JSON: {error}"))
        })?;
        return print(&text);
    }
    print(advice.to_string().trim_end())
}
