//! The artifact's folder: what is written is read back, any damage is refused by name, and a published folder is whole or not there.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod jobs;

use std::fs;
use std::path::Path;

use mixquant_crds::{Digest, FailureReason};
use mixquant_engine::artifact::store::{Draft, Published, remove, write_report};
use mixquant_engine::artifact::{Artifact, Check, weights};
use mixquant_engine::calibrate::default_plan;
use mixquant_engine::model::{Importance, QuantisedLinear, QuantisedLinears};
use proptest::prelude::*;

/// A small artifact for a model of another world.
fn publish(root: &Path) -> Published {
    publish_for(root, None)
}

fn publish_for(root: &Path, owner: Option<&str>) -> Published {
    let rows: Vec<f32> = (0..12u8).map(|value| f32::from(value) - 5.5).collect();
    let linear = |name: &str| QuantisedLinear::from_rows(name.into(), &rows, 3, 4);
    let linears = QuantisedLinears::from_tensors(vec![
        linear("model.layers.0.self_attn.q_proj"),
        linear("model.layers.0.mlp.up_proj"),
    ])
    .unwrap();
    let draft = Draft::new(root, 1000).unwrap();
    let mut draft = draft.owned_by(owner.map(str::to_owned));
    for (index, shard) in weights::shards(&linears).iter().enumerate() {
        draft
            .write(
                &format!("weights/model-{index}.safetensors"),
                &weights::encode(shard),
            )
            .unwrap();
    }
    draft
        .write(
            "attention.json",
            &serde_json::to_vec(&Importance {
                thresholds: vec![vec![0.25]],
            })
            .unwrap(),
        )
        .unwrap();
    draft
        .write("plan.json", &serde_json::to_vec(&default_plan()).unwrap())
        .unwrap();
    draft.publish(Digest::of_bytes(b"model")).unwrap()
}

fn refusal(directory: &Path) -> mixquant_engine::Error {
    let error = Artifact::open(directory, Check::Digests).expect_err("the damage must be seen");
    assert!(!error.message.contains('\n'), "{error}");
    assert!(
        matches!(
            error.reason,
            FailureReason::ArtifactInvalid
                | FailureReason::DigestMismatch
                | FailureReason::PlanInvalid
        ),
        "{error:?}"
    );
    error
}

#[test]
fn what_is_published_is_read_back_under_its_digest() {
    let root = tempfile::tempdir().unwrap();
    let published = publish(root.path());
    assert!(!published.reused);
    let artifact = Artifact::open(&published.path, Check::Digests).unwrap();
    assert_eq!(*artifact.digest(), published.digest);
    assert_eq!(published.path, root.path().join(published.digest.hex()));
    assert_eq!(*artifact.plan(), default_plan());
    assert_eq!(artifact.importance().thresholds, [[0.25]]);
    let names: Vec<_> = artifact
        .manifest()
        .files
        .iter()
        .map(|file| file.path.as_str())
        .collect();
    assert_eq!(
        names,
        ["attention.json", "plan.json", "weights/model-0.safetensors"]
    );
}

#[test]
fn the_report_is_no_part_of_the_digest() {
    let root = tempfile::tempdir().unwrap();
    let published = publish(root.path());
    write_report(&published.path, b"{}").unwrap();
    write_report(&published.path, b"{\"again\": 1}").unwrap();
    assert_eq!(
        fs::read(published.path.join("report.json")).unwrap(),
        b"{\"again\": 1}"
    );
    assert_eq!(
        *Artifact::open(&published.path, Check::Digests)
            .unwrap()
            .digest(),
        published.digest
    );
}

#[test]
fn the_same_content_is_kept_and_a_damaged_folder_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let first = publish(root.path());
    let marker = first.path.join("report.json");
    fs::write(&marker, "kept").unwrap();
    let second = publish(root.path());
    assert!(second.reused && second.digest == first.digest);
    assert!(marker.exists(), "a whole artifact is left alone");

    jobs::flip(&first.path.join("plan.json"), 3, 1);
    let third = publish(root.path());
    assert!(!third.reused && third.digest == first.digest);
    assert!(
        !marker.exists(),
        "a damaged artifact is replaced as a whole"
    );
    assert!(Artifact::open(&third.path, Check::Digests).is_ok());
    let left: Vec<_> = jobs::files(root.path())
        .into_iter()
        .filter(|path| !path.starts_with(third.digest.hex()))
        .collect();
    assert_eq!(left, [Path::new(".lock")], "nothing else stays");
}

#[test]
fn an_artifact_goes_with_its_last_owner_and_never_before() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let published = publish_for(root, Some("chat"));
    let digest = [published.digest.clone()];
    assert!(publish_for(root, Some("search")).reused);
    assert!(
        publish_for(root, Some("chat")).reused,
        "signing twice is once"
    );
    let whole = || Artifact::open(&published.path, Check::Digests).is_ok();
    assert!(whole(), "owners are no part of the digest");

    remove(root, "nobody", &digest).unwrap();
    remove(root, "chat", &digest).unwrap();
    assert!(whole(), "another has it too");
    remove(root, "chat", &digest).unwrap();
    assert!(whole(), "what was given up is no longer its own");
    remove(root, "search", &digest).unwrap();
    assert_eq!(jobs::files(root), [Path::new(".lock")], "nothing stays");
    remove(root, "search", &digest).unwrap();
    remove(&root.join("elsewhere"), "search", &digest).unwrap();
}

#[test]
fn what_was_there_before_there_were_owners_is_never_removed() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let published = publish(root);
    let digest = [published.digest.clone()];
    remove(root, "chat", &digest).unwrap();
    assert!(published.path.exists());
    assert!(publish_for(root, Some("chat")).reused);
    remove(root, "chat", &digest).unwrap();
    assert!(
        Artifact::open(&published.path, Check::Digests).is_ok(),
        "somebody may have used it all along"
    );
}

#[test]
fn what_replaces_a_damaged_artifact_keeps_its_owners() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let first = publish_for(root, Some("search"));
    jobs::flip(&first.path.join("plan.json"), 3, 1);
    assert!(!publish_for(root, Some("chat")).reused);
    remove(root, "chat", std::slice::from_ref(&first.digest)).unwrap();
    assert!(Artifact::open(&first.path, Check::Digests).is_ok());
}

#[test]
fn a_draft_of_a_dead_run_is_removed_and_one_of_a_living_run_is_not() {
    let root = tempfile::tempdir().unwrap();
    let living = Draft::new(root.path(), 0).unwrap();
    let dead = root.path().join(".draft-dead");
    fs::create_dir_all(dead.join("weights")).unwrap();
    fs::write(dead.join(".lock"), "").unwrap();
    let replaced = root.path().join(".old-dead");
    fs::create_dir(&replaced).unwrap();
    let drafts = || {
        fs::read_dir(root.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().is_dir())
            .count()
    };
    assert_eq!(drafts(), 3);
    let next = Draft::new(root.path(), 0).unwrap();
    assert!(!dead.exists() && !replaced.exists());
    assert_eq!(drafts(), 2);
    drop((living, next));
    assert_eq!(drafts(), 0, "a draft that is given up leaves nothing");
}

#[test]
fn each_file_that_is_missing_cut_or_too_long_is_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let published = publish(root.path());
    for file in jobs::files(&published.path) {
        let copy = root.path().join("copy");
        let path = copy.join(&file);
        let name = file.file_name().unwrap().to_str().unwrap();
        for damage in ["missing", "cut", "empty", "longer", "folder", "link"] {
            jobs::copy(&published.path, &copy);
            let content = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            match damage {
                "missing" => {}
                "cut" => fs::write(&path, &content[..content.len() - 1]).unwrap(),
                "empty" => fs::write(&path, "").unwrap(),
                "longer" => fs::write(&path, [&content[..], b" "].concat()).unwrap(),
                "folder" => fs::create_dir(&path).unwrap(),
                _ => std::os::unix::fs::symlink(published.path.join(&file), &path).unwrap(),
            }
            // The manifest itself may stand behind a link, as in a mounted volume: its content is what counts.
            if damage == "link" && name == "manifest.json" {
                assert!(Artifact::open(&copy, Check::Digests).is_ok());
            } else {
                let message = refusal(&copy).message;
                assert!(message.contains(name), "{damage} {name}: {message}");
            }
            fs::remove_dir_all(&copy).unwrap();
        }
    }
}

#[test]
fn a_linked_weights_folder_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let published = publish(root.path());
    let elsewhere = root.path().join("elsewhere");
    fs::rename(published.path.join("weights"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, published.path.join("weights")).unwrap();
    assert!(refusal(&published.path).message.contains("symbolic link"));
}

#[test]
fn a_folder_under_another_digests_name_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let published = publish(root.path());
    let other = root.path().join("0".repeat(64));
    jobs::copy(&published.path, &other);
    assert!(refusal(&other).message.contains("its folder is named for"));
    let free = root.path().join("by-hand");
    jobs::copy(&published.path, &free);
    assert!(
        Artifact::open(&free, Check::Digests).is_ok(),
        "any other name claims nothing"
    );
}

/// Rewrites the weights with `change` and lists them truthfully, as somebody could who can write the folder.
fn forged(change: impl Fn(&mut QuantisedLinear)) -> mixquant_engine::Error {
    let root = tempfile::tempdir().unwrap();
    let mut linear =
        QuantisedLinear::from_rows("model.layers.0.mlp.up_proj".into(), &[1.0; 12], 3, 4);
    change(&mut linear);
    let mut draft = Draft::new(root.path(), 0).unwrap();
    draft
        .write("weights/model.safetensors", &weights::encode(&[&linear]))
        .unwrap();
    draft
        .write("attention.json", b"{\"thresholds\": [[0.5]]}")
        .unwrap();
    draft
        .write("plan.json", &serde_json::to_vec(&default_plan()).unwrap())
        .unwrap();
    refusal(&draft.publish(Digest::of_bytes(b"model")).unwrap().path)
}

#[test]
fn scales_that_are_no_positive_numbers_are_refused_although_their_digest_is_right() {
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let message = forged(|linear| linear.weight.scales[1] = scale).message;
        assert!(
            message.contains("model.layers.0.mlp.up_proj") && message.contains("scale"),
            "{message}"
        );
    }
}

#[test]
fn with_digests_off_damage_is_loaded_but_sizes_are_still_checked() {
    let root = tempfile::tempdir().unwrap();
    let published = publish(root.path());
    let path = published.path.join("weights/model-0.safetensors");
    let size = fs::metadata(&path).unwrap().len();
    jobs::flip(&path, usize::try_from(size).unwrap() - 1, 0x40);
    assert!(
        refusal(&published.path)
            .message
            .contains("model-0.safetensors has the digest")
    );
    assert!(Artifact::open(&published.path, Check::Nothing).is_ok());
    fs::write(&path, &fs::read(&path).unwrap()[1..]).unwrap();
    assert!(
        Artifact::open(&published.path, Check::Nothing)
            .unwrap_err()
            .message
            .contains("bytes and the manifest says")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any byte of any file, changed in any way.
    #[test]
    fn one_changed_byte_is_refused_in_each_file(file in 0..4usize, place in 0.0..1.0f64, mask in 1..=255u8) {
        let root = tempfile::tempdir().unwrap();
        let published = publish(root.path());
        let files = jobs::files(&published.path);
        prop_assert_eq!(files.len(), 4);
        let path = published.path.join(&files[file]);
        let size = fs::metadata(&path).unwrap().len();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a place within a small file")]
        let offset = (size as f64 * place) as usize;
        jobs::flip(&path, offset, mask);
        refusal(&published.path);
    }
}
