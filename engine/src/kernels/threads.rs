//! How many threads compute: the container's CPU limit, or what the user says. Set once, before the first forward.

use std::path::Path;

use crate::{Error, Result};

/// More would only wait for memory.
const MAX_THREADS: usize = 256;

/// Sets the number of computing threads, `None` for the CPU limit of this container. Returns the number.
///
/// # Errors
/// 0 or too many threads, or a second call with another number.
pub fn configure(threads: Option<usize>) -> Result<usize> {
    let threads = match threads {
        Some(threads) if (1..=MAX_THREADS).contains(&threads) => threads,
        Some(threads) => {
            return Err(Error::plan(format!(
                "--threads is {threads}: write 1 to {MAX_THREADS}"
            )));
        }
        None => available(Path::new("/")),
    };
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("compute-{index}"))
        .build_global();
    if built.is_err() && rayon::current_num_threads() != threads {
        return Err(Error::internal(format!(
            "computing threads are already {}: set them once",
            rayon::current_num_threads()
        )));
    }
    Ok(threads)
}

/// The CPUs that this process may use: the cgroup's limit rounded up, at most the CPUs of the machine, at least 1.
pub fn available(root: &Path) -> usize {
    let machine = std::thread::available_parallelism().map_or(1, usize::from);
    cgroup_limit(root)
        .map_or(machine, |limit| limit.min(machine))
        .clamp(1, MAX_THREADS)
}

/// The limit of cgroup v2 (`cpu.max`: `quota period`) or v1 (two files; quota -1 = none), in whole CPUs.
fn cgroup_limit(root: &Path) -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    if let Some(text) = read("sys/fs/cgroup/cpu.max") {
        let (quota, period) = text.trim().split_once(' ')?;
        return whole_cpus(quota, period);
    }
    whole_cpus(
        &read("sys/fs/cgroup/cpu/cpu.cfs_quota_us")?,
        &read("sys/fs/cgroup/cpu/cpu.cfs_period_us")?,
    )
}

fn whole_cpus(quota: &str, period: &str) -> Option<usize> {
    let quota: usize = quota.trim().parse().ok()?;
    let period: usize = period.trim().parse().ok().filter(|period| *period > 0)?;
    Some(quota.div_ceil(period).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(files: &[(&str, &str)]) -> Option<usize> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        cgroup_limit(root.path())
    }

    #[test]
    fn the_limit_of_both_cgroup_versions_is_rounded_up() {
        assert_eq!(
            limit(&[("sys/fs/cgroup/cpu.max", "150000 100000\n")]),
            Some(2)
        );
        assert_eq!(
            limit(&[("sys/fs/cgroup/cpu.max", "5000 100000\n")]),
            Some(1)
        );
        assert_eq!(limit(&[("sys/fs/cgroup/cpu.max", "max 100000\n")]), None);
        assert_eq!(
            limit(&[
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
            ]),
            Some(4)
        );
        assert_eq!(
            limit(&[
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
            ]),
            None
        );
        assert_eq!(
            limit(&[
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "1\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "0\n")
            ]),
            None
        );
        assert_eq!(limit(&[]), None);
    }

    #[test]
    fn at_least_one_thread_computes() {
        assert!(available(Path::new("/nonexistent")) >= 1);
    }
}
