//! What `validate` promises.

use super::*;

fn example() -> MixQuantService {
    let text = include_str!("../../../crds/examples/chat.yaml");
    let mut service: MixQuantService = serde_norway::from_str(text).unwrap();
    service.metadata.namespace = Some("default".into());
    service.metadata.uid = Some("uid".into());
    service
}

#[test]
fn the_example_is_valid_in_base_units() {
    let valid = validate(&example()).unwrap();
    assert_eq!(
        valid.rollout.steps,
        [
            Step {
                weight: 10,
                hold: 60
            },
            Step {
                weight: 50,
                hold: 60
            }
        ]
    );
    assert_eq!((valid.rollout.interval, valid.rollout.warm_up), (15, 20));
    assert_eq!(valid.tpot.max_seconds, Some(0.1));
    assert_eq!(valid.tpot.max_ratio, Some(1.25));
    assert_eq!(valid.plan.kv_cache.sink_tokens, 4);
}

/// What went around the schema is named, all of it at once.
#[test]
fn every_problem_is_named_in_one_pass() {
    let mut service = example();
    service.spec.slo.tpot.quantile.0 = "1.5".into();
    service.spec.rollout.analysis.interval.0 = "often".into();
    service.spec.rollout.steps.clear();
    service.spec.precision.prefill.min_prompt_tokens = None;
    service.spec.verification.dataset = service.spec.calibration.dataset.clone();
    service.spec.replicas = 0;
    let text = validate(&service).unwrap_err().to_string();
    for part in [
        "slo.tpot.quantile",
        "rollout.analysis.interval is `often`",
        "rollout.steps needs",
        "prefill.minPromptTokens",
        "verification.dataset",
        "replicas",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn a_request_is_another_when_anything_but_the_replicas_changes() {
    let request = |change: fn(&mut MixQuantService)| {
        let mut service = example();
        change(&mut service);
        validate(&service).unwrap().request
    };
    let same = request(|_| {});
    assert_eq!(same, request(|service| service.spec.replicas = 7));
    assert_ne!(
        same,
        request(|service| service.spec.slo.tpot.max_milliseconds = Some(7))
    );
    assert_ne!(
        same,
        request(|service| service.spec.engine.image = "other".into())
    );
}

#[test]
fn an_image_or_a_limit_calibrates_nothing_anew() {
    let measured = |change: fn(&mut MixQuantService)| {
        let mut service = example();
        change(&mut service);
        validate(&service).unwrap().measured
    };
    let same = measured(|_| {});
    assert_eq!(
        same,
        measured(|service| service.spec.engine.image = "other".into())
    );
    assert_eq!(
        same,
        measured(|service| service.spec.verification.max_kl_p99.0 = "9".into())
    );
    assert_ne!(
        same,
        measured(|service| service.spec.calibration.samples = 7)
    );
    assert_ne!(
        same,
        measured(|service| service.spec.precision.kv_cache.block_size = 32)
    );
    assert_ne!(
        same,
        measured(|service| {
            service.spec.model.source.persistent_volume_claim.path = "other".into();
        })
    );
}
