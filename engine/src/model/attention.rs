//! Attention of one chunk over one KV head: append its keys and values, then answer its queries from what is stored.

use std::cell::RefCell;
use std::ops::Range;

use crate::kernels::{Backend, Strided};
use crate::kv::{HeadCache, Received, hadamard};

/// Rows of scores (one a query head and token) that are held at once: with 4,096 keys 384 KiB, which stays in the second-level cache.
const ROWS: usize = 24;
/// Keys that are transposed together: with 64 channels 16 KiB, which stays in the first-level cache while the rows of a tile pass by.
const PANEL: usize = 64;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    /// The keys panel by panel, `[head_dim, keys of the panel]` each. A panel is either of quantised keys or of others.
    panels: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
    /// The queries as quantised keys are stored.
    rotated: Vec<f32>,
    weights: Vec<f32>,
    /// Attention a key, in [`Received`]'s unit.
    received: Vec<u64>,
}

impl Scratch {
    fn transpose(
        &mut self,
        backend: &dyn Backend,
        panels: impl Iterator<Item = Range<usize>>,
        head_dim: usize,
    ) {
        self.panels.resize(self.keys.len(), 0.0);
        for keys in panels {
            let own = keys.start * head_dim..keys.end * head_dim;
            let panel = &mut self.panels[own.clone()];
            backend.transpose(&self.keys[own], head_dim, panel);
        }
    }
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
            scratch.transpose(backend, self.panels(), head_dim);
            let tokens = self.dst.len() / (group * head_dim);
            let tile = (ROWS / group).max(1);
            for first in (0..tokens).step_by(tile) {
                self.tile(backend, scratch, start, first..tokens.min(first + tile));
            }
            if self.watch {
                self.count(&scratch.received, start, tokens);
            }
        });
    }

    /// The keys of each panel.
    fn panels(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (quantised, len) = (self.head.quantised(), self.head.len());
        let cut = |from: usize, to: usize| {
            (from..to)
                .step_by(PANEL)
                .map(move |first| first..to.min(first + PANEL))
        };
        cut(0, quantised).chain(cut(quantised, len))
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
        let (visible, quantised) = (start + tokens.end, self.head.quantised());
        self.scaled_queries(scratch, tokens.clone());
        let panels = || self.panels().take_while(|keys| keys.start < visible);
        // Whole panels are multiplied, so that a row ends where the last of them does.
        let (step, rows) = (
            panels().last().map_or(visible, |keys| keys.end),
            tokens.len() * group,
        );
        scratch.weights.resize(rows * step, 0.0);
        let weights = &mut scratch.weights[..];
        for keys in panels() {
            let queries = Strided {
                values: if keys.start < quantised {
                    &scratch.rotated
                } else {
                    &scratch.queries
                },
                rows,
                step: head_dim,
            };
            let panel = &scratch.panels[keys.start * head_dim..keys.end * head_dim];
            backend.weighted_sum(queries, panel, keys.len(), step, &mut weights[keys.start..]);
        }
        if let Some(cap) = self.shape.cap {
            backend.soft_cap(weights, cap);
        }
        for (row, weights) in weights.chunks_exact_mut(step).enumerate() {
            let position = start + tokens.start + row / group;
            let first = self.shape.first_seen(position);
            let (seen, hidden) = weights.split_at_mut(position + 1);
            let (left, seen) = seen.split_at_mut(first);
            backend.softmax(seen);
            hidden[..visible - position - 1].fill(0.0);
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
        let weights = Strided {
            values: weights,
            rows,
            step,
        };
        let values = &scratch.values[..visible * head_dim];
        backend.weighted_sum(weights, values, head_dim, head_dim, dst);
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
