//! What goes wrong while requests run: clients that leave, that do not read, too many of them, and numbers that are none.

use std::fs;
use std::io::Read as _;
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use mixquant_engine::health::Health;
use mixquant_engine::metrics::Metrics;
use mixquant_engine::model::Model;
use mixquant_engine::sample::Sampling;
use mixquant_engine::scheduler::Limits;
use mixquant_engine::server::Options;
use mixquant_engine::tokenizer::Tokenizer;
use mixquant_engine::worker::{Event, Job, Worker};
use serde_json::{Value, json};
use tokio::sync::mpsc::Receiver;
use tokio::sync::{Semaphore, mpsc as events};

use crate::client::{post, read_head};
use crate::fixture::{Server, model, options, wait_for};

/// A request that runs until its client leaves, or for some seconds.
fn endless(stream: bool) -> Value {
    json!({"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "temperature": 0, "stream": stream})
}

fn idle(server: &Server) -> bool {
    server.metric("mixquant_requests_running", "") < 0.5
        && server.metric("mixquant_kv_cache_usage_ratio", "") < 1e-9
}

#[test]
fn a_client_that_leaves_frees_its_cache_and_its_place() {
    let server = Server::start(Options {
        max_batch_size: 1,
        queue_size: 1,
        ..options()
    });
    for (left, stream) in [(1.0, true), (2.0, false)] {
        if stream {
            let mut response = post(server.api, "/v1/completions", &endless(true));
            assert!(response.chunk().is_some());
            assert!(server.metric("mixquant_kv_cache_usage_ratio", "") > 0.0);
        } else {
            let bytes = crate::client::post_bytes("/v1/completions", &endless(false).to_string());
            let mut socket = TcpStream::connect(server.api).unwrap();
            std::io::Write::write_all(&mut socket, &bytes).unwrap();
            wait_for("a running request", || {
                server.metric("mixquant_requests_running", "") > 0.5
            });
        }
        wait_for("a free cache", || idle(&server));
        assert!(
            (server.metric("mixquant_requests_total", "outcome=\"cancelled\"") - left).abs() < 1e-9
        );
    }
    let generated = server.metric("mixquant_generation_tokens_total", "");
    assert!(
        generated < 1000.0,
        "{generated} tokens: the sequences ran on without their clients"
    );
    let next = post(
        server.api,
        "/v1/completions",
        &json!({"prompt": "a", "max_tokens": 1}),
    );
    assert_eq!(next.status, 200);
}

#[test]
fn a_full_queue_is_a_fast_503() {
    let server = Server::start(Options {
        max_batch_size: 1,
        queue_size: 1,
        ..options()
    });
    let mut first = post(server.api, "/v1/completions", &endless(true));
    assert!(first.chunk().is_some());
    let waiting = thread::spawn({
        let api = server.api;
        move || {
            post(
                api,
                "/v1/completions",
                &json!({"prompt": "a", "max_tokens": 1}),
            )
            .status
        }
    });
    wait_for("a waiting request", || {
        server.metric("mixquant_requests_waiting", "") > 0.5
    });
    let start = Instant::now();
    let refused = post(
        server.api,
        "/v1/completions",
        &json!({"prompt": "a", "max_tokens": 1}),
    );
    let elapsed = start.elapsed();
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (503, Some("1"))
    );
    assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    drop(first);
    assert_eq!(
        waiting.join().unwrap(),
        200,
        "the one that waited is served when the first leaves"
    );
}

/// Goal: numbers that are none fail one request and no other. Method: a model whose embedding of one token is NaN.
#[test]
fn logits_that_are_no_numbers_fail_their_request_only() {
    let directory = tempfile::tempdir().unwrap();
    damaged_model(directory.path(), 4000);
    let server = Server::start(Options {
        model: directory.path().to_owned(),
        ..options()
    });
    let body = |prompt: Value| json!({"prompt": prompt, "max_tokens": 20, "ignore_eos": true, "temperature": 0});
    let good = thread::spawn({
        let api = server.api;
        move || post(api, "/v1/completions", &body(json!([0, 10, 11])))
    });
    let bad = post(server.api, "/v1/completions", &body(json!([0, 10, 4000])));
    assert_eq!(bad.status, 500);
    let message = bad.json();
    assert!(
        message["error"]["message"]
            .as_str()
            .unwrap()
            .contains("no finite numbers"),
        "{message}"
    );
    let mut stream = body(json!([0, 4000]));
    stream["stream"] = true.into();
    assert_eq!(
        post(server.api, "/v1/completions", &stream).status,
        500,
        "a stream that fails before its first token has a status"
    );
    assert_eq!(good.join().unwrap().status, 200);
    assert!((server.metric("mixquant_nan_logits_total", "") - 2.0).abs() < 1e-9);
    assert!((server.metric("mixquant_requests_total", "outcome=\"error\"") - 2.0).abs() < 1e-9);
    wait_for("a free cache", || idle(&server));
}

/// Copies the demo model and overwrites the embedding row of one token with NaN.
fn damaged_model(directory: &Path, token: usize) {
    for entry in fs::read_dir(model()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), directory.join(entry.file_name())).unwrap();
    }
    let name = "model.embed_tokens.weight";
    let index: Value =
        serde_json::from_slice(&fs::read(directory.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    let shard = directory.join(index["weight_map"][name].as_str().unwrap());
    let mut bytes = fs::read(&shard).unwrap();
    let header_length =
        usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_length]).unwrap();
    let begin = usize::try_from(header[name]["data_offsets"][0].as_u64().unwrap()).unwrap();
    let row = 2 * usize::try_from(header[name]["shape"][1].as_u64().unwrap()).unwrap();
    let at = 8 + header_length + begin + token * row;
    for value in bytes[at..at + row].chunks_exact_mut(2) {
        value.copy_from_slice(&0x7FC0_u16.to_le_bytes());
    }
    fs::write(shard, bytes).unwrap();
}

/// Goal: a reader that does not read never holds up a step. Method: the worker alone, one channel of two events that nobody empties.
#[test]
fn a_reader_that_never_reads_ends_alone() {
    let health = Arc::new(Health::new());
    let metrics = Arc::new(Metrics::new("m", "r"));
    let tokenizer = Arc::new(Tokenizer::open(&model()).unwrap());
    let limits = Limits {
        max_batch_size: 4,
        kv_capacity_tokens: 4096,
    };
    let mut worker = Worker::new(
        Model::open(&model()).unwrap(),
        tokenizer,
        limits,
        metrics.clone(),
        health,
    );
    let (jobs, receiver) = mpsc::channel();
    let permits = Arc::new(Semaphore::new(2));
    let job = |index: usize, capacity: usize| {
        let (events, receiver) = events::channel(capacity);
        let job = Job {
            index,
            prompt: vec![0, 10, 11],
            max_new_tokens: 50,
            min_new_tokens: 0,
            ignore_eos: true,
            sampling: Sampling::greedy(),
            given: Vec::new(),
            stops: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
            arrived: Instant::now(),
            events,
            permit: permits.clone().try_acquire_owned().unwrap(),
        };
        (job, receiver)
    };
    let (deaf, mut unread) = job(0, 2);
    let (other, read) = job(1, 100);
    jobs.send(deaf).unwrap();
    jobs.send(other).unwrap();
    drop(jobs);
    worker.run(&receiver);
    assert_eq!(
        drain(read),
        (50, true),
        "the other one is served to its end"
    );
    assert_eq!(permits.available_permits(), 2, "both places are free");
    assert!(
        unread.try_recv().is_ok() && unread.try_recv().is_ok(),
        "what fitted was sent"
    );
    assert!(
        unread
            .try_recv()
            .is_err_and(|error| error == events::error::TryRecvError::Disconnected)
    );
    assert!(
        metrics
            .text()
            .contains("mixquant_requests_running{model_name=\"m\",revision=\"r\"} 0")
    );
}

/// Tokens in a channel whose sender is done, and whether the sequence finished.
fn drain(mut events: Receiver<(usize, Event)>) -> (usize, bool) {
    let mut tokens = 0;
    while let Ok((_, event)) = events.try_recv() {
        match event {
            Event::Token { .. } => tokens += 1,
            Event::Finished(_) => return (tokens, true),
            Event::Prompt(_) | Event::Failed(_) => return (tokens, false),
        }
    }
    (tokens, false)
}

#[test]
#[ignore = "long: waits for the 10 s timer of heads"]
fn a_head_that_never_ends_ends_by_the_timer_while_a_resting_connection_stays() {
    let server = Server::common();
    let mut slow = TcpStream::connect(server.api).unwrap();
    std::io::Write::write_all(&mut slow, b"GET /v1/models HTTP/1.1\r\nx: ").unwrap();
    let mut resting = TcpStream::connect(server.api).unwrap();
    let request = b"GET /v1/models HTTP/1.1\r\nhost: t\r\n\r\n";
    std::io::Write::write_all(&mut resting, request).unwrap();
    assert_eq!(read_head(resting.try_clone().unwrap()).status, 200);
    let start = Instant::now();
    slow.set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut rest = Vec::new();
    // Closed or reset, both are an end.
    let _ = slow.read_to_end(&mut rest);
    assert!(
        (8..20).contains(&start.elapsed().as_secs()),
        "{:?}",
        start.elapsed()
    );
    std::io::Write::write_all(&mut resting, request).unwrap();
    assert_eq!(read_head(resting).status, 200);
}
