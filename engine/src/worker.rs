//! The one thread that owns model, caches and scheduler: takes jobs in, runs steps, sends tokens out.
//!
//! It never waits for a client: a reader that is too slow or gone ends its own sequence and nothing else.

use std::collections::BTreeMap;
use std::slice;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mixquant_crds::KvPrecision;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use crate::drift::Watch;
use crate::health::Health;
use crate::metrics::Metrics;
use crate::model::{Chunk, KvCache, LogitRows, Model, Pass, Workspace};
use crate::sample::{Likelihood, Sampling};
use crate::scheduler::{Batch, Limits, Scheduler, SequenceId};
use crate::tokenizer::Tokenizer;
use crate::valve::log::DifferenceLog;
use crate::valve::read::{Settings, Valve};

mod answer;
mod prefill;
mod self_test;

use answer::{Answer, Next};
pub use self_test::self_test;

/// How often the bytes of all caches are counted while the worker is busy.
const KV_BYTES_INTERVAL: Duration = Duration::from_millis(500);

/// One sequence to compute, checked before: ids in the vocabulary, at least one of them, prompt and answer within the limits.
#[derive(Debug)]
pub struct Job {
    /// Comes back with every event: which of a request's sequences it is.
    pub index: usize,
    /// The prompt's ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; 0 only reads the prompt.
    pub max_new_tokens: usize,
    /// Tokens to generate before anything may end the answer.
    pub min_new_tokens: usize,
    /// End tokens do not end the answer.
    pub ignore_eos: bool,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// The answer's tokens where they are not drawn but given: what is wanted are their likelihoods. As many as `max_new_tokens`, or none.
    pub given: Vec<u32>,
    /// Texts that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// Likelihoods of the answer's tokens with so many alternatives.
    pub logprobs: Option<usize>,
    /// Likelihoods of the prompt's tokens too.
    pub prompt_logprobs: bool,
    /// When the request came in.
    pub arrived: Instant,
    /// Where events go; when it closes, the sequence ends.
    pub events: Sender<(usize, Event)>,
    /// The sequence's place in the bounded queue.
    pub permit: OwnedSemaphorePermit,
}

/// What happened to a sequence.
#[derive(Debug)]
pub enum Event {
    /// The likelihoods of the prompt's tokens from the second on.
    Prompt(Vec<Likelihood>),
    /// One more token.
    Token {
        /// Its id.
        token: u32,
        /// The text that is certain now: may be empty, may hold text of tokens before.
        text: String,
        /// Present when the job asked for it.
        likelihood: Option<Likelihood>,
    },
    /// The last event of a sequence that went well.
    Finished(Finish),
    /// The last event of one that did not: one line.
    Failed(String),
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end token or a stop string.
    Stop,
    /// The most tokens that were asked for.
    Length,
}

impl Finish {
    /// The word of the OpenAI API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

struct Sequence {
    job: Job,
    cache: Option<KvCache>,
    answer: Answer,
}

/// Model, caches and scheduler.
pub struct Worker {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    scheduler: Scheduler,
    sequences: BTreeMap<SequenceId, Sequence>,
    workspace: Workspace,
    valve: Valve,
    differences: Option<DifferenceLog>,
    drift: Option<Watch>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    next_id: u64,
    kv_capacity_tokens: usize,
    kv_bytes_counted: Instant,
}

impl Worker {
    /// A worker with nothing to do.
    pub fn new(
        model: Model,
        tokenizer: Arc<Tokenizer>,
        limits: Limits,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
    ) -> Self {
        Self {
            model,
            tokenizer,
            scheduler: Scheduler::new(limits),
            sequences: BTreeMap::new(),
            workspace: Workspace::default(),
            valve: Valve::new(Settings::default()),
            differences: None,
            drift: None,
            metrics,
            health,
            next_id: 0,
            kv_capacity_tokens: limits.kv_capacity_tokens.max(1),
            kv_bytes_counted: Instant::now(),
        }
    }

    /// With a valve other than the default, and a log of what it did not let pass.
    #[must_use]
    pub fn with_valve(mut self, settings: Settings, differences: Option<DifferenceLog>) -> Self {
        self.valve = Valve::new(settings);
        self.differences = differences;
        self
    }

    /// Counts what prompts hold beyond what calibration saw.
    #[must_use]
    pub fn with_drift(mut self, watch: Option<Watch>) -> Self {
        self.drift = watch;
        self
    }

    /// Works until every sender of jobs is gone and every sequence done.
    pub fn run(&mut self, jobs: &mpsc::Receiver<Job>) {
        loop {
            while let Ok(job) = jobs.try_recv() {
                self.add(job);
            }
            self.drop_cancelled();
            self.health.step_begins();
            let batch = self.scheduler.schedule();
            match &batch {
                Batch::Idle => {}
                Batch::Prefill(id) => self.prefill(*id),
                Batch::Decode(ids) => self.decode(ids),
            }
            self.health.step_ends();
            self.publish(batch == Batch::Idle);
            if batch == Batch::Idle {
                match jobs.recv() {
                    Ok(job) => self.add(job),
                    Err(mpsc::RecvError) => return,
                }
            }
        }
    }

    fn add(&mut self, job: Job) {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        if self
            .scheduler
            .add(id, job.prompt.len() + job.max_new_tokens)
        {
            let answer = Answer::new(&job);
            self.sequences.insert(
                id,
                Sequence {
                    job,
                    cache: None,
                    answer,
                },
            );
        } else {
            // The API checks lengths against the same limits first, so this is a last resort; a closed channel is fine.
            let _ = job.events.try_send((
                job.index,
                Event::Failed("the request does not fit into the cache".to_owned()),
            ));
        }
    }

    /// Ends sequences whose client is gone, so that the step about to be chosen leaves them out.
    fn drop_cancelled(&mut self) {
        let gone = self
            .sequences
            .iter()
            .filter(|(_, sequence)| sequence.job.events.is_closed());
        let gone: Vec<SequenceId> = gone.map(|(id, _)| *id).collect();
        for id in gone {
            self.end(id);
        }
    }

    fn end(&mut self, id: SequenceId) {
        self.scheduler.remove(id);
        self.sequences.remove(&id);
    }

    fn decode(&mut self, ids: &[SequenceId]) {
        let mut members: Vec<(SequenceId, &mut Sequence)> = (self.sequences.iter_mut())
            .filter(|(id, _)| ids.contains(id))
            .map(|(id, sequence)| (*id, sequence))
            .collect();
        let mut chunks: Vec<Chunk<'_>> = (members.iter_mut())
            .map(|(_, sequence)| Chunk {
                tokens: slice::from_ref(&sequence.answer.last_token),
                cache: sequence
                    .cache
                    .as_mut()
                    .expect("a running sequence had its prompt read"),
                logits: LogitRows::Last,
            })
            .collect();
        let result = self
            .model
            .forward(Pass::Precise, &mut chunks, &mut self.workspace, None);
        drop(chunks);
        let vocabulary = self.model.config().vocab_size;
        let step = Step {
            tokenizer: &self.tokenizer,
            metrics: &self.metrics,
            eos: &self.model.config().eos_token_ids,
        };
        let outcomes: Vec<(SequenceId, Next)> = match result {
            Err(error) => members
                .iter()
                .map(|(id, _)| (*id, Next::Failed(error.message.clone())))
                .collect(),
            Ok(logits) => (members.iter_mut().zip(logits.chunks_exact(vocabulary)))
                .map(|((id, sequence), logits)| (*id, step.next_token(sequence, logits)))
                .collect(),
        };
        for (id, next) in outcomes {
            self.settle(id, next);
        }
    }

    /// Takes in how a sequence came out of a step.
    fn settle(&mut self, id: SequenceId, next: Next) {
        let Some(sequence) = self.sequences.get(&id) else {
            return;
        };
        let job = &sequence.job;
        match next {
            Next::Continue => return,
            Next::Finished(finish) => {
                sequence.answer.observe_end(job, &self.metrics);
                // A client that is gone needs no last event.
                let _ = job.events.try_send((job.index, Event::Finished(finish)));
            }
            Next::Failed(message) => {
                tracing::warn!(message, "a request failed");
                let _ = job.events.try_send((job.index, Event::Failed(message)));
            }
            Next::Gone => {}
        }
        self.end(id);
    }

    fn publish(&mut self, idle: bool) {
        let stored: usize = self.caches().map(KvCache::len).sum();
        #[expect(
            clippy::cast_precision_loss,
            reason = "a share needs no more than 15 digits"
        )]
        let usage = stored as f64 / self.kv_capacity_tokens as f64;
        self.metrics
            .set_load(self.scheduler.running(), self.scheduler.waiting(), usage);
        if idle || self.kv_bytes_counted.elapsed() >= KV_BYTES_INTERVAL {
            self.kv_bytes_counted = Instant::now();
            self.metrics.set_kv_bytes(&self.kv_bytes());
        }
    }

    fn kv_bytes(&self) -> [(KvPrecision, usize); 4] {
        let tiers = [
            KvPrecision::INT2,
            KvPrecision::INT4,
            KvPrecision::INT8,
            KvPrecision::BF16,
        ];
        let mut total = tiers.map(|tier| (tier, 0));
        for (tier, bytes) in self.caches().flat_map(KvCache::bytes_by_tier) {
            for slot in total.iter_mut().filter(|slot| slot.0 == tier) {
                slot.1 += bytes;
            }
        }
        total
    }

    fn caches(&self) -> impl Iterator<Item = &KvCache> {
        self.sequences
            .values()
            .filter_map(|sequence| sequence.cache.as_ref())
    }
}

/// What turning logits into an event needs.
struct Step<'a> {
    tokenizer: &'a Tokenizer,
    metrics: &'a Metrics,
    eos: &'a [u32],
}

impl Step<'_> {
    /// `rows` are those of the prompt where they were asked for, `last` is what the first token is drawn from.
    fn after_prompt(&self, sequence: &mut Sequence, rows: &[f32], last: &[f32]) -> Next {
        let job = &sequence.job;
        if job.prompt_logprobs {
            if !rows.iter().all(|logit| logit.is_finite()) {
                return self.no_numbers();
            }
            let rows = rows.chunks_exact(last.len()).zip(&job.prompt[1..]);
            let top = job.logprobs.unwrap_or(0);
            let likelihoods = rows
                .map(|(row, token)| Likelihood::of(*token, row, top))
                .collect();
            if let Some(gone) = send(job, Event::Prompt(likelihoods)) {
                return gone;
            }
        }
        if job.max_new_tokens == 0 {
            return Next::Finished(Finish::Length);
        }
        self.next_token(sequence, last)
    }

    fn next_token(&self, sequence: &mut Sequence, logits: &[f32]) -> Next {
        let Sequence { job, answer, .. } = sequence;
        let Some(token) = answer.sample(job, logits, self.eos) else {
            return self.no_numbers();
        };
        let likelihood = job.logprobs.map(|top| Likelihood::of(token, logits, top));
        answer.observe_token(job, self.metrics);
        let (text, finish) = answer.push(job, token, self.tokenizer, self.eos);
        if let Some(gone) = send(
            job,
            Event::Token {
                token,
                text,
                likelihood,
            },
        ) {
            return gone;
        }
        finish.map_or(Next::Continue, Next::Finished)
    }

    fn no_numbers(&self) -> Next {
        self.metrics.nan_logits();
        Next::Failed("the model computed logits that are no finite numbers: its weights or its cache are damaged".to_owned())
    }
}

/// Sends without waiting. A full channel means that the client reads too slowly: it ends like one that is gone.
fn send(job: &Job, event: Event) -> Option<Next> {
    match job.events.try_send((job.index, event)) {
        Ok(()) => None,
        Err(TrySendError::Closed(_)) => Some(Next::Gone),
        Err(TrySendError::Full(_)) => {
            tracing::warn!("a client reads too slowly: its request ends");
            Some(Next::Gone)
        }
    }
}
