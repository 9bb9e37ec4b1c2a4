//! What goes wrong in the world: damaged weights that are really used, the wrong model, a full disk, signals and kills at any moment.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests panic and print as tests do"
)]

mod jobs;

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use mixquant_crds::names::{EXIT_INPUT, EXIT_RETRY};
use mixquant_engine::artifact::{Artifact, Check};
use mixquant_engine::calibrate;
use mixquant_engine::model::{Chunk, LogitRows, Model, Workspace};

/// An artifact whose W8A8 copy reads prompts of 64 tokens and more.
fn artifact(out: &Path) -> PathBuf {
    jobs::artifact(&jobs::options(out, jobs::plan()))
}

/// The logits after a prompt as serving computes them, and after one token decoded behind it.
fn answer(model: &Model, prompt_tokens: u32) -> [Vec<f32>; 2] {
    let prompt: Vec<u32> = (0..prompt_tokens)
        .map(|index| 300 + index * 7 % 1000)
        .collect();
    let mut workspace = Workspace::default();
    let mut cache = model.new_cache(prompt.len() + 1);
    let mut next = |pass, tokens: &[u32]| {
        let chunk = Chunk {
            tokens,
            cache: &mut cache,
            logits: LogitRows::Last,
        };
        model
            .forward(pass, &mut [chunk], &mut workspace, None)
            .unwrap()
            .to_vec()
    };
    [
        next(model.prefill_pass(prompt.len()), &prompt),
        next(model.prefill_pass(1), &[500]),
    ]
}

fn open(model: &Path, artifact: &Path) -> Model {
    let mut model = Model::open(model).unwrap();
    Artifact::open(artifact, Check::Nothing)
        .unwrap()
        .attach_to(&mut model)
        .unwrap();
    model
}

/// Inverts one bit of one byte: a high one of a tensor's first number in a safetensors file.
fn damage(path: &Path, tensor: &str, bytes_per_number: usize) {
    let mut file = fs::read(path).unwrap();
    let header_bytes = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_bytes]).unwrap();
    let start = usize::try_from(header[tensor]["data_offsets"][0].as_u64().unwrap()).unwrap()
        + 8
        + header_bytes;
    file[start + bytes_per_number - 1] ^= 0x40;
    fs::write(path, file).unwrap();
}

#[test]
fn damage_in_the_quantised_copy_changes_prompts_at_and_above_the_threshold_only() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = artifact(folder.path());
    let whole = open(&jobs::model(), &artifact);
    damage(
        &artifact.join("weights/model-00001-of-00001.safetensors"),
        "model.layers.2.mlp.down_proj.weight",
        1,
    );
    let damaged = open(&jobs::model(), &artifact);
    for (prompt_tokens, changes) in [(1, false), (63, false), (64, true), (100, true)] {
        let (before, after) = (
            answer(&whole, prompt_tokens),
            answer(&damaged, prompt_tokens),
        );
        // Below the threshold neither the prompt nor the token decoded behind it may have met the damaged copy.
        assert_eq!(
            before != after,
            changes,
            "a prompt of {prompt_tokens} tokens"
        );
        assert_eq!(before[0] != after[0], changes);
    }
    let refused = Artifact::open(&artifact, Check::Digests).unwrap_err();
    assert!(
        refused
            .message
            .contains("model-00001-of-00001.safetensors has the digest"),
        "{refused}"
    );
}

#[test]
fn damage_in_the_precise_copy_changes_decode_and_not_the_quantised_prefill() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = artifact(&folder.path().join("artifacts"));
    let whole = open(&jobs::model(), &artifact);
    let copy = folder.path().join("model");
    jobs::copy(&jobs::model(), &copy);
    let tensor = "model.layers.2.mlp.down_proj.weight";
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(copy.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    damage(
        &copy.join(index["weight_map"][tensor].as_str().unwrap()),
        tensor,
        2,
    );
    let damaged = open(&copy, &artifact);
    let ([prefill, decode], [damaged_prefill, damaged_decode]) =
        (answer(&whole, 64), answer(&damaged, 64));
    assert_eq!(
        prefill, damaged_prefill,
        "the prompt is read by the quantised copy"
    );
    assert_ne!(
        decode, damaged_decode,
        "the next token is computed by the precise one"
    );
    let ([short, _], [damaged_short, _]) = (answer(&whole, 63), answer(&damaged, 63));
    assert_ne!(
        short, damaged_short,
        "a prompt below the threshold is read by the precise copy"
    );
}

#[test]
fn an_artifact_for_another_model_is_refused_with_both_digests() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = artifact(&folder.path().join("artifacts"));
    let other = folder.path().join("model");
    jobs::copy(&jobs::model(), &other);
    fs::write(
        other.join("generation_config.json"),
        "{\"eos_token_id\": [1]}",
    )
    .unwrap();
    let text = jobs::text();
    let output = jobs::engine([
        "verify",
        "--model",
        other.to_str().unwrap(),
        "--artifact",
        artifact.to_str().unwrap(),
        "--data",
        text.to_str().unwrap(),
        "--window",
        "64",
    ]);
    let line = jobs::error_line(&output);
    let digests = [
        Model::open(&jobs::model()).unwrap().digest().clone(),
        Model::open(&other).unwrap().digest().clone(),
    ];
    assert!(
        digests.iter().all(|digest| line.contains(digest.as_str())),
        "{line}"
    );
    assert_eq!(output.status.code(), Some(EXIT_INPUT));
}

/// A file system of 4 MiB where this process may mount one; the quantised copy takes 9.5 MB.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::null())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            println!("skipped: this process may not mount a small file system");
            return None;
        }
        Some(Self(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _left = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_one_line_with_the_bytes_needed_and_leaves_nothing() {
    let Some(disk) = SmallDisk::mount() else {
        return;
    };
    let output = jobs::engine(jobs::calibrate(disk.0.path(), &jobs::plan(), &[]));
    let line = jobs::error_line(&output);
    assert_eq!(output.status.code(), Some(EXIT_RETRY), "{line}");
    for part in [
        disk.0.path().to_str().unwrap(),
        "bytes are needed: free space",
    ] {
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(jobs::files(disk.0.path()), [Path::new(".lock")]);
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let output = jobs::engine(jobs::calibrate(&file, &jobs::plan(), &[]));
    assert!(jobs::error_line(&output).contains(file.to_str().unwrap()));
    assert_eq!(output.status.code(), Some(EXIT_RETRY));
}

/// Waits until the process has said `text` on stderr.
fn wait_for(child: &mut std::process::Child, text: &str) {
    use std::io::{BufRead as _, BufReader};
    let log = BufReader::new(child.stderr.as_mut().expect("stderr is piped"));
    assert!(
        log.lines().any(|line| line.unwrap().contains(text)),
        "the process never said {text}"
    );
}

#[test]
fn sigterm_ends_a_job_with_its_answer_and_nothing_left() {
    let folder = tempfile::tempdir().unwrap();
    let (out, message) = (folder.path().join("out"), folder.path().join("message"));
    let arguments = jobs::calibrate(
        &out,
        &jobs::plan(),
        &[
            "--samples",
            "8",
            "--termination-message",
            message.to_str().unwrap(),
        ],
    );
    let mut child = jobs::command()
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(&mut child, "calibrating");
    assert!(
        Command::new("kill")
            .args(["-TERM", &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(child.wait().unwrap().code(), Some(EXIT_RETRY));
    assert!(
        fs::read_to_string(message)
            .unwrap()
            .contains("stopped by a signal")
    );
    assert_eq!(jobs::files(&out), [Path::new(".lock")]);
}

/// As little as a calibration can be asked for.
const SMALL: [&str; 6] = [
    "--samples",
    "2",
    "--sequence-length",
    "128",
    "--eval-samples",
    "1",
];

/// Kills while an artifact is removed: it is whole or hidden, never half, and the next run ends what was begun.
#[test]
fn killed_while_it_removes_an_artifact_it_leaves_no_half_and_the_next_run_ends_it() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let arguments = |more: &[&str]| {
        let extra = [&SMALL[..], &["--owner", "chat"], more].concat();
        jobs::calibrate(&out, &jobs::plan(), &extra)
    };
    let kept = jobs::artifact(&calibrate::Options {
        owner: Some("chat".into()),
        ..jobs::options(&out, jobs::plan())
    });
    let digest = format!("sha256:{}", "ab".repeat(32));
    let old = out.join("ab".repeat(32));
    let mut halves = 0;
    for _ in 0..3 {
        jobs::copy(&kept, &old);
        // Enough to do that a removal takes its time.
        for number in 0..20_000 {
            fs::write(old.join("weights").join(format!("{number}")), "").unwrap();
        }
        let mut child = jobs::command()
            .args(arguments(&["--remove", &digest]))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while old.exists() {
            assert!(
                child.try_wait().unwrap().is_none(),
                "it ended without removing"
            );
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let names = fs::read_dir(&out).unwrap().flatten();
        halves += names
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(".old-"))
            .count();
        assert!(
            Artifact::open(&kept, Check::Digests).is_ok(),
            "the other one is untouched"
        );
    }
    assert!(halves > 0, "no removal was interrupted");
    let run = jobs::engine(arguments(&[]));
    assert!(
        run.status.success(),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
    let hidden = fs::read_dir(&out).unwrap().flatten();
    let hidden: Vec<_> = hidden
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().starts_with('.'))
        .collect();
    assert_eq!(hidden, [".lock"]);
}

/// What hides from readers stays: the drafts of killed runs.
fn remove_artifacts(out: &Path) {
    for entry in fs::read_dir(out).unwrap().flatten() {
        if !entry.file_name().to_string_lossy().starts_with('.') {
            fs::remove_dir_all(entry.path()).unwrap();
        }
    }
}

/// Kills at moments spread over the whole run: whatever stands under a digest's name is whole, and the next run works and cleans up.
#[test]
fn killed_at_any_moment_nothing_half_written_validates_and_a_rerun_works() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let started = Instant::now();
    let arguments = jobs::calibrate(&out, &jobs::plan(), &SMALL);
    let undisturbed = jobs::engine(&arguments);
    assert!(
        undisturbed.status.success(),
        "{}",
        String::from_utf8_lossy(&undisturbed.stderr)
    );
    // The machine's load changes: a run that ended before its kill says how long one takes now.
    let mut whole_run = started.elapsed();
    let mut killed = 0;
    for moment in 1..=12 {
        remove_artifacts(&out);
        let mut child = jobs::command()
            .args(&arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let delay = whole_run * moment / 13;
        std::thread::sleep(delay);
        child.kill().unwrap();
        if child.wait().unwrap().signal() == Some(9) {
            killed += 1;
        } else {
            whole_run = delay;
        }
        for entry in fs::read_dir(&out).into_iter().flatten().flatten() {
            let visible = !entry.file_name().to_string_lossy().starts_with('.');
            assert!(
                !visible || Artifact::open(&entry.path(), Check::Digests).is_ok(),
                "{} is damaged",
                entry.path().display()
            );
        }
    }
    assert!(killed >= 4, "only {killed} runs were killed in time");
    let rerun = jobs::engine(&arguments);
    assert_eq!(rerun.stdout, undisturbed.stdout);
    let hidden: Vec<_> = fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().starts_with('.'))
        .collect();
    assert_eq!(hidden, [".lock"], "the rerun cleans up");
}
