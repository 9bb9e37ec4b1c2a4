//! The names, labels and buckets that are on the wire.

use super::*;

fn value(text: &str, series: &str) -> f64 {
    let line = text
        .lines()
        .find(|line| line.starts_with(series))
        .unwrap_or_else(|| panic!("{series} is missing"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn buckets_tell_five_percent_up_to_two_seconds() {
    let buckets = latency_buckets();
    assert!((buckets[0] - 0.001).abs() < 1e-12 && (buckets.last().unwrap() - 120.0).abs() < 1e-9);
    for pair in buckets.windows(2) {
        assert!(pair[0] < pair[1], "{pair:?}");
        assert!(pair[1] > 2.0 || pair[1] / pair[0] <= 1.05, "{pair:?}");
    }
}

#[test]
fn the_time_per_token_leaves_out_the_first() {
    let metrics = Metrics::new("m", "r");
    let second = Duration::from_secs(1);
    metrics.finished(6 * second, 4 * second, 5);
    metrics.finished(second, Duration::ZERO, 1);
    metrics.finished(second, Duration::ZERO, 0);
    let text = metrics.text();
    let series = |suffix: &str| format!("{}{suffix}{{", names::REQUEST_TIME_PER_OUTPUT_TOKEN);
    assert!((value(&text, &series("_count")) - 1.0).abs() < 1e-9);
    assert!((value(&text, &series("_sum")) - 1.0).abs() < 1e-9);
    assert!((value(&text, &format!("{}_count{{", names::E2E_REQUEST_LATENCY)) - 3.0).abs() < 1e-9);
}

#[test]
fn every_alias_repeats_its_series() {
    let metrics = Metrics::new("m", "r");
    metrics.first_token(Duration::from_millis(5));
    metrics.next_token(Duration::from_millis(5));
    metrics.finished(Duration::from_millis(9), Duration::from_millis(4), 2);
    metrics.set_load(3, 4, 0.5);
    metrics.prefilled(40, PrefillPrecision::BF16, PrefillReason::short);
    let text = metrics.text();
    let lines = |name: &str| -> Vec<String> {
        let of = |line: &&str| {
            line.starts_with(&format!("{name}{{")) || line.starts_with(&format!("{name}_"))
        };
        text.lines()
            .filter(of)
            .map(|line| line.replacen(name, "", 1))
            .collect()
    };
    for (alias, own) in names::VLLM_ALIASES {
        assert!(!lines(own).is_empty(), "{own}");
        assert_eq!(lines(alias), lines(own), "{alias}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn the_names_on_the_wire_are_those_of_the_contract() {
    let metrics = Metrics::new("a\"b", "r");
    metrics.set_build_info(&Digest::of_bytes(b""), None);
    metrics.prefilled(3, PrefillPrecision::W8A8, PrefillReason::length);
    metrics.request(Outcome::ok);
    metrics.set_kv_bytes(&[(KvPrecision::INT4, 7)]);
    let text = metrics.text();
    let labels = "model_name=\"a\\\"b\",revision=\"r\"";
    for line in [
        format!(
            "mixquant_prefill_precision_total{{{labels},precision=\"W8A8\",reason=\"length\"}} 1"
        ),
        format!("mixquant_requests_total{{{labels},outcome=\"ok\"}} 1"),
        format!("mixquant_kv_cache_bytes{{{labels},tier=\"INT4\"}} 7"),
        format!("mixquant_prompt_tokens_total{{{labels}}} 3"),
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} in\n{}",
            text.lines()
                .filter(|l| l.contains("total"))
                .collect::<Vec<_>>()
                .join("\n")
        );
    }
    assert!(value(&text, names::PROCESS_START_TIME) > 1.7e9);
}
