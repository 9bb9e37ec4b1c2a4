//! Which prompts are audited: a seeded share of those that the quantised copy reads.
//!
//! The valve shares the quantised cache with what it checks, so damage that both see alike (a key projection) passes it. An audited
//! prompt is read precisely as a whole beside it, which is the ground truth.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Draws the prompts to audit.
#[derive(Debug)]
pub struct Lottery {
    share: f64,
    random: StdRng,
}

impl Lottery {
    /// `percent` of the prompts, 0 to 100. The same seed picks the same prompts.
    pub fn new(percent: f64, seed: u64) -> Self {
        Self {
            share: (percent / 100.0).clamp(0.0, 1.0),
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// Whether the next prompt is audited.
    pub fn draw(&mut self) -> bool {
        self.random.random::<f64>() < self.share
    }
}

/// Prompts after which an audit of `percent` of them has seen at least one with a probability of `certainty`; nothing when it never will.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float of prompts is cast saturating, and it is not negative"
)]
pub fn prompts_until_seen(percent: f64, certainty: f64) -> Option<u64> {
    let missed = 1.0 - (percent / 100.0).clamp(0.0, 1.0);
    if missed >= 1.0 || certainty >= 1.0 {
        return (missed <= 0.0).then_some(1);
    }
    if missed <= 0.0 {
        return Some(1);
    }
    Some(((1.0 - certainty).ln() / missed.ln()).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_kept_and_the_seed_repeats_it() {
        let draws = |percent, seed| -> Vec<bool> {
            let mut lottery = Lottery::new(percent, seed);
            (0..20_000).map(|_| lottery.draw()).collect()
        };
        let one_percent = draws(1.0, 7);
        let picked = one_percent.iter().filter(|picked| **picked).count();
        // 200 expected, standard deviation 14.
        assert!((130..270).contains(&picked), "{picked}");
        assert_eq!(one_percent, draws(1.0, 7));
        assert_ne!(one_percent, draws(1.0, 8));
        assert!(draws(0.0, 1).iter().all(|picked| !picked));
        assert!(draws(100.0, 1).iter().all(|picked| *picked));
    }

    #[test]
    fn one_percent_sees_damage_within_459_prompts_in_99_of_100_cases() {
        assert_eq!(prompts_until_seen(1.0, 0.99), Some(459));
        assert_eq!(prompts_until_seen(100.0, 0.99), Some(1));
        assert_eq!(prompts_until_seen(0.0, 0.99), None);
        let mut missed = 0;
        for seed in 0..1000 {
            let mut lottery = Lottery::new(1.0, seed);
            missed += u32::from(!(0..459).any(|_| lottery.draw()));
        }
        assert!(missed <= 25, "{missed} of 1000 runs saw nothing");
    }
}
