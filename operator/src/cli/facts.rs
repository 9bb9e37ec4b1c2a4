//! Reads what a question is about: the service, its revisions, Deployments and Events. Decides nothing; only what `kubectl` shows too.

use anyhow::{Context as _, anyhow};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use mixquant_crds::{MixQuantService, names};
use serde::Serialize;

use super::connect::Connection;
use crate::build::deployment::frozen;
use crate::error::{Call, Error};
use crate::observed::FrozenRevision;
use crate::read::{self, DEADLINE};

/// Everything that is stored of one service.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The service.
    pub service: MixQuantService,
    /// Its revisions, newest first.
    pub revisions: Vec<Kept>,
    /// The pods of its revisions.
    pub pods: Vec<Pods>,
    /// What was told of it, oldest first.
    pub events: Vec<Told>,
}

/// A revision that is kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// Its place in the order.
    pub number: i64,
    /// When it was made.
    pub created_at: Option<Timestamp>,
    /// What it is.
    #[serde(flatten)]
    pub frozen: FrozenRevision,
}

/// How many pods a revision has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pods {
    /// The revision.
    pub revision: String,
    /// That should be.
    pub wanted: i32,
    /// That are ready.
    pub ready: i32,
}

/// An Event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Told {
    /// When it was last told.
    pub at: Option<Timestamp>,
    /// It is a Warning.
    pub warning: bool,
    /// In one word.
    pub reason: String,
    /// The evidence.
    pub message: String,
}

impl Facts {
    /// A revision's pods.
    pub fn pods_of(&self, revision: &str) -> Option<&Pods> {
        self.pods.iter().find(|pods| pods.revision == revision)
    }

    /// A revision that is kept.
    pub fn kept(&self, revision: &str) -> Option<&Kept> {
        let mut all = self.revisions.iter();
        all.find(|kept| kept.frozen.revision == revision)
    }
}

/// Everything that is stored of the service `name`.
pub async fn read(connection: &Connection, name: &str) -> anyhow::Result<Facts> {
    let service = service(connection, name).await?;
    let namespace = connection.namespace.as_str();
    let ours = format!(
        "{}={name},{}={}",
        names::LABEL_SERVICE,
        names::LABEL_MANAGED_BY,
        names::MANAGER
    );
    let api = || connection.client.clone();
    let revisions = Api::<ControllerRevision>::namespaced(api(), namespace);
    let deployments = Api::<Deployment>::namespaced(api(), namespace);
    let (revisions, deployments, events) = futures::try_join!(
        read::list(&revisions, &ours),
        read::list(&deployments, &ours),
        events(connection, name)
    )?;
    let mut revisions: Vec<Kept> = revisions.iter().filter_map(kept).collect();
    revisions.sort_by_key(|kept| std::cmp::Reverse(kept.number));
    let mut told: Vec<Told> = events.into_iter().map(told_by).collect();
    told.sort_by_key(|told| told.at);
    Ok(Facts {
        pods: deployments.iter().filter_map(pods).collect(),
        service,
        revisions,
        events: told,
    })
}

/// The service `name`.
///
/// # Errors
/// When it is not there or cannot be read; the message says what to try.
pub async fn service(connection: &Connection, name: &str) -> anyhow::Result<MixQuantService> {
    let namespace = &connection.namespace;
    let api: Api<MixQuantService> = Api::namespaced(connection.client.clone(), namespace);
    match read::get(&api, name, DEADLINE).await {
        Ok(Some(service)) => Ok(service),
        Ok(None) => {
            // An unknown resource is a 404 as well.
            services(connection, Some(namespace)).await?;
            Err(anyhow!(
                "no MixQuantService `{name}` in namespace `{namespace}`: `kubectl mixquant get -A` lists what there is"
            ))
        }
        Err(error) => Err(told(connection, error)),
    }
}

/// The services of a namespace, or of all; by namespace and name.
pub async fn services(
    connection: &Connection,
    namespace: Option<&str>,
) -> anyhow::Result<Vec<MixQuantService>> {
    let client = connection.client.clone();
    let api: Api<MixQuantService> = match namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    };
    let call = Call {
        verb: "list",
        kind: "MixQuantService".into(),
        name: String::new(),
    };
    let list = read::within(call, DEADLINE, api.list(&ListParams::default())).await;
    let mut services = match list {
        Err(Error::Refused { code: 404, .. }) => {
            return Err(anyhow!(
                "this cluster knows no MixQuantService: install the chart mixquant-operator ({})",
                connection.server
            ));
        }
        other => other.map_err(|error| told(connection, error))?.items,
    };
    services.sort_by_key(|service| (service.namespace(), service.name_any()));
    Ok(services)
}

/// An error as a person should see it: with the cluster when it cannot be reached, and what to try.
pub fn told(connection: &Connection, error: Error) -> anyhow::Error {
    match &error {
        Error::Unreachable { source, .. } if matches!(**source, kube::Error::SerdeError(_)) => {
            anyhow!(error).context(
                "the stored object is not of this program's version: use that of the operator",
            )
        }
        Error::Unreachable { .. } | Error::Timeout { .. } => anyhow!(error).context(format!(
            "cannot ask the cluster at {}: check --context, --kubeconfig and the network",
            connection.server
        )),
        Error::Refused {
            code: 401 | 403, ..
        } => anyhow!(error)
            .context("the cluster refuses: ask for this right, or use another context"),
        _ => anyhow!(error),
    }
}

async fn events(connection: &Connection, name: &str) -> Result<Vec<Event>, Error> {
    let api: Api<Event> = Api::namespaced(connection.client.clone(), &connection.namespace);
    let fields = format!("involvedObject.kind=MixQuantService,involvedObject.name={name}");
    let call = Call {
        verb: "list",
        kind: "Event".into(),
        name: name.to_owned(),
    };
    let parameters = ListParams::default().fields(&fields);
    let listed = read::within(call, DEADLINE, api.list(&parameters)).await;
    match listed {
        Ok(list) => Ok(list.items),
        // Events only illustrate: without the right to read them the rest is still true.
        Err(Error::Refused { code: 403, .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// A ControllerRevision; `None` when it cannot be read.
pub fn kept(object: &ControllerRevision) -> Option<Kept> {
    Some(Kept {
        number: object.revision,
        created_at: object.creation_timestamp().map(|time| time.0),
        frozen: frozen(object).ok()?,
    })
}

fn pods(object: &Deployment) -> Option<Pods> {
    let status = object.status.clone().unwrap_or_default();
    Some(Pods {
        revision: object.labels().get(names::LABEL_REVISION)?.clone(),
        wanted: object.spec.as_ref()?.replicas.unwrap_or(1),
        ready: status.ready_replicas.unwrap_or(0),
    })
}

/// The Event as it is told. New ones carry their time in `eventTime`, old ones in `lastTimestamp`, repeated ones in their series.
pub fn told_by(event: Event) -> Told {
    let series = event.series.and_then(|series| series.last_observed_time);
    let at = series.or(event.event_time).map(|time| time.0);
    Told {
        at: at.or(event.last_timestamp.map(|time| time.0)),
        warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.unwrap_or_default(),
        message: event.message.unwrap_or_default(),
    }
}

/// Reads a file, or standard input for `-`.
pub fn file(path: &std::path::Path) -> anyhow::Result<String> {
    /// A manifest is text written by people.
    const LIMIT: u64 = 4 << 20;
    let mut text = String::new();
    let what = || format!("cannot read {}", path.display());
    let mut reader: Box<dyn std::io::Read> = if path.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(path).with_context(what)?)
    };
    let limited = &mut std::io::Read::take(&mut reader, LIMIT + 1);
    let read = std::io::Read::read_to_string(limited, &mut text).with_context(what)?;
    anyhow::ensure!(
        u64::try_from(read).is_ok_and(|read| read <= LIMIT),
        "{} is larger than {} MiB: that is no manifest",
        path.display(),
        LIMIT >> 20
    );
    Ok(text)
}
