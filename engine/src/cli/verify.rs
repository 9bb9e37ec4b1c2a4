//! `mixquant-engine verify`: reads its arguments, measures as a Job and prints the report as one JSON object or as a small table.

use std::path::PathBuf;

use clap::Args;
use mixquant_crds::{Digest, JobMessage, PrecisionPlan, VerifyReport};

use crate::artifact::Check;
use crate::error::Result;
use crate::kernels::threads;
use crate::{job, verify};

/// What `verify` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory: config.json, tokenizer.json, safetensors.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// The artifact's folder; without it --plan is measured, or plain BF16.
    #[arg(long, value_name = "DIR")]
    pub artifact: Option<PathBuf>,
    /// Evaluation texts: JSON lines with `text`, `messages` or `prompt` and `answer`, or one plain text.
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Tokens of a window.
    #[arg(long, value_name = "TOKENS")]
    pub window: usize,
    /// Windows to measure, spread over the data; all by default.
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// A precision plan to measure instead of the artifact's, as JSON or a file with it.
    #[arg(long, value_name = "FILE|JSON", value_parser = job::parse_plan)]
    pub plan: Option<PrecisionPlan>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Where the answer for the operator is left.
    #[arg(long, value_name = "PATH")]
    pub termination_message: Option<PathBuf>,
    /// Refuse any other artifact.
    #[arg(long, value_name = "DIGEST")]
    pub expect_artifact_digest: Option<Digest>,
    /// Open damaged artifacts: only for tests.
    #[arg(long)]
    pub skip_digest_checks: bool,
    /// Worker threads; the CPU limit by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Verifies and prints the report.
///
/// # Errors
/// Whatever kept the measurement from being made. A large distance is no error.
pub fn run(arguments: &Arguments) -> Result<()> {
    let options = verify::Options {
        model: arguments.model.clone(),
        artifact: arguments.artifact.clone(),
        check: if arguments.skip_digest_checks {
            Check::Nothing
        } else {
            Check::Digests
        },
        data: arguments.data.clone(),
        window: arguments.window,
        samples: arguments.samples,
        plan: arguments.plan.clone(),
        expected_artifact: arguments.expect_artifact_digest.clone(),
    };
    let work = |progress: &_| {
        threads::configure(arguments.threads)?;
        verify::run(&options, progress)
    };
    let report = job::run(arguments.termination_message.as_deref(), work, |report| {
        JobMessage::Verified(report.clone())
    })?;
    job::print(&if arguments.json {
        serde_json::to_string(&report).expect("a report holds only strings and numbers")
    } else {
        table(&report)
    })
}

fn table(report: &VerifyReport) -> String {
    let mut lines = vec![
        format!("baseline perplexity  {:.4}", report.baseline_perplexity),
        format!(
            "perplexity           {:.4} ({:+.3} %)",
            report.perplexity, report.perplexity_increase_percent
        ),
        format!(
            "KL divergence        mean {:.6}, 99th percentile {:.6} nats",
            report.kl_mean, report.kl_p99
        ),
        format!(
            "top-1 agreement      {:.2} %",
            report.top1_agreement_percent
        ),
        format!("tokens               {}", report.tokens),
    ];
    if let Some(slice) = &report.worst_slice {
        lines.push(format!(
            "worst slice          {}: {:+.3} %, KL {:.6}, top-1 {:.2} %, {} tokens",
            slice.name,
            slice.perplexity_increase_percent,
            slice.kl_mean,
            slice.top1_agreement_percent,
            slice.tokens
        ));
    }
    if let Some(digest) = &report.artifact_digest {
        lines.push(format!("artifact             {digest}"));
    }
    lines.join("\n")
}
