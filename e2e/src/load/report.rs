//! What the load generator counted. Every failure is counted; the first few are kept with their reason.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use super::request::{Ask, Way};

/// Failures that are kept word for word.
const KEPT_FAILURES: usize = 10;

/// Counts of one run.
#[derive(Debug, Clone)]
pub struct Report {
    begun: Instant,
    /// Requests answered as they should be.
    pub succeeded: u64,
    /// All others.
    pub failed: u64,
    /// Of the succeeded: those with a known answer.
    pub exact: u64,
    /// Of the succeeded: how many went each way.
    pub ways: BTreeMap<Way, u64>,
    /// Failures by kind.
    pub kinds: BTreeMap<&'static str, u64>,
    /// The first failures: seconds since the start, the request's number, kind, reason.
    pub first_failures: Vec<String>,
    latencies: Vec<Duration>,
}

impl Report {
    pub(super) fn new() -> Self {
        Self {
            begun: Instant::now(),
            succeeded: 0,
            failed: 0,
            exact: 0,
            ways: BTreeMap::new(),
            kinds: BTreeMap::new(),
            first_failures: Vec::new(),
            latencies: Vec::new(),
        }
    }

    pub(super) fn succeeded(&mut self, way: Way, ask: &Ask<'_>, latency: Duration) {
        self.succeeded += 1;
        self.exact += u64::from(matches!(ask, Ask::Exact(_)));
        *self.ways.entry(way).or_default() += 1;
        self.latencies.push(latency);
    }

    pub(super) fn failed(&mut self, number: u64, kind: &'static str, reason: &str) {
        self.failed += 1;
        *self.kinds.entry(kind).or_default() += 1;
        if self.first_failures.len() < KEPT_FAILURES {
            self.first_failures.push(format!(
                "after {:.1} s, request {number}: {kind}: {reason}",
                self.begun.elapsed().as_secs_f64()
            ));
        }
    }

    /// The latency that the fraction `quantile` of the succeeded requests did not exceed.
    pub fn latency(&self, quantile: f64) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index, cut to the last one"
        )]
        let index = (quantile.clamp(0.0, 1.0) * sorted.len() as f64) as usize;
        sorted
            .get(index.min(sorted.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.begun.elapsed().as_secs_f64();
        writeln!(
            f,
            "{} requests in {seconds:.1} s: {} succeeded, {} failed",
            self.succeeded + self.failed,
            self.succeeded,
            self.failed
        )?;
        writeln!(
            f,
            "latency: median {:?}, 99 % within {:?}; {} answers were known and right",
            self.latency(0.5),
            self.latency(0.99),
            self.exact
        )?;
        for (way, count) in &self.ways {
            writeln!(f, "  {count} by {way}")?;
        }
        for (kind, count) in &self.kinds {
            writeln!(f, "  {count} failed: {kind}")?;
        }
        for failure in &self.first_failures {
            writeln!(f, "  {failure}")?;
        }
        Ok(())
    }
}
