//! Wrong requests: each is answered by a 4xx in OpenAI's shape that names its field, and changes nothing.

use std::io::{ErrorKind, Write as _};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::client::{Response, get, post, post_bytes, raw};
use crate::fixture::Server;

/// The error object of a refusal with this status.
fn refused(response: Response, status: u16, what: &str) -> Value {
    let found = response.status;
    let body = response.json();
    assert_eq!(found, status, "{what}: {body}");
    let error = &body["error"];
    assert_eq!(error["code"], status, "{what}: {body}");
    assert!(error["type"].is_string(), "{what}: {body}");
    let message = error["message"].as_str().expect("a message");
    assert!(
        !message.is_empty() && message.len() < 400 && !message.contains('\n'),
        "{what}: {message}"
    );
    error.clone()
}

/// Wrong values of each field of `/v1/completions`, as a JSON list.
const WRONG: &[(&str, &str)] = &[
    (
        "prompt",
        r#"[null, "", [], [[]], [""], 7, {}, [1, "a"], ["a", 1]]"#,
    ),
    (
        "prompt",
        "[[4096], [-1], [1.5], [[0, 4294967296]], [[0], [4096]]]",
    ),
    (
        "max_tokens",
        r#"[0, -1, 1.5, "9", 1024, 1025, 2147483648, 9223372036854775808]"#,
    ),
    ("min_tokens", r#"[-1, 5000, "x"]"#),
    ("n", "[0, 9, -1, 2147483648, []]"),
    ("temperature", r#"[-1, 2.1, 1e9, 1e300, "hot"]"#),
    ("top_p", r#"[0, -0.1, 1.1, "x"]"#),
    ("top_k", r#"[-2, 0.5, "x"]"#),
    ("min_p", "[-0.1, 1.5]"),
    ("seed", r#"["x", 1.5, 1e30]"#),
    ("logprobs", "[-1, 6, true, 2147483648]"),
    ("echo", r#"[1, "true"]"#),
    ("stop", r#"["", [""], 7, [1]]"#),
    ("stream", r#"["yes", 1]"#),
    ("stream_options", r#"[{"include_usage": true}, 7]"#),
    ("ignore_eos", r#"["no"]"#),
    ("logit_bias", r#"[{"7": 1}, {"99999999": 100}]"#),
    ("presence_penalty", r#"[0.5, "x"]"#),
    ("frequency_penalty", "[-1]"),
    ("repetition_penalty", "[1.1]"),
    (
        "response_format",
        r#"[{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}]"#,
    ),
    ("best_of", "[3]"),
    ("suffix", r#"["end"]"#),
    ("chat_template", r#"["{{ x }}"]"#),
    ("guided_regex", r#"["(a+)+b"]"#),
];

/// The same for values that are wrong by their size.
fn oversized() -> Vec<(&'static str, Value)> {
    vec![
        ("prompt", json!(vec![0; 1025])),
        ("prompt", json!(vec!["a"; 1000])),
        ("prompt", json!("word ".repeat(1100))),
        ("prompt", json!("x".repeat(1 << 20))),
        ("stop", json!("x".repeat(2000))),
        ("stop", json!(vec!["a"; 17])),
    ]
}

#[test]
fn each_wrong_field_is_a_400_that_names_it() {
    let server = Server::common();
    let values = |list: &str| serde_json::from_str::<Vec<Value>>(list).unwrap();
    let table = WRONG
        .iter()
        .flat_map(|(field, list)| values(list).into_iter().map(|value| (*field, value)));
    for (field, value) in table.chain(oversized()) {
        let mut body = json!({"prompt": "a pod", "max_tokens": 1});
        body[field] = value.clone();
        let what: String = format!("{field} = {value}").chars().take(120).collect();
        let error = refused(post(server.api, "/v1/completions", &body), 400, &what);
        assert_eq!(error["param"], field, "{what}: {error}");
        assert!(
            error["message"].as_str().unwrap().contains(field),
            "{what}: {error}"
        );
    }
}

#[test]
fn each_wrong_field_of_a_chat_is_a_400_that_names_it() {
    let server = Server::common();
    let message = |value: Value| json!({"messages": [value]});
    let said = json!([{"role": "user", "content": "hi"}]);
    let with = |name: &str, value: Value| json!({"messages": said, name: value});
    let table = [
        ("messages", json!({})),
        ("messages", json!({"messages": []})),
        ("messages", json!({"messages": "hi"})),
        ("messages[0]", message(json!("hi"))),
        ("messages[0].role", message(json!({"content": "hi"}))),
        (
            "messages[0].role",
            message(json!({"role": "wizard", "content": "hi"})),
        ),
        ("messages[0].content", message(json!({"role": "user"}))),
        (
            "messages[0].content",
            message(json!({"role": "user", "content": null})),
        ),
        (
            "messages[0].content",
            message(
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]}),
            ),
        ),
        (
            "messages[0].tool_calls",
            message(json!({"role": "assistant", "content": "x", "tool_calls": [{}]})),
        ),
        (
            "messages[0].name",
            message(json!({"role": "user", "content": "x", "name": "bob"})),
        ),
        (
            "messages",
            message(json!({"role": "user", "content": "word ".repeat(1100)})),
        ),
        ("tools", with("tools", json!([{"type": "function"}]))),
        ("tool_choice", with("tool_choice", json!("required"))),
        (
            "response_format",
            with("response_format", json!({"type": "json_schema"})),
        ),
        ("top_logprobs", with("top_logprobs", json!(5))),
        ("top_logprobs", with("top_logprobs", json!(21))),
        ("logprobs", with("logprobs", json!(5))),
        (
            "max_completion_tokens",
            with("max_completion_tokens", json!(0)),
        ),
        (
            "chat_template_kwargs",
            with("chat_template_kwargs", json!({"x": 1})),
        ),
        (
            "stream_options.surprise",
            json!({"messages": said, "stream": true, "stream_options": {"surprise": 1}}),
        ),
    ];
    for (field, body) in table {
        let error = refused(post(server.api, "/v1/chat/completions", &body), 400, field);
        assert_eq!(error["param"], field, "{error}");
    }
}

#[test]
fn harmless_fields_are_taken() {
    let body = json!({
        "prompt": "a pod", "max_tokens": 1, "user": "u", "metadata": {"a": "b"}, "presence_penalty": 0.0, "logit_bias": {}, "tools": null,
        "frequency_penalty": 0, "repetition_penalty": 1.0, "response_format": {"type": "text"}, "best_of": 1, "suffix": null, "top_k": -1,
    });
    let response = post(Server::common().api, "/v1/completions", &body);
    let status = response.status;
    assert_eq!(status, 200, "{}", response.text());
}

#[test]
fn bodies_that_are_no_request_are_refused() {
    let server = Server::common();
    let post = |body: &str| raw(server.api, &post_bytes("/v1/completions", body));
    let deep = "[".repeat(100_000);
    let nested = format!(r#"{{"prompt": {deep}"#);
    for body in [
        "",
        "[]",
        "7",
        "{",
        "\u{feff}{}",
        r#"{"prompt": "a", "temperature": NaN}"#,
        r#"{"temperature": 1e999}"#,
        r#"{"prompt": "\ud800"}"#,
        deep.as_str(),
        nested.as_str(),
    ] {
        refused(post(body), 400, body.get(..40).unwrap_or(body));
    }
}

#[test]
fn a_body_above_the_limit_is_a_413_however_it_is_sent() {
    let server = Server::common();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\n";
    refused(
        raw(
            server.api,
            format!("{head}content-length: 4194305\r\n\r\n").as_bytes(),
        ),
        413,
        "declared",
    );
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, "x".repeat(1 << 20));
    let chunked = format!(
        "{head}transfer-encoding: chunked\r\n\r\n{}",
        chunk.repeat(4)
    ) + "1\r\nx\r\n";
    refused(raw(server.api, chunked.as_bytes()), 413, "chunked");
}

#[test]
fn a_client_that_sends_a_declared_body_to_its_end_still_reads_the_413() {
    let server = Server::common();
    // Larger than what the sockets on both sides hold.
    let body = "x".repeat(32 << 20);
    let error = refused(
        raw(server.api, &post_bytes("/v1/completions", &body)),
        413,
        "sent whole",
    );
    assert!(
        error["message"].as_str().unwrap().contains("4194304 bytes"),
        "{error}"
    );
}

#[test]
fn large_bodies_that_stand_still_do_not_hold_up_one_that_arrives() {
    let server = Server::common();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 4194304\r\n\r\n";
    let slow: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut stream = TcpStream::connect(server.api).unwrap();
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&vec![b' '; (4 << 20) - 1]).unwrap();
            stream.set_nonblocking(true).unwrap();
            stream
        })
        .collect();
    let long = json!({"prompt": "a ".repeat(1_500_000)});
    refused(post(server.api, "/v1/completions", &long), 400, "too long");
    // It did not wait until the others' time was up.
    let open = slow
        .iter()
        .filter(|stream| {
            let peeked = stream.peek(&mut [0]);
            peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        })
        .count();
    assert!(open >= 20, "{open} of 40 are open");
}

#[test]
fn unknown_models_paths_and_methods_are_refused_in_the_same_shape() {
    let server = Server::common();
    let body = json!({"model": "gpt-9", "prompt": "a"});
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    ] {
        let error = refused(post(server.api, path, &body), 404, path);
        assert!(
            error["message"].as_str().unwrap().contains("kube-llama"),
            "{error}"
        );
    }
    for path in [
        "/",
        "/v1",
        "/v1/completions/",
        "//v1/models",
        "/v1/../metrics",
        "/metrics",
        "/V1/models",
    ] {
        refused(get(server.api, path), 404, path);
    }
    let wrong = get(server.api, "/v1/completions");
    assert_eq!(wrong.header("allow"), Some("POST"));
    let error = refused(wrong, 405, "GET");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("GET /v1/completions"),
        "{error}"
    );
    refused(
        post(server.api, "/v1/models/kube-llama", &json!({})),
        405,
        "POST",
    );
    for name in ["gpt-9", "org/name", "kube-llama/", "%2e%2e"] {
        refused(get(server.api, &format!("/v1/models/{name}")), 404, name);
    }
    assert_eq!(
        get(server.api, "/v1/models/kube-llama").json()["id"],
        "kube-llama"
    );
    let models = get(server.api, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "kube-llama");
    assert_eq!(models["data"][0]["max_model_len"], 1024);
}

#[test]
fn refusals_are_counted_and_leave_nothing_behind() {
    let server = Server::start(crate::fixture::options());
    for _ in 0..3 {
        refused(
            post(server.api, "/v1/completions", &json!({"prompt": ""})),
            400,
            "empty",
        );
    }
    assert!((server.metric("mixquant_requests_total", "outcome=\"rejected\"") - 3.0).abs() < 1e-9);
    assert!(server.metric("mixquant_kv_cache_usage_ratio", "") < 1e-9);
}
