//! The only writer to the API. Executes a plan's actions in order; the first error ends the pass.
//!
//! Nothing is written that is already there. Every write passes the fence (only a leader writes), has a deadline, is counted, and carries
//! a precondition: the status its resourceVersion, an existing object and a deletion the uid that was seen.

#![expect(
    clippy::disallowed_methods,
    reason = "this file is the one writer to the API"
)]

mod route;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Service;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event as KubeEvent, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource, ResourceExt};
use mixquant_crds::status::{MixQuantServiceStatus, Reason};
use mixquant_crds::{MixQuantService, names};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::action::{Action, Event, ObjectRef, ScaleRequest};
use crate::build::companion::{self, Built};
use crate::build::meta::Owner;
use crate::build::route::HTTPRoute;
use crate::build::{deployment, job, service};
use crate::clock;
use crate::compare::{covers, merge_patch};
use crate::error::{Call, Error, one_line};
use crate::lease::Fence;
use crate::metrics::{Metrics, ServiceLabels};
use crate::observed::{Kind, Traffic};
use crate::read::{self, DEADLINE, within};
use crate::refused;
use crate::validate::ValidService;

/// After the fence closes nobody else may lead for this long: a write that was sent in time may still arrive.
const GRACE: Duration = Duration::from_secs(4);

/// Writes as the field manager [`names::MANAGER`].
#[derive(Clone)]
pub struct Writer {
    client: Client,
    fence: Fence,
    metrics: Arc<Metrics>,
    reporter: Reporter,
}

/// A service as it was read at the start of a pass, in the form that the API stores.
pub struct Target {
    /// The owner of everything that is written.
    pub owner: Owner,
    /// The stored object; its resourceVersion moves on with every status that this pass writes.
    pub stored: DynamicObject,
    /// The same, read.
    pub service: MixQuantService,
    /// The same, checked; `None` when its spec cannot work.
    pub valid: Option<ValidService>,
}

impl Target {
    /// Reads what is stored.
    ///
    /// # Errors
    /// The object and the reason when it does not fit the schema of this version.
    pub fn read(stored: DynamicObject) -> Result<Self, (Box<DynamicObject>, String)> {
        let service = serde_json::to_value(&stored)
            .and_then(MixQuantService::deserialize)
            .map_err(|error| one_line(&error.to_string()));
        let owner = service.as_ref().ok().and_then(Owner::of);
        match (service, owner) {
            (Ok(service), Some(owner)) => Ok(Self {
                owner,
                stored,
                service,
                valid: None,
            }),
            (Err(why), _) => Err((Box::new(stored), why)),
            (Ok(_), None) => Err((Box::new(stored), "it has no namespace, name or uid".into())),
        }
    }
}

impl Writer {
    /// A writer behind `fence`. `instance` is this process's name in Events.
    pub fn new(client: Client, fence: Fence, metrics: Arc<Metrics>, instance: String) -> Self {
        let reporter = Reporter {
            controller: names::MANAGER.into(),
            instance: Some(instance),
        };
        Self {
            client,
            fence,
            metrics,
            reporter,
        }
    }

    /// Does what a plan asks for. The plan is dropped when the service is not the one it was made from any more.
    pub async fn execute(&self, target: &mut Target, actions: &[Action]) -> Result<(), Error> {
        if actions.is_empty() {
            return Ok(());
        }
        self.expect_unchanged(target).await?;
        for action in actions {
            self.act(target, action).await?;
        }
        Ok(())
    }

    async fn expect_unchanged(&self, target: &Target) -> Result<(), Error> {
        let owner = &target.owner;
        let now = read::service(&self.client, &owner.namespace, &owner.name).await?;
        let version = now.and_then(|object| object.metadata.resource_version);
        if version.is_some() && version == target.stored.metadata.resource_version {
            return Ok(());
        }
        Err(Error::Refused {
            call: call("get", "MixQuantService", &owner.name),
            code: 409,
            message: "the service changed while it was being looked at".into(),
        })
    }

    async fn act(&self, target: &mut Target, action: &Action) -> Result<(), Error> {
        let owner = &target.owner;
        match action {
            Action::Remember(status) | Action::Report(status) => {
                self.put_status(target, status).await
            }
            Action::ApplyRevision(new) => {
                let object = deployment::controller_revision(owner, &new.frozen, new.number);
                Box::pin(self.ensure(owner, object, Existing::Keep)).await
            }
            Action::ApplyDeployment(request) => {
                let object = deployment::deployment(owner, &request.frozen, request.replicas);
                Box::pin(self.ensure(owner, object, Existing::Repair)).await
            }
            Action::ScaleDeployment(request) => self.scale(owner, request).await,
            Action::ApplyTraffic(traffic) => {
                let revision = match traffic {
                    Traffic::Only(revision) => Some(revision.as_str()),
                    Traffic::All => None,
                };
                let selector = service::selector(&owner.name, revision);
                let object = service::service(owner, owner.name.clone(), selector);
                Box::pin(self.ensure(owner, object, Existing::Repair)).await
            }
            Action::ApplyTrack(request) => Box::pin(self.apply_track(owner, request)).await,
            Action::ApplyRoute(share) => Box::pin(self.apply_route(target, *share)).await,
            Action::PatchRoute(patch) => Box::pin(self.patch_route(owner, patch)).await,
            Action::ApplyCompanion(request) => {
                let valid = target.valid.as_ref().ok_or(Error::InvalidSpec)?;
                let (companion, installation) = (request.companion, &request.installation);
                let built = companion::build(companion, owner, valid, installation);
                Box::pin(self.ensure_companion(owner, built)).await
            }
            Action::ApplyJob(request) => {
                let valid = target.valid.as_ref().ok_or(Error::InvalidSpec)?;
                let object = job::requested(owner, valid, request);
                Box::pin(self.ensure(owner, object, Existing::Keep)).await
            }
            Action::Delete(object) => self.delete(owner, object).await,
            Action::Publish(event) => {
                self.publish(target, event).await;
                Ok(())
            }
            Action::Count(metric) => {
                let labels = ServiceLabels {
                    namespace: owner.namespace.clone(),
                    name: owner.name.clone(),
                };
                self.metrics.count(&labels, metric);
                Ok(())
            }
        }
    }

    /// Replaces the status. Writes nothing when nothing differs.
    pub async fn put_status(
        &self,
        target: &mut Target,
        status: &MixQuantServiceStatus,
    ) -> Result<(), Error> {
        let new = serde_json::to_value(status).expect("a status is plain data");
        if let Some(written) = self.patch_status(&target.stored, &new).await? {
            target.service.status = Some(status.clone());
            target.service.metadata = written.metadata.clone();
            target.stored = written;
        }
        Ok(())
    }

    /// A merge patch of what differs, with the resourceVersion that was read.
    async fn patch_status(
        &self,
        stored: &DynamicObject,
        new: &Value,
    ) -> Result<Option<DynamicObject>, Error> {
        let old = stored.data.get("status").unwrap_or(&Value::Null);
        let Some(change) = merge_patch(old, new) else {
            return Ok(None);
        };
        let patch = json!({
            "metadata": {"resourceVersion": stored.metadata.resource_version},
            "status": change,
        });
        let name = stored.name_any();
        let namespace = stored.namespace().unwrap_or_default();
        let api = read::services(&self.client, &namespace);
        let parameters = PatchParams {
            field_manager: Some(names::MANAGER.into()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(&patch);
        self.write(
            call("patch status", "MixQuantService", &name),
            api.patch_status(&name, &parameters, &patch),
        )
        .await
        .map(Some)
    }

    /// Says in the status, and once in an Event, that a person has to change something.
    pub async fn stall(
        &self,
        target: &mut Target,
        reason: Reason,
        message: &str,
    ) -> Result<(), Error> {
        let status = refused::status(&target.service, reason, message, clock::now());
        let known = target.service.status.as_ref() == Some(&status);
        self.put_status(target, &status).await?;
        if !known {
            let event = Event {
                warning: true,
                reason,
                note: message.to_owned(),
            };
            self.publish(target, &event).await;
        }
        Ok(())
    }

    /// Says in the status that the stored object is not what this version of the resource allows.
    pub async fn report_unreadable(&self, stored: &DynamicObject, why: &str) -> Result<(), Error> {
        let old = stored.data.get("status").unwrap_or(&Value::Null);
        let message = format!("the stored object does not fit its schema: {why}");
        let generation = stored.metadata.generation;
        let new = refused::raw_status(old, generation, &message, clock::now());
        self.patch_status(stored, &new).await.map(drop)
    }

    /// Makes `desired` true: creates what is missing, repairs what differs (unless it is kept as it is), touches nothing of others.
    async fn ensure<K>(&self, owner: &Owner, desired: K, existing: Existing) -> Result<(), Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + Serialize
            + DeserializeOwned,
    {
        let kind = K::kind(&()).into_owned();
        let name = desired.name_any();
        let api: Api<K> = Api::namespaced(self.client.clone(), &owner.namespace);
        let mut desired = serde_json::to_value(&desired).expect("an object is plain data");
        if let Some(live) = read::get(&api, &name, DEADLINE).await? {
            if !owner.claims(live.meta()) {
                return Err(Error::Foreign { kind, name });
            }
            if live.meta().deletion_timestamp.is_some() {
                return Err(Error::Leaving { kind, name });
            }
            if existing == Existing::Keep {
                return if owner.owns(live.meta()) {
                    Ok(())
                } else {
                    self.give_owner(&api, &live, owner).await
                };
            }
            let stored = serde_json::to_value(&live).expect("an object is plain data");
            if covers(&stored, &desired) {
                return Ok(());
            }
            // Another object of this name is not the one that was looked at.
            desired["metadata"]["uid"] = json!(live.meta().uid);
        }
        info!(kind, name, namespace = owner.namespace, "apply");
        let parameters = PatchParams::apply(names::MANAGER).force();
        let patch = Patch::Apply(&desired);
        self.write(
            call("apply", &kind, &name),
            api.patch(&name, &parameters, &patch),
        )
        .await
        .map(drop)
    }

    async fn ensure_companion(&self, owner: &Owner, built: Built) -> Result<(), Error> {
        let existing = Existing::Repair;
        match built {
            Built::ServiceAccount(object) => self.ensure(owner, *object, existing).await,
            Built::NetworkPolicy(object) => self.ensure(owner, *object, existing).await,
            Built::PodDisruptionBudget(object) => self.ensure(owner, *object, existing).await,
            Built::PodMonitor(object) => self.ensure(owner, *object, existing).await,
            Built::PrometheusRule(object) => self.ensure(owner, *object, existing).await,
        }
    }

    /// Puts the owner back that someone took away, and leaves the rest as it is.
    async fn give_owner<K>(&self, api: &Api<K>, live: &K, owner: &Owner) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let name = live.name_any();
        let patch = json!({"metadata": {
            "uid": live.meta().uid,
            "resourceVersion": live.meta().resource_version,
            "ownerReferences": [owner.reference()],
        }});
        let parameters = PatchParams {
            field_manager: Some(names::MANAGER.into()),
            ..PatchParams::default()
        };
        self.write(
            call("patch", &K::kind(&()), &name),
            api.patch(&name, &parameters, &Patch::Merge(&patch)),
        )
        .await
        .map(drop)
    }

    /// Changes the number of a Deployment's pods and nothing else.
    async fn scale(&self, owner: &Owner, request: &ScaleRequest) -> Result<(), Error> {
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), &owner.namespace);
        let patch =
            json!({"metadata": {"uid": request.uid}, "spec": {"replicas": request.replicas}});
        let parameters = PatchParams {
            field_manager: Some(names::MANAGER.into()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(&patch);
        let call = call("patch", "Deployment", &request.name);
        let scaled = api.patch(&request.name, &parameters, &patch);
        self.write(call, scaled).await.map(drop)
    }

    async fn delete(&self, owner: &Owner, object: &ObjectRef) -> Result<(), Error> {
        let name = &object.object.name;
        match object.object.kind {
            Kind::Job => self.delete_as::<Job>(owner, name, &object.uid).await,
            Kind::ControllerRevision => {
                self.delete_as::<ControllerRevision>(owner, name, &object.uid)
                    .await
            }
            Kind::Deployment => self.delete_as::<Deployment>(owner, name, &object.uid).await,
            Kind::Service => self.delete_as::<Service>(owner, name, &object.uid).await,
            Kind::HTTPRoute => self.delete_as::<HTTPRoute>(owner, name, &object.uid).await,
        }
    }

    /// Gone already, or another object of the name: both are what was asked for.
    async fn delete_as<K>(&self, owner: &Owner, name: &str, uid: &str) -> Result<(), Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let kind = K::kind(&()).into_owned();
        let api: Api<K> = Api::namespaced(self.client.clone(), &owner.namespace);
        let parameters = DeleteParams::background().preconditions(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        });
        info!(kind, name, namespace = owner.namespace, "delete");
        let deleted = self
            .write(call("delete", &kind, name), api.delete(name, &parameters))
            .await;
        match deleted {
            Err(Error::Refused {
                code: 404 | 409, ..
            })
            | Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Publishes an Event. It is for people: a failure is logged and stops nothing.
    pub async fn publish(&self, target: &Target, event: &Event) {
        let reference = target.service.object_ref(&());
        let kube_event = KubeEvent {
            type_: if event.warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: event.reason.as_str().to_owned(),
            note: Some(shortened(&event.note)),
            action: "Reconcile".into(),
            secondary: None,
        };
        // A new recorder for each: one that is kept folds an Event into an earlier one of the same reason and drops its note, the evidence.
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        let published = self
            .write(
                call("publish", "Event", event.reason.as_str()),
                recorder.publish(&kube_event, &reference),
            )
            .await;
        if let Err(error) = published {
            warn!(%error, "an Event was lost");
        }
    }

    /// Writes the Lease, with the resourceVersion that it carries or as a new one. The one write that needs no fence: it opens it.
    pub async fn put_lease(
        &self,
        api: &Api<Lease>,
        lease: &Lease,
        deadline: Duration,
    ) -> Result<Lease, Error> {
        let name = lease.name_any();
        let parameters = PostParams {
            field_manager: Some(names::MANAGER.into()),
            ..PostParams::default()
        };
        if lease.metadata.resource_version.is_none() {
            self.metrics.wrote("create", "Lease");
            return within(
                call("create", "Lease", &name),
                deadline,
                api.create(&parameters, lease),
            )
            .await;
        }
        self.metrics.wrote("replace", "Lease");
        within(
            call("replace", "Lease", &name),
            deadline,
            api.replace(&name, &parameters, lease),
        )
        .await
    }

    async fn write<T>(
        &self,
        call: Call,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let open = self
            .fence
            .remaining(clock::monotonic())
            .ok_or(Error::NotLeading)?;
        self.metrics.wrote(call.verb, &call.kind);
        within(call, (open + GRACE).min(DEADLINE), request).await
    }
}

/// What is done with an object that exists and is ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Existing {
    /// Nothing: it never changes.
    Keep,
    /// It is put back when it differs.
    Repair,
}

fn call(verb: &'static str, kind: &str, name: &str) -> Call {
    Call {
        verb,
        kind: kind.to_owned(),
        name: name.to_owned(),
    }
}

/// The API takes notes of at most 1 KiB.
fn shortened(note: &str) -> String {
    const LIMIT: usize = 1000;
    if note.len() <= LIMIT {
        return note.to_owned();
    }
    format!("{}…", &note[..note.floor_char_boundary(LIMIT)])
}
