//! The artifact: what calibration hands to serving, as a folder named by its digest. Read and checked here, written by [`store`].
//!
//! Nothing of a folder is used before its sizes, digests, paths, shapes and scales are checked. `serve`, `verify` and `inspect` open artifacts.

pub mod golden;
pub mod manifest;
pub mod probe;
pub mod store;
pub mod weights;

use std::path::Path;

use mixquant_crds::names::{
    ARTIFACT_ATTENTION, ARTIFACT_GOLDEN, ARTIFACT_MANIFEST, ARTIFACT_PLAN, ARTIFACT_RANGES,
};
use mixquant_crds::{Digest, PrecisionPlan};

use self::golden::Golden;
pub use self::manifest::Manifest;
use self::manifest::{FileEntry, Phase};
use crate::drift::Ranges;
use crate::error::{Error, Result};
use crate::files;
use crate::model::{Copies, Importance, Model, QuantisedLinears};

/// The manifest, the plan and the thresholds are small; anything larger is not one of them.
pub(crate) const MAX_JSON_BYTES: u64 = 16 << 20;

/// Whether an artifact's digests are checked when it is opened and attached. Everything else always is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// All of them: each file's, the folder's name, the model's.
    Digests,
    /// None: only for tests of damaged artifacts.
    Nothing,
}

/// An artifact in memory, checked.
#[derive(Debug)]
pub struct Artifact {
    check: Check,
    digest: Digest,
    manifest: Manifest,
    plan: PrecisionPlan,
    importance: Importance,
    copies: Copies,
    golden: Option<Golden>,
    ranges: Option<Ranges>,
}

impl Artifact {
    /// Reads the artifact in `directory`.
    ///
    /// # Errors
    /// The first file that is missing, damaged or not what the manifest says, named with what to do.
    pub fn open(directory: &Path, check: Check) -> Result<Self> {
        let manifest = manifest_of(directory, check)?;
        let digest = manifest.digest();
        let folder = Folder { directory, check };
        let plan: PrecisionPlan = folder.json(&manifest, ARTIFACT_PLAN)?;
        plan.check().map_err(|why| {
            Error::plan(format!(
                "{}: {why}",
                directory.join(ARTIFACT_PLAN).display()
            ))
        })?;
        let importance = folder.json(&manifest, ARTIFACT_ATTENTION)?;
        // Artifacts made before there were golden answers or ranges have none.
        let golden = folder.json_if_listed(&manifest, ARTIFACT_GOLDEN)?;
        let ranges = folder.json_if_listed(&manifest, ARTIFACT_RANGES)?;
        let copies = Copies {
            prefill: folder.copy(&manifest, Phase::Prefill)?,
            decode: folder.copy(&manifest, Phase::Decode)?,
        };
        for (kept, copy, phase) in [
            (plan.keeps_prefill_copy(), &copies.prefill, "prefill"),
            (plan.decode.scheme.has_own_copy(), &copies.decode, "decode"),
        ] {
            if kept && copy.is_empty() {
                let why = format!("the plan keeps a copy for {phase} and there are no weights");
                return Err(damaged(directory, &why));
            }
        }
        Ok(Self {
            check,
            digest,
            manifest,
            plan,
            importance,
            copies,
            golden,
            ranges,
        })
    }

    /// Over the manifest, which names plan, thresholds and tensors by their digests.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// What the artifact consists of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The plan.
    pub fn plan(&self) -> &PrecisionPlan {
        &self.plan
    }

    /// The thresholds of attention.
    pub fn importance(&self) -> &Importance {
        &self.importance
    }

    /// The first answers of a healthy engine, where the artifact has them.
    pub fn golden(&self) -> Option<&Golden> {
        self.golden.as_ref()
    }

    /// What calibration saw, where the artifact says it.
    pub fn ranges(&self) -> Option<&Ranges> {
        self.ranges.as_ref()
    }

    /// Gives the quantised copies, the thresholds and the plan to the model that they were made for.
    ///
    /// # Errors
    /// Another model, or tensors of another shape.
    pub fn attach_to(self, model: &mut Model) -> Result<()> {
        if self.check == Check::Digests && self.manifest.model_digest != *model.digest() {
            return Err(Error::digest(format!(
                "the artifact {} was made for the model {} and this model is {}: calibrate this model or mount the other one",
                self.digest,
                self.manifest.model_digest,
                model.digest()
            )));
        }
        if let Some(ranges) = &self.ranges {
            let config = model.config();
            ranges.check(config.num_hidden_layers, config.num_key_value_heads)?;
        }
        model.attach(self.copies, Some(self.importance), self.plan)
    }
}

/// The manifest in `directory`, checked.
fn manifest_of(directory: &Path, check: Check) -> Result<Manifest> {
    let path = directory.join(ARTIFACT_MANIFEST);
    let text = read(&path, MAX_JSON_BYTES).map_err(|why| {
        Error::artifact(format!(
            "{why}: is {} an artifact's folder?",
            directory.display()
        ))
    })?;
    let manifest = Manifest::parse(&text)
        .map_err(|why| Error::artifact(format!("{}: {why}", path.display())))?;
    if check == Check::Digests {
        check_name(directory, &manifest, &text)?;
    }
    Ok(manifest)
}

/// A folder named by a digest holds exactly what has that digest.
fn check_name(directory: &Path, manifest: &Manifest, text: &[u8]) -> Result<()> {
    let path = directory.join(ARTIFACT_MANIFEST);
    if manifest.canonical() != text {
        return Err(Error::digest(format!(
            "{} is not as calibration wrote it: calibrate again",
            path.display()
        )));
    }
    let digest = manifest.digest();
    let name = directory
        .canonicalize()
        .ok()
        .and_then(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .unwrap_or_default();
    let named: Option<Digest> = format!("sha256:{name}").parse().ok();
    match named {
        Some(named) if named != digest => Err(Error::digest(format!(
            "{} has the digest {digest} and its folder is named for {named}: calibrate again",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// Reads the files that a manifest lists.
struct Folder<'a> {
    directory: &'a Path,
    check: Check,
}

impl Folder<'_> {
    /// A copy of the block linears, from all of its files.
    fn copy(&self, manifest: &Manifest, phase: Phase) -> Result<QuantisedLinears> {
        let mut linears = Vec::new();
        for entry in manifest.weights(phase) {
            let decoded = weights::decode(&self.file(entry)?)
                .map_err(|why| damaged(&self.directory.join(&entry.path), &why))?;
            linears.extend(decoded);
        }
        weights::model_order(&mut linears);
        QuantisedLinears::from_tensors(linears)
            .map_err(|error| damaged(self.directory, &error.message))
    }

    fn json<T: serde::de::DeserializeOwned>(&self, manifest: &Manifest, path: &str) -> Result<T> {
        let entry = manifest
            .file(path)
            .expect("the manifest was checked for it");
        if entry.bytes > MAX_JSON_BYTES {
            return Err(damaged(
                &self.directory.join(path),
                &format!("{} bytes are too many", entry.bytes),
            ));
        }
        serde_json::from_slice(&self.file(entry)?)
            .map_err(|error| damaged(&self.directory.join(path), &error.to_string()))
    }

    fn json_if_listed<T: serde::de::DeserializeOwned>(
        &self,
        manifest: &Manifest,
        path: &str,
    ) -> Result<Option<T>> {
        let listed = manifest.file(path);
        listed.map(|_| self.json(manifest, path)).transpose()
    }

    /// The file's bytes, of the size and digest that the manifest says.
    fn file(&self, entry: &FileEntry) -> Result<Vec<u8>> {
        let path = self.directory.join(&entry.path);
        // Both the file and `weights/` must be real: a link could lead out of the folder.
        for part in entry
            .path
            .match_indices('/')
            .map(|(end, _)| &entry.path[..end])
            .chain([entry.path.as_str()])
        {
            let part = self.directory.join(part);
            if part.is_symlink() {
                return Err(damaged(&part, "it is a symbolic link"));
            }
        }
        let content = read(&path, entry.bytes)
            .map_err(|why| Error::artifact(format!("{why}: calibrate again")))?;
        if content.len() as u64 != entry.bytes {
            return Err(damaged(
                &path,
                &format!(
                    "it has {} bytes and the manifest says {}",
                    content.len(),
                    entry.bytes
                ),
            ));
        }
        let digest = if self.check == Check::Digests {
            Digest::of_bytes(&content)
        } else {
            entry.sha256.clone()
        };
        if digest != entry.sha256 {
            return Err(Error::digest(format!(
                "{} has the digest {digest} and the manifest says {}: calibrate again",
                path.display(),
                entry.sha256
            )));
        }
        Ok(content)
    }
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, String> {
    files::read(path, limit).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn damaged(path: &Path, why: &str) -> Error {
    Error::artifact(format!(
        "{} is damaged: {why}; calibrate again",
        path.display()
    ))
}
