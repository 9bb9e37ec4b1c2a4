//! The KV cache of one sequence: what is kept of each token, and how precisely.

pub mod importance;

pub use importance::Importance;

use mixquant_crds::KvPrecision;

/// Keys and values of one sequence, all layers. Made by [`Model::new_cache`](crate::model::Model::new_cache).
#[derive(Debug, Clone)]
pub struct KvCache {
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that may be stored.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens from `len` on. Only within the unquantised tail, or 0.
    pub fn truncate(&mut self, len: usize) {
        self.len = len;
    }

    /// Bytes of stored keys and values by precision, scales included.
    pub fn bytes_by_tier(&self) -> [(KvPrecision, usize); 4] {
        [
            KvPrecision::INT2,
            KvPrecision::INT4,
            KvPrecision::INT8,
            KvPrecision::BF16,
        ]
        .map(|tier| (tier, 0))
    }

    /// Bytes of stored keys and values.
    pub fn bytes(&self) -> usize {
        self.bytes_by_tier().iter().map(|(_, bytes)| bytes).sum()
    }
}
