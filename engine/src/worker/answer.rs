//! One answer as it grows: its draws, its text, its stop rules and its times.

use std::time::Instant;

use crate::detokenize::{Detokenizer, StopFinder};
use crate::metrics::Metrics;
use crate::sample::Sampler;
use crate::tokenizer::Tokenizer;

use super::{Finish, Job};

/// How a sequence came out of a step.
#[derive(Debug)]
pub(super) enum Next {
    Continue,
    Finished(Finish),
    Failed(String),
    /// The client is gone or too slow.
    Gone,
}

/// The state of an answer.
#[derive(Debug)]
pub(super) struct Answer {
    /// The token that the next step feeds.
    pub(super) last_token: u32,
    generated: usize,
    sampler: Sampler,
    detokenizer: Detokenizer,
    stops: StopFinder,
    /// When the first and the latest token came.
    times: Option<(Instant, Instant)>,
}

impl Answer {
    pub(super) fn new(job: &Job) -> Self {
        Self {
            last_token: 0,
            generated: 0,
            sampler: Sampler::new(job.sampling),
            detokenizer: Detokenizer::default(),
            stops: StopFinder::new(job.stops.clone()),
            times: None,
        }
    }

    /// The next token, drawn or given; nothing when the logits are no numbers.
    pub(super) fn sample(&mut self, job: &Job, logits: &[f32], eos: &[u32]) -> Option<u32> {
        if let Some(given) = job.given.get(self.generated) {
            let numbers = logits.iter().all(|logit| logit.is_finite());
            return numbers.then_some(*given);
        }
        let forbidden = if self.generated < job.min_new_tokens {
            eos
        } else {
            &[]
        };
        self.sampler.next(logits, forbidden)
    }

    /// Appends a token: the text that is certain now, and whether the answer ends with it.
    pub(super) fn push(
        &mut self,
        job: &Job,
        token: u32,
        tokenizer: &Tokenizer,
        eos: &[u32],
    ) -> (String, Option<Finish>) {
        self.last_token = token;
        self.generated += 1;
        let ended = !job.ignore_eos && eos.contains(&token);
        let hidden = ended || tokenizer.is_special(token);
        let text = self.detokenizer.push(if hidden {
            &[]
        } else {
            tokenizer.token_bytes(token)
        });
        if self.generated < job.min_new_tokens {
            return (text, None);
        }
        let (mut text, stopped) = self.stops.push(&text);
        if stopped {
            return (text, Some(Finish::Stop));
        }
        let last = self.generated >= job.max_new_tokens;
        if !ended && !last {
            return (text, None);
        }
        let (rest, stopped) = self.stops.push(&self.detokenizer.finish());
        text.push_str(&rest);
        if !stopped {
            text.push_str(&self.stops.finish());
        }
        (
            text,
            Some(if ended || stopped {
                Finish::Stop
            } else {
                Finish::Length
            }),
        )
    }

    /// Records that a token came now.
    pub(super) fn observe_token(&mut self, job: &Job, metrics: &Metrics) {
        let now = Instant::now();
        let first = match self.times {
            None => {
                metrics.first_token(now - job.arrived);
                now
            }
            Some((first, latest)) => {
                metrics.next_token(now - latest);
                first
            }
        };
        self.times = Some((first, now));
    }

    /// Records that the answer is complete.
    pub(super) fn observe_end(&self, job: &Job, metrics: &Metrics) {
        if let Some((first, latest)) = self.times {
            metrics.finished(latest - job.arrived, latest - first, self.generated);
        }
    }
}
