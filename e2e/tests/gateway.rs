//! Exact weights by a real Gateway (Contour and Envoy): promoted by copies first and rolled back under load through Envoy, then without a
//! gateway again.
//!
//! `make gateway` starts the Gateway and gives the operator its rights to routes. Times per token are measured here: it runs alone.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use mixquant_e2e::cluster::{condition, is_true};
use mixquant_e2e::load::Report;
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::service::{NAME, Service, image, revision};
use serde_json::{Value, json};

/// The scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(15);
/// From `kubectl apply` to Ready, and from a patch to its end.
const STAGE: Duration = Duration::from_mins(4);
/// Where Envoy listens: the node's own address, see `e2e/cluster/cluster`.
const ENVOY: (&str, u16) = ("172.31.255.1", 8080);

/// The weights of the steps.
const WEIGHTS: [i64; 2] = [25, 50];
/// What the gateway copies in the step that mirrors: everything, as Contour does whatever percentage is said.
const MIRROR: i64 = 100;

/// The weights of the route's last rule, by backend.
fn weights(context: &Context) -> anyhow::Result<Vec<(String, i64)>> {
    let route = context.kubectl.get(&["httproute", NAME])?;
    let rules = route["spec"]["rules"].as_array().context("no rules")?;
    let backends = rules.last().and_then(|rule| rule["backendRefs"].as_array());
    let weight = |backend: &Value| {
        let name = backend["name"].as_str().unwrap_or("").to_owned();
        (name, backend["weight"].as_i64().unwrap_or(1))
    };
    Ok(backends.into_iter().flatten().map(weight).collect())
}

fn expect_all_on_stable(context: &Context, object: &Value) -> anyhow::Result<()> {
    let names = ["stable", "canary"].map(|track| format!("{NAME}-{track}"));
    let expected = names.clone().into_iter().zip([100, 0]).collect::<Vec<_>>();
    ensure!(weights(context)? == expected, "{:?}", weights(context)?);
    for name in names {
        let service = context.kubectl.get(&["service", &name])?;
        let selected = &service["spec"]["selector"]["mixquant.io/revision"];
        ensure!(
            *selected == revision(object, "stable"),
            "{name} selects {selected}"
        );
    }
    Ok(())
}

fn expect_no_failure(report: &Report) -> anyhow::Result<()> {
    ensure!(report.failed == 0 && report.succeeded > 500, "{report}");
    Ok(())
}

fn weight(percent: i64) -> Value {
    json!({"weight": percent, "hold": "4s"})
}

/// While a canary answers copies, the route gives it nobody, and the service's own address is stable's.
fn expect_only_copies(context: &Context, object: &Value) -> anyhow::Result<()> {
    let shares = [100, 0].into_iter();
    let names = ["stable", "canary"].map(|track| format!("{NAME}-{track}"));
    let expected = names.into_iter().zip(shares).collect::<Vec<_>>();
    ensure!(weights(context)? == expected, "{:?}", weights(context)?);
    let selected = |name: &str| -> anyhow::Result<Value> {
        let service = context.kubectl.get(&["service", name])?;
        Ok(service["spec"]["selector"]["mixquant.io/revision"].clone())
    };
    let canary = selected(&format!("{NAME}-canary"))?;
    ensure!(
        canary == revision(object, "canary"),
        "copies go to {canary}"
    );
    let main = selected(NAME)?;
    ensure!(main == revision(object, "stable"), "people meet {main}");
    Ok(())
}

/// A good image is measured on copies, then takes its steps, each with the weight that was asked for.
async fn promoted(service: &Service) -> anyhow::Result<()> {
    let old = revision(&service.get()?, "stable").to_owned();
    let mirror = json!({"mirror": MIRROR, "hold": "20s"});
    let steps: Vec<Value> = [mirror].into_iter().chain(WEIGHTS.map(weight)).collect();
    service.patch(&json!({"engine": {"image": image("MIXQUANT_NEXT_ENGINE_IMAGE")?}, "rollout": {"steps": steps}}))?;
    let shifted = |object: &Value| {
        let rollout = &object["status"]["rollout"];
        let percent = |field: &str| rollout[field].as_i64().unwrap_or(0);
        (rollout["shifted"] == true).then(|| (percent("mirror"), percent("weight")))
    };
    let mirrors = |object: &Value| shifted(object) == Some((MIRROR, 0));
    let object = service.wait(STAGE, "copies", mirrors).await?;
    expect_only_copies(&service.context, &object)?;
    let mut reached = vec![(MIRROR, 0)];
    // Each step is left with a Pass alone, the first one with a Pass on copies.
    let what = "promoted through its steps";
    let object = service
        .wait(STAGE, what, |object| {
            let share = shifted(object).filter(|share| reached.last() != Some(share));
            reached.extend(share);
            let stable = revision(object, "stable");
            stable != old && !stable.is_empty() && is_true(object, "Ready")
        })
        .await?;
    let expected = [(MIRROR, 0), (0, WEIGHTS[0]), (0, WEIGHTS[1])];
    ensure!(reached == expected, "copies and weights were {reached:?}");
    expect_all_on_stable(&service.context, &object)
}

/// A starved canary is measured by the gateway's share of the requests, and leaves.
async fn rolled_back(service: &Service) -> anyhow::Result<()> {
    let before = service.get()?;
    let starved = json!({"requests": {"cpu": "40m"}, "limits": {"cpu": "40m"}});
    let steps = WEIGHTS.map(weight);
    service.patch(&json!({"engine": {"resources": starved}, "rollout": {"steps": steps}}))?;
    let canary = |object: &Value| !revision(object, "canary").is_empty();
    service.wait(STAGE, "a canary", canary).await?;
    let object = service
        .wait(STAGE, "stalled with no canary", |object| {
            is_true(object, "Stalled") && !canary(object)
        })
        .await?;
    ensure!(
        revision(&object, "stable") == revision(&before, "stable"),
        "{}",
        object["status"]
    );
    let said = condition(&object, "SLOMet").context("no SLOMet")?;
    ensure!(said.0 == "False" && said.1 == "SLOViolated", "{said:?}");
    expect_all_on_stable(&service.context, &object)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn behind_a_gateway_one_canary_is_promoted_and_one_rolled_back_without_one_failed_request() {
    with_temp_namespace("gateway", SCENARIO, |context| async move {
        ensure!(context.cluster.local, "the gateway is the local cluster's");
        let service = Service::create(context.clone())?;
        let gateway = json!({"name": "edge", "namespace": "mixquant-gateway"});
        service.patch(&json!({"traffic": {"mode": "GatewayAPI", "parentRefs": [gateway], "trackHeader": "x-mixquant-track"}}))?;
        let object = service.kubectl_wait_ready(STAGE).await?;
        expect_all_on_stable(&context, &object)?;
        let (host, port) = ENVOY;
        let load = service.load_at(host.to_owned(), port, SCENARIO).await?;
        promoted(&service).await?;
        rolled_back(&service).await?;
        expect_no_failure(&load.stop().await)?;
        // Without the gateway its route goes, and the Services that it named stay.
        let fed = json!({"requests": {"cpu": "200m"}, "limits": {"cpu": null}});
        service.patch(&json!({"engine": {"resources": fed}, "traffic": null}))?;
        context.kubectl.must(&["wait", "--for=delete", &format!("httproute/{NAME}"), "--timeout=60s"])?;
        let ready = |object: &Value| is_true(object, "Ready");
        let object = service.wait(STAGE, "ready without a gateway", ready).await?;
        let selected = context.kubectl.get(&["service", &format!("{NAME}-canary")])?;
        let selected = &selected["spec"]["selector"]["mixquant.io/revision"];
        ensure!(*selected == revision(&object, "stable"), "{selected}");
        Ok(())
    })
    .await;
}
