//! What `kubectl mixquant` answers, from objects to text: each answer is a file in `tests/cli/`; `UPDATE_EXPECT=1` rewrites them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use expect_test::{ExpectFile, expect_file};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use mixquant_crds::{Digest, MixQuantService};
use mixquant_operator::build::deployment;
use mixquant_operator::capacity::Cluster;
use mixquant_operator::cli::answer::Plain;
use mixquant_operator::cli::facts::{Facts, Kept, Pods, told_by};
use mixquant_operator::cli::standing::{State, standing};
use mixquant_operator::cli::table::Style;
use mixquant_operator::cli::timeline::{Change, Timeline, timeline};
use mixquant_operator::cli::{Exit, artifacts, explain, history, overview};
use mixquant_operator::observed::FrozenRevision;
use mixquant_operator::validate::validate;
use serde_json::{Value, json};

const EXAMPLE: &str = include_str!("../../crds/examples/chat.yaml");

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn chat(status: Value) -> MixQuantService {
    let mut service: Value = serde_norway::from_str(EXAMPLE).unwrap();
    service["metadata"]["namespace"] = json!("models");
    service["metadata"]["uid"] = json!("uid");
    service["metadata"]["generation"] = json!(2);
    service["metadata"]["creationTimestamp"] = json!("2026-01-01T09:00:00Z");
    service["status"] = status;
    serde_json::from_value(service).unwrap()
}

fn revision(name: &str, image: &str) -> Value {
    let digest = |text: &str| Digest::of_bytes(text.as_bytes());
    json!({"revision": name, "artifactDigest": digest("artifact"), "modelDigest": digest("model"), "image": image})
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message, "observedGeneration": 2,
        "lastTransitionTime": "2026-01-01T11:57:00Z"})
}

const EVIDENCE: &str = "revision 2222222222 failed at step 1: TPOT p95 above limit 100 ms: canary 2222222222 161 ms [152 ms, 170 ms] of 212 requests, stable 1111111111 41 ms [39 ms, 44 ms] of 398 requests";

fn rolled_back() -> Value {
    json!({"observedGeneration": 2, "phase": "Degraded", "stable": revision("1111111111", "engine:1"), "replicas": 2, "readyReplicas": 2,
        "tpot": "41 ms", "calibrations": [record()],
        "failedRevisions": [{"revision": "2222222222", "generation": 2, "request": Digest::of_bytes(b"request"), "reason": "SLOViolated",
            "message": EVIDENCE, "at": "2026-01-01T11:57:00Z"}],
        "conditions": [condition("Ready", "False", "SLOViolated", EVIDENCE), condition("Available", "True", "PodsReady", "2 of 2 pods"),
            condition("Stalled", "True", "SLOViolated", EVIDENCE)]})
}

fn record() -> Value {
    let verify = json!({"baseline_perplexity": 8.0, "perplexity": 8.004, "perplexity_increase_percent": 0.05, "kl_mean": 0.001,
        "kl_p99": 0.0047, "top1_agreement_percent": 98.92, "worst_slice": null, "tokens": 4088, "artifact_digest": null});
    json!({"inputsDigest": Digest::of_bytes(b"inputs"), "image": "engine:1", "report": {"model_digest": Digest::of_bytes(b"model"),
        "artifact_digest": Digest::of_bytes(b"artifact"), "calibration_tokens": 8192, "verify": verify}})
}

fn stepping() -> Value {
    let verdict = json!({"outcome": "Inconclusive", "at": "2026-01-01T11:59:50Z",
        "message": "canary: revision 2222222222 answered 12 requests of 100 needed"});
    json!({"observedGeneration": 2, "phase": "Canary", "stable": revision("1111111111", "engine:1"), "canary": revision("2222222222", "engine:2"),
        "rollout": {"stage": "Stepping", "step": 0, "stepStartedAt": "2026-01-01T11:59:00Z", "generation": 2,
            "request": Digest::of_bytes(b"request"), "weight": 33, "failedVerdicts": 0, "verdict": verdict},
        "conditions": [condition("Ready", "False", "RollingOut", "canary 2222222222 is at step 1 of 2, 1 of 1 pods available"),
            condition("Available", "True", "PodsReady", "2 of 2 pods"), condition("Stalled", "False", "Idle", "nothing waits for a person")]})
}

fn kept(number: i64, name: &str, image: &str) -> Kept {
    let mut service = chat(Value::Null);
    service.spec.engine.image = image.into();
    let artifact = Digest::of_bytes(b"artifact");
    let template = deployment::template(
        &validate(&service).unwrap(),
        &Digest::of_bytes(b"model"),
        &artifact,
    );
    Kept {
        number,
        created_at: Some("2026-01-01T10:00:00Z".parse().unwrap()),
        frozen: FrozenRevision {
            revision: name.into(),
            intent: Digest::of_bytes(image.as_bytes()),
            model_digest: Digest::of_bytes(b"model"),
            artifact_digest: artifact,
            image: image.into(),
            template,
        },
    }
}

fn facts(status: Value) -> Facts {
    let event = |at: &str, kind: &str, reason: &str, message: &str| {
        let event = json!({"metadata": {"name": "e"}, "involvedObject": {}, "eventTime": at, "type": kind, "reason": reason, "message": message});
        told_by(serde_json::from_value::<Event>(event).unwrap())
    };
    let pods = |revision: &str, wanted, ready| Pods {
        revision: revision.into(),
        wanted,
        ready,
    };
    Facts {
        service: chat(status),
        revisions: vec![
            kept(2, "2222222222", "engine:2"),
            kept(1, "1111111111", "engine:1"),
        ],
        pods: vec![pods("1111111111", 2, 2), pods("2222222222", 0, 0)],
        events: vec![
            event(
                "2026-01-01T11:50:00.000000Z",
                "Normal",
                "RollingOut",
                "revision 2222222222 starts beside stable 1111111111",
            ),
            event(
                "2026-01-01T11:57:00.000000Z",
                "Warning",
                "SLOViolated",
                EVIDENCE,
            ),
        ],
    }
}

fn shows(expected: &ExpectFile, answer: &impl Plain) {
    expected.assert_eq(&answer.plain(Style::PLAIN));
}

#[test]
fn explain_tells_a_rollback_with_its_gate_both_samples_the_bound_and_what_was_new() {
    let explanation = explain::explain(&facts(rolled_back()), now());
    let failure = explanation.failure.as_ref().unwrap();
    let paths: Vec<&str> = failure
        .differences
        .iter()
        .map(|one| one.path.as_str())
        .collect();
    assert_eq!(paths, ["template.spec.containers[engine].image"]);
    shows(&expect_file!["cli/explain-rolled-back.txt"], &explanation);
}

#[test]
fn explain_tells_a_trial_under_way_by_its_newest_verdict() {
    let explanation = explain::explain(&facts(stepping()), now());
    assert!(explanation.failure.is_none() && explanation.verdict.is_some());
    shows(&expect_file!["cli/explain-under-way.txt"], &explanation);
}

#[test]
fn a_failure_of_an_earlier_spec_is_history_and_no_reason() {
    let mut status = rolled_back();
    status["conditions"] = json!([
        condition(
            "Ready",
            "True",
            "Promoted",
            "revision 1111111111 serves what the spec asks for"
        ),
        condition("Available", "True", "PodsReady", "2 of 2 pods"),
        condition("Stalled", "False", "Idle", "nothing waits")
    ]);
    let explanation = explain::explain(&facts(status.clone()), now());
    assert!(explanation.failure.is_none());
    assert_eq!(explanation.earlier.len(), 1);
    // Stuck by something else: the old failure does not explain it.
    status["conditions"] = json!([condition(
        "Stalled",
        "True",
        "InvalidSpec",
        "replicas must lie between 1 and 1000"
    )]);
    let explanation = explain::explain(&facts(status), now());
    assert!(explanation.failure.is_none(), "{:?}", explanation.failure);
}

#[test]
fn history_names_roles_failures_and_the_number_to_go_back_to() {
    shows(
        &expect_file!["cli/history.txt"],
        &history::history(&facts(rolled_back()), now()),
    );
}

#[test]
fn artifacts_show_what_precision_cost_and_who_serves_them() {
    shows(
        &expect_file!["cli/artifacts.txt"],
        &artifacts::artifacts(&facts(rolled_back())),
    );
}

#[test]
fn get_shows_one_line_a_service_and_the_detail_of_one() {
    let services = [chat(rolled_back()), chat(stepping()), chat(Value::Null)];
    shows(
        &expect_file!["cli/get-all.txt"],
        &overview::overview(&services, true, now()),
    );
    shows(
        &expect_file!["cli/get-one.txt"],
        &overview::detail(&facts(stepping()), now()),
    );
    shows(
        &expect_file!["cli/get-none.txt"],
        &overview::overview(&[], false, now()),
    );
}

const SCALING: &str = r#"{"minReplicas": 2, "maxReplicas": 8, "targets": {"queueLength": 4, "kvCacheUsagePercent": 70}, "schedule": [
    {"days": ["Saturday", "Sunday"], "from": "00:00", "to": "24:00", "timeZone": "Europe/Berlin", "minReplicas": 1, "maxReplicas": 2}]}"#;

#[test]
fn a_number_of_pods_that_follows_the_load_is_told_with_its_reason_and_what_holds_it() {
    let mut status = stepping();
    status["scaling"] = json!({"desiredReplicas": 4, "lastScaleTime": "2026-01-01T11:40:00Z", "held": "Trial",
        "reason": "40 requests wait and 32 run, 4 may wait a pod (2 pods)"});
    let mut facts = facts(status);
    facts.service.spec.scaling = Some(serde_json::from_str(SCALING).unwrap());
    let detail = overview::detail(&facts, now());
    shows(&expect_file!["cli/get-scaled.txt"], &detail);
    let told = explain::explain(&facts, now()).plain(Style::PLAIN);
    let told: Vec<&str> = told
        .lines()
        .filter(|line| line.contains("scaling"))
        .collect();
    assert_eq!(
        told,
        [
            "scaling 2 to 8: 4 pods wanted for 20m: 40 requests wait and 32 run, 4 may wait a pod (2 pods)"
        ]
    );
    let mut next = facts.service.clone();
    next.spec.engine.image = "engine:3".into();
    let planned = timeline(&next, Some(Some(&facts.service)));
    assert_eq!(
        (planned.replicas, planned.change),
        (4, Some(Change::Revision))
    );
    shows(&expect_file!["cli/plan-scaled.txt"], &planned);
    next = facts.service.clone();
    next.spec.scaling = None;
    let planned = timeline(&next, Some(Some(&facts.service)));
    assert_eq!(planned.change, Some(Change::Scale));
}

#[test]
fn the_exit_code_of_status_says_where_a_service_stands() {
    let ready = condition(
        "Ready",
        "True",
        "Promoted",
        "revision 1 serves what the spec asks for",
    );
    let quiet = condition("Stalled", "False", "Idle", "nothing waits for a person");
    let seen =
        |generation: i64| json!({"observedGeneration": generation, "conditions": [ready, quiet]});
    let mut paused = stepping();
    let waits = condition(
        "Paused",
        "True",
        "RolloutPaused",
        "step 2 waits for a person",
    );
    paused["conditions"].as_array_mut().unwrap().push(waits);
    let found = standing(&chat(paused.clone()), now());
    assert_eq!(
        (found.exit(true), found.message.as_str()),
        (Exit::Done, "step 2 waits for a person")
    );
    let mut torn = seen(2);
    torn["conditions"] = json!([]);
    for (status, state, exit) in [
        (seen(2), State::Ready, Exit::Done),
        // What was true of the spec before says nothing about the new one.
        (seen(1), State::Progressing, Exit::NotYet),
        (rolled_back(), State::Degraded, Exit::No),
        (stepping(), State::Progressing, Exit::NotYet),
        (paused, State::Paused, Exit::NotYet),
        (torn, State::Progressing, Exit::NotYet),
        (Value::Null, State::Progressing, Exit::NotYet),
    ] {
        let found = standing(&chat(status.clone()), now());
        assert_eq!((found.state, found.exit(false)), (state, exit), "{status}");
    }
}

fn changed(change: impl FnOnce(&mut MixQuantService)) -> Timeline {
    let live = chat(Value::Null);
    let mut service = live.clone();
    change(&mut service);
    timeline(&service, Some(Some(&live)))
}

#[test]
fn plan_tells_what_a_change_costs() {
    let image = changed(|service| service.spec.engine.image = "engine:2".into());
    assert_eq!(image.change, Some(Change::Revision));
    // Two pods and as many again at half of the traffic.
    assert_eq!(image.peak_pods(), 4);
    shows(&expect_file!["cli/plan-image.txt"], &image);
    let threshold = changed(|service| {
        service.spec.precision.prefill.min_prompt_tokens =
            Some(mixquant_crds::scalars::PromptThreshold::Tokens(256));
    });
    assert_eq!(threshold.change, Some(Change::Calibration));
    let limit = changed(|service| service.spec.slo.tpot.max_milliseconds = Some(50));
    assert_eq!(
        (limit.change, limit.stages.len()),
        (Some(Change::Limits), 0)
    );
    let pauses = changed(|service| {
        service.spec.engine.image = "engine:2".into();
        let steps = json!([{"pause": {}}, {"weight": 10, "hold": "60s"}, {"pause": {"duration": "5m"}}, {"canaryReplicas": 3, "hold": "10s"}]);
        service.spec.rollout.steps = serde_json::from_value(steps).unwrap();
        service.spec.rollout.paused = true;
    });
    assert_eq!(pauses.longest_seconds, None);
    shows(&expect_file!["cli/plan-pauses.txt"], &pauses);
    let scale = changed(|service| service.spec.replicas = 5);
    assert_eq!((scale.change, scale.stages.len()), (Some(Change::Scale), 0));
    assert_eq!(changed(|_| {}).change, Some(Change::Nothing));
}

#[test]
fn plan_and_get_tell_that_a_canary_answers_copies_that_nobody_sees() {
    let steps = json!([{"mirror": 20, "hold": "60s"}, {"pause": {"duration": "5m"}}, {"weight": 50, "hold": "60s"}]);
    let planned = changed(|service| {
        service.spec.engine.image = "engine:2".into();
        let traffic = json!({"mode": "GatewayAPI", "parentRefs": [{"name": "edge"}]});
        service.spec.traffic = serde_json::from_value(traffic).unwrap();
        service.spec.rollout.steps = serde_json::from_value(steps).unwrap();
    });
    shows(&expect_file!["cli/plan-mirror.txt"], &planned);
    let mut status = stepping();
    status["rollout"]["weight"] = json!(0);
    status["rollout"]["mirror"] = json!(20);
    let found = overview::detail(&facts(status), now());
    assert_eq!(found.line.mirror, Some(20));
    let text = found.plain(Style::PLAIN);
    assert!(text.contains("step 1/2, mirrors 20 %"), "{text}");
}

#[test]
fn plan_of_a_first_deployment_has_no_steps_and_one_without_a_cluster_compares_nothing() {
    let first = timeline(&chat(Value::Null), Some(None));
    assert_eq!(first.change, Some(Change::First));
    shows(&expect_file!["cli/plan-first.txt"], &first);
    let offline = timeline(&chat(Value::Null), None);
    assert_eq!((offline.change, offline.stages.len()), (None, 5));
}

#[test]
fn a_plan_that_cannot_work_or_does_not_fit_says_no() {
    let wrong = changed(|service| service.spec.replicas = 0);
    assert_eq!(wrong.exit(), Exit::No);
    // Stable's two pods would leave room for one of the new ones.
    let larger = |service: &mut MixQuantService| {
        let resources = json!({"requests": {"cpu": "300m"}});
        service.spec.engine.resources = serde_json::from_value(resources).unwrap();
    };
    let mut full = changed(larger);
    assert_eq!(full.exit(), Exit::Done);
    let mut service = chat(Value::Null);
    larger(&mut service);
    full.look_for_room(&service, (2, Some("1111111111")), &node_with_stable("550m"));
    assert_eq!(full.exit(), Exit::No);
    shows(&expect_file!["cli/plan-full.txt"], &full);
}

/// One node, on which stable has its two pods.
fn node_with_stable(cpu: &str) -> Cluster {
    let node = json!({"metadata": {"name": "one"}, "status": {"allocatable": {"cpu": cpu, "memory": "4Gi", "ephemeral-storage": "10Gi", "pods": "10"},
        "conditions": [{"type": "Ready", "status": "True"}]}});
    let mut cluster = Cluster::default();
    cluster.add_node(&serde_json::from_value(node).unwrap());
    for name in ["a", "b"] {
        let labels = json!({"mixquant.io/service": "chat", "mixquant.io/revision": "1111111111", "app.kubernetes.io/component": "engine"});
        let pod = json!({"metadata": {"name": name, "namespace": "models", "labels": labels}, "spec": {"nodeName": "one",
            "containers": [{"name": "engine", "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}}}]}});
        cluster.add_pod(&serde_json::from_value(pod).unwrap());
    }
    cluster
}

#[test]
fn a_plan_for_which_stable_makes_room_shows_the_gap_and_says_yes() {
    let mut tight = changed(|service| service.spec.engine.image = "engine:2".into());
    let stable = Some("1111111111");
    tight.look_for_room(&chat(Value::Null), (2, stable), &node_with_stable("750m"));
    assert_eq!(tight.exit(), Exit::Done);
    shows(&expect_file!["cli/plan-tight.txt"], &tight);
}
