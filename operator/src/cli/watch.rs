//! Waits for changes of services: `get -w` and `status --timeout`. Only the shell's part; what a change means is decided elsewhere.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use futures::stream::{BoxStream, Stream, StreamExt};
use kube::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use mixquant_crds::MixQuantService;

use super::connect::Connection;
use super::facts;
use super::standing::{Standing, standing};
use crate::clock;

/// Services as they change, beginning with those that are there; a deleted one comes once more as it was.
///
/// A watch that breaks is begun again; only a refusal ends it.
pub fn changes<'a>(
    connection: &Connection,
    namespace: Option<&str>,
    name: Option<&str>,
) -> BoxStream<'a, anyhow::Result<MixQuantService>> {
    let client = connection.client.clone();
    let api: Api<MixQuantService> = match namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    };
    let config = match name {
        Some(name) => watcher::Config::default().fields(&format!("metadata.name={name}")),
        None => watcher::Config::default(),
    };
    flattened(watcher(api, config).default_backoff()).boxed()
}

fn flattened(
    events: impl Stream<Item = watcher::Result<Event<MixQuantService>>>,
) -> impl Stream<Item = anyhow::Result<MixQuantService>> {
    events.filter_map(|event| {
        std::future::ready(match event {
            Ok(Event::Apply(object) | Event::Delete(object) | Event::InitApply(object)) => {
                Some(Ok(object))
            }
            Err(error) if is_final(&error) => Some(Err(anyhow!("the watch was refused: {error}"))),
            Ok(Event::Init | Event::InitDone) | Err(_) => None,
        })
    })
}

/// Whether trying again is of no use.
fn is_final(error: &watcher::Error) -> bool {
    let (watcher::Error::InitialListFailed(source) | watcher::Error::WatchStartFailed(source)) =
        error
    else {
        return false;
    };
    matches!(source, kube::Error::Api(status) if matches!(status.code, 401 | 403 | 404))
}

/// Waits until nothing is under way any more, at most `timeout`; returns where the service stands then.
pub async fn settled(
    connection: &Connection,
    name: &str,
    (timeout, pause_is_good): (Option<Duration>, bool),
) -> anyhow::Result<Standing> {
    let now = standing(&facts::service(connection, name).await?, clock::now());
    let Some(timeout) = timeout.filter(|_| !now.is_final(pause_is_good)) else {
        return Ok(now);
    };
    let (mut last, deadline) = (now, clock::monotonic() + timeout);
    let mut changes = changes(connection, Some(&connection.namespace), Some(name));
    while let Some(changed) = next_before(&mut changes, deadline).await {
        let changed = changed?;
        anyhow::ensure!(
            changed.metadata.deletion_timestamp.is_none(),
            "`{name}` is being deleted"
        );
        last = standing(&changed, clock::now());
        if last.is_final(pause_is_good) {
            break;
        }
    }
    Ok(last)
}

/// The next of `stream`, or nothing at the deadline.
pub async fn next_before<T>(
    stream: &mut (impl Stream<Item = T> + Unpin),
    deadline: Instant,
) -> Option<T> {
    let left = deadline.saturating_duration_since(clock::monotonic());
    tokio::time::timeout(left, stream.next())
        .await
        .ok()
        .flatten()
}
