//! Do the pods fit? What engine pods ask for against what nodes have left and a quota allows. Pure; called for `plan`.
//!
//! An estimate as the scheduler's own first filter makes it: requests against allocatable, node by node. Affinity and volumes are not looked at.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Node, Pod, ResourceQuota};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use mixquant_crds::service::Resources;
use serde::Serialize;

use super::answer::Plain;
use super::table::{Cell, Style, Table, Tone, push};
use crate::compare::quantity;

/// Amounts in billionths of their unit, by resource.
type Amounts = BTreeMap<String, i128>;

/// Whether pods fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// What one engine pod asks for.
    pub requests: BTreeMap<String, String>,
    /// Pods that are needed beside those that run.
    pub needed: i32,
    /// Of them, that nodes have room for.
    pub room: i32,
    /// They all fit.
    pub fits: bool,
    /// Node by node.
    pub nodes: Vec<Room>,
    /// Quotas that would refuse them.
    pub quotas: Vec<String>,
}

/// A node's room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Room {
    /// The node.
    pub node: String,
    /// Engine pods that fit.
    pub pods: i32,
    /// What limits it, or why nothing is placed there.
    pub limit: String,
}

/// What nodes and namespaces have.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// All nodes.
    pub nodes: Vec<Node>,
    /// All pods on them.
    pub pods: Vec<Pod>,
    /// The quotas of the service's namespace.
    pub quotas: Vec<ResourceQuota>,
}

/// Whether `needed` more pods with these requests fit.
pub fn capacity(requests: &BTreeMap<String, Quantity>, needed: i32, cluster: &Cluster) -> Capacity {
    let asked = amounts(requests);
    let nodes: Vec<Room> = cluster
        .nodes
        .iter()
        .map(|node| room(node, &asked, &cluster.pods))
        .collect();
    let room = nodes
        .iter()
        .map(|node| node.pods)
        .fold(0, i32::saturating_add);
    let quotas = refusing(&asked, needed, &cluster.quotas);
    Capacity {
        requests: requests
            .iter()
            .map(|(name, amount)| (name.clone(), amount.0.clone()))
            .collect(),
        needed,
        room,
        fits: room >= needed && quotas.is_empty(),
        nodes,
        quotas,
    }
}

/// What a pod with these resources asks for: a limit without a request is one, as the API has it.
pub fn requests(resources: Option<&Resources>) -> BTreeMap<String, Quantity> {
    let Some(resources) = resources else {
        return BTreeMap::new();
    };
    let mut requests = resources.limits.clone().unwrap_or_default();
    requests.extend(resources.requests.clone().unwrap_or_default());
    requests
}

fn amounts(list: &BTreeMap<String, Quantity>) -> Amounts {
    let read = |(name, amount): (&String, &Quantity)| Some((name.clone(), quantity(&amount.0)?));
    list.iter().filter_map(read).collect()
}

fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += amount;
    }
}

/// What a pod sets aside: the sum over its containers, or its largest init container where that asks for more; with its overhead.
fn of_pod(pod: &Pod) -> Amounts {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        let requests = resources.and_then(|resources| resources.requests.as_ref());
        requests.map(amounts).unwrap_or_default()
    };
    let mut sum = Amounts::new();
    let Some(spec) = &pod.spec else { return sum };
    for container in &spec.containers {
        add(&mut sum, &of(container));
    }
    for container in spec.init_containers.iter().flatten() {
        for (name, amount) in of(container) {
            let most = sum.entry(name).or_default();
            *most = amount.max(*most);
        }
    }
    if let Some(overhead) = &spec.overhead {
        add(&mut sum, &amounts(overhead));
    }
    sum
}

fn closed(node: &Node) -> Option<String> {
    let spec = node.spec.as_ref();
    if spec.and_then(|spec| spec.unschedulable) == Some(true) {
        return Some("cordoned".into());
    }
    let mut taints = spec
        .and_then(|spec| spec.taints.as_ref())
        .into_iter()
        .flatten();
    if let Some(taint) = taints.find(|taint| taint.effect != "PreferNoSchedule") {
        return Some(format!("tainted {}", taint.key));
    }
    let mut conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let ready =
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    (!ready).then(|| "not ready".into())
}

fn room(node: &Node, asked: &Amounts, pods: &[Pod]) -> Room {
    let name = node.name_any();
    let none = |limit: String| Room {
        node: node.name_any(),
        pods: 0,
        limit,
    };
    if let Some(why) = closed(node) {
        return none(why);
    }
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    let mut free = allocatable.map(amounts).unwrap_or_default();
    let finished = |pod: &&Pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        !matches!(phase, Some("Succeeded" | "Failed"))
    };
    let here =
        |pod: &&Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&name);
    for pod in pods.iter().filter(here).filter(finished) {
        let mut used = of_pod(pod);
        used.insert("pods".into(), ONE);
        for (resource, amount) in used {
            if let Some(left) = free.get_mut(&resource) {
                *left -= amount;
            }
        }
    }
    let mut asked = asked.clone();
    asked.insert("pods".into(), ONE);
    let fit = |(resource, amount): (&String, &i128)| {
        let free = free.get(resource).copied().unwrap_or(0).max(0);
        let pods = if *amount > 0 {
            free / amount
        } else {
            i128::from(i32::MAX)
        };
        (i32::try_from(pods).unwrap_or(i32::MAX), resource.clone())
    };
    // `pods` is always asked for, so there is a least one.
    let least = asked.iter().map(fit).min();
    least.map_or_else(
        || none("unknown".into()),
        |(pods, limit)| Room {
            node: name,
            pods,
            limit,
        },
    )
}

/// One, in billionths.
const ONE: i128 = 1_000_000_000;

fn refusing(asked: &Amounts, needed: i32, quotas: &[ResourceQuota]) -> Vec<String> {
    let mut refusing = Vec::new();
    for quota in quotas {
        let Some(status) = &quota.status else {
            continue;
        };
        let hard = status.hard.as_ref().map(amounts).unwrap_or_default();
        let used = status.used.as_ref().map(amounts).unwrap_or_default();
        for (resource, limit) in hard {
            let each = match resource.strip_prefix("requests.").unwrap_or(&resource) {
                "pods" | "count/pods" => ONE,
                name => asked.get(name).copied().unwrap_or(0),
            };
            let after =
                used.get(&resource).copied().unwrap_or(0) + each * i128::from(needed.max(0));
            if each > 0 && needed > 0 && after > limit {
                refusing.push(format!(
                    "ResourceQuota {} limits {resource}",
                    quota.name_any()
                ));
            }
        }
    }
    refusing
}

impl Plain for Capacity {
    fn plain(&self, style: Style) -> String {
        let requests: Vec<String> = self
            .requests
            .iter()
            .map(|(name, amount)| format!("{name} {amount}"))
            .collect();
        let requests = if requests.is_empty() {
            "nothing set aside (spec.engine.resources.requests is empty)".into()
        } else {
            requests.join(", ")
        };
        let (tone, verdict) = if self.fits {
            (Tone::Good, "fits")
        } else {
            (Tone::Bad, "does not fit")
        };
        let mut text = format!(
            "capacity {}: {} more pods at the peak, room for {} ({requests} each)\n",
            style.paint(tone, verdict),
            self.needed,
            self.room
        );
        let mut table = Table::with_header(&["NODE", "ROOM", "LIMITED BY"]);
        for node in &self.nodes {
            table.row(vec![
                Cell::from(node.node.clone()),
                node.pods.to_string().into(),
                node.limit.clone().into(),
            ]);
        }
        text += &table.render(style, 2);
        for quota in &self.quotas {
            push(
                &mut text,
                format_args!("  {}\n", style.paint(Tone::Bad, quota)),
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(name: &str, cpu: &str, spec: &Value) -> Node {
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec, "status": {
            "allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}]}}))
        .unwrap()
    }

    fn pod(node: &str, cpu: &str, phase: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": {"phase": phase},
            "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}))
        .unwrap()
    }

    fn asked(cpu: &str) -> BTreeMap<String, Quantity> {
        [
            ("cpu".to_owned(), Quantity(cpu.into())),
            ("memory".to_owned(), Quantity("1Gi".into())),
        ]
        .into()
    }

    #[test]
    fn pods_are_counted_node_by_node_and_never_split() {
        let cluster = Cluster {
            nodes: vec![node("a", "1", &json!({})), node("b", "1500m", &json!({}))],
            pods: vec![pod("a", "300m", "Running"), pod("b", "1", "Succeeded")],
            ..Cluster::default()
        };
        let found = capacity(&asked("800m"), 2, &cluster);
        // 700 m are left on a, so 2.2 of a pod in sum, and one in truth.
        assert_eq!((found.room, found.fits), (1, false));
        assert_eq!(found.nodes[0].limit, "cpu");
        assert!(capacity(&asked("700m"), 3, &cluster).fits);
    }

    #[test]
    fn a_node_that_takes_no_pods_has_no_room() {
        let nodes = vec![
            node("cordoned", "8", &json!({"unschedulable": true})),
            node(
                "tainted",
                "8",
                &json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]}),
            ),
        ];
        let cluster = Cluster {
            nodes,
            ..Cluster::default()
        };
        let found = capacity(&asked("1"), 1, &cluster);
        assert_eq!(found.room, 0);
        assert_eq!(found.nodes[1].limit, "tainted gpu");
    }

    #[test]
    fn a_resource_that_no_node_has_never_fits() {
        let cluster = Cluster {
            nodes: vec![node("a", "8", &json!({}))],
            ..Cluster::default()
        };
        let mut gpu = asked("1");
        gpu.insert("nvidia.com/gpu".into(), Quantity("1".into()));
        let found = capacity(&gpu, 1, &cluster);
        assert_eq!(
            (found.fits, found.nodes[0].limit.as_str()),
            (false, "nvidia.com/gpu")
        );
        assert!(capacity(&gpu, 0, &cluster).fits, "nothing more is needed");
    }

    #[test]
    fn a_quota_that_would_refuse_the_pods_is_named() {
        let quota: ResourceQuota = serde_json::from_value(json!({"metadata": {"name": "team"}, "status": {
            "hard": {"requests.cpu": "4", "pods": "10"}, "used": {"requests.cpu": "3", "pods": "2"}}}))
        .unwrap();
        let cluster = Cluster {
            nodes: vec![node("a", "8", &json!({}))],
            quotas: vec![quota],
            ..Cluster::default()
        };
        assert!(capacity(&asked("1"), 1, &cluster).fits);
        let found = capacity(&asked("1"), 2, &cluster);
        assert_eq!(found.quotas, ["ResourceQuota team limits requests.cpu"]);
        assert!(!found.fits);
    }
}
