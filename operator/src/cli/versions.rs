//! Which versions talk to each other: this program, the operator's pods, the cluster. What `version` answers. Pure.

use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use serde::Serialize;

use super::answer::Plain;
use super::table::{Style, Table};

/// The versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Versions {
    /// This program.
    pub client: &'static str,
    /// The API that it speaks.
    pub api: &'static str,
    /// Kubernetes.
    pub cluster: Option<String>,
    /// The operators that are installed.
    pub operators: Vec<Installed>,
    /// Why the operators are not known.
    pub unknown: Option<String>,
}

/// An operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Installed {
    /// Its namespace.
    pub namespace: String,
    /// Its Deployment.
    pub name: String,
    /// The label `app.kubernetes.io/version`.
    pub version: String,
    /// Its image.
    pub image: String,
    /// Ready copies.
    pub ready: i32,
}

impl Versions {
    /// Of this program.
    pub fn client() -> Self {
        Self {
            client: env!("CARGO_PKG_VERSION"),
            api: "mixquant.io/v1alpha1",
            cluster: None,
            operators: Vec::new(),
            unknown: None,
        }
    }
}

/// What a Deployment of the operator says of itself.
pub fn installed(object: &Deployment) -> Installed {
    let template = object
        .spec
        .as_ref()
        .and_then(|spec| spec.template.spec.as_ref());
    let image = template.and_then(|pod| pod.containers.first()?.image.clone());
    let ready = object
        .status
        .as_ref()
        .and_then(|status| status.ready_replicas);
    Installed {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
        version: object
            .labels()
            .get("app.kubernetes.io/version")
            .cloned()
            .unwrap_or_default(),
        image: image.unwrap_or_default(),
        ready: ready.unwrap_or(0),
    }
}

impl Plain for Versions {
    fn plain(&self, style: Style) -> String {
        let mut table = Table::default();
        table.row(vec!["client".into(), self.client.into(), self.api.into()]);
        if let Some(cluster) = &self.cluster {
            table.row(vec!["cluster".into(), cluster.clone().into()]);
        }
        for one in &self.operators {
            table.row(vec![
                "operator".into(),
                one.version.clone().into(),
                format!(
                    "{}/{}, {} ready, {}",
                    one.namespace, one.name, one.ready, one.image
                )
                .into(),
            ]);
        }
        if let Some(why) = &self.unknown {
            table.row(vec![
                "operator".into(),
                "unknown".into(),
                why.clone().into(),
            ]);
        } else if self.cluster.is_some() && self.operators.is_empty() {
            table.row(vec![
                "operator".into(),
                "none".into(),
                "install the chart mixquant-operator".into(),
            ]);
        }
        table.render(style, 0)
    }
}
