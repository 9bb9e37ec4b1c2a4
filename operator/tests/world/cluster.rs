//! The cluster: what the API holds, and controllers, pods, Jobs and people that change it in virtual time.

use std::collections::VecDeque;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::report::{CalibrationReport, FailureReason, JobFailure, VerifyReport};
use mixquant_crds::status::{MixQuantServiceStatus, Outcome, RolloutStage, VerdictStatus};
use mixquant_crds::{Digest, JobMessage, KvPrecision, MixQuantService};
use mixquant_operator::action::{JobRequest, JobWork, Window};
use mixquant_operator::observed::{
    Dataset, FrozenRevision, JobState, Observed, ObservedDeployment, ObservedJob, ObservedPod,
    ObservedRevision, ObservedTraffic, Presence, Traffic,
};

use super::End;
use super::operator::Operator;
use super::scenario::{Change, Dice, Happening};
use super::traffic::{self, Page, REQUESTS_PER_SECOND};

/// When the simulation begins.
const EPOCH: i64 = 1_700_000_000;
/// Observations that a stale read may fall back to.
const HISTORY: usize = 12;

/// The moment of a virtual second.
pub fn moment(now: i64) -> Timestamp {
    Timestamp::from_second(EPOCH + now).unwrap()
}

/// A Job and what it will say.
#[derive(Debug, Clone)]
struct Job {
    seen: ObservedJob,
    ends_at: i64,
    answer: Result<JobMessage, String>,
}

/// A pod and its counters.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) uid: String,
    pub(super) revision: String,
    pub(super) born: i64,
    pub(super) ready_at: Option<i64>,
    pub(super) counts: Vec<u64>,
    slowness: f64,
}

/// Everything that exists.
#[derive(Debug)]
pub struct Cluster {
    /// Virtual seconds.
    pub now: i64,
    /// Rises with every change: what watches see.
    pub changes: u64,
    pub trace: Vec<String>,
    pub(super) service: MixQuantService,
    pub(super) jobs_made: u64,
    pub(super) pods: Vec<Pod>,
    pub(super) revisions: Vec<ObservedRevision>,
    pub(super) deployments: Vec<(FrozenRevision, String, i32)>,
    pub(super) traffic: Option<Traffic>,
    /// The pods that must be ready and selected now; less while faults heal.
    pub(super) floor: Floor,
    jobs: Vec<Job>,
    calibration_data: Option<u64>,
    history: VecDeque<Observed>,
    dice: Dice,
    made: u64,
    disturbed: bool,
}

/// When serving is guaranteed: after the first stable, outside the healing time of faults.
#[derive(Debug, Default)]
pub(super) struct Floor {
    /// The least `replicas` of the newest two specs.
    pub(super) replicas: i32,
    /// Faults heal until then.
    pub(super) heals_at: i64,
}

fn base() -> MixQuantService {
    let text = include_str!("../../../crds/examples/chat.yaml");
    let mut service: MixQuantService = serde_norway::from_str(text).unwrap();
    service.metadata.namespace = Some("default".into());
    service.metadata.uid = Some("uid".into());
    service.metadata.generation = Some(1);
    service.spec.engine.image = "engine:0".into();
    service.spec.verification.min_top1_agreement_percent.0 = "90".into();
    service.spec.slo.tpot.quantile.0 = "0.9".into();
    let rollout = &mut service.spec.rollout;
    rollout.steps[0].hold.0 = "20s".into();
    rollout.steps[1].hold.0 = "30s".into();
    rollout.analysis.interval.0 = "10s".into();
    rollout.analysis.min_samples = 50;
    rollout.analysis.warm_up.0 = "5s".into();
    rollout.progress_deadline_seconds = 300;
    service
}

impl Cluster {
    pub fn new(seed: u64) -> Self {
        let service = base();
        Self {
            now: 0,
            changes: 1,
            trace: Vec::new(),
            floor: Floor {
                replicas: service.spec.replicas,
                heals_at: 0,
            },
            service,
            jobs_made: 0,
            pods: Vec::new(),
            revisions: Vec::new(),
            deployments: Vec::new(),
            traffic: None,
            jobs: Vec::new(),
            calibration_data: Some(0),
            history: VecDeque::new(),
            dice: Dice::new(seed),
            made: 0,
            disturbed: false,
        }
    }

    pub fn note(&mut self, text: impl AsRef<str>) {
        self.trace
            .push(format!("{:>6} {}", self.now, text.as_ref()));
    }

    pub fn phase(&self) -> String {
        let phase = self.status().phase;
        phase.map_or_else(|| "none".into(), |phase| format!("{phase:?}"))
    }

    pub(super) fn status(&self) -> MixQuantServiceStatus {
        self.service.status.clone().unwrap_or_default()
    }

    fn unique(&mut self, kind: &str) -> String {
        self.made += 1;
        format!("{kind}-{}", self.made)
    }

    /// A change that watches see; what was seen before is kept for stale reads.
    pub(super) fn changed(&mut self) {
        self.changes += 1;
    }

    // What the operator asks for. -----------------------------------------------------------------------------------------------

    pub(super) fn write_status(&mut self, status: MixQuantServiceStatus) {
        self.service.status = Some(status);
        self.changed();
    }

    pub(super) fn make_job(&mut self, request: &JobRequest) {
        if self.jobs.iter().any(|job| job.seen.name == request.name) {
            return;
        }
        self.jobs_made += 1;
        let takes = 10 + i64::try_from(self.dice.below(40)).unwrap();
        let answer = self.answer(&request.work);
        let seen = ObservedJob {
            name: request.name.clone(),
            uid: self.unique("job"),
            state: JobState::Running,
            message: None,
            created_at: moment(self.now),
            finished_at: None,
            pod_problem: None,
        };
        self.jobs.push(Job {
            seen,
            ends_at: self.now + takes,
            answer,
        });
        self.changed();
    }

    fn answer(&self, work: &JobWork) -> Result<JobMessage, String> {
        let data = self.calibration_data.ok_or("its ConfigMap is gone")?;
        match work {
            JobWork::Calibrate { .. } if data == 2 => Ok(JobMessage::Failed(JobFailure {
                reason: FailureReason::DataInvalid,
                message: "line 3 is no JSON".into(),
            })),
            JobWork::Calibrate { plan, .. } => {
                let artifact =
                    Digest::of_json(&serde_json::json!({"plan": plan, "data": data})).unwrap();
                let bad = plan.kv_cache.default == KvPrecision::INT2;
                Ok(JobMessage::Calibrated(CalibrationReport {
                    model_digest: Digest::of_bytes(b"model"),
                    artifact_digest: artifact.clone(),
                    calibration_tokens: 1000,
                    verify: measured(&artifact, bad),
                }))
            }
            JobWork::Verify { artifact } => {
                // The artifact's numbers do not depend on the image here.
                let known = self.status().calibrations;
                let bad = known.iter().any(|record| {
                    record.report.artifact_digest == *artifact
                        && record.report.verify.perplexity_increase_percent > 1.0
                });
                Ok(JobMessage::Verified(measured(artifact, bad)))
            }
        }
    }

    pub(super) fn delete_job(&mut self, name: &str, uid: &str) {
        self.jobs
            .retain(|job| job.seen.name != name || job.seen.uid != uid);
        self.changed();
    }

    pub(super) fn scale(&mut self, frozen: &FrozenRevision, replicas: i32) {
        let mut deployments = self.deployments.iter_mut();
        match deployments.find(|(known, ..)| known.revision == frozen.revision) {
            Some(deployment) => deployment.2 = replicas,
            None => {
                let uid = self.unique("deployment");
                self.deployments.push((frozen.clone(), uid, replicas));
            }
        }
        self.control();
        self.changed();
    }

    pub(super) fn delete_deployment(&mut self, name: &str, uid: &str) {
        self.deployments
            .retain(|(frozen, known, _)| known != uid || !name.ends_with(frozen.revision.as_str()));
        self.control();
        self.changed();
    }

    // What controllers do. ------------------------------------------------------------------------------------------------------

    /// Deployment controllers: as many pods as asked for, newest taken away first.
    fn control(&mut self) {
        let deployments = self.deployments.clone();
        self.pods.retain(|pod| {
            let mut known = deployments.iter();
            known.any(|(frozen, ..)| frozen.revision == pod.revision)
        });
        for (frozen, _, replicas) in deployments {
            let wanted = usize::try_from(replicas).unwrap();
            let mut have = 0;
            self.pods.retain(|pod| {
                have += usize::from(pod.revision == frozen.revision);
                pod.revision != frozen.revision || have <= wanted
            });
            let have = have.min(wanted);
            for _ in have..wanted {
                let pod = self.new_pod(&frozen);
                self.pods.push(pod);
            }
        }
    }

    fn new_pod(&mut self, frozen: &FrozenRevision) -> Pod {
        let starts = 5 + i64::try_from(self.dice.below(20)).unwrap();
        Pod {
            uid: self.unique("pod"),
            revision: frozen.revision.clone(),
            born: self.now,
            ready_at: (frozen.image != "engine:3").then_some(self.now + starts),
            counts: vec![0; traffic::bounds().len() + 1],
            slowness: if frozen.image == "engine:2" { 1.5 } else { 1.0 },
        }
    }

    pub(super) fn is_ready(&self, pod: &Pod) -> bool {
        pod.ready_at.is_some_and(|at| at <= self.now)
    }

    pub(super) fn selects(&self, revision: &str) -> bool {
        match &self.traffic {
            None => false,
            Some(Traffic::All) => true,
            Some(Traffic::Only(only)) => only == revision,
        }
    }

    /// Whether pods start or Jobs run.
    pub fn is_moving(&self) -> bool {
        self.next().is_some()
    }

    /// When something here changes by itself.
    pub fn next(&self) -> Option<i64> {
        let pods = self.pods.iter().filter_map(|pod| pod.ready_at);
        let jobs = self
            .jobs
            .iter()
            .filter(|job| job.seen.state == JobState::Running);
        let jobs = jobs.map(|job| job.ends_at);
        pods.chain(jobs).filter(|at| *at > self.now).min()
    }

    /// Time passes; requests are answered where a trial samples them.
    pub fn advance(&mut self, to: i64, window: Option<&Window>) -> Result<(), String> {
        let from = self.now;
        if window.is_some() {
            self.serve(to - from);
        }
        self.now = to;
        let became_ready = self
            .pods
            .iter()
            .any(|pod| pod.ready_at.is_some_and(|at| from < at && at <= to));
        let mut ended = Vec::new();
        for job in &mut self.jobs {
            if job.seen.state == JobState::Running && job.ends_at <= to {
                job.seen.finished_at = Some(moment(to));
                job.seen.state = match &job.answer {
                    Ok(JobMessage::Failed(_)) | Err(_) => JobState::Failed {
                        reason: "PodFailurePolicy".into(),
                        text: "exit code 2".into(),
                    },
                    Ok(_) => JobState::Succeeded,
                };
                job.seen.message = job.answer.clone().ok().map(Ok);
                ended.push(format!("Job {} ends: {:?}", job.seen.name, job.seen.state));
            }
        }
        if became_ready || !ended.is_empty() {
            self.changed();
        }
        for text in ended {
            self.note(text);
        }
        self.check()
    }

    fn serve(&mut self, seconds: i64) {
        let serving: Vec<usize> = (0..self.pods.len())
            .filter(|index| {
                let pod = &self.pods[*index];
                self.is_ready(pod) && self.selects(&pod.revision)
            })
            .collect();
        if serving.is_empty() {
            return;
        }
        // More than this in one go tells nothing new.
        let requests = REQUESTS_PER_SECOND * seconds.clamp(0, 60).unsigned_abs();
        for request in 0..requests {
            let index = serving[usize::try_from(request).unwrap() % serving.len()];
            let pod = &mut self.pods[index];
            traffic::observe(&mut pod.counts, &mut self.dice, pod.slowness);
        }
    }

    // What people and the world do. ---------------------------------------------------------------------------------------------

    pub fn happen(&mut self, happening: &Happening, operator: &mut Operator) -> Result<(), String> {
        self.note(format!("{happening:?}"));
        match *happening {
            Happening::Change(change) => self.change(change),
            Happening::Crash(after) => operator.crash = Some(after),
            Happening::Stale(age) => operator.stale = age,
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

    // What is read. -------------------------------------------------------------------------------------------------------------

    pub fn pages(&self) -> Vec<Page<'_>> {
        let ready = self.pods.iter().filter(|pod| self.is_ready(pod));
        ready
            .map(|pod| Page {
                uid: &pod.uid,
                revision: &pod.revision,
                born: EPOCH + pod.born,
                counts: &pod.counts,
            })
            .collect()
    }

    /// The world, with children of `age` observations ago when it is stale.
    pub fn observe(&mut self, age: usize) -> Observed {
        let fresh = self.fresh();
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
        Observed {
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
            foreign: Vec::new(),
        }
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
            restarts: 0,
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
            failed,
            good: !self.disturbed
                && ["engine:0", "engine:1"].contains(&spec.engine.image.as_str())
                && spec.precision.kv_cache.default == KvPrecision::INT4
                && matches!(self.calibration_data, Some(0 | 1)),
        }
    }
}

fn measured(artifact: &Digest, bad: bool) -> VerifyReport {
    let increase = if bad { 7.5 } else { 0.25 };
    VerifyReport {
        baseline_perplexity: 8.0,
        perplexity: 8.0 * (1.0 + increase / 100.0),
        perplexity_increase_percent: increase,
        kl_mean: 0.002,
        kl_p99: 0.02,
        top1_agreement_percent: 98.0,
        worst_slice: None,
        tokens: 4096,
        artifact_digest: Some(artifact.clone()),
    }
}
