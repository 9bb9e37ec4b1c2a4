//! The number of pods follows the load on a real cluster: pods are added under it and taken away under it, and no request is lost.

use std::time::Duration;

use anyhow::ensure;
use mixquant_e2e::namespace::with_temp_namespace;
use mixquant_e2e::service::Service;
use serde_json::{Value, json};

/// The scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(10);
/// From `kubectl apply` to Ready.
const FIRST: Duration = Duration::from_mins(3);
/// From a load or a bound to the pods that it asks for.
const FOLLOWS: Duration = Duration::from_mins(4);

fn has_pods(object: &Value, count: i64) -> bool {
    let status = &object["status"];
    status["scaling"]["desiredReplicas"] == count
        && status["readyReplicas"] == count
        && status["replicas"] == count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pods_come_and_go_with_the_load_and_no_request_is_lost() {
    with_temp_namespace("scaling", SCENARIO, |context| async move {
        let service = Service::create(context)?;
        // The load is 22 requests a second: three pods' worth.
        service.patch(&json!({"scaling": {"minReplicas": 2, "maxReplicas": 3, "targets": {"requestsPerSecond": "8"}}}))?;
        service.kubectl_wait_ready(FIRST).await?;
        let load = service.load(SCENARIO).await?;
        let begun = std::time::Instant::now();
        let grown = service.wait(FOLLOWS, "three pods for the load", |object| has_pods(object, 3)).await?;
        let reason = grown["status"]["scaling"]["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("requests a second, 8 a pod"), "{reason}");
        ensure!(grown["spec"]["replicas"] == 2, "spec.replicas is people's: {}", grown["spec"]["replicas"]);
        service.patch(&json!({"scaling": {"maxReplicas": 2}}))?;
        service.wait(FOLLOWS, "two pods within the bounds", |object| has_pods(object, 2)).await?;
        // The one that leaves is drained, and takes its time for it.
        let mut gone = service.pods()?.len() == 2;
        for _ in 0..60 {
            if gone {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            gone = service.pods()?.len() == 2;
        }
        ensure!(gone, "the pod that leaves is still there: {:?}", service.pods()?);
        let report = load.stop().await;
        let seconds = begun.elapsed().as_secs();
        ensure!(report.failed == 0, "{report}");
        ensure!(report.succeeded >= 10 * seconds, "too few requests to tell: {report}");
        mixquant_e2e::means::say(&format!("three pods, then two, under load for {seconds} s: {report}"));
        Ok(())
    })
    .await;
}
