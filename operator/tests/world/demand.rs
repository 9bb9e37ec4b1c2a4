//! What people want of the service, what of it pods carry, and what must hold of the number of pods that follows it.

use mixquant_crds::MixQuantServiceSpec;
use mixquant_crds::scaling::{ScaleDown, ScaleUp, ScalingSpec, ScalingTargets};
use mixquant_crds::status::MixQuantServiceStatus;

use super::cluster::Cluster;

/// Of its KV cache a pod should use this part.
const TARGET: f64 = 0.5;
/// Seconds that pods stay after they were needed.
pub const DOWN_WINDOW: i64 = 60;
/// Seconds after which a demand that stays as it is has been answered.
const ANSWERED: i64 = 200;
/// What lasts less than this may pass unseen between two looks.
const UNSEEN: i64 = 25;

/// So many pods' worth, from so many seconds on.
#[derive(Debug, Clone, Copy)]
pub struct Demand {
    pub from: i64,
    pub pods: i32,
}

/// `spec.scaling`; `None` for 0.
pub fn scaling(which: u8, least: i32) -> Option<ScalingSpec> {
    let (min, max) = [(1, 3), (1, 6), (least, 4)]
        .get(usize::from(which).checked_sub(1)?)
        .copied()?;
    Some(ScalingSpec {
        min_replicas: min,
        max_replicas: max,
        targets: ScalingTargets {
            queue_length: None,
            requests_per_second: None,
            kv_cache_usage_percent: Some(50),
        },
        scale_up: ScaleUp::default(),
        scale_down: ScaleDown {
            stabilization_window_seconds: i32::try_from(DOWN_WINDOW).unwrap(),
        },
        schedule: Vec::new(),
    })
}

/// The pods that must always be there.
pub fn least(spec: &MixQuantServiceSpec) -> i32 {
    let scaling = spec.scaling.as_ref();
    scaling.map_or(spec.replicas, |scaling| scaling.min_replicas)
}

impl Cluster {
    pub(super) fn want(&mut self, pods: i32) {
        let from = self.now;
        self.demands.push(Demand { from, pods });
    }

    /// Whether the number of pods follows the load.
    pub fn scales(&self) -> bool {
        self.service.spec.scaling.is_some()
    }

    /// Whether the operator has had the time to answer the demand since metrics were last wrong.
    pub fn has_been_seen(&self) -> bool {
        !self.scales() || self.now >= self.fault_since + ANSWERED
    }

    /// The part of its KV cache that each pod with traffic uses. A demand of n pods is a little less than n pods' worth.
    pub(super) fn kv_cache_usage(&self) -> f64 {
        let wanted = self.demands.last().map_or(0, |demand| demand.pods);
        let demand = (f64::from(wanted) - 0.3).max(0.0) * TARGET;
        let serving = self.pods.iter().filter(|pod| self.is_ready(pod));
        let serving = serving.filter(|pod| self.selects(&pod.revision)).count();
        let serving = f64::from(u32::try_from(serving.max(1)).unwrap());
        (demand / serving).min(1.0)
    }

    /// The most pods that a demand of the last seconds asked for, if it lasted long enough to be seen.
    fn wanted_lately(&self) -> i32 {
        let mut most = 0;
        for (index, demand) in self.demands.iter().enumerate() {
            let until = self
                .demands
                .get(index + 1)
                .map_or(self.now, |next| next.from);
            let seen_from = demand.from.max(self.now - DOWN_WINDOW);
            if until - seen_from >= UNSEEN {
                most = most.max(demand.pods);
            }
        }
        most
    }

    /// Stable's pods that are wanted now.
    pub(super) fn desired(&self) -> i32 {
        let status = self.status();
        let chosen = status
            .scaling
            .filter(|_| self.service.spec.scaling.is_some());
        chosen.map_or(self.service.spec.replicas, |chosen| chosen.desired_replicas)
    }

    /// The number of pods moves within its bounds, and downwards only from rest and when nobody lately needed them.
    pub(super) fn may_choose(
        &self,
        before: &MixQuantServiceStatus,
        next: &MixQuantServiceStatus,
    ) -> Result<(), String> {
        let (Some(scaling), Some(chosen)) = (&self.service.spec.scaling, &next.scaling) else {
            return Ok(());
        };
        let desired = chosen.desired_replicas;
        let trial = before.canary.is_some();
        let bounds = scaling.min_replicas..=scaling.max_replicas;
        if !bounds.contains(&desired) && !trial {
            return Err(format!("{desired} pods are chosen of {bounds:?}"));
        }
        let Some(known) = &before.scaling else {
            return Ok(());
        };
        if desired >= known.desired_replicas {
            return Ok(());
        }
        if trial {
            return Err(format!(
                "{known:?} falls to {desired} while a canary is on trial"
            ));
        }
        let wanted = self.wanted_lately();
        if desired < wanted.min(scaling.max_replicas) {
            return Err(format!(
                "{desired} pods are chosen, and {wanted} were wanted lately"
            ));
        }
        Ok(())
    }

    /// At rest the number of pods is what the demand asks for, where there is room for them.
    pub(super) fn is_answered(&self) -> Result<(), String> {
        let Some(scaling) = &self.service.spec.scaling else {
            return Ok(());
        };
        let wanted = self.demands.last().map_or(0, |demand| demand.pods);
        let wanted = wanted.max(scaling.min_replicas).min(scaling.max_replicas);
        let status = self.status();
        let serves = status.stable.is_some() && status.canary.is_none();
        let serves = serves && self.service.metadata.deletion_timestamp.is_none();
        if serves && self.places.gpus.is_none() && self.desired() != wanted {
            let desired = self.desired();
            return Err(format!(
                "it rests with {desired} pods, and {wanted} are wanted"
            ));
        }
        Ok(())
    }
}
