//! The whole model: perplexity and divergence of schemes, in the order that theory says.

use mixquant_engine::calibrate::quantisers::awq::Awq;
use mixquant_engine::calibrate::quantisers::gptq::Gptq;
use mixquant_engine::calibrate::quantisers::{Quantiser, Recipe};
use mixquant_engine::quality::Row;
use mixquant_engine::quant::Scheme;

use super::{jobs, texts};

const fn recipe(scheme: Scheme, quantiser: Quantiser) -> Recipe {
    Recipe { scheme, quantiser }
}

#[test]
fn a_quantised_prefill_before_precise_decode_stays_within_half_a_percent() {
    let rows = [
        Row::Prefill(recipe(Scheme::W8A8, Quantiser::Rtn)),
        Row::Uniform(recipe(Scheme::W8A8, Quantiser::Rtn)),
        Row::Bf16,
    ];
    let measured = texts::distances(&jobs::model(), &rows);
    let [switched, uniform, bf16] = &measured[..] else {
        panic!("three rows")
    };
    assert!(
        switched.perplexity_increase_percent.abs() < 0.5,
        "{switched:?}"
    );
    assert!(
        bf16.kl_mean < switched.kl_mean && switched.kl_mean < uniform.kl_mean,
        "{measured:?}"
    );
}

/// `(scheme, quantiser)` each, the first further from the model than all others.
fn all_beat_the_first(recipes: &[(Scheme, Quantiser)]) -> Vec<f64> {
    let rows: Vec<Row> = (recipes.iter())
        .map(|(scheme, quantiser)| Row::Uniform(recipe(*scheme, *quantiser)))
        .collect();
    let measured = texts::distances(&jobs::model(), &rows);
    let kl: Vec<f64> = measured.iter().map(|report| report.kl_mean).collect();
    for better in &kl[1..] {
        assert!(*better < kl[0], "{kl:?}");
    }
    kl
}

#[test]
fn at_4_bits_gptq_is_nearer_to_the_model_than_rounding_to_nearest_and_8_bits_are_nearer_still() {
    let scheme = Scheme::w4a16(128);
    let kl = all_beat_the_first(&[
        (scheme, Quantiser::Rtn),
        (scheme, Quantiser::Gptq(Gptq::default())),
        (Scheme::W8A16, Quantiser::Rtn),
    ]);
    assert!(kl[2] < 0.1 * kl[0], "8 bits cost far less than 4: {kl:?}");
}

#[test]
#[ignore = "a minute: clipping and tables of all linears"]
fn at_4_bits_awq_and_tables_are_nearer_to_the_model_than_rounding_to_nearest() {
    let scheme = Scheme::w4a16(128);
    all_beat_the_first(&[
        (scheme, Quantiser::Rtn),
        (scheme, Quantiser::Awq(Awq::default())),
        (Scheme::LUT4, Quantiser::Lut),
    ]);
}
