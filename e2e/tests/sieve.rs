//! The operator killed at its writes, and an apiserver that fails in every other way: the end is the same, and so is what was made on the way.
//!
//! `MIXQUANT_SIEVE=all` (`make sieve`) kills at every write; by default a few, spread over all parts.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use mixquant_e2e::sieve::life::{Crash, Life, Lived, Means, PARTS, example};
use mixquant_e2e::sieve::proxy::{Asked, Fault};
use mixquant_e2e::sieve::{compare, crashes};
use mixquant_e2e::{apiserver, means};

/// Crashes of a sample.
const SAMPLE: usize = 9;

/// Lives at once: they mostly wait.
fn lives() -> usize {
    let given = std::env::var("MIXQUANT_SIEVE_LIVES").ok();
    given.and_then(|lives| lives.parse().ok()).unwrap_or(6)
}

fn means_of_lives() -> Option<Means> {
    let server = apiserver::with_resource()?;
    let operator = means::built("mixquant-operator")?;
    let folder = server
        .kubectl
        .kubeconfig()
        .unwrap()
        .parent()
        .unwrap()
        .join("sieve");
    std::fs::create_dir_all(&folder).unwrap();
    let example = example().unwrap();
    Some(Means {
        operator,
        folder,
        example,
    })
}

async fn client() -> Client {
    let server = apiserver::with_resource().unwrap();
    let file = Kubeconfig::read_from(server.kubectl.kubeconfig().unwrap()).unwrap();
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .unwrap();
    Client::try_from(config).unwrap()
}

fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
    })
}

async fn lived(
    client: &Client,
    namespace: &str,
    means: &Means,
    crash: Option<&Crash>,
) -> anyhow::Result<Lived> {
    Life::begin(client, namespace, means)
        .await?
        .live(crash)
        .await
}

/// The undisturbed life, lived twice: what differs between these two says nothing about crashes.
async fn reference(client: &Client, means: &Means) -> Lived {
    let (one, two) = tokio::join!(
        lived(client, "sieve-reference", means, None),
        lived(client, "sieve-again", means, None)
    );
    let (one, two) = (one.unwrap(), two.unwrap());
    let differences = compare(&one, &two);
    assert!(
        differences.is_empty(),
        "two undisturbed lives differ: {differences:#?}"
    );
    one
}

fn named(crash: &Crash) -> String {
    format!(
        "{}: {} #{} {:?}",
        PARTS[crash.part], crash.write.key, crash.write.occurrence, crash.moment
    )
}

#[test]
fn an_operator_killed_at_a_write_comes_to_the_same_end_having_made_the_same() {
    let Some(means) = means_of_lives() else {
        return;
    };
    let all = std::env::var("MIXQUANT_SIEVE").is_ok_and(|value| value == "all");
    let begun = Instant::now();
    runtime().block_on(async {
        let client = client().await;
        let reference = reference(&client, &means).await;
        let plan = crashes(&reference);
        assert!(plan.len() > 60, "only {} crashes are possible", plan.len());
        // A stride that three does not divide walks through parts and moments alike.
        let step = plan.len() / SAMPLE;
        let stride = if all {
            1
        } else {
            step + usize::from(step.is_multiple_of(3))
        };
        let chosen: Vec<Crash> = plan.iter().step_by(stride).cloned().collect();
        println!(
            "{} writes in an undisturbed life, {} crashes, {} of them now",
            plan.len() / 3,
            plan.len(),
            chosen.len()
        );
        let results = futures::stream::iter(chosen.iter().enumerate().map(|(number, crash)| {
            let (client, means, reference) = (&client, &means, &reference);
            async move {
                let namespace = format!("sieve-{number}");
                let (hit, problems) = match lived(client, &namespace, means, Some(crash)).await {
                    Ok(lived) => (lived.kills > 0, compare(reference, &lived)),
                    Err(error) => (true, vec![format!("{error:#}")]),
                };
                let word = if problems.is_empty() {
                    if hit { "same" } else { "not reached" }
                } else {
                    "DIFFERS"
                };
                println!("{word:<12} {} ({namespace})", named(crash));
                for problem in &problems {
                    println!("             {problem}");
                }
                (hit, problems.len())
            }
        }));
        let results: Vec<(bool, usize)> = results.buffer_unordered(lives()).collect().await;
        let reached = results.iter().filter(|(hit, _)| *hit).count();
        let different = results.iter().filter(|(_, problems)| *problems > 0).count();
        println!(
            "{} lives, {reached} killed at their write, {different} different, {} s",
            results.len(),
            begun.elapsed().as_secs()
        );
        assert_eq!(different, 0);
        assert!(
            reached * 10 >= results.len() * 8,
            "{reached} of {} crashes were reached",
            results.len()
        );
    });
}

/// An apiserver that fails in every other way, all the time: every third write meets one of these, every tenth watch ends or stalls.
#[test]
fn an_apiserver_that_refuses_delays_drops_and_forgets_changes_nothing_in_the_end() {
    let Some(means) = means_of_lives() else {
        return;
    };
    runtime().block_on(async {
        let client = client().await;
        let life = Life::begin(&client, "sieve-faults", &means).await.unwrap();
        let undisturbed = lived(&client, "sieve-faultless", &means, None);
        let disturbed = async {
            let mut ended = Vec::new();
            let mut number = 0;
            life.proxy.when(move |asked| fault(asked, &mut number));
            for part in PARTS {
                life.part(part).await.unwrap();
                ended.push(
                    mixquant_e2e::sieve::state::read(&client, "sieve-faults")
                        .await
                        .unwrap(),
                );
            }
            ended
        };
        let (undisturbed, ended) = tokio::join!(undisturbed, disturbed);
        for ((part, expected), found) in PARTS.iter().zip(undisturbed.unwrap().parts).zip(ended) {
            let differences = mixquant_e2e::sieve::state::differences(&expected.state, &found);
            assert!(differences.is_empty(), "{part}: {differences:#?}");
        }
    });
}

fn fault(asked: &Asked, number: &mut usize) -> Option<Fault> {
    if asked.key.starts_with("WATCH ") {
        return match asked.occurrence % 4 {
            1 => Some(Fault::Gone),
            2 => Some(Fault::Drop),
            _ => None,
        };
    }
    if !asked.is_write {
        return None;
    }
    *number += 1;
    match *number % 18 {
        0 => Some(Fault::Status(503, None)),
        3 => Some(Fault::Status(429, Some(1))),
        6 => Some(Fault::Drop),
        9 => Some(Fault::CommitThenDrop),
        12 => Some(Fault::Status(409, None)),
        15 => Some(Fault::Delay(Duration::from_millis(300))),
        _ => None,
    }
}
