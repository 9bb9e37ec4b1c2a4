//! What `validate` promises.

use mixquant_crds::rollout::{GateMetric, NoData, OnFailure};

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
            Step::Weight {
                weight: 10,
                replicas: None,
                hold: 60
            },
            Step::Weight {
                weight: 50,
                replicas: None,
                hold: 60
            }
        ]
    );
    assert_eq!((valid.rollout.interval, valid.rollout.warm_up), (15, 20));
    let [tpot] = &valid.gates[..] else {
        panic!("{:?}", valid.gates);
    };
    assert_eq!((tpot.max, tpot.max_ratio), (Some(0.1), Some(1.25)));
    assert_eq!(
        (tpot.min_samples, tpot.on_failure),
        (100, OnFailure::Rollback)
    );
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
    assert_eq!(
        same,
        request(|service| {
            let scaling = r#"{"minReplicas": 1, "maxReplicas": 3, "targets": {"queueLength": 4}}"#;
            service.spec.scaling = Some(serde_json::from_str(scaling).unwrap());
        })
    );
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
            let claim = &mut service.spec.model.source.persistent_volume_claim;
            claim.as_mut().unwrap().path = "other".into();
        })
    );
}

#[test]
fn gates_have_base_units_and_take_from_the_rollout_what_they_do_not_say() {
    let text = include_str!("../../../crds/examples/gated.yaml");
    let mut service: MixQuantService = serde_norway::from_str(text).unwrap();
    service.metadata.namespace = Some("default".into());
    service.metadata.uid = Some("uid".into());
    let valid = validate(&service).unwrap();
    let gate = |name: &str| {
        let mut all = valid.gates.iter();
        all.find(|gate| gate.name == name).unwrap()
    };
    assert_eq!(valid.gates.len(), 9);
    assert_eq!(gate("ttft").max, Some(2.0));
    assert_eq!(gate("error-rate").max, Some(0.01));
    assert_eq!(gate("itl").max_ratio, Some(1.25));
    assert_eq!(gate("itl").on_failure, OnFailure::Record);
    assert_eq!(gate("first-token").on_failure, OnFailure::Pause);
    assert_eq!(gate("first-token").max, Some(0.05));
    assert_eq!(gate("valve").no_data, NoData::Pass);
    assert_eq!(gate("nan").metric, GateMetric::NanLogits);
    assert_eq!(gate("nan").no_data, NoData::Hold);
    assert_eq!(gate("kv-memory").max, Some(0.95));
    assert_eq!(
        valid.rollout.steps,
        [
            Step::Pause { duration: Some(30) },
            Step::Replicas {
                replicas: 1,
                hold: 60
            },
            Step::Pause { duration: None },
            Step::Weight {
                weight: 50,
                replicas: None,
                hold: 60
            },
        ]
    );
    assert_eq!(
        (valid.rollout.rollback_window, valid.rollout.keep_failed),
        (2, 300)
    );
}

#[test]
fn a_gate_that_cannot_act_is_named() {
    let problem = |gate: &str| {
        let mut service = example();
        service.spec.gates = vec![serde_json::from_str(gate).unwrap()];
        validate(&service).unwrap_err().to_string()
    };
    for (gate, said) in [
        (
            r#"{"name": "a", "metric": "ITL", "quantile": "0.9"}"#,
            "gates[a] limits nothing",
        ),
        (
            r#"{"name": "a", "metric": "ITL", "max": "5"}"#,
            "gates[a].quantile belongs",
        ),
        (
            r#"{"name": "a", "metric": "NanLogits", "quantile": "0.9", "max": "5"}"#,
            "gates[a].quantile belongs",
        ),
        (
            r#"{"name": "a", "metric": "ITL", "quantile": "0.999", "max": "5"}"#,
            "between 0.5 and 0.99",
        ),
        (
            r#"{"name": "a", "metric": "OutOfMemory", "maxRegressionPercent": 5}"#,
            "maxRegressionPercent does not belong",
        ),
        (
            r#"{"name": "a", "metric": "NanLogits", "max": "many"}"#,
            "gates[a].max is `many`",
        ),
    ] {
        let text = problem(gate);
        assert!(text.contains(said), "{gate}: {text}");
    }
}

#[test]
fn a_step_of_two_kinds_or_of_none_is_named() {
    for step in [
        r#"{"weight": 5, "canaryReplicas": 1, "hold": "5s"}"#,
        r#"{"hold": "5s"}"#,
        r#"{"weight": 5}"#,
        r#"{"pause": {}, "hold": "5s"}"#,
    ] {
        let mut service = example();
        service.spec.rollout.steps[0] = serde_json::from_str(step).unwrap();
        let text = validate(&service).unwrap_err().to_string();
        assert!(text.contains("set exactly one"), "{step}: {text}");
    }
}

#[test]
fn a_route_is_named_exactly_where_a_gateway_splits_the_traffic() {
    for (traffic, said) in [
        (r#"{"mode": "GatewayAPI"}"#, "set exactly one of them there"),
        (
            r#"{"mode": "GatewayAPI", "parentRefs": [{"name": "edge"}], "routeRef": {"name": "mine"}}"#,
            "set exactly one of them there",
        ),
        (
            r#"{"routeRef": {"name": "mine"}}"#,
            "leave both out with ReplicaRatio",
        ),
        (
            r#"{"mode": "GatewayAPI", "routeRef": {"name": "mine"}, "trackHeader": "x-track"}"#,
            "write them into your own route",
        ),
    ] {
        let mut service = example();
        service.spec.traffic = serde_json::from_str(traffic).unwrap();
        let text = validate(&service).unwrap_err().to_string();
        assert!(text.contains(said), "{traffic}: {text}");
    }
}

#[test]
fn behind_a_gateway_a_step_may_have_a_weight_and_pods_of_its_own() {
    let mut service = example();
    let step = r#"{"weight": 5, "canaryReplicas": 3, "hold": "5s"}"#;
    service.spec.rollout.steps[0] = serde_json::from_str(step).unwrap();
    let traffic = r#"{"mode": "GatewayAPI", "parentRefs": [{"name": "edge"}]}"#;
    service.spec.traffic = serde_json::from_str(traffic).unwrap();
    let valid = validate(&service).unwrap();
    let expected = Step::Weight {
        weight: 5,
        replicas: Some(3),
        hold: 5,
    };
    assert_eq!(valid.rollout.steps[0], expected);
    assert!(valid.rollout.routed);
    let step = r#"{"canaryReplicas": 3, "hold": "5s"}"#;
    service.spec.rollout.steps[0] = serde_json::from_str(step).unwrap();
    assert!(validate(&service).is_err());
}

#[test]
fn copies_come_before_the_first_weight_and_only_by_the_route_that_the_operator_makes() {
    let own = r#"{"mode": "GatewayAPI", "parentRefs": [{"name": "edge"}]}"#;
    let users = r#"{"mode": "GatewayAPI", "routeRef": {"name": "mine"}}"#;
    let (mirror, more, weight) = (
        r#"{"mirror": 20, "hold": "60s"}"#,
        r#"{"mirror": 100, "canaryReplicas": 3, "hold": "60s"}"#,
        r#"{"weight": 50, "hold": "60s"}"#,
    );
    let with = |traffic: &str, steps: &[&str]| {
        let mut service = example();
        service.spec.traffic = serde_json::from_str(traffic).unwrap();
        let steps = format!("[{}]", steps.join(", "));
        service.spec.rollout.steps = serde_json::from_str(&steps).unwrap();
        validate(&service).map_err(|error| error.to_string())
    };
    let expected = Step::Mirror {
        percent: 100,
        replicas: Some(3),
        hold: 60,
    };
    let valid = with(own, &[mirror, more, weight]).unwrap();
    assert_eq!(valid.rollout.steps[1], expected);
    let both = r#"{"mirror": 20, "weight": 20, "hold": "60s"}"#;
    let shown = "set traffic.mode GatewayAPI with parentRefs, or remove the step with mirror";
    for (traffic, steps, said) in [
        ("{}", [mirror, weight].as_slice(), shown),
        (users, &[mirror, weight], shown),
        (own, &[weight, mirror], "stands before the first weight"),
        (own, &[more, mirror, weight], "must mirror rising shares"),
        (own, &[mirror], "at least one step with a weight"),
        (own, &[both, weight], "neither weight nor pause"),
    ] {
        let error = with(traffic, steps).unwrap_err();
        assert!(error.contains(said), "{steps:?}: {error}");
    }
}

#[test]
fn pausing_asks_for_nothing_new() {
    let mut service = example();
    let before = validate(&service).unwrap();
    service.spec.rollout.paused = true;
    let after = validate(&service).unwrap();
    assert_eq!(before.request, after.request);
    assert!(after.rollout.paused && !before.rollout.paused);
}

#[test]
fn a_measured_threshold_is_calibrated_and_a_safety_valve_is_not() {
    use mixquant_crds::scalars::{Auto, PromptThreshold};

    let example = validate(&example_with(|_| {})).unwrap();
    let auto = validate(&example_with(|service| {
        service.spec.precision.prefill.min_prompt_tokens =
            Some(PromptThreshold::Measured(Auto::Auto));
    }));
    let auto = auto.unwrap();
    assert!(auto.calibration.measures_threshold && !example.calibration.measures_threshold);
    assert_ne!(auto.measured, example.measured);
    let tighter = validate(&example_with(|service| {
        let valve = service.spec.precision.safety_valve.as_mut().unwrap();
        valve.max_kl.0 = "0.01".into();
    }));
    let tighter = tighter.unwrap();
    assert_eq!(tighter.measured, example.measured);
    assert_ne!(tighter.served, example.served);
}

#[test]
fn a_safety_valve_without_a_quantised_prefill_is_a_problem() {
    let service = example_with(|service| {
        let prefill = &mut service.spec.precision.prefill;
        prefill.scheme = PrefillScheme::Precise;
        prefill.min_prompt_tokens = None;
    });
    let text = validate(&service).unwrap_err().to_string();
    assert!(
        text.contains("safetyValve guards a quantised prefill"),
        "{text}"
    );
}

#[test]
fn copies_reach_the_plan_and_one_copy_needs_no_threshold() {
    use mixquant_crds::{DecodeScheme, WeightCopies};

    let plan =
        |change: fn(&mut MixQuantService)| validate(&example_with(change)).map(|valid| valid.plan);
    assert_eq!(plan(|_| {}).unwrap().weight_copies, WeightCopies::Dual);
    let single = plan(|service| {
        let precision = &mut service.spec.precision;
        precision.weight_copies = Some(WeightCopies::Single);
        precision.decode.scheme = DecodeScheme::W8A8;
        precision.prefill.min_prompt_tokens = None;
        precision.safety_valve = None;
    });
    assert_eq!(single.unwrap().weight_copies, WeightCopies::Single);
    let text = plan(|service| {
        service.spec.precision.weight_copies = Some(WeightCopies::Single);
    });
    let text = text.unwrap_err().to_string();
    assert!(
        text.contains("weightCopies Single belong together"),
        "{text}"
    );
}

fn example_with(change: impl FnOnce(&mut MixQuantService)) -> MixQuantService {
    let mut service = example();
    change(&mut service);
    service
}
