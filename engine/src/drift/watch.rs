//! Counts, while a prompt is read, the rows that lie beyond what calibration saw. The worker hands it to each prompt's first forward and
//! takes its counts for the metrics. It must never change what is computed.

use super::{INPUTS, Ranges, largest_of_inputs, largest_of_keys, largest_of_values};
use crate::model::{LinearInput, Tap};

/// What a stored scale can hold at most: seven times the largest F16. Beyond it a scale saturates, whatever calibration saw.
const SATURATED: f32 = 7.0 * 65504.0;

/// Rows that were looked at, and those of them that lay beyond the range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Looked at.
    pub rows: u64,
    /// Beyond.
    pub beyond: u64,
}

/// What was counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// In the order of [`INPUTS`]: one row a token and layer.
    pub inputs: [Share; 4],
    /// One row a token, layer and KV head.
    pub keys: Share,
    /// The same.
    pub values: Share,
}

/// Counts against an artifact's ranges.
#[derive(Debug)]
pub struct Watch {
    ranges: Ranges,
    /// Whether keys and values are quantised at all.
    stores_quantised: bool,
    counts: Counts,
}

impl Watch {
    /// Nothing counted yet. Keys and values are only looked at where the cache quantises them.
    pub fn new(ranges: Ranges, stores_quantised: bool) -> Self {
        Self {
            ranges,
            stores_quantised,
            counts: Counts::default(),
        }
    }

    /// What was counted since the last call.
    pub fn take(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }
}

impl Share {
    /// A row without a range, or one that is no number, is beyond it.
    fn add(&mut self, largest: &[f32], range: impl Fn(usize) -> f32) {
        let within = |(index, magnitude): &(usize, &f32)| **magnitude <= range(*index);
        let inside = largest.iter().enumerate().filter(within).count();
        self.rows += largest.len() as u64;
        self.beyond += (largest.len() - inside) as u64;
    }
}

impl Tap for Watch {
    fn watches_attention(&self) -> bool {
        false
    }

    fn linear_input(&mut self, layer: usize, input: LinearInput, rows: &[f32], columns: usize) {
        if let Some(place) = INPUTS.iter().position(|own| *own == input) {
            let range = self.ranges.inputs[layer][place];
            self.counts.inputs[place].add(&largest_of_inputs(rows, columns), |_| range);
        }
    }

    fn keys_and_values(&mut self, layer: usize, keys: &[f32], values: &[f32], width: usize) {
        if !self.stores_quantised {
            return;
        }
        let (key_ranges, value_ranges) = (&self.ranges.keys[layer], &self.ranges.values[layer]);
        let heads = key_ranges.len();
        let range = |ranges: &[f32], index: usize| ranges[index % heads].min(SATURATED);
        let keys = largest_of_keys(keys, heads, width);
        self.counts
            .keys
            .add(&keys, |index| range(key_ranges, index));
        let values = largest_of_values(values, heads, width);
        self.counts
            .values
            .add(&values, |index| range(value_ranges, index));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Seen;
    use super::*;

    /// 200 tokens of 8 channels in two heads; the first is a sink.
    fn rows(scale: f32) -> Vec<f32> {
        let value = |index: usize| {
            let sink = if index < 8 { 1000.0 } else { 1.0 };
            #[expect(clippy::cast_precision_loss, reason = "a small number")]
            let wave = ((index * 37 + 11) % 97) as f32 / 97.0 - 0.5;
            wave * sink * scale
        };
        (0..1600).map(value).collect()
    }

    fn read(tap: &mut dyn Tap, scale: f32) {
        let rows = rows(scale);
        for input in INPUTS {
            tap.linear_input(0, input, &rows, 8);
        }
        tap.keys_and_values(0, &rows, &rows, 8);
    }

    fn watch(stores_quantised: bool) -> Watch {
        let mut seen = Seen::new(1, 2);
        seen.text(200);
        read(&mut seen, 1.0);
        Watch::new(seen.ranges().unwrap(), stores_quantised)
    }

    #[test]
    fn what_calibration_saw_is_within_and_what_is_larger_is_beyond() {
        let mut watch = watch(true);
        read(&mut watch, 1.0);
        let same = watch.take();
        let inputs = Share {
            rows: 199,
            beyond: 0,
        };
        let heads = Share {
            rows: 398,
            beyond: 0,
        };
        assert_eq!(
            same,
            Counts {
                inputs: [inputs; 4],
                keys: heads,
                values: heads
            }
        );
        read(&mut watch, 4.0);
        let larger = watch.take();
        for share in [larger.keys, larger.values].iter().chain(&larger.inputs) {
            assert!(share.beyond * 10 > share.rows * 9, "{larger:?}");
        }
        assert_eq!(watch.take(), Counts::default());
    }

    #[test]
    fn what_no_scale_can_hold_and_what_is_no_number_is_beyond() {
        let mut watch = watch(true);
        for range in watch.ranges.keys.iter_mut().flatten() {
            *range = f32::MAX;
        }
        watch.keys_and_values(0, &[1e6; 16], &[f32::NAN; 16], 8);
        let counts = watch.take();
        let all = Share { rows: 2, beyond: 2 };
        assert_eq!((counts.keys, counts.values), (all, all));
    }

    #[test]
    fn keys_that_stay_precise_are_not_counted() {
        let mut watch = watch(false);
        read(&mut watch, 4.0);
        let counts = watch.take();
        assert_eq!((counts.keys, counts.values), Default::default());
        assert!(counts.inputs[0].beyond > 0);
    }

    #[test]
    fn ranges_of_another_shape_or_no_number_are_refused() {
        let ranges = watch(true).ranges;
        assert!(ranges.check(1, 2).is_ok());
        assert!(ranges.check(2, 2).is_err());
        assert!(ranges.check(1, 3).is_err());
        let mut negative = ranges.clone();
        negative.values[0][1] = -1.0;
        assert!(negative.check(1, 2).is_err());
        let mut seen = Seen::new(1, 2);
        seen.keys_and_values(0, &[f32::NAN; 16], &[1.0; 16], 8);
        let error = seen.ranges().unwrap_err();
        assert!(error.message.contains("damaged"), "{error:?}");
    }
}
