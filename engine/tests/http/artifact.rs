//! Serving with an artifact: long prompts are read on the quantised copy, short ones are not, and the cache is stored as the plan says.

use std::path::{Path, PathBuf};

use mixquant_crds::{DecodeScheme, PrecisionPlan, PrefillScheme};
use mixquant_engine::calibrate;
use mixquant_engine::calibrate::quantisers::Quantiser;
use mixquant_engine::server::Options;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Server, options};
use crate::jobs;

/// Prompts of so many tokens and more are read on the quantised copy. As many as the plan keeps recent, so that below it the cache is not
/// quantised either.
const MIN_PROMPT_TOKENS: u32 = 64;

/// Calibrates the demo model on a text that every checkout has. Returns the artifact's folder.
fn artifact(out: &Path) -> PathBuf {
    let mut plan = calibrate::default_plan();
    plan.prefill.min_prompt_tokens = MIN_PROMPT_TOKENS;
    jobs::artifact(&jobs::options(out, plan))
}

/// The likelihoods of a prompt and of four tokens behind it.
fn likelihoods(server: &Server, tokens: u32) -> Vec<Value> {
    let ids: Vec<u32> = (0..tokens)
        .map(|position| 100 + (position * 37) % 3000)
        .collect();
    let body = json!({"prompt": ids, "max_tokens": 4, "ignore_eos": true, "temperature": 0, "echo": true, "logprobs": 0});
    let answer = post(server.api, "/v1/completions", &body).json();
    answer["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap()
        .clone()
}

/// Goal: the switch is real. Method: one prompt below and one at the threshold, beside an engine without the artifact.
#[test]
fn the_quantised_copy_reads_long_prompts_only() {
    let out = tempfile::tempdir().unwrap();
    let with = Server::start(Options {
        artifact: Some(artifact(out.path())),
        ..options()
    });
    let without = Server::common();
    assert_eq!(
        likelihoods(&with, MIN_PROMPT_TOKENS - 1),
        likelihoods(without, MIN_PROMPT_TOKENS - 1),
        "below the threshold nothing differs"
    );
    let (quantised, precise) = (
        likelihoods(&with, MIN_PROMPT_TOKENS),
        likelihoods(without, MIN_PROMPT_TOKENS),
    );
    assert_ne!(
        quantised, precise,
        "at the threshold the copy reads the prompt"
    );
    let distance = |(a, b): (&Value, &Value)| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs();
    let mean = quantised
        .iter()
        .zip(&precise)
        .skip(1)
        .map(distance)
        .sum::<f64>()
        / f64::from(MIN_PROMPT_TOKENS + 3);
    assert!(mean < 0.5, "8 bits stay near: {mean} nats a token");
    let count = |labels: &str| with.metric("mixquant_prefill_precision_total", labels);
    assert!((count("precision=\"W8A8\",reason=\"length\"") - 1.0).abs() < 1e-9);
    assert!((count("precision=\"BF16\",reason=\"short\"") - 1.0).abs() < 1e-9);
}

/// Goal: tokens come from the copy that the plan gives decode, and it is counted. Method: metrics after a short and a long prompt.
#[test]
fn a_copy_for_decode_is_served_named_and_counted() {
    let out = tempfile::tempdir().unwrap();
    let mut plan = calibrate::default_plan();
    plan.prefill.min_prompt_tokens = MIN_PROMPT_TOKENS;
    plan.decode.scheme = DecodeScheme::W4A8;
    let with = Server::start(Options {
        artifact: Some(jobs::artifact(&calibrate::Options {
            decode_quantiser: Some(Quantiser::Rtn),
            ..jobs::options(out.path(), plan)
        })),
        ..options()
    });
    let short = MIN_PROMPT_TOKENS - 1;
    assert_ne!(
        likelihoods(&with, short),
        likelihoods(Server::common(), short),
        "short prompts are read by the decode copy"
    );
    likelihoods(&with, MIN_PROMPT_TOKENS);
    let count = |labels: &str| with.metric("mixquant_prefill_precision_total", labels);
    assert!((count("precision=\"W8A8\",reason=\"length\"") - 1.0).abs() < 1e-9);
    assert!((count("precision=\"W4A8\",reason=\"short\"") - 1.0).abs() < 1e-9);
    let bytes = |copy: &str| with.metric("mixquant_weight_bytes", &format!("copy=\"{copy}\""));
    let share = bytes("decode") / bytes("quantised");
    assert!((0.5..0.6).contains(&share), "4 bits beside 8: {share}");
}

/// Goal: keys and values are stored at the plan's precisions. Method: the bytes of each tier while a long sequence runs.
#[test]
fn the_cache_is_stored_as_the_plan_says() {
    let out = tempfile::tempdir().unwrap();
    let server = Server::start(Options {
        artifact: Some(artifact(out.path())),
        ..options()
    });
    let body =
        json!({"prompt": vec![300; 600], "max_tokens": 400, "ignore_eos": true, "stream": true});
    let mut stream = post(server.api, "/v1/completions", &body);
    assert!(stream.chunk().is_some());
    crate::fixture::wait_for("bytes of each tier", || {
        let bytes =
            |tier: &str| server.metric("mixquant_kv_cache_bytes", &format!("tier=\"{tier}\""));
        bytes("INT4") > 0.0 && bytes("INT8") > 0.0 && bytes("BF16") > 0.0
    });
    drop(stream);
    crate::fixture::wait_for("an empty cache", || {
        server.metric("mixquant_kv_cache_bytes", "") < 0.5
    });
}

/// Goal: the switch needs no calibration, and its threshold can be measured. Method: both ways to start, and the gauge.
#[test]
fn a_copy_made_at_load_reads_long_prompts_and_its_threshold_is_exported() {
    use mixquant_engine::valve::break_even::Threshold;

    let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
    plan.prefill.scheme = PrefillScheme::W8A8;
    let server = Server::start(Options {
        quantise: Some((plan.clone(), Some(Threshold::Tokens(MIN_PROMPT_TOKENS)))),
        ..options()
    });
    let gauge = "mixquant_prefill_min_prompt_tokens";
    assert!((server.metric(gauge, "") - f64::from(MIN_PROMPT_TOKENS)).abs() < 1e-9);
    likelihoods(&server, MIN_PROMPT_TOKENS);
    likelihoods(&server, MIN_PROMPT_TOKENS - 1);
    let count = |labels: &str| server.metric("mixquant_prefill_precision_total", labels);
    assert!((count("precision=\"W8A8\",reason=\"length\"") - 1.0).abs() < 1e-9);
    assert!((count("precision=\"BF16\",reason=\"short\"") - 1.0).abs() < 1e-9);
    let measured = Server::start(Options {
        quantise: Some((plan, Some(Threshold::Auto))),
        ..options()
    });
    let threshold = measured.metric(gauge, "");
    // On a machine where INT8 gains nothing there is no switch, and the gauge is 0.
    assert!((0.0..=1024.0).contains(&threshold), "{threshold}");
    assert!((Server::common().metric(gauge, "")).abs() < 1e-9);
}

/// Goal: weights that answer otherwise than at calibration take no request, also where no digest says so. Method: half a million INT8
/// weights with other sign bits, and digest checks off.
#[test]
fn a_damaged_copy_is_found_before_readiness_by_its_answers() {
    let out = tempfile::tempdir().unwrap();
    let artifact = artifact(out.path());
    let weights = std::fs::read_dir(artifact.join("weights")).unwrap();
    let file = weights.map(|entry| entry.unwrap().path()).next().unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    // Scales stand in front of the weights.
    let end = bytes.len();
    bytes[end - 500_000..]
        .iter_mut()
        .for_each(|byte| *byte ^= 0x80);
    std::fs::write(&file, bytes).unwrap();
    let mut running = mixquant_engine::server::start(Options {
        artifact: Some(artifact),
        skip_digest_checks: true,
        ..options()
    })
    .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let error = runtime.block_on(running.finished()).unwrap_err();
    assert!(
        error.message.contains("self-test") && error.message.contains("golden.json"),
        "{error}"
    );
}
