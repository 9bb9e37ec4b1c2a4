//! One prompt through the valve: what is kept, what is read again, and what either costs.

use mixquant_engine::model::{Chunk, KvCache, LogitRows, Model, Pass, QuantisedLinear, Workspace};
use mixquant_engine::valve::read::Work;
use mixquant_engine::valve::{Agreement, Limits, Reason, Verdict};

use crate::fixture::{invert, model, model_with, precise, prompt, read, settings};

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn forward(model: &Model, pass: Pass, tokens: &[u32], cache: &mut KvCache) -> Vec<f32> {
    let chunk = Chunk {
        tokens,
        cache,
        logits: LogitRows::Last,
    };
    let mut workspace = Workspace::default();
    model
        .forward(pass, &mut [chunk], &mut workspace, None)
        .unwrap()
        .to_vec()
}

#[test]
fn a_healthy_prompt_is_kept_and_costs_one_more_token() {
    let model = model();
    for tokens in [64, 100, 160] {
        let prompt = prompt(tokens);
        let (reading, _) = read(&model, &prompt, LogitRows::Last, settings(0.0));
        let check = reading.check.unwrap();
        assert_eq!(check.verdict, Verdict::Keep, "{check:?}");
        assert_eq!(
            (reading.pass, reading.cache.len()),
            (Pass::Prefill, prompt.len())
        );
        let expected = Work {
            quantised: prompt.len(),
            valve: 1,
            precise: 0,
        };
        assert_eq!(reading.work, expected);
        let kl = check.comparison.unwrap().kl;
        assert!(kl > 0.0, "two arithmetics are never the same: {kl}");
    }
}

/// Goal: the first token is drawn from precise logits over the quantised keys. Method: the same by hand.
#[test]
fn the_first_token_comes_from_the_precise_weights_over_the_quantised_keys() {
    let model = model();
    let prompt = prompt(96);
    let (reading, _) = read(&model, &prompt, LogitRows::Last, settings(0.0));
    let mut cache = model.new_cache(prompt.len());
    cache.hold();
    let quantised = forward(&model, Pass::Prefill, &prompt, &mut cache);
    cache.truncate(prompt.len() - 1);
    let precise = forward(
        &model,
        Pass::Precise,
        &prompt[prompt.len() - 1..],
        &mut cache,
    );
    assert_eq!(bits(&reading.last), bits(&precise));
    assert_ne!(bits(&reading.last), bits(&quantised));
}

/// Goal: what was held is quantised afterwards as it would have been. Method: the bytes of each tier of both caches.
#[test]
fn the_cache_is_quantised_behind_the_valve_as_before_it() {
    let model = model();
    // 160 and 96: the last token ends a block; the others do not.
    for tokens in [160, 96, 97, 111] {
        let prompt = prompt(tokens);
        let (reading, _) = read(&model, &prompt, LogitRows::Last, settings(0.0));
        let mut cache = model.new_cache(prompt.len());
        forward(&model, Pass::Prefill, &prompt, &mut cache);
        let tiers = |cache: &KvCache| cache.bytes_by_tier().map(|(_, bytes)| bytes > 0);
        assert_eq!(tiers(&reading.cache), tiers(&cache));
        let total = |cache: &KvCache| cache.bytes_by_tier().map(|(tier, bytes)| (tier, bytes))[3];
        assert_eq!(
            total(&reading.cache),
            total(&cache),
            "the same tokens are not quantised yet"
        );
    }
}

/// Sees whether the answer is the precise one, to the last bit, for the first token and the one after it.
fn answers_precisely(damage: impl Fn(&mut QuantisedLinear), reason: Reason, audit: f64) {
    let (damaged, precise) = (model_with(damage), precise());
    let prompt = prompt(96);
    let (reading, _) = read(&damaged, &prompt, LogitRows::Last, settings(audit));
    let (expected, _) = read(&precise, &prompt, LogitRows::Last, settings(0.0));
    let mut reading = reading;
    let mut expected = expected;
    assert_eq!(reading.check.as_ref().unwrap().fallback(), Some(reason));
    assert_eq!(reading.pass, Pass::Precise);
    assert_eq!(bits(&reading.last), bits(&expected.last));
    let next =
        |model: &Model, cache: &mut KvCache| bits(&forward(model, Pass::Precise, &[400], cache));
    assert_eq!(
        next(&damaged, &mut reading.cache),
        next(&precise, &mut expected.cache)
    );
    assert_eq!(reading.work.precise, prompt.len());
}

#[test]
fn a_damaged_output_projection_falls_back_to_the_precise_answer() {
    answers_precisely(
        |tensor| {
            if tensor.name.ends_with("down_proj") {
                invert(tensor);
            }
        },
        Reason::Top1,
        0.0,
    );
}

#[test]
fn scales_that_overflow_fall_back_to_the_precise_answer() {
    answers_precisely(
        |tensor| {
            if tensor.name.ends_with("layers.1.mlp.up_proj") {
                tensor.weight.scales.fill(f32::MAX);
            }
        },
        Reason::Nan,
        0.0,
    );
}

/// Goal: what the valve cannot see, the audit does. Method: keys and values of one layer that both passes share, damaged slightly more
/// than the limits allow, with an audit of every prompt.
#[test]
fn the_audit_sees_keys_that_both_passes_share() {
    let damage = |tensor: &mut QuantisedLinear| {
        if tensor.name.ends_with("v_proj") {
            invert(tensor);
        }
    };
    let prompt = prompt(96);
    let audited = read(
        &model_with(damage),
        &prompt,
        LogitRows::Last,
        settings(100.0),
    )
    .0;
    let check = audited.check.unwrap();
    let audit = check.audit.unwrap().unwrap();
    assert!(audit.kl > Limits::default().max_kl, "{audit:?}");
    assert_eq!(audited.pass, Pass::Precise);
    let healthy = read(&model(), &prompt, LogitRows::Last, settings(100.0)).0;
    assert_eq!(healthy.pass, Pass::Prefill, "{:?}", healthy.check);
    assert_eq!(healthy.work.precise, prompt.len());
}

#[test]
fn short_prompts_and_precise_plans_pass_no_valve() {
    let prompt = prompt(63);
    for model in [model(), precise()] {
        let (reading, _) = read(&model, &prompt, LogitRows::Last, settings(100.0));
        assert!(reading.check.is_none());
        assert_eq!(
            reading.work,
            Work {
                precise: 63,
                ..Work::default()
            }
        );
    }
}

#[test]
fn the_likelihoods_of_a_prompt_come_from_the_pass_that_counts() {
    let prompt = prompt(70);
    let rows = |model: &Model| {
        bits(
            read(model, &prompt, LogitRows::All, settings(100.0))
                .1
                .logits(),
        )
    };
    let damaged = model_with(|tensor| {
        if tensor.name.ends_with("down_proj") {
            invert(tensor);
        }
    });
    assert_eq!(rows(&damaged), rows(&precise()));
    assert_ne!(rows(&model()), rows(&precise()));
    let nothing = read(&model(), &prompt, LogitRows::None, settings(100.0)).0;
    assert!(nothing.check.is_none() && nothing.last.is_empty());
}

/// A limit of 0 lets nothing pass that is not the same, and endless limits let all pass that is a number.
#[test]
fn the_limits_decide() {
    let prompt = prompt(96);
    let with = |limits| {
        let settings = mixquant_engine::valve::read::Settings {
            limits,
            ..settings(0.0)
        };
        read(&model(), &prompt, LogitRows::Last, settings)
            .0
            .check
            .unwrap()
    };
    let strict = with(Limits {
        max_kl: 0.0,
        min_margin: 0.0,
    });
    assert_ne!(strict.verdict, Verdict::Keep);
    let loose = with(Limits {
        max_kl: f64::INFINITY,
        min_margin: f64::INFINITY,
    });
    assert_eq!(loose.verdict, Verdict::Keep);
    assert_ne!(loose.comparison.unwrap().agreement, Agreement::Different);
}
