//! Model directories that cannot be used: each ends in one line that names the thing and the fix, before anything is allocated for it.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::fs;
use std::path::{Path, PathBuf};

use mixquant_crds::FailureReason;
use mixquant_engine::model::Model;
use serde_json::{Value, json};

fn original() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

/// A copy of the shipped model, to be damaged.
struct Copy(tempfile::TempDir);

impl Copy {
    fn new() -> Self {
        let copy = Self(tempfile::tempdir().unwrap());
        for entry in fs::read_dir(original()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.path(entry.file_name().to_str().unwrap())).unwrap();
        }
        copy
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut value =
            serde_json::from_str(&fs::read_to_string(self.path(file)).unwrap()).unwrap();
        change(&mut value);
        fs::write(self.path(file), value.to_string()).unwrap();
    }

    fn error(&self) -> String {
        let Err(error) = Model::open(self.0.path()) else {
            panic!("it opens")
        };
        assert_eq!(error.reason, FailureReason::ModelInvalid);
        assert!(!error.message.contains('\n'), "one line: {error}");
        error.message
    }
}

#[test]
fn the_copy_opens_and_has_the_same_digest() {
    let copy = Copy::new();
    assert_eq!(
        Model::open(copy.0.path()).unwrap().digest(),
        Model::open(&original()).unwrap().digest()
    );
    fs::write(copy.path("generation_config.json"), "{}").unwrap();
    assert_ne!(
        Model::open(copy.0.path()).unwrap().digest(),
        Model::open(&original()).unwrap().digest()
    );
}

/// A field of `config.json`, a value (JSON) that cannot work, and what the error says.
const CASES: &[(&str, &str, &str)] = &[
    ("num_attention_heads", "0", "num_attention_heads is 0"),
    ("num_key_value_heads", "0", "num_key_value_heads is 0"),
    (
        "num_key_value_heads",
        "4",
        "num_key_value_heads 4 does not divide num_attention_heads 6",
    ),
    (
        "num_hidden_layers",
        "1000000000",
        "num_hidden_layers is 1000000000: at most",
    ),
    ("num_hidden_layers", "7", "model.layers.6."),
    (
        "num_hidden_layers",
        "18446744073709551615",
        "num_hidden_layers is",
    ),
    ("num_hidden_layers", "-1", "config.json: invalid value"),
    (
        "hidden_size",
        "1000000000000",
        "hidden_size is 1000000000000: at most",
    ),
    ("hidden_size", r#""384""#, "config.json: invalid type"),
    (
        "intermediate_size",
        "1025",
        "mlp.gate_proj.weight has the shape [1024, 384], config.json asks for [1025, 384]",
    ),
    ("head_dim", "63", "head_dim 63 is odd"),
    (
        "head_dim",
        "32",
        "self_attn.q_proj.weight has the shape [384, 384], config.json asks for [192, 384]",
    ),
    ("rope_theta", "0", "rope_theta is 0"),
    ("rope_theta", "-1e4", "rope_theta is -10000"),
    ("rms_norm_eps", "-1", "rms_norm_eps is -1"),
    (
        "vocab_size",
        "4095",
        "vocab_size is 4095, model.embed_tokens.weight has 4096 rows",
    ),
    (
        "max_position_embeddings",
        "0",
        "max_position_embeddings is 0",
    ),
    (
        "architectures",
        r#"["MambaForCausalLM"]"#,
        "architecture MambaForCausalLM is not supported: supported are LlamaForCausalLM",
    ),
    ("architectures", "[]", "architectures is missing"),
    (
        "hidden_act",
        r#""gelu""#,
        "hidden_act gelu is not supported",
    ),
    (
        "rope_scaling",
        r#"{"rope_type": "yarn", "factor": 4}"#,
        "rope_scaling type yarn is not supported: supported are default, linear, llama3",
    ),
    (
        "rope_scaling",
        r#"{"type": "dynamic", "factor": 4}"#,
        "rope_scaling type dynamic is not supported",
    ),
    (
        "rope_scaling",
        r#"{"type": "linear"}"#,
        "rope_scaling.factor is missing",
    ),
    (
        "rope_scaling",
        r#"{"type": "linear", "factor": 0}"#,
        "rope_scaling.factor is 0",
    ),
    (
        "attention_bias",
        "true",
        "tensor model.layers.0.self_attn.q_proj.bias is missing",
    ),
    (
        "quantization_config",
        r#"{"quant_method": "bitsandbytes"}"#,
        "quant_method bitsandbytes is not supported: supported are compressed-tensors",
    ),
];

#[test]
fn configurations_that_cannot_work_are_refused_by_field() {
    let copy = Copy::new();
    let config = fs::read_to_string(copy.path("config.json")).unwrap();
    for (field, value, expected) in CASES {
        fs::write(copy.path("config.json"), &config).unwrap();
        copy.edit("config.json", |config| {
            config[*field] = serde_json::from_str(value).unwrap();
        });
        let message = copy.error();
        assert!(message.contains(expected), "{field} = {value}: {message}");
    }
    fs::write(copy.path("config.json"), config.replace("10000.0", "NaN")).unwrap();
    assert!(copy.error().starts_with("config.json: "));
    fs::write(copy.path("config.json"), "{").unwrap();
    assert!(copy.error().starts_with("config.json: "));
    fs::remove_file(copy.path("config.json")).unwrap();
    assert!(copy.error().contains("config.json is missing"));
}

#[test]
fn code_that_a_checkpoint_names_is_not_run() {
    let copy = Copy::new();
    fs::write(copy.path("evil.py"), "import os; os.abort()").unwrap();
    copy.edit("config.json", |config| {
        config["auto_map"] = json!({"AutoModelForCausalLM": "evil.Evil"});
    });
    assert!(Model::open(copy.0.path()).is_ok());
}

#[test]
fn untied_models_need_their_head_and_tied_ones_do_not() {
    let copy = Copy::new();
    copy.edit("config.json", |config| {
        config["tie_word_embeddings"] = json!(true);
    });
    assert!(Model::open(copy.0.path()).is_ok());
}

#[test]
fn indexes_that_lie_or_lead_outside_are_refused() {
    let copy = Copy::new();
    let index = "model.safetensors.index.json";
    let text = fs::read_to_string(copy.path(index)).unwrap();
    for path in [
        "../model-00001-of-00002.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "",
        ".",
        "..",
    ] {
        fs::write(copy.path(index), &text).unwrap();
        copy.edit(index, |index| {
            index["weight_map"]["model.norm.weight"] = json!(path);
        });
        let message = copy.error();
        assert!(
            message.contains("is not a plain file name"),
            "{path}: {message}"
        );
    }
    fs::write(copy.path(index), &text).unwrap();
    copy.edit(index, |index| {
        index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00002.safetensors");
    });
    let message = copy.error();
    assert!(
        message.contains("does not hold tensor model.norm.weight"),
        "{message}"
    );
    fs::write(copy.path(index), &text).unwrap();
    copy.edit(index, |index| {
        index["weight_map"]["x"] = json!("model-00003-of-00003.safetensors");
    });
    let message = copy.error();
    assert!(
        message.contains("model-00003-of-00003.safetensors: is missing"),
        "{message}"
    );
    fs::write(copy.path(index), r#"{"weight_map": {}}"#).unwrap();
    assert!(copy.error().contains("names no tensors"));
}

#[test]
fn missing_truncated_and_damaged_shards_are_refused_by_name() {
    let shard = "model-00002-of-00002.safetensors";
    let whole = fs::read(original().join(shard)).unwrap();
    let copy = Copy::new();
    fs::remove_file(copy.path(shard)).unwrap();
    let message = copy.error();
    assert!(
        message.contains(shard) && message.contains("is missing: download"),
        "{message}"
    );
    for len in [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(copy.path(shard), &whole[..len]).unwrap();
        let message = copy.error();
        assert!(
            message.contains(shard) && message.contains("download the model again"),
            "{len} bytes: {message}"
        );
    }
    let mut longer = whole.clone();
    longer.push(0);
    let mut huge_header = whole.clone();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut not_json = whole;
    not_json[8..16].fill(b'x');
    for damaged in [longer, huge_header, not_json] {
        fs::write(copy.path(shard), damaged).unwrap();
        let message = copy.error();
        assert!(
            message.contains(shard) && message.contains("download the model again"),
            "{message}"
        );
    }
}

/// A one-layer model of 8 channels in one file, with the tensors that `change` leaves.
fn tiny(
    change: impl Fn(&mut Vec<(String, safetensors::Dtype, Vec<usize>)>),
) -> Result<Model, String> {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 10, "max_position_embeddings": 16, "tie_word_embeddings": true, "rope_theta": 1e4
    });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let block = [
        ("self_attn.q_proj", [8, 8]),
        ("self_attn.k_proj", [8, 8]),
        ("self_attn.v_proj", [8, 8]),
        ("self_attn.o_proj", [8, 8]),
    ];
    let mlp = [
        ("mlp.gate_proj", [12, 8]),
        ("mlp.up_proj", [12, 8]),
        ("mlp.down_proj", [8, 12]),
    ];
    let norms = [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.norm",
    ];
    let linears = block
        .into_iter()
        .chain(mlp)
        .map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape.to_vec()));
    let mut tensors: Vec<_> = linears
        .chain(norms.map(|name| (format!("{name}.weight"), vec![8])))
        .chain([("model.embed_tokens.weight".to_owned(), vec![10, 8])])
        .map(|(name, shape)| (name, safetensors::Dtype::F16, shape))
        .collect();
    change(&mut tensors);
    let zeros = vec![0_u8; 4096];
    let views = tensors.iter().map(|(name, dtype, shape)| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (
            name.clone(),
            safetensors::tensor::TensorView::new(*dtype, shape.clone(), &zeros[..bytes]).unwrap(),
        )
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    Model::open(folder.path()).map_err(|error| error.message)
}

#[test]
fn tensors_must_have_their_name_shape_and_type() {
    assert!(tiny(|_| ()).is_ok(), "F16 in one file");
    let missing =
        tiny(|tensors| tensors.retain(|(name, ..)| name != "model.layers.0.mlp.up_proj.weight"))
            .unwrap_err();
    assert!(
        missing.contains("tensor model.layers.0.mlp.up_proj.weight is missing"),
        "{missing}"
    );
    let swapped = tiny(|tensors| tensors[4].2.reverse()).unwrap_err();
    assert!(
        swapped
            .contains("mlp.gate_proj.weight has the shape [8, 12], config.json asks for [12, 8]"),
        "{swapped}"
    );
    let integers = tiny(|tensors| tensors[0].1 = safetensors::Dtype::I8).unwrap_err();
    assert!(
        integers
            .contains("self_attn.q_proj.weight has the type I8: supported are BF16, F16 and F32"),
        "{integers}"
    );
}

#[test]
fn folders_without_safetensors_say_what_to_do() {
    let copy = Copy::new();
    for file in [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ] {
        fs::remove_file(copy.path(file)).unwrap();
    }
    assert!(
        copy.error().contains(
            "neither model.safetensors nor model.safetensors.index.json is there: download"
        )
    );
    fs::write(copy.path("pytorch_model.bin"), "PK").unwrap();
    assert!(
        copy.error()
            .contains("PyTorch .bin files are not read, convert them to safetensors")
    );
    let nowhere = Model::open(Path::new("/nonexistent/model")).unwrap_err();
    assert!(
        nowhere
            .message
            .contains("/nonexistent/model: config.json is missing"),
        "{nowhere}"
    );
}
