//! `kubectl` as a function: what a person would type, with its answer. The tests use it wherever the person's view is what counts.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// One `kubectl` and the cluster it talks to.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: Option<PathBuf>,
    namespace: Option<String>,
}

/// What one call printed.
#[derive(Debug)]
pub struct Answer {
    /// Exit status 0.
    pub ok: bool,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Kubectl {
    /// `kubeconfig`: none means what the environment says.
    pub fn new(program: PathBuf, kubeconfig: Option<PathBuf>) -> Self {
        Self {
            program,
            kubeconfig,
            namespace: None,
        }
    }

    /// The same, in `namespace`.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            namespace: Some(namespace.to_owned()),
            ..self.clone()
        }
    }

    /// The kubeconfig that it reads, where that is not the environment's.
    pub fn kubeconfig(&self) -> Option<&Path> {
        self.kubeconfig.as_deref()
    }

    /// Runs it; `Err` only when it cannot be started.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<Answer> {
        self.run_with_input(arguments, "")
    }

    /// Runs it with `input` as standard input (for `-f -`).
    pub fn run_with_input(&self, arguments: &[&str], input: &str) -> anyhow::Result<Answer> {
        let mut command = Command::new(&self.program);
        if let Some(kubeconfig) = &self.kubeconfig {
            command.arg("--kubeconfig").arg(kubeconfig);
        }
        if let Some(namespace) = &self.namespace {
            command.args(["--namespace", namespace]);
        }
        // No call may hang a test: the apiserver answers in seconds or not at all.
        command.arg("--request-timeout=60s").args(arguments);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| self.program.display().to_string())?;
        let mut pipe = child.stdin.take().expect("standard input was asked for");
        let input = input.to_owned();
        let writer = std::thread::spawn(move || pipe.write_all(input.as_bytes()));
        let output = child.wait_with_output()?;
        // A broken pipe only says that kubectl gave up early; its answer says why.
        drop(writer.join());
        Ok(Answer {
            ok: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs it and demands success; the answer is its standard output.
    pub fn must(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let answer = self.run(arguments)?;
        if !answer.ok {
            bail!("kubectl {}: {}", arguments.join(" "), answer.stderr.trim());
        }
        Ok(answer.stdout)
    }

    /// `kubectl apply --server-side` of YAML text (server-side: no size limit from the last-applied annotation).
    pub fn apply(&self, yaml: &str) -> anyhow::Result<()> {
        let answer = self.run_with_input(
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            yaml,
        )?;
        if !answer.ok {
            bail!("kubectl apply: {}", answer.stderr.trim());
        }
        Ok(())
    }

    /// `kubectl get ARGUMENTS -o json`; `Value::Null` when there is no such object.
    pub fn get(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let mut all = vec!["get", "-o", "json"];
        all.extend_from_slice(arguments);
        let answer = self.run(&all)?;
        if answer.ok {
            return serde_json::from_str(&answer.stdout).context("kubectl printed no JSON");
        }
        if answer.stderr.contains("(NotFound)") {
            return Ok(Value::Null);
        }
        bail!("kubectl {}: {}", all.join(" "), answer.stderr.trim())
    }
}
