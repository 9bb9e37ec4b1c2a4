//! What is fuzzed: each function takes the bytes of one file that somebody else wrote and does with it what loading does.
//!
//! `cargo fuzz` targets and the mutation tests of every day call the same functions, on the same seeds.

use std::fs;
use std::path::{Path, PathBuf};

use mixquant_engine::artifact::manifest::Manifest;
use mixquant_engine::formats::Format;
use mixquant_engine::formats::gguf;
use mixquant_engine::model::Model;
use mixquant_engine::tokenizer::{Special, Tokenizer};
use safetensors::SafeTensors;

/// A name, the seed's path from the engine's folder, and what is done with the bytes.
pub type Entry = (&'static str, &'static [&'static str], fn(&[u8]));

/// All of them.
pub const ENTRIES: [Entry; 5] = [
    (
        "safetensors",
        &[
            "tests/goldens/llama/model.safetensors",
            "tests/goldens/model-gptq/model.safetensors",
            "tests/goldens/model-ct-w4a16-fused/model.safetensors",
        ],
        safetensors,
    ),
    (
        "gguf",
        &[
            "tests/goldens/kinds.gguf",
            "tests/goldens/model-gguf-llama/model.gguf",
            "tests/goldens/model-gguf-gemma2/model.gguf",
        ],
        gguf,
    ),
    (
        "quantization_config",
        &["tests/goldens/layouts.json"],
        quantization_config,
    ),
    (
        "tokenizer_json",
        &["../e2e/models/kube-llama-10m/tokenizer.json"],
        tokenizer_json,
    ),
    (
        "artifact_manifest",
        &["fuzz/seeds/manifest.json"],
        artifact_manifest,
    ),
];

/// A file of the engine's folder.
pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .find(|folder| folder.join("tests/goldens").is_dir())
        .expect("it is compiled inside the engine's folder")
        .join(name)
}

/// A folder of this process that is made once, with `file` in it.
fn folder_with(name: &str, file: &str, bytes: &[u8]) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("mixquant-fuzz-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).expect("temporary folders can be made");
    fs::write(folder.join(file), bytes).expect("temporary files can be written");
    folder
}

/// Loads the bytes as the weights of models that expect other layouts of them.
pub fn safetensors(bytes: &[u8]) {
    for model in ["llama", "model-gptq", "model-ct-w4a16-fused"] {
        let folder = folder_with(model, "model.safetensors", bytes);
        let config = path("tests/goldens").join(model).join("config.json");
        fs::copy(config, folder.join("config.json")).expect("temporary files can be written");
        let _ = Model::open(&folder);
    }
}

/// Loads the bytes as a model, and reads each tensor and the vocabulary whether it is one or not.
pub fn gguf(bytes: &[u8]) {
    let folder = folder_with("gguf", "model.gguf", bytes);
    let _ = Model::open(&folder);
    let Ok(header) = gguf::Header::parse(bytes) else {
        return;
    };
    let _ = gguf::config_json(&header);
    let _ = gguf::tokenizer_files(&header, bytes);
    for (_, info) in header.tensors() {
        if let [rows, columns] = info.shape[..] {
            let _ = info.kind.read(&bytes[info.range.clone()], [rows, columns]);
        }
    }
}

/// Parses the bytes as a map of configurations, or as one, and reads linears of every layout by them.
pub fn quantization_config(bytes: &[u8]) {
    let Ok(config) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return;
    };
    let file = fs::read(path("tests/goldens/layouts.safetensors")).expect("the goldens are there");
    let tensors = SafeTensors::deserialize(&file).expect("the goldens are whole");
    let one = [("ct-w4a16".to_owned(), config.clone())];
    let several = config.as_object().cloned().unwrap_or_default();
    for (case, config) in several.into_iter().chain(one) {
        if let Ok(format) = Format::parse(&config) {
            let _ = format.name();
            let _ = format.read(&tensors, &case, [24, 64]);
        }
    }
}

/// Opens the bytes as a tokenizer and takes a text there and back.
pub fn tokenizer_json(bytes: &[u8]) {
    let folder = folder_with("tokenizer", "tokenizer.json", bytes);
    if let Ok(tokenizer) = Tokenizer::open(&folder)
        && let Ok(ids) = tokenizer.encode("the pod's node\n\u{1f600} is gone", Special::Add)
    {
        let _ = tokenizer.decode(&ids);
    }
}

/// Parses the bytes as an artifact's manifest.
pub fn artifact_manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::parse(bytes) {
        let _ = (manifest.digest(), manifest.bytes());
        let again = Manifest::parse(&manifest.canonical());
        assert_eq!(
            again.as_ref(),
            Ok(&manifest),
            "what was parsed is written as it is read"
        );
    }
}
