//! `mixquant-operator`: reads the command line, builds the context, leads, reconciles and ends cleanly. Decides nothing about services.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::{ArgAction, Parser, Subcommand};
use kube::{Client, CustomResourceExt as _};
use mixquant_crds::MixQuantService;
use mixquant_operator::apply::Writer;
use mixquant_operator::context::Context;
use mixquant_operator::controller;
use mixquant_operator::lease::{Election, Ended, Fence};
use mixquant_operator::metrics::Metrics;
use mixquant_operator::observe::Observer;
use mixquant_operator::replay::World;
use mixquant_operator::server::{self, Health};
use mixquant_operator::telemetry::{self, LogFormat};
use mixquant_operator::watches::Scope;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How long passes that run when the process is asked to stop may go on.
const DRAIN: Duration = Duration::from_secs(2);

/// Calibrates, verifies and rolls out quantised models on Kubernetes.
#[derive(Parser)]
#[command(name = "mixquant-operator", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Reconcile until told to stop.
    Run(RunArguments),
    /// Print the custom resource definition as YAML.
    Crd,
    /// Print what would happen next in a world from a file: `observed`, `samples` and `now`.
    Plan {
        /// The world as YAML.
        #[arg(long, value_name = "FILE")]
        file: PathBuf,
    },
}

#[derive(clap::Args)]
struct RunArguments {
    /// Serve this namespace only; all without it.
    #[arg(long, env = "WATCH_NAMESPACE")]
    watch_namespace: Option<String>,
    /// Take part in an election, so that of several copies one writes.
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    leader_elect: bool,
    /// The name of the Lease.
    #[arg(long, default_value = "mixquant-operator")]
    lease_name: String,
    /// The namespace of the Lease; that of the current context without it.
    #[arg(long, env = "POD_NAMESPACE")]
    lease_namespace: Option<String>,
    /// This copy's name in the Lease and in Events. A pod's name is right: its containers never run at the same time.
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Where /metrics, /livez and /readyz are served.
    #[arg(long, default_value = "0.0.0.0:8080")]
    admin_listen: SocketAddr,
    /// A namespace whose pods may read engine pods' metrics beside the operator's own (that of --lease-namespace). May be repeated.
    #[arg(long, value_name = "NAMESPACE")]
    metrics_reader: Vec<String>,
    /// Use the routes of the Gateway API (`HTTPRoute`), for services with `spec.traffic.mode: GatewayAPI`. Needs the rights to them.
    #[arg(long)]
    gateway_api: bool,
    /// How log lines look.
    #[arg(long, value_enum, default_value = "json")]
    log_format: LogFormat,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Run(arguments) => run(arguments),
        Command::Crd => print_yaml(&MixQuantService::crd()),
        Command::Plan { file } => replay(&file),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(
                clippy::print_stderr,
                reason = "the one place that tells a person why the program ends"
            )]
            {
                eprintln!("error: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn print_yaml(value: &impl Serialize) -> anyhow::Result<()> {
    let yaml = serde_norway::to_string(value)?;
    #[expect(clippy::print_stdout, reason = "the command's output")]
    {
        print!("{yaml}");
    }
    Ok(())
}

fn replay(file: &Path) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let world = World::read(&text)
        .map_err(|error| anyhow!("{} is not a world: {error}", file.display()))?;
    print_yaml(&serde_json::to_value(world.plan())?)
}

fn run(arguments: RunArguments) -> anyhow::Result<()> {
    telemetry::init(arguments.log_format);
    // Two threads: the work is waiting. More would only hold memory.
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(4)
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(lead(arguments))
}

async fn lead(arguments: RunArguments) -> anyhow::Result<()> {
    let listener = TcpListener::bind(arguments.admin_listen)
        .await
        .with_context(|| {
            format!(
                "cannot listen on {}: choose another --admin-listen",
                arguments.admin_listen
            )
        })?;
    let config = kube::Config::infer()
        .await
        .context("no cluster: run in a pod with a service account, or set KUBECONFIG")?;
    let lease_namespace = arguments
        .lease_namespace
        .clone()
        .unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).context("cannot make a client for the cluster")?;
    let identity = arguments.identity.clone().unwrap_or_else(own_name);

    let metrics = Arc::new(Metrics::default());
    let health = Arc::new(Health::new(Arc::clone(&metrics)));
    let stop = CancellationToken::new();
    let stop_server = CancellationToken::new();
    stop_on_signal(stop.clone())?;
    let server = tokio::spawn(server::serve(
        listener,
        Arc::clone(&metrics),
        Arc::clone(&health),
        stop_server.clone(),
    ));

    let fence = if arguments.leader_elect {
        Fence::default()
    } else {
        warn!("no leader election: a second copy would write as well");
        Fence::open()
    };
    let writer = Writer::new(
        client.clone(),
        fence.clone(),
        Arc::clone(&metrics),
        identity.clone(),
    );
    let election = arguments.leader_elect.then(|| {
        let lease = (lease_namespace.as_str(), arguments.lease_name.as_str());
        let gate = (writer.clone(), fence);
        Election::new(&client, lease, identity, gate, Arc::clone(&health))
    });
    let readers = std::iter::once(lease_namespace).chain(arguments.metrics_reader);
    let observer =
        Observer::new(client.clone(), readers.collect()).with_gateway_api(arguments.gateway_api);
    let context = Arc::new(Context::new((client, observer), writer, metrics, health));
    let scope = Scope(arguments.watch_namespace.filter(|name| !name.is_empty()));
    let ended = elect_and_reconcile(election, context, scope, &stop).await;
    stop_server.cancel();
    let _ = server.await;
    match ended {
        Ended::Stopped => Ok(()),
        Ended::Lost => bail!("the lease was lost: this copy ends, and starts anew as a candidate"),
    }
}

async fn elect_and_reconcile(
    election: Option<Election>,
    context: Arc<Context>,
    scope: Scope,
    stop: &CancellationToken,
) -> Ended {
    let Some(mut election) = election else {
        context.health.leading_unelected();
        controller::run(context, scope, stop.clone()).await;
        return Ended::Stopped;
    };
    if !election.acquire(stop).await {
        return Ended::Stopped;
    }
    let mut reconciling = tokio::spawn(controller::run(context, scope, stop.clone()));
    let ended = tokio::select! {
        ended = election.hold(stop) => Some(ended),
        // Only a panic ends it before it is told to stop.
        _ = &mut reconciling => None,
    };
    if let Some(ended) = ended {
        // Passes that run may end; what they do not finish, the successor does.
        let drain = match ended {
            Ended::Stopped => DRAIN,
            Ended::Lost => Duration::ZERO,
        };
        if tokio::time::timeout(drain, &mut reconciling).await.is_err() {
            reconciling.abort();
        }
    }
    election.release().await;
    ended.unwrap_or(if stop.is_cancelled() {
        Ended::Stopped
    } else {
        Ended::Lost
    })
}

fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM: stopping"),
            _ = interrupt.recv() => info!("SIGINT: stopping"),
        }
        stop.cancel();
    });
    Ok(())
}

/// A name that no other process has, for one that runs outside of a pod.
fn own_name() -> String {
    let random: u64 = rand::random();
    format!("mixquant-operator-{}-{random:08x}", std::process::id())
}
