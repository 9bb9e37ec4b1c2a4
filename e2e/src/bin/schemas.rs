//! Writes JSON schemas of the Kubernetes kinds for kubeconform, from the `OpenAPI` document of the pinned Kubernetes: `schemas FOLDER`.
//!
//! kubeconform would fetch such files from the network; these are made from what the Go module cache holds, and are strict (no unknown field).
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for scripts"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use mixquant_e2e::means;
use serde_json::{Map, Value, json};

fn main() -> ExitCode {
    match run() {
        Ok(count) => {
            println!("{count} schemas");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<usize> {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        bail!("usage: schemas FOLDER")
    };
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let document = openapi_document()?;
    let text =
        std::fs::read_to_string(&document).with_context(|| document.display().to_string())?;
    let mut document: Value = serde_json::from_str(&text).context("the OpenAPI document")?;
    let Value::Object(mut definitions) = document["definitions"].take() else {
        bail!("the OpenAPI document has no definitions")
    };
    for definition in definitions.values_mut() {
        tighten(definition);
    }
    loosen_scalars(&mut definitions);
    let mut count = 0;
    for (name, definition) in &definitions {
        for kind in definition["x-kubernetes-group-version-kind"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
        {
            write_schema(&folder, &definitions, name, kind)?;
            count += 1;
        }
    }
    Ok(count)
}

/// The file in the Go module cache; the module is fetched when the cache has lost it.
fn openapi_document() -> anyhow::Result<PathBuf> {
    let module = means::repository().join("e2e/cluster/kubernetes");
    let output = Command::new("go")
        .args(["mod", "download", "-json", "k8s.io/kubernetes"])
        .current_dir(&module)
        .output()
        .context("go")?;
    if !output.status.success() {
        bail!(
            "go mod download k8s.io/kubernetes: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    let folder = answer["Dir"]
        .as_str()
        .context("go mod download names no folder")?;
    Ok(Path::new(folder).join("api/openapi-spec/swagger.json"))
}

/// Refuses unknown fields wherever the fields are listed, and drops the formats, which JSON Schema does not know.
fn tighten(schema: &mut Value) {
    let Value::Object(fields) = schema else {
        return;
    };
    fields.remove("format");
    if fields.contains_key("properties") && !fields.contains_key("additionalProperties") {
        fields.insert("additionalProperties".into(), json!(false));
    }
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.values_mut().for_each(tighten);
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = fields.get_mut(key) {
            tighten(inner);
        }
    }
}

/// Types that YAML may spell as a number or a text.
fn loosen_scalars(definitions: &mut Map<String, Value>) {
    for name in [
        "io.k8s.apimachinery.pkg.util.intstr.IntOrString",
        "io.k8s.apimachinery.pkg.api.resource.Quantity",
    ] {
        definitions.insert(name.to_owned(), json!({"type": ["string", "number"]}));
    }
}

fn write_schema(
    folder: &Path,
    definitions: &Map<String, Value>,
    name: &str,
    kind: &Value,
) -> anyhow::Result<()> {
    let word = |field: &str| kind[field].as_str().unwrap_or("").to_lowercase();
    let group = word("group")
        .split('.')
        .next()
        .map_or(String::new(), |group| {
            if group.is_empty() {
                String::new()
            } else {
                format!("-{group}")
            }
        });
    let mut needed = BTreeSet::new();
    collect(definitions, name, &mut needed);
    let used: Map<String, Value> = needed
        .into_iter()
        .map(|name| (name.to_owned(), definitions[name].clone()))
        .collect();
    let schema = json!({"$ref": format!("#/definitions/{name}"), "definitions": used});
    let file = folder.join(format!("{}{group}-{}.json", word("kind"), word("version")));
    std::fs::write(&file, schema.to_string()).with_context(|| file.display().to_string())
}

/// Adds `name` and every definition that it reaches.
fn collect<'a>(definitions: &'a Map<String, Value>, name: &str, needed: &mut BTreeSet<&'a str>) {
    let Some((name, definition)) = definitions.get_key_value(name) else {
        return;
    };
    if needed.insert(name) {
        let mut pending = vec![definition];
        while let Some(value) = pending.pop() {
            match value {
                Value::Object(fields) => {
                    if let Some(target) = fields.get("$ref").and_then(Value::as_str) {
                        collect(
                            definitions,
                            target.trim_start_matches("#/definitions/"),
                            needed,
                        );
                    }
                    pending.extend(fields.values());
                }
                Value::Array(items) => pending.extend(items),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
            }
        }
    }
}
