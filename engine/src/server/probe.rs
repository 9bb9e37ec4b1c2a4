//! `POST /probe` on the admin port: texts of an artifact, answered through the serving path one after the other, with their likelihoods.
//!
//! The operator asks for it while a canary is compared with stable. A probe is a request like any other (same queue, same steps, same
//! metrics), except that its answer is given. It must never cost a user anything: one probe runs at a time, none is begun while every
//! place of the batch is taken, and one that somebody comes to wait behind is given up. No text goes in or out.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use mixquant_crds::Digest;
use mixquant_crds::probe::{MAX_REQUESTS, MAX_SECONDS, ProbeAnswer, ProbeRequest, ProbedText};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{App, OutcomeGuard};
use crate::artifact::probe::{Probes, Text};
use crate::metrics::Outcome;
use crate::sample::Sampling;
use crate::worker::{Event, Job};

/// Longer bodies are no request for probes.
pub(super) const MAX_BODY: usize = 4 << 10;

/// Answers probes once the model is ready.
pub(super) struct Prober {
    /// Where artifacts are; `None` where the engine serves without one.
    artifacts: Option<PathBuf>,
    /// Sequences that run at once.
    places: usize,
    /// Sequences that run or wait at most.
    seats: usize,
    ready: OnceLock<Ready>,
    turn: tokio::sync::Mutex<()>,
    /// The texts that were read last.
    kept: Mutex<Option<(Digest, Arc<Probes>)>>,
}

struct Ready {
    /// It holds a sender of jobs, and the worker ends when the last is gone: the admin port must not keep it alive.
    app: Weak<App>,
    vocabulary: Digest,
}

/// A refusal: a status and one line.
type Refusal = (StatusCode, String);

/// Why no further text is answered.
enum Stop {
    /// What was answered stands.
    Here(String),
    /// The engine failed.
    Failed(String),
}

impl Prober {
    pub(super) fn new(artifact: Option<&Path>, places: usize, queue: usize) -> Self {
        Self {
            artifacts: artifact.and_then(Path::parent).map(Path::to_owned),
            places,
            seats: places + queue,
            ready: OnceLock::new(),
            turn: tokio::sync::Mutex::new(()),
            kept: Mutex::new(None),
        }
    }

    /// The model is ready: from now on probes are answered.
    pub(super) fn open(&self, app: &Arc<App>) {
        let ready = Ready {
            app: Arc::downgrade(app),
            vocabulary: app.tokenizer.digest(),
        };
        // Only one model is ever loaded in a process.
        let _ = self.ready.set(ready);
    }

    /// Answers one request.
    pub(super) async fn answer(&self, body: Bytes) -> Response {
        match self.probe(&body).await {
            Ok(answer) => Json(answer).into_response(),
            Err((status, why)) => (status, format!("{why}\n")).into_response(),
        }
    }

    async fn probe(&self, body: &[u8]) -> Result<ProbeAnswer, Refusal> {
        let unavailable = |why: &str| (StatusCode::SERVICE_UNAVAILABLE, why.to_owned());
        let ready = self.ready.get();
        let ready = ready.ok_or_else(|| unavailable("the model is not ready yet"))?;
        let app = ready.app.upgrade();
        let app = app.ok_or_else(|| unavailable("the process ends"))?;
        let wrong = |why: String| (StatusCode::BAD_REQUEST, why);
        let request: ProbeRequest = serde_json::from_slice(body)
            .map_err(|error| wrong(format!("not a request for probes ({error})")))?;
        if !(1..=MAX_REQUESTS).contains(&request.count)
            || !(1..=MAX_SECONDS).contains(&request.seconds)
        {
            return Err(wrong(format!(
                "`count` is 1 to {MAX_REQUESTS} and `seconds` 1 to {MAX_SECONDS}"
            )));
        }
        let Ok(_turn) = self.turn.try_lock() else {
            let why = "another probe is being answered: one at a time";
            return Err((StatusCode::TOO_MANY_REQUESTS, why.to_owned()));
        };
        let known = (&ready.vocabulary, app.bounds.vocab_size);
        let probes = self.probes(known, &request.artifact).await?;
        self.run(&app, &request, &probes)
            .await
            .map_err(|why| (StatusCode::INTERNAL_SERVER_ERROR, why))
    }

    /// The texts of an artifact that lies beside the one that is served.
    async fn probes(
        &self,
        (vocabulary, vocab_size): (&Digest, usize),
        artifact: &Digest,
    ) -> Result<Arc<Probes>, Refusal> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, probes)) = kept().as_ref()
            && known == artifact
        {
            return Ok(probes.clone());
        }
        let conflict = |why: String| (StatusCode::CONFLICT, why);
        let Some(artifacts) = &self.artifacts else {
            return Err(conflict("this engine serves without an artifact".into()));
        };
        let directory = artifacts.join(artifact.hex());
        let vocabulary = vocabulary.clone();
        let read = move || Probes::open(&directory, &vocabulary, vocab_size);
        let read = tokio::task::spawn_blocking(read).await;
        let read = read.map_err(|_| conflict("the texts could not be read".into()))?;
        let probes = Arc::new(read.map_err(|error| conflict(error.message))?);
        *kept() = Some((artifact.clone(), probes.clone()));
        Ok(probes)
    }

    async fn run(
        &self,
        app: &App,
        request: &ProbeRequest,
        probes: &Probes,
    ) -> Result<ProbeAnswer, String> {
        let ends = Instant::now() + Duration::from_secs(request.seconds.into());
        let texts = u32::try_from(probes.texts.len()).unwrap_or(u32::MAX);
        let mut answer = ProbeAnswer {
            texts,
            answers: Vec::new(),
            stopped: None,
        };
        for index in 0..request.count {
            let number = (request.first % texts).wrapping_add(index) % texts;
            let text = &probes.texts[number as usize];
            let context = app.bounds.max_sequence_length;
            if text.prompt.len() + text.answer.len() > context {
                let why = format!("text {number} is longer than the context of {context} tokens");
                answer.stopped = Some(why);
                continue;
            }
            let left = ends.saturating_duration_since(Instant::now());
            let answered = timeout(left, self.text(app, text)).await;
            let answered =
                answered.unwrap_or_else(|_| Err(Stop::Here("the time was up".to_owned())));
            match answered {
                Ok(nll) => answer.answers.push(ProbedText {
                    text: number,
                    tokens: u32::try_from(text.answer.len()).unwrap_or(u32::MAX),
                    nll,
                }),
                Err(Stop::Here(why)) => {
                    answer.stopped = Some(why);
                    break;
                }
                Err(Stop::Failed(why)) => return Err(why),
            }
        }
        Ok(answer)
    }

    /// Whether more sequences than `mine` leave no place free.
    fn is_busy(&self, app: &App, mine: usize) -> bool {
        let taken = self.seats.saturating_sub(app.permits.available_permits());
        taken.saturating_sub(mine) + 1 > self.places
    }

    /// The negative log-likelihood of a text's answer. Dropped at any moment, it leaves nothing behind.
    async fn text(&self, app: &App, text: &Text) -> Result<f64, Stop> {
        let here = |why: &str| Stop::Here(why.to_owned());
        app.health.ready(Instant::now()).map_err(Stop::Here)?;
        if self.is_busy(app, 0) {
            return Err(here("users take every place of the batch"));
        }
        let permit = app.permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| here("the queue is full"))?;
        // Counted as any request is, from here on.
        let outcome = OutcomeGuard::new(app.metrics.clone());
        let (events, mut received) = mpsc::channel(text.answer.len() + 2);
        let job = Job {
            index: 0,
            prompt: text.prompt.clone(),
            max_new_tokens: text.answer.len(),
            min_new_tokens: 0,
            ignore_eos: true,
            sampling: Sampling::greedy(),
            given: text.answer.clone(),
            stops: Vec::new(),
            logprobs: Some(0),
            prompt_logprobs: false,
            arrived: Instant::now(),
            events,
            permit,
        };
        app.jobs
            .send(job)
            .map_err(|_| here("the worker has ended"))?;
        let mut nll = 0.0;
        while let Some((_, event)) = received.recv().await {
            match event {
                Event::Prompt(_) => {}
                Event::Token { likelihood, .. } => {
                    let logprob = likelihood.map_or(f32::NAN, |likelihood| likelihood.logprob);
                    nll -= f64::from(logprob);
                    if self.is_busy(app, 1) {
                        return Err(here("users came to wait"));
                    }
                }
                Event::Finished(_) if nll.is_finite() => {
                    outcome.set(Outcome::ok);
                    app.metrics.probed();
                    return Ok(nll);
                }
                Event::Finished(_) => {
                    outcome.set(Outcome::error);
                    return Err(Stop::Failed("a likelihood is no finite number".into()));
                }
                Event::Failed(why) => {
                    outcome.set(Outcome::error);
                    return Err(Stop::Failed(why));
                }
            }
        }
        outcome.set(Outcome::error);
        Err(here("the worker has ended"))
    }
}
