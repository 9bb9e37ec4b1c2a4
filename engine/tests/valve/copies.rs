//! The three memory modes: which weights each keeps, and that they answer as they say.

use mixquant_crds::{DecodeScheme, PrecisionPlan, WeightCopies};
use mixquant_engine::artifact::manifest::Phase;
use mixquant_engine::artifact::{Artifact, Check};
use mixquant_engine::model::{
    Chunk, Importance, LogitRows, Model, Pass, QuantisedLinears, Workspace,
};

use crate::fixture::{directory, plan, prompt, read, settings};
use crate::jobs;

fn plan_with(copies: WeightCopies) -> PrecisionPlan {
    let mut plan = plan();
    plan.weight_copies = copies;
    if copies == WeightCopies::Single {
        plan.decode.scheme = DecodeScheme::W8A8;
        plan.prefill.min_prompt_tokens = 1;
    }
    plan
}

fn model_with(copies: WeightCopies) -> Model {
    let mut model = Model::open(&directory()).unwrap();
    let plan = plan_with(copies);
    let config = model.config();
    let thresholds = vec![vec![2.0; config.num_key_value_heads]; config.num_hidden_layers];
    let linears = model.linears_of(&plan);
    model
        .attach(linears, Some(Importance { thresholds }), plan)
        .unwrap();
    model
}

fn logits(model: &Model, pass: Pass, tokens: &[u32]) -> Vec<u32> {
    let mut cache = model.new_cache(tokens.len());
    let chunk = Chunk {
        tokens,
        cache: &mut cache,
        logits: LogitRows::All,
    };
    let mut workspace = Workspace::default();
    let rows = model.forward(pass, &mut [chunk], &mut workspace, None);
    rows.unwrap().iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn on_the_fly_gives_the_bits_of_the_second_copy() {
    let (dual, made) = (
        model_with(WeightCopies::Dual),
        model_with(WeightCopies::OnTheFly),
    );
    let prompt = prompt(96);
    for pass in [Pass::Prefill, Pass::Precise] {
        assert_eq!(
            logits(&dual, pass, &prompt),
            logits(&made, pass, &prompt),
            "{pass:?}"
        );
    }
    assert_ne!(
        logits(&made, Pass::Prefill, &prompt),
        logits(&made, Pass::Precise, &prompt)
    );
    let (reading, _) = read(&made, &prompt, LogitRows::Last, settings(0.0));
    assert_eq!(
        (reading.pass, reading.work.valve),
        (Pass::Prefill, 1),
        "the valve is behind it too"
    );
}

#[test]
fn one_copy_serves_both_phases_and_has_no_switch() {
    let (single, dual) = (
        model_with(WeightCopies::Single),
        model_with(WeightCopies::Dual),
    );
    let prompt = prompt(96);
    let quantised = logits(&dual, Pass::Prefill, &prompt);
    for pass in [Pass::Prefill, Pass::Precise] {
        assert_eq!(logits(&single, pass, &prompt), quantised, "{pass:?}");
    }
    let (reading, _) = read(&single, &prompt, LogitRows::Last, settings(100.0));
    assert!(reading.check.is_none(), "there is nothing to compare with");
}

#[test]
fn each_mode_keeps_what_it_says() {
    let bytes = |copies| model_with(copies).weight_bytes();
    let (dual, made, single) = (
        bytes(WeightCopies::Dual),
        bytes(WeightCopies::OnTheFly),
        bytes(WeightCopies::Single),
    );
    let model = model_with(WeightCopies::Dual);
    let linears: usize = model
        .quantise_linears()
        .iter()
        .map(|linear| linear.weight.out_features * linear.weight.in_features)
        .sum();
    let layer = linears / model.config().num_hidden_layers;
    assert_eq!(dual.precise, made.precise);
    assert_eq!((dual.scratch, made.quantised, single.scratch), (0, 0, 0));
    assert_eq!(dual.quantised, single.quantised);
    // A byte a weight, scales and padding beside.
    assert!(
        dual.quantised >= linears && dual.quantised < linears * 11 / 10,
        "{dual:?}"
    );
    assert_eq!(
        dual.precise - single.precise,
        2 * linears,
        "BF16 linears are gone"
    );
    assert!(
        made.scratch > 0 && made.scratch <= layer,
        "{made:?}, {layer} a layer"
    );
}

#[test]
fn artifacts_hold_a_copy_where_the_plan_keeps_one() {
    let folder = tempfile::tempdir().unwrap();
    for copies in [WeightCopies::OnTheFly, WeightCopies::Single] {
        let options = jobs::options(folder.path(), plan_with(copies));
        let artifact = jobs::artifact(&options);
        let artifact = Artifact::open(&artifact, Check::Digests).unwrap();
        let weights = artifact.manifest().weights(Phase::Prefill).count();
        assert_eq!(weights > 0, copies == WeightCopies::Single, "{copies:?}");
        let mut model = Model::open(&directory()).unwrap();
        let golden = artifact.golden().unwrap().clone();
        artifact.attach_to(&mut model).unwrap();
        assert!(golden.check(&model).unwrap() < 1e-6);
        let switched = golden
            .answers
            .iter()
            .all(|answer| answer.quantised.is_some());
        assert_eq!(switched, copies == WeightCopies::OnTheFly);
    }
}

#[test]
fn a_kept_copy_that_is_not_there_is_refused() {
    let mut model = Model::open(&directory()).unwrap();
    for copies in [WeightCopies::Dual, WeightCopies::Single] {
        let mut plan = plan_with(copies);
        plan.kv_cache = PrecisionPlan::baseline().kv_cache;
        let error = model
            .attach(QuantisedLinears::none(), None, plan)
            .unwrap_err();
        assert!(error.message.contains("needs quantised weights"), "{error}");
    }
}
