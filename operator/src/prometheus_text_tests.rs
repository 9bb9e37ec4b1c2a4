//! What `parse` reads, what it refuses and with which words.

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

fn read(text: &str, series: Series) -> Option<Result<Value, String>> {
    parse(text).unwrap().series.remove(&series)
}

fn tpot(text: &str) -> Histogram {
    match read(text, Series::Tpot) {
        Some(Ok(Value::Histogram(histogram))) => histogram,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_histogram_is_read_as_counts_between_its_bounds() {
    let text = text(&[("0.01", "2"), ("0.02", "2"), ("+Inf", "3")]);
    assert_eq!(parse(&text).unwrap().process_start, 1.7e9_f64.to_bits());
    assert_eq!(tpot(&text).bounds, vec![0.01, 0.02]);
    assert_eq!(tpot(&text).counts, [2, 0, 1]);
}

#[test]
fn parts_with_other_labels_are_added_up() {
    let text = format!(
        "process_start_time_seconds 1\n{NAME}_bucket{{le=\"1\",kind=\"a\"}} 1\n{NAME}_bucket{{le=\"+Inf\",kind=\"a\"}} 2\n\
         {NAME}_bucket{{le=\"1\",kind=\"b\"}} 10\n{NAME}_bucket{{le=\"+Inf\",kind=\"b\"}} 30\n"
    );
    assert_eq!(tpot(&text).counts, [11, 21]);
}

#[test]
fn counters_and_gauges_are_read_by_their_labels() {
    let text = "process_start_time_seconds 1\n\
        mixquant_requests_total{model_name=\"a\",outcome=\"ok\"} 40\n\
        mixquant_requests_total{model_name=\"b\",outcome=\"ok\"} 2\n\
        mixquant_requests_total{model_name=\"a\",outcome=\"error\"} 3\n\
        mixquant_requests_total{model_name=\"outcome=\\\"error\\\"\",outcome=\"cancelled\"} 9\n\
        mixquant_nan_logits_total 0\n\
        mixquant_kv_cache_usage_ratio 0.25\n";
    for (series, value) in [
        (Series::Answered, Value::Count(42)),
        (Series::Errors, Value::Count(3)),
        (Series::NanLogits, Value::Count(0)),
        (Series::KvUsage, Value::Level(0.25)),
    ] {
        assert_eq!(read(text, series), Some(Ok(value)), "{series:?}");
    }
}

/// "Renamed" and "empty" are no zero: a series that is not there is absent.
#[test]
fn a_series_that_is_not_there_is_absent_and_not_zero() {
    let text = "process_start_time_seconds 1\nmixquant_requests_total{outcome=\"ok\"} 5\nmixquant_nan_logits 0\n";
    for series in Series::ALL {
        let there = read(text, series);
        assert_eq!(
            there.is_some(),
            series == Series::Answered,
            "{series:?}: {there:?}"
        );
    }
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
    ] {
        let error = read(&text(&buckets), Series::Tpot).unwrap().unwrap_err();
        assert!(error.contains(reason), "{buckets:?}: {error}");
    }
}

#[test]
fn a_counter_or_gauge_that_is_not_plainly_right_is_refused_with_its_reason() {
    for (lines, series, reason) in [
        (
            "mixquant_requests_total{outcome=\"ok\"} NaN",
            Series::Answered,
            "is no count",
        ),
        (
            "mixquant_requests_total{outcome=\"error\"} -1",
            Series::Errors,
            "is no count",
        ),
        (
            "mixquant_requests_total{outcome=\"ok\"} 1\nmixquant_requests_total{outcome=\"ok\"} 2",
            Series::Answered,
            "twice",
        ),
        (
            "mixquant_requests_total{outcome=\"ok} 1",
            Series::Errors,
            "unfinished",
        ),
        (
            "mixquant_requests_total{outcome} 1",
            Series::Errors,
            "without a value",
        ),
        (
            "mixquant_kv_cache_usage_ratio +Inf",
            Series::KvUsage,
            "is no level",
        ),
        (
            "mixquant_kv_cache_usage_ratio -0.5",
            Series::KvUsage,
            "is no level",
        ),
        (
            "mixquant_nan_logits_total 1 2",
            Series::NanLogits,
            "timestamp",
        ),
    ] {
        let text = format!("process_start_time_seconds 1\n{lines}\n");
        let error = read(&text, series).unwrap().unwrap_err();
        assert!(error.contains(reason), "{lines}: {error}");
    }
}

/// One bad series says nothing about the others.
#[test]
fn a_bad_series_leaves_the_others_readable() {
    let text = text(&[("1", "1"), ("+Inf", "1")]) + "mixquant_kv_cache_usage_ratio NaN\n";
    assert_eq!(tpot(&text).counts, [1, 0]);
    assert!(read(&text, Series::KvUsage).unwrap().is_err());
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
        "\u{0}\u{0}\u{0} \u{feff}",
    ] {
        assert!(parse(text).is_err(), "{text:?}");
    }
    for line in [
        "_bucket{le=\"} 1",
        "_bucket{le=",
        "_bucket{ä=\"ö\",le=\"1} 1",
        "_bucket{=\"\",} 1",
        "_bucket{le=\"\\\\\"x} 1",
    ] {
        let text = format!("process_start_time_seconds 1\n{NAME}{line}\n");
        assert!(read(&text, Series::Tpot).unwrap().is_err(), "{line:?}");
    }
    let mut many = "process_start_time_seconds 1\n".to_owned();
    for n in 0..2000 {
        many = many + NAME + "_bucket{le=\"" + &n.to_string() + "\"} 0\n";
    }
    let error = read(&many, Series::Tpot).unwrap().unwrap_err();
    assert!(error.contains("more than"), "{error}");
    let mut many = "process_start_time_seconds 1\n".to_owned();
    for n in 0..2000 {
        many = many + "mixquant_requests_total{outcome=\"ok\",x=\"" + &n.to_string() + "\"} 0\n";
    }
    let error = read(&many, Series::Answered).unwrap().unwrap_err();
    assert!(error.contains("more than"), "{error}");
}
