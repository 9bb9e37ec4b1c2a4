//! Where do a canary's pods find room, and what gives way for them? Pure arithmetic, asked by `plan` before pods are made or grow and by
//! `kubectl mixquant plan` before a person makes a change.
//!
//! One list says it all: of a canary's pods so many fit when stable keeps 0, 1, 2, … of its own. `capacity` fills it in; the status remembers
//! it for a trial in which not everything fits.

use mixquant_crds::rollout::{OnFailure, Surge};

use crate::canary;
use crate::observed::Room;
use crate::validate::ValidService;

/// Pods of both tracks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// The canary's.
    pub canary: i32,
    /// Stable's.
    pub stable: i32,
}

/// What of `wanted` pods of a canary and `stable` pods fits together. Without a list everything does. One of stable's stays to compare
/// with where that leaves a place for the canary; beyond that the canary comes first, and stable keeps what it can.
pub fn split(wanted: i32, stable: i32, fits: &[i32]) -> Split {
    let Some(beside_none) = fits.first() else {
        return Split {
            canary: wanted,
            stable,
        };
    };
    let beside_one = fits.get(1).copied().unwrap_or(0);
    let most = if beside_one > 0 {
        beside_one
    } else {
        *beside_none
    };
    // What someone wrote into the status may be no list of room at all.
    let canary = wanted.min(most).max(wanted.min(1));
    let kept = fits.iter().rposition(|fit| *fit >= canary).unwrap_or(0);
    let kept = i32::try_from(kept).unwrap_or(i32::MAX);
    Split {
        canary,
        stable: kept.clamp(0, stable.max(0)),
    }
}

/// How a canary finds room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    /// Beside stable.
    Beside,
    /// Not all of it beside all of stable: of its pods so many fit when stable keeps 0, 1, 2, … of its own.
    Instead {
        /// The list.
        fits: Vec<i32>,
        /// What that costs.
        gap: String,
    },
    /// Not at all, and why.
    Nowhere(String),
}

/// How `wanted` pods of a canary, and `peak` of them in the end, find room beside stable's. A room that is not known is left to the
/// scheduler.
pub fn fit(valid: &ValidService, (wanted, peak): (i32, i32), room: Option<&Room>) -> Fit {
    let surge = valid.rollout.surge;
    let replicas = valid.replicas;
    let fits = match (surge, room) {
        (Surge::Always, _) | (Surge::Auto, None) => return Fit::Beside,
        (Surge::Auto, Some(room)) => extended(room, replicas),
        (Surge::Never, room) => one_for_one(room, replicas),
    };
    // What a promotion must end with: as many pods as stable has now.
    let placed = room.map_or(1, |room| room.fits.len().saturating_sub(1));
    let all = replicas
        .min(i32::try_from(placed).unwrap_or(replicas))
        .max(1);
    let ends = fits.first().is_some_and(|alone| *alone >= all);
    let beside = fits.last().copied().unwrap_or(0);
    if ends && beside >= wanted {
        return Fit::Beside;
    }
    let why = why(surge, room, (wanted, beside));
    let refused = |what: &str| Fit::Nowhere(format!("{why}, {what}; stable is left as it is"));
    if !ends {
        let alone = fits.first().copied().unwrap_or(0);
        return refused(&format!(
            "and for {alone} of {all} if stable left: free some, lower spec.engine.resources, or set spec.rollout.surge to Always where the cluster adds nodes for pods that wait"
        ));
    }
    let last = split(peak, replicas, &fits);
    let mut gates = valid.gates.iter();
    let relative = gates.find(|gate| gate.on_failure != OnFailure::Record && gate.max.is_none());
    if let (Some(gate), 0) = (relative, last.stable) {
        return refused(&format!(
            "and gate {} only compares with stable, which would have to leave: give it a limit of its own",
            gate.name
        ));
    }
    if canary::mirrors(&valid.rollout) && last.stable == 0 {
        return refused(
            "and rollout.steps mirrors, which needs stable to answer, and it would have to leave: make room for one pod beside it, or remove the step with mirror",
        );
    }
    let first = split(wanted, replicas, &fits);
    let gap = match (first.stable, last.stable) {
        (0, _) => "stable leaves before the canary comes: nothing serves until the canary's pods are ready, and going back has the same gap; limits over stable are not judged".to_owned(),
        (now, end) => format!(
            "stable keeps {now} of its {replicas} pods beside {} of the canary's, and {end} beside {} in the end",
            first.canary, last.canary
        ),
    };
    Fit::Instead {
        fits,
        gap: format!("{why}: {gap}"),
    }
}

fn why(surge: Surge, room: Option<&Room>, (wanted, beside): (i32, i32)) -> String {
    let never = "spec.rollout.surge is Never";
    match (surge, room) {
        (Surge::Never, None) => never.into(),
        (Surge::Never, Some(room)) => format!("{never} ({} each; free: {})", room.asked, room.free),
        (Surge::Auto | Surge::Always, room) => room.map_or_else(String::new, |room| {
            format!(
                "room for {beside} of {wanted} more pods ({} each; free: {})",
                room.asked, room.free
            )
        }),
    }
}

/// The list for all of stable's pods, of which some have no node yet: each of those takes the place of one of the canary's.
fn extended(room: &Room, replicas: i32) -> Vec<i32> {
    let count = usize::try_from(replicas.max(0)).unwrap_or(0) + 1;
    let mut fits: Vec<i32> = room
        .fits
        .iter()
        .map(|fit| (*fit).max(0))
        .take(count)
        .collect();
    while fits.len() < count {
        let last = fits.last().copied().unwrap_or(0);
        fits.push((last - 1).max(0));
    }
    fits
}

/// The list of a canary that only takes stable's places.
fn one_for_one(room: Option<&Room>, replicas: i32) -> Vec<i32> {
    let places = (0..=replicas.max(0)).map(|kept| replicas - kept);
    match room {
        None => places.collect(),
        Some(room) => {
            let fits = extended(room, replicas);
            places
                .zip(fits)
                .map(|(place, fit)| place.min(fit))
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use mixquant_crds::MixQuantService;
    use proptest::prelude::*;

    use super::*;
    use crate::validate::validate;

    fn service(replicas: i32, surge: Surge) -> ValidService {
        let text = include_str!("../../crds/examples/chat.yaml");
        let mut service: MixQuantService = serde_norway::from_str(text).unwrap();
        service.metadata.namespace = Some("default".into());
        service.metadata.uid = Some("uid".into());
        service.spec.replicas = replicas;
        service.spec.rollout.surge = surge;
        validate(&service).unwrap()
    }

    fn room(fits: &[i32]) -> Room {
        Room {
            fits: fits.to_vec(),
            asked: "nvidia.com/gpu 1".into(),
            free: "node a 0: nvidia.com/gpu, 0 of 1 free".into(),
        }
    }

    fn splits(fits: &[i32], stable: i32) -> Vec<(i32, i32)> {
        let all = (1..=4).map(|wanted| split(wanted, stable, fits));
        all.map(|split| (split.canary, split.stable)).collect()
    }

    #[test]
    fn the_canary_grows_into_stables_places_and_leaves_it_one() {
        assert_eq!(splits(&[], 2), [(1, 2), (2, 2), (3, 2), (4, 2)]);
        // One place, one pod.
        assert_eq!(splits(&[1, 0], 1), [(1, 0); 4]);
        // Two places, both stable's: one each to the end.
        assert_eq!(splits(&[2, 1, 0], 2), [(1, 1); 4]);
        // Three places, two of them stable's.
        assert_eq!(splits(&[3, 2, 1], 2), [(1, 2), (2, 1), (2, 1), (2, 1)]);
        // Four GPUs, stable has two pods of one, the canary's pods take two.
        assert_eq!(splits(&[2, 1, 1], 2), [(1, 2); 4]);
        // And three GPUs.
        assert_eq!(splits(&[1, 1, 0], 2), [(1, 1); 4]);
    }

    #[test]
    fn what_fits_beside_stable_is_added_and_what_fits_nowhere_waits() {
        let auto = service(1, Surge::Auto);
        assert_eq!(fit(&auto, (1, 1), None), Fit::Beside);
        assert_eq!(fit(&auto, (1, 1), Some(&room(&[2, 1]))), Fit::Beside);
        let Fit::Instead { fits, gap } = fit(&auto, (1, 1), Some(&room(&[1, 0]))) else {
            panic!("one GPU");
        };
        assert_eq!(fits, [1, 0]);
        assert!(
            gap.starts_with("room for 0 of 1 more pods (nvidia.com/gpu 1 each; free: node a 0")
        );
        assert!(gap.contains("nothing serves until"), "{gap}");
        let Fit::Nowhere(why) = fit(&auto, (1, 1), Some(&room(&[0, 0]))) else {
            panic!("none");
        };
        assert!(why.contains("for 0 of 1 if stable left"), "{why}");
        // A first step that fits is no use when the whole never will.
        let three = service(3, Surge::Auto);
        let full = fit(&three, (1, 3), Some(&room(&[2, 2, 1, 1])));
        assert!(matches!(full, Fit::Nowhere(_)), "{full:?}");
        // Stable itself has two of its three pods: the canary needs no more.
        assert!(matches!(
            fit(&three, (1, 3), Some(&room(&[2, 1, 0]))),
            Fit::Instead { .. }
        ));
        assert_eq!(
            fit(&service(1, Surge::Always), (1, 1), Some(&room(&[0, 0]))),
            Fit::Beside
        );
        for known in [None, Some(room(&[5, 4, 3]))] {
            let never = fit(&service(2, Surge::Never), (1, 2), known.as_ref());
            assert!(
                matches!(never, Fit::Instead { ref fits, .. } if *fits == [2, 1, 0]),
                "{never:?}"
            );
        }
    }

    #[test]
    fn a_gate_that_only_compares_keeps_stable_from_leaving() {
        let mut auto = service(1, Surge::Auto);
        for gate in &mut auto.gates {
            gate.max = None;
        }
        let Fit::Nowhere(why) = fit(&auto, (1, 1), Some(&room(&[1, 0]))) else {
            panic!("it could never pass");
        };
        assert!(why.contains("gate tpot only compares with stable"), "{why}");
        // Where one of stable's pods stays there is something to compare with.
        let mut two = service(2, Surge::Auto);
        two.gates.clone_from(&auto.gates);
        assert!(matches!(
            fit(&two, (1, 2), Some(&room(&[2, 1, 0]))),
            Fit::Instead { .. }
        ));
    }

    proptest! {
        /// Whatever the list: what is split fits by the list, the canary never shrinks as more is wanted, and stable never grows.
        #[test]
        fn a_split_fits_and_only_moves_towards_the_canary(
            mut fits in prop::collection::vec(0_i32..20, 1..12), wanted in 1_i32..30
        ) {
            fits.sort_by_key(|fit| std::cmp::Reverse(*fit));
            fits[0] = fits[0].max(1);
            let stable = i32::try_from(fits.len()).unwrap() - 1;
            let now = split(wanted, stable, &fits);
            prop_assert!(now.canary >= 1 && now.canary <= wanted);
            prop_assert!(fits[usize::try_from(now.stable).unwrap()] >= now.canary);
            prop_assert!(now.stable > 0 || stable == 0 || fits[1] == 0);
            let more = split(wanted + 1, stable, &fits);
            prop_assert!(more.canary >= now.canary && more.stable <= now.stable);
        }

        /// A forged list gives numbers that are numbers of pods.
        #[test]
        fn no_list_asks_for_less_than_nothing(
            fits in prop::collection::vec(any::<i32>(), 0..5), wanted in 0_i32..9, stable in 0_i32..9
        ) {
            let split = split(wanted, stable, &fits);
            prop_assert!(split.canary >= 0 && split.canary <= wanted);
            prop_assert!(split.stable >= 0 && split.stable <= stable);
        }
    }
}
