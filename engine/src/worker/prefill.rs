//! A prompt's step: it is read through the safety valve, counted, and its difference kept where there was one.

use std::time::{SystemTime, UNIX_EPOCH};

use super::answer::Next;
use super::{Job, Step, Worker};
use crate::metrics::{PrefillPrecision, PrefillReason};
use crate::model::{LogitRows, Model, Pass, Tap};
use crate::scheduler::SequenceId;
use crate::valve::Reason;
use crate::valve::log::Record;
use crate::valve::read::{Check, Reading};

impl Worker {
    pub(super) fn prefill(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get(&id) else {
            self.scheduler.remove(id);
            return;
        };
        let job = &sequence.job;
        let rows = match (job.prompt_logprobs, job.max_new_tokens) {
            (true, _) => LogitRows::All,
            (false, 0) => LogitRows::None,
            (false, _) => LogitRows::Last,
        };
        let capacity = job.prompt.len() + job.max_new_tokens;
        let prompt = (&job.prompt[..], rows);
        let tap = (self.drift.as_mut()).map(|watch| -> &mut dyn Tap { watch });
        let read = (self.valve).read(&self.model, prompt, capacity, &mut self.workspace, tap);
        if let Some(watch) = &mut self.drift {
            self.metrics.watched(&watch.take());
        }
        let next = match read {
            Err(error) => Next::Failed(error.message),
            Ok(reading) => {
                self.count(job, &reading);
                self.first_token(id, reading)
            }
        };
        self.settle(id, next);
    }

    fn first_token(&mut self, id: SequenceId, reading: Reading) -> Next {
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return Next::Gone;
        };
        sequence.cache = Some(reading.cache);
        let step = Step {
            tokenizer: &self.tokenizer,
            metrics: &self.metrics,
            eos: &self.model.config().eos_token_ids,
        };
        step.after_prompt(sequence, self.workspace.logits(), &reading.last)
    }

    fn count(&self, job: &Job, reading: &Reading) {
        let fallback = reading.check.as_ref().and_then(Check::fallback);
        let (precision, reason) = labels(&self.model, reading.pass, fallback.is_some());
        self.metrics.prefilled(job.prompt.len(), precision, reason);
        let Some(check) = &reading.check else { return };
        self.metrics.checked(check);
        if let Some(reason) = fallback {
            self.keep_difference(job, reason, check);
        }
    }

    fn keep_difference(&self, job: &Job, reason: Reason, check: &Check) {
        let kl = check.comparison.map(|comparison| comparison.kl);
        tracing::warn!(
            reason = reason.word(),
            ?kl,
            tokens = job.prompt.len(),
            "the safety valve had a prompt read again precisely"
        );
        let Some(log) = &self.differences else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let text = log
            .wants_text()
            .then(|| self.tokenizer.decode_all(&job.prompt));
        log.push(&Record::new(
            now.unwrap_or_default().as_secs(),
            reason,
            &job.prompt,
            check,
            text,
        ));
    }
}

fn labels(model: &Model, pass: Pass, fallback: bool) -> (PrefillPrecision, PrefillReason) {
    let plan = model.plan();
    let decode = plan.decode.scheme.into();
    match pass {
        _ if !plan.has_switch() => (decode, PrefillReason::plan),
        Pass::Prefill => (PrefillPrecision::W8A8, PrefillReason::length),
        Pass::Precise if fallback => (decode, PrefillReason::fallback),
        Pass::Precise => (decode, PrefillReason::short),
    }
}
