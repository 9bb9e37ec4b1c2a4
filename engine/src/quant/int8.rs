//! INT8 operands in the layout that the kernels read.
//!
//! Weights `[out, in]` are cut into blocks of 16 output channels; inside a block four inputs of one channel stand side by side:
//!
//! ```text
//! block b, inputs 4j..4j+4:   c0i0 c0i1 c0i2 c0i3  c1i0 c1i1 c1i2 c1i3  …  c15i0 … c15i3      (64 bytes, one AVX-512 register)
//! ```
//!
//! so that four broadcast activation bytes meet 16 channels at once. Weights are stored as `w + 128` (VNNI multiplies unsigned by signed);
//! the kernel takes `128 * Σ x` off again. Missing channels and inputs are padded with `w = 0`.

use super::QuantisedLinear;

const OFFSET: u8 = 128;

/// One linear's INT8 weights, packed.
#[derive(Debug, Clone)]
pub struct PackedInt8 {
    out_features: usize,
    in_features: usize,
    data: Vec<u8>,
    scale: Vec<f32>,
}

/// INT8 activations: rows of `row_len` bytes, padded with zeros to a multiple of four.
#[derive(Debug, Clone, Copy)]
pub struct Int8Rows<'a> {
    /// `rows * row_len` values.
    pub values: &'a [i8],
    /// One a row.
    pub scale: &'a [f32],
    /// The sum of each row's integers.
    pub sum: &'a [i32],
    /// Bytes from one row to the next: [`PackedInt8::row_len`].
    pub row_len: usize,
}

impl PackedInt8 {
    /// Output channels in a block.
    pub const BLOCK: usize = 16;
    /// Inputs side by side.
    pub const GROUP: usize = 4;

    /// Bytes of an activation row with so many inputs.
    pub const fn row_len(in_features: usize) -> usize {
        in_features.next_multiple_of(Self::GROUP)
    }

    /// Repacks row-major weights.
    pub fn pack(linear: &QuantisedLinear) -> Self {
        let (out_features, in_features) = (linear.out_features, linear.in_features);
        let block_len = Self::BLOCK * Self::row_len(in_features);
        let mut data = vec![OFFSET; out_features.div_ceil(Self::BLOCK) * block_len];
        for (channel, row) in linear.weight.chunks_exact(in_features).enumerate() {
            for (input, weight) in row.iter().enumerate() {
                data[Self::index(channel, input, block_len)] =
                    weight.cast_unsigned().wrapping_add(OFFSET);
            }
        }
        Self {
            out_features,
            in_features,
            data,
            scale: linear.scale.clone(),
        }
    }

    const fn index(channel: usize, input: usize, block_len: usize) -> usize {
        (channel / Self::BLOCK) * block_len
            + (input / Self::GROUP) * Self::BLOCK * Self::GROUP
            + (channel % Self::BLOCK) * Self::GROUP
            + input % Self::GROUP
    }

    /// The weight of one channel and input.
    pub fn get(&self, channel: usize, input: usize) -> i8 {
        self.data[Self::index(channel, input, self.block_len())]
            .wrapping_sub(OFFSET)
            .cast_signed()
    }

    /// Output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// One scale an output channel.
    pub fn scale(&self) -> &[f32] {
        &self.scale
    }

    /// The blocks one after another, as the file's comment draws them.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Bytes of one block.
    pub fn block_len(&self) -> usize {
        Self::BLOCK * Self::row_len(self.in_features)
    }
}

impl Int8Rows<'_> {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.scale.len()
    }

    /// One row with its padding.
    pub fn row(&self, index: usize) -> &[i8] {
        &self.values[index * self.row_len..(index + 1) * self.row_len]
    }

    /// Panics when the rows are not whole or not as long as `in_features` asks: the kernels rely on it.
    pub fn check(&self, in_features: usize) {
        assert_eq!(
            self.row_len,
            PackedInt8::row_len(in_features),
            "activation rows must be as long as the weights' rows"
        );
        assert_eq!(
            self.values.len(),
            self.rows() * self.row_len,
            "activations must be whole rows"
        );
        assert_eq!(self.sum.len(), self.rows(), "one sum a row");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packing_loses_nothing(out_features in 1_usize..40, in_features in 1_usize..40, seed in any::<u8>()) {
            let weight: Vec<i8> = (0..=u8::MAX).cycle().map(|i| i.wrapping_mul(89).wrapping_add(seed).cast_signed()).take(out_features * in_features).collect();
            let linear = QuantisedLinear { name: "x".into(), out_features, in_features, weight: weight.clone(), scale: vec![1.0; out_features] };
            let packed = PackedInt8::pack(&linear);
            for channel in 0..out_features {
                for input in 0..in_features {
                    prop_assert_eq!(packed.get(channel, input), weight[channel * in_features + input]);
                }
            }
        }
    }
}
