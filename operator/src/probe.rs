//! Sends the probes that `plan` asks for, and keeps what they answered until the window of the trial is over.
//!
//! A round runs beside the passes, one at a time of a service, and ends at its deadline whatever was answered. Soft state, as all samples: a
//! new process begins anew with fewer. It decides nothing: which round, when, and what its answers say is `plan`'s and `judge`'s.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mixquant_crds::names::{PORT_ADMIN, PROBE_PATH};
use mixquant_crds::probe::{ProbeAnswer, ProbeRequest};
use tokio::task::AbortHandle;

use crate::action::{ProbeRound, Window};
use crate::clock;
use crate::observed::ObservedPod;
use crate::pod_http::{Bounds, PodClient};
use crate::probed::{Answered, Probed};

/// What an answer may take beyond the round's own time.
const GRACE: Duration = Duration::from_secs(5);
/// The longest answer.
const MAX_BODY: usize = 64 << 10;

/// Sends probes, and keeps those of all services.
pub struct Prober {
    client: Arc<PodClient>,
    services: Arc<Mutex<HashMap<String, Kept>>>,
}

/// What is known of a service's window.
struct Kept {
    window: Window,
    probed: Probed,
    round: Option<AbortHandle>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(round) = &self.round {
            round.abort();
        }
    }
}

impl Default for Prober {
    fn default() -> Self {
        Self::on_port(PORT_ADMIN)
    }
}

impl Prober {
    /// Probes for pods that answer on `port`.
    pub fn on_port(port: u16) -> Self {
        Self {
            client: Arc::new(PodClient::on_port(port)),
            services: Arc::default(),
        }
    }

    /// What the probes of the service `uid` have answered.
    pub fn probed(&self, uid: &str) -> Probed {
        let mut services = lock(&self.services);
        let Some(kept) = services.get_mut(uid) else {
            return Probed::default();
        };
        let ended = kept.round.as_ref().is_none_or(AbortHandle::is_finished);
        if kept.probed.running && ended {
            // Its task ended without a word.
            kept.probed.end(None, Err("the probes broke off".into()));
        }
        kept.probed.clone()
    }

    /// The window whose probes count, and the round that is due in it. What was sent for another window is given up.
    pub fn set(
        &self,
        uid: &str,
        window: Option<&Window>,
        round: Option<&ProbeRound>,
        pods: &[ObservedPod],
    ) {
        let mut services = lock(&self.services);
        if services
            .get(uid)
            .is_some_and(|kept| Some(&kept.window) != window)
        {
            services.remove(uid);
        }
        let Some(round) = round.filter(|round| Some(&round.window) == window) else {
            return;
        };
        let kept = services.entry(uid.to_owned()).or_insert_with(|| Kept {
            window: round.window.clone(),
            probed: Probed::new(round.window.since),
            round: None,
        });
        if kept.probed.running {
            return;
        }
        let number = usize::try_from(kept.probed.rounds).unwrap_or(0);
        kept.probed.begin(clock::now());
        let [stable, canary] = &round.window.revisions;
        let stable = (!round.alone).then(|| pick(pods, stable, number));
        let canary = pick(pods, canary, number);
        let (client, services) = (self.client.clone(), self.services.clone());
        let (uid, round) = (uid.to_owned(), round.clone());
        let sent = tokio::spawn(async move {
            let stable = async {
                match stable {
                    Some(pod) => Some(ask(&client, pod, &round).await),
                    None => None,
                }
            };
            let (stable, canary) = tokio::join!(stable, ask(&client, canary, &round));
            let mut services = lock(&services);
            let kept = services.get_mut(&uid);
            if let Some(kept) = kept.filter(|kept| kept.window == round.window) {
                kept.probed.end(stable, canary);
            }
        });
        kept.round = Some(sent.abort_handle());
    }
}

fn lock(
    services: &Mutex<HashMap<String, Kept>>,
) -> std::sync::MutexGuard<'_, HashMap<String, Kept>> {
    services.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pod of `revision` that takes requests: another one each round.
fn pick(pods: &[ObservedPod], revision: &str, number: usize) -> Result<ObservedPod, String> {
    let ready = pods
        .iter()
        .filter(|pod| pod.revision == revision && pod.ready && !pod.terminating);
    let ready: Vec<_> = ready.collect();
    let chosen = ready.get(number % ready.len().max(1));
    chosen
        .map(|pod| (*pod).clone())
        .ok_or_else(|| format!("no pod of revision {revision} is ready"))
}

async fn ask(client: &PodClient, pod: Result<ObservedPod, String>, round: &ProbeRound) -> Answered {
    let pod = pod?;
    let asked = ProbeRequest {
        artifact: round.artifact.clone(),
        first: round.first,
        count: round.requests,
        seconds: round.seconds,
    };
    let told = |why: String| format!("pod {}: {why}", pod.name);
    let json = serde_json::to_string(&asked).map_err(|error| told(error.to_string()))?;
    let bounds = Bounds {
        deadline: Duration::from_secs(round.seconds.into()) + GRACE,
        body: MAX_BODY,
    };
    let text = client.post(&pod, (PROBE_PATH, json), bounds).await;
    let text = text.map_err(|why| {
        if why.starts_with("status 404") {
            return told(format!(
                "{why}: its engine has no probes, an older one does not"
            ));
        }
        told(why)
    })?;
    let answer: ProbeAnswer = serde_json::from_str(&text)
        .map_err(|error| told(format!("not an answer to probes ({error})")))?;
    if answer.answers.len() > round.requests as usize {
        return Err(told("more answers than were asked for".into()));
    }
    Ok(answer)
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
