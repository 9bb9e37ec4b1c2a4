//! The rest of a cluster, as far as an operator's rollout sees it: Jobs that answer, Deployments that get pods, and the collection of what
//! an owner left. A loop over the objects of one namespace; no kubelet, no controller manager.
//!
//! It only makes of objects what their specs say; it never looks at what the operator should have done.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::{Metadata, NamespaceResourceScope};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::{DynamicObject, ObjectMeta};
use kube::discovery::ApiResource;
use kube::{Api, Client, Resource, ResourceExt as _};
use mixquant_crds::names;
use mixquant_crds::{CalibrationReport, Digest, JobMessage, VerifyReport};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::page::Pages;

/// Between two looks.
const STEP: Duration = Duration::from_millis(150);

/// The artifact that every calibration makes.
fn artifact() -> Digest {
    Digest::of_bytes(b"artifact")
}

/// The resource, without its types: the rig stores what people would.
pub fn services(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: names::GROUP.into(),
        version: "v1alpha1".into(),
        api_version: format!("{}/v1alpha1", names::GROUP),
        kind: "MixQuantService".into(),
        plural: "mixquantservices".into(),
    };
    Api::namespaced_with(client.clone(), namespace, &resource)
}

/// A namespace's controllers.
pub struct World {
    client: Client,
    namespace: String,
    /// What pods tell.
    pub pages: Arc<Pages>,
    jobs_end: Arc<AtomicBool>,
}

impl World {
    /// Controllers that have not begun.
    pub fn new(client: Client, namespace: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            pages: Arc::new(Pages::new()),
            jobs_end: Arc::default(),
        }
    }

    /// Jobs end, or they run.
    pub fn let_jobs_end(&self, end: bool) {
        self.jobs_end.store(end, Ordering::Relaxed);
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Controls until the future is dropped.
    pub async fn run(self: Arc<Self>) {
        loop {
            // An object that goes away between two calls is looked at again.
            if let Err(error) = self.look().await {
                tracing_note(&self.namespace, &error);
            }
            tokio::time::sleep(STEP).await;
        }
    }

    async fn look(&self) -> anyhow::Result<()> {
        let all = ListParams::default();
        let jobs = self.api::<Job>().list(&all).await?.items;
        let deployments = self.api::<Deployment>().list(&all).await?.items;
        let pods = self.api::<Pod>().list(&all).await?.items;
        for job in &jobs {
            self.job(job).await?;
        }
        for deployment in &deployments {
            let uid = deployment.uid();
            let owned = |pod: &&Pod| {
                let mut owners = pod.owner_references().iter();
                owners.any(|owner| Some(&owner.uid) == uid.as_ref())
            };
            let own: Vec<&Pod> = pods.iter().filter(owned).collect();
            self.deployment(deployment, &own).await?;
        }
        let living = jobs.iter().filter_map(kube::ResourceExt::uid);
        let living = living.chain(deployments.iter().filter_map(kube::ResourceExt::uid));
        self.collect(living.collect(), &pods).await
    }

    async fn job(&self, job: &Job) -> anyhow::Result<()> {
        let ended = job
            .status
            .as_ref()
            .is_some_and(|status| status.completion_time.is_some());
        let Some(spec) = job.spec.as_ref().filter(|_| !ended) else {
            return Ok(());
        };
        let pod = self.pod(job, "0", &spec.template).await?;
        if self.jobs_end.load(Ordering::Relaxed) {
            self.finish(job, &pod).await?;
        }
        Ok(())
    }

    /// The pod `NAME-SUFFIX` of an object, made when it is missing.
    async fn pod<K>(
        &self,
        owner: &K,
        suffix: &str,
        template: &PodTemplateSpec,
    ) -> anyhow::Result<Pod>
    where
        K: Resource<DynamicType = ()> + Metadata<Ty = ObjectMeta>,
    {
        let api = self.api::<Pod>();
        let name = format!("{}-{suffix}", owner.name_any());
        if let Some(pod) = api.get_opt(&name).await? {
            return Ok(pod);
        }
        let mut pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": template.spec}))?;
        pod.metadata.labels = template
            .metadata
            .as_ref()
            .and_then(|meta| meta.labels.clone());
        pod.metadata.owner_references = owner.controller_owner_ref(&()).map(|owner| vec![owner]);
        Ok(api.create(&PostParams::default(), &pod).await?)
    }

    async fn finish(&self, job: &Job, pod: &Pod) -> anyhow::Result<()> {
        let container = job
            .spec
            .as_ref()
            .and_then(|spec| spec.template.spec.as_ref())
            .and_then(|spec| spec.containers.first())
            .map(|container| container.name.clone())
            .unwrap_or_default();
        let now = jiff::Timestamp::now()
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string();
        let message = message(container == "verification").to_termination_message();
        let ended = json!({"status": {"phase": "Succeeded", "containerStatuses": [{"name": container, "ready": false,
            "restartCount": 0, "image": "engine", "imageID": "engine", "state": {"terminated": {"exitCode": 0,
            "reason": "Completed", "message": message, "startedAt": now, "finishedAt": now}}}]}});
        let name = pod.name_any();
        self.api::<Pod>()
            .patch_status(&name, &PatchParams::default(), &Patch::Merge(&ended))
            .await?;
        let condition = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now, "lastProbeTime": now});
        let done = json!({"status": {"startTime": now, "completionTime": now, "succeeded": 1,
            "conditions": [condition("SuccessCriteriaMet"), condition("Complete")]}});
        self.api::<Job>()
            .patch_status(
                &job.name_any(),
                &PatchParams::default(),
                &Patch::Merge(&done),
            )
            .await?;
        Ok(())
    }

    async fn deployment(&self, deployment: &Deployment, own: &[&Pod]) -> anyhow::Result<()> {
        let Some(spec) = &deployment.spec else {
            return Ok(());
        };
        let wanted = spec.replicas.unwrap_or(1);
        let image = spec
            .template
            .spec
            .as_ref()
            .and_then(|pod| pod.containers[0].image.clone());
        let slow = image.is_some_and(|image| image.contains("slow"));
        let names: BTreeSet<String> = (0..wanted)
            .map(|number| format!("{}-{number}", deployment.name_any()))
            .collect();
        for pod in own {
            if !names.contains(&pod.name_any()) {
                self.remove(pod).await?;
            }
        }
        for number in 0..wanted {
            let pod = self
                .pod(deployment, &number.to_string(), &spec.template)
                .await?;
            if pod
                .status
                .as_ref()
                .and_then(|status| status.pod_ip.as_ref())
                .is_none()
            {
                let address = self.pages.add(slow).await?;
                self.ready(&pod, address).await?;
            }
        }
        let status = json!({"status": {"observedGeneration": deployment.metadata.generation, "replicas": wanted,
            "updatedReplicas": wanted, "readyReplicas": wanted, "availableReplicas": wanted}});
        let before = serde_json::to_value(&deployment.status)?;
        let same = status["status"].as_object().is_some_and(|wanted| {
            wanted
                .iter()
                .all(|(key, value)| before.get(key).unwrap_or(&json!(0)) == value)
        });
        if !same {
            self.api::<Deployment>()
                .patch_status(
                    &deployment.name_any(),
                    &PatchParams::default(),
                    &Patch::Merge(&status),
                )
                .await?;
        }
        Ok(())
    }

    async fn ready(&self, pod: &Pod, address: Ipv4Addr) -> anyhow::Result<()> {
        let now = jiff::Timestamp::now()
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string();
        let ip = address.to_string();
        let condition =
            |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now});
        let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now,
            "conditions": [condition("PodScheduled"), condition("Ready")], "containerStatuses": [{"name": "engine", "ready": true,
            "started": true, "restartCount": 0, "image": "engine", "imageID": "engine", "state": {"running": {"startedAt": now}}}]}});
        self.api::<Pod>()
            .patch_status(
                &pod.name_any(),
                &PatchParams::default(),
                &Patch::Merge(&status),
            )
            .await?;
        Ok(())
    }

    async fn remove(&self, pod: &Pod) -> anyhow::Result<()> {
        let at_once = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        self.api::<Pod>().delete(&pod.name_any(), &at_once).await?;
        let ip = pod
            .status
            .as_ref()
            .and_then(|status| status.pod_ip.as_ref());
        if let Some(address) = ip.and_then(|ip| ip.parse().ok()) {
            self.pages.remove(address);
        }
        Ok(())
    }

    /// Removes what belongs to an owner that is gone: pods, and everything once the service is.
    async fn collect(&self, living: BTreeSet<String>, pods: &[Pod]) -> anyhow::Result<()> {
        for pod in pods {
            if is_orphan(&pod.metadata, &living) {
                self.remove(pod).await?;
            }
        }
        let services = services(&self.client, &self.namespace);
        let listed = services.list(&ListParams::default()).await?;
        if !listed.items.is_empty() {
            return Ok(());
        }
        let nobody = BTreeSet::new();
        self.orphans::<Deployment>(&nobody).await?;
        self.orphans::<Job>(&nobody).await?;
        self.orphans::<ControllerRevision>(&nobody).await?;
        self.orphans::<Service>(&nobody).await?;
        self.orphans::<ServiceAccount>(&nobody).await?;
        self.orphans::<NetworkPolicy>(&nobody).await?;
        self.orphans::<PodDisruptionBudget>(&nobody).await
    }

    async fn orphans<K>(&self, living: &BTreeSet<String>) -> anyhow::Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api = self.api::<K>();
        for object in api.list(&ListParams::default()).await? {
            if is_orphan(object.meta(), living) {
                api.delete(&object.name_any(), &DeleteParams::background())
                    .await?;
            }
        }
        Ok(())
    }
}

fn is_orphan(object: &ObjectMeta, living: &BTreeSet<String>) -> bool {
    let mut owners = object.owner_references.iter().flatten().peekable();
    owners.peek().is_some() && !owners.any(|owner| living.contains(&owner.uid))
}

/// A look that failed is repeated; only a person who debugs the rig wants to know.
fn tracing_note(namespace: &str, error: &anyhow::Error) {
    if std::env::var_os("MIXQUANT_SIEVE_TRACE").is_some() {
        use std::io::Write as _;
        drop(writeln!(std::io::stderr(), "{namespace}: {error:#}"));
    }
}

/// A Job's answer: nothing is lost.
fn message(verified: bool) -> JobMessage {
    let report = VerifyReport {
        baseline_perplexity: 10.0,
        perplexity: 10.0,
        perplexity_increase_percent: 0.0,
        kl_mean: 0.0,
        kl_p99: 0.001,
        top1_agreement_percent: 99.9,
        worst_slice: None,
        tokens: 1000,
        artifact_digest: Some(artifact()),
    };
    if verified {
        return JobMessage::Verified(report);
    }
    JobMessage::Calibrated(CalibrationReport {
        model_digest: Digest::of_bytes(b"model"),
        artifact_digest: artifact(),
        calibration_tokens: 1000,
        prompt_lengths: Vec::new(),
        verify: report,
    })
}
