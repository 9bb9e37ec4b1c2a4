//! One forward: embedding, blocks, head. Each chunk is a sequence's next tokens; linears run over the rows of all chunks at once.

use std::ops::Range;

use mixquant_crds::DecodeScheme;
use rayon::prelude::*;

use super::attention::{Shape, Task};
use super::config::Activation;
use super::linear::{Arithmetic, Input, linear, product};
use super::weights::Layer;
use super::{Chunk, LinearInput, LogitRows, Model, Tap, Workspace};
use crate::kernels::{Backend, Rotation};
use crate::{Error, Result};

/// Rows of elementwise work that one thread takes at once.
const ROWS: usize = 16;

/// Values that one thread adds at once.
const ADDED: usize = 1 << 14;

impl Arithmetic {
    /// Of the block linears while tokens are generated.
    pub(super) fn decode(scheme: DecodeScheme) -> Self {
        match scheme {
            DecodeScheme::W8A8 => Self::Prefill,
            DecodeScheme::W4A8 | DecodeScheme::LUT4 => Self::Decode,
            DecodeScheme::BF16 | DecodeScheme::FP32 => Self::precise(scheme),
        }
    }

    /// Of everything else.
    pub(super) fn precise(scheme: DecodeScheme) -> Self {
        match scheme {
            DecodeScheme::FP32 => Self::Fp32,
            // What is not a block linear stays BF16 beside quantised linears.
            DecodeScheme::BF16 | DecodeScheme::W8A8 | DecodeScheme::W4A8 | DecodeScheme::LUT4 => {
                Self::Bf16
            }
        }
    }
}

impl Model {
    /// Refuses what a forward cannot compute, before anything is changed.
    pub(super) fn check_chunks(&self, chunks: &[Chunk<'_>]) -> Result<()> {
        let context = self.config.max_position_embeddings;
        for chunk in chunks {
            let layout = chunk.cache.layout();
            assert!(
                (layout.layers, layout.kv_heads, layout.head_dim)
                    == (
                        self.config.num_hidden_layers,
                        self.config.num_key_value_heads,
                        self.config.head_dim
                    ),
                "a cache is used with the model that made it"
            );
            let end = chunk.cache.len() + chunk.tokens.len();
            if chunk.tokens.is_empty() {
                return Err(Error::internal("a chunk without tokens cannot be computed"));
            }
            if end > chunk.cache.capacity() || end > context {
                let limit = context.min(chunk.cache.capacity());
                return Err(Error::internal(format!(
                    "{end} tokens do not fit the context of {limit}: shorten the prompt or the answer"
                )));
            }
            if let Some(id) = chunk
                .tokens
                .iter()
                .find(|id| usize::try_from(**id).is_ok_and(|id| id >= self.config.vocab_size))
            {
                return Err(Error::internal(format!(
                    "token id {id} is outside the vocabulary of {}",
                    self.config.vocab_size
                )));
            }
        }
        Ok(())
    }

    /// See [`Model::forward`]; the chunks are checked.
    pub(super) fn run(
        &self,
        blocks: Arithmetic,
        chunks: &mut [Chunk<'_>],
        ws: &mut Workspace,
        mut tap: Option<&mut dyn Tap>,
    ) {
        self.embed(chunks, ws);
        for index in 0..self.weights.layers.len() {
            self.block(blocks, index, chunks, ws, reborrow(&mut tap));
        }
        self.head(chunks, ws);
        for chunk in chunks {
            chunk.cache.commit(chunk.tokens.len());
        }
    }

    /// One block: adds to the residual stream, and appends to the layer's part of the caches.
    pub(super) fn block(
        &self,
        arithmetic: Arithmetic,
        index: usize,
        chunks: &mut [Chunk<'_>],
        ws: &mut Workspace,
        mut tap: Option<&mut dyn Tap>,
    ) {
        let layer = (index, &self.weights.layers[index]);
        self.attend(arithmetic, layer, chunks, ws, reborrow(&mut tap));
        self.feed_forward(arithmetic, layer, ws, tap);
    }

    /// Fills the residual stream and the rotations of all positions.
    pub(super) fn embed(&self, chunks: &[Chunk<'_>], ws: &mut Workspace) {
        let (hidden, half) = (self.config.hidden_size, self.config.head_dim / 2);
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        ws.x.resize(tokens * hidden, 0.0);
        ws.cos.resize(self.ropes.len() * tokens * half, 0.0);
        ws.sin.resize(self.ropes.len() * tokens * half, 0.0);
        let ids = || {
            let chunks = chunks.iter();
            chunks.flat_map(|chunk| chunk.tokens.iter().zip(chunk.cache.len()..))
        };
        for ((id, _), row) in ids().zip(ws.x.chunks_exact_mut(hidden)) {
            let id = usize::try_from(*id).expect("ids are below the vocabulary's size");
            self.weights.embedding.copy_row(id, row);
            if let Some(scale) = self.config.embedding_scale {
                for x in row {
                    *x *= scale;
                }
            }
        }
        let positions = self
            .ropes
            .iter()
            .flat_map(|rope| ids().map(move |(_, position)| (rope, position)));
        let rotations = ws
            .cos
            .chunks_exact_mut(half)
            .zip(ws.sin.chunks_exact_mut(half));
        for ((rope, position), (cos, sin)) in positions.zip(rotations) {
            rope.angles(position, cos, sin);
        }
    }

    /// Where the rotations of a layer lie in the workspace.
    fn rotations(&self, layer: usize, tokens: usize) -> Range<usize> {
        let len = tokens * self.config.head_dim / 2;
        let own = usize::from(self.ropes.len() > 1 && self.config.windows[layer].is_some());
        own * len..(own + 1) * len
    }

    fn attend(
        &self,
        arithmetic: Arithmetic,
        (index, layer): (usize, &Layer),
        chunks: &mut [Chunk<'_>],
        ws: &mut Workspace,
        mut tap: Option<&mut dyn Tap>,
    ) {
        let backend = self.backend;
        let (hidden, query_width, kv_width) = (
            self.config.hidden_size,
            self.config.query_width(),
            self.config.kv_width(),
        );
        let tokens = ws.x.len() / hidden;
        self.norm(&ws.x, &layer.input_norm, &mut ws.input);
        ws.query.resize(tokens * query_width, 0.0);
        ws.key.resize(tokens * kv_width, 0.0);
        ws.value.resize(tokens * kv_width, 0.0);
        tap_input(
            reborrow(&mut tap),
            index,
            LinearInput::Attention,
            &ws.input,
            hidden,
        );
        let mut input = Input::new(arithmetic, &ws.input, hidden, &mut ws.prepared);
        linear(backend, &layer.q, &mut input, &mut ws.query);
        linear(backend, &layer.k, &mut input, &mut ws.key);
        linear(backend, &layer.v, &mut input, &mut ws.value);
        if let Some(norms) = &layer.head_norms {
            self.norm_in_place(&mut ws.query, &norms.query);
            self.norm_in_place(&mut ws.key, &norms.key);
        }
        let own = self.rotations(index, tokens);
        let (angles, half) = (
            (&ws.cos[own.clone()], &ws.sin[own]),
            self.config.head_dim / 2,
        );
        rotate(backend, angles, half, query_width, &mut ws.query);
        rotate(backend, angles, half, kv_width, &mut ws.key);
        if let Some(tap) = reborrow(&mut tap) {
            tap.keys_and_values(index, &ws.key, &ws.value, kv_width);
        }
        self.heads(index, chunks, ws, reborrow(&mut tap));
        tap_input(
            reborrow(&mut tap),
            index,
            LinearInput::Output,
            &ws.input,
            query_width,
        );
        let mut input = Input::new(arithmetic, &ws.input, query_width, &mut ws.prepared);
        ws.update.resize(tokens * hidden, 0.0);
        linear(backend, &layer.o, &mut input, &mut ws.update);
        if let Some(norm) = &layer.attention_post_norm {
            self.norm_in_place(&mut ws.update, norm);
        }
        add(&mut ws.x, &ws.update);
    }

    /// Attention of all chunks and KV heads, gathered into `ws.input`.
    fn heads(
        &self,
        layer: usize,
        chunks: &mut [Chunk<'_>],
        ws: &mut Workspace,
        tap: Option<&mut dyn Tap>,
    ) {
        let config = &self.config;
        let (query_width, kv_width) = (config.query_width(), config.kv_width());
        let group = config.num_attention_heads / config.num_key_value_heads;
        let shape = Shape {
            kv_heads: config.num_key_value_heads,
            group,
            head_dim: config.head_dim,
            scale: config.query_scale,
            cap: config.attention_cap,
            window: config.windows[layer],
        };
        let own = group * config.head_dim;
        ws.heads.resize(ws.query.len(), 0.0);
        let tap = tap.filter(|tap| tap.watches_attention());
        let watched = tap.is_some();
        let mut tasks = Vec::new();
        let (mut first, mut left) = (0, &mut ws.heads[..]);
        for chunk in chunks.iter_mut() {
            let (tokens, last) = (chunk.tokens.len(), first + chunk.tokens.len());
            let watch = watched || chunk.cache.watches_attention();
            for (kv_head, head) in chunk.cache.layer_mut(layer).iter_mut().enumerate() {
                let (dst, rest) = left.split_at_mut(tokens * own);
                left = rest;
                tasks.push(Task {
                    shape,
                    kv_head,
                    head,
                    queries: &ws.query[first * query_width..last * query_width],
                    keys: &ws.key[first * kv_width..last * kv_width],
                    values: &ws.value[first * kv_width..last * kv_width],
                    dst,
                    watch,
                    received: Vec::new(),
                });
            }
            first = last;
        }
        tasks.par_iter_mut().for_each(|task| task.run(self.backend));
        if let Some(tap) = tap {
            for task in &tasks {
                let weights: Vec<f32> = task
                    .received
                    .iter()
                    .map(|received| received.weight())
                    .collect();
                let seen_by: Vec<f32> = task
                    .received
                    .iter()
                    .map(|received| received.seen_by())
                    .collect();
                tap.attention(layer, task.kv_head, &weights, &seen_by);
            }
        }
        ws.input.resize(ws.query.len(), 0.0);
        let mut first = 0;
        for task in &tasks {
            for (token, part) in task.dst.chunks_exact(own).enumerate() {
                ws.input[(first + token) * query_width + task.kv_head * own..][..own]
                    .copy_from_slice(part);
            }
            if task.kv_head + 1 == shape.kv_heads {
                first += task.dst.len() / own;
            }
        }
    }

    fn feed_forward(
        &self,
        arithmetic: Arithmetic,
        (index, layer): (usize, &Layer),
        ws: &mut Workspace,
        mut tap: Option<&mut dyn Tap>,
    ) {
        let backend = self.backend;
        let (hidden, ffn) = (self.config.hidden_size, self.config.intermediate_size);
        let tokens = ws.x.len() / hidden;
        self.norm(&ws.x, &layer.mlp_norm, &mut ws.input);
        ws.gate.resize(tokens * ffn, 0.0);
        ws.up.resize(tokens * ffn, 0.0);
        tap_input(
            reborrow(&mut tap),
            index,
            LinearInput::FeedForward,
            &ws.input,
            hidden,
        );
        let mut input = Input::new(arithmetic, &ws.input, hidden, &mut ws.prepared);
        linear(backend, &layer.gate, &mut input, &mut ws.gate);
        linear(backend, &layer.up, &mut input, &mut ws.up);
        let rows = ws
            .gate
            .par_chunks_mut(ROWS * ffn)
            .zip(ws.up.par_chunks(ROWS * ffn));
        rows.for_each(|(gate, up)| match self.config.activation {
            Activation::Silu => backend.silu_mul(gate, up),
            Activation::GeluTanh => backend.gelu_mul(gate, up),
        });
        tap_input(reborrow(&mut tap), index, LinearInput::Down, &ws.gate, ffn);
        let mut input = Input::new(arithmetic, &ws.gate, ffn, &mut ws.prepared);
        ws.update.resize(tokens * hidden, 0.0);
        linear(backend, &layer.down, &mut input, &mut ws.update);
        if let Some(norm) = &layer.mlp_post_norm {
            self.norm_in_place(&mut ws.update, norm);
        }
        add(&mut ws.x, &ws.update);
    }

    /// Logits of the wanted rows, always in the arithmetic of decode.
    fn head(&self, chunks: &[Chunk<'_>], ws: &mut Workspace) {
        let hidden = self.config.hidden_size;
        let (mut wanted, mut first) = (0, 0);
        for chunk in chunks {
            let last = first + chunk.tokens.len();
            let rows = match chunk.logits {
                LogitRows::None => last..last,
                LogitRows::Last => last - 1..last,
                LogitRows::All => first..last,
            };
            // Wanted rows move to the front: never behind their own place.
            ws.x.copy_within(rows.start * hidden..rows.end * hidden, wanted * hidden);
            wanted += rows.len();
            first = last;
        }
        ws.x.truncate(wanted * hidden);
        self.norm(&ws.x, &self.weights.norm, &mut ws.input);
        ws.logits.resize(wanted * self.config.vocab_size, 0.0);
        if wanted == 0 {
            return;
        }
        let arithmetic = Arithmetic::precise(self.plan.decode.scheme);
        let mut input = Input::new(arithmetic, &ws.input, hidden, &mut ws.prepared);
        product(
            self.backend,
            self.weights.head(),
            &mut input,
            &mut ws.logits,
        );
        if let Some(cap) = self.config.logit_cap {
            ws.logits
                .par_chunks_mut(self.config.vocab_size)
                .for_each(|row| self.backend.soft_cap(row, cap));
        }
    }

    fn norm(&self, x: &[f32], weight: &[f32], dst: &mut Vec<f32>) {
        dst.resize(x.len(), 0.0);
        let width = weight.len();
        let rows = dst
            .par_chunks_mut(ROWS * width)
            .zip(x.par_chunks(ROWS * width));
        rows.for_each(|(dst, x)| {
            for (dst, x) in dst.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                self.backend
                    .rms_norm(x, weight, self.config.rms_norm_eps, dst);
            }
        });
    }

    /// Norms each part of `weight`'s width: a row, or the heads of one.
    fn norm_in_place(&self, x: &mut [f32], weight: &[f32]) {
        let width = weight.len();
        x.par_chunks_mut(ROWS * width).for_each(|parts| {
            let mut before = vec![0.0; width];
            for part in parts.chunks_exact_mut(width) {
                before.copy_from_slice(part);
                self.backend
                    .rms_norm(&before, weight, self.config.rms_norm_eps, part);
            }
        });
    }
}

/// Rotates each row of `width` channels by its own position.
fn rotate(
    backend: &dyn Backend,
    (cos, sin): (&[f32], &[f32]),
    half: usize,
    width: usize,
    rows: &mut [f32],
) {
    rows.par_chunks_exact_mut(width)
        .zip(cos.par_chunks_exact(half))
        .zip(sin.par_chunks_exact(half))
        .with_min_len(ROWS)
        .for_each(|((row, cos), sin)| backend.rope(row, Rotation { cos, sin }));
}

fn add(x: &mut [f32], update: &[f32]) {
    x.par_chunks_mut(ADDED)
        .zip(update.par_chunks(ADDED))
        .for_each(|(x, update)| x.iter_mut().zip(update).for_each(|(x, y)| *x += y));
}

/// The tap for one more call.
fn reborrow<'a>(tap: &'a mut Option<&mut dyn Tap>) -> Option<&'a mut dyn Tap> {
    tap.as_mut().map(|tap| &mut **tap as &mut dyn Tap)
}

fn tap_input(
    tap: Option<&mut dyn Tap>,
    layer: usize,
    input: LinearInput,
    rows: &[f32],
    columns: usize,
) {
    if let Some(tap) = tap {
        tap.linear_input(layer, input, rows, columns);
    }
}
