//! One life of a service under an operator of its own, in seven parts: it is created, calibrated, gets a canary, promotes it, rolls another
//! back, is scaled and deleted. At one write of it the operator may be killed.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::proxy::{Asked, Counts, Fault, Moment, Proxy};
use super::state::{self, State};
use super::world::{World, services};
use crate::{apiserver, program};

/// The parts of a life, in order.
pub const PARTS: [&str; 7] = [
    "create",
    "calibrate",
    "canary",
    "promote",
    "roll back",
    "scale",
    "delete",
];
/// A part that takes longer hangs.
const PATIENCE: Duration = Duration::from_mins(2);
/// The operator has looked since its last write, and wrote nothing for so long: the part is over.
const QUIET: Duration = Duration::from_millis(1200);
/// Between two looks.
const STEP: Duration = Duration::from_millis(200);

/// Where an operator is killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crash {
    /// The index into [`PARTS`].
    pub part: usize,
    /// The write.
    pub write: Asked,
    /// Before, at or after it.
    pub moment: Moment,
}

/// A part as it ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// The namespace.
    pub state: State,
    /// What the operator created and deleted in it.
    pub counts: Counts,
    /// What it wrote.
    pub writes: Vec<Asked>,
}

/// A whole life.
#[derive(Debug)]
pub struct Lived {
    /// By part.
    pub parts: Vec<Ended>,
    /// How often the operator was killed.
    pub kills: usize,
}

/// What every life needs.
#[derive(Debug, Clone)]
pub struct Means {
    /// The operator's program.
    pub operator: PathBuf,
    /// A folder for kubeconfigs and logs.
    pub folder: PathBuf,
    /// The example that services are made from.
    pub example: Value,
}

/// The operator's process, started again whenever it is found dead.
struct Operator {
    means: Means,
    namespace: String,
    kubeconfig: PathBuf,
    process: Arc<Mutex<Option<Child>>>,
}

impl Operator {
    fn keep_running(&self) -> anyhow::Result<()> {
        let mut process = self.process.lock().expect("no holder of this lock panics");
        if let Some(child) = process.as_mut()
            && child.try_wait()?.is_none()
        {
            return Ok(());
        }
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.means.folder.join(format!("{}.log", self.namespace)))?;
        let child = program::command(&self.means.operator, &self.kubeconfig)
            .arg("--admin-listen=127.0.0.1:0")
            .args(["--watch-namespace", &self.namespace])
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| self.means.operator.display().to_string())?;
        *process = Some(child);
        Ok(())
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        end(&self.process);
    }
}

fn end(process: &Mutex<Option<Child>>) {
    let child = process
        .lock()
        .expect("no holder of this lock panics")
        .take();
    if let Some(mut child) = child {
        drop(child.kill());
        drop(child.wait());
    }
}

/// A service that lives.
pub struct Life {
    client: Client,
    namespace: String,
    means: Means,
    operator: Operator,
    world: Arc<World>,
    controls: tokio::task::JoinHandle<()>,
    /// Between the operator and the apiserver.
    pub proxy: Proxy,
    kills: Arc<Mutex<usize>>,
}

impl Drop for Life {
    fn drop(&mut self) {
        self.controls.abort();
    }
}

impl Life {
    /// A namespace with all that a service refers to, its controllers and an operator.
    ///
    /// # Errors
    /// What the apiserver refuses.
    pub async fn begin(client: &Client, namespace: &str, means: &Means) -> anyhow::Result<Self> {
        apiserver::furnish(client, namespace).await?;
        let proxy = Proxy::start(client.clone()).await?;
        let kubeconfig = means.folder.join(format!("{namespace}.kubeconfig"));
        write_kubeconfig(&kubeconfig, &proxy.address)?;
        let operator = Operator {
            means: means.clone(),
            namespace: namespace.to_owned(),
            kubeconfig,
            process: Arc::default(),
        };
        let (process, kills) = (Arc::clone(&operator.process), Arc::new(Mutex::new(0)));
        let count = Arc::clone(&kills);
        proxy.on_kill(move || {
            end(&process);
            *count.lock().expect("no holder of this lock panics") += 1;
        });
        let world = Arc::new(World::new(client.clone(), namespace));
        let controls = tokio::spawn(Arc::clone(&world).run());
        Ok(Self {
            client: client.clone(),
            namespace: namespace.to_owned(),
            means: means.clone(),
            operator,
            world,
            controls,
            proxy,
            kills,
        })
    }

    /// Lives through all parts.
    ///
    /// # Errors
    /// A part that does not reach its end, with the part and the service as it stands.
    pub async fn live(&self, crash: Option<&Crash>) -> anyhow::Result<Lived> {
        let mut parts = Vec::new();
        for (number, part) in PARTS.iter().enumerate() {
            self.proxy.begin();
            let crash = crash.filter(|crash| crash.part == number).cloned();
            self.proxy.when(move |asked| {
                let crash = crash.as_ref()?;
                let hit =
                    asked.key == crash.write.key && asked.occurrence == crash.write.occurrence;
                hit.then_some(Fault::Kill(crash.moment))
            });
            self.part(part)
                .await
                .with_context(|| format!("{}: {part}", self.namespace))?;
            parts.push(Ended {
                state: state::read(&self.client, &self.namespace).await?,
                counts: self.proxy.counts(),
                writes: self.proxy.writes(),
            });
        }
        let kills = *self.kills.lock().expect("no holder of this lock panics");
        Ok(Lived { parts, kills })
    }

    /// Begins a part and waits for its end.
    ///
    /// # Errors
    /// When the end does not come.
    pub async fn part(&self, part: &str) -> anyhow::Result<()> {
        let patch = |patch: Value| async move {
            services(&self.client, &self.namespace)
                .patch("chat", &PatchParams::default(), &Patch::Merge(&patch))
                .await
                .map(drop)
        };
        let image = |image: &str| json!({"spec": {"engine": {"image": image}}});
        self.world.let_jobs_end(part != "create");
        self.world
            .pages
            .set_traffic(!["create", "calibrate", "canary"].contains(&part));
        match part {
            "create" => {
                let object = serde_json::from_value(self.means.example.clone())?;
                services(&self.client, &self.namespace)
                    .create(&PostParams::default(), &object)
                    .await?;
            }
            "canary" => patch(image("localhost/engine:2")).await?,
            "roll back" => patch(image("localhost/engine:slow")).await?,
            "scale" => patch(json!({"spec": {"replicas": 3}})).await?,
            "delete" => {
                let api = services(&self.client, &self.namespace);
                api.delete("chat", &DeleteParams::background()).await?;
            }
            _ => {}
        }
        self.until(part).await
    }

    /// Waits until the part has reached its end and the operator has nothing more to do.
    async fn until(&self, part: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.operator.keep_running()?;
            let mut state = state::service(&self.client, &self.namespace).await?;
            if self.proxy.is_settled(QUIET) && may_end(part, &state) {
                state = state::read(&self.client, &self.namespace).await?;
                if ends(part, &state) {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                bail!(
                    "not within {PATIENCE:?}: {:#?}",
                    state.get("MixQuantService/chat")
                );
            }
            tokio::time::sleep(STEP).await;
        }
    }
}

/// Whether a part has reached its end, as far as the service alone says.
fn may_end(part: &str, state: &State) -> bool {
    let Some(service) = state.get("MixQuantService/chat") else {
        return part == "delete";
    };
    let phase = service["phase"].as_str().unwrap_or_default();
    let image = service.pointer("/stable/image").and_then(Value::as_str);
    let serves = |tag: &str| image.is_some_and(|image| image.ends_with(tag));
    let pods = |count: i64| service["replicas"] == json!([count, count]);
    match part {
        "create" => phase == "Calibrating",
        "calibrate" => phase == "Ready" && pods(2),
        "canary" => phase == "Canary" && pods(4),
        "promote" => phase == "Ready" && serves(":2") && pods(2),
        "roll back" => phase == "Degraded" && serves(":2") && pods(2),
        "scale" => phase == "Degraded" && pods(3),
        _ => false,
    }
}

/// The same, with the rest of the namespace.
fn ends(part: &str, state: &State) -> bool {
    match part {
        "create" => may_end(part, state) && state.keys().any(|name| name.starts_with("Job/")),
        "delete" => state.is_empty(),
        _ => may_end(part, state),
    }
}

fn write_kubeconfig(path: &Path, server: &str) -> anyhow::Result<()> {
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters: [{{name: test, cluster: {{server: \"{server}\"}}}}]\n\
         users: [{{name: operator, user: {{}}}}]\ncontexts: [{{name: test, context: {{cluster: test, user: operator}}}}]\ncurrent-context: test\n"
    );
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// The example of all lives: the smallest service, with steps as short as they may be. There is no node here, so room is not counted.
///
/// # Errors
/// An example that cannot be read.
pub fn example() -> anyhow::Result<Value> {
    let path = crate::means::repository().join("crds/examples/minimal.yaml");
    let mut example: Value = serde_norway::from_str(&std::fs::read_to_string(&path)?)?;
    example["metadata"]["name"] = "chat".into();
    let spec = &mut example["spec"];
    spec["replicas"] = 2.into();
    spec["engine"]["image"] = "localhost/engine:1".into();
    spec["rollout"] = json!({"steps": [{"weight": 50, "hold": "1s"}], "abortScaleDownDelaySeconds": 0, "surge": "Always",
        "analysis": {"interval": "1s", "minSamples": 50, "warmUp": "0s"}});
    Ok(example)
}
