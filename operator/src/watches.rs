//! The watches: what wakes a pass. Only metadata is asked for and nothing of it is kept but the list of services.
//!
//! Our own objects and their pods are found by label, the data and claims of users by what the specs refer to.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, Stream, StreamExt, select_all};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::controller::ReconcileRequest;
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use mixquant_crds::{MixQuantService, names};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::build::route::HTTPRoute;
use crate::context::{Context, Referenced, ServiceKey};

/// A service as the watch sees it.
pub type Trigger = PartialObjectMeta<MixQuantService>;
type Request = ReconcileRequest<Trigger>;

/// The queue turns at least this often, which shows that it is alive.
const TICK: Duration = Duration::from_secs(10);

/// The one watch whose kind is no part of every cluster.
const ROUTES: &str = "httproutes";
/// How soon to ask again whether the cluster knows it.
const ASK_AGAIN: Duration = Duration::from_mins(1);

/// The namespace that is watched; `None` for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope(pub Option<String>);

impl Scope {
    fn api<K>(&self, client: &Client) -> Api<PartialObjectMeta<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        match &self.0 {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        }
    }
}

/// Never: a watch that fails says so to [`crate::server::Health`] and goes on.
#[derive(Debug, thiserror::Error)]
#[error("never")]
pub enum Never {}

/// All services, and the requests to pass over them; it ends with `stop`.
pub fn queue(
    context: &Arc<Context>,
    scope: &Scope,
    stop: CancellationToken,
) -> (
    Store<Trigger>,
    impl Stream<Item = Result<Request, Never>> + use<>,
) {
    let (services, requests) = services(context, scope);
    let ours = format!("{}={}", names::LABEL_MANAGED_BY, names::MANAGER);
    let ours = watcher::Config::default().labels(&ours);
    let streams = vec![
        requests,
        owned::<Job>(context, scope, "jobs", ours.clone()),
        owned::<Deployment>(context, scope, "deployments", ours.clone()),
        owned::<ControllerRevision>(context, scope, "controllerrevisions", ours.clone()),
        owned::<Service>(context, scope, "services", ours.clone()),
        owned::<ServiceAccount>(context, scope, "serviceaccounts", ours.clone()),
        owned::<NetworkPolicy>(context, scope, "networkpolicies", ours.clone()),
        owned::<PodDisruptionBudget>(context, scope, "poddisruptionbudgets", ours.clone()),
        owned::<Pod>(context, scope, "pods", ours),
        referenced::<ConfigMap>(context, scope, "configmaps", Referenced::ConfigMap),
        referenced::<PersistentVolumeClaim>(
            context,
            scope,
            "persistentvolumeclaims",
            Referenced::Claim,
        ),
        ticks(context),
    ];
    let routes = context.observer.uses_routes();
    let routes = routes.then(|| routes_of_services(context, scope));
    let streams = streams.into_iter().chain(routes);
    let requests = select_all(streams)
        .map(Ok)
        .take_until(async move { stop.cancelled().await });
    (services, requests)
}

/// Whether the cluster does not know the kind that is watched (any more).
fn is_of_no_kind(error: &watcher::Error) -> bool {
    matches!(
        error,
        watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 404
    )
}

/// One watch without end (but for routes, whose kind may go): failures are reported and waited out with a backoff of its own.
fn events<K>(
    context: &Arc<Context>,
    api: Api<PartialObjectMeta<K>>,
    name: &'static str,
    config: watcher::Config,
) -> impl Stream<Item = Event<PartialObjectMeta<K>>> + Send + use<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
{
    let (context, health) = (Arc::clone(context), Arc::clone(&context.health));
    health.watch_started(name);
    let last = Arc::clone(&context.health);
    watcher(api, config)
        .default_backoff()
        .take_while(move |event| {
            let ends = name == ROUTES && event.as_ref().is_err_and(is_of_no_kind);
            if ends {
                last.watch_ended(name);
            }
            std::future::ready(!ends)
        })
        .filter_map(move |event| {
            let event = match event {
                Ok(event) => {
                    context.observer.known().heard(&event);
                    if matches!(event, Event::InitDone) {
                        health.watch_listed(name);
                    } else {
                        health.watch_progressed(name);
                    }
                    Some(event)
                }
                Err(error) => {
                    warn!(watch = name, %error, "the watch failed and is tried again");
                    health.watch_failed(name, error.to_string());
                    None
                }
            };
            std::future::ready(event)
        })
}

fn touched<K>(event: Event<K>) -> Option<K> {
    match event {
        Event::Apply(object) | Event::Delete(object) | Event::InitApply(object) => Some(object),
        Event::Init | Event::InitDone => None,
    }
}

fn request(key: &ServiceKey) -> Request {
    ObjectRef::new(&key.name).within(&key.namespace).into()
}

/// The services themselves. A service of a new list is stored at once: the queue drops requests for objects that it does not know.
fn services(
    context: &Arc<Context>,
    scope: &Scope,
) -> (Store<Trigger>, BoxStream<'static, Request>) {
    let (reader, mut writer) = store();
    let api = scope.api::<MixQuantService>(&context.client);
    let context = Arc::clone(context);
    let requests = events(
        &context,
        api,
        "mixquantservices",
        watcher::Config::default(),
    )
    .filter_map(move |event| {
        writer.apply_watcher_event(&event);
        if let Event::InitApply(object) = &event {
            writer.apply_watcher_event(&Event::Apply(object.clone()));
        }
        let deleted = matches!(event, Event::Delete(_));
        let key = touched(event).map(|object| ServiceKey {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
        });
        if let Some(key) = key.as_ref().filter(|_| deleted) {
            context.forget(key);
        }
        std::future::ready(key.filter(|_| !deleted).map(|key| request(&key)))
    });
    (reader, requests.boxed())
}

/// Objects that carry a service's name as a label.
fn owned<K>(
    context: &Arc<Context>,
    scope: &Scope,
    name: &'static str,
    config: watcher::Config,
) -> BoxStream<'static, Request>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Send
        + Sync
        + 'static,
{
    let api = scope.api::<K>(&context.client);
    events(context, api, name, config)
        .filter_map(move |event| {
            let request = touched(event).and_then(|object| {
                let labels: &BTreeMap<String, String> = object.labels();
                let key = ServiceKey {
                    namespace: object.namespace()?,
                    name: labels.get(names::LABEL_SERVICE)?.clone(),
                };
                debug!(
                    watch = name,
                    object = object.name_any(),
                    service = key.name,
                    "woken"
                );
                Some(request(&key))
            });
            std::future::ready(request)
        })
        .boxed()
}

/// Objects of users that specs refer to by name.
fn referenced<K>(
    context: &Arc<Context>,
    scope: &Scope,
    name: &'static str,
    reference: fn(String) -> Referenced,
) -> BoxStream<'static, Request>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Send
        + Sync
        + 'static,
{
    let api = scope.api::<K>(&context.client);
    let memory = Arc::clone(context);
    events(context, api, name, watcher::Config::default())
        .flat_map(move |event| {
            let keys = touched(event).map_or_else(Vec::new, |object| {
                let namespace = object.namespace().unwrap_or_default();
                memory.services_of(&namespace, &reference(object.name_any()))
            });
            futures::stream::iter(keys.into_iter().map(|key| request(&key)))
        })
        .boxed()
}

/// Routes: from the moment on that the cluster knows the kind, and until it does not know it any more.
fn routes_of_services(context: &Arc<Context>, scope: &Scope) -> BoxStream<'static, Request> {
    let (context, scope) = (Arc::clone(context), scope.clone());
    futures::stream::unfold(false, move |again| {
        let (context, scope) = (Arc::clone(&context), scope.clone());
        async move {
            if again {
                tokio::time::sleep(ASK_AGAIN).await;
            }
            while !context.observer.knows_routes().await {
                tokio::time::sleep(ASK_AGAIN).await;
            }
            let watch = referenced::<HTTPRoute>(&context, &scope, ROUTES, Referenced::Route);
            Some((watch, true))
        }
    })
    .flatten()
    .boxed()
}

/// No request ever, only a sign of life.
fn ticks(context: &Arc<Context>) -> BoxStream<'static, Request> {
    let health = Arc::clone(&context.health);
    health.controller_ticked();
    futures::stream::unfold(health, |health| async move {
        tokio::time::sleep(TICK).await;
        health.controller_ticked();
        Some((None, health))
    })
    .filter_map(std::future::ready)
    .boxed()
}
