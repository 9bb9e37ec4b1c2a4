//! The part of the custom resource that says how many engine pods there are, by their load: `spec.scaling`, and the day and time that change
//! its bounds; and `status.scaling`, what was chosen.
//!
//! The comments here become the schema's descriptions (`kubectl explain mqs.spec.scaling`). A field that could not act is refused by a
//! rule, never ignored. What CEL cannot see (is it a time zone?) is the operator's `validate`.

#![expect(
    unreachable_pub,
    reason = "KubeSchema repeats each struct inside a private scope"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalars::Decimal;

/// How many engine pods there are, by their load.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("self.minReplicas <= self.maxReplicas").message("scaling.minReplicas is above scaling.maxReplicas: no number of pods could keep both"))]
pub struct ScalingSpec {
    /// Never fewer pods than this.
    #[schemars(range(min = 1, max = 1000))]
    pub min_replicas: i32,
    /// Never more.
    #[schemars(range(min = 1, max = 1000))]
    pub max_replicas: i32,
    /// What one pod may carry. The target that asks for the most pods decides.
    pub targets: ScalingTargets,
    /// How pods are added.
    #[serde(default, skip_serializing_if = "ScaleUp::is_default")]
    pub scale_up: ScaleUp,
    /// How pods are taken away.
    #[serde(default, skip_serializing_if = "ScaleDown::is_default")]
    pub scale_down: ScaleDown,
    /// Other bounds at some times, such as fewer pods at night. The first entry that holds decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub schedule: Vec<ScheduledBounds>,
}

/// What one pod may carry.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("has(self.queueLength) || has(self.requestsPerSecond) || has(self.kvCacheUsagePercent)").message("scaling.targets says nothing to scale by: set queueLength, requestsPerSecond or kvCacheUsagePercent"))]
pub struct ScalingTargets {
    /// Requests that wait for a place in a pod's batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub queue_length: Option<i32>,
    /// Requests a second, rejected ones among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("scaling.targets.requestsPerSecond must be above 0, such as \"2.5\""))]
    pub requests_per_second: Option<Decimal>,
    /// Percent of a pod's KV cache in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub kv_cache_usage_percent: Option<i32>,
}

/// How pods are added.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleUp {
    /// Pods are added only when they were needed all through so many seconds; 0: at once.
    #[serde(default)]
    #[schemars(range(min = 0, max = 3600))]
    pub stabilization_window_seconds: i32,
}

impl ScaleUp {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How pods are taken away.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleDown {
    /// As many pods stay as were needed at any time of so many seconds.
    #[serde(default = "five_minutes")]
    #[schemars(range(min = 0, max = 3600))]
    pub stabilization_window_seconds: i32,
}

fn five_minutes() -> i32 {
    300
}

impl Default for ScaleDown {
    fn default() -> Self {
        Self {
            stabilization_window_seconds: five_minutes(),
        }
    }
}

impl ScaleDown {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Other bounds at some times, by the wall clock of a time zone.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("self.from != self.to").message("scaling.schedule: from and to are the same time: write 00:00 and 24:00 for a whole day"),
    validation = Rule::new("self.minReplicas <= self.maxReplicas").message("scaling.schedule: minReplicas is above maxReplicas: no number of pods could keep both")
)]
pub struct ScheduledBounds {
    /// The days on which it begins; without any, every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7), extend("x-kubernetes-list-type" = "set"))]
    pub days: Vec<Day>,
    /// When it begins.
    #[schemars(regex(pattern = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"))]
    pub from: String,
    /// When it has ended; on the next day where that is not after `from`.
    #[schemars(regex(pattern = r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"))]
    pub to: String,
    /// The IANA name of the time zone, such as Europe/Berlin.
    #[schemars(length(min = 1, max = 64))]
    #[serde(default = "utc")]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z][A-Za-z0-9+_/-]*$')").message("scaling.schedule: timeZone is not the name of one: write it as in Europe/Berlin"))]
    pub time_zone: String,
    /// Instead of `scaling.minReplicas`.
    #[schemars(range(min = 1, max = 1000))]
    pub min_replicas: i32,
    /// Instead of `scaling.maxReplicas`.
    #[schemars(range(min = 1, max = 1000))]
    pub max_replicas: i32,
}

fn utc() -> String {
    "UTC".into()
}

/// A day of the week.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "days speak for themselves")]
pub enum Day {
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

/// What `spec.scaling` has chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScalingStatus {
    /// Engine pods of the stable revision that are wanted.
    pub desired_replicas: i32,
    /// Why so many: the numbers of the newest change.
    pub reason: String,
    /// When that number last changed; absent until it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_scale_time: Option<Time>,
    /// What keeps the number as it is, whatever the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<Hold>,
}

/// What keeps the number of pods as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Hold {
    /// A canary is compared with stable: pods are added where everything fits, none is taken away.
    Trial,
    /// The pods' metrics could not be read for five minutes.
    NoData,
}
