//! A small cluster in virtual time for the operator's pure core: it obeys the contract of `action.rs` and nothing more.
//!
//! A scenario is a seed (for noise) and a list of happenings. Running it gives its end or the first broken invariant with a trace.
//! Nothing here knows how `plan` decides.

#![expect(
    unreachable_pub,
    reason = "a test's module has no crate to be reached from"
)]
#![expect(clippy::unwrap_used, reason = "this is a test: a panic is its failure")]

use std::collections::BTreeMap;

mod cluster;
mod demand;
mod faults;
mod gateway;
mod invariants;
mod operator;
mod places;
mod quiet;
mod scenario;
mod traffic;
mod view;
mod volume;

pub use scenario::{Change, Happening, Order, Scenario, shrink};

use cluster::Cluster;
use operator::Operator;

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// `status.phase`.
    pub phase: String,
    /// `status.stable.revision`.
    pub stable: Option<String>,
    /// Pods by revision, without those of none.
    pub pods: Vec<(String, i32)>,
    /// What the Service selects.
    pub traffic: String,
    /// The Services of the tracks, and the weights of the route.
    pub gateway: String,
    /// Revisions and inputs that failed and are remembered.
    pub failed: Vec<String>,
    /// Whether the spec at the end asks for something that must succeed when nothing disturbs it.
    pub good: bool,
}

/// A broken invariant.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Which, and how.
    pub message: String,
    /// What happened until then.
    pub trace: Vec<String>,
}

/// Virtual seconds after the last happening in which the service must come to rest.
const PATIENCE: i64 = 7200;
/// A rollout that has stood still for so long waits for a person.
const STILL: i64 = 1500;

/// How often each kind of Event was published.
pub type Said = BTreeMap<String, u64>;

/// Runs a scenario to rest, checking every invariant at every action.
pub fn run(scenario: &Scenario) -> Result<(End, Said), Failure> {
    // Nearly all lives are good and nobody reads their trace: a bad one is lived again.
    live(scenario, false).or_else(|_| live(scenario, true))
}

fn live(scenario: &Scenario, traced: bool) -> Result<(End, Said), Failure> {
    let mut simulation = Simulation {
        cluster: Cluster::new(scenario.seed, scenario.gpus, scenario.traffic),
        operator: Operator::default(),
        pending: scenario.happenings.clone(),
        order: scenario.order,
        since_change: 0,
    };
    simulation.pending.reverse();
    simulation.cluster.trace = traced.then(Vec::new);
    simulation.cluster.keeps_history = scenario.has_stale_reads();
    match simulation.run() {
        Ok(end) => Ok((end, simulation.cluster.said)),
        Err(message) => Err(Failure {
            message,
            trace: simulation.cluster.trace.unwrap_or_default(),
        }),
    }
}

struct Simulation {
    cluster: Cluster,
    operator: Operator,
    /// Last first.
    pending: Vec<(i64, Happening)>,
    order: Order,
    since_change: i64,
}

impl Simulation {
    fn run(&mut self) -> Result<End, String> {
        loop {
            self.happen()?;
            if self.operator.is_due(&self.cluster) {
                self.operator.pass(&mut self.cluster)?;
                self.cluster.check()?;
            }
            if self.is_at_rest() {
                if self.pending.is_empty() {
                    return self.end();
                }
                self.next_change()?;
                continue;
            }
            let next = self.next_moment();
            if self.cluster.now > self.since_change + PATIENCE {
                return Err(format!(
                    "no rest within {PATIENCE} s: the phase is {}",
                    self.cluster.phase()
                ));
            }
            let crowded = self.cluster.has_tenant();
            self.cluster.advance(next, self.operator.window())?;
            if crowded && !self.cluster.has_tenant() {
                self.operator.stir();
            }
        }
    }

    /// The happenings whose time has come.
    fn happen(&mut self) -> Result<(), String> {
        while let Some((at, happening)) = self.pending.last() {
            if self.order.waits_for_rest(happening) || *at > self.cluster.now {
                break;
            }
            self.take()?;
        }
        Ok(())
    }

    fn take(&mut self) -> Result<(), String> {
        if let Some((_, happening)) = self.pending.pop() {
            self.since_change = self.cluster.now;
            self.cluster.happen(&happening, &mut self.operator)?;
        }
        Ok(())
    }

    fn is_at_rest(&self) -> bool {
        if self.waits_for_a_person() {
            return true;
        }
        // Something missing is looked for again and again, and so is the load; that is rest.
        let phase = self.cluster.phase();
        let scales =
            self.cluster.scales() && ["Ready", "Degraded", "Pending"].contains(&phase.as_str());
        let looks = scales || phase == "Pending";
        let looks = looks && self.operator.only_looks(self.cluster.scales());
        let looks = looks && self.cluster.has_been_seen();
        let waits = self.operator.next().is_some() && !looks;
        !self.operator.is_due(&self.cluster) && !waits && !self.cluster.is_moving()
    }

    /// A rollout that stands still is judged on and on; longer than this no time alone lets it go on.
    fn waits_for_a_person(&self) -> bool {
        self.cluster.phase() == "Paused" && self.cluster.now > self.since_change + STILL
    }

    /// At rest nothing happens until the next happening does.
    fn next_change(&mut self) -> Result<(), String> {
        let Some((at, happening)) = self.pending.last() else {
            return Ok(());
        };
        let now = self.cluster.now + 1;
        self.cluster.now = if self.order.waits_for_rest(happening) {
            now
        } else {
            now.max(*at)
        };
        self.take()
    }

    fn next_moment(&self) -> i64 {
        if self.operator.is_due(&self.cluster) {
            return self.cluster.now + 1;
        }
        let moments = [
            self.operator.next(),
            self.cluster.next(),
            self.pending.last().map(|(at, _)| *at),
        ];
        let later = moments
            .into_iter()
            .flatten()
            .filter(|at| *at > self.cluster.now);
        later.min().unwrap_or(self.cluster.now + 1)
    }

    fn end(&mut self) -> Result<End, String> {
        if !self.waits_for_a_person() {
            self.operator.confirm_rest(&mut self.cluster)?;
        }
        self.cluster.is_answered()?;
        let end = self.cluster.end();
        // Pending: something that the spec names is missing. Deleted services are at rest anywhere.
        let rests = ["Ready", "Degraded", "Pending", "Paused"].contains(&end.phase.as_str());
        if rests || end.traffic == "None" {
            Ok(end)
        } else {
            Err(format!("it rests in {end:?}"))
        }
    }
}
