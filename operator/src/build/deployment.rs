//! Engine pods: the template that a revision freezes, the ControllerRevision that keeps it and the Deployment that runs it.
//!
//! The template is rendered once, when a revision is made. Later passes build the Deployment from the frozen one, so an upgrade of the
//! operator restarts no engine pod.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{
    ControllerRevision, Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment,
};
use k8s_openapi::api::core::v1::{
    Affinity, EnvVar, EnvVarSource, HTTPGetAction, ObjectFieldSelector, PodAffinityTerm,
    PodAntiAffinity, PodTemplateSpec, Probe, WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use mixquant_crds::{Digest, names};
use serde::Deserialize;

use super::meta::{self, Access, COMPONENT_ENGINE, Owner, labels};
use super::source;
use crate::observed::FrozenRevision;
use crate::validate::ValidService;

/// From the stop to the kill. The engine answers for 5 s more, until every node has taken the pod out of the Service, and then has
/// 25 s for the requests that run.
pub const TERMINATION_GRACE_SECONDS: i64 = 35;
/// A model that has not loaded after so many seconds is started anew. The rollout's own deadline is what people see first.
const STARTUP_SECONDS: i32 = 1800;

/// The engine pods of a service that serves the model of this digest with `artifact`, without the revision's label: the revision is this template's digest.
pub fn template(service: &ValidService, model: &Digest, artifact: &Digest) -> PodTemplateSpec {
    let mut container = meta::container(
        "engine",
        &service.engine.image,
        serve_arguments(service, artifact),
    );
    container.env = Some(vec![revision_from_label()]);
    container.ports = Some(vec![
        meta::port(names::PORT_API_NAME, names::PORT_API),
        meta::port(names::PORT_ADMIN_NAME, names::PORT_ADMIN),
    ]);
    container.resources = meta::resources(service.engine.resources.as_ref());
    container.volume_mounts = Some(vec![
        source::mount(),
        meta::mount("artifacts", names::MOUNT_ARTIFACTS, Access::Read),
    ]);
    container.startup_probe = Some(probe("/readyz", 1, STARTUP_SECONDS));
    container.readiness_probe = Some(probe("/readyz", 2, 3));
    container.liveness_probe = Some(probe("/livez", 10, 6));
    let mut pod = meta::pod(
        service,
        container,
        vec![
            source::volume(service),
            meta::claim("artifacts", &service.artifacts_claim),
        ],
    );
    source::fetch_first(&mut pod, service, Some(model), false);
    pod.termination_grace_period_seconds = Some(TERMINATION_GRACE_SECONDS);
    pod.affinity = Some(apart(&service.name));
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(labels(&service.name, COMPONENT_ENGINE)),
            ..ObjectMeta::default()
        }),
        spec: Some(pod),
    }
}

/// The pods of a service would rather not share a node: one that is lost takes as few of them as can be.
fn apart(service: &str) -> Affinity {
    let others = [
        (names::LABEL_COMPONENT, COMPONENT_ENGINE),
        (names::LABEL_SERVICE, service),
    ];
    let others = others.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let term = WeightedPodAffinityTerm {
        weight: 100,
        pod_affinity_term: PodAffinityTerm {
            topology_key: "kubernetes.io/hostname".into(),
            label_selector: Some(meta::selector(others.into())),
            ..PodAffinityTerm::default()
        },
    };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![term]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn serve_arguments(service: &ValidService, artifact: &Digest) -> Vec<String> {
    let (model, engine) = (&service.model, &service.engine);
    let mut arguments = vec![
        "serve".to_owned(),
        format!("--model={}", source::path(service)),
        format!("--artifact={}/{}", names::MOUNT_ARTIFACTS, artifact.hex()),
        format!("--listen=0.0.0.0:{}", names::PORT_API),
        format!("--admin-listen=0.0.0.0:{}", names::PORT_ADMIN),
        format!("--served-model-name={}", model.name),
        format!("--max-batch-size={}", engine.max_batch_size),
        format!("--max-sequence-length={}", engine.max_sequence_length),
    ];
    if let Some(valve) = &service.safety_valve {
        arguments.extend([
            format!("--valve-max-kl={}", valve.max_kl),
            format!("--valve-min-margin={}", valve.min_margin),
            format!("--shadow-audit-percent={}", valve.shadow_audit_percent),
        ]);
    }
    arguments
}

/// See [`names::ENV_REVISION`].
fn revision_from_label() -> EnvVar {
    EnvVar {
        name: names::ENV_REVISION.into(),
        value: None,
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector {
                api_version: Some("v1".into()),
                field_path: format!("metadata.labels['{}']", names::LABEL_REVISION),
            }),
            ..EnvVarSource::default()
        }),
    }
}

/// Slow answers are no death: a pod that is short of CPU must be judged by its latency, not restarted.
fn probe(path: &str, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(names::PORT_ADMIN_NAME.into()),
            scheme: Some("HTTP".into()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period),
        timeout_seconds: Some(5),
        failure_threshold: Some(failures),
        success_threshold: Some(1),
        ..Probe::default()
    }
}

/// The name of a revision's Deployment and ControllerRevision.
pub fn name(service: &str, revision: &str) -> String {
    format!("{service}-{revision}")
}

/// Keeps a revision's frozen template under the revision's name. `number` orders a service's revisions.
///
/// # Panics
/// Never: a frozen revision is plain data.
pub fn controller_revision(
    owner: &Owner,
    frozen: &FrozenRevision,
    number: i64,
) -> ControllerRevision {
    ControllerRevision {
        metadata: owner.object(
            name(&owner.name, &frozen.revision),
            revision_labels(&owner.name, &frozen.revision),
        ),
        data: Some(RawExtension(
            serde_json::to_value(frozen).expect("a frozen revision is plain data"),
        )),
        revision: number,
    }
}

/// What a ControllerRevision keeps.
///
/// # Errors
/// The reason when its data is not a frozen revision, or one of another name.
pub fn frozen(revision: &ControllerRevision) -> Result<FrozenRevision, String> {
    let data = revision.data.as_ref().ok_or("no data")?;
    FrozenRevision::deserialize(&data.0).map_err(|error| error.to_string())
}

/// The revision's Deployment, from its frozen template.
pub fn deployment(owner: &Owner, frozen: &FrozenRevision, replicas: i32) -> Deployment {
    let revision = &frozen.revision;
    let mut template = frozen.template.clone();
    template
        .metadata
        .get_or_insert_default()
        .labels
        .get_or_insert_default()
        .insert(names::LABEL_REVISION.into(), revision.clone());
    Deployment {
        metadata: owner.object(
            name(&owner.name, revision),
            revision_labels(&owner.name, revision),
        ),
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            selector: meta::selector(super::service::selector(&owner.name, Some(revision))),
            // The template never changes, so there is nothing to keep. The rollout's deadline is judged by the operator, from its own memory.
            revision_history_limit: Some(0),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".into()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_unavailable: Some(IntOrString::Int(0)),
                    max_surge: Some(IntOrString::Int(1)),
                }),
            }),
            template,
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn revision_labels(service: &str, revision: &str) -> BTreeMap<String, String> {
    let mut labels = labels(service, COMPONENT_ENGINE);
    labels.insert(names::LABEL_REVISION.into(), revision.to_owned());
    labels
}
