//! `apply`, `observe` and `lease` against an apiserver in memory: what is written, what is not, and what stops it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use std::sync::Arc;
use std::time::Duration;

use fake::{FakeApi, SERVICE, server, target, writer};
use mixquant_crds::status::{MixQuantServiceStatus, Phase, Reason};
use mixquant_crds::{Digest, JobMessage, MixQuantService};
use mixquant_operator::action::{
    Action, DeploymentRequest, Event, JobRequest, JobWork, NewRevision, ObjectRef,
};
use mixquant_operator::apply::{Target, Writer};
use mixquant_operator::build::deployment;
use mixquant_operator::clock;
use mixquant_operator::error::Error;
use mixquant_operator::lease::{Election, Ended, Fence};
use mixquant_operator::metrics::Metrics;
use mixquant_operator::observe::Observer;
use mixquant_operator::observed::{
    Dataset, FrozenRevision, JobState, Kind, ObjectName, Presence, Traffic,
};
use mixquant_operator::server::Health;
use mixquant_operator::validate::validate;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/models/deployments/chat-0123456789";
const MAIN: &str = "/api/v1/namespaces/models/services/chat";
const JOB: &str = "/apis/batch/v1/namespaces/models/jobs/chat-calibrate-1";

fn frozen(service: &MixQuantService) -> FrozenRevision {
    let digest = Digest::of_bytes(b"artifact");
    FrozenRevision {
        revision: "0123456789".into(),
        intent: Digest::of_bytes(b"intent"),
        model_digest: Digest::of_bytes(b"model"),
        artifact_digest: digest.clone(),
        image: service.spec.engine.image.clone(),
        template: deployment::template(
            &validate(service).unwrap(),
            &Digest::of_bytes(b"model"),
            &digest,
        ),
    }
}

fn everything(target: &Target) -> Vec<Action> {
    let frozen = frozen(&target.service);
    let work = JobWork::Calibrate {
        plan: target.valid.as_ref().unwrap().plan.clone(),
        expect_model: None,
        round: 0,
        remove: Vec::new(),
    };
    vec![
        Action::ApplyRevision(Box::new(NewRevision {
            frozen: frozen.clone(),
            number: 1,
        })),
        Action::ApplyDeployment(Box::new(DeploymentRequest {
            frozen,
            replicas: 2,
        })),
        Action::ApplyTraffic(Traffic::Only("0123456789".into())),
        Action::ApplyJob(JobRequest {
            name: "chat-calibrate-1".into(),
            work,
        }),
        Action::Report(Box::new(MixQuantServiceStatus {
            phase: Some(Phase::Deploying),
            ..MixQuantServiceStatus::default()
        })),
    ]
}

async fn execute_all(writer: &Writer, target: &mut Target) -> Result<(), Error> {
    let plan = everything(target);
    writer.execute(target, &plan).await
}

#[tokio::test]
async fn what_is_there_is_not_written_again_and_drift_is_put_back() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let mut one = target(&api).await;
    execute_all(&writer, &mut one).await.unwrap();
    assert_eq!(api.take_writes().len(), 5);

    let mut two = target(&api).await;
    execute_all(&writer, &mut two).await.unwrap();
    assert_eq!(api.take_writes(), Vec::<String>::new());

    api.change(DEPLOYMENT, |object| {
        object["spec"]["template"]["spec"]["containers"][0]["image"] = json!("other");
        object["spec"]["foreign"] = json!("kept");
    });
    api.change(MAIN, |object| {
        object["spec"]["selector"] = json!({"app": "x"});
    });
    let mut three = target(&api).await;
    execute_all(&writer, &mut three).await.unwrap();
    assert_eq!(
        api.take_writes(),
        [format!("PATCH {DEPLOYMENT}"), format!("PATCH {MAIN}")]
    );
    let deployment = api.object(DEPLOYMENT).unwrap();
    assert_eq!(deployment["spec"]["foreign"], "kept");
    let image = &deployment["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(*image, three.service.spec.engine.image);
}

#[tokio::test]
async fn traffic_is_widened_to_every_revision_and_narrowed_again() {
    let api = server();
    let writer = writer(&api, Fence::open());
    for traffic in [
        Traffic::Only("a".into()),
        Traffic::All,
        Traffic::Only("b".into()),
    ] {
        let mut target = target(&api).await;
        let plan = [Action::ApplyTraffic(traffic.clone())];
        writer.execute(&mut target, &plan).await.unwrap();
        let observer = Observer::new(api.client(), vec!["system".into()]);
        let observed = observer
            .observe(&target.owner, &target.service)
            .await
            .unwrap();
        assert_eq!(observed.traffic.unwrap().selects, Some(traffic));
        assert_eq!(api.take_writes().len(), 1);
    }
}

#[tokio::test]
async fn an_object_of_somebody_else_is_neither_adopted_nor_changed() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let foreign = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "models",
        "ownerReferences": [{"apiVersion": "mixquant.io/v1alpha1", "kind": "MixQuantService", "name": "chat", "uid": "earlier", "controller": true}]}});
    api.put(MAIN, foreign);
    let before = api.object(MAIN);
    let mut target = target(&api).await;
    let error = execute_all(&writer, &mut target).await.unwrap_err();
    assert!(
        matches!(error, Error::Foreign { .. }) && error.is_refusal(),
        "{error}"
    );
    assert_eq!(api.object(MAIN), before);
}

#[tokio::test]
async fn an_owner_that_was_taken_away_is_given_back() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let mut one = target(&api).await;
    execute_all(&writer, &mut one).await.unwrap();
    let forget = |object: &mut Value| {
        object["metadata"]
            .as_object_mut()
            .unwrap()
            .remove("ownerReferences");
    };
    api.change(JOB, forget);
    api.change(DEPLOYMENT, forget);
    api.take_writes();
    let mut two = target(&api).await;
    execute_all(&writer, &mut two).await.unwrap();
    assert_eq!(api.take_writes().len(), 2);
    for path in [JOB, DEPLOYMENT] {
        let owner = &api.object(path).unwrap()["metadata"]["ownerReferences"][0];
        assert_eq!(owner["uid"], "service-uid");
    }
}

#[tokio::test]
async fn a_plan_made_from_an_older_service_does_nothing() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let mut target = target(&api).await;
    let plan = everything(&target);
    api.change(SERVICE, |service| service["spec"]["replicas"] = json!(5));
    let error = writer.execute(&mut target, &plan).await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
    assert_eq!(api.take_writes(), Vec::<String>::new());
}

#[tokio::test]
async fn a_status_written_from_an_older_one_is_refused_by_the_server() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let mut target = target(&api).await;
    api.change(SERVICE, |service| {
        service["status"] = json!({"replicas": 1});
    });
    let status = MixQuantServiceStatus::default();
    let error = writer.put_status(&mut target, &status).await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
}

#[tokio::test]
async fn memory_that_ends_is_removed_from_the_stored_status() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let mut target = target(&api).await;
    let with = MixQuantServiceStatus {
        tpot: Some("12 ms".into()),
        ..MixQuantServiceStatus::default()
    };
    writer.put_status(&mut target, &with).await.unwrap();
    assert_eq!(api.object(SERVICE).unwrap()["status"]["tpot"], "12 ms");
    let without = MixQuantServiceStatus::default();
    writer.put_status(&mut target, &without).await.unwrap();
    assert_eq!(api.object(SERVICE).unwrap()["status"]["tpot"], Value::Null);
}

#[tokio::test]
async fn without_the_lease_nothing_is_written() {
    let api = server();
    let writer = writer(&api, Fence::default());
    let mut target = target(&api).await;
    let error = execute_all(&writer, &mut target).await.unwrap_err();
    assert!(matches!(error, Error::NotLeading));
    assert_eq!(api.take_writes(), Vec::<String>::new());
}

#[tokio::test]
async fn a_deletion_spares_another_object_of_the_same_name() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "chat-calibrate-1", "namespace": "models", "uid": "new"}});
    api.put(JOB, job);
    let delete = |uid: &str| {
        Action::Delete(ObjectRef {
            object: ObjectName {
                kind: Kind::Job,
                name: "chat-calibrate-1".into(),
            },
            uid: uid.into(),
        })
    };
    for (uid, left) in [("old", true), ("new", false), ("new", false)] {
        let mut target = target(&api).await;
        writer.execute(&mut target, &[delete(uid)]).await.unwrap();
        assert_eq!(api.object(JOB).is_some(), left, "{uid}");
    }
}

#[tokio::test]
async fn a_refusal_is_said_once_in_status_and_event_with_the_servers_words() {
    let api = server();
    api.0.lock().unwrap().refuse = Some(("deployments", 403, "exceeded quota: pods"));
    let writer = writer(&api, Fence::open());
    for writes in [2, 0] {
        let mut target = target(&api).await;
        let plan = everything(&target);
        let error = writer.execute(&mut target, &plan[1..]).await.unwrap_err();
        assert!(error.is_refusal());
        api.take_writes();
        let message = error.to_string();
        writer
            .stall(&mut target, Reason::ApplyFailed, &message)
            .await
            .unwrap();
        assert_eq!(api.take_writes().len(), writes);
    }
    let status = &api.object(SERVICE).unwrap()["status"];
    let ready = &status["conditions"][0];
    assert_eq!(
        (&ready["type"], &ready["status"]),
        (&json!("Ready"), &json!("False"))
    );
    assert_eq!(ready["reason"], "ApplyFailed");
    let message = ready["message"].as_str().unwrap();
    assert!(message.contains("exceeded quota: pods"), "{message}");
}

#[tokio::test]
async fn a_lost_event_stops_nothing() {
    let api = server();
    api.0.lock().unwrap().refuse = Some(("events", 500, "no"));
    let writer = writer(&api, Fence::open());
    let mut target = target(&api).await;
    let event = Action::Publish(Event {
        warning: false,
        reason: Reason::Promoted,
        note: "é".repeat(2000),
    });
    writer.execute(&mut target, &[event]).await.unwrap();
}

#[tokio::test]
async fn what_the_spec_refers_to_is_missing_by_name_or_present_by_digest() {
    let api = server();
    let target = target(&api).await;
    let observer = Observer::new(api.client(), vec!["system".into()]);
    let observed = observer
        .observe(&target.owner, &target.service)
        .await
        .unwrap();
    let missing = |what: &str| Dataset::Missing { what: what.into() };
    assert_eq!(
        observed.calibration_data,
        missing("ConfigMap `texts` does not exist")
    );
    let what = "PersistentVolumeClaim `models` does not exist".to_owned();
    assert_eq!(observed.model_claim, Presence::Missing { what });

    let map = "/api/v1/namespaces/models/configmaps/texts";
    let texts = |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "texts", "namespace": "models"}, "data": data});
    api.put(
        map,
        texts(json!({"calibration.jsonl": "abc", "evaluation.txt": ""})),
    );
    let observed = observer
        .observe(&target.owner, &target.service)
        .await
        .unwrap();
    let digest = Digest::of_bytes(b"abc");
    assert_eq!(observed.calibration_data, Dataset::Present { digest });
    assert_eq!(
        observed.evaluation_data,
        missing("key `evaluation.txt` of ConfigMap `texts` is empty")
    );
    // A change is seen at the next pass.
    api.change(map, |object| {
        object["data"]["calibration.jsonl"] = json!("abd");
    });
    let observed = observer
        .observe(&target.owner, &target.service)
        .await
        .unwrap();
    let digest = Digest::of_bytes(b"abd");
    assert_eq!(observed.calibration_data, Dataset::Present { digest });
}

#[tokio::test]
async fn what_was_applied_is_observed_as_matching_and_a_failed_job_with_its_words() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let mut target = target(&api).await;
    let plan = everything(&target);
    writer.execute(&mut target, &plan).await.unwrap();
    let uid = api.object(JOB).unwrap()["metadata"]["uid"].clone();
    api.change(JOB, |job| {
        job["status"] = json!({"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 2"}]});
    });
    let report =
        r#"{"failed":{"reason":"DataInvalid","message":"calibration.jsonl is empty: add texts"}}"#;
    api.put("/api/v1/namespaces/models/pods/chat-calibrate-1-x", json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "chat-calibrate-1-x", "namespace": "models",
            "labels": {"mixquant.io/service": "chat", "app.kubernetes.io/managed-by": "mixquant-operator", "app.kubernetes.io/component": "calibration"},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "chat-calibrate-1", "uid": uid, "controller": true}]},
        "spec": {"containers": []},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "calibration", "ready": false, "restartCount": 0, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 2, "message": report, "finishedAt": "2026-01-01T00:00:01Z"}}}]}}));

    let observed = Observer::new(api.client(), vec!["system".into()])
        .observe(&target.owner, &target.service)
        .await
        .unwrap();
    assert_eq!(observed.foreign, []);
    assert_eq!(observed.revisions[0].frozen, frozen(&target.service));
    assert!(observed.deployments[0].matches);
    assert_eq!(observed.deployments[0].replicas, 2);
    let traffic = observed.traffic.as_ref().unwrap();
    assert_eq!(traffic.selects, Some(Traffic::Only("0123456789".into())));
    assert!(traffic.matches);
    let job = &observed.jobs[0];
    assert!(matches!(&job.state, JobState::Failed { reason, .. } if reason == "PodFailurePolicy"));
    let Some(Ok(JobMessage::Failed(failure))) = &job.message else {
        panic!("{:?}", job.message);
    };
    assert_eq!(failure.message, "calibration.jsonl is empty: add texts");
}

fn election(api: &FakeApi, identity: &str) -> (Election, Fence, Writer) {
    let fence = Fence::default();
    let writer = writer(api, fence.clone());
    let health = Arc::new(Health::new(Arc::new(Metrics::default())));
    let gate = (writer.clone(), fence.clone());
    let election = Election::new(
        &api.client(),
        ("system", "lease"),
        identity.into(),
        gate,
        health,
    );
    (election, fence, writer)
}

#[tokio::test]
async fn one_of_two_leads_and_a_released_lease_is_taken_at_once() {
    let api = server();
    let stop = CancellationToken::new();
    let (mut one, _, first) = election(&api, "one");
    let (mut two, _, second) = election(&api, "two");
    assert!(one.acquire(&stop).await);
    let waiting = tokio::time::timeout(Duration::from_secs(3), two.acquire(&stop)).await;
    assert!(waiting.is_err(), "the second waits while the first leads");
    let mut target = target(&api).await;
    let plan = everything(&target);
    assert!(first.execute(&mut target, &plan).await.is_ok());
    assert!(matches!(
        second
            .put_status(&mut target, &MixQuantServiceStatus::default())
            .await,
        Err(Error::NotLeading)
    ));
    one.release().await;
    let took = tokio::time::timeout(Duration::from_secs(5), two.acquire(&stop)).await;
    assert_eq!(took, Ok(true));
}

#[tokio::test]
async fn a_leader_whose_lease_was_taken_stops_at_its_next_renewal() {
    let api = server();
    let stop = CancellationToken::new();
    let (mut one, fence, writer) = election(&api, "one");
    assert!(one.acquire(&stop).await);
    let path = "/apis/coordination.k8s.io/v1/namespaces/system/leases/lease";
    api.change(path, |lease| lease["spec"]["holderIdentity"] = json!("two"));
    assert_eq!(one.hold(&stop).await, Ended::Lost);
    assert!(fence.remaining(clock::monotonic()).is_none());
    let mut target = target(&api).await;
    assert!(
        writer
            .put_status(&mut target, &MixQuantServiceStatus::default())
            .await
            .is_err()
    );
    assert_eq!(api.object(path).unwrap()["spec"]["holderIdentity"], "two");
}

#[tokio::test]
async fn without_the_right_to_the_lease_nobody_leads() {
    let api = server();
    api.0.lock().unwrap().refuse = Some(("leases", 403, "leases is forbidden"));
    let (mut one, fence, _) = election(&api, "one");
    let stop = CancellationToken::new();
    let acquired = tokio::time::timeout(Duration::from_secs(3), one.acquire(&stop)).await;
    assert!(acquired.is_err());
    assert!(fence.remaining(clock::monotonic()).is_none());
}
