//! Do pods fit? What a pod asks for against what nodes have left and quotas allow. Pure: the operator asks before it makes a canary, and
//! `kubectl mixquant plan` before a person does.
//!
//! An estimate as the scheduler's own first filters make it, node by node: requests (extended resources and MIG slices are resources as CPU
//! is), cordons, taints against the pod's tolerations, its nodeSelector. Not looked at: affinity, topology spread, volumes, quotas with
//! scopes, other services' pods that wait for a node, and what an autoscaler of nodes would add. It must never decide what happens, only say what fits.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, Node, Pod, PodSpec, ResourceQuota, ResourceRequirements, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use mixquant_crds::names;
use serde::Serialize;

use crate::build::meta::COMPONENT_ENGINE;
use crate::compare::quantity;
use crate::observed::Room;

/// Amounts in billionths of their unit, by resource.
type Amounts = BTreeMap<String, i128>;
/// One, in billionths.
const ONE: i128 = 1_000_000_000;
/// Nodes that a message names.
const NAMED: usize = 3;

/// Whether pods fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// What one pod asks for.
    pub requests: BTreeMap<String, String>,
    /// Pods that are needed beside those that run.
    pub needed: i32,
    /// Of them, that nodes have room for.
    pub room: i32,
    /// They all fit.
    pub fits: bool,
    /// Node by node.
    pub nodes: Vec<NodeRoom>,
    /// Quotas that would refuse them.
    pub quotas: Vec<String>,
}

/// A node's room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRoom {
    /// The node.
    pub node: String,
    /// Pods that fit.
    pub pods: i32,
    /// What limits it and how much of it is free, or why nothing is placed there.
    pub limit: String,
}

/// What nodes and a namespace have: no more of it than decides, so that a large cluster takes little memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cluster {
    nodes: Vec<Place>,
    pods: Vec<Placed>,
    quotas: Vec<Quota>,
}

#[derive(Debug, Clone, PartialEq)]
struct Place {
    name: String,
    /// Why no pod is placed there, whatever it tolerates.
    closed: Option<&'static str>,
    taints: Vec<Taint>,
    labels: BTreeMap<String, String>,
    allocatable: Amounts,
}

#[derive(Debug, Clone, PartialEq)]
struct Placed {
    /// `None` while it waits for one.
    node: Option<String>,
    namespace: String,
    /// Service and revision of an engine pod.
    of: Option<(String, String)>,
    used: Amounts,
}

#[derive(Debug, Clone, PartialEq)]
struct Quota {
    name: String,
    hard: Amounts,
    used: Amounts,
}

/// The service whose pods come and go.
#[derive(Debug, Clone, Copy)]
pub struct Of<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub service: &'a str,
    /// The revision whose pods stay, if they may.
    pub stable: &'a str,
}

impl Cluster {
    /// Counts a node in.
    pub fn add_node(&mut self, node: &Node) {
        let spec = node.spec.clone().unwrap_or_default();
        let status = node.status.clone().unwrap_or_default();
        let mut conditions = status.conditions.iter().flatten();
        let ready =
            conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
        let closed = match spec.unschedulable {
            Some(true) => Some("cordoned"),
            Some(false) | None => (!ready).then_some("not ready"),
        };
        let taints = spec.taints.unwrap_or_default();
        self.nodes.push(Place {
            name: node.name_any(),
            closed,
            taints: taints
                .into_iter()
                .filter(|taint| taint.effect != "PreferNoSchedule")
                .collect(),
            labels: node.labels().clone(),
            allocatable: status.allocatable.as_ref().map(amounts).unwrap_or_default(),
        });
    }

    /// Counts a pod in. Those that have ended or are on their way out take no room.
    pub fn add_pod(&mut self, pod: &Pod) {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        let Some(spec) = &pod.spec else { return };
        if matches!(phase, Some("Succeeded" | "Failed"))
            || pod.metadata.deletion_timestamp.is_some()
        {
            return;
        }
        let label = |name: &str| pod.labels().get(name).cloned();
        let engine = label(names::LABEL_COMPONENT).is_some_and(|is| is == COMPONENT_ENGINE);
        let of = label(names::LABEL_SERVICE).zip(label(names::LABEL_REVISION));
        let mut used = of_pod(spec, |resources| resources.requests.as_ref());
        used.insert("pods".into(), ONE);
        self.pods.push(Placed {
            node: spec.node_name.clone(),
            namespace: pod.namespace().unwrap_or_default(),
            of: of.filter(|_| engine),
            used,
        });
    }

    /// Counts a quota in. One with scopes is about other pods, or about some only: it is left to the API.
    pub fn add_quota(&mut self, quota: &ResourceQuota) {
        let spec = quota.spec.clone().unwrap_or_default();
        let scoped =
            spec.scope_selector.is_some() || spec.scopes.is_some_and(|all| !all.is_empty());
        let Some(status) = quota.status.as_ref().filter(|_| !scoped) else {
            return;
        };
        self.quotas.push(Quota {
            name: quota.name_any(),
            hard: status.hard.as_ref().map(amounts).unwrap_or_default(),
            used: status.used.as_ref().map(amounts).unwrap_or_default(),
        });
    }

    /// The same without some pods.
    fn without(&self, leaves: impl Fn(&Placed) -> bool) -> Self {
        let mut after = self.clone();
        while let Some(index) = after.pods.iter().position(&leaves) {
            after.remove(index);
        }
        after
    }

    /// A pod leaves, and what a quota has counted for it. What it counts of limits is not known of pods that run: that stays.
    fn remove(&mut self, index: usize) {
        let pod = self.pods.swap_remove(index);
        for quota in &mut self.quotas {
            for (resource, used) in &mut quota.used {
                *used -= counted(resource, &pod.used, &Amounts::new()).min(*used);
            }
        }
    }
}

/// What a pod asks for.
struct Asked {
    requests: Amounts,
    limits: Amounts,
    selector: BTreeMap<String, String>,
    tolerations: Vec<Toleration>,
}

impl Asked {
    fn by(pod: &PodSpec) -> Self {
        let limits = of_pod(pod, |resources| resources.limits.as_ref());
        // A limit without a request is one, as the API has it.
        let mut requests = limits.clone();
        requests.extend(of_pod(pod, |resources| resources.requests.as_ref()));
        Self {
            requests,
            limits,
            selector: pod.node_selector.clone().unwrap_or_default(),
            tolerations: pod.tolerations.clone().unwrap_or_default(),
        }
    }
}

/// Whether `needed` more pods like this one fit.
pub fn capacity(pod: &PodSpec, needed: i32, cluster: &Cluster) -> Capacity {
    let asked = Asked::by(pod);
    let nodes = rooms(&asked, cluster);
    let room = sum(&nodes);
    let refusing = cluster.quotas.iter().filter_map(|quota| {
        let (pods, resource) = quota_room(&asked, quota)?;
        (needed > pods).then(|| format!("ResourceQuota {} limits {resource}", quota.name))
    });
    let quotas: Vec<String> = refusing.collect();
    Capacity {
        requests: asked
            .requests
            .iter()
            .map(|(name, amount)| (name.clone(), text(*amount)))
            .collect(),
        needed,
        room,
        fits: room >= needed && quotas.is_empty(),
        nodes,
        quotas,
    }
}

/// The room for a canary of `of`'s service. Its own pods count as free, and so do those of revisions that leave. Which of stable's pods
/// leave first is not known: those of the nodes that the API lists last, for the estimate.
pub fn room(pod: &PodSpec, of: Of<'_>, cluster: &Cluster) -> Room {
    let asked = Asked::by(pod);
    let own = |placed: &Placed| {
        let service = |own: &(String, String)| own.0 == of.service;
        placed.namespace == of.namespace && placed.of.as_ref().is_some_and(service)
    };
    let stable = |placed: &Placed| {
        let revision = |own: &(String, String)| own.1 == of.stable;
        own(placed) && placed.of.as_ref().is_some_and(revision)
    };
    let mut left = cluster.without(|placed| own(placed) && !stable(placed));
    let free = free(&asked, &left);
    let mut fits = vec![fit(&asked, &left)];
    let leaves = |placed: &Placed| stable(placed) && placed.node.is_some();
    while let Some(last) = left.pods.iter().rposition(leaves) {
        left.remove(last);
        fits.push(fit(&asked, &left));
    }
    fits.reverse();
    Room {
        fits,
        asked: list(&asked.requests),
        free,
    }
}

/// Pods that nodes have room for and quotas allow.
fn fit(asked: &Asked, cluster: &Cluster) -> i32 {
    let quotas = cluster.quotas.iter();
    let quotas = quotas.filter_map(|quota| quota_room(asked, quota));
    let least = quotas.map(|(pods, _)| pods).min();
    sum(&rooms(asked, cluster)).min(least.unwrap_or(i32::MAX))
}

/// What is free, in one line: the nodes with the most room first, and the quotas that limit.
fn free(asked: &Asked, cluster: &Cluster) -> String {
    let mut nodes = rooms(asked, cluster);
    nodes.sort_by_key(|node| std::cmp::Reverse(node.pods));
    let named = nodes.iter().take(NAMED);
    let mut said: Vec<String> = named
        .map(|node| format!("node {} {}: {}", node.node, node.pods, node.limit))
        .collect();
    if nodes.len() > NAMED {
        said.push(format!("{} more nodes", nodes.len() - NAMED));
    }
    if nodes.is_empty() {
        said.push("no node".into());
    }
    for quota in &cluster.quotas {
        if let Some((pods, resource)) = quota_room(asked, quota) {
            said.push(format!("ResourceQuota {} {pods}: {resource}", quota.name));
        }
    }
    said.join(", ")
}

fn list(amounts: &Amounts) -> String {
    if amounts.is_empty() {
        return "nothing set aside".into();
    }
    let each = amounts.iter();
    let each = each.map(|(name, amount)| format!("{name} {}", text(*amount)));
    each.collect::<Vec<_>>().join(", ")
}

/// An amount as people write it.
fn text(amount: i128) -> String {
    if amount % ONE != 0 {
        let milli = (amount + ONE / 1000 - 1).div_euclid(ONE / 1000);
        return format!("{milli}m");
    }
    let whole = amount / ONE;
    let unit = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
    let unit = unit
        .into_iter()
        .find(|(_, size)| whole != 0 && whole % size == 0);
    match unit {
        Some((unit, size)) => format!("{}{unit}", whole / size),
        None => whole.to_string(),
    }
}

fn amounts(list: &BTreeMap<String, Quantity>) -> Amounts {
    let read = |(name, amount): (&String, &Quantity)| Some((name.clone(), quantity(&amount.0)?));
    list.iter().filter_map(read).collect()
}

fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let sum = sum.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*amount);
    }
}

/// What a pod sets aside: the sum over its containers, or its largest init container where that asks for more; with its overhead.
fn of_pod(
    spec: &PodSpec,
    which: fn(&ResourceRequirements) -> Option<&BTreeMap<String, Quantity>>,
) -> Amounts {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        resources.and_then(which).map(amounts).unwrap_or_default()
    };
    let mut sum = Amounts::new();
    for container in &spec.containers {
        add(&mut sum, &of(container));
    }
    for container in spec.init_containers.iter().flatten() {
        let amounts = of(container);
        if container.restart_policy.as_deref() == Some("Always") {
            // A sidecar runs as long as the containers do.
            add(&mut sum, &amounts);
            continue;
        }
        for (name, amount) in amounts {
            let most = sum.entry(name).or_default();
            *most = amount.max(*most);
        }
    }
    if let Some(overhead) = &spec.overhead {
        add(&mut sum, &amounts(overhead));
    }
    sum
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    let value = toleration.value.as_deref().unwrap_or_default();
    let exists = toleration.operator.as_deref() == Some("Exists");
    (effect.is_empty() || effect == taint.effect)
        && (key == taint.key || (key.is_empty() && exists))
        && (exists || value == taint.value.as_deref().unwrap_or_default())
}

/// Why no pod like this is placed on a node.
fn closed(node: &Place, asked: &Asked) -> Option<String> {
    if let Some(why) = node.closed {
        return Some(why.into());
    }
    let tolerated = |taint: &&Taint| asked.tolerations.iter().any(|one| tolerates(one, taint));
    if let Some(taint) = node.taints.iter().find(|taint| !tolerated(taint)) {
        return Some(format!("tainted {}", taint.key));
    }
    let mut wanted = asked.selector.iter();
    let other = wanted.find(|(key, value)| node.labels.get(*key) != Some(value));
    other.map(|(key, value)| format!("not labelled {key}={value}"))
}

fn rooms(asked: &Asked, cluster: &Cluster) -> Vec<NodeRoom> {
    let mut used: BTreeMap<&str, Amounts> = BTreeMap::new();
    for pod in &cluster.pods {
        if let Some(node) = &pod.node {
            add(used.entry(node).or_default(), &pod.used);
        }
    }
    let nothing = Amounts::new();
    let nodes = cluster.nodes.iter();
    nodes
        .map(|node| {
            on_node(
                node,
                asked,
                used.get(node.name.as_str()).unwrap_or(&nothing),
            )
        })
        .collect()
}

fn on_node(node: &Place, asked: &Asked, used: &Amounts) -> NodeRoom {
    let room = |pods: i32, limit: String| NodeRoom {
        node: node.name.clone(),
        pods,
        limit,
    };
    if let Some(why) = closed(node, asked) {
        return room(0, why);
    }
    let of = |amounts: &Amounts, resource: &str| amounts.get(resource).copied().unwrap_or(0);
    let fit = |(resource, amount): (&str, i128)| {
        let all = of(&node.allocatable, resource);
        let free = (all - of(used, resource)).max(0);
        (times(free, amount), resource.to_owned(), free, all)
    };
    let requests = asked.requests.iter();
    let requests = requests.map(|(resource, amount)| (resource.as_str(), *amount));
    // `pods` is always asked for, so there is a least one.
    let least = requests.chain([("pods", ONE)]).map(fit).min();
    least.map_or_else(
        || room(0, "unknown".into()),
        |(pods, resource, free, all)| {
            room(
                pods,
                format!("{resource}, {} of {} free", text(free), text(all)),
            )
        },
    )
}

/// How often `amount` goes into `free`.
fn times(free: i128, amount: i128) -> i32 {
    if amount <= 0 {
        return i32::MAX;
    }
    i32::try_from(free.max(0) / amount).unwrap_or(i32::MAX)
}

fn sum(nodes: &[NodeRoom]) -> i32 {
    let pods = nodes.iter().map(|node| node.pods);
    pods.fold(0, i32::saturating_add)
}

/// What a quota counts for a pod.
fn counted(resource: &str, requests: &Amounts, limits: &Amounts) -> i128 {
    let of = |amounts: &Amounts, name: &str| amounts.get(name).copied().unwrap_or(0);
    match resource {
        "pods" | "count/pods" => ONE,
        _ => match resource.strip_prefix("limits.") {
            Some(name) => of(limits, name),
            None => of(
                requests,
                resource.strip_prefix("requests.").unwrap_or(resource),
            ),
        },
    }
}

/// Pods that a quota still allows, and the resource that limits them; `None` when it counts nothing of theirs.
fn quota_room(asked: &Asked, quota: &Quota) -> Option<(i32, String)> {
    let hard = quota.hard.iter();
    let room = hard.filter_map(|(resource, limit)| {
        let each = counted(resource, &asked.requests, &asked.limits);
        let free = limit - quota.used.get(resource).copied().unwrap_or(0);
        (each > 0).then(|| (times(free, each), resource.clone()))
    });
    room.min()
}

#[cfg(test)]
#[path = "capacity_tests.rs"]
mod tests;
