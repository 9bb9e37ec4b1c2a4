//! The load generator: a steady stream of requests, none ever tried twice, each answer checked to its last byte.
//!
//! It starts requests at a fixed rate however slow the answers are (an open loop), so a stalled service shows as failures and never as less load.
//! Kept and new connections, streamed and whole answers, short and exact requests take turns.

mod report;
mod request;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::{Mutex, Semaphore};

pub use report::Report;
pub use request::{Ask, Target, Way};

use crate::prompts::Prompt;

/// How much load, and its bounds.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Where it goes.
    pub target: Target,
    /// Requests a second.
    pub rate: u32,
    /// It ends by itself after this time,
    pub duration: Duration,
    /// or after this many requests.
    pub max_requests: u64,
    /// Every `exact_every`th request asks one of `prompts` and demands its answer; 0 = none.
    pub exact_every: u64,
    /// Requests with known answers.
    pub prompts: Vec<Prompt>,
}

/// More requests than this in flight are not started but counted as failed: the service does not keep up.
const MAX_IN_FLIGHT: usize = 512;

/// Load that runs until it is stopped or reaches a bound of its plan.
pub struct Running {
    stop: Arc<AtomicBool>,
    report: Arc<Mutex<Report>>,
    driver: std::thread::JoinHandle<()>,
}

/// From here on the address must be reachable: the node's proxy learns of a new Service a moment after its pods are ready.
const REACHABLE: Duration = Duration::from_secs(30);

impl Running {
    /// Waits until the target takes connections, then starts the load.
    ///
    /// # Errors
    /// A target that takes none for half a minute.
    pub async fn start(plan: Plan) -> anyhow::Result<Self> {
        let address = (plan.target.host.as_str(), plan.target.port);
        let reachable = tokio::time::timeout(REACHABLE, async {
            while tokio::net::TcpStream::connect(address).await.is_err() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        reachable.await.with_context(|| {
            format!(
                "{}:{} takes no connections from here: run this on a node of the cluster or in a pod",
                address.0, address.1
            )
        })?;
        // On threads of its own: a scenario that waits for a program blocks its thread, and the load must not wait with it.
        let stop = Arc::new(AtomicBool::new(false));
        let report = Arc::new(Mutex::new(Report::new()));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let driving = drive(plan, Arc::clone(&stop), Arc::clone(&report));
        let driver = std::thread::spawn(move || runtime.block_on(driving));
        Ok(Self {
            stop,
            report,
            driver,
        })
    }

    /// What was counted so far; requests in flight are not in it yet.
    pub async fn so_far(&self) -> Report {
        self.report.lock().await.clone()
    }

    /// Whether a bound of the plan ended it.
    pub fn is_finished(&self) -> bool {
        self.driver.is_finished()
    }

    /// Starts no more requests, waits for those in flight and reports.
    ///
    /// # Panics
    /// When the load generator itself panicked.
    pub async fn stop(self) -> Report {
        self.stop.store(true, Ordering::Relaxed);
        self.finish().await
    }

    /// Waits until a bound of the plan ends it, and reports.
    ///
    /// # Panics
    /// When the load generator itself panicked.
    pub async fn finish(self) -> Report {
        tokio::task::spawn_blocking(|| self.driver.join())
            .await
            .expect("waiting for a thread does not panic")
            .expect("the load generator does not panic");
        let report = self.report.lock().await;
        report.clone()
    }
}

async fn drive(plan: Plan, stop: Arc<AtomicBool>, report: Arc<Mutex<Report>>) {
    let clients = Arc::new(request::Clients::new());
    let plan = Arc::new(plan);
    let slots = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / plan.rate.max(1));
    let begun = Instant::now();
    for number in 0..plan.max_requests {
        ticks.tick().await;
        if stop.load(Ordering::Relaxed) || begun.elapsed() >= plan.duration {
            break;
        }
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            report.lock().await.failed(
                number,
                "not sent",
                &format!("{MAX_IN_FLIGHT} requests are in flight: the service does not keep up"),
            );
            continue;
        };
        let (clients, plan, report) =
            (Arc::clone(&clients), Arc::clone(&plan), Arc::clone(&report));
        tokio::spawn(async move {
            let (way, ask) = turn(&plan, number);
            let sent = Instant::now();
            let outcome = clients.ask(&plan.target, way, &ask).await;
            let mut report = report.lock().await;
            match outcome {
                Ok(()) => report.succeeded(way, &ask, sent.elapsed()),
                Err(failure) => report.failed(
                    number,
                    failure.kind,
                    &format!("{way:?}: {}", failure.detail),
                ),
            }
            drop(slot);
        });
    }
    // All slots back means that no request is in flight; each one has its own deadline, so this ends.
    let permits = u32::try_from(MAX_IN_FLIGHT).expect("the constant is small");
    drop(slots.acquire_many(permits).await);
}

/// Which way request `number` goes and what it asks: the ways take turns, whatever is asked.
fn turn(plan: &Plan, number: u64) -> (Way, Ask<'_>) {
    let way = Way {
        keep_alive: number.is_multiple_of(2),
        stream: (number / 2).is_multiple_of(2),
    };
    let exact =
        plan.exact_every > 0 && !plan.prompts.is_empty() && number.is_multiple_of(plan.exact_every);
    if exact {
        let index = usize::try_from(number / plan.exact_every).unwrap_or(0) % plan.prompts.len();
        return (way, Ask::Exact(&plan.prompts[index]));
    }
    (way, Ask::Short { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_four_ways_and_exact_questions_take_turns() {
        let prompt = Prompt {
            id: "a".into(),
            n_prompt_tokens: 1,
            max_tokens: 1,
            messages: Vec::new(),
            answer: "x".into(),
        };
        let target = Target {
            host: "127.0.0.1".into(),
            port: 1,
            model: "m".into(),
        };
        let plan = Plan {
            target,
            rate: 1,
            duration: Duration::ZERO,
            max_requests: 0,
            exact_every: 5,
            prompts: vec![prompt],
        };
        let turns: Vec<_> = (0..40).map(|number| turn(&plan, number)).collect();
        for keep_alive in [false, true] {
            for stream in [false, true] {
                let way = Way { keep_alive, stream };
                assert_eq!(
                    turns.iter().filter(|turn| turn.0 == way).count(),
                    10,
                    "{way:?}"
                );
                assert_eq!(
                    turns
                        .iter()
                        .filter(|turn| turn.0 == way && matches!(turn.1, Ask::Exact(_)))
                        .count(),
                    2,
                    "{way:?}"
                );
            }
        }
    }
}
