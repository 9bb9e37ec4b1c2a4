//! Which sequences the next step computes. Plain data: no clock, no thread, no model; the worker calls `schedule`, computes, and
//! calls `commit`.
//!
//! Waiting sequences are taken first come, first served. Each reserves cache for its whole length when it starts, so that
//! a running sequence never has to give way. A prompt is read between two decode steps, one prompt at a time, so that
//! neither starves the other.

use std::collections::VecDeque;

#[cfg(test)]
mod tests;

/// Names a sequence. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// What the machine can hold.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Sequences that run at once.
    pub max_batch_size: usize,
    /// Tokens that all caches together hold.
    pub kv_capacity_tokens: usize,
}

/// What to compute next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Batch {
    /// Nothing: every sequence is done.
    Idle,
    /// Read this sequence's prompt; its cache is new.
    Prefill(SequenceId),
    /// One token for each of these.
    Decode(Vec<SequenceId>),
}

#[derive(Debug)]
struct Entry {
    id: SequenceId,
    /// Prompt and answer at their longest, in tokens.
    tokens: usize,
}

/// Sequences that wait and that run.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    waiting: VecDeque<Entry>,
    running: Vec<Entry>,
    reserved_tokens: usize,
    /// The last step read a prompt: it is decode's turn.
    prefilled: bool,
}

impl Scheduler {
    /// Nothing waits, nothing runs.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            reserved_tokens: 0,
            prefilled: false,
        }
    }

    /// Puts a sequence at the end of the queue. False, and nothing changed, when it could never run.
    pub fn add(&mut self, id: SequenceId, tokens: usize) -> bool {
        if tokens > self.limits.kv_capacity_tokens || self.limits.max_batch_size == 0 {
            return false;
        }
        self.waiting.push_back(Entry { id, tokens });
        true
    }

    /// The next step. A sequence that it starts counts as running from now on.
    pub fn schedule(&mut self) -> Batch {
        let decode_is_due = self.prefilled && !self.running.is_empty();
        if !decode_is_due && let Some(id) = self.start_next() {
            self.prefilled = true;
            return Batch::Prefill(id);
        }
        self.prefilled = false;
        if self.running.is_empty() {
            return Batch::Idle;
        }
        Batch::Decode(self.running.iter().map(|entry| entry.id).collect())
    }

    /// Takes in what a step ended: these sequences have their last token, and their cache is free.
    pub fn commit(&mut self, finished: &[SequenceId]) {
        for id in finished {
            self.remove(*id);
        }
    }

    /// Forgets a sequence, waiting or running. False when it is not known (any more).
    pub fn remove(&mut self, id: SequenceId) -> bool {
        if let Some(at) = self.running.iter().position(|entry| entry.id == id) {
            let entry = self.running.remove(at);
            self.reserved_tokens -= entry.tokens;
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|entry| entry.id != id);
        self.waiting.len() < before
    }

    /// Sequences in the queue.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that are computed.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Cache that running sequences hold, in tokens.
    pub fn reserved_tokens(&self) -> usize {
        self.reserved_tokens
    }

    fn start_next(&mut self) -> Option<SequenceId> {
        let next = self.waiting.front()?;
        let fits = self.running.len() < self.limits.max_batch_size
            && self.reserved_tokens + next.tokens <= self.limits.kv_capacity_tokens;
        if !fits {
            return None;
        }
        let entry = self.waiting.pop_front()?;
        let id = entry.id;
        self.reserved_tokens += entry.tokens;
        self.running.push(entry);
        Some(id)
    }
}
