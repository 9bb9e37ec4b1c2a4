//! The operator at rest: three services that are ready, and nothing to do. It writes nothing but its lease, and stays small.
//!
//! `make test` watches for half a minute; `make rest` for ten, by `MIXQUANT_REST_SECONDS`. The apiserver's audit log is the witness.

use std::time::Duration;

use anyhow::ensure;
use k8s_openapi::jiff::Timestamp;
use mixquant_e2e::audit;
use mixquant_e2e::means;
use mixquant_e2e::namespace::with_temp_namespace;
use mixquant_e2e::operator;
use mixquant_e2e::service::{NAME, Service};
use serde_json::json;

/// Memory that the operator may hold.
const MAX_RESIDENT_BYTES: u64 = 64 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_rest_the_operator_writes_nothing_but_its_lease() {
    let seconds = std::env::var("MIXQUANT_REST_SECONDS").map_or(30, |text| {
        text.parse().expect("MIXQUANT_REST_SECONDS is a number")
    });
    with_temp_namespace(
        "rest",
        Duration::from_secs(600 + seconds),
        move |context| async move {
            ensure!(
                context.cluster.local,
                "only the local cluster's audit log can be read"
            );
            let first = Service::create(context.clone())?;
            let services = [
                first,
                Service::at(context.clone(), "second"),
                Service::at(context.clone(), "third"),
            ];
            for service in &services {
                service.apply()?;
                service.patch(&json!({"replicas": 1}))?;
            }
            for service in &services {
                service.kubectl_wait_ready(Duration::from_mins(4)).await?;
            }
            // A status may follow Ready once more (the last pod of a Job that leaves); a quiet interval begins when the object stops changing.
            for service in &services {
                settled(service).await?;
            }
            let since = Timestamp::now().to_string();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            let writes = audit::writes_since(&context.cluster, &since)?;
            let unexpected: Vec<_> = writes
                .iter()
                .filter(|write| !write.ends_with(" leases"))
                .collect();
            ensure!(
                unexpected.is_empty(),
                "in {seconds} s of rest the operator wrote {unexpected:?}"
            );
            ensure!(
                !writes.is_empty() || seconds < 30,
                "not even the lease was renewed: the audit log was not read"
            );
            let bytes = operator::resident_bytes(&context.cluster)?;
            ensure!(
                bytes < MAX_RESIDENT_BYTES,
                "the operator holds {} MiB",
                bytes >> 20
            );
            means::say(&format!(
                "{NAME} and 2 more: {} lease writes in {seconds} s, {} KiB resident",
                writes.len(),
                bytes >> 10
            ));
            Ok(())
        },
    )
    .await;
}

/// Waits until the service has not changed for five seconds.
async fn settled(service: &Service) -> anyhow::Result<()> {
    for _ in 0..24 {
        let before = service.get()?["metadata"]["resourceVersion"].clone();
        tokio::time::sleep(Duration::from_secs(5)).await;
        if service.get()?["metadata"]["resourceVersion"] == before {
            return Ok(());
        }
    }
    anyhow::bail!("{} changes all the time", service.name)
}
