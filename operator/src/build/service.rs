//! The service's one address: a Kubernetes Service of the same name whose selector is moved between revisions. And the Services of its two
//! tracks, where a gateway splits the traffic.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use mixquant_crds::names;

use super::meta::{COMPONENT_ENGINE, Owner, labels};
use crate::observed::Track;

/// The port that clients use.
pub const PORT: i32 = 80;

/// Selects the engine pods of one revision, or of all with `None`. Jobs' pods are never selected.
pub fn selector(name: &str, revision: Option<&str>) -> BTreeMap<String, String> {
    let mut selector: BTreeMap<String, String> = [
        (names::LABEL_SERVICE, name),
        (names::LABEL_COMPONENT, COMPONENT_ENGINE),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    if let Some(revision) = revision {
        selector.insert(names::LABEL_REVISION.to_owned(), revision.to_owned());
    }
    selector
}

/// The name of a track's Service.
pub fn track_name(service: &str, track: Track) -> String {
    format!("{service}-{}", track.as_str())
}

/// The Service `name` with this selector. The admin port is not in it: metrics and health are for the pod's own address.
pub fn service(owner: &Owner, name: String, selector: BTreeMap<String, String>) -> Service {
    Service {
        metadata: owner.object(name, labels(&owner.name, COMPONENT_ENGINE)),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".into()),
            selector: Some(selector),
            ports: Some(vec![ServicePort {
                name: Some(names::PORT_API_NAME.into()),
                port: PORT,
                target_port: Some(IntOrString::String(names::PORT_API_NAME.into())),
                protocol: Some("TCP".into()),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}
