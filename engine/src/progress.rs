//! How far a Job is: bars on a terminal, plain lines with percent in a pod's log; both on stderr, so that stdout stays one JSON object.
//!
//! It also carries the wish to stop: each step of a stage asks whether a signal came, so that a Job ends between two steps and cleans up.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use crate::error::{Error, Result};

/// A log line is written each time that a stage has gone another so many percent.
const LINE_PERCENT: usize = 10;

/// Where progress goes.
#[derive(Debug, Clone)]
pub struct Progress {
    output: Output,
    stop: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    Bars,
    Lines,
    Nothing,
}

/// One stage of a Job, of a known number of steps.
#[derive(Debug)]
pub struct Stage {
    name: &'static str,
    total: usize,
    done: usize,
    next_line_percent: usize,
    output: Output,
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

impl Progress {
    /// Bars when stderr is a terminal, lines otherwise. Work ends with an error soon after `stop` becomes true.
    pub fn new(stop: Arc<AtomicBool>) -> Self {
        let output = if std::io::stderr().is_terminal() {
            Output::Bars
        } else {
            Output::Lines
        };
        Self { output, stop }
    }

    /// Shows nothing and never stops: for tests and for callers with a display of their own.
    pub fn hidden() -> Self {
        Self {
            output: Output::Nothing,
            stop: Arc::default(),
        }
    }

    /// Begins a stage of `total` steps.
    pub fn stage(&self, name: &'static str, total: usize) -> Stage {
        let bar = if self.output == Output::Bars {
            ProgressBar::new(total as u64)
        } else {
            ProgressBar::hidden()
        };
        let style = ProgressStyle::with_template(
            "{prefix:>12} [{bar:32}] {pos}/{len} {percent:>3} % eta {eta}",
        )
        .expect("the template is a constant");
        bar.set_style(style.progress_chars("=> "));
        bar.set_prefix(name);
        Stage {
            name,
            total,
            done: 0,
            next_line_percent: LINE_PERCENT,
            output: self.output,
            bar,
            stop: Arc::clone(&self.stop),
        }
    }

    /// A remark for the person who watches.
    pub fn note(&self, text: &str) {
        if self.output != Output::Nothing {
            line(&format!("note: {text}"));
        }
    }
}

impl Stage {
    /// So many steps were done before and need not be done again.
    pub fn skip(&mut self, steps: usize) {
        self.done += steps;
        self.bar.inc(steps as u64);
    }

    /// One step is done.
    ///
    /// # Errors
    /// When a signal asked the process to stop.
    pub fn advance(&mut self) -> Result<()> {
        self.done += 1;
        self.bar.inc(1);
        let percent = (self.done * 100).checked_div(self.total).unwrap_or(100);
        if self.output == Output::Lines && percent >= self.next_line_percent {
            self.next_line_percent = percent / LINE_PERCENT * LINE_PERCENT + LINE_PERCENT;
            line(&format!(
                "{}: {}/{} ({percent} %)",
                self.name, self.done, self.total
            ));
        }
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::internal(
                "stopped by a signal: nothing half-written is left, run it again",
            ));
        }
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.bar.finish();
    }
}

/// A closed stderr must not end the Job.
fn line(text: &str) {
    let _closed = writeln!(std::io::stderr().lock(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_ends_with_an_error_after_a_signal() {
        let stop = Arc::new(AtomicBool::new(false));
        let progress = Progress {
            output: Output::Nothing,
            stop: Arc::clone(&stop),
        };
        let mut stage = progress.stage("testing", 3);
        assert!(stage.advance().is_ok());
        stop.store(true, Ordering::Relaxed);
        assert!(
            stage
                .advance()
                .unwrap_err()
                .message
                .contains("stopped by a signal")
        );
    }
}
