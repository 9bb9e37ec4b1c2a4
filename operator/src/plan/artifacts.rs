//! Which artifacts on the volume are still needed. The operator cannot reach the volume: the next calibration Job is told which to remove,
//! before it writes its own.
//!
//! Memory before muscle: what leaves is marked, and what was measured of it forgotten, before the Job is made; from then on nothing can
//! serve from it. Named are artifacts to remove, never those to keep, so a Job of yesterday removes nothing that came after it.

use mixquant_crds::Digest;
use mixquant_crds::status::ArtifactStatus;

use super::{Decisions, World};

/// The artifacts that are remembered at most.
const MEMORY: usize = 64;

/// The artifacts that the next calibration Job removes.
pub(super) fn leaving(decisions: &Decisions) -> Vec<Digest> {
    let known = decisions.memory.artifacts.iter();
    let leaving = known.filter(|artifact| artifact.leaves);
    leaving.map(|artifact| artifact.digest.clone()).collect()
}

/// A calibration Job is about to be made: marks what no revision needs.
pub(super) fn mark(world: &World<'_>, decisions: &mut Decisions) {
    let memory = &mut decisions.memory;
    let kept = &world.observed.revisions;
    let roles = [&memory.stable, &memory.canary].into_iter().flatten();
    let roles: Vec<_> = roles.cloned().collect();
    let is_known = |revision: &str| {
        kept.iter().any(|kept| kept.frozen.revision == revision)
            || roles.iter().any(|role| role.revision == revision)
    };
    let mut deployments = world.observed.deployments.iter();
    if deployments.any(|seen| !is_known(&seen.revision)) {
        // Its template is lost, and so is what its pods serve from.
        return;
    }
    let is_needed = |artifact: &Digest| {
        kept.iter()
            .any(|kept| kept.frozen.artifact_digest == *artifact)
            || roles.iter().any(|role| role.artifact_digest == *artifact)
    };
    for artifact in &mut memory.artifacts {
        artifact.leaves |= !is_needed(&artifact.digest);
    }
    let known = &memory.artifacts;
    memory.calibrations.retain(|record| {
        let digest = &record.report.artifact_digest;
        !known
            .iter()
            .any(|artifact| artifact.leaves && artifact.digest == *digest)
    });
}

/// A calibration Job has answered: what it was told to remove is gone, and `made` is there.
pub(super) fn made(decisions: &mut Decisions, made: &Digest) {
    let known = &mut decisions.memory.artifacts;
    known.retain(|artifact| !artifact.leaves && artifact.digest != *made);
    known.insert(
        0,
        ArtifactStatus {
            digest: made.clone(),
            leaves: false,
        },
    );
    known.truncate(MEMORY);
}
