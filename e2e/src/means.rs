//! Where things are and whether they are there: the repository, the cluster's programs, the shared data. Never looks at the network.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate lies in the repository")
        .to_owned()
}

/// Where the cluster keeps its programs and its state, as `e2e/cluster/cluster` decides it.
pub fn cluster_home() -> PathBuf {
    let home =
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| std::env::temp_dir().into()));
    std::env::var_os("MIXQUANT_CLUSTER_HOME")
        .map_or_else(|| home().join(".cache/mixquant-cluster"), PathBuf::from)
}

/// Where the tests may leave files for people: dumps, results.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

/// The program `name` of the cluster's own build, else the one on `PATH`.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(cluster_home().join("bin"))
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// The program `name` of this repository, as it lies beside the test that runs; says which command builds it where it is missing.
pub fn built(name: &str) -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    // Tests lie in a folder below the programs.
    let file = test.parent()?.parent()?.join(name);
    if file.is_file() {
        return Some(file);
    }
    skip(&format!(
        "{} is missing: cargo build --workspace --bins",
        file.display()
    ));
    None
}

/// Says why a test does not run, or fails it where `MIXQUANT_REQUIRE_CLUSTER` demands that it does.
///
/// # Panics
/// When the variable is set.
pub fn skip(reason: &str) {
    assert!(
        std::env::var_os("MIXQUANT_REQUIRE_CLUSTER").is_none(),
        "MIXQUANT_REQUIRE_CLUSTER is set, and yet: {reason}"
    );
    say(&format!("skipped: {reason}"));
}

/// Writes a line past the test harness, which shows what a test prints only when it fails: what was measured is for people to read, and a
/// skipped test must not look like a passed one.
pub fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}
