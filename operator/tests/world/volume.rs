//! The volume for artifacts: what calibration Jobs put there and remove, and that nobody loses what it serves from.

use std::collections::BTreeSet;

use mixquant_crds::{Digest, JobMessage};
use mixquant_operator::action::{JobRequest, JobWork};
use mixquant_operator::observed::FrozenRevision;

use super::cluster::Cluster;

/// The artifacts that are there.
#[derive(Debug, Default)]
pub struct Volume {
    there: BTreeSet<Digest>,
    /// The newest pass was made from a view of old: no promise is made then, and the shell reads from no cache.
    pub(super) blurred: bool,
}

impl Cluster {
    /// A calibration Job removes what it is told to; none of it may be what a revision needs.
    pub(super) fn may_remove(&mut self, job: &JobRequest) -> Result<(), String> {
        let JobWork::Calibrate { remove, .. } = &job.work else {
            return Ok(());
        };
        if self.volume.blurred {
            return Ok(());
        }
        let kept = self.revisions.iter().map(|kept| &kept.frozen);
        let serving = self.deployments.iter().map(|(frozen, ..)| frozen);
        let needed: BTreeSet<&Digest> = kept
            .chain(serving)
            .map(|frozen| &frozen.artifact_digest)
            .collect();
        if let Some(lost) = remove.iter().find(|artifact| needed.contains(artifact)) {
            return Err(format!(
                "a revision needs the artifact {lost}, and it is removed"
            ));
        }
        for artifact in remove {
            self.volume.there.remove(artifact);
            *self.said.entry("artifact removed".into()).or_default() += 1;
        }
        Ok(())
    }

    /// What a Job has made is there.
    pub(super) fn store(&mut self, answer: &Result<JobMessage, String>) {
        if let Ok(JobMessage::Calibrated(report)) = answer {
            self.volume.there.insert(report.artifact_digest.clone());
        }
    }

    /// Pods find what they serve from.
    pub(super) fn may_read(&self, frozen: &FrozenRevision, replicas: i32) -> Result<(), String> {
        let artifact = &frozen.artifact_digest;
        if replicas == 0 || self.volume.there.contains(artifact) {
            return Ok(());
        }
        Err(format!(
            "pods of {} look for the artifact {artifact}, and it was removed",
            frozen.revision
        ))
    }
}
