//! `manifest.json`: what an artifact consists of. Its canonical JSON is what the artifact's digest is taken over.
//!
//! Pure: it parses, checks and digests; the folder is read by the parent and written by [`super::store`].

use mixquant_crds::Digest;
use mixquant_crds::names::{
    ARTIFACT_ATTENTION, ARTIFACT_GOLDEN, ARTIFACT_PLAN, ARTIFACT_PROBE, ARTIFACT_RANGES,
    ARTIFACT_WEIGHTS,
};
use serde::{Deserialize, Serialize};

/// The layout that this engine writes and reads.
pub const SCHEMA_VERSION: u32 = 1;

/// More files than an artifact can need.
const MAX_FILES: usize = 10_000;

/// What the names of the decode copy's files begin with; all others are the prefill copy's.
const DECODE_FILES: &str = "/decode-";

/// What a quantised copy of the block linears is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Quantised prefills.
    Prefill,
    /// Decode, where the plan gives it a copy of its own.
    Decode,
}

impl Phase {
    /// The path of one of the copy's files.
    pub fn path(self, index: usize, count: usize) -> String {
        let stem = match self {
            Self::Prefill => "/model-",
            Self::Decode => DECODE_FILES,
        };
        format!(
            "{ARTIFACT_WEIGHTS}{stem}{:05}-of-{count:05}.safetensors",
            index + 1
        )
    }
}

/// The list of an artifact's files. `report.json` is not on it: reports and timings are no part of what an artifact is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The model that the artifact was made for.
    pub model_digest: Digest,
    /// Sorted by path.
    pub files: Vec<FileEntry>,
}

/// One file of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Relative to the artifact's folder, `/` between the parts.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Its digest.
    pub sha256: Digest,
}

/// Only the version, read first so that a newer layout is named as such and not as a broken one.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    schema_version: u32,
}

impl Manifest {
    /// A manifest of `files` in canonical order.
    pub fn new(model_digest: Digest, mut files: Vec<FileEntry>) -> Self {
        files.sort();
        Self {
            schema_version: SCHEMA_VERSION,
            model_digest,
            files,
        }
    }

    /// Parses and checks everything that can be checked without the folder.
    ///
    /// # Errors
    /// What is wrong, without the file's name.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let version: Version =
            serde_json::from_slice(text).map_err(|error| format!("not a manifest ({error})"))?;
        if version.schema_version != SCHEMA_VERSION {
            return Err(format!(
                "schemaVersion {} is not the {SCHEMA_VERSION} that this engine reads: calibrate again with this engine",
                version.schema_version
            ));
        }
        let manifest: Self =
            serde_json::from_slice(text).map_err(|error| format!("not a manifest ({error})"))?;
        if manifest.files.len() > MAX_FILES {
            return Err(format!(
                "{} files, more than the {MAX_FILES} that an artifact can have",
                manifest.files.len()
            ));
        }
        if let Some(entry) = manifest.files.iter().find(|entry| !is_known(&entry.path)) {
            return Err(format!(
                "the path `{}` is no part of an artifact",
                entry.path.chars().take(100).collect::<String>()
            ));
        }
        if !manifest.files.is_sorted_by(|one, two| one.path < two.path) {
            return Err("its files are not sorted or one is named twice".into());
        }
        for needed in [ARTIFACT_ATTENTION, ARTIFACT_PLAN] {
            if manifest.file(needed).is_none() {
                return Err(format!("it does not list {needed}"));
            }
        }
        Ok(manifest)
    }

    /// The bytes of `manifest.json`: keys sorted, no white space.
    pub fn canonical(&self) -> Vec<u8> {
        // The way through `Value` sorts the keys, as in `Digest::of_json`.
        let value = serde_json::to_value(self).expect("a manifest holds only strings and numbers");
        serde_json::to_vec(&value).expect("a JSON value can be written")
    }

    /// The artifact's digest.
    pub fn digest(&self) -> Digest {
        Digest::of_json(self).expect("a manifest holds only strings and numbers")
    }

    /// The entry of `path`.
    pub fn file(&self, path: &str) -> Option<&FileEntry> {
        self.files.iter().find(|entry| entry.path == path)
    }

    /// The entries below `weights/` that hold the copy of this phase.
    pub fn weights(&self, phase: Phase) -> impl Iterator<Item = &FileEntry> {
        let decode = phase == Phase::Decode;
        self.files.iter().filter(move |entry| {
            (entry.path.strip_prefix(ARTIFACT_WEIGHTS))
                .is_some_and(|name| name.starts_with(DECODE_FILES) == decode)
        })
    }

    /// The size of all listed files.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum, entry| sum.saturating_add(entry.bytes))
    }
}

/// Whether `path` is one that the layout knows; this is also what keeps a manifest from naming a file outside its folder.
fn is_known(path: &str) -> bool {
    let plain = |name: &str| {
        !name.is_empty()
            && !name.starts_with('.')
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    match path.split_once('/') {
        None => [
            ARTIFACT_PLAN,
            ARTIFACT_ATTENTION,
            ARTIFACT_GOLDEN,
            ARTIFACT_RANGES,
            ARTIFACT_PROBE,
        ]
        .contains(&path),
        Some((folder, name)) => {
            folder == ARTIFACT_WEIGHTS
                && plain(name)
                && name.strip_suffix(".safetensors").is_some_and(plain)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str) -> FileEntry {
        FileEntry {
            path: path.into(),
            bytes: 3,
            sha256: Digest::of_bytes(b"abc"),
        }
    }

    fn manifest(paths: &[&str]) -> Manifest {
        Manifest::new(
            Digest::of_bytes(b"model"),
            paths.iter().copied().map(entry).collect(),
        )
    }

    #[test]
    fn what_is_written_is_read_back_and_digested_alike() {
        let written = manifest(&["weights/w-1.safetensors", "plan.json", "attention.json"]);
        let read = Manifest::parse(&written.canonical()).unwrap();
        assert_eq!(read, written);
        assert_eq!(read.digest(), Digest::of_bytes(&written.canonical()));
        assert_eq!(read.bytes(), 9);
    }

    #[test]
    fn a_path_outside_the_layout_is_refused() {
        for path in [
            "../plan.json",
            "/etc/passwd",
            "weights/../x.safetensors",
            "weights/a/b.safetensors",
            "weights/.safetensors",
            "weights/x.bin",
            "report.json",
            "weights\\x.safetensors",
            "weights/\u{0}.safetensors",
            "",
        ] {
            let text = manifest(&["plan.json", "attention.json", path]).canonical();
            let why = Manifest::parse(&text).unwrap_err();
            assert!(why.contains("is no part of an artifact"), "{path}: {why}");
        }
    }

    #[test]
    fn a_missing_or_repeated_file_is_refused() {
        assert!(
            Manifest::parse(&manifest(&["plan.json"]).canonical())
                .unwrap_err()
                .contains("attention.json")
        );
        let twice = manifest(&["attention.json", "plan.json", "plan.json"]);
        assert!(
            Manifest::parse(&twice.canonical())
                .unwrap_err()
                .contains("named twice")
        );
    }

    #[test]
    fn another_schema_version_is_named_with_the_fix() {
        let text = br#"{"schemaVersion": 2, "anything": []}"#;
        assert!(
            Manifest::parse(text)
                .unwrap_err()
                .contains("calibrate again")
        );
        assert!(Manifest::parse(b"{}").is_err());
        assert!(Manifest::parse(b"").is_err());
    }
}
