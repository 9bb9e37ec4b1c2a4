//! The only writer of `kubectl-mixquant`: asks the server about a manifest (dry-run: nothing is stored).

#![expect(
    clippy::disallowed_methods,
    reason = "this file is the one writer of kubectl-mixquant; apply.rs is the operator's"
)]

use kube::Api;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, ValidationDirective};
use mixquant_crds::MixQuantService;
use serde_json::Value;

use super::connect::Connection;
use crate::error::{Call, Error};
use crate::read::{DEADLINE, within};

/// The field manager of what this program writes.
pub const MANAGER: &str = "kubectl-mixquant";

/// What became of a question to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The manifest is wrong, in the server's words.
    Wrong(String),
    /// The server could not be asked, and why.
    Unasked(String),
}

/// Asks the server whether it would take the service that `object` is. Stores nothing.
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
    let parameters = PatchParams {
        dry_run: true,
        force: true,
        field_manager: Some(MANAGER.into()),
        field_validation: Some(ValidationDirective::Strict),
    };
    let call = Call {
        verb: "dry-run",
        kind: "MixQuantService".into(),
        name: name.to_owned(),
    };
    let patch = Patch::Apply(object);
    match within(call, DEADLINE, api.patch(name, &parameters, &patch)).await {
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
