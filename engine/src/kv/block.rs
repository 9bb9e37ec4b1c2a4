//! A quantised block: the tokens of one KV head that left the recent window together, each at its own precision.
//!
//! One list a plane, tokens in order; a token has a row in each plane that its tier needs:
//!
//! ```text
//! tier   planes                       bytes of a token (key and value, head_dim d, g groups)
//! INT2   int2                         2 * ceil(d / 4)  + 4 g
//! INT4   int4                         d                + 4 g
//! INT8   int4, refinement             2 d              + 4 g
//! BF16   bf16                         4 d
//! ```
//!
//! Low nibbles (and low pairs of bits) hold the first channels. Keys are stored rotated (see `hadamard`), values as they are.

use half::{bf16, f16};
use mixquant_crds::KvPrecision;

use crate::quant::nest::{self, GROUP};

/// See the file's comment.
#[derive(Debug, Clone, Default)]
pub(super) struct Block {
    tiers: Vec<KvPrecision>,
    int2: Vec<u8>,
    int4: Vec<u8>,
    refinement: Vec<u8>,
    bf16: Vec<bf16>,
    /// `ceil(d / 64)` for the key and again for the value of each token that is not BF16.
    scales: Vec<f16>,
}

impl Block {
    /// Stores one token more. The key is rotated already.
    pub(super) fn push(&mut self, tier: KvPrecision, key: &[f32], value: &[f32]) {
        self.tiers.push(tier);
        for row in [key, value] {
            match tier {
                KvPrecision::BF16 => self.bf16.extend(row.iter().map(|x| bf16::from_f32(*x))),
                KvPrecision::INT2 => self.push_int2(row),
                KvPrecision::INT4 => self.push_int4(row, false),
                KvPrecision::INT8 => self.push_int4(row, true),
            }
        }
    }

    fn push_int2(&mut self, row: &[f32]) {
        let mut codes = Vec::with_capacity(row.len());
        for group in row.chunks(GROUP) {
            let scale = nest::int2_scale(group);
            self.scales.push(scale);
            codes.extend(group.iter().map(|x| nest::int2(*x, scale)));
        }
        let pack = |codes: &[i8]| {
            codes.iter().enumerate().fold(0, |byte, (i, q)| {
                byte | ((q.cast_unsigned() & 3) << (2 * i))
            })
        };
        self.int2.extend(codes.chunks(4).map(pack));
    }

    fn push_int4(&mut self, row: &[f32], refine: bool) {
        let (mut coarse, mut fine) = (Vec::with_capacity(row.len()), Vec::with_capacity(row.len()));
        for group in row.chunks(GROUP) {
            let scale = nest::int4_scale(group);
            self.scales.push(scale);
            for x in group {
                let q = nest::int4(*x, scale);
                coarse.push(q);
                fine.push(nest::refinement(*x, q, scale));
            }
        }
        self.int4.extend(coarse.chunks(2).map(pack_nibbles));
        if refine {
            self.refinement.extend(fine.chunks(2).map(pack_nibbles));
        }
    }

    /// Appends all keys (rotated) and values, `head_dim` channels each.
    pub(super) fn read(&self, head_dim: usize, keys: &mut Vec<f32>, values: &mut Vec<f32>) {
        let groups = head_dim.div_ceil(GROUP);
        let (mut pairs, mut nibbles, mut refinements) = (
            self.int2.chunks_exact(head_dim.div_ceil(4)),
            self.int4.chunks_exact(head_dim / 2),
            self.refinement.chunks_exact(head_dim / 2),
        );
        let (mut plain, mut scales) = (
            self.bf16.chunks_exact(head_dim),
            self.scales.chunks_exact(groups),
        );
        for tier in &self.tiers {
            for dst in [&mut *keys, &mut *values] {
                if *tier == KvPrecision::BF16 {
                    dst.extend(
                        plain
                            .next()
                            .expect("push stored a row")
                            .iter()
                            .map(|x| x.to_f32()),
                    );
                    continue;
                }
                let scales = scales.next().expect("push stored a scale a group");
                match tier {
                    KvPrecision::INT2 => read_int2(
                        pairs.next().expect("push stored a row"),
                        scales,
                        head_dim,
                        dst,
                    ),
                    KvPrecision::INT8 => {
                        let refinement = refinements.next().expect("push stored a row");
                        read_int8(
                            nibbles.next().expect("push stored a row"),
                            refinement,
                            scales,
                            dst,
                        );
                    }
                    KvPrecision::INT4 | KvPrecision::BF16 => {
                        read_int4(nibbles.next().expect("push stored a row"), scales, dst);
                    }
                }
            }
        }
    }

    /// Adds the bytes of each tier's tokens.
    pub(super) fn count_bytes(&self, head_dim: usize, bytes: &mut [(KvPrecision, usize); 4]) {
        let scales = 2 * head_dim.div_ceil(GROUP) * size_of::<f16>();
        for (tier, total) in bytes {
            let token = match tier {
                KvPrecision::INT2 => 2 * head_dim.div_ceil(4) + scales,
                KvPrecision::INT4 => head_dim + scales,
                KvPrecision::INT8 => 2 * head_dim + scales,
                KvPrecision::BF16 => 2 * head_dim * size_of::<bf16>(),
            };
            *total += token * self.tiers.iter().filter(|own| *own == tier).count();
        }
    }
}

fn pack_nibbles(pair: &[i8]) -> u8 {
    let high = pair.get(1).map_or(0, |q| q.cast_unsigned() << 4);
    (pair[0].cast_unsigned() & 15) | high
}

/// The two signed nibbles of a byte.
fn nibbles(byte: u8) -> [i8; 2] {
    [(byte << 4).cast_signed() >> 4, byte.cast_signed() >> 4]
}

fn read_int2(codes: &[u8], scales: &[f16], head_dim: usize, dst: &mut Vec<f32>) {
    for channel in 0..head_dim {
        let code = (codes[channel / 4] >> (2 * (channel % 4)) << 6).cast_signed() >> 6;
        dst.push(nest::int2_value(code, scales[channel / GROUP].to_f32()));
    }
}

fn read_int4(coarse: &[u8], scales: &[f16], dst: &mut Vec<f32>) {
    for (coarse, scale) in coarse.chunks(GROUP / 2).zip(scales) {
        let scale = scale.to_f32();
        dst.extend(
            coarse
                .iter()
                .flat_map(|byte| nibbles(*byte))
                .map(|q| nest::int4_value(q, scale)),
        );
    }
}

fn read_int8(coarse: &[u8], fine: &[u8], scales: &[f16], dst: &mut Vec<f32>) {
    for ((coarse, fine), scale) in coarse
        .chunks(GROUP / 2)
        .zip(fine.chunks(GROUP / 2))
        .zip(scales)
    {
        let scale = scale.to_f32();
        let planes = coarse
            .iter()
            .flat_map(|byte| nibbles(*byte))
            .zip(fine.iter().flat_map(|byte| nibbles(*byte)));
        dst.extend(planes.map(|(q, r)| nest::int8_value(q, r, scale)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIERS: [KvPrecision; 4] = [
        KvPrecision::INT2,
        KvPrecision::INT4,
        KvPrecision::INT8,
        KvPrecision::BF16,
    ];

    fn rows(head_dim: usize) -> impl Strategy<Value = Vec<(usize, Vec<f32>)>> {
        proptest::collection::vec(
            (
                0_usize..4,
                proptest::collection::vec(-3.0_f32..3.0, 2 * head_dim),
            ),
            1..9,
        )
    }

    proptest! {
        #[test]
        fn tokens_of_all_tiers_are_read_back_in_their_own_precision(
            (head_dim, rows) in proptest::sample::select(vec![2_usize, 6, 8, 64, 80, 128]).prop_flat_map(|d| (Just(d), rows(d)))
        ) {
            let mut block = Block::default();
            for (tier, row) in &rows {
                block.push(TIERS[*tier], &row[..head_dim], &row[head_dim..]);
            }
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            block.read(head_dim, &mut keys, &mut values);
            // The largest value is 3: half a step of 3 / 7, a sixteenth of one, and what two bits allow.
            let bounds = [3.0, 3.0 / 14.0 * 1.01, 3.0 / 112.0 * 1.01, 3.0 / 256.0];
            for (token, (tier, row)) in rows.iter().enumerate() {
                let read = keys[token * head_dim..][..head_dim].iter().chain(&values[token * head_dim..][..head_dim]);
                for (x, read) in row.iter().zip(read) {
                    prop_assert!((x - read).abs() <= bounds[*tier], "{:?}: {x} became {read}", TIERS[*tier]);
                }
            }
        }

        #[test]
        fn demotion_is_dropping_the_refinement(row in proptest::collection::vec(-3.0_f32..3.0, 128)) {
            let (mut fine, mut coarse) = (Block::default(), Block::default());
            fine.push(KvPrecision::INT8, &row[..64], &row[64..]);
            coarse.push(KvPrecision::INT4, &row[..64], &row[64..]);
            prop_assert_eq!(&fine.int4, &coarse.int4);
            prop_assert_eq!(&fine.scales, &coarse.scales);
            fine.tiers[0] = KvPrecision::INT4;
            fine.refinement.clear();
            let (mut a, mut b) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
            fine.read(64, &mut a.0, &mut a.1);
            coarse.read(64, &mut b.0, &mut b.1);
            prop_assert_eq!(a, b);
        }
    }

    #[test]
    fn counted_bytes_are_the_stored_bytes() {
        for head_dim in [6, 64, 128] {
            let mut block = Block::default();
            for tier in TIERS {
                block.push(tier, &vec![1.0; head_dim], &vec![2.0; head_dim]);
            }
            let mut bytes = TIERS.map(|tier| (tier, 0));
            block.count_bytes(head_dim, &mut bytes);
            let stored = block.int2.len()
                + block.int4.len()
                + block.refinement.len()
                + 2 * block.bf16.len()
                + 2 * block.scales.len();
            assert_eq!(bytes.iter().map(|(_, bytes)| bytes).sum::<usize>(), stored);
        }
    }
}
