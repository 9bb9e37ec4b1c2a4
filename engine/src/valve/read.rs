//! Reading a prompt: by the quantised copy with the valve behind it, or precisely. The worker calls it once a prompt.
//!
//! ```text
//! quantised prefill, n tokens ─► last token again, precise weights, same cache ─► judge ─► keep: decode goes on from this cache
//!                                                                                 └─► fall back: n tokens precisely, new cache
//! ```
//!
//! Cost: one forward of one token a quantised prompt, and a precise prefill for each that falls back or is audited. The first token is
//! always drawn from precise logits.

use std::slice;

use super::audit::Lottery;
use super::{Comparison, Limits, Reason, Verdict, compare, judge, most_likely};
use crate::Result;
use crate::model::{Chunk, KvCache, LogitRows, Model, Pass, Tap, Workspace};

/// How the valve works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// What passes.
    pub limits: Limits,
    /// Percent of the quantised prompts that are also read precisely.
    pub shadow_audit_percent: f64,
    /// Which ones.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            shadow_audit_percent: mixquant_crds::names::valve_defaults::SHADOW_AUDIT_PERCENT,
            seed: 0,
        }
    }
}

/// The valve of one engine.
#[derive(Debug)]
pub struct Valve {
    limits: Limits,
    lottery: Lottery,
    /// Of the one token that is computed again: the logits of the whole prompt stay in the caller's.
    workspace: Workspace,
}

/// A prompt that was read.
#[derive(Debug)]
pub struct Reading {
    /// Keys and values of the prompt's tokens.
    pub cache: KvCache,
    /// The logits that the first token is drawn from; empty when none were wanted.
    pub last: Vec<f32>,
    /// Which weights wrote the cache.
    pub pass: Pass,
    /// What the valve saw; nothing where the prompt was read precisely at once, or no logits were wanted.
    pub check: Option<Check>,
    /// What was computed.
    pub work: Work,
}

/// What the valve saw.
#[derive(Debug, Clone)]
pub struct Check {
    /// The last token's logits of both passes over the same cache; nothing when one was no number.
    pub comparison: Option<Comparison>,
    /// Of an audited prompt: what would have been served against the full precise prefill; the inner nothing when that was no number.
    pub audit: Option<Option<Comparison>>,
    /// What follows.
    pub verdict: Verdict,
    /// The quantised pass's most likely tokens with their log-probabilities.
    pub quantised_top: Vec<(u32, f32)>,
    /// The precise pass's: of the full prefill where there was one.
    pub precise_top: Vec<(u32, f32)>,
}

/// Tokens computed for one prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// By the quantised copy.
    pub quantised: usize,
    /// By the valve.
    pub valve: usize,
    /// By the precise weights, from the start.
    pub precise: usize,
}

impl Check {
    /// Why the prompt was read again, if it was.
    pub fn fallback(&self) -> Option<Reason> {
        match self.verdict {
            Verdict::Keep => None,
            Verdict::Fallback(reason) => Some(reason),
        }
    }
}

impl Valve {
    /// A valve that has seen nothing.
    pub fn new(settings: Settings) -> Self {
        Self {
            limits: settings.limits,
            lottery: Lottery::new(settings.shadow_audit_percent, settings.seed),
            workspace: Workspace::default(),
        }
    }

    /// Reads a prompt by the model's plan into a new cache of `capacity` tokens. With [`LogitRows::All`], `workspace.logits()` then holds
    /// the prompt's rows of the pass that counts; such prompts are judged but not audited. `tap` watches the first pass over the prompt.
    ///
    /// # Errors
    /// A prompt that does not fit.
    pub fn read(
        &mut self,
        model: &Model,
        (prompt, rows): (&[u32], LogitRows),
        capacity: usize,
        workspace: &mut Workspace,
        tap: Option<&mut dyn Tap>,
    ) -> Result<Reading> {
        if model.prefill_pass(prompt.len()) == Pass::Precise {
            return precisely(model, (prompt, rows), capacity, workspace, tap);
        }
        let mut cache = model.new_cache(capacity);
        // The last token is computed twice, so nothing of the prompt may be quantised before.
        cache.hold();
        let whole = (prompt, rows);
        forward(model, Pass::Prefill, whole, &mut cache, workspace, tap)?;
        let work = Work {
            quantised: prompt.len(),
            ..Work::default()
        };
        if rows == LogitRows::None {
            cache.resume();
            return Ok(Reading {
                cache,
                last: Vec::new(),
                pass: Pass::Prefill,
                check: None,
                work,
            });
        }
        let (kept, mut check) = self.check(model, prompt, &mut cache, workspace)?;
        let work = Work { valve: 1, ..work };
        let audited = rows == LogitRows::Last && self.lottery.draw();
        if check.verdict == Verdict::Keep && !audited {
            return Ok(kept.into_reading(cache, check, work));
        }
        let mut precise = precisely(model, (prompt, rows), capacity, workspace, None)?;
        check.precise_top = most_likely(&precise.last);
        if audited {
            let truth = compare(&kept.0, &precise.last, self.limits);
            check.audit = Some(truth);
            let apart = judge(truth.as_ref(), self.limits) != Verdict::Keep;
            if apart && check.verdict == Verdict::Keep {
                check.verdict = Verdict::Fallback(Reason::Audit);
            }
        }
        let work = Work {
            precise: prompt.len(),
            ..work
        };
        if check.verdict == Verdict::Keep {
            return Ok(kept.into_reading(cache, check, work));
        }
        precise.check = Some(check);
        precise.work = work;
        Ok(precise)
    }

    /// Computes the last token again and compares. Returns the precise logits too.
    fn check(
        &mut self,
        model: &Model,
        prompt: &[u32],
        cache: &mut KvCache,
        quantised: &Workspace,
    ) -> Result<(Kept, Check)> {
        let last = prompt.len() - 1;
        cache.truncate(last);
        cache.resume();
        let token = (slice::from_ref(&prompt[last]), LogitRows::Last);
        let workspace = &mut self.workspace;
        forward(model, Pass::Precise, token, cache, workspace, None)?;
        let precise = self.workspace.logits();
        // A row of an earlier token counts too: a client may have asked for its likelihood.
        let finite = quantised.logits().iter().all(|logit| logit.is_finite());
        let quantised = last_row(model, quantised.logits());
        let comparison = compare(quantised, precise, self.limits).filter(|_| finite);
        let check = Check {
            comparison,
            audit: None,
            verdict: judge(comparison.as_ref(), self.limits),
            quantised_top: most_likely(quantised),
            precise_top: most_likely(precise),
        };
        Ok((Kept(precise.to_vec()), check))
    }
}

/// The precise logits over the quantised prefill's cache.
struct Kept(Vec<f32>);

impl Kept {
    fn into_reading(self, cache: KvCache, check: Check, work: Work) -> Reading {
        Reading {
            cache,
            last: self.0,
            pass: Pass::Prefill,
            check: Some(check),
            work,
        }
    }
}

fn precisely(
    model: &Model,
    (prompt, rows): (&[u32], LogitRows),
    capacity: usize,
    workspace: &mut Workspace,
    tap: Option<&mut dyn Tap>,
) -> Result<Reading> {
    let mut cache = model.new_cache(capacity);
    let whole = (prompt, rows);
    forward(model, Pass::Precise, whole, &mut cache, workspace, tap)?;
    Ok(Reading {
        cache,
        last: last_row(model, workspace.logits()).to_vec(),
        pass: Pass::Precise,
        check: None,
        work: Work {
            precise: prompt.len(),
            ..Work::default()
        },
    })
}

/// The last vocabulary-long row; nothing of no rows.
fn last_row<'a>(model: &Model, logits: &'a [f32]) -> &'a [f32] {
    &logits[logits.len().saturating_sub(model.config().vocab_size)..]
}

fn forward(
    model: &Model,
    pass: Pass,
    (tokens, logits): (&[u32], LogitRows),
    cache: &mut KvCache,
    workspace: &mut Workspace,
    tap: Option<&mut dyn Tap>,
) -> Result<()> {
    let chunk = Chunk {
        tokens,
        cache,
        logits,
    };
    model
        .forward(pass, &mut [chunk], workspace, tap)
        .map(|_| ())
}
