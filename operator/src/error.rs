//! What can go wrong between this process and the API. Every variant names the object and has a reason that conditions and metrics carry.

use std::time::Duration;

use thiserror::Error;

/// Which call failed: the verb, the kind and the name of the object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `get`, `list`, `apply`, `patch status`, `delete`, `publish`, …
    pub verb: &'static str,
    /// The object's kind.
    pub kind: String,
    /// The object's name, or the selector of a list.
    pub name: String,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.verb, self.kind, self.name)
    }
}

/// Why a pass ended early.
#[derive(Debug, Error)]
pub enum Error {
    /// The API answered with a refusal.
    #[error("{call}: {message}")]
    Refused {
        /// The call.
        call: Call,
        /// The HTTP status.
        code: u16,
        /// The server's own words.
        message: String,
    },
    /// The namespace is being deleted: nothing can be made in it any more, and the service goes with it.
    #[error("{call}: its namespace is being deleted")]
    NamespaceLeaving {
        /// The call.
        call: Call,
    },
    /// The API could not be asked, or its answer could not be read.
    #[error("{call}: {source}")]
    Unreachable {
        /// The call.
        call: Call,
        /// What the client says.
        source: Box<kube::Error>,
    },
    /// The API did not answer in time.
    #[error("{call}: no answer within {} s", deadline.as_secs())]
    Timeout {
        /// The call.
        call: Call,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// An object of this name exists and belongs to something else.
    #[error(
        "{kind} {name} exists and is not controlled by this service: remove it, or rename the service"
    )]
    Foreign {
        /// The object's kind.
        kind: String,
        /// The object's name.
        name: String,
    },
    /// An object of ours is being deleted; it comes back when it is gone.
    #[error("{kind} {name} is being deleted")]
    Leaving {
        /// The object's kind.
        kind: String,
        /// The object's name.
        name: String,
    },
    /// This process may not write (any more).
    #[error("this process does not lead: nothing was written")]
    NotLeading,
    /// The spec cannot work: nothing is made from it.
    #[error("nothing is made from a spec that cannot work")]
    InvalidSpec,
    /// The code panicked over this service; the log has the place.
    #[error("a bug: the pass panicked")]
    Panicked,
    /// The pass as a whole took too long.
    #[error("the pass took more than {} s", .0.as_secs())]
    TooLong(Duration),
    /// What is stored is not what this version of the resource allows.
    #[error("the stored object does not fit its schema: {0}")]
    Unreadable(String),
}

impl Error {
    /// The error that `source` is, of `call`.
    pub fn of(call: Call, source: kube::Error) -> Self {
        match source {
            kube::Error::Api(status) if is_about_a_leaving_namespace(&status) => {
                Self::NamespaceLeaving { call }
            }
            kube::Error::Api(status) => Self::Refused {
                call,
                code: status.code,
                message: one_line(&status.message),
            },
            source => Self::Unreachable {
                call,
                source: Box::new(source),
            },
        }
    }

    /// One word, the `error` label of the metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused { code: 403, .. } => "Forbidden",
            Self::Refused { code: 404, .. } => "NotFound",
            Self::Refused { code: 409, .. } => "Conflict",
            Self::Refused { code: 422, .. } => "Invalid",
            Self::Refused { code: 429, .. } => "TooManyRequests",
            Self::Refused { code: 500.., .. } => "ServerError",
            Self::Refused { .. } => "Refused",
            Self::Unreachable { .. } => "Unreachable",
            Self::Timeout { .. } => "Timeout",
            Self::Foreign { .. } => "Foreign",
            Self::Leaving { .. } | Self::NamespaceLeaving { .. } => "Leaving",
            Self::NotLeading => "NotLeading",
            Self::InvalidSpec => "InvalidSpec",
            Self::Panicked => "Panicked",
            Self::TooLong(_) => "TooLong",
            Self::Unreadable(_) => "Unreadable",
        }
    }

    /// Whether a person has to change something: the condition says so. The rest heals by another try.
    pub fn is_refusal(&self) -> bool {
        match self {
            // A server error, a conflict and a request to slow down are the API's own affair.
            Self::Refused { code, .. } => !matches!(code, 404 | 409 | 429 | 500..),
            Self::Foreign { .. } => true,
            Self::Unreachable { .. }
            | Self::Timeout { .. }
            | Self::Leaving { .. }
            | Self::NamespaceLeaving { .. }
            | Self::NotLeading
            | Self::InvalidSpec
            | Self::Panicked
            | Self::TooLong(_)
            | Self::Unreadable(_) => false,
        }
    }

    /// Whether somebody changed the object in between: the pass starts over.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { code: 409, .. })
    }
}

/// The API marks this refusal: only creations meet it, with code 403.
fn is_about_a_leaving_namespace(status: &kube::core::Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .into_iter()
        .any(|cause| cause.reason == "NamespaceTerminating")
}

/// A server's message as one line of bounded length, for conditions and Events.
pub fn one_line(text: &str) -> String {
    let mut line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > 800 {
        let cut = line.floor_char_boundary(800);
        line.truncate(cut);
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: u16) -> Error {
        let call = Call {
            verb: "apply",
            kind: "Deployment".into(),
            name: "chat".into(),
        };
        Error::Refused {
            call,
            code,
            message: "exceeded quota".into(),
        }
    }

    #[test]
    fn only_what_a_person_can_cure_is_a_refusal() {
        for code in [400, 403, 405, 413, 422] {
            assert!(refused(code).is_refusal(), "{code}");
        }
        for code in [404, 409, 429, 500, 503, 504] {
            assert!(!refused(code).is_refusal(), "{code}");
        }
    }

    #[test]
    fn a_leaving_namespace_is_told_from_other_refusals_by_its_cause() {
        let refusal = |cause: &str| {
            let status = serde_json::json!({
                "status": "Failure", "code": 403, "reason": "Forbidden",
                "message": "unable to create new content in namespace x because it is being terminated",
                "details": {"name": "chat", "kind": "services", "causes": [{"reason": cause, "field": "metadata.namespace"}]},
            });
            let status: kube::core::Status = serde_json::from_value(status).unwrap();
            let call = Call {
                verb: "apply",
                kind: "Service".into(),
                name: "chat".into(),
            };
            Error::of(call, kube::Error::Api(Box::new(status)))
        };
        let leaving = refusal("NamespaceTerminating");
        assert!(matches!(leaving, Error::NamespaceLeaving { .. }) && !leaving.is_refusal());
        assert!(matches!(
            refusal("FieldManagerConflict"),
            Error::Refused { code: 403, .. }
        ));
    }

    #[test]
    fn an_error_names_the_call_and_the_servers_words() {
        assert_eq!(
            refused(403).to_string(),
            "apply Deployment chat: exceeded quota"
        );
    }

    #[test]
    fn a_long_message_of_many_lines_becomes_one_bounded_line() {
        let line = one_line(&"äb\n\t c".repeat(1000));
        assert!(line.len() < 820 && !line.contains('\n'));
    }
}
