//! One file, from a store to the disk: in ranges, each flushed before it counts, under another name until it is whole.
//!
//! Called by `mod` for every file that is not there yet. A broken connection costs at most one range.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use futures::StreamExt as _;
use mixquant_crds::FailureReason;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore as _};

use super::inventory::version;
use super::record::{Item, PART, ranges, resume_from};
use super::refusal::changed;
use super::source::Source;
use crate::artifact::store::cannot_write;
use crate::progress::Stage;
use crate::{Error, Result};

/// The longest pause between two tries of a range.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// What every file of a download shares.
pub(super) struct Download<'a> {
    pub(super) source: &'a Source,
    /// Where the files go.
    pub(super) folder: &'a Path,
    /// Bytes of a range.
    pub(super) range: u64,
    /// Of all files, for the message of a full disk.
    pub(super) total: u64,
    pub(super) stage: Mutex<Stage>,
}

/// How a try of a range ended badly.
enum Ended {
    /// Another try may go on.
    Broken(String),
    /// None does.
    Failed(Error),
}

impl Download<'_> {
    /// The bytes of `item` that need not be fetched again.
    pub(super) fn present(&self, item: &Item) -> u64 {
        let len =
            |name: &str| std::fs::metadata(self.folder.join(name)).map_or(0, |file| file.len());
        if len(&item.name) == item.size && self.folder.join(&item.name).is_file() {
            return item.size;
        }
        resume_from(len(&format!("{}{PART}", item.name)), item.size, self.range)
    }

    /// Brings `item` into the folder.
    ///
    /// # Errors
    /// What the store or the disk refuses, and an object that is not what it was said to be.
    pub(super) async fn bring(&self, item: &Item) -> Result<()> {
        let whole = self.folder.join(&item.name);
        if whole.is_file() && self.present(item) == item.size {
            return Ok(());
        }
        let path = self.folder.join(format!("{}{PART}", item.name));
        let failed = |error: &io::Error| cannot_write("the model", self.folder, error, self.total);
        let open = || {
            let from = self.present(item);
            let mut options = OpenOptions::new();
            let file = options
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)?;
            file.set_len(from)?;
            Ok((file, from))
        };
        let (mut file, mut from) = open().map_err(|error: io::Error| failed(&error))?;
        let mut broken = 0;
        while from < item.size {
            let to = item.size.min(from + self.range);
            match self.range(item, from..to, &mut file).await {
                Ok(()) => {
                    (from, broken) = (to, 0);
                    self.stage
                        .lock()
                        .expect("no holder of this lock panics")
                        .advance()?;
                }
                Err(Ended::Failed(error)) => return Err(error),
                Err(Ended::Broken(why)) => {
                    broken += 1;
                    self.pause(item, from, broken, &why).await?;
                }
            }
        }
        file.sync_all()
            .and_then(|()| std::fs::rename(&path, &whole))
            .map_err(|error| failed(&error))
    }

    /// Waits before the next try of a range, or gives up.
    async fn pause(&self, item: &Item, from: u64, broken: usize, why: &str) -> Result<()> {
        let patience = &self.source.patience;
        let name = self.source.shown(&item.name);
        if broken > patience.retries {
            return Err(Error::new(
                FailureReason::SourceUnavailable,
                format!(
                    "{name}: broke off {broken} times at byte {from} of {}: {why}; run it again to go on",
                    item.size
                ),
            ));
        }
        tracing::info!(%name, at = from, tries = broken, %why, "a transfer broke off and is tried again");
        let doublings = u32::try_from(broken - 1).unwrap_or(u32::MAX).min(10);
        tokio::time::sleep((patience.first_pause * 2_u32.pow(doublings)).min(MAX_PAUSE)).await;
        Ok(())
    }

    /// One range, flushed.
    async fn range(&self, item: &Item, range: Range<u64>, file: &mut File) -> Result<(), Ended> {
        let written = |error: io::Error| {
            Ended::Failed(cannot_write("the model", self.folder, &error, self.total))
        };
        let answer = self.ask(item, range.clone()).await.map_err(Ended::Failed)?;
        let mut left = range.end - range.start;
        file.seek(SeekFrom::Start(range.start)).map_err(written)?;
        let mut body = answer.into_stream();
        while left > 0 {
            let next = tokio::time::timeout(self.source.patience.stall, body.next());
            let bytes = match next.await {
                Err(_late) => return Err(Ended::Broken("the server sends nothing more".into())),
                Ok(None) => {
                    return Err(Ended::Broken(format!(
                        "{left} bytes of a range are missing"
                    )));
                }
                Ok(Some(Err(error))) => {
                    return Err(Ended::Broken(self.source.failed("", &error).message));
                }
                Ok(Some(Ok(bytes))) => bytes,
            };
            left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
                Ended::Broken("the server sends more than it was asked for".into())
            })?;
            file.write_all(&bytes).map_err(written)?;
        }
        file.sync_data().map_err(written)
    }

    /// Asks for a range of exactly this version of the object.
    async fn ask(&self, item: &Item, range: Range<u64>) -> Result<GetResult> {
        let source = self.source;
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: item.version.clone().filter(|_| item.has_e_tag()),
            ..GetOptions::default()
        };
        let answer = source
            .store
            .get_opts(&source.object(&item.name), options)
            .await
            .map_err(|error| source.failed(&item.name, &error))?;
        // Not every server looks at If-Match.
        let same = answer.meta.size == item.size
            && answer.range == range
            && version(&answer.meta) == item.version;
        if same {
            Ok(answer)
        } else {
            Err(changed(&source.shown(&item.name)))
        }
    }
}

/// Ranges of all files, and how many of them are there.
pub(super) fn counted(download: &Download<'_>, files: &[Item]) -> (usize, usize) {
    let all: usize = files
        .iter()
        .map(|item| ranges(0, item.size, download.range))
        .sum();
    let left: usize = files
        .iter()
        .map(|item| ranges(download.present(item), item.size, download.range))
        .sum();
    (all, all - left)
}
