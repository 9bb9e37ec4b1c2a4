//! The HTTP client under every store: hyper with rustls, no proxy, no cookies, and redirects only where a source asks for them.
//!
//! `source` hands it to `object_store`, which signs, retries and reads ranges. It decides how long a server may be silent; it never
//! sends a credential to another host than the one that it was given for.

use std::time::Duration;

use async_trait::async_trait;
use axum::http::header::{ACCEPT_ENCODING, AUTHORIZATION, HOST, LOCATION, USER_AGENT};
use axum::http::{HeaderValue, Request, Response, Uri};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use hyper_util::rt::TokioExecutor;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use url::Url;

/// Until a connection stands.
const CONNECT: Duration = Duration::from_secs(10);
/// Until a server begins to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Model hubs send one or two.
const MAX_REDIRECTS: usize = 5;

/// What the client may do, said once for a source.
#[derive(Debug, Clone, Default)]
pub(super) struct Connector {
    /// Connections without TLS: only where the user wrote `http://`.
    pub(super) plain_text: bool,
    /// Redirects: only for plain web servers, whose requests carry no signature over the host.
    pub(super) redirects: bool,
    /// Sent as `Authorization` to the source's own host.
    pub(super) authorization: Option<HeaderValue>,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = TcpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        let tls = HttpsConnectorBuilder::new().with_tls_config(trust()?);
        let tls = if self.plain_text {
            tls.https_or_http()
        } else {
            tls.https_only()
        };
        let client =
            Client::builder(TokioExecutor::new()).build(tls.enable_http1().wrap_connector(tcp));
        Ok(HttpClient::new(Service {
            client,
            rules: self.clone(),
        }))
    }
}

/// The system's certificates, or `SSL_CERT_FILE`; Mozilla's where an image has none.
fn trust() -> object_store::Result<rustls::ClientConfig> {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let failed = |source: rustls::Error| object_store::Error::Generic {
        store: "TLS",
        source: Box::new(source),
    };
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(failed)?;
    Ok(match config.clone().with_native_roots() {
        Ok(native) => native,
        Err(_none) => config.with_webpki_roots(),
    }
    .with_no_client_auth())
}

#[derive(Debug)]
struct Service {
    client: Client<HttpsConnector<TcpConnector>, HttpRequestBody>,
    rules: Connector,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut parts, body) = request.into_parts();
        // A body that was packed on the way would have another length and other ranges than the file.
        parts
            .headers
            .insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let agent = concat!("mixquant-engine/", env!("CARGO_PKG_VERSION"));
        parts
            .headers
            .insert(USER_AGENT, HeaderValue::from_static(agent));
        if let Some(authorization) = &self.rules.authorization {
            parts.headers.insert(AUTHORIZATION, authorization.clone());
        }
        for _ in 0..=MAX_REDIRECTS {
            let response = self
                .send(Request::from_parts(parts.clone(), body.clone()))
                .await?;
            let Some(next) = self.next(&parts.uri, &response)? else {
                let body = |body: Incoming| HttpResponseBody::new(body.map_err(broken));
                return Ok(response.map(body));
            };
            if next.authority() != parts.uri.authority() {
                parts.headers.remove(AUTHORIZATION);
            }
            parts.headers.remove(HOST);
            parts.uri = next;
        }
        Err(refused(format!("more than {MAX_REDIRECTS} redirects")))
    }
}

impl Service {
    async fn send(&self, request: HttpRequest) -> Result<Response<Incoming>, HttpError> {
        let answer = tokio::time::timeout(ANSWER, self.client.request(request)).await;
        answer
            .map_err(|late| HttpError::new(HttpErrorKind::Timeout, late))?
            .map_err(|error| {
                let kind = if error.is_connect() {
                    HttpErrorKind::Connect
                } else {
                    HttpErrorKind::Interrupted
                };
                HttpError::new(kind, error)
            })
    }

    /// Where a redirect leads; `None` for every other answer.
    fn next(&self, from: &Uri, response: &Response<Incoming>) -> Result<Option<Uri>, HttpError> {
        let location = response.headers().get(LOCATION);
        let (true, true, Some(location)) = (
            self.rules.redirects,
            response.status().is_redirection(),
            location,
        ) else {
            return Ok(None);
        };
        target(from, location.as_bytes()).map(Some).map_err(refused)
    }
}

/// The absolute address that a `Location` names, never from TLS to plain text.
fn target(from: &Uri, location: &[u8]) -> Result<Uri, String> {
    let location = std::str::from_utf8(location).map_err(|_| "a redirect that is no text")?;
    let base = Url::parse(&from.to_string()).map_err(|error| error.to_string())?;
    let next = base
        .join(location)
        .map_err(|error| format!("a redirect to no address: {error}"))?;
    let allowed = next.scheme() == "https" || (next.scheme() == "http" && base.scheme() == "http");
    if !allowed || next.host().is_none() {
        return Err(format!("a redirect from {base} to {next} is not followed"));
    }
    next.as_str()
        .parse()
        .map_err(|error| format!("a redirect to no address: {error}"))
}

fn broken(error: hyper::Error) -> HttpError {
    HttpError::new(HttpErrorKind::Interrupted, error)
}

/// Another try gives the same answer.
fn refused(text: String) -> HttpError {
    HttpError::new(HttpErrorKind::Decode, std::io::Error::other(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_never_leaves_tls_and_may_be_relative() {
        let to = |from: &str, location: &str| {
            target(&from.parse().unwrap(), location.as_bytes()).map(|uri| uri.to_string())
        };
        let https = "https://hub.example/a/b";
        assert_eq!(
            to(https, "https://cdn.example/x?sig=1").unwrap(),
            "https://cdn.example/x?sig=1"
        );
        assert_eq!(to(https, "../c").unwrap(), "https://hub.example/c");
        assert_eq!(
            to("http://a.example/x", "/y").unwrap(),
            "http://a.example/y"
        );
        for location in [
            "http://cdn.example/x",
            "ftp://cdn.example/x",
            "file:///etc/passwd",
            "https://",
        ] {
            assert!(to(https, location).is_err(), "{location}");
        }
    }
}
