//! `mixquant-engine export`: reads its arguments, quantises a model and writes it in a layout that other engines load.

use std::path::PathBuf;

use clap::Args;

use super::quantiser::Quantising;
use crate::error::Result;
use crate::export::{self, Layout};
use crate::job;
use crate::kernels::threads;
use crate::quant::Scheme;

/// What `export` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory of the unquantised model.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// The new folder.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// W8A8, W8A16, W4A16[-g32|-g64|-g128][-asym] or FP8.
    #[arg(long, value_name = "SCHEME", default_value = "W4A16-g128")]
    pub scheme: Scheme,
    /// compressed-tensors, gptq, or dequantised (FP32 weights that hold the quantised values).
    #[arg(long, value_name = "LAYOUT", default_value = "compressed-tensors")]
    pub layout: Layout,
    /// Bits a weight of the block linears to spend where they save most: W4A16 in groups of 128, 64 and 32, and W8A16.
    #[arg(long, value_name = "BITS", conflicts_with = "scheme")]
    pub budget_bpw: Option<f64>,
    /// How weights are made.
    #[command(flatten)]
    pub quantising: Quantising,
    /// Calibration texts, which every quantiser but rtn and every budget needs.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Texts to read, spread over the data.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub samples: usize,
    /// Tokens of a text at most.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    pub sequence_length: usize,
    /// Worker threads; the CPU limit by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Quantises and writes.
///
/// # Errors
/// Whatever kept the checkpoint from being written; then nothing is left but finished layers, which the next run takes up.
pub fn run(arguments: &Arguments) -> Result<()> {
    let options = export::Options {
        model: arguments.model.clone(),
        out: arguments.out.clone(),
        recipe: arguments.quantising.recipe(arguments.scheme)?,
        budget_bits_per_weight: arguments.budget_bpw,
        layout: arguments.layout,
        data: arguments.data.clone(),
        samples: arguments.samples,
        sequence_length: arguments.sequence_length,
    };
    threads::configure(arguments.threads)?;
    let lines = export::run(&options, &job::progress())?;
    job::print(&lines.join("\n"))
}
