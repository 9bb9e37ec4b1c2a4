//! Spends a budget of bits on the places of a model where they save the most loss. Pure and deterministic.
//!
//! Every place begins at its cheapest choice. Then the upgrade with the largest saving a bit is bought, again and again, as long as it fits: the
//! greedy walk along each place's lower convex hull, which is optimal but for the last upgrade that does not fit.

/// One way to store a place's weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Bits in all.
    pub bits: f64,
    /// What it is expected to cost; any unit that adds up over places.
    pub loss: f64,
}

/// For each place the index of its choice, or nothing when even the cheapest ones exceed the budget.
///
/// # Panics
/// When a place has no choices.
pub fn allocate(places: &[Vec<Choice>], budget_bits: f64) -> Option<Vec<usize>> {
    let hulls: Vec<Vec<usize>> = places.iter().map(|choices| hull(choices)).collect();
    let mut at = vec![0; places.len()];
    let mut spent: f64 = places
        .iter()
        .zip(&hulls)
        .map(|(choices, hull)| choices[hull[0]].bits)
        .sum();
    if spent > budget_bits {
        return None;
    }
    let mut open: Vec<bool> = hulls.iter().map(|hull| hull.len() > 1).collect();
    loop {
        let mut best: Option<(f64, usize, f64)> = None;
        for (place, (choices, hull)) in places.iter().zip(&hulls).enumerate() {
            if !open[place] {
                continue;
            }
            let (from, to) = (choices[hull[at[place]]], choices[hull[at[place] + 1]]);
            let bits = to.bits - from.bits;
            let saving = (from.loss - to.loss) / bits;
            if best.is_none_or(|(most, ..)| saving > most) {
                best = Some((saving, place, bits));
            }
        }
        let Some((_, place, bits)) = best else {
            return Some(at.iter().zip(&hulls).map(|(at, hull)| hull[*at]).collect());
        };
        // Later upgrades of a place go on from this one, so one that does not fit ends its place.
        if spent + bits > budget_bits {
            open[place] = false;
            continue;
        }
        spent += bits;
        at[place] += 1;
        open[place] = at[place] + 1 < hulls[place].len();
    }
}

/// The choices worth having, by bits: each saves less loss a bit than the one before.
fn hull(choices: &[Choice]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by(|one, two| {
        let (one, two) = (choices[*one], choices[*two]);
        one.bits
            .total_cmp(&two.bits)
            .then(one.loss.total_cmp(&two.loss))
    });
    let mut hull: Vec<usize> = Vec::new();
    for index in order {
        if hull
            .last()
            .is_some_and(|last| choices[*last].loss <= choices[index].loss)
        {
            continue;
        }
        while let [.., before, last] = hull[..] {
            if saving(choices[before], choices[last]) > saving(choices[last], choices[index]) {
                break;
            }
            hull.pop();
        }
        hull.push(index);
    }
    hull
}

fn saving(from: Choice, to: Choice) -> f64 {
    (from.loss - to.loss) / (to.bits - from.bits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn choices() -> impl Strategy<Value = Vec<Vec<Choice>>> {
        let choice = (1_u16..100, 1_u16..1000).prop_map(|(bits, loss)| Choice {
            bits: f64::from(bits),
            loss: f64::from(loss),
        });
        proptest::collection::vec(proptest::collection::vec(choice, 1..4), 1..6)
    }

    fn total(places: &[Vec<Choice>], at: &[usize]) -> Choice {
        let chosen = places.iter().zip(at).map(|(choices, at)| choices[*at]);
        chosen.fold(
            Choice {
                bits: 0.0,
                loss: 0.0,
            },
            |sum, choice| Choice {
                bits: sum.bits + choice.bits,
                loss: sum.loss + choice.loss,
            },
        )
    }

    /// The least loss within the budget, by trying everything.
    fn best(places: &[Vec<Choice>], budget: f64) -> Option<f64> {
        let Some((first, rest)) = places.split_first() else {
            return (budget >= 0.0).then_some(0.0);
        };
        let tried = first
            .iter()
            .filter_map(|choice| Some(choice.loss + best(rest, budget - choice.bits)?));
        tried.min_by(f64::total_cmp)
    }

    proptest! {
        #[test]
        fn the_budget_is_kept_and_the_loss_is_that_of_the_best_but_for_one_upgrade(places in choices(), budget in 1_u16..400) {
            let budget = f64::from(budget);
            let found = allocate(&places, budget);
            prop_assert_eq!(found.is_some(), best(&places, budget).is_some());
            let Some(found) = found else { return Ok(()); };
            let total = total(&places, &found);
            prop_assert!(total.bits <= budget);
            // What one upgrade can save at most bounds the distance from the best.
            let most = places.iter().flat_map(|choices| choices.iter().flat_map(|one| choices.iter().map(|two| one.loss - two.loss))).fold(0.0, f64::max);
            prop_assert!(total.loss <= best(&places, budget).unwrap() + most);
        }

        #[test]
        fn with_all_the_bits_in_the_world_every_place_has_its_least_loss(places in choices()) {
            let found = allocate(&places, f64::INFINITY).unwrap();
            for (choices, at) in places.iter().zip(found) {
                let least = choices.iter().map(|choice| choice.loss).fold(f64::INFINITY, f64::min);
                prop_assert!((choices[at].loss - least).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn bits_go_where_they_save_most() {
        let place = |loss: f64| {
            vec![
                Choice { bits: 4.0, loss },
                Choice {
                    bits: 8.0,
                    loss: 0.0,
                },
            ]
        };
        let places = [place(1.0), place(9.0), place(3.0)];
        assert_eq!(allocate(&places, 11.0), None);
        assert_eq!(allocate(&places, 12.0), Some(vec![0, 0, 0]));
        assert_eq!(allocate(&places, 16.0), Some(vec![0, 1, 0]));
        assert_eq!(allocate(&places, 23.0), Some(vec![0, 1, 1]));
    }
}
