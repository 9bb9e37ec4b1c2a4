//! What a store's refusal means for a person: which thing, and what to do about it.
//!
//! Called for every error of a store. It decides whether another try may help; it never repeats a credential or a signed address.

use mixquant_crds::FailureReason;

use crate::Error;

/// A sentence of a server's answer, cut here.
const MAX_DETAIL: usize = 300;

/// The error that a store's answer about `what` becomes. `credentials` names what the source would sign with, or says that nothing is given.
pub(super) fn explain(what: &str, credentials: &str, error: &object_store::Error) -> Error {
    use object_store::Error as Store;
    let status = status(error);
    let detail = detail(error);
    let (reason, fix) = match (error, status) {
        (Store::NotFound { .. }, _) | (_, Some(404)) => (
            FailureReason::SourceRefused,
            "it does not exist: check the URI, the endpoint and the region".to_owned(),
        ),
        (Store::PermissionDenied { .. } | Store::Unauthenticated { .. }, _)
        | (_, Some(401 | 403)) => (
            FailureReason::SourceRefused,
            format!("access is denied ({credentials}): {detail}"),
        ),
        (Store::Precondition { .. }, _) | (_, Some(412)) => return changed(what),
        (Store::NotSupported { .. }, _) => (
            FailureReason::SourceRefused,
            format!(
                "the server does not send parts of files (HTTP ranges), which resuming needs: {detail}"
            ),
        ),
        (_, Some(300..=407 | 409..=428 | 430..=499)) => (
            FailureReason::SourceRefused,
            format!("the request is refused, check the URI, the endpoint and the region: {detail}"),
        ),
        _ => (
            FailureReason::SourceUnavailable,
            format!("the store does not answer as it should, run it again to go on: {detail}"),
        ),
    };
    Error::new(reason, format!("{what}: {fix}"))
}

/// The object is another one than at the beginning.
pub(super) fn changed(what: &str) -> Error {
    Error::new(
        FailureReason::SourceUnavailable,
        format!("{what}: it was changed while it was read: run it again to fetch the new one"),
    )
}

/// The HTTP status in an error. `object_store` keeps it in types of its own that it does not show; its words are the same for every store.
fn status(error: &object_store::Error) -> Option<u16> {
    let text = chain(error);
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The innermost cause, as one bounded line without the query of an address: it may hold a signature.
fn detail(error: &object_store::Error) -> String {
    let text = chain(error);
    let words = text
        .split_whitespace()
        .map(|word| match word.split_once('?') {
            Some((address, _)) if address.contains("://") => address,
            _ => word,
        });
    let line: String = words.collect::<Vec<_>>().join(" ");
    line.chars().take(MAX_DETAIL).collect()
}

fn chain(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text += ": ";
            text += &words;
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> object_store::Error {
        object_store::Error::Generic {
            store: "S3",
            source: text.to_owned().into(),
        }
    }

    #[test]
    fn what_another_try_cannot_cure_is_told_from_what_it_may() {
        let reason = |status: u16| {
            let error = answer(&format!(
                "Error performing GET https://s3/x in 1ms - Server returned non-2xx status code: {status} Words: <xml>"
            ));
            explain("s3://b/x", "no credentials are given", &error).reason
        };
        for status in [301, 400, 401, 403, 404, 405, 416, 451] {
            assert_eq!(reason(status), FailureReason::SourceRefused, "{status}");
        }
        for status in [408, 412, 429, 500, 502, 503, 504] {
            assert_eq!(reason(status), FailureReason::SourceUnavailable, "{status}");
        }
        let cut = explain("x", "", &answer("connection reset"));
        assert_eq!(cut.reason, FailureReason::SourceUnavailable);
    }

    #[test]
    fn a_message_is_bounded_and_has_no_signature() {
        let long = format!(
            "https://cdn.example/file?X-Amz-Signature=secret {}",
            "word ".repeat(500)
        );
        let message = explain("x", "", &answer(&long)).message;
        assert!(message.len() < 500, "{}", message.len());
        assert!(!message.contains("secret"), "{message}");
        assert!(message.contains("https://cdn.example/file "), "{message}");
    }
}
