//! Stored tensors: bytes of a mapped file read as numbers, without a copy until a plan computes with them.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;

use super::checkpoint::mmap::release;
use super::halves::Halves;
use crate::kernels::{Matrix, Values};

/// Numbers that one thread moves or rounds at once: so much of a file is in memory twice for a moment.
const PIECE: usize = 1 << 20;

/// Where a tensor's numbers lie.
#[derive(Debug, Clone)]
pub(super) enum Storage {
    /// BF16 in the file, aligned.
    MappedBf16(Arc<Mmap>, Range<usize>),
    /// F32 in the file, aligned.
    MappedF32(Arc<Mmap>, Range<usize>),
    /// BF16 copied.
    Bf16(Halves),
    /// F32 copied, or widened from F16.
    F32(Vec<f32>),
}

/// A tensor of the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    storage: Storage,
    shape: Vec<usize>,
    /// The same in BF16 and in memory of their own, when the plan computes so: rounded from F32, or moved out of a mapped file.
    own: Option<Halves>,
}

impl Storage {
    /// `None` for a type that is not supported. F16 is widened once; data that is not aligned is copied once.
    pub(super) fn mapped(map: Arc<Mmap>, range: Range<usize>, dtype: Dtype) -> Option<Self> {
        let bytes = &map[range.clone()];
        match dtype {
            Dtype::BF16 if bytemuck::try_cast_slice::<u8, bf16>(bytes).is_ok() => {
                Some(Self::MappedBf16(map, range))
            }
            Dtype::BF16 => {
                let pairs = bytes.as_chunks().0;
                Some(Self::Bf16(Halves::fill(
                    pairs.len(),
                    PIECE,
                    |first, dst| {
                        for (dst, pair) in dst.iter_mut().zip(&pairs[first..]) {
                            *dst = bf16::from_le_bytes(*pair);
                        }
                    },
                )))
            }
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
            Self::Bf16(values) => Self::Bf16(copied(&values[range])),
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

/// The same numbers elsewhere.
fn copied(values: &[bf16]) -> Halves {
    Halves::fill(values.len(), PIECE, |first, dst| {
        dst.copy_from_slice(&values[first..][..dst.len()]);
    })
}

impl Tensor {
    pub(super) fn new(storage: Storage, shape: Vec<usize>) -> Self {
        Self {
            storage,
            shape,
            own: None,
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
        let part = |row: usize| row * width..(row + 1) * width;
        let storage = match self.stored() {
            Values::F32(values) => {
                let parts = rows.iter().flat_map(|row| &values[part(*row)]);
                Storage::F32(parts.copied().collect())
            }
            Values::Bf16(values) => {
                let len = rows.len() * width;
                Storage::Bf16(Halves::fill(len, width.max(1), |first, dst| {
                    dst.copy_from_slice(&values[part(rows[first / width])]);
                }))
            }
        };
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        Self::new(storage, shape)
    }

    /// The numbers as stored.
    pub(super) fn stored(&self) -> Values<'_> {
        match (&self.storage, &self.own) {
            (Storage::MappedBf16(..), Some(own)) => Values::Bf16(own),
            _ => self.storage.values(),
        }
    }

    /// Keeps a copy rounded to BF16 beside an F32 original, or drops it.
    pub(super) fn round(&mut self, wanted: bool) {
        let Values::F32(values) = self.storage.values() else {
            return;
        };
        self.own = wanted.then(|| {
            Halves::fill(values.len(), PIECE, |first, dst| {
                for (dst, value) in dst.iter_mut().zip(&values[first..]) {
                    *dst = bf16::from_f32(*value);
                }
            })
        });
        if wanted {
            self.release();
        }
    }

    /// Moves the BF16 numbers of a mapped file into memory of their own, letting go of each piece of the file behind it; or gives that memory
    /// back.
    pub(super) fn hold(&mut self, wanted: bool) {
        let Storage::MappedBf16(map, range) = &self.storage else {
            return;
        };
        if !wanted {
            self.own = None;
        } else if self.own.is_none() {
            let values: &[bf16] = bytemuck::cast_slice(&map[range.clone()]);
            self.own = Some(Halves::fill(values.len(), PIECE, |first, dst| {
                dst.copy_from_slice(&values[first..][..dst.len()]);
                let start = range.start + size_of::<bf16>() * first;
                release(map, start..start + size_of_val(dst));
            }));
        }
    }

    /// The matrix that the plan computes with.
    pub(super) fn matrix(&self) -> Matrix<'_> {
        let own = self.own.as_deref().map(Values::Bf16);
        Matrix {
            values: own.unwrap_or_else(|| self.storage.values()),
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

    /// Bytes of the numbers, a rounded copy included. Those in a mapped file count too: they are in memory once they are used.
    pub(super) fn bytes(&self) -> usize {
        match (self.stored(), &self.own) {
            (Values::F32(values), Some(own)) => size_of_val(values) + size_of_val(&own[..]),
            (Values::F32(values), None) => size_of_val(values),
            (Values::Bf16(values), _) => size_of_val(values),
        }
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
