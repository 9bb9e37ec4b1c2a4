//! Reads the two things that a verdict needs from a pod's exposition text: when its process started and its histogram of TPOT.
//!
//! Called by `scrape.rs` on text from the network. Pure and strict: whatever is not plainly right (NaN, a negative or falling count, a series
//! twice, a missing +Inf) is refused with a reason. A refused scrape is no sample; it is never taken for a good one.

use std::collections::BTreeMap;

use mixquant_crds::names::engine_metrics::{PROCESS_START_TIME, REQUEST_TIME_PER_OUTPUT_TOKEN};

use crate::samples::Histogram;

/// Buckets of one series; more is no engine of ours.
const MAX_BUCKETS: usize = 1000;
/// Counts above this are not exact in the format's floats.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// One pod's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Scrape {
    /// Seconds since the epoch, bit for bit as written: another value is another process.
    pub process_start: u64,
    /// Time per output token since the process started.
    pub tpot: Histogram,
}

/// Parses the whole text.
///
/// # Errors
/// The first thing that is wrong, in one line.
pub fn parse(text: &str) -> Result<Scrape, String> {
    let bucket_name = format!("{REQUEST_TIME_PER_OUTPUT_TOKEN}_bucket");
    let mut start = None;
    // By the labels other than `le`: an engine may split the histogram, and all its parts count.
    let mut series: BTreeMap<String, Vec<(f64, u64)>> = BTreeMap::new();
    for line in text.lines() {
        let Some((name, rest)) = split_name(line) else {
            continue;
        };
        if name == PROCESS_START_TIME {
            let (_, value) = labels_and_value(rest).map_err(|why| format!("{name}: {why}"))?;
            if start.replace(value).is_some() {
                return Err(format!("{name} is there twice"));
            }
        } else if name == bucket_name {
            let (labels, value) = labels_and_value(rest).map_err(|why| format!("{name}: {why}"))?;
            let (bound, others) = take_bound(labels).map_err(|why| format!("{name}: {why}"))?;
            let buckets = series.entry(others).or_default();
            if buckets.len() == MAX_BUCKETS {
                return Err(format!("{name} has more than {MAX_BUCKETS} buckets"));
            }
            buckets.push((bound, count(value).map_err(|why| format!("{name}: {why}"))?));
        }
    }
    let start = start.ok_or_else(|| format!("{PROCESS_START_TIME} is missing"))?;
    if !(start.is_finite() && start > 0.0) {
        return Err(format!("{PROCESS_START_TIME} is {start}"));
    }
    if series.is_empty() {
        return Err(format!("{bucket_name} is missing"));
    }
    Ok(Scrape {
        process_start: start.to_bits(),
        tpot: sum(series.into_values())?,
    })
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

/// The bound in `le`, and the labels without it.
fn take_bound(labels: &str) -> Result<(f64, String), String> {
    let at = if labels.starts_with("le=\"") {
        0
    } else {
        labels.find(",le=\"").ok_or("a bucket without `le`")?
    };
    let value_at = labels[at..].find('"').ok_or("a bucket without `le`")? + at + 1;
    let end = labels[value_at..].find('"').ok_or("an unfinished `le`")? + value_at;
    let bound = match &labels[value_at..end] {
        "+Inf" => f64::INFINITY,
        text => text
            .parse::<f64>()
            .ok()
            .filter(|bound| bound.is_finite())
            .ok_or_else(|| format!("le=\"{}\" is no bound", shortened(text)))?,
    };
    Ok((bound, format!("{}{}", &labels[..at], &labels[end + 1..])))
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
mod tests {
    use super::*;

    const NAME: &str = "mixquant_request_time_per_output_token_seconds";

    fn text(buckets: &[(&str, &str)]) -> String {
        let mut text = String::from("# TYPE x histogram\nprocess_start_time_seconds 1.7e9\n");
        for (bound, count) in buckets {
            let labels = format!("{{model_name=\"a,le=\\\"b}}\",le=\"{bound}\"}}");
            text = text + NAME + "_bucket" + &labels + " " + count + "\n";
        }
        text + NAME + "_sum 1.5\n" + NAME + "_count 3\n# EOF\n"
    }

    #[test]
    fn a_histogram_is_read_as_counts_between_its_bounds() {
        let scrape = parse(&text(&[("0.01", "2"), ("0.02", "2"), ("+Inf", "3")])).unwrap();
        assert_eq!(scrape.process_start, 1.7e9_f64.to_bits());
        assert_eq!(scrape.tpot.bounds, vec![0.01, 0.02]);
        assert_eq!(scrape.tpot.counts, [2, 0, 1]);
    }

    #[test]
    fn parts_with_other_labels_are_added_up() {
        let text = format!(
            "process_start_time_seconds 1\n{NAME}_bucket{{le=\"1\",kind=\"a\"}} 1\n{NAME}_bucket{{le=\"+Inf\",kind=\"a\"}} 2\n\
             {NAME}_bucket{{le=\"1\",kind=\"b\"}} 10\n{NAME}_bucket{{le=\"+Inf\",kind=\"b\"}} 30\n"
        );
        assert_eq!(parse(&text).unwrap().tpot.counts, [11, 21]);
    }

    #[test]
    fn what_is_not_plainly_right_is_refused_with_its_reason() {
        for (buckets, reason) in [
            (vec![("1", "NaN"), ("+Inf", "1")], "is no count"),
            (vec![("1", "-1"), ("+Inf", "1")], "is no count"),
            (vec![("1", "1.5"), ("+Inf", "2")], "is no count"),
            (vec![("1", "+Inf"), ("+Inf", "2")], "is no count"),
            (vec![("1", "1e300"), ("+Inf", "2")], "is no count"),
            (vec![("1", "two"), ("+Inf", "2")], "is no number"),
            (vec![("1", "1 1700000000"), ("+Inf", "2")], "timestamp"),
            (vec![("1", "2"), ("+Inf", "1")], "fall"),
            (vec![("2", "1"), ("1", "1"), ("+Inf", "1")], "do not rise"),
            (vec![("1", "1"), ("1", "1"), ("+Inf", "1")], "do not rise"),
            (
                vec![("1", "1"), ("+Inf", "1"), ("+Inf", "1")],
                "do not rise",
            ),
            (vec![("1", "1")], "+Inf"),
            (vec![("+Inf", "1")], "+Inf"),
            (vec![("wide", "1"), ("+Inf", "1")], "is no bound"),
            (vec![], "is missing"),
        ] {
            let error = parse(&text(&buckets)).unwrap_err();
            assert!(error.contains(reason), "{buckets:?}: {error}");
        }
    }

    #[test]
    fn a_text_without_a_start_time_or_with_two_is_refused() {
        let good = text(&[("1", "1"), ("+Inf", "1")]);
        let without = good.replace("process_start_time_seconds", "other");
        assert!(parse(&without).unwrap_err().contains("is missing"));
        let twice = format!("{good}process_start_time_seconds 2\n");
        assert!(parse(&twice).unwrap_err().contains("twice"));
        let nan = good.replace("1.7e9", "NaN");
        assert!(parse(&nan).is_err());
    }

    #[test]
    fn hostile_text_is_an_error_and_never_a_panic() {
        for text in [
            "",
            "{",
            "}",
            "a{",
            "process_start_time_seconds",
            "process_start_time_seconds{",
            "process_start_time_seconds{\"} 1",
            "mixquant_request_time_per_output_token_seconds_bucket{le=\"} 1",
            "mixquant_request_time_per_output_token_seconds_bucket{le=",
            "mixquant_request_time_per_output_token_seconds_bucket{ä=\"ö\",le=\"1} 1",
            "\u{0}\u{0}\u{0} \u{feff}",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        let mut many = "process_start_time_seconds 1\n".to_owned();
        for n in 0..2000 {
            many = many + NAME + "_bucket{le=\"" + &n.to_string() + "\"} 0\n";
        }
        assert!(parse(&many).unwrap_err().contains("more than"));
    }
}
