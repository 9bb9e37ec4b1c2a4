//! A service that nobody uses: its canaries are judged by probes alone. Who is probed, what pods answer, and when nobody learns of it.

use mixquant_crds::MixQuantServiceSpec;
use mixquant_crds::probe::{ProbeAnswer, ProbedText};
use mixquant_operator::action::ProbeRound;
use mixquant_operator::probed::Answered;

use super::cluster::Cluster;
use super::traffic::MetricFault;

/// Seconds that a round takes.
pub const TAKES: i64 = 3;
/// Texts of each artifact.
const TEXTS: u32 = 16;
/// Nats a token by which worse answers are less likely; the gate allows 0.05.
const WORSE: f64 = 0.2;

/// One life in ten, where pods always find room: a canary that has nothing beside it has nothing to be compared with.
pub fn is_quiet(seed: u64, gpus: Option<usize>) -> bool {
    gpus.is_none() && seed % 5 == 4
}

/// Probes, and a gate on their answers.
pub fn quieten(spec: &mut MixQuantServiceSpec) {
    let probe = r#"{"requestsPerInterval": 48}"#;
    spec.probe = Some(serde_json::from_str(probe).unwrap());
    let answers = r#"{"name": "answers", "metric": "NllIncrease", "max": "0.05"}"#;
    spec.gates.push(serde_json::from_str(answers).unwrap());
}

impl Cluster {
    /// The gates that a Pass takes.
    pub(super) fn gates(&self) -> usize {
        // tpot and error-rate are of `spec.slo`.
        2 + self.service.spec.gates.len()
    }

    /// What the pods of both tracks answer.
    pub(super) fn answer_probes(&mut self, round: &ProbeRound) -> (Option<Answered>, Answered) {
        let [stable, canary] = round.window.revisions.clone();
        let stable = (!round.alone).then(|| self.answer_round(&stable, round));
        (stable, self.answer_round(&canary, round))
    }

    fn answer_round(&mut self, revision: &str, round: &ProbeRound) -> Answered {
        let fault = self.fault.map(|(fault, _)| fault);
        if fault == Some(MetricFault::Down) {
            return Err("status 503".into());
        }
        let mut pods = self.pods.iter();
        let index = pods.position(|pod| pod.revision == revision && self.is_ready(pod));
        let index = index.ok_or("no pod is ready")?;
        let pod = &mut self.pods[index];
        let mut answers = Vec::new();
        for number in 0..round.requests {
            let text = round.first.wrapping_add(number) % TEXTS;
            let manners = pod.manners;
            pod.counters.observe(&mut self.dice, &manners);
            pod.counters.probed();
            let noise = 0.02 * self.dice.normal();
            let worse = if manners.worse { WORSE } else { 0.0 };
            let nll = 32.0 * (2.0 + 0.1 * f64::from(text) + noise + worse);
            answers.push(ProbedText {
                text,
                tokens: 32,
                nll: if fault == Some(MetricFault::Nan) {
                    f64::NAN
                } else {
                    nll
                },
            });
        }
        let nothing = matches!(fault, Some(MetricFault::Empty | MetricFault::Renamed));
        Ok(ProbeAnswer {
            texts: TEXTS,
            answers: if nothing { Vec::new() } else { answers },
            stopped: None,
        })
    }
}
