//! What every pass shares: the client's readers and the one writer, metrics and health, and the little that is remembered between passes.
//!
//! All of it is soft: a new process starts with none of it and comes to the same decisions.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kube::Client;
use mixquant_crds::MixQuantServiceSpec;

use crate::apply::Writer;
use crate::metrics::{Metrics, ServiceLabels, Shown};
use crate::observe::Observer;
use crate::probe::Prober;
use crate::scrape::Scraper;
use crate::server::Health;
use crate::validate::traffic::routing;

/// The longest pause after passes that failed in a row.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// A service's namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl ServiceKey {
    /// As metrics want it.
    pub fn labels(&self) -> ServiceLabels {
        ServiceLabels {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

/// Something that a spec names and that belongs to the user.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Referenced {
    /// A ConfigMap with data.
    ConfigMap(String),
    /// A claim.
    Claim(String),
    /// A route of a gateway: the user's, or the service's own.
    Route(String),
}

/// What is remembered of one service.
#[derive(Debug, Default)]
struct Memory {
    uid: String,
    references: BTreeSet<Referenced>,
    phase: Option<String>,
    failures: u32,
    /// Its namespace is being deleted, which nothing can undo.
    leaving: bool,
}

/// Shared by all passes.
pub struct Context {
    /// Reads services.
    pub client: Client,
    /// Reads the rest.
    pub observer: Observer,
    /// Reads pods' metrics.
    pub scraper: Scraper,
    /// Has pods answer probes.
    pub prober: Prober,
    /// Writes.
    pub writer: Writer,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Says how the loops are.
    pub health: Arc<Health>,
    memory: Mutex<HashMap<ServiceKey, Memory>>,
}

impl Context {
    /// A context that remembers nothing.
    pub fn new(
        (client, observer): (Client, Observer),
        writer: Writer,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
    ) -> Self {
        Self {
            observer,
            scraper: Scraper::default(),
            prober: Prober::default(),
            client,
            writer,
            metrics,
            health,
            memory: Mutex::default(),
        }
    }

    fn remember<T>(&self, key: &ServiceKey, change: impl FnOnce(&mut Memory) -> T) -> T {
        let mut memory = self.memory.lock().expect("no holder of this lock panics");
        change(memory.entry(key.clone()).or_default())
    }

    /// What `spec` refers to: a change there wakes this service.
    pub fn remember_references(&self, key: &ServiceKey, uid: &str, spec: &MixQuantServiceSpec) {
        let data = [&spec.calibration.dataset, &spec.verification.dataset]
            .map(|dataset| Referenced::ConfigMap(dataset.config_map.name.clone()));
        let artifacts = spec.artifacts.persistent_volume_claim.claim_name.as_str();
        let claims = spec.model.source.claim_name().into_iter();
        let claims = claims.chain([artifacts]);
        let claims = claims.map(|name| Referenced::Claim(name.to_owned()));
        let routing = routing(&spec.traffic);
        let route = routing.route(&key.name);
        let route = route.map(|name| Referenced::Route(name.to_owned()));
        self.remember(key, |memory| {
            memory.leaving &= memory.uid == uid;
            uid.clone_into(&mut memory.uid);
            memory.references = data.into_iter().chain(claims).chain(route).collect();
        });
    }

    /// The services that refer to an object.
    pub fn services_of(&self, namespace: &str, referenced: &Referenced) -> Vec<ServiceKey> {
        let memory = self.memory.lock().expect("no holder of this lock panics");
        let mut keys: Vec<_> = memory
            .iter()
            .filter(|(key, memory)| {
                key.namespace == namespace && memory.references.contains(referenced)
            })
            .map(|(key, _)| key.clone())
            .collect();
        keys.sort();
        keys
    }

    /// Shows where a service is in the metrics.
    pub fn show(&self, key: &ServiceKey, shown: &Shown) {
        let before = self.remember(key, |memory| memory.phase.replace(shown.phase.clone()));
        self.metrics.show(&key.labels(), before.as_deref(), shown);
    }

    /// A service is gone.
    pub fn forget(&self, key: &ServiceKey) {
        let memory = self
            .memory
            .lock()
            .expect("no holder of this lock panics")
            .remove(key);
        if let Some(memory) = memory {
            self.scraper.set_windows(&memory.uid, None, None);
            self.prober.set(&memory.uid, None, None, &[]);
            self.metrics.forget(&key.labels(), memory.phase.as_deref());
        }
    }

    /// The service's namespace is being deleted: there is nothing left to do for it.
    pub fn leaves(&self, key: &ServiceKey) {
        self.remember(key, |memory| memory.leaving = true);
    }

    /// Whether that was said of this service (and not of one that had its name before).
    pub fn is_leaving(&self, key: &ServiceKey, uid: &str) -> bool {
        self.remember(key, |memory| memory.leaving && memory.uid == uid)
    }

    /// A pass ended well.
    pub fn succeeded(&self, key: &ServiceKey) {
        self.remember(key, |memory| memory.failures = 0);
    }

    /// A pass failed: how long to wait before the next, longer each time in a row and per service.
    pub fn failed(&self, key: &ServiceKey) -> Duration {
        let failures = self.remember(key, |memory| {
            memory.failures = memory.failures.saturating_add(1);
            memory.failures
        });
        backoff(failures)
    }
}

/// 0.25 s, doubled at each failure in a row, at most [`MAX_BACKOFF`].
fn backoff(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(10);
    (Duration::from_millis(250) * 2_u32.pow(doublings)).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_and_is_bounded() {
        assert_eq!(backoff(1), Duration::from_millis(250));
        assert_eq!(backoff(3), Duration::from_secs(1));
        assert_eq!(backoff(9), MAX_BACKOFF);
        assert_eq!(backoff(u32::MAX), MAX_BACKOFF);
    }
}
