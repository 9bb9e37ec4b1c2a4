//! The operator as a program of this machine, beside an apiserver that the tests started. It ends with the value that holds it.
//!
//! For the operator that the chart installed in a cluster see [`crate::operator`].

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;

use crate::kubectl::Kubectl;
use crate::means;

/// The operator's command line for an apiserver of the tests: without leader election, and as if it ran in the chart's namespace, whose pods
/// may read metrics.
pub fn command(program: &Path, kubeconfig: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .args(["run", "--leader-elect=false", "--log-format=text"])
        .args(["--lease-namespace", crate::operator::NAMESPACE])
        .env("KUBECONFIG", kubeconfig)
        .stdin(Stdio::null());
    command
}

/// A running operator without leader election.
pub struct Operator {
    process: Child,
    port: u16,
}

impl Operator {
    /// Starts it for the apiserver of `kubectl`; none, with the reason printed, where it has not been built.
    ///
    /// # Panics
    /// When the program is there and cannot be started.
    pub fn start(kubectl: &Kubectl, arguments: &[&str]) -> Option<Self> {
        let program = means::built("mixquant-operator")?;
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("the loopback has a free port")
            .port();
        let process = command(&program, kubectl.kubeconfig().unwrap_or(Path::new("")))
            .arg(format!("--admin-listen=127.0.0.1:{port}"))
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the operator starts");
        Some(Self { process, port })
    }

    /// The sum of all series of a metric; 0 while the page is not there yet. By `curl`, which is to be there.
    ///
    /// # Panics
    /// Without `curl`.
    pub fn sum(&self, metric: &str) -> f64 {
        let address = format!("http://127.0.0.1:{}/metrics", self.port);
        let page = Command::new("curl")
            .args(["-s", "-m", "5", &address])
            .output()
            .expect("curl runs");
        let page = String::from_utf8_lossy(&page.stdout).into_owned();
        let series = page.lines().filter(|line| line.starts_with(metric));
        series
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    }

    /// Memory that it holds now (its resident set) and the most that it ever held, in bytes.
    ///
    /// # Errors
    /// It has ended.
    pub fn resident_bytes(&self) -> anyhow::Result<[u64; 2]> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        Ok([
            kibibytes(&status, "VmRSS:")? * 1024,
            kibibytes(&status, "VmHWM:")? * 1024,
        ])
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// A size in `/proc/PID/status`.
///
/// # Errors
/// The process has ended, or the kernel says it otherwise.
pub(crate) fn kibibytes(status: &str, field: &str) -> anyhow::Result<u64> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse().ok())
        .with_context(|| format!("no {field} in the status of the process"))
}
