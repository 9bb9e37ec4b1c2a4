//! The operator's rights: every right that the chart grants was made use of by the scenarios before this one. The audit log is the witness.
//!
//! Cargo runs test files by name, so this one comes last; alone it would find rights that nothing has used yet.

use std::time::Duration;

use anyhow::{bail, ensure};
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::service::Service;
use mixquant_e2e::{audit, monitoring};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_uses_every_right_that_it_has() {
    with_temp_namespace("rights", Duration::from_mins(5), |context| async move {
        ensure!(
            context.cluster.local,
            "only the local cluster's audit log can be read"
        );
        monitoring::install(&context.cluster.kubectl)?;
        let monitored = monitored(&context).await;
        monitoring::remove(&context.cluster.kubectl)?;
        monitored?;
        let granted = audit::granted(&context.cluster)?;
        let used = audit::used(&context.cluster)?;
        let unused: Vec<_> = granted.difference(&used).collect();
        ensure!(unused.is_empty(), "granted and never used: {unused:?}");
        let borrowed: Vec<_> = used.difference(&granted).collect();
        ensure!(borrowed.is_empty(), "used and never granted: {borrowed:?}");
        Ok(())
    })
    .await;
}

/// Where the Prometheus operator's kinds are known, a service gets a monitor and rules.
async fn monitored(context: &Context) -> anyhow::Result<()> {
    let service = Service::create(context.clone())?;
    service.patch(&json!({"replicas": 1}))?;
    service.kubectl_wait_ready(Duration::from_mins(3)).await?;
    // The operator asks once a minute which kinds there are, and looks at a service only when something woke it.
    for wake in 0..60 {
        let made = ["podmonitor", "prometheusrule"].map(|kind| {
            let object = format!("{kind}/{}-mixquant", service.name);
            context
                .kubectl
                .get(&[&object])
                .is_ok_and(|made| !made.is_null())
        });
        if made == [true, true] {
            return Ok(());
        }
        let (service, wake) = (format!("mqs/{}", service.name), format!("test/wake={wake}"));
        context
            .kubectl
            .must(&["annotate", "--overwrite", &service, &wake])?;
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    bail!("no monitor and rules although the kinds are there")
}
