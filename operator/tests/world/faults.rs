//! What people and the world do to a service.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::KvPrecision;
use mixquant_crds::status::{Outcome, RolloutStage, VerdictStatus};
use mixquant_operator::observed::Traffic;

use super::cluster::{Cluster, moment};
use super::operator::Operator;
use super::scenario::{Change, Happening};

impl Cluster {
    pub fn happen(&mut self, happening: &Happening, operator: &mut Operator) -> Result<(), String> {
        self.note(|| format!("{happening:?}"));
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
            _ => {
                self.disturbed = true;
                self.fault(*happening);
            }
        }
        self.changed();
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
            Change::Replicas(replicas) => spec.replicas = replicas,
            Change::Hold(seconds) => spec.rollout.steps[0].hold.0 = format!("{seconds}s"),
        }
        if *spec != before {
            self.floor.replicas = spec.replicas.min(before.replicas);
            // New pods of a scaled stable need their time.
            self.floor.heals_at = self.floor.heals_at.max(self.now + 60);
            let generation = self.service.metadata.generation.unwrap();
            self.service.metadata.generation = Some(generation + 1);
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
            Happening::LoseAnswers => {
                for job in &mut self.jobs {
                    job.seen.message = None;
                }
            }
            Happening::ForgePass => self.forge(),
            Happening::ClearStatus => self.service.status = None,
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
            });
        }
    }
}
