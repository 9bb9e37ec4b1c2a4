//! Live traffic that is not what calibration saw, on a real cluster: it is told, the model is calibrated anew on other texts and takes the way
//! of every change, and the artifact that nothing needs any more is removed.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mixquant_e2e::cluster::condition;
use mixquant_e2e::means;
use mixquant_e2e::namespace::with_temp_namespace;
use mixquant_e2e::service::Service;
use serde_json::{Value, json};

/// The scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(15);
/// From `kubectl apply` to Ready.
const FIRST: Duration = Duration::from_mins(3);
/// A window of traffic, a calibration and a rollout.
const ROUND: Duration = Duration::from_mins(5);

fn artifact(object: &Value) -> String {
    let digest = object["status"]["stable"]["artifactDigest"].as_str();
    digest.unwrap_or("").to_owned()
}

/// The recalibration `round` serves, and nothing is under way.
fn serves(object: &Value, round: i64, before: &str) -> bool {
    let status = &object["status"];
    status["drift"]["round"].as_i64() >= Some(round)
        && status["rollout"].is_null()
        && !artifact(object).is_empty()
        && artifact(object) != before
}

/// The artifacts on the volume of a namespace, by the hex digits of their digests.
fn kept(folder: &std::path::Path) -> anyhow::Result<BTreeSet<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names
        .filter(|name| name.as_ref().is_ok_and(|name| !name.starts_with('.')))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn drift_is_told_and_recalibrated_under_load_and_what_nothing_needs_is_removed() {
    with_temp_namespace("drift", SCENARIO, |context| async move {
        let service = Service::create(context.clone())?;
        // Calibration's texts have hundreds of tokens, the load's questions a few dozen.
        service.patch(&json!({
            "drift": {
                "action": "Recalibrate", "maxPromptLengthShiftPercent": "50",
                "minPrompts": 100, "window": "1m", "coolDown": "1s",
            },
            "rollout": {"revisionHistoryLimit": 0},
        }))?;
        let first = artifact(&service.kubectl_wait_ready(FIRST).await?);
        let load = service.load(SCENARIO).await?;
        let told = service
            .wait(ROUND, "the drift is told", |object| {
                condition(object, "Drifted").is_some_and(|drifted| drifted.0 == "True")
            })
            .await?;
        let (_, reason, message) = condition(&told, "Drifted").context("no Drifted")?;
        ensure!(
            reason == "Drifted" && message.contains("prompts of another length") && message.contains("limit 50 %"),
            "{reason}: {message}"
        );
        let object = service.wait(ROUND, "another artifact", |object| serves(object, 1, &first)).await?;
        let second = artifact(&object);
        ensure!(object["spec"] == told["spec"], "spec is people's");
        let object = service.wait(ROUND, "a third artifact", |object| serves(object, 2, &second)).await?;
        let report = load.stop().await;
        ensure!(report.failed == 0 && report.succeeded > 500, "{report}");
        means::say(&format!("recalibrated twice under load: {report}"));
        if context.cluster.local {
            let folder = context.cluster.run_folder()?.join("volumes").join(&context.namespace);
            let (kept, digits) = (kept(&folder)?, |digest: &str| digest.replace("sha256:", ""));
            ensure!(
                kept.contains(&digits(&artifact(&object))) && !kept.contains(&digits(&first)),
                "stable serves from {}, the first artifact was {first}, and the volume has {kept:?}",
                artifact(&object)
            );
        }
        Ok(())
    })
    .await;
}
