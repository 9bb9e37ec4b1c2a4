//! What people and the world do to a service.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::names::ANNOTATION_REQUEST;
use mixquant_crds::rollout::{PauseStep, RollbackWindow, Step, TrialFailure};
use mixquant_crds::status::{Outcome, RolloutStage, VerdictStatus};
use mixquant_crds::{KvPrecision, Span};
use mixquant_operator::observed::Traffic;

use super::cluster::{Cluster, at_most, gpus_each, moment};
use super::demand::{least, scaling};
use super::gateway;
use super::operator::Operator;
use super::scenario::{Ask, Change, Happening};
use super::traffic::{Counters, MetricFault};

fn pause(duration: Option<&str>) -> Step {
    let duration = duration.map(|text| Span(text.into()));
    Step {
        weight: None,
        mirror: None,
        canary_replicas: None,
        hold: None,
        pause: Some(PauseStep { duration }),
    }
}

/// Two revisions, or none.
pub fn rollback_window(lenient: bool) -> Option<RollbackWindow> {
    lenient.then_some(RollbackWindow { revisions: 2 })
}

impl Cluster {
    pub fn happen(&mut self, happening: &Happening, operator: &mut Operator) -> Result<(), String> {
        self.note(|| format!("{happening:?}"));
        operator.stir();
        match *happening {
            Happening::Change(change) => self.change(change),
            Happening::Crash(after) => operator.crash = Some(after),
            Happening::Stale(age) => operator.stale = age,
            Happening::Delete => {
                self.service.metadata.deletion_timestamp = Some(Time(moment(self.now)));
                self.floor.heals_at = i64::MAX;
                self.collected_at = Some(self.now + 30);
            }
            Happening::UpgradeOperator => operator.upgrade(),
            Happening::Ask(ask) => {
                self.disturbed = true;
                self.ask(ask);
            }
            Happening::Metrics(fault, seconds) => {
                self.disturbed = true;
                self.begin_fault(fault, seconds);
            }
            _ => {
                self.disturbed = true;
                self.fault(*happening);
            }
        }
        if !matches!(happening, Happening::Change(Change::Demand(_))) {
            self.changed();
        }
        self.check()
    }

    fn change(&mut self, change: Change) {
        let spec = &mut self.service.spec;
        let before = spec.clone();
        match change {
            Change::Image(image) => spec.engine.image = format!("engine:{image}"),
            Change::Precision(which) => {
                let kv = &mut spec.precision.kv_cache;
                kv.default = if which == 1 {
                    KvPrecision::INT2
                } else {
                    KvPrecision::INT4
                };
                kv.block_size = if which == 2 { 32 } else { 16 };
            }
            Change::Data(data) => self.calibration_data = Some(data),
            Change::DataGone => self.calibration_data = None,
            Change::Traffic(mode) if self.places.gpus.is_none() => {
                spec.traffic = gateway::spec(mode);
                gateway::mirror(spec, None);
            }
            Change::Replicas(replicas) if spec.scaling.is_none() => {
                spec.replicas = at_most(replicas, self.places.gpus);
            }
            Change::Scaling(which) => spec.scaling = scaling(which, at_most(2, self.places.gpus)),
            Change::Demand(pods) => return self.want(pods),
            Change::Gpus(gpus) if self.places.gpus.is_none_or(|all| all >= gpus) => {
                spec.engine.resources = Some(gpus_each(gpus));
            }
            // A quiet service compares answers, and alone there is nothing to compare with.
            Change::Surge(surge) if !self.quiet => spec.rollout.surge = surge,
            // The API refuses replicas that scaling owns; no node has room for the others.
            Change::Surge(_) | Change::Replicas(_) | Change::Traffic(_) | Change::Gpus(_) => {}
            Change::Hold(seconds) => {
                let mut steps = spec.rollout.steps.iter_mut();
                let step = steps.find(|step| step.hold.is_some()).unwrap();
                step.hold = Some(Span(format!("{seconds}s")));
            }
            Change::Paused(paused) => spec.rollout.paused = paused,
            Change::Way(way) => {
                gateway::mirror(spec, (way == 4).then_some(50));
                let steps = &mut spec.rollout.steps;
                steps.retain(|step| step.pause.is_none());
                match way {
                    1 => steps.insert(0, pause(Some("40s"))),
                    2 => steps.insert(1, pause(None)),
                    _ => {}
                }
                spec.rollout.on_failure = if way == 3 {
                    TrialFailure::Pause
                } else {
                    TrialFailure::Rollback
                };
            }
            Change::Lenient(lenient) => {
                spec.rollout.rollback_window = rollback_window(lenient);
                spec.rollout.abort_scale_down_delay_seconds = if lenient { 60 } else { 0 };
            }
        }
        if *spec != before {
            self.floor.replicas = least(spec).min(least(&before));
            // New pods of a scaled stable need their time.
            self.floor.heals_at = self.floor.heals_at.max(self.now + 60);
            let generation = self.service.metadata.generation.unwrap();
            self.service.metadata.generation = Some(generation + 1);
            self.make_users_route();
        }
    }

    /// A person writes a request for the canary that they see.
    fn ask(&mut self, ask: Ask) {
        let canary = self.status().canary.map(|canary| canary.revision);
        let canary = canary.unwrap_or_else(|| "0000000000".into());
        let kept = |which: u64| {
            let count = u64::try_from(self.revisions.len().max(1)).unwrap();
            let index = usize::try_from(which % count).unwrap();
            let kept = self.revisions.get(index);
            kept.map_or_else(|| canary.clone(), |kept| kept.frozen.revision.clone())
        };
        let command = match ask {
            Ask::Promote => format!("promote {canary}"),
            Ask::PromoteFull => {
                self.asked_full.insert(canary.clone());
                format!("promote {canary} full")
            }
            Ask::Abort => format!("abort {canary}"),
            Ask::Retry => "retry".into(),
            Ask::Undo(which) => format!("undo {}", kept(which)),
        };
        let text = format!("{} {command}", self.changes);
        let annotations = self.service.metadata.annotations.get_or_insert_default();
        annotations.insert(ANNOTATION_REQUEST.into(), text);
    }

    fn begin_fault(&mut self, fault: MetricFault, seconds: i64) {
        self.end_fault();
        for pod in &mut self.pods {
            match fault {
                MetricFault::Frozen => pod.frozen = Some(pod.counters.clone()),
                MetricFault::Reset => pod.counters = Counters::new(),
                _ => {}
            }
        }
        self.fault = Some((fault, self.now + seconds));
        self.fault_since = self.now;
    }

    pub(super) fn end_fault(&mut self) {
        if self.fault.take().is_some() {
            self.fault_since = self.now;
        }
        for pod in &mut self.pods {
            pod.frozen = None;
        }
    }

    fn fault(&mut self, happening: Happening) {
        let heals = |cluster: &mut Self| cluster.floor.heals_at = cluster.now + 90;
        match happening {
            Happening::KillPod if !self.pods.is_empty() => {
                let index = self.pick(self.pods.len());
                self.pods.remove(index);
                self.control();
                heals(self);
            }
            Happening::DeleteDeployment if !self.deployments.is_empty() => {
                let index = self.pick(self.deployments.len());
                self.deployments.remove(index);
                self.control();
                heals(self);
            }
            Happening::EditDeployment if !self.deployments.is_empty() => {
                let index = self.pick(self.deployments.len());
                self.deployments[index].2 = i32::try_from(self.pick(6)).unwrap();
                self.control();
                heals(self);
            }
            Happening::DeleteJob if !self.jobs.is_empty() => {
                let index = self.pick(self.jobs.len());
                self.jobs.remove(index);
            }
            Happening::DeleteRevision if !self.revisions.is_empty() => {
                let index = self.pick(self.revisions.len());
                self.revisions.remove(index);
            }
            Happening::EditTraffic if self.traffic.is_some() => {
                self.traffic = Some(Traffic::Only("0000000000".into()));
                heals(self);
            }
            Happening::EditRoute(weight) => {
                self.edit_route(weight);
                heals(self);
            }
            Happening::LoseRoute => {
                self.lose_route();
                heals(self);
            }
            Happening::GatewayDown(seconds) => self.gateway_goes(seconds),
            Happening::LoseAnswers => {
                for job in &mut self.jobs {
                    job.seen.message = None;
                }
            }
            Happening::ForgePass => self.forge(),
            Happening::ClearStatus => self.service.status = None,
            Happening::Tenant(gpus, seconds) => self.tenant_comes(gpus, seconds),
            _ => {}
        }
    }

    fn pick(&mut self, count: usize) -> usize {
        usize::try_from(self.dice.below(u64::try_from(count).unwrap())).unwrap()
    }

    /// A status that claims that the trial has passed.
    fn forge(&mut self) {
        let at = Time(moment(self.now));
        let status = self.service.status.as_mut();
        if let Some(rollout) = status.and_then(|status| status.rollout.as_mut()) {
            rollout.stage = RolloutStage::Promoting;
            rollout.verdict = Some(VerdictStatus {
                outcome: Outcome::Pass,
                at,
                message: "forged".into(),
                gates: Vec::new(),
            });
        }
    }
}
