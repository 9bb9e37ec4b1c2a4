//! World in, plan out: each `plans/*.yaml` names a world, changes it, and its `.txt` is the plan. `UPDATE_EXPECT=1` writes the plans.
//!
//! The worlds are made by the plan itself in a cluster that does at once what it is told; the files say what differs from there.
#![expect(clippy::unwrap_used, reason = "this is a test: a panic is its failure")]

mod drifts;
mod exhaustive;
mod probes;
mod properties;
mod told;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use expect_test::expect_file;
use jiff::{SignedDuration, Timestamp};
use mixquant_operator::action::{Action, Plan};
use mixquant_operator::histogram::Histogram;
use mixquant_operator::load::Load;
use mixquant_operator::observed::Observed;
use mixquant_operator::samples::{Samples, Series, TrackSamples, Value as Measured};
use serde::Deserialize;
use serde_json::Value;

use told::{Told, World};

/// One case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Case {
    /// What it shows.
    shows: String,
    /// The world that it starts from.
    given: World,
    /// JSON pointers into the service as it is first applied, and what to put there.
    #[serde(default)]
    first: BTreeMap<String, Value>,
    /// JSON pointers into the observation and what to put there; null takes away.
    #[serde(default)]
    set: BTreeMap<String, Value>,
    /// Seconds after the world was reached.
    #[serde(default)]
    after: i64,
    /// What was sampled; nothing when absent.
    samples: Option<Sampled>,
    /// What pods carried; nothing when absent.
    load: Option<Carried>,
}

/// The same load for so many looks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Carried {
    looks: u32,
    pods: u32,
    #[serde(default)]
    silent: u32,
    #[serde(default)]
    running: f64,
    #[serde(default)]
    waiting: f64,
    #[serde(default)]
    kv_cache_usage: f64,
    #[serde(default)]
    requests_per_second: u64,
}

impl Carried {
    /// A look every 15 seconds, the last one now.
    fn loads(&self, now: Timestamp) -> Vec<Load> {
        let looks = 0..self.looks;
        looks
            .map(|look| Load {
                at: now - SignedDuration::from_secs(15 * i64::from(self.looks - 1 - look)),
                pods: self.pods,
                silent: self.silent,
                running: self.running,
                waiting: self.waiting,
                kv_cache_usage: self.kv_cache_usage,
                requests: self.requests_per_second * 15 * u64::from(look),
            })
            .collect()
    }
}

/// Requests of both tracks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Sampled {
    /// Median time per output token.
    stable_milliseconds: f64,
    canary_milliseconds: f64,
    /// Requests of each.
    requests: u64,
    /// Seconds before now that they were taken.
    #[serde(default)]
    age: i64,
    /// They are of the window before.
    #[serde(default)]
    of_earlier_step: bool,
    /// A pod of the canary that did not answer.
    problem: Option<String>,
}

/// `requests` between 0.8 and 1.2 times the median, evenly.
fn histogram(median: f64, requests: u64) -> Histogram {
    let mut bounds = vec![1.0];
    while bounds[bounds.len() - 1] < 500.0 {
        bounds.push(bounds[bounds.len() - 1] * 1.05);
    }
    let mut counts = vec![0; bounds.len() + 1];
    for request in 0..requests {
        let place = f64::from(u32::try_from(request).unwrap())
            / f64::from(u32::try_from(requests).unwrap());
        let value = median * (0.8 + 0.4 * place);
        counts[bounds.partition_point(|bound| *bound < value)] += 1;
    }
    let bounds = bounds.into_iter().map(|bound| bound / 1000.0).collect();
    Histogram { bounds, counts }
}

fn samples(sampled: &Sampled, observed: &Observed, now: Timestamp) -> Samples {
    let status = observed.service.status.as_ref().unwrap();
    let began = status.rollout.as_ref().unwrap().step_started_at.0;
    let track = |median, problem: Option<&String>| TrackSamples {
        values: [(
            Series::Tpot,
            Measured::Histogram(histogram(median, sampled.requests)),
        )]
        .into(),
        pods: 1,
        problems: problem.cloned().into_iter().collect(),
        grew_at: Some(now - SignedDuration::from_secs(sampled.age)),
        ..TrackSamples::default()
    };
    let warm_up = if sampled.of_earlier_step { -60 } else { 20 };
    Samples {
        since: Some(began + SignedDuration::from_secs(warm_up)),
        taken_at: Some(now - SignedDuration::from_secs(sampled.age)),
        tracks: BTreeMap::from([
            (
                status.stable.as_ref().unwrap().revision.clone(),
                track(sampled.stable_milliseconds, None),
            ),
            (
                status.canary.as_ref().unwrap().revision.clone(),
                track(sampled.canary_milliseconds, sampled.problem.as_ref()),
            ),
        ]),
        ..Samples::default()
    }
}

/// Puts `value` where `pointer` says; `~` stands for nothing there yet.
fn put(root: &mut Value, pointer: &str, value: &Value) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = root
        .pointer_mut(parent)
        .unwrap_or_else(|| panic!("nothing at {parent}"));
    match parent {
        Value::Array(list) if value.is_null() => {
            list.remove(key.parse().unwrap());
        }
        Value::Array(list) if key == "-" => list.push(value.clone()),
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value.clone(),
        Value::Object(map) => {
            map.insert(key.into(), value.clone());
        }
        other => panic!("{pointer}: {other} holds nothing"),
    }
}

fn changed(observed: &Observed, set: &BTreeMap<String, Value>) -> Observed {
    let mut value = serde_json::to_value(observed).unwrap();
    for (pointer, new) in set {
        put(&mut value, pointer, &named(observed, new));
    }
    serde_json::from_value(value).unwrap()
}

/// `$stable` and `$canary` stand for their revisions.
fn named(observed: &Observed, value: &Value) -> Value {
    let status = observed.service.status.as_ref();
    let roles = [
        ("$stable", status.and_then(|status| status.stable.as_ref())),
        ("$canary", status.and_then(|status| status.canary.as_ref())),
    ];
    let mut text = value.to_string();
    for (name, role) in roles {
        if let Some(role) = role {
            text = text.replace(name, &role.revision);
        }
    }
    serde_json::from_str(&text).unwrap()
}

/// A plan as people read it.
fn text(case: &Case, plan: &Plan) -> String {
    let mut text = format!("# {}\n", case.shows);
    for action in &plan.actions {
        writeln!(text, "{}", told::brief(action)).unwrap();
        if let Action::Remember(status) | Action::Report(status) = action {
            for condition in &status.conditions {
                let message: String = condition.message.chars().take(160).collect();
                writeln!(
                    text,
                    "    {}={} {}: {message}",
                    condition.type_, condition.status, condition.reason
                )
                .unwrap();
            }
        }
    }
    if plan.actions.is_empty() {
        text.push_str("nothing\n");
    }
    match plan.requeue {
        Some(after) => writeln!(text, "again after {} s", after.as_secs()).unwrap(),
        None => text.push_str("rest\n"),
    }
    text
}

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "yaml")
        })
        .collect();
    cases.sort();
    cases
}

#[test]
fn every_world_has_its_plan() {
    let cases = cases();
    assert!(cases.len() > 30, "only {} cases", cases.len());
    for path in cases {
        let file = std::fs::read_to_string(&path).unwrap();
        let case: Case = serde_norway::from_str(&file)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut service = serde_json::to_value(told::service()).unwrap();
        for (pointer, new) in &case.first {
            put(&mut service, pointer, new);
        }
        let mut told = Told::reach_with(serde_json::from_value(service).unwrap(), case.given);
        told.now += SignedDuration::from_secs(case.after);
        told.observed = changed(&told.observed, &case.set);
        let samples = case.samples.as_ref();
        let samples = samples.map(|sampled| samples_of(sampled, &told));
        let mut samples = samples.unwrap_or_default();
        if let Some(carried) = &case.load {
            let now = Timestamp::from_second(told.now.as_second()).unwrap();
            samples.loads = carried.loads(now);
        }
        let plan = told.plan(&samples);
        expect_file![path.with_extension("txt")].assert_eq(&text(&case, &plan));
    }
}

fn samples_of(sampled: &Sampled, told: &Told) -> Samples {
    samples(sampled, &told.observed, told.now)
}

/// Quiet: at rest the display follows what stable measures by steps of a fifth, and at most every ten minutes.
#[test]
fn at_rest_the_shown_time_per_token_is_written_seldom_and_only_when_it_changed() {
    let mut told = Told::reach(World::Serving);
    told.now += SignedDuration::from_secs(3600);
    let shown = |told: &mut Told, median: f64, requests: u64, later: i64| {
        told.now += SignedDuration::from_secs(later);
        let status = told.observed.service.status.clone().unwrap();
        let values = [(
            Series::Tpot,
            Measured::Histogram(histogram(median, requests)),
        )];
        let track = TrackSamples {
            values: values.into(),
            pods: 2,
            ..TrackSamples::default()
        };
        let samples = Samples {
            since: Some(told.now),
            taken_at: Some(told.now),
            tracks: [(status.stable.unwrap().revision, track)].into(),
            ..Samples::default()
        };
        let plan = told.plan(&samples);
        let wrote = !plan.actions.is_empty();
        told.act(&plan);
        let status = told.observed.service.status.as_ref().unwrap();
        (status.tpot.clone().unwrap_or_default(), wrote)
    };
    let is = |text: &str, wrote: bool| (text.to_owned(), wrote);
    assert_eq!(shown(&mut told, 20.0, 99, 1), is("", false), "too few");
    let first = shown(&mut told, 20.0, 1000, 1);
    assert!(first.1 && first.0.ends_with(" ms"), "{first:?}");
    assert_eq!(
        shown(&mut told, 40.0, 1000, 300),
        is(&first.0, false),
        "too soon"
    );
    assert_eq!(
        shown(&mut told, 22.0, 1000, 400),
        is(&first.0, false),
        "too alike"
    );
    let second = shown(&mut told, 40.0, 1000, 1);
    assert!(second.1 && second.0 != first.0, "{second:?}");
}
