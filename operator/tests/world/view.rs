//! What is read from the cluster: metrics pages, observations (stale ones too), the end of a life.

use mixquant_crds::rollout::TrialFailure;
use mixquant_crds::{Digest, KvPrecision};
use mixquant_operator::build::companion;
use mixquant_operator::observed::{
    CompanionState, Dataset, FrozenRevision, Installation, Observed, ObservedCompanion,
    ObservedDeployment, ObservedPod, ObservedTraffic, Presence, Tracks, Traffic,
};

use super::End;
use super::cluster::{Cluster, HISTORY, Pod, moment};
use super::traffic::Page;

impl Cluster {
    pub fn pages(&self) -> Vec<Page> {
        let ready = self.pods.iter().filter(|pod| self.is_ready(pod));
        let used = self.kv_cache_usage();
        ready
            .map(|pod| Page {
                kv_cache_usage: if self.selects(&pod.revision) {
                    used
                } else {
                    0.0
                },
                pod: self.pod(pod),
                counters: pod.frozen.as_ref().unwrap_or(&pod.counters).clone(),
                fault: self.fault.map(|(fault, _)| fault),
            })
            .collect()
    }

    /// The world, with children of `age` observations ago when it is stale.
    pub fn observe(&mut self, age: usize) -> Observed {
        let fresh = self.fresh();
        self.volume.blurred = age > 0;
        if !self.keeps_history {
            return fresh;
        }
        self.history.push_front(fresh.clone());
        self.history.truncate(HISTORY);
        match self.history.get(age) {
            Some(old) => Observed {
                service: fresh.service,
                calibration_data: fresh.calibration_data,
                evaluation_data: fresh.evaluation_data,
                ..old.clone()
            },
            None => fresh,
        }
    }

    fn fresh(&self) -> Observed {
        let data = self
            .calibration_data
            .map(|data| Digest::of_bytes(&[1, u8::try_from(data).unwrap()]));
        let mut observed = Observed {
            service: self.service.clone(),
            calibration_data: match data {
                Some(digest) => Dataset::Present { digest },
                None => Dataset::Missing {
                    what: "ConfigMap `texts` does not exist".into(),
                },
            },
            evaluation_data: Dataset::Present {
                digest: Digest::of_bytes(&[2]),
            },
            model_claim: Presence::Present,
            artifact_claim: Presence::Present,
            jobs: self.jobs.iter().map(|job| job.seen.clone()).collect(),
            revisions: self.revisions.clone(),
            deployments: self
                .deployments
                .iter()
                .map(|one| self.deployment(one))
                .collect(),
            pods: self.pods.iter().map(|pod| self.pod(pod)).collect(),
            traffic: self.traffic.clone().map(|traffic| ObservedTraffic {
                selects: (traffic != Traffic::Only("0000000000".into())).then_some(traffic),
                matches: true,
            }),
            tracks: Tracks::default(),
            route: None,
            old_route: None,
            foreign: Vec::new(),
            room: None,
            installation: Installation::default(),
            companions: companion::wanted(&Installation::default())
                .into_iter()
                .map(|companion| ObservedCompanion {
                    companion,
                    state: if self.companions.contains(&companion) {
                        CompanionState::Right
                    } else {
                        CompanionState::Wrong
                    },
                })
                .collect(),
        };
        self.show_gateway(&mut observed);
        observed
    }

    fn deployment(
        &self,
        (frozen, uid, replicas): &(FrozenRevision, String, i32),
    ) -> ObservedDeployment {
        let pods = self
            .pods
            .iter()
            .filter(|pod| pod.revision == frozen.revision);
        let existing = i32::try_from(pods.clone().count()).unwrap();
        let ready = i32::try_from(pods.filter(|pod| self.is_ready(pod)).count()).unwrap();
        ObservedDeployment {
            revision: frozen.revision.clone(),
            uid: uid.clone(),
            replicas: *replicas,
            existing,
            ready,
            available: ready,
            up_to_date: true,
            matches: true,
            problem: (frozen.image == "engine:3").then(|| "CrashLoopBackOff, exit code 139".into()),
        }
    }

    fn pod(&self, pod: &Pod) -> ObservedPod {
        ObservedPod {
            name: pod.uid.clone(),
            uid: pod.uid.clone(),
            revision: pod.revision.clone(),
            ip: Some("127.0.0.1".into()),
            ready: self.is_ready(pod),
            terminating: false,
            restarts: pod.restarts(self.now),
            cannot_start: None,
            out_of_memory: pod.was_killed(self.now),
            created_at: moment(pod.born),
        }
    }

    pub fn end(&self) -> End {
        let status = self.status();
        let mut pods: Vec<_> = self
            .deployments
            .iter()
            .filter(|(.., replicas)| *replicas > 0)
            .map(|(frozen, _, replicas)| (frozen.revision.clone(), *replicas))
            .collect();
        pods.sort();
        let mut failed: Vec<String> = status
            .failed_revisions
            .iter()
            .map(|failed| failed.revision.clone())
            .collect();
        failed.sort();
        let spec = &self.service.spec;
        End {
            phase: self.phase(),
            stable: status.stable.map(|stable| stable.revision),
            pods,
            traffic: format!("{:?}", self.traffic),
            gateway: self.end_of_gateway(),
            failed,
            good: !self.disturbed
                && !spec.rollout.paused
                && spec.rollout.on_failure == TrialFailure::Rollback
                && spec.rollout.steps.iter().all(|step| step.pause.is_none())
                && ["engine:0", "engine:1"].contains(&spec.engine.image.as_str())
                && spec.precision.kv_cache.default == KvPrecision::INT4
                && matches!(self.calibration_data, Some(0 | 1)),
        }
    }
}
