//! The shell in small: observe, plan, act in order, die when told to. It keeps to the contract of `action.rs`.

use std::time::Duration;

use mixquant_crds::Digest;
use mixquant_operator::action::{Action, Plan, Window};
use mixquant_operator::observed::Observed;
use mixquant_operator::plan::plan;
use mixquant_operator::validate::{ValidService, validate};

use super::cluster::{Cluster, moment, second};
use super::invariants::Done;
use super::traffic::Scraper;

/// How often something missing is looked for, and how often the load.
const LOOKS: [Duration; 2] = [Duration::from_mins(1), Duration::from_secs(15)];
/// Looks at a load that stays as it is, after which nothing more follows from it.
const SETTLED: u32 = 10;

/// The operator's process.
#[derive(Debug, Default)]
pub struct Operator {
    scraper: Scraper,
    requeue: Option<i64>,
    /// Passes in a row that had nothing to do and did not wait for a moment of their own.
    idle: u32,
    /// Change of the cluster that the newest pass has seen.
    seen: Option<u64>,
    /// Dies after so many actions of the next pass that has any.
    pub crash: Option<usize>,
    /// Sees children of so many changes ago in the next pass.
    pub stale: usize,
    /// Which operator's templates.
    version: u8,
    valid: Option<(i64, ValidService)>,
}

fn template_1(
    service: &ValidService,
    _: &Digest,
    artifact: &Digest,
) -> k8s_openapi::api::core::v1::PodTemplateSpec {
    serde_json::from_value(serde_json::json!({
        "spec": {"containers": [{"name": "engine", "image": service.engine.image, "args": [artifact.hex()],
            "resources": service.engine.resources}]}
    }))
    .unwrap()
}

fn template_2(
    service: &ValidService,
    _: &Digest,
    artifact: &Digest,
) -> k8s_openapi::api::core::v1::PodTemplateSpec {
    serde_json::from_value(serde_json::json!({
        "spec": {"containers": [{"name": "engine", "image": service.engine.image, "args": ["--new", artifact.hex()],
            "resources": service.engine.resources}]}
    }))
    .unwrap()
}

impl Operator {
    /// The window of the trial under way: only its requests decide anything.
    pub fn window(&self) -> Option<&Window> {
        let window = self.scraper.window.as_ref();
        window.filter(|window| window.revisions[0] != window.revisions[1])
    }

    /// When time alone wakes it.
    pub fn next(&self) -> Option<i64> {
        self.requeue
    }

    /// Whether it waits for something outside and looks again only in case a watch is lost.
    pub fn only_looks(&self, at_the_load: bool) -> bool {
        self.idle > if at_the_load { SETTLED } else { 1 }
    }

    /// Something happened that no watch tells: what was looked at is looked at anew.
    pub fn stir(&mut self) {
        self.idle = 0;
    }

    pub fn is_due(&self, cluster: &Cluster) -> bool {
        self.seen != Some(cluster.changes) || self.requeue.is_some_and(|at| at <= cluster.now)
    }

    fn die(&mut self) {
        *self = Self {
            version: self.version,
            ..Self::default()
        };
    }

    /// A new process that renders other templates.
    pub fn upgrade(&mut self) {
        self.version = 1;
        self.die();
    }

    fn decide(&mut self, cluster: &Cluster, mut observed: Observed) -> (ValidService, Plan) {
        let now = moment(cluster.now);
        let samples = self.scraper.scrape(&cluster.pages(), now);
        let generation = observed.service.metadata.generation.unwrap();
        let valid = match &self.valid {
            Some((known, valid)) if *known == generation => valid.clone(),
            _ => validate(&observed.service).unwrap(),
        };
        self.valid = Some((generation, valid.clone()));
        let render = if self.version == 0 {
            template_1
        } else {
            template_2
        };
        let first = plan(&valid, &observed, &samples, now, render);
        let Some(asks) = &first.asks_room else {
            return (valid, first);
        };
        observed.room = cluster.room(asks);
        let informed = plan(&valid, &observed, &samples, now, render);
        (valid, informed)
    }

    /// One reconcile.
    pub fn pass(&mut self, cluster: &mut Cluster) -> Result<(), String> {
        self.seen = Some(cluster.changes);
        let stale = std::mem::take(&mut self.stale);
        if stale > 0 {
            // It will see the truth a moment later.
            self.seen = None;
        }
        let observed = cluster.observe(stale);
        let (valid, plan) = self.decide(cluster, observed);
        let load = plan.load.as_ref();
        self.scraper.set_windows(plan.window.clone(), load);
        if let Some(round) = &plan.probe {
            let answers = cluster.answer_probes(round);
            let (since, now) = (round.window.since, moment(cluster.now));
            self.scraper.probe(since, answers, now);
        }
        self.requeue = plan.requeue.map(|after| cluster.now + seconds(after));
        if let Some(window) = &plan.window {
            // Baselines are taken as soon as the window opens.
            let opens = second(window.since);
            if opens > cluster.now {
                self.requeue = Some(self.requeue.map_or(opens, |at| at.min(opens)));
            }
        }
        let looks = plan.requeue.is_some_and(|after| LOOKS.contains(&after));
        let looks = looks && self.window().is_none();
        self.idle = if plan.actions.is_empty() && looks {
            self.idle + 1
        } else {
            0
        };
        if plan.actions.is_empty() {
            return Ok(());
        }
        let crash = self.crash.take();
        for (index, action) in plan.actions.iter().enumerate() {
            if crash == Some(index) {
                cluster.note(|| "the operator dies".into());
                self.die();
                return Ok(());
            }
            if cluster.act(&valid, &plan, action)? == Done::Conflict {
                // It is tried again at once, on what is there then.
                self.seen = None;
                break;
            }
        }
        if crash.is_some() {
            cluster.note(|| "the operator dies after its pass".into());
            self.die();
        }
        Ok(())
    }

    /// At rest another look, by a fresh process too, finds nothing to do.
    pub fn confirm_rest(&mut self, cluster: &mut Cluster) -> Result<(), String> {
        self.die();
        let observed = cluster.observe(0);
        let (_, plan) = self.decide(cluster, observed);
        let ask: Vec<&Action> = plan.actions.iter().collect();
        if ask.is_empty() && plan.requeue.is_none_or(|after| LOOKS.contains(&after)) {
            Ok(())
        } else {
            Err(format!(
                "at rest it would still {ask:?}, {:?}",
                plan.requeue
            ))
        }
    }
}

fn seconds(after: Duration) -> i64 {
    i64::try_from(after.as_secs()).unwrap_or(i64::MAX / 4)
}
