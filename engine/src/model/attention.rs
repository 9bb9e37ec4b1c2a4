//! Attention of one chunk over one KV head: append its keys and values, then answer its queries from what is stored.

use std::cell::RefCell;
use std::ops::Range;

use crate::kernels::{Backend, Matrix, Values};
use crate::kv::{HeadCache, Received, hadamard};

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
    /// The queries as quantised keys are stored.
    rotated: Vec<f32>,
    weights: Vec<f32>,
    /// Attention a key, in [`Received`]'s unit.
    received: Vec<u64>,
}

/// Sizes that all tasks share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) kv_heads: usize,
    /// Query heads a KV head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// What scores are multiplied by.
    pub(super) scale: f32,
    /// Scores are bent below this.
    pub(super) cap: Option<f32>,
    /// How many tokens a token sees, itself included; `None` is all.
    pub(super) window: Option<usize>,
}

impl Shape {
    /// The first key that the token at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// How many of the tokens `start..end` see the key at `position`.
    fn seen_by(&self, position: usize, start: usize, end: usize) -> usize {
        let last = self
            .window
            .map_or(end, |window| end.min(position.saturating_add(window)));
        last.saturating_sub(position.max(start))
    }
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
    /// Whether the attention that keys receive is counted.
    pub(super) watch: bool,
    /// What each key received from this chunk, when it was counted.
    pub(super) received: Vec<Received>,
}

impl Task<'_> {
    /// Does it.
    pub(super) fn run(&mut self, backend: &dyn Backend) {
        let Shape {
            kv_heads,
            group,
            head_dim,
            ..
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
            scratch.received.clear();
            scratch.received.resize(self.head.len(), 0);
            let tokens = self.dst.len() / (group * head_dim);
            for first in (0..tokens).step_by(TILE) {
                self.tile(backend, scratch, start, first..tokens.min(first + TILE));
            }
            if self.watch {
                self.count(&scratch.received, start, tokens);
            }
        });
    }

    /// Answers the queries of a few tokens. All rows see the keys up to the last token's; weights of keys that a row may not see, because they
    /// come later or left its window, are 0.
    fn tile(
        &mut self,
        backend: &dyn Backend,
        scratch: &mut Scratch,
        start: usize,
        tokens: Range<usize>,
    ) {
        let Shape {
            group, head_dim, ..
        } = self.shape;
        let visible = start + tokens.end;
        self.scaled_queries(scratch, tokens.clone());
        scratch.weights.resize(tokens.len() * group * visible, 0.0);
        let weights = &mut scratch.weights[..];
        let keys = |range: Range<usize>| Matrix {
            values: Values::F32(&scratch.keys[range.start * head_dim..range.end * head_dim]),
            rows: range.len(),
            columns: head_dim,
        };
        let quantised = self.head.quantised();
        backend.matmul(&scratch.rotated, keys(0..quantised), visible, weights);
        backend.matmul(
            &scratch.queries,
            keys(quantised..visible),
            visible,
            &mut weights[quantised..],
        );
        if let Some(cap) = self.shape.cap {
            backend.soft_cap(weights, cap);
        }
        for (row, weights) in weights.chunks_exact_mut(visible).enumerate() {
            let position = start + tokens.start + row / group;
            let first = self.shape.first_seen(position);
            let (seen, hidden) = weights.split_at_mut(position + 1);
            let (left, seen) = seen.split_at_mut(first);
            backend.softmax(seen);
            hidden.fill(0.0);
            left.fill(0.0);
            if self.watch {
                let visible = seen.len() as u64;
                scratch.received[first..]
                    .iter_mut()
                    .zip(seen)
                    .for_each(|(sum, weight)| Received::add(sum, *weight, visible));
            }
        }
        let dst = &mut self.dst[tokens.start * group * head_dim..tokens.end * group * head_dim];
        backend.weighted_sum(
            weights,
            &scratch.values[..visible * head_dim],
            head_dim,
            dst,
        );
    }

    /// Tells the cache what each key received. Key `j` was seen by the queries of all tokens from `j` on whose window reaches it.
    fn count(&mut self, weights: &[u64], start: usize, tokens: usize) {
        let shape = self.shape;
        let seen_by = |key: usize| shape.seen_by(key, start, start + tokens) * shape.group;
        let received = weights.iter().enumerate().map(|(key, weight)| Received {
            weight: *weight,
            seen_by: seen_by(key) as u64,
        });
        self.received = received.collect();
        self.head.receive(&self.received);
    }

    /// The queries times the scale of scores, and again rotated when there are quantised keys to meet.
    fn scaled_queries(&self, scratch: &mut Scratch, tokens: Range<usize>) {
        let Shape {
            kv_heads,
            group,
            head_dim,
            scale,
            ..
        } = self.shape;
        let own = group * head_dim;
        scratch.queries.clear();
        scratch.rotated.clear();
        for token in tokens {
            let queries = &self.queries[(token * kv_heads + self.kv_head) * own..][..own];
            scratch
                .queries
                .extend(queries.iter().map(|query| query * scale));
        }
        if self.head.quantised() > 0 {
            scratch.rotated.extend_from_slice(&scratch.queries);
            scratch
                .rotated
                .chunks_exact_mut(head_dim)
                .for_each(hadamard::rotate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_counts_the_token_itself_and_both_directions_agree() {
        let shape = |window| Shape {
            kv_heads: 1,
            group: 1,
            head_dim: 2,
            scale: 1.0,
            cap: None,
            window,
        };
        for window in [None, Some(1), Some(3), Some(100)] {
            let shape = shape(window);
            let (start, end) = (4, 9);
            for key in 0..end {
                let seeing = (start..end)
                    .filter(|position| (shape.first_seen(*position)..=*position).contains(&key));
                assert_eq!(
                    shape.seen_by(key, start, end),
                    seeing.count(),
                    "{window:?} {key}"
                );
            }
        }
        assert_eq!(shape(Some(1)).first_seen(7), 7);
        assert_eq!(shape(Some(3)).first_seen(7), 5);
    }
}
