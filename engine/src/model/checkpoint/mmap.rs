//! Maps a weights file read-only into memory, and lets go of what was read: the only unsafe code outside the kernels.

use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

use crate::{Error, Result, files};

/// The bytes of a whole, non-empty file.
///
/// # Errors
/// The file is missing, empty or cannot be mapped.
#[expect(
    unsafe_code,
    reason = "a mapping is only as constant as the file under it"
)]
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let failed = |error: std::io::Error| {
        let fix = match error.kind() {
            std::io::ErrorKind::NotFound => "is missing: download the model again",
            std::io::ErrorKind::PermissionDenied => "cannot be read: check its permissions",
            std::io::ErrorKind::InvalidInput => {
                "is not a file: point at a Hugging Face model directory"
            }
            _ => "cannot be mapped: check the volume",
        };
        Error::model(format!("{}: {fix} ({error})", path.display()))
    };
    let file = files::open(path).map_err(failed)?;
    // SAFETY: the mapping is private and read-only. Model volumes are mounted read-only in pods and nobody writes into a model that serves;
    // every length and offset in the file is checked before bytes are read as numbers, and all bit patterns are valid numbers.
    unsafe { Mmap::map(&file) }.map_err(failed)
}

/// Lets go of the memory behind some bytes of a mapping: they are read from the file again when they are used again. What a weight was packed
/// from, or only hashed, would else stay in memory beside what computes.
#[expect(
    unsafe_code,
    reason = "of other mappings than these, advice could lose the contents"
)]
pub(in crate::model) fn release(map: &Mmap, bytes: std::ops::Range<usize>) {
    // SAFETY: the mapping is read-only, so no page of it differs from the file, which gives the same bytes again.
    let advised =
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
    if let Err(error) = advised {
        tracing::debug!(%error, "the pages of a weights file stay in memory");
    }
}
