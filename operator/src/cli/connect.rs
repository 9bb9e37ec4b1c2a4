//! From kubectl's flags to a client. Looks at kubeconfigs as kubectl does and asks nothing of the cluster yet.

use anyhow::Context as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use super::arguments::Global;

/// A cluster and the namespace that is meant.
pub struct Connection {
    /// Speaks to it.
    pub client: Client,
    /// `--namespace`, or the context's.
    pub namespace: String,
    /// Where it is, for errors.
    pub server: String,
}

/// The cluster that the flags name.
///
/// # Errors
/// When there is none: the message says which flag or file to look at.
pub async fn connect(global: &Global) -> anyhow::Result<Connection> {
    let options = KubeConfigOptions {
        context: global.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &global.kubeconfig {
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file)
                .with_context(|| format!("--kubeconfig {}", file.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await?
        }
        None if global.context.is_some() => Config::from_kubeconfig(&options)
            .await
            .context("--context: `kubectl config get-contexts` lists what there is")?,
        None => Config::infer()
            .await
            .context("no cluster: set KUBECONFIG or --kubeconfig")?,
    };
    let namespace = global.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
    let server = config.cluster_url.to_string();
    let client = Client::try_from(config).context("cannot make a client for the cluster")?;
    Ok(Connection {
        client,
        namespace,
        server,
    })
}
