//! The HTTP side: requests to jobs, events to answers. It computes nothing and holds no model.
//!
//! [`start`] brings up the two ports and the worker; everything else here is what one request passes through.

mod admin;
mod body;
mod error;
mod fields;
mod guard;
mod http;
mod logprobs;
mod probe;
mod reply;
mod request;
mod seats;
mod start;
mod text;

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, Request as HttpRequest, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::sync::Semaphore;
use tokio::sync::mpsc;

use crate::health::Health;
use crate::metrics::{Metrics, Outcome};
use crate::tokenizer::{Special, Tokenizer};
use crate::worker::{Event, Job};

use body::read_body;
use error::ApiError;
use fields::Fields;
use logprobs::Logprobs;
use reply::{Choice, Reply};
use request::{Bounds, Prompt, Request};
pub use start::{Options, Running, start};

/// Events of one streamed sequence that its client may be behind.
const STREAM_BACKLOG: usize = 256;
/// Logits that the likelihoods of one prompt may take.
const MAX_PROMPT_LOGITS_BYTES: usize = 1 << 30;

/// What every request needs.
pub(crate) struct App {
    model_name: String,
    created: u64,
    bounds: Bounds,
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    jobs: Sender<Job>,
    /// One permit for each sequence that runs or waits.
    permits: Arc<Semaphore>,
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(text::models))
        .route("/v1/models/{*name}", get(text::model))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/health", get(text::health))
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .with_state(app)
}

async fn unknown_path(method: Method, uri: Uri) -> ApiError {
    ApiError::not_found(format!(
        "there is no {}: chat with POST /v1/chat/completions, complete a text with POST /v1/completions, see the model with GET /v1/models",
        shown(&method, &uri)
    ))
}

async fn unknown_method(method: Method, uri: Uri) -> ApiError {
    ApiError::method(format!(
        "there is no {}: the header `allow` names the methods of this path",
        shown(&method, &uri)
    ))
}

/// A request's first line for a message, cut where a client made it long.
fn shown(method: &Method, uri: &Uri) -> String {
    let path: String = uri.path().chars().take(100).collect();
    let method: String = method.as_str().chars().take(20).collect();
    format!("{method} {path}")
}

async fn completions(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response {
    answer(app, request, false)
        .await
        .unwrap_or_else(IntoResponse::into_response)
}

async fn chat_completions(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response {
    answer(app, request, true)
        .await
        .unwrap_or_else(IntoResponse::into_response)
}

async fn answer(app: Arc<App>, http: HttpRequest<Body>, chat: bool) -> Result<Response, ApiError> {
    // Dropped with the request when the client goes away.
    let outcome = OutcomeGuard::new(app.metrics.clone());
    let reply = prepare(app, http, chat, outcome.clone())
        .await
        .inspect_err(|error| {
            let fault = error.status.is_server_error()
                && error.status != axum::http::StatusCode::SERVICE_UNAVAILABLE;
            outcome.set(if fault {
                Outcome::error
            } else {
                Outcome::rejected
            });
        })?;
    match reply {
        (reply, Some(options)) => reply.stream(options).await,
        (reply, None) => reply.whole().await,
    }
}

/// Reads, checks and submits a request.
async fn prepare(
    app: Arc<App>,
    http: HttpRequest<Body>,
    chat: bool,
    outcome: OutcomeGuard,
) -> Result<(Reply, Option<request::StreamOptions>), ApiError> {
    let body = read_body(http).await?;
    // From here on the time is the engine's; a slow upload is not.
    let arrived = Instant::now();
    let mut fields = Fields::parse(&body)?;
    app.check_model(&mut fields)?;
    let mut request = if chat {
        Request::chat(fields, app.bounds)?
    } else {
        Request::completion(fields, app.bounds)?
    };
    let prompts = app
        .clone()
        .encode(std::mem::take(&mut request.prompts))
        .await?;
    let lengths = app.check_lengths(&prompts, &request, chat)?;
    let permits = app
        .permits
        .clone()
        .try_acquire_many_owned(u32::try_from(prompts.len() * request.n).unwrap_or(u32::MAX));
    let Ok(mut permits) = permits else {
        return Err(ApiError::unavailable("the queue is full: try again"));
    };
    let capacity: usize = match request.stream {
        Some(_) => prompts.len() * request.n * STREAM_BACKLOG,
        // Every event of an answer that is read at the end has room, so that it never counts as read too slowly.
        None => lengths.iter().map(|length| length + 2).sum::<usize>() * request.n,
    };
    let (sender, events) = mpsc::channel(capacity);
    let mut choices = Vec::with_capacity(prompts.len() * request.n);
    for ((ids, echo), max_new_tokens) in prompts.iter().zip(lengths) {
        for _ in 0..request.n {
            let index = choices.len();
            let permit = permits
                .split(1)
                .ok_or_else(|| ApiError::internal("a sequence has no place in the queue"))?;
            choices.push(choice(&request, chat, ids, echo));
            let job = job(
                &request,
                index,
                ids,
                max_new_tokens,
                (arrived, sender.clone(), permit),
            );
            app.jobs
                .send(job)
                .map_err(|_| ApiError::unavailable("the worker ended: the process will restart"))?;
        }
    }
    let prefix = if chat { "chatcmpl" } else { "cmpl" };
    let reply = Reply {
        chat,
        id: format!("{prefix}-{:032x}", rand::random::<u128>()),
        created: unix_seconds(),
        choices,
        events,
        prompt_tokens: prompts.iter().map(|(ids, _)| ids.len()).sum(),
        completion_tokens: 0,
        outcome,
        app,
    };
    Ok((reply, request.stream))
}

type Sending = (
    Instant,
    mpsc::Sender<(usize, Event)>,
    tokio::sync::OwnedSemaphorePermit,
);

fn job(
    request: &Request,
    index: usize,
    ids: &Arc<[u32]>,
    max_new_tokens: usize,
    sending: Sending,
) -> Job {
    let (arrived, events, permit) = sending;
    let mut sampling = request.sampling;
    sampling.seed = if request.seeded {
        sampling.seed.wrapping_add(index as u64)
    } else {
        rand::random()
    };
    Job {
        index,
        prompt: ids.to_vec(),
        max_new_tokens,
        min_new_tokens: request.min_new_tokens.min(max_new_tokens),
        ignore_eos: request.ignore_eos,
        sampling,
        given: Vec::new(),
        stops: request.stops.clone(),
        logprobs: request.logprobs,
        prompt_logprobs: request.echo && request.logprobs.is_some(),
        arrived,
        events,
        permit,
    }
}

fn choice(request: &Request, chat: bool, ids: &Arc<[u32]>, echo: &str) -> Choice {
    let logprobs = match request.logprobs {
        None => Logprobs::Unwanted,
        Some(_) if chat => Logprobs::Objects(Vec::new()),
        Some(_) => Logprobs::Lists(Box::default()),
    };
    let text = if request.echo {
        echo.to_owned()
    } else {
        String::new()
    };
    Choice {
        prompt: ids.clone(),
        text,
        logprobs,
        finish: None,
        introduced: false,
    }
}

impl App {
    /// The request's `model`, when it has one, must be the one that is served.
    fn check_model(&self, fields: &mut Fields) -> Result<(), ApiError> {
        match fields.string("model")? {
            Some(name) if name != self.model_name => Err(self.unknown_model(&name)),
            _ => Ok(()),
        }
    }

    fn unknown_model(&self, name: &str) -> ApiError {
        let name: String = name.chars().take(100).collect();
        let served = &self.model_name;
        let mut error = ApiError::not_found(format!(
            "the model `{name}` is not served here: use `{served}`"
        ));
        error.param = Some("model".to_owned());
        error
    }

    /// Each prompt's ids and its text for an echo.
    async fn encode(
        self: Arc<Self>,
        prompts: Vec<Prompt>,
    ) -> Result<Vec<(Arc<[u32]>, String)>, ApiError> {
        // Tokenising a long text takes milliseconds: it must not hold up the other connections.
        let encoded = tokio::task::spawn_blocking(move || {
            prompts
                .into_iter()
                .map(|prompt| self.encode_one(prompt))
                .collect()
        });
        encoded
            .await
            .map_err(|_| ApiError::internal("the tokenizer failed on this prompt"))?
    }

    fn encode_one(&self, prompt: Prompt) -> Result<(Arc<[u32]>, String), ApiError> {
        let (ids, text) = match prompt {
            Prompt::Text(text) => {
                self.check_text("prompt", text.len())?;
                (self.tokenizer.encode(&text, Special::Add)?, text)
            }
            Prompt::Chat(messages) => {
                self.check_text(
                    "messages",
                    messages.iter().map(|message| message.content.len()).sum(),
                )?;
                (self.tokenizer.encode_chat(&messages)?, String::new())
            }
            Prompt::Ids(ids) => {
                let hidden = usize::from(ids.first().copied() == self.tokenizer.bos());
                let text = self.tokenizer.decode_all(&ids[hidden..]);
                (ids, text)
            }
        };
        Ok((ids.into(), text))
    }

    /// Refuses a text that cannot fit whatever its tokens are, before the tokenizer works on it.
    fn check_text(&self, name: &str, bytes: usize) -> Result<(), ApiError> {
        let most = self
            .bounds
            .max_sequence_length
            .saturating_mul(self.tokenizer.longest_token_bytes());
        if bytes <= most {
            return Ok(());
        }
        let context = self.bounds.max_sequence_length;
        Err(ApiError::field(
            name,
            format!("`{name}` has {bytes} bytes: the context holds {context} tokens"),
        ))
    }

    /// The most tokens to generate for each prompt.
    fn check_lengths(
        &self,
        prompts: &[(Arc<[u32]>, String)],
        request: &Request,
        chat: bool,
    ) -> Result<Vec<usize>, ApiError> {
        let context = self.bounds.max_sequence_length;
        let name = if chat { "messages" } else { "prompt" };
        let length = |(ids, _): &(Arc<[u32]>, String)| {
            let prompt = ids.len();
            if prompt == 0 {
                return Err(ApiError::field(name, format!("`{name}` has no token")));
            }
            let logits = prompt.saturating_mul(self.bounds.vocab_size * size_of::<f32>());
            if request.echo && request.logprobs.is_some() && logits > MAX_PROMPT_LOGITS_BYTES {
                return Err(ApiError::field(
                    "logprobs",
                    format!(
                        "`logprobs` of a prompt of {prompt} tokens need too much memory: send a shorter prompt"
                    ),
                ));
            }
            let room = context.saturating_sub(prompt);
            let wanted = request
                .max_new_tokens
                .unwrap_or(if chat { room.max(1) } else { 16 });
            match (wanted <= room, request.max_new_tokens) {
                (true, _) => Ok(wanted),
                (false, None) if !chat && room > 0 => Ok(room),
                (false, Some(_)) if room > 0 => Err(ApiError::field(
                    request.max_name,
                    format!(
                        "`{}` is {wanted} and the prompt has {prompt} tokens: together more than the context of {context}",
                        request.max_name
                    ),
                )),
                (false, _) => Err(ApiError::field(
                    name,
                    format!(
                        "`{name}` has {prompt} tokens: the context of {context} leaves no room for an answer"
                    ),
                )),
            }
        };
        prompts.iter().map(length).collect()
    }
}

/// Counts one request once: as cancelled unless something else is set before the last clone goes.
#[derive(Debug, Clone)]
pub(crate) struct OutcomeGuard(Arc<Counted>);

#[derive(Debug)]
struct Counted {
    metrics: Arc<Metrics>,
    outcome: Mutex<Outcome>,
}

impl OutcomeGuard {
    fn new(metrics: Arc<Metrics>) -> Self {
        Self(Arc::new(Counted {
            metrics,
            outcome: Mutex::new(Outcome::cancelled),
        }))
    }

    fn set(&self, outcome: Outcome) {
        *self
            .0
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = outcome;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.metrics.request(
            *self
                .outcome
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}
