//! Tables and properties of the capacity.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn node(name: &str, allocatable: &Value, spec: &Value) -> Node {
    serde_json::from_value(
        json!({"metadata": {"name": name, "labels": {"pool": name}}, "spec": spec, "status": {
        "allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}}),
    )
    .unwrap()
}

fn plain_node(name: &str, cpu: &str, spec: &Value) -> Node {
    node(
        name,
        &json!({"cpu": cpu, "memory": "8Gi", "pods": "110"}),
        spec,
    )
}

fn pod(node: &str, requests: &Value, phase: &str) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p"}, "status": {"phase": phase},
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": requests}}]}}))
    .unwrap()
}

fn engine(node: &str, revision: &str, requests: &Value) -> Pod {
    let mut engine = pod(node, requests, "Running");
    engine.metadata.namespace = Some("models".into());
    engine.metadata.labels = Some(
        [
            (names::LABEL_SERVICE, "chat"),
            (names::LABEL_COMPONENT, COMPONENT_ENGINE),
            (names::LABEL_REVISION, revision),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into(),
    );
    engine
}

fn asking(requests: &Value) -> PodSpec {
    serde_json::from_value(
        json!({"containers": [{"name": "engine", "resources": {"requests": requests}}]}),
    )
    .unwrap()
}

fn cpu(cpu: &str) -> PodSpec {
    asking(&json!({"cpu": cpu, "memory": "1Gi"}))
}

fn cluster(nodes: &[Node], pods: &[Pod]) -> Cluster {
    let mut cluster = Cluster::default();
    for node in nodes {
        cluster.add_node(node);
    }
    for pod in pods {
        cluster.add_pod(pod);
    }
    cluster
}

const CHAT: Of<'static> = Of {
    namespace: "models",
    service: "chat",
    stable: "old",
};

#[test]
fn pods_are_counted_node_by_node_and_never_split() {
    let used = |cpu: &str| json!({"cpu": cpu});
    let cluster = cluster(
        &[
            plain_node("a", "1", &json!({})),
            plain_node("b", "1500m", &json!({})),
        ],
        &[
            pod("a", &used("300m"), "Running"),
            pod("b", &used("1"), "Succeeded"),
        ],
    );
    let found = capacity(&cpu("800m"), 2, &cluster);
    // 700 m are left on a, so 2.2 of a pod in sum, and one in truth.
    assert_eq!((found.room, found.fits), (1, false));
    assert_eq!(found.nodes[0].limit, "cpu, 700m of 1 free");
    assert!(capacity(&cpu("700m"), 3, &cluster).fits);
}

#[test]
fn a_node_that_takes_no_pods_has_no_room_and_one_that_is_tolerated_and_selected_has() {
    let tainted = json!({"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]});
    let preferred = json!({"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]});
    let nodes = [
        plain_node("cordoned", "8", &json!({"unschedulable": true})),
        plain_node("tainted", "8", &tainted),
        plain_node("preferred", "8", &preferred),
    ];
    let cluster = cluster(&nodes, &[]);
    let with = |more: Value| {
        let mut pod = serde_json::to_value(cpu("1")).unwrap();
        pod.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let pod = serde_json::from_value(pod).unwrap();
        let nodes = capacity(&pod, 1, &cluster).nodes;
        nodes
            .into_iter()
            .map(|node| node.pods > 0)
            .collect::<Vec<_>>()
    };
    let exists = json!({"tolerations": [{"key": "gpu", "operator": "Exists"}]});
    let equal = json!({"tolerations": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]});
    let other = json!({"tolerations": [{"key": "gpu", "value": "no"}]});
    let every = json!({"tolerations": [{"operator": "Exists"}]});
    assert_eq!(with(json!({})), [false, false, true]);
    assert_eq!(with(exists), [false, true, true]);
    assert_eq!(with(equal), [false, true, true]);
    assert_eq!(with(other), [false, false, true]);
    assert_eq!(with(every), [false, true, true]);
    assert_eq!(
        with(json!({"nodeSelector": {"pool": "preferred"}})),
        [false, false, true]
    );
    assert_eq!(
        with(json!({"nodeSelector": {"pool": "other"}})),
        [false, false, false]
    );
}

#[test]
fn a_resource_that_no_node_has_never_fits_and_a_slice_is_a_resource() {
    let slices = json!({"cpu": "8", "memory": "8Gi", "pods": "110", "nvidia.com/mig-1g.10gb": "2"});
    let cluster = cluster(&[node("a", &slices, &json!({}))], &[]);
    let gpu = asking(&json!({"cpu": "1", "nvidia.com/gpu": "1"}));
    let found = capacity(&gpu, 1, &cluster);
    assert!(!found.fits && found.nodes[0].limit.starts_with("nvidia.com/gpu, 0 of 0"));
    assert!(capacity(&gpu, 0, &cluster).fits, "nothing more is needed");
    let slice = asking(&json!({"cpu": "1", "nvidia.com/mig-1g.10gb": "1"}));
    assert_eq!(capacity(&slice, 2, &cluster).room, 2);
}

fn quota(hard: &Value, used: &Value, spec: &Value) -> ResourceQuota {
    serde_json::from_value(
        json!({"metadata": {"name": "team"}, "spec": spec, "status": {"hard": hard, "used": used}}),
    )
    .unwrap()
}

#[test]
fn a_quota_that_would_refuse_the_pods_is_named_and_one_with_scopes_is_left_to_the_api() {
    let (hard, used) = (
        json!({"requests.cpu": "4", "pods": "10"}),
        json!({"requests.cpu": "3", "pods": "2"}),
    );
    let mut cluster = cluster(&[plain_node("a", "8", &json!({}))], &[]);
    cluster.add_quota(&quota(
        &json!({"requests.cpu": "0"}),
        &used,
        &json!({"scopes": ["BestEffort"]}),
    ));
    assert!(capacity(&cpu("1"), 2, &cluster).fits);
    cluster.add_quota(&quota(&hard, &used, &json!({})));
    assert!(capacity(&cpu("1"), 1, &cluster).fits);
    let found = capacity(&cpu("1"), 2, &cluster);
    assert_eq!(found.quotas, ["ResourceQuota team limits requests.cpu"]);
    assert!(!found.fits);
    let room = room(&cpu("1"), CHAT, &cluster);
    assert_eq!(room.fits, [1]);
    assert!(
        room.free.ends_with("ResourceQuota team 1: requests.cpu"),
        "{}",
        room.free
    );
}

#[test]
fn a_quota_counts_limits_and_gives_back_what_stable_leaves() {
    let limited: PodSpec = serde_json::from_value(
        json!({"containers": [{"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}]}),
    )
    .unwrap();
    let mut cluster = cluster(
        &[plain_node("a", "8", &json!({}))],
        &[engine("a", "old", &json!({"memory": "2Gi"}))],
    );
    cluster.add_quota(&quota(
        &json!({"limits.memory": "3Gi"}),
        &json!({"limits.memory": "1Gi"}),
        &json!({}),
    ));
    assert_eq!(room(&limited, CHAT, &cluster).fits, [1, 1]);
    let (hard, used) = (
        json!({"requests.memory": "3Gi"}),
        json!({"requests.memory": "2Gi"}),
    );
    cluster.add_quota(&quota(&hard, &used, &json!({})));
    let room = room(&limited, CHAT, &cluster);
    assert_eq!(room.fits, [1, 0]);
}

#[test]
fn on_one_gpu_there_is_no_room_beside_stable_and_room_instead_of_it() {
    let gpu = json!({"cpu": "1", "nvidia.com/gpu": "1"});
    let machine = json!({"cpu": "8", "memory": "8Gi", "pods": "110", "nvidia.com/gpu": "1"});
    let found = room(
        &asking(&gpu),
        CHAT,
        &cluster(
            &[node("a", &machine, &json!({}))],
            &[engine("a", "old", &gpu)],
        ),
    );
    assert_eq!(found.fits, [1, 0]);
    assert_eq!(found.asked, "cpu 1, nvidia.com/gpu 1");
    assert_eq!(found.free, "node a 0: nvidia.com/gpu, 0 of 1 free");
    // A pod of stable that waits for a node has none to give.
    let mut waits = engine("a", "old", &gpu);
    waits.spec.as_mut().unwrap().node_name = None;
    let waiting = room(
        &asking(&gpu),
        CHAT,
        &cluster(&[node("a", &machine, &json!({}))], &[waits]),
    );
    assert_eq!(waiting.fits, [1]);
    // A canary that runs already, or that of an earlier trial, is no reason against a canary.
    for revision in ["new", "earlier"] {
        let pods = [engine("a", revision, &gpu)];
        let found = room(
            &asking(&gpu),
            CHAT,
            &cluster(&[node("a", &machine, &json!({}))], &pods),
        );
        assert_eq!(found.fits, [1]);
    }
    // Another service of the same name in another namespace is.
    let mut other = engine("a", "new", &gpu);
    other.metadata.namespace = Some("other".into());
    let found = room(
        &asking(&gpu),
        CHAT,
        &cluster(&[node("a", &machine, &json!({}))], &[other]),
    );
    assert_eq!(found.fits, [0]);
}

#[test]
fn a_sidecar_is_added_and_an_init_container_is_a_maximum() {
    let pod: PodSpec = serde_json::from_value(json!({
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}],
        "initContainers": [
            {"name": "sidecar", "restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}},
            {"name": "fetch", "resources": {"requests": {"cpu": "2"}}}]}))
    .unwrap();
    assert_eq!(
        text(of_pod(&pod, |resources| resources.requests.as_ref())["cpu"]),
        "2"
    );
}

#[test]
fn amounts_are_written_as_people_write_them() {
    for (amount, expected) in [
        (ONE, "1"),
        (ONE / 4, "250m"),
        (ONE * (1 << 30), "1Gi"),
        (ONE * (384 << 20), "384Mi"),
        (ONE * 1000, "1000"),
        (0, "0"),
        (1, "1m"),
    ] {
        assert_eq!(text(amount), expected);
    }
}

proptest! {
    /// More nodes or fewer pods never take room away, and stable's leaving gives room for at least as many pods like its own.
    #[test]
    fn room_never_shrinks_when_the_world_gets_emptier(
        gpus in prop::collection::vec(0_u32..5, 0..6),
        pods in prop::collection::vec((0_usize..6, prop::sample::select(vec!["old", "new", "other"])), 0..12),
        more in 0_u32..5,
        lost in any::<prop::sample::Index>(),
    ) {
        let gpu = json!({"nvidia.com/gpu": "1"});
        let asked = asking(&gpu);
        let machine = |index: usize, gpus: u32| node(
            &format!("n{index}"), &json!({"pods": "110", "nvidia.com/gpu": gpus.to_string()}), &json!({}));
        let mut nodes: Vec<Node> = gpus.iter().enumerate().map(|(index, gpus)| machine(index, *gpus)).collect();
        // As the scheduler has it: no node holds more than it has.
        let mut left = gpus.clone();
        let mut placed = Vec::new();
        for (index, revision) in pods {
            if let Some(left) = left.get_mut(index).filter(|left| **left > 0) {
                *left -= 1;
                placed.push(engine(&format!("n{index}"), revision, &gpu));
            }
        }
        let before = room(&asked, CHAT, &cluster(&nodes, &placed));
        let stable = placed.iter().filter(|pod| pod.labels()[names::LABEL_REVISION] == "old").count();
        let beside = *before.fits.last().unwrap();
        prop_assert_eq!(before.fits.len(), stable + 1);
        prop_assert!(before.fits.windows(2).all(|pair| pair[0] == pair[1] + 1), "one for one");
        let free: u32 = left.iter().sum();
        prop_assert!(beside >= i32::try_from(free).unwrap());
        if !placed.is_empty() {
            let mut fewer = placed.clone();
            fewer.remove(lost.index(placed.len()));
            prop_assert!(*room(&asked, CHAT, &cluster(&nodes, &fewer)).fits.last().unwrap() >= beside);
        }
        nodes.push(machine(nodes.len(), more));
        let after = room(&asked, CHAT, &cluster(&nodes, &placed));
        prop_assert_eq!(*after.fits.last().unwrap(), beside + i32::try_from(more).unwrap());
    }

    /// Every object that the API could hold is counted without a panic.
    #[test]
    fn no_amount_is_too_odd(amount in "-?[0-9]{0,20}(\\.[0-9]{0,12})?(m|Ki|Gi|E|e99|)") {
        let odd = json!({"cpu": amount, "nvidia.com/gpu": amount});
        let machine = node("a", &odd, &json!({}));
        let mut cluster = cluster(&[machine], &[engine("a", "old", &odd)]);
        cluster.add_quota(&quota(&odd, &odd, &json!({})));
        let found = room(&asking(&odd), CHAT, &cluster);
        prop_assert!(found.fits.iter().all(|fit| *fit >= 0) && found.fits.is_sorted_by(|one, two| one >= two));
    }
}
