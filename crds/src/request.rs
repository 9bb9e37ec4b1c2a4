//! What a person asks of a rollout: one annotation with an id, answered once in `status.request`.
//!
//! Written by `kubectl mixquant` or by hand (`kubectl annotate --overwrite mqs/chat mixquant.io/request='7 promote 3f9c0a12d4'`), read by
//! the operator. A request names the revision that it speaks of, so that it never acts on another one. Pausing is a state and no
//! request: `spec.rollout.paused`.

use std::fmt;
use std::str::FromStr;

/// Longer text is no request.
const MAX_LENGTH: usize = 256;
/// An id is at most so long.
const MAX_ID: usize = 64;

/// The value of [`names::ANNOTATION_REQUEST`](crate::names::ANNOTATION_REQUEST): `ID VERB [REVISION] [full]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Chosen by who asks, new for each request: an id that was answered is not answered again. 1 to 64 characters of `A-Za-z0-9._:-`.
    pub id: String,
    /// What is asked.
    pub command: Command,
}

/// What may be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// `promote REVISION [full]`: end the pause that the canary waits in; `full` makes it stable as soon as all its pods run, without
    /// the steps and verdicts that are left.
    Promote {
        /// The canary.
        revision: String,
        /// Whether steps and verdicts are skipped.
        full: bool,
    },
    /// `abort REVISION`: roll the canary back. It is not tried again until the spec changes or a retry is asked for.
    Abort {
        /// The canary.
        revision: String,
    },
    /// `retry`: what failed for the spec as it stands is tried again, as a new attempt.
    Retry,
    /// `undo REVISION`: a revision of the history serves instead of what the spec asks for, until the spec changes or a retry is asked for.
    Undo {
        /// The revision, as the suffix of its `ControllerRevision`'s name.
        revision: String,
    },
}

/// Why a text is no request, with the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0}: write `ID promote REVISION [full]`, `ID abort REVISION`, `ID retry` or `ID undo REVISION`"
)]
pub struct RequestError(String);

fn is_id(text: &str) -> bool {
    (1..=MAX_ID).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte))
}

fn revision(text: &str) -> Result<String, RequestError> {
    let plain = text.len() <= MAX_ID && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if plain {
        Ok(text.to_owned())
    } else {
        Err(RequestError(format!("`{text}` is no revision")))
    }
}

impl FromStr for Request {
    type Err = RequestError;

    fn from_str(text: &str) -> Result<Self, RequestError> {
        if text.len() > MAX_LENGTH {
            return Err(RequestError(format!(
                "the request has more than {MAX_LENGTH} bytes"
            )));
        }
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let (id, command) = match words[..] {
            [id, "promote", of] => (
                id,
                Command::Promote {
                    revision: revision(of)?,
                    full: false,
                },
            ),
            [id, "promote", of, "full"] => (
                id,
                Command::Promote {
                    revision: revision(of)?,
                    full: true,
                },
            ),
            [id, "abort", of] => (
                id,
                Command::Abort {
                    revision: revision(of)?,
                },
            ),
            [id, "retry"] => (id, Command::Retry),
            [id, "undo", of] => (
                id,
                Command::Undo {
                    revision: revision(of)?,
                },
            ),
            _ => return Err(RequestError(format!("`{}` is no request", text.trim()))),
        };
        if !is_id(id) {
            return Err(RequestError(format!("`{id}` is no id")));
        }
        Ok(Self {
            id: id.to_owned(),
            command,
        })
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.command)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Promote {
                revision,
                full: true,
            } => write!(f, "promote {revision} full"),
            Self::Promote {
                revision,
                full: false,
            } => write!(f, "promote {revision}"),
            Self::Abort { revision } => write!(f, "abort {revision}"),
            Self::Retry => f.write_str("retry"),
            Self::Undo { revision } => write!(f, "undo {revision}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_written_as_it_is_read() {
        for text in [
            "7 promote 3f9c0a12d4",
            "7 promote 3f9c0a12d4 full",
            "2026-11-30T04:00:00Z abort 3f9c0a12d4",
            "a.b_c retry",
            "x undo 0011223344",
        ] {
            assert_eq!(text.parse::<Request>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_request_is_refused_with_the_forms_that_are() {
        let long = format!("1 retry{}", " ".repeat(300));
        for text in [
            "",
            "retry",
            "1 promote",
            "1 promote abc fully",
            "1 undo",
            "1 undo ../x",
            "1 Retry",
            "ü retry",
            "1 retry now",
            "1 abort",
            &long,
        ] {
            let error = text.parse::<Request>().unwrap_err().to_string();
            assert!(error.contains("ID promote REVISION"), "{text}: {error}");
        }
    }
}
