//! The only writer of `kubectl-mixquant`: says what a person orders, and asks the server about a manifest (nothing is stored by that).

#![expect(
    clippy::disallowed_methods,
    reason = "this file is the one writer of kubectl-mixquant; apply.rs is the operator's"
)]

use kube::Api;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams, ValidationDirective};
use mixquant_crds::MixQuantService;
use serde_json::Value;

use super::connect::Connection;
use super::facts;
use super::intent::Saying;
use crate::error::{Call, Error};
use crate::read::{DEADLINE, within};

/// The field manager of what this program writes.
pub const MANAGER: &str = "kubectl-mixquant";

/// Says it: one merge patch of the service. Returns the service as it is then.
///
/// # Errors
/// When the server refuses; the message says what to try.
pub async fn say(
    connection: &Connection,
    name: &str,
    saying: &Saying,
) -> anyhow::Result<MixQuantService> {
    let api: Api<MixQuantService> =
        Api::namespaced(connection.client.clone(), &connection.namespace);
    let parameters = PatchParams {
        field_manager: Some(MANAGER.into()),
        ..PatchParams::default()
    };
    let call = Call {
        verb: "patch",
        kind: "MixQuantService".into(),
        name: name.to_owned(),
    };
    let patch = Patch::Merge(&saying.patch);
    let said = within(call, DEADLINE, api.patch(name, &parameters, &patch)).await;
    said.map_err(|error| facts::told(connection, error))
}

/// What became of a question to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The manifest is wrong, in the server's words.
    Wrong(String),
    /// The server could not be asked, and why.
    Unasked(String),
}

/// Asks the server whether it would take the service that `object` is, as a new one or in the place of the one that is there. Stores
/// nothing.
///
/// # Errors
/// Why not.
pub async fn dry_run(connection: &Connection, object: &Value) -> Result<(), Refusal> {
    let namespace = object["metadata"]["namespace"].as_str();
    let namespace = namespace.unwrap_or(&connection.namespace);
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let resource = ApiResource::erase::<MixQuantService>(&());
    let api: Api<DynamicObject> =
        Api::namespaced_with(connection.client.clone(), namespace, &resource);
    let call = || Call {
        verb: "dry-run",
        kind: "MixQuantService".into(),
        name: name.to_owned(),
    };
    let new: DynamicObject = serde_json::from_value(object.clone())
        .map_err(|error| Refusal::Wrong(error.to_string()))?;
    let creating = PostParams {
        dry_run: true,
        field_manager: Some(MANAGER.into()),
    };
    let mut asked = within(call(), DEADLINE, api.create(&creating, &new)).await;
    if matches!(asked, Err(Error::Refused { code: 409, .. })) {
        let changing = PatchParams {
            dry_run: true,
            field_manager: Some(MANAGER.into()),
            field_validation: Some(ValidationDirective::Strict),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(object);
        asked = within(call(), DEADLINE, api.patch(name, &changing, &patch)).await;
    }
    match asked {
        Ok(_) => Ok(()),
        Err(Error::Refused {
            code: 400 | 422,
            message,
            ..
        }) => Err(Refusal::Wrong(message)),
        Err(Error::Refused { code: 404, .. }) => Err(Refusal::Unasked(format!(
            "the cluster at {} has no MixQuantService or no namespace `{namespace}`",
            connection.server
        ))),
        Err(error) => Err(Refusal::Unasked(error.to_string())),
    }
}
