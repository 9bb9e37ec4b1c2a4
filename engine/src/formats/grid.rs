//! What formats share: which weights share a scale, and columns that are stored in the order of their groups.

use super::stored::Stored;
use crate::quant::weight::{Codes, QuantisedWeight};
use crate::{Error, Result};

/// Rows and columns that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) row_block: usize,
    pub(super) group: usize,
}

/// How a scheme cuts a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strategy {
    /// One scale.
    Tensor,
    /// One a row.
    Channel,
    /// One for each so many columns of a row.
    Group(usize),
    /// One for each `[rows, columns]`.
    Block(usize, usize),
}

impl Strategy {
    pub(super) fn grid(self, [out_features, in_features]: [usize; 2]) -> Grid {
        let (row_block, group) = match self {
            Self::Tensor => (out_features, in_features),
            Self::Channel => (1, in_features),
            Self::Group(group) => (1, group.min(in_features)),
            Self::Block(rows, columns) => (rows.min(out_features), columns.min(in_features)),
        };
        Grid { row_block, group }
    }

    /// For people.
    pub(super) fn name(self) -> String {
        match self {
            Self::Tensor => "one scale a tensor".into(),
            Self::Channel => "one scale a channel".into(),
            Self::Group(group) => format!("groups of {group}"),
            Self::Block(rows, columns) => format!("blocks of {rows}x{columns}"),
        }
    }
}

impl Grid {
    /// `[rows of blocks, columns of blocks]`.
    pub(super) fn blocks(self, [out_features, in_features]: [usize; 2]) -> [usize; 2] {
        [
            out_features.div_ceil(self.row_block),
            in_features.div_ceil(self.group),
        ]
    }

    /// Scales `[blocks]`; dimensions of one may be left out, as files do.
    pub(super) fn scales(
        self,
        shape: [usize; 2],
        name: &str,
        stored: &Stored<'_>,
    ) -> Result<Vec<f32>> {
        let [rows, columns] = self.blocks(shape);
        let squeezed = |dims: &[usize]| -> Vec<usize> {
            dims.iter().copied().filter(|dim| *dim != 1).collect()
        };
        if squeezed(&stored.shape) != squeezed(&[rows, columns]) {
            return Err(Error::model(format!(
                "tensor {name} has the shape {:?} where its scheme needs [{rows}, {columns}]: config.json and weights are of different models",
                stored.shape
            )));
        }
        stored.floats(name)
    }
}

/// Sorts the columns of `weight` by group, given each input's group, and remembers the order. Nothing happens where they are sorted already.
///
/// # Errors
/// Groups outside the scales, or with another number of inputs than the group size.
pub(super) fn sort_by_group(
    name: &str,
    groups: &[i32],
    weight: QuantisedWeight,
) -> Result<QuantisedWeight> {
    let group = weight.group;
    let place = |input: usize| i32::try_from(input / group).unwrap_or(i32::MAX);
    if groups
        .iter()
        .enumerate()
        .all(|(input, own)| *own == place(input))
    {
        return Ok(weight);
    }
    let mut order: Vec<u32> = (0..u32::try_from(groups.len()).unwrap_or(u32::MAX)).collect();
    order.sort_by_key(|input| groups[*input as usize]);
    let uneven = order
        .iter()
        .enumerate()
        .find(|(column, input)| groups[**input as usize] != place(*column));
    if let Some((column, input)) = uneven {
        return Err(Error::model(format!(
            "{name}: the inputs are not cut into groups of {group} (sorted, place {column} has the group {}): the file is damaged or of another layout",
            groups[*input as usize]
        )));
    }
    let codes = match weight.codes {
        Codes::Int8(codes) => Codes::Int8(permuted(&codes, &order, weight.in_features)),
        Codes::Int4(codes) => Codes::Int4(permuted_nibbles(&codes, &order, weight.in_features)),
        other @ (Codes::Fp8(_) | Codes::Lut4 { .. }) => other,
    };
    Ok(QuantisedWeight {
        codes,
        input_order: Some(order),
        ..weight
    })
}

fn permuted(codes: &[i8], order: &[u32], width: usize) -> Vec<i8> {
    codes
        .chunks_exact(width)
        .flat_map(|row| order.iter().map(|input| row[*input as usize]))
        .collect()
}

fn permuted_nibbles(codes: &[u8], order: &[u32], width: usize) -> Vec<u8> {
    let row_len = QuantisedWeight::nibble_row(width);
    let mut sorted = vec![0; codes.len()];
    for (row, dst) in codes
        .chunks_exact(row_len)
        .zip(sorted.chunks_exact_mut(row_len))
    {
        for (column, input) in order.iter().enumerate() {
            let input = *input as usize;
            let code = row[input / 2] >> (input % 2 * 4) & 15;
            dst[column / 2] |= code << (column % 2 * 4);
        }
    }
    sorted
}

/// Zeros as a weight keeps them: none when all are the one that codes without zeros have.
pub(super) fn zeros_unless(symmetric: f32, zeros: Vec<f32>) -> Option<Vec<f32>> {
    if zeros.iter().all(|zero| zero.total_cmp(&symmetric).is_eq()) {
        None
    } else {
        Some(zeros)
    }
}
