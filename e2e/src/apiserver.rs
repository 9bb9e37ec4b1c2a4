//! A kube-apiserver with its etcd for the tests that need nothing else: on free ports of the loopback, in a folder of its own, up in seconds.
//!
//! Both programs end with the test process, however that ends: a shell between them waits for the end of a pipe that only the test holds.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim};
use kube::Client;
use kube::api::PostParams;
use serde_json::json;

use crate::kubectl::Kubectl;
use crate::means;

/// How long both programs may take to answer.
const START_DEADLINE: Duration = Duration::from_mins(1);

/// Runs etcd and the apiserver until standard input ends, then removes the folder. The arguments: folder, etcd, apiserver, and four ports.
const SUPERVISOR: &str = r#"
folder=$1 etcd=$2 apiserver=$3 client=$4 peer=$5 port=$6
cd "$folder" || exit 1
openssl ecparam -name prime256v1 -genkey -noout -out sa.key 2>openssl.log || exit 1
echo 'test-token,admin,admin,system:masters' >tokens.csv
"$etcd" --data-dir etcd --listen-client-urls "http://127.0.0.1:$client" --advertise-client-urls "http://127.0.0.1:$client" \
  --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
  --initial-cluster "default=http://127.0.0.1:$peer" --unsafe-no-fsync >etcd.log 2>&1 </dev/null &
first=$!
"$apiserver" --etcd-servers="http://127.0.0.1:$client" --secure-port="$port" --bind-address=127.0.0.1 --cert-dir=certificates \
  --service-cluster-ip-range=10.96.0.0/16 --token-auth-file=tokens.csv --authorization-mode=RBAC \
  --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=sa.key --service-account-signing-key-file=sa.key \
  --endpoint-reconciler-type=none --disable-admission-plugins=ServiceAccount >apiserver.log 2>&1 </dev/null &
second=$!
cat >/dev/null
kill -KILL $first $second
wait
cd / && rm -rf "$folder"
"#;

/// A running apiserver.
pub struct ApiServer {
    /// `kubectl` that talks to it as an administrator.
    pub kubectl: Kubectl,
    /// Holds the pipe whose end ends both programs.
    _supervisor: Child,
}

/// The apiserver that all tests of one process share; none, with the reason printed, where the means are missing.
///
/// # Panics
/// When it cannot start although the means are there.
pub fn shared() -> Option<&'static ApiServer> {
    static SERVER: OnceLock<Option<ApiServer>> = OnceLock::new();
    SERVER
        .get_or_init(|| find().map(|programs| start(&programs).expect("the apiserver starts")))
        .as_ref()
}

/// The same server with the custom resource installed and established.
///
/// # Panics
/// When it cannot be installed.
pub fn with_resource() -> Option<&'static ApiServer> {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    let server = shared()?;
    INSTALLED.get_or_init(|| install(&server.kubectl).expect("the custom resource installs"));
    Some(server)
}

fn install(kubectl: &Kubectl) -> anyhow::Result<()> {
    let crd = means::repository().join("crds/mixquantservices.yaml");
    kubectl.must(&["apply", "--server-side", "-f", &crd.display().to_string()])?;
    let resource = "customresourcedefinition/mixquantservices.mixquant.io";
    let established = "--for=condition=Established";
    kubectl
        .must(&["wait", established, "--timeout=30s", resource])
        .map(drop)
}

/// Makes a namespace with what the examples refer to: claims and texts.
///
/// # Errors
/// What the apiserver refuses.
pub async fn furnish(client: &Client, namespace: &str) -> anyhow::Result<()> {
    let post = PostParams::default();
    let object = serde_json::from_value(json!({"metadata": {"name": namespace}}))?;
    kube::Api::<Namespace>::all(client.clone())
        .create(&post, &object)
        .await?;
    let texts = json!({"metadata": {"name": "texts"}, "data": {"calibration.jsonl": "{\"text\": \"a\"}\n", "evaluation.txt": "b\n"}});
    kube::Api::<ConfigMap>::namespaced(client.clone(), namespace)
        .create(&post, &serde_json::from_value(texts)?)
        .await?;
    for claim in ["models", "artifacts"] {
        let claim = json!({"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        kube::Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace)
            .create(&post, &serde_json::from_value(claim)?)
            .await?;
    }
    Ok(())
}

struct Programs {
    etcd: PathBuf,
    apiserver: PathBuf,
    kubectl: PathBuf,
}

fn find() -> Option<Programs> {
    let need = |name: &str| {
        let found = means::program(name);
        if found.is_none() {
            means::skip(&format!(
                "{name} is missing: run scripts/prerequisites and e2e/cluster/build"
            ));
        }
        found
    };
    need("openssl")?;
    Some(Programs {
        etcd: need("etcd")?,
        apiserver: need("kube-apiserver")?,
        kubectl: need("kubectl")?,
    })
}

fn start(programs: &Programs) -> anyhow::Result<ApiServer> {
    let folder = std::env::temp_dir().join(format!("mixquant-apiserver-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let [client, peer, port] = free_ports()?;
    let supervisor = Command::new("bash")
        .args(["-c", SUPERVISOR, "supervisor"])
        .args([&folder, &programs.etcd, &programs.apiserver])
        .args([client, peer, port].map(|port| port.to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("bash")?;
    let kubeconfig = folder.join("kubeconfig");
    std::fs::write(&kubeconfig, kubeconfig_text(port))?;
    let kubectl = Kubectl::new(programs.kubectl.clone(), Some(kubeconfig));
    let server = ApiServer {
        kubectl,
        _supervisor: supervisor,
    };
    wait_until_ready(&server.kubectl, &folder)?;
    Ok(server)
}

fn wait_until_ready(kubectl: &Kubectl, folder: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_DEADLINE;
    // The namespace `default` is made by the apiserver itself a moment after it answers.
    while !kubectl
        .run(&["get", "namespace", "default"])
        .is_ok_and(|answer| answer.ok)
    {
        if Instant::now() > deadline {
            let log = std::fs::read_to_string(folder.join("apiserver.log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(10).collect();
            bail!(
                "kube-apiserver did not answer in {START_DEADLINE:?}; its last lines, newest first: {tail:#?}"
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Three ports that are free now: all are held at once, so that they differ.
fn free_ports() -> anyhow::Result<[u16; 3]> {
    let listeners = [
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
    ];
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

fn kubeconfig_text(port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Config\nclusters: [{{name: test, cluster: {{server: \"https://127.0.0.1:{port}\", insecure-skip-tls-verify: true}}}}]\n\
         users: [{{name: admin, user: {{token: test-token}}}}]\ncontexts: [{{name: test, context: {{cluster: test, user: admin}}}}]\ncurrent-context: test\n"
    )
}
