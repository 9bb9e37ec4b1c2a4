//! Requests, their latency, and the operator's scraper with its soft state.

use std::collections::BTreeMap;

use jiff::Timestamp;
use mixquant_operator::action::Window;
use mixquant_operator::samples::{Histogram, Samples, TrackSamples};

use super::scenario::Dice;

/// Requests a second that reach the Service.
pub const REQUESTS_PER_SECOND: u64 = 20;
/// The median time per output token of a good image, seconds.
const MEDIAN: f64 = 0.020;
/// Its spread: the standard deviation of the logarithm.
const SPREAD: f64 = 0.2;

/// Buckets of ratio 1.05, as the engine has them, around the latencies that occur here.
pub fn bounds() -> Vec<f64> {
    let mut bounds = vec![0.005];
    while bounds[bounds.len() - 1] < 0.2 {
        bounds.push(bounds[bounds.len() - 1] * 1.05);
    }
    bounds
}

/// Adds a request of a pod whose image is `slowness` times as slow.
pub fn observe(counts: &mut [u64], dice: &mut Dice, slowness: f64) {
    let latency = MEDIAN * slowness * (SPREAD * dice.normal()).exp();
    let bucket = ((latency / 0.005).ln() / 1.05_f64.ln()).ceil().max(0.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small number that is not negative"
    )]
    let bucket = (bucket as usize).min(counts.len() - 1);
    counts[bucket] += 1;
}

/// What a pod shows on its metrics page.
pub struct Page<'a> {
    pub uid: &'a str,
    pub revision: &'a str,
    pub born: i64,
    pub counts: &'a [u64],
}

/// The scraper: baselines by pod, lost when the operator dies.
#[derive(Debug, Default)]
pub struct Scraper {
    pub window: Option<Window>,
    baselines: BTreeMap<String, Vec<u64>>,
}

impl Scraper {
    pub fn set_window(&mut self, window: Option<Window>) {
        if self.window != window {
            self.baselines.clear();
            self.window = window;
        }
    }

    pub fn scrape(&mut self, pages: &[Page<'_>], now: Timestamp) -> Samples {
        let Some(window) = &self.window else {
            return Samples::default();
        };
        if now < window.since {
            return Samples::default();
        }
        let bounds = bounds();
        let mut tracks: BTreeMap<String, TrackSamples> = BTreeMap::new();
        for page in pages {
            if !window
                .revisions
                .iter()
                .any(|revision| revision == page.revision)
            {
                continue;
            }
            let born_inside = page.born >= window.since.as_second();
            let baseline = self
                .baselines
                .entry(page.uid.to_owned())
                .or_insert_with(|| {
                    if born_inside {
                        vec![0; page.counts.len()]
                    } else {
                        page.counts.to_vec()
                    }
                });
            let track = tracks.entry(page.revision.to_owned()).or_default();
            track.pods += 1;
            if track.tpot.counts.is_empty() {
                track.tpot = Histogram {
                    bounds: bounds.clone(),
                    counts: vec![0; bounds.len() + 1],
                };
            }
            for (sum, (newest, before)) in track
                .tpot
                .counts
                .iter_mut()
                .zip(page.counts.iter().zip(baseline.iter()))
            {
                *sum += newest - before;
            }
        }
        Samples {
            since: Some(window.since),
            taken_at: Some(now),
            tracks,
        }
    }
}
