//! Activations as packed linears take them: FP32 as they are, or INT8 with one scale a row and group.

/// How the columns of INT8 activations (and of the weights that meet them) lie: group after group, each padded with zeros to whole steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    columns: usize,
    group: usize,
}

/// INT8 activations: rows of [`Groups::row_len`] bytes.
#[derive(Debug, Clone, Copy)]
pub struct Int8Rows<'a> {
    /// `rows * row_len` values in -127..=127.
    pub values: &'a [i8],
    /// `rows * groups` scales: `x = scale * value`.
    pub scales: &'a [f32],
    /// `rows * groups` sums of the group's integers.
    pub sums: &'a [i32],
    /// The layout.
    pub groups: Groups,
}

/// The input of a packed linear.
#[derive(Debug, Clone, Copy)]
pub enum Activations<'a> {
    /// `[rows, in_features]`.
    Fp32(&'a [f32]),
    /// See [`Int8Rows`].
    Int8(Int8Rows<'a>),
}

impl Groups {
    /// Columns of a step: every group takes whole steps, so that kernels read 8 columns at once.
    pub const STEP: usize = 8;

    /// `columns` (above 0) in groups of `group`; a larger group means one.
    pub fn new(columns: usize, group: usize) -> Self {
        assert!(
            columns > 0 && group > 0,
            "a row has columns and groups have some"
        );
        let group = group.min(columns);
        Self { columns, group }
    }

    /// Columns without padding.
    pub const fn columns(self) -> usize {
        self.columns
    }

    /// Groups of a row.
    pub const fn count(self) -> usize {
        self.columns.div_ceil(self.group)
    }

    /// Columns that share a scale.
    pub const fn group(self) -> usize {
        self.group
    }

    /// Bytes of a group: `group` and its padding.
    pub const fn padded(self) -> usize {
        self.group.next_multiple_of(Self::STEP)
    }

    /// Bytes of a row.
    pub const fn row_len(self) -> usize {
        self.count() * self.padded()
    }

    /// The columns of a group; the last group may be short.
    pub fn range(self, group: usize) -> std::ops::Range<usize> {
        group * self.group..self.columns.min((group + 1) * self.group)
    }

    /// Where a column is stored.
    pub const fn index(self, column: usize) -> usize {
        column / self.group * self.padded() + column % self.group
    }
}

impl<'a> Int8Rows<'a> {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.scales.len() / self.groups.count()
    }

    /// One row with its padding.
    pub fn row(&self, index: usize) -> &'a [i8] {
        let len = self.groups.row_len();
        &self.values[index * len..(index + 1) * len]
    }

    /// Some of the rows.
    #[must_use]
    pub fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        let (len, count) = (self.groups.row_len(), self.groups.count());
        Self {
            values: &self.values[rows.start * len..rows.end * len],
            scales: &self.scales[rows.start * count..rows.end * count],
            sums: &self.sums[rows.start * count..rows.end * count],
            groups: self.groups,
        }
    }

    /// Panics when the rows are not whole or not laid out as the weights: every unsafe kernel relies on it.
    pub fn check(&self, groups: Groups) {
        assert_eq!(
            self.groups, groups,
            "activations must be grouped as the weights are"
        );
        let (rows, count) = (self.rows(), groups.count());
        assert!(
            self.values.len() == rows * groups.row_len()
                && self.scales.len() == rows * count
                && self.sums.len() == rows * count,
            "activations must be whole rows"
        );
    }
}

impl Activations<'_> {
    /// Some of the rows of `[rows, columns]`.
    #[must_use]
    pub fn slice(&self, rows: std::ops::Range<usize>, columns: usize) -> Self {
        match self {
            Self::Fp32(x) => Self::Fp32(&x[rows.start * columns..rows.end * columns]),
            Self::Int8(x) => Self::Int8(x.slice(rows)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_takes_whole_steps() {
        let groups = Groups::new(70, 20);
        assert_eq!(
            (groups.count(), groups.padded(), groups.row_len()),
            (4, 24, 96)
        );
        assert_eq!(
            (groups.index(19), groups.index(20), groups.range(3)),
            (19, 24, 60..70)
        );
        assert_eq!(Groups::new(5, 128).count(), 1);
    }
}
