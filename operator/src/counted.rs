//! What the processes of a trial counted inside its window: baselines, restarts, falls and faults. Pure; fed by `scrape` with pods' answers.
//!
//! A baseline belongs to one process (pod uid and start time). Whatever cannot be told apart is left out: fewer samples, never better ones.

use std::collections::BTreeMap;

use jiff::Timestamp;

use crate::action::Window;
use crate::observed::ObservedPod;
use crate::prometheus_text::Scrape;
use crate::samples::{Samples, Series, TrackSamples, Value};

/// Processes remembered in one window: pods and their restarts.
const MAX_PROCESSES: usize = 4096;

/// What one process showed of a series when the window began for it, and at its newest scrape.
#[derive(Debug, Clone, PartialEq)]
struct Reading {
    baseline: Value,
    newest: Value,
}

/// A pod's process and a series of it: revision, pod uid, process start. A restarted process starts from zero and is another one.
type Process = (String, String, u64);

/// A window and everything that was counted in it.
#[derive(Debug, Clone)]
pub struct Counted {
    window: Window,
    taken_at: Option<Timestamp>,
    processes: BTreeMap<Process, BTreeMap<Series, Reading>>,
    /// By revision, this round's: how many pods answered, what is wrong with the others, what is wrong with a series.
    answered: BTreeMap<String, u32>,
    problems: BTreeMap<String, Vec<String>>,
    faults: BTreeMap<String, BTreeMap<Series, Vec<String>>>,
    /// By revision: when something was last counted anew.
    grew_at: BTreeMap<String, Timestamp>,
}

impl Counted {
    /// A window in which nothing has been counted.
    pub fn new(window: Window) -> Self {
        Self {
            window,
            taken_at: None,
            processes: BTreeMap::new(),
            answered: BTreeMap::new(),
            problems: BTreeMap::new(),
            faults: BTreeMap::new(),
            grew_at: BTreeMap::new(),
        }
    }

    /// The window.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// Whether a pod's samples count.
    pub fn asks(&self, pod: &ObservedPod) -> bool {
        pod.ready && !pod.terminating && self.window.revisions.contains(&pod.revision)
    }

    /// A new round of answers.
    pub fn begin(&mut self) {
        self.answered.clear();
        self.problems.clear();
        self.faults.clear();
    }

    /// The round is over.
    pub fn end(&mut self, now: Timestamp) {
        self.taken_at = Some(now);
    }

    /// A pod's answer in this round, or why there is none.
    pub fn absorb(&mut self, pod: &ObservedPod, answer: Result<Scrape, String>, now: Timestamp) {
        let mut scrape = match answer {
            Ok(scrape) => scrape,
            Err(why) => return self.problem(pod, &why),
        };
        *self.answered.entry(pod.revision.clone()).or_default() += 1;
        let key = (pod.revision.clone(), pod.uid.clone(), scrape.process_start);
        if self.processes.len() >= MAX_PROCESSES && !self.processes.contains_key(&key) {
            return self.problem(pod, "too many restarts in one window");
        }
        let process = self.processes.entry(key).or_default();
        let mut faults = Vec::new();
        for series in Series::ALL {
            match scrape.series.remove(&series) {
                Some(Ok(value)) => match read(process, series, value) {
                    Read::Same => {}
                    Read::Grew => {
                        self.grew_at.insert(pod.revision.clone(), now);
                    }
                    Read::Fell => {
                        faults.push((series, "fell; it is counted from here on".to_owned()));
                    }
                },
                Some(Err(why)) => faults.push((series, why)),
                None => faults.push((series, "is not exported".to_owned())),
            }
        }
        for (series, why) in faults {
            self.fault(pod, series, &why);
        }
    }

    fn problem(&mut self, pod: &ObservedPod, why: &str) {
        let problems = self.problems.entry(pod.revision.clone()).or_default();
        problems.push(format!("pod {}: {why}", pod.name));
        problems.sort();
    }

    fn fault(&mut self, pod: &ObservedPod, series: Series, why: &str) {
        let track = self.faults.entry(pod.revision.clone()).or_default();
        let faults = track.entry(series).or_default();
        faults.push(format!(
            "pod {}: {} {why}",
            pod.name,
            series.source().family
        ));
        faults.sort();
    }

    /// What the window holds now.
    pub fn samples(&self) -> Samples {
        let mut tracks: BTreeMap<String, TrackSamples> = BTreeMap::new();
        for revision in &self.window.revisions {
            let track = tracks.entry(revision.clone()).or_default();
            track.pods = self.answered.get(revision).copied().unwrap_or_default();
            track.problems = self.problems.get(revision).cloned().unwrap_or_default();
            track.faults = self.faults.get(revision).cloned().unwrap_or_default();
            track.grew_at = self.grew_at.get(revision).copied();
        }
        for ((revision, _, _), process) in &self.processes {
            let Some(track) = tracks.get_mut(revision) else {
                continue;
            };
            for (series, counted) in process {
                let total = track.values.entry(*series);
                let total = total.or_insert_with(|| counted.newest.nothing());
                if !total.add(&counted.baseline, &counted.newest) {
                    let faults = track.faults.entry(*series).or_default();
                    faults.push("its pods have different buckets".into());
                }
            }
        }
        Samples {
            since: self.taken_at.map(|_| self.window.since),
            taken_at: self.taken_at,
            tracks,
            ..Samples::default()
        }
    }
}

/// What a new reading of a series is to the one before.
enum Read {
    /// It is the first, or says nothing new.
    Same,
    /// Something was counted.
    Grew,
    /// It cannot follow it.
    Fell,
}

fn read(process: &mut BTreeMap<Series, Reading>, series: Series, value: Value) -> Read {
    match process.get_mut(&series) {
        Some(counted) if counted.newest.continues(&value) => {
            let grew = counted.newest.count() < value.count();
            counted.newest = counted.newest.reached(value);
            if grew { Read::Grew } else { Read::Same }
        }
        known => {
            let fell = known.is_some();
            let baseline = value.clone();
            let newest = value;
            process.insert(series, Reading { baseline, newest });
            if fell { Read::Fell } else { Read::Same }
        }
    }
}

#[cfg(test)]
#[path = "counted_tests.rs"]
mod tests;
