//! How a person's verb is said: the patch, the request in it, and why a verb makes no sense now.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use mixquant_crds::{Digest, MixQuantService, names};
use mixquant_operator::build::deployment;
use mixquant_operator::cli::Exit;
use mixquant_operator::cli::facts::{Facts, Kept};
use mixquant_operator::cli::intent::{Saying, Verb, outcome, saying};
use mixquant_operator::observed::FrozenRevision;
use mixquant_operator::validate::validate;
use serde_json::{Value, json};

fn chat(paused: bool, status: Value) -> MixQuantService {
    let text = include_str!("../../crds/examples/chat.yaml");
    let mut service: Value = serde_norway::from_str(text).unwrap();
    service["metadata"]["namespace"] = json!("models");
    service["metadata"]["uid"] = json!("uid");
    service["spec"]["rollout"]["paused"] = json!(paused);
    service["status"] = status;
    serde_json::from_value(service).unwrap()
}

fn revision(name: &str) -> Value {
    let digest = Digest::of_bytes(b"x");
    json!({"revision": name, "artifactDigest": digest, "modelDigest": digest, "image": "engine:1"})
}

fn stepping(stage: &str) -> Value {
    json!({"stable": revision("1111111111"), "canary": revision("2222222222"), "rollout": {"stage": stage, "step": 0,
        "stepStartedAt": "2026-01-01T00:00:00Z", "generation": 1, "request": Digest::of_bytes(b"r"), "failedVerdicts": 0}})
}

fn serving() -> Value {
    json!({"stable": revision("3333333333"), "promoted": [
        {"revision": "3333333333", "at": "2026-01-03T00:00:00Z"},
        {"revision": "2222222222", "at": "2026-01-02T00:00:00Z"},
        {"revision": "1111111111", "at": "2026-01-01T00:00:00Z"}]})
}

fn facts(paused: bool, status: Value, kept_of: &[(i64, &str)]) -> Facts {
    let service = chat(paused, status);
    let digest = Digest::of_bytes(b"x");
    let template = deployment::template(
        &validate(&chat(false, Value::Null)).unwrap(),
        &Digest::of_bytes(b"model"),
        &digest,
    );
    let kept = |&(number, name): &(i64, &str)| Kept {
        number,
        created_at: None,
        frozen: FrozenRevision {
            revision: name.to_owned(),
            intent: digest.clone(),
            model_digest: digest.clone(),
            artifact_digest: digest.clone(),
            image: "engine:1".into(),
            template: template.clone(),
        },
    };
    Facts {
        revisions: kept_of.iter().map(kept).collect(),
        service,
        pods: Vec::new(),
        events: Vec::new(),
    }
}

const KEPT: [(i64, &str); 2] = [(2, "2222222222"), (1, "1111111111")];

fn says(verb: &Verb, paused: bool, status: Value) -> Result<Saying, String> {
    saying(verb, &facts(paused, status, &KEPT), "7")
}

fn request(saying: &Saying) -> &str {
    let annotations = &saying.patch["metadata"]["annotations"];
    annotations[names::ANNOTATION_REQUEST].as_str().unwrap()
}

#[test]
fn a_request_names_the_canary_that_it_speaks_of() {
    for (verb, text) in [
        (Verb::Promote { full: false }, "7 promote 2222222222"),
        (Verb::Promote { full: true }, "7 promote 2222222222 full"),
        (Verb::Abort, "7 abort 2222222222"),
        (Verb::Retry, "7 retry"),
    ] {
        let saying = says(&verb, false, stepping("Stepping")).unwrap();
        assert_eq!(request(&saying), text);
        assert!(saying.patch.get("spec").is_none(), "the spec is the user's");
    }
}

#[test]
fn without_a_canary_there_is_nothing_to_promote_or_abort() {
    for verb in [Verb::Promote { full: false }, Verb::Abort] {
        let error = says(&verb, false, serving()).unwrap_err();
        assert!(error.contains("no revision is on trial"), "{error}");
        let error = says(&verb, false, stepping("RollingBack")).unwrap_err();
        assert!(error.contains("being rolled back already"), "{error}");
    }
}

#[test]
fn pausing_is_the_specs_own_switch_and_promoting_turns_it_back() {
    let pause = says(&Verb::Pause, false, stepping("Stepping")).unwrap();
    assert_eq!(pause.patch, json!({"spec": {"rollout": {"paused": true}}}));
    assert!(pause.request.is_none());
    assert!(says(&Verb::Pause, true, stepping("Stepping")).is_err());
    let resume = says(&Verb::Promote { full: false }, true, serving()).unwrap();
    assert_eq!(
        resume.patch,
        json!({"spec": {"rollout": {"paused": false}}})
    );
    let full = says(&Verb::Promote { full: true }, true, stepping("Stepping")).unwrap();
    assert_eq!(full.patch["spec"]["rollout"]["paused"], false);
    assert_eq!(request(&full), "7 promote 2222222222 full");
}

#[test]
fn undo_goes_to_what_served_before_or_to_what_is_named_if_it_is_kept() {
    let undo = |to: Option<&str>, status| {
        let to = to.map(str::to_owned);
        says(&Verb::Undo { to }, false, status).map(|saying| request(&saying).to_owned())
    };
    assert_eq!(undo(None, serving()).unwrap(), "7 undo 2222222222");
    assert_eq!(undo(Some("1"), serving()).unwrap(), "7 undo 1111111111");
    assert_eq!(
        undo(Some("1111111111"), serving()).unwrap(),
        "7 undo 1111111111"
    );
    let error = undo(Some("9"), serving()).unwrap_err();
    assert!(error.contains("no revision `9` is kept"), "{error}");
    let error = undo(None, stepping("Stepping")).unwrap_err();
    assert!(error.contains("--to-revision"), "{error}");
}

#[test]
fn only_the_answer_to_this_very_request_is_an_answer() {
    let said = says(&Verb::Retry, false, serving()).unwrap();
    let answered = |request: &str, answer: &str| {
        let mut status = serving();
        status["request"] = json!({"request": request, "answer": answer, "message": "why", "at": "2026-01-01T00:00:00Z"});
        outcome(&said, &chat(false, status))
    };
    assert_eq!(answered("7 retry", "Accepted").exit(), Exit::Done);
    assert_eq!(answered("7 retry", "Refused").exit(), Exit::No);
    let other = answered("6 retry", "Accepted");
    assert!(!other.is_final());
    assert_eq!(other.exit(), Exit::NotYet);
    // A switch of the spec needs no answer.
    let pause = says(&Verb::Pause, false, serving()).unwrap();
    assert_eq!(outcome(&pause, &chat(true, serving())).exit(), Exit::Done);
}
