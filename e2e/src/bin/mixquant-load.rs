//! The load generator as a program, for the demo's pod and for people: `mixquant-load HOST:PORT [REQUESTS_A_SECOND] [SECONDS] [MODEL]`.
//!
//! It prints a line every few seconds and a report at the end, also when SIGTERM or Ctrl-C ends it early. Exit status 1 when a request failed.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its report is its output"
)]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use mixquant_e2e::load::{Plan, Report, Running, Target};
use mixquant_e2e::prompts;
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str =
    "usage: mixquant-load HOST:PORT [REQUESTS_A_SECOND, 20] [SECONDS, 10] [MODEL, kube-llama]";
/// Between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(report) => {
            print!("{report}");
            ExitCode::from(u8::from(report.failed > 0))
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

async fn run() -> anyhow::Result<Report> {
    let plan = plan(&std::env::args().skip(1).collect::<Vec<_>>())?;
    let running = Running::start(plan).await?;
    let mut terminated = signal(SignalKind::terminate())?;
    let mut ticks = tokio::time::interval(PROGRESS_EVERY);
    while !running.is_finished() {
        tokio::select! {
            _ = ticks.tick() => {
                let report = running.so_far().await;
                let first = report.first_failures.first().map_or(String::new(), |failure| format!(" (the first {failure})"));
                println!("{} succeeded, {} failed{first}", report.succeeded, report.failed);
            }
            _ = terminated.recv() => break,
            _ = tokio::signal::ctrl_c() => break,
        }
    }
    Ok(running.stop().await)
}

fn plan(arguments: &[String]) -> anyhow::Result<Plan> {
    let (Some(address), true) = (arguments.first(), arguments.len() <= 4) else {
        bail!(USAGE)
    };
    let (host, port) = address.rsplit_once(':').context(USAGE)?;
    let number = |index: usize, default: u32| {
        arguments
            .get(index)
            .map_or(Ok(default), |text| text.parse().context(USAGE))
    };
    let (rate, seconds) = (number(1, 20)?, number(2, 10)?);
    if !(1..=10_000).contains(&rate) || !(1..=86_400).contains(&seconds) {
        bail!("the rate must be 1 to 10000 a second and the time 1 to 86400 seconds");
    }
    Ok(Plan {
        target: Target {
            host: host.to_owned(),
            port: port.parse().context(USAGE)?,
            model: arguments
                .get(3)
                .map_or("kube-llama", String::as_str)
                .to_owned(),
        },
        rate,
        duration: Duration::from_secs(seconds.into()),
        max_requests: u64::from(rate) * u64::from(seconds),
        exact_every: 20,
        prompts: prompts::short()?,
    })
}
