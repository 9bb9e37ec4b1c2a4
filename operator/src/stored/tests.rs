//! What is read from stored objects.

use serde_json::json;

use super::*;

fn pod_with(status: &Value) -> Pod {
    let pod = json!({"metadata": {"name": "chat-1", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"mixquant.io/revision": "abc"}}, "spec": {"containers": []}, "status": status});
    serde_json::from_value(pod).unwrap()
}

fn container(state: &Value, last: &Value) -> Value {
    json!({"phase": "Running", "containerStatuses": [{"name": "engine", "ready": false, "restartCount": 3, "image": "", "imageID": "",
        "state": state, "lastState": last}]})
}

#[test]
fn what_keeps_a_pod_from_running_is_said_with_its_reason_and_exit_code() {
    let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let waiting =
        |reason: &str, message: &str| json!({"waiting": {"reason": reason, "message": message}});
    let running = json!({"running": {}});
    let unschedulable = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}]});
    for (status, problem) in [
        (
            container(&waiting("CrashLoopBackOff", "back-off 20s"), &killed),
            Some("CrashLoopBackOff: the last try ended with exit code 137 (OOMKilled)"),
        ),
        (
            container(&waiting("ImagePullBackOff", "no such image"), &json!({})),
            Some("ImagePullBackOff: no such image"),
        ),
        (
            container(&running, &killed),
            Some("ended with exit code 137 (OOMKilled)"),
        ),
        (
            unschedulable,
            Some("is unschedulable: 0/1 nodes are available: 1 Insufficient cpu."),
        ),
        (
            container(&waiting("ContainerCreating", ""), &json!({})),
            None,
        ),
        (container(&running, &json!({})), None),
        (json!({"phase": "Pending"}), None),
    ] {
        let found = pod_problem(&pod_with(&status));
        match (problem, found) {
            (None, found) => assert_eq!(found, None, "{status}"),
            (Some(problem), found) => {
                let found = found.expect("a problem");
                assert!(found.ends_with(problem), "{found}");
                assert!(found.starts_with("pod chat-1"), "{found}");
            }
        }
    }
}

#[test]
fn a_container_that_cannot_be_made_and_one_killed_for_memory_are_seen() {
    let seen = |state: Value, last: Value| {
        let found = pod(&pod_with(&container(&state, &last))).unwrap();
        (found.cannot_start, found.out_of_memory)
    };
    let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "secret x"}});
    let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let (why, _) = seen(waiting("CreateContainerConfigError"), json!({}));
    assert_eq!(why.as_deref(), Some("CreateContainerConfigError: secret x"));
    for reason in ["ImagePullBackOff", "CrashLoopBackOff", "ContainerCreating"] {
        assert_eq!(seen(waiting(reason), json!({})), (None, false), "{reason}");
    }
    assert!(seen(json!({"running": {}}), killed.clone()).1);
    assert!(seen(killed, json!({})).1);
    let failed = json!({"terminated": {"exitCode": 137, "reason": "Error"}});
    assert!(!seen(json!({"running": {}}), failed).1);
}

#[test]
fn a_finished_pod_is_no_engine_pod() {
    assert!(pod(&pod_with(&json!({"phase": "Failed"}))).is_none());
    let alive = pod(&pod_with(&json!({"phase": "Running", "podIP": "10.0.0.1"}))).unwrap();
    assert_eq!(alive.ip.as_deref(), Some("10.0.0.1"));
    assert!(!alive.ready);
}

fn job_with(status: &Value) -> Job {
    let job = json!({"metadata": {"name": "j", "uid": "job", "creationTimestamp": "2026-01-01T00:00:00Z"}, "status": status});
    serde_json::from_value(job).unwrap()
}

#[test]
fn a_job_that_gets_no_pod_says_so_after_a_while() {
    let created: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let job_at = |seconds: i64| {
        let now = created + jiff::SignedDuration::from_secs(seconds);
        job(&job_with(&json!({})), &[], now).unwrap()
    };
    assert_eq!(job_at(1).pod_problem, None);
    assert!(job_at(20).pod_problem.unwrap().contains("no pod of Job j"));
}

#[test]
fn an_answer_that_is_missing_or_is_no_report_is_an_error_with_what_there_was() {
    let pods = |message: Option<&str>| {
        let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": message, "finishedAt": "2026-01-01T00:00:05Z"}});
        let mut pod = pod_with(&container(&ended, &json!({})));
        let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job"}]);
        pod.metadata.owner_references = serde_json::from_value(owner).unwrap();
        [pod]
    };
    let message = |text| {
        let now = Timestamp::UNIX_EPOCH;
        job(&job_with(&json!({})), &pods(text), now)
            .unwrap()
            .message
    };
    let Some(Err(silent)) = message(None) else {
        panic!("a pod without a message");
    };
    assert!(silent.contains("exit code 1"), "{silent}");
    let Some(Err(garbled)) = message(Some("panicked at x")) else {
        panic!("a pod with another message");
    };
    assert!(garbled.contains("panicked at x"), "{garbled}");
}

#[test]
fn a_download_that_failed_is_the_jobs_answer_and_one_that_succeeded_is_none() {
    let ended = |code: i32, message: &str| json!({"terminated": {"exitCode": code, "message": message, "finishedAt": "2026-01-01T00:00:05Z"}});
    let status = |name: &str, state: Value| json!([{"name": name, "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": state}]);
    let denied = r#"{"failed":{"reason":"SourceRefused","message":"s3://b/m: access is denied"}}"#;
    let answer = |init: Value, own: Value| {
        let mut pod = pod_with(
            &json!({"phase": "Failed", "initContainerStatuses": status("fetch", init),
            "containerStatuses": status("calibration", own)}),
        );
        let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job"}]);
        pod.metadata.owner_references = serde_json::from_value(owner).unwrap();
        let seen = job(&job_with(&json!({})), &[pod], Timestamp::UNIX_EPOCH).unwrap();
        (seen.message, seen.pod_problem)
    };
    let waiting = json!({"waiting": {"reason": "PodInitializing"}});
    let (message, problem) = answer(ended(2, denied), waiting.clone());
    assert!(
        matches!(message, Some(Ok(JobMessage::Failed(failure))) if failure.message.contains("denied"))
    );
    assert!(problem.unwrap().contains("exit code 2"));
    assert_eq!(answer(ended(0, ""), waiting), (None, None));
    let (message, _) = answer(ended(0, ""), ended(2, "panicked"));
    assert!(matches!(message, Some(Err(text)) if text.contains("panicked")));
}

#[test]
fn the_error_line_of_a_log_is_why_a_program_ended() {
    let log = "{\"level\":\"INFO\"}\nerror: --max-sequence-length 4096 is longer than the context of 1024\n";
    assert!(last_words(log).is_some_and(|why| why.starts_with("--max-sequence-length 4096")));
    assert_eq!(last_words("one\ntwo\n\n"), Some("two"));
    assert_eq!(last_words("\n"), None);
}
