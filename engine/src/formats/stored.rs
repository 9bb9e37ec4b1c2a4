//! Tensors as they lie in a file: type, shape and bytes, and reading them as numbers with every length checked.

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use crate::{Error, Result};

/// One tensor's type, shape and little-endian bytes; the bytes fit type and shape.
#[derive(Debug, Clone)]
pub struct Stored<'a> {
    /// The type.
    pub dtype: Dtype,
    /// The dimensions, the slowest first.
    pub shape: Vec<usize>,
    /// The numbers.
    pub bytes: &'a [u8],
}

/// Where tensors are found by name.
pub trait Tensors {
    /// The tensor of this name.
    fn find(&self, name: &str) -> Option<Stored<'_>>;
}

impl Tensors for SafeTensors<'_> {
    fn find(&self, name: &str) -> Option<Stored<'_>> {
        let view = self.tensor(name).ok()?;
        Some(Stored {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data(),
        })
    }
}

/// The tensor of this name, or an error that names it.
pub(super) fn need<'a>(tensors: &'a dyn Tensors, name: &str) -> Result<Stored<'a>> {
    tensors.find(name).ok_or_else(|| {
        Error::model(format!(
            "tensor {name} is missing from the weights: download the model again"
        ))
    })
}

/// Whether the linear's `.weight` is there in floating point: the checkpoint left it unquantised, whatever its configuration says.
pub(super) fn is_dense(tensors: &dyn Tensors, linear: &str) -> bool {
    tensors
        .find(&format!("{linear}.weight"))
        .is_some_and(|weight| matches!(weight.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32))
}

impl<'a> Stored<'a> {
    /// Refuses another type.
    pub(super) fn of_type(self, name: &str, dtype: Dtype) -> Result<Self> {
        if self.dtype == dtype {
            return Ok(self);
        }
        Err(Error::model(format!(
            "tensor {name} has the type {:?} where this format has {dtype:?}: config.json and weights are of different models",
            self.dtype
        )))
    }

    /// Refuses another shape.
    pub(super) fn of_shape(self, name: &str, shape: &[usize]) -> Result<Self> {
        if self.shape == shape {
            return Ok(self);
        }
        Err(Error::model(format!(
            "tensor {name} has the shape {:?}, config.json asks for {shape:?}: config.json and weights are of different models",
            self.shape
        )))
    }

    /// 32-bit words, row-major.
    pub(super) fn words(self, name: &str, shape: [usize; 2]) -> Result<Words<'a>> {
        let stored = self.of_type(name, Dtype::I32)?.of_shape(name, &shape)?;
        Ok(Words {
            words: stored.bytes.as_chunks().0,
            columns: shape[1],
        })
    }

    /// Numbers of a floating type.
    pub(super) fn floats(&self, name: &str) -> Result<Vec<f32>> {
        match self.dtype {
            Dtype::F32 => Ok(numbers(self.bytes, f32::from_le_bytes)),
            Dtype::F16 => Ok(numbers(self.bytes, |b| f16::from_le_bytes(b).to_f32())),
            Dtype::BF16 => Ok(numbers(self.bytes, |b| bf16::from_le_bytes(b).to_f32())),
            other => Err(Error::model(format!(
                "tensor {name} has the type {other:?}: scales are BF16, F16 or F32; the file is of another layout"
            ))),
        }
    }

    /// 32-bit integers of this many.
    pub(super) fn ints(self, name: &str, len: usize) -> Result<Vec<i32>> {
        let stored = self.of_type(name, Dtype::I32)?.of_shape(name, &[len])?;
        Ok(numbers(stored.bytes, i32::from_le_bytes))
    }
}

fn numbers<T, const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
    let chunks = bytes.as_chunks::<N>().0;
    chunks.iter().map(|bytes| number(*bytes)).collect()
}

/// A matrix of 32-bit words that hold packed codes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a> {
    words: &'a [[u8; 4]],
    columns: usize,
}

impl Words<'_> {
    /// The bytes of one word, the lowest codes first.
    pub(super) fn bytes(&self, row: usize, column: usize) -> [u8; 4] {
        self.words[row * self.columns + column]
    }

    /// The `index`-th code of `bits` bits in one word, counted from the lowest bits. `bits` is 4 or 8.
    pub(super) fn code(&self, row: usize, column: usize, index: usize, bits: usize) -> u8 {
        let word = u32::from_le_bytes(self.bytes(row, column));
        u8::try_from(word >> (index * bits) & ((1 << bits) - 1)).expect("a code has at most 8 bits")
    }
}
