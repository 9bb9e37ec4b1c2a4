//! Leader election by a Lease. Of all copies of the operator one writes; `Fence` is what its writes must pass.
//!
//! Every write of the Lease carries the resourceVersion it was decided on. A candidate trusts its own monotonic clock only: a holder is gone
//! when its record has not changed for the lease's duration. A leader that cannot renew stops writing 5 s before anyone may take over.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::apply::Writer;
use crate::clock;
use crate::error::Error;
use crate::server::Health;

/// Others may take over so long after the last renewal that they saw.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A leader that has not renewed for so long writes nothing more.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Time between tries: of a candidate, and of a leader whose renewal failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// One call about the Lease.
const CALL_DEADLINE: Duration = Duration::from_secs(4);

/// Until when this process may write. Cheap to clone; closed at the start.
#[derive(Clone, Default)]
pub struct Fence(Arc<Mutex<Option<Instant>>>);

impl Fence {
    /// A fence that is always open: for one process without election, and for tests.
    pub fn open() -> Self {
        let forever = clock::monotonic() + Duration::from_hours(100 * 365 * 24);
        Self(Arc::new(Mutex::new(Some(forever))))
    }

    /// How long a write may still take; `None` when this process may not write.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        let until = *self.0.lock().expect("no holder of this lock panics");
        until?
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    fn set(&self, until: Option<Instant>) {
        *self.0.lock().expect("no holder of this lock panics") = until;
    }
}

/// Why an election ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to stop; the Lease is released.
    Stopped,
    /// Somebody else leads, or the Lease could not be renewed in time.
    Lost,
}

/// What is known of the holder, and since when by the own clock.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    record: LeaseSpec,
    since: Instant,
}

/// What to do with the Lease now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Create,
    Take,
    Renew,
    Wait,
}

/// Decides from what is stored, who asks and how long the record has not changed.
fn decide(stored: Option<&LeaseSpec>, me: &str, leading: bool, unchanged: Duration) -> Step {
    let Some(record) = stored else {
        return Step::Create;
    };
    match record.holder_identity.as_deref() {
        None | Some("") => Step::Take,
        Some(holder) if holder == me && leading => Step::Renew,
        // The same pod with a new container: the old process is gone.
        Some(holder) if holder == me => Step::Take,
        Some(_) if unchanged >= duration_of(record) => Step::Take,
        Some(_) => Step::Wait,
    }
}

fn duration_of(record: &LeaseSpec) -> Duration {
    let seconds = record.lease_duration_seconds.unwrap_or_default();
    u64::try_from(seconds).map_or(LEASE_DURATION, Duration::from_secs)
}

/// One process's part in the election.
pub struct Election {
    api: Api<Lease>,
    writer: Writer,
    fence: Fence,
    health: Arc<Health>,
    namespace: String,
    name: String,
    identity: String,
    seen: Option<Seen>,
    held: Option<Lease>,
}

impl Election {
    /// A candidate called `identity` for the Lease `namespace`/`name`. `fence` opens when it leads.
    pub fn new(
        client: &Client,
        (namespace, name): (&str, &str),
        identity: String,
        (writer, fence): (Writer, Fence),
        health: Arc<Health>,
    ) -> Self {
        Self {
            api: Api::namespaced(client.clone(), namespace),
            writer,
            fence,
            health,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity,
            seen: None,
            held: None,
        }
    }

    /// Waits until this process leads; `false` when it was asked to stop before.
    pub async fn acquire(&mut self, stop: &CancellationToken) -> bool {
        info!(lease = %self.name, identity = %self.identity, "waiting for the lease");
        loop {
            match self.attempt().await {
                Ok(()) if self.held.is_some() => {
                    info!(lease = %self.name, identity = %self.identity, "leading");
                    self.health.leading(true);
                    return true;
                }
                Ok(()) => {}
                Err(error) => {
                    warn!(%error, "cannot take part in the election; nothing is reconciled until this is cured");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return false,
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
            }
        }
    }

    /// Keeps the Lease until `stop`, then leaves it held: [`Self::release`] is called when the last write is done.
    pub async fn hold(&mut self, stop: &CancellationToken) -> Ended {
        let mut pause = RENEW_INTERVAL;
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ended::Stopped,
                () = tokio::time::sleep(pause) => {}
            }
            pause = match self.attempt().await {
                Ok(()) => RENEW_INTERVAL,
                Err(error) => {
                    warn!(%error, "the lease was not renewed");
                    RETRY_INTERVAL
                }
            };
            if self.held.is_none() || self.fence.remaining(clock::monotonic()).is_none() {
                self.fence.set(None);
                self.health.leading(false);
                return Ended::Lost;
            }
        }
    }

    /// Gives the Lease away, so that a successor need not wait. A failure only costs the successor that wait.
    pub async fn release(&mut self) {
        self.fence.set(None);
        self.health.leading(false);
        let Some(mut lease) = self.held.take() else {
            return;
        };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(MicroTime(clock::now()));
        }
        match self
            .writer
            .put_lease(&self.api, &lease, CALL_DEADLINE)
            .await
        {
            Ok(_) => info!(lease = %self.name, "released the lease"),
            Err(error) => warn!(%error, "the lease was not released"),
        }
    }

    /// One look at the Lease and at most one write.
    async fn attempt(&mut self) -> Result<(), Error> {
        let started = clock::monotonic();
        let stored = match self.held.clone() {
            Some(held) => Some(held),
            None => self.read().await?,
        };
        let record = stored.as_ref().and_then(|lease| lease.spec.as_ref());
        let unchanged = self.observe(record, started);
        let step = decide(record, &self.identity, self.held.is_some(), unchanged);
        if step == Step::Wait {
            self.health.election_ticked();
            return Ok(());
        }
        let lease = self.desired(stored, step);
        match self
            .writer
            .put_lease(&self.api, &lease, CALL_DEADLINE)
            .await
        {
            Ok(written) => {
                self.held = Some(written);
                self.fence.set(Some(started + RENEW_DEADLINE));
                self.health.election_ticked();
                Ok(())
            }
            Err(error) if error.is_conflict() => self.after_conflict().await,
            Err(error) => Err(error),
        }
    }

    /// Somebody wrote in between. It may have been this process, whose answer got lost: then the record is its own.
    async fn after_conflict(&mut self) -> Result<(), Error> {
        let was_held = self.held.is_some();
        let stored = self.read().await?;
        let mine = stored
            .as_ref()
            .and_then(|lease| lease.spec.as_ref())
            .is_some_and(|spec| spec.holder_identity.as_deref() == Some(&self.identity));
        self.held = stored.filter(|_| was_held && mine);
        Ok(())
    }

    async fn read(&self) -> Result<Option<Lease>, Error> {
        crate::read::get(&self.api, &self.name, CALL_DEADLINE).await
    }

    /// How long the record has been as it is, by the own clock.
    fn observe(&mut self, record: Option<&LeaseSpec>, now: Instant) -> Duration {
        let Some(record) = record else {
            self.seen = None;
            return Duration::ZERO;
        };
        match &self.seen {
            Some(seen) if seen.record == *record => now.saturating_duration_since(seen.since),
            _ => {
                self.seen = Some(Seen {
                    record: record.clone(),
                    since: now,
                });
                Duration::ZERO
            }
        }
    }

    fn desired(&self, stored: Option<Lease>, step: Step) -> Lease {
        let now = MicroTime(clock::now());
        let mut lease = stored.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let spec = lease.spec.get_or_insert_default();
        if step != Step::Renew {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(-1).saturating_add(1));
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds =
            Some(i32::try_from(LEASE_DURATION.as_secs()).expect("15 fits"));
        spec.renew_time = Some(now);
        lease
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_by(holder: &str) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_lease_that_nobody_holds_is_taken_at_once() {
        assert_eq!(decide(None, "me", false, seconds(0)), Step::Create);
        assert_eq!(
            decide(Some(&held_by("")), "me", false, seconds(0)),
            Step::Take
        );
        let empty = LeaseSpec::default();
        assert_eq!(decide(Some(&empty), "me", false, seconds(0)), Step::Take);
    }

    #[test]
    fn another_holder_is_waited_for_until_its_record_has_not_changed_for_the_duration() {
        let other = held_by("other");
        assert_eq!(decide(Some(&other), "me", false, seconds(14)), Step::Wait);
        assert_eq!(decide(Some(&other), "me", false, seconds(15)), Step::Take);
    }

    #[test]
    fn a_restarted_container_of_the_same_pod_does_not_wait_for_itself() {
        assert_eq!(
            decide(Some(&held_by("me")), "me", false, seconds(0)),
            Step::Take
        );
        assert_eq!(
            decide(Some(&held_by("me")), "me", true, seconds(0)),
            Step::Renew
        );
    }

    #[test]
    fn a_nonsense_duration_does_not_make_everyone_a_leader() {
        let mut record = held_by("other");
        record.lease_duration_seconds = Some(-1);
        assert_eq!(decide(Some(&record), "me", false, seconds(1)), Step::Wait);
    }

    #[test]
    fn a_fence_is_closed_until_opened_and_closes_by_time_alone() {
        let fence = Fence::default();
        let now = clock::monotonic();
        assert_eq!(fence.remaining(now), None);
        fence.set(Some(now + seconds(10)));
        assert_eq!(fence.remaining(now + seconds(4)), Some(seconds(6)));
        assert_eq!(fence.remaining(now + seconds(10)), None);
        assert_eq!(fence.remaining(now + seconds(60)), None);
    }
}
