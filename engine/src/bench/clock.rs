//! The only clock of a benchmark: wall time, and the time that all threads of this process have computed.
//!
//! Computing time is what other load on the machine disturbs least; wall time is what a user waits for. Every sample has both.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

/// How long something took, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Seconds {
    /// On the wall.
    pub wall: f64,
    /// Computed by all threads together; the wall's where the system does not tell.
    pub cpu: f64,
}

/// The middle of several samples, and the smallest and largest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the samples are not above it.
    pub median: f64,
    /// The smallest.
    pub low: f64,
    /// The largest.
    pub high: f64,
}

/// Nanoseconds that all living threads of this process have computed so far (Linux; nothing elsewhere).
fn computed() -> Option<u64> {
    let of = |path: &Path| {
        std::fs::read_to_string(path.join("schedstat"))
            .ok()?
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    };
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    let all: u64 = threads
        .flatten()
        .filter_map(|thread| of(&thread.path()))
        .sum();
    Some(all).filter(|all| *all > 0)
}

/// Runs `work` again and again for at least `time`. Returns the seconds of one run.
///
/// # Errors
/// The first of `work`.
#[expect(
    clippy::cast_precision_loss,
    reason = "nanoseconds of a process are far below 2^53"
)]
pub(super) fn time<E>(
    time: Duration,
    mut work: impl FnMut() -> Result<(), E>,
) -> Result<Seconds, E> {
    let (before, start) = (computed(), Instant::now());
    let mut runs = 0.0;
    loop {
        work()?;
        runs += 1.0;
        if start.elapsed() >= time {
            break;
        }
    }
    let wall = start.elapsed().as_secs_f64();
    let cpu = before
        .zip(computed())
        .map(|(before, after)| after.saturating_sub(before) as f64 / 1e9)
        .filter(|seconds| *seconds > 0.0)
        .unwrap_or(wall);
    Ok(Seconds {
        wall: wall / runs,
        cpu: cpu / runs,
    })
}

impl Spread {
    /// Of at least one sample.
    pub fn of(samples: impl Iterator<Item = f64>) -> Self {
        let mut samples: Vec<f64> = samples.collect();
        samples.sort_by(f64::total_cmp);
        Self {
            median: samples[samples.len() / 2],
            low: samples[0],
            high: samples[samples.len() - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_odd_number_is_the_middle_one() {
        let spread = Spread::of([3.0, 1.0, 9.0].into_iter());
        assert_eq!((spread.low, spread.median, spread.high), (1.0, 3.0, 9.0));
    }

    #[test]
    fn one_run_is_timed_however_short_the_time_is() {
        let mut runs = 0;
        let seconds = time(Duration::ZERO, || {
            runs += 1;
            Ok::<(), ()>(())
        });
        assert_eq!(runs, 1);
        assert!(seconds.is_ok_and(|seconds| seconds.wall >= 0.0 && seconds.cpu >= 0.0));
        assert_eq!(time(Duration::ZERO, || Err::<(), u8>(7)), Err(7));
    }
}
