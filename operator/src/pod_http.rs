//! One request to one engine pod's admin port, bounded in time and in size. Called by `scrape` and `probe`; it keeps nothing.
//!
//! The pod itself answers or nobody does: no redirect is followed, no connection is kept, nothing compressed is unpacked. Whatever is not a
//! plain answer is an error in words that may stand in a status.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::error::one_line;
use crate::observed::ObservedPod;

/// To reach a pod at all.
const CONNECT: Duration = Duration::from_secs(2);
/// What is read of a refusal, and told of it.
const MAX_REFUSAL: usize = 4 << 10;
const TOLD: usize = 200;

/// Asks pods on one port.
pub struct PodClient {
    client: Client<HttpConnector, Full<Bytes>>,
    port: u16,
}

/// What an answer may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// From the first packet to the last byte.
    pub deadline: Duration,
    /// Bytes of its body.
    pub body: usize,
}

impl PodClient {
    /// A client of pods that answer on `port`.
    pub fn on_port(port: u16) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        Self {
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(0)
                .build(connector),
            port,
        }
    }

    /// What a pod answers to a GET.
    ///
    /// # Errors
    /// Why there is no plain answer.
    pub async fn get(
        &self,
        pod: &ObservedPod,
        path: &str,
        bounds: Bounds,
    ) -> Result<String, String> {
        self.ask(pod, (Method::GET, path, Bytes::new()), bounds)
            .await
    }

    /// What a pod answers to a POST of JSON.
    ///
    /// # Errors
    /// Why there is no plain answer.
    pub async fn post(
        &self,
        pod: &ObservedPod,
        (path, json): (&str, String),
        bounds: Bounds,
    ) -> Result<String, String> {
        self.ask(pod, (Method::POST, path, json.into()), bounds)
            .await
    }

    async fn ask(
        &self,
        pod: &ObservedPod,
        request: (Method, &str, Bytes),
        bounds: Bounds,
    ) -> Result<String, String> {
        tokio::time::timeout(bounds.deadline, self.fetch(pod, request, bounds.body))
            .await
            .map_err(|_| format!("no answer within {} s", bounds.deadline.as_secs()))?
    }

    async fn fetch(
        &self,
        pod: &ObservedPod,
        (method, path, body): (Method, &str, Bytes),
        most: usize,
    ) -> Result<String, String> {
        let address: IpAddr = pod
            .ip
            .as_deref()
            .ok_or("no address yet")?
            .parse()
            .map_err(|_| "its address is none")?;
        let address = SocketAddr::new(address, self.port);
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{address}{path}"))
            .header(header::ACCEPT, "text/plain, application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let response = self.client.request(request).await;
        let response = response.map_err(|error| reasons(&error))?;
        let status = response.status();
        if response.headers().contains_key(header::CONTENT_ENCODING) {
            return Err("a compressed answer that was not asked for".into());
        }
        if status != hyper::StatusCode::OK {
            let why = read(response, MAX_REFUSAL).await.unwrap_or_default();
            let why: String = one_line(&why).chars().take(TOLD).collect();
            let separator = if why.is_empty() { "" } else { ": " };
            return Err(format!("status {status}{separator}{why}"));
        }
        read(response, most).await
    }
}

async fn read(response: Response<Incoming>, most: usize) -> Result<String, String> {
    let body = Limited::new(response.into_body(), most).collect().await;
    let body = body.map_err(|error| format!("its body: {error}"))?;
    String::from_utf8(body.to_bytes().into()).map_err(|_| "its body is no UTF-8".into())
}

fn reasons(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
