//! What a manifest would do: the change, the steps with their pods and times, the gates, the capacity. What `plan` answers. Pure.

use mixquant_crds::rollout::TrialFailure;
use mixquant_crds::{Digest, MixQuantService};
use serde::Serialize;

use super::Exit;
use super::answer::Plain;
use super::differences::{Difference, differences};
use super::scaling;
use super::table::{Cell, Style, Table, Tone, exact, indented, push};
use crate::build::deployment;
use crate::capacity::{self, Capacity, Cluster, Of};
use crate::validate::{InvalidSpec, Step, ValidService, validate};
use crate::{canary, judge, places};

/// What a manifest would do.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Timeline {
    /// The service.
    pub namespace: String,
    /// The service.
    pub name: String,
    /// Why the spec cannot work; the rest is empty then.
    pub problems: Vec<String>,
    /// Against what the cluster has; `None` when it was not asked.
    pub change: Option<Change>,
    /// What differs in the spec from what the cluster has.
    pub differences: Vec<Difference>,
    /// Pods of stable that the stages are reckoned with.
    pub replicas: i32,
    /// How their number follows the load.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scaling: Vec<String>,
    /// In order.
    pub stages: Vec<Stage>,
    /// Seconds from the first ready canary pod to the end, at best.
    pub shortest_seconds: i64,
    /// Seconds to the end, or to rolling back, at worst (without the Job); `None` when a pause waits for a person.
    pub longest_seconds: Option<i64>,
    /// What every step is judged by.
    pub gates: Vec<String>,
    /// Whether the pods have room beside those that run; `None` when it was not asked.
    pub capacity: Option<Capacity>,
    /// What gives way where they have not.
    pub gap: Option<String>,
    /// Why the rollout would not begin.
    pub waits: Option<String>,
    /// What could not be found out, and why.
    pub unknown: Vec<String>,
}

/// What a manifest asks anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Change {
    /// The service does not exist.
    First,
    /// The spec is the one that the cluster has.
    Nothing,
    /// Only the number of pods: no rollout.
    Scale,
    /// Limits, or the rollout's steps and switches: what serves is measured by them at the next change.
    Limits,
    /// Other engine pods from the same artifact: a canary.
    Revision,
    /// Another artifact: a calibration Job, then a canary.
    Calibration,
}

impl Change {
    fn says(self) -> &'static str {
        match self {
            Self::First => {
                "the first deployment: calibration, then pods; nothing to compare with, so no steps"
            }
            Self::Nothing => "nothing changes",
            Self::Scale => "only the number of pods changes: no new revision, no rollout",
            Self::Limits => {
                "limits, steps or switches change: no new revision; a failure that they caused is tried again"
            }
            Self::Revision => {
                "other engine pods: a canary from the artifact that exists, after a verification if the image is new"
            }
            Self::Calibration => {
                "another artifact: a calibration Job, then a canary (an artifact of the same inputs is used again)"
            }
        }
    }

    fn rolls(self) -> bool {
        matches!(self, Self::Revision | Self::Calibration)
    }
}

/// A stage of the rollout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stage {
    /// `calibration`, `start`, `step 1`, …, `take over`.
    pub name: String,
    /// Percent asked for.
    pub weight: Option<i32>,
    /// Percent of the requests that are copied to the canary, whose answers nobody gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<i32>,
    /// Percent that whole pods give.
    pub achieved: Option<i32>,
    /// Pods of the canary.
    pub canary: i32,
    /// Pods of stable.
    pub stable: i32,
    /// Seconds at least.
    pub at_least_seconds: i64,
    /// Seconds after which it has failed; `None` when it waits for a person.
    pub at_most_seconds: Option<i64>,
}

/// What `service` would do to `live`, the same service as the cluster has it (`None`: not there), as far as it is known.
pub fn timeline(service: &MixQuantService, live: Option<Option<&MixQuantService>>) -> Timeline {
    let service = complete(service);
    let mut timeline = Timeline {
        namespace: service.metadata.namespace.clone().unwrap_or_default(),
        name: service.metadata.name.clone().unwrap_or_default(),
        problems: Vec::new(),
        change: None,
        differences: Vec::new(),
        replicas: service.spec.replicas,
        scaling: Vec::new(),
        stages: Vec::new(),
        shortest_seconds: 0,
        longest_seconds: None,
        gates: Vec::new(),
        capacity: None,
        gap: None,
        waits: None,
        unknown: Vec::new(),
    };
    let valid = match validate(&service) {
        Ok(valid) => valid,
        Err(InvalidSpec(problems)) => {
            timeline.problems = problems;
            return timeline;
        }
    };
    timeline.change = live.map(|live| change(&valid, live));
    if let Some(Some(live)) = live {
        let spec = |service: &MixQuantService| {
            serde_json::to_value(&service.spec).expect("a spec is plain data")
        };
        timeline.differences = differences(&spec(live), &spec(&service));
        // A switch such as `rollout.paused` asks nothing anew, and yet it is a change.
        if timeline.change == Some(Change::Nothing) && !timeline.differences.is_empty() {
            timeline.change = Some(Change::Limits);
        }
    }
    timeline.scaling = valid.scaling.as_ref().map_or_else(Vec::new, scaling::says);
    let valid = scaling::present(valid, live.flatten());
    timeline.replicas = valid.replicas;
    timeline.stages = stages(&valid, timeline.change);
    let jobs = |stage: &&Stage| stage.name == "calibration";
    let pods = || timeline.stages.iter().filter(|stage| !jobs(stage));
    timeline.shortest_seconds = pods().map(|stage| stage.at_least_seconds).sum();
    timeline.longest_seconds = pods().map(|stage| stage.at_most_seconds).sum();
    timeline.gates = gates(&valid);
    timeline
}

/// A manifest has no uid yet, and perhaps no namespace.
fn complete(service: &MixQuantService) -> MixQuantService {
    let mut service = service.clone();
    let metadata = &mut service.metadata;
    metadata.uid.get_or_insert_with(|| "none".into());
    metadata.namespace.get_or_insert_with(|| "default".into());
    service
}

fn change(valid: &ValidService, live: Option<&MixQuantService>) -> Change {
    let Some(live) = live else {
        return Change::First;
    };
    let Ok(live) = validate(&complete(live)) else {
        return Change::Calibration;
    };
    if live.measured != valid.measured
        || live.calibration.data != valid.calibration.data
        || live.verification.data != valid.verification.data
    {
        Change::Calibration
    } else if live.served != valid.served {
        Change::Revision
    } else if live.request != valid.request {
        Change::Limits
    } else if live.replicas != valid.replicas || live.scaling != valid.scaling {
        Change::Scale
    } else {
        Change::Nothing
    }
}

fn stages(valid: &ValidService, change: Option<Change>) -> Vec<Stage> {
    let rollout = &valid.rollout;
    let deadline = i64::from(rollout.progress_deadline);
    let stage = |name: &str, canary, at_least, at_most| Stage {
        name: name.to_owned(),
        weight: None,
        mirror: None,
        achieved: None,
        canary,
        stable: valid.replicas,
        at_least_seconds: at_least,
        at_most_seconds: at_most,
    };
    let mut stages = Vec::new();
    if matches!(change, None | Some(Change::First | Change::Calibration)) {
        let longest = valid.calibration.active_deadline_seconds;
        stages.push(stage("calibration", 0, 0, Some(longest)));
    }
    if change == Some(Change::First) {
        let pods = stage("start", 0, 0, Some(deadline));
        stages.push(pods);
        return stages;
    }
    if change.is_some_and(|change| !change.rolls()) {
        return stages;
    }
    // A verdict is due an interval after the warm-up, and a step is left only with a Pass.
    let judged = i64::from(rollout.warm_up) + i64::from(rollout.interval);
    let size = |count: usize| {
        let steps = &rollout.steps[..count];
        canary::size_after(rollout, steps, valid.replicas)
    };
    stages.push(stage("start", size(0), 0, Some(deadline)));
    let mut shares = false;
    let (mut mirror, mut given) = (None, None);
    for (index, step) in rollout.steps.iter().enumerate() {
        let pods = size(index + 1);
        let (name, weight, at_least) = told(index, step);
        shares |= matches!(step, Step::Weight { .. } | Step::Replicas { .. });
        mirror = match *step {
            Step::Mirror { percent, .. } => Some(percent),
            _ => mirror.filter(|_| !shares),
        };
        let copies = mirror.map_or(String::new(), |percent| format!(", mirrors {percent} %"));
        // A gateway gives what is asked for; without one the pods give what they are.
        given = weight.filter(|_| rollout.routed).or(given);
        let by_pods = || canary::achieved_weight(pods, valid.replicas);
        let reached = shares || mirror.is_some();
        let least = i64::from(at_least).max(if reached { judged } else { 0 });
        let most = match *step {
            // A pause does not count against the deadline.
            Step::Pause { duration } => duration.map(|_| least + deadline),
            Step::Weight { .. } | Step::Mirror { .. } | Step::Replicas { .. } => Some(deadline),
        };
        stages.push(Stage {
            weight,
            mirror,
            achieved: shares.then(|| given.unwrap_or_else(by_pods)),
            ..stage(&(name + &copies), pods, least, most)
        });
    }
    let last = size(rollout.steps.len());
    let all = last.max(valid.replicas);
    stages.push(Stage {
        achieved: given.or_else(|| Some(canary::achieved_weight(all, valid.replicas))),
        ..stage("take over", all, judged, Some(deadline))
    });
    stages
}

/// A step's name, the weight that it asks for, and its seconds at least.
fn told(index: usize, step: &Step) -> (String, Option<i32>, u32) {
    let name = format!("step {}", index + 1);
    match *step {
        Step::Weight { weight, hold, .. } => (name, Some(weight), hold),
        Step::Mirror { hold, .. } | Step::Replicas { hold, .. } => (name, None, hold),
        Step::Pause {
            duration: Some(seconds),
        } => (format!("{name}, pause"), None, seconds),
        Step::Pause { duration: None } => (format!("{name}, until promoted"), None, 0),
    }
}

fn gates(valid: &ValidService) -> Vec<String> {
    let limits = &valid.verification.limits;
    let mut gates = vec![format!(
        "precision, by the Job: perplexity increase at most {} %, top-1 agreement at least {} %, KL p99 at most {}",
        limits.max_perplexity_increase, limits.min_top1_agreement, limits.max_kl_p99
    )];
    gates.extend(valid.gates.iter().map(judge::says));
    let min_samples = valid.gates.first().map_or(0, |gate| gate.min_samples);
    let rollout = &valid.rollout;
    let does = match rollout.on_failure {
        TrialFailure::Rollback => "rolled back",
        TrialFailure::Pause => "halted",
    };
    gates.push(format!(
        "judged every {} after {} of warm-up, on {} requests of each track; {} at Fail {} in a row",
        exact(rollout.interval.into()),
        exact(rollout.warm_up.into()),
        min_samples,
        does,
        rollout.failure_limit
    ));
    gates.extend(valid.probes.map(|probes| {
        format!("while users send fewer, {probes} probes to each track in each of these intervals")
    }));
    gates
}

impl Timeline {
    /// The most engine pods that exist at one time.
    pub fn peak_pods(&self) -> i32 {
        let stages = self.stages.iter();
        stages
            .map(|stage| stage.canary + stage.stable)
            .max()
            .unwrap_or(0)
    }

    /// Looks for room: `needed` more pods beside those that run, or the way that the operator would take instead. `stable` is the revision
    /// that serves now.
    pub fn look_for_room(
        &mut self,
        service: &MixQuantService,
        (needed, stable): (i32, Option<&str>),
        cluster: &Cluster,
    ) {
        let service = complete(service);
        let Ok(valid) = validate(&service) else {
            return;
        };
        let valid = ValidService {
            replicas: self.replicas,
            ..valid
        };
        // Which model and artifact it is decides nothing about what a pod asks for.
        let any = Digest::of_bytes(b"");
        let template = deployment::template(&valid, &any, &any);
        let pod = template.spec.unwrap_or_default();
        self.capacity = Some(capacity::capacity(&pod, needed, cluster));
        let (Some(stable), true) = (stable, self.change.is_some_and(Change::rolls)) else {
            return;
        };
        let of = Of {
            namespace: &valid.namespace,
            service: &valid.name,
            stable,
        };
        let room = capacity::room(&pod, of, cluster);
        let peak = canary::peak(&valid.rollout, valid.replicas);
        let mut limit = Vec::new();
        for stage in self.stages.iter_mut().filter(|stage| stage.canary > 0) {
            if limit.is_empty() {
                match places::fit(&valid, (stage.canary, peak), Some(&room)) {
                    places::Fit::Beside => {}
                    places::Fit::Instead { fits, gap } => {
                        limit = fits;
                        self.gap = Some(format!("{}: {gap}", stage.name));
                    }
                    places::Fit::Nowhere(why) => {
                        self.waits = Some(why);
                        return;
                    }
                }
            }
            let split = places::split(stage.canary, valid.replicas, &limit);
            (stage.canary, stage.stable) = (split.canary, split.stable);
            let achieved = canary::achieved_weight(stage.canary, stage.stable);
            stage.achieved = stage.achieved.map(|_| achieved);
        }
    }

    /// What a script should do.
    pub fn exit(&self) -> Exit {
        let full = self
            .capacity
            .as_ref()
            .is_some_and(|capacity| !capacity.fits && self.gap.is_none());
        if full || self.waits.is_some() || !self.problems.is_empty() {
            Exit::No
        } else {
            Exit::Done
        }
    }
}

impl Plain for Timeline {
    fn plain(&self, style: Style) -> String {
        let of = format!("{} in {}", self.name, self.namespace);
        let of = style.paint(Tone::Plain, &of);
        if !self.problems.is_empty() {
            return format!(
                "{of}: {}\n{}",
                style.paint(Tone::Bad, "the spec cannot work"),
                indented(&self.problems, style)
            );
        }
        let says = self
            .change
            .map_or("not compared with a cluster", Change::says);
        let mut text = format!("{of}: {says}\n");
        if !self.differences.is_empty() {
            let mut table = Table::default();
            for one in &self.differences {
                let side = |side: &Option<String>| side.clone().unwrap_or("(nothing)".into());
                table.row(vec![
                    one.path.clone().into(),
                    format!("{} -> {}", side(&one.from), side(&one.to)).into(),
                ]);
            }
            push(
                &mut text,
                format_args!("\nchanges\n{}", table.render(style, 2)),
            );
        }
        if !self.stages.is_empty() {
            push(&mut text, format_args!("\n{}", self.table(style)));
        }
        if self.stages.iter().any(|stage| stage.achieved.is_some()) {
            let longest = self.longest_seconds.map_or_else(
                || "a pause waits for a person".to_owned(),
                |seconds| format!("promoted or rolled back after {} at most", exact(seconds)),
            );
            push(
                &mut text,
                format_args!(
                    "at best {} after the canary's pods are ready; {longest}\n",
                    exact(self.shortest_seconds)
                ),
            );
        }
        if !self.scaling.is_empty() {
            let said = indented(&self.scaling, style);
            push(&mut text, format_args!("\nscaling\n{said}"));
        }
        text += "\ngates\n";
        text += &indented(&self.gates, style);
        if let Some(capacity) = &self.capacity {
            push(&mut text, format_args!("\n{}", capacity.plain(style)));
        }
        let ways = [(&self.gap, Tone::Busy), (&self.waits, Tone::Bad)];
        for (said, tone) in ways {
            if let Some(said) = said {
                push(&mut text, format_args!("  {}\n", style.paint(tone, said)));
            }
        }
        for unknown in &self.unknown {
            push(
                &mut text,
                format_args!(
                    "\n{}\n",
                    style.paint(Tone::Busy, &format!("unknown: {unknown}"))
                ),
            );
        }
        text
    }
}

impl Timeline {
    fn table(&self, style: Style) -> String {
        let titles = [
            "STAGE", "WEIGHT", "ACHIEVED", "CANARY", "STABLE", "AT LEAST", "AT MOST",
        ];
        let mut table = Table::with_header(&titles);
        let percent = |value: Option<i32>| value.map_or("-".into(), |value| format!("{value} %"));
        for stage in &self.stages {
            table.row(vec![
                Cell::from(stage.name.clone()),
                percent(stage.weight).into(),
                percent(stage.achieved).into(),
                stage.canary.to_string().into(),
                stage.stable.to_string().into(),
                exact(stage.at_least_seconds).into(),
                stage.at_most_seconds.map_or("-".into(), exact).into(),
            ]);
        }
        table.render(style, 0)
    }
}
