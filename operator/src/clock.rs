//! The only reader of the clock. Everything that decides gets the time as an argument.

#![expect(clippy::disallowed_methods, reason = "this file is the clock")]

use std::time::Instant;

use jiff::Timestamp;

/// The wall clock: for what people read and for what must outlive this process.
pub fn now() -> Timestamp {
    Timestamp::now()
}

/// The monotonic clock: for deadlines inside this process. It goes on while the process is stopped and never jumps.
pub fn monotonic() -> Instant {
    Instant::now()
}
