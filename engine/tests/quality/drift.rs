//! What is counted beyond calibration's ranges: next to nothing on texts like calibration's, nearly everything after a shift.

use mixquant_crds::PrecisionPlan;
use mixquant_engine::calibrate::default_plan;
use mixquant_engine::dataset::Window;
use mixquant_engine::drift::{Counts, Ranges, Seen, Share, Watch};
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Tap, Workspace};
use mixquant_engine::valve::read::{Settings, Valve};

use super::{jobs, outliers, texts};

/// What calibration keeps of these texts.
fn ranges(model: &mut Model, calibration: &[Window]) -> Ranges {
    model.set_plan(PrecisionPlan::baseline()).unwrap();
    let config = model.config();
    let mut seen = Seen::new(config.num_hidden_layers, config.num_key_value_heads);
    for text in calibration {
        seen.text(text.ids.len());
        read(model, Pass::Precise, &text.ids, &mut seen);
    }
    seen.ranges().unwrap()
}

fn read(model: &Model, pass: Pass, ids: &[u32], tap: &mut dyn Tap) {
    let mut cache = model.new_cache(ids.len());
    let chunk = Chunk {
        tokens: ids,
        cache: &mut cache,
        logits: LogitRows::None,
    };
    let mut workspace = Workspace::default();
    model
        .forward(pass, &mut [chunk], &mut workspace, Some(tap))
        .unwrap();
}

/// What serving counts while the valve reads these prompts on the quantised copy.
fn counted(model: &mut Model, ranges: &Ranges, prompts: &[Window]) -> Counts {
    let mut plan = default_plan();
    plan.prefill.min_prompt_tokens = 1;
    plan.kv_cache = PrecisionPlan::baseline().kv_cache;
    model.attach(model.quantise_linears(), None, plan).unwrap();
    let mut watch = Watch::new(ranges.clone(), true);
    let (mut valve, mut workspace) = (Valve::new(Settings::default()), Workspace::default());
    for prompt in prompts {
        let whole = (&prompt.ids[..], LogitRows::Last);
        valve
            .read(
                model,
                whole,
                prompt.ids.len(),
                &mut workspace,
                Some(&mut watch),
            )
            .unwrap();
    }
    watch.take()
}

fn percent(share: Share) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts of a test")]
    let percent = 100.0 * share.beyond as f64 / share.rows.max(1) as f64;
    percent
}

fn together(shares: &[Share]) -> Share {
    shares.iter().fold(Share::default(), |sum, share| Share {
        rows: sum.rows + share.rows,
        beyond: sum.beyond + share.beyond,
    })
}

#[test]
fn texts_of_calibration_lie_within_its_ranges_and_a_shift_of_activations_does_not() {
    let mut model = Model::open(&jobs::model()).unwrap();
    let calibration = texts::calibration();
    let ranges = ranges(&mut model, &calibration);
    assert_eq!(ranges.prompt_lengths.iter().sum::<u64>(), 16);

    let same = counted(&mut model, &ranges, &calibration);
    let others = counted(&mut model, &ranges, &texts::evaluation());
    let folder = tempfile::tempdir().unwrap();
    outliers::transform(folder.path());
    let mut shifted = Model::open(folder.path()).unwrap();
    let shifted = counted(&mut shifted, &ranges, &calibration);
    for (name, counts) in [("same", &same), ("others", &others), ("shifted", &shifted)] {
        println!(
            "{name}: activations {:.3} % of {:?}, keys {:.3} %, values {:.3} %",
            percent(together(&counts.inputs)),
            counts.inputs.map(percent),
            percent(counts.keys),
            percent(counts.values)
        );
    }
    for share in [together(&same.inputs), same.keys, same.values] {
        assert!(share.rows > 10_000, "{same:?}");
        assert!(percent(share) < 0.3, "the texts of calibration: {same:?}");
    }
    // The inputs behind both norms were scaled, and they alone.
    assert!(percent(shifted.inputs[0]) > 90.0 && percent(shifted.inputs[2]) > 90.0);
    let [far, near] = [&shifted, &others].map(|counts| percent(together(&counts.inputs)));
    assert!(far > 20.0 && near < far / 4.0, "{near} {far}");
}
