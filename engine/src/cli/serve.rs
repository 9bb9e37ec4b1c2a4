//! `mixquant-engine serve`: reads the arguments, starts the server and turns signals into its end.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use mixquant_crds::{DecodeScheme, PrecisionPlan, PrefillScheme, WeightCopies, names};
use tokio::runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::{Error, Result};
use crate::kernels::threads;
use crate::server::{Options, start};

use super::valve::ValveArguments;
use crate::valve::break_even::Threshold;

/// What `serve` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory: config.json, tokenizer.json, safetensors.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Calibrated artifact; without it everything runs at the stored precision.
    #[arg(long, value_name = "DIR")]
    pub artifact: Option<PathBuf>,
    /// Quantise at load, without calibration: the safe first step.
    #[arg(long, value_name = "SCHEME", conflicts_with = "artifact")]
    pub quantize: Option<Quantize>,
    /// With --quantize: `Dual` keeps both forms of the weights, `OnTheFly` makes the quantised one while a prompt is read, `Single` keeps
    /// it alone for prefill and decode.
    #[arg(long, value_name = "COPIES", requires = "quantize", default_value = "Dual", value_parser = copies)]
    pub weight_copies: WeightCopies,
    /// With --quantize: prompts of so many tokens and more are read by the quantised copy; `auto` measures at start from where on that pays.
    #[arg(
        long,
        value_name = "N|auto",
        requires = "quantize",
        default_value = "512"
    )]
    pub min_prompt_tokens: Threshold,
    /// Where the API listens.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8000")]
    pub listen: SocketAddr,
    /// Where /livez, /readyz and /metrics listen.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:9090")]
    pub admin_listen: SocketAddr,
    /// The model's name in requests and metrics; the directory's name by default.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// The revision's name in metrics.
    #[arg(long, env = names::ENV_REVISION, value_name = "LABEL", default_value = "")]
    pub revision: String,
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = positive)]
    pub max_batch_size: usize,
    /// Tokens of prompt and answer together; the model's context by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_sequence_length: Option<usize>,
    /// Sequences that wait at most; more are answered with 503.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub queue_size: usize,
    /// Threads that compute; the CPUs that this process may use by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// After SIGTERM, requests are still taken for so long, until load balancers know.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub drain_delay_seconds: u64,
    /// After that, requests in progress may take so long.
    #[arg(long, value_name = "SECONDS", default_value_t = 25)]
    pub shutdown_grace_seconds: u64,
    /// Do not compare the artifact's files to their digests. For tests with damaged artifacts only.
    #[arg(long)]
    pub skip_digest_checks: bool,
    /// The safety valve behind quantised prefills.
    #[command(flatten)]
    pub valve: ValveArguments,
}

/// Schemes that need no calibration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Quantize {
    /// INT8 weights and activations.
    #[value(name = "W8A8")]
    W8A8,
}

/// At least 1, and little enough that products of two such numbers cannot overflow.
fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<u32>() {
        Ok(number @ 1..=1_000_000_000) => Ok(number as usize),
        _ => Err("give a whole number from 1 to 1000000000".to_owned()),
    }
}

/// Serves until SIGTERM or SIGINT and then drains; a second signal ends at once.
///
/// # Errors
/// What keeps the server from starting, the worker's failure, or a drain that was cut short.
pub fn run(arguments: &Arguments) -> Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Error::internal(format!("cannot wait for signals: {error}")))?;
    runtime.block_on(async {
        // Before anything else: a signal while the model loads must end the process in order too.
        let mut signals = Signals::new()?;
        threads::configure(arguments.threads)?;
        let mut running = start(options(arguments))?;
        tracing::info!(api = %running.api(), admin = %running.admin(), "listening");
        tokio::select! {
            result = running.finished() => return result,
            () = signals.next() => tracing::info!("draining: a second signal ends at once"),
        }
        running.begin_drain();
        tokio::select! {
            result = running.finished() => result,
            () = signals.next() => Err(Error::internal("a second signal ended the process before its requests were answered")),
        }
    })
}

fn options(arguments: &Arguments) -> Options {
    Options {
        model: arguments.model.clone(),
        artifact: arguments.artifact.clone(),
        listen: arguments.listen,
        admin_listen: arguments.admin_listen,
        model_name: (arguments.served_model_name.clone())
            .unwrap_or_else(|| directory_name(&arguments.model)),
        revision: arguments.revision.clone(),
        max_batch_size: arguments.max_batch_size,
        max_sequence_length: arguments.max_sequence_length,
        queue_size: arguments.queue_size,
        drain_delay: Duration::from_secs(arguments.drain_delay_seconds),
        shutdown_grace: Duration::from_secs(arguments.shutdown_grace_seconds),
        skip_digest_checks: arguments.skip_digest_checks,
        quantise: arguments
            .quantize
            .map(|Quantize::W8A8| quantised(arguments.weight_copies, arguments.min_prompt_tokens)),
        valve: arguments.valve.settings(),
        difference_log: arguments.valve.log(),
    }
}

/// The plan of `--quantize W8A8` and its threshold.
fn quantised(copies: WeightCopies, threshold: Threshold) -> (PrecisionPlan, Option<Threshold>) {
    let decode = match copies {
        WeightCopies::Single => DecodeScheme::W8A8,
        WeightCopies::Dual | WeightCopies::OnTheFly => DecodeScheme::BF16,
    };
    let mut plan = PrecisionPlan::precise(decode);
    plan.prefill.scheme = PrefillScheme::W8A8;
    plan.weight_copies = copies;
    // One copy has no switch, so no threshold either.
    let threshold = plan.has_switch().then_some(threshold);
    (plan, threshold)
}

fn copies(text: &str) -> Result<WeightCopies, String> {
    serde_json::from_value(text.into()).map_err(|_| "give Dual, OnTheFly or Single".to_owned())
}

pub(super) fn directory_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let listen = |kind| {
            signal(kind)
                .map_err(|error| Error::internal(format!("cannot listen for signals: {error}")))
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
