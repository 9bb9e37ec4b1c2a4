//! Quantises a model layer by layer over the calibration texts, so that no more than one layer's moments are ever in memory.
//!
//! `calibrate`, `export` and `quality` call it. Finished layers are kept on disk, so that a killed run goes on where it was; the answer is the
//! same on any number of threads and after any number of kills. The model is left as it was.

use std::collections::BTreeMap;

use mixquant_crds::PrecisionPlan;

use super::checkpoint::Checkpoints;
use super::quantisers::gptq::Gptq;
use super::quantisers::{Place, Quantiser, Recipe, Tied};
use super::statistics::{Gatherer, Statistics};
use crate::dataset::Window;
use crate::error::Result;
use crate::model::{LinearInput, Model, StoredLinear, Workspace};
use crate::progress::{Progress, Stage};
use crate::quant::{QuantisedLinear, QuantisedLinears, Scheme};

/// The places of a block, in the order of the computation.
pub const PLACES: [LinearInput; 4] = [
    LinearInput::Attention,
    LinearInput::Output,
    LinearInput::FeedForward,
    LinearInput::Down,
];

/// What is made of which linears: those that read one input get one scheme.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// The quantiser, and the scheme of all places that have none of their own.
    pub recipe: Recipe,
    /// Schemes by layer and place.
    pub own: BTreeMap<(usize, LinearInput), Scheme>,
}

impl Assignment {
    /// The same everywhere.
    pub const fn uniform(recipe: Recipe) -> Self {
        Self {
            recipe,
            own: BTreeMap::new(),
        }
    }

    /// What a place gets.
    pub fn recipe(&self, layer: usize, place: LinearInput) -> Recipe {
        let scheme = self.own.get(&(layer, place)).copied();
        Recipe {
            scheme: scheme.unwrap_or(self.recipe.scheme),
            ..self.recipe
        }
    }
}

/// Quantises all block linears.
///
/// # Errors
/// A quantiser that does not fit the scheme, weights or texts that cannot be used, a signal to stop.
pub fn quantise(
    model: &mut Model,
    texts: &[Window],
    assignment: &Assignment,
    saved: Option<&Checkpoints>,
    progress: &Progress,
) -> Result<QuantisedLinears> {
    assignment.recipe.check()?;
    for scheme in assignment.own.values() {
        Recipe {
            scheme: *scheme,
            ..assignment.recipe
        }
        .check()?;
    }
    let plan = model.plan().clone();
    model.set_plan(PrecisionPlan::baseline())?;
    let result = Walk::new(model, texts, assignment, progress).run(saved);
    model.stop_simulating();
    model.set_plan(plan)?;
    result
}

/// The state of a walk through the layers.
struct Walk<'a> {
    model: &'a mut Model,
    texts: &'a [Window],
    assignment: &'a Assignment,
    linears: Vec<StoredLinear>,
    /// What enters the current layer, a text each.
    streams: Vec<Vec<f32>>,
    workspace: Workspace,
    stage: Stage,
}

impl<'a> Walk<'a> {
    fn new(
        model: &'a mut Model,
        texts: &'a [Window],
        assignment: &'a Assignment,
        progress: &Progress,
    ) -> Self {
        let layers = model.config().num_hidden_layers;
        let passes = if assignment.recipe.quantiser.needs_data() {
            // One more takes the streams to the next layer.
            stages(assignment.recipe.quantiser).len() + 1
        } else {
            1
        };
        let texts = if assignment.recipe.quantiser.needs_data() {
            texts
        } else {
            &[]
        };
        Self {
            linears: model.stored_linears(),
            stage: progress.stage("quantising", layers * passes * texts.len().max(1)),
            model,
            texts,
            assignment,
            streams: Vec::new(),
            workspace: Workspace::default(),
        }
    }

    fn run(mut self, saved: Option<&Checkpoints>) -> Result<QuantisedLinears> {
        self.streams = self
            .texts
            .iter()
            .map(|text| self.model.embed_text(&text.ids))
            .collect::<Result<_>>()?;
        let mut all = Vec::new();
        for layer in 0..self.model.config().num_hidden_layers {
            let layers_linears = if let Some(linears) = saved.and_then(|saved| saved.load(layer)) {
                let skipped = stages(self.assignment.recipe.quantiser).len();
                self.stage.skip(skipped * self.texts.len());
                linears
            } else {
                let linears = self.layer(layer)?;
                if let Some(saved) = saved {
                    saved.save(layer, &linears)?;
                }
                linears
            };
            self.pass(layer, &layers_linears)?;
            all.extend(layers_linears);
        }
        QuantisedLinears::from_tensors(all)
    }

    /// Quantises one layer. Simulated linears of it may be left behind.
    fn layer(&mut self, layer: usize) -> Result<Vec<QuantisedLinear>> {
        let quantiser = self.assignment.recipe.quantiser;
        let mut done = Vec::new();
        for places in stages(quantiser).iter().copied() {
            let statistics = self.gather(layer, places)?;
            for place in places {
                let linears = self.place(layer, *place, &statistics[place])?;
                if matches!(quantiser, Quantiser::Gptq(_)) {
                    self.simulate(layer, *place, &linears)?;
                }
                done.extend(linears);
            }
        }
        Ok(done)
    }

    fn simulate(
        &mut self,
        layer: usize,
        place: LinearInput,
        linears: &[QuantisedLinear],
    ) -> Result<()> {
        let activations = self.assignment.recipe(layer, place).scheme.activations;
        self.model.simulate(linears, activations)
    }

    /// Reads the texts up to the layer's places.
    fn gather(
        &mut self,
        layer: usize,
        places: &[LinearInput],
    ) -> Result<BTreeMap<LinearInput, Statistics>> {
        let widths: Vec<(LinearInput, usize)> = places
            .iter()
            .map(|place| {
                let mut linears = self.linears.iter();
                let linear = linears.find(|linear| linear.layer == layer && linear.input == *place);
                (*place, linear.map_or(0, |linear| linear.in_features))
            })
            .collect();
        let tokens = self.texts.iter().map(|text| text.ids.len()).sum();
        let mut gatherer = Gatherer::new(&widths, tokens);
        for (text, stream) in self.texts.iter().zip(&self.streams) {
            let mut stream = stream.clone();
            let (model, workspace) = (&*self.model, &mut self.workspace);
            model.run_block(
                layer,
                &text.ids,
                &mut stream,
                workspace,
                Some(&mut gatherer),
            );
            self.stage.advance()?;
        }
        Ok(gatherer.into_places())
    }

    fn place(
        &self,
        layer: usize,
        place: LinearInput,
        statistics: &Statistics,
    ) -> Result<Vec<QuantisedLinear>> {
        let linears: Vec<&StoredLinear> = self
            .linears
            .iter()
            .filter(|linear| linear.layer == layer && linear.input == place)
            .collect();
        let stored: Vec<Vec<f32>> = linears
            .iter()
            .map(|linear| self.model.stored_weights(&linear.name))
            .collect();
        let config = self.model.config();
        let place_of_linears = Place {
            names: linears.iter().map(|linear| linear.name.as_str()).collect(),
            weights: stored.iter().map(Vec::as_slice).collect(),
            statistics,
            tied: match place {
                LinearInput::Output => Tied::Heads {
                    group: config.num_attention_heads / config.num_key_value_heads,
                    head_dim: config.head_dim,
                },
                _ => Tied::No,
            },
        };
        let (weights, scale) = self
            .assignment
            .recipe(layer, place)
            .quantise(&place_of_linears)?;
        let named = linears
            .iter()
            .zip(weights)
            .map(|(linear, weight)| QuantisedLinear {
                name: linear.name.clone(),
                weight,
                input_scale: scale.clone(),
            });
        Ok(named.collect())
    }

    /// Takes the streams through the layer: with the quantised linears where the quantiser makes up for them, else with the precise ones.
    fn pass(&mut self, layer: usize, linears: &[QuantisedLinear]) -> Result<()> {
        self.model.stop_simulating();
        if self.texts.is_empty() {
            return self.stage.advance();
        }
        if matches!(self.assignment.recipe.quantiser, Quantiser::Gptq(_)) {
            for place in PLACES {
                let names: Vec<&str> = self
                    .linears
                    .iter()
                    .filter(|linear| linear.layer == layer && linear.input == place)
                    .map(|linear| linear.name.as_str())
                    .collect();
                let own = linears
                    .iter()
                    .filter(|linear| names.contains(&linear.name.as_str()));
                self.simulate(layer, place, &own.cloned().collect::<Vec<_>>())?;
            }
        }
        for (text, stream) in self.texts.iter().zip(&mut self.streams) {
            self.model
                .run_block(layer, &text.ids, stream, &mut self.workspace, None);
            self.stage.advance()?;
        }
        self.model.stop_simulating();
        Ok(())
    }
}

/// Which places are gathered in one reading of the texts.
const fn stages(quantiser: Quantiser) -> &'static [&'static [LinearInput]] {
    match quantiser {
        Quantiser::Gptq(Gptq {
            true_sequential: true,
            ..
        }) => &[
            &[LinearInput::Attention],
            &[LinearInput::Output],
            &[LinearInput::FeedForward],
            &[LinearInput::Down],
        ],
        _ => &[&PLACES],
    }
}
