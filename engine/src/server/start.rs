//! Brings the process up and down: ports first, then the model, then requests; and back in the order that loses none.

use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use mixquant_crds::{Digest, KvPrecision, PrecisionPlan};
use tokio::runtime;
use tokio::sync::{Semaphore, oneshot, watch};

use crate::artifact::golden::Golden;
use crate::artifact::{Artifact, Check};
use crate::drift::Watch;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::metrics::Metrics;
use crate::model::Model;
use crate::scheduler::Limits;
use crate::tokenizer::Tokenizer;
use crate::valve::break_even::{Threshold, resolve};
use crate::valve::log::{self, DifferenceLog};
use crate::valve::read::Settings;
use crate::worker::{Job, Worker, self_test};

use super::http::{Port, bind};
use super::probe::Prober;
use super::request::Bounds;
use super::{App, admin, router, unix_seconds};

/// Connections of the API and of the admin port. Below the usual limit of 1024 open files.
const MAX_CONNECTIONS: usize = 768;
const MAX_ADMIN_CONNECTIONS: usize = 64;
/// Sequences of one request at most, whatever the queue holds.
const MAX_SEQUENCES: usize = 128;
/// How long answers may take to say that the worker ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How to serve.
#[derive(Debug, Clone)]
pub struct Options {
    /// Hugging Face directory.
    pub model: PathBuf,
    /// Artifact directory.
    pub artifact: Option<PathBuf>,
    /// Without an artifact: obey this plan, for which weights are quantised at load, with another or a measured threshold.
    pub quantise: Option<(PrecisionPlan, Option<Threshold>)>,
    /// The API's address.
    pub listen: SocketAddr,
    /// The admin port's address.
    pub admin_listen: SocketAddr,
    /// The model's name in requests and metrics.
    pub model_name: String,
    /// The revision's name in metrics.
    pub revision: String,
    /// Sequences that run at once.
    pub max_batch_size: usize,
    /// Prompt and answer together; the model's context when absent.
    pub max_sequence_length: Option<usize>,
    /// Sequences that wait at most.
    pub queue_size: usize,
    /// Time between the first signal and the end of accepting.
    pub drain_delay: Duration,
    /// Time for requests in progress after that.
    pub shutdown_grace: Duration,
    /// Uses an artifact without comparing its files to their digests.
    pub skip_digest_checks: bool,
    /// What the safety valve lets pass.
    pub valve: Settings,
    /// Where it keeps what it does not.
    pub difference_log: Option<log::Options>,
}

/// A server that runs.
#[derive(Debug)]
pub struct Running {
    api: SocketAddr,
    admin: SocketAddr,
    drain: watch::Sender<bool>,
    health: Arc<Health>,
    finished: oneshot::Receiver<Result<()>>,
}

impl Running {
    /// Where the API listens.
    pub fn api(&self) -> SocketAddr {
        self.api
    }

    /// Where the admin port listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Readiness goes off now; the rest follows the drain delay and the grace.
    pub fn begin_drain(&self) {
        self.health.set_draining();
        // Nobody listens any more when the server has ended already.
        let _ = self.drain.send(true);
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What kept the model from loading, or ended the worker.
    pub async fn finished(&mut self) -> Result<()> {
        (&mut self.finished)
            .await
            .unwrap_or_else(|_| Err(Error::internal("the server's thread ended without a word")))
    }
}

/// What the worker's thread tells the API's.
struct Loaded {
    tokenizer: Arc<Tokenizer>,
    bounds: Bounds,
}

/// Takes the ports and begins to load; requests are answered as soon as the model is ready.
///
/// # Errors
/// An address that cannot be taken, or a thread that cannot be started.
pub fn start(options: Options) -> Result<Running> {
    let (api_listener, api) = bind(options.listen, "--listen")?;
    let (admin_listener, admin) = bind(options.admin_listen, "--admin-listen")?;
    let health = Arc::new(Health::new());
    let metrics = Arc::new(Metrics::new(&options.model_name, &options.revision));
    let prober = Arc::new(Prober::new(
        options.artifact.as_deref(),
        options.max_batch_size,
        options.queue_size,
    ));
    let (drain, draining) = watch::channel(false);
    let (finish, finished) = oneshot::channel();
    let (end_admin, admin_ends) = oneshot::channel();
    spawn("admin", {
        let port = Port {
            router: admin::router(&health, &metrics, &prober),
            health: health.clone(),
            max_connections: MAX_ADMIN_CONNECTIONS,
        };
        move || run_admin(port, admin_listener, admin_ends)
    })?;
    let (jobs, job_receiver) = mpsc::channel();
    let (loaded_sender, loaded) = oneshot::channel();
    let (worker_guard, worker_ends) = oneshot::channel();
    spawn("worker", {
        let (options, metrics, health) = (options.clone(), metrics.clone(), health.clone());
        move || {
            run_worker(
                &options,
                (metrics, health),
                &job_receiver,
                (loaded_sender, worker_guard),
            );
        }
    })?;
    let serving = Serving {
        options,
        health: health.clone(),
        metrics,
        jobs,
        prober,
    };
    spawn("api", move || {
        let result = serving.run(api_listener, loaded, worker_ends, draining);
        drop(end_admin);
        // The receiver may be gone with the `Running` that held it.
        let _ = finish.send(result);
    })?;
    Ok(Running {
        api,
        admin,
        drain,
        health,
        finished,
    })
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
    thread
        .map(drop)
        .map_err(|error| Error::internal(format!("cannot start the thread `{name}`: {error}")))
}

fn run_admin(port: Port, listener: TcpListener, end: oneshot::Receiver<()>) {
    let served = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .and_then(|runtime| {
            let end = async { drop(end.await) };
            runtime.block_on(port.serve(listener, end, Duration::ZERO))
        });
    if let Err(error) = served {
        tracing::error!(%error, "the admin port failed");
    }
}

type Reports = (oneshot::Sender<Result<Loaded>>, oneshot::Sender<String>);

/// Loads, reports, works. Whatever ends it is told last.
fn run_worker(
    options: &Options,
    (metrics, health): (Arc<Metrics>, Arc<Health>),
    jobs: &mpsc::Receiver<Job>,
    (loaded, ended): Reports,
) {
    let ending = health.clone();
    let work = move || match load(options, &metrics) {
        Err(error) => drop(loaded.send(Err(error))),
        Ok(Ready {
            model,
            tokenizer,
            bounds,
            differences,
            drift,
        }) => {
            let limits = Limits {
                max_batch_size: options.max_batch_size,
                kv_capacity_tokens: options.max_batch_size * bounds.max_sequence_length,
            };
            let worker = Worker::new(model, tokenizer.clone(), limits, metrics, health.clone());
            let worker = worker.with_valve(options.valve, differences);
            let mut worker = worker.with_drift(drift);
            health.set_loaded();
            if loaded.send(Ok(Loaded { tokenizer, bounds })).is_ok() {
                worker.run(jobs);
            }
        }
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        let why = (panic.downcast_ref::<String>().cloned())
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic".to_owned());
        let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
        ending.set_ended(&why);
        // At shutdown nobody listens any more.
        let _ = ended.send(why);
    }
}

/// What was loaded.
struct Ready {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    bounds: Bounds,
    differences: Option<DifferenceLog>,
    drift: Option<Watch>,
}

fn load(options: &Options, metrics: &Arc<Metrics>) -> Result<Ready> {
    // First what can fail at once.
    let differences = (options.difference_log.as_ref())
        .map(|log| DifferenceLog::open(log, metrics.clone()))
        .transpose()?;
    let mut model = Model::open(&options.model)?;
    let tokenizer = Tokenizer::open(&options.model)?;
    let config = model.config();
    let (vocab_size, context) = (config.vocab_size, config.max_position_embeddings);
    if tokenizer.vocab_size() > vocab_size {
        return Err(Error::model(format!(
            "{}: the tokenizer has ids up to {} but the model's vocabulary has {vocab_size}: they are not of one model",
            options.model.display(),
            tokenizer.vocab_size() - 1
        )));
    }
    let max_sequence_length = options.max_sequence_length.unwrap_or(context);
    if !(2..=context).contains(&max_sequence_length) {
        return Err(Error::plan(format!(
            "--max-sequence-length is {max_sequence_length}: the model's context allows 2 to {context}"
        )));
    }
    let Attached {
        artifact,
        golden,
        drift,
    } = attach(options, &mut model)?;
    self_test(&model, &tokenizer, golden.as_ref())?;
    metrics.set_plan(model.plan());
    metrics.set_weight_bytes(model.weight_bytes());
    metrics.set_build_info(model.digest(), artifact.as_ref());
    let artifact = artifact.map_or_else(|| "none".to_owned(), |digest| digest.to_string());
    tracing::info!(model = %model.digest(), artifact, plan = ?model.plan(), weights = ?model.weight_bytes(), "the model is ready");
    let max_sequences = MAX_SEQUENCES.min(options.max_batch_size + options.queue_size);
    Ok(Ready {
        model,
        tokenizer: Arc::new(tokenizer),
        bounds: Bounds {
            max_sequence_length,
            vocab_size,
            max_sequences,
        },
        differences,
        drift,
    })
}

/// What an artifact says beside what the model takes.
#[derive(Default)]
struct Attached {
    artifact: Option<Digest>,
    golden: Option<Golden>,
    drift: Option<Watch>,
}

/// Gives the model what it was calibrated to, or what can be had without.
fn attach(options: &Options, model: &mut Model) -> Result<Attached> {
    let Some(directory) = &options.artifact else {
        if let Some((scheme, threshold)) = &options.quantise {
            let plan = resolve(scheme, *threshold, model)?;
            model.attach(model.linears_of(&plan), None, plan)?;
        } else {
            model.hold();
        }
        return Ok(Attached::default());
    };
    let check = if options.skip_digest_checks {
        tracing::warn!("digest checks are off: this artifact may be damaged");
        Check::Nothing
    } else {
        Check::Digests
    };
    let artifact = Artifact::open(directory, check)?;
    let digest = artifact.digest().clone();
    let golden = artifact.golden().cloned();
    let ranges = artifact.ranges().cloned();
    artifact.attach_to(model)?;
    let quantises = model.plan().kv_cache.default != KvPrecision::BF16;
    Ok(Attached {
        artifact: Some(digest),
        golden,
        drift: ranges.map(|ranges| Watch::new(ranges, quantises)),
    })
}

/// The API's thread.
struct Serving {
    options: Options,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    jobs: mpsc::Sender<Job>,
    prober: Arc<Prober>,
}

impl Serving {
    fn run(
        self,
        listener: TcpListener,
        loaded: oneshot::Receiver<Result<Loaded>>,
        worker_ends: oneshot::Receiver<String>,
        draining: watch::Receiver<bool>,
    ) -> Result<()> {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(4)
            .thread_name("api")
            .enable_all()
            .build();
        let runtime = runtime
            .map_err(|error| Error::internal(format!("cannot start the API's threads: {error}")))?;
        let result = runtime.block_on(self.serve(listener, loaded, worker_ends, draining));
        runtime.shutdown_background();
        result
    }

    async fn serve(
        self,
        listener: TcpListener,
        loaded: oneshot::Receiver<Result<Loaded>>,
        worker_ends: oneshot::Receiver<String>,
        mut draining: watch::Receiver<bool>,
    ) -> Result<()> {
        let loaded = tokio::select! {
            loaded = loaded => loaded,
            _ = draining.wait_for(|drain| *drain) => return Ok(()),
        };
        let mut worker_ends = worker_ends;
        let loaded = match loaded {
            Ok(loaded) => loaded?,
            Err(_) => return Err(ended(worker_ends.await)),
        };
        let Self {
            options,
            health,
            metrics,
            jobs,
            prober,
        } = self;
        let app = Arc::new(App {
            model_name: options.model_name,
            created: unix_seconds(),
            bounds: loaded.bounds,
            tokenizer: loaded.tokenizer,
            metrics,
            health: health.clone(),
            jobs,
            permits: Arc::new(Semaphore::new(options.max_batch_size + options.queue_size)),
        });
        prober.open(&app);
        let port = Port {
            router: router(app),
            health,
            max_connections: MAX_CONNECTIONS,
        };
        let stop = async {
            // An error means that the `Running` is gone: nobody could ever ask for the end, so it is now.
            let _ = draining.wait_for(|drain| *drain).await;
            tokio::time::sleep(options.drain_delay).await;
        };
        let (stop_now, stopping) = oneshot::channel::<()>();
        let stop = async {
            tokio::select! {
                () = stop => {}
                _ = stopping => {}
            }
        };
        let mut serving = std::pin::pin!(port.serve(listener, stop, options.shutdown_grace));
        let served = tokio::select! {
            served = &mut serving => served,
            why = &mut worker_ends => {
                drop(stop_now);
                // Requests in progress learn it from their closed channels; then the process may go.
                let _ = tokio::time::timeout(LAST_WORDS, serving).await;
                return Err(ended(why));
            }
        };
        match served {
            Ok(true) => Ok(()),
            Ok(false) => {
                tracing::warn!("requests were still in progress at the end of the grace");
                Ok(())
            }
            Err(error) => Err(Error::internal(format!("the API port failed: {error}"))),
        }
    }
}

fn ended(why: Result<String, oneshot::error::RecvError>) -> Error {
    Error::internal(format!(
        "the worker ended: {}",
        why.unwrap_or_else(|_| "its thread is gone".to_owned())
    ))
}
