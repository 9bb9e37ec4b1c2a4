//! What a benchmark found, as a table for people and as JSON: every rate beside its roof.
//!
//! Shares are of computing time: they hold on a busy machine. Work is counted as little as can be: the products of the block linears for
//! prefill (attention, norms and roundings count as time only), the bytes of weights and cache for decode.

use std::fmt;
use std::fs;

use serde::Serialize;

use super::clock::Spread;
use super::roofs::{Rate, Roofs};
use super::{Options, Subject};
use crate::advise::ModelFacts;
use crate::kernels::peak::Unit;

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The model or shape.
    pub model: String,
    /// The instruction set of the kernels.
    pub backend: &'static str,
    /// The processor.
    pub cpu: String,
    /// Threads that computed.
    pub threads: usize,
    /// Samples of each cell.
    pub rounds: usize,
    /// Measured in the same run.
    pub roofs: Roofs,
    /// By scheme.
    pub rows: Vec<Row>,
    /// The most that this process ever held, all schemes and the memory that is read for the roof.
    pub peak_memory_bytes: Option<u64>,
}

/// One scheme.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// As on the command line.
    pub scheme: String,
    /// Weights in memory.
    pub weight_bytes: usize,
    /// By length of the prompt.
    pub prefill: Vec<Cell>,
    /// One sequence, token by token.
    pub decode: Cell,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cell {
    /// Tokens of the prompt, or in front of those that are decoded.
    pub tokens: usize,
    /// Tokens a second on the wall.
    pub per_second: Spread,
    /// Tokens a second of computing, times the threads.
    pub per_cpu_second: Spread,
    /// Share of the roof by computing time, in percent; absent where there is no roof.
    pub roof_percent: Option<f64>,
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of tokens, weights and bytes are far below 2^53"
)]
pub(super) fn row(subject: &Subject, options: &Options, roofs: &Roofs) -> Row {
    let threads = rayon::current_num_threads() as f64;
    let facts = ModelFacts::of("", subject.model.config());
    let peak = match subject.unit() {
        Unit::Int8 => roofs.int8_ops,
        Unit::Bf16 => roofs.bf16_ops,
        Unit::Fp32 => roofs.fp32_ops,
    };
    let cell = |index: usize, tokens: usize, run: usize, work: f64, roof: Option<Rate>| {
        let run = run as f64;
        let samples = &subject.samples[index];
        let per_cpu_second = Spread::of(samples.iter().map(|s| threads * run / s.cpu));
        Cell {
            tokens,
            per_second: Spread::of(samples.iter().map(|s| run / s.wall)),
            roof_percent: roof
                .map(|roof| 100.0 * work * per_cpu_second.median / (threads * roof.cpu)),
            per_cpu_second,
        }
    };
    let operations = 2.0 * facts.linear_weights as f64;
    let lengths = options.prefill.iter().enumerate();
    let prefill = lengths.map(|(index, length)| cell(index, *length, *length, operations, peak));
    let bytes = subject.model.bytes_a_token() + subject.context.bytes();
    Row {
        scheme: subject.storage.to_string(),
        weight_bytes: subject.model.weight_bytes().total(),
        prefill: prefill.collect(),
        decode: cell(
            options.prefill.len(),
            options.context,
            options.steps,
            bytes as f64,
            Some(roofs.read()),
        ),
    }
}

/// The processor's name, as the system tells it.
pub(super) fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim())
    };
    let numbers = field("cpu family").zip(field("model\t"));
    let numbers = numbers.map(|(family, model)| format!(" family {family} model {model}"));
    format!(
        "{}{}",
        field("model name").unwrap_or("unknown"),
        numbers.unwrap_or_default()
    )
}

/// The most memory that this process ever held.
pub(super) fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}; {}, {} kernels, {} thread(s); median of {} (lowest to highest)\n",
            self.model, self.cpu, self.backend, self.threads, self.rounds
        )?;
        let giga = |rate: Option<Rate>| {
            rate.map_or("no such instruction".to_owned(), |rate| {
                format!(
                    "{:.0} ({:.0} a CPU second)",
                    rate.wall / 1e9,
                    rate.cpu / 1e9
                )
            })
        };
        writeln!(f, "| roof | best of the rounds |\n| --- | --- |")?;
        writeln!(f, "| INT8, GOP/s | {} |", giga(self.roofs.int8_ops))?;
        writeln!(f, "| BF16, GFLOP/s | {} |", giga(self.roofs.bf16_ops))?;
        writeln!(f, "| FP32, GFLOP/s | {} |", giga(self.roofs.fp32_ops))?;
        for (index, rate) in self.roofs.read_bytes.iter().enumerate() {
            writeln!(
                f,
                "| memory read by {} thread(s), GB/s | {:.1} ({:.1} a CPU second) |",
                index + 1,
                rate.wall / 1e9,
                rate.cpu / 1e9
            )?;
        }
        writeln!(
            f,
            "\n| scheme | weights, MB | phase | tokens/s | tokens a CPU second and thread | of the roof |\n| --- | --- | --- | --- | --- | --- |"
        )?;
        for row in &self.rows {
            for cell in &row.prefill {
                line(f, row, &format!("prefill {}", cell.tokens), cell)?;
            }
            line(
                f,
                row,
                &format!("decode at {}", row.decode.tokens),
                &row.decode,
            )?;
        }
        match self.peak_memory_bytes {
            Some(bytes) => write!(f, "\nMost memory held: {} MB.", bytes / 1_000_000),
            None => Ok(()),
        }
    }
}

fn line(f: &mut fmt::Formatter<'_>, row: &Row, phase: &str, cell: &Cell) -> fmt::Result {
    let spread = |s: &Spread| format!("{:.1} ({:.1} to {:.1})", s.median, s.low, s.high);
    writeln!(
        f,
        "| {} | {} | {phase} | {} | {} | {} |",
        row.scheme,
        row.weight_bytes / 1_000_000,
        spread(&cell.per_second),
        spread(&cell.per_cpu_second),
        cell.roof_percent
            .map_or("-".to_owned(), |percent| format!("{percent:.0} %"))
    )
}
