//! Verification against numbers made elsewhere, and what the plans that the rollouts use cost this model.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests panic and print as tests do"
)]

mod jobs;

use std::fs;
use std::path::Path;

use mixquant_crds::{DecodeScheme, KvPrecision, PrecisionPlan, PrefillScheme, VerifyReport};
use mixquant_engine::artifact::Check;
use mixquant_engine::dataset::{Dataset, Window};
use mixquant_engine::model::Model;
use mixquant_engine::progress::Progress;
use mixquant_engine::tokenizer::Tokenizer;
use mixquant_engine::{calibrate, verify};
use serde_json::Value;

/// Windows of a file by the recipe, and the model.
fn windows(path: &Path, window: usize) -> (Model, Vec<Window>) {
    let tokenizer = Tokenizer::open(&jobs::model()).unwrap();
    (
        Model::open(&jobs::model()).unwrap(),
        Dataset::read(path)
            .unwrap()
            .windows(&tokenizer, window)
            .unwrap(),
    )
}

/// Every key and value at one precision, the rest precise.
fn uniform(precision: KvPrecision) -> PrecisionPlan {
    let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
    (plan.kv_cache.default, plan.kv_cache.important) = (precision, precision);
    plan
}

fn measure(plan: &PrecisionPlan, data: &Path, samples: usize) -> VerifyReport {
    let options = verify::Options {
        model: jobs::model(),
        artifact: None,
        check: Check::Digests,
        data: data.to_owned(),
        window: 512,
        samples: Some(samples),
        plan: Some(plan.clone()),
        expected_artifact: None,
    };
    verify::run(&options, &Progress::hidden()).unwrap()
}

#[test]
fn the_baseline_perplexity_is_that_of_the_reference() {
    let (Some(text), Some(reference)) = (
        jobs::shared("data/eval-ppl.txt"),
        jobs::shared("data/reference/kube-llama-10m-eval-ppl.json"),
    ) else {
        return;
    };
    let reference: Value = serde_json::from_slice(&fs::read(reference).unwrap()).unwrap();
    let (mut model, windows) = windows(&text, 1024);
    assert_eq!(
        windows.len() as u64,
        reference["n_chunks"].as_u64().unwrap()
    );
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    for index in [0, 61] {
        let report = verify::measure(
            &mut model,
            &windows[index..=index],
            None,
            &Progress::hidden(),
        )
        .unwrap();
        let expected = (reference["chunk_nll_sum"][index].as_f64().unwrap() / 1023.0).exp();
        assert!(
            (report.baseline_perplexity / expected - 1.0).abs() < 1e-4,
            "window {index}: {} and {expected}",
            report.baseline_perplexity
        );
    }
}

#[test]
fn the_baseline_is_at_distance_zero_from_itself() {
    let (mut model, windows) = windows(&jobs::text(), 256);
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    let report = verify::measure(&mut model, &windows[..2], None, &Progress::hidden()).unwrap();
    assert_eq!(
        report.perplexity.to_bits(),
        report.baseline_perplexity.to_bits()
    );
    assert_eq!(
        (
            report.perplexity_increase_percent,
            report.kl_mean,
            report.kl_p99,
            report.top1_agreement_percent
        ),
        (0.0, 0.0, 0.0, 100.0)
    );
    assert_eq!(report.tokens, 2 * 255);
}

/// BF16 without a quantised cache goes block by block through another arithmetic: close to the baseline, and not the same.
#[test]
fn bf16_is_near_the_baseline_and_really_another_arithmetic() {
    let (mut model, windows) = windows(&jobs::text(), 256);
    let report = verify::measure(&mut model, &windows[..2], None, &Progress::hidden()).unwrap();
    assert!(report.kl_mean > 0.0 && report.kl_mean < 1e-3, "{report:?}");
    assert!(report.perplexity_increase_percent.abs() < 0.5, "{report:?}");
    assert_eq!(
        *model.plan(),
        PrecisionPlan::precise(DecodeScheme::BF16),
        "the plan is in force again"
    );
}

#[test]
fn a_quantised_prefill_is_measured_even_when_no_prompt_is_long_enough_for_it() {
    let (mut model, windows) = windows(&jobs::text(), 64);
    let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
    let precise = verify::measure(&mut model, &windows[..2], None, &Progress::hidden()).unwrap();
    plan.prefill.scheme = PrefillScheme::W8A8;
    plan.prefill.min_prompt_tokens = 512;
    model.attach(model.quantise_linears(), None, plan).unwrap();
    let quantised = verify::measure(&mut model, &windows[..2], None, &Progress::hidden()).unwrap();
    assert!(
        quantised.kl_mean > precise.kl_mean,
        "{quantised:?} {precise:?}"
    );
}

/// The good and the bad plan of the cluster scenarios, calibrated and measured on so many windows of 512 tokens.
fn good_and_bad(samples: usize) {
    let (Some(calibration), Some(text)) = (
        jobs::shared("data/calibration.jsonl"),
        jobs::shared("data/eval-ppl.txt"),
    ) else {
        return;
    };
    let out = tempfile::tempdir().unwrap();
    let mut plan = calibrate::default_plan();
    plan.prefill.min_prompt_tokens = 128;
    let options = calibrate::Options {
        data: calibration,
        samples,
        sequence_length: 512,
        evaluation_data: Some(text.clone()),
        evaluation_samples: Some(samples),
        evaluation_sequence_length: 512,
        ..jobs::options(out.path(), plan)
    };
    let good = calibrate::run(&options, &Progress::hidden())
        .unwrap()
        .verify;
    let bad = measure(&uniform(KvPrecision::INT2), &text, samples);
    println!("W8A8, BF16, INT4/INT8 cache: {good:?}\nBF16, INT2 cache: {bad:?}");
    let tokens = 511 * samples as u64;
    assert_eq!((good.tokens, bad.tokens), (tokens, tokens));
    // The gates that the custom resource has by default.
    assert!(good.perplexity_increase_percent < 1.0, "{good:?}");
    assert!(
        good.kl_p99 < 0.1 && good.top1_agreement_percent > 98.0,
        "{good:?}"
    );
    assert!(bad.perplexity_increase_percent > 2.0, "{bad:?}");
    assert!(
        bad.kl_p99 > 0.1 && bad.top1_agreement_percent < 98.0,
        "{bad:?}"
    );
}

#[test]
fn the_calibrated_plan_passes_the_gates_and_two_bit_keys_breach_each_of_them() {
    good_and_bad(4);
}

#[test]
#[ignore = "long; make test-long runs it"]
fn the_calibrated_plan_passes_the_gates_and_two_bit_keys_breach_each_of_them_on_the_sample_of_the_scenarios()
 {
    good_and_bad(16);
}

#[test]
fn each_step_down_in_cache_precision_costs_more() {
    let reports = [KvPrecision::INT8, KvPrecision::INT4, KvPrecision::INT2]
        .map(|precision| measure(&uniform(precision), &jobs::text(), 1));
    let kl: Vec<f64> = reports.iter().map(|report| report.kl_mean).collect();
    assert!(kl.is_sorted_by(|finer, coarser| finer < coarser), "{kl:?}");
}

#[test]
fn the_report_has_exactly_the_promised_fields_and_does_not_depend_on_threads() {
    let (model, text) = (jobs::model(), jobs::text());
    let run = |threads: &str| {
        let output = jobs::engine([
            "verify",
            "--model",
            model.to_str().unwrap(),
            "--data",
            text.to_str().unwrap(),
            "--window",
            "128",
            "--samples",
            "3",
            "--json",
            "--threads",
            threads,
        ]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        output.stdout
    };
    let one = run("1");
    assert_eq!(one, run("2"));
    let report: Value = serde_json::from_slice(&one).unwrap();
    let mut fields: Vec<&str> = report
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    fields.sort_unstable();
    assert_eq!(
        fields,
        [
            "artifact_digest",
            "baseline_perplexity",
            "kl_mean",
            "kl_p99",
            "perplexity",
            "perplexity_increase_percent",
            "tokens",
            "top1_agreement_percent",
            "worst_slice"
        ]
    );
    let slice = report["worst_slice"]["name"].as_str().unwrap();
    assert!(slice.starts_with("position-"), "{slice}");
}

#[test]
fn rows_are_reported_by_their_task() {
    let Some(rows) = jobs::shared("data/eval-retrieval.jsonl") else {
        return;
    };
    let report = measure(&PrecisionPlan::precise(DecodeScheme::BF16), &rows, 4);
    let slice = report.worst_slice.unwrap().name;
    assert!(
        ["list", "listf", "agent", "needle"].contains(&slice.as_str()),
        "{slice}"
    );
}

#[test]
fn a_plan_that_needs_calibration_is_refused_without_an_artifact() {
    let (model, text) = (jobs::model(), jobs::text());
    let plan = serde_json::to_string(&jobs::plan()).unwrap();
    let output = jobs::engine([
        "verify",
        "--model",
        model.to_str().unwrap(),
        "--data",
        text.to_str().unwrap(),
        "--window",
        "128",
        "--plan",
        &plan,
    ]);
    assert!(jobs::error_line(&output).contains("give --artifact"));
}
