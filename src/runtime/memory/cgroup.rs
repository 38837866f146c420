//! Memory that the control group of this process may still take: a job's limit, where the system sets one.

use std::fs;
use std::path::{Path, PathBuf};

use crate::runtime::units::Bytes;

/// Where the system shows control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// The tightest room of this process's group and the groups around it; none without a limit.
#[must_use]
pub fn job_memory() -> Option<Bytes> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    tightest(Path::new(ROOT), &groups)
}

/// `groups` are lines `number:controllers:path`; the unified hierarchy has no controllers in its line.
fn tightest(root: &Path, groups: &str) -> Option<Bytes> {
    let rooms = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        let names = ["memory.max", "memory.current", "inactive_file "];
        let names_before = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
        match controllers {
            "" => around(root, path, names),
            _ if controllers.split(',').any(|one| one == "memory") => around(&root.join("memory"), path, names_before),
            _ => None,
        }
    });
    rooms.min()
}

/// The tightest room of the group at `path` and those that hold it. A container may see only the outermost.
fn around(root: &Path, path: &str, names: [&str; 3]) -> Option<Bytes> {
    let folder: PathBuf = root.join(path);
    folder.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(|folder| room(folder, names)).min()
}

/// What a group's limit leaves; pages of files that nobody uses make room when they must.
fn room(folder: &Path, [limit, used, idle]: [&str; 3]) -> Option<Bytes> {
    let number = |name: &str| -> Option<u64> { fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok() };
    // An absent limit is the word "max", or a number near the largest that there is.
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
    fn the_tightest_group_around_counts_with_its_idle_files_as_room() {
        let root = tempfile::tempdir().expect("a folder");
        let (stat, max) = ("anon 5\ninactive_file 100\n", ("memory.max", "max\n"));
        group(root.path(), "", &[]);
        group(root.path(), "job", &[("memory.max", "1000\n"), ("memory.current", "700\n"), ("memory.stat", stat)]);
        group(root.path(), "job/step", &[max, ("memory.current", "600\n")]);
        assert_eq!(tightest(root.path(), "0::/job/step\n"), Some(Bytes(400)));
        assert_eq!(tightest(root.path(), "0::/other\n"), None);
        assert_eq!(tightest(root.path(), "3:cpu:/job\n"), None);
    }

    #[test]
    fn the_older_hierarchy_is_read_by_its_own_names() {
        let root = tempfile::tempdir().expect("a folder");
        let none = ("memory.limit_in_bytes", "9223372036854771712\n");
        group(root.path(), "memory", &[none, ("memory.usage_in_bytes", "5\n")]);
        let files = [("memory.limit_in_bytes", "500\n"), ("memory.usage_in_bytes", "200\n")];
        group(root.path(), "memory/slurm/job_1", &files);
        assert_eq!(tightest(root.path(), "4:cpuset,memory:/slurm/job_1\n0::/\n"), Some(Bytes(300)));
        assert_eq!(tightest(root.path(), "4:memory:/\n"), None);
    }
}
