//! Servers in this process, on ports of the system's choice.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use mixquant_engine::server::{Options, Running, start};

use crate::client::get;

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_mins(3);

pub(crate) fn model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

/// A file of the shared data, where it lies beside the repository.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../shared")
        .join(path);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is not on this machine", path.display());
    None
}

pub(crate) fn options() -> Options {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Options {
        model: model(),
        artifact: None,
        quantise: None,
        listen: address,
        admin_listen: address,
        model_name: "kube-llama".to_owned(),
        revision: "r1".to_owned(),
        max_batch_size: 8,
        max_sequence_length: None,
        queue_size: 32,
        drain_delay: Duration::ZERO,
        shutdown_grace: Duration::from_secs(20),
        skip_digest_checks: false,
        valve: mixquant_engine::valve::read::Settings::default(),
        difference_log: None,
    }
}

pub(crate) struct Server {
    /// Dropped, it ends the server.
    _running: Running,
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Server {
    /// Starts a server and waits until it is ready.
    pub(crate) fn start(options: Options) -> Self {
        let running = start(options).expect("free ports");
        let (api, admin) = (running.api(), running.admin());
        let server = Self {
            _running: running,
            api,
            admin,
        };
        wait_for("readiness", || get(admin, "/readyz").status == 200);
        server
    }

    /// One server for all tests that leave nothing behind.
    pub(crate) fn common() -> &'static Self {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(|| Self::start(options()))
    }

    pub(crate) fn metrics(&self) -> String {
        get(self.admin, "/metrics").text()
    }

    /// The sum over the series of this name whose labels contain `label`.
    pub(crate) fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.metrics();
        let of = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(label);
        text.lines()
            .filter(of)
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }
}

/// Waits for a condition, not for a time.
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "no {what} after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
