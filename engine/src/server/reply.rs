//! Events of the worker to the JSON that clients read, whole or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::Receiver;

use crate::metrics::Outcome;
use crate::worker::{Event, Finish};

use super::error::ApiError;
use super::logprobs::Logprobs;
use super::request::StreamOptions;
use super::{App, OutcomeGuard};

/// One answer as far as it has come.
#[derive(Debug)]
pub(super) struct Choice {
    /// The prompt's ids.
    pub(super) prompt: Arc<[u32]>,
    /// Text that was not sent yet; begins as the echo.
    pub(super) text: String,
    pub(super) logprobs: Logprobs,
    pub(super) finish: Option<Finish>,
    /// A chat's stream begins each choice with its role.
    pub(super) introduced: bool,
}

/// A request that is being computed.
pub(super) struct Reply {
    pub(super) app: Arc<App>,
    pub(super) chat: bool,
    pub(super) id: String,
    /// Seconds since the epoch, the same in every chunk.
    pub(super) created: u64,
    pub(super) choices: Vec<Choice>,
    pub(super) events: Receiver<(usize, Event)>,
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) outcome: OutcomeGuard,
}

impl Reply {
    /// Waits for all answers.
    ///
    /// # Errors
    /// What failed in the engine.
    pub(super) async fn whole(mut self) -> Result<Response, ApiError> {
        while self.open() {
            self.next()
                .await
                .inspect_err(|_| self.outcome.set(Outcome::error))?;
        }
        let choices: Vec<Value> = (0..self.choices.len())
            .map(|index| self.whole_choice(index))
            .collect();
        let object = if self.chat {
            "chat.completion"
        } else {
            "text_completion"
        };
        let mut body = self.envelope(object, choices.into());
        body["usage"] = self.usage();
        self.outcome.set(Outcome::ok);
        Ok(Json(body).into_response())
    }

    /// Waits for the first event, so that what fails before it has a status, and streams from then on.
    ///
    /// # Errors
    /// What failed before the first event.
    pub(super) async fn stream(mut self, options: StreamOptions) -> Result<Response, ApiError> {
        let first = self
            .next()
            .await
            .inspect_err(|_| self.outcome.set(Outcome::error))?;
        let lines = self.chunks(first, options);
        let state = Streaming {
            reply: self,
            options,
            lines,
            ended: false,
        };
        let body = stream::unfold(state, |mut state| async move {
            let line = state.next_line().await?;
            Some((Ok::<Bytes, Infallible>(line), state))
        });
        let headers = [
            (CONTENT_TYPE, "text/event-stream"),
            (CACHE_CONTROL, "no-cache"),
        ];
        Ok((headers, Body::from_stream(body)).into_response())
    }

    fn open(&self) -> bool {
        self.choices.iter().any(|choice| choice.finish.is_none())
    }

    /// Takes in one event; which choice it was for.
    async fn next(&mut self) -> Result<usize, ApiError> {
        let Some((index, event)) = self.events.recv().await else {
            return Err(ApiError::internal(
                "the request ended before its answer: the worker ended, or the client read too slowly",
            ));
        };
        let tokenizer = &self.app.tokenizer;
        let choice = &mut self.choices[index];
        match event {
            Event::Prompt(likelihoods) => {
                choice
                    .logprobs
                    .prompt(&choice.prompt, &likelihoods, tokenizer);
            }
            Event::Token {
                token,
                text,
                likelihood,
            } => {
                self.completion_tokens += 1;
                choice.logprobs.token(token, likelihood.as_ref(), tokenizer);
                choice.text.push_str(&text);
            }
            Event::Finished(finish) => choice.finish = Some(finish),
            Event::Failed(message) => return Err(ApiError::internal(message)),
        }
        Ok(index)
    }

    fn whole_choice(&mut self, index: usize) -> Value {
        let choice = &mut self.choices[index];
        let text = std::mem::take(&mut choice.text);
        let logprobs = choice.logprobs.take();
        let finish = choice.finish.map(Finish::word);
        if self.chat {
            let message = json!({"role": "assistant", "content": text});
            json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
        } else {
            json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
        }
    }

    /// The lines that a choice has to send after an event.
    fn chunks(&mut self, index: usize, options: StreamOptions) -> VecDeque<Bytes> {
        let mut deltas = Vec::with_capacity(2);
        let chat = self.chat;
        let choice = &mut self.choices[index];
        let text = std::mem::take(&mut choice.text);
        let finish = choice.finish.map(Finish::word);
        if chat && !choice.introduced {
            choice.introduced = true;
            let delta = json!({"role": "assistant", "content": ""});
            deltas.push(
                json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}),
            );
        }
        let logprobs = if finish.is_none() {
            choice.logprobs.take()
        } else {
            Value::Null
        };
        deltas.push(if chat {
            let delta = if finish.is_none() {
                json!({"content": text})
            } else {
                json!({})
            };
            json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
        } else {
            json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
        });
        let mut lines = VecDeque::with_capacity(deltas.len() + 1);
        for delta in deltas {
            let mut chunk = self.envelope(self.chunk_object(), json!([delta]));
            if options.continuous_usage {
                chunk["usage"] = self.usage();
            } else if options.include_usage {
                chunk["usage"] = Value::Null;
            }
            lines.push_back(line(&chunk));
        }
        lines
    }

    fn chunk_object(&self) -> &'static str {
        if self.chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        }
    }

    fn envelope(&self, object: &str, choices: Value) -> Value {
        let mut envelope = Map::new();
        envelope.insert("id".to_owned(), self.id.clone().into());
        envelope.insert("object".to_owned(), object.into());
        envelope.insert("created".to_owned(), self.created.into());
        envelope.insert("model".to_owned(), self.app.model_name.clone().into());
        envelope.insert("choices".to_owned(), choices);
        envelope.into()
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.prompt_tokens, self.completion_tokens);
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
    }
}

/// A stream in progress.
struct Streaming {
    reply: Reply,
    options: StreamOptions,
    /// Lines to send before the next event is waited for.
    lines: VecDeque<Bytes>,
    ended: bool,
}

impl Streaming {
    async fn next_line(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.ended {
                return None;
            }
            if self.reply.open() {
                match self.reply.next().await {
                    Ok(index) => self.lines = self.reply.chunks(index, self.options),
                    Err(error) => {
                        self.reply.outcome.set(Outcome::error);
                        self.ended = true;
                        self.lines.push_back(line(&error.body()));
                    }
                }
            } else {
                self.reply.outcome.set(Outcome::ok);
                self.ended = true;
                if self.options.include_usage {
                    let mut chunk = self.reply.envelope(self.reply.chunk_object(), json!([]));
                    chunk["usage"] = self.reply.usage();
                    self.lines.push_back(line(&chunk));
                }
                self.lines
                    .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
            }
        }
    }
}

/// One server-sent event. JSON has no raw line breaks, so one line is enough.
fn line(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}
