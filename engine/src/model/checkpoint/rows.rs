//! Some rows of quantised weights: parts of fused linears, and rows in another order.

use crate::quant::weight::{Codes, QuantisedWeight};

/// The rows `rows` of `weight`, in that order, each with the scales that it has there.
pub(in crate::model) fn select_rows(weight: &QuantisedWeight, rows: &[usize]) -> QuantisedWeight {
    let (width, groups) = (weight.in_features, weight.groups());
    let nibbles = QuantisedWeight::nibble_row(width);
    let of = |values: &[f32]| -> Vec<f32> {
        rows.iter()
            .flat_map(|row| &values[row / weight.row_block * groups..][..groups])
            .copied()
            .collect()
    };
    let bytes = |codes: &[u8], len: usize| -> Vec<u8> {
        rows.iter()
            .flat_map(|row| &codes[row * len..][..len])
            .copied()
            .collect()
    };
    let codes = match &weight.codes {
        Codes::Int8(codes) => Codes::Int8(
            rows.iter()
                .flat_map(|row| &codes[row * width..][..width])
                .copied()
                .collect(),
        ),
        Codes::Int4(codes) => Codes::Int4(bytes(codes, nibbles)),
        Codes::Fp8(codes) => Codes::Fp8(bytes(codes, width)),
        Codes::Lut4 { codes, tables } => Codes::Lut4 {
            codes: bytes(codes, nibbles),
            tables: rows.iter().map(|row| tables[*row]).collect(),
        },
    };
    QuantisedWeight {
        out_features: rows.len(),
        in_features: width,
        codes,
        // Rows that shared a scale may part.
        row_block: 1,
        group: weight.group,
        scales: of(&weight.scales),
        zeros: weight.zeros.as_deref().map(of),
        input_order: weight.input_order.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selected_rows_keep_their_weights() {
        let whole = QuantisedWeight {
            out_features: 4,
            in_features: 3,
            codes: Codes::Int8((1..13).collect()),
            row_block: 2,
            group: 2,
            scales: vec![1.0, 0.5, 2.0, 4.0],
            zeros: Some(vec![0.0, 1.0, 2.0, 3.0]),
            input_order: Some(vec![2, 0, 1]),
        };
        let rows = [3, 1, 2];
        let selected = select_rows(&whole, &rows);
        selected.check("x").unwrap();
        let (mut own, mut expected) = ([0.0; 3], [0.0; 3]);
        for (index, row) in rows.into_iter().enumerate() {
            selected.dequantise_row(index, &mut own);
            whole.dequantise_row(row, &mut expected);
            assert_eq!(
                own.map(f32::to_bits),
                expected.map(f32::to_bits),
                "row {row}"
            );
        }
    }
}
