//! `mixquant-engine calibrate` as a Job runs it: deterministic, one JSON object on stdout, its answer in the termination message, and clear refusals.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod jobs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use jobs::plan;
use mixquant_crds::names::EXIT_INPUT;
use mixquant_crds::{
    CalibrationReport, FailureReason, JobMessage, KvCacheMode, KvPrecision, PrecisionPlan,
    PrefillScheme,
};
use mixquant_engine::artifact::{Artifact, Check};

/// Calibrates on four windows of a text and verifies on two others.
fn calibrate(out: &Path, plan: &PrecisionPlan, extra: &[&str]) -> Output {
    jobs::engine(jobs::calibrate(out, plan, extra))
}

fn report(output: &Output) -> CalibrationReport {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON object")
}

#[test]
fn the_same_inputs_give_the_same_artifact_on_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let message = folder.path().join("message");
    let first = calibrate(
        &one,
        &plan(),
        &[
            "--threads",
            "1",
            "--termination-message",
            message.to_str().unwrap(),
        ],
    );
    let second = calibrate(&two, &plan(), &["--threads", "2"]);
    let again = calibrate(&one, &plan(), &[]);
    let (first_report, second_report) = (report(&first), report(&second));
    assert_eq!(first_report, second_report);
    assert_eq!(first_report, report(&again));

    assert_eq!(first_report.calibration_tokens, 4 * 256);
    assert_eq!(first_report.verify.tokens, 2 * 255);
    assert_eq!(
        first_report.verify.artifact_digest.as_ref(),
        Some(&first_report.artifact_digest)
    );
    let answer: JobMessage = serde_json::from_slice(&fs::read(message).unwrap()).unwrap();
    assert_eq!(answer, JobMessage::Calibrated(first_report.clone()));

    let directory = one.join(first_report.artifact_digest.hex());
    let expected = [
        "attention.json",
        "golden.json",
        "manifest.json",
        "plan.json",
        "probe.json",
        "ranges.json",
        "report.json",
        "weights/model-00001-of-00001.safetensors",
    ];
    assert_eq!(jobs::files(&directory), expected.map(PathBuf::from));
    assert_eq!(
        serde_json::from_slice::<CalibrationReport>(
            &fs::read(directory.join("report.json")).unwrap()
        )
        .unwrap(),
        first_report
    );
    let artifact = Artifact::open(&directory, Check::Digests).unwrap();
    assert_eq!(
        (artifact.plan(), artifact.digest()),
        (&plan(), &first_report.artifact_digest)
    );
    assert!(
        artifact
            .importance()
            .thresholds
            .iter()
            .flatten()
            .all(|threshold| threshold.is_finite() && *threshold > 0.0)
    );

    let log = String::from_utf8(first.stderr).unwrap();
    for line in ["calibrating: 4/4 (100 %)", "verifying: 2/2 (100 %)"] {
        assert!(log.lines().any(|logged| logged == line), "{line} in {log}");
    }
}

#[test]
fn another_plan_is_another_artifact_and_a_precise_prefill_has_no_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut precise = plan();
    precise.prefill.scheme = PrefillScheme::Precise;
    precise.kv_cache.mode = KvCacheMode::Uniform;
    precise.kv_cache.important = precise.kv_cache.default;
    let report = report(&calibrate(folder.path(), &precise, &[]));
    let directory = folder.path().join(report.artifact_digest.hex());
    assert_eq!(
        jobs::files(&directory),
        [
            "attention.json",
            "golden.json",
            "manifest.json",
            "plan.json",
            "probe.json",
            "ranges.json",
            "report.json"
        ]
        .map(PathBuf::from)
    );
    assert_eq!(precise.kv_cache.default, KvPrecision::INT4);
    assert!(report.verify.kl_mean > 0.0, "4-bit keys leave a trace");
}

#[test]
fn every_quantiser_of_the_prefill_copy_gives_one_artifact_on_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let plain = report(&calibrate(folder.path(), &plan(), &[]));
    for quantiser in ["smoothquant", "gptq"] {
        let made = |threads: &str| {
            let extra = ["--quantiser", quantiser, "--threads", threads];
            report(&calibrate(folder.path(), &plan(), &extra))
        };
        let (one, two) = (made("1"), made("2"));
        assert_eq!(one, two, "{quantiser}");
        assert_ne!(one.artifact_digest, plain.artifact_digest, "{quantiser}");
        // Scales that inputs are divided by must really be applied: without them nothing like the model is left.
        assert!(
            one.verify.kl_mean < 1.5 * plain.verify.kl_mean,
            "{quantiser}: {:?} {:?}",
            one.verify,
            plain.verify
        );
    }
}

#[test]
fn a_quantiser_that_cannot_make_the_prefill_copy_is_refused() {
    let wanted = ["the quantiser lut cannot make W8A8", "it makes LUT4"];
    refused(&["--quantiser", "lut"], FailureReason::PlanInvalid, &wanted);
    refused(
        &["--mix", "code=1"],
        FailureReason::DataInvalid,
        &["has no texts of the kind code"],
    );
}

/// Calibrates with `extra`, which must end in one clear line with all of `wanted`, the same failure for the operator, and nothing left.
fn refused(extra: &[&str], reason: FailureReason, wanted: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (out, message) = (folder.path().join("out"), folder.path().join("message"));
    let extra = [extra, &["--termination-message", message.to_str().unwrap()]].concat();
    let output = jobs::engine(jobs::calibrate(&out, &plan(), &extra));
    let line = jobs::error_line(&output);
    assert!(
        wanted.iter().all(|part| line.contains(part)),
        "{extra:?}: {line}"
    );
    assert_eq!(output.status.code(), Some(EXIT_INPUT), "{line}");
    let JobMessage::Failed(failure) = serde_json::from_slice(&fs::read(&message).unwrap()).unwrap()
    else {
        panic!("{extra:?} did not fail")
    };
    assert_eq!(
        (failure.reason, format!("error: {}", failure.message)),
        (reason, line)
    );
    assert!(
        !out.exists() || jobs::files(&out) == [Path::new(".lock")],
        "{extra:?} left {:?}",
        jobs::files(&out)
    );
}

#[test]
fn bad_data_is_one_clear_line_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    for (data, wanted) in [
        (write("empty.jsonl", b""), "empty.jsonl is empty"),
        (
            write("broken.jsonl", b"{\"text\": \"a b c d\"}\n{\"text\": \n"),
            "broken.jsonl line 2: not JSON",
        ),
        (
            write("shape.jsonl", b"{\"content\": \"a b c d\"}\n"),
            "shape.jsonl line 1: has none of `text`",
        ),
        (
            write("binary.txt", b"abc\n\xff\xfe"),
            "binary.txt is not UTF-8 at line 2",
        ),
        (
            write("short.txt", b"a few words only"),
            "short.txt is too short for one window of 256 tokens",
        ),
        ("/nonexistent".to_owned(), "/nonexistent"),
    ] {
        refused(&["--data", &data], FailureReason::DataInvalid, &[wanted]);
    }
    let (text, short) = (
        jobs::text(),
        write("short.jsonl", b"{\"text\": \"a few words only\"}\n"),
    );
    let text = text.to_str().unwrap();
    let extra = ["--data", &short, "--samples", "1", "--eval-data", text];
    refused(
        &extra,
        FailureReason::DataInvalid,
        &["no calibration text has 69 tokens"],
    );
    refused(
        &["--eval-data", text],
        FailureReason::DataInvalid,
        &["holds the calibration texts"],
    );
}

#[test]
fn numbers_that_cannot_work_are_one_clear_line_with_those_that_can() {
    let cases: [(&[&str], &[&str]); 6] = [
        (&["--samples", "10000"], &["10000 were asked for", "only"]),
        (&["--samples", "0"], &["0 samples"]),
        (&["--eval-samples", "10000"], &["10000 were asked for"]),
        (
            &["--sequence-length", "1025"],
            &["--sequence-length 1025", "1024"],
        ),
        (&["--sequence-length", "1"], &["1 tokens predicts nothing"]),
        (&["--threads", "0"], &["--threads"]),
    ];
    for (extra, wanted) in cases {
        let reason = if extra[0] == "--threads" {
            FailureReason::PlanInvalid
        } else {
            FailureReason::DataInvalid
        };
        refused(extra, reason, wanted);
    }
}

#[test]
fn another_model_than_the_expected_one_is_refused_with_both_digests() {
    let absent = format!("sha256:{}", "0".repeat(64));
    let wanted = [absent.as_str(), "was expected", "the model is sha256:"];
    refused(
        &["--expect-model-digest", &absent],
        FailureReason::DigestMismatch,
        &wanted,
    );
    let folder = tempfile::tempdir().unwrap();
    refused(
        &["--model", folder.path().to_str().unwrap()],
        FailureReason::ModelInvalid,
        &["config.json"],
    );
}

#[test]
fn inspect_says_what_a_model_and_an_artifact_are() {
    let inspect = |directory: &Path, extra: &[&str]| {
        let output = jobs::engine([&["inspect", directory.to_str().unwrap()], extra].concat());
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let facts = |directory: &Path| {
        serde_json::from_str::<serde_json::Value>(&inspect(directory, &["--json"])).unwrap()
    };
    let model = facts(&jobs::model());
    assert_eq!(
        (&model["kind"], &model["architecture"]),
        (&"model".into(), &"LlamaForCausalLM".into())
    );
    assert_eq!(
        (&model["parameters"], &model["layers"]),
        (&12_587_904.into(), &6.into())
    );
    assert!(inspect(&jobs::model(), &[]).contains("contextTokens  1024\n"));

    let out = tempfile::tempdir().unwrap();
    let report = report(&calibrate(
        out.path(),
        &plan(),
        &["--samples", "1", "--eval-samples", "1"],
    ));
    let directory = out.path().join(report.artifact_digest.hex());
    let artifact = facts(&directory);
    assert_eq!(
        (&artifact["kind"], &artifact["digest"]),
        (&"artifact".into(), &report.artifact_digest.as_str().into())
    );
    assert_eq!(
        (&artifact["modelDigest"], &model["digest"]),
        (
            &report.model_digest.as_str().into(),
            &report.model_digest.as_str().into()
        )
    );
    assert_eq!(artifact["plan"]["prefill"]["scheme"], "W8A8");
    assert_eq!(artifact["report"]["calibration_tokens"], 256);
    assert!(
        inspect(&directory, &[]).contains("report.verify.tokens "),
        "the table joins names with dots"
    );

    jobs::flip(&directory.join("plan.json"), 10, 1);
    assert!(
        jobs::error_line(&jobs::engine(["inspect", directory.to_str().unwrap()]))
            .contains("plan.json")
    );
}
