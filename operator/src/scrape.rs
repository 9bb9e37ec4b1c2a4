//! Asks engine pods for their metrics and keeps, for the window of a trial, what each process counted since the window began.
//!
//! Soft state: after a restart of the operator the windows begin anew, which leaves fewer samples and never better ones. An answer that is
//! late, too large, redirected or not plainly right is a problem with a reason, never a sample.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use futures::StreamExt;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use jiff::Timestamp;
use mixquant_crds::names::PORT_ADMIN;

use crate::action::Window;
use crate::clock;
use crate::observed::ObservedPod;
use crate::prometheus_text::{self, Scrape};
use crate::samples::{Histogram, Samples, TrackSamples};

/// One pod, from the first packet to the last byte.
const DEADLINE: Duration = Duration::from_secs(2);
/// More than this is no metrics page.
const MAX_BODY: usize = 4 * 1024 * 1024;
/// Pods asked at a time, of one service.
const CONCURRENCY: usize = 8;
/// Processes remembered in one window: pods and their restarts.
const MAX_PROCESSES: usize = 4096;

/// Asks pods, and keeps the windows of all services.
pub struct Scraper {
    client: Client<HttpConnector, Empty<Bytes>>,
    port: u16,
    trials: Mutex<HashMap<String, Trial>>,
}

impl Default for Scraper {
    fn default() -> Self {
        Self::on_port(PORT_ADMIN)
    }
}

impl Scraper {
    /// A scraper of pods that answer on `port`.
    pub fn on_port(port: u16) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(DEADLINE));
        Self {
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(0)
                .build(connector),
            port,
            trials: Mutex::default(),
        }
    }

    /// The window whose samples the next passes over the service `uid` need; `None` when there is no trial.
    pub fn set_window(&self, uid: &str, window: Option<&Window>) {
        let mut trials = self.trials.lock().expect("no holder of this lock panics");
        match window {
            None => {
                trials.remove(uid);
            }
            Some(window) => {
                if trials.get(uid).is_none_or(|trial| trial.window != *window) {
                    trials.insert(uid.to_owned(), Trial::new(window.clone()));
                }
            }
        }
    }

    /// Asks the ready pods of the trial's revisions and returns what its window holds now; nothing without a trial.
    pub async fn sample(&self, uid: &str, pods: &[ObservedPod]) -> Samples {
        let trial = |trials: &HashMap<String, Trial>| trials.get(uid).cloned();
        let Some(mut trial) = trial(&self.trials.lock().expect("no holder of this lock panics"))
        else {
            return Samples::default();
        };
        if clock::now() < trial.window.since {
            return Samples::default();
        }
        let asked = trial.asked(pods);
        let answers: Vec<_> = futures::stream::iter(asked)
            .map(|pod: ObservedPod| async move {
                let answer = self.ask(&pod).await;
                (pod, answer)
            })
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        trial.begin();
        for (pod, answer) in answers {
            trial.absorb(&pod, answer);
        }
        trial.taken_at = Some(clock::now());
        let samples = trial.samples();
        let mut trials = self.trials.lock().expect("no holder of this lock panics");
        // The window may have been replaced meanwhile; then these samples are nobody's any more.
        if let Some(kept) = trials.get_mut(uid)
            && kept.window == trial.window
        {
            *kept = trial;
        }
        samples
    }

    async fn ask(&self, pod: &ObservedPod) -> Result<Scrape, String> {
        let text = tokio::time::timeout(DEADLINE, self.fetch(pod))
            .await
            .map_err(|_| format!("no answer within {} s", DEADLINE.as_secs()))??;
        prometheus_text::parse(&text)
    }

    async fn fetch(&self, pod: &ObservedPod) -> Result<String, String> {
        let address: IpAddr = pod
            .ip
            .as_deref()
            .ok_or("no address yet")?
            .parse()
            .map_err(|_| "its address is none")?;
        let request = Request::get(format!(
            "http://{}/metrics",
            SocketAddr::new(address, self.port)
        ))
        .header(header::ACCEPT, "text/plain")
        .body(Empty::new())
        .map_err(|error| error.to_string())?;
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| reasons(&error))?;
        // A redirect is not followed: the pod itself answers or nobody does.
        if response.status() != StatusCode::OK {
            return Err(format!("status {}", response.status()));
        }
        if response.headers().contains_key(header::CONTENT_ENCODING) {
            return Err("a compressed answer that was not asked for".into());
        }
        let body = Limited::new(response.into_body(), MAX_BODY)
            .collect()
            .await
            .map_err(|error| format!("its body: {error}"))?;
        String::from_utf8(body.to_bytes().into()).map_err(|_| "its body is no UTF-8".into())
    }
}

fn reasons(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// What one process counted when the window began for it, and at its newest scrape.
#[derive(Debug, Clone, PartialEq)]
struct Process {
    baseline: Histogram,
    newest: Histogram,
}

/// A window and everything that was counted in it.
#[derive(Debug, Clone)]
struct Trial {
    window: Window,
    taken_at: Option<Timestamp>,
    /// By revision, pod uid and process start: a restarted process starts from zero and is another one.
    processes: BTreeMap<(String, String, u64), Process>,
    answered: BTreeMap<String, u32>,
    problems: BTreeMap<String, Vec<String>>,
}

impl Trial {
    fn new(window: Window) -> Self {
        Self {
            window,
            taken_at: None,
            processes: BTreeMap::new(),
            answered: BTreeMap::new(),
            problems: BTreeMap::new(),
        }
    }

    /// The pods whose samples count.
    fn asked(&self, pods: &[ObservedPod]) -> Vec<ObservedPod> {
        pods.iter()
            .filter(|pod| pod.ready && !pod.terminating)
            .filter(|pod| self.window.revisions.contains(&pod.revision))
            .cloned()
            .collect()
    }

    /// A new round of answers.
    fn begin(&mut self) {
        self.answered.clear();
        self.problems.clear();
    }

    fn absorb(&mut self, pod: &ObservedPod, answer: Result<Scrape, String>) {
        let scrape = match answer {
            Ok(scrape) => scrape,
            Err(why) => return self.problem(pod, &why),
        };
        *self.answered.entry(pod.revision.clone()).or_default() += 1;
        let key = (pod.revision.clone(), pod.uid.clone(), scrape.process_start);
        if self.processes.len() >= MAX_PROCESSES && !self.processes.contains_key(&key) {
            return self.problem(pod, "too many restarts in one window");
        }
        match self.processes.get_mut(&key) {
            Some(process) if continues(&process.newest, &scrape.tpot) => {
                process.newest = scrape.tpot;
            }
            known => {
                let reset = known.is_some();
                let process = Process {
                    baseline: scrape.tpot.clone(),
                    newest: scrape.tpot,
                };
                self.processes.insert(key, process);
                if reset {
                    self.problem(pod, "its counters fell; they are counted from here on");
                }
            }
        }
    }

    fn problem(&mut self, pod: &ObservedPod, why: &str) {
        let problems = self.problems.entry(pod.revision.clone()).or_default();
        problems.push(format!("pod {}: {why}", pod.name));
        problems.sort();
    }

    fn samples(&self) -> Samples {
        let mut tracks: BTreeMap<String, TrackSamples> = BTreeMap::new();
        for revision in &self.window.revisions {
            let track = tracks.entry(revision.clone()).or_default();
            track.pods = self.answered.get(revision).copied().unwrap_or_default();
            track.problems = self.problems.get(revision).cloned().unwrap_or_default();
        }
        for ((revision, _, _), process) in &self.processes {
            let Some(track) = tracks.get_mut(revision) else {
                continue;
            };
            if !add(&mut track.tpot, process) {
                track
                    .problems
                    .push("its pods have different buckets".into());
            }
        }
        Samples {
            since: self.taken_at.map(|_| self.window.since),
            taken_at: self.taken_at,
            tracks,
        }
    }
}

/// Whether `after` may be a later reading of the counters of `before`.
fn continues(before: &Histogram, after: &Histogram) -> bool {
    before.bounds == after.bounds
        && before
            .counts
            .iter()
            .zip(&after.counts)
            .all(|(before, after)| before <= after)
}

/// Adds what `process` counted in the window; `false` when its buckets are others.
fn add(total: &mut Histogram, process: &Process) -> bool {
    let (baseline, newest) = (&process.baseline, &process.newest);
    if total.bounds.is_empty() {
        total.bounds.clone_from(&newest.bounds);
        total.counts = vec![0; newest.counts.len()];
    }
    if total.bounds != newest.bounds {
        return false;
    }
    for ((sum, before), after) in total
        .counts
        .iter_mut()
        .zip(&baseline.counts)
        .zip(&newest.counts)
    {
        *sum = sum.saturating_add(after.saturating_sub(*before));
    }
    true
}

#[cfg(test)]
#[path = "scrape_tests.rs"]
mod tests;
