//! `bench` on a shape that takes milliseconds: what it reports, and what it refuses. Times are not asserted: they belong to the machine.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::path::Path;
use std::time::Duration;

use mixquant_engine::bench::{Options, Source, on_request, run};
use mixquant_engine::progress::Progress;

fn options(source: Source) -> Options {
    Options {
        source,
        schemes: ["BF16", "W8A8", "W4A16-g32-asym", "FP8", "LUT4"]
            .map(|scheme| scheme.parse().unwrap())
            .to_vec(),
        prefill: vec![1, 33],
        context: 5,
        steps: 2,
        rounds: 2,
        sample: Duration::from_millis(1),
    }
}

fn micro() -> Options {
    options(Source::Shape("micro".parse().unwrap()))
}

#[test]
fn every_scheme_and_phase_has_a_rate_and_every_rate_its_roof() {
    let report = run(&micro(), &Progress::hidden()).unwrap();
    assert_eq!(report.rows.len(), 5);
    assert!(!report.roofs.read_bytes.is_empty());
    for row in &report.rows {
        let tokens: Vec<usize> = row.prefill.iter().map(|cell| cell.tokens).collect();
        assert_eq!((tokens, row.decode.tokens), (vec![1, 33], 5));
        for cell in row.prefill.iter().chain([&row.decode]) {
            let rate = &cell.per_second;
            assert!(0.0 < rate.low && rate.low <= rate.median && rate.median <= rate.high);
        }
        assert!(row.decode.roof_percent.unwrap() > 0.0);
    }
    let [bf16, w8, w4] = [0, 1, 2].map(|index| report.rows[index].weight_bytes);
    assert!(w4 < w8 && w8 < bf16, "{w4} {w8} {bf16}");
    let json: serde_json::Value = serde_json::to_value(&report).unwrap();
    assert!(json["rows"][0]["prefill"][1]["perSecond"]["median"].is_f64());
    let text = report.to_string();
    for word in ["| W8A8 |", "prefill 33", "decode at 5", "memory read by 1"] {
        assert!(text.contains(word), "{word} is missing from\n{text}");
    }
}

#[test]
fn a_caller_gets_the_samples_of_one_round_for_a_line() {
    let mut options = micro();
    options.schemes.truncate(2);
    let mut answers = Vec::new();
    on_request(&options, &b"\n\n"[..], &mut answers).unwrap();
    let answers = String::from_utf8(answers).unwrap();
    let [ready, first, second] = answers.lines().collect::<Vec<_>>()[..] else {
        panic!("a line when ready and one a request, not\n{answers}");
    };
    assert_eq!(ready, r#"{"ready":true}"#);
    for line in [first, second] {
        let samples: Vec<serde_json::Value> = serde_json::from_str(line).unwrap();
        assert_eq!(samples.len(), 2 * (options.prefill.len() + 1));
        assert!(
            samples
                .iter()
                .all(|sample| sample["wall"].as_f64() > Some(0.0))
        );
    }
}

#[test]
fn a_directory_is_measured_in_other_schemes_than_it_stores() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m");
    let mut options = options(Source::Directory(directory));
    options.schemes = ["BF16", "W8A8"]
        .map(|scheme| scheme.parse().unwrap())
        .to_vec();
    let report = run(&options, &Progress::hidden()).unwrap();
    assert!(report.rows[1].weight_bytes < report.rows[0].weight_bytes);
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    let refused = |change: fn(&mut Options)| {
        let mut options = micro();
        change(&mut options);
        run(&options, &Progress::hidden()).unwrap_err().message
    };
    assert!(refused(|options| options.rounds = 0).contains("one round"));
    assert!(refused(|options| options.prefill = vec![0]).contains("0 tokens"));
    assert!(refused(|options| options.prefill = vec![40_000]).contains("40000 tokens"));
    assert!(refused(|options| options.context = 32_768).contains("32770 tokens"));
    let missing = |options: &mut Options| options.source = Source::Directory("nowhere".into());
    assert!(refused(missing).contains("nowhere"));
}
