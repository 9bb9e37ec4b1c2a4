//! What happens to a service: changes by people, faults by the world. Made from a seed, and shrunk when an invariant breaks.

use mixquant_crds::rollout::Surge;

use super::traffic::MetricFault;
use super::{Failure, run};

/// Numbers from a seed (splitmix64): the same in every version of every library.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x5851_F42D_4C95_7F2D)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// In `0..below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.next() % below
    }

    /// In [0, 1).
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// A change of the spec, of what it names, or of what people want of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// 0 and 1 are good, 2 is slow (1.5 times), 3 never gets ready, 4 fails requests, 5 runs out of memory.
    Image(u64),
    /// 0 and 2 are good, 1 loses precision.
    Precision(u64),
    /// 0 and 1 are good, 2 fails the Job.
    Data(u64),
    /// Pods of stable.
    Replicas(i32),
    /// `spec.traffic`.
    Traffic(u8),
    /// `spec.scaling`: 0 for none.
    Scaling(u8),
    /// People want so many pods' worth.
    Demand(i32),
    /// GPUs of each pod.
    Gpus(usize),
    /// `spec.rollout.surge`.
    Surge(Surge),
    /// The first step's hold.
    Hold(u32),
    /// `spec.rollout.paused`.
    Paused(bool),
    /// The way of a canary: 0 by weights, 1 begins dark for a while, 2 waits for a person in the middle, 3 stands still where it fails, 4 by copies first
    /// where the route is the service's own.
    Way(u8),
    /// 0 as it is; 1 goes back without steps and keeps what failed for a minute.
    Lenient(bool),
    /// The eviction of `ConfigMap`s: data are gone.
    DataGone,
}

/// What a person asks of a rollout, of the canary that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    Promote,
    PromoteFull,
    Abort,
    Retry,
    /// One of the revisions that are kept.
    Undo(u64),
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happening {
    /// A person changes something.
    Change(Change),
    /// The operator dies in its next pass with actions, after so many of them.
    Crash(usize),
    /// The next pass sees the children as they were so many changes ago.
    Stale(usize),
    /// A pod dies.
    KillPod,
    /// Someone deletes a Deployment.
    DeleteDeployment,
    /// Someone deletes a Job.
    DeleteJob,
    /// Someone deletes a revision's template.
    DeleteRevision,
    /// Someone edits the Service's selector.
    EditTraffic,
    /// Someone scales a Deployment.
    EditDeployment,
    /// Finished pods of Jobs are collected, with their messages.
    LoseAnswers,
    /// Someone writes a passed trial into the status.
    ForgePass,
    /// A person asks something of the rollout.
    Ask(Ask),
    /// Metrics pages are wrong for so many seconds.
    Metrics(MetricFault, i64),
    /// Another service takes so many free GPUs for so many seconds.
    Tenant(usize, i64),
    /// Someone gives the canary so many percent in the route.
    EditRoute(i32),
    /// Someone deletes the service's own route.
    LoseRoute,
    /// The gateway takes no change for so many seconds.
    GatewayDown(i64),
    /// Someone clears the status.
    ClearStatus,
    /// A newer operator renders other templates.
    UpgradeOperator,
    /// Someone deletes the service; what it owns is collected a moment later.
    Delete,
}

/// A seed and what happens.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub seed: u64,
    /// GPUs of the cluster; `None`: always enough.
    pub gpus: Option<usize>,
    /// Who splits the traffic at first: 0 the ratio of pods, 1 a route of the service's own, 2 a user's.
    pub traffic: u8,
    /// By rising time.
    pub happenings: Vec<(i64, Happening)>,
    pub order: Order,
}

/// When happenings happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Each at its time.
    Timed,
    /// Changes when the service is at rest, the others at once.
    ChangesFromRest,
    /// Each when the service is at rest.
    AllFromRest,
}

impl Order {
    pub fn waits_for_rest(self, happening: &Happening) -> bool {
        match self {
            Self::Timed => false,
            Self::ChangesFromRest => matches!(happening, Happening::Change(_)),
            Self::AllFromRest => true,
        }
    }
}

impl Scenario {
    /// Anything at any time.
    pub fn chaos(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut at = 0;
        let count = 3 + dice.below(12);
        let mut happenings: Vec<_> = (0..count)
            .map(|_| {
                at += i64::try_from(dice.below(120)).unwrap();
                (at, any(&mut dice))
            })
            .collect();
        if seed % 8 == 1 {
            // Larger pods are asked for while another service has what they need.
            happenings.push((150, Happening::Tenant(4, 55)));
            happenings.push((151, Happening::Change(Change::Gpus(2))));
            happenings.sort_by_key(|(at, _)| *at);
        }
        Self {
            seed,
            gpus: gpus(seed),
            traffic: traffic(seed),
            happenings: with_gateway(seed, happenings),
            order: Order::Timed,
        }
    }

    /// Changes one after the other, each from rest.
    pub fn orderly(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let count = 2 + dice.below(4);
        Self {
            seed,
            gpus: gpus(seed),
            traffic: traffic(seed),
            happenings: (0..count)
                .map(|_| (0, Happening::Change(change(&mut dice))))
                .collect(),
            order: Order::ChangesFromRest,
        }
    }

    /// The same with the operator killed, blinded and restarted all along.
    pub fn with_crashes(&self) -> Self {
        let mut dice = Dice::new(self.seed ^ 0xDEAD);
        let mut happenings = Vec::new();
        for change in &self.happenings {
            happenings.push(*change);
            for _ in 0..dice.below(5) {
                let happening = match dice.below(4) {
                    0 => Happening::Stale(1 + usize::try_from(dice.below(6)).unwrap()),
                    _ => Happening::Crash(usize::try_from(dice.below(5)).unwrap()),
                };
                happenings.push((0, happening));
            }
        }
        Self {
            happenings,
            ..self.clone()
        }
    }

    pub fn has_stale_reads(&self) -> bool {
        let mut all = self.happenings.iter();
        all.any(|(_, happening)| matches!(happening, Happening::Stale(_)))
    }

    /// Whether something beside people's changes happens.
    pub fn is_disturbed(&self) -> bool {
        let mut all = self.happenings.iter();
        all.any(|(_, happening)| !matches!(happening, Happening::Change(_)))
    }
}

/// What happens to a gateway and its routes, among the rest.
fn with_gateway(seed: u64, mut happenings: Vec<(i64, Happening)>) -> Vec<(i64, Happening)> {
    if gpus(seed).is_some() {
        return happenings;
    }
    let mut dice = Dice::new(seed ^ 0x6A7E);
    let last = happenings.last().map_or(1, |(at, _)| at + 1);
    for _ in 0..dice.below(5) {
        let happening = match dice.below(6) {
            0 | 1 => Happening::EditRoute(i32::try_from(dice.below(101)).unwrap()),
            2 => Happening::LoseRoute,
            3 | 4 => Happening::GatewayDown(5 + i64::try_from(dice.below(400)).unwrap()),
            _ => Happening::Change(Change::Traffic(u8::try_from(dice.below(3)).unwrap())),
        };
        let at = i64::try_from(dice.below(last.unsigned_abs())).unwrap();
        happenings.push((at, happening));
    }
    happenings.sort_by_key(|(at, _)| *at);
    happenings
}

/// Half of all lives are spent where GPUs are scarce.
fn gpus(seed: u64) -> Option<usize> {
    (seed % 2 == 1).then(|| 1 + usize::try_from(seed / 2 % 6).unwrap())
}

/// Two thirds of the lives in which GPUs are never scarce begin behind a gateway. Where they are, a stable without a pod loses its share of
/// the requests behind one, see decision 14.
fn traffic(seed: u64) -> u8 {
    match gpus(seed) {
        Some(_) => 0,
        None => u8::try_from(seed / 12 % 3).unwrap(),
    }
}

fn change(dice: &mut Dice) -> Change {
    match dice.below(18) {
        14 => Change::Scaling(u8::try_from(dice.below(4)).unwrap()),
        15..=17 => Change::Demand(i32::try_from(dice.below(6)).unwrap()),
        12 => Change::Gpus(1 + usize::try_from(dice.below(2)).unwrap()),
        13 => Change::Surge(
            [Surge::Auto, Surge::Never, Surge::Auto][usize::try_from(dice.below(3)).unwrap()],
        ),
        0..=4 => Change::Image(dice.below(6)),
        5..=7 => Change::Precision(dice.below(3)),
        8 => Change::Data(dice.below(3)),
        9 | 10 => Change::Replicas(1 + i32::try_from(dice.below(4)).unwrap()),
        _ => Change::Hold(10 + u32::try_from(dice.below(20)).unwrap()),
    }
}

/// Changes that make a rollout wait, or wait less.
fn way(dice: &mut Dice) -> Change {
    match dice.below(4) {
        0 => Change::Paused(dice.below(2) == 0),
        1 => Change::Lenient(dice.below(2) == 0),
        _ => Change::Way(u8::try_from(dice.below(5)).unwrap()),
    }
}

fn ask(dice: &mut Dice) -> Ask {
    match dice.below(8) {
        0 | 1 => Ask::Promote,
        2 => Ask::PromoteFull,
        3 => Ask::Abort,
        4 | 5 => Ask::Retry,
        _ => Ask::Undo(dice.next()),
    }
}

fn metrics(dice: &mut Dice) -> Happening {
    let kind = usize::try_from(dice.below(6)).unwrap();
    let seconds = 10 + i64::try_from(dice.below(400)).unwrap();
    Happening::Metrics(MetricFault::ALL[kind], seconds)
}

fn any(dice: &mut Dice) -> Happening {
    match dice.below(42) {
        35 => Happening::Change(Change::Scaling(1 + u8::try_from(dice.below(3)).unwrap())),
        36 | 37 => Happening::Change(Change::Demand(i32::try_from(dice.below(6)).unwrap())),
        34 | 38..=41 => Happening::Tenant(
            1 + usize::try_from(dice.below(4)).unwrap(),
            5 + i64::try_from(dice.below(50)).unwrap(),
        ),
        24..=26 => Happening::Change(way(dice)),
        27..=30 => Happening::Ask(ask(dice)),
        31..=33 => metrics(dice),
        0..=8 => Happening::Change(change(dice)),
        9..=12 => Happening::Crash(usize::try_from(dice.below(6)).unwrap()),
        13..=15 => Happening::Stale(1 + usize::try_from(dice.below(8)).unwrap()),
        16 => Happening::KillPod,
        17 => Happening::DeleteDeployment,
        18 => Happening::DeleteJob,
        19 => Happening::DeleteRevision,
        20 => Happening::EditTraffic,
        21 => Happening::EditDeployment,
        22 => Happening::LoseAnswers,
        _ => Happening::ForgePass,
    }
}

/// The failure with as few happenings as still show one.
pub fn shrink(scenario: &Scenario, failure: Failure) -> (Scenario, Failure) {
    let mut smallest = (scenario.clone(), failure);
    let mut index = 0;
    while index < smallest.0.happenings.len() {
        let mut smaller = smallest.0.clone();
        smaller.happenings.remove(index);
        match run(&smaller) {
            Err(failure) => smallest = (smaller, failure),
            Ok(_) => index += 1,
        }
    }
    smallest
}
