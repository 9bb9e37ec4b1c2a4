//! `kubectl mixquant` against a real apiserver: what it reads, what it writes, what it ends with. No operator runs; the tests write its part.
#![expect(
    clippy::unwrap_used,
    reason = "the helpers of these tests are tests too"
)]

use std::process::{Command, Output};

use mixquant_e2e::apiserver;
use mixquant_e2e::kubectl::Kubectl;
use mixquant_e2e::means;
use serde_json::{Value, json};

/// A namespace with the example `chat` in it, and both programs that look at it.
struct Scene {
    kubectl: Kubectl,
    namespace: String,
}

/// The scene `name`, or none where the means are missing.
fn scene(name: &str) -> Option<Scene> {
    means::built("kubectl-mixquant")?;
    let server = apiserver::with_resource()?;
    server.kubectl.must(&["create", "namespace", name]).unwrap();
    let kubectl = server.kubectl.in_namespace(name);
    let example = example();
    kubectl.must(&["apply", "-f", &example]).unwrap();
    Some(Scene {
        kubectl,
        namespace: name.into(),
    })
}

fn example() -> String {
    let file = means::repository().join("crds/examples/chat.yaml");
    file.display().to_string()
}

/// What one call printed, and its exit code.
#[derive(Debug)]
struct Told {
    code: i32,
    out: String,
    err: String,
}

impl Scene {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(means::built("kubectl-mixquant").unwrap());
        let kubeconfig = self.kubectl.kubeconfig().unwrap();
        command.arg("--kubeconfig").arg(kubeconfig);
        command.args(["-n", &self.namespace]).args(arguments);
        command.env_remove("KUBECONFIG");
        command
    }

    fn run(&self, arguments: &[&str]) -> Told {
        told(&self.command(arguments).output().unwrap())
    }

    /// Runs it and reads what programs read.
    fn json(&self, arguments: &[&str]) -> Value {
        let told = self.run(&[arguments, &["-o", "json"]].concat());
        serde_json::from_str(&told.out).unwrap_or_else(|error| panic!("{error}: {told:?}"))
    }

    /// Writes a status as the operator would.
    fn status(&self, status: &Value) {
        let patch = json!({"status": status}).to_string();
        let kind = [
            "patch",
            "mqs",
            "chat",
            "--type=merge",
            "--subresource=status",
            "--patch",
            &patch,
        ];
        self.kubectl.must(&kind).unwrap();
    }
}

fn told(output: &Output) -> Told {
    Told {
        code: output.status.code().unwrap(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn condition(kind: &str, status: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": "Tested", "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

fn ready(generation: i64) -> Value {
    json!({"observedGeneration": generation, "phase": "Ready", "conditions": [condition("Ready", "True", "it serves"),
        condition("Available", "True", "2 of 2"), condition("Stalled", "False", "nothing")]})
}

fn stuck(generation: i64) -> Value {
    json!({"observedGeneration": generation, "phase": "Degraded", "conditions": [condition("Ready", "False", "it broke the limit"),
        condition("Available", "True", "2 of 2"), condition("Stalled", "True", "it broke the limit")]})
}

#[test]
fn status_ends_with_the_code_that_its_contract_says() {
    let Some(scene) = scene("cli-status") else {
        return;
    };
    let unseen = scene.run(&["status", "chat"]);
    assert_eq!(unseen.code, 4, "{unseen:?}");
    assert!(
        unseen.out.contains("has not looked at it yet"),
        "{unseen:?}"
    );
    scene.status(&ready(1));
    assert_eq!(scene.run(&["status", "mqs/chat"]).code, 0);
    scene.status(&stuck(1));
    let told = scene.run(&["status", "chat"]);
    assert_eq!(told.code, 3, "{told:?}");
    assert!(told.out.contains("it broke the limit"), "{told:?}");
    // Ready for an older spec is not ready.
    scene.status(&ready(0));
    assert_eq!(scene.run(&["status", "chat"]).code, 4);
    let none = scene.run(&["status", "absent"]);
    assert_eq!((none.code, none.out.as_str()), (1, ""), "{none:?}");
    assert!(
        none.err
            .contains("no MixQuantService `absent` in namespace `cli-status`"),
        "{none:?}"
    );
    assert_eq!(scene.run(&["status"]).code, 2);
    assert_eq!(scene.run(&["status", "pods/x"]).code, 2);
}

#[test]
fn status_waits_for_the_end_and_no_longer_than_it_is_told() {
    let Some(scene) = scene("cli-wait") else {
        return;
    };
    let late = scene.run(&["status", "chat", "--timeout", "1s"]);
    assert_eq!(late.code, 4, "{late:?}");
    let mut command = scene.command(&["status", "chat", "--timeout", "1m"]);
    let waiting = command
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    scene.status(&stuck(1));
    let told = told(&waiting.wait_with_output().unwrap());
    assert_eq!(told.code, 3, "{told:?}");
}

#[test]
fn get_lists_what_kubectl_lists_and_programs_read_the_same() {
    let Some(scene) = scene("cli-get") else {
        return;
    };
    scene.status(&ready(1));
    let told = scene.run(&["get"]);
    assert_eq!(told.code, 0, "{told:?}");
    let lines: Vec<&str> = told.out.lines().collect();
    assert!(lines[0].starts_with("NAME  READY"), "{told:?}");
    assert!(lines[1].starts_with("chat  True"), "{told:?}");
    assert!(
        !told.out.contains('\u{1b}'),
        "colours belong to terminals: {told:?}"
    );
    let all = scene.json(&["get", "-A"]);
    let names: Vec<&str> = all["services"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["namespace"].as_str().unwrap())
        .collect();
    assert!(names.contains(&"cli-get"), "{all}");
    let one = scene.json(&["get", "chat"]);
    assert_eq!(
        (&one["state"], &one["name"]),
        (&json!("Ready"), &json!("chat"))
    );
    assert_eq!(one["conditions"].as_array().unwrap().len(), 3);
}

#[test]
fn get_watches_until_it_is_stopped() {
    use std::io::{BufRead, BufReader};
    let Some(scene) = scene("cli-watch") else {
        return;
    };
    let mut command = scene.command(&["get", "chat", "--watch"]);
    let mut watching = command
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert!(next().starts_with("NAME"));
    assert!(next().contains("Unknown"));
    scene.status(&ready(1));
    assert!(next().contains("True"));
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn lint_asks_the_servers_rules_and_stores_nothing() {
    let Some(scene) = scene("cli-lint") else {
        return;
    };
    let folder = means::repository().join("crds/examples/invalid");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path().display().to_string();
        let told = scene.run(&["lint", "-f", &file]);
        assert_eq!(told.code, 3, "{file}: {told:?}");
        count += 1;
    }
    assert!(count >= 40);
    let told = scene.run(&["lint", "-f", &example(), "-f", &example()]);
    assert_eq!(told.code, 0, "{told:?}");
    assert!(told.out.contains("server (CEL rules"), "{told:?}");
    // Only the rules of the server know this one.
    let rule = means::repository()
        .join("crds/examples/invalid/name-with-dot.yaml")
        .display()
        .to_string();
    assert!(
        scene
            .run(&["lint", "-f", &rule])
            .out
            .contains("metadata.name must start with a letter")
    );
    let managers = scene
        .kubectl
        .get(&["mqs", "chat", "--show-managed-fields"])
        .unwrap();
    assert!(
        !managers["metadata"]["managedFields"]
            .to_string()
            .contains("kubectl-mixquant")
    );
}

#[test]
fn lint_without_a_cluster_says_what_was_not_asked() {
    let Some(scene) = scene("cli-offline") else {
        return;
    };
    let told = scene.run(&["lint", "--offline", "-f", &example()]);
    assert_eq!(told.code, 0, "{told:?}");
    assert!(
        told.out.contains("not checked by the server: --offline"),
        "{told:?}"
    );
    let mut command = Command::new(means::built("kubectl-mixquant").unwrap());
    let unreachable = command.args(["--kubeconfig", "/nowhere", "lint", "-f", &example()]);
    let gone = self::told(&unreachable.output().unwrap());
    assert_eq!(gone.code, 0, "{gone:?}");
    assert!(gone.out.contains("not checked by the server: "), "{gone:?}");
}

#[test]
fn plan_compares_with_what_the_cluster_has_and_changes_nothing() {
    let Some(scene) = scene("cli-plan") else {
        return;
    };
    let before = scene.kubectl.get(&["mqs", "chat"]).unwrap();
    let same = scene.json(&["plan", "-f", &example()]);
    assert_eq!(same["change"], "nothing", "{same}");
    let text = std::fs::read_to_string(example()).unwrap();
    let file = std::env::temp_dir().join(format!("mixquant-plan-{}.yaml", std::process::id()));
    std::fs::write(&file, text.replace("engine:0.1.0", "engine:next")).unwrap();
    let file = file.display().to_string();
    let other = scene.run(&["plan", "-f", &file]);
    // A bare apiserver has no node, so the canary does not fit.
    assert_eq!(other.code, 3, "{other:?}");
    assert!(
        other
            .out
            .contains("engine:0.1.0 -> localhost/mixquant-engine:next"),
        "{other:?}"
    );
    assert!(
        other
            .out
            .contains("capacity does not fit: 4 more pods at the peak, room for 0"),
        "{other:?}"
    );
    let offline = scene.run(&["plan", "--offline", "-f", &file]);
    assert_eq!(offline.code, 0, "{offline:?}");
    assert!(offline.out.contains("take over"), "{offline:?}");
    assert_eq!(scene.kubectl.get(&["mqs", "chat"]).unwrap(), before);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn version_names_the_cluster_and_says_when_no_operator_is_there() {
    let Some(scene) = scene("cli-version") else {
        return;
    };
    let told = scene.run(&["version"]);
    assert_eq!(told.code, 0, "{told:?}");
    assert!(
        told.out.contains("cluster   v1.") && told.out.contains("install the chart"),
        "{told:?}"
    );
}

#[test]
fn a_cluster_that_cannot_be_reached_is_named_with_the_flags_to_check() {
    let Some(scene) = scene("cli-unreachable") else {
        return;
    };
    let text = std::fs::read_to_string(scene.kubectl.kubeconfig().unwrap()).unwrap();
    // Port 1 of the loopback: nobody listens there.
    let (start, rest) = text.split_once("https://127.0.0.1:").unwrap();
    let end = rest.find('"').unwrap();
    let file = std::env::temp_dir().join(format!("mixquant-kubeconfig-{}", std::process::id()));
    std::fs::write(&file, format!("{start}https://127.0.0.1:1{}", &rest[end..])).unwrap();
    let mut command = Command::new(means::built("kubectl-mixquant").unwrap());
    let told = told(
        &command
            .arg("--kubeconfig")
            .arg(&file)
            .args(["get"])
            .output()
            .unwrap(),
    );
    assert_eq!(told.code, 1, "{told:?}");
    assert!(
        told.err
            .contains("cannot ask the cluster at https://127.0.0.1:1"),
        "{told:?}"
    );
    std::fs::remove_file(file).unwrap();
}

fn on_trial() -> Value {
    let digest = format!("sha256:{}", "0".repeat(64));
    let revision = |name: &str| json!({"revision": name, "artifactDigest": digest, "modelDigest": digest, "image": "engine:1"});
    json!({"observedGeneration": 1, "phase": "Canary", "stable": revision("1111111111"), "canary": revision("2222222222"),
        "rollout": {"stage": "Stepping", "step": 0, "stepStartedAt": "2026-01-01T00:00:00Z", "generation": 1, "request": digest,
            "weight": 33, "failedVerdicts": 0},
        "conditions": [condition("Ready", "False", "a canary"), condition("Stalled", "False", "nothing")]})
}

/// The request in the annotation, as soon as there is another one than `before`.
fn requested(scene: &Scene, before: &str) -> String {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        let service = scene.kubectl.get(&["mqs", "chat"]).unwrap();
        let found = service["metadata"]["annotations"]["mixquant.io/request"].as_str();
        if let Some(found) = found.filter(|found| *found != before) {
            return found.to_owned();
        }
        assert!(
            std::time::Instant::now() < deadline,
            "no request was written"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn an_order_is_an_annotation_and_ends_with_the_operators_answer() {
    let Some(scene) = scene("cli-orders") else {
        return;
    };
    let none = scene.run(&["abort", "chat"]);
    assert_eq!(none.code, 1, "{none:?}");
    scene.status(&on_trial());
    let unanswered = scene.run(&["promote", "chat", "--full", "--timeout", "0s"]);
    assert_eq!(unanswered.code, 4, "{unanswered:?}");
    let mut before = requested(&scene, "");
    assert!(before.ends_with(" promote 2222222222 full"), "{before}");
    for (answer, code) in [("Accepted", 0), ("Refused", 3)] {
        let mut command = scene.command(&["abort", "chat", "--timeout", "1m"]);
        let asking = command
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let request = requested(&scene, &before);
        assert!(request.ends_with(" abort 2222222222"), "{request}");
        let mut status = on_trial();
        status["request"] = json!({"request": request, "answer": answer, "message": "so it is", "at": "2026-01-01T00:00:00Z"});
        scene.status(&status);
        let told = told(&asking.wait_with_output().unwrap());
        assert_eq!(told.code, code, "{told:?}");
        assert!(told.out.contains("so it is"), "{told:?}");
        before = request;
    }
}

#[test]
fn pause_and_promote_turn_the_specs_switch() {
    let Some(scene) = scene("cli-pause") else {
        return;
    };
    let paused =
        || scene.kubectl.get(&["mqs", "chat"]).unwrap()["spec"]["rollout"]["paused"].clone();
    assert_eq!(scene.run(&["pause", "chat"]).code, 0);
    assert_eq!(paused(), true);
    assert_eq!(scene.run(&["pause", "chat"]).code, 1, "twice");
    assert_eq!(scene.run(&["promote", "chat"]).code, 0);
    assert_eq!(paused(), false);
}
