//! Asks engine pods for their metrics; `counted` keeps what each process counted since the window of a trial began, `load` what all carry.
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
use crate::load::{LoadWindow, Loads};
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
    services: Mutex<HashMap<String, Asked>>,
}

/// Why a service's pods are asked.
#[derive(Clone, Default)]
struct Asked {
    trial: Option<Counted>,
    loads: Option<Loads>,
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
            services: Mutex::default(),
        }
    }

    /// The samples that the next passes over the service `uid` need; neither when nothing serves.
    pub fn set_windows(&self, uid: &str, window: Option<&Window>, load: Option<&LoadWindow>) {
        let mut services = self.services.lock().expect("no holder of this lock panics");
        if window.is_none() && load.is_none() {
            services.remove(uid);
            return;
        }
        let asked = services.entry(uid.to_owned()).or_default();
        asked.trial = window.map(|window| {
            let same = asked.trial.take_if(|trial| trial.window() == window);
            same.unwrap_or_else(|| Counted::new(window.clone()))
        });
        asked.loads = load.map(|load| {
            let kept = asked.loads.take();
            let mut loads = kept.unwrap_or_else(|| Loads::new(load.clone()));
            loads.set_window(load);
            loads
        });
    }

    /// Asks the ready pods that count, and returns what is known of them now; nothing where nobody needs it.
    pub async fn sample(&self, uid: &str, pods: &[ObservedPod]) -> Samples {
        let asked = |services: &HashMap<String, Asked>| services.get(uid).cloned();
        let asked = asked(&self.services.lock().expect("no holder of this lock panics"));
        let Some(Asked { trial, mut loads }) = asked else {
            return Samples::default();
        };
        let mut trial = trial.filter(|trial| clock::now() >= trial.window().since);
        let counts = |pod: &&ObservedPod| {
            trial.as_ref().is_some_and(|trial| trial.asks(pod))
                || loads.as_ref().is_some_and(|loads| loads.asks(pod))
        };
        let counting: Vec<ObservedPod> = pods.iter().filter(counts).cloned().collect();
        let answers: Vec<_> = futures::stream::iter(counting)
            .map(|pod: ObservedPod| async move {
                let answer = self.ask(&pod).await;
                (pod, answer)
            })
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        let now = clock::now();
        if let Some(loads) = &mut loads {
            loads.add(&answers, now);
        }
        if let Some(trial) = &mut trial {
            trial.begin();
            for (pod, answer) in answers {
                if trial.asks(&pod) {
                    trial.absorb(&pod, answer, now);
                }
            }
            trial.end(now);
        }
        let samples = Samples {
            loads: loads.as_ref().map_or_else(Vec::new, Loads::entries),
            ..trial
                .as_ref()
                .map_or_else(Samples::default, Counted::samples)
        };
        self.keep(uid, Asked { trial, loads });
        samples
    }

    /// Keeps what a look has found. A window may have been replaced meanwhile; then its samples are nobody's any more.
    fn keep(&self, uid: &str, found: Asked) {
        let mut services = self.services.lock().expect("no holder of this lock panics");
        let Some(kept) = services.get_mut(uid) else {
            return;
        };
        if let (Some(kept), Some(trial)) = (&mut kept.trial, found.trial)
            && kept.window() == trial.window()
        {
            *kept = trial;
        }
        if kept.loads.is_some() && found.loads.is_some() {
            kept.loads = found.loads;
        }
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
