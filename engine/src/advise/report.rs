//! The advice as text: a table, the plan, the reasons.

use std::fmt::{self, Write as _};

use super::quality::of_kv;
use super::scheme::Kv;
use super::{Advice, HEADROOM, Row};

/// Decimal units, three digits.
pub(super) fn bytes(bytes: f64) -> String {
    scaled(bytes, "B")
}

fn scaled(number: f64, unit: &str) -> String {
    let (mut number, mut prefix) = (number, "");
    for next in ["k", "M", "G", "T", "P"] {
        if number < 999.5 {
            break;
        }
        number /= 1000.0;
        prefix = next;
    }
    let digits = match number {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{number:.digits$} {prefix}{unit}")
}

fn time(seconds: f64) -> String {
    match seconds {
        0.0..0.000_999_5 => scaled(seconds * 1e6, "us"),
        0.0..0.999_5 => scaled(seconds * 1e3, "ms"),
        _ => format!("{seconds:.2} s"),
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.heading(f)?;
        self.table(f)?;
        self.cache(f)?;
        match &self.recommendation {
            None => writeln!(f, "\nrecommended: nothing")?,
            Some(found) => {
                writeln!(
                    f,
                    "\nrecommended: {}, keys and values {}",
                    found.scheme,
                    found.kv.name()
                )?;
                writeln!(f, "precision:")?;
                for line in found.yaml.lines() {
                    writeln!(f, "  {line}")?;
                }
            }
        }
        writeln!(f, "\nwhy")?;
        for reason in &self.why {
            writeln!(f, "- {reason}")?;
        }
        Ok(())
    }
}

impl Advice {
    fn heading(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (model, device, load) = (&self.model, &self.device, &self.load);
        let weights = super::float(model.linear_weights + model.other_weights);
        writeln!(
            f,
            "model   {}: {} weights, {} of them in block linears; {} of BF16 keys and values a token",
            model.name,
            scaled(weights, "").trim_end(),
            scaled(super::float(model.linear_weights), "").trim_end(),
            bytes(model.kv_bytes_per_token(16.0))
        )?;
        let mut rates = format!("{}op/s BF16", scaled(device.bf16_ops_per_second, ""));
        for (name, rate) in [
            ("INT8", device.int8_ops_per_second),
            ("FP8", device.fp8_ops_per_second),
        ] {
            if let Some(rate) = rate {
                write!(rates, ", {}op/s {name}", scaled(rate, ""))?;
            }
        }
        writeln!(
            f,
            "device  {}: {}, {}/s, {rates}; prefill reaches {:.0} %, decode {:.0} %",
            device.name,
            bytes(device.memory_bytes),
            bytes(device.bandwidth_bytes_per_second),
            100.0 * device.prefill_reach,
            100.0 * device.decode_reach
        )?;
        writeln!(
            f,
            "load    {} sequences of {} tokens, prompts of {}, {}",
            load.concurrency,
            load.sequence_length,
            load.prompt_tokens,
            load.task.word()
        )?;
        writeln!(
            f,
            "fits    {HEADROOM} x (weights + 2 x layers x KV heads x head_dim x sequence x concurrency x bytes) is at most the memory\n"
        )
    }

    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = vec![[
            "scheme".to_owned(),
            "weights".to_owned(),
            "needs, KV BF16".to_owned(),
            "KV INT8".to_owned(),
            "KV INT4/INT8".to_owned(),
            "TTFT".to_owned(),
            "TPOT".to_owned(),
            "quality".to_owned(),
        ]];
        lines.extend(self.rows.iter().map(cells));
        let widths: Vec<usize> = (0..8)
            .map(|column| {
                lines
                    .iter()
                    .map(|line| line[column].len())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        for line in &lines {
            let mut text = String::new();
            for (cell, width) in line.iter().zip(&widths) {
                write!(text, "{cell:width$}  ")?;
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        writeln!(
            f,
            "speeds: the roofline with {} keys and values; TTFT of one prompt, TPOT with all sequences",
            self.kv.name()
        )
    }

    fn cache(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nkeys and values, for {}", self.load.task.word())?;
        let Some(row) = self.rows.first() else {
            return Ok(());
        };
        for (kv, fit) in Kv::ALL.iter().zip(&row.kv) {
            let expected = of_kv(*kv, self.load.task);
            writeln!(
                f,
                "{:9}  {:8}  {:9}  {}",
                kv.name(),
                bytes(fit.kv_bytes),
                expected.class.word(),
                expected.source
            )?;
        }
        Ok(())
    }
}

fn cells(row: &Row) -> [String; 8] {
    let needed = |index: usize| {
        let fit = row.kv[index];
        let mark = if fit.fits { "" } else { " no" };
        format!("{}{mark}", bytes(fit.needed_bytes))
    };
    [
        row.scheme.name.to_owned(),
        bytes(row.weight_bytes),
        needed(0),
        needed(1),
        needed(2),
        time(row.ttft_seconds),
        time(row.tpot_seconds),
        format!("{} ({})", row.quality.class.word(), row.quality.source),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        for (number, text) in [
            (0.0, "0.00 B"),
            (999.0, "999 B"),
            (1_234.0, "1.23 kB"),
            (16.06e9, "16.1 GB"),
            (141e9, "141 GB"),
            (4.8e12, "4.80 TB"),
        ] {
            assert_eq!(bytes(number), text);
        }
        assert_eq!(time(0.0123), "12.3 ms");
        assert_eq!(time(0.000_045), "45.0 us");
        assert_eq!(time(2.5), "2.50 s");
    }
}
