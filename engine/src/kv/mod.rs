//! The KV cache of one sequence: what is kept of each token, and how precisely.
//!
//! The forward appends and reads; the plan decides the tiers. Nothing is decided anywhere else, and nothing is quantised twice.

mod block;
pub(crate) mod hadamard;
mod head;
pub mod importance;

use std::sync::Arc;

use mixquant_crds::{KvCacheMode, KvCachePlan, KvPrecision};
use rayon::prelude::*;

pub(crate) use self::head::{HeadCache, Received};
pub use self::importance::Importance;

/// What all heads of a cache share.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Whether what is not quantised is kept as FP32 (the baseline) or as BF16.
    pub(crate) full_precision: bool,
    pub(crate) plan: KvCachePlan,
    /// Needed in mode `AttentionMixedPrecision`.
    pub(crate) importance: Option<Arc<Importance>>,
}

/// Keys and values of one sequence, all layers. Made by [`Model::new_cache`](crate::model::Model::new_cache).
#[derive(Debug, Clone)]
pub struct KvCache {
    layout: Layout,
    len: usize,
    capacity: usize,
    /// Whether nothing is quantised for now.
    held: bool,
    /// `[layer][kv_head]`.
    heads: Vec<HeadCache>,
}

impl KvCache {
    pub(crate) fn new(layout: Layout, capacity: usize) -> Self {
        let heads = vec![HeadCache::new(&layout); layout.layers * layout.kv_heads];
        Self {
            layout,
            len: 0,
            capacity,
            held: false,
            heads,
        }
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens whose keys and values are in quantised blocks (the same in every head).
    pub fn quantised_tokens(&self) -> usize {
        self.heads.first().map_or(0, HeadCache::quantised)
    }

    /// Tokens that may be stored.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens from `len` on: only tokens that are not quantised yet, or all of them.
    ///
    /// # Panics
    /// When a part of the quantised tokens would have to go.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len {
            return;
        }
        if len == 0 {
            self.heads.fill(HeadCache::new(&self.layout));
        } else {
            self.heads.iter_mut().for_each(|head| head.truncate(len));
        }
        self.len = len;
    }

    /// Quantises nothing from now on, so that the last tokens can still be forgotten and computed again.
    pub fn hold(&mut self) {
        self.held = true;
    }

    /// Ends [`hold`](Self::hold): what is due is quantised with the next tokens.
    pub fn resume(&mut self) {
        self.held = false;
    }

    /// Bytes of stored keys and values by precision, scales included. FP32 of the baseline counts as BF16's row, with its own size.
    pub fn bytes_by_tier(&self) -> [(KvPrecision, usize); 4] {
        let mut bytes = [
            KvPrecision::INT2,
            KvPrecision::INT4,
            KvPrecision::INT8,
            KvPrecision::BF16,
        ]
        .map(|tier| (tier, 0));
        for head in &self.heads {
            head.count_bytes(&mut bytes);
        }
        bytes
    }

    /// Bytes of stored keys and values.
    pub fn bytes(&self) -> usize {
        self.bytes_by_tier().iter().map(|(_, bytes)| bytes).sum()
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The KV heads of one layer.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut [HeadCache] {
        let heads = self.layout.kv_heads;
        &mut self.heads[layer * heads..(layer + 1) * heads]
    }

    /// Whether tiers depend on the attention that keys receive.
    pub(crate) fn watches_attention(&self) -> bool {
        self.layout.plan.mode == KvCacheMode::AttentionMixedPrecision
    }

    /// All layers have appended so many tokens: quantises what became due.
    pub(crate) fn commit(&mut self, tokens: usize) {
        self.len += tokens;
        let layout = &self.layout;
        if self.held || layout.plan.default == KvPrecision::BF16 {
            return;
        }
        self.heads
            .par_iter_mut()
            .enumerate()
            .for_each(|(index, head)| {
                head.quantise_due(layout, index / layout.kv_heads, index % layout.kv_heads);
            });
    }
}
