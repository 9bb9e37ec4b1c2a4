//! Attention of one chunk over one KV head: append its keys and values, then answer its queries from what is stored.

use std::cell::RefCell;

use crate::kernels::{Backend, Matrix, Values};
use crate::kv::HeadCache;

/// Query tokens that are answered at once.
const TILE: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
    weights: Vec<f32>,
}

/// Sizes that all tasks share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) kv_heads: usize,
    /// Query heads a KV head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
}

/// The work of one chunk on one KV head.
pub(super) struct Task<'a> {
    pub(super) shape: Shape,
    pub(super) kv_head: usize,
    pub(super) head: &'a mut HeadCache,
    /// `[tokens, kv_heads * group * head_dim]`, rotated.
    pub(super) queries: &'a [f32],
    /// `[tokens, kv_heads * head_dim]`, rotated.
    pub(super) keys: &'a [f32],
    /// `[tokens, kv_heads * head_dim]`.
    pub(super) values: &'a [f32],
    /// `[tokens, group * head_dim]`.
    pub(super) dst: &'a mut [f32],
}

impl Task<'_> {
    /// Does it.
    pub(super) fn run(&mut self, backend: &dyn Backend) {
        let Shape {
            kv_heads,
            group,
            head_dim,
        } = self.shape;
        let start = self.head.len();
        let (own, width) = (self.kv_head * head_dim, kv_heads * head_dim);
        for (key, value) in self
            .keys
            .chunks_exact(width)
            .zip(self.values.chunks_exact(width))
        {
            self.head
                .push(&key[own..own + head_dim], &value[own..own + head_dim]);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            self.head.read(&mut scratch.keys, &mut scratch.values);
            let tokens = self.dst.len() / (group * head_dim);
            for first in (0..tokens).step_by(TILE) {
                self.tile(backend, scratch, start, first..tokens.min(first + TILE));
            }
        });
    }

    /// Answers the queries of a few tokens. All rows see the keys up to the last token's; weights of keys that a row may not see are 0.
    fn tile(
        &mut self,
        backend: &dyn Backend,
        scratch: &mut Scratch,
        start: usize,
        tokens: std::ops::Range<usize>,
    ) {
        let Shape {
            kv_heads,
            group,
            head_dim,
        } = self.shape;
        let (rows, visible) = (tokens.len() * group, start + tokens.end);
        self.scaled_queries(
            &mut scratch.queries,
            tokens.clone(),
            kv_heads * group * head_dim,
        );
        scratch.weights.resize(rows * visible, 0.0);
        let weights = &mut scratch.weights[..rows * visible];
        let keys = Matrix {
            values: Values::F32(&scratch.keys[..visible * head_dim]),
            rows: visible,
            columns: head_dim,
        };
        backend.matmul(&scratch.queries, keys, visible, weights);
        for (row, weights) in weights.chunks_exact_mut(visible).enumerate() {
            let (seen, hidden) = weights.split_at_mut(start + tokens.start + row / group + 1);
            backend.softmax(seen);
            hidden.fill(0.0);
        }
        let dst = &mut self.dst[tokens.start * group * head_dim..tokens.end * group * head_dim];
        backend.weighted_sum(
            weights,
            &scratch.values[..visible * head_dim],
            head_dim,
            dst,
        );
    }

    fn scaled_queries(&self, dst: &mut Vec<f32>, tokens: std::ops::Range<usize>, width: usize) {
        let Shape {
            group, head_dim, ..
        } = self.shape;
        #[expect(
            clippy::cast_precision_loss,
            reason = "a head has at most 1,024 channels"
        )]
        let scale = 1.0 / (head_dim as f32).sqrt();
        dst.clear();
        for token in tokens {
            let own = &self.queries[token * width + self.kv_head * group * head_dim..]
                [..group * head_dim];
            dst.extend(own.iter().map(|query| query * scale));
        }
    }
}
