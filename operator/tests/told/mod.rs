//! A cluster that does at once what a plan tells it, and the worlds that are reached that way.
#![expect(
    unreachable_pub,
    reason = "a test's module has no crate to be reached from"
)]

mod route;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use mixquant_crds::report::{CalibrationReport, VerifyReport};
use mixquant_crds::{Digest, JobMessage, MixQuantService, MixQuantServiceStatus};
use mixquant_operator::action::{Action, DeploymentRequest, JobWork, Plan};
use mixquant_operator::histogram::Histogram;
use mixquant_operator::observed::{
    Companion, CompanionState, Dataset, Installation, JobState, Kind, Observed, ObservedDeployment,
    ObservedJob, ObservedRevision, ObservedTraffic, Presence, Tracks,
};
use mixquant_operator::plan::plan;
use mixquant_operator::samples::{Samples, Series, TrackSamples, Value};
use mixquant_operator::validate::{ValidService, validate};
use serde::Deserialize;

/// The worlds that cases start from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum World {
    /// Just applied.
    Fresh,
    /// The calibration Job runs.
    Calibrating,
    /// It has answered.
    Calibrated,
    /// The first revision's pods start.
    Deploying,
    /// The first revision serves.
    Serving,
    /// Another image is asked for and its verification has answered.
    Verified,
    /// Its canary starts.
    Starting,
    /// It takes the first step.
    Stepping,
    /// It takes the second, which is the last.
    LastStep,
    /// It takes over.
    Promoting,
    /// It failed and leaves.
    RollingBack,
    /// It failed and is gone.
    Degraded,
}

/// The world, its time, and what the plan asks of it.
#[derive(Clone)]
pub struct Told {
    pub now: Timestamp,
    pub observed: Observed,
    /// Routes are taken only by [`Told::gateway_takes`].
    pub gateway_lags: bool,
    made: u32,
}

fn render(service: &ValidService, _: &Digest, artifact: &Digest) -> PodTemplateSpec {
    serde_json::from_value(serde_json::json!({
        "spec": {"containers": [{"name": "engine", "image": service.engine.image, "args": [artifact.hex()]}]}
    }))
    .expect("a pod template")
}

/// The service of all cases.
pub fn service() -> MixQuantService {
    let text = include_str!("../../../crds/examples/chat.yaml");
    let mut service: MixQuantService = serde_norway::from_str(text).expect("an example");
    service.metadata.namespace = Some("default".into());
    service.metadata.uid = Some("uid".into());
    service.metadata.generation = Some(1);
    service.spec.engine.image = "engine:1".into();
    service
}

fn measured(artifact: &Digest) -> VerifyReport {
    VerifyReport {
        baseline_perplexity: 8.0,
        perplexity: 8.02,
        perplexity_increase_percent: 0.25,
        kl_mean: 0.002,
        kl_p99: 0.02,
        top1_agreement_percent: 98.0,
        worst_slice: None,
        tokens: 4096,
        artifact_digest: Some(artifact.clone()),
    }
}

/// The way from one world to the next.
type Onwards = fn(&mut Told);

impl Told {
    /// A service that was just applied.
    pub fn new(service: MixQuantService) -> Self {
        let present = |bytes: &[u8]| Dataset::Present {
            digest: Digest::of_bytes(bytes),
        };
        let route = route::first(&service);
        Self {
            gateway_lags: false,
            now: "2026-01-01T00:00:00.7Z".parse().expect("a time"),
            observed: Observed {
                service,
                calibration_data: present(b"calibration"),
                evaluation_data: present(b"evaluation"),
                model_claim: Presence::Present,
                artifact_claim: Presence::Present,
                jobs: Vec::new(),
                revisions: Vec::new(),
                deployments: Vec::new(),
                pods: Vec::new(),
                traffic: None,
                tracks: Tracks::default(),
                route,
                old_route: None,
                foreign: Vec::new(),
                installation: Installation::default(),
                companions: Vec::new(),
                room: None,
            },
            made: 0,
        }
    }

    /// The world of that name.
    pub fn reach(world: World) -> Self {
        Self::reach_with(service(), world)
    }

    /// The world of that name, of another service.
    pub fn reach_with(service: MixQuantService, world: World) -> Self {
        let mut told = Self::new(service);
        let path: [(World, Onwards); 9] = [
            (World::Fresh, Self::pass),
            (World::Calibrating, Self::answer),
            (World::Calibrated, Self::pass),
            (World::Deploying, |told| {
                told.pods_ready();
                told.settle();
            }),
            (World::Serving, |told| {
                told.observed.service.spec.engine.image = "engine:2".into();
                told.observed.service.metadata.generation = Some(2);
                told.pass();
                told.answer();
            }),
            (World::Verified, Self::pass),
            (World::Starting, |told| {
                told.pods_ready();
                told.pass();
                told.pass();
                told.shift();
            }),
            (World::Stepping, |told| {
                told.verdict(80, 1.0);
                told.shift();
            }),
            (World::LastStep, |told| {
                told.verdict(80, 1.0);
                told.shift();
            }),
        ];
        let trunk = match world {
            World::RollingBack | World::Degraded => World::Stepping,
            other => other,
        };
        for (here, onwards) in path {
            if here == trunk {
                break;
            }
            onwards(&mut told);
        }
        if trunk != world {
            told.verdict(40, 3.0);
            told.verdict(20, 3.0);
        }
        if world == World::Degraded {
            told.settle();
        }
        told
    }

    pub fn plan(&self, samples: &Samples) -> Plan {
        let valid = validate(&self.observed.service).expect("a valid service");
        plan(&valid, &self.observed, samples, self.now, render)
    }

    /// A pass that has no samples.
    pub fn pass(&mut self) {
        let plan = self.plan(&Samples::default());
        self.act(&plan);
    }

    fn settle(&mut self) {
        for _ in 0..10 {
            self.pass();
        }
    }

    /// Time passes and the canary is judged at `slowness` times stable's latency.
    fn verdict(&mut self, after: i64, slowness: f64) {
        self.pods_ready();
        self.now += SignedDuration::from_secs(after);
        let samples = self.samples(slowness).expect("a trial");
        let plan = self.plan(&samples);
        self.act(&plan);
    }

    /// Samples of the trial's window in which the canary has `slowness` times stable's latency; `None` without a trial.
    pub fn samples(&self, slowness: f64) -> Option<Samples> {
        let window = self.plan(&Samples::default()).window?;
        if window.revisions[0] == window.revisions[1] {
            return None;
        }
        let bounds: Vec<f64> = (0..200).map(|power| 0.001 * 1.05_f64.powi(power)).collect();
        let track = |median: f64| {
            let mut counts = vec![0; bounds.len() + 1];
            counts[bounds.partition_point(|bound| *bound < median)] = 1000;
            let tpot = Value::Histogram(Histogram {
                bounds: bounds.clone(),
                counts,
            });
            TrackSamples {
                values: [(Series::Tpot, tpot)].into(),
                pods: 1,
                grew_at: Some(self.now),
                ..TrackSamples::default()
            }
        };
        let [stable, canary] = window.revisions;
        Some(Samples {
            since: Some(window.since),
            taken_at: Some(self.now),
            tracks: [(stable, track(0.02)), (canary, track(0.02 * slowness))].into(),
            ..Samples::default()
        })
    }

    /// All Jobs succeed.
    pub fn answer(&mut self) {
        let known = self.observed.service.status.as_ref();
        let known = known.and_then(|status| status.calibrations.first());
        let artifact = known.map_or(Digest::of_bytes(b"artifact"), |known| {
            known.report.artifact_digest.clone()
        });
        self.answer_with(&artifact);
    }

    /// All Jobs that run succeed, with this artifact.
    pub fn answer_with(&mut self, artifact: &Digest) {
        let running = self.observed.jobs.iter_mut();
        for job in running.filter(|job| job.state == JobState::Running) {
            let verify = measured(artifact);
            let message = if job.name.contains("-verify-") {
                JobMessage::Verified(verify)
            } else {
                JobMessage::Calibrated(CalibrationReport {
                    model_digest: Digest::of_bytes(b"model"),
                    artifact_digest: artifact.clone(),
                    calibration_tokens: 1000,
                    prompt_lengths: vec![0, 0, 0, 0, 0, 128, 0, 0, 0, 0, 0, 0, 0, 0],
                    verify,
                })
            };
            job.state = JobState::Succeeded;
            job.finished_at = Some(self.now);
            job.message = Some(Ok(message));
        }
    }

    /// All Jobs that run fail.
    pub fn fail_jobs(&mut self) {
        for job in &mut self.observed.jobs {
            if job.state == JobState::Running {
                job.state = JobState::Failed {
                    reason: "BackoffLimitExceeded".into(),
                    text: "it has failed".into(),
                };
                job.finished_at = Some(self.now);
            }
        }
    }

    pub fn pods_ready(&mut self) {
        for deployment in &mut self.observed.deployments {
            deployment.up_to_date = true;
            deployment.existing = deployment.replicas;
            deployment.ready = deployment.replicas;
            deployment.available = deployment.replicas;
        }
    }

    fn mend(&mut self, companion: Companion) {
        let mut all = self.observed.companions.iter_mut();
        let found = all.find(|seen| seen.companion == companion);
        found.expect("one that was observed").state = CompanionState::Right;
    }

    fn deploy(&mut self, request: &DeploymentRequest, uid: String) {
        let revision = &request.frozen.revision;
        let deployments = &mut self.observed.deployments;
        let mut known = deployments.iter_mut();
        if let Some(known) = known.find(|known| known.revision == *revision) {
            known.matches = true;
            known.replicas = request.replicas;
            known.existing = request.replicas;
            known.ready = known.ready.min(request.replicas);
            known.available = known.available.min(request.replicas);
            return;
        }
        deployments.push(ObservedDeployment {
            revision: revision.clone(),
            uid,
            replicas: request.replicas,
            existing: request.replicas,
            ready: 0,
            available: 0,
            up_to_date: true,
            matches: true,
            problem: None,
        });
    }

    pub fn act(&mut self, plan: &Plan) {
        for action in &plan.actions {
            self.made += 1;
            let uid = format!("uid-{}", self.made);
            match action {
                Action::Remember(status) | Action::Report(status) => {
                    // What is written is read again as the API kept it.
                    let kept = serde_json::to_value(status).expect("a status is plain data");
                    let kept = serde_json::from_value(kept).expect("what was written");
                    self.observed.service.status = Some(kept);
                }
                Action::ApplyRevision(new) => self.observed.revisions.push(ObservedRevision {
                    frozen: new.frozen.clone(),
                    number: new.number,
                    uid,
                }),
                Action::ApplyDeployment(request) => self.deploy(request, uid),
                Action::ScaleDeployment(request) => {
                    let mut all = self.observed.deployments.iter_mut();
                    let known = all.find(|known| known.uid == request.uid);
                    known.expect("one that is there").replicas = request.replicas;
                }
                Action::ApplyTraffic(traffic) => {
                    self.observed.traffic = Some(ObservedTraffic {
                        selects: Some(traffic.clone()),
                        matches: true,
                    });
                }
                Action::ApplyTrack(request) => {
                    let seen = Self::selects(&request.revision);
                    *self.observed.tracks.of_mut(request.track) = Some(seen);
                }
                Action::ApplyRoute(share) => self.put_route(*share),
                Action::PatchRoute(patch) => self.patch_route(patch),
                Action::ApplyCompanion(request) => self.mend(request.companion),
                Action::ApplyJob(job) => self.observed.jobs.push(ObservedJob {
                    name: job.name.clone(),
                    uid,
                    state: JobState::Running,
                    message: None,
                    created_at: self.now,
                    finished_at: None,
                    pod_problem: None,
                }),
                Action::Delete(object) => match object.object.kind {
                    Kind::Job => self.observed.jobs.retain(|job| job.uid != object.uid),
                    Kind::Deployment => {
                        let deployments = &mut self.observed.deployments;
                        deployments.retain(|deployment| deployment.uid != object.uid);
                    }
                    Kind::ControllerRevision => {
                        let revisions = &mut self.observed.revisions;
                        revisions.retain(|revision| revision.uid != object.uid);
                    }
                    Kind::Service => self.observed.traffic = None,
                    Kind::HTTPRoute => self.observed.old_route = None,
                },
                Action::Publish(_) | Action::Count(_) => {}
            }
        }
    }
}

/// A status in one line.
fn written(action: &Action, status: &MixQuantServiceStatus) -> String {
    let word = match action {
        Action::Remember(_) => "Remember",
        _ => "Report",
    };
    let revision = |role: &Option<mixquant_crds::status::RevisionStatus>| {
        role.as_ref()
            .map_or("none".to_owned(), |role| role.image.clone())
    };
    let rollout = status.rollout.as_ref().map_or(String::new(), |at| {
        let verdict = at.verdict.as_ref();
        let verdict = verdict.map_or(String::new(), |verdict| format!(", {:?}", verdict.outcome));
        let mirror = (at.mirror > 0).then(|| format!(" mirror {}", at.mirror));
        let mirror = mirror.unwrap_or_default();
        format!(
            ", {:?} step {} weight {}{mirror} failed verdicts {}{verdict}",
            at.stage, at.step, at.weight, at.failed_verdicts
        )
    });
    let failed: Vec<String> = status
        .failed_revisions
        .iter()
        .map(|failed| format!("{} {:?}", failed.revision, failed.reason))
        .collect();
    format!(
        "{word} {:?}: stable {}, canary {}{rollout}, calibrations {}, failed {failed:?}{}",
        status.phase.expect("a phase"),
        revision(&status.stable),
        revision(&status.canary),
        status.calibrations.len(),
        wanted(status),
    )
}

/// The pods that the load asks for, in a line of their own.
fn wanted(status: &MixQuantServiceStatus) -> String {
    let Some(chosen) = &status.scaling else {
        return String::new();
    };
    let held = chosen
        .held
        .map_or(String::new(), |held| format!(", held: {held:?}"));
    let (pods, reason) = (chosen.desired_replicas, &chosen.reason);
    format!("\n    {pods} pods wanted: {reason}{held}")
}

/// An action in one line.
pub fn brief(action: &Action) -> String {
    match action {
        Action::Remember(status) | Action::Report(status) => written(action, status),
        Action::ApplyRevision(new) => {
            format!("ApplyRevision {} number {}", new.frozen.image, new.number)
        }
        Action::ApplyDeployment(request) => format!(
            "ApplyDeployment {} x {}",
            request.frozen.image, request.replicas
        ),
        Action::ScaleDeployment(request) => {
            format!("ScaleDeployment {} x {}", request.name, request.replicas)
        }
        Action::ApplyTraffic(traffic) => format!("ApplyTraffic {traffic:?}"),
        Action::ApplyTrack(request) => {
            format!("ApplyTrack {:?} {}", request.track, request.revision)
        }
        Action::ApplyRoute(share) => format!("ApplyRoute canary {share}"),
        Action::PatchRoute(patch) => format!(
            "PatchRoute {} at {}: canary {} %",
            patch.name, patch.resource_version, patch.weight
        ),
        Action::ApplyCompanion(request) => format!("ApplyCompanion {:?}", request.companion),
        Action::ApplyJob(job) => {
            let work = match &job.work {
                JobWork::Calibrate { round, remove, .. } => {
                    let round = (*round > 0).then(|| format!(", round {round}"));
                    let remove =
                        (!remove.is_empty()).then(|| format!(", removes {}", remove.len()));
                    let [round, remove] = [round, remove].map(Option::unwrap_or_default);
                    format!("calibrate{round}{remove}")
                }
                JobWork::Verify { .. } => "verify".to_owned(),
            };
            format!("ApplyJob {} ({work})", job.name)
        }
        Action::Delete(object) => format!("Delete {:?} {}", object.object.kind, object.object.name),
        Action::Publish(event) => {
            let kind = if event.warning { "Warning" } else { "Normal" };
            format!("Publish {kind} {:?}: {}", event.reason, event.note)
        }
        Action::Count(metric) => format!("Count {metric:?}"),
    }
}
