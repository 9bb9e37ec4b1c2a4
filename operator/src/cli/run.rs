//! The shell: reads what a command needs, hands it to the pure part, writes the answer. Decides nothing.

use std::io::Write;
use std::path::Path;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use kube::Api;
use mixquant_crds::MixQuantService;

use super::answer::Answer;
use super::arguments::{Arguments, Command, Global, Order};
use super::connect::{Connection, connect};
use super::table::Style;
use super::timeline::{self, Timeline};
use super::versions::{Versions, installed};
use super::{Exit, artifacts, explain, facts, history, intent, lint, order, overview, watch};
use crate::clock;
use crate::error::Call;
use crate::read::{self, DEADLINE, within};

/// Does what the command line asks and writes the answer to `out`.
pub async fn run(
    arguments: &Arguments,
    style: Style,
    out: &mut impl Write,
) -> anyhow::Result<Exit> {
    let global = &arguments.global;
    let answer = match &arguments.command {
        Command::Get {
            name,
            all_namespaces,
            watch,
        } => {
            let what = (name.as_deref(), *all_namespaces);
            if *watch {
                return follow(global, what, style, out).await;
            }
            get(global, what, style).await?
        }
        Command::Status {
            name,
            timeout,
            success_on_pause,
        } => {
            let wait = (*timeout, *success_on_pause);
            let standing = watch::settled(&connect(global).await?, name, wait).await?;
            Answer::new(&standing, style, standing.exit(*success_on_pause))
        }
        Command::Explain { name } => {
            let facts = facts::read(&connect(global).await?, name).await?;
            Answer::new(&explain::explain(&facts, clock::now()), style, Exit::Done)
        }
        Command::History { name } => {
            let facts = facts::read(&connect(global).await?, name).await?;
            Answer::new(&history::history(&facts, clock::now()), style, Exit::Done)
        }
        Command::Artifacts { name } => {
            let facts = facts::read(&connect(global).await?, name).await?;
            Answer::new(&artifacts::artifacts(&facts), style, Exit::Done)
        }
        Command::Order(asked) => Box::pin(order(global, asked, style)).await?,
        Command::Plan { filename, offline } => {
            Box::pin(plan(global, filename, *offline, style)).await?
        }
        Command::Lint { filename, offline } => {
            let report = lint(global, filename, *offline).await?;
            Answer::new(&report, style, report.exit())
        }
        Command::Version { client } => {
            Answer::new(&version(global, *client).await?, style, Exit::Done)
        }
    };
    answer.write(global.output, out)?;
    Ok(answer.exit)
}

async fn get(
    global: &Global,
    (name, everywhere): (Option<&str>, bool),
    style: Style,
) -> anyhow::Result<Answer> {
    let connection = connect(global).await?;
    if let Some(name) = name {
        let facts = facts::read(&connection, name).await?;
        return Ok(Answer::new(
            &overview::detail(&facts, clock::now()),
            style,
            Exit::Done,
        ));
    }
    let namespace = (!everywhere).then_some(connection.namespace.as_str());
    let services = facts::services(&connection, namespace).await?;
    let overview = overview::overview(&services, everywhere, clock::now());
    Ok(Answer::new(&overview, style, Exit::Done))
}

/// A table that grows by a line at every change, until it is stopped.
async fn follow(
    global: &Global,
    (name, everywhere): (Option<&str>, bool),
    style: Style,
    out: &mut impl Write,
) -> anyhow::Result<Exit> {
    let connection = connect(global).await?;
    let namespace = (!everywhere).then_some(connection.namespace.as_str());
    match name {
        Some(name) => drop(facts::service(&connection, name).await?),
        None => drop(facts::services(&connection, namespace).await?),
    }
    let mut changes = watch::changes(&connection, namespace, name);
    let mut first = true;
    while let Some(service) = futures::StreamExt::next(&mut changes).await {
        let overview = overview::overview(&[service?], everywhere, clock::now());
        let mut answer = Answer::new(&overview, style, Exit::Done);
        if !std::mem::take(&mut first) {
            // The titles stand there already.
            answer.text = answer.text.lines().skip(1).collect::<Vec<_>>().join("\n") + "\n";
        }
        answer.write(global.output, out)?;
    }
    Ok(Exit::Done)
}

async fn order(global: &Global, asked: &Order, style: Style) -> anyhow::Result<Answer> {
    let (name, verb, timeout) = asked.parts();
    let connection = connect(global).await?;
    let facts = facts::read(&connection, name).await?;
    let saying = intent::saying(&verb, &facts, &new_id()).map_err(anyhow::Error::msg)?;
    let said = order::say(&connection, name, &saying).await?;
    let mut outcome = intent::outcome(&saying, &said);
    let deadline = clock::monotonic() + timeout;
    let mut changes = watch::changes(&connection, Some(&connection.namespace), Some(name));
    while !outcome.is_final() {
        let Some(changed) = watch::next_before(&mut changes, deadline).await else {
            break;
        };
        outcome = intent::outcome(&saying, &changed?);
    }
    Ok(Answer::new(&outcome, style, outcome.exit()))
}

/// Of no other request: the second that it was made in, for people, and chance.
fn new_id() -> String {
    let now = clock::now().strftime("%Y%m%dT%H%M%SZ");
    let chance: u32 = rand::random();
    format!("{now}-{chance:08x}")
}

async fn plan(global: &Global, file: &Path, offline: bool, style: Style) -> anyhow::Result<Answer> {
    let documents = lint::documents(&file.display().to_string(), &facts::file(file)?);
    ensure!(
        documents.len() == 1,
        "{} holds {} services: plan looks at one",
        file.display(),
        documents.len()
    );
    let report = lint::Report {
        documents,
        checks: vec![lint::SCHEMA, lint::OPERATOR],
        skipped: None,
    };
    if report.exit() != Exit::Done {
        return Ok(Answer::new(&report, style, report.exit()));
    }
    let object = &report.documents[0].object;
    let mut service = lint::read(object).map_err(anyhow::Error::msg)?;
    let named = object["metadata"]["namespace"].as_str();
    if let (Some(named), Some(asked)) = (named, &global.namespace) {
        ensure!(
            named == asked,
            "the manifest's namespace is `{named}` and --namespace says `{asked}`: use one of them"
        );
    }
    let connection = if offline {
        None
    } else {
        Some(connect(global).await)
    };
    let timeline = match connection {
        None => timeline::timeline(&service, None),
        Some(Err(error)) => {
            let mut timeline = timeline::timeline(&service, None);
            timeline
                .unknown
                .push(format!("what runs, and the room for more: {error:#}"));
            timeline
        }
        Some(Ok(mut connection)) => {
            if let Some(named) = named {
                named.clone_into(&mut connection.namespace);
            }
            service.metadata.namespace = Some(connection.namespace.clone());
            compared(&connection, &service).await?
        }
    };
    Ok(Answer::new(&timeline, style, timeline.exit()))
}

/// The timeline against what the cluster has, with its room.
async fn compared(connection: &Connection, service: &MixQuantService) -> anyhow::Result<Timeline> {
    let name = service.metadata.name.as_deref().unwrap_or_default();
    let services = facts::services(connection, Some(&connection.namespace)).await?;
    let exists = services
        .iter()
        .any(|live| live.metadata.name.as_deref() == Some(name));
    let live = if exists {
        Some(facts::read(connection, name).await?)
    } else {
        None
    };
    let mut timeline = timeline::timeline(service, Some(live.as_ref().map(|live| &live.service)));
    let running: i32 = live
        .iter()
        .flat_map(|live| &live.pods)
        .map(|pods| pods.wanted)
        .sum();
    let needed = (timeline.peak_pods() - running).max(0);
    match read::cluster(&connection.client, &connection.namespace).await {
        Ok(cluster) => {
            let status = live.as_ref().and_then(|live| live.service.status.as_ref());
            let stable = status.and_then(|status| status.stable.as_ref());
            let stable = stable.map(|stable| stable.revision.as_str());
            timeline.look_for_room(service, (needed, stable), &cluster);
        }
        Err(error) => timeline
            .unknown
            .push(format!("the room for {needed} more pods: {error}")),
    }
    Ok(timeline)
}

async fn lint(
    global: &Global,
    files: &[std::path::PathBuf],
    offline: bool,
) -> anyhow::Result<lint::Report> {
    let mut report = lint::Report {
        documents: Vec::new(),
        checks: vec![lint::SCHEMA, lint::OPERATOR],
        skipped: None,
    };
    for file in files {
        let found = lint::documents(&file.display().to_string(), &facts::file(file)?);
        report.documents.extend(found);
    }
    if offline {
        report.skipped = Some("--offline".into());
        return Ok(report);
    }
    let connection = match connect(global).await {
        Ok(connection) => connection,
        Err(error) => {
            report.skipped = Some(format!("{error:#}"));
            return Ok(report);
        }
    };
    let right = report
        .documents
        .iter_mut()
        .filter(|document| document.problems.is_empty());
    for document in right {
        match order::dry_run(&connection, &document.object).await {
            Ok(()) => {}
            Err(order::Refusal::Wrong(problem)) => document.problems.push(problem),
            Err(order::Refusal::Unasked(why)) => {
                report.skipped = Some(why);
                return Ok(report);
            }
        }
    }
    report.checks.push(lint::SERVER);
    Ok(report)
}

async fn version(global: &Global, client_only: bool) -> anyhow::Result<Versions> {
    let mut versions = Versions::client();
    if client_only {
        return Ok(versions);
    }
    let connection = connect(global).await?;
    let call = Call {
        verb: "get",
        kind: "version".into(),
        name: String::new(),
    };
    let info = within(call, DEADLINE, connection.client.apiserver_version()).await;
    let info = info
        .map_err(|error| facts::told(&connection, error))
        .context("no answer")?;
    versions.cluster = Some(info.git_version);
    let operators: Api<Deployment> = Api::all(connection.client.clone());
    match read::list(&operators, "app.kubernetes.io/name=mixquant-operator").await {
        Ok(operators) => versions.operators = operators.iter().map(installed).collect(),
        Err(error) => versions.unknown = Some(error.to_string()),
    }
    Ok(versions)
}
