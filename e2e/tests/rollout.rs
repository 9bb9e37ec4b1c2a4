//! The whole loop on a real cluster: deploy, promote under load, refuse, roll back, delete. Kills are in `kills.rs`.
//!
//! Each scenario has its own namespace and runs alone (`make e2e` passes `--test-threads=1`): times per token are measured here.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use mixquant_e2e::cluster::{condition, is_true};
use mixquant_e2e::load::Report;
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::prompts::Prompt;
use mixquant_e2e::service::{NAME, Service, image, revision};
use mixquant_e2e::{means, operator, prompts};
use serde_json::{Value, json};

/// A scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(10);
/// From `kubectl apply` to Ready: calibration of 16 texts, verification, pods.
const FIRST: Duration = Duration::from_mins(3);
/// From a patch to its end, promoted or not.
const ROLLOUT: Duration = Duration::from_mins(3);

/// Deploys the manifest and waits as a person would.
async fn deployed(context: Context) -> anyhow::Result<Service> {
    let service = Service::create(context)?;
    service.kubectl_wait_ready(FIRST).await?;
    Ok(service)
}

/// Every request was answered, and there were enough of them to say so.
fn expect_no_failure(report: &Report, seconds: f64) -> anyhow::Result<()> {
    ensure!(report.failed == 0, "{report}");
    #[expect(clippy::cast_precision_loss, reason = "a count of requests")]
    let rate = (report.succeeded + report.failed) as f64 / seconds;
    ensure!(
        rate >= 20.0,
        "only {rate:.1} requests a second were sent: {report}"
    );
    ensure!(
        report.ways.len() == 4 && report.exact > 0,
        "not every kind of request was sent: {report}"
    );
    Ok(())
}

/// A condition has this status, and its message carries a number.
fn expect_with_number(object: &Value, kind: &str, status: &str) -> anyhow::Result<String> {
    let (actual, reason, message) =
        condition(object, kind).with_context(|| format!("no condition {kind}"))?;
    ensure!(
        actual == status,
        "{kind}={actual} ({reason}: {message}), expected {status}"
    );
    ensure!(
        message.chars().any(|character| character.is_ascii_digit()),
        "{kind} carries no number: {message}"
    );
    Ok(format!("{reason}: {message}"))
}

async fn expect_answer(service: &Service, prompt: &Prompt) -> anyhow::Result<()> {
    let answer = service.ask(prompt).await?;
    ensure!(
        answer == prompt.answer,
        "{}: `{answer}` instead of `{}`",
        prompt.id,
        prompt.answer
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_first_deployment_is_calibrated_verified_and_answers() {
    with_temp_namespace("first", SCENARIO, |context| async move {
        let service = Service::create(context)?;
        service.kubectl_wait_is_refused()?;
        let object = service.kubectl_wait_ready(FIRST).await?;
        for kind in ["Ready", "Available", "Calibrated", "PrecisionOK"] {
            ensure!(
                is_true(&object, kind),
                "{kind} is not true when Ready is: {}",
                object["status"]
            );
        }
        expect_with_number(&object, "PrecisionOK", "True")?;
        ensure!(
            object["status"]["observedGeneration"] == object["metadata"]["generation"],
            "{}",
            object["status"]
        );
        ensure!(
            object["status"]["readyReplicas"] == 2 && !revision(&object, "stable").is_empty(),
            "{}",
            object["status"]
        );
        ensure!(
            revision(&object, "canary").is_empty(),
            "{}",
            object["status"]
        );
        for (revision, page) in service.metrics().await? {
            let own = page.lines().filter(|line| line.starts_with("mixquant_"));
            let label = format!("revision=\"{revision}\"");
            let strange = own.clone().find(|line| !line.contains(&label));
            ensure!(
                own.count() > 0 && strange.is_none(),
                "no {label} in {strange:?}"
            );
        }
        let short = prompts::short()?;
        for prompt in &short {
            expect_answer(&service, prompt).await?;
        }
        ensure!(
            service.prefills("W8A8").await? == 0
                && service.prefills("BF16").await? >= short.len() as u64,
            "short prompts are read precisely"
        );
        let long = prompts::long()?;
        for prompt in &long {
            expect_answer(&service, prompt).await?;
        }
        ensure!(
            !long.is_empty() && service.prefills("W8A8").await? == long.len() as u64,
            "{} long prompts were asked and {} were read in INT8",
            long.len(),
            service.prefills("W8A8").await?
        );
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_good_change_goes_through_its_steps_and_is_promoted_without_one_failed_request() {
    with_temp_namespace("promote", SCENARIO, |context| async move {
        let service = deployed(context).await?;
        let old = revision(&service.get()?, "stable").to_owned();
        let load = service.load(SCENARIO).await?;
        let begun = std::time::Instant::now();
        service.patch(&json!({"engine": {"image": image("MIXQUANT_NEXT_ENGINE_IMAGE")?}}))?;
        let mut steps = Vec::new();
        let what = "promoted through its steps";
        let object = service
            .wait(ROLLOUT, what, |object| {
                let rollout = &object["status"]["rollout"];
                if rollout["stage"] == "Stepping" && steps.last() != Some(&rollout["step"].as_i64())
                {
                    steps.push(rollout["step"].as_i64());
                }
                let stable = revision(object, "stable");
                stable != old && !stable.is_empty() && is_true(object, "Ready")
            })
            .await?;
        let seconds = begun.elapsed().as_secs_f64();
        expect_no_failure(&load.stop().await, seconds)?;
        ensure!(steps == [Some(0), Some(1)], "the steps were {steps:?}");
        service.kubectl_wait_ready(Duration::from_secs(2)).await?;
        let revisions: BTreeSet<_> = service.pods()?.into_iter().map(|pod| pod.1).collect();
        ensure!(
            revisions.contains(revision(&object, "stable")),
            "{revisions:?}"
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

/// What must hold after a change was refused or rolled back: the old revision serves, untouched, and Ready says that the spec does not.
async fn expect_stable_untouched(
    service: &Service,
    before: &Value,
    pods: &[(String, String, i64)],
) -> anyhow::Result<Value> {
    let object = service
        .wait(ROLLOUT, "stalled with no canary", |object| {
            is_true(object, "Stalled") && revision(object, "canary").is_empty()
        })
        .await?;
    ensure!(
        revision(&object, "stable") == revision(before, "stable"),
        "stable moved: {}",
        object["status"]
    );
    ensure!(
        condition(&object, "Available").is_some_and(|found| found.0 == "True"),
        "{}",
        object["status"]
    );
    ensure!(
        condition(&object, "Ready").is_some_and(|found| found.0 == "False"),
        "{}",
        object["status"]
    );
    service.kubectl_wait_is_refused()?;
    let now = service.pods()?;
    ensure!(
        pods.iter().all(|pod| now.contains(pod)),
        "stable's pods changed: {pods:?}, now {now:?}"
    );
    Ok(object)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_plan_that_breaks_precision_never_gets_traffic() {
    with_temp_namespace("precision", SCENARIO, |context| async move {
        let service = deployed(context).await?;
        let (before, pods, deployments) = (service.get()?, service.pods()?, service.deployments()?);
        let load = service.load(SCENARIO).await?;
        let begun = std::time::Instant::now();
        // Two bits for every key and value measurably break this model. A merge patch removes a field by null.
        let broken =
            json!({"mode": "Uniform", "default": "INT2", "important": null, "importance": null});
        service.patch(&json!({"precision": {"kvCache": broken}}))?;
        let object = expect_stable_untouched(&service, &before, &pods).await?;
        let evidence = expect_with_number(&object, "PrecisionOK", "False")?;
        ensure!(evidence.starts_with("PrecisionRegression"), "{evidence}");
        ensure!(
            service.deployments()? == deployments,
            "a Deployment was made for the refused plan: {:?}",
            service.deployments()?
        );
        let seconds = begun.elapsed().as_secs_f64();
        expect_no_failure(&load.stop().await, seconds)?;
        // The way back is the old spec: it is ready at once and nothing is calibrated again.
        service.apply()?;
        service
            .patch(&json!({"precision": {"kvCache": before["spec"]["precision"]["kvCache"]}}))?;
        service.kubectl_wait_ready(Duration::from_secs(30)).await?;
        ensure!(
            service.pods()? == pods,
            "pods changed: {pods:?}, now {:?}",
            service.pods()?
        );
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_starved_canary_is_rolled_back_without_one_failed_request() {
    with_temp_namespace("slow", SCENARIO, |context| async move {
        let service = deployed(context.clone()).await?;
        let (before, pods) = (service.get()?, service.pods()?);
        let load = service.load(SCENARIO).await?;
        let begun = std::time::Instant::now();
        service.patch(&json!({"engine": {"resources": {"requests": {"cpu": "40m"}, "limits": {"cpu": "40m"}}}}))?;
        service
            .wait(ROLLOUT, "a canary", |object| {
                !revision(object, "canary").is_empty()
            })
            .await?;
        let object = expect_stable_untouched(&service, &before, &pods).await?;
        let seconds = begun.elapsed().as_secs_f64();
        expect_no_failure(&load.stop().await, seconds)?;
        let evidence = expect_with_number(&object, "SLOMet", "False")?;
        ensure!(evidence.starts_with("SLOViolated"), "{evidence}");
        expect_rollback_evidence(&context)
    })
    .await;
}

/// The rollback is an Event and a metric too, not only a condition.
fn expect_rollback_evidence(context: &Context) -> anyhow::Result<()> {
    let events = context.kubectl.get(&[
        "events",
        "--field-selector",
        &format!("involvedObject.name={NAME},type=Warning"),
    ])?;
    let events = events["items"].as_array().cloned().unwrap_or_default();
    let words: Vec<String> = events
        .iter()
        .map(|event| format!("{} {}", event["reason"], event["message"]))
        .collect();
    ensure!(
        words.iter().any(|text| text.contains("ms")),
        "no Event carries the times: {words:?}"
    );
    let page = operator::metrics(&context.cluster)?;
    let mine = |line: &&str| {
        line.starts_with("mixquant_rollbacks_total{") && line.contains(&context.namespace)
    };
    let Some(line) = page.lines().find(mine) else {
        bail!(
            "no mixquant_rollbacks_total of {} in\n{page}",
            context.namespace
        )
    };
    ensure!(line.ends_with(" 1"), "{line}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_invalid_manifest_is_refused() {
    with_temp_namespace("invalid", SCENARIO, |context| async move {
        let folder = means::repository().join("crds/examples/invalid");
        let mut count = 0;
        for entry in std::fs::read_dir(&folder)? {
            let file = entry?.path();
            let answer = context
                .kubectl
                .run(&["apply", "-f", &file.display().to_string()])?;
            ensure!(!answer.ok, "{} was accepted", file.display());
            count += 1;
        }
        ensure!(count >= 25, "{count} manifests");
        let left = context.kubectl.get(&["mqs"])?;
        ensure!(
            left["items"].as_array().is_some_and(Vec::is_empty),
            "{left}"
        );
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn delete_leaves_nothing_behind() {
    with_temp_namespace("delete", SCENARIO, |context| async move {
        deployed(context.clone()).await?;
        let owned = owned_objects(&context)?;
        for kind in [
            "deployment.apps/",
            "service/",
            "controllerrevision.apps/",
            "pod/",
        ] {
            ensure!(
                owned.iter().any(|name| name.starts_with(kind)),
                "no {kind} before the deletion, so this test sees nothing: {owned:?}"
            );
        }
        context
            .kubectl
            .must(&["delete", "mqs", NAME, "--timeout=60s"])?;
        let deadline = tokio::time::Instant::now() + Duration::from_secs(90);
        loop {
            let left = owned_objects(&context)?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "still there: {left:?}"
            );
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    })
    .await;
}

/// Every object of any kind in the namespace that belongs to the service, as `pod/x` or `deployment.apps/x`.
fn owned_objects(context: &Context) -> anyhow::Result<Vec<String>> {
    let kinds = context.kubectl.must(&[
        "api-resources",
        "--namespaced",
        "--verbs=list",
        "--output=name",
    ])?;
    let kinds: Vec<&str> = kinds
        .lines()
        .filter(|kind| !kind.starts_with("events") && !kind.contains("metrics.k8s.io"))
        .collect();
    let selector = format!("mixquant.io/service={NAME}");
    let list = context.kubectl.must(&[
        "get",
        &kinds.join(","),
        "--selector",
        &selector,
        "--ignore-not-found",
        "--output=name",
    ])?;
    Ok(list.lines().map(str::to_owned).collect())
}
