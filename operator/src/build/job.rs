//! The two Jobs: calibration (makes an artifact and measures it) and verification (measures an artifact that exists).
//!
//! Both answer through the container's termination message and get no API token. Exit code 2 says that another try gives the same answer.

use k8s_openapi::api::batch::v1::{
    Job, JobSpec, PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::{PodTemplateSpec, Volume, VolumeMount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use mixquant_crds::service::ConfigMapKey;
use mixquant_crds::{Digest, PrecisionPlan, names};

use super::meta::{self, Access, COMPONENT_CALIBRATION, COMPONENT_VERIFICATION, Owner, labels};
use super::source;
use crate::action::{JobRequest, JobWork};
use crate::validate::ValidService;

/// Tries of a Job after the first that ended in a way which another try may cure.
const BACKOFF_LIMIT: i32 = 2;

/// The Job that a plan asks for.
pub fn requested(owner: &Owner, service: &ValidService, request: &JobRequest) -> Job {
    let name = &request.name;
    match &request.work {
        JobWork::Calibrate {
            plan,
            expect_model,
            round,
            remove,
        } => {
            let asked = Asked {
                plan,
                expect_model: expect_model.as_ref(),
                round: *round,
                remove,
            };
            calibration(owner, name, service, &asked)
        }
        JobWork::Verify { artifact } => verification(owner, name, service, artifact),
    }
}

/// What a calibration is asked for beside what the spec says.
pub struct Asked<'a> {
    /// What the artifact should hold.
    pub plan: &'a PrecisionPlan,
    /// The only model that may be read, where one is expected.
    pub expect_model: Option<&'a Digest>,
    /// Which of the data's texts are read.
    pub round: i32,
    /// Artifacts that are removed first.
    pub remove: &'a [Digest],
}

/// The calibration Job `name`: reads the model (only the expected one, when one is) and both data sets, writes an artifact by the plan, reports it.
///
/// # Panics
/// Never: a plan is plain data.
pub fn calibration(owner: &Owner, name: &str, service: &ValidService, asked: &Asked<'_>) -> Job {
    let plan = serde_json::to_string(asked.plan).expect("a plan is plain data");
    let (calibration, verification) = (&service.calibration, &service.verification);
    let mut args = vec![
        "calibrate".to_owned(),
        model(service),
        format!(
            "--data={}",
            file(names::MOUNT_CALIBRATION, &calibration.data)
        ),
        format!("--out={}", names::MOUNT_ARTIFACTS),
        format!("--plan={plan}"),
        format!("--samples={}", calibration.samples),
        format!("--sequence-length={}", calibration.sequence_length),
        format!(
            "--eval-data={}",
            file(names::MOUNT_EVALUATION, &verification.data)
        ),
        format!("--eval-samples={}", verification.samples),
        format!("--eval-sequence-length={}", verification.sequence_length),
        format!("--owner={}", service.name),
        format!("--termination-message={}", names::TERMINATION_MESSAGE_PATH),
    ];
    if service.calibration.measures_threshold {
        args.push("--min-prompt-tokens=auto".to_owned());
    }
    if let Some(digest) = asked.expect_model {
        args.push(format!("--expect-model-digest={digest}"));
    }
    if asked.round > 0 {
        args.push(format!("--round={}", asked.round));
    }
    let remove = asked.remove.iter();
    args.extend(remove.map(|digest| format!("--remove={digest}")));
    let work = Work {
        component: COMPONENT_CALIBRATION,
        args,
        model: asked.expect_model,
        artifacts: Access::Write,
        data: vec![
            ("calibration", names::MOUNT_CALIBRATION, &calibration.data),
            ("evaluation", names::MOUNT_EVALUATION, &verification.data),
        ],
    };
    work.into_job(owner, name, service)
}

/// The verification Job `name`: measures `artifact` with the engine image that the spec names now.
pub fn verification(owner: &Owner, name: &str, service: &ValidService, artifact: &Digest) -> Job {
    let verification = &service.verification;
    let args = vec![
        "verify".to_owned(),
        model(service),
        format!("--artifact={}/{}", names::MOUNT_ARTIFACTS, artifact.hex()),
        format!(
            "--data={}",
            file(names::MOUNT_EVALUATION, &verification.data)
        ),
        format!("--window={}", verification.sequence_length),
        format!("--samples={}", verification.samples),
        "--json".to_owned(),
        format!("--expect-artifact-digest={artifact}"),
        format!("--termination-message={}", names::TERMINATION_MESSAGE_PATH),
    ];
    let work = Work {
        component: COMPONENT_VERIFICATION,
        args,
        model: service.model.digest.as_ref(),
        artifacts: Access::Read,
        data: vec![("evaluation", names::MOUNT_EVALUATION, &verification.data)],
    };
    work.into_job(owner, name, service)
}

fn model(service: &ValidService) -> String {
    format!("--model={}", source::path(service))
}

fn file(mount: &str, data: &ConfigMapKey) -> String {
    format!("{mount}/{}", data.key)
}

/// What differs between the two Jobs.
struct Work<'a> {
    component: &'static str,
    args: Vec<String>,
    /// The only model that a download may bring.
    model: Option<&'a Digest>,
    artifacts: Access,
    data: Vec<(&'static str, &'static str, &'a ConfigMapKey)>,
}

impl Work<'_> {
    fn into_job(self, owner: &Owner, name: &str, service: &ValidService) -> Job {
        let (volumes, mounts) = self.volumes(service);
        let mut container = meta::container(self.component, &service.engine.image, self.args);
        container.resources = meta::resources(service.calibration.resources.as_ref());
        container.volume_mounts = Some(mounts);
        let mut pod = meta::pod(service, container, volumes);
        pod.restart_policy = Some("Never".into());
        // The engine writes to a temporary folder and renames it: a quick end leaves nothing half-written.
        pod.termination_grace_period_seconds = Some(5);
        source::fetch_first(&mut pod, service, self.model, true);
        let labels = labels(&owner.name, self.component);
        Job {
            metadata: owner.object(name.to_owned(), labels.clone()),
            spec: Some(JobSpec {
                active_deadline_seconds: Some(service.calibration.active_deadline_seconds),
                backoff_limit: Some(BACKOFF_LIMIT),
                pod_failure_policy: Some(failure_policy(
                    self.component,
                    source::is_fetched(service),
                )),
                // A new pod only when the old one is surely gone: two would write to the same volume.
                pod_replacement_policy: Some("Failed".into()),
                template: PodTemplateSpec {
                    metadata: Some(ObjectMeta {
                        labels: Some(labels),
                        ..ObjectMeta::default()
                    }),
                    spec: Some(pod),
                },
                ..JobSpec::default()
            }),
            status: None,
        }
    }

    fn volumes(&self, service: &ValidService) -> (Vec<Volume>, Vec<VolumeMount>) {
        let mut volumes = vec![
            source::volume(service),
            meta::claim("artifacts", &service.artifacts_claim),
        ];
        let mut mounts = vec![
            source::mount(),
            meta::mount("artifacts", names::MOUNT_ARTIFACTS, self.artifacts),
        ];
        for (name, path, source) in &self.data {
            volumes.push(meta::dataset(name, source));
            mounts.push(meta::mount(name, path, Access::Read));
        }
        (volumes, mounts)
    }
}

/// A wrong input fails the Job at once, in the download before it as well; a node that goes away costs no try.
fn failure_policy(container: &str, fetched: bool) -> PodFailurePolicy {
    let containers = std::iter::once(container).chain(fetched.then_some(source::FETCH));
    let mut rules: Vec<PodFailurePolicyRule> = containers.map(wrong_input).collect();
    rules.push(PodFailurePolicyRule {
        action: "Ignore".into(),
        on_exit_codes: None,
        on_pod_conditions: Some(vec![PodFailurePolicyOnPodConditionsPattern {
            type_: "DisruptionTarget".into(),
            status: "True".into(),
        }]),
    });
    PodFailurePolicy { rules }
}

fn wrong_input(container: &str) -> PodFailurePolicyRule {
    PodFailurePolicyRule {
        action: "FailJob".into(),
        on_exit_codes: Some(PodFailurePolicyOnExitCodesRequirement {
            container_name: Some(container.to_owned()),
            operator: "In".into(),
            values: vec![names::EXIT_INPUT],
        }),
        on_pod_conditions: None,
    }
}
