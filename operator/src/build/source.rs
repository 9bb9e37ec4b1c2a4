//! How a pod gets the model: from a claim or an image as a volume, or by an init container that downloads it. Called by both kinds of pods.
//!
//! The engine's own container never gets credentials and mounts the model read-only.

use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, EnvVar, EnvVarSource, ImageVolumeSource, PodSpec,
    ResourceRequirements, SecretKeySelector, Volume, VolumeMount,
};
use mixquant_crds::names::fetch_environment as env;
use mixquant_crds::{Digest, names};

use super::meta::{self, Access};
use crate::validate::{Cache, Source, ValidService};

/// The init container's name.
pub const FETCH: &str = "fetch";
const VOLUME: &str = "models";

/// The model's folder, as containers see it.
pub fn path(service: &ValidService) -> String {
    let below = match &service.model.source {
        Source::Claim { path, .. } => Some(path),
        Source::Store { folder, .. } => Some(folder),
        Source::Image { path, .. } => path.as_ref(),
    };
    match below {
        Some(below) => format!("{}/{below}", names::MOUNT_MODELS),
        None => names::MOUNT_MODELS.to_owned(),
    }
}

/// Whether pods of this service download the model, and so need a way out.
pub fn is_fetched(service: &ValidService) -> bool {
    matches!(service.model.source, Source::Store { .. })
}

/// The TCP port that the download's server listens on; `None` where nothing is downloaded.
pub fn server_port(service: &ValidService) -> Option<u16> {
    let Source::Store { uri, endpoint, .. } = &service.model.source else {
        return None;
    };
    let server = endpoint.as_ref().unwrap_or(uri);
    let (scheme, rest) = server.split_once("://")?;
    let authority = rest.split('/').next().unwrap_or_default();
    let named = match authority.rsplit_once(':') {
        Some((_, port)) if scheme.starts_with("http") => port.parse().ok(),
        _ => None,
    };
    Some(named.unwrap_or(if scheme == "http" { 80 } else { 443 }))
}

/// The volume that the model lies on.
pub fn volume(service: &ValidService) -> Volume {
    let claim = |claim: &str| meta::claim(VOLUME, claim);
    match &service.model.source {
        Source::Claim { claim: name, .. } => claim(name),
        Source::Store { cache, .. } => match cache {
            Cache::Claim { claim: name } => claim(name),
            Cache::Pod { size_limit } => Volume {
                name: VOLUME.to_owned(),
                empty_dir: Some(EmptyDirVolumeSource {
                    medium: None,
                    size_limit: size_limit.clone(),
                }),
                ..Volume::default()
            },
        },
        Source::Image { reference, .. } => Volume {
            name: VOLUME.to_owned(),
            image: Some(ImageVolumeSource {
                reference: Some(reference.clone()),
                pull_policy: Some("IfNotPresent".into()),
            }),
            ..Volume::default()
        },
    }
}

/// Where the engine's container finds it.
pub fn mount() -> VolumeMount {
    meta::mount(VOLUME, names::MOUNT_MODELS, Access::Read)
}

/// Puts the init container into a pod, where the source needs one. `expected` is the only digest that it takes; a Job's `answers` to the
/// operator when it fails.
pub fn fetch_first(
    pod: &mut PodSpec,
    service: &ValidService,
    expected: Option<&Digest>,
    answers: bool,
) {
    let Source::Store {
        uri,
        endpoint,
        region,
        secret,
        ..
    } = &service.model.source
    else {
        return;
    };
    let mut args = vec![
        "fetch".to_owned(),
        format!("--source={uri}"),
        format!("--to={}", path(service)),
    ];
    let given = [
        ("endpoint", endpoint.clone()),
        ("region", region.clone()),
        ("digest", expected.map(ToString::to_string)),
        (
            "termination-message",
            answers.then(|| names::TERMINATION_MESSAGE_PATH.to_owned()),
        ),
    ];
    args.extend(
        given
            .into_iter()
            .filter_map(|(name, value)| Some(format!("--{name}={}", value?))),
    );
    let mut container = meta::container(FETCH, &service.engine.image, args);
    container.env = secret.as_ref().map(|secret| credentials(uri, secret));
    // The same as what runs after it: a pod asks for the larger of the two, so this asks for nothing more.
    container.resources = resources_of(&pod.containers);
    container.volume_mounts = Some(vec![meta::mount(
        VOLUME,
        names::MOUNT_MODELS,
        Access::Write,
    )]);
    pod.init_containers = Some(vec![container]);
}

fn resources_of(containers: &[Container]) -> Option<ResourceRequirements> {
    let mut resources = containers.first()?.resources.clone()?;
    let only_basic = |amounts: &mut Option<std::collections::BTreeMap<String, _>>| {
        if let Some(amounts) = amounts {
            amounts.retain(|name, _| !name.contains('/'));
        }
    };
    // A download needs no device.
    only_basic(&mut resources.requests);
    only_basic(&mut resources.limits);
    Some(resources)
}

/// The keys of the Secret that the source's kind knows, as variables. A key that must be there keeps the pod from starting, with its name.
fn credentials(uri: &str, secret: &str) -> Vec<EnvVar> {
    let scheme = uri.split("://").next().unwrap_or_default();
    let keys: &[(&str, bool)] = match scheme {
        "s3" => &[
            (env::AWS_ACCESS_KEY_ID, true),
            (env::AWS_SECRET_ACCESS_KEY, true),
            (env::AWS_SESSION_TOKEN, false),
        ],
        "gs" => &[(env::GOOGLE_SERVICE_ACCOUNT_KEY, true)],
        "az" => &[
            (env::AZURE_STORAGE_ACCOUNT_NAME, true),
            (env::AZURE_STORAGE_ACCOUNT_KEY, false),
            (env::AZURE_STORAGE_SAS_TOKEN, false),
        ],
        _ => &[(env::BEARER_TOKEN, true)],
    };
    let variable = |(key, required): &(&str, bool)| EnvVar {
        name: (*key).to_owned(),
        value: None,
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: secret.to_owned(),
                key: (*key).to_owned(),
                optional: (!required).then_some(true),
            }),
            ..EnvVarSource::default()
        }),
    };
    keys.iter().map(variable).collect()
}
