//! One `MixQuantService` of a scenario: applied from the shared manifest, changed by patches, watched, asked, put under load.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::cluster::{self, Target};
use crate::load;
use crate::means;
use crate::namespace::Context;
use crate::prompts::{self, Prompt, first_line};

/// The service's name in most scenarios.
pub const NAME: &str = "chat";
/// Port of the service.
const PORT: u16 = 80;
/// Requests a second of the load: above the 20 that are asked for, because a busy machine may start one late.
const RATE: u32 = 22;

/// A service in a scenario's namespace.
#[derive(Clone)]
pub struct Service {
    /// Where it is.
    pub context: Context,
    /// Its name.
    pub name: String,
}

impl Service {
    /// Prepares the volumes and the texts, and applies the manifest.
    pub fn create(context: Context) -> anyhow::Result<Self> {
        let output = Command::new(means::repository().join("scripts/volumes"))
            .arg(&context.namespace)
            .output()
            .context("scripts/volumes")?;
        ensure!(
            output.status.success(),
            "scripts/volumes: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let service = Self::at(context, NAME);
        service.apply()?;
        Ok(service)
    }

    /// A service of that name in the scenario's namespace, whether it exists or not.
    pub fn at(context: Context, name: &str) -> Self {
        Self {
            context,
            name: name.to_owned(),
        }
    }

    /// Applies the manifest as it is in the repository.
    pub fn apply(&self) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(means::repository().join("e2e/manifests/service.yaml"))?;
        self.context.kubectl.apply(
            &text
                .replace("${NAME}", &self.name)
                .replace("${ENGINE_IMAGE}", &image("MIXQUANT_ENGINE_IMAGE")?),
        )
    }

    /// A merge patch of the spec, as `kubectl patch` would send it.
    pub fn patch(&self, spec: &Value) -> anyhow::Result<()> {
        let patch = json!({"spec": spec}).to_string();
        self.context
            .kubectl
            .must(&[
                "patch",
                "mqs",
                &self.name,
                "--type=merge",
                "--patch",
                &patch,
            ])
            .map(drop)
    }

    /// The whole object as it is now.
    pub fn get(&self) -> anyhow::Result<Value> {
        self.context.kubectl.get(&["mqs", &self.name])
    }

    fn target(&self) -> Target<'_> {
        Target {
            api_version: "mixquant.io/v1alpha1",
            kind: "MixQuantService",
            plural: "mixquantservices",
            namespace: &self.context.namespace,
            name: &self.name,
        }
    }

    /// Watches until `condition` holds for the object.
    pub async fn wait<F>(
        &self,
        deadline: Duration,
        what: &str,
        condition: F,
    ) -> anyhow::Result<Value>
    where
        F: FnMut(&Value) -> bool,
    {
        cluster::wait_for(
            &self.context.cluster.client,
            self.target(),
            deadline,
            what,
            condition,
        )
        .await
    }

    /// Waits as a person would, with `kubectl wait --for=condition=Ready`, and returns the object right after.
    pub async fn kubectl_wait_ready(&self, deadline: Duration) -> anyhow::Result<Value> {
        let (kubectl, object) = (self.context.kubectl.clone(), format!("mqs/{}", self.name));
        let waited = tokio::task::spawn_blocking(move || {
            // The request's own limit would end the watch before the deadline.
            let timeout = format!("--timeout={}s", deadline.as_secs());
            kubectl.run(&[
                "wait",
                "--request-timeout=0",
                "--for=condition=Ready",
                &object,
                &timeout,
            ])
        });
        let answer = waited.await??;
        ensure!(
            answer.ok,
            "kubectl wait --for=condition=Ready: {}; {}",
            answer.stderr.trim(),
            self.conditions()?
        );
        self.get()
    }

    /// Fails when `kubectl wait --for=condition=Ready` would say that the service is ready.
    pub fn kubectl_wait_is_refused(&self) -> anyhow::Result<()> {
        let answer = self.context.kubectl.run(&[
            "wait",
            "--for=condition=Ready",
            &format!("mqs/{}", self.name),
            "--timeout=2s",
        ])?;
        ensure!(
            !answer.ok,
            "kubectl wait says Ready: {}",
            self.conditions()?
        );
        Ok(())
    }

    fn conditions(&self) -> anyhow::Result<String> {
        let object = self.get()?;
        let conditions = object
            .pointer("/status/conditions")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let line = |condition: &Value| {
            format!(
                "{}={} {} ({})",
                condition["type"], condition["status"], condition["reason"], condition["message"]
            )
        };
        Ok(format!(
            "phase {}; {}",
            object["status"]["phase"],
            conditions.iter().map(line).collect::<Vec<_>>().join("; ")
        ))
    }

    /// The service's address inside the cluster.
    pub fn address(&self) -> anyhow::Result<String> {
        let service = self.context.kubectl.get(&["service", &self.name])?;
        let address = service
            .pointer("/spec/clusterIP")
            .and_then(Value::as_str)
            .context("the Service has no cluster IP")?;
        Ok(address.to_owned())
    }

    /// Asks over the chat API, through the apiserver's proxy, and returns the first line of the answer.
    pub async fn ask(&self, prompt: &Prompt) -> anyhow::Result<String> {
        let body = json!({"model": "kube-llama", "messages": prompt.messages, "max_tokens": prompt.max_tokens, "temperature": 0});
        let path = format!(
            "/api/v1/namespaces/{}/services/{}:http/proxy/v1/chat/completions",
            self.context.namespace, self.name
        );
        let request = hyper::Request::post(path)
            .header("content-type", "application/json")
            .body(body.to_string().into_bytes())?;
        // A connection of its own: one that was kept may be closed by the server at the moment it is used, and a question is not asked twice.
        let answer: Value = kube::Client::try_default().await?.request(request).await?;
        let Some(content) = answer
            .pointer("/choices/0/message/content")
            .and_then(Value::as_str)
        else {
            bail!("no answer in {answer}")
        };
        Ok(first_line(content).to_owned())
    }

    /// The pods of its engines, whatever their revision.
    pub fn engine_pods(&self) -> anyhow::Result<Value> {
        self.context.kubectl.get(&[
            "pods",
            "--selector",
            &format!(
                "mixquant.io/service={},app.kubernetes.io/component=engine",
                self.name
            ),
        ])
    }

    /// The running pods' revisions, by their labels, and their pages of metrics.
    pub async fn metrics(&self) -> anyhow::Result<Vec<(String, String)>> {
        let list = self.engine_pods()?;
        let pods = list["items"].as_array().map(Vec::as_slice);
        let mut pages = Vec::new();
        for pod in pods.unwrap_or_default() {
            let name = pod["metadata"]["name"].as_str().unwrap_or("");
            pages.push((pod_facts(pod).1, self.metrics_of(name).await?));
        }
        Ok(pages)
    }

    /// The page of metrics of one pod, through the apiserver's proxy.
    pub async fn metrics_of(&self, pod: &str) -> anyhow::Result<String> {
        let path = format!(
            "/api/v1/namespaces/{}/pods/{pod}:{}/proxy/metrics",
            self.context.namespace,
            mixquant_crds::names::PORT_ADMIN
        );
        let request = hyper::Request::get(path).body(Vec::new())?;
        Ok(self.context.cluster.client.request_text(request).await?)
    }

    /// Prompts that the running pods have read in this precision, by their own count.
    pub async fn prefills(&self, precision: &str) -> anyhow::Result<u64> {
        let label = format!("precision=\"{precision}\"");
        let mut sum = 0;
        for (_, page) in self.metrics().await? {
            let counts = page
                .lines()
                .filter(|line| line.starts_with("mixquant_prefill_precision_total{"))
                .filter(|line| line.contains(&label))
                .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
            sum += counts.sum::<u64>();
        }
        Ok(sum)
    }

    /// Starts the load of the scenarios: 22 requests a second until it is stopped, for at most `duration`. It goes straight to the Service's address.
    pub async fn load(&self, duration: Duration) -> anyhow::Result<load::Running> {
        self.load_at(self.address()?, PORT, duration).await
    }

    /// The same load, to another address that leads to the service.
    pub async fn load_at(
        &self,
        host: String,
        port: u16,
        duration: Duration,
    ) -> anyhow::Result<load::Running> {
        load::Running::start(load::Plan {
            target: load::Target {
                host,
                port,
                model: "kube-llama".to_owned(),
            },
            rate: RATE,
            duration,
            max_requests: u64::from(RATE) * duration.as_secs(),
            exact_every: 20,
            prompts: prompts::short()?,
        })
        .await
    }

    /// The Deployments of this service by name, with their pods' number.
    pub fn deployments(&self) -> anyhow::Result<Vec<(String, i64)>> {
        let list = self.context.kubectl.get(&[
            "deployments",
            "--selector",
            &format!("mixquant.io/service={}", self.name),
        ])?;
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let name = |item: &Value| {
            item.pointer("/metadata/name")
                .and_then(Value::as_str)
                .unwrap_or("")
                .to_owned()
        };
        Ok(items
            .iter()
            .map(|item| (name(item), item["spec"]["replicas"].as_i64().unwrap_or(0)))
            .collect())
    }

    /// UID, revision and restarts of every engine pod.
    pub fn pods(&self) -> anyhow::Result<Vec<(String, String, i64)>> {
        let list = self.engine_pods()?;
        let mut pods: Vec<_> = list["items"]
            .as_array()
            .cloned()
            .unwrap_or_default()
            .iter()
            .map(pod_facts)
            .collect();
        pods.sort();
        Ok(pods)
    }
}

fn pod_facts(pod: &Value) -> (String, String, i64) {
    let text = |pointer: &str| {
        pod.pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or("")
            .to_owned()
    };
    let restarts = pod
        .pointer("/status/containerStatuses/0/restartCount")
        .and_then(Value::as_i64)
        .unwrap_or(0);
    (
        text("/metadata/uid"),
        text("/metadata/labels/mixquant.io~1revision"),
        restarts,
    )
}

/// The name of an image that `images/build` made.
pub fn image(variable: &str) -> anyhow::Result<String> {
    std::env::var(variable).with_context(|| {
        format!("{variable} is not set: run `make e2e`, which sets it from target/images/names")
    })
}

/// The revision of a track (`stable`, `canary`), empty when there is none.
pub fn revision<'a>(object: &'a Value, track: &str) -> &'a str {
    object
        .pointer(&format!("/status/{track}/revision"))
        .and_then(Value::as_str)
        .unwrap_or("")
}
