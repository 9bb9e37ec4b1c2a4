//! `mixquant-engine calibrate`: reads its arguments, runs the calibration as a Job and prints the report as one JSON object.

use std::path::PathBuf;

use clap::Args;
use mixquant_crds::{Digest, JobMessage, PrecisionPlan};

use crate::calibrate::quantisers::Quantiser;
use crate::dataset::mix::Mix;
use crate::error;
use crate::kernels::threads;
use crate::valve::break_even::Threshold;
use crate::{calibrate, job};

/// What `calibrate` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory: config.json, tokenizer.json, safetensors.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Calibration texts: JSON lines with `text`, `messages`, `tokens`, or `prompt` and `answer`, or one plain text.
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Where the artifact's folder is made; its name is its digest.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The precision plan as JSON or a file with it; W8A8 prefill, BF16 decode and INT4/INT8 cache by default.
    #[arg(long, value_name = "FILE|JSON", value_parser = job::parse_plan)]
    pub plan: Option<PrecisionPlan>,
    /// Prompts of so many tokens and more are read by the quantised copy, or `auto` to measure from where on that pays; instead of the
    /// plan's number.
    #[arg(long, value_name = "N|auto")]
    pub min_prompt_tokens: Option<Threshold>,
    /// Texts to read, spread over the data.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub samples: usize,
    /// Where the data has more texts: which of them to read. 0 at first; each other number reads others.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "mix")]
    pub round: usize,
    /// How much of each `kind` or `task` of text, such as agent=3,documentation=1; spread over the data by default.
    #[arg(long, value_name = "KIND=SHARE,…")]
    pub mix: Option<Mix>,
    /// Tokens of a text at most.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    pub sequence_length: usize,
    /// Texts to verify on, other than the calibration texts; without it, those that calibration did not read.
    #[arg(long, value_name = "FILE")]
    pub eval_data: Option<PathBuf>,
    /// Windows to verify on; 16 by default, or all where there are fewer.
    #[arg(long, value_name = "N")]
    pub eval_samples: Option<usize>,
    /// Tokens of a window; --sequence-length by default.
    #[arg(long, value_name = "TOKENS")]
    pub eval_sequence_length: Option<usize>,
    /// How the W8A8 copy is made: rtn, smoothquant, gptq or awq.
    #[arg(long, value_name = "NAME", default_value = "rtn")]
    pub quantiser: Quantiser,
    /// How decode's own copy is made, with decode.scheme W4A8 (gptq by default, awq or rtn) or LUT4 (lut by default, or rtn).
    #[arg(long, value_name = "NAME")]
    pub decode_quantiser: Option<Quantiser>,
    /// Bits a weight that decode.scheme W4A8 may spend where they save most, instead of the plan's bitsPerWeight.
    #[arg(long, value_name = "BITS")]
    pub budget_bpw: Option<f64>,
    /// Refuse any other model.
    #[arg(long, value_name = "DIGEST")]
    pub expect_model_digest: Option<Digest>,
    /// The service that the artifact is made for: it signs the artifact, which stays while anybody has signed it.
    #[arg(long, value_name = "NAME", value_parser = parse_owner)]
    pub owner: Option<String>,
    /// An artifact that --owner needs no more: removed first, unless somebody else has signed it. May be repeated.
    #[arg(long, value_name = "DIGEST", requires = "owner")]
    pub remove: Vec<Digest>,
    /// Where the answer for the operator is left.
    #[arg(long, value_name = "PATH")]
    pub termination_message: Option<PathBuf>,
    /// Worker threads; the CPU limit by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// A service's name, which is also a file's.
fn parse_owner(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !text.is_empty() && text.len() <= 63 && text.bytes().all(plain) {
        Ok(text.to_owned())
    } else {
        Err("a service's name has 1 to 63 characters of a-z, 0-9 and -".into())
    }
}

/// Calibrates and prints the report.
///
/// # Errors
/// Whatever kept the artifact from being made.
pub fn run(arguments: &Arguments) -> error::Result<()> {
    let mut plan = (arguments.plan.clone()).unwrap_or_else(calibrate::default_plan);
    if arguments.budget_bpw.is_some() {
        plan.decode.bits_per_weight = arguments.budget_bpw;
    }
    let options = calibrate::Options {
        model: arguments.model.clone(),
        data: arguments.data.clone(),
        out: arguments.out.clone(),
        plan,
        samples: arguments.samples,
        mix: arguments.mix.clone(),
        round: arguments.round,
        owner: arguments.owner.clone(),
        remove: arguments.remove.clone(),
        sequence_length: arguments.sequence_length,
        evaluation_data: arguments.eval_data.clone(),
        evaluation_samples: arguments.eval_samples,
        evaluation_sequence_length: arguments
            .eval_sequence_length
            .unwrap_or(arguments.sequence_length),
        quantiser: arguments.quantiser,
        decode_quantiser: arguments.decode_quantiser,
        expected_model: arguments.expect_model_digest.clone(),
        min_prompt_tokens: arguments.min_prompt_tokens,
    };
    let work = |progress: &_| {
        threads::configure(arguments.threads)?;
        calibrate::run(&options, progress)
    };
    let report = job::run(arguments.termination_message.as_deref(), work, |report| {
        JobMessage::Calibrated(report.clone())
    })?;
    job::print(&serde_json::to_string(&report).expect("a report holds only strings and numbers"))
}
