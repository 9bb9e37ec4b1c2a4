//! Why is it so? The failing gate with its numbers, the revisions and what differs between them, how it went, what to do. Pure.
//!
//! Everything is read from stored objects: the status's memory of failures, conditions, `ControllerRevision`s and Events.

use jiff::Timestamp;
use mixquant_crds::status::{ConditionType, FailedRevision, Phase, Reason};
use serde::Serialize;
use serde_json::{Value, json};

use super::answer::Plain;
use super::differences::{Difference, differences};
use super::facts::{Facts, Kept, Pods, Told};
use super::overview::{Judged, verdict};
use super::scaling::{Scaled, scaled};
use super::standing::{Standing, State, condition, standing};
use super::table::{Cell, Style, Table, Tone, indented, push, span};

/// Events and differences that are shown at most.
const MOST: usize = 12;

/// Why a service is as it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// Where it stands.
    #[serde(flatten)]
    pub standing: Standing,
    /// What failed, if anything did for what the spec asks now.
    pub failure: Option<Failure>,
    /// The newest verdict of a trial under way.
    pub verdict: Option<Judged>,
    /// What serves meanwhile.
    pub serving: Option<Pods>,
    /// The number of pods, where it follows the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaled>,
    /// Failures of earlier requests, newest first.
    pub earlier: Vec<Failure>,
    /// How it went, oldest first.
    pub events: Vec<Told>,
    /// What a person may do.
    pub advice: Vec<String>,
    #[serde(skip)]
    now: Timestamp,
}

/// A failure and what was new in what failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// The revision; for a calibration its inputs.
    pub revision: String,
    /// In one word.
    pub reason: Reason,
    /// Which gate decided it.
    pub gate: &'static str,
    /// The numbers: both samples and the bound.
    pub message: String,
    /// When.
    pub at: Timestamp,
    /// The generation of the spec that asked for it.
    pub generation: i64,
    /// The revision that it is compared with.
    pub stable: Option<String>,
    /// What differs from stable's revision.
    pub differences: Vec<Difference>,
}

/// Which gate a failure's reason belongs to.
fn gate(reason: Reason) -> &'static str {
    match reason {
        Reason::SLOViolated => "live traffic (spec.slo)",
        Reason::PrecisionRegression => "precision (spec.verification)",
        Reason::CalibrationFailed => "calibration",
        Reason::ProgressDeadlineExceeded => "time (spec.rollout.progressDeadlineSeconds)",
        Reason::PodsFailing => "the canary's pods",
        Reason::Aborted => "none: a person decided",
        _ => "none",
    }
}

/// Why the service that `facts` are of is as it is.
pub fn explain(facts: &Facts, now: Timestamp) -> Explanation {
    let status = facts.service.status.clone().unwrap_or_default();
    let standing = standing(&facts.service, now);
    let mut failures = status
        .failed_revisions
        .iter()
        .map(|failed| failure(facts, failed));
    // A failure is the answer when nothing moves because of it, or while its canary leaves.
    let leaves = status.phase == Some(Phase::RollingBack);
    let failure = if standing.state == State::Degraded || leaves {
        failures.next().filter(|failure| is_current(facts, failure))
    } else {
        None
    };
    let serving = status.stable.as_ref();
    let serving = serving.and_then(|stable| facts.pods_of(&stable.revision).cloned());
    let first = facts.events.len().saturating_sub(MOST);
    Explanation {
        advice: advice(facts, &standing, failure.as_ref()),
        failure,
        verdict: verdict(&status, now).filter(|_| !leaves),
        serving,
        scaling: scaled(&facts.service, now),
        earlier: failures.collect(),
        events: facts.events[first..].to_vec(),
        standing,
        now,
    }
}

/// Whether the failure is what the conditions speak of: an older one of another request is history.
fn is_current(facts: &Facts, failure: &Failure) -> bool {
    let stalled = condition(&facts.service, ConditionType::Stalled);
    let ready = condition(&facts.service, ConditionType::Ready);
    let mut told = [stalled, ready].into_iter().flatten();
    told.any(|condition| condition.message.contains(&failure.message))
}

fn failure(facts: &Facts, failed: &FailedRevision) -> Failure {
    let status = facts.service.status.as_ref();
    let stable = status.and_then(|status| status.stable.as_ref());
    let stable = stable.map(|stable| stable.revision.clone());
    let kept = stable.as_ref().and_then(|stable| facts.kept(stable));
    let (from, to) = (kept, facts.kept(&failed.revision));
    let differences = match (from, to) {
        (Some(from), Some(to)) => differences(&content(from), &content(to)),
        _ => Vec::new(),
    };
    Failure {
        revision: failed.revision.clone(),
        reason: failed.reason,
        gate: gate(failed.reason),
        message: failed.message.clone(),
        at: failed.at.0,
        generation: failed.generation,
        stable,
        differences,
    }
}

/// What a revision is, without its names.
fn content(kept: &Kept) -> Value {
    let frozen = &kept.frozen;
    json!({
        "model": frozen.model_digest,
        "artifact": frozen.artifact_digest,
        "template": frozen.template,
    })
}

fn advice(facts: &Facts, standing: &Standing, failure: Option<&Failure>) -> Vec<String> {
    let name = &standing.name;
    let watch = format!("wait for it: kubectl mixquant status {name} --timeout 10m");
    let change = "change the spec and apply it: a changed request is tried anew";
    let retry = format!("or try the same again: kubectl mixquant retry {name}");
    let undone = standing.reason == Reason::Undone.as_str();
    let status = facts.service.status.as_ref();
    let serves = status.is_some_and(|status| status.stable.is_some());
    let mut advice: Vec<String> = match (standing.state, failure.map(|failure| failure.reason)) {
        (State::Ready, _) => Vec::new(),
        (State::Progressing, _) => vec![watch],
        (State::Paused, _) => vec![
            format!("let it go on: kubectl mixquant promote {name}"),
            format!("or roll it back: kubectl mixquant abort {name}"),
        ],
        (State::Degraded, Some(Reason::PrecisionRegression)) => vec![
            "choose a more precise scheme, better calibration data, or wider limits in spec.verification, and apply it".into(),
        ],
        (State::Degraded, Some(Reason::CalibrationFailed)) => vec![
            format!("read what the Job said: kubectl logs -l mixquant.io/service={name},app.kubernetes.io/component=calibration"),
            change.into(),
            retry,
        ],
        (State::Degraded, Some(_)) => vec![change.into(), retry],
        (State::Degraded, None) if undone => vec![
            format!("go back to what the spec asks for: kubectl mixquant retry {name}"),
            "or change the spec and apply it".into(),
        ],
        (State::Degraded, None) => vec!["change what the message names, and apply it".into()],
    };
    if standing.state == State::Degraded && serves {
        advice.push("or leave it: what served before goes on serving".into());
    }
    advice
}

impl Plain for Explanation {
    fn plain(&self, style: Style) -> String {
        let mut text = self.standing.plain(style);
        if let Some(failure) = &self.failure {
            push(&mut text, format_args!("\n{}", failure.plain(style)));
        }
        if let Some(verdict) = &self.verdict {
            push(&mut text, format_args!("\n{}", verdict.plain(style)));
        }
        if let Some(serving) = &self.serving {
            push(
                &mut text,
                format_args!(
                    "\nstable {}: {} of {} pods ready\n",
                    style.paint(Tone::Plain, &serving.revision),
                    serving.ready,
                    serving.wanted
                ),
            );
        }
        if let Some(scaling) = &self.scaling {
            push(&mut text, format_args!("\n{}", scaling.plain(style)));
        }
        if !self.events.is_empty() {
            push(
                &mut text,
                format_args!("\nhow it went\n{}", self.told(style)),
            );
        }
        if !self.earlier.is_empty() {
            let mut table = Table::default();
            for failure in self.earlier.iter().take(MOST) {
                let ago = span(self.now.duration_since(failure.at).as_secs());
                table.row(vec![
                    format!("{ago} ago").into(),
                    failure.revision.clone().into(),
                    failure.reason.as_str().into(),
                    failure.message.clone().into(),
                ]);
            }
            push(
                &mut text,
                format_args!("\nearlier failures\n{}", table.render(style, 2)),
            );
        }
        if !self.advice.is_empty() {
            let advice = indented(&self.advice, style);
            push(&mut text, format_args!("\nwhat to do\n{advice}"));
        }
        text
    }
}

impl Explanation {
    fn told(&self, style: Style) -> String {
        let mut table = Table::default();
        for told in &self.events {
            let ago = told
                .at
                .map_or("?".into(), |at| span(self.now.duration_since(at).as_secs()));
            let tone = if told.warning { Tone::Bad } else { Tone::Plain };
            table.row(vec![
                format!("{ago} ago").into(),
                Cell::new(told.reason.clone(), tone),
                told.message.clone().into(),
            ]);
        }
        table.render(style, 2)
    }
}

impl Plain for Failure {
    fn plain(&self, style: Style) -> String {
        let mut table = Table::default();
        let mut row = |title: &str, text: String, tone| {
            table.row(vec![Cell::new(title, Tone::Faint), Cell::new(text, tone)]);
        };
        row(
            "failed",
            format!(
                "revision {} of generation {}",
                self.revision, self.generation
            ),
            Tone::Plain,
        );
        row("gate", self.gate.into(), Tone::Plain);
        row("reason", self.reason.as_str().into(), Tone::Bad);
        row("evidence", self.message.clone(), Tone::Plain);
        let mut text = table.render(style, 0);
        if let (Some(stable), false) = (&self.stable, self.differences.is_empty()) {
            push(
                &mut text,
                format_args!(
                    "\nwhat is new against stable {}\n",
                    style.paint(Tone::Plain, stable)
                ),
            );
            let mut table = Table::default();
            for one in self.differences.iter().take(MOST) {
                let side = |side: &Option<String>| side.clone().unwrap_or("(nothing)".into());
                let change = format!("{} -> {}", side(&one.from), side(&one.to));
                table.row(vec![one.path.clone().into(), change.into()]);
            }
            text += &table.render(style, 2);
            let more = self.differences.len().saturating_sub(MOST);
            if more > 0 {
                push(
                    &mut text,
                    format_args!("  and {more} more: see `-o yaml`\n"),
                );
            }
        }
        text
    }
}
