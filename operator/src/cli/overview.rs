//! Services in a table, and one service in detail: what `get` answers. Pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use mixquant_crds::MixQuantService;
use mixquant_crds::status::{
    ConditionType, GateStatus, MixQuantServiceStatus, Outcome, RevisionStatus,
};
use serde::Serialize;

use super::answer::Plain;
use super::facts::{Facts, Pods};
use super::scaling::{Scaled, scaled};
use super::standing::{Standing, condition, standing};
use super::table::{Cell, Style, Table, Tone, push, span};

/// Services, one a line.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Overview {
    /// In order.
    pub services: Vec<Line>,
    #[serde(skip)]
    with_namespace: bool,
}

/// A service in one line.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    /// Where it stands.
    #[serde(flatten)]
    pub standing: Standing,
    /// `status.phase`.
    pub phase: Option<String>,
    /// The condition Ready.
    pub ready: Option<String>,
    /// The revision that serves.
    pub stable: Option<String>,
    /// The revision on trial.
    pub canary: Option<String>,
    /// The step that it is at, from 1, and of how many.
    pub step: Option<String>,
    /// Percent of ready pods that are the canary's.
    pub weight: Option<i32>,
    /// Percent of the requests that are copied to the canary, whose answers nobody gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<i32>,
    /// Stable's time per output token.
    pub tpot: Option<String>,
    /// Seconds since it was created.
    pub age_seconds: Option<i64>,
}

/// The overview of `services`, which are in order.
pub fn overview(services: &[MixQuantService], with_namespace: bool, now: Timestamp) -> Overview {
    Overview {
        services: services.iter().map(|service| line(service, now)).collect(),
        with_namespace,
    }
}

fn line(service: &MixQuantService, now: Timestamp) -> Line {
    let status = service.status.clone().unwrap_or_default();
    let revision = |role: &Option<RevisionStatus>| role.as_ref().map(|role| role.revision.clone());
    let steps = service.spec.rollout.steps.len();
    let ready = condition(service, ConditionType::Ready);
    let created = service.creation_timestamp();
    let mirror = status.rollout.as_ref().map(|at| at.mirror);
    Line {
        standing: standing(service, now),
        phase: status.phase.map(|phase| format!("{phase:?}")),
        ready: ready.map(|ready| ready.status.clone()),
        stable: revision(&status.stable),
        canary: revision(&status.canary),
        step: status
            .rollout
            .as_ref()
            .map(|at| format!("{}/{steps}", at.step + 1)),
        weight: status.rollout.as_ref().map(|at| at.weight),
        mirror: mirror.filter(|percent| *percent > 0),
        tpot: status.tpot,
        age_seconds: created.map(|created| now.duration_since(created.0).as_secs()),
    }
}

/// The titles of the columns.
const TITLES: [&str; 9] = [
    "NAME", "READY", "PHASE", "STABLE", "CANARY", "STEP", "WEIGHT", "TPOT", "AGE",
];

impl Line {
    /// What the canary has of the requests.
    fn share(&self) -> Option<String> {
        let weight = self.weight.map(|weight| format!("{weight} %"));
        self.mirror
            .map(|percent| format!("mirrors {percent} %"))
            .or(weight)
    }

    fn cells(&self, with_namespace: bool) -> Vec<Cell> {
        let or_dash = |text: &Option<String>| Cell::from(text.clone().unwrap_or("-".into()));
        let tone = self.standing.state.tone();
        let mut cells = Vec::new();
        if with_namespace {
            cells.push(self.standing.namespace.clone().into());
        }
        cells.extend([
            self.standing.name.clone().into(),
            Cell::new(self.ready.clone().unwrap_or("Unknown".into()), tone),
            Cell::new(self.phase.clone().unwrap_or("-".into()), tone),
            or_dash(&self.stable),
            or_dash(&self.canary),
            or_dash(&self.step),
            or_dash(&self.share()),
            or_dash(&self.tpot),
            or_dash(&self.age_seconds.map(span)),
        ]);
        cells
    }
}

impl Plain for Overview {
    fn plain(&self, style: Style) -> String {
        if self.services.is_empty() {
            return "no MixQuantService here; `-A` looks into every namespace\n".into();
        }
        let mut titles = TITLES.to_vec();
        if self.with_namespace {
            titles.insert(0, "NAMESPACE");
        }
        let mut table = Table::with_header(&titles);
        for line in &self.services {
            table.row(line.cells(self.with_namespace));
        }
        table.render(style, 0)
    }
}

/// One service in detail.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Detail {
    /// In one line.
    #[serde(flatten)]
    pub line: Line,
    /// Its tracks.
    pub tracks: Vec<Track>,
    /// The number of its pods, where it follows the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaled>,
    /// The newest verdict of the trial.
    pub verdict: Option<Judged>,
    /// Its conditions.
    pub conditions: Vec<Condition>,
    #[serde(skip)]
    now: Timestamp,
}

/// A track.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Track {
    /// `stable` or `canary`.
    pub role: &'static str,
    /// Its revision.
    #[serde(flatten)]
    pub revision: RevisionStatus,
    /// Its pods.
    pub pods: Option<Pods>,
}

/// A verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Judged {
    /// What was decided.
    pub outcome: Outcome,
    /// Seconds ago.
    pub ago_seconds: i64,
    /// The numbers.
    pub message: String,
    /// What each gate said.
    pub gates: Vec<GateStatus>,
}

/// The detail of the service that `facts` are of.
pub fn detail(facts: &Facts, now: Timestamp) -> Detail {
    let status = facts.service.status.clone().unwrap_or_default();
    Detail {
        line: line(&facts.service, now),
        tracks: tracks(facts, &status),
        scaling: scaled(&facts.service, now),
        verdict: verdict(&status, now),
        conditions: status.conditions,
        now,
    }
}

fn tracks(facts: &Facts, status: &MixQuantServiceStatus) -> Vec<Track> {
    [("stable", &status.stable), ("canary", &status.canary)]
        .into_iter()
        .filter_map(|(role, revision)| {
            let revision = revision.clone()?;
            Some(Track {
                role,
                pods: facts.pods_of(&revision.revision).cloned(),
                revision,
            })
        })
        .collect()
}

/// The newest verdict of the trial under way.
pub fn verdict(status: &MixQuantServiceStatus, now: Timestamp) -> Option<Judged> {
    let verdict = status.rollout.as_ref()?.verdict.as_ref()?;
    Some(Judged {
        outcome: verdict.outcome,
        ago_seconds: now.duration_since(verdict.at.0).as_secs().max(0),
        message: verdict.message.clone(),
        gates: verdict.gates.clone(),
    })
}

fn tone(outcome: Outcome) -> Tone {
    match outcome {
        Outcome::Pass => Tone::Good,
        Outcome::Fail => Tone::Bad,
        Outcome::Inconclusive => Tone::Busy,
    }
}

impl Plain for Detail {
    fn plain(&self, style: Style) -> String {
        let mut text = self.line.standing.plain(style);
        let line = &self.line;
        if let (Some(step), Some(share)) = (&line.step, line.share()) {
            let of = line.mirror.map_or("weight ", |_| "");
            let step = format!("step {step}, {of}{share}");
            push(
                &mut text,
                format_args!("\n{}\n", style.paint(Tone::Plain, &step)),
            );
        }
        if !self.tracks.is_empty() {
            let mut table =
                Table::with_header(&["TRACK", "REVISION", "READY", "ARTIFACT", "IMAGE"]);
            for track in &self.tracks {
                let pods = track.pods.as_ref();
                let pods =
                    pods.map_or("-".into(), |pods| format!("{}/{}", pods.ready, pods.wanted));
                table.row(vec![
                    track.role.into(),
                    track.revision.revision.clone().into(),
                    pods.into(),
                    track.revision.artifact_digest.short().into(),
                    track.revision.image.clone().into(),
                ]);
            }
            push(&mut text, format_args!("\n{}", table.render(style, 0)));
        }
        if let Some(scaling) = &self.scaling {
            push(&mut text, format_args!("\n{}", scaling.plain(style)));
        }
        if let Some(verdict) = &self.verdict {
            push(&mut text, format_args!("\n{}", verdict.plain(style)));
        }
        let mut table = Table::with_header(&["CONDITION", "STATUS", "FOR", "REASON", "MESSAGE"]);
        for condition in &self.conditions {
            let since = self.now.duration_since(condition.last_transition_time.0);
            table.row(vec![
                condition.type_.clone().into(),
                condition.status.clone().into(),
                span(since.as_secs()).into(),
                condition.reason.clone().into(),
                condition.message.clone().into(),
            ]);
        }
        push(&mut text, format_args!("\n{}", table.render(style, 0)));
        text
    }
}

impl Plain for Judged {
    fn plain(&self, style: Style) -> String {
        let mut text = format!(
            "verdict {} {} ago: {}\n",
            style.paint(tone(self.outcome), &format!("{:?}", self.outcome)),
            span(self.ago_seconds),
            style.paint(Tone::Plain, &self.message)
        );
        if !self.gates.is_empty() {
            let mut table = Table::with_header(&["GATE", "SAYS", "ON FAIL", "NUMBERS"]);
            for gate in &self.gates {
                table.row(vec![
                    gate.name.clone().into(),
                    Cell::new(format!("{:?}", gate.outcome), tone(gate.outcome)),
                    format!("{:?}", gate.on_failure).into(),
                    gate.message.clone().into(),
                ]);
            }
            text += &table.render(style, 2);
        }
        text
    }
}
