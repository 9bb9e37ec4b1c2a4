//! GPUs: which pods have theirs, who else takes some, and what the operator may know of it, by its own arithmetic on real objects.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use mixquant_crds::names;
use mixquant_operator::action::RoomQuestion;
use mixquant_operator::capacity::{self, Of};
use mixquant_operator::observed::Room;
use serde_json::json;

use super::cluster::{Cluster, Pod};

/// The resource that is scarce.
pub const GPU: &str = "nvidia.com/gpu";

/// Of a GPU each of a template's pods takes so many.
pub fn size(template: &PodTemplateSpec) -> usize {
    let spec = template.spec.as_ref();
    let resources = spec.and_then(|spec| spec.containers.first()?.resources.as_ref());
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    let gpus = requests.and_then(|requests| requests.get(GPU));
    gpus.map_or(1, |gpus| gpus.0.parse().unwrap())
}

/// The GPUs of the one node that there is; without a number there are always enough, and nobody may look at them.
#[derive(Debug, Default)]
pub struct Places {
    /// How many.
    pub gpus: Option<usize>,
    /// Those that another service has, and until when.
    pub tenant: Option<(usize, i64)>,
    /// What a trial in stable's place leaves serving, and until when that is excused.
    pub gap: Option<(i32, i64)>,
}

impl Cluster {
    fn free(&self) -> Option<usize> {
        let taken = self.places.tenant.map_or(0, |(gpus, _)| gpus);
        let placed = self.pods.iter().filter(|pod| pod.placed);
        let used = taken + placed.map(|pod| pod.size).sum::<usize>();
        Some(self.places.gpus?.saturating_sub(used))
    }

    /// The scheduler: pods that wait get their GPUs, the oldest first.
    pub(super) fn schedule(&mut self) {
        for index in 0..self.pods.len() {
            let fits = self.free().is_none_or(|free| self.pods[index].size <= free);
            let pod = &mut self.pods[index];
            if !pod.placed && fits {
                pod.placed = true;
                pod.ready_at = (!pod.manners.crashes).then_some(self.now + pod.starts);
            }
        }
    }

    /// Another service takes as many of the free GPUs as it wants.
    pub(super) fn tenant_comes(&mut self, wants: usize, seconds: i64) {
        if let (Some(free), None) = (self.free(), self.places.tenant) {
            self.places.tenant = Some((wants.min(free), self.now + seconds));
        }
    }

    /// Whether another service has GPUs. That it leaves is told by no watch.
    pub fn has_tenant(&self) -> bool {
        self.places.tenant.is_some()
    }

    pub(super) fn tenant_leaves(&mut self) {
        self.places.tenant = None;
        self.schedule();
    }

    /// What the shell answers to a plan that asks.
    pub fn room(&self, asks: &RoomQuestion) -> Option<Room> {
        let gpus = self.places.gpus?;
        let mut cluster = capacity::Cluster::default();
        let node = json!({"metadata": {"name": "only"}, "status": {"allocatable": {GPU: gpus.to_string(), "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}]}});
        cluster.add_node(&serde_json::from_value(node).unwrap());
        for pod in &self.pods {
            cluster.add_pod(&stored(pod));
        }
        if let Some((taken, _)) = self.places.tenant {
            let spec = json!({"nodeName": "only", "containers": [{"name": "c", "resources": {"requests": {GPU: taken.to_string()}}}]});
            let other = json!({"metadata": {"name": "other", "namespace": "other"}, "spec": spec});
            cluster.add_pod(&serde_json::from_value(other).unwrap());
        }
        let of = Of {
            namespace: "default",
            service: "chat",
            stable: &asks.stable,
        };
        let pod = asks.template.spec.as_ref().unwrap();
        Some(capacity::room(pod, of, &cluster))
    }

    /// A trial that takes stable's place leaves one pod serving where there are two places; its end takes a while to heal.
    pub(super) fn remember_gap(&mut self) {
        let status = self.status();
        let at = status.rollout.filter(|_| status.canary.is_some());
        let room = at.map_or_else(Vec::new, |at| at.room);
        match (room.get(1), &mut self.places.gap) {
            (Some(beside_one), gap) => *gap = Some((i32::from(*beside_one > 0), i64::MAX)),
            (None, Some((_, until))) if *until == i64::MAX => *until = self.now + 150,
            (None, _) => {}
        }
    }

    /// The pods that must serve in spite of a gap.
    pub(super) fn floor_of_gap(&self) -> Option<i32> {
        let (floor, until) = self.places.gap?;
        (self.now < until).then_some(floor)
    }
}

fn stored(pod: &Pod) -> k8s_openapi::api::core::v1::Pod {
    let labels = json!({names::LABEL_SERVICE: "chat", names::LABEL_COMPONENT: "engine", names::LABEL_REVISION: pod.revision});
    let spec = json!({"nodeName": pod.placed.then_some("only"),
        "containers": [{"name": "engine", "resources": {"requests": {GPU: pod.size.to_string()}}}]});
    let stored = json!({"metadata": {"name": pod.uid, "namespace": "default", "labels": labels}, "spec": spec});
    serde_json::from_value(stored).unwrap()
}
