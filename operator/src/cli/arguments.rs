//! The command line of `kubectl-mixquant`. It takes kubectl's own names for what kubectl has too.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use mixquant_crds::Span;

use super::answer::Format;

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
