//! The fault rig after Sieve (OSDI 2022): a real operator's process, a real apiserver, and between them a proxy that fails where it is told
//! to; the rest of the cluster is scripted. A life that was disturbed must end as one that was not, having created and deleted the same.

pub mod life;
pub mod page;
pub mod proxy;
pub mod state;
pub mod world;

use self::life::{Crash, Lived, PARTS};
use self::proxy::Moment;

/// Every write of an undisturbed life, at each moment.
pub fn crashes(reference: &Lived) -> Vec<Crash> {
    let mut crashes = Vec::new();
    for (part, ended) in reference.parts.iter().enumerate() {
        for write in &ended.writes {
            for moment in [Moment::BeforeSend, Moment::AfterCommit, Moment::AfterReply] {
                crashes.push(Crash {
                    part,
                    write: write.clone(),
                    moment,
                });
            }
        }
    }
    crashes
}

/// Where a life that was disturbed differs from one that was not, in lines for people.
pub fn compare(reference: &Lived, found: &Lived) -> Vec<String> {
    let mut lines = Vec::new();
    for ((part, expected), found) in PARTS.iter().zip(&reference.parts).zip(&found.parts) {
        let state = state::differences(&expected.state, &found.state);
        lines.extend(state.into_iter().map(|line| format!("{part}: {line}")));
        if expected.counts != found.counts {
            lines.push(format!(
                "{part}: created and deleted {:?}, not {:?}",
                found.counts, expected.counts
            ));
        }
    }
    lines
}
