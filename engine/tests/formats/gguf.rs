//! GGUF files written by gguf-py: every kind's weights, whole models, and vocabularies rebuilt from them.

use std::fs;

use mixquant_engine::formats::gguf::Header;
use mixquant_engine::inspect::{Description, describe};
use mixquant_engine::model::Model;
use mixquant_engine::tokenizer::{Special, Tokenizer};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::families::compare;
use crate::golden;

#[derive(Deserialize)]
struct Golden {
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
}

#[test]
fn every_kind_of_block_reads_as_gguf_py_reads_it() {
    let file = fs::read(golden("kinds.gguf")).unwrap();
    let header = Header::parse(&file).unwrap();
    let expected = fs::read(golden("kinds.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let mut quantised = 0;
    for (name, info) in header.tensors() {
        let [rows, columns] = info.shape[..] else {
            panic!("{name} is no matrix")
        };
        let Some(weight) = info.kind.read(&file[info.range.clone()], [rows, columns]) else {
            continue;
        };
        weight.check(name).unwrap();
        let expected = expected.tensor(name).unwrap();
        let expected = expected.data().as_chunks::<4>().0;
        assert_eq!(expected.len(), rows * columns, "{name}");
        let mut row = vec![0.0; columns];
        for (index, expected) in expected.chunks_exact(columns).enumerate() {
            weight.dequantise_row(index, &mut row);
            for (own, theirs) in row.iter().zip(expected) {
                let theirs = f32::from_le_bytes(*theirs);
                // A minimum is kept as a zero, so the last bits of both differ.
                assert!(
                    (own - theirs).abs() <= 1e-6 * theirs.abs().max(1.0),
                    "{name}: {own} {theirs}"
                );
            }
        }
        quantised += 1;
    }
    assert_eq!(quantised, 8);
}

#[test]
fn gguf_models_answer_as_transformers_does_with_their_weights() {
    for model in ["model-gguf-llama", "model-gguf-gemma2"] {
        compare(&golden(model), 1e-4);
    }
}

#[test]
fn a_gguf_file_and_its_folder_are_the_same_model() {
    let folder = Model::open(&golden("model-gguf-llama")).unwrap();
    let file = Model::open(&golden("model-gguf-llama/model.gguf")).unwrap();
    assert_eq!(folder.digest(), file.digest());
    let Description::Model(facts) = describe(&golden("model-gguf-llama")).unwrap() else {
        panic!("it is a model")
    };
    assert_eq!(facts.format, "gguf F16, F32, Q4_0, Q8_0");
    assert_eq!(
        facts.bytes,
        fs::metadata(golden("model-gguf-llama/model.gguf"))
            .unwrap()
            .len()
    );
}

#[test]
fn vocabularies_are_rebuilt_with_the_ids_of_their_own_tokenizers() {
    for model in ["model-gguf-llama", "model-gguf-gemma2"] {
        let golden_file = fs::read_to_string(golden(model).join("golden.json")).unwrap();
        let expected: Golden = serde_json::from_str(&golden_file).unwrap();
        let tokenizer = Tokenizer::open(&golden(model)).unwrap();
        assert!(expected.texts.len() >= 5);
        for Text { text, ids } in expected.texts {
            let own = tokenizer.encode(&text, Special::None).unwrap();
            assert_eq!(own, ids, "{model}: {text:?}");
            assert_eq!(tokenizer.decode_all(&own), text, "{model}");
        }
    }
}

#[test]
fn files_that_cannot_be_loaded_say_why() {
    let whole = fs::read(golden("model-gguf-llama/model.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let message = Model::open(folder.path()).unwrap_err().message;
        assert!(!message.contains('\n'), "{message}");
        message
    };
    let replaced = |from: &str, to: &str| {
        let at = whole
            .windows(from.len())
            .position(|part| part == from.as_bytes());
        let mut bytes = whole.clone();
        bytes[at.unwrap()..][..from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    assert!(
        error(&whole[..whole.len() - 1]).starts_with("model.gguf: ends before the data of tensor")
    );
    assert!(error(&whole[..100]).starts_with("model.gguf: ends inside its header"));
    let other = error(&replaced(
        "general.architecture\u{8}\0\0\0\u{5}\0\0\0\0\0\0\0llama",
        "general.architecture\u{8}\0\0\0\u{5}\0\0\0\0\0\0\0mamba",
    ));
    assert!(
        other.contains(
            "has the architecture mamba, which is not supported: supported are llama, qwen2"
        ),
        "{other}"
    );
    let missing = error(&replaced("blk.1.ffn_up.weight", "blk.7.ffn_up.weight"));
    assert!(
        missing.contains("tensor model.layers.1.mlp.up_proj.weight is missing"),
        "{missing}"
    );
    let second = folder.path().join("second.gguf");
    fs::write(&second, &whole).unwrap();
    fs::write(&path, &whole).unwrap();
    assert!(
        Model::open(folder.path())
            .unwrap_err()
            .message
            .contains("has 2 GGUF files: point at the file itself")
    );
    assert!(Model::open(&second).is_ok());
}
