//! The revisions that are kept, newest first, with what became of them: what `history` answers. Pure.

use jiff::Timestamp;
use mixquant_crds::Digest;
use serde::Serialize;

use super::answer::Plain;
use super::facts::{Facts, Pods};
use super::table::{Cell, Style, Table, Tone, span};

/// The revisions of a service.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Newest first.
    pub revisions: Vec<Entry>,
}

/// A revision.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// What `undo --to-revision` takes.
    pub number: i64,
    /// Its name.
    pub revision: String,
    /// `stable`, `canary`, or what it failed by.
    pub role: Option<String>,
    /// Why it failed.
    pub failure: Option<String>,
    /// Its pods.
    pub pods: Option<Pods>,
    /// What its pods serve.
    pub artifact_digest: Digest,
    /// The model.
    pub model_digest: Digest,
    /// The engine.
    pub image: String,
    /// Seconds since it was made.
    pub age_seconds: Option<i64>,
}

/// The history of the service that `facts` are of.
pub fn history(facts: &Facts, now: Timestamp) -> History {
    let status = facts.service.status.clone().unwrap_or_default();
    let entry = |kept: &super::facts::Kept| {
        let frozen = &kept.frozen;
        let has = |role: &Option<mixquant_crds::status::RevisionStatus>| {
            role.as_ref()
                .is_some_and(|role| role.revision == frozen.revision)
        };
        let mut failures = status.failed_revisions.iter();
        let failure = failures.find(|failed| failed.revision == frozen.revision);
        let role = if has(&status.stable) {
            Some("stable".to_owned())
        } else if has(&status.canary) {
            Some("canary".to_owned())
        } else {
            failure.map(|failed| failed.reason.as_str().to_owned())
        };
        Entry {
            number: kept.number,
            revision: frozen.revision.clone(),
            role,
            failure: failure.map(|failed| failed.message.clone()),
            pods: facts.pods_of(&frozen.revision).cloned(),
            artifact_digest: frozen.artifact_digest.clone(),
            model_digest: frozen.model_digest.clone(),
            image: frozen.image.clone(),
            age_seconds: kept.created_at.map(|at| now.duration_since(at).as_secs()),
        }
    };
    History {
        revisions: facts.revisions.iter().map(entry).collect(),
    }
}

impl Plain for History {
    fn plain(&self, style: Style) -> String {
        if self.revisions.is_empty() {
            return "no revision has been made yet\n".into();
        }
        let titles = [
            "NUMBER", "REVISION", "ROLE", "PODS", "ARTIFACT", "MODEL", "IMAGE", "AGE",
        ];
        let mut table = Table::with_header(&titles);
        for entry in &self.revisions {
            let tone = match (entry.role.as_deref(), &entry.failure) {
                (Some("stable"), _) => Tone::Good,
                (Some("canary"), None) => Tone::Busy,
                (_, Some(_)) => Tone::Bad,
                (_, None) => Tone::Faint,
            };
            let pods = entry.pods.as_ref();
            let pods = pods.map_or("-".into(), |pods| format!("{}/{}", pods.ready, pods.wanted));
            table.row(vec![
                entry.number.to_string().into(),
                entry.revision.clone().into(),
                Cell::new(entry.role.clone().unwrap_or("-".into()), tone),
                pods.into(),
                entry.artifact_digest.short().into(),
                entry.model_digest.short().into(),
                entry.image.clone().into(),
                entry.age_seconds.map_or("-".into(), span).into(),
            ]);
        }
        table.render(style, 0)
    }
}
