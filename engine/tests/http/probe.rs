//! Probes: answers that are given, scored by what users would get, at nobody's cost.

use std::path::{Path, PathBuf};
use std::thread;

use mixquant_crds::Digest;
use mixquant_crds::probe::{MAX_TEXTS, ProbeAnswer};
use mixquant_engine::artifact::probe::{Probes, Text};
use mixquant_engine::artifact::store::Draft;
use mixquant_engine::artifact::{Artifact, Check};
use mixquant_engine::model::{Chunk, KvCache, LogitRows, Model, Pass, Workspace};
use mixquant_engine::sample::Likelihood;
use mixquant_engine::server::Options;
use mixquant_engine::tokenizer::Tokenizer;
use mixquant_engine::valve::read::{Settings, Valve};
use serde_json::json;

use crate::client::{Response, get, post};
use crate::fixture::{Server, model, options, wait_for};
use crate::jobs;

/// An artifact and its digest.
fn artifact(out: &Path) -> (PathBuf, Digest) {
    let folder = jobs::artifact(&jobs::options(out, jobs::plan()));
    let digest = Artifact::open(&folder, Check::Digests).unwrap();
    (folder, digest.digest().clone())
}

fn probes(folder: &Path) -> Probes {
    serde_json::from_slice(&std::fs::read(folder.join("probe.json")).unwrap()).unwrap()
}

/// The artifact in `folder` once more, with other texts for probes, beside it.
fn with_texts(folder: &Path, probes: &Probes) -> Digest {
    let artifact = Artifact::open(folder, Check::Digests).unwrap();
    let mut draft = Draft::new(folder.parent().unwrap(), 0).unwrap();
    for entry in &artifact.manifest().files {
        let content = match entry.path.as_str() {
            "probe.json" => serde_json::to_vec(probes).unwrap(),
            path => std::fs::read(folder.join(path)).unwrap(),
        };
        draft.write(&entry.path, &content).unwrap();
    }
    draft
        .publish(artifact.manifest().model_digest.clone())
        .unwrap()
        .digest
}

fn ask(server: &Server, artifact: &Digest, count: u32) -> Response {
    let body = json!({"artifact": artifact, "first": 0, "count": count, "seconds": 100});
    post(server.admin, "/probe", &body)
}

fn answer(response: Response) -> ProbeAnswer {
    assert_eq!(response.status, 200);
    serde_json::from_value(response.json()).unwrap()
}

fn serve(folder: &Path, places: usize) -> Server {
    Server::start(Options {
        artifact: Some(folder.to_owned()),
        max_batch_size: places,
        ..options()
    })
}

/// What the model says of a text's answer when every token of it is decoded behind a prompt that was read in that way.
fn likelihood(model: &Model, text: &Text, quantised: bool) -> f64 {
    let mut workspace = Workspace::default();
    // The last token of the answer is fed too, and its logits are nobody's.
    let capacity = text.prompt.len() + text.answer.len();
    let (mut cache, mut logits) = if quantised {
        let mut valve = Valve::new(Settings::default());
        let prompt = (&text.prompt[..], LogitRows::Last);
        let read = valve.read(model, prompt, capacity, &mut workspace, None);
        let read = read.unwrap();
        assert_eq!(read.pass, Pass::Prefill, "the valve lets it pass");
        (read.cache, read.last)
    } else {
        let mut cache = model.new_cache(capacity);
        let logits = decode(model, &text.prompt, &mut cache, &mut workspace);
        (cache, logits)
    };
    let mut nll = 0.0;
    for token in &text.answer {
        nll -= f64::from(Likelihood::of(*token, &logits, 0).logprob);
        let next = std::slice::from_ref(token);
        logits = decode(model, next, &mut cache, &mut workspace);
    }
    nll
}

fn decode(
    model: &Model,
    tokens: &[u32],
    cache: &mut KvCache,
    workspace: &mut Workspace,
) -> Vec<f32> {
    let chunk = Chunk {
        tokens,
        cache,
        logits: LogitRows::Last,
    };
    let logits = model.forward(Pass::Precise, &mut [chunk], workspace, None);
    logits.unwrap().to_vec()
}

/// Goal: the score is that of the serving path, quantised prefill and cache included. Method: the same answers, decoded by hand.
#[test]
fn a_given_answer_is_scored_as_the_serving_path_computes_it() {
    let out = tempfile::tempdir().unwrap();
    let (folder, digest) = artifact(out.path());
    let server = serve(&folder, 8);
    let got = answer(ask(&server, &digest, 3));
    let texts = probes(&folder).texts;
    assert_eq!(texts.len(), 2, "one a window of calibration");
    assert_eq!((got.texts, got.stopped.as_deref()), (2, None));
    let order: Vec<u32> = got.answers.iter().map(|answer| answer.text).collect();
    assert_eq!(order, [0, 1, 0], "from the beginning again");
    assert_eq!(got.answers[0], got.answers[2], "the same text twice");
    let mut model = Model::open(&model()).unwrap();
    let whole = Artifact::open(&folder, Check::Digests).unwrap();
    whole.attach_to(&mut model).unwrap();
    assert!((server.metric("mixquant_valve_fallback_total", "")).abs() < 1e-9);
    for (text, answer) in texts.iter().zip(&got.answers) {
        let by_hand = likelihood(&model, text, true);
        let precise = likelihood(&model, text, false);
        let apart = |nll: f64| (answer.nll - nll).abs();
        assert!(apart(by_hand) < 1e-4, "{} {by_hand}", answer.nll);
        assert!(apart(precise) > 1e-4, "the copy for prompts read it");
        assert_eq!(answer.tokens as usize, text.answer.len());
    }
}

/// Goal: nobody takes probes for users, and gates have their latencies. Method: the counters after three probes.
#[test]
fn probes_are_requests_like_others_and_are_counted_apart_too() {
    let out = tempfile::tempdir().unwrap();
    let (folder, digest) = artifact(out.path());
    let server = serve(&folder, 8);
    let counted = |name: &str, label: &str, expected: f64| {
        assert!(
            (server.metric(name, label) - expected).abs() < 1e-9,
            "{name}"
        );
    };
    counted("mixquant_probes_total", "", 0.0);
    assert_eq!(answer(ask(&server, &digest, 3)).answers.len(), 3);
    counted("mixquant_probes_total", "", 3.0);
    counted("mixquant_requests_total", "outcome=\"ok\"", 3.0);
    counted(
        "mixquant_request_time_per_output_token_seconds_count",
        "",
        3.0,
    );
    counted("mixquant_time_to_first_token_seconds_count", "", 3.0);
    let body = json!({"prompt": "Some licence", "max_tokens": 4});
    assert_eq!(post(server.api, "/v1/completions", &body).status, 200);
    counted("mixquant_probes_total", "", 3.0);
    counted("mixquant_requests_total", "outcome=\"ok\"", 4.0);
}

/// Goal: another artifact's texts are asked as they are there. Method: an artifact beside the served one, whole, damaged, of other words, none.
#[test]
fn texts_come_from_any_whole_artifact_beside_the_served_one_and_from_no_other() {
    let out = tempfile::tempdir().unwrap();
    let (folder, digest) = artifact(out.path());
    let mut fewer = probes(&folder);
    fewer.texts.truncate(1);
    let beside = with_texts(&folder, &fewer);
    let mut foreign = fewer.clone();
    foreign.vocabulary = Digest::of_bytes(b"other words");
    let foreign = with_texts(&folder, &foreign);
    let mut none = fewer.clone();
    none.texts.clear();
    let none = with_texts(&folder, &none);
    let server = serve(&folder, 8);
    assert_eq!(answer(ask(&server, &beside, 1)).texts, 1);
    assert_eq!(answer(ask(&server, &digest, 1)).texts, 2);
    let refused = |artifact: &Digest, why: &str| {
        let response = ask(&server, artifact, 1);
        assert_eq!(response.status, 409, "{why}");
        let text = response.text();
        assert!(text.contains(why), "{text}");
    };
    refused(&foreign, "another vocabulary");
    refused(&none, "damaged: 0 texts");
    refused(&Digest::of_bytes(b"nothing"), "cannot read");
    std::fs::write(
        folder
            .parent()
            .unwrap()
            .join(beside.hex())
            .join("probe.json"),
        "{}",
    )
    .unwrap();
    // What was read last is kept; the one before is read anew.
    refused(&beside, "damaged");
    let without = Server::common();
    let response = ask(without, &digest, 1);
    assert_eq!(response.status, 409);
    assert!(response.text().contains("without an artifact"));
}

#[test]
fn a_wrong_request_for_probes_is_refused_with_the_reason() {
    let server = Server::common();
    let digest = Digest::of_bytes(b"any");
    for (body, status) in [
        (
            json!({"artifact": digest, "first": 0, "count": 0, "seconds": 1}),
            400,
        ),
        (
            json!({"artifact": digest, "first": 0, "count": 65, "seconds": 1}),
            400,
        ),
        (
            json!({"artifact": digest, "first": 0, "count": 1, "seconds": 0}),
            400,
        ),
        (
            json!({"artifact": digest, "first": 0, "count": 1, "seconds": 999}),
            400,
        ),
        (
            json!({"artifact": "../..", "first": 0, "count": 1, "seconds": 1}),
            400,
        ),
        (json!({"artifact": digest}), 400),
        (json!({"pad": "x".repeat(5000)}), 413),
    ] {
        let response = post(server.admin, "/probe", &body);
        assert_eq!(response.status, status, "{body}");
        assert!(!response.text().is_empty());
    }
    assert_eq!(get(server.admin, "/probe").status, 405);
    assert_eq!(
        post(server.api, "/probe", &json!({})).status,
        404,
        "not for users"
    );
}

/// Goal: one at a time. Method: a second request while the first is answered.
#[test]
fn a_second_probe_is_turned_away_while_one_is_answered() {
    let out = tempfile::tempdir().unwrap();
    let (folder, digest) = artifact(out.path());
    let server = serve(&folder, 8);
    thread::scope(|scope| {
        let first = scope.spawn(|| answer(ask(&server, &digest, 64)));
        wait_for("the first probe", || {
            server.metric("mixquant_probes_total", "") > 0.5
        });
        assert_eq!(ask(&server, &digest, 1).status, 429);
        assert_eq!(first.join().unwrap().answers.len(), 64);
    });
}

/// Goal: users come first. Method: an engine with one place; a user who has it, and one who comes while a probe has it.
#[test]
fn a_probe_gives_way_to_users() {
    let out = tempfile::tempdir().unwrap();
    let (folder, digest) = artifact(out.path());
    let server = serve(&folder, 1);
    let long =
        json!({"prompt": vec![300; 8], "max_tokens": 900, "ignore_eos": true, "stream": true});
    let mut user = post(server.api, "/v1/completions", &long);
    assert!(user.chunk().is_some());
    let refused = answer(ask(&server, &digest, 1));
    assert_eq!(refused.answers, []);
    assert_eq!(
        refused.stopped.as_deref(),
        Some("users take every place of the batch")
    );
    drop(user);
    let idle = || server.metric("mixquant_requests_running", "") < 0.5;
    wait_for("an idle engine", idle);
    thread::scope(|scope| {
        let probe = scope.spawn(|| answer(ask(&server, &digest, 64)));
        wait_for("the probe", || {
            server.metric("mixquant_probes_total", "") > 0.5
        });
        let short = json!({"prompt": vec![300; 8], "max_tokens": 2, "ignore_eos": true});
        assert_eq!(post(server.api, "/v1/completions", &short).status, 200);
        let probe = probe.join().unwrap();
        assert!(probe.stopped.unwrap().contains("users"), "it gave way");
        assert!(probe.answers.len() < 64);
    });
}

#[test]
fn an_artifact_keeps_no_more_texts_than_the_contract_says() {
    let tokenizer = Tokenizer::open(&model()).unwrap();
    let text: Vec<u32> = (0..100).collect();
    let texts = vec![&text[..]; 100];
    let kept = Probes::of(&tokenizer, &texts);
    assert_eq!(kept.texts.len(), MAX_TEXTS as usize);
    assert!(kept.texts.iter().all(|text| text.answer.len() == 32));
    let short = Probes::of(&tokenizer, &[&text[..7], &text[..20]]);
    let lengths = |text: &Text| (text.prompt.len(), text.answer.len());
    assert_eq!(
        short.texts.iter().map(lengths).collect::<Vec<_>>(),
        [(10, 10)]
    );
}
