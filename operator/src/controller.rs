//! Watches, and one pass over one service: observe, validate, scrape, plan, apply.
//!
//! Watches ask for metadata only and wake passes; no pass believes them, it reads what it needs. Each has its own backoff, so that one that
//! fails starves no other. At most four services are passed over at a time, one never twice at once.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::{Action, Config};
use mixquant_crds::status::Reason;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, info, info_span, warn};

use crate::action::Plan;
use crate::apply::Target;
use crate::build::deployment;
use crate::clock;
use crate::context::{Context, ServiceKey};
use crate::error::Error;
use crate::metrics::Shown;
use crate::observed::ObservedPod;
use crate::plan::{plan, plan_invalid};
use crate::read;
use crate::samples::Samples;
use crate::validate::{ValidService, validate};
use crate::watches::{self, Scope, Trigger};

/// Passes at a time.
const CONCURRENCY: u16 = 4;
/// A whole pass; each of its calls has a shorter deadline.
const PASS_DEADLINE: Duration = Duration::from_mins(2);
/// At rest a service is looked at again after this time, in case that no watch told of a change.
const RESYNC: Duration = Duration::from_mins(5);

/// Reconciles until `stop`; returns when the passes that run then have ended.
pub async fn run(context: Arc<Context>, scope: Scope, stop: CancellationToken) {
    let (store, queue) = watches::queue(&context, &scope, stop);
    info!(?scope, "reconciling");
    let config = Config::default().concurrency(CONCURRENCY);
    let passes = kube::runtime::controller::applier(
        |object, context| Box::pin(reconcile(object, context)),
        error_policy,
        context,
        store,
        queue,
        config,
    );
    futures::StreamExt::for_each(passes, |result| async move {
        match result {
            Ok((service, _)) => debug!(%service, "done"),
            // `reconcile` has logged its own.
            Err(error) => debug!(%error, "a pass ended early"),
        }
    })
    .await;
}

fn key_of(object: &Trigger) -> ServiceKey {
    ServiceKey {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
    }
}

async fn reconcile(object: Arc<Trigger>, context: Arc<Context>) -> Result<Action, Error> {
    let key = key_of(&object);
    let span = info_span!("pass", namespace = %key.namespace, name = %key.name);
    let started = clock::monotonic();
    // One service that makes the code panic must not stop the others.
    let pass = Box::pin(pass(&key, &context)).instrument(span.clone());
    let pass = AssertUnwindSafe(pass).catch_unwind();
    let result = match tokio::time::timeout(PASS_DEADLINE, pass).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(Error::Panicked),
        Err(_) => Err(Error::TooLong(PASS_DEADLINE)),
    };
    let _entered = span.enter();
    let took = clock::monotonic().saturating_duration_since(started);
    context
        .metrics
        .reconciled(took, result.as_ref().err().map(Error::reason));
    match &result {
        Ok(_) => context.succeeded(&key),
        Err(error) if error.is_conflict() => debug!(%error, "once more"),
        Err(error) => warn!(%error, "will be tried again"),
    }
    result
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the queue hands over what it owns"
)]
fn error_policy(object: Arc<Trigger>, _: &Error, context: Arc<Context>) -> Action {
    Action::requeue(context.failed(&key_of(&object)))
}

async fn pass(key: &ServiceKey, context: &Context) -> Result<Action, Error> {
    let Some(stored) = read::service(&context.client, &key.namespace, &key.name).await? else {
        context.forget(key);
        return Ok(Action::await_change());
    };
    let uid = stored.metadata.uid.as_deref().unwrap_or_default();
    if stored.metadata.deletion_timestamp.is_some() || context.is_leaving(key, uid) {
        // Everything that was made carries an owner reference: the garbage collector removes it.
        return Ok(Action::await_change());
    }
    let mut target = match Target::read(stored) {
        Ok(target) => target,
        Err((stored, why)) => {
            context.writer.report_unreadable(&stored, &why).await?;
            return Err(Error::Unreadable(why));
        }
    };
    let uid = target.owner.uid.clone();
    context.remember_references(key, &uid, &target.service.spec);
    let done = advance(context, &mut target).await;
    if let Err(Error::NamespaceLeaving { .. }) = &done {
        context.leaves(key);
        return Ok(Action::await_change());
    }
    if let Err(error) = &done
        && error.is_refusal()
    {
        let message = error.to_string();
        let reason = Reason::ApplyFailed;
        context.writer.stall(&mut target, reason, &message).await?;
    }
    if let Some(status) = &target.service.status {
        let phase = status.phase.map(|phase| format!("{phase:?}"));
        let weight = status.rollout.as_ref().map_or(0, |rollout| rollout.weight);
        let scaling = status.scaling.as_ref();
        let shown = Shown {
            phase: phase.unwrap_or_else(|| "Unknown".into()),
            weight,
            desired: scaling.map_or(target.service.spec.replicas, |chosen| {
                chosen.desired_replicas
            }),
        };
        context.show(key, &shown);
    }
    done.map(Action::requeue)
}

/// Thinks and does; returns when to look again.
async fn advance(context: &Context, target: &mut Target) -> Result<Duration, Error> {
    let Thought { plan, valid, pods } = think(context, target).await?;
    target.valid = valid;
    let pause = pause(&plan, clock::now());
    let uid = &target.owner.uid;
    let scraper = &context.scraper;
    scraper.set_windows(uid, plan.window.as_ref(), plan.load.as_ref());
    let (window, probe) = (plan.window.as_ref(), plan.probe.as_ref());
    context.prober.set(uid, window, probe, &pods);
    context.writer.execute(target, &plan.actions).await?;
    Ok(pause)
}

/// A pass's plan, what it was made for, and the pods that were there.
struct Thought {
    plan: Plan,
    valid: Option<ValidService>,
    pods: Vec<ObservedPod>,
}

/// The pure middle, and the reading that it needs.
async fn think(context: &Context, target: &Target) -> Result<Thought, Error> {
    let mut observed = context
        .observer
        .observe(&target.owner, &target.service)
        .await?;
    let valid = match validate(&target.service) {
        Ok(valid) => valid,
        Err(problem) => {
            return Ok(Thought {
                plan: plan_invalid(&observed, &problem, clock::now()),
                valid: None,
                pods: observed.pods,
            });
        }
    };
    let uid = &target.owner.uid;
    let samples = Samples {
        probed: context.prober.probed(uid),
        ..context.scraper.sample(uid, &observed.pods).await
    };
    let now = clock::now();
    let mut made = plan(&valid, &observed, &samples, now, deployment::template);
    if let Some(asks) = &made.asks_room {
        observed.room = context.observer.room(&target.owner, asks).await?;
        made = plan(&valid, &observed, &samples, now, deployment::template);
    }
    Ok(Thought {
        plan: made,
        valid: Some(valid),
        pods: observed.pods,
    })
}

/// When the next pass is due. A new window's baselines are taken as soon as it opens.
fn pause(plan: &Plan, now: Timestamp) -> Duration {
    let opens = plan
        .window
        .as_ref()
        .and_then(|window| Duration::try_from(window.since.duration_since(now)).ok())
        .filter(|wait| !wait.is_zero());
    [plan.requeue, opens, Some(RESYNC)]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(RESYNC)
}
