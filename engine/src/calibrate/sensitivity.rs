//! What each tensor costs when it alone is rounded to 4 bits, and from that the schemes that fit a budget of bits a weight.
//!
//! The cost is measured where it counts: the mean KL divergence of the model's next tokens from the unquantised ones. For other schemes it is
//! scaled by the squared error of the tensor's outputs, to which a small divergence is proportional.

use std::collections::BTreeMap;

use mixquant_crds::PrecisionPlan;

use super::allocate::{Choice, allocate};
use super::quantise::{Assignment, PLACES};
use super::quantisers::Recipe;
use super::statistics::{Gatherer, Statistics, output_error};
use crate::dataset::Window;
use crate::error::{Error, Result};
use crate::model::{Chunk, LinearInput, LogitRows, Model, Pass, StoredLinear, Workspace};
use crate::progress::Progress;
use crate::quant::{ActivationFormat, QuantisedLinear, Scheme, round_to_nearest};
use crate::verify::divergence::distance;

/// Texts that sensitivity is measured on: it takes one reading of them a tensor.
const TEXTS: usize = 8;

/// What the budget may buy, the cheapest first.
const CHOICES: [Scheme; 4] = [
    Scheme::w4a16(128),
    Scheme::w4a16(64),
    Scheme::w4a16(32),
    Scheme::W8A16,
];

/// One tensor's cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Sensitivity {
    /// The linear.
    pub name: String,
    /// Its layer.
    pub layer: usize,
    /// What it reads.
    pub input: LinearInput,
    /// Weights in it.
    pub weights: usize,
    /// Mean KL divergence (nats) with each of the schemes W4A16-g128, -g64, -g32 and W8A16: the first measured, the others scaled.
    pub kl: Vec<f64>,
    /// Bits a weight of the same schemes.
    pub bits: Vec<f64>,
}

/// Measures every block linear. The model is left as it was.
///
/// # Errors
/// Texts or weights that cannot be used, or a signal to stop.
pub fn measure(
    model: &mut Model,
    texts: &[Window],
    progress: &Progress,
) -> Result<Vec<Sensitivity>> {
    let plan = model.plan().clone();
    model.set_plan(PrecisionPlan::baseline())?;
    let texts = &texts[..texts.len().min(TEXTS)];
    let measured = measure_all(model, texts, progress);
    model.stop_simulating();
    model.set_plan(plan)?;
    measured
}

fn measure_all(
    model: &mut Model,
    texts: &[Window],
    progress: &Progress,
) -> Result<Vec<Sensitivity>> {
    let linears = model.stored_linears();
    let mut stage = progress.stage("sensitivity", linears.len() + 1);
    let mut workspace = Workspace::default();
    let baseline = texts
        .iter()
        .map(|text| logits(model, text, &mut workspace))
        .collect::<Result<Vec<_>>>()?;
    let mut streams = texts
        .iter()
        .map(|text| model.embed_text(&text.ids))
        .collect::<Result<Vec<_>>>()?;
    stage.advance()?;
    let mut found = Vec::with_capacity(linears.len());
    for layer in 0..model.config().num_hidden_layers {
        let own: Vec<&StoredLinear> = linears
            .iter()
            .filter(|linear| linear.layer == layer)
            .collect();
        let widths: Vec<_> = own
            .iter()
            .map(|linear| (linear.input, linear.in_features))
            .collect();
        let mut gatherer = Gatherer::new(&widths, 1);
        for (text, stream) in texts.iter().zip(&mut streams) {
            model.run_block(
                layer,
                &text.ids,
                stream,
                &mut workspace,
                Some(&mut gatherer),
            );
        }
        let statistics = gatherer.into_places();
        for linear in own {
            let rows = model.stored_weights(&linear.name);
            let mut sensitivity = errors(linear, &rows, &statistics[&linear.input]);
            let quantised = QuantisedLinear {
                name: linear.name.clone(),
                weight: round_to_nearest(&rows, linear.in_features, CHOICES[0].weights),
                input_scale: None,
            };
            model.simulate(&[quantised], ActivationFormat::Bf16)?;
            let kl = mean_kl(model, texts, &baseline, &mut workspace)?;
            model.stop_simulating();
            let first = sensitivity.kl[0];
            for error in &mut sensitivity.kl {
                *error = if first > 0.0 {
                    kl * *error / first
                } else {
                    0.0
                };
            }
            found.push(sensitivity);
            stage.advance()?;
        }
    }
    Ok(found)
}

/// The squared output errors with each scheme, still in the place of divergences.
fn errors(linear: &StoredLinear, rows: &[f32], statistics: &Statistics) -> Sensitivity {
    let moments = statistics.moments();
    let (kl, bits) = CHOICES
        .iter()
        .map(|scheme| {
            let weight = round_to_nearest(rows, linear.in_features, scheme.weights);
            let mut delta = weight.dequantise();
            delta
                .iter_mut()
                .zip(rows)
                .for_each(|(delta, row)| *delta -= row);
            let error = output_error(&delta, &moments, linear.in_features);
            (error, weight.bits_per_weight())
        })
        .unzip();
    Sensitivity {
        name: linear.name.clone(),
        layer: linear.layer,
        input: linear.input,
        weights: rows.len(),
        kl,
        bits,
    }
}

fn logits(model: &Model, text: &Window, workspace: &mut Workspace) -> Result<Vec<f32>> {
    let inputs = &text.ids[..text.ids.len() - 1];
    let mut cache = model.new_cache(inputs.len());
    let chunk = Chunk {
        tokens: inputs,
        cache: &mut cache,
        logits: LogitRows::All,
    };
    let logits = model.forward(Pass::Precise, &mut [chunk], workspace, None)?;
    Ok(logits.to_vec())
}

fn mean_kl(
    model: &Model,
    texts: &[Window],
    baseline: &[Vec<f32>],
    workspace: &mut Workspace,
) -> Result<f64> {
    let vocab_size = model.config().vocab_size;
    let (mut sum, mut tokens) = (0.0, 0);
    for (text, baseline) in texts.iter().zip(baseline) {
        let logits = logits(model, text, workspace)?;
        let rows = baseline
            .chunks_exact(vocab_size)
            .zip(logits.chunks_exact(vocab_size));
        for ((baseline, logits), target) in rows.zip(&text.ids[1..]) {
            let distance = distance(baseline, logits, *target).map_err(|_| {
                Error::model("logits over the calibration texts are not finite: the model's weights are damaged")
            })?;
            sum += distance.kl;
            tokens += 1;
        }
    }
    Ok(sum / f64::from(tokens.max(1)))
}

/// Schemes for all places that together take at most `bits_per_weight` bits a weight of the block linears.
///
/// # Errors
/// A budget that even 4 bits everywhere exceed: says what they take.
#[expect(
    clippy::cast_precision_loss,
    reason = "numbers of weights are far below 2^53"
)]
pub fn assign(
    sensitivities: &[Sensitivity],
    bits_per_weight: f64,
    recipe: Recipe,
) -> Result<Assignment> {
    let mut places: BTreeMap<(usize, LinearInput), Vec<Choice>> = BTreeMap::new();
    for tensor in sensitivities {
        let nothing = Choice {
            bits: 0.0,
            loss: 0.0,
        };
        let choices = places
            .entry((tensor.layer, tensor.input))
            .or_insert_with(|| vec![nothing; CHOICES.len()]);
        for (choice, (kl, bits)) in choices.iter_mut().zip(tensor.kl.iter().zip(&tensor.bits)) {
            choice.loss += kl;
            choice.bits += bits * tensor.weights as f64;
        }
    }
    let weights: usize = sensitivities.iter().map(|tensor| tensor.weights).sum();
    let choices: Vec<Vec<Choice>> = places.values().cloned().collect();
    let Some(chosen) = allocate(&choices, bits_per_weight * weights as f64) else {
        let least: f64 = choices.iter().map(|choices| choices[0].bits).sum();
        return Err(Error::plan(format!(
            "--budget-bpw {bits_per_weight} is less than 4 bits with their scales take: give at least {:.2}",
            (least / weights as f64 * 100.0).ceil() / 100.0
        )));
    };
    let own = places
        .into_keys()
        .zip(chosen)
        .map(|(place, choice)| (place, CHOICES[choice]));
    Ok(Assignment {
        recipe,
        own: own.collect(),
    })
}

/// The places of one layer with their schemes, for people.
pub fn describe(assignment: &Assignment, layers: usize) -> Vec<String> {
    (0..layers)
        .map(|layer| {
            let schemes = PLACES.map(|place| assignment.recipe(layer, place).scheme.to_string());
            let [attention, output, feed_forward, down] = schemes;
            format!(
                "layer {layer}: q,k,v {attention}; o {output}; gate,up {feed_forward}; down {down}"
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::quantisers::Quantiser;

    fn tensor(layer: usize, input: LinearInput, kl: f64) -> Sensitivity {
        Sensitivity {
            name: format!("{layer} {input:?}"),
            layer,
            input,
            weights: 1000,
            kl: vec![kl, kl * 0.8, kl * 0.6, kl * 0.01],
            bits: vec![4.125, 4.25, 4.5, 8.0],
        }
    }

    fn recipe() -> Recipe {
        Recipe {
            scheme: Scheme::w4a16(128),
            quantiser: Quantiser::Rtn,
        }
    }

    #[test]
    fn the_most_sensitive_place_is_kept_at_8_bits() {
        let tensors = [
            tensor(0, LinearInput::Attention, 0.5),
            tensor(0, LinearInput::Attention, 0.5),
            tensor(0, LinearInput::Down, 0.001),
            tensor(1, LinearInput::Down, 0.002),
        ];
        let assignment = assign(&tensors, 6.2, recipe()).unwrap();
        let scheme = |layer, place| assignment.recipe(layer, place).scheme.to_string();
        assert_eq!(scheme(0, LinearInput::Attention), "W8A16");
        assert!(scheme(0, LinearInput::Down).starts_with("W4A16"));
        assert!(describe(&assignment, 1)[0].starts_with("layer 0: q,k,v W8A16; o W4A16-g128"));
    }

    #[test]
    fn a_budget_below_4_bits_is_refused_with_the_least_that_works() {
        let error = assign(&[tensor(0, LinearInput::Down, 1.0)], 4.0, recipe()).unwrap_err();
        assert!(error.message.contains("give at least 4.13"), "{error}");
    }
}
