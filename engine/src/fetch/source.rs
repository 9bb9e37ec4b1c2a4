//! Where a model comes from: a URI becomes an object store, a folder in it and the credentials that sign.
//!
//! Credentials come from the environment alone, under the names that `names::fetch_environment` lists; what is not there is not asked of
//! an instance's metadata service, so a public bucket needs nothing and a pod never gets a node's rights.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use mixquant_crds::FailureReason;
use mixquant_crds::names::fetch_environment as env;
use object_store::aws::AmazonS3Builder;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use super::client::Connector;
use super::refusal;
use crate::{Error, Result};

/// Where a model is, as the command line says it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Address {
    /// `s3://`, `gs://`, `az://`, `https://` or `http://`.
    pub uri: String,
    /// Another server than the provider's own, such as a `MinIO` in the cluster.
    pub endpoint: Option<String>,
    /// Of an S3 bucket; `us-east-1` by default.
    pub region: Option<String>,
}

/// How often and how long a request is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Tries after the first.
    pub retries: usize,
    /// The pause before the second try; doubled at each.
    pub first_pause: Duration,
    /// A server may send nothing for so long.
    pub stall: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            retries: 8,
            first_pause: Duration::from_millis(200),
            stall: Duration::from_mins(1),
        }
    }
}

/// An opened source.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) store: Arc<dyn ObjectStore>,
    /// The folder.
    pub(super) folder: Path,
    /// The only file that is wanted, where the URI names one.
    pub(super) file: Option<String>,
    /// Whether the store can say what the folder holds; a web server cannot.
    pub(super) lists: bool,
    /// As the user wrote it.
    pub(super) uri: String,
    /// What it signs with, for messages; never the secret itself.
    pub(super) credentials: String,
    pub(super) patience: Patience,
}

impl Source {
    /// The error that a store's answer about `name` is.
    pub(super) fn failed(&self, name: &str, error: &object_store::Error) -> Error {
        refusal::explain(&self.shown(name), &self.credentials, error)
    }

    /// A file of it, for messages.
    pub(super) fn shown(&self, name: &str) -> String {
        if name.is_empty() || self.file.is_some() {
            return self.uri.clone();
        }
        format!("{}/{name}", self.uri.trim_end_matches('/'))
    }

    /// The object that a file is.
    pub(super) fn object(&self, name: &str) -> Path {
        self.folder.clone().join(name)
    }
}

/// A URI's parts.
#[derive(Debug, PartialEq, Eq)]
struct Parts {
    kind: Kind,
    /// Bucket, container or, of a web server, `https://host:port`.
    root: String,
    folder: Path,
    file: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    S3,
    Gcs,
    Azure,
    Web,
}

fn wrong(uri: &str, why: &str) -> Error {
    let shown: String = uri.chars().filter(|c| !c.is_control()).take(200).collect();
    Error::new(
        FailureReason::SourceRefused,
        format!(
            "`{shown}` {why}: write s3://bucket/folder, gs://bucket/folder, az://container/folder or https://host/folder"
        ),
    )
}

fn parts(uri: &str) -> Result<Parts> {
    let url = Url::parse(uri).map_err(|error| wrong(uri, &format!("is no URI ({error})")))?;
    if !url.username().is_empty() || url.password().is_some() {
        // Not shown: it may be a password.
        return Err(wrong(
            url.scheme(),
            "…: a URI must hold no credentials, they come from a Secret",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong(
            uri,
            "has a query or a fragment, which name no folder",
        ));
    }
    let host = url.host_str().filter(|host| !host.is_empty());
    let host = host.ok_or_else(|| wrong(uri, "names no bucket or host"))?;
    let (kind, root) = match url.scheme() {
        "s3" => (Kind::S3, host.to_owned()),
        "gs" => (Kind::Gcs, host.to_owned()),
        "az" => (Kind::Azure, host.to_owned()),
        "https" | "http" => (Kind::Web, url.origin().ascii_serialization()),
        _ => return Err(wrong(uri, "is of no kind that can be fetched")),
    };
    let whole = Path::from_url_path(url.path())
        .map_err(|error| wrong(uri, &format!("has a path that names no folder ({error})")))?;
    let last = whole.filename().unwrap_or_default().to_owned();
    let is_file = std::path::Path::new(&last)
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let folder = if is_file {
        let names: Vec<_> = whole.parts().collect();
        names[..names.len() - 1].iter().cloned().collect()
    } else {
        whole
    };
    Ok(Parts {
        kind,
        root,
        folder,
        file: is_file.then_some(last),
    })
}

/// Opens a source; `variable` looks into the environment.
///
/// # Errors
/// A URI of no known kind, and credentials that are incomplete.
pub(super) fn open(
    address: &Address,
    patience: Patience,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Source> {
    let parts = parts(&address.uri)?;
    let builder = Builder {
        parts: &parts,
        address,
        // Optional keys of a Secret that are not there are variables that are empty.
        variable: &|name| variable(name).filter(|value| !value.is_empty()),
        retry: RetryConfig {
            backoff: BackoffConfig {
                init_backoff: patience.first_pause,
                max_backoff: Duration::from_secs(10),
                base: 2.0,
            },
            max_retries: patience.retries,
            retry_timeout: Duration::from_secs(150),
        },
    };
    let built = match parts.kind {
        Kind::S3 => builder.s3(),
        Kind::Gcs => builder.gcs(),
        Kind::Azure => builder.azure(),
        Kind::Web => builder.web(),
    };
    let (store, credentials) = built.map_err(|error| match error {
        Built::Store(error) => refusal::explain(&address.uri, "", &error),
        Built::Ours(error) => error,
    })?;
    Ok(Source {
        store,
        folder: parts.folder,
        file: parts.file,
        lists: parts.kind != Kind::Web,
        uri: address.uri.clone(),
        credentials,
        patience,
    })
}

enum Built {
    Store(object_store::Error),
    Ours(Error),
}

impl From<object_store::Error> for Built {
    fn from(error: object_store::Error) -> Self {
        Self::Store(error)
    }
}

type Opened = std::result::Result<(Arc<dyn ObjectStore>, String), Built>;

struct Builder<'a> {
    parts: &'a Parts,
    address: &'a Address,
    variable: &'a dyn Fn(&str) -> Option<String>,
    retry: RetryConfig,
}

impl Builder<'_> {
    fn connector(&self) -> Connector {
        let server = self.address.endpoint.as_ref().unwrap_or(&self.address.uri);
        Connector {
            plain_text: server.starts_with("http://"),
            ..Connector::default()
        }
    }

    /// Whether plain HTTP is allowed is the connector's to say.
    fn options() -> ClientOptions {
        ClientOptions::new().with_allow_http(true)
    }

    fn incomplete(&self, name: &str, other: &str) -> Built {
        Built::Ours(Error::new(
            FailureReason::SourceRefused,
            format!(
                "{}: {name} is given without {other}: the Secret needs both keys",
                self.address.uri
            ),
        ))
    }

    fn s3(&self) -> Opened {
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&self.parts.root)
            .with_region(self.address.region.as_deref().unwrap_or("us-east-1"))
            .with_client_options(Self::options())
            .with_http_connector(self.connector())
            .with_retry(self.retry.clone());
        if let Some(endpoint) = &self.address.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let key = (self.variable)(env::AWS_ACCESS_KEY_ID);
        let secret = (self.variable)(env::AWS_SECRET_ACCESS_KEY);
        let credentials = match (key, secret) {
            (Some(key), Some(secret)) => {
                builder = builder
                    .with_access_key_id(&key)
                    .with_secret_access_key(secret);
                if let Some(token) = (self.variable)(env::AWS_SESSION_TOKEN) {
                    builder = builder.with_token(token);
                }
                format!("with {} {key}", env::AWS_ACCESS_KEY_ID)
            }
            (None, None) => {
                builder = builder.with_skip_signature(true);
                none_given(&[env::AWS_ACCESS_KEY_ID, env::AWS_SECRET_ACCESS_KEY])
            }
            (Some(_), None) => {
                return Err(self.incomplete(env::AWS_ACCESS_KEY_ID, env::AWS_SECRET_ACCESS_KEY));
            }
            (None, Some(_)) => {
                return Err(self.incomplete(env::AWS_SECRET_ACCESS_KEY, env::AWS_ACCESS_KEY_ID));
            }
        };
        Ok((Arc::new(builder.build()?), credentials))
    }

    fn gcs(&self) -> Opened {
        let mut builder = GoogleCloudStorageBuilder::new()
            .with_bucket_name(&self.parts.root)
            .with_client_options(Self::options())
            .with_http_connector(self.connector())
            .with_retry(self.retry.clone());
        if let Some(endpoint) = &self.address.endpoint {
            builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint);
        }
        let credentials = if let Some(key) = (self.variable)(env::GOOGLE_SERVICE_ACCOUNT_KEY) {
            builder = builder.with_service_account_key(key);
            format!("with {}", env::GOOGLE_SERVICE_ACCOUNT_KEY)
        } else {
            builder = builder.with_skip_signature(true);
            none_given(&[env::GOOGLE_SERVICE_ACCOUNT_KEY])
        };
        Ok((Arc::new(builder.build()?), credentials))
    }

    fn azure(&self) -> Opened {
        let account = (self.variable)(env::AZURE_STORAGE_ACCOUNT_NAME)
            .ok_or_else(|| self.incomplete("az://", env::AZURE_STORAGE_ACCOUNT_NAME))?;
        let mut builder = MicrosoftAzureBuilder::new()
            .with_container_name(&self.parts.root)
            .with_account(&account)
            .with_client_options(Self::options())
            .with_http_connector(self.connector())
            .with_retry(self.retry.clone());
        if let Some(endpoint) = &self.address.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let key = (self.variable)(env::AZURE_STORAGE_ACCOUNT_KEY);
        let sas = (self.variable)(env::AZURE_STORAGE_SAS_TOKEN);
        let credentials = if let Some(key) = key {
            builder = builder.with_access_key(key);
            format!(
                "with {} of account {account}",
                env::AZURE_STORAGE_ACCOUNT_KEY
            )
        } else if let Some(sas) = sas {
            builder = builder.with_config(AzureConfigKey::SasKey, sas);
            format!("with {} of account {account}", env::AZURE_STORAGE_SAS_TOKEN)
        } else {
            builder = builder.with_skip_signature(true);
            none_given(&[env::AZURE_STORAGE_ACCOUNT_KEY, env::AZURE_STORAGE_SAS_TOKEN])
        };
        Ok((Arc::new(builder.build()?), credentials))
    }

    fn web(&self) -> Opened {
        let token = (self.variable)(env::BEARER_TOKEN);
        let authorization = token
            .as_ref()
            .map(|token| HeaderValue::from_str(&format!("Bearer {}", token.trim())))
            .transpose()
            .map_err(|_| {
                Built::Ours(Error::new(
                    FailureReason::SourceRefused,
                    format!(
                        "{} holds characters that no header may have",
                        env::BEARER_TOKEN
                    ),
                ))
            })?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        let credentials = if authorization.is_some() {
            format!("with {}", env::BEARER_TOKEN)
        } else {
            none_given(&[env::BEARER_TOKEN])
        };
        let connector = Connector {
            redirects: true,
            authorization,
            ..self.connector()
        };
        let store = HttpBuilder::new()
            .with_url(&self.parts.root)
            .with_client_options(Self::options())
            .with_http_connector(connector)
            .with_retry(self.retry.clone())
            .build()?;
        Ok((Arc::new(store), credentials))
    }
}

fn none_given(names: &[&str]) -> String {
    format!(
        "no credentials are given: the Secret would have {}",
        names.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_uri_names_its_bucket_and_its_folder() {
        let of = |uri: &str| {
            let parts = parts(uri).unwrap();
            (parts.kind, parts.root, parts.folder.to_string(), parts.file)
        };
        let named =
            |kind, root: &str, folder: &str| (kind, root.to_owned(), folder.to_owned(), None);
        assert_eq!(of("s3://models/a/b/"), named(Kind::S3, "models", "a/b"));
        assert_eq!(of("s3://models"), named(Kind::S3, "models", ""));
        assert_eq!(of("gs://m_1/a"), named(Kind::Gcs, "m_1", "a"));
        assert_eq!(of("az://m/a%20b"), named(Kind::Azure, "m", "a b"));
        assert_eq!(
            of("https://hub.example:8443/org/model/resolve/main"),
            named(
                Kind::Web,
                "https://hub.example:8443",
                "org/model/resolve/main"
            )
        );
        let (_, _, folder, file) = of("s3://models/a/model-Q4.GGUF");
        assert_eq!(
            (folder.as_str(), file.as_deref()),
            ("a", Some("model-Q4.GGUF"))
        );
    }

    #[test]
    fn what_names_no_folder_is_refused_and_a_password_is_not_repeated() {
        for uri in [
            "",
            "models",
            "/models/a",
            "ftp://h/a",
            "file:///etc",
            "s3:///a",
            "https://h/a?x=1",
            "https://h/a#b",
        ] {
            let error = parts(uri).unwrap_err();
            assert_eq!(error.reason, FailureReason::SourceRefused, "{uri}");
            assert!(error.message.contains("write s3://"), "{error}");
        }
        let error = parts("https://user:hunter2@h/a").unwrap_err();
        assert!(!error.message.contains("hunter2"), "{error}");
        assert!(
            parts("s3://models/a/../../b")
                .unwrap()
                .folder
                .parts()
                .all(|part| part.as_ref() != "..")
        );
    }

    #[test]
    fn half_of_a_credential_is_refused_and_none_is_a_public_bucket() {
        let open = |uri: &str, given: &[&str]| {
            let address = Address {
                uri: uri.into(),
                ..Address::default()
            };
            open(&address, Patience::default(), &|name| {
                given.contains(&name).then(|| "value".to_owned())
            })
        };
        let public = open("s3://b/m", &[]).unwrap();
        assert!(public.credentials.contains("no credentials are given"));
        let error = open("s3://b/m", &[env::AWS_ACCESS_KEY_ID]).unwrap_err();
        assert!(
            error.message.contains(env::AWS_SECRET_ACCESS_KEY),
            "{error}"
        );
        let error = open("az://c/m", &[]).unwrap_err();
        assert!(
            error.message.contains(env::AZURE_STORAGE_ACCOUNT_NAME),
            "{error}"
        );
        let signed = open(
            "s3://b/m",
            &[env::AWS_ACCESS_KEY_ID, env::AWS_SECRET_ACCESS_KEY],
        )
        .unwrap();
        assert!(!format!("{:?}", signed.credentials).contains("SECRET"));
    }
}
