//! The forward against numbers that `transformers` computed in FP32 (recipe: `e2e/data/README.md`).
//!
//! The model that ships is compared always, with the rows that ship. A second model, whole files and more prompts need `shared/` beside the
//! repository; what cannot be compared without it is named.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test panics where it fails and prints what it measured"
)]

use std::path::{Path, PathBuf};

use mixquant_crds::PrecisionPlan;
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};
use mixquant_engine::tokenizer::{Special, Tokenizer};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The model that ships.
const MODEL: &str = "kube-llama-10m";
/// Logits are compared to this; where the two best are nearer, either may win.
const LOGIT_TOLERANCE: f32 = 1e-3;

/// A folder with `models/` and `data/` (with `data/reference/`): what ships with the repository.
fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e")
}

/// The same, but with more in it; `None` with the reason printed.
fn shared() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    if path.join("data/reference").is_dir() {
        return Some(path);
    }
    println!(
        "{} is not there: only what ships is compared",
        path.display()
    );
    None
}

/// The models that can be compared here, each with its folder.
fn models() -> Vec<(&'static str, PathBuf)> {
    let mut models = vec![(MODEL, shipped())];
    models.extend(shared().map(|shared| ("stories260k", shared)));
    models
}

fn baseline(shared: &Path, name: &str) -> Model {
    let mut model = Model::open(&shared.join("models").join(name)).unwrap();
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    model
}

fn read<T: DeserializeOwned>(shared: &Path, file: &str) -> T {
    serde_json::from_str(
        &std::fs::read_to_string(shared.join("data/reference").join(file)).unwrap(),
    )
    .unwrap()
}

fn rows<T: DeserializeOwned>(shared: &Path, file: &str) -> Vec<T> {
    let text = std::fs::read_to_string(shared.join("data").join(file)).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[derive(Deserialize)]
struct Items<T> {
    items: Vec<T>,
}

#[derive(Deserialize)]
struct Greedy {
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    min_top2_gap: f32,
    min_gap_at: usize,
}

#[derive(Deserialize)]
struct Logits {
    prompt_ids: Vec<u32>,
    top5: Vec<Top>,
    logsumexp: f64,
}

#[derive(Deserialize)]
struct Top {
    id: u32,
    logit: f32,
}

#[derive(Deserialize)]
struct Perplexity {
    window: usize,
    n_chunks: usize,
    ppl: f64,
    chunk_nll_sum: Vec<f64>,
}

#[derive(Deserialize)]
struct Question {
    prompt: String,
    answer: String,
    #[serde(alias = "max_tokens")]
    max_new_tokens: usize,
    #[serde(default)]
    stop: Vec<String>,
}

#[derive(Deserialize)]
struct Answer {
    output_ids: Vec<u32>,
    correct: bool,
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .unwrap();
    u32::try_from(best.0).unwrap()
}

/// Greedy tokens after a prompt, the end token included.
fn generate(model: &Model, prompt: &[u32], limit: usize) -> Vec<u32> {
    let mut cache = model.new_cache(prompt.len() + limit);
    let mut workspace = Workspace::default();
    let mut next = prompt.to_vec();
    let mut output = Vec::new();
    while output.len() < limit {
        let chunk = Chunk {
            tokens: &next,
            cache: &mut cache,
            logits: LogitRows::Last,
        };
        let token = argmax(
            model
                .forward(Pass::Precise, &mut [chunk], &mut workspace, None)
                .unwrap(),
        );
        output.push(token);
        if model.config().eos_token_ids.contains(&token) {
            break;
        }
        next = vec![token];
    }
    output
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    largest
        + logits
            .iter()
            .map(|x| (f64::from(*x) - largest).exp())
            .sum::<f64>()
            .ln()
}

#[test]
fn greedy_ids_equal_the_reference() {
    for (name, folder) in models() {
        let model = baseline(&folder, name);
        let reference: Items<Greedy> = read(&folder, &format!("{name}-greedy.json"));
        assert_eq!(reference.items.len(), 10);
        for item in &reference.items {
            let output = generate(&model, &item.prompt_ids, item.output_ids.len());
            let same = if item.min_top2_gap < LOGIT_TOLERANCE {
                item.min_gap_at
            } else {
                item.output_ids.len()
            };
            assert_eq!(
                output[..same],
                item.output_ids[..same],
                "{name}: {:?}",
                item.prompt_ids
            );
        }
    }
}

#[test]
fn the_five_largest_logits_equal_the_reference() {
    let mut worst = 0.0_f32;
    for (name, folder) in models() {
        let model = baseline(&folder, name);
        let reference: Items<Logits> = read(&folder, &format!("{name}-logits.json"));
        for item in &reference.items {
            let mut cache = model.new_cache(item.prompt_ids.len());
            let mut workspace = Workspace::default();
            let chunk = Chunk {
                tokens: &item.prompt_ids,
                cache: &mut cache,
                logits: LogitRows::Last,
            };
            let logits = model
                .forward(Pass::Precise, &mut [chunk], &mut workspace, None)
                .unwrap();
            assert!((log_sum_exp(logits) - item.logsumexp).abs() < 1e-3);
            for top in &item.top5 {
                let difference = (logits[usize::try_from(top.id).unwrap()] - top.logit).abs();
                worst = worst.max(difference);
                assert!(
                    difference < LOGIT_TOLERANCE,
                    "{name}: token {} differs by {difference}",
                    top.id
                );
            }
        }
    }
    println!("largest difference of a logit: {worst}");
}

/// Sums of negative log likelihoods of the first `windows` windows.
fn window_nll(folder: &Path, name: &str, file: &str, window: usize, windows: usize) -> Vec<f64> {
    let model = baseline(folder, name);
    let tokenizer = Tokenizer::open(&folder.join("models").join(name)).unwrap();
    let text = std::fs::read_to_string(folder.join("data").join(file)).unwrap();
    let ids = tokenizer.encode(&text, Special::None).unwrap();
    let vocabulary = model.config().vocab_size;
    let mut workspace = Workspace::default();
    let targets = ids.chunks_exact(window - 1).take(windows);
    targets
        .map(|targets| {
            let mut input = vec![tokenizer.bos().unwrap()];
            input.extend(&targets[..targets.len() - 1]);
            let mut cache = model.new_cache(input.len());
            let chunk = Chunk {
                tokens: &input,
                cache: &mut cache,
                logits: LogitRows::All,
            };
            let logits = model
                .forward(Pass::Precise, &mut [chunk], &mut workspace, None)
                .unwrap();
            let nll = |(row, target): (&[f32], &u32)| {
                log_sum_exp(row) - f64::from(row[usize::try_from(*target).unwrap()])
            };
            logits.chunks_exact(vocabulary).zip(targets).map(nll).sum()
        })
        .collect()
}

/// Perplexity within 0.01 %, which is the mean log likelihood within 1e-4 nats.
fn check_perplexity(folder: &Path, name: &str, reference: &str, file: &str, windows: usize) {
    let reference: Perplexity = read(folder, reference);
    let windows = windows.min(reference.n_chunks);
    let sums = window_nll(folder, name, file, reference.window, windows);
    assert_eq!(sums.len(), windows);
    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    let tokens = (windows * (reference.window - 1)) as f64;
    let mean = sums.iter().sum::<f64>() / tokens;
    let expected = reference.chunk_nll_sum[..windows].iter().sum::<f64>() / tokens;
    println!(
        "{name}, {windows} windows: perplexity {} (reference {}, whole file {})",
        mean.exp(),
        expected.exp(),
        reference.ppl
    );
    assert!(
        (mean - expected).abs() < 1e-4,
        "{mean} nats, reference {expected}"
    );
}

#[test]
fn perplexity_of_the_first_windows_equals_the_reference() {
    check_perplexity(
        &shipped(),
        MODEL,
        "kube-llama-10m-eval-ppl.json",
        "evaluation.txt",
        8,
    );
    let Some(shared) = shared() else { return };
    check_perplexity(
        &shared,
        "stories260k",
        "stories260k-eval-ppl-stories.json",
        "eval-ppl-stories.txt",
        8,
    );
}

#[test]
#[ignore = "long; make test-long runs it"]
fn perplexity_of_the_whole_files_equals_the_reference() {
    let Some(shared) = shared() else { return };
    check_perplexity(
        &shared,
        MODEL,
        "kube-llama-10m-eval-ppl.json",
        "eval-ppl.txt",
        usize::MAX,
    );
    check_perplexity(
        &shared,
        "stories260k",
        "stories260k-eval-ppl-stories.json",
        "eval-ppl-stories.txt",
        usize::MAX,
    );
    check_perplexity(
        &shared,
        "stories260k",
        "stories260k-eval-ppl.json",
        "eval-ppl.txt",
        usize::MAX,
    );
}

/// Greedy answers cut at the first stop string, compared exactly. Returns how many are right, and how many rows differ from the reference.
fn answers(
    shared: &Path,
    file: &str,
    reference: &str,
    every: usize,
    stop: &[&str],
) -> (usize, usize, usize) {
    let model = baseline(shared, MODEL);
    let tokenizer = Tokenizer::open(&shared.join("models").join(MODEL)).unwrap();
    let prompts: Vec<Question> = rows(shared, file);
    let reference: Items<Answer> = read(shared, reference);
    let (mut right, mut different, mut total) = (0, 0, 0);
    for (prompt, expected) in prompts.iter().zip(&reference.items).step_by(every) {
        let ids = tokenizer.encode(&prompt.prompt, Special::Add).unwrap();
        let output = generate(&model, &ids, prompt.max_new_tokens);
        let text = tokenizer.decode_all(&output);
        let stops = prompt
            .stop
            .iter()
            .map(String::as_str)
            .chain(stop.iter().copied());
        let end = stops
            .filter_map(|stop| text.find(stop))
            .min()
            .unwrap_or(text.len());
        let correct = text[..end].trim() == prompt.answer;
        total += 1;
        right += usize::from(correct);
        let length = output.len().min(expected.output_ids.len());
        different += usize::from(
            correct != expected.correct || output[..length] != expected.output_ids[..length],
        );
    }
    println!("{file}: {right} of {total} right, {different} rows other than the reference");
    (right, different, total)
}

#[test]
fn answers_of_a_sample_equal_the_reference() {
    let Some(shared) = shared() else { return };
    let (_, different, _) = answers(
        &shared,
        "eval-retrieval.jsonl",
        "kube-llama-10m-eval-retrieval.json",
        17,
        &[],
    );
    assert_eq!(different, 0);
    let stop = ["\n", "<|end|>", "<|eos|>"];
    let (right, different, total) = answers(
        &shared,
        "agentic-prompts.jsonl",
        "kube-llama-10m-agentic-prompts.json",
        17,
        &stop,
    );
    assert_eq!((right, different), (total, 0));
}

#[test]
#[ignore = "long; make test-long runs it"]
fn answers_of_all_prompts_equal_the_reference() {
    let Some(shared) = shared() else { return };
    let (right, _, total) = answers(
        &shared,
        "eval-retrieval.jsonl",
        "kube-llama-10m-eval-retrieval.json",
        1,
        &[],
    );
    assert_eq!(
        (right, total),
        (191, 200),
        "95.5 % of the retrieval prompts"
    );
    let stop = ["\n", "<|end|>", "<|eos|>"];
    let (right, _, total) = answers(
        &shared,
        "agentic-prompts.jsonl",
        "kube-llama-10m-agentic-prompts.json",
        1,
        &stop,
    );
    assert_eq!((right, total), (100, 100));
}
