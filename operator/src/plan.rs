//! What happens next? From the service, the world, the samples and the time to the actions of one pass. Called once a reconcile.
//!
//! Every pass has the same shape: read the memory (status) -> `measure` it against the Jobs -> `trial` moves the memory at most one
//! stage -> `effects` makes the world what the memory says -> one status write. The status goes first when its memory changed (memory
//! before muscle), else last. There is no other state: a crash anywhere is a pass that ended early.
#![warn(clippy::wildcard_enum_match_arm)]

mod artifacts;
mod asked;
mod drift;
mod effects;
mod ending;
mod fit;
mod measure;
mod probe;
mod scale;
mod traffic;
mod trial;
mod verdict;

use std::time::Duration;

use jiff::Timestamp;
use mixquant_crds::MixQuantServiceStatus;
use mixquant_crds::status::{FailedRevision, Reason, VerdictStatus};

use crate::action::{Action, Event, Metric, Plan, RoomQuestion, Window};
use crate::canary;
use crate::observed::{FrozenRevision, ObjectName, Observed, ObservedDeployment};
use crate::revision::{Render, find_or_freeze};
use crate::samples::Samples;
use crate::status;
use crate::validate::{InvalidSpec, ValidService};

pub use measure::Measured;
pub use traffic::{mirror, route_problem, traffic_is_right, weight};

/// The names that the status keeps at most.
const MEMORY: usize = 10;
/// Seconds of a window at rest, where `spec.drift` names no other.
const REST_WINDOW: i64 = 600;
/// How soon to look again at what this pass has begun, or for an object of someone else to go away.
const AGAIN: Duration = Duration::from_secs(10);

/// Everything that a pass may look at.
#[derive(Clone, Copy)]
pub struct World<'a> {
    /// The service.
    pub valid: &'a ValidService,
    /// The world.
    pub observed: &'a Observed,
    /// What the trial's pods measured.
    pub samples: &'a Samples,
    /// The time. Must not run backwards within a process.
    pub now: Timestamp,
    /// How a new revision's template is made.
    pub render: Render,
}

impl World<'_> {
    /// A revision's Deployment.
    pub fn deployment(&self, revision: &str) -> Option<&ObservedDeployment> {
        let mut all = self.observed.deployments.iter();
        all.find(|deployment| deployment.revision == revision)
    }

    /// Whether a revision runs `replicas` pods, all available and of its newest template.
    pub fn runs(&self, revision: &str, replicas: i32) -> bool {
        self.deployment(revision).is_some_and(|deployment| {
            deployment.up_to_date
                && deployment.replicas == replicas
                && deployment.available >= replicas
        })
    }

    /// Stable's pods that must be there: those that are asked for, or where the load asks for more, those that are always wanted.
    pub fn least(&self) -> i32 {
        let replicas = self.valid.replicas;
        let scaling = self.valid.scaling.as_ref();
        scaling.map_or(replicas, |scaling| {
            replicas.min(scaling.bounds_at(self.now).min)
        })
    }

    /// Whether an object of this name belongs to someone else.
    pub fn is_foreign(&self, object: &ObjectName) -> bool {
        self.observed.foreign.contains(object)
    }
}

/// What a pass has decided so far.
#[derive(Default)]
pub struct Decisions {
    /// The memory, moved on.
    pub memory: MixQuantServiceStatus,
    /// Events and counts, in order; published after the memory is written, so that none is told twice.
    pub told: Vec<Action>,
    /// The moments at which time alone changes something.
    pub wake: Vec<Duration>,
    /// Names that are taken by someone else.
    pub blocked: Vec<String>,
    /// The verdict of this pass.
    pub verdict: Option<VerdictStatus>,
    /// Why what is asked for has no room to begin.
    pub no_room: Option<String>,
    /// The room that decides something and is not known.
    pub asks_room: Option<Box<RoomQuestion>>,
}

impl Decisions {
    fn tell(&mut self, warning: bool, reason: Reason, note: impl Into<String>) {
        self.told.push(Action::Publish(Event {
            warning,
            reason,
            note: note.into(),
        }));
    }

    /// An object that we need belongs to someone else.
    fn block(&mut self, object: String) {
        if !self.blocked.contains(&object) {
            self.blocked.push(object);
        }
    }

    fn count(&mut self, metric: Metric) {
        self.told.push(Action::Count(metric));
    }

    fn wake_at(&mut self, then: Timestamp, now: Timestamp) {
        self.wake.push(canary::until(then, now));
    }

    /// Whether `revision` (or the inputs that it names) failed for the request that stands now.
    pub fn failure(&self, valid: &ValidService, revision: &str) -> Option<&FailedRevision> {
        let mut all = self.memory.failed_revisions.iter();
        all.find(|failed| failed.revision == revision && failed.request == valid.request)
    }

    /// Remembers that `revision` failed and tells it.
    fn fail(&mut self, world: &World<'_>, revision: &str, reason: Reason, message: &str) {
        let failed = FailedRevision {
            revision: revision.to_owned(),
            generation: world.valid.generation,
            request: world.valid.request.clone(),
            reason,
            message: message.to_owned(),
            at: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.now),
        };
        self.memory.failed_revisions.insert(0, failed);
        self.memory.failed_revisions.truncate(MEMORY);
        self.tell(true, reason, message);
    }
}

/// One pass over a service whose spec can work. `render` is `build::deployment::template`.
pub fn plan(
    valid: &ValidService,
    observed: &Observed,
    samples: &Samples,
    now: Timestamp,
    render: Render,
) -> Plan {
    let world = World {
        valid,
        observed,
        samples,
        // Statuses keep whole seconds: what is remembered must read back as it was written.
        now: Timestamp::from_second(now.as_second()).unwrap_or(now),
        render,
    };
    if observed.service.metadata.deletion_timestamp.is_some() {
        // Owner references take everything with it; nothing new may appear meanwhile.
        return only(Vec::new());
    }
    let before = observed.service.status.clone().unwrap_or_default();
    let mut decisions = Decisions {
        memory: before.clone(),
        ..Decisions::default()
    };
    asked::expire(&world, &mut decisions);
    let valid = asked::attempted(valid, &decisions.memory);
    let world = World {
        valid: &valid,
        ..world
    };
    asked::answer(&world, &mut decisions);
    asked::confirm(&world, &mut decisions);
    let valid = asked::attempted(world.valid, &decisions.memory);
    let world = World {
        valid: &valid,
        ..world
    };
    let measured = measure::measure(&world, &mut decisions);
    let target = target(&world, &decisions.memory, &measured);
    let valid = scale::scaled(&world, &mut decisions, target.as_ref());
    let world = World {
        valid: &valid,
        ..world
    };
    trial::advance(&world, &mut decisions, target.as_ref());
    if let Some(target) = &target {
        fit::make_room(&world, &mut decisions, target);
    }
    verdict::show_at_rest(&world, &mut decisions);
    scale::say_what_holds(&world, &mut decisions);
    let effects = effects::effects(&world, &mut decisions, &measured, target.as_ref());
    let idle = effects.is_empty();
    drift::watch(&world, &mut decisions, (&measured, target.as_ref()), idle);

    let remembers = !status::same_memory(&before, &decisions.memory);
    let after = status::report(&world, &decisions, &measured, target.as_ref());
    let window = window(&world, &after);
    let load = scale::load_window(&world, &after);
    let probe = probe::round(&world, &after, window.as_ref());
    let mut actions = Vec::new();
    if remembers {
        actions.push(Action::Remember(Box::new(after.clone())));
    }
    actions.append(&mut decisions.told);
    actions.extend(effects);
    if !remembers && Some(&after) != observed.service.status.as_ref() {
        actions.push(Action::Report(Box::new(after)));
    }
    if !decisions.blocked.is_empty() || !actions.is_empty() {
        // Watches wake us sooner; should one be lost, what was begun goes on all the same.
        decisions.wake.push(AGAIN);
    }
    Plan {
        actions,
        requeue: decisions.wake.iter().min().copied(),
        window,
        load,
        probe,
        asks_room: decisions.asks_room,
    }
}

/// One pass over a service whose spec cannot work: it says so and leaves everything as it is.
pub fn plan_invalid(observed: &Observed, problem: &InvalidSpec, now: Timestamp) -> Plan {
    let before = observed.service.status.clone();
    let after = status::invalid(observed, &problem.to_string(), now);
    let mut actions = Vec::new();
    if before.as_ref() != Some(&after) && observed.service.metadata.deletion_timestamp.is_none() {
        let told = before.is_some_and(|before| status::says_invalid(&before, &after));
        actions.push(Action::Report(Box::new(after)));
        if !told {
            actions.push(Action::Publish(Event {
                warning: true,
                reason: Reason::InvalidSpec,
                note: problem.to_string(),
            }));
        }
    }
    only(actions)
}

/// These actions, and nothing to sample or to wait for.
fn only(actions: Vec<Action>) -> Plan {
    Plan {
        actions,
        requeue: None,
        window: None,
        load: None,
        probe: None,
        asks_room: None,
    }
}

/// The revision that should serve: what a person put in the spec's place, or what the spec asks for; `None` until its precision is
/// measured and accepted.
fn target(
    world: &World<'_>,
    memory: &MixQuantServiceStatus,
    measured: &Measured,
) -> Option<FrozenRevision> {
    if let Some(undo) = &memory.undo {
        let mut kept = world.observed.revisions.iter();
        let found = kept.find(|kept| kept.frozen.revision == undo.revision);
        return found.map(|kept| kept.frozen.clone());
    }
    match measured {
        Measured::Accepted { record, .. } => {
            let roles = [memory.stable.as_ref(), memory.canary.as_ref()];
            let preferred = roles.into_iter().flatten().map(|role| &role.revision);
            Some(find_or_freeze(
                world.valid,
                &record.report,
                &world.observed.revisions,
                &preferred.map(String::as_str).collect::<Vec<_>>(),
                world.render,
            ))
        }
        Measured::Waiting { .. }
        | Measured::Invalid { .. }
        | Measured::Running { .. }
        | Measured::Failed { .. }
        | Measured::Rejected { .. } => None,
    }
}

/// What the shell samples until the next pass: the trial's window; at rest stable alone, for display and drift.
fn window(world: &World<'_>, memory: &MixQuantServiceStatus) -> Option<Window> {
    let stable = memory.stable.as_ref()?;
    let Some(canary) = &memory.canary else {
        let second = world.now.as_second();
        let drift = world.valid.drift.as_ref();
        let span = drift.map_or(REST_WINDOW, |drift| i64::from(drift.window.max(1)));
        let since = Timestamp::from_second(second - second.rem_euclid(span)).ok()?;
        let revisions = [stable.revision.clone(), stable.revision.clone()];
        return Some(Window { since, revisions });
    };
    canary::window(
        &world.valid.rollout,
        memory.rollout.as_ref()?,
        &stable.revision,
        &canary.revision,
    )
}
