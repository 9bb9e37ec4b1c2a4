//! Model supply: brings a model from an object store or a web server into a folder, so that a process killed at any moment loses at most
//! a range and never leaves a folder that looks whole and is not.
//!
//! `fetch --to DIR` works in `.NAME.fetch` beside it, which a file lock gives to one process at a time, compares the model's digest, and
//! renames. A folder that is whole is left alone. It never reads a credential but from the environment, and nothing is served from here.

mod client;
mod download;
mod inventory;
mod record;
mod refusal;
mod source;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use futures::{StreamExt as _, TryStreamExt as _};
use mixquant_crds::Digest;

use self::download::{Download, counted};
use self::record::{Item, RECORD, Record};
pub use self::source::{Address, Patience};
use crate::artifact::store::{cannot_write, lock_root, set_readable, sync_folder, write_synced};
use crate::progress::Progress;
use crate::{Error, Result, model};

/// Bytes of a range by default: what a broken connection costs at most.
pub const RANGE_BYTES: u64 = 16 << 20;
/// Files at once by default.
pub const CONNECTIONS: u16 = 4;

/// What to bring, and where to.
#[derive(Debug, Clone)]
pub struct Options {
    /// From where.
    pub from: Address,
    /// The folder that will be the model's.
    pub to: PathBuf,
    /// The model's digest, as `inspect` prints it; another model is refused.
    pub digest: Option<Digest>,
    /// Files at once, at least 1.
    pub connections: usize,
    /// Bytes of a range, at least 1.
    pub range: u64,
    /// How often a request is tried.
    pub patience: Patience,
}

/// What was brought.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Fetched {
    /// The folder.
    pub path: PathBuf,
    /// The model's.
    pub digest: Digest,
    /// Of all files.
    pub bytes: u64,
    /// How many.
    pub files: usize,
    /// The folder was whole before.
    pub reused: bool,
}

/// Brings the model. `variable` looks into the environment for credentials.
///
/// # Errors
/// What the store, the disk or the digest refuses, and a signal to stop; run again, it goes on where it was.
pub fn run(
    options: &Options,
    progress: &Progress,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Fetched> {
    let place = Place::of(&options.to)?;
    let failed = |error: std::io::Error| cannot_write("the model", &options.to, &error, 0);
    std::fs::create_dir_all(&place.work).map_err(failed)?;
    let _lock = lock_root(&place.work).map_err(failed)?;
    // A folder that was made of the wanted digest is whole whatever the source holds today: nothing is asked.
    if let (Some(wanted), Some(record)) = (&options.digest, Record::read(&place.to))
        && record.digest.as_ref() == Some(wanted)
        && record.is_whole_in(&place.to)
    {
        return Ok(place.fetched(&record, wanted.clone(), true));
    }
    let source = source::open(&options.from, options.patience, variable)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Error::internal(format!("cannot start the downloads: {error}")))?;
    let result = runtime.block_on(async {
        let files = inventory::find(&source).await?;
        place.bring(options, &source, files, progress).await
    });
    // A stalled connection must not hold up the end.
    runtime.shutdown_background();
    result
}

/// The folder and where it is made.
struct Place {
    to: PathBuf,
    work: PathBuf,
}

impl Place {
    fn of(to: &Path) -> Result<Self> {
        let name = to.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| {
            Error::storage(format!(
                "--to {}: name the folder that will be the model's, below one that exists",
                to.display()
            ))
        })?;
        Ok(Self {
            work: to.with_file_name(format!(".{name}.fetch")),
            to: to.to_owned(),
        })
    }

    fn fetched(&self, record: &Record, digest: Digest, reused: bool) -> Fetched {
        Fetched {
            path: self.to.clone(),
            digest,
            bytes: record.files.iter().map(|item| item.size).sum(),
            files: record.files.len(),
            reused,
        }
    }

    async fn bring(
        &self,
        options: &Options,
        source: &source::Source,
        files: Vec<Item>,
        progress: &Progress,
    ) -> Result<Fetched> {
        let mut record = Record {
            source: source.uri.clone(),
            files,
            digest: None,
        };
        if let Some(digest) = self.is_there(&record, options.digest.as_ref()) {
            return Ok(self.fetched(&record, digest, true));
        }
        let total = record.files.iter().map(|item| item.size).sum();
        let folder = self.work.join("model");
        let failed = |error: std::io::Error| cannot_write("the model", &self.to, &error, total);
        self.prepare(&folder, &record).map_err(failed)?;
        let mut download = Download {
            source,
            folder: &folder,
            range: options.range.max(1),
            total,
            stage: Mutex::new(progress.stage("fetch", 0)),
        };
        let (ranges, done) = counted(&download, &record.files);
        let mut stage = progress.stage("fetch", ranges);
        stage.skip(done);
        download.stage = Mutex::new(stage);
        let brought = record.files.iter().map(|item| download.bring(item));
        futures::stream::iter(brought)
            .buffer_unordered(options.connections.max(1))
            .try_collect::<Vec<()>>()
            .await?;
        let digest = check(&folder, options.digest.as_ref())?;
        record.digest = Some(digest.clone());
        self.publish(&folder, &record).map_err(failed)?;
        Ok(self.fetched(&record, digest, false))
    }

    /// The digest of the folder where it already is what `record` says.
    fn is_there(&self, record: &Record, wanted: Option<&Digest>) -> Option<Digest> {
        let there = Record::read(&self.to)?;
        let digest = there.digest.clone()?;
        let same = record
            .files
            .iter()
            .all(|item| there.keeps(&record.source, item))
            && there.files.len() == record.files.len()
            && there.is_whole_in(&self.to)
            && wanted.is_none_or(|wanted| *wanted == digest);
        same.then_some(digest)
    }

    /// Keeps what an earlier run left of the same files, removes the rest, and writes down what is being made.
    fn prepare(&self, folder: &Path, record: &Record) -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let before = Record::read(&self.work);
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            let name = name.strip_suffix(record::PART).unwrap_or(name);
            let item = record.files.iter().find(|item| item.name == name);
            let keeps = |item: &Item| {
                let before = before.as_ref();
                before.is_some_and(|before| before.keeps(&record.source, item))
            };
            if !item.is_some_and(keeps) {
                std::fs::remove_file(entry.path())?;
            }
        }
        let path = self.work.join(RECORD);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        write_synced(&path, &record.bytes())
    }

    /// Renames the finished folder into place; one that is there and is another's goes out of the way first.
    fn publish(&self, folder: &Path, record: &Record) -> std::io::Result<()> {
        write_synced(&folder.join(RECORD), &record.bytes())?;
        for item in &record.files {
            set_readable(&folder.join(&item.name))?;
        }
        set_readable(folder)?;
        sync_folder(folder)?;
        let old = self.work.join("old");
        if old.symlink_metadata().is_ok() {
            std::fs::remove_dir_all(&old)?;
        }
        if self.to.symlink_metadata().is_ok() {
            std::fs::rename(&self.to, &old)?;
        }
        std::fs::rename(folder, &self.to)?;
        sync_folder(self.to.parent().unwrap_or(Path::new(".")))?;
        let _stays = std::fs::remove_file(self.work.join(RECORD));
        let _stays = std::fs::remove_dir_all(&old);
        Ok(())
    }
}

/// The model's digest. What is damaged or another model is removed: it would be kept, and be as wrong, for good.
fn check(folder: &Path, wanted: Option<&Digest>) -> Result<Digest> {
    let removed = |error: Error| {
        let _stays = std::fs::remove_dir_all(folder);
        error
    };
    let digest = model::digest_of(folder).map_err(removed)?;
    match wanted {
        Some(wanted) if *wanted != digest => Err(removed(Error::digest(format!(
            "the model has the digest {digest}, not {wanted}: the source holds another model or a damaged copy; correct --digest (spec.model.digest) or the source",
        )))),
        _ => Ok(digest),
    }
}
