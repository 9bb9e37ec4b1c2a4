//! The cluster: what the API holds, and controllers, pods, Jobs and people that change it in virtual time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mixquant_crds::report::{CalibrationReport, FailureReason, JobFailure};
use mixquant_crds::service::Resources;
use mixquant_crds::status::MixQuantServiceStatus;
use mixquant_crds::{Decimal, Digest, JobMessage, KvPrecision, MixQuantService, Span};
use mixquant_operator::action::{JobRequest, JobWork, Window};
use mixquant_operator::observed::{
    Companion, FrozenRevision, JobState, Observed, ObservedJob, ObservedRevision, Traffic,
};

use super::demand::Demand;
use super::faults::rollback_window;
use super::gateway::{self, Gateway};
use super::places::{GPU, Places, size};
use super::quiet::{is_quiet, quieten};
use super::scenario::Dice;
use super::traffic::{Counters, Manners, MetricFault, measured};
use super::volume::Volume;

/// When the simulation begins.
pub(super) const EPOCH: i64 = 1_700_000_000;
/// Observations that a stale read may fall back to.
pub(super) const HISTORY: usize = 12;

/// The moment of a virtual second.
pub fn moment(now: i64) -> Timestamp {
    Timestamp::from_second(EPOCH + now).unwrap()
}

/// The virtual second of a moment.
pub fn second(moment: Timestamp) -> i64 {
    moment.as_second() - EPOCH
}

/// A Job and what it will say.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) seen: ObservedJob,
    ends_at: i64,
    answer: Result<JobMessage, String>,
}

/// A pod and its counters.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) uid: String,
    pub(super) revision: String,
    pub(super) born: i64,
    /// It has its GPUs.
    pub(super) placed: bool,
    /// How many.
    pub(super) size: usize,
    /// Seconds from there until it is ready.
    pub(super) starts: i64,
    pub(super) ready_at: Option<i64>,
    pub(super) counters: Counters,
    /// The page as it was when it froze.
    pub(super) frozen: Option<Counters>,
    pub(super) manners: Manners,
}

impl Pod {
    /// Whether the kernel has killed its container for memory.
    pub(super) fn was_killed(&self, now: i64) -> bool {
        self.manners.out_of_memory && now >= self.born + 40
    }

    /// How often its container has ended until `now`.
    pub(super) fn restarts(&self, now: i64) -> i32 {
        if self.manners.crashes {
            i32::try_from((now - self.born) / 20).unwrap().min(3)
        } else {
            0
        }
    }
}

/// Everything that exists.
#[derive(Debug)]
pub struct Cluster {
    /// Virtual seconds.
    pub now: i64,
    /// Rises with every change: what watches see.
    pub changes: u64,
    /// How often each kind of Event was published.
    pub said: BTreeMap<String, u64>,
    /// What happened; only kept when somebody will read it.
    pub trace: Option<Vec<String>>,
    pub(super) service: MixQuantService,
    pub(super) jobs_made: u64,
    pub(super) pods: Vec<Pod>,
    pub(super) revisions: Vec<ObservedRevision>,
    pub(super) deployments: Vec<(FrozenRevision, String, i32)>,
    pub(super) traffic: Option<Traffic>,
    pub(super) gateway: Gateway,
    pub(super) companions: BTreeSet<Companion>,
    /// The pods that must be ready and selected now; less while faults heal.
    pub(super) floor: Floor,
    pub(super) jobs: Vec<Job>,
    pub(super) calibration_data: Option<u64>,
    /// Earlier observations are kept for stale reads.
    pub keeps_history: bool,
    pub(super) history: VecDeque<Observed>,
    pub(super) dice: Dice,
    made: u64,
    pub(super) disturbed: bool,
    /// What is wrong with metrics pages, and until when.
    pub(super) fault: Option<(MetricFault, i64)>,
    /// Since when, or since when nothing is.
    pub(super) fault_since: i64,
    /// The canaries that a person asked to promote in full.
    pub(super) asked_full: BTreeSet<String>,
    /// The revisions that have been stable.
    pub(super) was_stable: BTreeSet<String>,
    pub(super) places: Places,
    pub(super) volume: Volume,
    /// What people wanted, and since when.
    pub(super) demands: Vec<Demand>,
    /// When the garbage collector takes what the deleted service owned.
    pub(super) collected_at: Option<i64>,
    /// Nobody uses the service.
    pub(super) quiet: bool,
}

/// When serving is guaranteed: after the first stable, outside the healing time of faults.
#[derive(Debug, Default)]
pub(super) struct Floor {
    /// The least `replicas` of the newest two specs.
    pub(super) replicas: i32,
    /// Faults heal until then.
    pub(super) heals_at: i64,
}

fn base(gpus: Option<usize>, traffic: u8, mirrors: bool) -> MixQuantService {
    let text = include_str!("../../../crds/examples/chat.yaml");
    let mut service: MixQuantService = serde_norway::from_str(text).unwrap();
    service.metadata.namespace = Some("default".into());
    service.metadata.uid = Some("uid".into());
    service.metadata.generation = Some(1);
    service.spec.engine.image = "engine:0".into();
    service.spec.engine.resources = Some(gpus_each(1));
    service.spec.replicas = at_most(2, gpus);
    service.spec.verification.min_top1_agreement_percent.0 = "90".into();
    service.spec.slo.tpot.quantile.0 = "0.9".into();
    let rollout = &mut service.spec.rollout;
    rollout.steps[0].hold = Some(Span("20s".into()));
    rollout.steps[1].hold = Some(Span("30s".into()));
    rollout.analysis.interval.0 = "10s".into();
    rollout.analysis.min_samples = 50;
    rollout.analysis.warm_up.0 = "5s".into();
    rollout.progress_deadline_seconds = 300;
    service.spec.slo.error_rate_percent = Some(Decimal("5".into()));
    let killed = r#"{"name": "killed", "metric": "OutOfMemory", "max": "0"}"#;
    service.spec.gates = vec![serde_json::from_str(killed).unwrap()];
    service.spec.traffic = gateway::spec(traffic);
    gateway::mirror(&mut service.spec, mirrors.then_some(50));
    service
}

/// What a pod of so many GPUs asks for.
pub(super) fn gpus_each(gpus: usize) -> Resources {
    Resources {
        requests: Some([(GPU.to_owned(), Quantity(gpus.to_string()))].into()),
        limits: None,
    }
}

/// Pods of a service that always finds room for itself, also with two GPUs each.
pub(super) fn at_most(replicas: i32, gpus: Option<usize>) -> i32 {
    let most = gpus.map_or(i32::MAX, |gpus| i32::try_from((gpus / 2).max(1)).unwrap());
    replicas.min(most)
}

impl Cluster {
    pub fn new(seed: u64, gpus: Option<usize>, traffic: u8) -> Self {
        // Half of the lives behind a route of the service's own begin with copies.
        let mut service = base(gpus, traffic, (seed / 4).is_multiple_of(2));
        service.spec.rollout.rollback_window = rollback_window(seed % 3 == 2);
        let mut cluster = Self {
            now: 0,
            changes: 1,
            said: BTreeMap::new(),
            trace: None,
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
            gateway: Gateway::default(),
            companions: BTreeSet::new(),
            jobs: Vec::new(),
            calibration_data: Some(0),
            keeps_history: false,
            history: VecDeque::new(),
            dice: Dice::new(seed),
            made: 0,
            disturbed: false,
            fault: None,
            fault_since: 0,
            asked_full: BTreeSet::new(),
            was_stable: BTreeSet::new(),
            places: Places {
                gpus,
                ..Places::default()
            },
            volume: Volume::default(),
            demands: Vec::new(),
            collected_at: None,
            quiet: is_quiet(seed, gpus),
        };
        if cluster.quiet {
            quieten(&mut cluster.service.spec);
        }
        cluster.make_users_route();
        cluster
    }

    pub fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>6} {}", self.now, text()));
        }
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

    pub(super) fn write_status(&mut self, status: MixQuantServiceStatus) {
        if let Some(stable) = &status.stable {
            self.was_stable.insert(stable.revision.clone());
        }
        self.service.status = Some(status);
        self.remember_gap();
        self.changed();
    }

    pub(super) fn make_job(&mut self, request: &JobRequest) {
        if self.jobs.iter().any(|job| job.seen.name == request.name) {
            return;
        }
        self.jobs_made += 1;
        let takes = 10 + i64::try_from(self.dice.below(40)).unwrap();
        let answer = self.answer(&request.work);
        self.store(&answer);
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
            JobWork::Calibrate { plan, round, .. } => {
                let read = serde_json::json!({"plan": plan, "data": data, "round": round});
                let artifact = Digest::of_json(&read).unwrap();
                let bad = plan.kv_cache.default == KvPrecision::INT2;
                Ok(JobMessage::Calibrated(CalibrationReport {
                    model_digest: Digest::of_bytes(b"model"),
                    artifact_digest: artifact.clone(),
                    calibration_tokens: 1000,
                    prompt_lengths: Vec::new(),
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
        let known = deployments.find(|(known, ..)| known.revision == frozen.revision);
        if let Some(deployment) = known {
            deployment.2 = replicas;
        } else {
            let uid = self.unique("deployment");
            self.deployments.push((frozen.clone(), uid, replicas));
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

    /// Deployment controllers: as many pods as asked for, newest taken away first.
    pub(super) fn control(&mut self) {
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
        self.schedule();
    }

    /// Owned objects of a deleted service go, whenever they were made.
    fn collect(&mut self) {
        self.jobs.clear();
        self.deployments.clear();
        self.revisions.clear();
        self.traffic = None;
        self.collect_gateway();
        self.control();
    }

    fn new_pod(&mut self, frozen: &FrozenRevision) -> Pod {
        let manners = Manners::of(&frozen.image, self.quiet);
        let starts = 5 + i64::try_from(self.dice.below(20)).unwrap();
        Pod {
            uid: self.unique("pod"),
            revision: frozen.revision.clone(),
            born: self.now,
            placed: false,
            size: size(&frozen.template),
            starts,
            ready_at: None,
            counters: Counters::new(),
            frozen: matches!(self.fault, Some((MetricFault::Frozen, _))).then(Counters::new),
            manners,
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
        // A container that crashes is started again every 20 seconds, three times.
        let crashing = self.pods.iter().filter(|pod| pod.manners.crashes);
        let crashes = crashing.flat_map(|pod| [1, 2, 3].map(|time| pod.born + time * 20));
        let heals = self.fault.map(|(_, until)| until);
        let moments = pods.chain(jobs).chain(crashes).chain(heals);
        let leaves = self.places.tenant.map(|(_, until)| until);
        let moments = moments.chain(self.collected_at).chain(leaves);
        let moments = moments.chain(self.gateway_takes_next());
        moments.filter(|at| *at > self.now).min()
    }

    /// Time passes; requests are answered where a trial samples them.
    pub fn advance(&mut self, to: i64, window: Option<&Window>) -> Result<(), String> {
        let from = self.now;
        if window.is_some() {
            self.serve(to - from);
        }
        self.now = to;
        if self.collected_at.is_some_and(|at| at <= to) {
            self.collect();
        }
        self.gateway_takes();
        if self.fault.is_some_and(|(_, until)| until <= to) {
            self.end_fault();
        }
        if self.places.tenant.is_some_and(|(_, until)| until <= to) {
            self.tenant_leaves();
        }
        let crashed = |at: i64| {
            self.pods
                .iter()
                .any(|pod| pod.restarts(at) > 0 && pod.restarts(at) != pod.restarts(from))
        };
        if crashed(to) {
            self.changed();
        }
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
            self.note(|| text);
        }
        self.check()
    }
}
