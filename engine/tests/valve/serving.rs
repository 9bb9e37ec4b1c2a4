//! The worker with its valve: metrics, the difference log, and requests that fail alone.

use std::fs;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use mixquant_engine::health::Health;
use mixquant_engine::metrics::Metrics;
use mixquant_engine::model::Model;
use mixquant_engine::sample::Sampling;
use mixquant_engine::scheduler::Limits;
use mixquant_engine::tokenizer::Tokenizer;
use mixquant_engine::valve::log::{DifferenceLog, MIN_BYTES, Options};
use mixquant_engine::worker::{Event, Job, Worker};
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc as events};

use crate::fixture::{directory, invert, model, model_with, precise, prompt, settings};

/// What came of the prompts, in their order: the tokens, or why there are none.
struct Served {
    answers: Vec<Result<Vec<u32>, String>>,
    metrics: Arc<Metrics>,
}

impl Served {
    fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.metrics.text();
        let of = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(label);
        let values = text.lines().filter(of);
        values
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }
}

/// Serves the prompts, eight tokens each.
fn serve(model: Model, prompts: &[Vec<u32>], audit: f64, log: Option<&Options>) -> Served {
    let metrics = Arc::new(Metrics::new("m", "r"));
    let tokenizer = Arc::new(Tokenizer::open(&directory()).unwrap());
    let limits = Limits {
        max_batch_size: 4,
        kv_capacity_tokens: 4096,
    };
    let log = log.map(|options| DifferenceLog::open(options, metrics.clone()).unwrap());
    let mut worker = Worker::new(
        model,
        tokenizer,
        limits,
        metrics.clone(),
        Arc::new(Health::new()),
    )
    .with_valve(settings(audit), log);
    let (jobs, receiver) = mpsc::channel();
    let permits = Arc::new(Semaphore::new(prompts.len()));
    let mut readers = Vec::new();
    for prompt in prompts {
        let (events, reader) = events::channel(64);
        readers.push(reader);
        let job = Job {
            index: 0,
            prompt: prompt.clone(),
            max_new_tokens: 8,
            min_new_tokens: 0,
            ignore_eos: true,
            sampling: Sampling::greedy(),
            given: Vec::new(),
            stops: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
            arrived: Instant::now(),
            events,
            permit: permits.clone().try_acquire_owned().unwrap(),
        };
        jobs.send(job).unwrap();
    }
    drop(jobs);
    worker.run(&receiver);
    // The log is written when the worker is gone.
    drop(worker);
    let answers = readers.into_iter().map(answer).collect();
    Served { answers, metrics }
}

fn answer(mut events: events::Receiver<(usize, Event)>) -> Result<Vec<u32>, String> {
    let mut tokens = Vec::new();
    while let Ok((_, event)) = events.try_recv() {
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::Finished(_) => return Ok(tokens),
            Event::Failed(why) => return Err(why),
            Event::Prompt(_) => {}
        }
    }
    Err("no end".to_owned())
}

fn damaged() -> Model {
    model_with(|tensor| {
        if tensor.name.ends_with("down_proj") {
            invert(tensor);
        }
    })
}

fn log(folder: &Path, text: bool) -> Options {
    Options {
        file: folder.join("differences.jsonl"),
        bytes: MIN_BYTES,
        text,
    }
}

#[test]
fn metrics_tell_kept_prompts_from_those_read_again() {
    let prompts = [prompt(96), prompt(128), prompt(20)];
    let healthy = serve(model(), &prompts, 100.0, None);
    let count = |served: &Served, name: &str, label: &str| {
        let value = served.metric(name, label);
        assert!(value.fract().abs() < 1e-9, "{value}");
        value
    };
    let prefill = "mixquant_prefill_precision_total";
    let expect = |served: &Served, name: &str, label: &str, wanted: f64| {
        let found = count(served, name, label);
        assert!(
            (found - wanted).abs() < 1e-9,
            "{name}{{{label}}} is {found}, not {wanted}"
        );
    };
    expect(
        &healthy,
        prefill,
        "precision=\"W8A8\",reason=\"length\"",
        2.0,
    );
    expect(
        &healthy,
        prefill,
        "precision=\"BF16\",reason=\"short\"",
        1.0,
    );
    expect(&healthy, "mixquant_valve_fallback_total", "", 0.0);
    expect(&healthy, "mixquant_first_token_kl_count", "", 2.0);
    expect(&healthy, "mixquant_shadow_audit_kl_count", "", 2.0);
    expect(&healthy, "mixquant_top1_agreement_total", "", 2.0);
    let broken = serve(damaged(), &prompts, 0.0, None);
    expect(
        &broken,
        prefill,
        "precision=\"BF16\",reason=\"fallback\"",
        2.0,
    );
    expect(&broken, "mixquant_valve_fallback_total", "", 2.0);
    expect(&broken, "mixquant_shadow_audit_kl_count", "", 0.0);
}

#[test]
fn whole_answers_behind_a_damaged_copy_are_the_precise_ones() {
    let prompts: Vec<_> = (64..72).map(|tokens| prompt(tokens * 2)).collect();
    let (found, wanted) = (
        serve(damaged(), &prompts, 0.0, None).answers,
        serve(precise(), &prompts, 0.0, None).answers,
    );
    assert!(
        wanted
            .iter()
            .all(|answer| answer.as_ref().is_ok_and(|tokens| tokens.len() == 8))
    );
    assert_eq!(found, wanted);
}

#[test]
fn differences_are_kept_by_digest_and_by_text_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = [prompt(96), prompt(128)];
    let served = serve(damaged(), &prompts, 0.0, Some(&log(folder.path(), false)));
    let lines = |folder: &Path| -> Vec<Value> {
        let text = fs::read_to_string(folder.join("differences.jsonl")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let records = lines(folder.path());
    assert_eq!(records.len(), 2);
    for (record, prompt) in records.iter().zip(&prompts) {
        assert_eq!(record["prompt_tokens"], prompt.len());
        assert_eq!(record["scheme"], "W8A8");
        assert!(
            record["prompt_sha256"]
                .as_str()
                .unwrap()
                .starts_with("sha256:")
        );
        assert!(record["kl"].as_f64().unwrap() > 0.05, "{record}");
        for side in ["quantised_top", "precise_top"] {
            assert_eq!(record[side].as_array().unwrap().len(), 5, "{record}");
        }
        assert!(record.get("text").is_none());
    }
    assert!((served.metric("mixquant_difference_records_total", "written") - 2.0).abs() < 1e-9);
    let folder = tempfile::tempdir().unwrap();
    serve(
        damaged(),
        &prompts[..1],
        0.0,
        Some(&log(folder.path(), true)),
    );
    assert!(!lines(folder.path())[0]["text"].as_str().unwrap().is_empty());
}

/// Goal: a log that cannot be written costs records, not requests. Method: its predecessor's name is taken, and it is full.
#[test]
fn a_log_that_cannot_be_written_fails_no_request() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("differences.jsonl.1/x")).unwrap();
    let full = vec![b'\n'; usize::try_from(MIN_BYTES / 2).unwrap()];
    fs::write(folder.path().join("differences.jsonl"), full).unwrap();
    let prompts = [prompt(96), prompt(128)];
    let served = serve(damaged(), &prompts, 0.0, Some(&log(folder.path(), false)));
    assert_eq!(
        served.answers,
        serve(precise(), &prompts, 0.0, None).answers
    );
    assert!((served.metric("mixquant_difference_records_total", "dropped") - 2.0).abs() < 1e-9);
}

/// Goal: where the precise weights are bad too, that request fails and no other. Method: the embedding of one token is NaN, so a prompt
/// with it has no good logits in either pass.
#[test]
fn a_prompt_that_neither_pass_can_read_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let bad_token = 4000;
    crate::fixture::nan_embedding(folder.path(), bad_token);
    let model = crate::fixture::attached(Model::open(folder.path()).unwrap(), |_| ());
    let mut bad = prompt(96);
    bad[50] = u32::try_from(bad_token).unwrap();
    let prompts = [prompt(96), bad, prompt(128)];
    let served = serve(model, &prompts, 0.0, None);
    let why = served.answers[1].as_ref().unwrap_err();
    assert!(
        why.contains("no finite numbers") && why.contains("damaged"),
        "{why}"
    );
    assert!(served.answers[0].is_ok() && served.answers[2].is_ok());
    assert!((served.metric("mixquant_valve_fallback_total", "reason=\"nan\"") - 1.0).abs() < 1e-9);
}
