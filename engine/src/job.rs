//! What `calibrate` and `verify` share as Jobs: they stop on a signal, answer in the termination message, and print to stdout only their answer.
//!
//! The termination message is written on success and on failure, a panic included; the operator reads nothing else.

use std::any::Any;
use std::fs;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mixquant_crds::{JobFailure, JobMessage, PrecisionPlan};
use tokio::signal::unix::{SignalKind, signal};

use crate::error::{Error, Result};
use crate::files;
use crate::progress::Progress;

/// A plan has a few hundred bytes.
const MAX_PLAN_BYTES: u64 = 1 << 20;

/// Progress that ends with the first SIGTERM or SIGINT.
pub fn progress() -> Progress {
    Progress::new(stop_on_signal())
}

/// Runs `work` and leaves its answer, or why there is none, in the file at `message_path`.
///
/// # Errors
/// Those of `work`, a panic in it, and an answer that cannot be written.
pub fn run<T>(
    message_path: Option<&Path>,
    work: impl FnOnce(&Progress) -> Result<T>,
    answer: impl FnOnce(&T) -> JobMessage,
) -> Result<T> {
    run_and_tell(message_path, work, |value| Some(answer(value)))
}

/// The same for a step before the Job's own work: only a failure is an answer.
///
/// # Errors
/// Those of `work`, a panic in it, and an answer that cannot be written.
pub fn run_step<T>(
    message_path: Option<&Path>,
    work: impl FnOnce(&Progress) -> Result<T>,
) -> Result<T> {
    run_and_tell(message_path, work, |_| None)
}

fn run_and_tell<T>(
    message_path: Option<&Path>,
    work: impl FnOnce(&Progress) -> Result<T>,
    answer: impl FnOnce(&T) -> Option<JobMessage>,
) -> Result<T> {
    let progress = progress();
    let result = catch_unwind(AssertUnwindSafe(|| work(&progress)))
        .unwrap_or_else(|panic| Err(Error::internal(panic_message(panic.as_ref()))));
    let message = match &result {
        Ok(value) => answer(value),
        Err(error) => Some(JobMessage::Failed(JobFailure {
            reason: error.reason,
            message: error.message.clone(),
        })),
    };
    let written = match (message_path, message) {
        (Some(path), Some(message)) => write_message(path, &message),
        _ => Ok(()),
    };
    // The work's own error comes first: it is the cause.
    result.and_then(|value| written.map(|()| value))
}

/// A `--plan`: the JSON itself, or the name of a file with it.
///
/// # Errors
/// A file that cannot be read, what is wrong with the JSON, or a plan that cannot work.
pub fn parse_plan(text: &str) -> Result<PrecisionPlan, String> {
    let content = if text.trim_start().starts_with('{') {
        text.to_owned()
    } else {
        files::read_text(Path::new(text), MAX_PLAN_BYTES)
            .map_err(|error| format!("cannot read the plan file {text}: {error}"))?
    };
    let plan: PrecisionPlan =
        serde_json::from_str(&content).map_err(|error| format!("not a precision plan: {error}"))?;
    plan.check()?;
    Ok(plan)
}

/// Prints the answer to stdout.
///
/// # Errors
/// When stdout is closed or full: an answer that nobody got is no success.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|error| Error::internal(format!("cannot write to stdout: {error}")))
}

/// The file is mounted by the kubelet, so it is overwritten in place and not renamed.
fn write_message(path: &Path, message: &JobMessage) -> Result<()> {
    fs::write(path, message.to_termination_message()).map_err(|error| {
        Error::storage(format!(
            "cannot write the termination message to {}: {error}; check --termination-message",
            path.display()
        ))
    })
}

/// Becomes true at the first SIGTERM or SIGINT; the second one ends the process at once. As PID 1 of a container a process without a handler would ignore both.
fn stop_on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let watch = move || -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        runtime.block_on(async {
            let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
            loop {
                tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
                if flag.swap(true, Ordering::Relaxed) {
                    #[expect(clippy::exit, reason = "the second signal means now; drafts of dead runs are cleaned by the next run")]
                    std::process::exit(mixquant_crds::names::EXIT_RETRY);
                }
            }
        })
    };
    let spawned = std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Err(error) = watch() {
            tracing::warn!(%error, "cannot watch for signals: the process ends only by SIGKILL");
        }
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "cannot watch for signals");
    }
    stop
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!(
        "a bug in the engine: {}; please report it",
        text.unwrap_or("panic").lines().next().unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_json_or_a_file_with_it_and_is_checked() {
        let text = serde_json::to_string(&PrecisionPlan::baseline()).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &text).unwrap();
        assert_eq!(parse_plan(&text).unwrap(), PrecisionPlan::baseline());
        assert_eq!(
            parse_plan(file.path().to_str().unwrap()).unwrap(),
            PrecisionPlan::baseline()
        );
        assert!(
            parse_plan("/nonexistent")
                .unwrap_err()
                .contains("cannot read the plan file /nonexistent")
        );
        assert!(
            parse_plan(&text.replace("\"blockSize\":16", "\"blockSize\":17"))
                .unwrap_err()
                .contains("blockSize is 17")
        );
        assert!(
            parse_plan("{}")
                .unwrap_err()
                .contains("not a precision plan: missing field")
        );
    }
    use mixquant_crds::FailureReason;

    fn message_of(work: impl FnOnce(&Progress) -> Result<()>) -> (Result<()>, JobMessage) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let result = run(Some(file.path()), work, |()| {
            unreachable!("only failures are tested")
        });
        (
            result,
            serde_json::from_slice(&fs::read(file.path()).unwrap()).unwrap(),
        )
    }

    #[test]
    fn a_failure_is_written_to_the_termination_message() {
        let (result, message) = message_of(|_| Err(Error::data("too short")));
        assert_eq!(result.unwrap_err().message, "too short");
        assert_eq!(
            message,
            JobMessage::Failed(JobFailure {
                reason: FailureReason::DataInvalid,
                message: "too short".into()
            })
        );
    }

    #[test]
    fn a_panic_is_a_failure_with_a_message() {
        let (result, message) = message_of(|_| panic!("boom"));
        assert!(result.unwrap_err().message.contains("boom"));
        assert!(
            matches!(message, JobMessage::Failed(failure) if failure.reason == FailureReason::Internal)
        );
    }

    #[test]
    fn an_answer_that_cannot_be_written_is_an_error() {
        let answer = |(): &()| {
            JobMessage::Failed(JobFailure {
                reason: FailureReason::Internal,
                message: String::new(),
            })
        };
        let error = run(Some(Path::new("/nonexistent/message")), |_| Ok(()), answer).unwrap_err();
        assert!(error.message.contains("--termination-message"), "{error}");
    }
}
