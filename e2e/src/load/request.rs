//! One request of the load generator: sent once, and its answer checked whole. Anything unexpected is a failure with a reason.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::{Value, json};

use crate::prompts::{Prompt, first_line};

/// From sending to the last byte.
const REQUEST_DEADLINE: Duration = Duration::from_secs(30);
/// An answer larger than this is wrong.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Tokens that a short request asks for.
const SHORT_TOKENS: u64 = 8;

/// Where requests go.
#[derive(Debug, Clone)]
pub struct Target {
    /// Name or address.
    pub host: String,
    /// Port of the API.
    pub port: u16,
    /// The served model name.
    pub model: String,
}

/// How a request travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    /// On a connection that others used before and will use again.
    pub keep_alive: bool,
    /// The answer comes token by token.
    pub stream: bool,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connection = if self.keep_alive {
            "kept connection"
        } else {
            "new connection"
        };
        write!(
            f,
            "{connection}, {}",
            if self.stream { "streamed" } else { "whole" }
        )
    }
}

/// What a request asks for.
#[derive(Debug, Clone)]
pub enum Ask<'a> {
    /// A few tokens after a short text; the count must be right.
    Short {
        /// The request's number, so that prompts differ.
        number: u64,
    },
    /// A question whose answer must be exact.
    Exact(&'a Prompt),
}

/// Why a request failed.
#[derive(Debug)]
pub(super) struct Failure {
    /// One of a few words to count by.
    pub kind: &'static str,
    /// What was seen.
    pub detail: String,
}

fn failure(kind: &'static str, detail: impl fmt::Display) -> Failure {
    Failure {
        kind,
        detail: detail.to_string().chars().take(300).collect(),
    }
}

/// Clients that keep their connections, as many as a service has: one alone would give half of the requests to one pod.
const KEEPING: usize = 16;

/// The clients: some keep connections and take turns, one opens a new one each time. None sends anything twice.
pub(super) struct Clients {
    keeping: Vec<Client<HttpConnector, Full<Bytes>>>,
    fresh: Client<HttpConnector, Full<Bytes>>,
    turn: AtomicUsize,
}

impl Clients {
    pub(super) fn new() -> Self {
        // By default this client sends a request again when a kept connection dies under it: that would hide what is counted here.
        let client = |idle: usize| {
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .retry_canceled_requests(false)
                .pool_max_idle_per_host(idle)
                .build_http()
        };
        Self {
            keeping: (0..KEEPING).map(|_| client(8)).collect(),
            fresh: client(0),
            turn: AtomicUsize::new(0),
        }
    }

    /// Sends it once and checks the answer.
    pub(super) async fn ask(
        &self,
        target: &Target,
        way: Way,
        ask: &Ask<'_>,
    ) -> Result<(), Failure> {
        let request = request(target, way, ask);
        let client = if way.keep_alive {
            &self.keeping[self.turn.fetch_add(1, Ordering::Relaxed) % KEEPING]
        } else {
            &self.fresh
        };
        let exchange = async {
            let response = client
                .request(request)
                .await
                .map_err(|error| failure("connection", chain(&error)))?;
            check(response, way, ask).await
        };
        tokio::time::timeout(REQUEST_DEADLINE, exchange)
            .await
            .unwrap_or_else(|_| {
                Err(failure(
                    "timeout",
                    format!("no whole answer in {REQUEST_DEADLINE:?}"),
                ))
            })
    }
}

/// An error with all its causes, which hyper keeps apart.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn request(target: &Target, way: Way, ask: &Ask<'_>) -> Request<Full<Bytes>> {
    let (path, mut body) = match ask {
        Ask::Short { number } => (
            "/v1/completions",
            json!({"prompt": format!("Request {number}: a Deployment manages"), "max_tokens": SHORT_TOKENS, "temperature": 0, "ignore_eos": true}),
        ),
        Ask::Exact(prompt) => (
            "/v1/chat/completions",
            json!({"messages": prompt.messages, "max_tokens": prompt.max_tokens, "temperature": 0, "stop": ["\n"]}),
        ),
    };
    body["model"] = json!(target.model);
    if way.stream {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    let mut builder = Request::post(format!("http://{}:{}{path}", target.host, target.port))
        .header(header::CONTENT_TYPE, "application/json");
    if !way.keep_alive {
        builder = builder.header(header::CONNECTION, "close");
    }
    builder
        .body(Full::new(Bytes::from(body.to_string())))
        .expect("method, address and headers are valid")
}

async fn check(response: Response<Incoming>, way: Way, ask: &Ask<'_>) -> Result<(), Failure> {
    let status = response.status();
    let (head, body) = response.into_parts();
    let body = http_body_util::Limited::new(body, MAX_ANSWER_BYTES);
    let bytes = body
        .collect()
        .await
        .map_err(|error| failure("truncated answer", error))?
        .to_bytes();
    let text =
        String::from_utf8(bytes.to_vec()).map_err(|_| failure("wrong answer", "not UTF-8"))?;
    if status != StatusCode::OK {
        return Err(failure(status_kind(status), format!("{status}: {text}")));
    }
    let kind = head
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("");
    let expected = if way.stream {
        "text/event-stream"
    } else {
        "application/json"
    };
    if !kind.starts_with(expected) {
        return Err(failure(
            "wrong answer",
            format!("content type `{kind}`, not {expected}"),
        ));
    }
    let answer = if way.stream {
        streamed(&text)?
    } else {
        whole(&text)?
    };
    judge(&answer, ask)
}

fn status_kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        429 => "429 too many requests",
        500..=599 => "5xx",
        _ => "unexpected status",
    }
}

/// What both forms of an answer carry.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    text: String,
    finish_reason: String,
    completion_tokens: u64,
}

fn whole(text: &str) -> Result<Answer, Failure> {
    let value: Value = serde_json::from_str(text).map_err(|error| failure("wrong JSON", error))?;
    let choice = &value["choices"][0];
    let content = choice["text"]
        .as_str()
        .or_else(|| choice["message"]["content"].as_str());
    Ok(Answer {
        text: content
            .ok_or_else(|| failure("wrong JSON", format!("no text in {text}")))?
            .to_owned(),
        finish_reason: choice["finish_reason"].as_str().unwrap_or("").to_owned(),
        completion_tokens: value["usage"]["completion_tokens"].as_u64().unwrap_or(0),
    })
}

fn streamed(text: &str) -> Result<Answer, Failure> {
    let mut answer = Answer::default();
    let mut done = false;
    for line in text.lines().filter(|line| !line.is_empty()) {
        let data = line
            .strip_prefix("data: ")
            .ok_or_else(|| failure("wrong stream", format!("line `{line}`")))?;
        if done {
            return Err(failure(
                "wrong stream",
                format!("after [DONE] came `{data}`"),
            ));
        }
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let value: Value =
            serde_json::from_str(data).map_err(|error| failure("wrong JSON", error))?;
        if !value["error"].is_null() {
            return Err(failure("error in the stream", &value["error"]));
        }
        let choice = &value["choices"][0];
        let piece = choice["text"]
            .as_str()
            .or_else(|| choice["delta"]["content"].as_str());
        answer.text.push_str(piece.unwrap_or(""));
        if let Some(reason) = choice["finish_reason"].as_str() {
            reason.clone_into(&mut answer.finish_reason);
        }
        if let Some(tokens) = value["usage"]["completion_tokens"].as_u64() {
            answer.completion_tokens = tokens;
        }
    }
    if done {
        Ok(answer)
    } else {
        Err(failure("truncated stream", "it ended without [DONE]"))
    }
}

fn judge(answer: &Answer, ask: &Ask<'_>) -> Result<(), Failure> {
    match ask {
        Ask::Short { .. }
            if answer.finish_reason != "length" || answer.completion_tokens != SHORT_TOKENS =>
        {
            Err(failure(
                "wrong answer",
                format!("{SHORT_TOKENS} tokens were asked for, and this came: {answer:?}"),
            ))
        }
        Ask::Exact(prompt) if first_line(&answer.text) != prompt.answer => Err(failure(
            "wrong answer",
            format!(
                "{}: `{}` instead of `{}`",
                prompt.id, answer.text, prompt.answer
            ),
        )),
        Ask::Short { .. } | Ask::Exact(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\n\
                          data: {\"choices\":[],\"usage\":{\"completion_tokens\":8}}\n\ndata: [DONE]\n\n";

    #[test]
    fn a_whole_stream_is_one_answer() {
        let expected = Answer {
            text: "ab".into(),
            finish_reason: "length".into(),
            completion_tokens: 8,
        };
        assert_eq!(streamed(STREAM).unwrap(), expected);
    }

    #[test]
    fn a_stream_cut_at_any_line_is_a_failure() {
        let lines: Vec<&str> = STREAM.split_inclusive('\n').collect();
        for count in 0..lines.len() - 2 {
            assert!(streamed(&lines[..count].concat()).is_err(), "{count} lines");
        }
    }

    #[test]
    fn an_error_inside_a_stream_is_a_failure() {
        assert_eq!(
            streamed("data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n")
                .unwrap_err()
                .kind,
            "error in the stream"
        );
    }

    #[test]
    fn fewer_tokens_than_asked_for_are_a_failure() {
        let answer = Answer {
            text: "a".into(),
            finish_reason: "length".into(),
            completion_tokens: 7,
        };
        assert_eq!(
            judge(&answer, &Ask::Short { number: 0 }).unwrap_err().kind,
            "wrong answer"
        );
    }
}
