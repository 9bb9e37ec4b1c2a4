//! A small apiserver in memory behind a real `kube::Client`: a map from path to object with resourceVersions, uids, preconditions,
//! label selectors and server-side apply as a merge. It counts writes and refuses what a test tells it to.

#![allow(dead_code, reason = "each test program uses its part of this module")]

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::BodyExt;
use hyper::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use mixquant_operator::apply::{Target, Writer};
use mixquant_operator::lease::Fence;
use mixquant_operator::metrics::Metrics;
use mixquant_operator::read;
use mixquant_operator::validate::validate;
use serde_json::{Value, json};

/// Where the example is stored.
pub(crate) const SERVICE: &str =
    "/apis/mixquant.io/v1alpha1/namespaces/models/mixquantservices/chat";

/// A server that holds the example `chat`.
pub(crate) fn server() -> FakeApi {
    let api = FakeApi::default();
    let mut service: Value =
        serde_norway::from_str(include_str!("../../../crds/examples/chat.yaml")).unwrap();
    service["metadata"]["namespace"] = json!("models");
    service["metadata"]["uid"] = json!("service-uid");
    service["metadata"]["generation"] = json!(1);
    api.put(SERVICE, service);
    api
}

/// A writer behind `fence`.
pub(crate) fn writer(api: &FakeApi, fence: Fence) -> Writer {
    Writer::new(
        api.client(),
        fence,
        Arc::new(Metrics::default()),
        "test".into(),
    )
}

/// The example as it is stored, read and checked.
pub(crate) async fn target(api: &FakeApi) -> Target {
    let stored = read::service(&api.client(), "models", "chat")
        .await
        .unwrap();
    let mut target = Target::read(stored.unwrap()).ok().unwrap();
    target.valid = Some(validate(&target.service).unwrap());
    target
}

/// The state of the server.
#[derive(Default)]
pub(crate) struct State {
    /// By path, such as `/apis/apps/v1/namespaces/models/deployments/chat`.
    pub(crate) objects: BTreeMap<String, Value>,
    /// `METHOD path` of every write that arrived, in order.
    pub(crate) writes: Vec<String>,
    /// The path of every read that arrived, in order.
    reads: Vec<String>,
    /// Paths that contain the text are refused with the status and message.
    pub(crate) refuse: Option<(&'static str, u16, &'static str)>,
    version: u64,
}

/// A handle to the server.
#[derive(Clone, Default)]
pub(crate) struct FakeApi(pub(crate) Arc<Mutex<State>>);

impl FakeApi {
    /// A client of this server.
    pub(crate) fn client(&self) -> Client {
        let state = Arc::clone(&self.0);
        let service = tower::service_fn(move |request: Request<Body>| {
            let state = Arc::clone(&state);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
                let query = parts.uri.query().unwrap_or_default().to_owned();
                let path = parts.uri.path().to_owned();
                let answer = state
                    .lock()
                    .unwrap()
                    .answer(&parts.method, &path, &query, body);
                let (status, value) = answer;
                let response = Response::builder()
                    .status(status)
                    .body(Body::from(serde_json::to_vec(&value).unwrap()))
                    .unwrap();
                Ok::<_, Infallible>(response)
            }
        });
        Client::new(service, "models")
    }

    /// Stores an object as it is, without counting it as a write.
    pub(crate) fn put(&self, path: &str, object: Value) {
        let mut state = self.0.lock().unwrap();
        let object = state.stamp(object);
        state.objects.insert(path.to_owned(), object);
    }

    /// A stored object.
    pub(crate) fn object(&self, path: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(path).cloned()
    }

    /// Changes a stored object behind everybody's back.
    pub(crate) fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut state = self.0.lock().unwrap();
        let mut object = state.objects[path].clone();
        change(&mut object);
        let object = state.stamp(object);
        state.objects.insert(path.to_owned(), object);
    }

    /// The writes since the last call.
    pub(crate) fn take_writes(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().writes)
    }

    /// The paths that were read since the last call.
    pub(crate) fn take_reads(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().reads)
    }
}

type Answer = (StatusCode, Value);

fn refused(code: u16, message: &str) -> Answer {
    let reason = match code {
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        _ => "",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": reason});
    (StatusCode::from_u16(code).unwrap(), status)
}

impl State {
    fn stamp(&mut self, mut object: Value) -> Value {
        self.version += 1;
        let version = self.version;
        let metadata = &mut object["metadata"];
        metadata["resourceVersion"] = json!(version.to_string());
        if metadata.get("uid").is_none() {
            metadata["uid"] = json!(format!("uid-{version}"));
        }
        if metadata.get("creationTimestamp").is_none() {
            metadata["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        object
    }

    fn answer(&mut self, method: &Method, path: &str, query: &str, body: Value) -> Answer {
        if *method == Method::GET {
            self.reads.push(path.to_owned());
        } else {
            self.writes.push(format!("{method} {path}"));
        }
        if let Some((part, code, message)) = self.refuse
            && path.contains(part)
            && *method != Method::GET
        {
            return refused(code, message);
        }
        match *method {
            Method::GET => self.get(path, query),
            Method::POST => {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                let path = format!("{path}/{name}");
                if self.objects.contains_key(&path) {
                    return refused(409, "already exists");
                }
                self.store(path, body)
            }
            Method::PUT => match self.conflict(path, &body) {
                Some(answer) => answer,
                None if self.objects.contains_key(path) => self.store(path.to_owned(), body),
                None => refused(404, "not found"),
            },
            Method::PATCH => self.patch(path, query, &body),
            Method::DELETE => {
                let Some(object) = self.objects.get(path) else {
                    return refused(404, "not found");
                };
                let wanted = &body["preconditions"]["uid"];
                if !wanted.is_null() && *wanted != object["metadata"]["uid"] {
                    return refused(409, "the uid is another");
                }
                let object = self.objects.remove(path).unwrap();
                (StatusCode::OK, object)
            }
            _ => refused(405, "no such method"),
        }
    }

    fn store(&mut self, path: String, object: Value) -> Answer {
        let object = self.stamp(object);
        self.objects.insert(path, object.clone());
        (StatusCode::OK, object)
    }

    fn conflict(&self, path: &str, body: &Value) -> Option<Answer> {
        let stored = self.objects.get(path)?;
        ["resourceVersion", "uid"].into_iter().find_map(|field| {
            let wanted = &body["metadata"][field];
            let differs = !wanted.is_null() && *wanted != stored["metadata"][field];
            differs.then(|| refused(409, &format!("another {field}")))
        })
    }

    fn patch(&mut self, path: &str, query: &str, body: &Value) -> Answer {
        let path = path.strip_suffix("/status").unwrap_or(path).to_owned();
        if let Value::Array(operations) = body {
            return self.patch_by_operations(path, operations);
        }
        if let Some(answer) = self.conflict(&path, body) {
            return answer;
        }
        let applies =
            query.contains("fieldManager=mixquant-operator") && query.contains("force=true");
        let mut object = match self.objects.get(&path) {
            Some(object) => object.clone(),
            None if applies => json!({}),
            None => return refused(404, "not found"),
        };
        merge(&mut object, body);
        self.store(path, object)
    }

    /// RFC 6902, as far as it is used: `test` and `add` of a member.
    fn patch_by_operations(&mut self, path: String, operations: &[Value]) -> Answer {
        let Some(mut object) = self.objects.get(&path).cloned() else {
            return refused(404, "not found");
        };
        for operation in operations {
            let at = operation["path"].as_str().unwrap();
            if operation["op"] == "test" {
                if object.pointer(at) != Some(&operation["value"]) {
                    // What a real one says.
                    let message = "the server rejected our request due to an error in our request";
                    return refused(422, message);
                }
            } else {
                let (parent, member) = at.rsplit_once('/').unwrap();
                object.pointer_mut(parent).unwrap()[member] = operation["value"].clone();
            }
        }
        self.store(path, object)
    }

    fn get(&self, path: &str, query: &str) -> Answer {
        if let Some(object) = self.objects.get(path) {
            return (StatusCode::OK, object.clone());
        }
        // A collection has an even number of parts after the group and version, an object an odd one: `…/namespaces/NS/KIND[/NAME]`.
        let after = path.split_once("/namespaces/").map_or("", |(_, rest)| rest);
        if after.split('/').count() != 2 {
            return refused(404, "not found");
        }
        let wanted = selector(query);
        let prefix = format!("{path}/");
        let items: Vec<&Value> = self
            .objects
            .iter()
            .filter(|(path, _)| path.starts_with(&prefix))
            .map(|(_, object)| object)
            .filter(|object| {
                wanted
                    .iter()
                    .all(|(key, value)| object["metadata"]["labels"][key] == **value)
            })
            .collect();
        (
            StatusCode::OK,
            json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
        )
    }
}

fn selector(query: &str) -> HashMap<String, String> {
    query
        .split('&')
        .find_map(|part| part.strip_prefix("labelSelector="))
        .map(|text| {
            text.replace("%2F", "/")
                .replace("%3D", "=")
                .replace("%2C", ",")
        })
        .iter()
        .flat_map(|text| text.split(','))
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn merge(object: &mut Value, patch: &Value) {
    match (object, patch) {
        (Value::Object(object), Value::Object(patch)) => {
            for (key, value) in patch {
                if value.is_null() {
                    object.remove(key);
                } else if key == "selector" {
                    // An atomic map: it is replaced as a whole.
                    object.insert(key.clone(), value.clone());
                } else {
                    merge(object.entry(key.clone()).or_insert(json!({})), value);
                }
            }
        }
        (object, patch) => *object = patch.clone(),
    }
}
