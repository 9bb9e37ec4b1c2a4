//! One KV head of one layer: quantised blocks first, then the tail that is not quantised yet.
//!
//! ```text
//! tokens   0 ……………………………………… n·B | n·B …………………………………… len
//!          blocks of B, each once   tail: FP32 or BF16 rows, with the attention that each key has received
//! ```

use half::bf16;
use mixquant_crds::{KvCacheMode, KvPrecision};

use super::block::Block;
use super::{Layout, hadamard};

/// Attention is summed in units of 2^-22: integers add up to the same in every order, so cuts and threads change nothing.
const UNIT: f32 = 4_194_304.0;

/// See the file's comment.
#[derive(Debug, Clone)]
pub(crate) struct HeadCache {
    head_dim: usize,
    blocks: Vec<Block>,
    /// Tokens in the blocks.
    quantised: usize,
    keys: Rows,
    values: Rows,
    /// Per tail token; empty where no tier depends on attention.
    received: Vec<Received>,
}

/// What a key got from the queries so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Received {
    /// In sum over the queries: the softmax weight times the keys that the query saw, in units of 2^-22. A query that sees `n` keys and
    /// leans on none gives each `1 / n`, so 1 a query is the weight of a key like any other, however long the text is.
    pub(crate) weight: u64,
    /// Queries that could see the key.
    pub(crate) seen_by: u64,
}

/// Rows that are not quantised.
#[derive(Debug, Clone)]
enum Rows {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Received {
    /// Adds one query's softmax weight, rounded to the unit; the query saw `visible` keys.
    #[inline]
    pub(crate) fn add(weight_sum: &mut u64, weight: f32, visible: u64) {
        // 2^23 + x has x in its low bits, for x up to 2^22: a weight is at most 1.
        *weight_sum += visible * u64::from((weight * UNIT + 8_388_608.0).to_bits() & 0x007f_ffff);
    }

    /// The sum of the weights, each times the keys that its query saw.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "a sum is shown, not compared for equality"
    )]
    pub(crate) fn weight(self) -> f32 {
        (self.weight as f64 / f64::from(UNIT)) as f32
    }

    /// The number of queries.
    #[expect(
        clippy::cast_precision_loss,
        reason = "queries are far fewer than 2^24"
    )]
    pub(crate) fn seen_by(self) -> f32 {
        self.seen_by as f32
    }

    /// The mean over the queries: 1 is a key like any other. Compared with a threshold.
    fn normalised(self) -> f32 {
        self.weight() / self.seen_by().max(1.0)
    }
}

impl Rows {
    fn push(&mut self, row: &[f32]) {
        match self {
            Self::F32(rows) => rows.extend_from_slice(row),
            Self::Bf16(rows) => rows.extend(row.iter().map(|value| bf16::from_f32(*value))),
        }
    }

    fn truncate(&mut self, len: usize) {
        match self {
            Self::F32(rows) => rows.truncate(len),
            Self::Bf16(rows) => rows.truncate(len),
        }
    }

    fn drop_first(&mut self, len: usize) {
        match self {
            Self::F32(rows) => drop(rows.drain(..len)),
            Self::Bf16(rows) => drop(rows.drain(..len)),
        }
    }

    fn read(&self, range: std::ops::Range<usize>, dst: &mut Vec<f32>) {
        match self {
            Self::F32(rows) => dst.extend_from_slice(&rows[range]),
            Self::Bf16(rows) => dst.extend(
                rows[range]
                    .iter()
                    .map(|value| f32::from_bits(u32::from(value.to_bits()) << 16)),
            ),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F32(rows) => size_of_val(&rows[..]),
            Self::Bf16(rows) => size_of_val(&rows[..]),
        }
    }
}

impl HeadCache {
    pub(super) fn new(layout: &Layout) -> Self {
        let empty = || {
            if layout.full_precision {
                Rows::F32(Vec::new())
            } else {
                Rows::Bf16(Vec::new())
            }
        };
        Self {
            head_dim: layout.head_dim,
            blocks: Vec::new(),
            quantised: 0,
            keys: empty(),
            values: empty(),
            received: Vec::new(),
        }
    }

    /// Tokens stored.
    pub(crate) fn len(&self) -> usize {
        self.quantised + self.keys.len() / self.head_dim
    }

    /// Tokens in quantised blocks: the keys of these are read rotated.
    pub(crate) fn quantised(&self) -> usize {
        self.quantised
    }

    /// Appends a token.
    pub(crate) fn push(&mut self, key: &[f32], value: &[f32]) {
        self.keys.push(key);
        self.values.push(value);
    }

    /// All keys and values, `[len, head_dim]` each; the keys of the first [`quantised`](Self::quantised) tokens are rotated.
    pub(crate) fn read(&self, keys: &mut Vec<f32>, values: &mut Vec<f32>) {
        keys.clear();
        values.clear();
        for block in &self.blocks {
            block.read(self.head_dim, keys, values);
        }
        self.keys.read(0..self.keys.len(), keys);
        self.values.read(0..self.values.len(), values);
    }

    /// Adds what a chunk's queries gave to the keys, the sequence's first key first. Quantised tokens are decided: theirs is dropped.
    pub(crate) fn receive(&mut self, received: &[Received]) {
        self.received
            .resize(self.len() - self.quantised, Received::default());
        for (sum, more) in self.received.iter_mut().zip(&received[self.quantised..]) {
            sum.weight += more.weight;
            sum.seen_by += more.seen_by;
        }
    }

    pub(super) fn truncate(&mut self, len: usize) {
        let tail = len
            .checked_sub(self.quantised)
            .expect("only tokens that are not quantised yet can be forgotten");
        self.keys.truncate(tail * self.head_dim);
        self.values.truncate(tail * self.head_dim);
        self.received.truncate(tail);
    }

    /// Quantises the blocks that are full and wholly before the recent window, counted from the last block boundary.
    pub(super) fn quantise_due(&mut self, layout: &Layout, layer: usize, kv_head: usize) {
        let plan = &layout.plan;
        let [block, recent, sinks] = [plan.block_size, plan.recent_tokens, plan.sink_tokens]
            .map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let boundary = self.len() / block * block;
        let due = boundary.saturating_sub(recent) / block * block;
        let Some(tokens) = due.checked_sub(self.quantised).filter(|tokens| *tokens > 0) else {
            return;
        };
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        self.keys.read(0..tokens * self.head_dim, &mut keys);
        self.values.read(0..tokens * self.head_dim, &mut values);
        let threshold = layout
            .importance
            .as_ref()
            .map_or(f32::INFINITY, |importance| {
                importance.thresholds[layer][kv_head]
            });
        let rows = keys
            .chunks_exact_mut(self.head_dim)
            .zip(values.chunks_exact(self.head_dim));
        for (token, (key, value)) in rows.enumerate() {
            if token % block == 0 {
                self.blocks.push(Block::default());
            }
            let received = self.received.get(token).copied().unwrap_or_default();
            let mixed = plan.mode == KvCacheMode::AttentionMixedPrecision;
            let important =
                mixed && (self.quantised + token < sinks || received.normalised() >= threshold);
            hadamard::rotate(key);
            let tier = if important {
                plan.important
            } else {
                plan.default
            };
            self.blocks
                .last_mut()
                .expect("pushed above")
                .push(tier, key, value);
        }
        self.quantised = due;
        self.keys.drop_first(tokens * self.head_dim);
        self.values.drop_first(tokens * self.head_dim);
        self.received.drain(..tokens.min(self.received.len()));
    }

    pub(super) fn count_bytes(&self, bytes: &mut [(KvPrecision, usize); 4]) {
        for block in &self.blocks {
            block.count_bytes(self.head_dim, bytes);
        }
        let plain = bytes
            .iter_mut()
            .find(|(tier, _)| *tier == KvPrecision::BF16)
            .expect("all tiers are listed");
        plain.1 += self.keys.bytes() + self.values.bytes();
    }
}
