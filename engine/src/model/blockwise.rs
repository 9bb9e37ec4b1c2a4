//! A model block by block, for quantisers: the residual stream of a text in, through one block, and out again, in FP32.
//!
//! Also replaces linears by simulated ones and hands out stored weights. Calibration calls it; serving never does.

use super::linear::Arithmetic;
use super::simulated::Simulated;
use super::weights::Layer;
use super::{Chunk, LinearInput, LogitRows, Model, Tap, Workspace};
use crate::quant::{ActivationFormat, QuantisedLinear};
use crate::{Error, Result};

/// A block linear as it is stored.
#[derive(Debug)]
pub struct StoredLinear {
    /// The checkpoint's name without `.weight`.
    pub name: String,
    /// Its layer.
    pub layer: usize,
    /// What it reads.
    pub input: LinearInput,
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
}

/// What the linears of a block read, in the order of [`Layer::linears`].
const INPUTS: [LinearInput; 7] = [
    LinearInput::Attention,
    LinearInput::Attention,
    LinearInput::Attention,
    LinearInput::Output,
    LinearInput::FeedForward,
    LinearInput::FeedForward,
    LinearInput::Down,
];

impl Model {
    /// The block linears, in the artifact's order.
    pub fn stored_linears(&self) -> Vec<StoredLinear> {
        let layers = self.weights.layers.iter().enumerate();
        layers
            .flat_map(|(layer, weights)| {
                weights
                    .linears()
                    .into_iter()
                    .zip(INPUTS)
                    .map(move |(linear, input)| StoredLinear {
                        name: linear.name.clone(),
                        layer,
                        input,
                        out_features: linear.out_features,
                        in_features: linear.in_features,
                    })
            })
            .collect()
    }

    /// A block linear's stored weights, `[out, in]`.
    ///
    /// # Panics
    /// When there is no linear of that name.
    pub fn stored_weights(&self, name: &str) -> Vec<f32> {
        let linear = self.weights.linears().find(|linear| linear.name == name);
        let linear = linear.expect("names come from stored_linears");
        linear.weight.stored_rows(0..linear.out_features)
    }

    /// Computes with these instead of the linears of the same names from now on, in every pass.
    ///
    /// # Errors
    /// A linear that the model does not have, or of another shape.
    pub fn simulate(
        &mut self,
        linears: &[QuantisedLinear],
        activations: ActivationFormat,
    ) -> Result<()> {
        for quantised in linears {
            let mut all = self.weights.layers.iter_mut().flat_map(Layer::linears_mut);
            let Some(linear) = all.find(|linear| linear.name == quantised.name) else {
                return Err(Error::artifact(format!(
                    "{}: is not in the model: quantise this model",
                    quantised.name
                )));
            };
            linear.check_shape(&quantised.weight)?;
            linear.simulated = Some(Simulated::new(quantised, activations));
        }
        Ok(())
    }

    /// Computes with the linears' own weights again.
    pub fn stop_simulating(&mut self) {
        for linear in self.weights.layers.iter_mut().flat_map(Layer::linears_mut) {
            linear.simulated = None;
        }
    }

    /// What enters the first block: `[tokens, hidden_size]`.
    ///
    /// # Errors
    /// Tokens that the model cannot read.
    pub fn embed_text(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut cache = self.new_cache(tokens.len());
        let chunks = [Chunk {
            tokens,
            cache: &mut cache,
            logits: LogitRows::None,
        }];
        self.check_chunks(&chunks)?;
        let mut workspace = Workspace::default();
        self.embed(&chunks, &mut workspace);
        Ok(workspace.x)
    }

    /// Takes a text's residual stream through one block, from the text's first token on.
    pub fn run_block(
        &self,
        layer: usize,
        tokens: &[u32],
        stream: &mut Vec<f32>,
        workspace: &mut Workspace,
        tap: Option<&mut dyn Tap>,
    ) {
        let mut cache = self.new_cache(tokens.len());
        let mut chunks = [Chunk {
            tokens,
            cache: &mut cache,
            logits: LogitRows::None,
        }];
        rayon::scope(|_| {
            // For the rotations; the stream is what the block before left.
            self.embed(&chunks, workspace);
            std::mem::swap(&mut workspace.x, stream);
            self.block(Arithmetic::Fp32, layer, &mut chunks, workspace, tap);
            std::mem::swap(&mut workspace.x, stream);
        });
    }
}
