//! `mixquant-engine export`: layouts of others hold the same weights, kills lose nothing, threads change nothing, and what cannot work is refused.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod jobs;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use mixquant_crds::PrecisionPlan;
use mixquant_engine::formats::Format;
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};
use safetensors::SafeTensors;

/// Arguments that quantise with few texts. `extra` replaces what stands here.
fn arguments(out: &Path, extra: &[&str]) -> Vec<String> {
    let (model, text) = (jobs::model(), jobs::text());
    let defaults = [
        ("--model", model.to_str().unwrap()),
        ("--data", text.to_str().unwrap()),
        ("--out", out.to_str().unwrap()),
        ("--samples", "2"),
        ("--sequence-length", "128"),
    ];
    let kept = defaults
        .iter()
        .filter(|(name, _)| !extra.contains(name))
        .flat_map(|(name, value)| [*name, *value]);
    let all = ["export"]
        .into_iter()
        .chain(kept)
        .chain(extra.iter().copied());
    all.map(str::to_owned).collect()
}

fn export(out: &Path, extra: &[&str]) -> String {
    let output = jobs::engine(arguments(out, extra));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Tensors of an exported checkpoint: bytes and shape by name.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            (
                name.to_owned(),
                (view.shape().to_vec(), view.data().to_vec()),
            )
        })
        .collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|word| f32::from_le_bytes(*word)).collect()
}

/// Where a layout is exported to, once.
fn place(folder: &Path, layout: &str, settings: &[&str]) -> PathBuf {
    folder.join(format!("{layout}_{}", settings.join("_")))
}

/// Compares all block linears, as the engine's reader of the layout reads them, with the dequantised checkpoint of the same settings.
fn compare(folder: &Path, layout: &str, settings: &[&str]) -> serde_json::Value {
    let [out, plain] = [layout, "dequantised"].map(|layout| {
        let out = place(folder, layout, settings);
        if !out.exists() {
            export(&out, &[settings, &["--layout", layout]].concat());
        }
        out
    });
    let config = fs::read(out.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let format = Format::parse(&config["quantization_config"]).unwrap();
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut linears = 0;
    for (name, (shape, expected)) in tensors(&plain) {
        let Some(linear) = name
            .strip_suffix(".weight")
            .filter(|name| name.ends_with("_proj"))
        else {
            assert_eq!(
                file.tensor(&name).unwrap().data(),
                expected,
                "{name} is as it was"
            );
            continue;
        };
        let weight = format.read(&file, linear, [shape[0], shape[1]]).unwrap();
        let weight = weight
            .expect("every block linear is quantised")
            .dequantise();
        assert!(
            weight == floats(&expected),
            "{linear} differs: {layout} {settings:?}"
        );
        linears += 1;
    }
    assert_eq!(linears, 42);
    config["quantization_config"].clone()
}

#[test]
fn every_layout_holds_the_weights_that_were_made() {
    let folder = tempfile::tempdir().unwrap();
    let packed = "compressed-tensors";
    let cases: [(&str, &[&str]); 8] = [
        (packed, &["--scheme", "W4A16-g128", "--quantiser", "rtn"]),
        (
            packed,
            &["--scheme", "W4A16-g64-asym", "--quantiser", "rtn"],
        ),
        (packed, &["--scheme", "W8A16"]),
        (packed, &["--scheme", "W8A8", "--quantiser", "rtn"]),
        (packed, &["--scheme", "FP8"]),
        ("gptq", &["--scheme", "W4A16-g32", "--quantiser", "rtn"]),
        (
            "gptq",
            &["--scheme", "W4A16-g64-asym", "--quantiser", "rtn"],
        ),
        ("gptq", &["--scheme", "W8A16"]),
    ];
    for (layout, settings) in cases {
        compare(folder.path(), layout, settings);
    }
    let sorted = [
        "--scheme",
        "W4A16-g128",
        "--act-order",
        "group",
        "--no-true-sequential",
    ];
    let config = compare(folder.path(), "gptq", &sorted);
    assert_eq!(
        (&config["desc_act"], &config["bits"]),
        (&true.into(), &4.into())
    );
}

fn logits(directory: &Path) -> Vec<f32> {
    let mut model = Model::open(directory).unwrap();
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    let tokens: Vec<u32> = (100..164).collect();
    let mut cache = model.new_cache(tokens.len());
    let chunk = Chunk {
        tokens: &tokens,
        cache: &mut cache,
        logits: LogitRows::All,
    };
    model
        .forward(Pass::Precise, &mut [chunk], &mut Workspace::default(), None)
        .unwrap()
        .to_vec()
}

/// 8 bits lose so little that a scale folded wrongly would show at once.
#[test]
fn folded_scales_change_nothing_but_the_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let before = logits(&jobs::model());
    let distance = |quantiser: &str| {
        let out = folder.path().join(quantiser);
        export(
            &out,
            &[
                "--scheme",
                "W8A8",
                "--quantiser",
                quantiser,
                "--layout",
                "dequantised",
            ],
        );
        let after = logits(&out);
        let squares = before
            .iter()
            .zip(&after)
            .map(|(one, two)| f64::from(one - two).powi(2));
        squares.sum::<f64>()
    };
    let (plain, smoothed) = (distance("rtn"), distance("smoothquant"));
    assert!(
        plain > 0.0 && smoothed < 4.0 * plain,
        "{smoothed} and {plain}"
    );
    let [plain, smoothed] = ["rtn", "smoothquant"].map(|name| tensors(&folder.path().join(name)));
    let folded = plain
        .iter()
        .filter(|(name, tensor)| name.contains("layernorm") && smoothed[*name] != **tensor);
    assert!(folded.count() > 0, "some scales were folded into norms");
}

/// Kept layers of a run below `root`.
fn kept(root: &Path) -> usize {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let runs = entries.filter(|entry| {
        entry
            .file_name()
            .to_string_lossy()
            .starts_with(".quantise-")
    });
    runs.flat_map(|run| fs::read_dir(run.path()).into_iter().flatten().flatten())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("layer-"))
        .count()
}

/// Waits until so many layers are kept or the run ends.
fn wait_for_layers(root: &Path, child: &mut Child, layers: usize) {
    while kept(root) < layers && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_run_goes_on_where_it_was_and_threads_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["--quantiser", "gptq", "--scheme", "W4A16-g64"];
    let undisturbed = folder.path().join("one/out");
    export(&undisturbed, &[&settings[..], &["--threads", "1"]].concat());
    let root = folder.path().join("two");
    let out = root.join("out");
    let threads = [&settings[..], &["--threads", "2"]].concat();
    for layers in [1, 3] {
        let mut child = jobs::command()
            .args(arguments(&out, &threads))
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for_layers(&root, &mut child, layers);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(
            kept(&root) >= layers && !out.exists(),
            "killed with {} layers",
            kept(&root)
        );
    }
    let before = kept(&root);
    let mut child = jobs::command()
        .args(arguments(&out, &threads))
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_layers(&root, &mut child, before + 1);
    assert!(child.wait().unwrap().success());
    assert_eq!(
        kept(&root),
        0,
        "finished layers go when the checkpoint is there"
    );
    let left: Vec<PathBuf> = fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(left, std::slice::from_ref(&out), "nothing else is left");
    assert_eq!(tensors(&out), tensors(&undisturbed));
}

#[test]
fn a_budget_is_kept_and_spent_and_each_layout_says_which_linear_has_what() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["--budget-bpw", "5.5", "--quantiser", "rtn"];
    let out = place(folder.path(), "compressed-tensors", &settings);
    let answer = export(&out, &settings);
    let last = answer.lines().last().unwrap();
    let bits: f64 = last.split(' ').nth(1).unwrap().parse().unwrap();
    assert!((5.0..=5.5).contains(&bits), "{last}");
    assert!(
        answer.contains("W8A16") && answer.contains("W4A16"),
        "{answer}"
    );
    let config = compare(folder.path(), "compressed-tensors", &settings);
    assert!(config["config_groups"].as_object().unwrap().len() > 1);
    let config = compare(folder.path(), "gptq", &settings);
    assert!(!config["dynamic"].as_object().unwrap().is_empty());
}

#[test]
fn what_cannot_work_is_one_clear_line_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let cases: [(&[&str], &str); 8] = [
        (&["--scheme", "W5A16"], "the scheme `W5A16` is not known"),
        (&["--scheme", "LUT4"], "compressed-tensors has no tables"),
        (
            &["--scheme", "W8A8", "--layout", "gptq"],
            "the GPTQ layout cannot hold W8A8",
        ),
        (
            &["--scheme", "FP8", "--quantiser", "awq"],
            "cannot make FP8",
        ),
        (&["--damp", "0"], "--damp is 0"),
        (&["--budget-bpw", "3"], "give at least 4.1"),
        (&["--act-order", "group"], "use --act-order weight"),
        (&["--samples", "1000"], "1000 were asked for"),
    ];
    for (extra, wanted) in cases {
        let output = jobs::engine(arguments(&out, extra));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains(wanted),
            "{extra:?}: {text}"
        );
        assert!(!out.exists(), "{extra:?}");
    }
    fs::create_dir(&out).unwrap();
    assert!(jobs::error_line(&jobs::engine(arguments(&out, &[]))).contains("exists"));
}
