//! The same answer to the last bit: for 1 and 2 threads, alone and in a batch, in one chunk and in many, in two engines.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::path::{Path, PathBuf};

use mixquant_crds::{DecodeScheme, KvCacheMode, KvPrecision, PrecisionPlan, PrefillScheme};
use mixquant_engine::model::{Chunk, Importance, KvCache, LogitRows, Model, Pass, Workspace};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

fn precise(scheme: DecodeScheme) -> Model {
    let mut model = Model::open(&directory()).unwrap();
    model.set_plan(PrecisionPlan::precise(scheme)).unwrap();
    model
}

/// W8A8 prefill, BF16 decode, INT4 and INT8 keys chosen by attention.
fn mixed() -> Model {
    let mut model = Model::open(&directory()).unwrap();
    let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
    plan.prefill.scheme = PrefillScheme::W8A8;
    plan.kv_cache.mode = KvCacheMode::AttentionMixedPrecision;
    plan.kv_cache.default = KvPrecision::INT4;
    plan.kv_cache.important = KvPrecision::INT8;
    plan.kv_cache.sink_tokens = 4;
    plan.kv_cache.recent_tokens = 16;
    let thresholds =
        vec![vec![1.0; model.config().num_key_value_heads]; model.config().num_hidden_layers];
    let quantised = model.quantise_linears();
    model
        .attach(quantised, Some(Importance { thresholds }), plan)
        .unwrap();
    model
}

fn tokens(count: usize, seed: usize) -> Vec<u32> {
    std::iter::once(0)
        .chain(
            (1..count)
                .map(|i| u32::try_from(8 + (i * i * 37 + i * 101 + seed * 977) % 4000).unwrap()),
        )
        .collect()
}

fn feed(model: &Model, pass: Pass, cache: &mut KvCache, tokens: &[u32]) -> Vec<u32> {
    let mut workspace = Workspace::default();
    let chunk = Chunk {
        tokens,
        cache,
        logits: LogitRows::All,
    };
    model
        .forward(pass, &mut [chunk], &mut workspace, None)
        .unwrap()
        .iter()
        .map(|x| x.to_bits())
        .collect()
}

#[test]
fn chunks_of_any_size_give_the_same_logits() {
    for scheme in [DecodeScheme::FP32, DecodeScheme::BF16] {
        let model = precise(scheme);
        let tokens = tokens(70, 1);
        let whole = feed(&model, Pass::Precise, &mut model.new_cache(70), &tokens);
        for size in [1, 7, 33] {
            let mut cache = model.new_cache(70);
            let parts: Vec<u32> = tokens
                .chunks(size)
                .flat_map(|part| feed(&model, Pass::Precise, &mut cache, part))
                .collect();
            assert!(
                parts == whole,
                "{scheme:?}: chunks of {size} differ from one chunk"
            );
        }
    }
}

/// `verify` feeds whole blocks where decode feeds tokens: both must see and store the same.
#[test]
fn a_block_at_once_and_token_by_token_store_the_same() {
    let model = mixed();
    let (prompt, rest) = (tokens(96, 2), tokens(64, 3));
    let (mut by_block, mut by_token) = (model.new_cache(200), model.new_cache(200));
    for cache in [&mut by_block, &mut by_token] {
        feed(&model, Pass::Prefill, cache, &prompt);
    }
    for block in rest.chunks(16) {
        let at_once = feed(&model, Pass::Precise, &mut by_block, block);
        let single: Vec<u32> = block
            .iter()
            .flat_map(|token| feed(&model, Pass::Precise, &mut by_token, &[*token]))
            .collect();
        assert!(at_once == single, "logits differ at {}", by_block.len());
        assert_eq!(by_block.bytes_by_tier(), by_token.bytes_by_tier());
    }
    let tiers = by_block.bytes_by_tier();
    assert!(
        tiers[1].1 > 0 && tiers[2].1 > 0,
        "both tiers are used: {tiers:?}"
    );
}

#[test]
fn a_sequence_answers_alike_alone_and_in_a_batch() {
    let model = mixed();
    let mut workspace = Workspace::default();
    for batch in [2, 5, 17] {
        let mut caches: Vec<KvCache> = (0..batch).map(|_| model.new_cache(100)).collect();
        let mut alone = Vec::new();
        for (index, cache) in caches.iter_mut().enumerate() {
            feed(&model, Pass::Prefill, cache, &tokens(20 + index, index));
            let mut copy = cache.clone();
            alone.extend(feed(
                &model,
                Pass::Precise,
                &mut copy,
                &[100 + u32::try_from(index).unwrap()],
            ));
        }
        let next: Vec<[u32; 1]> = (0..batch)
            .map(|index| [100 + u32::try_from(index).unwrap()])
            .collect();
        let mut chunks: Vec<Chunk<'_>> = caches
            .iter_mut()
            .zip(&next)
            .map(|(cache, tokens)| Chunk {
                tokens,
                cache,
                logits: LogitRows::Last,
            })
            .collect();
        let together = model
            .forward(Pass::Precise, &mut chunks, &mut workspace, None)
            .unwrap();
        assert!(
            together.iter().map(|x| x.to_bits()).eq(alone),
            "a batch of {batch} differs"
        );
    }
}

#[test]
fn one_and_two_threads_answer_alike() {
    let model = mixed();
    let answer = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let mut cache = model.new_cache(400);
            let mut logits = feed(&model, Pass::Prefill, &mut cache, &tokens(300, 4));
            logits.extend(feed(&model, Pass::Precise, &mut cache, &[5]));
            logits.extend(feed(&model, Pass::Precise, &mut cache, &[9]));
            (logits, cache.bytes_by_tier())
        })
    };
    let one = answer(1);
    for threads in [2, 3] {
        assert!(answer(threads) == one, "{threads} threads differ from one");
    }
}

#[test]
fn two_engines_answer_alike() {
    let (a, b) = (mixed(), mixed());
    assert_eq!(a.digest(), b.digest());
    let prompt = tokens(120, 5);
    let of = |model: &Model| feed(model, Pass::Prefill, &mut model.new_cache(120), &prompt);
    assert!(of(&a) == of(&b));
}
