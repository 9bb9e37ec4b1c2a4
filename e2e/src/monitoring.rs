//! The Prometheus operator's kinds, for clusters that do not have them. What their specs hold is its own affair.

use serde_json::json;

use crate::kubectl::Kubectl;

/// Kind and plural.
const KINDS: [(&str, &str); 2] = [
    ("PodMonitor", "podmonitors"),
    ("PrometheusRule", "prometheusrules"),
];

/// Makes the kinds known and waits until the apiserver serves them.
///
/// # Errors
/// What the apiserver answered.
pub fn install(kubectl: &Kubectl) -> anyhow::Result<()> {
    for (kind, plural) in KINDS {
        let version = json!({"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}}});
        let names = json!({"kind": kind, "plural": plural, "singular": kind.to_lowercase()});
        let crd = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.monitoring.coreos.com"), "annotations": {"api-approved.kubernetes.io": "unapproved, test"}},
            "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}});
        kubectl.apply(&crd.to_string())?;
        let name = format!("customresourcedefinition/{plural}.monitoring.coreos.com");
        kubectl.must(&[
            "wait",
            "--for=condition=Established",
            "--timeout=30s",
            &name,
        ])?;
    }
    Ok(())
}

/// Takes them away, with every object of them.
///
/// # Errors
/// What the apiserver answered.
pub fn remove(kubectl: &Kubectl) -> anyhow::Result<()> {
    for (_, plural) in KINDS {
        let name = format!("{plural}.monitoring.coreos.com");
        kubectl.must(&[
            "delete",
            "customresourcedefinition",
            &name,
            "--ignore-not-found",
        ])?;
    }
    Ok(())
}
