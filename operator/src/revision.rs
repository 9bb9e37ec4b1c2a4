//! Identities: what names a Job, what names a revision, and how a revision is found again.
//!
//! Names are digests of what they stand for, so the same wish always finds the same object and going back makes nothing anew.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use mixquant_crds::status::RevisionStatus;
use mixquant_crds::{CalibrationReport, Digest};
use serde_json::json;

use crate::observed::{FrozenRevision, ObservedRevision};
use crate::validate::{Model, Source, ValidService};

/// Raised when calibration itself changes its meaning: all services are then calibrated anew.
const CALIBRATION_SCHEMA: u32 = 1;

/// Finished Jobs keep their pod, and so their message, for a moment after the Job says that it is done; a missing message before this
/// many seconds may only be late.
pub const LATE_MESSAGE_SECONDS: i64 = 60;

/// Renders the engine pod template of a service that serves a model with an artifact. The shell passes `build::deployment::template`.
pub type Render = fn(&ValidService, &Digest, &Digest) -> PodTemplateSpec;

/// Over everything that a calibration Job reads. The engine image and the gate's limits are not part of it: another image only
/// verifies, and limits are judged on numbers that are already known. Another round reads other texts of the same data.
pub fn inputs(
    service: &ValidService,
    (calibration_data, evaluation_data): (&Digest, &Digest),
    round: i32,
) -> Digest {
    let data = [&service.measured, calibration_data, evaluation_data];
    if round == 0 {
        return together(&data);
    }
    together(&[data[0], data[1], data[2], &digest(&json!({"round": round}))])
}

/// The spec's part of [`inputs`].
pub fn measured(service: &ValidService) -> Digest {
    let model = &service.model;
    let mut inputs = json!({
        "schema": CALIBRATION_SCHEMA,
        "model": measured_model(model),
        "plan": service.plan,
        "calibration": {
            "samples": service.calibration.samples,
            "sequenceLength": service.calibration.sequence_length,
        },
        "evaluation": {
            "samples": service.verification.samples,
            "sequenceLength": service.verification.sequence_length,
        },
        "artifacts": service.artifacts_claim,
    });
    // What a spec may leave out stands here only when it is there: a new field calibrates nothing anew that does not use it.
    if service.calibration.measures_threshold {
        inputs["measuresThreshold"] = true.into();
    }
    digest(&inputs)
}

/// Over what a verify-only Job measures: an artifact, by an image, on the evaluation data that are part of `inputs`.
pub fn verification(inputs: &Digest, artifact: &Digest, image: &str) -> Digest {
    digest(&json!({"inputs": inputs, "artifact": artifact, "image": image}))
}

/// Over what the spec asks of engine pods: everything that a template is rendered from. A revision with the same intent is used again
/// whatever today's operator would render, so an operator upgrade restarts no pod.
pub fn intent(service: &ValidService, model: &Digest, artifact: &Digest) -> Digest {
    together(&[&service.served, model, artifact])
}

/// The spec's part of [`intent`].
pub fn served(service: &ValidService) -> Digest {
    let mut asked = json!({
        "model": served_model(&service.model),
        "artifacts": service.artifacts_claim,
        "engine": service.engine,
    });
    if let Some(valve) = &service.safety_valve {
        asked["safetyValve"] = json!(valve);
    }
    digest(&asked)
}

/// What calibration reads of the model. Where a download is kept and what signs it is no part of what is measured.
fn measured_model(model: &Model) -> serde_json::Value {
    match &model.source {
        Source::Claim { claim, path } => {
            json!({"claim": claim, "path": path, "digest": model.digest})
        }
        Source::Store { folder, .. } => json!({"store": folder, "digest": model.digest}),
        Source::Image { reference, path } => {
            json!({"image": reference, "path": path, "digest": model.digest})
        }
    }
}

fn served_model(model: &Model) -> serde_json::Value {
    match &model.source {
        Source::Claim { claim, path } => json!({"name": model.name, "claim": claim, "path": path}),
        source => json!({"name": model.name, "source": source}),
    }
}

/// The revision that serves `report`'s artifact as the spec asks: one that is kept already (those in `preferred` first), or a new one.
pub fn find_or_freeze(
    service: &ValidService,
    report: &CalibrationReport,
    kept: &[ObservedRevision],
    preferred: &[&str],
    render: Render,
) -> FrozenRevision {
    let intent = intent(service, &report.model_digest, &report.artifact_digest);
    let same = || kept.iter().filter(|kept| kept.frozen.intent == intent);
    let found = preferred
        .iter()
        .find_map(|revision| same().find(|kept| kept.frozen.revision == **revision))
        .or_else(|| same().max_by_key(|kept| kept.number));
    match found {
        Some(found) => found.frozen.clone(),
        None => freeze(
            service,
            (&report.model_digest, &report.artifact_digest),
            intent,
            render,
        ),
    }
}

/// The template of a revision that serves and whose `ControllerRevision` is lost, when rendering it anew gives the same revision.
pub fn freeze_again(
    service: &ValidService,
    role: &RevisionStatus,
    render: Render,
) -> Option<FrozenRevision> {
    let mut service = service.clone();
    service.engine.image.clone_from(&role.image);
    service.served = served(&service);
    let of = (&role.model_digest, &role.artifact_digest);
    let intent = intent(&service, of.0, of.1);
    let frozen = freeze(&service, of, intent, render);
    (frozen.revision == role.revision).then_some(frozen)
}

fn freeze(
    service: &ValidService,
    (model, artifact): (&Digest, &Digest),
    intent: Digest,
    render: Render,
) -> FrozenRevision {
    let template = render(service, model, artifact);
    let revision = digest(&json!({
        "modelDigest": model,
        "artifactDigest": artifact,
        "template": template,
    }));
    FrozenRevision {
        revision: revision.short().to_owned(),
        intent,
        model_digest: model.clone(),
        artifact_digest: artifact.clone(),
        image: service.engine.image.clone(),
        template,
    }
}

/// The name of a revision's Deployment and `ControllerRevision`.
pub fn object_name(service: &str, revision: &str) -> String {
    format!("{service}-{revision}")
}

/// The names that a calibration Job may have: the second is used once when the first succeeded and its message was lost. At most 63
/// characters for a service name of 40.
pub fn calibration_names(service: &str, inputs: &Digest) -> [String; 2] {
    attempts(format!("{service}-calibrate-{}", inputs.short()))
}

/// The same for a verify-only Job.
pub fn verification_names(service: &str, verification: &Digest) -> [String; 2] {
    attempts(format!("{service}-verify-{}", verification.short()))
}

fn attempts(name: String) -> [String; 2] {
    let second = format!("{name}-2");
    [name, second]
}

/// Whole seconds from `since` to `now`; 0 when `since` lies ahead, so that a clock that was set back never shortens a wait to less
/// than nothing.
pub fn seconds_between(since: Timestamp, now: Timestamp) -> i64 {
    (now.as_second() - since.as_second()).max(0)
}

/// One digest over several, in this order.
fn together(digests: &[&Digest]) -> Digest {
    let lines: Vec<&str> = digests.iter().map(|digest| digest.as_str()).collect();
    Digest::of_bytes(lines.join("\n").as_bytes())
}

fn digest(value: &serde_json::Value) -> Digest {
    Digest::of_json(value).expect("a JSON value is JSON")
}
