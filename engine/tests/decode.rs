//! Decode from a quantised copy of its own: made by calibration, bound by digest, read by decode alone, counted, and measured.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod jobs;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use mixquant_crds::{CalibrationReport, DecodeScheme, KvCacheMode, KvPrecision, PrecisionPlan};
use mixquant_engine::artifact::manifest::Phase;
use mixquant_engine::artifact::{Artifact, Check, weights};
use mixquant_engine::calibrate::quantisers::Quantiser;
use mixquant_engine::model::{
    Chunk, Config, Copies, LogitRows, Model, Pass, QuantisedLinear, QuantisedLinears, Workspace,
};
use mixquant_engine::quant::{ActivationFormat, Codes};
use tempfile::TempDir;

/// Nothing quantised in the cache: what is seen is the weights' doing.
fn plan(decode: DecodeScheme) -> PrecisionPlan {
    let mut plan = jobs::plan();
    plan.decode.scheme = decode;
    plan.kv_cache.mode = KvCacheMode::Uniform;
    plan.kv_cache.default = KvPrecision::BF16;
    plan.kv_cache.important = KvPrecision::BF16;
    plan
}

fn calibrated(out: &Path, plan: &PrecisionPlan, extra: &[&str]) -> (PathBuf, CalibrationReport) {
    let output = jobs::engine(jobs::calibrate(out, plan, extra));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: CalibrationReport = serde_json::from_slice(&output.stdout).unwrap();
    (out.join(report.artifact_digest.hex()), report)
}

/// 4 bits everywhere, rounded to nearest.
static PLAIN: LazyLock<(TempDir, PathBuf, CalibrationReport)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let extra = ["--decode-quantiser", "rtn"];
    let (path, report) = calibrated(folder.path(), &plan(DecodeScheme::W4A8), &extra);
    (folder, path, report)
});

/// The decode copy in an artifact.
fn decode_copy(artifact: &Path) -> Vec<QuantisedLinear> {
    let manifest = Artifact::open(artifact, Check::Digests).unwrap();
    let files = manifest.manifest().weights(Phase::Decode);
    files
        .flat_map(|file| weights::decode(&fs::read(artifact.join(&file.path)).unwrap()).unwrap())
        .collect()
}

fn attached(artifact: &Path) -> Model {
    let mut model = Model::open(&jobs::model()).unwrap();
    let artifact = Artifact::open(artifact, Check::Digests).unwrap();
    artifact.attach_to(&mut model).unwrap();
    model
}

fn logits(model: &Model, pass: Pass) -> Vec<f32> {
    let tokens: Vec<u32> = (0..96).map(|at| (at * 37 + 11) % 3000).collect();
    let tokens: Vec<u32> = tokens
        .iter()
        .map(|id| id % u32::try_from(model.config().vocab_size).unwrap())
        .collect();
    let mut cache = model.new_cache(tokens.len());
    let chunk = Chunk {
        tokens: &tokens,
        cache: &mut cache,
        logits: LogitRows::All,
    };
    let mut workspace = Workspace::default();
    let rows = model.forward(pass, &mut [chunk], &mut workspace, None);
    rows.unwrap().to_vec()
}

/// The mean absolute difference.
fn apart(one: &[f32], two: &[f32]) -> f64 {
    let count = f64::from(u32::try_from(one.len()).unwrap());
    let sum = one.iter().zip(two).map(|(a, b)| f64::from((a - b).abs()));
    sum.sum::<f64>() / count
}

#[test]
fn decode_reads_the_copy_that_the_artifact_has_for_it_and_prefill_the_other() {
    let (_folder, artifact, _) = &*PLAIN;
    let model = attached(artifact);
    let (prefill, decode) = (logits(&model, Pass::Prefill), logits(&model, Pass::Precise));

    // The same weights, dequantised, with activations as they come: INT8 activations a group are all that may differ.
    let mut simulated = Model::open(&jobs::model()).unwrap();
    let precise = logits(&simulated, Pass::Precise);
    let copy = decode_copy(artifact);
    simulated.simulate(&copy, ActivationFormat::Bf16).unwrap();
    let expected = logits(&simulated, Pass::Precise);
    let (near, far) = (apart(&decode, &expected), apart(&decode, &precise));
    println!("decode is {near:.4} from its copy's own weights and {far:.4} from the precise ones");
    assert!(near < 0.25 * far, "{near} {far}");

    // Beside a precise decode the prefill copy gives the same bits.
    let mut dual = Model::open(&jobs::model()).unwrap();
    let linears = dual.quantise_linears();
    dual.attach(linears, None, plan(DecodeScheme::BF16))
        .unwrap();
    assert_eq!(logits(&dual, Pass::Prefill), prefill);
    assert_eq!(model.prefill_pass(64), Pass::Prefill);
    assert_eq!(model.prefill_pass(63), Pass::Precise);
}

#[test]
fn memory_holds_both_copies_and_no_precise_linears() {
    let (_folder, artifact, _) = &*PLAIN;
    let (model, copy) = (attached(artifact), decode_copy(artifact));
    let bytes = model.weight_bytes();
    let weights: usize = copy
        .iter()
        .map(|linear| linear.weight.out_features * linear.weight.in_features)
        .sum();
    // 4 bits a weight, and at most an eighth for scales and padding.
    assert!(
        (weights / 2..weights / 2 * 9 / 8).contains(&bytes.decode),
        "{bytes:?} {weights}"
    );
    let mut single = Model::open(&jobs::model()).unwrap();
    let precise = single.weight_bytes().precise;
    assert_eq!(
        precise - bytes.precise,
        2 * weights,
        "BF16 linears are gone"
    );
    let linears = single.quantise_linears();
    single
        .attach(linears, None, plan(DecodeScheme::BF16))
        .unwrap();
    assert_eq!(bytes.quantised, single.weight_bytes().quantised);
    assert!(model.bytes_a_token() < single.bytes_a_token() - weights);
}

#[test]
fn the_job_measures_what_decode_from_4_bits_costs_and_a_budget_buys_some_of_it_back() {
    let (folder, artifact, plain) = &*PLAIN;
    let extra = ["--decode-quantiser", "rtn", "--budget-bpw", "6"];
    let (spent, report) = calibrated(folder.path(), &plan(DecodeScheme::W4A8), &extra);
    let (_, precise) = calibrated(folder.path(), &plan(DecodeScheme::BF16), &[]);
    let kl = [&precise, &report, plain].map(|report| report.verify.kl_mean);
    println!("KL: BF16 decode, 6 bits a weight, 4 bits everywhere: {kl:?}");
    assert!(kl[0] < kl[1] && kl[1] < kl[2], "{kl:?}");

    let bits = |artifact: &Path| {
        let copy = QuantisedLinears::from_tensors(decode_copy(artifact)).unwrap();
        let int8 = |linear: &&QuantisedLinear| matches!(linear.weight.codes, Codes::Int8(_));
        let eight = copy.iter().filter(int8).count();
        (mixquant_engine::quality::bits_per_weight(&copy), eight)
    };
    let ((few, none), (more, some)) = (bits(artifact), bits(&spent));
    assert!((4.0..4.2).contains(&few) && none == 0, "{few} {none}");
    assert!((5.0..=6.0).contains(&more) && some > 0, "{more} {some}");
    let opened = Artifact::open(&spent, Check::Digests).unwrap();
    assert_eq!(opened.plan().decode.bits_per_weight, Some(6.0));
}

#[test]
fn one_changed_byte_of_the_copy_is_refused_by_its_files_name() {
    let (_folder, artifact, _) = &*PLAIN;
    let damaged = tempfile::tempdir().unwrap();
    let path = damaged.path().join(artifact.file_name().unwrap());
    jobs::copy(artifact, &path);
    let file = path.join("weights/decode-00001-of-00001.safetensors");
    let bytes = fs::metadata(&file).unwrap().len();
    jobs::flip(&file, usize::try_from(bytes).unwrap() - 1, 1);
    let error = Artifact::open(&path, Check::Digests).unwrap_err();
    assert!(
        error.message.contains("decode-00001") && error.message.contains("has the digest"),
        "{error}"
    );
    fs::remove_file(&file).unwrap();
    let error = Artifact::open(&path, Check::Nothing).unwrap_err();
    assert!(error.message.contains("decode-00001"), "{error}");
}

#[test]
fn tables_decode_as_their_own_weights_do() {
    let shape = "micro".parse::<mixquant_engine::bench::Shape>().unwrap();
    let config: Config = shape.config().unwrap();
    let mut model = Model::random(config.clone(), None).unwrap();
    let precise = logits(&model, Pass::Precise);
    let mut plan = PrecisionPlan::precise(DecodeScheme::LUT4);
    let copies = model.linears_of(&plan);
    assert!(copies.prefill.is_empty());
    let mut simulated = Model::random(config, None).unwrap();
    let copy: Vec<_> = copies.decode.iter().cloned().collect();
    simulated.simulate(&copy, ActivationFormat::Bf16).unwrap();
    let expected = logits(&simulated, Pass::Precise);

    model.attach(copies.clone(), None, plan.clone()).unwrap();
    let found = logits(&model, Pass::Precise);
    let (near, far) = (apart(&found, &expected), apart(&found, &precise));
    assert!(near < 0.1 * far, "{near} {far}");

    plan.decode.scheme = DecodeScheme::W4A8;
    let error = model.set_plan(plan.clone()).unwrap_err();
    assert!(error.message.contains("W4A8 needs quantised"), "{error}");
    let error = model.attach(copies, None, plan.clone()).unwrap_err();
    assert!(error.message.contains("is not INT4"), "{error}");
    let error = model.attach(Copies::none(), None, plan).unwrap_err();
    assert!(error.message.contains("W4A8 needs quantised"), "{error}");
}

#[test]
fn settings_without_a_copy_to_make_are_refused_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let (bf16, lut) = (plan(DecodeScheme::BF16), plan(DecodeScheme::LUT4));
    for (plan, extra, wanted) in [
        (&bf16, ["--decode-quantiser", "gptq"], "use W4A8 or LUT4"),
        (&bf16, ["--budget-bpw", "5"], "a budget for W4A8"),
        (&lut, ["--decode-quantiser", "gptq"], "cannot make LUT4"),
        (
            &plan(DecodeScheme::W4A8),
            ["--budget-bpw", "4.05"],
            "give at least 4.",
        ),
    ] {
        let output = jobs::engine(jobs::calibrate(folder.path(), plan, &extra));
        let error = jobs::error_line(&output);
        assert!(error.contains(wanted), "{error}");
    }
    assert_eq!(Quantiser::suiting("LUT4".parse().unwrap()), Quantiser::Lut);
}
