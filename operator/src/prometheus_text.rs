//! Reads what a verdict needs from a pod's exposition text: when its process started, and the series that gates look at.
//!
//! Called by `scrape.rs` on text from the network. Pure and strict: whatever is not plainly right (NaN, a negative or falling count, a series
//! twice, a missing +Inf) is refused with a reason, for the series that it belongs to. What is refused is no sample; it is never taken for
//! a good one, and a series that is absent is never taken for zero.

use std::collections::{BTreeMap, BTreeSet};

use mixquant_crds::names::engine_metrics::PROCESS_START_TIME;

use crate::histogram::Histogram;
use crate::samples::{Series, Shape, Value};

/// Buckets of one series; more is no engine of ours.
const MAX_BUCKETS: usize = 1000;
/// Parts of one series by labels; more is no engine of ours.
const MAX_PARTS: usize = 64;
/// Counts above this are not exact in the format's floats.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// One pod's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Scrape {
    /// Seconds since the epoch, bit for bit as written: another value is another process.
    pub process_start: u64,
    /// The series that are there, since the process started; `Err` with the reason for one that is not plainly right.
    pub series: BTreeMap<Series, Result<Value, String>>,
}

/// Parses the whole text.
///
/// # Errors
/// Why nothing of it can be used, in one line.
pub fn parse(text: &str) -> Result<Scrape, String> {
    let mut start = None;
    let mut parts: BTreeMap<Series, Result<Parts, String>> = BTreeMap::new();
    for line in text.lines() {
        let Some((name, rest)) = split_name(line) else {
            continue;
        };
        if name == PROCESS_START_TIME {
            let (_, value) = labels_and_value(rest).map_err(|why| format!("{name}: {why}"))?;
            if start.replace(value).is_some() {
                return Err(format!("{name} is there twice"));
            }
            continue;
        }
        for series in Series::ALL {
            if !is_sample_of(series, name) {
                continue;
            }
            let known = parts.entry(series).or_insert_with(|| Ok(Parts::default()));
            if let Ok(found) = known
                && let Err(why) = found.take(series, rest)
            {
                *known = Err(format!("{name}: {why}"));
            }
        }
    }
    let start = start.ok_or_else(|| format!("{PROCESS_START_TIME} is missing"))?;
    if !(start.is_finite() && start > 0.0) {
        return Err(format!("{PROCESS_START_TIME} is {start}"));
    }
    let series = parts.into_iter().filter_map(|(series, parts)| {
        let value = match parts {
            Ok(parts) => parts.value(series).transpose()?,
            Err(why) => Err(why),
        };
        Some((series, value))
    });
    Ok(Scrape {
        process_start: start.to_bits(),
        series: series.collect(),
    })
}

/// Whether a line of this name is a sample of `series`.
fn is_sample_of(series: Series, name: &str) -> bool {
    let source = series.source();
    let suffix = match source.shape {
        Shape::Histogram => "_bucket",
        Shape::Counter => "_total",
        Shape::Gauge => "",
    };
    name.strip_prefix(source.family) == Some(suffix)
}

/// The samples of one series.
#[derive(Default)]
struct Parts {
    /// By the labels other than `le`: an engine may split a histogram, and all its parts count.
    buckets: BTreeMap<String, Vec<(f64, u64)>>,
    total: u64,
    greatest: Option<f64>,
    seen: BTreeSet<String>,
}

impl Parts {
    fn take(&mut self, series: Series, rest: &str) -> Result<(), String> {
        let (labels, value) = labels_and_value(rest)?;
        let source = series.source();
        let pairs = pairs(labels)?;
        if let Some(wanted) = source.label
            && !pairs.contains(&wanted)
        {
            return Ok(());
        }
        if source.shape == Shape::Histogram {
            return self.bucket(&pairs, value);
        }
        if self.seen.len() == MAX_PARTS {
            return Err(format!("more than {MAX_PARTS} parts"));
        }
        if !self.seen.insert(labels.to_owned()) {
            return Err("the same sample twice".into());
        }
        if source.shape == Shape::Counter {
            self.total = self.total.saturating_add(count(value)?);
        } else if value.is_finite() && value >= 0.0 {
            self.greatest = Some(self.greatest.unwrap_or(0.0).max(value));
        } else {
            return Err(format!("{value} is no level"));
        }
        Ok(())
    }

    fn bucket(&mut self, pairs: &[(&str, &str)], value: f64) -> Result<(), String> {
        let bound = pairs.iter().find(|(name, _)| *name == "le");
        let bound = match bound.ok_or("a bucket without `le`")?.1 {
            "+Inf" => f64::INFINITY,
            text => text
                .parse::<f64>()
                .ok()
                .filter(|bound| bound.is_finite())
                .ok_or_else(|| format!("le=\"{}\" is no bound", shortened(text)))?,
        };
        let others: Vec<String> = pairs
            .iter()
            .filter(|(name, _)| *name != "le")
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        if self.buckets.len() == MAX_PARTS && !self.buckets.contains_key(&others.join(",")) {
            return Err(format!("more than {MAX_PARTS} parts"));
        }
        let buckets = self.buckets.entry(others.join(",")).or_default();
        if buckets.len() == MAX_BUCKETS {
            return Err(format!("more than {MAX_BUCKETS} buckets"));
        }
        buckets.push((bound, count(value)?));
        Ok(())
    }

    /// The series as a whole; `None` when none of the samples was a part of it.
    fn value(self, series: Series) -> Result<Option<Value>, String> {
        Ok(match series.source().shape {
            Shape::Histogram if self.buckets.is_empty() => None,
            Shape::Histogram => Some(Value::Histogram(sum(self.buckets.into_values())?)),
            Shape::Counter => (!self.seen.is_empty()).then_some(Value::Count(self.total)),
            Shape::Gauge => self.greatest.map(Value::Level),
        })
    }
}

fn split_name(line: &str) -> Option<(&str, &str)> {
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' '])?;
    Some((&line[..end], &line[end..]))
}

/// The text between the braces (empty without any) and the value. A timestamp would make the sample somebody else's, and old.
fn labels_and_value(rest: &str) -> Result<(&str, f64), String> {
    let (labels, value) = if rest.starts_with('{') {
        let end = closing_brace(rest).ok_or("an unfinished label list")?;
        (&rest[1..end], &rest[end + 1..])
    } else {
        ("", rest)
    };
    let mut fields = value.split_ascii_whitespace();
    let number = fields.next().ok_or("no value")?;
    if fields.next().is_some() {
        return Err("a sample with a timestamp".into());
    }
    let number = number
        .parse()
        .map_err(|_| format!("`{}` is no number", shortened(number)))?;
    Ok((labels, number))
}

fn closing_brace(text: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

/// The labels in the text between the braces, values as they are written (escapes kept).
fn pairs(labels: &str) -> Result<Vec<(&str, &str)>, String> {
    let mut pairs = Vec::new();
    let mut rest = labels;
    while !rest.is_empty() {
        let (name, after) = rest.split_once("=\"").ok_or("a label without a value")?;
        let end = end_of_value(after).ok_or("an unfinished label value")?;
        pairs.push((name, &after[..end]));
        rest = &after[end + 1..];
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None if rest.is_empty() => {}
            None => return Err("labels that are not parted by commas".into()),
        }
    }
    Ok(pairs)
}

/// Where the closing quote of a label value stands.
fn end_of_value(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(at),
            _ => {}
        }
    }
    None
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked to be a whole number that a u64 holds"
)]
fn count(value: f64) -> Result<u64, String> {
    if value.fract() == 0.0 && (0.0..MAX_EXACT).contains(&value) {
        Ok(value as u64)
    } else {
        Err(format!("{value} is no count"))
    }
}

/// Adds the parts up; they must have the same buckets.
fn sum(parts: impl Iterator<Item = Vec<(f64, u64)>>) -> Result<Histogram, String> {
    let mut total: Option<Histogram> = None;
    for part in parts {
        let part = histogram(part)?;
        match &mut total {
            None => total = Some(part),
            Some(total) if total.bounds == part.bounds => {
                for (sum, count) in total.counts.iter_mut().zip(part.counts) {
                    *sum = sum.saturating_add(count);
                }
            }
            Some(_) => return Err("two series of the histogram have different buckets".into()),
        }
    }
    total.ok_or_else(|| "the histogram has no series".into())
}

/// Cumulative buckets, in the order of the text, as counts between bounds.
fn histogram(buckets: Vec<(f64, u64)>) -> Result<Histogram, String> {
    let mut result = Histogram::default();
    let mut before = 0;
    let mut closed = false;
    for (bound, cumulative) in buckets {
        if closed || result.bounds.last().is_some_and(|last| bound <= *last) {
            return Err("the histogram's bounds do not rise".into());
        }
        let here = cumulative
            .checked_sub(before)
            .ok_or("the histogram's cumulative counts fall")?;
        result.counts.push(here);
        before = cumulative;
        if bound.is_finite() {
            result.bounds.push(bound);
        } else {
            closed = true;
        }
    }
    if closed && !result.bounds.is_empty() {
        Ok(result)
    } else {
        Err("the histogram has no +Inf bucket, or no other".into())
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
#[path = "prometheus_text_tests.rs"]
mod tests;
