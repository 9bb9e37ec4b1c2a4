//! Asks engine pods for their metrics; `counted` keeps what each process counted since the window of a trial began.
//!
//! Soft state: after a restart of the operator the windows begin anew, which leaves fewer samples and never better ones. An answer that is
//! late, too large, redirected or not plainly right is a problem with a reason, never a sample.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use futures::StreamExt;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use mixquant_crds::names::PORT_ADMIN;

use crate::action::Window;
use crate::clock;
use crate::counted::Counted;
use crate::observed::ObservedPod;
use crate::prometheus_text::{self, Scrape};
use crate::samples::Samples;

/// One pod, from the first packet to the last byte.
const DEADLINE: Duration = Duration::from_secs(2);
/// More than this is no metrics page.
const MAX_BODY: usize = 4 * 1024 * 1024;
/// Pods asked at a time, of one service.
const CONCURRENCY: usize = 8;

/// Asks pods, and keeps the windows of all services.
pub struct Scraper {
    client: Client<HttpConnector, Empty<Bytes>>,
    port: u16,
    trials: Mutex<HashMap<String, Counted>>,
}

impl Default for Scraper {
    fn default() -> Self {
        Self::on_port(PORT_ADMIN)
    }
}

impl Scraper {
    /// A scraper of pods that answer on `port`.
    pub fn on_port(port: u16) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(DEADLINE));
        Self {
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(0)
                .build(connector),
            port,
            trials: Mutex::default(),
        }
    }

    /// The window whose samples the next passes over the service `uid` need; `None` when nothing serves.
    pub fn set_window(&self, uid: &str, window: Option<&Window>) {
        let mut trials = self.trials.lock().expect("no holder of this lock panics");
        match window {
            None => {
                trials.remove(uid);
            }
            Some(window) => {
                if trials.get(uid).is_none_or(|trial| trial.window() != window) {
                    trials.insert(uid.to_owned(), Counted::new(window.clone()));
                }
            }
        }
    }

    /// Asks the ready pods of the trial's revisions and returns what its window holds now; nothing without a trial.
    pub async fn sample(&self, uid: &str, pods: &[ObservedPod]) -> Samples {
        let trial = |trials: &HashMap<String, Counted>| trials.get(uid).cloned();
        let Some(mut trial) = trial(&self.trials.lock().expect("no holder of this lock panics"))
        else {
            return Samples::default();
        };
        if clock::now() < trial.window().since {
            return Samples::default();
        }
        let asked = trial.asked(pods);
        let answers: Vec<_> = futures::stream::iter(asked)
            .map(|pod: ObservedPod| async move {
                let answer = self.ask(&pod).await;
                (pod, answer)
            })
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        let now = clock::now();
        trial.begin();
        for (pod, answer) in answers {
            trial.absorb(&pod, answer, now);
        }
        trial.end(now);
        let samples = trial.samples();
        let mut trials = self.trials.lock().expect("no holder of this lock panics");
        // The window may have been replaced meanwhile; then these samples are nobody's any more.
        if let Some(kept) = trials.get_mut(uid)
            && kept.window() == trial.window()
        {
            *kept = trial;
        }
        samples
    }

    async fn ask(&self, pod: &ObservedPod) -> Result<Scrape, String> {
        let text = tokio::time::timeout(DEADLINE, self.fetch(pod))
            .await
            .map_err(|_| format!("no answer within {} s", DEADLINE.as_secs()))??;
        prometheus_text::parse(&text)
    }

    async fn fetch(&self, pod: &ObservedPod) -> Result<String, String> {
        let address: IpAddr = pod
            .ip
            .as_deref()
            .ok_or("no address yet")?
            .parse()
            .map_err(|_| "its address is none")?;
        let request = Request::get(format!(
            "http://{}/metrics",
            SocketAddr::new(address, self.port)
        ))
        .header(header::ACCEPT, "text/plain")
        .body(Empty::new())
        .map_err(|error| error.to_string())?;
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| reasons(&error))?;
        // A redirect is not followed: the pod itself answers or nobody does.
        if response.status() != StatusCode::OK {
            return Err(format!("status {}", response.status()));
        }
        if response.headers().contains_key(header::CONTENT_ENCODING) {
            return Err("a compressed answer that was not asked for".into());
        }
        let body = Limited::new(response.into_body(), MAX_BODY)
            .collect()
            .await
            .map_err(|error| format!("its body: {error}"))?;
        String::from_utf8(body.to_bytes().into()).map_err(|_| "its body is no UTF-8".into())
    }
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

#[cfg(test)]
#[path = "scrape_tests.rs"]
mod tests;
