//! Reads the world of one service into `Observed`: its own objects by label and owner, and what its spec refers to.
//!
//! Called at the start of every pass; decides nothing. What a decision hangs on is read from the API itself: the service and everything
//! that belongs to it. What stands beside it (companions, claims, data) is read again when a watch says that it changed, see [`Known`].

mod routes;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Service};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Resource, ResourceExt};
use mixquant_crds::service::ConfigMapKey;
use mixquant_crds::{Digest, MixQuantService, names};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::{debug, warn};

use crate::action::RoomQuestion;
use crate::build::companion::{self, Built};
use crate::build::meta::{COMPONENT_ENGINE, Owner};
use crate::build::{monitoring, route};
use crate::capacity;
use crate::clock;
use crate::compare::covers;
use crate::error::{Call, Error};
use crate::known::Known;
use crate::observed::{
    CompanionState, Dataset, Installation, Kind, ObjectName, Observed, ObservedCompanion, Presence,
    Room, Tracks,
};
use crate::read::{self, DEADLINE};
use crate::stored::{self, Deployed, plain};
use crate::validate::validate;

/// Data whose digest is remembered, by the ConfigMap's uid and key; more services than this only cost reads.
const MAX_DIGESTS: usize = 1024;

/// What kinds the cluster knows is asked again after this time: the Prometheus operator may come and go.
const KINDS_KEPT: Duration = Duration::from_mins(1);

type Claim = PartialObjectMeta<PersistentVolumeClaim>;

/// Asked of a claim.
const THERE: &str = "is it there";

/// Reads through one client, and remembers the digests of data by their resourceVersion.
pub struct Observer {
    client: Client,
    known: Known,
    /// This process may use routes of the Gateway API.
    gateway_api: bool,
    installation: Mutex<(Installation, Option<Instant>)>,
    digests: Mutex<HashMap<(String, String), (String, Digest)>>,
}

impl Observer {
    /// An observer that has read nothing. Pods of the namespaces `metrics_readers` may read engine pods' metrics.
    pub fn new(client: Client, metrics_readers: Vec<String>) -> Self {
        let installation = Installation {
            metrics_readers,
            ..Installation::default()
        };
        Self {
            client,
            known: Known::default(),
            gateway_api: false,
            installation: Mutex::new((installation, None)),
            digests: Mutex::default(),
        }
    }

    /// What the watches have to keep honest.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// The same, that may use routes of the Gateway API.
    #[must_use]
    pub fn with_gateway_api(mut self, may_use: bool) -> Self {
        self.gateway_api = may_use;
        self
    }

    /// The world of `service` now.
    pub async fn observe(
        &self,
        owner: &Owner,
        service: &MixQuantService,
    ) -> Result<Observed, Error> {
        let namespace = owner.namespace.as_str();
        let stored = Box::pin(self.stored(owner)).await?;
        let installation = self.installation().await;
        let spec = &service.spec;
        let routed = Box::pin(self.routed(owner, spec, &installation)).await?;
        let model = spec.model.source.claim_name();
        let artifacts = &spec.artifacts.persistent_volume_claim.claim_name;
        let referenced = async {
            futures::try_join!(
                self.dataset(namespace, &spec.calibration.dataset.config_map),
                self.dataset(namespace, &spec.verification.dataset.config_map),
                self.claim(namespace, model),
                self.claim(namespace, Some(artifacts)),
            )
        };
        let (calibration_data, evaluation_data, model_claim, artifact_claim) =
            Box::pin(referenced).await?;
        let mut observed = Observed {
            service: service.clone(),
            calibration_data,
            evaluation_data,
            model_claim,
            artifact_claim,
            jobs: Vec::new(),
            revisions: Vec::new(),
            deployments: Vec::new(),
            pods: Vec::new(),
            traffic: None,
            tracks: Tracks::default(),
            route: None,
            old_route: None,
            foreign: Vec::new(),
            companions: Box::pin(self.companions(owner, service, &installation)).await?,
            installation,
            room: None,
        };
        stored.describe(owner, &mut observed);
        routed.describe(&mut observed);
        Ok(observed)
    }

    /// The room for a canary; `None` where this process may not read nodes, the pods on them or quotas.
    pub async fn room(&self, owner: &Owner, asks: &RoomQuestion) -> Result<Option<Room>, Error> {
        let cluster = match read::cluster(&self.client, &owner.namespace).await {
            Ok(cluster) => cluster,
            Err(error @ Error::Refused { code: 403, .. }) => {
                debug!(%error, "the room for a canary is not known");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let of = capacity::Of {
            namespace: &owner.namespace,
            service: &owner.name,
            stable: &asks.stable,
        };
        let pod = asks.template.spec.clone().unwrap_or_default();
        Ok(Some(capacity::room(&pod, of, &cluster)))
    }

    /// Everything that carries this service's labels, and whatever has the main Service's name.
    async fn stored(&self, owner: &Owner) -> Result<Stored, Error> {
        let namespace = owner.namespace.as_str();
        let ours = selector_of(owner);
        let services: Api<Service> = self.api(namespace);
        let (jobs, revisions, deployments, pods, main) = futures::try_join!(
            self.list::<Job>(namespace, &ours),
            self.list::<ControllerRevision>(namespace, &ours),
            self.list::<Deployment>(namespace, &ours),
            self.list::<Pod>(namespace, &ours),
            read::get(&services, &owner.name, DEADLINE),
        )?;
        Ok(Stored {
            jobs,
            revisions,
            deployments,
            pods,
            main,
        })
    }

    /// What the operator is installed beside now. When the cluster does not say, what it said last.
    async fn installation(&self) -> Installation {
        let lock = || {
            self.installation
                .lock()
                .expect("no holder of this lock panics")
        };
        let (known, asked) = lock().clone();
        let now = clock::monotonic();
        if asked.is_some_and(|asked| now.saturating_duration_since(asked) < KINDS_KEPT) {
            return known;
        }
        let found = futures::try_join!(self.kinds(monitoring::GROUP_VERSION), async {
            if self.gateway_api {
                self.kinds(route::GROUP_VERSION).await
            } else {
                Ok(Vec::new())
            }
        });
        let (monitoring, routes) = match found {
            Ok(found) => found,
            Err(error) => {
                warn!(%error, "which kinds there are is not known");
                return known;
            }
        };
        let found = Installation {
            pod_monitors: monitoring.iter().any(|kind| kind == "PodMonitor"),
            prometheus_rules: monitoring.iter().any(|kind| kind == "PrometheusRule"),
            http_routes: routes.iter().any(|kind| kind == "HTTPRoute"),
            ..known
        };
        *lock() = (found.clone(), Some(now));
        found
    }

    /// The kinds of a group and version; none where the cluster does not know it.
    async fn kinds(&self, group_version: &str) -> Result<Vec<String>, Error> {
        let call = Call {
            verb: "discover",
            kind: group_version.into(),
            name: String::new(),
        };
        let listed = self.client.list_api_group_resources(group_version);
        let list = match read::within(call, DEADLINE, listed).await {
            Ok(list) => list,
            Err(Error::Refused { code: 404, .. }) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let kinds = list.resources.into_iter();
        Ok(kinds.map(|resource| resource.kind).collect())
    }

    /// Whether this process may use routes.
    pub fn uses_routes(&self) -> bool {
        self.gateway_api
    }

    /// Whether there are routes to be used, as it was found at most a minute ago.
    pub async fn knows_routes(&self) -> bool {
        self.installation().await.http_routes
    }

    /// What should stand beside the pods, and how it is found.
    async fn companions(
        &self,
        owner: &Owner,
        service: &MixQuantService,
        installation: &Installation,
    ) -> Result<Vec<ObservedCompanion>, Error> {
        let Ok(valid) = validate(service) else {
            return Ok(Vec::new());
        };
        let wanted = companion::wanted(installation).into_iter();
        let found = wanted.map(async |companion| {
            let state = match companion::build(companion, owner, &valid, installation) {
                Built::ServiceAccount(object) => self.state(owner, &*object).await,
                Built::NetworkPolicy(object) => self.state(owner, &*object).await,
                Built::PodDisruptionBudget(object) => self.state(owner, &*object).await,
                Built::PodMonitor(object) => self.state(owner, &*object).await,
                Built::PrometheusRule(object) => self.state(owner, &*object).await,
            };
            state.map(|state| ObservedCompanion { companion, state })
        });
        futures::future::try_join_all(found).await
    }

    async fn state<K>(&self, owner: &Owner, desired: &K) -> Result<CompanionState, Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Serialize
            + Debug,
    {
        let (kind, name) = (K::kind(&()), desired.name_any());
        let (namespace, desired) = (owner.namespace.as_str(), plain(desired));
        // The owner's uid is part of what is desired.
        let question = Digest::of_bytes(desired.to_string().as_bytes()).to_string();
        if self
            .known
            .recall::<K>(namespace, &name, &question)
            .is_some()
        {
            return Ok(CompanionState::Right);
        }
        let reading = self.known.begin::<K>(namespace, &name);
        let live = match read::get(&self.api::<K>(namespace), &name, DEADLINE).await {
            Ok(live) => live,
            Err(error @ Error::Refused { code: 403, .. }) => {
                warn!(%error, "left as it is");
                return Ok(CompanionState::Unreadable);
            }
            Err(error) => return Err(error),
        };
        Ok(match live {
            Some(live) if !owner.claims(live.meta()) => CompanionState::Foreign {
                name: format!("{kind} {name}"),
            },
            Some(live) if covers(&plain(&live), &desired) => {
                self.known.keep(reading, &question, String::new());
                CompanionState::Right
            }
            Some(_) | None => CompanionState::Wrong,
        })
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn list<K>(&self, namespace: &str, selector: &str) -> Result<Vec<K>, Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        read::list(&self.api::<K>(namespace), selector).await
    }

    /// Whether a claim is there; a source without one lacks nothing.
    async fn claim(&self, namespace: &str, name: Option<&str>) -> Result<Presence, Error> {
        let Some(name) = name else {
            return Ok(Presence::Present);
        };
        if self.known.recall::<Claim>(namespace, name, THERE).is_some() {
            return Ok(Presence::Present);
        }
        let reading = self.known.begin::<Claim>(namespace, name);
        Ok(
            match read::get(&self.api::<Claim>(namespace), name, DEADLINE).await? {
                Some(_) => {
                    self.known.keep(reading, THERE, String::new());
                    Presence::Present
                }
                None => Presence::Missing {
                    what: format!("PersistentVolumeClaim `{name}` does not exist"),
                },
            },
        )
    }

    /// The digest of a key's bytes.
    async fn dataset(&self, namespace: &str, source: &ConfigMapKey) -> Result<Dataset, Error> {
        let (name, key) = (&source.name, &source.key);
        let recalled = self.known.recall::<ConfigMap>(namespace, name, key);
        if let Some(digest) = recalled.and_then(|text| text.parse().ok()) {
            return Ok(Dataset::Present { digest });
        }
        let reading = self.known.begin::<ConfigMap>(namespace, name);
        let found = self.read_dataset(namespace, source).await?;
        if let Dataset::Present { digest } = &found {
            self.known.keep(reading, key, digest.to_string());
        }
        Ok(found)
    }

    /// A ConfigMap of up to 1 MiB is read only when its resourceVersion is a new one.
    async fn read_dataset(&self, namespace: &str, source: &ConfigMapKey) -> Result<Dataset, Error> {
        let name = &source.name;
        let metadata: Api<PartialObjectMeta<ConfigMap>> = self.api(namespace);
        let missing = |what: String| Ok(Dataset::Missing { what });
        let Some(seen) = read::get(&metadata, name, DEADLINE).await? else {
            return missing(format!("ConfigMap `{name}` does not exist"));
        };
        if let Some(digest) = self.remembered(&seen.metadata, &source.key) {
            return Ok(Dataset::Present { digest });
        }
        let api: Api<ConfigMap> = self.api(namespace);
        let Some(map) = read::get(&api, name, DEADLINE).await? else {
            return missing(format!("ConfigMap `{name}` does not exist"));
        };
        let key = &source.key;
        let text = map.data.as_ref().and_then(|data| data.get(key));
        let binary = map.binary_data.as_ref().and_then(|data| data.get(key));
        let bytes = match (text, binary) {
            (Some(text), _) => text.as_bytes(),
            (None, Some(bytes)) => &bytes.0,
            (None, None) => return missing(format!("ConfigMap `{name}` has no key `{key}`")),
        };
        if bytes.is_empty() {
            return missing(format!("key `{key}` of ConfigMap `{name}` is empty"));
        }
        let digest = Digest::of_bytes(bytes);
        self.remember(&map.metadata, key, &digest);
        Ok(Dataset::Present { digest })
    }

    fn remembered(&self, object: &kube::core::ObjectMeta, key: &str) -> Option<Digest> {
        let digests = self.digests.lock().expect("no holder of this lock panics");
        let (version, digest) = digests.get(&(object.uid.clone()?, key.to_owned()))?;
        (object.resource_version.as_ref() == Some(version)).then(|| digest.clone())
    }

    fn remember(&self, object: &kube::core::ObjectMeta, key: &str, digest: &Digest) {
        let (Some(uid), Some(version)) = (&object.uid, &object.resource_version) else {
            return;
        };
        let mut digests = self.digests.lock().expect("no holder of this lock panics");
        if digests.len() >= MAX_DIGESTS {
            digests.clear();
        }
        digests.insert(
            (uid.clone(), key.to_owned()),
            (version.clone(), digest.clone()),
        );
    }
}

/// Selects everything that carries this service's labels.
fn selector_of(owner: &Owner) -> String {
    format!(
        "{}={},{}={}",
        names::LABEL_SERVICE,
        owner.name,
        names::LABEL_MANAGED_BY,
        names::MANAGER
    )
}

/// What was read, as it is stored.
struct Stored {
    jobs: Vec<Job>,
    revisions: Vec<ControllerRevision>,
    deployments: Vec<Deployment>,
    pods: Vec<Pod>,
    main: Option<Service>,
}

impl Stored {
    /// Fills in what is this service's, and names what is somebody else's.
    fn describe(self, owner: &Owner, observed: &mut Observed) {
        let foreign = &mut observed.foreign;
        let jobs = split(owner, self.jobs, Kind::Job, foreign);
        let revisions = split(owner, self.revisions, Kind::ControllerRevision, foreign);
        let deployments = split(owner, self.deployments, Kind::Deployment, foreign);
        let main = self.main.into_iter().collect();
        let main = split(owner, main, Kind::Service, foreign).pop();

        let (engine_pods, job_pods): (Vec<Pod>, Vec<Pod>) =
            self.pods.into_iter().partition(|pod| {
                let component = pod.labels().get(names::LABEL_COMPONENT);
                component.is_some_and(|component| component == COMPONENT_ENGINE)
            });
        observed.revisions = revisions.iter().filter_map(stored::revision).collect();
        let deployed = Deployed {
            owner,
            revisions: &observed.revisions,
            pods: &engine_pods,
        };
        observed.deployments = deployments
            .iter()
            .filter_map(|deployment| deployed.observed(deployment))
            .collect();
        observed.pods = engine_pods
            .iter()
            .filter_map(stored::pod)
            // Pods of an earlier service of this name are on their way out and count for nothing.
            .filter(|pod| {
                let mut known = observed.deployments.iter();
                known.any(|deployment| deployment.revision == pod.revision)
            })
            .collect();
        let now = clock::now();
        observed.jobs = jobs
            .iter()
            .filter_map(|job| stored::job(job, &job_pods, now))
            .collect();
        observed.traffic = main.map(|main| stored::traffic(owner, &main));
    }
}

/// Keeps what is this service's, and names the rest.
fn split<K: Resource>(
    owner: &Owner,
    objects: Vec<K>,
    kind: Kind,
    foreign: &mut Vec<ObjectName>,
) -> Vec<K> {
    let (ours, others): (Vec<K>, Vec<K>) = objects
        .into_iter()
        .partition(|object| owner.claims(object.meta()));
    foreign.extend(others.iter().map(|object| ObjectName {
        kind,
        name: object.name_any(),
    }));
    ours
}
