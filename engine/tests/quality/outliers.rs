//! Activation outliers as large models have them, given to the shipped model by a transform that changes no output in exact arithmetic.
//!
//! Some channels of each RMSNorm are scaled up and the same columns of the linears behind it down, by powers of two: BF16 weights stay exact.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use mixquant_crds::PrecisionPlan;
use mixquant_engine::calibrate::quantisers::awq::Awq;
use mixquant_engine::calibrate::quantisers::{Quantiser, Recipe};
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};
use mixquant_engine::quality::Row;
use mixquant_engine::quant::Scheme;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::{jobs, texts};

/// Every so many channels one is loud.
const EVERY: usize = 48;
const FACTOR: f32 = 64.0;

/// Which linears read a norm's output.
const READERS: [(&str, &[&str]); 2] = [
    (
        "input_layernorm",
        &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ),
    (
        "post_attention_layernorm",
        &["mlp.gate_proj", "mlp.up_proj"],
    ),
];

fn loud(channel: usize) -> bool {
    channel % EVERY == 7
}

/// What a tensor's number at `index` is multiplied by.
fn factor(name: &str, index: usize, columns: usize) -> f32 {
    for (norm, readers) in READERS {
        if name.contains(norm) && loud(index) {
            return FACTOR;
        }
        if readers.iter().any(|reader| name.contains(reader)) && loud(index % columns) {
            return 1.0 / FACTOR;
        }
    }
    1.0
}

/// Writes the shipped model with outliers.
pub(crate) fn transform(to: &Path) {
    for entry in fs::read_dir(jobs::model()).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path
            .extension()
            .is_none_or(|extension| extension != "safetensors")
        {
            fs::copy(&path, target).unwrap();
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = SafeTensors::deserialize(&bytes)
            .unwrap()
            .iter()
            .map(|(name, view)| {
                assert_eq!(view.dtype(), Dtype::BF16);
                let columns = *view.shape().last().unwrap();
                let (pairs, _) = view.data().as_chunks::<2>();
                let numbers = pairs.iter().enumerate().flat_map(|(index, pair)| {
                    let value = bf16::from_le_bytes(*pair).to_f32() * factor(name, index, columns);
                    assert_eq!(bf16::from_f32(value).to_f32().to_bits(), value.to_bits());
                    bf16::from_f32(value).to_le_bytes()
                });
                (name.to_owned(), (view.shape().to_vec(), numbers.collect()))
            })
            .collect();
        let views = tensors.iter().map(|(name, (shape, data))| {
            (
                name,
                TensorView::new(Dtype::BF16, shape.clone(), data).unwrap(),
            )
        });
        fs::write(target, safetensors::serialize(views, None).unwrap()).unwrap();
    }
}

fn logits(directory: &Path, tokens: &[u32]) -> Vec<f32> {
    let mut model = Model::open(directory).unwrap();
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    let mut cache = model.new_cache(tokens.len());
    let chunk = Chunk {
        tokens,
        cache: &mut cache,
        logits: LogitRows::All,
    };
    let mut workspace = Workspace::default();
    model
        .forward(Pass::Precise, &mut [chunk], &mut workspace, None)
        .unwrap()
        .to_vec()
}

#[test]
fn outliers_cost_plain_w8a8_its_quality_and_smoothing_wins_it_back() {
    let folder = tempfile::tempdir().unwrap();
    transform(folder.path());
    let tokens = &texts::evaluation()[0].ids;
    let (before, after) = (
        logits(&jobs::model(), tokens),
        logits(folder.path(), tokens),
    );
    let largest = before
        .iter()
        .zip(&after)
        .map(|(one, two)| (one - two).abs())
        .fold(0.0, f32::max);
    assert!(
        largest < 1e-3,
        "the transform keeps the function: {largest}"
    );

    let row = |quantiser| {
        Row::Uniform(Recipe {
            scheme: Scheme::W8A8,
            quantiser,
        })
    };
    let rows = [
        row(Quantiser::Rtn),
        row(Quantiser::SmoothQuant),
        row(Quantiser::Awq(Awq::default())),
    ];
    let with = texts::distances(folder.path(), &rows);
    let without = texts::distances(&jobs::model(), &rows[..1]);
    let increase = |index: usize| with[index].perplexity_increase_percent;
    for (name, report) in ["rtn", "smoothquant", "awq"].iter().zip(&with) {
        println!(
            "W8A8 {name} with outliers: perplexity {:+.3} %, KL {:.6}",
            report.perplexity_increase_percent, report.kl_mean
        );
    }
    assert!(increase(0) > 5.0, "plain W8A8 visibly loses: {:?}", with[0]);
    for smoothed in [1, 2] {
        let report = &with[smoothed];
        assert!(
            increase(smoothed).abs() < 0.5,
            "{:?}: {report:?}",
            rows[smoothed]
        );
        assert!(
            report.kl_mean < 1.5 * without[0].kl_mean,
            "as if there were none: {report:?} {:?}",
            without[0]
        );
    }
}
