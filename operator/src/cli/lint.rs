//! Is a manifest right? By the schema and by what the operator itself checks, and by the cluster's own rules when there is one.
//!
//! Pure; the server's words are handed in. Says which of the checks ran, so that a clean answer is not taken for more than it is.

use mixquant_crds::MixQuantService;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Exit;
use super::answer::Plain;
use super::schema;
use super::table::{Style, Tone, push};
use crate::error::one_line;
use crate::validate::{InvalidSpec, validate};

/// What was found in all manifests.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// One for each document.
    pub documents: Vec<Linted>,
    /// The checks that ran.
    pub checks: Vec<&'static str>,
    /// Why the server's rules were not asked.
    pub skipped: Option<String>,
}

/// A document of a manifest.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Linted {
    /// The file.
    pub file: String,
    /// Its place in it, from 1.
    pub document: usize,
    /// The service.
    pub name: Option<String>,
    /// What is wrong, each with the fix where it is known.
    pub problems: Vec<String>,
    /// The object, for the server.
    #[serde(skip)]
    pub object: Value,
}

/// What the operator calls each check.
pub const SCHEMA: &str = "schema";
/// See [`SCHEMA`].
pub const OPERATOR: &str = "operator";
/// See [`SCHEMA`].
pub const SERVER: &str = "server (CEL rules and admission)";

/// The documents of a file that are services; those of other kinds are none of ours.
pub fn documents(file: &str, text: &str) -> Vec<Linted> {
    let mut found = Vec::new();
    for (index, document) in serde_norway::Deserializer::from_str(text).enumerate() {
        let linted = |name: Option<&str>, problems, object| Linted {
            file: file.to_owned(),
            document: index + 1,
            name: name.map(str::to_owned),
            problems,
            object,
        };
        let object = match Value::deserialize(document) {
            Ok(Value::Null) => continue,
            Ok(object) => object,
            Err(error) => {
                // The reader cannot go on behind a syntax error.
                let problem = one_line(&format!("no YAML: {error}"));
                found.push(linted(None, vec![problem], Value::Null));
                break;
            }
        };
        let name = object["metadata"]["name"].as_str().map(str::to_owned);
        match (object["apiVersion"].as_str(), object["kind"].as_str()) {
            (Some("mixquant.io/v1alpha1"), Some("MixQuantService")) => {
                found.push(linted(name.as_deref(), check(&object), object));
            }
            (Some(version), Some("MixQuantService")) => {
                let problem =
                    format!("apiVersion: `{version}` is not known: write mixquant.io/v1alpha1");
                found.push(linted(name.as_deref(), vec![problem], object));
            }
            (None, _) | (_, None) => {
                let problem =
                    "apiVersion or kind is missing: write mixquant.io/v1alpha1 and MixQuantService"
                        .into();
                found.push(linted(name.as_deref(), vec![problem], object));
            }
            _ => {}
        }
    }
    if found.is_empty() {
        found.push(Linted {
            file: file.to_owned(),
            document: 1,
            name: None,
            problems: vec!["holds no MixQuantService".into()],
            object: Value::Null,
        });
    }
    found
}

/// What is wrong with one object, without a server.
pub fn check(object: &Value) -> Vec<String> {
    let problems = schema::problems(object);
    if !problems.is_empty() {
        return problems;
    }
    match read(object) {
        Err(error) => vec![error],
        Ok(service) => match validate(&service) {
            Ok(_) => Vec::new(),
            Err(InvalidSpec(problems)) => problems,
        },
    }
}

/// The service that `object` is, with what only the server gives.
///
/// # Errors
/// When it does not fit the types.
pub fn read(object: &Value) -> Result<MixQuantService, String> {
    let service = MixQuantService::deserialize(object);
    let mut service = service.map_err(|error| one_line(&error.to_string()))?;
    let metadata = &mut service.metadata;
    metadata.uid.get_or_insert_with(|| "none".into());
    metadata.namespace.get_or_insert_with(|| "default".into());
    Ok(service)
}

impl Report {
    /// What a script should do.
    pub fn exit(&self) -> Exit {
        let wrong = self
            .documents
            .iter()
            .any(|document| !document.problems.is_empty());
        if wrong { Exit::No } else { Exit::Done }
    }
}

impl Plain for Report {
    fn plain(&self, style: Style) -> String {
        let mut text = String::new();
        for document in &self.documents {
            let place = match &document.name {
                Some(name) => format!("{}: {name}", document.file),
                None => format!("{}: document {}", document.file, document.document),
            };
            let place = style.paint(Tone::Plain, &place);
            if document.problems.is_empty() {
                push(
                    &mut text,
                    format_args!("{place}: {}\n", style.paint(Tone::Good, "right")),
                );
            }
            for problem in &document.problems {
                push(
                    &mut text,
                    format_args!("{place}: {}\n", style.paint(Tone::Bad, problem)),
                );
            }
        }
        push(
            &mut text,
            format_args!("checked by: {}\n", self.checks.join(", ")),
        );
        if let Some(why) = &self.skipped {
            push(
                &mut text,
                format_args!(
                    "{}\n",
                    style.paint(Tone::Busy, &format!("not checked by the server: {why}"))
                ),
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = include_str!("../../../crds/examples/chat.yaml");

    fn problems(text: &str) -> Vec<String> {
        let found = documents("file", text);
        found
            .into_iter()
            .flat_map(|document| document.problems)
            .collect()
    }

    #[test]
    fn every_example_is_right() {
        for text in [
            CHAT,
            include_str!("../../../crds/examples/minimal.yaml"),
            include_str!("../../../crds/examples/aggressive.yaml"),
        ] {
            assert_eq!(problems(text), Vec::<String>::new());
        }
    }

    #[test]
    fn structural_mistakes_are_named_by_their_path() {
        for (from, to, problem) in [
            (
                "replicas: 2",
                "replica: 2",
                "spec.replica: unknown field; is `replicas` meant?",
            ),
            (
                "replicas: 2",
                "replicas: two",
                "spec.replicas: write integer, not a text",
            ),
            (
                "replicas: 2",
                "replicas: 0",
                "spec.replicas: 0 must lie between 1 and 1000",
            ),
            (
                "quantile: \"0.95\"",
                "quantile: 0.95",
                "spec.slo.tpot.quantile: write string, not a number: write \"0.95\" in quotes",
            ),
            (
                "scheme: W8A8",
                "scheme: W4A4",
                "spec.precision.prefill.scheme: `W4A4` is none of ",
            ),
            (
                "hold: 60s}",
                "hold: 60}",
                "spec.rollout.steps[0].hold: write string, not a number: write \"60\" in quotes",
            ),
            (
                "  artifacts: {",
                "  artefacts: {",
                "spec.artifacts: missing",
            ),
            ("  name: chat", "  labels: {}", "metadata.name: missing"),
        ] {
            let text = CHAT.replacen(from, to, 1);
            assert_ne!(text, CHAT, "{from}");
            let found = problems(&text);
            assert!(
                found.iter().any(|found| found.starts_with(problem)),
                "{problem}: {found:?}"
            );
        }
    }

    #[test]
    fn what_the_operator_itself_would_refuse_is_told_without_a_cluster() {
        let text = CHAT.replace("evaluation.txt", "calibration.jsonl");
        let found = problems(&text);
        assert!(
            found[0].contains("verify on texts that calibration has not seen"),
            "{found:?}"
        );
    }

    #[test]
    fn a_manifest_that_is_none_is_refused_and_others_kinds_are_passed_over() {
        assert_eq!(problems(""), ["holds no MixQuantService"]);
        assert_eq!(
            problems("kind: ConfigMap\napiVersion: v1\n"),
            ["holds no MixQuantService"]
        );
        assert!(problems("a: [").join("").contains("no YAML"));
        assert!(problems("- 1\n").join("").contains("missing"));
        let two = format!("apiVersion: v1\nkind: Secret\n---\n{CHAT}");
        assert_eq!(documents("f", &two).len(), 1);
        assert_eq!(problems(&two), Vec::<String>::new());
        let old = CHAT.replace("v1alpha1", "v1alpha0");
        assert!(problems(&old)[0].contains("write mixquant.io/v1alpha1"));
    }

    #[test]
    fn aliases_that_would_grow_without_bound_are_refused() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            let alias = format!("*a{}, ", level - 1).repeat(10);
            push(&mut bomb, format_args!("a{level}: &a{level} [{alias}]\n"));
        }
        assert!(problems(&bomb).join("").contains("no YAML"));
    }
}
