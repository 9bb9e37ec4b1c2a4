//! What a gateway splits the traffic by: the Services of the tracks, the service's own route, and the one write to an object of a user,
//! weights of a route that the operator does not own. Part of the writer.
//!
//! That one is a JSON patch that first tests everything it rests on: an edit in between makes it fail, and the pass starts over from what is there.

use kube::Api;
use kube::api::{Patch, PatchParams};
use mixquant_crds::names;
use serde_json::{Value, json};

use super::{Existing, Target, Writer, call};
use crate::action::{RoutePatch, TrackRequest};
use crate::build::meta::Owner;
use crate::build::route::{HTTPRoute, route};
use crate::build::service::{self, track_name};
use crate::canary::Share;
use crate::error::Error;
use crate::observed::Track;
use crate::read::{self, DEADLINE};
use crate::validate::Routing;

/// The operations: the route is the one that was seen, as it was seen; the backends are ours; their weights.
fn operations(service: &str, patch: &RoutePatch) -> Vec<Value> {
    let mut operations = vec![
        json!({"op": "test", "path": "/metadata/uid", "value": patch.uid}),
        json!({"op": "test", "path": "/metadata/resourceVersion", "value": patch.resource_version}),
    ];
    for split in &patch.splits {
        let backends = [
            (Track::Stable, split.stable, 100 - patch.weight),
            (Track::Canary, split.canary, patch.weight),
        ];
        for (track, backend, weight) in backends {
            let path = format!("/spec/rules/{}/backendRefs/{}", split.rule, backend.place);
            let name = track_name(service, track);
            operations.push(json!({"op": "test", "path": format!("{path}/name"), "value": name}));
            operations
                .push(json!({"op": "add", "path": format!("{path}/weight"), "value": weight}));
        }
    }
    operations
}

impl Writer {
    /// Turns a track's Service to the pods of a revision.
    pub(super) async fn apply_track(
        &self,
        owner: &Owner,
        request: &TrackRequest,
    ) -> Result<(), Error> {
        let selector = service::selector(&owner.name, Some(&request.revision));
        let name = track_name(&owner.name, request.track);
        let object = service::service(owner, name, selector);
        self.ensure(owner, object, Existing::Repair).await
    }

    /// Makes the service's own route give the canary `share`.
    pub(super) async fn apply_route(&self, target: &Target, share: Share) -> Result<(), Error> {
        let valid = target.valid.as_ref().ok_or(Error::InvalidSpec)?;
        let Routing::Own(own) = &valid.traffic else {
            return Err(Error::InvalidSpec);
        };
        let object = route(&target.owner, own, share);
        self.ensure(&target.owner, object, Existing::Repair).await
    }

    /// Changes the weights of a user's route and nothing else of it.
    pub(super) async fn patch_route(&self, owner: &Owner, patch: &RoutePatch) -> Result<(), Error> {
        let api: Api<HTTPRoute> = Api::namespaced(self.client.clone(), &owner.namespace);
        let operations = serde_json::from_value(Value::Array(operations(&owner.name, patch)));
        let operations = operations.expect("operations are as RFC 6902 has them");
        let parameters = PatchParams {
            field_manager: Some(names::MANAGER.into()),
            ..PatchParams::default()
        };
        let patched = Patch::Json::<()>(operations);
        let call = call("patch", "HTTPRoute", &patch.name);
        let patched = api.patch(&patch.name, &parameters, &patched);
        match self.write(call, patched).await {
            // The API does not say that a test failed; that the route is another one does.
            Err(Error::Refused {
                call,
                code: 422,
                message,
            }) => {
                let now = read::get(&api, &patch.name, DEADLINE).await?;
                let same = now.and_then(|now| now.metadata.resource_version)
                    == Some(patch.resource_version.clone());
                let code = if same { 422 } else { 409 };
                Err(Error::Refused {
                    call,
                    code,
                    message,
                })
            }
            done => done.map(drop),
        }
    }
}
