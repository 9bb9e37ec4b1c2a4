//! `kubectl-mixquant`: what people ask about their services and what they may order, on stored objects alone.
//!
//! Reads (`facts`) and writes (`order`, the only writer) lie at the edge, `run` joins them; everything between is pure: objects and the
//! time in, an answer out. It never talks to the operator and decides nothing: kubectl can do all of it, see `docs/cli.md`.

pub mod answer;
pub mod arguments;
pub mod artifacts;
pub mod capacity;
pub mod connect;
pub mod differences;
pub mod explain;
pub mod facts;
pub mod history;
pub mod intent;
pub mod lint;
pub mod order;
pub mod overview;
pub mod run;
pub mod scaling;
pub mod schema;
pub mod standing;
pub mod table;
pub mod timeline;
pub mod versions;
pub mod watch;

/// Exit codes: a contract for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done; for `status`: the spec is what serves. For `lint` and `plan`: nothing speaks against it.
    Done = 0,
    /// The question could not be answered: no cluster, no such service, no right.
    Error = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The answer is no: rolled back, refused, invalid, does not fit.
    No = 3,
    /// Not yet: something is under way, waits for a person, or the time given was too short.
    NotYet = 4,
}
