//! What must hold at every action and at every moment, whatever happened before.

use mixquant_crds::rollout::Surge;
use mixquant_crds::status::{MixQuantServiceStatus, Outcome, Reason, RolloutStage, RolloutStatus};
use mixquant_operator::action::{
    Action, Event, Metric, NewRevision, PRECISION_GATE, Plan, ScaleRequest,
};
use mixquant_operator::canary;
use mixquant_operator::observed::{FrozenRevision, Kind, ObservedRevision, Traffic};
use mixquant_operator::validate::ValidService;

use super::cluster::{Cluster, moment};
use super::traffic::{Manners, MetricFault};

/// How an action went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// As asked.
    Well,
    /// Somebody was faster: the pass ends.
    Conflict,
}

impl Cluster {
    /// Executes an action after checking that it may be asked for.
    pub fn act(
        &mut self,
        valid: &ValidService,
        plan: &Plan,
        action: &Action,
    ) -> Result<Done, String> {
        self.note(|| brief(action));
        if self.service.metadata.deletion_timestamp.is_some() {
            return Err("a service that is being deleted gets something new".into());
        }
        match action {
            Action::Remember(status) | Action::Report(status) => {
                self.may_become(plan, status)?;
                self.write_status(status.as_ref().clone());
            }
            Action::ApplyRevision(new) => self.keep(new),
            Action::ApplyDeployment(request) => {
                self.may_scale(valid, &request.frozen, request.replicas)?;
                self.may_read(&request.frozen, request.replicas)?;
                self.scale(&request.frozen, request.replicas);
            }
            Action::ScaleDeployment(request) => self.rescale(valid, request)?,
            Action::ApplyTraffic(traffic) => {
                self.may_select(traffic)?;
                self.traffic = Some(traffic.clone());
                self.changed();
            }
            Action::ApplyTrack(request) => self.apply_track(request)?,
            Action::ApplyRoute(share) => self.apply_route(*share)?,
            Action::PatchRoute(patch) => {
                if !self.patch_route(patch)? {
                    return Ok(Done::Conflict);
                }
            }
            Action::ApplyCompanion(request) => {
                self.companions.insert(request.companion);
                self.changed();
            }
            Action::ApplyJob(job) => {
                self.may_remove(job)?;
                self.make_job(job);
            }
            Action::Delete(object) => {
                let name = &object.object.name;
                match object.object.kind {
                    Kind::Job => self.delete_job(name, &object.uid),
                    Kind::Deployment => {
                        let status = self.status();
                        let stable = status.stable.map(|stable| stable.revision);
                        if stable.is_some_and(|stable| name.ends_with(&stable)) {
                            return Err("stable's Deployment is deleted".into());
                        }
                        self.delete_deployment(name, &object.uid);
                    }
                    Kind::ControllerRevision => {
                        self.revisions.retain(|kept| kept.uid != object.uid);
                        self.changed();
                    }
                    Kind::HTTPRoute => self.delete_route(&object.uid)?,
                    Kind::Service => return Err("the main Service is deleted".into()),
                }
            }
            Action::Count(Metric::Verdict {
                gate,
                outcome: Outcome::Pass,
            }) if ["tpot", "error-rate"].contains(&gate.as_str()) => self.may_pass()?,
            Action::Publish(event) => {
                *self.said.entry(kind(event)).or_default() += 1;
            }
            Action::Count(_) => {}
        }
        self.check().map(|()| Done::Well)
    }

    fn keep(&mut self, new: &NewRevision) {
        let kept = ObservedRevision {
            frozen: new.frozen.clone(),
            number: new.number,
            uid: format!("revision-{}", new.number),
        };
        let revision = &kept.frozen.revision;
        let mut all = self.revisions.iter();
        if all.all(|known| known.frozen.revision != *revision) {
            self.revisions.push(kept);
            self.changed();
        }
    }

    fn rescale(&mut self, valid: &ValidService, request: &ScaleRequest) -> Result<(), String> {
        let mut all = self.deployments.iter();
        let known = all.find(|(_, uid, _)| *uid == request.uid);
        if let Some((frozen, ..)) = known.cloned() {
            self.may_scale(valid, &frozen, request.replicas)?;
            self.scale(&frozen, request.replicas);
        }
        Ok(())
    }

    /// Memory moves only as the design allows.
    fn may_become(&self, plan: &Plan, next: &MixQuantServiceStatus) -> Result<(), String> {
        let before = self.status();
        let passed = passes(plan, self.gates());
        let was = |status: &MixQuantServiceStatus| {
            status.stable.as_ref().map(|stable| stable.revision.clone())
        };
        let canary = before
            .canary
            .as_ref()
            .map(|canary| canary.revision.as_str());
        let excused = canary.is_some_and(|canary| self.may_skip(canary));
        if was(&before).is_some() && was(&before) != was(next) {
            if !passed && !excused {
                return Err("stable changes without a Pass in the same pass".into());
            }
            if was(next).as_deref() != canary {
                return Err("stable becomes what was not the canary".into());
            }
            if !excused {
                self.may_serve(&before, next)?;
                self.may_leave_step(&before)?;
            }
        }
        self.may_make_room(plan, &before, next)?;
        self.may_choose(&before, next)?;
        let (Some(from), Some(to)) = (&before.rollout, &next.rollout) else {
            return Ok(());
        };
        let steps = &self.service.spec.rollout.steps;
        let shares = |count: usize| {
            let steps = steps.iter().take(count);
            let shares = steps.filter(|step| step.pause.is_none()).count();
            i32::try_from(shares).unwrap()
        };
        let position = |at: &RolloutStatus| match at.stage {
            RolloutStage::RollingBack | RolloutStage::Starting => -1,
            RolloutStage::Stepping => shares(usize::try_from(at.step + 1).unwrap()) - 1,
            RolloutStage::Promoting => shares(usize::MAX),
        };
        let (low, high) = (position(from), position(to));
        if high > low + 1 && !excused {
            return Err(format!(
                "the weight rises by more than a step: {from:?} to {to:?}"
            ));
        }
        if high > low && low >= 0 && !passed && !excused {
            return Err(format!(
                "the weight rises without a Pass: {from:?} to {to:?}"
            ));
        }
        if high < low && high != -1 {
            return Err(format!(
                "the weight falls, and not to 0: {from:?} to {to:?}"
            ));
        }
        if high > low && low >= 0 && !excused {
            self.may_leave_step(&before)?;
        }
        if high > low && to.step_started_at.0 != moment(self.now) {
            return Err("a step begins in the past".into());
        }
        Ok(())
    }

    /// Nothing that the gates could have seen as bad becomes stable.
    fn may_serve(
        &self,
        before: &MixQuantServiceStatus,
        next: &MixQuantServiceStatus,
    ) -> Result<(), String> {
        let manners = |status: &MixQuantServiceStatus| {
            let stable = status.stable.as_ref();
            stable.map(|stable| Manners::of(&stable.image, self.quiet))
        };
        let canary = before.canary.as_ref();
        let canary = canary.map(|canary| canary.revision.as_str());
        let at = before.rollout.as_ref();
        let beside_one = at.and_then(|at| at.room.get(1));
        let alone = beside_one.is_some_and(|beside_one| *beside_one == 0);
        // Where nothing runs beside the canary, only its own limits can be judged, and the slow one keeps them.
        // Slowness and worse answers are measured against stable: beside the same they are none.
        let bad = manners(next)
            .filter(|next| !(alone && next.slowness > 1.0))
            .filter(|next| !next.are_good())
            .is_some_and(|next| {
                let relative = next.slowness > 1.0 || next.worse;
                !relative || manners(before) != Some(next)
            });
        if bad && !self.is_unharmed_yet(canary) {
            return Err(format!("a bad canary is promoted: {:?}", manners(next)));
        }
        Ok(())
    }

    /// Stable makes room only after that was told, where there is none or the spec says so; and a canary that fits nowhere is not begun.
    fn may_make_room(
        &self,
        plan: &Plan,
        before: &MixQuantServiceStatus,
        next: &MixQuantServiceStatus,
    ) -> Result<(), String> {
        let room = |status: &MixQuantServiceStatus| {
            let at = status.rollout.as_ref();
            at.map_or_else(Vec::new, |at| at.room.clone())
        };
        let told = plan.actions.iter().any(|action| {
            matches!(action, Action::Publish(event) if event.reason == Reason::InsufficientCapacity)
        });
        if room(next).is_empty() || room(next) == room(before) {
            return Ok(());
        }
        if !told {
            return Err("stable makes room and nobody is told".into());
        }
        let never = self.service.spec.rollout.surge == Surge::Never;
        if self.places.gpus.is_none() && !never {
            return Err("stable makes room and there is enough".into());
        }
        Ok(())
    }

    /// Whether a person's word or the spec lets `revision` skip its steps.
    fn may_skip(&self, revision: &str) -> bool {
        let window = self.service.spec.rollout.rollback_window.is_some();
        self.asked_full.contains(revision) || (window && self.was_stable.contains(revision))
    }

    /// Whether `revision` is bad only by running out of memory, and none of its pods has yet: a status that someone forged to the last
    /// stage leaves so little time that nothing is there to be seen.
    fn is_unharmed_yet(&self, revision: Option<&str>) -> bool {
        let mut pods = self
            .pods
            .iter()
            .filter(|pod| Some(pod.revision.as_str()) == revision);
        pods.all(|pod| pod.manners.out_of_memory && !pod.was_killed(self.now))
    }

    /// No gate on metrics passes on pages that say nothing.
    fn may_pass(&self) -> Result<(), String> {
        let blind = match self.fault {
            None | Some((MetricFault::Reset, _)) => false,
            // What was counted until then stands for two intervals.
            Some((MetricFault::Frozen, _)) => self.now > self.fault_since + 20,
            Some(_) => true,
        };
        if blind {
            return Err(format!("a gate passes blindly: {:?}", self.fault));
        }
        Ok(())
    }

    /// Pods are asked for only for a role that is remembered, and never taken from stable.
    fn may_scale(
        &self,
        valid: &ValidService,
        frozen: &FrozenRevision,
        replicas: i32,
    ) -> Result<(), String> {
        let status = self.status();
        let revision = &frozen.revision;
        let stable = status
            .stable
            .as_ref()
            .is_some_and(|stable| stable.revision == *revision);
        let at = status.rollout.as_ref().filter(|_| status.canary.is_some());
        let wanted = self.desired();
        let kept = at.map_or(wanted, |at| canary::stable_size(&valid.rollout, at, wanted));
        if stable && replicas < kept {
            return Err(format!("stable {revision} is scaled to {replicas}"));
        }
        if stable && kept == 0 {
            return Ok(());
        }
        let has_pods = self.pods.iter().any(|pod| pod.revision == *revision);
        if replicas == 0 && (!has_pods || self.now < self.floor.heals_at) {
            // A stale view may ask once more for what is so; pods that someone added by hand leave whatever the Service selects.
            return Ok(());
        }
        if replicas == 0 && self.is_in_a_track(revision) {
            return Err(format!(
                "{revision} leaves while a track's Service selects it"
            ));
        }
        if replicas == 0 {
            return match &self.traffic {
                Some(Traffic::All) => {
                    Err(format!("{revision} leaves while the Service selects it"))
                }
                Some(Traffic::Only(only)) if only == revision => {
                    Err(format!("{revision} leaves while the Service selects it"))
                }
                Some(Traffic::Only(_)) | None => Ok(()),
            };
        }
        let canary = status
            .canary
            .as_ref()
            .is_some_and(|canary| canary.revision == *revision);
        if !stable && !canary {
            return Err(format!(
                "{revision} gets pods before its role is remembered"
            ));
        }
        let mut failed = status.failed_revisions.iter();
        let failed =
            failed.any(|failed| failed.revision == *revision && failed.request == valid.request);
        if !stable && failed {
            return Err(format!("{revision} failed and is tried again"));
        }
        let mut records = status.calibrations.iter();
        let bad = records.any(|record| {
            record.report.artifact_digest == frozen.artifact_digest
                && record.report.verify.perplexity_increase_percent > 1.0
        });
        if bad {
            return Err(format!("{revision} lost precision and gets pods"));
        }
        Ok(())
    }

    fn may_select(&self, traffic: &Traffic) -> Result<(), String> {
        let status = self.status();
        let stage = status.rollout.map(|rollout| rollout.stage);
        match traffic {
            Traffic::All
                if !matches!(
                    stage,
                    Some(RolloutStage::Stepping | RolloutStage::Promoting)
                ) =>
            {
                Err("the canary gets traffic before its step is remembered".into())
            }
            Traffic::All if self.mirrors_at().is_some() => {
                Err("people meet a canary that is to answer copies only".into())
            }
            Traffic::Only(revision)
                if status.stable.as_ref().map(|stable| &stable.revision) != Some(revision) =>
            {
                Err(format!("{revision} gets all the traffic and is not stable"))
            }
            Traffic::All | Traffic::Only(_) => Ok(()),
        }
    }

    /// Holds at every moment: people are served by as many pods as they asked for, unless a fault is healing.
    pub fn check(&self) -> Result<(), String> {
        if self.traffic.is_none() || self.now < self.floor.heals_at {
            return Ok(());
        }
        let serving = self
            .pods
            .iter()
            .filter(|pod| self.is_ready(pod) && self.selects(&pod.revision));
        let serving = i32::try_from(serving.count()).unwrap();
        // A trial may hold the number below bounds that have risen meanwhile.
        let floor = self.floor.replicas.min(self.desired());
        let floor = self.floor_of_gap().map_or(floor, |gap| floor.min(gap));
        if serving < floor {
            return Err(format!("{serving} pods serve, {floor} are asked for"));
        }
        self.check_copies()?;
        self.check_route(floor)
    }
}

/// An Event's reason; of a request what was asked and answered, of a promotion what it rests on.
fn kind(event: &Event) -> String {
    let reason = format!("{:?}", event.reason);
    let words: Vec<&str> = event.note.split(['`', ' ', ':']).collect();
    match event.reason {
        Reason::Requested => {
            let answer = if words.contains(&"done") {
                "done"
            } else {
                "refused"
            };
            let full = if words.get(5) == Some(&"full") {
                " full"
            } else {
                ""
            };
            format!("{}{full} {answer}", words.get(3).unwrap_or(&"?"))
        }
        Reason::InsufficientCapacity if event.note.contains("waits") => {
            format!("{reason} and waits")
        }
        Reason::RollingOut | Reason::SLOViolated if event.note.contains("mirrors") => {
            format!("{reason} by copies")
        }
        Reason::Promoted if event.note.contains("lately") => format!("{reason} in the window"),
        Reason::Promoted if event.note.contains("a person") => format!("{reason} in full"),
        _ => reason,
    }
}

/// Whether every gate on live traffic passed in this plan.
fn passes(plan: &Plan, gates: usize) -> bool {
    let mut live = plan.actions.iter().filter_map(|action| match action {
        Action::Count(Metric::Verdict { gate, outcome }) if gate != PRECISION_GATE => {
            Some(*outcome)
        }
        _ => None,
    });
    live.clone().count() == gates && live.all(|outcome| outcome == Outcome::Pass)
}

/// An action in one line of the trace.
fn brief(action: &Action) -> String {
    match action {
        Action::Remember(status) | Action::Report(status) => {
            let word = if matches!(action, Action::Remember(_)) {
                "Remember"
            } else {
                "Report"
            };
            let revision = |role: &Option<mixquant_crds::status::RevisionStatus>| {
                role.as_ref().map_or("-".to_owned(), |role| {
                    format!("{} ({})", role.revision, role.image)
                })
            };
            let rollout = status.rollout.as_ref().map(|at| {
                let verdict = at.verdict.as_ref().map(|verdict| verdict.message.clone());
                format!("{:?} {} {:?}", at.stage, at.step, verdict)
            });
            format!(
                "{word} {:?}: stable {}, canary {}, {}, failed {:?}",
                status.phase,
                revision(&status.stable),
                revision(&status.canary),
                rollout.unwrap_or_default(),
                status
                    .failed_revisions
                    .iter()
                    .map(|failed| &failed.revision)
                    .collect::<Vec<_>>()
            )
        }
        Action::ApplyRevision(new) => format!(
            "ApplyRevision {} number {}",
            new.frozen.revision, new.number
        ),
        Action::ApplyDeployment(request) => format!(
            "ApplyDeployment {} x {}",
            request.frozen.revision, request.replicas
        ),
        Action::ScaleDeployment(request) => {
            format!("ScaleDeployment {} x {}", request.name, request.replicas)
        }
        Action::ApplyTraffic(traffic) => format!("ApplyTraffic {traffic:?}"),
        Action::ApplyTrack(request) => format!("{request:?}"),
        Action::ApplyRoute(share) => format!("ApplyRoute {share}"),
        Action::PatchRoute(patch) => format!("PatchRoute {} %", patch.weight),
        Action::ApplyCompanion(request) => format!("ApplyCompanion {:?}", request.companion),
        Action::ApplyJob(job) => format!("ApplyJob {}", job.name),
        Action::Delete(object) => format!("Delete {:?} {}", object.object.kind, object.object.name),
        Action::Publish(event) => format!("Publish {:?}: {}", event.reason, event.note),
        Action::Count(metric) => format!("Count {metric:?}"),
    }
}
