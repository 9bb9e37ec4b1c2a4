//! Decoder-only transformers on the CPU, all families through one graph: opens a Hugging Face directory and computes logits by the plan.
//!
//! Called by the worker, by calibration and by verification. It never samples, never tokenises and never decides what to run.

mod attention;
mod blockwise;
mod checkpoint;
pub mod config;
mod copies;
mod digest;
mod forward;
mod halves;
mod linear;
mod rope;
mod simulated;
mod tensor;
mod weight;
mod weights;
mod workspace;

use std::path::Path;
use std::sync::Arc;

use mixquant_crds::{DecodeScheme, Digest, KvCacheMode, PrecisionPlan, WeightCopies};

pub use self::blockwise::StoredLinear;
pub(crate) use self::checkpoint::random_values;
use self::checkpoint::{Checkpoint, Random, Requantised};
pub(crate) use self::checkpoint::{SHARD_INDEX, SINGLE_SHARD, map, shards_of_index};
pub use self::config::Config;
use self::copies::{Attached, Wanted};
pub use self::copies::{Copies, WeightBytes, decode_scheme};
pub(crate) use self::digest::FILES as CONFIGURATION_FILES;
use self::linear::Arithmetic;
use self::rope::Rope;
use self::weights::Weights;
pub use self::workspace::Workspace;
use crate::formats::gguf::TokenizerFiles;
use crate::kernels::{self, Backend};
use crate::kv::Layout;
pub use crate::kv::{Importance, KvCache};
use crate::quant::WeightFormat;
pub use crate::quant::{QuantisedLinear, QuantisedLinears};
use crate::{Error, Result};

/// Which weights a forward uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The quantised form of the block linears: the attached copy, or made on the way from the precise weights.
    Prefill,
    /// The arithmetic of the plan's decode scheme: the precise weights, unless tokens are generated from a quantised copy.
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

/// The places of a block where linears read an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearInput {
    /// q, k and v.
    Attention,
    /// o.
    Output,
    /// gate and up.
    FeedForward,
    /// down.
    Down,
}

/// Watches a chunk being computed.
pub trait Tap: Send {
    /// Whether attention is to be counted, which takes time.
    fn watches_attention(&self) -> bool {
        true
    }

    /// Called once a layer and KV head of each chunk, in order. For each key from the sequence's first token on: the softmax weight times the
    /// keys that the query saw, in sum over the chunk's queries of the head group, and how many of these queries could see it.
    fn attention(&mut self, _layer: usize, _kv_head: usize, _received: &[f32], _seen_by: &[f32]) {}

    /// Called before the linears of each place, with the `[tokens, columns]` that they read, not yet rounded.
    fn linear_input(&mut self, _layer: usize, _input: LinearInput, _rows: &[f32], _columns: usize) {
    }

    /// Called once a layer, with the `[tokens, width]` keys (their positions rotated in) and values that go to the caches.
    fn keys_and_values(&mut self, _layer: usize, _keys: &[f32], _values: &[f32], _width: usize) {}
}

/// Two that watch the same.
impl<A: Tap, B: Tap> Tap for (A, B) {
    fn watches_attention(&self) -> bool {
        self.0.watches_attention() || self.1.watches_attention()
    }

    fn attention(&mut self, layer: usize, kv_head: usize, received: &[f32], seen_by: &[f32]) {
        self.0.attention(layer, kv_head, received, seen_by);
        self.1.attention(layer, kv_head, received, seen_by);
    }

    fn linear_input(&mut self, layer: usize, input: LinearInput, rows: &[f32], columns: usize) {
        self.0.linear_input(layer, input, rows, columns);
        self.1.linear_input(layer, input, rows, columns);
    }

    fn keys_and_values(&mut self, layer: usize, keys: &[f32], values: &[f32], width: usize) {
        self.0.keys_and_values(layer, keys, values, width);
        self.1.keys_and_values(layer, keys, values, width);
    }
}

/// How a checkpoint stores its weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredFacts {
    /// For people, such as `safetensors BF16` or `gptq 4-bit, groups of 128`.
    pub format: String,
    /// Bytes of the files.
    pub bytes: u64,
}

/// Whether there is a model at this path, whole or damaged.
pub fn is_model(path: &Path) -> bool {
    path.join("config.json").exists() || checkpoint::GgufFile::find(path) != Ok(None)
}

/// The digest of the model at this path, which is checked as far as its files' headers.
///
/// # Errors
/// The file that cannot be used, and what to do about it.
pub fn digest_of(path: &Path) -> Result<Digest> {
    let (_, checkpoint) = checkpoint::open(path)?;
    digest::of_model(path, &*checkpoint)
}

/// The tokenizer's files that a GGUF model holds; `None` for a model of another kind.
///
/// # Errors
/// A vocabulary that cannot be rebuilt, and what would make it load.
pub fn tokenizer_files(path: &Path) -> Result<Option<TokenizerFiles>> {
    checkpoint::tokenizer_files(path)
}

/// A model that answers.
#[derive(Debug)]
pub struct Model {
    config: Config,
    digest: Digest,
    stored: StoredFacts,
    plan: PrecisionPlan,
    weights: Weights,
    attached: Attached,
    /// Of layers that see the whole context, and then of those with a window where they have their own.
    ropes: Vec<Rope>,
    importance: Option<Arc<Importance>>,
    backend: &'static dyn Backend,
}

impl Model {
    /// Opens a Hugging Face directory, or a GGUF file or the directory that holds it. Everything is checked before it is used; the plan is
    /// precise BF16.
    ///
    /// # Errors
    /// The file or tensor that cannot be used, and what to do about it.
    pub fn open(path: &Path) -> Result<Self> {
        let (config, checkpoint) = checkpoint::open(path)?;
        let digest = || digest::of_model(path, &*checkpoint);
        Self::build(config, &*checkpoint, digest)
    }

    /// The model at `path` with its block linears rounded to nearest, whatever its files store: a measurement of that scheme. Its digest is
    /// that of its configuration alone, so it is nobody's model.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_as(path: &Path, weights: WeightFormat) -> Result<Self> {
        let (config, stored) = checkpoint::open(path)?;
        let stored = &*stored;
        let digest = digest::of_no_file(&config);
        Self::build(config, &Requantised { stored, weights }, || Ok(digest))
    }

    /// Random weights of a shape: block linears in BF16, or as `weights` says.
    ///
    /// # Errors
    /// A shape that the scheme cannot have.
    pub fn random(config: Config, weights: Option<WeightFormat>) -> Result<Self> {
        let digest = digest::of_no_file(&config);
        Self::build(config, &Random::new(weights), || Ok(digest))
    }

    fn build(
        config: Config,
        checkpoint: &dyn Checkpoint,
        digest: impl FnOnce() -> Result<Digest>,
    ) -> Result<Self> {
        let mut weights = Weights::open(checkpoint, &config)?;
        let digest = digest()?;
        let stored = StoredFacts {
            format: checkpoint.format(),
            bytes: checkpoint
                .files()
                .iter()
                .map(|(_, bytes)| bytes.len() as u64)
                .sum(),
        };
        weights.round(Wanted::by(DecodeScheme::BF16));
        Ok(Self {
            ropes: [Some(&config.rope), config.local_rope.as_ref()]
                .into_iter()
                .flatten()
                .map(|parameters| Rope::new(parameters, config.head_dim))
                .collect(),
            config,
            digest,
            stored,
            plan: PrecisionPlan::precise(DecodeScheme::BF16),
            weights,
            attached: Attached::default(),
            importance: None,
            backend: kernels::detect(),
        })
    }

    /// Computes with another implementation of the kernels (tests compare them).
    pub fn set_backend(&mut self, backend: &'static dyn Backend) {
        self.backend = backend;
    }

    /// The checkpoint's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The digest over all files that the engine reads.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// How the checkpoint stores its weights.
    pub fn stored(&self) -> &StoredFacts {
        &self.stored
    }

    /// The plan that is obeyed.
    pub fn plan(&self) -> &PrecisionPlan {
        &self.plan
    }

    /// Bytes of the weights that the plan keeps in memory, by copy.
    pub fn weight_bytes(&self) -> WeightBytes {
        self.weights.bytes(&self.plan)
    }

    /// Bytes of weights that one decoded token reads.
    pub fn bytes_a_token(&self) -> usize {
        let blocks = Arithmetic::decode(self.plan.decode.scheme);
        self.weights.read_bytes(blocks)
    }

    /// Obeys another plan from now on. Caches made before keep the old one.
    ///
    /// # Errors
    /// A plan that cannot work with what is attached.
    pub fn set_plan(&mut self, plan: PrecisionPlan) -> Result<()> {
        check_plan(&plan, self.attached, self.importance.is_some())?;
        self.weights.round(Wanted::by(plan.decode.scheme));
        self.plan = plan;
        self.hold();
        Ok(())
    }

    /// Moves the precise weights that the plan computes with from the checkpoint's files into memory of their own, where decode reads them
    /// fastest. A plan does it when it is set; a model that serves as it was opened has to be told. The baseline computes with whatever is there.
    pub fn hold(&mut self) {
        let decode = self.plan.decode.scheme;
        if decode != DecodeScheme::FP32 {
            self.weights.hold(Wanted::by(decode));
        }
    }

    /// Takes what an artifact holds: the quantised copies of the block linears (or none), the importance thresholds and the plan.
    ///
    /// # Errors
    /// Tensors or thresholds that do not fit this model. Nothing is changed then.
    pub fn attach(
        &mut self,
        copies: impl Into<Copies>,
        thresholds: Option<Importance>,
        plan: PrecisionPlan,
    ) -> Result<()> {
        let copies = copies.into();
        let attached = Attached::of(&copies, plan.decode.scheme);
        check_plan(&plan, attached, thresholds.is_some())?;
        if let Some(thresholds) = &thresholds {
            thresholds.check(
                self.config.num_hidden_layers,
                self.config.num_key_value_heads,
            )?;
        }
        self.weights.attach(copies, &plan.decode)?;
        self.attached = attached;
        self.importance = thresholds.map(Arc::new);
        self.set_plan(plan)
    }

    /// Rounds all block linears to symmetric INT8, one scale an output channel.
    pub fn quantise_linears(&self) -> QuantisedLinears {
        self.weights.quantise()
    }

    /// What has to be attached for a plan without an artifact: all block linears rounded to nearest for each copy that it keeps.
    pub fn linears_of(&self, plan: &PrecisionPlan) -> Copies {
        let decode = decode_scheme(plan.decode.scheme);
        Copies {
            prefill: if plan.keeps_prefill_copy() {
                self.quantise_linears()
            } else {
                QuantisedLinears::none()
            },
            decode: decode.map_or_else(QuantisedLinears::none, |scheme| {
                self.weights.quantise_as(scheme)
            }),
        }
    }

    /// An empty cache that stores as the plan says.
    pub fn new_cache(&self, capacity_tokens: usize) -> KvCache {
        let layout = Layout {
            layers: self.config.num_hidden_layers,
            kv_heads: self.config.num_key_value_heads,
            head_dim: self.config.head_dim,
            full_precision: self.plan.decode.scheme == DecodeScheme::FP32,
            plan: self.plan.kv_cache.clone(),
            importance: self.importance.clone(),
        };
        KvCache::new(layout, capacity_tokens)
    }

    /// Computes the chunks and appends them to their caches. Returns the wanted logits rows of all chunks one after another, each
    /// `vocab_size` long. The answer for a sequence does not depend on the other chunks or on the number of threads, nor, as long as nothing
    /// is quantised, on how its tokens are cut into chunks.
    ///
    /// # Errors
    /// A chunk without tokens, a full cache, a token outside the vocabulary, a position outside the context. Nothing is changed then.
    pub fn forward<'w>(
        &self,
        pass: Pass,
        chunks: &mut [Chunk<'_>],
        workspace: &'w mut Workspace,
        tap: Option<&mut dyn Tap>,
    ) -> Result<&'w [f32]> {
        self.check_chunks(chunks)?;
        let blocks = match pass {
            Pass::Prefill
                if self.attached.prefill || self.plan.weight_copies == WeightCopies::OnTheFly =>
            {
                Arithmetic::Prefill
            }
            Pass::Prefill | Pass::Precise => Arithmetic::decode(self.plan.decode.scheme),
        };
        // Inside the pool from the start: each product then only splits, instead of waking the pool up.
        rayon::scope(|_| self.run(blocks, chunks, workspace, tap));
        Ok(&workspace.logits)
    }

    /// Which pass reads a prompt with this many tokens that no cache served.
    pub fn prefill_pass(&self, prompt_tokens: usize) -> Pass {
        let long = prompt_tokens
            >= usize::try_from(self.plan.prefill.min_prompt_tokens).unwrap_or(usize::MAX);
        if self.plan.has_switch() && long {
            Pass::Prefill
        } else {
            Pass::Precise
        }
    }
}

/// Whether a plan can work with what is attached.
fn check_plan(plan: &PrecisionPlan, attached: Attached, importance: bool) -> Result<()> {
    plan.check().map_err(Error::plan)?;
    let missing = if plan.keeps_prefill_copy() && !attached.prefill {
        Some("prefill.scheme W8A8".to_owned())
    } else {
        let scheme = plan.decode.scheme;
        (scheme.has_own_copy() && attached.decode != Some(scheme))
            .then(|| format!("decode.scheme {scheme:?}"))
    };
    if let Some(scheme) = missing {
        return Err(Error::plan(format!(
            "{scheme} needs quantised weights: calibrate and give the artifact"
        )));
    }
    if plan.kv_cache.mode == KvCacheMode::AttentionMixedPrecision && !importance {
        return Err(Error::plan(
            "kvCache.mode AttentionMixedPrecision needs attention thresholds: calibrate and give the artifact",
        ));
    }
    Ok(())
}
