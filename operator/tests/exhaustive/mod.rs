//! Every state that the core can come to in a small world: a breadth-first search over `plan` itself, closed under all that may happen.
//!
//! One stable pod, one step, three images. At each state: a pass with no samples, good ones or bad ones; a crash after
//! the first action; time; pods that come and go; and a few changes and requests by people. What is checked on every edge: stable
//! changes only with a fresh Pass, or by a person's word. What is checked on the whole graph: from every state the undisturbed way, with
//! samples that pass, ends at rest in Ready, Degraded or Paused.

use std::collections::HashMap;

use jiff::SignedDuration;
use mixquant_crds::Span;
use mixquant_crds::names::ANNOTATION_REQUEST;
use mixquant_crds::rollout::Surge;
use mixquant_crds::status::{MixQuantServiceStatus, Phase, RolloutStage};
use mixquant_operator::observed::{ObservedTraffic, Track, Traffic};
use mixquant_operator::samples::Samples;
use serde_json::json;

use crate::told::{Told, World, service};

/// Seconds that one tick of time takes: the interval and the hold.
const TICK: i64 = 10;
/// Ages beyond the deadline are alike.
const OLD: i64 = 40;
/// A search that grows beyond this has a key that is not closed.
const MAX_STATES: usize = 60_000;

/// A state: the world, and how much people may still do.
#[derive(Clone)]
struct State {
    told: Told,
    changes: u8,
    requests: u8,
}

/// How a canary reaches traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Beside stable, by the ratio of pods.
    Beside,
    /// In the one place that there is.
    InPlace,
    /// By a gateway that takes a while.
    Gateway,
    /// The same, and copies of requests come first.
    Mirror,
}

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    /// A pass; the canary measured at so many times stable's latency, or not at all.
    Pass(Option<f64>),
    /// A pass with good samples that dies after its first action.
    Crash,
    /// Time passes.
    Tick,
    /// All pods get ready.
    Ready,
    /// The canary's pods are lost.
    Lost,
    /// The gateway takes what the route says.
    Taken,
    /// Someone gives the canary everything in the route.
    EditRoute,
    /// A person asks for another image.
    Image(u8),
    /// A person asks something of the rollout.
    Ask(&'static str),
}

const EVENTS: [Event; 16] = [
    Event::Pass(None),
    Event::Pass(Some(1.0)),
    Event::Pass(Some(3.0)),
    Event::Crash,
    Event::Tick,
    Event::Ready,
    Event::Lost,
    Event::Taken,
    Event::EditRoute,
    Event::Image(1),
    Event::Image(2),
    Event::Image(3),
    Event::Ask("abort"),
    Event::Ask("promote full"),
    Event::Ask("retry"),
    Event::Ask("undo"),
];

/// The world that the search begins in: the first image serves, the precision of the others is known.
fn start(changes: u8, requests: u8, way: Way) -> State {
    let mut service = service();
    if way == Way::InPlace {
        service.spec.rollout.surge = Surge::Never;
    }
    let routed = matches!(way, Way::Gateway | Way::Mirror);
    if routed {
        let traffic = json!({"mode": "GatewayAPI", "parentRefs": [{"name": "edge"}]});
        service.spec.traffic = serde_json::from_value(traffic).expect("a traffic");
    }
    // Alone, a canary three times as slow is told by its own limit.
    service.spec.slo.tpot.max_milliseconds = Some(50);
    service.spec.replicas = 1;
    let rollout = &mut service.spec.rollout;
    rollout.steps.truncate(1);
    rollout.steps[0].weight = Some(50);
    rollout.steps[0].hold = Some(Span("10s".into()));
    if way == Way::Mirror {
        let mirror = json!({"mirror": 50, "hold": "10s"});
        let mirror = serde_json::from_value(mirror).expect("a step");
        rollout.steps.insert(0, mirror);
    }
    rollout.analysis.interval = Span("10s".into());
    rollout.analysis.warm_up = Span("0s".into());
    rollout.analysis.failure_limit = 1;
    rollout.progress_deadline_seconds = 30;
    let mut told = Told::reach_with(service, World::Serving);
    for image in [2, 3, 1] {
        told.observed.service.spec.engine.image = format!("engine:{image}");
        told.observed.service.metadata.generation = Some(1 + i64::from(image));
        told.pass();
        told.answer();
        told.pass();
        // No canary is wanted yet: the next image ends its trial.
    }
    for _ in 0..14 {
        told.pods_ready();
        told.pass();
    }
    told.gateway_lags = routed;
    State {
        told,
        changes,
        requests,
    }
}

fn status(state: &State) -> MixQuantServiceStatus {
    state
        .told
        .observed
        .service
        .status
        .clone()
        .unwrap_or_default()
}

/// What a state is, without what no decision looks at: times are ages, and old ages are alike.
fn key(state: &State) -> String {
    let now = state.told.now;
    let age = |then: jiff::Timestamp| now.duration_since(then).as_secs().min(OLD);
    let status = status(state);
    let rollout = status.rollout.as_ref().map(|at| {
        json!([
            format!(
                "{:?} {:?} {:?} {:?}",
                at.stage, at.paused, at.waived, at.room
            ),
            at.step,
            age(at.step_started_at.0),
            at.request.short(),
            at.failed_verdicts,
            (at.released, at.shifted),
            at.verdict.as_ref().map(|verdict| age(verdict.at.0)),
        ])
    });
    let role = |role: Option<mixquant_crds::status::RevisionStatus>| role.map(|role| role.image);
    let failed: Vec<_> = status
        .failed_revisions
        .iter()
        .map(|failed| (&failed.revision, failed.request.short().to_owned()))
        .collect();
    let observed = &state.told.observed;
    let deployments: Vec<_> = observed
        .deployments
        .iter()
        .map(|one| (&one.revision, one.replicas, one.existing, one.ready))
        .collect();
    json!([
        role(status.stable),
        role(status.canary),
        rollout,
        failed,
        status.undo,
        status.attempt,
        status.request.map(|request| request.request),
        observed.service.metadata.annotations,
        observed.service.spec.engine.image,
        deployments,
        (&observed.traffic, &observed.tracks, &observed.route),
        observed
            .jobs
            .iter()
            .map(|job| &job.name)
            .collect::<Vec<_>>(),
        (state.changes, state.requests),
    ])
    .to_string()
}

/// The state after an event; `None` when it cannot happen here.
fn next(state: &State, event: Event) -> Option<State> {
    let mut after = state.clone();
    let told = &mut after.told;
    match event {
        Event::Pass(slowness) => {
            let samples = match slowness {
                None => Samples::default(),
                Some(slowness) => told.samples(slowness)?,
            };
            let plan = told.plan(&samples);
            told.act(&plan);
            told.answer();
        }
        Event::Crash => {
            let samples = told.samples(1.0).unwrap_or_default();
            let mut plan = told.plan(&samples);
            plan.actions.truncate(1);
            told.act(&plan);
            told.answer();
        }
        Event::Tick => told.now += SignedDuration::from_secs(TICK),
        Event::Ready => told.pods_ready(),
        Event::Lost => {
            let canary = status(state).canary?.revision;
            let mut all = told.observed.deployments.iter_mut();
            let lost = all.find(|one| one.revision == canary)?;
            (lost.ready, lost.available) = (0, 0);
        }
        Event::Taken => told.gateway_takes().then_some(())?,
        Event::EditRoute => {
            after.changes = after.changes.checked_sub(1)?;
            told.edit_route(100)?;
        }
        Event::Image(image) => {
            after.changes = after.changes.checked_sub(1)?;
            let image = format!("engine:{image}");
            let service = &mut told.observed.service;
            if service.spec.engine.image == image {
                return None;
            }
            service.spec.engine.image = image;
            let generation = service.metadata.generation.get_or_insert(0);
            *generation += 1;
        }
        Event::Ask(what) => {
            after.requests = after.requests.checked_sub(1)?;
            let canary = status(state).canary.map(|canary| canary.revision);
            let oldest = told.observed.revisions.first()?.frozen.revision.clone();
            let text = match (what, canary) {
                ("undo", _) => format!("{} undo {oldest}", after.requests),
                ("retry", _) => format!("{} retry", after.requests),
                ("promote full", Some(canary)) => {
                    format!("{} promote {canary} full", after.requests)
                }
                (_, Some(canary)) => format!("{} abort {canary}", after.requests),
                (_, None) => return None,
            };
            let annotations = told
                .observed
                .service
                .metadata
                .annotations
                .get_or_insert_default();
            annotations.insert(ANNOTATION_REQUEST.into(), text);
        }
    }
    Some(after)
}

/// A canary has traffic only where its step and its gateway gave it some; and nothing that is selected has lost its pods by our hand.
fn check_gateway(state: &State) {
    let observed = &state.told.observed;
    let selects = |seen: Option<&ObservedTraffic>| match seen.and_then(|seen| seen.selects.clone())
    {
        Some(Traffic::Only(revision)) => Some(revision),
        Some(Traffic::All) | None => None,
    };
    let status = status(state);
    let at = status.rollout.as_ref();
    let stage = at.map(|at| at.stage);
    let steps = &observed.service.spec.rollout.steps;
    let copies = steps[0].mirror.is_some() && at.is_some_and(|at| at.step == 0);
    if copies && stage == Some(RolloutStage::Stepping) {
        let traffic = selects(observed.traffic.as_ref());
        assert_eq!(traffic, status.stable.map(|stable| stable.revision));
    }
    for track in Track::ALL {
        let Some(revision) = selects(observed.tracks.of(track)) else {
            continue;
        };
        let mut all = observed.deployments.iter();
        let runs = all.find(|one| one.revision == revision);
        assert!(
            runs.is_some_and(|one| one.replicas > 0),
            "{track:?} selects {revision}, which is gone, at {stage:?}: {}",
            key(state)
        );
    }
}

/// Stable changes only with a Pass of this very pass, or by a person's word.
fn check_edge(before: &State, event: Event, after: &State) {
    let stable = |state: &State| status(state).stable.map(|stable| stable.revision);
    if stable(before) == stable(after) {
        return;
    }
    let old = status(before);
    let annotations = before.told.observed.service.metadata.annotations.as_ref();
    let request = annotations.and_then(|all| all.get(ANNOTATION_REQUEST));
    let canary = old.canary.as_ref().map_or("", |canary| &canary.revision);
    let asked = request.is_some_and(|text| text.ends_with(&format!("promote {canary} full")));
    let proven = matches!(event, Event::Pass(Some(slowness)) if slowness < 1.5);
    let proven = proven || event == Event::Crash;
    assert!(
        proven || asked,
        "stable changes by {event:?} without a fresh Pass: {}",
        key(before)
    );
    assert_eq!(stable(after).as_deref(), Some(canary), "{}", key(before));
    // The Pass is of the revision that the spec or a person asks for now.
    let asks = &before.told.observed.service.spec.engine.image;
    let serves = status(after).stable.map(|stable| stable.image);
    assert!(
        serves.as_ref() == Some(asks) || old.undo.is_some(),
        "{serves:?} is promoted and {asks} is asked for"
    );
}

/// What happens when nothing disturbs: a pass with good samples, pods that get ready; and time, once passes change only what is shown.
fn undisturbed(state: &State) -> State {
    let mut after = state.clone();
    let before = key(state);
    for _ in 0..4 {
        let samples = after.told.samples(1.0).unwrap_or_default();
        let plan = after.told.plan(&samples);
        after.told.act(&plan);
        after.told.answer();
        after.told.pods_ready();
        after.told.gateway_takes();
        if key(&after) != before {
            return after;
        }
    }
    after.told.now += SignedDuration::from_secs(TICK);
    after
}

/// Whether a state is at rest, and well: what is left to do is to say so.
fn rests(state: &State) -> bool {
    let mut settled = state.clone();
    for _ in 0..3 {
        settled.told.pass();
    }
    let plan = settled.told.plan(&Samples::default());
    let status = status(&settled);
    let well = matches!(
        status.phase,
        Some(Phase::Ready | Phase::Degraded | Phase::Paused)
    );
    plan.actions.is_empty() && well && status.canary.is_none() && key(&settled) == key(state)
}

/// All states, with the one that each comes to when nothing disturbs.
fn search(begin: State) -> (Vec<State>, Vec<usize>) {
    let mut known: HashMap<String, usize> = HashMap::from([(key(&begin), 0)]);
    let mut states = vec![begin];
    let mut onwards = Vec::new();
    let mut at = 0;
    while at < states.len() {
        let state = states[at].clone();
        let mut find = |after: State| {
            *known.entry(key(&after)).or_insert_with(|| {
                states.push(after);
                states.len() - 1
            })
        };
        for event in EVENTS {
            if let Some(after) = next(&state, event) {
                check_edge(&state, event, &after);
                check_gateway(&after);
                find(after);
            }
        }
        onwards.push(find(undisturbed(&state)));
        assert!(states.len() < MAX_STATES, "more than {MAX_STATES} states");
        at += 1;
    }
    (states, onwards)
}

#[expect(clippy::print_stdout, reason = "how much was searched is a result")]
fn every_way_ends_at_rest(changes: u8, requests: u8, way: Way) {
    let (states, onwards) = search(start(changes, requests, way));
    let mut ends: Vec<Option<bool>> = vec![None; states.len()];
    for begin in 0..states.len() {
        let mut way = Vec::new();
        let mut at = begin;
        let end = loop {
            if let Some(end) = ends[at] {
                break end;
            }
            if rests(&states[at]) {
                way.push(at);
                break true;
            }
            if way.contains(&at) {
                break false;
            }
            way.push(at);
            at = onwards[at];
        };
        let keys = || -> Vec<String> { way.iter().map(|at| key(&states[*at])).collect() };
        assert!(end, "goes round and never rests:\n{}", keys().join("\n"));
        for place in way {
            ends[place] = Some(end);
        }
    }
    println!(
        "{} states, {} edges tried",
        states.len(),
        states.len() * (EVENTS.len() + 1)
    );
    assert!(states.len() > 200, "only {} states", states.len());
}

#[test]
fn two_changes_of_the_spec_at_any_moment_end_at_rest_and_promote_nothing_unproven() {
    every_way_ends_at_rest(2, 0, Way::Beside);
}

#[test]
fn a_change_and_a_request_at_any_moment_end_at_rest_and_promote_nothing_unproven() {
    every_way_ends_at_rest(1, 1, Way::Beside);
}

/// One place: stable leaves before a canary comes.
#[test]
fn two_changes_where_a_canary_takes_stables_place_end_at_rest_and_promote_nothing_unproven() {
    every_way_ends_at_rest(2, 0, Way::InPlace);
}

#[test]
fn a_change_and_a_request_where_a_canary_takes_stables_place_end_at_rest() {
    every_way_ends_at_rest(1, 1, Way::InPlace);
}

#[test]
fn two_changes_behind_a_gateway_that_takes_a_while_end_at_rest_and_promote_nothing_unproven() {
    every_way_ends_at_rest(2, 0, Way::Gateway);
}

#[test]
fn a_change_and_a_request_behind_a_gateway_that_takes_a_while_end_at_rest() {
    every_way_ends_at_rest(1, 1, Way::Gateway);
}

/// With a request beside the change the graph is some 18,000 states large and holds too; the simulator's lives have both.
#[test]
fn a_change_where_copies_come_first_ends_at_rest_and_people_meet_no_canary_before_its_first_weight()
{
    every_way_ends_at_rest(1, 0, Way::Mirror);
}
