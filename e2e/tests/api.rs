//! The custom resource on a real apiserver: it installs, takes every example, refuses every wrong one with the words that say the fix.
//!
//! Everything goes through `kubectl`, because its user is the one who must understand the refusal. Nothing is stored but the resource itself.
#![expect(
    clippy::unwrap_used,
    reason = "the helpers of these tests are tests too"
)]

use std::path::{Path, PathBuf};

use mixquant_e2e::apiserver::{self, ApiServer};
use mixquant_e2e::kubectl::Answer;
use mixquant_e2e::means;

fn yaml_files(folder: &str) -> Vec<PathBuf> {
    let folder = means::repository().join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    files
}

fn dry_run(server: &ApiServer, file: &Path) -> Answer {
    server
        .kubectl
        .run(&[
            "apply",
            "--dry-run=server",
            "-f",
            &file.display().to_string(),
        ])
        .unwrap()
}

#[test]
fn the_custom_resource_has_no_violation_of_the_schema_rules() {
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    let crd = server
        .kubectl
        .get(&["customresourcedefinition", "mixquantservices.mixquant.io"])
        .unwrap();
    let conditions = crd["status"]["conditions"].as_array().unwrap();
    let status = |kind: &str| {
        conditions
            .iter()
            .find(|condition| condition["type"] == kind)
            .map(|condition| &condition["status"])
    };
    assert_eq!(status("Established").unwrap(), "True");
    assert_eq!(status("NamesAccepted").unwrap(), "True");
    // The apiserver reports a schema that is not structural as a condition and goes on without pruning.
    assert!(
        status("NonStructuralSchema").is_none_or(|status| status == "False"),
        "{conditions:#?}"
    );
}

#[test]
fn every_example_is_accepted() {
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    let files = yaml_files("crds/examples");
    assert!(!files.is_empty());
    let refused: Vec<String> = files
        .iter()
        .filter_map(|file| {
            let answer = dry_run(server, file);
            (!answer.ok).then(|| format!("{}: {}", file.display(), answer.stderr.trim()))
        })
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn every_invalid_example_is_refused_with_the_message_that_its_first_line_expects() {
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    let files = yaml_files("crds/examples/invalid");
    assert!(
        files.len() >= 25,
        "{} invalid examples, at least 25 are wanted",
        files.len()
    );
    let mut wrong = Vec::new();
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let Some(expected) = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("# expect: "))
        else {
            wrong.push(format!(
                "{}: the first line is not `# expect: <text>`",
                file.display()
            ));
            continue;
        };
        let answer = dry_run(server, file);
        if answer.ok {
            wrong.push(format!(
                "{}: accepted, expected `{expected}`",
                file.display()
            ));
        } else if !answer.stderr.contains(expected.trim()) {
            wrong.push(format!(
                "{}: expected `{expected}`, got `{}`",
                file.display(),
                answer.stderr.trim()
            ));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Creates the example `chat` under another name in a namespace of its own and hands its `kubectl` to the test.
fn with_service(name: &str, test: impl FnOnce(&mixquant_e2e::kubectl::Kubectl)) {
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    server.kubectl.must(&["create", "namespace", name]).unwrap();
    let kubectl = server.kubectl.in_namespace(name);
    let example = means::repository().join("crds/examples/chat.yaml");
    kubectl
        .must(&["apply", "-f", &example.display().to_string()])
        .unwrap();
    test(&kubectl);
}

#[test]
fn kubectl_shows_the_columns_that_people_look_for() {
    with_service("columns", |kubectl| {
        let header = |wide: &[&str]| {
            let text = kubectl.must(&[&["get", "mqs"], wide].concat()).unwrap();
            text.lines()
                .next()
                .unwrap()
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            header(&[]),
            [
                "NAME", "READY", "PHASE", "STABLE", "CANARY", "WEIGHT", "TPOT", "AGE"
            ]
        );
        let mut wide = header(&["-o", "wide"]);
        wide.sort();
        for column in ["REASON", "STEP"] {
            assert!(wide.iter().any(|name| name == column), "{wide:?}");
        }
    });
}

#[test]
fn kubectl_scale_sets_the_replicas() {
    with_service("scale", |kubectl| {
        kubectl
            .must(&["scale", "mqs/chat", "--replicas=5"])
            .unwrap();
        assert_eq!(
            kubectl.get(&["mqs", "chat"]).unwrap()["spec"]["replicas"],
            5
        );
    });
}

#[test]
fn replicas_that_scaling_owns_are_changed_by_nobody() {
    with_service("scaling", |kubectl| {
        let scaling = r#"{"spec": {"scaling": {"minReplicas": 1, "maxReplicas": 4, "targets": {"queueLength": 4}}}}"#;
        let patch = |patch: &str| {
            kubectl
                .run(&["patch", "mqs", "chat", "--type=merge", "--patch", patch])
                .unwrap()
        };
        let set = patch(scaling);
        assert!(set.ok, "{}", set.stderr);
        // As another autoscaler does it.
        let scaled = kubectl.run(&["scale", "mqs/chat", "--replicas=5"]).unwrap();
        assert!(
            !scaled.ok && scaled.stderr.contains("spec.scaling owns"),
            "{}",
            scaled.stderr
        );
        let bounds = patch(r#"{"spec": {"scaling": {"maxReplicas": 6}}}"#);
        assert!(bounds.ok, "{}", bounds.stderr);
        let removed = patch(r#"{"spec": {"scaling": null, "replicas": 5}}"#);
        assert!(removed.ok, "{}", removed.stderr);
    });
}

#[test]
fn kubectl_explain_describes_every_part_of_the_spec() {
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    let text = server.kubectl.must(&["explain", "mqs.spec"]).unwrap();
    for field in [
        "model",
        "precision",
        "calibration",
        "verification",
        "artifacts",
        "engine",
        "replicas",
        "scaling",
        "slo",
        "rollout",
    ] {
        assert!(
            text.contains(&format!("  {field}\t")),
            "`{field}` is not explained:\n{text}"
        );
    }
    assert!(!text.contains("<no description>"), "{text}");
}

#[test]
fn status_can_only_be_written_through_its_subresource() {
    with_service("status", |kubectl| {
        let patch = r#"{"status": {"phase": "Ready"}}"#;
        kubectl
            .must(&["patch", "mqs", "chat", "--type=merge", "--patch", patch])
            .unwrap();
        assert!(kubectl.get(&["mqs", "chat"]).unwrap()["status"]["phase"].is_null());
        kubectl
            .must(&[
                "patch",
                "mqs",
                "chat",
                "--type=merge",
                "--subresource=status",
                "--patch",
                patch,
            ])
            .unwrap();
        assert_eq!(
            kubectl.get(&["mqs", "chat"]).unwrap()["status"]["phase"],
            "Ready"
        );
    });
}

/// What `mixquant-engine advise` prints under `precision:` stands in a service that the apiserver takes.
#[test]
fn every_advised_plan_is_accepted() {
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    let example = means::repository().join("crds/examples/chat.yaml");
    let example = std::fs::read_to_string(example).unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut plans = 0;
    for entry in std::fs::read_dir(means::repository().join("engine/tests/advise")).unwrap() {
        let entry = entry.unwrap();
        let text = std::fs::read_to_string(entry.path()).unwrap();
        let Some((_, plan)) = text.split_once("\nprecision:\n") else {
            continue;
        };
        let (plan, _) = plan.split_once("\n\n").unwrap();
        let mut service: serde_norway::Value = serde_norway::from_str(&example).unwrap();
        service["spec"]["precision"] = serde_norway::from_str(plan).unwrap();
        let file = folder.join(entry.file_name());
        std::fs::write(&file, serde_norway::to_string(&service).unwrap()).unwrap();
        let answer = dry_run(server, &file);
        assert!(answer.ok, "{plan}\n{}", answer.stderr);
        plans += 1;
    }
    assert!(plans >= 4, "{plans} plans");
}
