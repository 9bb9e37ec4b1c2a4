//! The running cluster as the tests see it: its client, its `kubectl`, and waiting for a state by watching instead of by sleeping.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures::StreamExt as _;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use serde_json::Value;

use crate::kubectl::Kubectl;
use crate::means;

/// A cluster that answers.
#[derive(Clone)]
pub struct Cluster {
    /// For watches and everything typed.
    pub client: kube::Client,
    /// For what a person would type.
    pub kubectl: Kubectl,
    /// Whether it is the local one, whose node is this machine.
    pub local: bool,
}

impl Cluster {
    /// The cluster that the environment names; none, with the reason printed, when there is no such thing.
    pub async fn connect() -> Option<Self> {
        match Self::try_connect().await {
            Ok(cluster) => Some(cluster),
            Err(error) => {
                means::skip(&format!(
                    "no cluster answers ({error:#}): run `make e2e`, or `e2e/cluster/cluster up` and then this through `cluster exec`"
                ));
                None
            }
        }
    }

    async fn try_connect() -> anyhow::Result<Self> {
        let local = std::env::var("CLUSTER").map_or(true, |value| value != "current");
        if local && std::env::var_os("MIXQUANT_CLUSTER_RUN").is_none() {
            bail!("this does not run inside the cluster's network");
        }
        let client = kube::Client::try_default().await?;
        client.apiserver_version().await?;
        let program = means::program("kubectl").unwrap_or_else(|| PathBuf::from("kubectl"));
        Ok(Self {
            client,
            kubectl: Kubectl::new(program, None),
            local,
        })
    }

    /// The local cluster's folder for what lives as long as it does (volumes, logs).
    pub fn run_folder(&self) -> anyhow::Result<PathBuf> {
        let folder = std::env::var_os("MIXQUANT_CLUSTER_RUN")
            .context("only the local cluster has a folder: MIXQUANT_CLUSTER_RUN is not set")?;
        Ok(PathBuf::from(folder))
    }
}

/// Which object is meant.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// For example `apps/v1`; `v1` for the core group.
    pub api_version: &'a str,
    /// For example `Deployment`.
    pub kind: &'a str,
    /// The plural, as in URLs.
    pub plural: &'a str,
    /// The namespace.
    pub namespace: &'a str,
    /// The name.
    pub name: &'a str,
}

impl Target<'_> {
    fn api(&self, client: &kube::Client) -> Api<DynamicObject> {
        let (group, version) = self
            .api_version
            .split_once('/')
            .unwrap_or(("", self.api_version));
        let resource = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk(group, version, self.kind),
            self.plural,
        );
        Api::namespaced_with(client.clone(), self.namespace, &resource)
    }
}

/// Watches one object until `condition` holds for it, and returns it then; an absent object is `Value::Null`.
///
/// A connection that breaks is made again: what was watched for is still to come, and only the deadline ends the wait.
///
/// # Errors
/// At the deadline, with the object as it was last seen and what the watch last failed with.
pub async fn wait_for<F>(
    client: &kube::Client,
    target: Target<'_>,
    deadline: Duration,
    what: &str,
    mut condition: F,
) -> anyhow::Result<Value>
where
    F: FnMut(&Value) -> bool,
{
    let (mut last, mut problem) = (Value::Null, None);
    let waited = tokio::time::timeout(deadline, async {
        let mut seen = watch_object(target.api(client), target.name)
            .default_backoff()
            .boxed();
        while let Some(state) = seen.next().await {
            match state {
                Ok(object) => last = object.map_or(Ok(Value::Null), serde_json::to_value)?,
                Err(error) => {
                    problem = Some(error);
                    continue;
                }
            }
            if condition(&last) {
                return anyhow::Ok(());
            }
        }
        bail!("the watch of {} {} ended", target.kind, target.name)
    })
    .await;
    let Ok(result) = waited else {
        let problem = problem.map_or_else(String::new, |error| {
            format!("; the watch failed with: {error}")
        });
        bail!(
            "{} {} did not come to be `{what}` in {deadline:?}{problem}; last seen: {}",
            target.kind,
            target.name,
            shorten(&last)
        )
    };
    result.map(|()| last)
}

/// The `status` of an object (or all of it) in at most 2,000 characters.
fn shorten(object: &Value) -> String {
    let text = object.get("status").unwrap_or(object).to_string();
    text.chars().take(2000).collect()
}

/// The condition `kind` of an object's status: its `status`, `reason` and `message`.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    let found = conditions
        .iter()
        .find(|condition| condition["type"] == kind)?;
    Some((
        found["status"].as_str()?,
        found["reason"].as_str().unwrap_or(""),
        found["message"].as_str().unwrap_or(""),
    ))
}

/// Whether condition `kind` is `True` and about the newest generation.
pub fn is_true(object: &Value, kind: &str) -> bool {
    let Some(conditions) = object
        .pointer("/status/conditions")
        .and_then(Value::as_array)
    else {
        return false;
    };
    conditions.iter().any(|condition| {
        condition["type"] == kind
            && condition["status"] == "True"
            && condition["observedGeneration"] == object["metadata"]["generation"]
    })
}
