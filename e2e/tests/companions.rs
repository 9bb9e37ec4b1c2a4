//! The operator against a real apiserver, with nothing else of a cluster: what it makes beside a service's pods, that it mends it,
//! and that it answers people.
#![expect(
    clippy::unwrap_used,
    reason = "the helpers of these tests are tests too"
)]

use std::process::Command;
use std::time::{Duration, Instant};

use mixquant_e2e::apiserver;
use mixquant_e2e::kubectl::Kubectl;
use mixquant_e2e::means;
use mixquant_e2e::monitoring;
use mixquant_e2e::program::Operator;
use serde_json::{Value, json};

/// How long the operator may take for one thing.
const PATIENCE: Duration = Duration::from_secs(30);

/// Looks again and again until `found` gives something.
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "{what} did not happen within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

const OBJECTS: [&str; 6] = [
    "serviceaccount/chat-mixquant",
    "networkpolicy/chat-engine",
    "networkpolicy/chat-jobs",
    "poddisruptionbudget/chat-mixquant",
    "podmonitor/chat-mixquant",
    "prometheusrule/chat-mixquant",
];

#[test]
fn the_operator_makes_what_stands_beside_the_pods_mends_it_and_then_rests() {
    if means::program("curl").is_none() {
        return means::skip("curl is missing");
    }
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    monitoring::install(&server.kubectl).unwrap();
    let namespace = "companions";
    server
        .kubectl
        .must(&["create", "namespace", namespace])
        .unwrap();
    let kubectl = server.kubectl.in_namespace(namespace);
    let example = means::repository().join("crds/examples/chat.yaml");
    kubectl
        .must(&["apply", "-f", &example.display().to_string()])
        .unwrap();
    let Some(operator) = Operator::start(
        &kubectl,
        &[
            "--watch-namespace",
            namespace,
            "--metrics-reader",
            "monitoring",
        ],
    ) else {
        return;
    };

    let get = |object: &str| kubectl.get(&[object]).unwrap();
    let uid = get("mqs/chat")["metadata"]["uid"].clone();
    for object in OBJECTS {
        let made = wait_for(object, || Some(get(object)).filter(|made| !made.is_null()));
        let owner = &made["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["uid"], &owner["controller"]),
            (&uid, &json!(true)),
            "{object}"
        );
    }
    assert_eq!(get(OBJECTS[0])["automountServiceAccountToken"], false);
    let policy = get("networkpolicy/chat-engine");
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
    let readers = &policy["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchExpressions"]
        [0]["values"];
    assert_eq!(*readers, json!(["mixquant-system", "monitoring"]));

    opened_and_closed(&kubectl);
    rests(&operator, &kubectl);
    answers(&kubectl, namespace);
}

/// Somebody opens the policies: both lists are put back as a whole.
fn opened_and_closed(kubectl: &Kubectl) {
    let open = json!({"spec": {"egress": [{}], "ingress": [{}]}}).to_string();
    for policy in ["networkpolicy/chat-engine", "networkpolicy/chat-jobs"] {
        let before = kubectl.get(&[policy]).unwrap()["spec"].clone();
        kubectl
            .must(&["patch", policy, "--type=merge", "--patch", &open])
            .unwrap();
        wait_for("closing the policy again", || {
            let now = kubectl.get(&[policy]).unwrap()["spec"].clone();
            (now == before).then_some(())
        });
    }
    let loose = json!({"spec": {"maxUnavailable": "100%"}}).to_string();
    let budget = "poddisruptionbudget/chat-mixquant";
    kubectl
        .must(&["patch", budget, "--type=merge", "--patch", &loose])
        .unwrap();
    wait_for("mending the budget", || {
        (kubectl.get(&[budget]).unwrap()["spec"]["maxUnavailable"] == 1).then_some(())
    });
    kubectl
        .must(&["delete", "serviceaccount", "chat-mixquant"])
        .unwrap();
    wait_for("making the account again", || {
        let made: Value = kubectl.get(&["serviceaccount/chat-mixquant"]).unwrap();
        (!made.is_null()).then_some(())
    });
}

/// Woken without a reason, the operator looks and writes nothing: what the server made of its objects is what it wants.
fn rests(operator: &Operator, kubectl: &Kubectl) {
    let writes = || operator.sum("mixquant_operator_api_writes_total");
    let passes = || operator.sum("mixquant_operator_reconcile_duration_seconds_count");
    let wake = |value: &str| {
        let before = passes();
        let value = format!("test/wake={value}");
        kubectl
            .must(&["annotate", "--overwrite", "mqs/chat", &value])
            .unwrap();
        wait_for("a pass", || (passes() > before).then_some(()));
    };
    // The first two passes may still be those that ended the mending.
    wake("1");
    wake("2");
    let before = writes();
    assert!(before > 0.0, "the metrics were not read");
    for value in ["3", "4", "5"] {
        wake(value);
    }
    let more = writes() - before;
    assert!(more.abs() < 0.5, "{more} writes at rest");
}

/// An order of `kubectl mixquant` reaches this operator and ends with its own answer.
fn answers(kubectl: &Kubectl, namespace: &str) {
    let Some(plugin) = means::built("kubectl-mixquant") else {
        return;
    };
    let run = Command::new(plugin)
        .arg("--kubeconfig")
        .arg(kubectl.kubeconfig().unwrap())
        .args(["-n", namespace, "retry", "chat", "--timeout", "30s"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&run.stdout).into_owned();
    assert_eq!(run.status.code(), Some(3), "{told}");
    assert!(told.contains("nothing has failed"), "{told}");
    let answer = kubectl.get(&["mqs/chat"]).unwrap()["status"]["request"].clone();
    assert_eq!(answer["answer"], "Refused", "{answer}");
}
