//! Rules of the repository that a program can check. Each one names the file and what to do; none of them needs a cluster.

use std::path::{Path, PathBuf};
use std::process::Command;

use mixquant_crds::names::{engine_metrics, operator_metrics};
use mixquant_e2e::means;

/// Longer files hold more than one thing.
const MAX_LINES: usize = 500;

/// Files of the repository, committed or about to be, as paths from its root.
fn files() -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(means::repository())
        .output();
    let output = output.expect("git is there");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let names = String::from_utf8(output.stdout).expect("git quotes names that are not UTF-8");
    names
        .lines()
        .filter(|name| means::repository().join(name).is_file())
        .map(str::to_owned)
        .collect()
}

fn has_extension(name: &str, wanted: &[&str]) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|extension| wanted.iter().any(|wanted| extension == *wanted))
}

/// Text that people write and read: no data, no lock files, nothing generated.
fn sources() -> Vec<(String, String)> {
    let generated = |name: &str| {
        has_extension(name, &["lock", "sum", "mod", "jsonl", "txt", "safetensors"])
            || name.starts_with("e2e/models/")
            || name.ends_with("mixquantservices.yaml")
            || name == "LICENSE"
    };
    let names = files().into_iter().filter(|name| !generated(name));
    names
        .filter_map(|name| {
            std::fs::read_to_string(means::repository().join(&name))
                .ok()
                .map(|text| (name, text))
        })
        .collect()
}

fn rust_sources() -> Vec<(String, String)> {
    sources()
        .into_iter()
        .filter(|(name, _)| has_extension(name, &["rs"]))
        .collect()
}

/// Fails with one line for each file that breaks a rule.
fn expect_none(rule: &str, offenders: &[String]) {
    assert!(
        offenders.is_empty(),
        "{rule}:\n  {}",
        offenders.join("\n  ")
    );
}

/// `name:line` of every line that `wrong` says is wrong.
fn lines_where(sources: &[(String, String)], wrong: impl Fn(&str) -> bool) -> Vec<String> {
    let numbered = sources.iter().flat_map(|(name, text)| {
        text.lines()
            .enumerate()
            .map(move |(index, line)| (name, index + 1, line))
    });
    numbered
        .filter(|(_, _, line)| wrong(line))
        .map(|(name, number, line)| format!("{name}:{number}: {}", line.trim()))
        .collect()
}

#[test]
fn no_file_is_longer_than_its_limit() {
    let long = sources()
        .into_iter()
        .filter(|(name, text)| !name.starts_with("docs/") && text.lines().count() > MAX_LINES);
    let offenders: Vec<_> = long
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    expect_none(
        "a file has at most 500 lines: split it by what it decides",
        &offenders,
    );
}

#[test]
fn every_rust_file_begins_by_saying_what_it_is() {
    let silent = rust_sources()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//! "));
    expect_none(
        "a file begins with `//! ` and what it decides",
        &silent.map(|(name, _)| name).collect::<Vec<_>>(),
    );
}

#[test]
fn nothing_is_left_for_later_in_a_comment() {
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X:"),
    ];
    let offenders = lines_where(&sources(), |line| {
        words.iter().any(|word| line.contains(word))
    });
    expect_none("an issue or nothing, no note for later", &offenders);
}

#[test]
fn no_test_is_ignored_without_a_reason() {
    let bare = concat!("#[ign", "ore]");
    expect_none(
        "write `#[ignore = \"why, and what runs it\"]`",
        &lines_where(&rust_sources(), |line| line.trim() == bare),
    );
}

#[test]
fn no_file_knows_the_machine_it_was_written_on() {
    let places = [
        concat!("/wo", "rk/"),
        concat!("/tmp", "/wt"),
        concat!("/ro", "ot/"),
        concat!("/home", "/"),
    ];
    let offenders = lines_where(&sources(), |line| {
        places.iter().any(|place| line.contains(place))
    });
    expect_none("no path of one machine", &offenders);
}

/// What is decided without looking at the world, so that it can be tested without one.
#[test]
fn the_pure_files_of_the_operator_do_no_input_or_output() {
    let pure = [
        "plan",
        "judge",
        "canary",
        "revision",
        "validate",
        "build",
        "status",
        "prometheus_text",
        "bounds",
        "histogram",
        "samples",
        "counted",
        "load",
        "scaling",
    ];
    let is_pure = |name: &str| {
        name.strip_prefix("operator/src/").is_some_and(|rest| {
            pure.iter()
                .any(|file| rest == format!("{file}.rs") || rest.starts_with(&format!("{file}/")))
        })
    };
    let pure_sources: Vec<_> = rust_sources()
        .into_iter()
        .filter(|(name, _)| is_pure(name))
        .collect();
    assert!(
        pure_sources.len() >= pure.len(),
        "some of {pure:?} are gone: name the pure files here"
    );
    let forbidden = [
        "kube::Client",
        "kube::client",
        "kube::Api",
        "kube::api::Api",
        "tokio",
        "hyper",
        "std::fs",
        "std::net",
        "Timestamp::now",
        "SystemTime::now",
    ];
    let offenders = lines_where(&pure_sources, |line| {
        !line.trim_start().starts_with("//") && forbidden.iter().any(|word| line.contains(word))
    });
    expect_none("a pure file takes everything as an argument", &offenders);
}

#[test]
fn the_chart_installs_the_generated_resource() {
    let generated =
        std::fs::read_to_string(means::repository().join("crds/mixquantservices.yaml")).unwrap();
    let copies: Vec<PathBuf> = files()
        .into_iter()
        .filter(|name| name.starts_with("charts/") && name.ends_with("mixquantservices.yaml"))
        .map(PathBuf::from)
        .collect();
    assert!(!copies.is_empty(), "the chart has no mixquantservices.yaml");
    for copy in copies {
        let text = std::fs::read_to_string(means::repository().join(&copy)).unwrap();
        assert!(
            text == generated,
            "{} differs from crds/mixquantservices.yaml: copy it",
            copy.display()
        );
    }
}

#[test]
fn every_metric_is_documented() {
    let page = std::fs::read_to_string(means::repository().join("docs/metrics.md")).unwrap();
    let source = std::fs::read_to_string(means::repository().join("crds/src/names.rs")).unwrap();
    // Read from the source, so that a new constant cannot be forgotten here.
    let quoted = source.split('"').skip(1).step_by(2);
    let metrics: Vec<&str> = quoted
        .filter(|text| text.starts_with("mixquant_") || text.starts_with("vllm:"))
        .collect();
    for known in [
        engine_metrics::TIME_TO_FIRST_TOKEN,
        operator_metrics::ROLLBACKS,
    ] {
        assert!(
            metrics.contains(&known),
            "{known} was not found in names.rs"
        );
    }
    let missing: Vec<String> = metrics
        .into_iter()
        .filter(|metric| !page.contains(metric))
        .map(str::to_owned)
        .collect();
    expect_none("docs/metrics.md explains every metric", &missing);
}

/// Every name in the table is a test or a world of the plan tests: a fault whose test was renamed or removed is covered no more.
#[test]
fn every_test_that_the_table_of_faults_names_exists() {
    let page = std::fs::read_to_string(means::repository().join("docs/faults.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| F"));
    let named: Vec<&str> = rows
        .filter_map(|row| row.trim_end_matches('|').rsplit('|').next())
        .flat_map(|covered| covered.split('`').skip(1).step_by(2))
        .filter(|name| !name.contains([' ', '/', '.']))
        .collect();
    assert!(named.len() > 80, "only {} names", named.len());
    let worlds = files().into_iter().filter_map(|name| {
        let name = name.strip_prefix("operator/tests/plans/")?;
        name.strip_suffix(".yaml").map(str::to_owned)
    });
    let worlds: Vec<String> = worlds.collect();
    let sources = rust_sources();
    let missing: Vec<String> = named
        .into_iter()
        .filter(|name| {
            let function = format!("fn {name}(");
            !worlds.iter().any(|world| world == name)
                && !sources.iter().any(|(_, text)| text.contains(&function))
        })
        .map(str::to_owned)
        .collect();
    expect_none("docs/faults.md names tests that exist", &missing);
}

/// Goal: `make bench` finds the places that it writes to.
#[test]
fn every_table_that_the_benchmark_writes_has_its_place_in_the_page() {
    let read = |path: &str| std::fs::read_to_string(means::repository().join(path)).unwrap();
    let (script, page) = (read("scripts/bench"), read("docs/benchmarks.md"));
    let tables: Vec<&str> = script
        .lines()
        .filter_map(|line| line.split_once("| page "))
        .map(|(_, name)| name.trim())
        .collect();
    assert!(tables.len() > 3, "{tables:?}");
    let missing: Vec<String> = tables
        .into_iter()
        .filter(|name| {
            let mark = |mark: String| page.lines().position(|line| line == mark);
            let (start, end) = (
                mark(format!("<!-- bench:{name} -->")),
                mark(format!("<!-- /bench:{name} -->")),
            );
            start.is_none() || start >= end
        })
        .map(str::to_owned)
        .collect();
    expect_none("docs/benchmarks.md has both marks of each table", &missing);
}
