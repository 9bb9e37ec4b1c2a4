//! `spec.model.source` as one of the kinds that it can be.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mixquant_crds::Digest;
use mixquant_crds::service::{ModelSource, ModelSpec, ObjectStore};
use serde::Serialize;

use super::Problems;

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// On a volume.
    Claim {
        /// The claim.
        claim: String,
        /// The folder on it.
        path: String,
    },
    /// In an object store, brought by an init container.
    Store {
        /// The folder, or a GGUF file.
        uri: String,
        /// Another server than the provider's.
        endpoint: Option<String>,
        /// Of an S3 bucket.
        region: Option<String>,
        /// The Secret with credentials.
        secret: Option<String>,
        /// Where pods keep it.
        cache: Cache,
        /// The folder's name there: of the same name, the same model.
        folder: String,
    },
    /// In an OCI image.
    Image {
        /// The image.
        reference: String,
        /// The folder in it.
        path: Option<String>,
    },
}

/// Where a download is kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Cache {
    /// In each pod.
    Pod {
        /// At most so much.
        size_limit: Option<Quantity>,
    },
    /// On a claim that pods share.
    Claim {
        /// Its name.
        claim: String,
    },
}

/// The source that a spec names.
pub(super) fn source(model: &ModelSpec, problems: &mut Problems) -> Source {
    let ModelSource {
        persistent_volume_claim,
        object_store,
        image,
    } = &model.source;
    match (persistent_volume_claim, object_store, image) {
        (Some(claim), None, None) => Source::Claim {
            claim: claim.claim_name.clone(),
            path: claim.path.clone(),
        },
        (None, Some(store), None) => stored(store, model.digest.as_ref(), problems),
        (None, None, Some(image)) => Source::Image {
            reference: image.reference.clone(),
            path: image.path.clone(),
        },
        _ => {
            problems.0.push(
                "model.source must have exactly one of persistentVolumeClaim, objectStore and image"
                    .into(),
            );
            Source::Claim {
                claim: String::new(),
                path: String::new(),
            }
        }
    }
}

fn stored(store: &ObjectStore, digest: Option<&Digest>, problems: &mut Problems) -> Source {
    let claim = store
        .cache
        .as_ref()
        .and_then(|cache| cache.persistent_volume_claim.as_ref());
    problems.require(
        digest.is_some() || claim.is_none() && !store.uri.starts_with("http://"),
        "model.digest is missing: it belongs to objectStore.cache.persistentVolumeClaim and to http://",
    );
    let cache = match claim {
        Some(claim) => Cache::Claim {
            claim: claim.claim_name.clone(),
        },
        None => Cache::Pod {
            size_limit: store
                .cache
                .as_ref()
                .and_then(|cache| cache.empty_dir.as_ref())
                .map(|folder| folder.size_limit.clone()),
        },
    };
    let named = (&store.uri, &store.endpoint, &store.region, digest);
    Source::Store {
        uri: store.uri.clone(),
        endpoint: store.endpoint.clone(),
        region: store.region.clone(),
        secret: store.secret_ref.as_ref().map(|secret| secret.name.clone()),
        cache,
        folder: Digest::of_json(&named)
            .expect("texts are JSON")
            .short()
            .to_owned(),
    }
}
