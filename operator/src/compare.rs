//! Whether a stored object already says what we would write, and the smallest merge patch between two states. Pure; used by `apply` and `observe`.
//!
//! The API fills in defaults and rewrites quantities, and others may add fields of their own. So "the same" means: everything that we say is there.

use serde_json::{Map, Value};

/// Whether `live` holds everything that `desired` says. Lists of plain values must be equal; of a list of objects each must be covered
/// by one of `live`'s, which may have more.
pub fn covers(live: &Value, desired: &Value) -> bool {
    match (live, desired) {
        (_, Value::Null) => true,
        (Value::Object(live), Value::Object(desired)) => desired.iter().all(|(key, value)| {
            let live = live.get(key).unwrap_or(&Value::Null);
            match key.as_str() {
                "requests" | "limits" => same_quantities(live, value),
                // One more label selects fewer pods: a selector is the same only as a whole.
                "selector" => live == value,
                // One more rule opens a policy or takes a route's requests: rules are the same only as a whole. None and an empty list are
                // the same.
                "ingress" | "egress" | "rules" | "parentRefs" | "hostnames" => {
                    same(live, value) || (is_empty(live) && is_empty(value))
                }
                _ => covers(live, value),
            }
        }),
        (Value::Array(live), Value::Array(desired)) => {
            if desired.iter().all(Value::is_object) {
                desired
                    .iter()
                    .all(|item| live.iter().any(|live| covers(live, item)))
            } else {
                live == desired
            }
        }
        (live, desired) => live == desired,
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

fn same_quantities(live: &Value, desired: &Value) -> bool {
    let (Value::Object(live), Value::Object(desired)) = (live, desired) else {
        return live == desired;
    };
    desired.iter().all(|(name, wanted)| {
        live.get(name).is_some_and(|stored| {
            stored == wanted
                || match (stored.as_str(), wanted.as_str()) {
                    (Some(stored), Some(wanted)) => {
                        let stored = quantity(stored);
                        stored.is_some() && stored == quantity(wanted)
                    }
                    _ => false,
                }
        })
    })
}

/// A quantity in billionths; `None` when it is none, or too large or too fine to be compared exactly.
pub fn quantity(text: &str) -> Option<i128> {
    let end = text
        .find(|c: char| !matches!(c, '0'..='9' | '.' | '+' | '-'))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 9 || whole.len() > 15 {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let billionths = digits * 10_i128.pow(9 - u32::try_from(fraction.len()).ok()?);
    let binary = |power| billionths.checked_mul(1024_i128.pow(power));
    let decimal = |power: u32| billionths.checked_mul(10_i128.pow(power));
    let fine = |power: u32| {
        let divisor = 10_i128.pow(power);
        (billionths % divisor == 0).then_some(billionths / divisor)
    };
    match suffix {
        "" => Some(billionths),
        "n" => fine(9),
        "u" => fine(6),
        "m" => fine(3),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        _ => exponent(suffix).and_then(decimal),
    }
}

fn exponent(suffix: &str) -> Option<u32> {
    let digits = suffix.strip_prefix(['e', 'E'])?;
    digits.parse().ok().filter(|power| *power <= 18)
}

/// The JSON merge patch that turns `old` into `new`; `None` when they are the same. Absent and null are the same.
pub fn merge_patch(old: &Value, new: &Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let mut patch = Map::new();
            for (key, value) in old {
                if !value.is_null() && new.get(key).is_none_or(Value::is_null) {
                    patch.insert(key.clone(), Value::Null);
                }
            }
            for (key, value) in new {
                let before = old.get(key).unwrap_or(&Value::Null);
                if let Some(change) = merge_patch(before, value) {
                    patch.insert(key.clone(), change);
                }
            }
            (!patch.is_empty()).then_some(Value::Object(patch))
        }
        (old, new) if same(old, new) => None,
        (_, new) => Some(new.clone()),
    }
}

/// Equal, with absent and null alike, and numbers compared as numbers: the API stores `1.0` as `1`.
fn same(one: &Value, two: &Value) -> bool {
    match (one, two) {
        (Value::Array(one), Value::Array(two)) => {
            one.len() == two.len() && one.iter().zip(two).all(|(one, two)| same(one, two))
        }
        (Value::Object(one), Value::Object(two)) => {
            let within = |some: &Map<String, Value>, other: &Map<String, Value>| {
                some.iter()
                    .all(|(key, value)| same(value, other.get(key).unwrap_or(&Value::Null)))
            };
            within(one, two) && within(two, one)
        }
        (Value::Number(one), Value::Number(two)) => one == two || one.as_f64() == two.as_f64(),
        (one, two) => one == two,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn defaults_and_foreign_fields_are_no_difference() {
        let desired =
            json!({"spec": {"replicas": 2, "containers": [{"name": "engine", "args": ["a"]}]}});
        let live = json!({"spec": {"replicas": 2, "paused": false, "containers": [
            {"name": "sidecar"}, {"name": "engine", "args": ["a"], "imagePullPolicy": "Always"}]}});
        assert!(covers(&live, &desired));
    }

    #[test]
    fn a_changed_or_missing_field_is_a_difference() {
        let desired = json!({"a": 1, "list": ["x"], "objects": [{"name": "n", "v": 1}]});
        for live in [
            json!({"a": 2, "list": ["x"], "objects": [{"name": "n", "v": 1}]}),
            json!({"a": 1, "list": ["x", "y"], "objects": [{"name": "n", "v": 1}]}),
            json!({"a": 1, "list": ["x"], "objects": [{"name": "n", "v": 2}]}),
            json!({"a": 1, "list": ["x"]}),
            json!({}),
            json!(null),
        ] {
            assert!(!covers(&live, &desired), "{live}");
        }
    }

    #[test]
    fn a_selector_with_one_more_label_is_a_difference() {
        let desired = json!({"spec": {"selector": {"a": "b"}}});
        let narrower = json!({"spec": {"selector": {"a": "b", "revision": "c"}}});
        assert!(covers(&desired, &desired));
        assert!(!covers(&narrower, &desired));
    }

    #[test]
    fn a_rule_more_in_a_policy_is_a_difference_and_none_is_an_empty_list() {
        let desired = json!({"ingress": [{"ports": [{"port": 8000}]}], "egress": []});
        assert!(covers(
            &json!({"ingress": [{"ports": [{"port": 8000}]}]}),
            &desired
        ));
        for live in [
            json!({"ingress": [{"ports": [{"port": 8000}]}, {}]}),
            json!({"ingress": [{"ports": [{"port": 8000}], "from": []}, {}]}),
            json!({"ingress": [{"ports": [{"port": 8000}]}], "egress": [{}]}),
        ] {
            assert!(!covers(&live, &desired), "{live}");
        }
    }

    #[test]
    fn quantities_are_compared_by_their_value() {
        for (stored, wanted) in [
            ("100m", "0.1"),
            ("1Gi", "1024Mi"),
            ("1", "1000m"),
            ("2e3", "2k"),
            ("1500m", "1.5"),
            ("3E", "3E"),
        ] {
            let live = json!({"limits": {"cpu": stored}});
            assert!(
                covers(&live, &json!({"limits": {"cpu": wanted}})),
                "{stored} {wanted}"
            );
        }
        for (stored, wanted) in [
            ("1Gi", "1G"),
            ("1", "2"),
            ("1x", "1y"),
            ("", "-"),
            ("1m", "1n"),
        ] {
            let live = json!({"limits": {"cpu": stored}});
            assert!(
                !covers(&live, &json!({"limits": {"cpu": wanted}})),
                "{stored} {wanted}"
            );
        }
    }

    #[test]
    fn a_merge_patch_removes_what_is_gone_and_is_nothing_when_nothing_changed() {
        let old = json!({"a": 1, "b": {"c": 2, "d": 3}, "list": [1], "gone": null});
        let new = json!({"a": 1, "b": {"c": 4, "d": null}, "list": [1, 2], "e": 5});
        assert_eq!(
            merge_patch(&old, &new),
            Some(json!({"b": {"c": 4, "d": null}, "list": [1, 2], "e": 5}))
        );
        assert_eq!(merge_patch(&old, &old), None);
        assert_eq!(
            merge_patch(&json!({"a": 1}), &json!({"a": 1.0, "b": null})),
            None
        );
        assert_eq!(
            merge_patch(&json!({"a": 1}), &json!({})),
            Some(json!({"a": null}))
        );
        assert_eq!(
            merge_patch(&json!(null), &json!({"a": 1})),
            Some(json!({"a": 1}))
        );
    }
}
