//! Cores to which a launcher has bound the ranks of a machine. Open MPI binds one or two ranks to one core each by default,
//! with all their threads: pinning memory and loading weights then take several times as long.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde::{Deserialize, Serialize};

use super::{World, host};

/// Names of processes that start ranks and may bind them.
const LAUNCHERS: [&str; 7] = ["mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy"];
/// Processes between a rank and its launcher, such as a shell that starts the command.
const ANCESTORS_MAX: usize = 8;

/// Cores of one rank, and of the process that has started it.
#[derive(Deserialize, Serialize)]
struct Binding {
    host: String,
    /// Cores that the rank may use, as the kernel lists them, such as `0-3,8`.
    own: String,
    /// Cores that its launcher may use; absent where no launcher is among its ancestors.
    launcher: Option<String>,
}

impl World {
    /// What to tell a user if a launcher has bound all ranks of a machine to fewer cores than it may use itself. Every rank
    /// takes part.
    #[must_use]
    pub fn binding_note(&self) -> Option<String> {
        let own = status("self").map(|status| status.cores).unwrap_or_default();
        note(&self.gather(&Binding { host: host(), own, launcher: launcher_cores() }))
    }
}

fn note(bindings: &[Binding]) -> Option<String> {
    let mut machines: BTreeMap<&str, (u64, BTreeSet<u64>, usize)> = BTreeMap::new();
    for Binding { host, own, launcher } in bindings {
        let (ranks, cores, available) = machines.entry(host).or_default();
        *ranks += 1;
        cores.extend(cores_of(own));
        *available = launcher.as_deref().map_or(0, |list| cores_of(list).len()).max(*available);
    }
    let (host, (ranks, cores, available)) =
        machines.into_iter().find(|(_, (_, cores, available))| cores.len() < *available)?;
    let ranks = if ranks == 1 { "1 rank is".to_owned() } else { format!("{ranks} ranks are") };
    let bound = if cores.len() == 1 { "1 core".to_owned() } else { format!("{} cores", cores.len()) };
    Some(format!(
        "{host}: {ranks} bound to {bound} of {available} by the launcher, which makes loading and pinning slow: add \
         --bind-to none to mpirun"
    ))
}

/// Numbers of the cores in the kernel's list.
fn cores_of(list: &str) -> BTreeSet<u64> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

struct Status {
    name: String,
    parent: String,
    cores: String,
}

/// The kernel's record of a process.
fn status(process: &str) -> Option<Status> {
    let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
    Some(Status { name: field("Name:")?, parent: field("PPid:")?, cores: field("Cpus_allowed_list:")? })
}

/// Cores of the nearest launcher among this process's ancestors.
fn launcher_cores() -> Option<String> {
    let mut process = status("self")?;
    for _ in 0..ANCESTORS_MAX {
        process = status(&process.parent)?;
        if LAUNCHERS.contains(&&*process.name) {
            return Some(process.cores);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(host: &str, own: &str, launcher: Option<&str>) -> Binding {
        Binding { host: host.into(), own: own.into(), launcher: launcher.map(Into::into) }
    }

    #[test]
    fn ranks_that_share_less_than_their_launcher_may_use_are_named() {
        assert_eq!(note(&[rank("a", "0-15", Some("0-15"))]), None);
        assert_eq!(note(&[rank("a", "3", None)]), None, "without a launcher nobody has bound anything");
        assert_eq!(note(&[rank("a", "0-7", Some("0-15")), rank("a", "8-15", Some("0-15"))]), None);
        let words = note(&[rank("a", "0-15", Some("0-15")), rank("b", "3", Some("0-3,8-19"))]).expect("b is bound");
        assert!(words.starts_with("b: 1 rank is bound to 1 core of 16") && words.contains("--bind-to none"), "{words}");
        let two = note(&[rank("a", "0", Some("0-15")), rank("a", "1", Some("0-15"))]).expect("bound");
        assert!(two.contains("2 ranks are bound to 2 cores of 16"), "{two}");
        assert_eq!(cores_of("0-2,7"), BTreeSet::from([0, 1, 2, 7]));
    }
}
