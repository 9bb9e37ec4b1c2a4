//! What the operator makes, as YAML: `UPDATE_EXPECT=1 cargo test -p mixquant-operator --test build` rewrites `tests/objects/`.
//! The fields that Pod Security `restricted` asks for are checked one by one as well, so that an update cannot lose them unseen.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use expect_test::expect_file;
use k8s_openapi::api::core::v1::PodSpec;
use mixquant_crds::service::SecretName;
use mixquant_crds::{Digest, MixQuantService};
use mixquant_operator::build::companion::{self, Built};
use mixquant_operator::build::meta::Owner;
use mixquant_operator::build::{deployment, job, service};
use mixquant_operator::observed::{Companion, FrozenRevision, Installation};
use mixquant_operator::validate::{ValidService, validate};
use serde::Serialize;

const EXAMPLE: &str = include_str!("../../crds/examples/chat.yaml");

fn example() -> MixQuantService {
    let mut service: MixQuantService = serde_norway::from_str(EXAMPLE).unwrap();
    service.metadata.namespace = Some("models".into());
    service.metadata.uid = Some("8a5d5b1c-0000-4000-8000-000000000001".into());
    service.metadata.generation = Some(1);
    service
}

fn valid() -> (Owner, ValidService) {
    let service = example();
    (Owner::of(&service).unwrap(), validate(&service).unwrap())
}

fn digest() -> Digest {
    Digest::of_bytes(b"artifact")
}

fn frozen(service: &ValidService) -> FrozenRevision {
    FrozenRevision {
        revision: "0123456789".into(),
        intent: Digest::of_bytes(b"intent"),
        model_digest: Digest::of_bytes(b"model"),
        artifact_digest: digest(),
        image: service.engine.image.clone(),
        template: deployment::template(service, &digest()),
    }
}

fn yaml(object: &impl Serialize) -> String {
    serde_norway::to_string(object).unwrap()
}

#[test]
fn the_deployment_of_a_revision_is_as_written() {
    let (owner, service) = valid();
    let object = deployment::deployment(&owner, &frozen(&service), 2);
    expect_file!["objects/deployment.yaml"].assert_eq(&yaml(&object));
}

#[test]
fn the_controller_revision_keeps_the_template_whole() {
    let (owner, service) = valid();
    let frozen = frozen(&service);
    let object = deployment::controller_revision(&owner, &frozen, 3);
    assert_eq!(deployment::frozen(&object).unwrap(), frozen);
    assert_eq!(object.metadata.name.as_deref(), Some("chat-0123456789"));
    assert!(owner.owns(&object.metadata));
}

#[test]
fn the_calibration_job_is_as_written() {
    let (owner, service) = valid();
    let plan = (&service.plan, Some(&digest()));
    let object = job::calibration(&owner, "chat-calibrate-0123456789", &service, plan);
    expect_file!["objects/calibration.yaml"].assert_eq(&yaml(&object));
}

#[test]
fn the_verification_job_is_as_written() {
    let (owner, service) = valid();
    let object = job::verification(&owner, "chat-verify-0123456789", &service, &digest());
    expect_file!["objects/verification.yaml"].assert_eq(&yaml(&object));
}

#[test]
fn the_main_service_is_as_written() {
    let (owner, _) = valid();
    let selector = service::selector(&owner.name, Some("0123456789"));
    let object = service::service(&owner, selector);
    expect_file!["objects/service.yaml"].assert_eq(&yaml(&object));
}

#[test]
fn what_stands_beside_the_pods_is_as_written() {
    let (owner, service) = valid();
    let installation = Installation {
        metrics_readers: vec!["mixquant-system".into(), "monitoring".into()],
        pod_monitors: true,
        prometheus_rules: true,
    };
    let built: Vec<String> = companion::wanted(&installation)
        .into_iter()
        .map(
            |companion| match companion::build(companion, &owner, &service, &installation) {
                Built::ServiceAccount(object) => yaml(&object),
                Built::NetworkPolicy(object) => yaml(&object),
                Built::PodDisruptionBudget(object) => yaml(&object),
                Built::PodMonitor(object) => yaml(&object),
                Built::PrometheusRule(object) => yaml(&object),
            },
        )
        .collect();
    expect_file!["objects/companions.yaml"].assert_eq(&built.join("---\n"));
    // The rules by themselves, as Prometheus' own test program reads them.
    let Built::PrometheusRule(rule) =
        companion::build(Companion::Rule, &owner, &service, &installation)
    else {
        panic!("another kind");
    };
    expect_file!["objects/alerts.yaml"].assert_eq(&yaml(&rule.spec));
}

#[test]
fn without_the_prometheus_operator_none_of_its_objects_are_wanted_and_nobody_reads_metrics() {
    let (owner, service) = valid();
    let bare = Installation::default();
    let wanted = companion::wanted(&bare);
    assert!(!wanted.contains(&Companion::Monitor) && !wanted.contains(&Companion::Rule));
    let Built::NetworkPolicy(policy) =
        companion::build(Companion::EngineNetwork, &owner, &service, &bare)
    else {
        panic!("another kind");
    };
    // A rule with an empty list of peers would let everybody in.
    let spec = policy.spec.unwrap();
    assert_eq!(spec.ingress.unwrap().len(), 1);
    assert_eq!(spec.egress, Some(Vec::new()));
}

#[test]
fn two_renderings_are_equal_byte_for_byte() {
    let (_, service) = valid();
    let one = yaml(&deployment::template(&service, &digest()));
    let again = yaml(&deployment::template(&valid().1, &digest()));
    assert_eq!(one, again);
    assert!(
        !one.contains("mixquant.io/revision:"),
        "the revision is this template's digest"
    );
}

#[test]
fn replicas_and_rollout_are_no_part_of_the_template() {
    let (_, service) = valid();
    let mut other = example();
    other.spec.replicas = 7;
    other.spec.rollout.steps.truncate(1);
    other.spec.slo.tpot.max_milliseconds = Some(1);
    let other = validate(&other).unwrap();
    assert_eq!(
        deployment::template(&service, &digest()),
        deployment::template(&other, &digest())
    );
}

/// <https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted>, and no API token besides.
fn is_restricted(pod: &PodSpec) {
    assert_eq!(pod.automount_service_account_token, Some(false));
    assert_eq!(pod.service_account_name.as_deref(), Some("chat-mixquant"));
    assert!(pod.host_network.is_none() && pod.host_pid.is_none() && pod.host_ipc.is_none());
    let security = pod.security_context.as_ref().unwrap();
    assert_eq!(security.run_as_non_root, Some(true));
    assert!(security.run_as_user.unwrap() >= 10_000);
    assert_eq!(
        security.seccomp_profile.as_ref().unwrap().type_,
        "RuntimeDefault"
    );
    for volume in pod.volumes.as_ref().unwrap() {
        assert!(volume.host_path.is_none());
        assert!(volume.persistent_volume_claim.is_some() || volume.config_map.is_some());
    }
    for container in &pod.containers {
        let security = container.security_context.as_ref().unwrap();
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(security.run_as_non_root, Some(true));
        let capabilities = security.capabilities.as_ref().unwrap();
        assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]));
        assert!(capabilities.add.is_none() && security.privileged.is_none());
        for mount in container.volume_mounts.as_ref().unwrap() {
            let writable = container.name == "calibration" && mount.name == "artifacts";
            assert_eq!(
                mount.read_only,
                (!writable).then_some(true),
                "{}",
                mount.name
            );
        }
    }
}

#[test]
fn every_pod_holds_to_pod_security_restricted() {
    let (owner, service) = valid();
    let plan = (&service.plan, None);
    let engine = deployment::deployment(&owner, &frozen(&service), 1);
    let jobs = [
        job::calibration(&owner, "c", &service, plan),
        job::verification(&owner, "v", &service, &digest()),
    ];
    is_restricted(&engine.spec.unwrap().template.spec.unwrap());
    for job in jobs {
        is_restricted(&job.spec.unwrap().template.spec.unwrap());
    }
}

#[test]
fn pull_secrets_reach_engine_and_job_pods_and_nothing_is_said_without_them() {
    let mut service = example();
    let (owner, without) = valid();
    service.spec.engine.image_pull_secrets = vec![SecretName {
        name: "registry".into(),
    }];
    let with = validate(&service).unwrap();
    let secrets = |valid: &ValidService| {
        let engine = deployment::template(valid, &digest()).spec.unwrap();
        let job = job::verification(&owner, "v", valid, &digest());
        let job = job.spec.unwrap().template.spec.unwrap();
        [engine.image_pull_secrets, job.image_pull_secrets].map(|secrets| {
            secrets.map(|secrets| secrets.into_iter().map(|secret| secret.name).collect())
        })
    };
    let named: Option<Vec<String>> = Some(vec!["registry".into()]);
    assert_eq!(secrets(&with), [named.clone(), named]);
    assert_eq!(secrets(&without), [None, None]);
    // The field came later: a spec without it must keep its digest, or every service would be rolled out anew.
    let spec = serde_json::to_value(&example().spec).unwrap();
    assert!(spec["engine"].get("imagePullSecrets").is_none());
}

#[test]
fn an_engine_pod_has_time_to_drain_before_it_is_killed() {
    let (_, service) = valid();
    let pod = deployment::template(&service, &digest()).spec.unwrap();
    let (drain_delay, shutdown_grace) = (5, 25);
    assert!(pod.termination_grace_period_seconds.unwrap() > drain_delay + shutdown_grace);
}
