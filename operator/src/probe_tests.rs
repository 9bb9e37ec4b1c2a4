//! Probes against scripted pods on the loopback.

use jiff::Timestamp;
use mixquant_crds::Digest;
use mixquant_crds::probe::ProbedText;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::observed::fixture::pod;

fn window(second: i64) -> Window {
    Window {
        since: Timestamp::from_second(second).unwrap(),
        revisions: ["stable".into(), "canary".into()],
    }
}

fn round(second: i64) -> ProbeRound {
    ProbeRound {
        window: window(second),
        artifact: Digest::of_bytes(b"artifact"),
        first: 3,
        requests: 2,
        seconds: 10,
        alone: false,
    }
}

fn pods() -> Vec<ObservedPod> {
    vec![pod("s", "stable"), pod("c", "canary")]
}

fn http(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn answered(nll: f64) -> String {
    let answers = [3, 4].map(|text| ProbedText {
        text,
        tokens: 8,
        nll,
    });
    let answer = ProbeAnswer {
        texts: 8,
        answers: answers.into(),
        stopped: None,
    };
    http("200 OK", &serde_json::to_string(&answer).unwrap())
}

/// Both tracks answer on one port; `answer` gives each request's answer, and every request is sent back.
async fn serve(answer: String) -> (u16, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, requests) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            // The body comes with the head or right behind it.
            while !request.ends_with(b"}") {
                let mut part = [0; 1024];
                let count = stream.read(&mut part).await.unwrap();
                request.extend_from_slice(&part[..count]);
            }
            sender.send(String::from_utf8(request).unwrap()).unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    (port, requests)
}

/// What is known once the round has ended.
async fn ended(prober: &Prober) -> Probed {
    let ends = async {
        while prober.probed("uid").running {
            tokio::task::yield_now().await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_mins(1), ends).await;
    assert!(ended.is_ok(), "{:?}", prober.probed("uid"));
    prober.probed("uid")
}

#[tokio::test]
async fn a_round_asks_a_pod_of_each_track_for_the_same_texts() {
    let (port, mut requests) = serve(answered(8.0)).await;
    let prober = Prober::on_port(port);
    assert_eq!(prober.probed("uid"), Probed::default());
    prober.set("uid", Some(&window(5)), Some(&round(5)), &pods());
    assert!(prober.probed("uid").running);
    // A round that runs is not sent twice.
    prober.set("uid", Some(&window(5)), Some(&round(5)), &pods());
    let probed = ended(&prober).await;
    assert_eq!(probed.problems, Vec::<String>::new());
    assert_eq!((probed.rounds, probed.texts), (1, Some(8)));
    assert_eq!(probed.pairs.keys().copied().collect::<Vec<_>>(), [3, 4]);
    assert_eq!(probed.since, Some(window(5).since));
    let asked: Vec<String> = std::iter::from_fn(|| requests.try_recv().ok()).collect();
    assert_eq!(asked.len(), 2);
    for request in asked {
        assert!(request.starts_with("POST /probe HTTP/1.1"), "{request}");
        let body = request.rsplit("\r\n").next().unwrap();
        let body: ProbeRequest = serde_json::from_str(body).unwrap();
        assert_eq!((body.first, body.count, body.seconds), (3, 2, 10));
        assert_eq!(body.artifact, Digest::of_bytes(b"artifact"));
    }
    // No round is due any more, and the answers stand; another window has none.
    prober.set("uid", Some(&window(5)), None, &pods());
    assert_eq!(prober.probed("uid").pairs.len(), 2);
    prober.set("uid", Some(&window(6)), None, &pods());
    assert_eq!(prober.probed("uid"), Probed::default());
}

#[tokio::test]
async fn what_is_no_plain_answer_to_probes_is_a_problem_with_its_reason() {
    let many = serde_json::json!({"texts": 8, "answers": vec![serde_json::json!({"text": 1, "tokens": 8, "nll": 1.0}); 3]});
    let huge = http("200 OK", &" ".repeat(MAX_BODY + 1));
    for (answer, reason) in [
        (
            http("503 Busy", "the model is not ready yet"),
            "the model is not ready yet",
        ),
        (http("404 Not Found", ""), "an older one does not"),
        (http("302 Found", ""), "302"),
        (http("200 OK", "{}"), "not an answer to probes"),
        (
            http(
                "200 OK",
                r#"{"texts": 8, "answers": [{"text": 1, "tokens": 8, "nll": null}]}"#,
            ),
            "not an answer",
        ),
        (
            http(
                "200 OK",
                r#"{"texts": 8, "answers": [{"text": 1, "tokens": 8, "nll": -1.0}]}"#,
            ),
            "no likelihood",
        ),
        (http("200 OK", &many.to_string()), "more answers"),
        (huge, "its body"),
        ("garbage\r\n\r\n".to_owned(), "pod chat-s"),
    ] {
        let (port, _requests) = serve(answer).await;
        let prober = Prober::on_port(port);
        prober.set("uid", Some(&window(5)), Some(&round(5)), &pods());
        let probed = ended(&prober).await;
        assert!(probed.pairs.is_empty(), "{reason}");
        assert!(probed.problems[0].contains(reason), "{:?}", probed.problems);
    }
}

#[tokio::test]
async fn without_a_ready_pod_of_a_track_there_is_a_problem_and_nothing_is_compared() {
    let (port, _requests) = serve(answered(8.0)).await;
    let prober = Prober::on_port(port);
    let mut unready = pods();
    unready[0].ready = false;
    prober.set("uid", Some(&window(5)), Some(&round(5)), &unready);
    let probed = ended(&prober).await;
    assert_eq!(
        probed.problems,
        ["stable: no pod of revision stable is ready"]
    );
    assert!(probed.pairs.is_empty());
    let alone = ProbeRound {
        alone: true,
        ..round(5)
    };
    prober.set("uid", Some(&window(5)), Some(&alone), &unready);
    let probed = ended(&prober).await;
    assert_eq!((probed.problems.len(), probed.texts), (0, Some(8)));
}

#[tokio::test]
async fn the_rounds_go_round_among_the_pods_that_are_ready() {
    let mut pods = vec![pod("a", "canary"), pod("b", "canary"), pod("c", "stable")];
    let name = |pods: &[ObservedPod], number| pick(pods, "canary", number).unwrap().uid;
    assert_eq!([0, 1, 2].map(|number| name(&pods, number)), ["a", "b", "a"]);
    pods[0].terminating = true;
    assert_eq!([0, 1].map(|number| name(&pods, number)), ["b", "b"]);
}

#[tokio::test]
async fn a_round_of_a_window_that_is_over_is_given_up() {
    // It accepts and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let prober = Prober::on_port(listener.local_addr().unwrap().port());
    prober.set("uid", Some(&window(5)), Some(&round(5)), &pods());
    let (mut stream, _) = listener.accept().await.unwrap();
    prober.set("uid", None, None, &[]);
    assert_eq!(prober.probed("uid"), Probed::default());
    // The connection ends because the one who asked is gone.
    let mut rest = Vec::new();
    let read = tokio::time::timeout(Duration::from_mins(1), stream.read_to_end(&mut rest));
    assert!(read.await.unwrap().is_ok());
    // A round for a window that is not the trial's is not sent.
    prober.set("uid", Some(&window(6)), Some(&round(5)), &pods());
    assert_eq!(prober.probed("uid"), Probed::default());
}
