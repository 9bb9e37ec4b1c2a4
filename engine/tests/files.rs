//! A pipe, a device or a folder in place of any file that the engine reads: refused by name, never waited for and never read without end.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use mixquant_engine::advise::device::Device;
use mixquant_engine::artifact::store::Draft;
use mixquant_engine::artifact::weights;
use mixquant_engine::calibrate::default_plan;
use mixquant_engine::dataset::Dataset;
use mixquant_engine::inspect;
use mixquant_engine::job::parse_plan;
use mixquant_engine::model::{Importance, Model, QuantisedLinear, QuantisedLinears};
use mixquant_engine::quality::tasks;
use mixquant_engine::tokenizer::Tokenizer;

/// Only a reader that waits for ever takes so long.
const PATIENCE: Duration = Duration::from_mins(1);

/// What is wrong with a file, by what stands in its place.
const PLACED: [fn(&Path); 3] = [
    |path| {
        let made = Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    },
    |path| symlink("/dev/zero", path).unwrap(),
    |path| fs::create_dir(path).unwrap(),
];

/// Puts each wrong thing in place of `name` in a copy of `folder`, and expects that `read` refuses it and names it.
fn refused<T: 'static>(folder: &Path, name: &str, read: fn(&Path) -> Result<T, String>) {
    for place in PLACED {
        let root = tempfile::tempdir().unwrap();
        // An artifact's folder is named by its digest.
        let copy = root.path().join(folder.file_name().unwrap());
        copy_folder(folder, &copy);
        let path = copy.join(name);
        if path.exists() {
            fs::remove_file(&path).unwrap();
        }
        place(&path);
        let (sender, receiver) = mpsc::channel();
        let whole = copy.clone();
        thread::spawn(move || sender.send(read(&whole).err()));
        let error = receiver.recv_timeout(PATIENCE);
        let error = error.unwrap_or_else(|_| panic!("{name}: the reader waits"));
        let error = error.unwrap_or_else(|| panic!("{name}: it was read"));
        let file = Path::new(name).file_name().unwrap().to_str().unwrap();
        assert!(
            error.contains(file) && !error.contains('\n'),
            "{name}: {error}"
        );
        // Links in an artifact are refused as such.
        let named = error.contains("not a ") || error.contains("symbolic link");
        assert!(named, "{name}: {error}");
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &copy);
        } else {
            fs::copy(&path, &copy).unwrap();
        }
    }
}

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/goldens")
        .join(name)
}

fn open_model(folder: &Path) -> Result<(), String> {
    Model::open(folder).map(drop).map_err(|error| error.message)
}

fn open_tokenizer(folder: &Path) -> Result<(), String> {
    Tokenizer::open(folder)
        .map(drop)
        .map_err(|error| error.message)
}

fn describe(folder: &Path) -> Result<(), String> {
    inspect::describe(folder)
        .map(drop)
        .map_err(|error| error.message)
}

#[test]
fn files_of_a_model() {
    for name in [
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
    ] {
        refused(&goldens("llama"), name, open_model);
    }
    refused(&goldens("model-gguf-llama"), "model.gguf", open_model);
}

#[test]
fn files_of_a_tokenizer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m");
    let small = tempfile::tempdir().unwrap();
    fs::copy(
        folder.join("tokenizer.json"),
        small.path().join("tokenizer.json"),
    )
    .unwrap();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        refused(small.path(), name, open_tokenizer);
    }
}

#[test]
fn files_of_an_artifact() {
    let rows: Vec<f32> = (0..12u8).map(|value| f32::from(value) - 5.5).collect();
    let linear = QuantisedLinear::from_rows("model.layers.0.self_attn.q_proj".into(), &rows, 3, 4);
    let linears = QuantisedLinears::from_tensors(vec![linear]).unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut draft = Draft::new(root.path(), 1000).unwrap();
    let importance = Importance {
        thresholds: vec![vec![0.25]],
    };
    let weights = weights::encode(&weights::shards(&linears)[0]);
    for (name, content) in [
        ("weights/model-0.safetensors", weights),
        ("attention.json", serde_json::to_vec(&importance).unwrap()),
        ("plan.json", serde_json::to_vec(&default_plan()).unwrap()),
    ] {
        draft.write(name, &content).unwrap();
    }
    let model = mixquant_crds::Digest::of_bytes(b"model");
    let published = draft.publish(model).unwrap();
    assert_eq!(describe(&published.path), Ok(()));
    refused(&published.path, "report.json", describe);
    for name in [
        "manifest.json",
        "plan.json",
        "attention.json",
        "weights/model-0.safetensors",
    ] {
        refused(&published.path, name, describe);
    }
}

#[test]
fn files_that_an_option_names() {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), "data.jsonl", |folder| {
        Dataset::read(&folder.join("data.jsonl")).map_err(|error| error.message)
    });
    refused(folder.path(), "tasks.jsonl", |folder| {
        tasks::read(&folder.join("tasks.jsonl"), None).map_err(|error| error.message)
    });
    refused(folder.path(), "device.yaml", |folder| {
        Device::read(&folder.join("device.yaml")).map_err(|error| error.message)
    });
    refused(folder.path(), "plan.json", |folder| {
        parse_plan(folder.join("plan.json").to_str().unwrap())
    });
}
