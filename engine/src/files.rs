//! Opens files that others wrote: plain ones only, and no more of them than was expected.
//!
//! Everything that reads a model, an artifact, data or a description goes through here. A pipe would make a reader wait for ever, a device would
//! never end, and a size is only a claim: the file is looked at after it is open, without waiting, and is read up to the limit.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read as _, Result};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a plain file to read, following links.
///
/// # Errors
/// The system's, and `InvalidInput` for a folder, a pipe, a socket or a device.
pub(crate) fn open(path: &Path) -> Result<File> {
    // Without it the opening of a pipe waits for a writer. A plain file does not know the difference.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(Error::new(
            ErrorKind::InvalidInput,
            "it is not a plain file",
        ))
    }
}

/// The bytes of a plain file that has at most `limit` of them.
///
/// # Errors
/// As [`open`], and `FileTooLarge`.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let claimed = file.metadata()?.len();
    let mut bytes = Vec::new();
    if claimed <= limit {
        bytes.try_reserve_exact(usize::try_from(claimed).unwrap_or(usize::MAX))?;
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    let found = claimed.max(bytes.len() as u64);
    if found > limit {
        let why = format!("it has {found} bytes, more than the {limit} that such a file may have");
        return Err(Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

/// The text of a plain file that has at most `limit` bytes.
///
/// # Errors
/// As [`read`], and `InvalidData` where the bytes are no UTF-8.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::new(
            ErrorKind::InvalidData,
            format!("it is not UTF-8 at byte {at}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit_and_not_beyond() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        assert_eq!(read_text(&path, u64::MAX).unwrap(), "four");
        let error = read(&path, 3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert!(
            error.to_string().contains("4 bytes, more than the 3"),
            "{error}"
        );
        // Of a file of the kernel's the size says nothing.
        assert_eq!(
            read(Path::new("/proc/self/status"), 3).unwrap_err().kind(),
            ErrorKind::FileTooLarge
        );
    }

    #[test]
    fn what_is_not_a_plain_file_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        for path in [&pipe, folder.path(), Path::new("/dev/zero")] {
            let error = read(path, 100).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
    }
}
