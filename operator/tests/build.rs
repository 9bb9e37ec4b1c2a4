//! What the operator makes, as YAML: `UPDATE_EXPECT=1 cargo test -p mixquant-operator --test build` rewrites `tests/objects/`.
//! The fields that Pod Security `restricted` asks for are checked one by one as well, so that an update cannot lose them unseen.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use expect_test::expect_file;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use mixquant_crds::service::SecretName;
use mixquant_crds::traffic::GatewayRef;
use mixquant_crds::{Digest, MixQuantService};
use mixquant_operator::build::companion::{self, Built};
use mixquant_operator::build::job::{self, Asked};
use mixquant_operator::build::meta::Owner;
use mixquant_operator::build::{self, deployment, route, service};
use mixquant_operator::canary::Share;
use mixquant_operator::observed::{Companion, FrozenRevision, Installation};
use mixquant_operator::validate::{OwnRoute, ValidService, validate};
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
        template: deployment::template(service, &model(), &digest()),
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

fn asked<'a>(service: &'a ValidService, model: Option<&'a Digest>) -> Asked<'a> {
    Asked {
        plan: &service.plan,
        expect_model: model,
        round: 0,
        remove: &[],
    }
}

#[test]
fn the_calibration_job_is_as_written() {
    let (owner, service) = valid();
    let (model, old) = (digest(), [Digest::of_bytes(b"old")]);
    let asked = Asked {
        round: 2,
        remove: &old,
        ..asked(&service, Some(&model))
    };
    let object = job::calibration(&owner, "chat-calibrate-0123456789", &service, &asked);
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
    let object = service::service(&owner, owner.name.clone(), selector);
    expect_file!["objects/service.yaml"].assert_eq(&yaml(&object));
}

#[test]
fn what_stands_beside_the_pods_is_as_written() {
    let (owner, service) = valid();
    let installation = Installation {
        metrics_readers: vec!["mixquant-system".into(), "monitoring".into()],
        pod_monitors: true,
        prometheus_rules: true,
        http_routes: true,
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
    let one = yaml(&deployment::template(&service, &model(), &digest()));
    let again = yaml(&deployment::template(&valid().1, &model(), &digest()));
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
        deployment::template(&service, &model(), &digest()),
        deployment::template(&other, &model(), &digest())
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
        assert!(
            volume.persistent_volume_claim.is_some()
                || volume.config_map.is_some()
                || volume.empty_dir.is_some()
                || volume.image.is_some()
        );
    }
    let init = pod.init_containers.iter().flatten();
    for container in init.chain(&pod.containers) {
        let security = container.security_context.as_ref().unwrap();
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(security.run_as_non_root, Some(true));
        let capabilities = security.capabilities.as_ref().unwrap();
        assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]));
        assert!(capabilities.add.is_none() && security.privileged.is_none());
        for mount in container.volume_mounts.as_ref().unwrap() {
            let writable = (container.name == "calibration" && mount.name == "artifacts")
                || (container.name == "fetch" && mount.name == "models");
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
    for service in [service, from(STORE), from(CACHED), from(IMAGE)] {
        let asked = asked(&service, None);
        let engine = deployment::deployment(&owner, &frozen(&service), 1);
        let jobs = [
            job::calibration(&owner, "c", &service, &asked),
            job::verification(&owner, "v", &service, &digest()),
        ];
        is_restricted(&engine.spec.unwrap().template.spec.unwrap());
        for job in jobs {
            is_restricted(&job.spec.unwrap().template.spec.unwrap());
        }
    }
}

const STORE: &str = r#"{"objectStore": {"uri": "s3://models/team/kube-llama", "endpoint": "http://minio.storage:9000",
    "region": "eu-west-1", "secretRef": {"name": "bucket"}, "cache": {"emptyDir": {"sizeLimit": "20Gi"}}}}"#;
const CACHED: &str = r#"{"objectStore": {"uri": "https://hub.example/org/model",
    "cache": {"persistentVolumeClaim": {"claimName": "cache"}}}}"#;
const IMAGE: &str =
    r#"{"image": {"reference": "registry.example/models/kube-llama:1", "path": "model"}}"#;

fn model() -> Digest {
    Digest::of_bytes(b"model")
}

/// The example with its model from another source, pinned.
fn from(source: &str) -> ValidService {
    let mut service = example();
    service.spec.model.source = serde_json::from_str(source).unwrap();
    service.spec.model.digest = Some(model());
    validate(&service).unwrap()
}

#[test]
fn pods_of_a_downloaded_model_are_as_written() {
    let (owner, _) = valid();
    let service = from(STORE);
    let engine = deployment::template(&service, &model(), &digest());
    let model_digest = model();
    let asked = asked(&service, Some(&model_digest));
    let job = job::calibration(&owner, "c", &service, &asked);
    let network = |companion| {
        let Built::NetworkPolicy(policy) =
            companion::build(companion, &owner, &service, &Installation::default())
        else {
            panic!("another kind");
        };
        yaml(&policy.spec.unwrap().egress)
    };
    let parts = [
        yaml(&engine),
        yaml(&job.spec.unwrap().template),
        network(Companion::EngineNetwork),
    ];
    expect_file!["objects/downloaded.yaml"].assert_eq(&parts.join("---\n"));
    assert_eq!(
        network(Companion::EngineNetwork),
        network(Companion::JobNetwork)
    );
}

#[test]
fn the_engine_sees_the_model_read_only_and_no_credential_whatever_the_source() {
    for source in [STORE, CACHED, IMAGE] {
        let service = from(source);
        let pod = deployment::template(&service, &model(), &digest())
            .spec
            .unwrap();
        let engine = &pod.containers[0];
        assert!(!yaml(engine).contains("secretKeyRef"), "{source}");
        let mounts = engine.volume_mounts.as_ref().unwrap();
        let models = mounts.iter().find(|mount| mount.name == "models").unwrap();
        assert_eq!(models.read_only, Some(true));
        let argument = &engine.args.as_ref().unwrap()[1];
        assert!(argument.starts_with("--model=/models/"), "{argument}");
        if let Some([fetch]) = pod.init_containers.as_deref() {
            let args = fetch.args.as_ref().unwrap();
            assert!(args.contains(&format!("--digest={}", model())));
            assert!(args.contains(&argument.replace("--model=", "--to=")));
        } else {
            assert_eq!(source, IMAGE);
        }
    }
}

/// What is not part of the model must not calibrate anew; what is must.
#[test]
fn a_cache_or_a_secret_changes_no_measurement_and_another_uri_does() {
    let measured = |source: &str| from(source).measured;
    let store = measured(STORE);
    assert_eq!(store, measured(&STORE.replace("bucket", "other")));
    assert_eq!(store, measured(&STORE.replace("20Gi", "40Gi")));
    assert_ne!(store, measured(&STORE.replace("team", "other")));
    assert_ne!(store, measured(&STORE.replace("minio", "other")));
    assert_ne!(
        measured(IMAGE),
        measured(&IMAGE.replace("llama:1", "llama:2"))
    );
}

#[test]
fn the_way_out_is_the_port_of_the_store_and_without_a_download_there_is_none() {
    let (owner, claim) = valid();
    let port = |service: &ValidService| build::source::server_port(service);
    assert_eq!(port(&claim), None);
    assert_eq!(port(&from(IMAGE)), None);
    assert_eq!(port(&from(STORE)), Some(9000));
    assert_eq!(port(&from(CACHED)), Some(443));
    for (server, expected) in [
        ("http://minio", 80),
        ("https://minio:8443/", 8443),
        ("https://minio", 443),
    ] {
        let source = STORE.replace("http://minio.storage:9000", server);
        assert_eq!(port(&from(&source)), Some(expected), "{server}");
    }
    let Built::NetworkPolicy(policy) = companion::build(
        Companion::JobNetwork,
        &owner,
        &from(IMAGE),
        &Installation::default(),
    ) else {
        panic!("another kind");
    };
    assert_eq!(policy.spec.unwrap().egress, Some(Vec::new()));
}

#[test]
fn a_download_asks_for_no_device() {
    let mut service = example();
    service.spec.model.source = serde_json::from_str(STORE).unwrap();
    let resources = r#"{"limits": {"cpu": "2", "nvidia.com/gpu": "1"}}"#;
    service.spec.engine.resources = Some(serde_json::from_str(resources).unwrap());
    let valid = validate(&service).unwrap();
    let pod = deployment::template(&valid, &model(), &digest())
        .spec
        .unwrap();
    let limits = |container: &Container| {
        let resources = container.resources.clone().unwrap();
        resources.limits.unwrap().into_keys().collect::<Vec<_>>()
    };
    assert_eq!(limits(&pod.containers[0]), ["cpu", "nvidia.com/gpu"]);
    assert_eq!(limits(&pod.init_containers.unwrap()[0]), ["cpu"]);
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
        let engine = deployment::template(valid, &model(), &digest())
            .spec
            .unwrap();
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
    let pod = deployment::template(&service, &model(), &digest())
        .spec
        .unwrap();
    let (drain_delay, shutdown_grace) = (5, 25);
    assert!(pod.termination_grace_period_seconds.unwrap() > drain_delay + shutdown_grace);
}

/// A service behind a gateway, and what its route gives a canary.
fn routed(share: Share) -> String {
    let (owner, _) = valid();
    let wanted = OwnRoute {
        parents: vec![GatewayRef {
            name: "edge".into(),
            namespace: Some("gateways".into()),
            section_name: None,
        }],
        hostnames: vec!["chat.example.com".into()],
        track_header: Some("x-mixquant-track".into()),
    };
    yaml(&route::route(&owner, &wanted, share))
}

#[test]
fn the_route_is_as_written_with_a_weight_and_with_copies() {
    let weight = Share {
        weight: 25,
        mirror: None,
    };
    expect_file!["objects/route.yaml"].assert_eq(&routed(weight));
    let copies = Share {
        weight: 0,
        mirror: Some(20),
    };
    expect_file!["objects/route-mirror.yaml"].assert_eq(&routed(copies));
}

/// A Gateway API that is older than percentages has it all the same.
#[test]
fn copies_of_everything_are_said_without_a_percentage() {
    let all = routed(Share {
        weight: 0,
        mirror: Some(100),
    });
    assert!(
        all.contains("RequestMirror") && !all.contains("percent"),
        "{all}"
    );
}
