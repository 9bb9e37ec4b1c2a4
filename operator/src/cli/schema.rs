//! Checks a value against the structural part of the resource's own schema: types, unknown and missing fields, ranges, lengths, patterns.
//!
//! What an apiserver does before it evaluates the rules (CEL); those need the server. Pure; called by `lint`.

use fancy_regex::Regex;
use kube::CustomResourceExt as _;
use mixquant_crds::MixQuantService;
use serde_json::{Map, Value};

/// Problems that are told at most: the rest comes after the first are mended.
const MOST: usize = 50;
/// What every object has and the schema of a resource does not repeat.
const COMMON: [&str; 4] = ["apiVersion", "kind", "metadata", "status"];

/// The schema of `spec`, as the CRD has it.
///
/// # Panics
/// Never: the CRD is made from types of this program.
pub fn of_spec() -> Value {
    let crd = serde_json::to_value(MixQuantService::crd()).expect("a CRD is plain data");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// What is wrong with `object` as a `MixQuantService`, each with its path.
pub fn problems(object: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let Value::Object(fields) = object else {
        return vec!["the document is no object".into()];
    };
    for field in fields.keys() {
        if field != "spec" && !COMMON.contains(&field.as_str()) {
            found.push(format!(
                "{field}: unknown field; what a service asks for stands in spec"
            ));
        }
    }
    if object["metadata"]["name"]
        .as_str()
        .is_none_or(str::is_empty)
    {
        found.push("metadata.name: missing".into());
    }
    match fields.get("spec") {
        None | Some(Value::Null) => found.push("spec: missing".into()),
        Some(spec) => check("spec", spec, &of_spec(), &mut found),
    }
    found.truncate(MOST);
    found
}

fn check(path: &str, value: &Value, schema: &Value, found: &mut Vec<String>) {
    if found.len() >= MOST || (value.is_null() && schema["nullable"] == true) {
        return;
    }
    if schema["x-kubernetes-int-or-string"] == true {
        if !value.is_string() && !value.is_i64() && !value.is_u64() {
            found.push(format!(
                "{path}: write a number or a text, not {}",
                kind(value)
            ));
        }
        return;
    }
    let wanted = schema["type"].as_str().unwrap_or_default();
    let fits = match wanted {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        _ => true,
    };
    if !fits {
        let hint = match (wanted, value) {
            ("string", Value::Number(number)) => format!(": write \"{number}\" in quotes"),
            _ => String::new(),
        };
        found.push(format!("{path}: write {wanted}, not {}{hint}", kind(value)));
        return;
    }
    if let Some(choices) = schema["enum"].as_array()
        && !choices.contains(value)
    {
        let choices: Vec<String> = choices.iter().map(plain).collect();
        found.push(format!(
            "{path}: `{}` is none of {}",
            plain(value),
            choices.join(", ")
        ));
    }
    match value {
        Value::Object(fields) => object(path, fields, schema, found),
        Value::Array(items) => {
            count(
                path,
                items.len(),
                schema,
                ("minItems", "maxItems", "items"),
                found,
            );
            repeated(path, items, schema, found);
            for (index, item) in items.iter().enumerate() {
                check(&format!("{path}[{index}]"), item, &schema["items"], found);
            }
        }
        Value::String(text) => string(path, text, schema, found),
        Value::Number(number) => range(path, number.as_f64(), schema, found),
        Value::Null | Value::Bool(_) => {}
    }
}

/// Items of a list whose keys make them one of a kind.
fn repeated(path: &str, items: &[Value], schema: &Value, found: &mut Vec<String>) {
    let keys = schema["x-kubernetes-list-map-keys"].as_array();
    let Some(keys) = keys.filter(|_| schema["x-kubernetes-list-type"] == "map") else {
        return;
    };
    let of = |item: &Value| -> Vec<Value> {
        let names = keys.iter().filter_map(Value::as_str);
        names.map(|name| item[name].clone()).collect()
    };
    for (index, item) in items.iter().enumerate() {
        if items[..index].iter().any(|earlier| of(earlier) == of(item)) {
            let keys: Vec<String> = of(item).iter().map(plain).collect();
            found.push(format!(
                "{path}[{index}]: `{}` is there twice",
                keys.join(", ")
            ));
        }
    }
}

fn object(path: &str, fields: &Map<String, Value>, schema: &Value, found: &mut Vec<String>) {
    for name in schema["required"].as_array().into_iter().flatten() {
        let name = name.as_str().unwrap_or_default();
        if fields.get(name).is_none_or(Value::is_null) {
            found.push(format!("{path}.{name}: missing"));
        }
    }
    count(
        path,
        fields.len(),
        schema,
        ("minProperties", "maxProperties", "entries"),
        found,
    );
    for (name, value) in fields {
        let inner = format!("{path}.{name}");
        let known = schema["properties"].get(name);
        match known.or(schema
            .get("additionalProperties")
            .filter(|more| more.is_object()))
        {
            Some(schema) if !value.is_null() => check(&inner, value, schema, found),
            // The apiserver drops a null that nothing allows.
            Some(_) => {}
            None => found.push(format!("{inner}: unknown field{}", similar(name, schema))),
        }
    }
}

/// The field that was probably meant.
fn similar(name: &str, schema: &Value) -> String {
    let lower = name.to_lowercase();
    let known = schema["properties"].as_object();
    let mut known = known.into_iter().flat_map(Map::keys);
    let meant = known.find(|known| {
        let known = known.to_lowercase();
        known.contains(&lower) || lower.contains(&known)
    });
    meant.map_or(String::new(), |meant| format!("; is `{meant}` meant?"))
}

fn count(
    path: &str,
    size: usize,
    schema: &Value,
    (least, most, what): (&str, &str, &str),
    found: &mut Vec<String>,
) {
    let size = u64::try_from(size).unwrap_or(u64::MAX);
    if schema[least].as_u64().is_some_and(|least| size < least) {
        found.push(format!("{path}: needs at least {} {what}", schema[least]));
    }
    if schema[most].as_u64().is_some_and(|most| size > most) {
        found.push(format!("{path}: takes at most {} {what}", schema[most]));
    }
}

fn string(path: &str, text: &str, schema: &Value, found: &mut Vec<String>) {
    count(
        path,
        text.chars().count(),
        schema,
        ("minLength", "maxLength", "characters"),
        found,
    );
    let Some(pattern) = schema["pattern"].as_str() else {
        return;
    };
    // A pattern that this program cannot read is left to the server.
    let matches = Regex::new(pattern).and_then(|pattern| pattern.is_match(text));
    if matches.is_ok_and(|matches| !matches) {
        let start: String = text.chars().take(80).collect();
        found.push(format!("{path}: `{start}` does not match {pattern}"));
    }
}

fn range(path: &str, number: Option<f64>, schema: &Value, found: &mut Vec<String>) {
    let (Some(number), least, most) = (number, &schema["minimum"], &schema["maximum"]) else {
        return;
    };
    let below = least.as_f64().is_some_and(|least| number < least);
    let above = most.as_f64().is_some_and(|most| number > most);
    if below || above {
        let bound = match (least.as_f64(), most.as_f64()) {
            (Some(least), Some(most)) => format!("must lie between {least} and {most}"),
            (Some(least), None) => format!("must be at least {least}"),
            (None, Some(most)) => format!("must be at most {most}"),
            (None, None) => return,
        };
        found.push(format!("{path}: {number} {bound}"));
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}
