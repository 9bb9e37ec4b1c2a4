//! From a stored `HTTPRoute` to what `plan` may know of it: where its weights are, and whether its Gateways have taken them.

use kube::ResourceExt;
use serde_json::Value;

use super::plain;
use crate::build::meta::Owner;
use crate::build::route::{self, HTTPRoute, ParentStatus};
use crate::build::service::track_name;
use crate::canary::Share;
use crate::compare::covers;
use crate::error::one_line;
use crate::observed::{Backend, FoundRoute, RouteSplit, Track};
use crate::validate::OwnRoute;

/// What a Gateway must say of a route, and what some say too.
const CONDITIONS: [(&str, bool); 3] = [
    ("Accepted", true),
    ("ResolvedRefs", true),
    ("Programmed", false),
];

/// A route of `owner`, which is `own` or a user's.
pub fn route(owner: &Owner, live: &HTTPRoute, own: Option<&OwnRoute>) -> FoundRoute {
    let splits = splits(owner, live);
    let share = Share {
        weight: splits.first().map_or(0, |split| split.canary.weight),
        mirror: own.and_then(|_| mirror(owner, live, splits.first()?)),
    };
    let matches = own.is_none_or(|own| {
        let desired = route::route(owner, own, share);
        covers(&plain(live), &plain(&desired))
    });
    FoundRoute {
        uid: live.uid().unwrap_or_default(),
        resource_version: live.resource_version().unwrap_or_default(),
        matches,
        splits,
        mirror: share.mirror,
        problem: problem(live),
    }
}

/// Percent that the rule of `split` copies to the canary; one that says no percentage copies all.
fn mirror(owner: &Owner, live: &HTTPRoute, split: &RouteSplit) -> Option<i32> {
    let name = track_name(&owner.name, Track::Canary);
    let mut filters = live.spec.rules.get(split.rule)?["filters"]
        .as_array()?
        .iter();
    let to_canary = |filter: &&Value| filter["requestMirror"]["backendRef"]["name"] == name;
    let percent = &filters.find(to_canary)?["requestMirror"]["percent"];
    percent
        .as_i64()
        .map_or(Some(100), |percent| i32::try_from(percent).ok())
}

/// The rules whose backends are both tracks; what else a rule refers to is its user's affair.
fn splits(owner: &Owner, live: &HTTPRoute) -> Vec<RouteSplit> {
    let rules = live.spec.rules.iter().enumerate();
    rules
        .filter_map(|(rule, said)| {
            Some(RouteSplit {
                rule,
                stable: backend(owner, said, Track::Stable)?,
                canary: backend(owner, said, Track::Canary)?,
            })
        })
        .collect()
}

fn backend(owner: &Owner, rule: &Value, track: Track) -> Option<Backend> {
    let name = track_name(&owner.name, track);
    let mut all = rule["backendRefs"].as_array()?.iter();
    let is_ours = |backend: &Value| {
        word(backend, "name", "") == name
            && word(backend, "kind", "Service") == "Service"
            && word(backend, "group", "").is_empty()
            && word(backend, "namespace", &owner.namespace) == owner.namespace
    };
    let place = all.position(is_ours)?;
    let weight = rule["backendRefs"][place]["weight"].as_i64().unwrap_or(1);
    Some(Backend {
        place,
        weight: i32::try_from(weight).ok()?,
    })
}

fn word<'a>(object: &'a Value, field: &str, default: &'a str) -> &'a str {
    object[field].as_str().unwrap_or(default)
}

/// What its Gateways have not taken of the newest generation.
fn problem(live: &HTTPRoute) -> Option<String> {
    if live.spec.parent_refs.is_empty() {
        return Some("it names no Gateway: add parentRefs".into());
    }
    let mut parents = live.spec.parent_refs.iter();
    parents.find_map(|parent| problem_of(live, parent))
}

fn problem_of(live: &HTTPRoute, parent: &Value) -> Option<String> {
    let namespace = live.namespace().unwrap_or_default();
    let status = live.status.as_ref();
    let said = status.iter().flat_map(|status| &status.parents);
    let mut said = said
        .filter(|said| is_same(parent, &said.parent_ref, &namespace))
        .peekable();
    let name = format!(
        "{} {}",
        word(parent, "kind", "Gateway"),
        word(parent, "name", "")
    );
    if said.peek().is_none() {
        return Some(format!("{name} has said nothing of it yet"));
    }
    let generation = live.metadata.generation.unwrap_or(0);
    said.find_map(|said| not_taken(said, generation))
        .map(|why| one_line(&format!("{name} {why}")))
}

fn is_same(one: &Value, two: &Value, namespace: &str) -> bool {
    let same = |field: &str, default: &str| word(one, field, default) == word(two, field, default);
    same("group", route::GROUP)
        && same("kind", "Gateway")
        && same("name", "")
        && same("namespace", namespace)
        && same("sectionName", "")
        && one["port"] == two["port"]
}

fn not_taken(said: &ParentStatus, generation: i64) -> Option<String> {
    CONDITIONS.into_iter().find_map(|(kind, needed)| {
        let mut all = said.conditions.iter();
        let Some(condition) = all.find(|condition| condition.type_ == kind) else {
            return needed.then(|| format!("has not said {kind} yet"));
        };
        if condition.observed_generation.unwrap_or(0) < generation {
            return Some(format!("has not seen its generation {generation} yet"));
        }
        (condition.status != "True").then(|| {
            format!(
                "says {kind}={} {}: {}",
                condition.status, condition.reason, condition.message
            )
        })
    })
}
