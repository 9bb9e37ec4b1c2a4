//! How much the pods of a service carry: one entry a look, kept for as long as scaling looks back. Pure; fed by `scrape` with pods' answers.
//!
//! Soft state, as all samples are: after a restart of the operator it begins anew, and what is not known takes no pod away (see `scaling`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::observed::ObservedPod;
use crate::prometheus_text::Scrape;
use crate::revision::seconds_between;
use crate::samples::{Series, Value};

/// Seconds between two entries at least: passes may come much more often.
const SPACING: i64 = 5;
/// Entries kept at most, whatever is asked for.
const MAX_ENTRIES: usize = 2048;

/// Whose load is to be kept, and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadWindow {
    /// The revisions whose pods the main Service selects.
    pub revisions: Vec<String>,
    /// Seconds that an entry is kept.
    pub keep: u32,
}

/// What all pods carried at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// When.
    pub at: Timestamp,
    /// Pods that said it plainly.
    pub pods: u32,
    /// Ready pods that did not.
    pub silent: u32,
    /// Sequences that are being computed.
    pub running: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// The sum of the pods' parts of their KV caches in use.
    pub kv_cache_usage: f64,
    /// Requests that have ended since the first entry, however they ended.
    pub requests: u64,
}

/// What one pod carries.
struct Carried {
    running: f64,
    waiting: f64,
    kv_cache_usage: f64,
    requests: u64,
}

/// The entries of a service.
#[derive(Debug, Clone)]
pub struct Loads {
    window: LoadWindow,
    entries: VecDeque<Load>,
    /// Requests that each process had counted when it was last asked: pod uid and process start.
    counted: BTreeMap<(String, u64), u64>,
    requests: u64,
}

impl Loads {
    /// Nothing is known.
    pub fn new(window: LoadWindow) -> Self {
        Self {
            window,
            entries: VecDeque::new(),
            counted: BTreeMap::new(),
            requests: 0,
        }
    }

    /// Another window: what is known stays, for it is the same service.
    pub fn set_window(&mut self, window: &LoadWindow) {
        self.window.clone_from(window);
    }

    /// Whether a pod's load counts.
    pub fn asks(&self, pod: &ObservedPod) -> bool {
        pod.ready && !pod.terminating && self.window.revisions.contains(&pod.revision)
    }

    /// The answers of one look, from the pods that count.
    pub fn add(&mut self, answers: &[(ObservedPod, Result<Scrape, String>)], now: Timestamp) {
        // Passes think in whole seconds: an entry of this moment is not of the future.
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
        let last = self.entries.back().map(|last| last.at);
        if last.is_some_and(|last| seconds_between(last, now) < SPACING) {
            return;
        }
        let mut load = Load {
            at: now,
            ..Load::default()
        };
        let (mut counted, mut silent) = (BTreeMap::new(), BTreeSet::new());
        for (pod, answer) in answers {
            if !self.asks(pod) {
                continue;
            }
            let scrape = answer.as_ref().ok();
            let Some((scrape, carried)) = scrape.and_then(|scrape| Some((scrape, read(scrape)?)))
            else {
                load.silent += 1;
                silent.insert(pod.uid.as_str());
                continue;
            };
            load.pods += 1;
            load.running += carried.running;
            load.waiting += carried.waiting;
            load.kv_cache_usage += carried.kv_cache_usage;
            let process = (pod.uid.clone(), scrape.process_start);
            let before = self.counted.get(&process).copied();
            let new = carried
                .requests
                .saturating_sub(before.unwrap_or(carried.requests));
            self.requests = self.requests.saturating_add(new);
            counted.insert(process, carried.requests);
        }
        // One that was silent goes on from where it was when it speaks again.
        for (process, requests) in std::mem::take(&mut self.counted) {
            if silent.contains(process.0.as_str()) {
                counted.entry(process).or_insert(requests);
            }
        }
        self.counted = counted;
        load.requests = self.requests;
        self.entries.push_back(load);
        let keep = i64::from(self.window.keep);
        while self.entries.len() > MAX_ENTRIES
            || self
                .entries
                .front()
                .is_some_and(|first| seconds_between(first.at, now) > keep)
        {
            self.entries.pop_front();
        }
    }

    /// What is known, oldest first.
    pub fn entries(&self) -> Vec<Load> {
        self.entries.iter().cloned().collect()
    }
}

/// What a pod's page says of its load; `None` when any part of it is not plainly there.
fn read(scrape: &Scrape) -> Option<Carried> {
    let level = |series| match scrape.series.get(&series)? {
        Ok(Value::Level(level)) => Some(*level),
        Ok(_) | Err(_) => None,
    };
    let count = |series| match scrape.series.get(&series)? {
        Ok(Value::Count(count)) => Some(*count),
        Ok(_) | Err(_) => None,
    };
    let mut requests = 0_u64;
    for series in [
        Series::Answered,
        Series::Errors,
        Series::Cancelled,
        Series::Rejected,
    ] {
        requests = requests.saturating_add(count(series)?);
    }
    Some(Carried {
        running: level(Series::Running)?,
        waiting: level(Series::Waiting)?,
        kv_cache_usage: level(Series::KvUsage)?,
        requests,
    })
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
