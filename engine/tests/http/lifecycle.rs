//! The process from its first line to its exit code, and the admin port on the way.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use mixquant_crds::names;
use serde_json::{Value, json};

use crate::client::{get, post};
use crate::fixture::{Server, model, wait_for};

/// Tokens of a stream that lasts long enough to do something beside it.
const TOKENS: usize = 150;
const GAPS: f64 = 149.0;

/// A port of the system's choice.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A server of its own process; killed when the test fails.
struct Process {
    child: Child,
    api: SocketAddr,
    admin: SocketAddr,
}

impl Process {
    fn start(arguments: &[&str]) -> Self {
        let mut child = command(ANY, ANY)
            .args(arguments)
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let listening = lines
            .by_ref()
            .map(Result::unwrap)
            .find(|line| line.contains("listening"));
        let event: Value =
            serde_json::from_str(&listening.expect("a line with the addresses")).unwrap();
        let address = |name: &str| event[name].as_str().unwrap().parse().unwrap();
        let process = Self {
            child,
            api: address("api"),
            admin: address("admin"),
        };
        // A pipe that nobody empties would block the process.
        thread::spawn(move || lines.for_each(drop));
        wait_for("readiness", || get(process.admin, "/readyz").status == 200);
        process
    }

    fn signal(&self) {
        let sent = Command::new("kill")
            .args(["-TERM", &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
    }

    fn exit(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("an end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(api: SocketAddr, admin: SocketAddr) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mixquant-engine"));
    let model = model();
    command.args(["serve", "--model", model.to_str().unwrap()]);
    command.args([
        "--listen",
        &api.to_string(),
        "--admin-listen",
        &admin.to_string(),
    ]);
    command.env(names::ENV_REVISION, "of-this-pod");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn long_stream() -> Value {
    json!({"prompt": "a", "max_tokens": TOKENS, "ignore_eos": true, "temperature": 0, "stream": true})
}

#[test]
fn the_revision_that_a_pod_is_told_is_on_each_of_its_series() {
    let process = Process::start(&[]);
    let page = get(process.admin, "/metrics").text();
    let own: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("mixquant_"))
        .collect();
    assert!(!own.is_empty());
    for line in own {
        assert!(line.contains("revision=\"of-this-pod\""), "{line}");
    }
}

/// Goal: nothing is lost between SIGTERM and the end. Method: one answer streams across it, new requests come during the delay.
#[test]
fn a_drained_server_answers_everything_and_exits_with_0() {
    let mut process = Process::start(&[
        "--drain-delay-seconds",
        "1",
        "--shutdown-grace-seconds",
        "120",
    ]);
    let mut streaming = post(process.api, "/v1/completions", &long_stream());
    assert!(streaming.chunk().is_some());
    process.signal();
    wait_for("readiness to go off", || {
        get(process.admin, "/readyz").status == 503
    });
    assert_eq!(
        get(process.admin, "/livez").status,
        200,
        "draining is not dead"
    );
    let late = post(
        process.api,
        "/v1/completions",
        &json!({"prompt": "a", "max_tokens": 1}),
    );
    assert_eq!(
        (late.status, late.header("connection")),
        (200, Some("close"))
    );
    assert_eq!(streaming.events().last().unwrap(), "[DONE]");
    assert_eq!(process.exit().code(), Some(0));
}

#[test]
fn an_idle_server_exits_right_after_its_drain_delay() {
    let mut process = Process::start(&["--drain-delay-seconds", "0"]);
    process.signal();
    let start = Instant::now();
    assert_eq!(process.exit().code(), Some(0));
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut process = Process::start(&["--drain-delay-seconds", "100"]);
    process.signal();
    wait_for("readiness to go off", || {
        get(process.admin, "/readyz").status == 503
    });
    process.signal();
    let start = Instant::now();
    assert_eq!(process.exit().code(), Some(1));
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
}

/// The one line on stderr that tells a person why, and the exit code.
fn failure(mut command: Command) -> (String, i32) {
    let mut child = command.spawn().unwrap();
    let mut stderr = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    let code = child.wait().unwrap().code().expect("an exit, not a signal");
    let errors: Vec<&str> = stderr
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    (errors[0].to_owned(), code)
}

#[test]
fn an_occupied_port_is_one_clear_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().map(|address| (taken, address)).unwrap();
    for (api, admin, flag) in [(taken.1, ANY, "--listen"), (ANY, taken.1, "--admin-listen")] {
        let (line, code) = failure(command(api, admin));
        assert!(
            line.contains(&taken.1.to_string()) && line.contains("in use") && line.ends_with(flag),
            "{line}"
        );
        assert_ne!(code, 0);
    }
}

#[test]
fn a_model_that_cannot_be_served_is_one_clear_line() {
    let empty = tempfile::tempdir().unwrap();
    let mut missing = command(ANY, ANY);
    missing.args(["--artifact", empty.path().to_str().unwrap()]);
    let mut long = command(ANY, ANY);
    long.args(["--max-sequence-length", "4096"]);
    let mut no_model = Command::new(env!("CARGO_BIN_EXE_mixquant-engine"));
    no_model.args([
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--model",
    ]);
    no_model
        .arg(empty.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    for (command, named) in [
        (missing, empty.path().to_str().unwrap()),
        (long, "--max-sequence-length"),
        (no_model, "config.json"),
    ] {
        let (line, code) = failure(command);
        assert!(line.contains(named), "{line}");
        assert_eq!(code, 2, "{line}");
    }
}

/// Goal: the time per token is the client's. Method: one stream, measured on both sides.
#[test]
fn the_time_per_token_is_what_the_client_sees() {
    let server = Server::start(crate::fixture::options());
    let mut stream = post(server.api, "/v1/completions", &long_stream());
    assert!(stream.chunk().is_some());
    let start = Instant::now();
    assert_eq!(stream.events().last().unwrap(), "[DONE]");
    let seen = start.elapsed().as_secs_f64() / GAPS;
    let metric = |name: &str| server.metric(&format!("mixquant_{name}"), "");
    wait_for("the last observation", || {
        metric("request_time_per_output_token_seconds_count") > 0.5
    });
    let measured = metric("request_time_per_output_token_seconds_sum");
    assert!(
        measured > 0.5 * seen && measured < 1.5 * seen,
        "client {seen}, server {measured}"
    );
    let gaps = metric("inter_token_latency_seconds_count");
    assert!((gaps - GAPS).abs() < 1e-9, "{gaps} gaps");
    let mean_gap = metric("inter_token_latency_seconds_sum") / gaps;
    assert!(
        (mean_gap / measured - 1.0).abs() < 0.01,
        "one request: the mean gap is the time per token"
    );
    assert!((metric("time_to_first_token_seconds_count") - 1.0).abs() < 1e-9);
    assert!(
        (server.metric("vllm:request_time_per_output_token_seconds_sum", "") - measured).abs()
            < 1e-12
    );
    let text = server.metrics();
    assert!(
        text.contains("precision=\"BF16\",reason=\"plan\"")
            && text.contains("model_digest=\"sha256:"),
        "{text}"
    );
}

#[test]
fn probes_answer_while_the_worker_is_busy() {
    let server = Server::common();
    let busy: Vec<_> = (0..4)
        .map(|_| {
            let api = server.api;
            thread::spawn(move || post(api, "/v1/completions", &long_stream()).events().len())
        })
        .collect();
    wait_for("work", || {
        server.metric("mixquant_requests_running", "") > 0.5
    });
    for path in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(get(server.admin, path).status, 200, "{path}");
    }
    assert_eq!(get(server.api, "/health").status, 200);
    for thread in busy {
        assert_eq!(
            thread.join().unwrap(),
            TOKENS + 2,
            "the tokens, the reason and the end"
        );
    }
}
