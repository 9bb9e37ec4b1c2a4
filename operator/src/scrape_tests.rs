//! The scraper against scripted pods on the loopback.

use std::sync::Arc;

use jiff::Timestamp;
use mixquant_crds::rollout::{GateMetric, NoData, OnFailure};
use mixquant_crds::status::Outcome;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::judge;
use crate::observed::fixture::pod;
use crate::samples::{Series, Value};
use crate::validate::Gate;

fn window() -> Window {
    Window {
        since: Timestamp::UNIX_EPOCH,
        revisions: ["stable".into(), "canary".into()],
    }
}

fn tpot(samples: &Samples, revision: &str) -> Vec<u64> {
    match samples.tracks[revision].values.get(&Series::Tpot) {
        Some(Value::Histogram(histogram)) => histogram.counts.clone(),
        other => panic!("{other:?}"),
    }
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
    scraper.set_windows("uid", Some(&window()), None);
    scraper.sample("uid", &[pod("a", "canary")]).await;
    let samples = scraper.sample("uid", &[pod("a", "canary")]).await;
    assert_eq!(tpot(&samples, "canary"), [4, 0]);
    assert_eq!(samples.tracks["canary"].pods, 1);
    assert_eq!(samples.since, Some(Timestamp::UNIX_EPOCH));
    scraper.set_windows("uid", None, None);
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
            "is missing",
        ),
        (huge.into_bytes(), "its body"),
        (b"garbage\r\n\r\n".to_vec(), "pod chat-a: "),
    ] {
        let scraper = Scraper::on_port(serve(vec![answer]).await);
        scraper.set_windows("uid", Some(&window()), None);
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
    scraper.set_windows("uid", Some(&window()), None);
    let pods: Vec<_> = (0..8).map(|n| pod(&n.to_string(), "canary")).collect();
    let started = clock::monotonic();
    let samples = scraper.sample("uid", &pods).await;
    assert!(started.elapsed() < DEADLINE * 2);
    assert_eq!(samples.tracks["canary"].problems.len(), 8);
    drop(held);
}

fn answered(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// A page of `count` requests at 5 ms.
fn whole(name: &str, count: &str) -> String {
    let bucket = format!("mixquant_{name}_seconds_bucket");
    format!(
        "process_start_time_seconds 5\n{bucket}{{le=\"0.005\"}} {count}\n{bucket}{{le=\"0.2\"}} {count}\n{bucket}{{le=\"+Inf\"}} {count}\n"
    )
}

/// What the gate says when both pods show `first` and then `second`.
async fn judged(first: Vec<u8>, second: Vec<u8>) -> judge::Verdict {
    let answers = [&first, &first, &second, &second].map(Clone::clone);
    let scraper = Scraper::on_port(serve(answers.into()).await);
    scraper.set_windows("uid", Some(&window()), None);
    let pods = [pod("a", "stable"), pod("b", "canary")];
    scraper.sample("uid", &pods).await;
    let samples = scraper.sample("uid", &pods).await;
    let gate = Gate {
        name: "tpot".into(),
        metric: GateMetric::TPOT,
        quantile: Some(0.9),
        max: Some(0.1),
        max_ratio: Some(1.5),
        min_samples: 50,
        no_data: NoData::Hold,
        on_failure: OnFailure::Rollback,
    };
    let look = judge::Look {
        window: &window(),
        interval: 15,
        samples: &samples,
        killed: 0,
        alone: false,
        now: clock::now(),
    };
    judge::gate(&gate, &look)
}

/// Every way in which pages can say nothing, through the real scraper, parser and judge: none passes, and none is a failure either.
#[tokio::test]
async fn no_fault_of_the_metrics_passes_a_gate_or_fails_it() {
    let name = "request_time_per_output_token";
    let good = || answered(&whole(name, "100"));
    let later = |body: &str| answered(body);
    let full = whole(name, "2000");
    let healthy = judged(good(), later(&full)).await;
    assert_eq!(healthy.outcome, Outcome::Pass, "{}", healthy.message);
    let huge = format!("{full}# {}", "x".repeat(MAX_BODY));
    let faults = [
        ("down", Vec::new()),
        (
            "5xx",
            b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_vec(),
        ),
        ("empty", later("")),
        ("frozen", good()),
        ("reset", later(&whole(name, "50"))),
        ("renamed", later(&whole("request_tpot", "2000"))),
        ("NaN", later(&whole(name, "NaN"))),
        ("negative", later(&whole(name, "-2000"))),
        ("infinite", later(&whole(name, "+Inf"))),
        ("huge", answered(&huge)),
        ("cut off", good()[..60].to_vec()),
        ("twice", later(&format!("{full}{full}"))),
        (
            "restarted",
            later(&full.replace("seconds 5\n", "seconds 9\n")),
        ),
    ];
    for (fault, second) in faults {
        let verdict = judged(good(), second).await;
        let message = verdict.message;
        assert_eq!(verdict.outcome, Outcome::Inconclusive, "{fault}: {message}");
    }
}
