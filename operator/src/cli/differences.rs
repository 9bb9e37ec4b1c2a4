//! What differs between two values, by path: how a revision is told from another. Pure.

use serde::Serialize;
use serde_json::Value;

/// One place that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// Where, such as `template.spec.containers[engine].args`.
    pub path: String,
    /// What the first says; `None` when it says nothing.
    pub from: Option<String>,
    /// What the second says.
    pub to: Option<String>,
}

/// Every place where `to` differs from `from`, in the order of their keys.
pub fn differences(from: &Value, to: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    compare(String::new(), from, to, &mut found);
    found
}

fn compare(path: String, from: &Value, to: &Value, found: &mut Vec<Difference>) {
    match (from, to) {
        (Value::Object(one), Value::Object(two)) => {
            let new = two.keys().filter(|key| !one.contains_key(*key));
            for key in one.keys().chain(new) {
                let inner = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                let of =
                    |map: &serde_json::Map<_, Value>| map.get(key).cloned().unwrap_or_default();
                compare(inner, &of(one), &of(two), found);
            }
        }
        (Value::Array(one), Value::Array(two)) if named(one) && named(two) => {
            let new = two
                .iter()
                .filter(|item| with_name(one, name(item)).is_null());
            for item in one.iter().chain(new) {
                let name = name(item);
                let inner = format!("{path}[{name}]");
                compare(inner, with_name(one, name), with_name(two, name), found);
            }
        }
        (Value::Array(one), Value::Array(two)) if plain(one) && plain(two) => {
            let missing = |these: &[Value], those: &[Value]| {
                let these = these.iter().filter(|item| !those.contains(item));
                these.map(text).collect::<Vec<_>>().join(" ")
            };
            let (gone, new) = (missing(one, two), missing(two, one));
            if one != two {
                let some = |text: String| (!text.is_empty()).then_some(text);
                found.push(Difference {
                    path,
                    from: some(gone),
                    to: some(new),
                });
            }
        }
        (from, to) if from == to => {}
        (from, to) => {
            let some = |value: &Value| (!value.is_null()).then(|| text(value));
            found.push(Difference {
                path,
                from: some(from),
                to: some(to),
            });
        }
    }
}

fn name(item: &Value) -> &str {
    item["name"].as_str().unwrap_or_default()
}

fn named(list: &[Value]) -> bool {
    !list.is_empty() && list.iter().all(|item| item["name"].is_string())
}

fn with_name<'a>(list: &'a [Value], wanted: &str) -> &'a Value {
    let found = list.iter().find(|item| name(item) == wanted);
    found.unwrap_or(&Value::Null)
}

fn plain(list: &[Value]) -> bool {
    list.iter()
        .all(|item| !item.is_object() && !item.is_array())
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_values_do_not_differ() {
        let value = json!({"a": [{"name": "x", "b": [1, 2]}], "c": null});
        assert_eq!(differences(&value, &value), []);
    }

    #[test]
    fn a_difference_names_its_place_and_both_sides() {
        let from =
            json!({"image": "a", "list": [{"name": "x", "args": ["--a=1", "--b"]}], "gone": 1});
        let to =
            json!({"image": "b", "list": [{"name": "x", "args": ["--a=2", "--b"]}, {"name": "y"}]});
        let found = differences(&from, &to);
        let lines: Vec<String> = found
            .iter()
            .map(|one| format!("{} {:?} {:?}", one.path, one.from, one.to))
            .collect();
        assert_eq!(
            lines,
            [
                r#"gone Some("1") None"#,
                r#"image Some("a") Some("b")"#,
                r#"list[x].args Some("--a=1") Some("--a=2")"#,
                r#"list[y] None Some("{\"name\":\"y\"}")"#,
            ]
        );
    }

    #[test]
    fn another_order_of_arguments_is_a_difference() {
        let found = differences(&json!(["a", "b"]), &json!(["b", "a"]));
        assert_eq!(found.len(), 1);
    }
}
