//! Whether the engine is alive and ready: a few flags that the worker sets and the admin port reads.
//!
//! Busy is not dead and idle is not dead: only a worker that ended, or one step that takes longer than any step can, is dead.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A step above this time hangs: the longest honest one reads a whole prompt on a throttled CPU.
pub const STALL_LIMIT: Duration = Duration::from_mins(5);

/// What the probes report.
#[derive(Debug)]
pub struct Health {
    origin: Instant,
    /// Milliseconds after `origin` when the step in progress began, plus 1; 0 between steps.
    step_began: AtomicU64,
    loaded: AtomicBool,
    draining: AtomicBool,
    /// Why the worker ended.
    ended: Mutex<Option<String>>,
}

impl Health {
    /// Alive, not yet ready.
    pub fn new() -> Self {
        Self {
            origin: Instant::now(),
            step_began: AtomicU64::new(0),
            loaded: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            ended: Mutex::new(None),
        }
    }

    /// The worker begins a step.
    pub fn step_begins(&self) {
        self.step_began
            .store(self.milliseconds(Instant::now()) + 1, Ordering::Relaxed);
    }

    /// The worker ended a step.
    pub fn step_ends(&self) {
        self.step_began.store(0, Ordering::Relaxed);
    }

    /// Weights are loaded, digests match and the self-test made a token.
    pub fn set_loaded(&self) {
        self.loaded.store(true, Ordering::Release);
    }

    /// The process was told to end.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether the process was told to end.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// The worker's thread ended and will not come back.
    pub fn set_ended(&self, why: &str) {
        let mut ended = self
            .ended
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        ended.get_or_insert_with(|| why.to_owned());
    }

    /// Why the engine is dead, if it is.
    ///
    /// # Errors
    /// One line for the probe's body.
    pub fn live(&self, now: Instant) -> Result<(), String> {
        let ended = self
            .ended
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(why) = ended.as_ref() {
            return Err(format!("the worker ended: {why}"));
        }
        let began = self.step_began.load(Ordering::Relaxed);
        let stalled = self
            .milliseconds(now)
            .saturating_sub(began.saturating_sub(1));
        if began > 0 && u128::from(stalled) > STALL_LIMIT.as_millis() {
            return Err(format!(
                "one step takes {} s so far: the worker hangs",
                stalled / 1000
            ));
        }
        Ok(())
    }

    /// Why the engine takes no requests, if it does not.
    ///
    /// # Errors
    /// One line for the probe's body.
    pub fn ready(&self, now: Instant) -> Result<(), String> {
        self.live(now)?;
        if self.draining() {
            return Err("draining: the process was told to end".to_owned());
        }
        if !self.loaded.load(Ordering::Acquire) {
            return Err("loading: the model is not ready yet".to_owned());
        }
        Ok(())
    }

    fn milliseconds(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.origin).as_millis()).unwrap_or(u64::MAX)
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_and_idle_are_alive_but_a_hanging_step_is_not() {
        let health = Health::new();
        let start = Instant::now();
        assert!(health.live(start + 10 * STALL_LIMIT).is_ok(), "idle");
        health.step_begins();
        assert!(health.live(start + STALL_LIMIT / 2).is_ok(), "busy");
        assert!(
            health
                .live(start + 2 * STALL_LIMIT)
                .unwrap_err()
                .contains("hangs")
        );
        health.step_ends();
        assert!(health.live(start + 2 * STALL_LIMIT).is_ok(), "idle again");
    }

    #[test]
    fn ready_means_loaded_alive_and_not_draining() {
        let health = Health::new();
        let now = Instant::now();
        assert!(health.ready(now).unwrap_err().contains("loading"));
        health.set_loaded();
        assert!(health.ready(now).is_ok());
        health.set_draining();
        assert!(health.ready(now).unwrap_err().contains("draining"));
        assert!(health.live(now).is_ok());
        health.set_ended("a panic");
        assert!(health.live(now).unwrap_err().contains("a panic"));
    }
}
