//! What all objects of a service share: owner, names of labels, volumes and the security context that Pod Security `restricted` asks for.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapVolumeSource, Container, ContainerPort, KeyToPath, LocalObjectReference,
    PersistentVolumeClaimVolumeSource, PodSecurityContext, PodSpec, ResourceRequirements,
    SeccompProfile, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::Resource;
use mixquant_crds::service::{ConfigMapKey, Resources};
use mixquant_crds::{MixQuantService, names};

use crate::validate::ValidService;

/// The user and group of every container: the images' own, and no one on the node.
pub const USER: i64 = 65532;

/// The value of the component label on engine pods.
pub const COMPONENT_ENGINE: &str = "engine";
/// The value of the component label on calibration Jobs.
pub const COMPONENT_CALIBRATION: &str = "calibration";
/// The value of the component label on verification Jobs.
pub const COMPONENT_VERIFICATION: &str = "verification";

/// The service that owns an object. Deleting it deletes the object: no finalizer is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The service's namespace, and the object's.
    pub namespace: String,
    /// The service's name.
    pub name: String,
    /// The service's uid: a new service of the same name adopts nothing.
    pub uid: String,
}

impl Owner {
    /// The owner that `service` is; `None` for an object that the API has not stored.
    pub fn of(service: &MixQuantService) -> Option<Self> {
        Some(Self {
            namespace: service.metadata.namespace.clone()?,
            name: service.metadata.name.clone()?,
            uid: service.metadata.uid.clone()?,
        })
    }

    /// The reference as owned objects carry it. `blockOwnerDeletion` stays away: it would need a right on finalizers.
    pub fn reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: MixQuantService::api_version(&()).into_owned(),
            kind: MixQuantService::kind(&()).into_owned(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }

    /// Whether this service controls the object.
    pub fn owns(&self, object: &ObjectMeta) -> bool {
        controller(object).is_some_and(|owner| owner.uid == self.uid)
    }

    /// Whether the object is this service's: it controls it, or nobody does and the object has this service's labels (someone took the
    /// owner away; it is given back). An object that another service controls, be it of the same name, is not.
    pub fn claims(&self, object: &ObjectMeta) -> bool {
        let label = |name: &str| object.labels.as_ref().and_then(|labels| labels.get(name));
        match controller(object) {
            Some(owner) => owner.uid == self.uid,
            None => {
                label(names::LABEL_MANAGED_BY).is_some_and(|value| value == names::MANAGER)
                    && label(names::LABEL_SERVICE) == Some(&self.name)
            }
        }
    }

    /// The metadata of an object of this service.
    pub fn object(&self, name: String, labels: BTreeMap<String, String>) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: Some(self.namespace.clone()),
            labels: Some(labels),
            owner_references: Some(vec![self.reference()]),
            ..ObjectMeta::default()
        }
    }
}

fn controller(object: &ObjectMeta) -> Option<&OwnerReference> {
    object
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true))
}

/// The labels of everything that belongs to the service `name`.
pub fn labels(name: &str, component: &str) -> BTreeMap<String, String> {
    [
        (names::LABEL_APP_NAME, names::APP_NAME),
        (names::LABEL_APP_INSTANCE, name),
        (names::LABEL_MANAGED_BY, names::MANAGER),
        (names::LABEL_COMPONENT, component),
        (names::LABEL_SERVICE, name),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
}

/// A selector by labels alone.
pub fn selector(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector {
        match_labels: Some(labels),
        match_expressions: None,
    }
}

/// A pod of `service` without rights: no token, no root, files of the volume readable by the group.
pub fn pod(service: &ValidService, container: Container, volumes: Vec<Volume>) -> PodSpec {
    let secrets = service.engine.image_pull_secrets.iter();
    let secrets: Vec<LocalObjectReference> = secrets
        .map(|secret| LocalObjectReference {
            name: secret.name.clone(),
        })
        .collect();
    PodSpec {
        service_account_name: Some(super::companion::name(&service.name)),
        automount_service_account_token: Some(false),
        image_pull_secrets: (!secrets.is_empty()).then_some(secrets),
        enable_service_links: Some(false),
        containers: vec![container],
        volumes: Some(volumes),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            fs_group_change_policy: Some("OnRootMismatch".into()),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".into(),
                localhost_profile: None,
            }),
            ..PodSecurityContext::default()
        }),
        ..PodSpec::default()
    }
}

/// A container that can write nothing but what is mounted for writing.
pub fn container(name: &str, image: &str, args: Vec<String>) -> Container {
    Container {
        name: name.to_owned(),
        image: Some(image.to_owned()),
        // A tag is trusted to be what the node has; a digest in spec.engine.image makes it certain.
        image_pull_policy: Some("IfNotPresent".into()),
        args: Some(args),
        termination_message_path: Some(names::TERMINATION_MESSAGE_PATH.into()),
        termination_message_policy: Some("FallbackToLogsOnError".into()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            run_as_non_root: Some(true),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".into()]),
                add: None,
            }),
            ..SecurityContext::default()
        }),
        ..Container::default()
    }
}

/// CPU and memory as the API wants them.
pub fn resources(resources: Option<&Resources>) -> Option<ResourceRequirements> {
    resources.map(|resources| ResourceRequirements {
        requests: resources.requests.clone(),
        limits: resources.limits.clone(),
        claims: None,
    })
}

/// A port of a container.
pub fn port(name: &str, number: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: i32::from(number),
        protocol: Some("TCP".into()),
        ..ContainerPort::default()
    }
}

/// Whether a volume may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Mounted read-only.
    Read,
    /// Mounted for writing.
    Write,
}

/// A claim's volume. It is read-only at the mount, not at the claim: one pod may mount it for writing while others read.
pub fn claim(name: &str, claim: &str) -> Volume {
    Volume {
        name: name.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: None,
        }),
        ..Volume::default()
    }
}

/// One key of a ConfigMap as a file of the same name.
pub fn dataset(name: &str, source: &ConfigMapKey) -> Volume {
    let key = &source.key;
    Volume {
        name: name.to_owned(),
        config_map: Some(ConfigMapVolumeSource {
            name: source.name.clone(),
            items: Some(vec![KeyToPath {
                key: key.clone(),
                path: key.clone(),
                mode: None,
            }]),
            ..ConfigMapVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// Where a volume is seen.
pub fn mount(name: &str, path: &str, access: Access) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: (access == Access::Read).then_some(true),
        ..VolumeMount::default()
    }
}
