//! What a device allows: operations over its rate, bytes over its bandwidth, whichever takes longer.
//!
//! ```text
//! prefill of T tokens   2·linears·T / rate  +  2·layers·heads·head_dim·T² / BF16 rate (causal attention)  +  2·head / BF16 rate
//! decode of B sequences (weights read once + B·L·KV bytes a token) / bandwidth, or 2·weights·B / BF16 rate
//! ```

use super::scheme::{Kv, Prefill, Scheme};
use super::{Device, ModelFacts, float};

/// What widening 4-bit weights costs a prefill: W4A16 reads prompts at 0.96 of BF16's speed (Mix-Quant, Fig. 1).
const W4A16_PREFILL: f64 = 0.96;

/// Operations a second of the block linears while prompts are read, as far as they are reached.
fn prefill_rate(scheme: &Scheme, device: &Device) -> f64 {
    let bf16 = device.bf16_ops_per_second;
    let rate = match scheme.prefill {
        Prefill::Bf16 => bf16,
        Prefill::Int8 => device.int8_ops_per_second.unwrap_or(bf16),
        Prefill::Fp8 => device.fp8_ops_per_second.unwrap_or(bf16),
        Prefill::W4A16 => bf16 * W4A16_PREFILL,
    };
    rate * device.prefill_reach
}

/// Seconds to the first token of one prompt of `tokens`. A scheme with a switch pays the valve: one decode step.
pub(super) fn prefill_seconds(
    scheme: &Scheme,
    model: &ModelFacts,
    device: &Device,
    tokens: u64,
) -> f64 {
    let bf16 = device.bf16_ops_per_second * device.prefill_reach;
    let bandwidth = device.bandwidth_bytes_per_second * device.decode_reach;
    let tokens_f = float(tokens);
    let linears = 2.0 * float(model.linear_weights) * tokens_f / prefill_rate(scheme, device);
    let width = float(model.layers * model.heads * model.head_dim);
    let attention = 2.0 * width * tokens_f * tokens_f / bf16;
    let head = 2.0 * float(model.head_weights) / bf16;
    // A quantised copy is read once; one that is made on the way reads 2 bytes and writes and reads 1.
    let weight_bytes = match (scheme.prefill, scheme.scratch) {
        (_, true) => 4.0,
        (Prefill::Int8 | Prefill::Fp8, false) => 1.0,
        (Prefill::Bf16 | Prefill::W4A16, false) => scheme.read_bits / 8.0,
    } * float(model.linear_weights);
    let reading = (weight_bytes + 2.0 * float(model.head_weights)) / bandwidth;
    let making = if scheme.scratch {
        3.0 * float(model.linear_weights) / bandwidth
    } else {
        0.0
    };
    let valve = if scheme.has_switch() {
        decode_seconds((scheme, Kv::Bf16), model, device, (1, tokens))
    } else {
        0.0
    };
    (linears + attention + head + making).max(reading) + valve
}

/// Seconds a token for `sequences` of `length` tokens each.
pub(super) fn decode_seconds(
    (scheme, kv): (&Scheme, Kv),
    model: &ModelFacts,
    device: &Device,
    (sequences, length): (u64, u64),
) -> f64 {
    let tokens = float(sequences * length);
    let bytes = scheme.read_bytes(model) + tokens * model.kv_bytes_per_token(kv.bits());
    let streaming = bytes / (device.bandwidth_bytes_per_second * device.decode_reach);
    let weights = float(model.linear_weights + model.head_weights);
    let computing = 2.0 * weights * float(sequences) / prefill_rate(scheme, device);
    streaming.max(computing)
}

/// The prompt from which on a quantised prefill is faster, the valve included; nothing when it never is within the context.
pub(super) fn break_even(
    scheme: &Scheme,
    precise: &Scheme,
    model: &ModelFacts,
    device: &Device,
) -> Option<u64> {
    let gains = |tokens: u64| {
        prefill_seconds(scheme, model, device, tokens)
            < prefill_seconds(precise, model, device, tokens)
    };
    // The gain grows with the prompt's length: what is fixed (reading weights, the valve's step) is paid once.
    let context = model.context.max(1);
    if !gains(context) {
        return None;
    }
    let (mut low, mut high) = (1, context);
    while low < high {
        let middle = low.midpoint(high);
        if gains(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}
