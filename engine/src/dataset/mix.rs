//! A calibration set mixed like the tasks that the model will serve: so much of each `kind` or `task`. Pure.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::{Window, sample};
use crate::error::{Error, Result};

/// Shares by kind, such as `agent=3,documentation=1`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix(BTreeMap<String, f64>);

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut shares = BTreeMap::new();
        for part in text.split(',') {
            let wrong = || {
                format!(
                    "`{part}` is not a kind and its share: write such as agent=3,documentation=1"
                )
            };
            let (kind, share) = part.split_once('=').ok_or_else(wrong)?;
            let share: f64 = share.trim().parse().map_err(|_| wrong())?;
            if !(share.is_finite() && share > 0.0) || kind.trim().is_empty() {
                return Err(wrong());
            }
            if shares.insert(kind.trim().to_owned(), share).is_some() {
                return Err(format!("{} is given twice", kind.trim()));
            }
        }
        Ok(Self(shares))
    }
}

/// `count` windows with the shares of the mix, each kind spread over the file, and those left over; both in the order of kinds.
///
/// # Errors
/// A kind that the data lacks, or too few windows of one: says how many there are.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count is a count"
)]
pub fn mixed(
    name: &str,
    windows: Vec<Window>,
    count: usize,
    mix: &Mix,
) -> Result<(Vec<Window>, Vec<Window>)> {
    let mut kinds: BTreeMap<String, Vec<Window>> = BTreeMap::new();
    for window in windows {
        let kind = window.slice.clone().unwrap_or_default();
        kinds.entry(kind).or_default().push(window);
    }
    let total: f64 = mix.0.values().sum();
    let (mut chosen, mut rest) = (Vec::new(), Vec::new());
    // The counts of all kinds up to here, rounded: together they are the whole.
    let (mut so_far, mut taken) = (0.0, 0);
    for (kind, share) in &mix.0 {
        let Some(windows) = kinds.remove(kind) else {
            let shown = |kind: &String| match kind.as_str() {
                "" => "texts without a kind".to_owned(),
                kind => kind.to_owned(),
            };
            let known: Vec<String> = kinds.keys().take(8).map(shown).collect();
            return Err(Error::data(format!(
                "{name} has no texts of the kind {kind}: it has {}",
                known.join(", ")
            )));
        };
        so_far += share;
        let want = (count as f64 * so_far / total).round() as usize - taken;
        taken += want;
        if want == 0 {
            rest.extend(windows);
            continue;
        }
        let (own, left) = sample(&format!("{name} ({kind})"), windows, want)?;
        chosen.extend(own);
        rest.extend(left);
    }
    rest.extend(kinds.into_values().flatten());
    Ok((chosen, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows() -> Vec<Window> {
        (0..20_u32)
            .map(|index| Window {
                ids: vec![index, index],
                slice: Some(if index % 4 == 0 { "agent" } else { "text" }.to_owned()),
            })
            .collect()
    }

    fn mix(text: &str, count: usize) -> Result<(Vec<Window>, Vec<Window>)> {
        mixed("data", windows(), count, &text.parse().unwrap())
    }

    #[test]
    fn each_kind_has_its_share_and_the_rest_is_disjoint() {
        let (chosen, rest) = mix("text=1, agent=1", 8).unwrap();
        let agents = chosen
            .iter()
            .filter(|window| window.slice.as_deref() == Some("agent"));
        assert_eq!((agents.count(), chosen.len(), rest.len()), (4, 8, 12));
        assert!(rest.iter().all(|window| !chosen.contains(window)));
        assert_eq!(mix("text=2,agent=1", 7).unwrap().0.len(), 7);
        assert_eq!(mix("agent=1,text=1000", 3).unwrap().0.len(), 3);
    }

    #[test]
    fn a_mix_that_cannot_be_had_is_refused_with_what_there_is() {
        let error = mix("code=1,text=1", 4).unwrap_err();
        assert!(
            error
                .message
                .contains("no texts of the kind code: it has agent, text"),
            "{error}"
        );
        let error = mix("agent=1", 6).unwrap_err();
        assert!(
            error.message.contains("data (agent) gives only 5 samples"),
            "{error}"
        );
        for text in ["", "a", "a=", "a=0", "a=-1", "a=inf", "=1", "a=1,"] {
            assert!(
                text.parse::<Mix>().unwrap_err().contains("write such as"),
                "{text}"
            );
        }
        assert!("a=1,a=2".parse::<Mix>().unwrap_err().contains("twice"));
    }
}
