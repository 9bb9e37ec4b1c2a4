//! Properties of `plan` on worlds that nobody has thought of: any status, any children, any time.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::names::ANNOTATION_REQUEST;
use mixquant_crds::status::{
    FailedRevision, Halt, MixQuantServiceStatus, Outcome, Reason, RolloutStage, RolloutStatus,
    VerdictStatus, Waiver,
};
use mixquant_operator::action::{Action, Plan};
use mixquant_operator::observed::{JobState, Observed, ObservedTraffic, Traffic};
use mixquant_operator::samples::Samples;
use mixquant_operator::validate::validate;
use proptest::prelude::*;

use crate::told::{Told, World};

/// What is done to a world that was reached honestly.
#[derive(Debug, Clone)]
enum Twist {
    Status {
        stage: u8,
        step: i32,
        age: i64,
        verdict: bool,
    },
    NoStable,
    NoCanary,
    NoStatus,
    Failed {
        of_stable: bool,
        same_request: bool,
    },
    Deployment {
        index: usize,
        replicas: i32,
        available: i32,
        up_to_date: bool,
        matches: bool,
    },
    NoDeployment(usize),
    NoRevision(usize),
    Traffic(u8),
    Job {
        index: usize,
        state: u8,
        message: bool,
    },
    NoJob(usize),
    Image(u8),
    Replicas(i32),
    Paused(bool),
    Ask(u8),
    Later(i64),
}

fn twist() -> impl Strategy<Value = Twist> {
    prop_oneof![
        (0_u8..4, -3_i32..6, -100_i64..2000, any::<bool>()).prop_map(
            |(stage, step, age, verdict)| Twist::Status {
                stage,
                step,
                age,
                verdict
            }
        ),
        Just(Twist::NoStable),
        Just(Twist::NoCanary),
        Just(Twist::NoStatus),
        (any::<bool>(), any::<bool>()).prop_map(|(of_stable, same_request)| Twist::Failed {
            of_stable,
            same_request
        }),
        (0_usize..3, 0_i32..6, 0_i32..6, any::<bool>(), any::<bool>()).prop_map(
            |(index, replicas, available, up_to_date, matches)| Twist::Deployment {
                index,
                replicas,
                available,
                up_to_date,
                matches
            }
        ),
        (0_usize..3).prop_map(Twist::NoDeployment),
        (0_usize..3).prop_map(Twist::NoRevision),
        (0_u8..5).prop_map(Twist::Traffic),
        (0_usize..3, 0_u8..4, any::<bool>()).prop_map(|(index, state, message)| Twist::Job {
            index,
            state,
            message
        }),
        (0_usize..3).prop_map(Twist::NoJob),
        (1_u8..5).prop_map(Twist::Image),
        (1_i32..6).prop_map(Twist::Replicas),
        any::<bool>().prop_map(Twist::Paused),
        (0_u8..6).prop_map(Twist::Ask),
        (-1000_i64..100_000).prop_map(Twist::Later),
    ]
}

fn world() -> impl Strategy<Value = World> {
    prop::sample::select(vec![
        World::Fresh,
        World::Calibrating,
        World::Calibrated,
        World::Deploying,
        World::Serving,
        World::Verified,
        World::Starting,
        World::Stepping,
        World::LastStep,
        World::Promoting,
        World::RollingBack,
        World::Degraded,
    ])
}

fn twist_status(told: &mut Told, twist: &Twist) {
    let request = validate(&told.observed.service).unwrap().request;
    let now = told.now;
    let Some(status) = told.observed.service.status.as_mut() else {
        return;
    };
    match *twist {
        Twist::Status {
            stage,
            step,
            age,
            verdict,
        } => {
            let stages = [
                RolloutStage::Starting,
                RolloutStage::Stepping,
                RolloutStage::Promoting,
                RolloutStage::RollingBack,
            ];
            status.rollout = Some(RolloutStatus {
                stage: stages[usize::from(stage)],
                step,
                step_started_at: Time(now - SignedDuration::from_secs(age)),
                generation: 1,
                request,
                weight: 0,
                mirror: step,
                failed_verdicts: step,
                verdict: verdict.then(|| VerdictStatus {
                    outcome: Outcome::Pass,
                    at: Time(now),
                    message: "forged".into(),
                    gates: Vec::new(),
                }),
                paused: (age % 7 == 0).then_some(Halt::Gate),
                released: age % 2 == 0,
                shifted: age % 3 == 0,
                // Claimed by the status alone.
                waived: [None, Some(Waiver::Request), Some(Waiver::RollbackWindow)]
                    [usize::try_from(age.rem_euclid(3)).unwrap()],
                room: vec![step; usize::from(age % 5 == 0) * 2],
            });
        }
        Twist::NoStable => status.stable = None,
        Twist::NoCanary => status.canary = None,
        Twist::Failed {
            of_stable,
            same_request,
        } => {
            let role = if of_stable {
                &status.stable
            } else {
                &status.canary
            };
            if let Some(role) = role {
                let revision = role.revision.clone();
                let other = mixquant_crds::Digest::of_bytes(b"another request");
                status.failed_revisions.push(FailedRevision {
                    revision,
                    generation: 1,
                    request: if same_request { request } else { other },
                    reason: Reason::SLOViolated,
                    message: "twisted".into(),
                    at: Time(now),
                });
            }
        }
        _ => {}
    }
}

fn twist_traffic(observed: &mut Observed, which: u8) {
    let revision = |index: usize| {
        observed
            .revisions
            .get(index)
            .map(|kept| kept.frozen.revision.clone())
    };
    let selects = match which {
        0 => None,
        1 => Some(Traffic::All),
        2 => Some(Traffic::Only("0000000000".into())),
        other => revision(usize::from(other) - 3).map(Traffic::Only),
    };
    observed.traffic = (which != 2).then_some(ObservedTraffic {
        selects,
        matches: which != 4,
    });
}

fn apply(told: &mut Told, twist: &Twist) {
    let observed = &mut told.observed;
    match *twist {
        Twist::NoStatus => observed.service.status = None,
        Twist::Deployment {
            index,
            replicas,
            available,
            up_to_date,
            matches,
        } => {
            if let Some(deployment) = observed.deployments.get_mut(index) {
                deployment.replicas = replicas;
                deployment.existing = available;
                deployment.ready = available;
                deployment.available = available;
                deployment.up_to_date = up_to_date;
                deployment.matches = matches;
            }
        }
        Twist::NoDeployment(index) if index < observed.deployments.len() => {
            observed.deployments.remove(index);
        }
        Twist::NoRevision(index) if index < observed.revisions.len() => {
            observed.revisions.remove(index);
        }
        Twist::NoJob(index) if index < observed.jobs.len() => {
            observed.jobs.remove(index);
        }
        Twist::Traffic(which) => twist_traffic(observed, which),
        Twist::Job {
            index,
            state,
            message,
        } => {
            if let Some(job) = observed.jobs.get_mut(index) {
                job.state = match state {
                    0 => JobState::Running,
                    1 => JobState::Succeeded,
                    2 => JobState::Deleting,
                    _ => JobState::Failed {
                        reason: "BackoffLimitExceeded".into(),
                        text: "twisted".into(),
                    },
                };
                if !message {
                    job.message = None;
                }
            }
        }
        Twist::Image(image) => {
            observed.service.spec.engine.image = format!("engine:{image}");
            observed.service.metadata.generation = Some(10 + i64::from(image));
        }
        Twist::Replicas(replicas) => observed.service.spec.replicas = replicas,
        Twist::Paused(paused) => observed.service.spec.rollout.paused = paused,
        Twist::Ask(which) => ask(observed, which),
        Twist::Later(seconds) => told.now += SignedDuration::from_secs(seconds),
        _ => twist_status(told, twist),
    }
}

/// A person's request, of the canary or of the oldest revision.
fn ask(observed: &mut Observed, which: u8) {
    let status = observed.service.status.as_ref();
    let canary = status.and_then(|status| status.canary.as_ref());
    let canary = canary.map_or("0123456789", |canary| &canary.revision);
    let oldest = observed.revisions.first();
    let oldest = oldest.map_or("0123456789", |kept| &kept.frozen.revision);
    let text = match which {
        0 => format!("1 abort {canary}"),
        1 => format!("1 promote {canary}"),
        2 => format!("1 promote {canary} full"),
        3 => "1 retry".to_owned(),
        4 => format!("1 undo {oldest}"),
        _ => "please".to_owned(),
    };
    let annotations = observed
        .service
        .metadata
        .annotations
        .get_or_insert_default();
    annotations.insert(ANNOTATION_REQUEST.into(), text);
}

/// Whether a person asks for a promotion without verdicts.
fn asks_for_all(observed: &Observed) -> bool {
    let annotations = observed.service.metadata.annotations.as_ref();
    let text = annotations.and_then(|all| all.get(ANNOTATION_REQUEST));
    text.is_some_and(|text| text.ends_with("full"))
}

fn twist_all(told: &mut Told, twists: &[Twist]) {
    for twist in twists {
        apply(told, twist);
    }
}

fn stable_of(status: Option<&MixQuantServiceStatus>) -> Option<String> {
    let stable = status.and_then(|status| status.stable.as_ref());
    stable.map(|stable| stable.revision.clone())
}

fn written(plan: &Plan) -> Option<&MixQuantServiceStatus> {
    plan.actions.iter().find_map(|action| match action {
        Action::Remember(status) | Action::Report(status) => Some(status.as_ref()),
        _ => None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// (a) total; (f) without samples and a person's word nothing is promoted, whatever the status claims; one status write a pass.
    #[test]
    fn any_world_has_a_plan_that_promotes_nothing_unproven(
        world in world(),
        twists in prop::collection::vec(twist(), 0..6),
    ) {
        let mut told = Told::reach(world);
        twist_all(&mut told, &twists);
        let plan = told.plan(&Samples::default());
        let writes = plan.actions.iter().filter(|action| matches!(action, Action::Remember(_) | Action::Report(_)));
        prop_assert!(writes.count() <= 1);
        let before = stable_of(told.observed.service.status.as_ref());
        if let (Some(before), Some(status), false) = (before, written(&plan), asks_for_all(&told.observed)) {
            prop_assert_eq!(Some(before), stable_of(Some(status)));
        }
    }

    /// (b) a fixed point: with time standing still, doing what is asked ends in nothing being asked.
    #[test]
    fn doing_what_is_asked_ends_in_nothing_being_asked(
        world in world(),
        twists in prop::collection::vec(twist(), 0..6),
    ) {
        let mut told = Told::reach(world);
        twist_all(&mut told, &twists);
        for _ in 0..20 {
            let plan = told.plan(&Samples::default());
            if plan.actions.is_empty() {
                return Ok(());
            }
            told.act(&plan);
            told.pods_ready();
        }
        prop_assert!(false, "still busy: {:?}", told.plan(&Samples::default()).actions);
    }

    /// (c) a crash after any number of actions changes nothing about where it ends.
    #[test]
    fn a_plan_cut_anywhere_ends_where_the_whole_one_does(
        world in world(),
        twists in prop::collection::vec(twist(), 0..4),
        cuts in prop::collection::vec(0_usize..6, 1..4),
    ) {
        let mut whole = Told::reach(world);
        twist_all(&mut whole, &twists);
        let mut cut = Told::reach(world);
        twist_all(&mut cut, &twists);
        for at in cuts {
            let mut plan = cut.plan(&Samples::default());
            plan.actions.truncate(at);
            cut.act(&plan);
        }
        for told in [&mut whole, &mut cut] {
            for _ in 0..20 {
                let plan = told.plan(&Samples::default());
                told.act(&plan);
                told.pods_ready();
            }
        }
        let end = |told: &Told| {
            let status = told.observed.service.status.clone().unwrap_or_default();
            let mut pods: Vec<_> = told
                .observed
                .deployments
                .iter()
                .filter(|deployment| deployment.replicas > 0)
                .map(|deployment| (deployment.revision.clone(), deployment.replicas))
                .collect();
            pods.sort();
            let traffic = told.observed.traffic.clone();
            (status.phase, stable_of(Some(&status)), pods, traffic)
        };
        prop_assert_eq!(end(&whole), end(&cut));
    }
}
