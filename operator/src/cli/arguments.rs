//! The command line of `kubectl-mixquant`. It takes kubectl's own names for what kubectl has too.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use mixquant_crds::Span;

use super::answer::Format;
use super::intent::Verb;

/// Asks about `MixQuantService`s and orders what people decide. Exit codes: 0 done or ready, 1 error, 2 wrong usage, 3 no (rolled back,
/// invalid, does not fit), 4 not yet.
#[derive(Debug, Parser)]
#[command(name = "kubectl-mixquant", bin_name = "kubectl mixquant", version)]
pub struct Arguments {
    /// What holds for every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What holds for every command.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// The namespace; that of the context without it.
    #[arg(short, long, global = true)]
    pub namespace: Option<String>,
    /// The context of the kubeconfig; its current one without it.
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// The kubeconfig; $KUBECONFIG or ~/.kube/config without it.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// How the answer is written.
    #[arg(short, long, global = true, value_enum, default_value = "plain")]
    pub output: Format,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show services, or one in detail.
    #[command(alias = "list")]
    Get {
        /// The service; all without it.
        #[arg(value_parser = service_name)]
        name: Option<String>,
        /// In every namespace.
        #[arg(short = 'A', long, conflicts_with = "name")]
        all_namespaces: bool,
        /// Go on and print a line at every change.
        #[arg(short, long)]
        watch: bool,
    },
    /// Say in one line where a service stands, and by the exit code: 0 ready, 3 rolled back or stuck, 4 under way.
    Status {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
        /// Wait so long for the end of what is under way, such as 10m.
        #[arg(long, value_parser = timeout)]
        timeout: Option<Duration>,
        /// A rollout that waits for a person is an end, and a good one.
        #[arg(long)]
        success_on_pause: bool,
    },
    /// Say why: the failing gate with its numbers, the revisions and what differs between them, how it went.
    Explain {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
    },
    /// Show what a manifest would do: steps with their times, pods against what the nodes have, gates. Changes nothing.
    Plan {
        /// The manifest; `-` is standard input.
        #[arg(short, long, value_name = "FILE")]
        filename: PathBuf,
        /// Ask no cluster: no comparison with what runs, no capacity.
        #[arg(long)]
        offline: bool,
    },
    /// What a person decides.
    #[command(flatten)]
    Order(Order),
    /// Show the revisions that are kept.
    History {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
    },
    /// Show what calibrations made and how precise it is.
    Artifacts {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
    },
    /// Check manifests; with a cluster by its own rules too (server dry-run).
    Lint {
        /// Manifests; `-` is standard input.
        #[arg(short, long, required = true, value_name = "FILE")]
        filename: Vec<PathBuf>,
        /// Ask no cluster.
        #[arg(long)]
        offline: bool,
    },
    /// Print the versions of this program, the operator and the cluster.
    Version {
        /// Of this program only.
        #[arg(long)]
        client: bool,
    },
}

/// What a person decides about a rollout.
#[derive(Debug, Subcommand)]
pub enum Order {
    /// Let the rollout go on: ends the pause that the canary waits in, or that of `pause`.
    Promote {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
        /// Skip the steps and verdicts that are left: it serves as soon as its pods run.
        #[arg(long)]
        full: bool,
        /// How long the operator's answer is waited for.
        #[command(flatten)]
        patience: Patience,
    },
    /// Begin no trial and move none on, until `promote`.
    Pause {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
    },
    /// Roll the canary back. It is not tried again until the spec changes or `retry`.
    Abort {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
        /// How long the operator's answer is waited for.
        #[command(flatten)]
        patience: Patience,
    },
    /// Try again what failed for the spec as it stands.
    Retry {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
        /// How long the operator's answer is waited for.
        #[command(flatten)]
        patience: Patience,
    },
    /// Let a revision of the history serve instead of what the spec asks for.
    Undo {
        /// The service.
        #[arg(value_parser = service_name)]
        name: String,
        /// Its number or name, as `history` shows them; the one that served before stable without it.
        #[arg(long, value_name = "REVISION")]
        to_revision: Option<String>,
        /// How long the operator's answer is waited for.
        #[command(flatten)]
        patience: Patience,
    },
}

impl Order {
    /// The service, what is ordered, and how long an answer is waited for.
    pub fn parts(&self) -> (&str, Verb, Duration) {
        match self {
            Self::Promote {
                name,
                full,
                patience,
            } => (name, Verb::Promote { full: *full }, patience.timeout),
            Self::Pause { name } => (name, Verb::Pause, Duration::ZERO),
            Self::Abort { name, patience } => (name, Verb::Abort, patience.timeout),
            Self::Retry { name, patience } => (name, Verb::Retry, patience.timeout),
            Self::Undo {
                name,
                to_revision,
                patience,
            } => {
                let to = to_revision.clone();
                (name, Verb::Undo { to }, patience.timeout)
            }
        }
    }
}

/// How long an answer is waited for.
#[derive(Debug, Clone, Copy, Args)]
pub struct Patience {
    /// Wait so long for the operator's answer; 0s does not wait.
    #[arg(long, default_value = "15s", value_parser = timeout)]
    pub timeout: Duration,
}

/// `chat`, or as kubectl prints it: `mqs/chat`, `mixquantservice.mixquant.io/chat`.
fn service_name(text: &str) -> Result<String, String> {
    let kinds = [
        "mqs",
        "mixquantservice",
        "mixquantservices",
        "mixquantservice.mixquant.io",
        "mixquantservices.mixquant.io",
    ];
    let name = match text.split_once('/') {
        Some((kind, name)) if kinds.contains(&kind) => name,
        Some((kind, _)) => return Err(format!("`{kind}` is no MixQuantService: write mqs/NAME")),
        None => text,
    };
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 63 || !name.chars().all(plain) {
        return Err("a service's name has only a-z, 0-9 and -".into());
    }
    Ok(name.to_owned())
}

fn timeout(text: &str) -> Result<Duration, String> {
    let seconds = Span(text.to_owned()).seconds();
    let seconds = seconds.ok_or("write a span such as 90s, 10m or 1h")?;
    Ok(Duration::from_secs(seconds.into()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_service_may_be_named_as_kubectl_prints_it() {
        for text in ["chat", "mqs/chat", "mixquantservice.mixquant.io/chat"] {
            assert_eq!(service_name(text), Ok("chat".into()));
        }
        for text in ["", "mqs/", "pod/chat", "a/b/c", "../x", "Chat", "a%2f"] {
            assert!(service_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn kubectls_flags_stand_before_and_after_the_verb() {
        let parse = |line: &str| Arguments::try_parse_from(line.split(' '));
        let before = parse("x -n models get chat").unwrap();
        let after = parse("x get chat --namespace models").unwrap();
        assert_eq!(before.global.namespace, after.global.namespace);
        assert!(parse("x get chat -A").is_err());
        assert!(parse("x status chat --timeout 5").is_err());
    }
}
