//! One KV head of one layer: its tokens in order.

use half::bf16;
use mixquant_crds::KvPrecision;

use super::Layout;

/// Rows that are not quantised.
#[derive(Debug, Clone)]
enum Rows {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// See the file's comment.
#[derive(Debug, Clone)]
pub(crate) struct HeadCache {
    head_dim: usize,
    keys: Rows,
    values: Rows,
}

impl Rows {
    fn push(&mut self, row: &[f32]) {
        match self {
            Self::F32(rows) => rows.extend_from_slice(row),
            Self::Bf16(rows) => rows.extend(row.iter().map(|value| bf16::from_f32(*value))),
        }
    }

    fn truncate(&mut self, len: usize) {
        match self {
            Self::F32(rows) => rows.truncate(len),
            Self::Bf16(rows) => rows.truncate(len),
        }
    }

    fn read(&self, dst: &mut Vec<f32>) {
        match self {
            Self::F32(rows) => dst.extend_from_slice(rows),
            Self::Bf16(rows) => dst.extend(
                rows.iter()
                    .map(|value| f32::from_bits(u32::from(value.to_bits()) << 16)),
            ),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F32(rows) => size_of_val(&rows[..]),
            Self::Bf16(rows) => size_of_val(&rows[..]),
        }
    }
}

impl HeadCache {
    pub(super) fn new(layout: &Layout) -> Self {
        let empty = || {
            if layout.full_precision {
                Rows::F32(Vec::new())
            } else {
                Rows::Bf16(Vec::new())
            }
        };
        Self {
            head_dim: layout.head_dim,
            keys: empty(),
            values: empty(),
        }
    }

    /// Tokens stored.
    pub(crate) fn len(&self) -> usize {
        self.keys.len() / self.head_dim
    }

    /// Appends a token.
    pub(crate) fn push(&mut self, key: &[f32], value: &[f32]) {
        self.keys.push(key);
        self.values.push(value);
    }

    /// All keys and values, `[len, head_dim]` each.
    pub(crate) fn read(&self, keys: &mut Vec<f32>, values: &mut Vec<f32>) {
        keys.clear();
        values.clear();
        self.keys.read(keys);
        self.values.read(values);
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.keys.truncate(len * self.head_dim);
        self.values.truncate(len * self.head_dim);
    }

    pub(super) fn count_bytes(&self, bytes: &mut [(KvPrecision, usize); 4]) {
        bytes[3].1 += self.keys.bytes() + self.values.bytes();
    }
}
