//! The difference log: one JSON line for each prompt whose quantised and precise answers were too far apart, in a file of bounded size.
//!
//! A thread of its own writes, and what it cannot write is dropped and counted: a full or hanging disk never holds up or fails a
//! request. Prompts are kept as a digest; their text only where the operator of the engine asked for it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use mixquant_crds::Digest;
use serde::{Deserialize, Serialize};

use super::Reason;
use super::read::Check;
use crate::{Error, Result};

/// Records that wait for the disk at most.
const WAITING: usize = 64;
/// The least that a log may be bounded to: a few records.
pub const MIN_BYTES: u64 = 16 << 10;
/// Bytes of a prompt's text that a record keeps at most.
const TEXT_BYTES: usize = 4 << 10;

/// Where differences are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The file; `FILE.1` beside it holds the older half.
    pub file: PathBuf,
    /// Both together have at most so many bytes, at least [`MIN_BYTES`].
    pub bytes: u64,
    /// Whether records hold the prompt's text.
    pub text: bool,
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Record {
    /// Seconds since the epoch.
    pub time: u64,
    /// Why the prompt was read again.
    pub reason: &'static str,
    /// The scheme of the pass that was not trusted.
    pub scheme: &'static str,
    /// Over the prompt's ids, each as 4 bytes, little-endian.
    pub prompt_sha256: Digest,
    /// How many ids.
    pub prompt_tokens: usize,
    /// KL(precise ‖ quantised) of the first token, nats; absent when a logit was no number.
    pub kl: Option<f64>,
    /// The precise logits' lead of the most likely token.
    pub margin: Option<f64>,
    /// KL(full precise prefill ‖ served), of audited prompts.
    pub audit_kl: Option<f64>,
    /// The most likely tokens of the quantised pass.
    pub quantised_top: Vec<TopToken>,
    /// The same of the precise pass.
    pub precise_top: Vec<TopToken>,
    /// The prompt's text, its beginning at least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A token and how likely it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopToken {
    /// Its id.
    pub token: u32,
    /// Natural logarithm.
    pub logprob: f32,
}

impl Record {
    /// What the valve saw at a prompt.
    pub fn new(
        time: u64,
        reason: Reason,
        prompt: &[u32],
        check: &Check,
        text: Option<String>,
    ) -> Self {
        let bytes: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
        let top = |list: &[(u32, f32)]| {
            let tokens = list.iter();
            tokens
                .map(|&(token, logprob)| TopToken { token, logprob })
                .collect()
        };
        Self {
            time,
            reason: reason.word(),
            scheme: "W8A8",
            prompt_sha256: Digest::of_bytes(&bytes),
            prompt_tokens: prompt.len(),
            kl: check.comparison.map(|comparison| comparison.kl),
            margin: check.comparison.map(|comparison| comparison.margin),
            audit_kl: check.audit.flatten().map(|comparison| comparison.kl),
            quantised_top: top(&check.quantised_top),
            precise_top: top(&check.precise_top),
            text: text.map(shorten),
        }
    }

    /// The line with its end.
    fn line(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("a record is plain data");
        line.push(b'\n');
        line
    }
}

fn shorten(mut text: String) -> String {
    let end = (0..=TEXT_BYTES.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

/// The log and the thread that writes it. Dropped, it waits for the records that were taken.
#[derive(Debug)]
pub struct DifferenceLog {
    sender: Option<SyncSender<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
    text: bool,
    on: Told,
}

/// Is told of each record whether it was written.
type Told = std::sync::Arc<dyn Observer>;

/// Counts what became of records.
pub trait Observer: std::fmt::Debug + Send + Sync {
    /// A record was written, or dropped.
    fn record(&self, written: bool);
}

impl DifferenceLog {
    /// Opens the file, or begins it. A line that a kill cut short stays alone.
    ///
    /// # Errors
    /// A bound that is too small, a file that cannot be opened, or one that is no plain file.
    pub fn open(options: &Options, on: Told) -> Result<Self> {
        if options.bytes < MIN_BYTES {
            return Err(Error::plan(format!(
                "--difference-log-bytes is {}: give at least {MIN_BYTES}",
                options.bytes
            )));
        }
        let file = Rotating::open(&options.file, options.bytes).map_err(|error| {
            Error::storage(format!(
                "cannot write the difference log {}: {error}; give another --difference-log",
                options.file.display()
            ))
        })?;
        let (sender, receiver) = sync_channel(WAITING);
        let told = on.clone();
        let thread = std::thread::Builder::new()
            .name("difference-log".into())
            .spawn(move || write_all(file, &receiver, told.as_ref()))
            .map_err(|error| {
                Error::internal(format!("cannot start the difference log: {error}"))
            })?;
        Ok(Self {
            sender: Some(sender),
            thread: Some(thread),
            text: options.text,
            on,
        })
    }

    /// Whether records hold text.
    pub fn wants_text(&self) -> bool {
        self.text
    }

    /// Takes a record, or drops it when the disk is behind. Never waits.
    pub fn push(&self, record: &Record) {
        let taken = self
            .sender
            .as_ref()
            .map(|sender| sender.try_send(record.line()));
        if let None | Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) = taken {
            self.on.record(false);
        }
    }
}

impl Drop for DifferenceLog {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it was printed by then; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn write_all(mut file: Rotating, records: &Receiver<Vec<u8>>, on: &dyn Observer) {
    let mut failing = false;
    for line in records {
        let written = file.append(&line);
        on.record(written.is_ok());
        match written {
            Ok(()) => failing = false,
            // Once until it works again: a full disk is no reason to fill the log of the process too.
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(file = %file.path.display(), %error, "differences are dropped");
            }
            Err(_) => {}
        }
    }
}

/// A file and its predecessor, together bounded.
#[derive(Debug)]
struct Rotating {
    path: PathBuf,
    file: File,
    len: u64,
    /// Of one of the two.
    limit: u64,
}

impl Rotating {
    fn open(path: &Path, bytes: u64) -> io::Result<Self> {
        // Checked first: opening a pipe would wait, and a device must not be renamed later.
        if path.exists() && !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a plain file"));
        }
        let mut file = open(path)?;
        let mut len = file.seek(SeekFrom::End(0))?;
        if len > 0 {
            file.seek(SeekFrom::End(-1))?;
            let mut last = [0];
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
                len += 1;
            }
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            len,
            limit: bytes / 2,
        })
    }

    /// Appends a line whole or not at all.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let bytes = line.len() as u64;
        if bytes > self.limit {
            return Err(io::Error::other("the record is longer than the log"));
        }
        if self.len + bytes > self.limit {
            self.rotate()?;
        }
        if let Err(error) = self.file.write_all(line) {
            // What was written of it goes again, so that every line is whole. If even that fails the line is cut, and says so to a reader.
            let _ = self.file.set_len(self.len);
            return Err(error);
        }
        self.len += bytes;
        Ok(())
    }

    /// The file becomes its own predecessor. One that was longer than it may be (an earlier, larger bound) goes.
    fn rotate(&mut self) -> io::Result<()> {
        let mut older = self.path.clone().into_os_string();
        older.push(".1");
        if self.len > self.limit {
            fs::remove_file(&self.path)?;
        } else {
            fs::rename(&self.path, &older)?;
        }
        self.file = open(&self.path)?;
        self.len = 0;
        Ok(())
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .open(path)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::valve::Verdict;

    #[derive(Debug, Default)]
    struct Counts {
        written: AtomicUsize,
        dropped: AtomicUsize,
    }

    impl Observer for Counts {
        fn record(&self, written: bool) {
            let count = if written {
                &self.written
            } else {
                &self.dropped
            };
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn record(prompt: &[u32], text: Option<&str>) -> Record {
        let check = Check {
            comparison: None,
            audit: None,
            verdict: Verdict::Fallback(Reason::Nan),
            quantised_top: vec![(7, -0.5)],
            precise_top: vec![(8, -0.25)],
        };
        Record::new(1, Reason::Nan, prompt, &check, text.map(str::to_owned))
    }

    fn options(folder: &Path, bytes: u64) -> Options {
        Options {
            file: folder.join("differences.jsonl"),
            bytes,
            text: false,
        }
    }

    fn bytes(folder: &Path) -> u64 {
        let sizes = fs::read_dir(folder).unwrap();
        sizes
            .map(|entry| entry.unwrap().metadata().unwrap())
            .filter(fs::Metadata::is_file)
            .map(|metadata| metadata.len())
            .sum()
    }

    #[test]
    fn a_record_is_one_line_and_has_text_only_when_asked() {
        let line = String::from_utf8(record(&[1, 2], None).line()).unwrap();
        assert_eq!(line.lines().count(), 1);
        assert!(!line.contains("text"), "{line}");
        assert!(
            line.contains("\"kl\":null") && line.contains("\"prompt_tokens\":2"),
            "{line}"
        );
        let with = String::from_utf8(record(&[1], Some("a\nb")).line()).unwrap();
        assert!(
            with.contains(r#""text":"a\nb""#) && with.lines().count() == 1,
            "{with}"
        );
        let long = "ä".repeat(TEXT_BYTES);
        let kept = record(&[1], Some(&long)).text.unwrap();
        assert!(kept.len() <= TEXT_BYTES && kept.chars().all(|c| c == 'ä'));
        assert_ne!(
            record(&[1], None).prompt_sha256,
            record(&[2], None).prompt_sha256
        );
    }

    #[test]
    fn the_bound_holds_over_any_number_of_records_and_the_latest_stay() {
        let folder = tempfile::tempdir().unwrap();
        let counts = Arc::new(Counts::default());
        let log = DifferenceLog::open(&options(folder.path(), MIN_BYTES), counts.clone()).unwrap();
        let mut pushed = 0;
        while pushed < 500 {
            log.push(&record(&[pushed], None));
            pushed += 1;
            if pushed.is_multiple_of(32) {
                // Not more at once than may wait.
                while counts.written.load(Ordering::SeqCst) < pushed as usize {
                    std::thread::yield_now();
                }
                assert!(bytes(folder.path()) <= MIN_BYTES);
            }
        }
        drop(log);
        assert_eq!(counts.written.load(Ordering::SeqCst), 500);
        let text = fs::read_to_string(folder.path().join("differences.jsonl")).unwrap();
        let last = record(&[499], None).line();
        assert!(text.as_bytes().ends_with(&last));
        assert!(
            text.lines()
                .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok())
        );
    }

    #[test]
    fn a_disk_that_takes_nothing_drops_records_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        // The predecessor's name is taken by a folder that is not empty: no rotation can work.
        fs::create_dir_all(folder.path().join("differences.jsonl.1/x")).unwrap();
        let counts = Arc::new(Counts::default());
        let log = DifferenceLog::open(&options(folder.path(), MIN_BYTES), counts.clone()).unwrap();
        for prompt in 0..200 {
            log.push(&record(&[prompt], None));
        }
        drop(log);
        let (written, dropped) = (
            counts.written.load(Ordering::SeqCst),
            counts.dropped.load(Ordering::SeqCst),
        );
        assert!(
            written > 0 && dropped > 0 && written + dropped == 200,
            "{written} {dropped}"
        );
        assert!(bytes(folder.path()) <= MIN_BYTES);
    }

    #[test]
    fn a_line_cut_by_a_kill_stays_alone() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), MIN_BYTES);
        fs::write(&options.file, "{\"cut").unwrap();
        let log = DifferenceLog::open(&options, Arc::new(Counts::default())).unwrap();
        log.push(&record(&[1], None));
        drop(log);
        let text = fs::read_to_string(&options.file).unwrap();
        assert_eq!(text.lines().next(), Some("{\"cut"));
        assert_eq!(text.lines().count(), 2);
    }

    #[test]
    fn what_cannot_be_a_log_is_refused_with_its_fix() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |options: &Options| {
            let error = DifferenceLog::open(options, Arc::new(Counts::default())).unwrap_err();
            error.message
        };
        let small = refused(&options(folder.path(), 100));
        assert!(small.contains("at least 16384"), "{small}");
        for file in ["/dev/null", "/nonexistent/log"] {
            let options = Options {
                file: file.into(),
                ..options(folder.path(), MIN_BYTES)
            };
            let message = refused(&options);
            assert!(
                message.contains(file) && message.contains("--difference-log"),
                "{message}"
            );
        }
    }
}
