//! `mixquant-operator plan`: what the operator would do in a world from a file. Pure; nothing is read from or written to a cluster.

use jiff::Timestamp;
use serde::Deserialize;

use crate::action::Plan;
use crate::build::deployment;
use crate::observed::Observed;
use crate::plan::{plan, plan_invalid};
use crate::samples::Samples;
use crate::validate::validate;

/// A moment of one service.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct World {
    /// The service and what surrounds it.
    pub observed: Observed,
    /// What its pods measured; nothing without it.
    #[serde(default)]
    pub samples: Samples,
    /// The time.
    pub now: Timestamp,
}

impl World {
    /// Reads YAML or JSON.
    ///
    /// # Errors
    /// What is no world in it.
    pub fn read(text: &str) -> Result<Self, String> {
        // Through JSON's data model: YAML's own has tags for enums, which nobody would write by hand.
        let value: serde_json::Value =
            serde_norway::from_str(text).map_err(|error| error.to_string())?;
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    /// What happens next.
    pub fn plan(&self) -> Plan {
        match validate(&self.observed.service) {
            Ok(valid) => plan(
                &valid,
                &self.observed,
                &self.samples,
                self.now,
                deployment::template,
            ),
            Err(problem) => plan_invalid(&self.observed, &problem, self.now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_from_a_file_is_planned_like_one_from_a_cluster() {
        let mut service: serde_json::Value =
            serde_norway::from_str(include_str!("../../crds/examples/chat.yaml")).unwrap();
        service["metadata"]["namespace"] = "models".into();
        service["metadata"]["uid"] = "u".into();
        service["metadata"]["generation"] = 1.into();
        let missing = serde_json::json!({"missing": {"what": "ConfigMap `texts` does not exist"}});
        let world = serde_json::json!({"now": "2026-01-01T00:00:00Z", "observed": {"service": service,
            "calibrationData": missing, "evaluationData": missing, "modelClaim": "present", "artifactClaim": "present"}});
        let yaml = serde_norway::to_string(&world).unwrap();
        let world = World::read(&yaml).unwrap();
        let text = serde_json::to_string(&world.plan()).unwrap();
        assert!(text.contains("ConfigMap `texts` does not exist"), "{text}");
        assert!(World::read("now: 2026-01-01T00:00:00Z").is_err());
    }
}
