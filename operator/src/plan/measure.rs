//! Where the measuring of the spec's model stands: which Job is wanted, what Jobs answered, what the precision gate says of it.
//!
//! Memory: finished measurements by their inputs, and inputs that failed. A Job that is gone after its answer was remembered is not
//! missed, one that is gone before is made again.

use std::time::Duration;

use mixquant_crds::status::{CalibrationRecord, Outcome, Reason};
use mixquant_crds::{CalibrationReport, Digest, JobMessage, VerifyReport};

use super::{Decisions, MEMORY, World, artifacts, drift};
use crate::action::{Action, JobRequest, JobWork, Metric, ObjectRef, PRECISION_GATE};
use crate::canary::later;
use crate::judge;
use crate::observed::{Dataset, JobState, Kind, ObjectName, ObservedJob, Presence};
use crate::revision::{self, LATE_MESSAGE_SECONDS, seconds_between};

/// A running Job or something missing is looked at again after this, should a watch be lost.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// Where the measuring stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Measured {
    /// Something that the spec names is missing.
    Waiting {
        /// What.
        message: String,
    },
    /// What is there cannot be used.
    Invalid {
        /// Why, with the fix.
        message: String,
    },
    /// A Job is wanted.
    Running {
        /// The Job; made unless it exists.
        job: JobRequest,
        /// The Jobs of the same inputs, which stay.
        keep: Vec<String>,
        /// One to be removed first: it failed for an earlier request.
        remove: Option<ObjectRef>,
        /// How it does.
        message: String,
    },
    /// The Job failed, for good.
    Failed {
        /// The Jobs of the same inputs, which stay.
        keep: Vec<String>,
        /// Why.
        message: String,
    },
    /// The precision is outside the limits.
    Rejected {
        /// The Jobs of the same inputs, which stay.
        keep: Vec<String>,
        /// The numbers.
        message: String,
    },
    /// The precision is within the limits.
    Accepted {
        /// What was measured.
        record: Box<CalibrationRecord>,
        /// The Jobs of the same inputs, which stay.
        keep: Vec<String>,
        /// The numbers.
        message: String,
    },
}

/// Takes over what Jobs answered and says where the measuring stands.
pub(super) fn measure(world: &World<'_>, decisions: &mut Decisions) -> Measured {
    let data = match data(world) {
        Ok(data) => data,
        Err(measured) => {
            // Which Jobs would be wanted is not known, so no failure is forgotten: a failed Job of theirs would be taken for a new answer.
            decisions.wake.push(LOOK_AGAIN);
            return *measured;
        }
    };
    let round = drift::round(decisions.memory.drift.as_ref());
    let inputs = revision::inputs(world.valid, data, round);
    let image = &world.valid.engine.image;
    let calibration = revision::calibration_names(&world.valid.name, &inputs);
    let records = decisions.memory.calibrations.iter();
    let mut known = records.filter(|record| record.inputs_digest == inputs);
    let exact = known.clone().find(|record| record.image == *image).cloned();
    let other = known.next().cloned();
    let mut keep = calibration.to_vec();
    if let Some(record) = exact {
        keep.extend(verification(world, &record).1);
        forget_old_failures(world, decisions, &keep);
        return gate(world, decisions, record, keep);
    }
    let (wanted, names) = match other {
        None => (Wanted::Calibration { inputs }, calibration),
        Some(record) => verification(world, &record),
    };
    keep.extend(names.iter().cloned());
    forget_old_failures(world, decisions, &names);
    job(world, decisions, &wanted, &names, keep)
}

/// The verification of a known artifact by the spec's image, and the names of its Job.
fn verification(world: &World<'_>, record: &CalibrationRecord) -> (Wanted, [String; 2]) {
    let artifact = &record.report.artifact_digest;
    let image = &world.valid.engine.image;
    let digest = revision::verification(&record.inputs_digest, artifact, image);
    let names = revision::verification_names(&world.valid.name, &digest);
    let of = Box::new(record.clone());
    (Wanted::Verification { digest, of }, names)
}

/// The digests of both datasets, or what keeps the measuring from starting.
fn data<'a>(world: &World<'a>) -> Result<(&'a Digest, &'a Digest), Box<Measured>> {
    let observed = world.observed;
    let mut missing = Vec::new();
    for claim in [&observed.model_claim, &observed.artifact_claim] {
        match claim {
            Presence::Present => {}
            Presence::Missing { what } => missing.push(what.as_str()),
        }
    }
    let mut digests = Vec::new();
    for dataset in [&observed.calibration_data, &observed.evaluation_data] {
        match dataset {
            Dataset::Present { digest } => digests.push(digest),
            Dataset::Missing { what } => missing.push(what.as_str()),
        }
    }
    missing.dedup();
    let [calibration, evaluation] = digests[..] else {
        return Err(Box::new(Measured::Waiting {
            message: missing.join("; "),
        }));
    };
    if !missing.is_empty() {
        return Err(Box::new(Measured::Waiting {
            message: missing.join("; "),
        }));
    }
    if calibration == evaluation {
        return Err(Box::new(Measured::Invalid {
            message: "verification.dataset holds the same bytes as calibration.dataset: verify on texts that calibration has not seen".into(),
        }));
    }
    Ok((calibration, evaluation))
}

/// What must be measured.
enum Wanted {
    Calibration {
        inputs: Digest,
    },
    Verification {
        digest: Digest,
        of: Box<CalibrationRecord>,
    },
}

impl Wanted {
    /// What names a failure of it.
    fn short(&self) -> &str {
        match self {
            Self::Calibration { inputs } => inputs.short(),
            Self::Verification { digest, .. } => digest.short(),
        }
    }

    fn verb(&self) -> &'static str {
        match self {
            Self::Calibration { .. } => "calibration",
            Self::Verification { .. } => "verification",
        }
    }

    fn work(&self, world: &World<'_>, decisions: &Decisions) -> JobWork {
        match self {
            Self::Calibration { .. } => JobWork::Calibrate {
                plan: world.valid.plan.clone(),
                expect_model: world.valid.model.digest.clone(),
                round: drift::round(decisions.memory.drift.as_ref()),
                remove: artifacts::leaving(decisions),
            },
            Self::Verification { of, .. } => JobWork::Verify {
                artifact: of.report.artifact_digest.clone(),
            },
        }
    }

    /// The record that an answer makes, or why it is none.
    fn record(&self, world: &World<'_>, message: &JobMessage) -> Result<CalibrationRecord, String> {
        let image = &world.valid.engine.image;
        match (self, message) {
            (_, JobMessage::Failed(failure)) => Err(failure.message.clone()),
            (Self::Calibration { inputs }, JobMessage::Calibrated(report)) => {
                same_model(world, report)?;
                same_artifact(&report.verify, &report.artifact_digest)?;
                Ok(CalibrationRecord {
                    inputs_digest: inputs.clone(),
                    image: image.clone(),
                    report: report.clone(),
                })
            }
            (Self::Verification { of, .. }, JobMessage::Verified(verify)) => {
                same_artifact(verify, &of.report.artifact_digest)?;
                Ok(of.verified_by(image, verify.clone()))
            }
            (Self::Calibration { .. }, JobMessage::Verified(_))
            | (Self::Verification { .. }, JobMessage::Calibrated(_)) => Err(format!(
                "the Job answered something else than a {}: is spec.engine.image a mixquant-engine of this version?",
                self.verb()
            )),
        }
    }
}

fn same_model(world: &World<'_>, report: &CalibrationReport) -> Result<(), String> {
    match &world.valid.model.digest {
        Some(wanted) if *wanted != report.model_digest => Err(format!(
            "the model is {} and not {wanted} as spec.model.digest says",
            report.model_digest
        )),
        Some(_) | None => Ok(()),
    }
}

fn same_artifact(report: &VerifyReport, wanted: &Digest) -> Result<(), String> {
    match &report.artifact_digest {
        Some(measured) if measured != wanted => Err(format!(
            "the Job measured artifact {measured} and not {wanted}"
        )),
        Some(_) | None => Ok(()),
    }
}

/// Failures of earlier requests are forgotten, so that the revision is tried again; a failed Job of theirs goes first.
fn forget_old_failures(world: &World<'_>, decisions: &mut Decisions, names: &[String]) {
    let failed_job = |failed: &str| {
        world.observed.jobs.iter().any(|job| {
            names.contains(&job.name) && job.name.contains(failed) && is_over(&job.state)
        })
    };
    decisions.memory.failed_revisions.retain(|failed| {
        let of_a_job = failed.reason == Reason::CalibrationFailed;
        failed.request == world.valid.request || (of_a_job && failed_job(&failed.revision))
    });
}

/// Whether a Job is finished or on its way out.
fn is_over(state: &JobState) -> bool {
    match state {
        JobState::Running => false,
        JobState::Succeeded | JobState::Failed { .. } | JobState::Deleting => true,
    }
}

/// The precision gate on a record. A rejection is remembered, so that it is told once.
fn gate(
    world: &World<'_>,
    decisions: &mut Decisions,
    record: CalibrationRecord,
    keep: Vec<String>,
) -> Measured {
    let limits = &world.valid.verification.limits;
    let (outcome, message) = judge::precision(&record.report.verify, limits);
    match outcome {
        Outcome::Pass => Measured::Accepted {
            record: Box::new(record),
            keep,
            message,
        },
        Outcome::Fail | Outcome::Inconclusive => {
            let short = record.inputs_digest.short();
            if decisions.failure(world.valid, short).is_none() {
                decisions.fail(world, short, Reason::PrecisionRegression, &message);
                decisions.count(Metric::Verdict {
                    gate: PRECISION_GATE.into(),
                    outcome,
                });
            }
            Measured::Rejected { keep, message }
        }
    }
}

/// The wanted Job: its answer, its failure, or that it runs.
fn job(
    world: &World<'_>,
    decisions: &mut Decisions,
    wanted: &Wanted,
    names: &[String; 2],
    keep: Vec<String>,
) -> Measured {
    if let Some(failed) = decisions.failure(world.valid, wanted.short()) {
        let message = failed.message.clone();
        return Measured::Failed { keep, message };
    }
    let find = |name: &String| world.observed.jobs.iter().find(|job| job.name == *name);
    let mut failures = decisions.memory.failed_revisions.iter();
    if failures.any(|failed| failed.revision == wanted.short()) {
        let mut old = names.iter().filter_map(find);
        if let Some(job) = old.find(|job| is_over(&job.state)) {
            return replaced((world, &*decisions), wanted, job, keep);
        }
    }
    let [first, second] = names;
    let lost = |name| find(name).is_some_and(|job| matches!(answer(world, job), Answer::Lost));
    let name = if lost(first) { second } else { first };
    let why = match find(name).map_or(Answer::None, |job| answer(world, job)) {
        Answer::None => return running(world, decisions, wanted, name, keep),
        Answer::Said(Ok(message)) => match wanted.record(world, message) {
            Ok(record) => return measured(world, decisions, wanted, record, keep),
            Err(why) => why,
        },
        Answer::Said(Err(why)) => why,
        Answer::Lost => "it succeeded twice and its answer was lost both times".to_owned(),
    };
    failed(world, decisions, wanted, (name, &why), keep)
}

/// What a Job has said.
enum Answer<'a> {
    /// Nothing yet.
    None,
    /// It succeeded, and its pod is gone with the answer.
    Lost,
    /// This.
    Said(Result<&'a JobMessage, String>),
}

fn answer<'a>(world: &World<'_>, job: &'a ObservedJob) -> Answer<'a> {
    match &job.state {
        JobState::Running | JobState::Deleting => Answer::None,
        JobState::Succeeded => match &job.message {
            Some(Ok(message)) => Answer::Said(Ok(message)),
            Some(Err(why)) => Answer::Said(Err(format!("its answer is no report: {why}"))),
            None => {
                let ended = job.finished_at.unwrap_or(job.created_at);
                if seconds_between(ended, world.now) < LATE_MESSAGE_SECONDS {
                    Answer::None
                } else {
                    Answer::Lost
                }
            }
        },
        JobState::Failed { reason, text } => match &job.message {
            Some(Ok(message @ JobMessage::Failed(_))) => Answer::Said(Ok(message)),
            Some(Ok(JobMessage::Calibrated(_) | JobMessage::Verified(_)) | Err(_)) | None => {
                let problem = job.pod_problem.as_ref();
                let problem = problem.map_or(String::new(), |text| format!("; {text}"));
                Answer::Said(Err(format!("{reason}: {text}{problem}")))
            }
        },
    }
}

/// A finished Job of an earlier request makes room.
fn replaced(
    (world, decisions): (&World<'_>, &Decisions),
    wanted: &Wanted,
    job: &ObservedJob,
    keep: Vec<String>,
) -> Measured {
    let object = ObjectName {
        kind: Kind::Job,
        name: job.name.clone(),
    };
    let remove = ObjectRef {
        object,
        uid: job.uid.clone(),
    };
    Measured::Running {
        job: JobRequest {
            name: job.name.clone(),
            work: wanted.work(world, decisions),
        },
        keep,
        remove: (job.state != JobState::Deleting).then_some(remove),
        message: format!(
            "{} Job {} failed before and is made again",
            wanted.verb(),
            job.name
        ),
    }
}

fn running(
    world: &World<'_>,
    decisions: &mut Decisions,
    wanted: &Wanted,
    name: &str,
    keep: Vec<String>,
) -> Measured {
    let job = world.observed.jobs.iter().find(|job| job.name == name);
    if let Some(ended) = job.and_then(|job| job.finished_at) {
        // Only a lost answer is waited for by time alone.
        let late = u32::try_from(LATE_MESSAGE_SECONDS).unwrap_or(u32::MAX);
        decisions.wake_at(later(ended, late), world.now);
    }
    decisions.wake.push(LOOK_AGAIN);
    if job.is_none() && matches!(wanted, Wanted::Calibration { .. }) {
        artifacts::mark(world, decisions);
    }
    let problem = job.and_then(|job| job.pod_problem.as_deref());
    let problem = problem.map_or(String::new(), |text| format!(": {text}"));
    Measured::Running {
        job: JobRequest {
            name: name.to_owned(),
            work: wanted.work(world, decisions),
        },
        keep,
        remove: None,
        message: format!("{} Job {name} is at work{problem}", wanted.verb()),
    }
}

fn measured(
    world: &World<'_>,
    decisions: &mut Decisions,
    wanted: &Wanted,
    record: CalibrationRecord,
    keep: Vec<String>,
) -> Measured {
    if matches!(wanted, Wanted::Calibration { .. }) {
        artifacts::made(decisions, &record.report.artifact_digest);
    }
    decisions.memory.calibrations.insert(0, record.clone());
    decisions.memory.calibrations.truncate(MEMORY);
    decisions.tell(
        false,
        Reason::CalibrationSucceeded,
        format!(
            "{} finished: artifact {}, {} tokens measured",
            wanted.verb(),
            record.report.artifact_digest,
            record.report.verify.tokens
        ),
    );
    let measured = gate(world, decisions, record, keep);
    if matches!(measured, Measured::Accepted { .. }) {
        decisions.told.push(Action::Count(Metric::Verdict {
            gate: PRECISION_GATE.into(),
            outcome: Outcome::Pass,
        }));
    }
    measured
}

fn failed(
    world: &World<'_>,
    decisions: &mut Decisions,
    wanted: &Wanted,
    (job, why): (&str, &str),
    keep: Vec<String>,
) -> Measured {
    let message = format!(
        "{} Job {job} failed: {why}; it is tried again when the spec or the data change",
        wanted.verb()
    );
    decisions.fail(world, wanted.short(), Reason::CalibrationFailed, &message);
    Measured::Failed { keep, message }
}
