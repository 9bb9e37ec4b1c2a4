//! Requests, what pods count of them, and the operator's scraper: the real bookkeeping on pages that may be wrong.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use mixquant_crds::Digest;
use mixquant_crds::report::VerifyReport;
use mixquant_operator::action::Window;
use mixquant_operator::counted::Counted;
use mixquant_operator::histogram::Histogram;
use mixquant_operator::load::{LoadWindow, Loads};
use mixquant_operator::observed::ObservedPod;
use mixquant_operator::probed::{Answered, Probed};
use mixquant_operator::prometheus_text::Scrape;
use mixquant_operator::samples::{Samples, Series, Value};

use super::quiet::TAKES;
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

/// How an image behaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Manners {
    /// Times the latency of a good one.
    pub slowness: f64,
    /// Of a hundred requests so many fail.
    pub errors: u64,
    /// Its containers are killed for memory.
    pub out_of_memory: bool,
    /// Its containers end again and again.
    pub crashes: bool,
    /// It finds the right answers less likely.
    pub worse: bool,
}

impl Manners {
    /// 0 and 1 are good, 2 is slow (of a quiet service: answers worse), 3 never gets ready, 4 fails requests, 5 runs out of memory.
    pub fn of(image: &str, quiet: bool) -> Self {
        let second = image == "engine:2";
        Self {
            slowness: if second && !quiet { 1.5 } else { 1.0 },
            worse: second && quiet,
            errors: if image == "engine:4" { 20 } else { 0 },
            out_of_memory: image == "engine:5",
            crashes: image == "engine:3",
        }
    }

    /// Whether it may become stable without a person's word.
    pub fn are_good(&self) -> bool {
        *self == Self::of("engine:0", false)
    }
}

/// What a process has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counters {
    tpot: Vec<u64>,
    answered: u64,
    errors: u64,
    probes: u64,
}

impl Counters {
    pub fn new() -> Self {
        Self {
            tpot: vec![0; bounds().len() + 1],
            answered: 0,
            errors: 0,
            probes: 0,
        }
    }

    /// Adds a request.
    pub fn observe(&mut self, dice: &mut Dice, manners: &Manners) {
        if manners.errors > 0 && dice.below(100) < manners.errors {
            self.errors += 1;
            return;
        }
        let latency = MEDIAN * manners.slowness * (SPREAD * dice.normal()).exp();
        let bucket = ((latency / 0.005).ln() / 1.05_f64.ln()).ceil().max(0.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small number that is not negative"
        )]
        let bucket = (bucket as usize).min(self.tpot.len() - 1);
        self.tpot[bucket] += 1;
        self.answered += 1;
    }

    /// The newest request was a probe.
    pub fn probed(&mut self) {
        self.probes = (self.probes + 1).min(self.answered);
    }

    fn series(&self) -> BTreeMap<Series, Result<Value, String>> {
        let tpot = Histogram {
            bounds: bounds(),
            counts: self.tpot.clone(),
        };
        BTreeMap::from([
            (Series::Tpot, Ok(Value::Histogram(tpot))),
            (Series::Answered, Ok(Value::Count(self.answered))),
            (Series::Errors, Ok(Value::Count(self.errors))),
            (Series::Probes, Ok(Value::Count(self.probes))),
            (Series::Cancelled, Ok(Value::Count(0))),
            (Series::Rejected, Ok(Value::Count(0))),
            (Series::Running, Ok(Value::Level(0.0))),
            (Series::Waiting, Ok(Value::Level(0.0))),
        ])
    }
}

/// What is wrong with metrics pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricFault {
    /// Nobody answers, or too late, or with 5xx, or with 100 MB.
    Down,
    /// A page without any series.
    Empty,
    /// The series have other names.
    Renamed,
    /// Every number is NaN.
    Nan,
    /// The page stays as it was.
    Frozen,
    /// Counters start again inside one process.
    Reset,
}

impl MetricFault {
    pub const ALL: [Self; 6] = [
        Self::Down,
        Self::Empty,
        Self::Renamed,
        Self::Nan,
        Self::Frozen,
        Self::Reset,
    ];
}

/// What a pod shows on its metrics page.
pub struct Page {
    pub pod: ObservedPod,
    pub counters: Counters,
    /// The part of its KV cache in use.
    pub kv_cache_usage: f64,
    pub fault: Option<MetricFault>,
}

impl Page {
    fn answer(&self) -> Result<Scrape, String> {
        let mut series = self.counters.series();
        series.insert(Series::KvUsage, Ok(Value::Level(self.kv_cache_usage)));
        match self.fault {
            Some(MetricFault::Down) => return Err("status 503".into()),
            Some(MetricFault::Empty | MetricFault::Renamed) => series.clear(),
            Some(MetricFault::Nan) => {
                for value in series.values_mut() {
                    *value = Err("NaN is no count".into());
                }
            }
            // What froze and what was reset is in the counters.
            Some(MetricFault::Frozen | MetricFault::Reset) | None => {}
        }
        Ok(Scrape {
            process_start: 1,
            series,
        })
    }
}

/// The scraper: what it knows is lost when the operator dies.
#[derive(Debug, Default)]
pub struct Scraper {
    pub window: Option<Window>,
    counted: Option<Counted>,
    loads: Option<Loads>,
    probed: Probed,
    /// When the round under way ends, and how.
    round: Option<(Timestamp, (Option<Answered>, Answered))>,
}

impl Scraper {
    /// A round of probes begins.
    pub fn probe(
        &mut self,
        since: Timestamp,
        answers: (Option<Answered>, Answered),
        now: Timestamp,
    ) {
        if self.probed.since != Some(since) {
            self.probed = Probed::new(since);
        }
        self.probed.begin(now);
        self.round = Some((now + SignedDuration::from_secs(TAKES), answers));
    }

    fn end_round(&mut self, now: Timestamp) {
        if let Some((_, (stable, canary))) = self.round.take_if(|(ends, _)| *ends <= now) {
            self.probed.end(stable, canary);
        }
    }

    pub fn set_windows(&mut self, window: Option<Window>, load: Option<&LoadWindow>) {
        if self.window != window {
            self.counted = window.clone().map(Counted::new);
            (self.probed, self.round) = (Probed::default(), None);
            self.window = window;
        }
        self.loads = load.map(|load| {
            let mut loads = self.loads.take();
            let loads = loads.get_or_insert_with(|| Loads::new(load.clone()));
            loads.set_window(load);
            loads.clone()
        });
    }

    pub fn scrape(&mut self, pages: &[Page], now: Timestamp) -> Samples {
        let answers: Vec<_> = pages
            .iter()
            .map(|page| (page.pod.clone(), page.answer()))
            .collect();
        if let Some(loads) = &mut self.loads {
            loads.add(&answers, now);
        }
        let loads = self.loads.as_ref().map_or_else(Vec::new, Loads::entries);
        self.end_round(now);
        let counted = self.counted.as_mut();
        let Some(counted) = counted.filter(|counted| now >= counted.window().since) else {
            return Samples {
                loads,
                ..Samples::default()
            };
        };
        counted.begin();
        for (pod, answer) in answers {
            if counted.asks(&pod) {
                counted.absorb(&pod, answer, now);
            }
        }
        counted.end(now);
        Samples {
            loads,
            probed: self.probed.clone(),
            ..counted.samples()
        }
    }
}

/// What a Job measures of an artifact.
pub fn measured(artifact: &Digest, bad: bool) -> VerifyReport {
    let increase = if bad { 7.5 } else { 0.25 };
    VerifyReport {
        baseline_perplexity: 8.0,
        perplexity: 8.0 * (1.0 + increase / 100.0),
        perplexity_increase_percent: increase,
        kl_mean: 0.002,
        kl_p99: 0.02,
        top1_agreement_percent: 98.0,
        worst_slice: None,
        tokens: 4096,
        artifact_digest: Some(artifact.clone()),
    }
}
