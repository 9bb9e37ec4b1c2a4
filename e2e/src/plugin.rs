//! `kubectl mixquant` as a person calls it in a scenario: what it prints and what it ends with, which is a contract.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::means;
use crate::namespace::Context;

/// The plugin, in a scenario's namespace.
pub struct Plugin {
    program: PathBuf,
    kubeconfig: Option<PathBuf>,
    namespace: String,
}

impl Plugin {
    /// The release build of the plugin, which the scenarios' first step makes.
    pub fn of(context: &Context) -> anyhow::Result<Self> {
        let program = means::target().join("release/kubectl-mixquant");
        ensure!(
            program.is_file(),
            "{} is missing: cargo build --release -p mixquant-operator --bins",
            program.display()
        );
        Ok(Self {
            program,
            kubeconfig: context.kubectl.kubeconfig().map(PathBuf::from),
            namespace: context.namespace.clone(),
        })
    }

    /// Runs it and demands this exit code; returns what it printed.
    pub fn expect(&self, code: i32, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        if let Some(kubeconfig) = &self.kubeconfig {
            command.arg("--kubeconfig").arg(kubeconfig);
        }
        let output = command
            .args(["--namespace", &self.namespace])
            .args(arguments)
            .output()
            .with_context(|| self.program.display().to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (printed, said) = (text(&output.stdout), text(&output.stderr));
        ensure!(
            output.status.code() == Some(code),
            "kubectl mixquant {}: {} instead of {code}: {printed} {said}",
            arguments.join(" "),
            output.status
        );
        Ok(printed)
    }
}
