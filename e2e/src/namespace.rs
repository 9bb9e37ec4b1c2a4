//! A namespace for one scenario: made with restricted Pod Security, dumped when the scenario fails, removed at the end.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::Api;
use kube::runtime::wait::await_condition;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::kubectl::Kubectl;
use crate::means;
use crate::operator;

/// What a scenario gets.
#[derive(Clone)]
pub struct Context {
    /// The cluster.
    pub cluster: Cluster,
    /// The scenario's own namespace.
    pub namespace: String,
    /// `kubectl` in that namespace.
    pub kubectl: Kubectl,
}

/// Runs `scenario` in a namespace of its own, for at most `deadline`.
///
/// `KEEP=1` keeps the namespace. Skipped, with the reason printed, where there is no cluster.
///
/// # Panics
/// When the scenario fails, with its error and where the dump is.
#[expect(
    clippy::print_stderr,
    reason = "where the dump lies is for the person who reads the test's output"
)]
pub async fn with_temp_namespace<F, Fut>(name: &str, deadline: Duration, scenario: F)
where
    F: FnOnce(Context) -> Fut,
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let Some(cluster) = Cluster::connect().await else {
        return;
    };
    let context = create(cluster, name)
        .await
        .expect("a namespace can be made");
    // A task of its own, so that a failed assertion is caught here and the dump is still written.
    let outcome = tokio::spawn(tokio::time::timeout(deadline, scenario(context.clone()))).await;
    let failure = match outcome {
        Ok(Ok(Ok(()))) => None,
        Ok(Ok(Err(error))) => Some(format!("{error:#}")),
        Ok(Err(_)) => Some(format!("not done after {deadline:?}")),
        Err(panicked) => Some(panic_text(panicked)),
    };
    if failure.is_some() {
        match dump(&context) {
            Ok(file) => eprintln!(
                "{name}: what the cluster looked like is in {}",
                file.display()
            ),
            Err(error) => eprintln!("{name}: no dump: {error:#}"),
        }
    }
    if std::env::var_os("KEEP").is_some_and(|value| !value.is_empty()) {
        eprintln!("{name}: KEEP is set, namespace {} stays", context.namespace);
    } else if let Err(error) = remove(&context) {
        eprintln!("{name}: namespace {} stays: {error:#}", context.namespace);
    }
    if let Some(failure) = failure {
        panic!("{name}: {failure}");
    }
}

fn panic_text(panicked: tokio::task::JoinError) -> String {
    let Ok(payload) = panicked.try_into_panic() else {
        return "cancelled".to_owned();
    };
    let text = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("panicked").to_owned()
}

async fn create(cluster: Cluster, name: &str) -> anyhow::Result<Context> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let namespace = format!("e2e-{name}-{:x}", seconds & 0xff_ffff);
    cluster.kubectl.apply(&format!(
        "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {namespace}\n  labels:\n    pod-security.kubernetes.io/enforce: restricted\n    \
         mixquant.io/e2e: scenario\n"
    ))?;
    // Pods of a new namespace are refused until its service account is there.
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), &namespace);
    let there = await_condition(accounts, "default", |account: Option<&ServiceAccount>| {
        account.is_some()
    });
    tokio::time::timeout(Duration::from_secs(30), there)
        .await
        .context("the namespace got no service account")??;
    let kubectl = cluster.kubectl.in_namespace(&namespace);
    Ok(Context {
        cluster,
        namespace,
        kubectl,
    })
}

fn remove(context: &Context) -> anyhow::Result<()> {
    context.cluster.kubectl.must(&[
        "delete",
        "namespace",
        &context.namespace,
        "--request-timeout=0",
        "--timeout=120s",
    ])?;
    // Volumes belong to no namespace; the scenario's own carry its name.
    let selector = format!("mixquant.io/e2e-namespace={}", context.namespace);
    context.cluster.kubectl.must(&[
        "delete",
        "persistentvolume",
        "--wait=false",
        "--selector",
        &selector,
    ])?;
    Ok(())
}

/// Writes objects, events and logs of the namespace, and the operator's log, into one file.
fn dump(context: &Context) -> anyhow::Result<PathBuf> {
    let folder = means::target().join("e2e-dumps");
    std::fs::create_dir_all(&folder)?;
    let file = folder.join(format!("{}.txt", context.namespace));
    let mut text = String::new();
    let kubectl = &context.kubectl;
    let mut section = |title: &str, answer: anyhow::Result<crate::kubectl::Answer>| match answer {
        Ok(answer) => writeln!(text, "==== {title}\n{}{}", answer.stdout, answer.stderr),
        Err(error) => writeln!(text, "==== {title}\n{error:#}"),
    };
    section(
        "services",
        kubectl.run(&["get", "mixquantservices", "-o", "yaml"]),
    )?;
    section(
        "objects",
        kubectl.run(&[
            "get",
            "pods,deployments,replicasets,jobs,services,endpointslices,pvc",
            "-o",
            "wide",
        ]),
    )?;
    section(
        "events",
        kubectl.run(&["get", "events", "--sort-by=.lastTimestamp"]),
    )?;
    section("pods", kubectl.run(&["describe", "pods"]))?;
    for pod in names(&kubectl.get(&["pods"]).unwrap_or_default()) {
        section(
            &format!("log of {pod}"),
            kubectl.run(&["logs", &pod, "--all-containers", "--tail=200"]),
        )?;
        section(
            &format!("earlier log of {pod}"),
            kubectl.run(&["logs", &pod, "--previous", "--tail=200"]),
        )?;
    }
    let system = context.cluster.kubectl.in_namespace(operator::NAMESPACE);
    section(
        "operator",
        system.run(&["get", "pods,leases", "-o", "wide"]),
    )?;
    section(
        "log of the operator",
        system.run(&["logs", "--selector", operator::SELECTOR, "--tail=1000"]),
    )?;
    std::fs::write(&file, text)?;
    Ok(file)
}

/// The names in a `List`.
pub fn names(list: &Value) -> Vec<String> {
    let items = list["items"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    items
        .iter()
        .filter_map(|item| item.pointer("/metadata/name")?.as_str().map(str::to_owned))
        .collect()
}
