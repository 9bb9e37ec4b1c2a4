//! Which token comes next: greedy or drawn, from one row of logits; and the log-probabilities that clients ask for.
//!
//! Pure: the same logits, parameters and seed give the same token. Logits that are no numbers never become a token.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// How tokens are drawn. The order is vLLM's: temperature, `min_p`, `top_k`, `top_p`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Only so many most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens at least so likely, relative to the most likely one; 0 for all.
    pub min_p: f32,
    /// Where the random numbers begin.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

/// One sequence's draws.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: StdRng,
}

impl Sampler {
    /// Begins at the seed.
    pub fn new(sampling: Sampling) -> Self {
        Self {
            sampling,
            random: StdRng::seed_from_u64(sampling.seed),
        }
    }

    /// The next token, none of `forbidden`. Nothing when a logit is no finite number, or when no token may be taken.
    pub fn next(&mut self, logits: &[f32], forbidden: &[u32]) -> Option<u32> {
        if !logits.iter().all(|logit| logit.is_finite()) {
            return None;
        }
        let allowed = (0_u32..)
            .zip(logits.iter().copied())
            .filter(|(id, _)| !forbidden.contains(id));
        if self.sampling.temperature == 0.0 {
            // Of equal ones the first: `max_by` would take the last.
            return allowed
                .reduce(|best, next| if next.1 > best.1 { next } else { best })
                .map(|(id, _)| id);
        }
        let candidates = self.candidates(allowed.collect());
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut point = self.random.random::<f64>() * total;
        for (id, weight) in &candidates {
            point -= weight;
            if point < 0.0 {
                return Some(*id);
            }
        }
        candidates.last().map(|(id, _)| *id)
    }

    /// The tokens that may be drawn with their weights (the most likely one has 1).
    fn candidates(&self, allowed: Vec<(u32, f32)>) -> Vec<(u32, f64)> {
        let Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            ..
        } = self.sampling;
        let largest = allowed
            .iter()
            .fold(f32::NEG_INFINITY, |largest, (_, logit)| largest.max(*logit));
        let weight = |logit: f32| (f64::from(logit - largest) / f64::from(temperature)).exp();
        let mut candidates: Vec<(u32, f64)> = (allowed.into_iter())
            .map(|(id, logit)| (id, weight(logit)))
            .filter(|(_, weight)| *weight >= f64::from(min_p))
            .collect();
        if top_k == 0 && top_p >= 1.0 {
            return candidates;
        }
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if top_k > 0 {
            candidates.truncate(top_k);
        }
        let wanted = f64::from(top_p) * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = candidates.iter().position(|(_, weight)| {
            sum += weight;
            sum >= wanted
        });
        candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
        candidates
    }
}

/// How likely a token was, with the most likely ones beside it.
#[derive(Debug, Clone, PartialEq)]
pub struct Likelihood {
    /// The token.
    pub token: u32,
    /// Its natural log-probability before any sampling parameter.
    pub logprob: f32,
    /// The most likely tokens, most likely first.
    pub top: Vec<(u32, f32)>,
}

impl Likelihood {
    /// The likelihood of `token` under these logits, with the `top` most likely ones.
    pub fn of(token: u32, logits: &[f32], top: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits
            .iter()
            .map(|logit| f64::from(logit - largest).exp())
            .sum();
        let total = f64::from(largest) + sum.ln();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a log-probability of 7 digits is all that f32 logits hold"
        )]
        let logprob = |logit: f32| (f64::from(logit) - total) as f32;
        let mut best: Vec<(u32, f32)> = Vec::with_capacity(top + 1);
        for (id, logit) in (0_u32..).zip(logits.iter().copied()) {
            if best.len() == top && best.last().is_none_or(|last| logit <= last.1) {
                continue;
            }
            let at = best.partition_point(|better| better.1 >= logit);
            best.insert(at, (id, logit));
            best.truncate(top);
        }
        Self {
            token,
            logprob: logprob(
                logits
                    .get(token as usize)
                    .copied()
                    .unwrap_or(f32::NEG_INFINITY),
            ),
            top: best
                .into_iter()
                .map(|(id, logit)| (id, logprob(logit)))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drawn(sampling: Sampling, logits: &[f32]) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling);
        (0..200)
            .map(|_| sampler.next(logits, &[]).unwrap())
            .collect()
    }

    fn warm() -> Sampling {
        Sampling {
            temperature: 1.0,
            ..Sampling::greedy()
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equal_logits() {
        assert_eq!(
            Sampler::new(Sampling::greedy()).next(&[1.0, 3.0, 3.0], &[]),
            Some(1)
        );
        assert_eq!(
            Sampler::new(Sampling::greedy()).next(&[1.0, 3.0, 3.0], &[1, 2]),
            Some(0)
        );
    }

    #[test]
    fn what_is_no_number_is_no_token() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(Sampler::new(warm()).next(&[0.0, wrong], &[]), None);
        }
        assert_eq!(Sampler::new(warm()).next(&[], &[]), None);
        assert_eq!(Sampler::new(warm()).next(&[1.0], &[0]), None);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let logits = [0.3, 0.2, 0.1, 0.0];
        assert_eq!(drawn(warm(), &logits), drawn(warm(), &logits));
        assert_ne!(
            drawn(warm(), &logits),
            drawn(Sampling { seed: 1, ..warm() }, &logits)
        );
    }

    #[test]
    fn draws_follow_the_probabilities() {
        // Probabilities 0.8 and 0.2; 200 draws have a standard deviation of 5.7.
        let first = drawn(warm(), &[4.0_f32.ln(), 0.0])
            .iter()
            .filter(|id| **id == 0)
            .count();
        assert!((130..=190).contains(&first), "{first}");
    }

    #[test]
    fn each_limit_cuts_the_tail() {
        let logits = [3.0, 2.0, 1.0, -5.0];
        let most = |sampling| drawn(sampling, &logits).into_iter().max().unwrap();
        assert_eq!(most(Sampling { top_k: 1, ..warm() }), 0);
        assert_eq!(most(Sampling { top_k: 2, ..warm() }), 1);
        assert_eq!(
            most(Sampling {
                top_p: 0.5,
                ..warm()
            }),
            0
        );
        assert_eq!(
            most(Sampling {
                top_p: 0.7,
                ..warm()
            }),
            1
        );
        assert_eq!(
            most(Sampling {
                min_p: 0.3,
                ..warm()
            }),
            1
        );
    }

    #[test]
    fn likelihoods_are_normalised_and_sorted() {
        let likelihood = Likelihood::of(2, &[0.0, 1.0, 2.0, 1.0], 3);
        let ids: Vec<u32> = likelihood.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [2, 1, 3]);
        let sum = (0.0_f32.exp() + 2.0 * 1.0_f32.exp() + 2.0_f32.exp()).ln();
        assert!((likelihood.logprob - (2.0 - sum)).abs() < 1e-6);
        assert!(Likelihood::of(0, &[0.0], 0).top.is_empty());
    }

    proptest! {
        #[test]
        fn a_drawn_token_is_allowed_and_in_range(
            logits in prop::collection::vec(-30.0_f32..30.0, 1..40),
            temperature in 0.0_f32..3.0, top_k in 0_usize..50, top_p in 0.01_f32..=1.0, min_p in 0.0_f32..=1.0, seed: u64,
        ) {
            let mut sampler = Sampler::new(Sampling { temperature, top_k, top_p, min_p, seed });
            let token = sampler.next(&logits, &[0]);
            prop_assert_eq!(token.is_some(), logits.len() > 1);
            if let Some(token) = token {
                prop_assert!(token > 0 && (token as usize) < logits.len());
            }
        }
    }
}
