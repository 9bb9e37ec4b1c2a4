//! Reads from the API, each with a deadline and an error that names the object. Never from a cache: a plan made from a stale view could undo a newer one.

use std::fmt::Debug;
use std::time::Duration;

use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;

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
