//! What a download is made of, written beside it: how the next run knows which bytes are still good. Plain data and pure rules.
//!
//! `mod` and `download` ask it. It never trusts a file by its name alone.

use std::path::Path;

use mixquant_crds::Digest;
use serde::{Deserialize, Serialize};

use crate::files;

/// In a finished folder, and beside one that is being made.
pub(super) const RECORD: &str = ".mixquant-fetch.json";
/// The name of a file that is not whole yet ends so.
pub(super) const PART: &str = ".part";

/// A record names some files.
const MAX_RECORD_BYTES: u64 = 4 << 20;

/// A file of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Item {
    /// Its name in the model's folder: a plain file name.
    pub(super) name: String,
    /// Bytes.
    pub(super) size: u64,
    /// What changes when the content does: the store's `ETag`, or the time of its last change.
    pub(super) version: Option<String>,
}

impl Item {
    /// Whether the version is an `ETag`, which a store can be asked to compare.
    pub(super) fn has_e_tag(&self) -> bool {
        self.version
            .as_ref()
            .is_some_and(|version| version.ends_with('"'))
    }
}

/// A download.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Where it came from.
    pub(super) source: String,
    /// Of what.
    pub(super) files: Vec<Item>,
    /// The model's digest, once it is whole.
    pub(super) digest: Option<Digest>,
}

impl Record {
    /// The record in a folder; one that cannot be read is none.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        let text = files::read(&folder.join(RECORD), MAX_RECORD_BYTES).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// As it is written.
    pub(super) fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("a record is plain data")
    }

    /// Whether every file lies in `folder` with its size.
    pub(super) fn is_whole_in(&self, folder: &Path) -> bool {
        self.files.iter().all(|item| {
            std::fs::metadata(folder.join(&item.name))
                .is_ok_and(|file| file.is_file() && file.len() == item.size)
        })
    }

    /// Whether bytes of `item` that an earlier run left may be kept: it read the same version of the same file. A file without a version
    /// could be any.
    pub(super) fn keeps(&self, source: &str, item: &Item) -> bool {
        self.source == source && item.version.is_some() && self.files.contains(item)
    }
}

/// Where to go on in a file of `size` bytes of which `present` are there: behind the last whole range, since only whole ranges are
/// flushed to the disk.
pub(super) fn resume_from(present: u64, size: u64, range: u64) -> u64 {
    // More than the file has cannot be its beginning.
    if present > size {
        0
    } else {
        present - present % range
    }
}

/// How many ranges lie from `from` to `size`.
pub(super) fn ranges(from: u64, size: u64, range: u64) -> usize {
    usize::try_from((size - from).div_ceil(range)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn resuming_never_keeps_a_byte_that_was_not_flushed_and_never_loses_a_whole_range(
            present in 0_u64..10_000, size in 0_u64..10_000, range in 1_u64..500
        ) {
            let from = resume_from(present, size, range);
            prop_assert!(from <= size && from.is_multiple_of(range));
            if present <= size {
                prop_assert!(from <= present && present - from < range);
            } else {
                prop_assert_eq!(from, 0);
            }
            let left = ranges(from, size, range) as u64;
            prop_assert!(left * range >= size - from && (left == 0 || (left - 1) * range < size - from));
        }
    }

    fn item(version: Option<&str>) -> Item {
        Item {
            name: "config.json".into(),
            size: 3,
            version: version.map(str::to_owned),
        }
    }

    #[test]
    fn bytes_are_kept_only_of_the_same_version_from_the_same_source() {
        let record = |version| Record {
            source: "s3://b/m".into(),
            files: vec![item(version)],
            digest: None,
        };
        assert!(record(Some("1")).keeps("s3://b/m", &item(Some("1"))));
        assert!(!record(Some("1")).keeps("s3://b/m", &item(Some("2"))));
        assert!(!record(Some("1")).keeps("s3://b/n", &item(Some("1"))));
        assert!(!record(None).keeps("s3://b/m", &item(None)));
    }

    #[test]
    fn a_record_is_read_back_and_a_damaged_one_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let record = Record {
            source: "s3://b/m".into(),
            files: vec![item(Some("1"))],
            digest: None,
        };
        std::fs::write(folder.path().join(RECORD), record.bytes()).unwrap();
        assert_eq!(Record::read(folder.path()).as_ref(), Some(&record));
        assert!(!record.is_whole_in(folder.path()));
        std::fs::write(folder.path().join("config.json"), "{}\n").unwrap();
        assert!(record.is_whole_in(folder.path()));
        std::fs::write(folder.path().join(RECORD), "{").unwrap();
        assert_eq!(Record::read(folder.path()), None);
    }
}
