//! Asks engine pods for their metrics; `counted` keeps what each process counted since the window of a trial began, `load` what all carry.
//!
//! Soft state: after a restart of the operator the windows begin anew, which leaves fewer samples and never better ones. An answer that is
//! late, too large, redirected or not plainly right is a problem with a reason, never a sample.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use futures::StreamExt;
use mixquant_crds::names::PORT_ADMIN;

use crate::action::Window;
use crate::clock;
use crate::counted::Counted;
use crate::load::{LoadWindow, Loads};
use crate::observed::ObservedPod;
use crate::pod_http::{Bounds, PodClient};
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
    client: PodClient,
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
        Self {
            client: PodClient::on_port(port),
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
        let bounds = Bounds {
            deadline: DEADLINE,
            body: MAX_BODY,
        };
        let text = self.client.get(pod, "/metrics", bounds).await?;
        prometheus_text::parse(&text)
    }
}

#[cfg(test)]
#[path = "scrape_tests.rs"]
mod tests;
