//! The scraper against scripted pods on the loopback, and the window's bookkeeping without any.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

fn pod(uid: &str, revision: &str) -> ObservedPod {
    ObservedPod {
        name: format!("chat-{uid}"),
        uid: uid.into(),
        revision: revision.into(),
        ip: Some("127.0.0.1".into()),
        ready: true,
        terminating: false,
        restarts: 0,
        created_at: Timestamp::UNIX_EPOCH,
    }
}

fn scrape(process_start: u64, counts: [u64; 3]) -> Scrape {
    let tpot = Histogram {
        bounds: vec![0.01, 0.02],
        counts: counts.into(),
    };
    Scrape {
        process_start,
        tpot,
    }
}

fn window() -> Window {
    Window {
        since: Timestamp::UNIX_EPOCH,
        revisions: ["stable".into(), "canary".into()],
    }
}

fn counts(trial: &Trial, revision: &str) -> Vec<u64> {
    trial.samples().tracks[revision].tpot.counts.clone()
}

#[test]
fn only_what_was_counted_inside_the_window_is_a_sample() {
    let mut trial = Trial::new(window());
    trial.absorb(&pod("a", "canary"), Ok(scrape(1, [100, 5, 0])));
    assert_eq!(counts(&trial, "canary"), [0, 0, 0]);
    trial.absorb(&pod("a", "canary"), Ok(scrape(1, [110, 5, 1])));
    trial.absorb(&pod("b", "canary"), Ok(scrape(9, [7, 7, 7])));
    trial.absorb(&pod("b", "canary"), Ok(scrape(9, [8, 7, 7])));
    trial.absorb(&pod("c", "stable"), Ok(scrape(9, [0, 0, 0])));
    assert_eq!(counts(&trial, "canary"), [11, 0, 1]);
    assert_eq!(counts(&trial, "stable"), [0, 0, 0]);
}

#[test]
fn a_restarted_process_counts_from_its_own_start_and_keeps_what_was_seen_before() {
    let mut trial = Trial::new(window());
    for (start, count) in [(1, 100), (1, 120), (2, 3), (2, 8)] {
        trial.absorb(&pod("a", "canary"), Ok(scrape(start, [count, 0, 0])));
    }
    assert_eq!(counts(&trial, "canary"), [25, 0, 0]);
}

#[test]
fn counters_that_fall_inside_one_process_give_no_negative_and_no_huge_count() {
    let mut trial = Trial::new(window());
    for count in [100, 130, 10, 12] {
        trial.begin();
        trial.absorb(&pod("a", "canary"), Ok(scrape(1, [count, 0, 0])));
    }
    assert_eq!(counts(&trial, "canary"), [2, 0, 0]);
}

#[test]
fn frozen_counters_are_no_samples() {
    let mut trial = Trial::new(window());
    for _ in 0..5 {
        trial.absorb(&pod("a", "canary"), Ok(scrape(1, [100, 0, 0])));
    }
    assert_eq!(counts(&trial, "canary"), [0, 0, 0]);
}

#[test]
fn a_pod_that_fails_is_named_with_its_reason() {
    let mut trial = Trial::new(window());
    trial.absorb(&pod("a", "canary"), Err("connection refused".into()));
    let samples = trial.samples();
    assert_eq!(
        samples.tracks["canary"].problems,
        ["pod chat-a: connection refused"]
    );
    assert_eq!(samples.tracks["canary"].pods, 0);
}

/// A server that answers each connection with the next of `answers`, byte for byte.
async fn serve(answers: Vec<Vec<u8>>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(&answer).await;
        }
    });
    port
}

fn page(count: u64) -> Vec<u8> {
    let name = "mixquant_request_time_per_output_token_seconds_bucket";
    let body = format!(
        "process_start_time_seconds 5\n{name}{{le=\"0.01\"}} {count}\n{name}{{le=\"+Inf\"}} {count}\n"
    );
    format!(
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[tokio::test]
async fn two_scrapes_of_a_pod_are_its_difference() {
    let port = serve(vec![page(10), page(14)]).await;
    let scraper = Scraper::on_port(port);
    assert_eq!(
        scraper.sample("uid", &[pod("a", "canary")]).await,
        Samples::default()
    );
    scraper.set_window("uid", Some(&window()));
    scraper.sample("uid", &[pod("a", "canary")]).await;
    let samples = scraper.sample("uid", &[pod("a", "canary")]).await;
    assert_eq!(samples.tracks["canary"].tpot.counts, [4, 0]);
    assert_eq!(samples.tracks["canary"].pods, 1);
    assert_eq!(samples.since, Some(Timestamp::UNIX_EPOCH));
    scraper.set_window("uid", None);
    assert_eq!(
        scraper.sample("uid", &[pod("a", "canary")]).await,
        Samples::default()
    );
}

#[tokio::test]
async fn an_answer_that_is_not_plain_metrics_is_a_problem_and_no_sample() {
    let huge = format!(
        "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}",
        "x".repeat(MAX_BODY + 1)
    );
    for (answer, reason) in [
        (
            b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n".to_vec(),
            "503",
        ),
        (
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n"
                .to_vec(),
            "302",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 0\r\n\r\n".to_vec(),
            "compressed",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n\xff\xfe".to_vec(),
            "UTF-8",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec(),
            "missing",
        ),
        (huge.into_bytes(), "its body"),
        (b"garbage\r\n\r\n".to_vec(), "pod chat-a: "),
    ] {
        let scraper = Scraper::on_port(serve(vec![answer]).await);
        scraper.set_window("uid", Some(&window()));
        let samples = scraper.sample("uid", &[pod("a", "canary")]).await;
        let track = &samples.tracks["canary"];
        assert_eq!(track.pods, 0, "{reason}");
        assert!(track.problems[0].contains(reason), "{:?}", track.problems);
    }
}

#[tokio::test]
async fn a_pod_that_never_answers_ends_at_the_deadline_and_holds_up_no_other() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let held = Arc::new(listener);
    let scraper = Scraper::on_port(port);
    scraper.set_window("uid", Some(&window()));
    let pods: Vec<_> = (0..8).map(|n| pod(&n.to_string(), "canary")).collect();
    let started = clock::monotonic();
    let samples = scraper.sample("uid", &pods).await;
    assert!(started.elapsed() < DEADLINE * 2);
    assert_eq!(samples.tracks["canary"].problems.len(), 8);
    drop(held);
}
