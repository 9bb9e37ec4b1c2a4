//! Records what healthy engine pods measure of their time per token on a real cluster, quiet and disturbed: the traces from which
//! `operator/tests/verdicts.rs` makes rollouts to see how often a healthy one is rolled back.
//!
//! `make traces` writes them to `operator/tests/traces` (`MIXQUANT_TRACE_KIND`: only one kind); without `MIXQUANT_TRACES` it is skipped.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mixquant_crds::names;
use mixquant_e2e::load;
use mixquant_e2e::means;
use mixquant_e2e::namespace::with_temp_namespace;
use mixquant_e2e::prompts;
use mixquant_e2e::service::{Service, revision};
use serde_json::{Value, json};

/// The scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(40);
/// From `kubectl apply` to Ready, and from a patch to its end.
const STAGE: Duration = Duration::from_mins(4);
/// One record of a trace.
const RECORD: Duration = Duration::from_secs(5);
/// Records of a trace.
const RECORDS: usize = 9;
/// Traces of each kind.
const TRACES: usize = 4;
const FAMILY: &str = "mixquant_request_time_per_output_token_seconds_bucket";

/// What happens beside the pods while a trace is recorded.
struct Kind {
    name: &'static str,
    /// Requests a second to both pods.
    rate: u32,
    /// Programs that never wait, on the same node.
    spinners: usize,
    /// The pods' limit of CPU, if they have one.
    cpu: Option<&'static str>,
}

const KINDS: [Kind; 6] = [
    Kind {
        name: "quiet",
        rate: 30,
        spinners: 0,
        cpu: None,
    },
    Kind {
        name: "busy",
        rate: 60,
        spinners: 0,
        cpu: None,
    },
    Kind {
        name: "neighbour",
        rate: 30,
        spinners: 1,
        cpu: None,
    },
    Kind {
        name: "crowded",
        rate: 30,
        spinners: 3,
        cpu: None,
    },
    Kind {
        name: "limited",
        rate: 30,
        spinners: 0,
        cpu: Some("300m"),
    },
    Kind {
        name: "limited-neighbour",
        rate: 30,
        spinners: 2,
        cpu: Some("300m"),
    },
];

/// Programs that take CPU from everything else until this is dropped.
struct Spinners(Vec<Child>);

impl Spinners {
    fn start(count: usize) -> anyhow::Result<Self> {
        let start = |_| {
            Command::new("sh")
                .args(["-c", "while :; do :; done"])
                .spawn()
        };
        let children = (0..count).map(start).collect::<Result<_, _>>();
        Ok(Self(children.context("sh")?))
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have been killed already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The cumulative counts of the buckets of a page of metrics, in the order of their bounds.
fn buckets(page: &str) -> Vec<u64> {
    let lines = page.lines().filter(|line| line.starts_with(FAMILY));
    let count = |line: &str| line.rsplit(' ').next()?.parse::<f64>().ok();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count"
    )]
    lines.filter_map(count).map(|count| count as u64).collect()
}

/// What was counted in each bucket between two pages: `[bucket, count]`, without those that nothing fell into.
fn between(before: &[u64], after: &[u64]) -> Vec<[u64; 2]> {
    let grown = before
        .iter()
        .zip(after)
        .map(|(before, after)| after - before);
    let mut below = 0;
    let counted = grown.map(|cumulative| {
        let count = cumulative - below;
        below = cumulative;
        count
    });
    let counted = (0..).zip(counted).filter(|(_, count)| *count > 0);
    counted.map(|(bucket, count)| [bucket, count]).collect()
}

/// The pods of stable; those of the revision before it may still be leaving.
fn serving(service: &Service) -> anyhow::Result<Vec<String>> {
    let object = service.get()?;
    let pods = service.engine_pods()?;
    let pods = pods["items"].as_array().cloned().unwrap_or_default();
    let is_stables = |pod: &&Value| {
        let labels = &pod["metadata"]["labels"];
        labels[names::LABEL_REVISION] == revision(&object, "stable")
    };
    let name = |pod: &Value| pod["metadata"]["name"].as_str().unwrap_or("").to_owned();
    Ok(pods.iter().filter(is_stables).map(name).collect())
}

/// One trace of both pods.
async fn record(service: &Service, folder: &Path, name: &str) -> anyhow::Result<()> {
    let names = serving(service)?;
    ensure!(names.len() == 2, "{} pods", names.len());
    let pages = || async {
        let pages = names.iter().map(|name| service.metrics_of(name));
        let pages = futures::future::try_join_all(pages).await?;
        anyhow::Ok(pages.iter().map(|page| buckets(page)).collect::<Vec<_>>())
    };
    let mut ticks = tokio::time::interval(RECORD);
    ticks.tick().await;
    let mut before = pages().await?;
    let mut pods = [Vec::new(), Vec::new()];
    for _ in 0..RECORDS {
        ticks.tick().await;
        let after = pages().await?;
        for (pod, records) in pods.iter_mut().enumerate() {
            records.push(between(&before[pod], &after[pod]));
        }
        before = after;
    }
    let mut text = format!("{{\"recordSeconds\": {}, \"pods\": [\n", RECORD.as_secs());
    for (pod, records) in pods.iter().enumerate() {
        let lines: Vec<_> = records
            .iter()
            .map(|record| json!(record).to_string())
            .collect();
        let end = if pod == 0 { "]," } else { "]" };
        writeln!(text, "[{}{end}", lines.join(",\n"))?;
    }
    text.push_str("]}\n");
    std::fs::write(folder.join(format!("{name}.json")), text)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_healthy_pods_measure_is_recorded() {
    let Some(folder) = std::env::var_os("MIXQUANT_TRACES").map(PathBuf::from) else {
        return means::skip("MIXQUANT_TRACES names no folder: `make traces` records");
    };
    with_temp_namespace("traces", SCENARIO, |context| async move {
        ensure!(
            context.cluster.local,
            "the disturbances are programs on the local cluster's node"
        );
        std::fs::create_dir_all(&folder)?;
        let service = Service::create(context)?;
        // Nothing is judged here: a limit of CPU is a change of revision, and its canary is to pass.
        service.patch(
            &json!({"slo": {"tpot": {"maxMilliseconds": 120_000, "maxRegressionPercent": 1000}}}),
        )?;
        service.kubectl_wait_ready(STAGE).await?;
        let only = std::env::var("MIXQUANT_TRACE_KIND").ok();
        let wanted = |kind: &&Kind| only.as_ref().is_none_or(|only| only == kind.name);
        for kind in KINDS.iter().filter(wanted) {
            service.patch(&json!({"engine": {"resources": {"limits": {"cpu": kind.cpu}}}}))?;
            let plan = load::Plan {
                target: load::Target {
                    host: service.address()?,
                    port: 80,
                    model: "kube-llama".to_owned(),
                },
                rate: kind.rate,
                duration: SCENARIO,
                max_requests: u64::from(kind.rate) * SCENARIO.as_secs(),
                exact_every: 0,
                prompts: prompts::short()?,
            };
            let load = load::Running::start(plan).await?;
            service.kubectl_wait_ready(STAGE).await?;
            let spinners = Spinners::start(kind.spinners)?;
            for trace in 1..=TRACES {
                record(&service, &folder, &format!("{}-{trace}", kind.name)).await?;
            }
            drop(spinners);
            means::say(&format!("{}: {}", kind.name, load.stop().await));
        }
        Ok(())
    })
    .await;
}
