//! Facts and findings about a machine.

use std::fs;

use super::facts::Cores;
use super::finding::Finding;
use crate::runtime::units::{Bytes, from_index};
use crate::tensor::boundary::torch_version;
use crate::world::devices::libraries;

/// Version and folder of libtorch.
pub(super) fn libtorch() -> Finding {
    let (version, folder) = (torch_version(), libraries());
    Finding::ok("libtorch", format!("{version} at {}", folder.display()))
}

/// The cores that this process may use.
pub(super) fn cores() -> Cores {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let count = std::thread::available_parallelism().map_or(1, |count| from_index(count.get()));
    Cores { list: list.unwrap_or_default().trim().to_owned(), count }
}

/// The limit of locked memory of this process; `None` for no limit.
pub(super) fn locked_memory() -> Option<Bytes> {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    locked(&limits)
}

fn locked(limits: &str) -> Option<Bytes> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok().map(Bytes)
}

/// The finding about a limit of locked memory.
pub(super) fn pinned(with_gpu: bool, limit: Option<Bytes>) -> Finding {
    match (limit, with_gpu) {
        (None, _) => Finding::ok("locked memory", "no limit"),
        (Some(limit), false) => Finding::ok("locked memory", format!("{limit}; without a GPU nothing is pinned")),
        (Some(limit), true) => Finding::warn(
            "locked memory",
            format!("the limit is {limit}"),
            "CUDA pins beyond it, a network card may not: ulimit -l unlimited before the launch, or LimitMEMLOCK of slurmd",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::doctor::Verdict;

    #[test]
    fn the_limit_of_locked_memory_is_read_in_bytes() {
        let table = |limit: &str| format!("Limit  Soft Limit\nMax locked memory         {limit}    8388608    bytes\n");
        assert_eq!(locked(&table("8388608")), Some(Bytes(8 << 20)));
        assert_eq!(locked(&table("unlimited")), None);
        assert_eq!(pinned(true, Some(Bytes(8 << 20))).verdict, Verdict::Warn);
        assert_eq!(pinned(true, None).verdict, Verdict::Ok);
        assert_eq!(pinned(false, Some(Bytes(0))).verdict, Verdict::Ok);
    }
}
