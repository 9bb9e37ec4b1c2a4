//! Finished layers on disk: what lets a killed quantisation go on instead of beginning again.
//!
//! A hidden folder beside the artifacts, named by the digest of everything that the result depends on; a file a layer, named by its content, written
//! whole or not at all. What cannot be read is made again. [`Checkpoints::finish`] removes the folder and what dead runs left; folders of another model
//! or other texts whose run is dead go when the next run begins. Those of the same stay until then: one run makes several copies.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use mixquant_crds::Digest;
use sha2::{Digest as _, Sha256};

use super::quantise::Assignment;
use crate::artifact::weights;
use crate::dataset::Window;
use crate::error::{Error, Result};
use crate::files;
use crate::quant::QuantisedLinear;

/// Goes up when the same inputs give another result.
const VERSION: u32 = 1;
const PREFIX: &str = ".quantise-";
const LOCK: &str = ".lock";

/// The folder of one quantisation.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    /// Locked for the life of this process.
    _lock: File,
}

impl Checkpoints {
    /// Opens the folder of these inputs below `root`, with what an earlier run left in it.
    ///
    /// # Errors
    /// A volume that cannot be written, or another living run with the same inputs.
    pub fn open(
        root: &Path,
        model: &Digest,
        texts: &[Window],
        assignment: &Assignment,
    ) -> Result<Self> {
        let inputs = format!("{PREFIX}{}-", &inputs(model, texts).hex()[..16]);
        let made = Digest::of_bytes(format!("{assignment:?}").as_bytes());
        let folder = root.join(format!("{inputs}{}", &made.hex()[..16]));
        fs::create_dir_all(&folder).map_err(|error| failed(&folder, &error))?;
        remove_stale(root, Some(&inputs));
        let lock = File::create(folder.join(LOCK)).map_err(|error| failed(&folder, &error))?;
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::storage(format!(
                "{} is in use: another run quantises the same model with the same texts, wait for it",
                folder.display()
            )));
        }
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    /// The layer that an earlier run finished.
    pub(super) fn load(&self, layer: usize) -> Option<Vec<QuantisedLinear>> {
        let path = self.find(layer)?;
        let content = files::read(&path, u64::MAX).ok()?;
        let whole = path.file_name()?.to_str()? == file_name(layer, &content);
        let linears = weights::decode(&content).ok().filter(|_| whole);
        let Some(mut linears) = linears else {
            tracing::warn!(path = %path.display(), "a finished layer is damaged: it is quantised again");
            return None;
        };
        weights::model_order(&mut linears);
        Some(linears)
    }

    fn find(&self, layer: usize) -> Option<PathBuf> {
        let prefix = layer_prefix(layer);
        let mut entries = fs::read_dir(&self.folder).ok()?.flatten();
        let entry =
            entries.find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?;
        Some(entry.path())
    }

    /// Keeps a finished layer.
    ///
    /// # Errors
    /// A full or failing disk.
    pub(super) fn save(&self, layer: usize, linears: &[QuantisedLinear]) -> Result<()> {
        let content = weights::encode(&linears.iter().collect::<Vec<_>>());
        let path = self.folder.join(file_name(layer, &content));
        let write = || -> io::Result<()> {
            if let Some(damaged) = self.find(layer) {
                fs::remove_file(damaged)?;
            }
            let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
            file.write_all(&content)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(|error| failed(&self.folder, &error))
    }

    /// The result is elsewhere now.
    pub fn finish(self) {
        let _stays = fs::remove_dir_all(&self.folder);
        if let Some(root) = self.folder.parent() {
            remove_stale(root, None);
        }
    }
}

fn layer_prefix(layer: usize) -> String {
    format!("layer-{layer:05}-")
}

fn file_name(layer: usize, content: &[u8]) -> String {
    let digest = Digest::of_bytes(content);
    format!("{}{}.safetensors", layer_prefix(layer), digest.hex())
}

/// Everything that the result depends on but for what is made of it.
fn inputs(model: &Digest, texts: &[Window]) -> Digest {
    let mut hash = Sha256::new();
    hash.update(format!("{VERSION} {}\n", model.as_str()));
    for text in texts {
        hash.update((text.ids.len() as u64).to_le_bytes());
        for id in &text.ids {
            hash.update(id.to_le_bytes());
        }
    }
    Digest::of_bytes(&hash.finalize())
}

/// Removes the folders that no living process holds, but for those whose names begin with `kept`.
fn remove_stale(root: &Path, kept: Option<&str>) {
    let Ok(entries) = fs::read_dir(root) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with(PREFIX) || kept.is_some_and(|kept| name.starts_with(kept)) {
            continue;
        }
        let lock = files::open(&entry.path().join(LOCK));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _stays = fs::remove_dir_all(entry.path());
        }
    }
}

fn failed(folder: &Path, error: &io::Error) -> Error {
    Error::storage(format!(
        "cannot keep finished layers in {}: {error}; free space or check the volume",
        folder.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::quantisers::{Quantiser, Recipe};
    use crate::quant::Scheme;

    fn open(root: &Path, ids: &[u32], scheme: Scheme) -> Result<Checkpoints> {
        let text = Window {
            ids: ids.to_vec(),
            slice: None,
        };
        let assignment = Assignment::uniform(Recipe {
            scheme,
            quantiser: Quantiser::Rtn,
        });
        Checkpoints::open(root, &Digest::of_bytes(b"model"), &[text], &assignment)
    }

    fn layer() -> Vec<QuantisedLinear> {
        let name = "model.layers.0.mlp.up_proj".to_owned();
        vec![QuantisedLinear::from_rows(
            name,
            &[1.0, -2.0, 3.0, 0.5],
            2,
            2,
        )]
    }

    #[test]
    fn a_finished_layer_is_found_by_the_same_inputs_only() {
        let root = tempfile::tempdir().unwrap();
        let first = open(root.path(), &[1, 2], Scheme::W8A8).unwrap();
        assert_eq!(first.load(0), None);
        first.save(0, &layer()).unwrap();
        drop(first);
        let again = open(root.path(), &[1, 2], Scheme::W8A8).unwrap();
        assert_eq!(again.load(0), Some(layer()));
        assert_eq!(again.load(1), None);
        drop(again);
        for (ids, scheme) in [([1, 3], Scheme::W8A8), ([1, 2], Scheme::FP8)] {
            assert_eq!(open(root.path(), &ids, scheme).unwrap().load(0), None);
        }
        let left = fs::read_dir(root.path()).unwrap().count();
        assert_eq!(left, 1, "folders of dead runs go");
    }

    #[test]
    fn what_else_is_made_of_the_same_texts_stays_until_the_run_is_finished() {
        let root = tempfile::tempdir().unwrap();
        let killed = open(root.path(), &[1, 2], Scheme::W8A8).unwrap();
        killed.save(0, &layer()).unwrap();
        drop(killed);
        let other = open(root.path(), &[1, 2], Scheme::FP8).unwrap();
        let again = open(root.path(), &[1, 2], Scheme::W8A8).unwrap();
        assert_eq!(again.load(0), Some(layer()));
        other.finish();
        assert_eq!(again.load(0), Some(layer()), "a living run's folder stays");
        drop(again);
        open(root.path(), &[1, 2], Scheme::FP8).unwrap().finish();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_layer_is_made_again() {
        let root = tempfile::tempdir().unwrap();
        let saved = open(root.path(), &[1], Scheme::W8A8).unwrap();
        saved.save(0, &layer()).unwrap();
        let path = saved.find(0).unwrap();
        let mut content = fs::read(&path).unwrap();
        *content.last_mut().unwrap() ^= 1;
        fs::write(&path, &content).unwrap();
        assert_eq!(saved.load(0), None);
        fs::write(&path, &content[..10]).unwrap();
        assert_eq!(saved.load(0), None);
        saved.save(0, &layer()).unwrap();
        assert_eq!(saved.load(0), Some(layer()));
        saved.finish();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn two_runs_do_not_write_the_same_folder() {
        let root = tempfile::tempdir().unwrap();
        let _first = open(root.path(), &[1], Scheme::W8A8).unwrap();
        assert!(
            open(root.path(), &[1], Scheme::W8A8)
                .unwrap_err()
                .message
                .contains("in use")
        );
        let _other = open(root.path(), &[2], Scheme::W8A8).unwrap();
    }
}
