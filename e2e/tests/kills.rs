//! The operator killed with SIGKILL at many points of a service's life: it ends where an undisturbed run does.
//!
//! Both runs go through a first deployment, a promotion and a rollback, under load, and lose no request.

use std::time::Duration;

use anyhow::ensure;
use mixquant_e2e::cluster::is_true;
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::operator;
use mixquant_e2e::service::{NAME, Service, image, revision};
use serde_json::{Value, json};

/// A run as a whole.
const SCENARIO: Duration = Duration::from_mins(12);
/// From a change to its end.
const CHANGE: Duration = Duration::from_mins(3);

/// What two runs must have in common at the end, whatever happened on the way.
fn outcome(service: &Service) -> anyhow::Result<Value> {
    let object = service.get()?;
    let conditions = object
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let mut words: Vec<_> = conditions
        .iter()
        .map(|found| {
            (
                found["type"].to_string(),
                found["status"].to_string(),
                found["reason"].to_string(),
            )
        })
        .collect();
    words.sort();
    let mut deployments = service.deployments()?;
    deployments.retain(|deployment| deployment.1 > 0);
    Ok(json!({
        "phase": object["status"]["phase"],
        "conditions": words,
        "stable": object["status"]["stable"],
        "canary": object["status"]["canary"],
        "rollout": object["status"]["rollout"]["stage"],
        "ready": object["status"]["readyReplicas"],
        "deployments": deployments.len(),
    }))
}

/// What is asked of a service, one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    FirstDeployment,
    NewImage,
    StarvedCanary,
}

impl Change {
    const ALL: [Self; 3] = [Self::FirstDeployment, Self::NewImage, Self::StarvedCanary];

    fn ask(self, service: &Service) -> anyhow::Result<()> {
        let starved = json!({"requests": {"cpu": "40m"}, "limits": {"cpu": "40m"}});
        match self {
            Self::FirstDeployment => Service::create(service.context.clone()).map(drop),
            Self::NewImage => {
                service.patch(&json!({"engine": {"image": image("MIXQUANT_NEXT_ENGINE_IMAGE")?}}))
            }
            Self::StarvedCanary => service.patch(&json!({"engine": {"resources": starved}})),
        }
    }

    /// The change has come to its end, and the last pod of the revision that lost is gone.
    fn is_done(self, object: &Value) -> bool {
        let at_rest =
            object["status"]["rollout"].is_null() && revision(object, "canary").is_empty();
        let answer = match self {
            Self::FirstDeployment | Self::NewImage => "Ready",
            Self::StarvedCanary => "Stalled",
        };
        at_rest && is_true(object, answer)
    }
}

fn stage_is(object: &Value, stage: &str) -> bool {
    object["status"]["rollout"]["stage"] == stage
}

fn step_is(object: &Value, step: i64) -> bool {
    stage_is(object, "Stepping") && object["status"]["rollout"]["step"] == step
}

/// When a run is disturbed: in which change, a name, and how the service's status shows it.
type Moment = (Change, &'static str, fn(&Value) -> bool);

const MOMENTS: [Moment; 8] = [
    (Change::FirstDeployment, "calibrating", |object| {
        object["status"]["phase"] == "Calibrating"
    }),
    (Change::FirstDeployment, "deploying", |object| {
        object["status"]["phase"] == "Deploying"
    }),
    (Change::NewImage, "canary starting", |object| {
        stage_is(object, "Starting")
    }),
    (Change::NewImage, "canary at its first step", |object| {
        step_is(object, 0)
    }),
    (Change::NewImage, "canary with a verdict", |object| {
        object["status"]["rollout"]["verdict"]["outcome"].is_string()
    }),
    (Change::NewImage, "canary at its second step", |object| {
        step_is(object, 1)
    }),
    (Change::NewImage, "canary being promoted", |object| {
        stage_is(object, "Promoting")
    }),
    (
        Change::StarvedCanary,
        "canary being rolled back",
        |object| stage_is(object, "RollingBack"),
    ),
];

/// Goes through all changes; at each of the given moments, once it is seen, the operator is killed. The requests begin with the first answer.
async fn run(context: Context, moments: &[Moment]) -> anyhow::Result<(Value, usize)> {
    let service = Service::at(context.clone(), NAME);
    let (mut kills, mut load) = (0, None);
    for change in Change::ALL {
        change.ask(&service)?;
        for (_, name, moment) in moments.iter().filter(|moment| moment.0 == change) {
            service.wait(CHANGE, name, moment).await?;
            operator::kill(&context.cluster).await?;
            kills += 1;
        }
        let what = format!("at the end of {change:?}");
        service
            .wait(CHANGE, &what, |object| change.is_done(object))
            .await?;
        if load.is_none() {
            load = Some(service.load(SCENARIO).await?);
        }
    }
    if let Some(load) = load {
        let report = load.stop().await;
        ensure!(report.failed == 0, "{report}");
    }
    Ok((outcome(&service)?, kills))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operator_killed_at_eight_points_ends_where_an_undisturbed_one_does() {
    with_temp_namespace("undisturbed", SCENARIO, |quiet| async move {
        let (expected, _) = run(quiet, &[]).await?;
        with_temp_namespace("killed", SCENARIO, |context| async move {
            let (actual, kills) = run(context, &MOMENTS).await?;
            ensure!(kills == MOMENTS.len(), "only {kills} kills");
            ensure!(
                actual == expected,
                "killed: {actual:#}\nundisturbed: {expected:#}"
            );
            Ok(())
        })
        .await;
        Ok(())
    })
    .await;
}
