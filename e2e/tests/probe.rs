//! Canaries that nobody uses, on a real cluster: probes alone promote a good one and roll back one that answers worse.
//!
//! No load is sent here: every request that is counted is the operator's own.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use mixquant_e2e::cluster::{condition, is_true};
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::service::{Service, image, revision};
use serde_json::{Value, json};

/// A scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(10);
/// From `kubectl apply` to Ready.
const FIRST: Duration = Duration::from_mins(3);
/// From a patch to its end, promoted or not, a calibration included.
const ROLLOUT: Duration = Duration::from_mins(5);

/// Probes, and a gate on their answers that allows 2 % of perplexity.
fn probed() -> Value {
    json!({
        "probe": {"requestsPerInterval": 16},
        "gates": [{"name": "answers", "metric": "NllIncrease", "max": "0.02"}],
    })
}

async fn deployed(context: Context) -> anyhow::Result<Service> {
    let service = Service::create(context)?;
    service.kubectl_wait_ready(FIRST).await?;
    service.patch(&probed())?;
    Ok(service)
}

/// What the gate of that name said last, while a trial is under way.
fn said(object: &Value, gate: &str) -> Option<String> {
    let gates = object
        .pointer("/status/rollout/verdict/gates")?
        .as_array()?;
    let gate = gates.iter().find(|said| said["name"] == gate)?;
    gate["message"].as_str().map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_canary_that_nobody_uses_is_promoted_by_probes_alone() {
    with_temp_namespace("quiet", SCENARIO, |context| async move {
        let service = deployed(context).await?;
        let old = revision(&service.get()?, "stable").to_owned();
        service.patch(&json!({"engine": {"image": image("MIXQUANT_NEXT_ENGINE_IMAGE")?}}))?;
        let (mut latency, mut answers) = (String::new(), String::new());
        let object = service
            .wait(ROLLOUT, "promoted by probes", |object| {
                latency = said(object, "tpot").unwrap_or(std::mem::take(&mut latency));
                answers = said(object, "answers").unwrap_or(std::mem::take(&mut answers));
                let stable = revision(object, "stable");
                stable != old && !stable.is_empty() && is_true(object, "Ready")
            })
            .await?;
        ensure!(latency.contains("of them probes)"), "{latency}");
        ensure!(
            answers.contains("NLL increase within the limits"),
            "{answers}"
        );
        ensure!(
            condition(&object, "SLOMet").is_some_and(|found| found.0 == "True"),
            "{}",
            object["status"]
        );
        Ok(())
    })
    .await;
}

/// Puts a worse model beside the demo model on the node's disk: in the middle half of each file every weight stands where its neighbour did. It is
/// a whole model with a digest of its own, and verification, which compares a model with itself, finds nothing.
fn worse_model(context: &Context) -> anyhow::Result<&'static str> {
    const NAME: &str = "kube-llama-worse";
    let models = context.cluster.run_folder()?.join("volumes/models");
    let (good, worse) = (models.join("kube-llama-10m"), models.join(NAME));
    std::fs::create_dir_all(&worse)?;
    for entry in std::fs::read_dir(&good)? {
        let entry = entry?;
        let mut bytes = std::fs::read(entry.path())?;
        if entry
            .path()
            .extension()
            .is_some_and(|kind| kind == "safetensors")
        {
            // BF16: two bytes a weight.
            let quarter = bytes.len() / 8 * 2;
            bytes[quarter..3 * quarter].rotate_left(2);
        }
        std::fs::write(worse.join(entry.file_name()), bytes)?;
    }
    Ok(NAME)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_canary_that_answers_worse_is_rolled_back_by_probes_with_the_numbers() {
    with_temp_namespace("worse", SCENARIO, |context| async move {
        let service = deployed(context.clone()).await?;
        let before = service.get()?;
        let path = worse_model(&context)?;
        service.patch(&json!({"model": {"source": {"persistentVolumeClaim": {"path": path}}}}))?;
        let object = service
            .wait(ROLLOUT, "rolled back by probes", |object| {
                is_true(object, "Stalled") && revision(object, "canary").is_empty()
            })
            .await?;
        ensure!(
            is_true(&object, "PrecisionOK"),
            "verification saw it, not probes: {}",
            object["status"]
        );
        ensure!(
            revision(&object, "stable") == revision(&before, "stable"),
            "stable moved: {}",
            object["status"]
        );
        let (status, reason, message) =
            condition(&object, "SLOMet").context("no condition SLOMet")?;
        ensure!(
            status == "False"
                && reason == "SLOViolated"
                && message.contains("NLL increase above limit 0.0200 nats a token"),
            "SLOMet={status} {reason}: {message}"
        );
        ensure!(
            condition(&object, "Available").is_some_and(|found| found.0 == "True"),
            "{}",
            object["status"]
        );
        Ok(())
    })
    .await;
}
