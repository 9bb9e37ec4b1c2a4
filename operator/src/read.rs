//! Reads from the API, each with a deadline and an error that names the object. Never from a cache: a plan made from a stale view could undo a newer one.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client};
use mixquant_crds::MixQuantService;
use serde::de::DeserializeOwned;

use crate::capacity::Cluster;
use crate::error::{Call, Error};

/// No call may take longer.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Waits for one call at most `deadline`.
pub async fn within<T>(
    call: Call,
    deadline: Duration,
    future: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    match tokio::time::timeout(deadline, future).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Error::of(call, error)),
        Err(_) => Err(Error::Timeout { call, deadline }),
    }
}

/// The object `name`; `None` when there is none.
pub async fn get<K>(api: &Api<K>, name: &str, deadline: Duration) -> Result<Option<K>, Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let call = Call {
        verb: "get",
        kind: K::kind(&()).into_owned(),
        name: name.to_owned(),
    };
    within(call, deadline, api.get_opt(name)).await
}

/// The services of a namespace, as they are stored.
pub fn services(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let resource = ApiResource::erase::<MixQuantService>(&());
    Api::namespaced_with(client.clone(), namespace, &resource)
}

/// The service as it is stored, whether or not it fits the schema of this version; `None` when it is gone.
pub async fn service(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<Option<DynamicObject>, Error> {
    let api = services(client, namespace);
    within(
        Call {
            verb: "get",
            kind: "MixQuantService".into(),
            name: name.to_owned(),
        },
        DEADLINE,
        api.get_opt(name),
    )
    .await
}

/// All objects with these labels.
pub async fn list<K>(api: &Api<K>, selector: &str) -> Result<Vec<K>, Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let call = Call {
        verb: "list",
        kind: K::kind(&()).into_owned(),
        name: selector.to_owned(),
    };
    let parameters = ListParams::default().labels(selector);
    let list = within(call, DEADLINE, api.list(&parameters)).await?;
    Ok(list.items)
}

/// Objects of one answer: pods of a whole cluster are never in memory at once.
const PAGE: u32 = 200;
/// Pages at most; a list that goes on is no list.
const MAX_PAGES: usize = 5000;

/// Calls `each` for every object of a list.
async fn every<K>(api: &Api<K>, fields: &str, mut each: impl FnMut(&K)) -> Result<(), Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let mut parameters = ListParams::default().fields(fields).limit(PAGE);
    for _ in 0..MAX_PAGES {
        let call = Call {
            verb: "list",
            kind: K::kind(&()).into_owned(),
            name: String::new(),
        };
        let page = within(call, DEADLINE, api.list(&parameters)).await?;
        page.items.iter().for_each(&mut each);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => break,
        }
    }
    Ok(())
}

/// Nodes, what is on them, and the quotas of a namespace.
pub async fn cluster(client: &Client, namespace: &str) -> Result<Cluster, Error> {
    let mut cluster = Cluster::default();
    let nodes = Api::<Node>::all(client.clone());
    every(&nodes, "", |node| cluster.add_node(node)).await?;
    let pods = Api::<Pod>::all(client.clone());
    let alive = "status.phase!=Succeeded,status.phase!=Failed";
    every(&pods, alive, |pod| cluster.add_pod(pod)).await?;
    let quotas = Api::<ResourceQuota>::namespaced(client.clone(), namespace);
    every(&quotas, "", |quota| cluster.add_quota(quota)).await?;
    Ok(cluster)
}
