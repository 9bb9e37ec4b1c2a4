//! Writing an artifact's folder so that a process killed at any moment leaves nothing that validates and nothing that stays.
//!
//! A draft is a hidden folder beside the finished ones, held by a file lock for as long as its process lives; publishing syncs and renames it.
//! `calibrate` calls it. It never changes a finished artifact except to add its report and its owners.
//!
//! Several services may keep their artifacts in one folder, and the same inputs give the same artifact: each signs what it had made, and
//! what leaves with its last owner is removed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use mixquant_crds::Digest;
use mixquant_crds::names::{ARTIFACT_MANIFEST, ARTIFACT_OWNERS, ARTIFACT_REPORT, ARTIFACT_WEIGHTS};

use super::manifest::{FileEntry, Manifest};
use super::{Artifact, Check};
use crate::error::{Error, Result};
use crate::files;

/// Hidden folders with this prefix belong to a run that lives or died.
const DRAFT_PREFIX: &str = ".draft-";
/// An artifact on its way out.
const OLD_PREFIX: &str = ".old-";
/// Held while drafts are made, cleaned and published.
const LOCK: &str = ".lock";
/// Signs an artifact that was there before owners were: somebody may need it.
const UNKNOWN_OWNER: &str = ".unknown";

/// An artifact that is being written. Dropped without [`Draft::publish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    root: PathBuf,
    folder: tempfile::TempDir,
    /// Locked for the life of this process: how another run knows that the folder is not stale.
    _lock: File,
    files: Vec<FileEntry>,
    owner: Option<String>,
    /// What the whole artifact will take, for the message of a full disk.
    expected_bytes: u64,
}

/// Where a draft ended up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// `<root>/<hex digest>`.
    pub path: PathBuf,
    /// The artifact's digest.
    pub digest: Digest,
    /// Whether the same artifact was there already.
    pub reused: bool,
}

impl Draft {
    /// Starts a draft below `root`, which is made when missing, after removing what dead runs left there.
    ///
    /// # Errors
    /// A root that cannot be written.
    pub fn new(root: &Path, expected_bytes: u64) -> Result<Self> {
        let failed = |error: &io::Error| write_error(root, error, expected_bytes);
        fs::create_dir_all(root).map_err(|error| failed(&error))?;
        let _guard = lock_root(root).map_err(|error| failed(&error))?;
        remove_stale(root);
        let folder = tempfile::Builder::new()
            .prefix(DRAFT_PREFIX)
            .tempdir_in(root)
            .map_err(|error| failed(&error))?;
        let lock = File::create(folder.path().join(LOCK)).map_err(|error| failed(&error))?;
        // A file system without locks only loses the cleaning of stale drafts.
        let _unsupported = lock.try_lock();
        fs::create_dir(folder.path().join(ARTIFACT_WEIGHTS)).map_err(|error| failed(&error))?;
        Ok(Self {
            root: root.to_owned(),
            folder,
            _lock: lock,
            files: Vec::new(),
            owner: None,
            expected_bytes,
        })
    }

    /// Signs what is published with the name of a service.
    #[must_use]
    pub fn owned_by(mut self, owner: Option<String>) -> Self {
        self.owner = owner;
        self
    }

    /// Writes one file of the artifact and syncs it.
    ///
    /// # Errors
    /// A full or failing disk.
    pub fn write(&mut self, path: &str, content: &[u8]) -> Result<()> {
        write_synced(&self.folder.path().join(path), content)
            .map_err(|error| write_error(&self.root, &error, self.expected_bytes))?;
        self.files.push(FileEntry {
            path: path.to_owned(),
            bytes: content.len() as u64,
            sha256: Digest::of_bytes(content),
        });
        Ok(())
    }

    /// Writes the manifest and moves the draft to its digest's name. An artifact that is there and whole is kept, a damaged one is replaced.
    ///
    /// # Errors
    /// A full or failing disk.
    pub fn publish(mut self, model_digest: Digest) -> Result<Published> {
        let manifest = Manifest::new(model_digest, std::mem::take(&mut self.files));
        let digest = manifest.digest();
        let path = self.root.join(digest.hex());
        let (root, expected_bytes) = (self.root.clone(), self.expected_bytes);
        let reused = self
            .move_to(&path, &manifest)
            .map_err(|error| write_error(&root, &error, expected_bytes))?;
        Ok(Published {
            path,
            digest,
            reused,
        })
    }

    fn move_to(self, path: &Path, manifest: &Manifest) -> io::Result<bool> {
        let _guard = lock_root(&self.root)?;
        if Artifact::open(path, Check::Digests)
            .is_ok_and(|artifact| *artifact.digest() == manifest.digest())
        {
            if let Some(owner) = &self.owner {
                if owners(path)?.is_empty() {
                    sign(path, UNKNOWN_OWNER)?;
                }
                sign(path, owner)?;
            }
            return Ok(true);
        }
        let draft = self.folder.path();
        // Whoever shares the damaged one shares what takes its place.
        for owner in owners(path)?.iter().chain(&self.owner) {
            sign(draft, owner)?;
        }
        write_synced(&draft.join(ARTIFACT_MANIFEST), &manifest.canonical())?;
        fs::remove_file(draft.join(LOCK))?;
        set_readable(draft)?;
        sync_folder(&draft.join(ARTIFACT_WEIGHTS))?;
        sync_folder(draft)?;
        let old = if path.symlink_metadata().is_ok() {
            let old = tempfile::Builder::new()
                .prefix(OLD_PREFIX)
                .tempdir_in(&self.root)?;
            fs::rename(path, old.path().join("artifact"))?;
            Some(old)
        } else {
            None
        };
        fs::rename(draft, path)?;
        let _renamed = self.folder.keep();
        sync_folder(&self.root)?;
        old.map_or(Ok(()), tempfile::TempDir::close)?;
        Ok(false)
    }
}

/// Puts `report.json` into a finished artifact, whole or not at all. It is no part of the digest.
///
/// # Errors
/// A full or failing disk.
pub fn write_report(artifact: &Path, report: &[u8]) -> Result<()> {
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(artifact)?;
        file.write_all(report)?;
        file.as_file().sync_all()?;
        set_readable(file.path())?;
        file.persist(artifact.join(ARTIFACT_REPORT))
            .map_err(|error| error.error)?;
        sync_folder(artifact)
    };
    write().map_err(|error| write_error(artifact, &error, report.len() as u64))
}

/// Removes the artifacts that `owner` needs no more; what another owner has too is only given up, and what this one has not signed stays.
/// Killed at any moment, it leaves each artifact whole or hidden, and what is hidden goes with the next draft.
///
/// # Errors
/// A root that cannot be written.
pub fn remove(root: &Path, owner: &str, artifacts: &[Digest]) -> Result<()> {
    let give_up = |artifact: &Digest| {
        let path = root.join(artifact.hex());
        let owners = owners(&path)?;
        if !owners.iter().any(|known| known == owner) {
            return Ok(());
        }
        if owners.len() > 1 {
            fs::remove_file(path.join(ARTIFACT_OWNERS).join(owner))?;
            return sync_folder(&path.join(ARTIFACT_OWNERS));
        }
        let old = tempfile::Builder::new()
            .prefix(OLD_PREFIX)
            .tempdir_in(root)?;
        fs::rename(&path, old.path().join("artifact"))?;
        sync_folder(root)?;
        tracing::info!(path = %path.display(), "removing an artifact that no revision needs");
        old.close()
    };
    let work = || {
        if artifacts.is_empty() || !root.exists() {
            return Ok(());
        }
        let _guard = lock_root(root)?;
        artifacts.iter().try_for_each(give_up)
    };
    work().map_err(|error| {
        let root = root.display();
        Error::storage(format!(
            "cannot remove artifacts that no revision needs below {root}: {error}; make it writable for this user"
        ))
    })
}

/// Who signed an artifact, by name; nobody where there is none.
fn owners(artifact: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(artifact.join(ARTIFACT_OWNERS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut owners = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    owners.sort();
    Ok(owners)
}

fn sign(artifact: &Path, owner: &str) -> io::Result<()> {
    let folder = artifact.join(ARTIFACT_OWNERS);
    if !folder.exists() {
        fs::create_dir(&folder)?;
        set_readable(&folder)?;
    }
    File::create(folder.join(owner))?.sync_all()?;
    sync_folder(&folder)?;
    sync_folder(artifact)
}

/// Removes drafts whose process is gone, and artifacts that were on their way out. What cannot be removed stays for the next run.
fn remove_stale(root: &Path) {
    let Ok(entries) = fs::read_dir(root) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let stale = name.starts_with(OLD_PREFIX)
            || (name.starts_with(DRAFT_PREFIX) && !is_alive(&entry.path()));
        if stale {
            tracing::info!(path = %entry.path().display(), "removing what a killed run left");
            let _stays = fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether a living process holds the draft. A draft without a lock file is one that was killed while it was made or published: the root's lock excludes both.
fn is_alive(draft: &Path) -> bool {
    match files::open(&draft.join(LOCK)) {
        Ok(file) => !matches!(file.try_lock(), Ok(())),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// One run at a time changes the root's entries. Released by the kernel when the process dies.
pub(crate) fn lock_root(root: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(root.join(LOCK))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => file.lock()?,
        Err(TryLockError::Error(error)) => {
            tracing::warn!(%error, root = %root.display(), "no file locks here: let one process at a time write here");
        }
    }
    Ok(file)
}

pub(crate) fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Some network file systems cannot sync a folder; they write its entries through anyway.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// Temporary files and folders are private; engine pods may run as another user than the Job.
pub(crate) fn set_readable(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn write_error(path: &Path, error: &io::Error, bytes: u64) -> Error {
    cannot_write("the artifact", path, error, bytes)
}

/// What a disk refuses: `what` of about `bytes` cannot be written below `path`, and the fix.
pub(crate) fn cannot_write(what: &str, path: &Path, error: &io::Error, bytes: u64) -> Error {
    let path = path.display();
    let fix = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            format!("about {bytes} bytes are needed: free space or use a larger volume")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "make it writable for this user".to_owned()
        }
        _ => "check the volume and try again".to_owned(),
    };
    Error::storage(format!("cannot write {what} below {path}: {error}; {fix}"))
}
