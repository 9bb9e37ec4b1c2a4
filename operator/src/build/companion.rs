//! What stands beside a service's pods: an account without rights, who may connect to whom, how many pods may be evicted at once, and
//! what Prometheus should read and warn of.
//!
//! None of it is part of a revision: it follows the spec at once and restarts nothing.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use mixquant_crds::names;

use super::meta::{
    self, COMPONENT_CALIBRATION, COMPONENT_ENGINE, COMPONENT_VERIFICATION, Owner, labels,
};
use super::monitoring::{self, PodMonitor, PrometheusRule};
use super::{service, source};
use crate::observed::{Companion, Installation};
use crate::validate::ValidService;

/// The label that the API itself gives every namespace.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// An object as it should be.
#[derive(Debug, Clone, PartialEq)]
pub enum Built {
    /// Of every pod of the service.
    ServiceAccount(Box<ServiceAccount>),
    /// Of engine pods, or of Jobs' pods.
    NetworkPolicy(Box<NetworkPolicy>),
    /// Of engine pods.
    PodDisruptionBudget(Box<PodDisruptionBudget>),
    /// Of engine pods.
    PodMonitor(Box<PodMonitor>),
    /// Of the service.
    PrometheusRule(Box<PrometheusRule>),
}

/// The name of the account, the budget and what Prometheus reads.
pub fn name(service: &str) -> String {
    format!("{service}-mixquant")
}

/// What a service should have in this installation.
pub fn wanted(installation: &Installation) -> Vec<Companion> {
    let mut wanted = vec![
        Companion::Account,
        Companion::EngineNetwork,
        Companion::JobNetwork,
        Companion::Budget,
    ];
    if installation.pod_monitors {
        wanted.push(Companion::Monitor);
    }
    if installation.prometheus_rules {
        wanted.push(Companion::Rule);
    }
    wanted
}

/// The object's kind and name.
pub fn object(companion: Companion, service: &str) -> (&'static str, String) {
    match companion {
        Companion::Account => ("ServiceAccount", name(service)),
        Companion::EngineNetwork => ("NetworkPolicy", format!("{service}-engine")),
        Companion::JobNetwork => ("NetworkPolicy", format!("{service}-jobs")),
        Companion::Budget => ("PodDisruptionBudget", name(service)),
        Companion::Monitor => ("PodMonitor", name(service)),
        Companion::Rule => ("PrometheusRule", name(service)),
    }
}

/// The object as it should be.
pub fn build(
    companion: Companion,
    owner: &Owner,
    service: &ValidService,
    installation: &Installation,
) -> Built {
    match companion {
        Companion::Account => Built::ServiceAccount(Box::new(account(owner))),
        Companion::EngineNetwork => {
            Built::NetworkPolicy(Box::new(engine_network(owner, service, installation)))
        }
        Companion::JobNetwork => Built::NetworkPolicy(Box::new(job_network(owner, service))),
        Companion::Budget => Built::PodDisruptionBudget(Box::new(budget(owner))),
        Companion::Monitor => Built::PodMonitor(Box::new(monitoring::monitor(owner))),
        Companion::Rule => Built::PrometheusRule(Box::new(monitoring::rule(owner, service))),
    }
}

/// An account that is allowed nothing and whose token no pod gets.
fn account(owner: &Owner) -> ServiceAccount {
    ServiceAccount {
        metadata: owner.object(name(&owner.name), labels(&owner.name, COMPONENT_ENGINE)),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

fn ports(port: u16) -> Vec<NetworkPolicyPort> {
    vec![NetworkPolicyPort {
        port: Some(IntOrString::Int(port.into())),
        protocol: Some("TCP".into()),
        end_port: None,
    }]
}

/// The API for everybody (the Service and whatever routes to it decide who reaches it), the admin port for the namespaces that read
/// metrics; out of the pod, nothing but a download. The kubelet's probes come from the node itself, which policies never stop.
fn engine_network(
    owner: &Owner,
    service: &ValidService,
    installation: &Installation,
) -> NetworkPolicy {
    let from_namespaces = NetworkPolicyPeer {
        namespace_selector: Some(LabelSelector {
            match_labels: None,
            match_expressions: Some(vec![LabelSelectorRequirement {
                key: NAMESPACE_NAME.into(),
                operator: "In".into(),
                values: Some(installation.metrics_readers.clone()),
            }]),
        }),
        ..NetworkPolicyPeer::default()
    };
    let mut ingress = vec![NetworkPolicyIngressRule {
        from: None,
        ports: Some(ports(names::PORT_API)),
    }];
    if !installation.metrics_readers.is_empty() {
        ingress.push(NetworkPolicyIngressRule {
            from: Some(vec![from_namespaces]),
            ports: Some(ports(names::PORT_ADMIN)),
        });
    }
    let (_, name) = object(Companion::EngineNetwork, &owner.name);
    policy(owner, service, name, (engine_pods(owner), ingress))
}

/// Jobs read their volumes and answer through the kubelet: nobody connects to them, and they to nobody but the model's store.
fn job_network(owner: &Owner, service: &ValidService) -> NetworkPolicy {
    let pods = LabelSelector {
        match_labels: Some([(names::LABEL_SERVICE.to_owned(), owner.name.clone())].into()),
        match_expressions: Some(vec![LabelSelectorRequirement {
            key: names::LABEL_COMPONENT.into(),
            operator: "In".into(),
            values: Some(vec![
                COMPONENT_CALIBRATION.into(),
                COMPONENT_VERIFICATION.into(),
            ]),
        }]),
    };
    let (_, name) = object(Companion::JobNetwork, &owner.name);
    policy(owner, service, name, (pods, Vec::new()))
}

/// The way out of a pod that downloads its model: names, and the port of the store. A policy is about a whole pod, so it stays open when
/// the download is done; the store's address is not known here, so every address is meant.
fn way_out(service: &ValidService) -> Vec<NetworkPolicyEgressRule> {
    let Some(port) = source::server_port(service) else {
        return Vec::new();
    };
    let mut names = ports(53);
    names.push(NetworkPolicyPort {
        protocol: Some("UDP".into()),
        ..names[0].clone()
    });
    [names, ports(port)]
        .map(|ports| NetworkPolicyEgressRule {
            ports: Some(ports),
            to: None,
        })
        .into()
}

fn policy(
    owner: &Owner,
    service: &ValidService,
    name: String,
    (pods, ingress): (LabelSelector, Vec<NetworkPolicyIngressRule>),
) -> NetworkPolicy {
    NetworkPolicy {
        metadata: owner.object(name, labels(&owner.name, COMPONENT_ENGINE)),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(pods),
            policy_types: Some(vec!["Ingress".into(), "Egress".into()]),
            ingress: Some(ingress),
            // Said, though empty: what is not said, others could fill in.
            egress: Some(way_out(service)),
        }),
    }
}

/// One pod at a time, of stable and canary together. With a single replica it may go as well: a budget that forbids it would hold up
/// every drain of its node for good. A pod that is not ready may always go.
fn budget(owner: &Owner) -> PodDisruptionBudget {
    PodDisruptionBudget {
        metadata: owner.object(name(&owner.name), labels(&owner.name, COMPONENT_ENGINE)),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(engine_pods(owner)),
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".into()),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

/// Selects the engine pods of every revision.
pub(super) fn engine_pods(owner: &Owner) -> LabelSelector {
    let labels: BTreeMap<String, String> = service::selector(&owner.name, None);
    meta::selector(labels)
}
