//! The KV cache as the forward uses it: what each plan costs in bytes and in quality, and what may be forgotten.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::path::{Path, PathBuf};

use mixquant_crds::{DecodeScheme, KvCacheMode, KvPrecision, PrecisionPlan};
use mixquant_engine::calibrate::collect::Collector;
use mixquant_engine::model::{
    Chunk, Importance, KvCache, LogitRows, Model, Pass, QuantisedLinears, Tap, Workspace,
};
use mixquant_engine::tokenizer::{Special, Tokenizer};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

fn plan(mode: KvCacheMode, default: KvPrecision, important: KvPrecision) -> PrecisionPlan {
    let mut plan = PrecisionPlan::precise(DecodeScheme::FP32);
    plan.kv_cache.mode = mode;
    plan.kv_cache.default = default;
    plan.kv_cache.important = important;
    plan.kv_cache.recent_tokens = 16;
    plan.kv_cache.sink_tokens = 4;
    plan
}

fn uniform(precision: KvPrecision) -> Model {
    let mut model = Model::open(&directory()).unwrap();
    model
        .set_plan(plan(KvCacheMode::Uniform, precision, precision))
        .unwrap();
    model
}

fn mixed(threshold: f32, default: KvPrecision, important: KvPrecision) -> Model {
    let mut model = Model::open(&directory()).unwrap();
    let thresholds =
        vec![vec![threshold; model.config().num_key_value_heads]; model.config().num_hidden_layers];
    let none = QuantisedLinears::from_tensors(Vec::new()).unwrap();
    model
        .attach(
            none,
            Some(Importance { thresholds }),
            plan(KvCacheMode::AttentionMixedPrecision, default, important),
        )
        .unwrap();
    model
}

fn tokens(count: usize) -> Vec<u32> {
    std::iter::once(0)
        .chain((1..count).map(|i| u32::try_from(8 + (i * i * 37 + i * 101) % 4000).unwrap()))
        .collect()
}

fn feed(model: &Model, cache: &mut KvCache, tokens: &[u32]) -> Vec<f32> {
    let chunk = Chunk {
        tokens,
        cache,
        logits: LogitRows::All,
    };
    model
        .forward(Pass::Precise, &mut [chunk], &mut Workspace::default(), None)
        .unwrap()
        .to_vec()
}

/// The mean KL divergence of 32 tokens that follow a stored prompt of 160 tokens.
fn divergence(model: &Model, baseline: &Model) -> f64 {
    let all = tokens(192);
    let after = |model: &Model| {
        let mut cache = model.new_cache(192);
        feed(model, &mut cache, &all[..160]);
        all[160..]
            .chunks(16)
            .flat_map(|block| feed(model, &mut cache, block))
            .collect::<Vec<f32>>()
    };
    let probabilities = |row: &[f32]| {
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let powers: Vec<f64> = row.iter().map(|x| f64::from(x - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        powers
            .into_iter()
            .map(|power| power / sum)
            .collect::<Vec<f64>>()
    };
    let (a, b) = (after(baseline), after(model));
    let vocabulary = model.config().vocab_size;
    let kl = a
        .chunks(vocabulary)
        .zip(b.chunks(vocabulary))
        .map(|(a, b)| {
            probabilities(a)
                .iter()
                .zip(probabilities(b))
                .map(|(p, q)| p * (p / q).ln())
                .sum::<f64>()
        });
    kl.sum::<f64>() / 32.0
}

#[test]
fn fewer_bits_cost_more_quality_and_fewer_bytes() {
    let baseline = uniform(KvPrecision::BF16);
    let mut last = (0.0, usize::MAX);
    for precision in [
        KvPrecision::BF16,
        KvPrecision::INT8,
        KvPrecision::INT4,
        KvPrecision::INT2,
    ] {
        let model = uniform(precision);
        let mut cache = model.new_cache(192);
        feed(&model, &mut cache, &tokens(192));
        let kl = divergence(&model, &baseline);
        println!("{precision:?}: kl {kl:.6}, {} bytes", cache.bytes());
        assert!(
            kl >= last.0 && cache.bytes() < last.1,
            "{precision:?}: kl {kl}, {} bytes after {last:?}",
            cache.bytes()
        );
        last = (kl, cache.bytes());
        match precision {
            KvPrecision::BF16 => assert!(kl.abs() < 1e-12, "nothing is quantised"),
            KvPrecision::INT8 => assert!(kl < 1e-3, "{kl}"),
            KvPrecision::INT4 => assert!(kl < 0.1, "{kl}"),
            KvPrecision::INT2 => assert!(kl > 0.05, "INT2 must hurt to serve as a bad plan: {kl}"),
        }
    }
}

#[test]
fn a_token_costs_the_bits_that_its_tier_says() {
    // 12 heads of 64 channels; 176 tokens are quantised, 16 are recent and stay FP32.
    for (precision, bytes) in [
        (KvPrecision::INT2, 2 * 16 + 4),
        (KvPrecision::INT4, 2 * 32 + 4),
        (KvPrecision::INT8, 2 * 64 + 4),
    ] {
        let model = uniform(precision);
        let mut cache = model.new_cache(192);
        feed(&model, &mut cache, &tokens(192));
        let tiers = cache.bytes_by_tier();
        assert_eq!(
            tiers.iter().find(|(tier, _)| *tier == precision).unwrap().1,
            12 * 176 * bytes,
            "{precision:?}"
        );
        assert_eq!(tiers[3].1, 12 * 16 * 2 * 64 * 4);
    }
}

#[test]
fn attention_chooses_the_tier() {
    let stored = |model: &Model| {
        let mut cache = model.new_cache(192);
        feed(model, &mut cache, &tokens(192));
        cache.bytes_by_tier()
    };
    // Nothing reaches such a threshold but the sinks: 4 tokens of 12 heads.
    let sinks = stored(&mixed(f32::MAX, KvPrecision::INT4, KvPrecision::INT8));
    assert_eq!(sinks[2].1, 12 * 4 * 132);
    let some = stored(&mixed(1.0, KvPrecision::INT4, KvPrecision::INT8));
    assert!(some[2].1 > sinks[2].1 && some[1].1 > 0, "{some:?}");
    let all = stored(&mixed(0.0, KvPrecision::INT4, KvPrecision::INT8));
    assert_eq!((all[1].1, all[2].1), (0, 12 * 176 * 132));
    let plain = stored(&mixed(1.0, KvPrecision::INT4, KvPrecision::BF16));
    assert_eq!(plain[2].1, 0);
}

/// A text's tokens, the start token first.
fn text(count: usize) -> Vec<u32> {
    let tokenizer = Tokenizer::open(&directory()).unwrap();
    let file = directory().join("../../data/evaluation.txt");
    let text = std::fs::read_to_string(file).unwrap();
    let mut ids = tokenizer.encode(&text, Special::Add).unwrap();
    ids.truncate(count);
    ids
}

#[test]
fn a_calibrated_threshold_picks_about_the_same_share_of_keys_in_prompts_of_every_length() {
    let mut model = Model::open(&directory()).unwrap();
    let plan = plan(
        KvCacheMode::AttentionMixedPrecision,
        KvPrecision::INT4,
        KvPrecision::INT8,
    );
    let config = model.config();
    let (layers, kv_heads) = (config.num_hidden_layers, config.num_key_value_heads);
    let mut collector = Collector::new(&plan.kv_cache, layers, kv_heads);
    let chunk = Chunk {
        tokens: &text(512),
        cache: &mut model.new_cache(512),
        logits: LogitRows::None,
    };
    model
        .forward(
            Pass::Precise,
            &mut [chunk],
            &mut Workspace::default(),
            Some(&mut collector),
        )
        .unwrap();
    let importance = collector.thresholds(0.9).unwrap();
    let none = QuantisedLinears::from_tensors(Vec::new()).unwrap();
    model.attach(none, Some(importance), plan).unwrap();
    for tokens in [128, 256, 512, 1024] {
        let mut cache = model.new_cache(tokens);
        feed(&model, &mut cache, &text(tokens));
        let stored = cache.bytes_by_tier();
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        let [low, high] = [stored[1].1 as f64 / 68.0, stored[2].1 as f64 / 132.0];
        let share = high / (low + high);
        println!(
            "{tokens} tokens: {:.1} % of the keys at INT8",
            share * 100.0
        );
        assert!((0.05..0.30).contains(&share), "{tokens} tokens: {share}");
    }
}

#[test]
fn important_keys_at_more_bits_are_nearer_to_the_baseline() {
    let baseline = uniform(KvPrecision::BF16);
    let low = divergence(&uniform(KvPrecision::INT2), &baseline);
    let mixed = divergence(&mixed(1.0, KvPrecision::INT2, KvPrecision::INT8), &baseline);
    assert!(
        mixed < low,
        "INT2 alone {low}, with important keys at INT8 {mixed}"
    );
}

struct Watch {
    calls: Vec<(usize, usize)>,
    total: f64,
    seen: Vec<f32>,
}

impl Tap for Watch {
    fn attention(&mut self, layer: usize, kv_head: usize, received: &[f32], seen_by: &[f32]) {
        self.calls.push((layer, kv_head));
        self.total += received
            .iter()
            .map(|weight| f64::from(*weight))
            .sum::<f64>();
        self.seen = seen_by.to_vec();
        assert!(
            received
                .iter()
                .zip(seen_by)
                .all(|(received, seen)| *received >= 0.0 && *received <= seen * 40.0)
        );
    }
}

#[test]
fn a_tap_sees_every_head_and_all_attention() {
    let model = uniform(KvPrecision::BF16);
    let mut watch = Watch {
        calls: Vec::new(),
        total: 0.0,
        seen: Vec::new(),
    };
    let mut cache = model.new_cache(40);
    let all = tokens(40);
    let chunk = Chunk {
        tokens: &all,
        cache: &mut cache,
        logits: LogitRows::None,
    };
    let logits = model
        .forward(
            Pass::Precise,
            &mut [chunk],
            &mut Workspace::default(),
            Some(&mut watch),
        )
        .unwrap()
        .len();
    assert_eq!(logits, 0);
    assert_eq!(
        watch.calls,
        (0..6)
            .flat_map(|layer| [(layer, 0), (layer, 1)])
            .collect::<Vec<_>>()
    );
    // The weights of each of the 3 queries of a position add up to 1, and each counts as often as the query sees keys: 1 + 2 + … + 40.
    assert!((watch.total / 12.0 - 2460.0).abs() < 0.2, "{}", watch.total);
    assert_eq!((watch.seen[0], watch.seen[39]), (120.0, 3.0));
}

#[test]
fn tokens_that_are_not_quantised_yet_can_be_forgotten() {
    let model = uniform(KvPrecision::INT4);
    let all = tokens(64);
    let mut cache = model.new_cache(64);
    feed(&model, &mut cache, &all[..40]);
    let expected = feed(&model, &mut cache.clone(), &all[40..44]);
    feed(&model, &mut cache, &all[50..52]);
    cache.truncate(40);
    assert_eq!(cache.len(), 40);
    assert!(feed(&model, &mut cache, &all[40..44]) == expected);
    cache.truncate(0);
    assert!(cache.is_empty() && cache.bytes() == 0);
}

#[test]
#[should_panic(expected = "only tokens that are not quantised yet can be forgotten")]
fn quantised_tokens_cannot_be_cut_in_two() {
    let model = uniform(KvPrecision::INT4);
    let mut cache = model.new_cache(64);
    feed(&model, &mut cache, &tokens(64));
    cache.truncate(8);
}

#[test]
fn a_forward_refuses_what_does_not_fit_and_changes_nothing() {
    let model = uniform(KvPrecision::INT4);
    let mut cache = model.new_cache(4);
    let mut error = |tokens: &[u32]| {
        let chunk = Chunk {
            tokens,
            cache: &mut cache,
            logits: LogitRows::Last,
        };
        let error = model
            .forward(Pass::Precise, &mut [chunk], &mut Workspace::default(), None)
            .unwrap_err();
        assert!(cache.is_empty());
        error.message
    };
    assert!(error(&[]).contains("without tokens"));
    assert!(error(&[0; 5]).contains("5 tokens do not fit the context of 4"));
    assert!(error(&[4096]).contains("token id 4096 is outside the vocabulary of 4096"));
}
