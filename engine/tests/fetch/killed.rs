//! The program itself, killed in the middle.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::server::{Fault, Server};
use super::*;

fn program(server: &Server, uri: &str, options: &Options) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mixquant-engine"));
    command
        .args([
            "fetch",
            "--source",
            uri,
            "--endpoint",
            &server.address,
            "--to",
        ])
        .arg(&options.to)
        .args(["--range-bytes", "1048576", "--connections", "2"])
        .env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn a_killed_download_goes_on_and_reads_at_most_the_ranges_that_were_under_way_again() {
    let (server, uri) = bucket_with(&sharded());
    let cache = Cache::new();
    let options = cache.options(&server, uri);
    let size: u64 = 25_454_503;
    // The server stands still after ten reads: whenever the kill comes, it comes in the middle.
    server.when(|seen| {
        if seen.number < 10 {
            Fault::None
        } else {
            Fault::Hold(1 << 19)
        }
    });
    let mut first = program(&server, uri, &options).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_mins(1);
    while server.reads() < 12 {
        assert!(Instant::now() < deadline, "only {} reads", server.reads());
        std::thread::sleep(Duration::from_millis(5));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(!cache.model().exists());
    server.when(|_| Fault::None);
    let second = program(&server, uri, &options).output().unwrap();
    let stderr = String::from_utf8(second.stderr).unwrap();
    assert!(second.status.success(), "{stderr}");
    let told: serde_json::Value = serde_json::from_slice(&second.stdout).unwrap();
    assert_eq!(told["digest"], digest_of(&sharded()).as_str());
    assert_eq!(told["reused"], false);
    assert_eq!(digest_of(&cache.model()), digest_of(&sharded()));
    assert!(
        stderr.contains("fetch: ") && stderr.contains("(100 %)"),
        "{stderr}"
    );
    let again = server.bytes() - size;
    assert!(again < (4 << 20), "{again} bytes were read twice");
}

#[test]
fn a_failure_leaves_its_reason_and_the_exit_code_says_whether_to_try_again() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let options = cache.options(&server, uri);
    let message = cache.folder.path().join("message");
    let mut command = program(&server, uri, &options);
    command
        .args([
            "--digest",
            Digest::of_bytes(b"another").as_str(),
            "--termination-message",
        ])
        .arg(&message);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(mixquant_crds::names::EXIT_INPUT));
    let told: mixquant_crds::JobMessage =
        serde_json::from_slice(&std::fs::read(&message).unwrap()).unwrap();
    assert!(matches!(told, mixquant_crds::JobMessage::Failed(failure)
        if failure.reason == mixquant_crds::FailureReason::DigestMismatch));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("error: the model has the digest")
    );
}
