//! What calibrations made and how far it is from the unquantised model: what `artifacts` answers. Pure.

use mixquant_crds::{Digest, VerifyReport};
use serde::Serialize;

use super::answer::Plain;
use super::facts::Facts;
use super::table::{Style, Table};

/// The artifacts that a service remembers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Artifacts {
    /// Newest first.
    pub artifacts: Vec<Artifact>,
}

/// An artifact.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Artifact {
    /// Its content, and its folder's name on the claim.
    pub artifact_digest: Digest,
    /// The model that it was made from.
    pub model_digest: Digest,
    /// Everything that its calibration read.
    pub inputs_digest: Digest,
    /// The engine image that measured it.
    pub image: String,
    /// Tokens that calibration read.
    pub calibration_tokens: u64,
    /// The distance from the baseline.
    pub verify: VerifyReport,
    /// The kept revisions that serve it, newest first.
    pub revisions: Vec<String>,
}

/// The artifacts of the service that `facts` are of.
pub fn artifacts(facts: &Facts) -> Artifacts {
    let status = facts.service.status.clone().unwrap_or_default();
    let artifact = |record: &mixquant_crds::status::CalibrationRecord| {
        let digest = &record.report.artifact_digest;
        let revisions = facts.revisions.iter();
        let revisions = revisions.filter(|kept| kept.frozen.artifact_digest == *digest);
        Artifact {
            artifact_digest: digest.clone(),
            model_digest: record.report.model_digest.clone(),
            inputs_digest: record.inputs_digest.clone(),
            image: record.image.clone(),
            calibration_tokens: record.report.calibration_tokens,
            verify: record.report.verify.clone(),
            revisions: revisions.map(|kept| kept.frozen.revision.clone()).collect(),
        }
    };
    Artifacts {
        artifacts: status.calibrations.iter().map(artifact).collect(),
    }
}

impl Plain for Artifacts {
    fn plain(&self, style: Style) -> String {
        if self.artifacts.is_empty() {
            return "nothing has been calibrated yet\n".into();
        }
        let mut table = Table::with_header(&[
            "ARTIFACT",
            "MODEL",
            "PERPLEXITY",
            "TOP-1",
            "KL P99",
            "TOKENS",
            "SERVED BY",
        ]);
        for artifact in &self.artifacts {
            let verify = &artifact.verify;
            let used = if artifact.revisions.is_empty() {
                "-".to_owned()
            } else {
                artifact.revisions.join(",")
            };
            table.row(vec![
                artifact.artifact_digest.short().into(),
                artifact.model_digest.short().into(),
                format!("{:+.3} %", verify.perplexity_increase_percent).into(),
                format!("{:.2} %", verify.top1_agreement_percent).into(),
                format!("{:.4}", verify.kl_p99).into(),
                verify.tokens.to_string().into(),
                used.into(),
            ]);
        }
        table.render(style, 0)
    }
}
