//! What the tests of `calibrate`, `verify` and artifacts share: where models and texts are, running the binary, and damage to files.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "each test program uses a part of it, and helpers of tests panic and print as tests do"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mixquant_crds::PrecisionPlan;
use mixquant_engine::calibrate;
use mixquant_engine::calibrate::quantisers::Quantiser;
use mixquant_engine::progress::Progress;

/// The model that ships with the repository.
pub(crate) fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

/// A plain text of about 3,000 tokens that every checkout has.
pub(crate) fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../LICENSE")
}

/// A file of the shared data beside the checkout, or nothing, with the reason printed.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../shared")
        .join(path);
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

/// The default plan for prompts of 64 tokens and more.
pub(crate) fn plan() -> PrecisionPlan {
    let mut plan = calibrate::default_plan();
    plan.prefill.min_prompt_tokens = 64;
    plan
}

/// Calibrates on two short windows of the text and verifies on one: the least that makes a whole artifact.
pub(crate) fn options(out: &Path, plan: PrecisionPlan) -> calibrate::Options {
    calibrate::Options {
        model: model(),
        data: text(),
        out: out.to_owned(),
        plan,
        samples: 2,
        sequence_length: 128,
        evaluation_data: None,
        evaluation_samples: Some(1),
        evaluation_sequence_length: 128,
        quantiser: Quantiser::Rtn,
        decode_quantiser: None,
        mix: None,
        round: 0,
        owner: None,
        remove: Vec::new(),
        expected_model: None,
        min_prompt_tokens: None,
    }
}

/// Calibrates; returns the artifact's folder.
pub(crate) fn artifact(options: &calibrate::Options) -> PathBuf {
    let report = calibrate::run(options, &Progress::hidden()).unwrap();
    options.out.join(report.artifact_digest.hex())
}

/// Arguments that calibrate on four windows of the text and verify on two others. clap refuses an option that is given twice, so `extra`
/// replaces what stands here.
pub(crate) fn calibrate(out: &Path, plan: &PrecisionPlan, extra: &[&str]) -> Vec<String> {
    let (model, text) = (model(), text());
    let plan = serde_json::to_string(plan).unwrap();
    let defaults = [
        ("--model", model.to_str().unwrap()),
        ("--data", text.to_str().unwrap()),
        ("--out", out.to_str().unwrap()),
        ("--plan", &plan),
        ("--samples", "4"),
        ("--sequence-length", "256"),
        ("--eval-samples", "2"),
    ];
    let kept = defaults
        .iter()
        .filter(|(name, _)| !extra.contains(name))
        .flat_map(|(name, value)| [*name, *value]);
    ["calibrate"]
        .into_iter()
        .chain(kept)
        .chain(extra.iter().copied())
        .map(str::to_owned)
        .collect()
}

/// Runs `mixquant-engine`.
pub(crate) fn engine<I: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = I>) -> Output {
    command()
        .args(arguments)
        .output()
        .expect("the binary can be started")
}

/// `mixquant-engine`, not yet started.
pub(crate) fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_mixquant-engine"))
}

/// The one line that a failed command says, after checking that it is one line and that nothing was printed as an answer.
pub(crate) fn error_line(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert!(!output.status.success(), "it should have failed: {text}");
    assert!(output.stdout.is_empty(), "a failure has no answer");
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    assert_eq!(
        lines.len(),
        1,
        "one line that starts with `error: ` in {text}"
    );
    assert_eq!(
        text.lines().last(),
        Some(lines[0]),
        "the error comes last in {text}"
    );
    lines[0].to_owned()
}

/// A copy of a folder of plain files and folders.
pub(crate) fn copy(from: &Path, to: &Path) {
    each_file(from, to, &|from, to| fs::copy(from, to).map(drop).unwrap());
}

/// The same files in another folder of the same disk: one that is changed must be removed first.
pub(crate) fn link(from: &Path, to: &Path) {
    each_file(from, to, &|from, to| fs::hard_link(from, to).unwrap());
}

fn each_file(from: &Path, to: &Path, put: &impl Fn(&Path, &Path)) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            each_file(&entry.path(), &target, put);
        } else {
            put(&entry.path(), &target);
        }
    }
}

/// All files below a folder, relative, sorted.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Changes one byte.
pub(crate) fn flip(path: &Path, offset: usize, mask: u8) {
    let mut bytes = fs::read(path).unwrap();
    bytes[offset] ^= mask;
    fs::write(path, bytes).unwrap();
}
