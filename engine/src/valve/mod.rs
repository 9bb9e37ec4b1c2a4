//! The safety valve: whether what a quantised prefill wrote may be decoded from, or the prompt has to be read precisely.
//!
//! [`judge`] is pure. [`read`] reads a prompt by it, [`audit`] picks the prompts that are also read precisely, [`log`] keeps what
//! differed, [`break_even`] measures from which prompt length on any of it pays. The worker calls them; nothing here samples a token or knows a client. See `docs/safety-valve.md`.

pub mod audit;
pub mod break_even;
pub mod log;
pub mod read;

use crate::sample::Likelihood;

/// The most likely tokens that a record keeps of either side.
pub const TOP: usize = 5;

/// What still counts as the same answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// KL(precise ‖ quantised) of the first token at most, nats.
    pub max_kl: f64,
    /// Another most likely token is a breach only where the precise logits of the two most likely ones are at least so far apart: below
    /// it the two tokens all but tie, and either is a right answer.
    pub min_margin: f64,
}

impl Default for Limits {
    fn default() -> Self {
        use mixquant_crds::names::valve_defaults as defaults;
        Self {
            max_kl: defaults::MAX_KL,
            min_margin: defaults::MIN_MARGIN,
        }
    }
}

/// Why a prompt is read again precisely, the gravest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A logit is no finite number, or all are masked.
    Nan,
    /// Another most likely token, and the precise logits were sure.
    Top1,
    /// The distributions are too far apart.
    Kl,
    /// The full precise prefill of an audited prompt is too far apart.
    Audit,
}

impl Reason {
    /// The label value and the word in records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Nan => "nan",
            Self::Top1 => "top1",
            Self::Kl => "kl",
            Self::Audit => "audit",
        }
    }
}

/// Whether both sides hold the same token most likely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Agreement {
    /// They do.
    Same,
    /// They do not, and the precise margin is below the limit.
    Tie,
    /// They do not, though the precise logits were sure.
    Different,
}

/// How far two rows of finite logits are apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// KL(precise ‖ quantised), nats, at least 0.
    pub kl: f64,
    /// The precise logits' lead of the most likely token over the second.
    pub margin: f64,
    /// See [`Agreement`].
    pub agreement: Agreement,
}

/// The valve's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Decode from the cache that the quantised prefill wrote.
    Keep,
    /// Read the prompt again precisely.
    Fallback(Reason),
}

/// Compares one token's logits of two passes, each row as long as the vocabulary. Nothing when one holds what is no finite number, or
/// is empty.
pub fn compare(quantised: &[f32], precise: &[f32], limits: Limits) -> Option<Comparison> {
    assert_eq!(
        quantised.len(),
        precise.len(),
        "both rows span the vocabulary"
    );
    let quantised_top = top(quantised)?.0;
    let (precise_top, margin) = top(precise)?;
    let (q_max, p_max) = (
        f64::from(quantised[quantised_top]),
        f64::from(precise[precise_top]),
    );
    let (mut q_sum, mut p_sum, mut weighted) = (0.0, 0.0, 0.0);
    for (&q, &p) in quantised.iter().zip(precise) {
        let (q, p) = (f64::from(q), f64::from(p));
        let weight = (p - p_max).exp();
        p_sum += weight;
        q_sum += (q - q_max).exp();
        weighted += weight * (p - q);
    }
    let agreement = if quantised_top == precise_top {
        Agreement::Same
    } else if margin < limits.min_margin {
        Agreement::Tie
    } else {
        Agreement::Different
    };
    let (q_logsumexp, p_logsumexp) = (q_max + q_sum.ln(), p_max + p_sum.ln());
    Some(Comparison {
        kl: (weighted / p_sum + (q_logsumexp - p_logsumexp)).max(0.0),
        margin,
        agreement,
    })
}

/// What a comparison means. `None` stands for logits that are no numbers.
pub fn judge(comparison: Option<&Comparison>, limits: Limits) -> Verdict {
    match comparison {
        None => Verdict::Fallback(Reason::Nan),
        Some(found) if found.agreement == Agreement::Different => Verdict::Fallback(Reason::Top1),
        // A KL or a limit that is no number is not below it, so it breaches.
        Some(found) if found.kl <= limits.max_kl => Verdict::Keep,
        Some(_) => Verdict::Fallback(Reason::Kl),
    }
}

/// The first index of the largest logit and its lead over the next one; nothing when a logit is not finite. A vocabulary of one token
/// has an endless lead.
fn top(logits: &[f32]) -> Option<(usize, f64)> {
    let (mut best, mut second) = (0, f32::NEG_INFINITY);
    for (index, &logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return None;
        }
        if index == 0 {
            continue;
        }
        if logit > logits[best] {
            second = logits[best];
            best = index;
        } else {
            second = second.max(logit);
        }
    }
    let first = logits.get(best)?;
    Some((best, f64::from(*first) - f64::from(second)))
}

/// The [`TOP`] most likely tokens with their log-probabilities; empty when a logit is no finite number.
pub fn most_likely(logits: &[f32]) -> Vec<(u32, f32)> {
    if logits.iter().all(|logit| logit.is_finite()) {
        Likelihood::of(0, logits, TOP).top
    } else {
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
