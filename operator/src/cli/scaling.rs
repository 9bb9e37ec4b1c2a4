//! The number of pods by the load, as people read it. What is chosen is decided in [`crate::scaling`].

use jiff::Timestamp;
use mixquant_crds::MixQuantService;
use mixquant_crds::scaling::Hold;
use serde::Serialize;

use super::answer::Plain;
use super::table::{Style, Tone, push, span};
use crate::validate::{Scaling, ValidService};

/// What `spec.scaling` has chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Scaled {
    /// Pods that are wanted.
    pub desired: i32,
    /// Whatever the load.
    pub min: i32,
    /// Whatever the load.
    pub max: i32,
    /// Why so many.
    pub reason: String,
    /// Seconds since the number changed.
    pub since_seconds: Option<i64>,
    /// What keeps it as it is.
    pub held: Option<Hold>,
}

/// What is chosen for `service`; `None` where nothing scales.
pub fn scaled(service: &MixQuantService, now: Timestamp) -> Option<Scaled> {
    let spec = service.spec.scaling.as_ref()?;
    let status = service.status.as_ref()?.scaling.as_ref()?;
    let changed = status.last_scale_time.as_ref();
    Some(Scaled {
        desired: status.desired_replicas,
        min: spec.min_replicas,
        max: spec.max_replicas,
        reason: status.reason.clone(),
        since_seconds: changed.map(|at| now.duration_since(at.0).as_secs()),
        held: status.held,
    })
}

/// The service with the pods that `live` has come to, or that it would begin with.
pub fn present(valid: ValidService, live: Option<&MixQuantService>) -> ValidService {
    let Some(scaling) = &valid.scaling else {
        return valid;
    };
    let status = live.and_then(|live| live.status.as_ref());
    let chosen = status.and_then(|status| status.scaling.as_ref());
    let begins = scaling.bounds.nearest(valid.replicas);
    let most = scaling.most();
    let replicas = chosen.map_or(begins, |chosen| chosen.desired_replicas.clamp(1, most));
    ValidService { replicas, ..valid }
}

/// How the number follows the load, in one line each.
pub fn says(scaling: &Scaling) -> Vec<String> {
    let targets = &scaling.targets;
    let by = [
        targets
            .queue_length
            .map(|target| format!("{target} waiting requests")),
        targets
            .requests_per_second
            .map(|target| format!("{target} requests a second")),
        targets
            .kv_cache_usage
            .map(|target| format!("{:.0} % of the KV cache", target * 100.0)),
    ];
    let by: Vec<String> = by.into_iter().flatten().collect();
    let bounds = scaling.bounds;
    let mut said = vec![format!(
        "{} to {} pods, by {} a pod; added after {} s, taken away after {} s, and not while a canary is on trial",
        bounds.min,
        bounds.max,
        by.join(", "),
        scaling.up_window,
        scaling.down_window
    )];
    said.extend(scaling.schedule.iter().map(|entry| {
        let time = |minute: u16| format!("{:02}:{:02}", minute / 60, minute % 60);
        format!(
            "{} to {} pods from {} to {} {}, {}",
            entry.bounds.min,
            entry.bounds.max,
            time(entry.from),
            time(entry.to),
            entry.time_zone,
            days(&entry.days)
        )
    }));
    said
}

fn days(days: &[i8]) -> String {
    const NAMES: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    if days.len() == NAMES.len() {
        return "every day".into();
    }
    let name = |day: &i8| usize::try_from(*day).ok().and_then(|day| NAMES.get(day));
    let names: Vec<&str> = days.iter().filter_map(name).copied().collect();
    names.join(" ")
}

impl Plain for Scaled {
    fn plain(&self, style: Style) -> String {
        let since = self
            .since_seconds
            .map_or(String::new(), |seconds| format!(" for {}", span(seconds)));
        let mut text = format!(
            "scaling {} to {}: {} pods wanted{since}: {}\n",
            self.min,
            self.max,
            self.desired,
            style.paint(Tone::Plain, &self.reason)
        );
        let held = match self.held {
            None => return text,
            Some(Hold::Trial) => {
                "held: a canary is on trial, so no pod is taken away, and pods are added only where all fit"
            }
            Some(Hold::NoData) => {
                "held: the pods' metrics could not be read for five minutes; do the NetworkPolicies let the operator reach their admin port?"
            }
        };
        push(
            &mut text,
            format_args!("  {}\n", style.paint(Tone::Busy, held)),
        );
        text
    }
}
