//! Compares the facts of all ranks.

use std::collections::{BTreeMap, BTreeSet};

use super::facts::Facts;
use super::finding::{Finding, Verdict};
use super::messages;
use crate::runtime::failure::{Exit, Failure};
use crate::runtime::units::from_index;
use crate::world::devices;

/// Clocks with a larger difference make logs hard to compare, and certificates fail.
const CLOCK_MS_MAX: u64 = 2000;

/// The findings of all ranks, in the order in which a run would meet them.
pub(super) fn findings(all: &[Facts]) -> Vec<Finding> {
    let mut found = vec![mpi(all), hosts(all), cores(all)];
    found.extend(sharing(all));
    found.extend(messages::finding(all));
    let names: Vec<&str> = all.iter().flat_map(|facts| &facts.findings).map(|finding| finding.name.as_str()).collect();
    let mut seen = BTreeSet::new();
    for name in names.into_iter().filter(|name| seen.insert(*name)) {
        found.extend(merged(all, name));
    }
    found.extend(digests(all));
    found
}

/// The worst finding called `name`, with its ranks where other ranks have a better one.
fn merged(all: &[Facts], name: &str) -> Option<Finding> {
    let own = |facts: &Facts| facts.findings.iter().find(|finding| finding.name == name).cloned();
    let each: Vec<(usize, Finding)> =
        all.iter().enumerate().filter_map(|(rank, facts)| Some((rank, own(facts)?))).collect();
    let worst = each.iter().map(|(_, finding)| finding.verdict).max()?;
    let with: Vec<usize> = each.iter().filter(|(_, finding)| finding.verdict == worst).map(|(rank, _)| *rank).collect();
    let mut first = each.into_iter().find(|(_, finding)| finding.verdict == worst)?.1;
    if worst != Verdict::Ok && with.len() < all.len() {
        let ranks: Vec<String> = with.iter().take(8).map(ToString::to_string).collect();
        let more = if with.len() > ranks.len() { ", …" } else { "" };
        let word = if with.len() == 1 { "rank" } else { "ranks" };
        first.detail = format!("{word} {}{more}: {}", ranks.join(", "), first.detail);
    }
    Some(first)
}

/// MPI's world against the launcher's number of ranks.
fn mpi(all: &[Facts]) -> Finding {
    let ranks = from_index(all.len());
    let library = all.first().map_or("", |facts| facts.library.as_str());
    let other = all.iter().find(|facts| facts.library != library);
    if let Some(other) = other {
        let detail = format!("rank 0 has {library}, another rank {}", other.library);
        return Finding::fail("mpi", Exit::Disagree, detail, "give all nodes one MPI");
    }
    let word = if ranks == 1 { "rank" } else { "ranks" };
    match all.iter().find_map(|facts| facts.launcher.as_ref()) {
        Some((variable, tasks)) if *tasks != ranks => Finding::fail(
            "mpi",
            Exit::Disagree,
            format!("{library} knows {ranks} {word}, and {variable} says that {tasks} were started"),
            "start with srun --mpi=pmix, or with the mpirun of the MPI that longstraw was built with",
        ),
        Some((variable, tasks)) => Finding::ok("mpi", format!("{library}, {ranks} {word}; {variable} says {tasks}")),
        None => Finding::ok("mpi", format!("{library}, {ranks} {word}, no launcher")),
    }
}

/// Machines, ranks on each, and their clocks.
fn hosts(all: &[Facts]) -> Finding {
    let mut ranks: BTreeMap<&str, u64> = BTreeMap::new();
    for facts in all {
        *ranks.entry(&facts.host).or_default() += 1;
    }
    let names: Vec<String> = ranks.iter().map(|(host, count)| format!("{host} ({count})")).collect();
    let names = format!("machines with their ranks: {}", names.join(", "));
    let clocks = || all.iter().map(|facts| facts.clock_ms);
    let apart = clocks().max().unwrap_or(0) - clocks().min().unwrap_or(0);
    if apart > CLOCK_MS_MAX {
        let detail = format!("{names}; their clocks are {apart} ms apart");
        return Finding::warn("machines", detail, "set the clocks by one source (chrony, ntpd)");
    }
    if ranks.values().collect::<BTreeSet<_>>().len() > 1 {
        return Finding::warn("machines", names, "give each the same number of ranks (--ntasks-per-node)");
    }
    Finding::ok("machines", names)
}

/// Ranks and threads on one set of cores.
#[derive(Default)]
struct Use {
    ranks: u64,
    threads: u64,
    cores: u64,
}

/// Threads against the cores that they run on.
fn cores(all: &[Facts]) -> Finding {
    let word = |count: u64, one: &str| if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") };
    let mut machines: BTreeMap<(&str, &str), Use> = BTreeMap::new();
    for Facts { host, cores, threads, .. } in all {
        let here = machines.entry((host, &cores.list)).or_default();
        here.ranks += 1;
        here.threads += threads;
        here.cores = cores.count;
    }
    let counts =
        |Use { ranks, threads, cores }: &Use| [word(*threads, "thread"), word(*ranks, "rank"), word(*cores, "core")];
    let fix = "set OMP_NUM_THREADS to cores / ranks, ask Slurm for more with --cpus-per-task, and keep mpirun from \
               putting a rank on one core (--bind-to none)";
    if let Some(((host, list), crowded)) = machines.iter().find(|(_, here)| here.threads > here.cores) {
        let [threads, ranks, cores] = counts(crowded);
        return Finding::warn("cores", format!("{host}: {threads} of {ranks} share {cores} ({list})"), fix);
    }
    let [threads, ranks, cores] = counts(machines.values().next().unwrap_or(&Use::default()));
    Finding::ok("cores", format!("{threads} of {ranks} on {cores}"))
}

/// Ranks of one machine that use one GPU, and ranks without a GPU among ranks with one.
fn sharing(all: &[Facts]) -> Option<Finding> {
    let with = all.iter().filter(|facts| facts.gpu.is_some()).count();
    if with == 0 {
        return None;
    }
    if with < all.len() {
        let error = devices::Error::Uneven { with, ranks: all.len() };
        return Some(Finding::failed("gpus", &Failure::from(error)));
    }
    let mut users: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (second, facts) in all.iter().enumerate().filter(|(_, facts)| !facts.share_device) {
        let gpu = facts.gpu.clone().unwrap_or_default();
        if let Some(&first) = users.get(&(facts.host.as_str(), gpu.as_str())) {
            return Some(Finding::failed("gpus", &Failure::from(devices::Error::Shared { first, second, gpu })));
        }
        users.insert((&facts.host, facts.gpu.as_deref().unwrap_or_default()), second);
    }
    Some(Finding::ok("gpus", format!("{with} ranks have one each")))
}

/// Two ranks with different configurations.
fn digests(all: &[Facts]) -> Option<Finding> {
    let mut read = all.iter().enumerate().filter_map(|(rank, facts)| Some((rank, facts.digest.as_ref()?)));
    let (first, digest) = read.next()?;
    let (other, _) = read.find(|(_, other)| *other != digest)?;
    let fix = "give all ranks the same files, flags and LONGSTRAW_ variables";
    let detail = format!("ranks {first} and {other} have different ones");
    Some(Finding::fail("configurations", Exit::Disagree, detail, fix))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::tools::doctor::facts::Cores;

    pub(in crate::tools::doctor) fn rank(host: &str, gpu: Option<&str>) -> Facts {
        Facts {
            host: host.into(),
            clock_ms: 1000,
            library: "Open MPI v4.1.4".into(),
            launcher: None,
            cores: Cores { list: "0-3".into(), count: 4 },
            threads: 2,
            digest: Some("a".into()),
            gpu: gpu.map(Into::into),
            share_device: false,
            transport: None,
            findings: vec![Finding::ok("model", "there")],
        }
    }

    fn line(all: &[Facts], name: &str) -> String {
        let found = findings(all);
        found.iter().find(|finding| finding.name == name).map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn equal_ranks_give_one_line_for_each_check() {
        let all = [rank("a", Some("0000:01")), rank("a", Some("0000:02"))];
        let found = findings(&all);
        let names: Vec<&str> = found.iter().map(|finding| finding.name.as_str()).collect();
        assert_eq!(names, ["mpi", "machines", "cores", "gpus", "model"]);
        assert!(found.iter().all(|finding| finding.verdict == Verdict::Ok), "{found:?}");
        assert_eq!(line(&all, "cores"), "ok    cores           4 threads of 2 ranks on 4 cores");
    }

    #[test]
    fn a_failure_on_one_rank_names_the_rank() {
        let mut all = [rank("a", None), rank("a", None), rank("b", None)];
        all[2].findings = vec![Finding::fail("model", Exit::Data, "not there", "fetch it")];
        assert_eq!(line(&all, "model"), "FAIL  model           rank 2: not there: fetch it");
        assert!(line(&all, "machines").starts_with("warn  machines"), "uneven: {}", line(&all, "machines"));
        all[0].digest = Some("b".into());
        assert!(line(&all, "configurations").contains("ranks 0 and 1 have different ones"));
    }

    #[test]
    fn two_ranks_on_one_gpu_are_named_unless_they_may_share_it() {
        let mut all = [rank("a", Some("01")), rank("b", Some("01")), rank("a", Some("01"))];
        assert!(line(&all, "gpus").starts_with("FAIL  gpus            ranks 0 and 2"), "{}", line(&all, "gpus"));
        for facts in &mut all {
            facts.share_device = true;
        }
        assert!(line(&all, "gpus").starts_with("ok"));
        all[1].gpu = None;
        assert!(line(&all, "gpus").contains("2 of 3 ranks have a GPU"));
    }

    #[test]
    fn clocks_cores_and_the_launchers_ranks_are_compared() {
        let mut all = [rank("a", None), rank("b", None)];
        all[1].clock_ms = 5000;
        assert!(line(&all, "machines").contains("4000 ms apart"));
        all[0].threads = 9;
        assert!(line(&all, "cores").contains("a: 9 threads of 1 rank share 4 cores (0-3)"), "{}", line(&all, "cores"));
        all[0].launcher = Some(("SLURM_STEP_NUM_TASKS".into(), 4));
        let mpi = line(&all, "mpi");
        assert!(
            mpi.starts_with("FAIL") && mpi.contains("knows 2 ranks, and SLURM_STEP_NUM_TASKS says that 4"),
            "{mpi}"
        );
    }
}
