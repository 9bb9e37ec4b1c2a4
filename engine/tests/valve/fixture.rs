//! Models with and without damage, and prompts.

use std::fs;
use std::path::{Path, PathBuf};

use mixquant_crds::PrecisionPlan;
use mixquant_engine::calibrate::default_plan;
use mixquant_engine::model::{
    Importance, LogitRows, Model, QuantisedLinear, QuantisedLinears, Workspace,
};
use mixquant_engine::quant::Codes;
use mixquant_engine::tokenizer::{Special, Tokenizer};
use mixquant_engine::valve::read::{Reading, Settings, Valve};

/// Prompts of so many tokens and more are quantised.
pub(crate) const THRESHOLD: u32 = 64;

pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

/// The default plan with a threshold that test prompts reach.
pub(crate) fn plan() -> PrecisionPlan {
    let mut plan = default_plan();
    plan.prefill.min_prompt_tokens = THRESHOLD;
    plan
}

/// The demo model with its W8A8 copy, each tensor of which `edit` may damage.
pub(crate) fn model_with(edit: impl Fn(&mut QuantisedLinear)) -> Model {
    attached(Model::open(&directory()).unwrap(), edit)
}

/// A model with its W8A8 copy, each tensor of which `edit` may damage.
pub(crate) fn attached(mut model: Model, edit: impl Fn(&mut QuantisedLinear)) -> Model {
    let mut tensors = model.quantise_linears().into_tensors();
    tensors.iter_mut().for_each(edit);
    let config = model.config();
    let thresholds = vec![vec![2.0; config.num_key_value_heads]; config.num_hidden_layers];
    let copy = QuantisedLinears::from_tensors(tensors).unwrap();
    model
        .attach(copy, Some(Importance { thresholds }), plan())
        .unwrap();
    model
}

pub(crate) fn model() -> Model {
    model_with(|_| ())
}

/// The same model and cache without a quantised prefill: what an answer must be after a fallback.
pub(crate) fn precise() -> Model {
    let mut model = model();
    let mut plan = plan();
    plan.prefill.min_prompt_tokens = u32::MAX;
    model.set_plan(plan).unwrap();
    model
}

/// Reverses the signs of a tensor.
pub(crate) fn invert(tensor: &mut QuantisedLinear) {
    let Codes::Int8(codes) = &mut tensor.weight.codes else {
        panic!("the copy is INT8");
    };
    for code in codes {
        *code = -*code;
    }
}

/// Ids that look like a text's.
pub(crate) fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| 300 + at * 7 % 1000).collect()
}

pub(crate) fn settings(shadow_audit_percent: f64) -> Settings {
    Settings {
        shadow_audit_percent,
        ..Settings::default()
    }
}

/// Reads with a fresh valve.
pub(crate) fn read(
    model: &Model,
    prompt: &[u32],
    rows: LogitRows,
    settings: Settings,
) -> (Reading, Workspace) {
    let mut workspace = Workspace::default();
    let capacity = prompt.len() + 8;
    let reading = Valve::new(settings)
        .read(model, (prompt, rows), capacity, &mut workspace, None)
        .unwrap();
    (reading, workspace)
}

/// Tokens of a passage of plain text.
const PASSAGE: usize = 128;

/// Chat and retrieval prompts as clients send them and passages of plain text, at most `most` of each file: those beside the checkout, or the
/// repository's.
pub(crate) fn traffic(tokenizer: &Tokenizer, most: usize) -> Vec<Vec<u32>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shared = root.join("../../shared/data");
    let folder = if shared.exists() {
        shared
    } else {
        root.join("../e2e/data")
    };
    let mut prompts = Vec::new();
    for name in [
        "agentic-prompts.jsonl",
        "eval-retrieval.jsonl",
        "calibration.jsonl",
    ] {
        let Ok(text) = fs::read_to_string(folder.join(name)) else {
            println!("skipped: {name} is not in {}", folder.display());
            continue;
        };
        let rows = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let prompt = |row: serde_json::Value| {
            if let Some(messages) = row.get("messages") {
                let messages: Vec<_> = serde_json::from_value(messages.clone()).unwrap();
                return tokenizer.encode_chat(&messages).unwrap();
            }
            let text = row.get("prompt").or_else(|| row.get("text")).unwrap();
            tokenizer
                .encode(text.as_str().unwrap(), Special::Add)
                .unwrap()
        };
        prompts.extend(
            rows.map(prompt)
                .filter(|ids| ids.len() >= THRESHOLD as usize)
                .take(most),
        );
    }
    let texts =
        ["eval-ppl.txt", "evaluation.txt"].map(|name| fs::read_to_string(folder.join(name)));
    for text in texts.into_iter().flatten() {
        let ids = tokenizer.encode(&text, Special::None).unwrap();
        let passages = ids.chunks_exact(PASSAGE - 1).take(most);
        prompts.extend(passages.map(|passage| [&[tokenizer.bos().unwrap()], passage].concat()));
    }
    prompts
}

/// Copies the demo model and overwrites the embedding row of one token with NaN.
pub(crate) fn nan_embedding(folder: &Path, token: usize) {
    for entry in fs::read_dir(directory()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let name = "model.embed_tokens.weight";
    let json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    let index = json(&fs::read(folder.join("model.safetensors.index.json")).unwrap());
    let shard = folder.join(index["weight_map"][name].as_str().unwrap());
    let mut bytes = fs::read(&shard).unwrap();
    let header = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let number = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let entry = json(&bytes[8..header])[name].clone();
    let row = 2 * number(&entry["shape"][1]);
    let at = header + number(&entry["data_offsets"][0]) + token * row;
    for value in bytes[at..at + row].chunks_exact_mut(2) {
        value.copy_from_slice(&0x7FC0_u16.to_le_bytes());
    }
    fs::write(shard, bytes).unwrap();
}
