//! Stored tensors: bytes of a mapped file read as numbers, without a copy wherever the file allows it.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;

use super::checkpoint::mmap::release;
use crate::kernels::{Matrix, Values};

/// Where a tensor's numbers lie.
#[derive(Debug, Clone)]
pub(super) enum Storage {
    /// BF16 in the file, aligned.
    MappedBf16(Arc<Mmap>, Range<usize>),
    /// F32 in the file, aligned.
    MappedF32(Arc<Mmap>, Range<usize>),
    /// BF16 copied.
    Bf16(Vec<bf16>),
    /// F32 copied, or widened from F16.
    F32(Vec<f32>),
}

/// A tensor of the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    storage: Storage,
    shape: Vec<usize>,
    /// The same rounded to BF16, when the plan computes in BF16 and the checkpoint does not store it.
    rounded: Option<Vec<bf16>>,
}

impl Storage {
    /// `None` for a type that is not supported. F16 is widened once; data that is not aligned is copied once.
    pub(super) fn mapped(map: Arc<Mmap>, range: Range<usize>, dtype: Dtype) -> Option<Self> {
        let bytes = &map[range.clone()];
        match dtype {
            Dtype::BF16 if bytemuck::try_cast_slice::<u8, bf16>(bytes).is_ok() => {
                Some(Self::MappedBf16(map, range))
            }
            Dtype::BF16 => Some(Self::Bf16(read(bytes, bf16::from_le_bytes))),
            Dtype::F32 if bytemuck::try_cast_slice::<u8, f32>(bytes).is_ok() => {
                Some(Self::MappedF32(map, range))
            }
            Dtype::F32 => Some(Self::F32(read(bytes, f32::from_le_bytes))),
            Dtype::F16 => Some(Self::F32(read(bytes, |pair| {
                f16::from_le_bytes(pair).to_f32()
            }))),
            _ => None,
        }
    }

    /// The numbers of this range.
    fn part(&self, range: Range<usize>) -> Self {
        let bytes =
            |start: usize, size: usize| start + range.start * size..start + range.end * size;
        match self {
            Self::MappedBf16(map, own) => {
                Self::MappedBf16(Arc::clone(map), bytes(own.start, size_of::<bf16>()))
            }
            Self::MappedF32(map, own) => {
                Self::MappedF32(Arc::clone(map), bytes(own.start, size_of::<f32>()))
            }
            Self::Bf16(values) => Self::Bf16(values[range].to_vec()),
            Self::F32(values) => Self::F32(values[range].to_vec()),
        }
    }

    fn values(&self) -> Values<'_> {
        match self {
            Self::MappedBf16(map, range) => Values::Bf16(bytemuck::cast_slice(&map[range.clone()])),
            Self::MappedF32(map, range) => Values::F32(bytemuck::cast_slice(&map[range.clone()])),
            Self::Bf16(values) => Values::Bf16(values),
            Self::F32(values) => Values::F32(values),
        }
    }
}

/// Numbers of `N` bytes each, from bytes at any address.
fn read<T, const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|bytes| number(*bytes))
        .collect()
}

impl Tensor {
    pub(super) fn new(storage: Storage, shape: Vec<usize>) -> Self {
        Self {
            storage,
            shape,
            rounded: None,
        }
    }

    /// The matrix of some of the rows.
    pub(super) fn rows(&self, rows: Range<usize>) -> Self {
        let columns = self.shape[1];
        let storage = self.storage.part(rows.start * columns..rows.end * columns);
        Self::new(storage, vec![rows.len(), columns])
    }

    /// The tensor whose first dimension has the entries `rows` of this one's, in that order.
    pub(super) fn select(&self, rows: &[usize]) -> Self {
        let width: usize = self.shape[1..].iter().product();
        let parts = rows.iter().map(|row| row * width..(row + 1) * width);
        let storage = match self.stored() {
            Values::F32(values) => {
                Storage::F32(parts.flat_map(|part| &values[part]).copied().collect())
            }
            Values::Bf16(values) => {
                Storage::Bf16(parts.flat_map(|part| &values[part]).copied().collect())
            }
        };
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        Self::new(storage, shape)
    }

    /// The numbers as stored.
    pub(super) fn stored(&self) -> Values<'_> {
        self.storage.values()
    }

    /// Keeps a copy rounded to BF16 beside an F32 original, or drops it.
    pub(super) fn round(&mut self, wanted: bool) {
        self.rounded = match (wanted, self.storage.values()) {
            (true, Values::F32(values)) => {
                Some(values.iter().map(|value| bf16::from_f32(*value)).collect())
            }
            _ => None,
        };
        if self.rounded.is_some() {
            self.release();
        }
    }

    /// The matrix that the plan computes with.
    pub(super) fn matrix(&self) -> Matrix<'_> {
        let values = self
            .rounded
            .as_ref()
            .map_or_else(|| self.storage.values(), |rounded| Values::Bf16(rounded));
        Matrix {
            values,
            rows: self.shape[0],
            columns: self.shape[1],
        }
    }

    /// All numbers as FP32.
    pub(super) fn to_f32(&self) -> Vec<f32> {
        match self.stored() {
            Values::F32(values) => values.to_vec(),
            Values::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    /// Lets go of the memory of a mapped file: the numbers are read from it again when they are used again.
    pub(super) fn release(&self) {
        match &self.storage {
            Storage::MappedBf16(map, range) | Storage::MappedF32(map, range) => {
                release(map, range.clone());
            }
            Storage::Bf16(_) | Storage::F32(_) => {}
        }
    }

    /// Bytes of the numbers, the rounded copy included. Those in a mapped file count too: they are in memory once they are used.
    pub(super) fn bytes(&self) -> usize {
        let stored = match self.stored() {
            Values::F32(values) => size_of_val(values),
            Values::Bf16(values) => size_of_val(values),
        };
        stored
            + self
                .rounded
                .as_ref()
                .map_or(0, |rounded| size_of_val(&rounded[..]))
    }

    /// Some rows of the matrix as stored, as FP32.
    pub(super) fn stored_rows(&self, rows: Range<usize>) -> Vec<f32> {
        let columns = self.shape[1];
        let range = rows.start * columns..rows.end * columns;
        match self.stored() {
            Values::F32(values) => values[range].to_vec(),
            Values::Bf16(values) => values[range].iter().map(|value| value.to_f32()).collect(),
        }
    }

    /// One row of the matrix as FP32.
    pub(super) fn copy_row(&self, row: usize, dst: &mut [f32]) {
        match self.matrix().slice(row, row + 1).values {
            Values::F32(values) => dst.copy_from_slice(values),
            Values::Bf16(values) => dst
                .iter_mut()
                .zip(values)
                .for_each(|(dst, value)| *dst = value.to_f32()),
        }
    }
}
