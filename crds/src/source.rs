//! Where a model's files are: `spec.model.source`, with the rules that `kubectl apply` enforces.
//!
//! `service` includes it. Secrets are named here and never read by the operator.

#![expect(
    unreachable_pub,
    reason = "KubeSchema repeats each struct inside a private scope"
)]

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Where a model's files are: exactly one of these.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("(has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.objectStore) ? 1 : 0) + (has(self.image) ? 1 : 0) == 1").message("model.source must have exactly one of persistentVolumeClaim, objectStore and image")
)]
pub struct ModelSource {
    /// A folder in Hugging Face layout on a volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<ClaimPath>,
    /// A folder in Hugging Face layout, or a GGUF file, that an init container downloads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_store: Option<ObjectStore>,
    /// A folder in Hugging Face layout in an OCI image, mounted as a volume: needs the feature `ImageVolume` (Kubernetes 1.33 and 1.34 by its gate) and a runtime that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ModelImage>,
}

impl ModelSource {
    /// The claim that pods mount for the model: the source itself, or the cache of a download.
    pub fn claim_name(&self) -> Option<&str> {
        let cache = || {
            let cache = self.object_store.as_ref()?.cache.as_ref()?;
            Some(cache.persistent_volume_claim.as_ref()?.claim_name.as_str())
        };
        match &self.persistent_volume_claim {
            Some(claim) => Some(&claim.claim_name),
            None => cache(),
        }
    }
}

/// A folder on a claim.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClaimPath {
    /// A PersistentVolumeClaim in the service's namespace.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub claim_name: String,
    /// The folder on it, relative to its root.
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(
        validation = Rule::new("!self.startsWith('/')").message("path is absolute: write it relative to the volume's root"),
        validation = Rule::new("!self.split('/').exists(part, part == '..' || part == '.' || part == '')").message("path must be plain folder names: no `..`, `.` or empty parts"),
        validation = Rule::new("self.matches('^[A-Za-z0-9._/-]+$')").message("path may hold only letters, digits, `.`, `_`, `-` and `/`")
    )]
    pub path: String,
}

/// A claim.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClaimRef {
    /// A PersistentVolumeClaim in the service's namespace.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub claim_name: String,
}

/// An object store or a web server.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("!has(self.endpoint) || !self.uri.startsWith('http')").message("objectStore.endpoint belongs to s3://, gs:// and az://: an https:// URI names its server itself"),
    validation = Rule::new("!has(self.region) || self.uri.startsWith('s3://')").message("objectStore.region belongs to s3://: leave it out"),
    validation = Rule::new("!self.uri.startsWith('az://') || has(self.secretRef)").message("objectStore.secretRef is missing: az:// needs a Secret with AZURE_STORAGE_ACCOUNT_NAME, also for a public container")
)]
pub struct ObjectStore {
    /// The folder, or a GGUF file: `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder`, `https://host/folder` or `http://host/folder`.
    #[schemars(length(min = 6, max = 1024))]
    #[x_kube(
        validation = Rule::new("self.matches('^(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._~%=+@,-]+)*/?$') || self.matches('^https?://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[A-Za-z0-9._~%=+@,:-]+)+/?$')").message("objectStore.uri must be s3://bucket/folder, gs://bucket/folder, az://container/folder or https://host/folder, without credentials, query or fragment"),
        validation = Rule::new("!self.split('/').exists(part, part == '..' || part == '.')").message("objectStore.uri must have plain folder names: no `..` and no `.`")
    )]
    pub uri: String,
    /// Another server than the provider's own, such as `http://minio.storage:9000`.
    #[schemars(length(max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^https?://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/?$')").message("objectStore.endpoint must be http:// or https://, a host and perhaps a port"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The region of an S3 bucket; us-east-1 by default.
    #[schemars(length(max = 64), regex(pattern = r"^[a-z0-9-]+$"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Credentials, for the init container alone. Keys: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` (and `AWS_SESSION_TOKEN`); `GOOGLE_SERVICE_ACCOUNT_KEY`; `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY` or `AZURE_STORAGE_SAS_TOKEN`; `BEARER_TOKEN`. Without it requests are not signed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
    /// Where pods keep the download; by default in an `emptyDir` of each pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<ModelCache>,
}

/// A Secret in the service's namespace.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretRef {
    /// Its name.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub name: String,
}

/// Where a download is kept: exactly one of these.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("has(self.emptyDir) != has(self.persistentVolumeClaim)").message("objectStore.cache must have exactly one of emptyDir and persistentVolumeClaim")
)]
pub struct ModelCache {
    /// A folder of each pod, gone with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<EmptyDirCache>,
    /// A claim that pods share, so that a model is downloaded once: ReadWriteMany, or ReadWriteOnce on one node. Needs `model.digest`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<ClaimRef>,
}

/// A folder of a pod.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EmptyDirCache {
    /// A pod that fills more is evicted; the whole model must fit.
    pub size_limit: Quantity,
}

/// A model in an OCI image.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelImage {
    /// The image. `engine.imagePullSecrets` are used for it too.
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$')").message("image.reference is not an image reference: write registry/name:tag or registry/name@sha256:…"))]
    pub reference: String,
    /// The folder in it; its root by default.
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(
        validation = Rule::new("!self.startsWith('/')").message("path is absolute: write it relative to the image's root"),
        validation = Rule::new("!self.split('/').exists(part, part == '..' || part == '.' || part == '')").message("path must be plain folder names: no `..`, `.` or empty parts"),
        validation = Rule::new("self.matches('^[A-Za-z0-9._/-]+$')").message("path may hold only letters, digits, `.`, `_`, `-` and `/`")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}
