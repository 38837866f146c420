//! Memory that the control group of this process may still take: a job's limit, if the system sets one.

use std::fs;
use std::path::{Path, PathBuf};

use crate::runtime::units::Bytes;

/// Where the system shows control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// The smallest remainder of this process's control group and its ancestors; `None` without a limit.
#[must_use]
pub fn job_memory() -> Option<Bytes> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    remaining(Path::new(ROOT), &groups)
}

/// `groups` are lines `number:controllers:path`; the unified hierarchy has no controllers in its line.
fn remaining(root: &Path, groups: &str) -> Option<Bytes> {
    let remainders = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        let names = ["memory.max", "memory.current", "inactive_file "];
        let names_v1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
        match controllers {
            "" => smallest_remainder(root, path, names),
            _ if controllers.split(',').any(|one| one == "memory") => {
                smallest_remainder(&root.join("memory"), path, names_v1)
            }
            _ => None,
        }
    });
    remainders.min()
}

/// The smallest remainder of the group at `path` and its ancestors. A container may see only the outermost group.
fn smallest_remainder(root: &Path, path: &str, names: [&str; 3]) -> Option<Bytes> {
    let folder: PathBuf = root.join(path);
    folder.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(|folder| remainder(folder, names)).min()
}

/// The remainder of one group's limit. Unused pages of files count as free, since the system can drop them.
fn remainder(folder: &Path, [limit, used, idle]: [&str; 3]) -> Option<Bytes> {
    let number = |name: &str| -> Option<u64> { fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok() };
    // Without a limit the file contains "max", or a number near the maximum.
    let limit = number(limit).filter(|&limit| limit < 1 << 60)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let idle = stat.lines().find_map(|line| line.strip_prefix(idle)?.trim().parse().ok()).unwrap_or(0);
    Some(Bytes(limit.saturating_sub(number(used).unwrap_or(0).saturating_sub(idle))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(root: &Path, path: &str, files: &[(&str, &str)]) {
        fs::create_dir_all(root.join(path)).expect("a folder");
        for (name, text) in files {
            fs::write(root.join(path).join(name), text).expect("a file");
        }
    }

    #[test]
    fn the_smallest_remainder_counts_and_idle_files_are_free() {
        let root = tempfile::tempdir().expect("a folder");
        let (stat, max) = ("anon 5\ninactive_file 100\n", ("memory.max", "max\n"));
        group(root.path(), "", &[]);
        group(root.path(), "job", &[("memory.max", "1000\n"), ("memory.current", "700\n"), ("memory.stat", stat)]);
        group(root.path(), "job/step", &[max, ("memory.current", "600\n")]);
        assert_eq!(remaining(root.path(), "0::/job/step\n"), Some(Bytes(400)));
        assert_eq!(remaining(root.path(), "0::/other\n"), None);
        assert_eq!(remaining(root.path(), "3:cpu:/job\n"), None);
    }

    #[test]
    fn the_older_hierarchy_is_read_by_its_own_names() {
        let root = tempfile::tempdir().expect("a folder");
        let none = ("memory.limit_in_bytes", "9223372036854771712\n");
        group(root.path(), "memory", &[none, ("memory.usage_in_bytes", "5\n")]);
        let files = [("memory.limit_in_bytes", "500\n"), ("memory.usage_in_bytes", "200\n")];
        group(root.path(), "memory/slurm/job_1", &files);
        assert_eq!(remaining(root.path(), "4:cpuset,memory:/slurm/job_1\n0::/\n"), Some(Bytes(300)));
        assert_eq!(remaining(root.path(), "4:memory:/\n"), None);
    }
}
