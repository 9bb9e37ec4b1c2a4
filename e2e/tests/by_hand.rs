//! What people do while a rollout is under way: pause, abort, retry, promote and undo it with `kubectl mixquant`, and upgrade the operator.
//!
//! Every scenario runs under load: whatever a person orders, no request fails.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use mixquant_e2e::cluster::{Cluster, is_true};
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::plugin::Plugin;
use mixquant_e2e::service::{NAME, Service, image, revision};
use mixquant_e2e::{means, operator};
use serde_json::{Value, json};

/// A scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(10);
/// From a change or an order to its end.
const CHANGE: Duration = Duration::from_mins(3);

/// Deployed and ready.
async fn deployed(context: &Context) -> anyhow::Result<Service> {
    let service = Service::create(context.clone())?;
    service.kubectl_wait_ready(CHANGE).await?;
    Ok(service)
}

/// The canary has its pods, takes traffic and waits for a person.
async fn waits_for_a_person(service: &Service) -> anyhow::Result<Value> {
    service
        .wait(CHANGE, "paused with a canary", |object| {
            object["status"]["phase"] == "Paused" && !revision(object, "canary").is_empty()
        })
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn people_abort_retry_promote_and_undo_under_load_without_one_failed_request() {
    with_temp_namespace("orders", SCENARIO, |context| async move {
        let service = deployed(&context).await?;
        let plugin = Plugin::of(&context)?;
        let old = revision(&service.get()?, "stable").to_owned();
        let load = service.load(SCENARIO).await?;
        service.patch(&json!({
            "engine": {"image": image("MIXQUANT_NEXT_ENGINE_IMAGE")?},
            "rollout": {"steps": [{"weight": 50, "hold": "2s"}, {"pause": {}}]},
        }))?;
        let new = revision(&waits_for_a_person(&service).await?, "canary").to_owned();
        plugin.expect(4, &["status", NAME])?;
        plugin.expect(0, &["status", NAME, "--success-on-pause"])?;

        plugin.expect(0, &["abort", NAME])?;
        service
            .wait(CHANGE, "aborted, the canary's pods gone", |object| {
                is_true(object, "Stalled") && revision(object, "canary").is_empty()
            })
            .await?;
        plugin.expect(3, &["status", NAME, "--timeout", "1m"])?;
        let why = plugin.expect(0, &["explain", NAME])?;
        ensure!(why.contains(&new), "explain names no {new}: {why}");

        plugin.expect(0, &["retry", NAME])?;
        waits_for_a_person(&service).await?;
        plugin.expect(0, &["promote", NAME])?;
        plugin.expect(0, &["status", NAME, "--timeout", "3m"])?;
        let object = service.get()?;
        ensure!(revision(&object, "stable") == new, "{}", object["status"]);

        plugin.expect(0, &["undo", NAME])?;
        let object = waits_for_a_person(&service).await?;
        ensure!(revision(&object, "canary") == old, "{}", object["status"]);
        plugin.expect(0, &["promote", NAME, "--full"])?;
        service
            .wait(CHANGE, "the old revision is stable again", |object| {
                revision(object, "stable") == old && object["status"]["rollout"].is_null()
            })
            .await?;
        let history = plugin.expect(0, &["history", NAME])?;
        ensure!(
            history.contains(&old) && history.contains(&new),
            "{history}"
        );
        let report = load.stop().await;
        ensure!(report.failed == 0 && report.exact > 0, "{report}");
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_upgrade_of_the_operator_in_mid_canary_restarts_no_engine_pod_and_the_rollout_goes_on() {
    with_temp_namespace("upgrade", SCENARIO, |context| async move {
        let service = deployed(&context).await?;
        let old = revision(&service.get()?, "stable").to_owned();
        let load = service.load(SCENARIO).await?;
        service.patch(&json!({
            "engine": {"image": image("MIXQUANT_NEXT_ENGINE_IMAGE")?},
            "rollout": {"steps": [{"weight": 50, "hold": "40s"}]},
        }))?;
        service
            .wait(CHANGE, "the canary at its step", |object| {
                object["status"]["rollout"]["stage"] == "Stepping"
            })
            .await?;
        let pods = service.pods()?;
        let before = operator::pod_name(&context.cluster)?;
        let upgraded = upgrade(&context.cluster, &context.namespace);
        let seen = service.get()?;
        ensure!(
            seen["status"]["rollout"]["stage"] == "Stepping",
            "the step was over before the upgrade was, which shows nothing: {}",
            seen["status"]["rollout"]
        );
        upgraded?;
        let after = operator::pod_name(&context.cluster)?;
        ensure!(
            before != after,
            "the upgrade replaced no pod of the operator"
        );
        let now = service.pods()?;
        ensure!(now == pods, "engine pods changed: {pods:?}, now {now:?}");
        let object = service
            .wait(CHANGE, "promoted by the operator that came", |object| {
                revision(object, "stable") != old && is_true(object, "Ready")
            })
            .await?;
        let canaries: Vec<_> = pods
            .iter()
            .filter(|pod| pod.1 == revision(&object, "stable"))
            .collect();
        let end = service.pods()?;
        ensure!(
            !canaries.is_empty() && canaries.iter().all(|pod| end.contains(pod)),
            "the canary's pods did not live on: {canaries:?}, now {end:?}"
        );
        let report = load.stop().await;
        ensure!(report.failed == 0 && report.exact > 0, "{report}");
        Ok(())
    })
    .await;
}

/// `helm upgrade` with one value changed, so that the operator's pod is made anew; waits until the new one is ready.
fn upgrade(cluster: &Cluster, value: &str) -> anyhow::Result<()> {
    let helm = means::program("helm").context("helm is missing: e2e/cluster/build helm")?;
    let chart = means::repository().join("charts/mixquant-operator");
    let mut command = std::process::Command::new(helm);
    if let Some(kubeconfig) = cluster.kubectl.kubeconfig() {
        command.arg("--kubeconfig").arg(kubeconfig);
    }
    let output = command
        .args([
            "--namespace",
            operator::NAMESPACE,
            "upgrade",
            "mixquant-operator",
        ])
        .arg(chart)
        .args([
            "--skip-crds",
            "--reuse-values",
            "--wait",
            "--timeout",
            "60s",
        ])
        .args(["--set", &format!("podAnnotations.upgraded-by={value}")])
        .output()?;
    if !output.status.success() {
        bail!(
            "helm upgrade: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
