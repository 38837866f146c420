//! Checks everything that can be checked before a long run: one line for each finding, with what to do about it.
//!
//! Each rank checks its own machine. The ranks of one machine first exchange the addresses of their GPUs, since ranks on one
//! GPU share its memory. Then all ranks exchange their facts, and each compares them in the same way: two ranks on one GPU,
//! clocks, different files.

mod devices;
mod facts;
mod finding;
mod inputs;
mod machine;
mod messages;
mod together;

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

pub(crate) use devices::gpu_model;
pub use finding::{Finding, Verdict};

use crate::config::{DeviceChoice, Environment, Error, Loaded, RunConfig, When};
use crate::runtime::failure::{Exit, Failure};
use crate::runtime::units::{Rank, from_index};
use crate::world::{World, host, library};
use devices::Gpu;
use facts::{Facts, RankCounts, Transport};

/// The result of all checks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Whether no finding is a failure.
    pub healthy: bool,
    /// Ranks that were checked.
    pub ranks: u64,
    /// In the order in which a run would meet them.
    pub findings: Vec<Finding>,
}

/// How many of a machine's ranks use the GPU at `address`, given the addresses of all.
fn ranks_on_gpu(address: Option<&str>, all: &[String]) -> u64 {
    address.map_or(1, |address| from_index(all.iter().filter(|other| *other == address).count())).max(1)
}

/// Runs all checks, on every rank.
#[must_use]
pub fn examine(loaded: &Result<Loaded, Error>, environment: &Environment, world: &World) -> Report {
    let machine = world.machine();
    let Rank(index) = machine.rank();
    let wanted = loaded.as_ref().map_or(DeviceChoice::Auto, |loaded| loaded.run.run.device);
    let (device, gpu) = devices::check(wanted, index);
    let address = gpu.as_ref().map(|gpu| gpu.address.as_str());
    let counts = RankCounts {
        world: from_index(world.all.size()),
        machine: from_index(machine.size()),
        gpu: ranks_on_gpu(address, &machine.gather_texts(address.unwrap_or_default())),
    };
    let mut facts = check_rank(loaded.as_ref(), environment, counts, device, gpu);
    // Ranks leave a barrier together, so they read their clocks at the same moment.
    world.all.barrier();
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    facts.clock_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    let sent = serde_json::to_string(&facts).unwrap_or_default();
    let all: Vec<Facts> =
        world.all.gather_texts(&sent).iter().filter_map(|text| serde_json::from_str(text).ok()).collect();
    Report::new(counts.world, together::findings(&all))
}

/// The facts and findings of one rank.
fn check_rank(
    loaded: Result<&Loaded, &Error>,
    environment: &Environment,
    counts: RankCounts,
    device: Vec<Finding>,
    gpu: Option<Gpu>,
) -> Facts {
    let run = loaded.ok().map(|loaded| &loaded.run);
    let mut findings = vec![inputs::configuration(loaded, counts.world)];
    findings.push(machine::libtorch());
    findings.extend(device);
    findings.push(machine::pinned(gpu.is_some(), machine::locked_memory()));
    match loaded {
        Ok(loaded) => {
            let (model, spec) = inputs::model(loaded);
            findings.push(model);
            findings.push(inputs::memory(loaded, spec.as_ref(), gpu.as_ref(), counts));
            findings.push(inputs::run_folder(&loaded.rank.dir));
            findings.extend(inputs::rubrics(&loaded.run));
            findings.push(inputs::key(&loaded.run, environment));
        }
        Err(_) => findings.push(inputs::memory_alone()),
    }
    Facts {
        host: host(),
        clock_ms: 0,
        library: library(),
        launcher: environment.launcher_tasks().map(|launcher| (launcher.variable.to_owned(), launcher.tasks)),
        cores: machine::cores(),
        threads: u64::try_from(tch::get_num_threads()).unwrap_or(1),
        digest: run.map(RunConfig::digest),
        transport: transport(run, counts.world, gpu.as_ref()),
        gpu: gpu.map(|gpu| gpu.address),
        share_device: loaded.is_ok_and(|loaded| loaded.rank.share_device),
        findings,
    }
}

/// `None` where the configuration is refused for `ranks` ranks.
fn transport(run: Option<&RunConfig>, ranks: u64, gpu: Option<&Gpu>) -> Option<Transport> {
    let run = run.filter(|run| run.check(Some(ranks)).is_empty())?;
    let direct = match run.run.direct {
        When::Always => Some(true),
        When::Never => Some(false),
        When::Auto => None,
    };
    let cp_size = usize::try_from(run.cp_size(ranks)).unwrap_or(usize::MAX);
    Some(Transport { direct, cp_size, nccl: gpu.is_some_and(|gpu| gpu.nccl) })
}

impl Report {
    fn new(ranks: u64, findings: Vec<Finding>) -> Report {
        let healthy = findings.iter().all(|finding| finding.verdict != Verdict::Fail);
        Report { healthy, ranks, findings }
    }

    /// The report where MPI does not start, or does not connect the processes.
    #[must_use]
    pub fn without_world(failure: &Failure) -> Report {
        Report::new(1, vec![Finding::failed("mpi", failure)])
    }

    /// The exit code of the first failure.
    #[must_use]
    pub fn exit(&self) -> Exit {
        let failed = self.findings.iter().find(|finding| finding.verdict == Verdict::Fail);
        failed.map_or(Exit::Done, Finding::exit)
    }

    /// One line for each finding.
    #[must_use]
    pub fn text(&self) -> String {
        let lines: Vec<String> = self.findings.iter().map(ToString::to_string).collect();
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_a_gpu_if_their_addresses_are_equal() {
        let apart: Vec<String> = (0..8).map(|bus| format!("0000:0{bus}")).collect();
        assert_eq!(ranks_on_gpu(Some("0000:03"), &apart), 1);
        let pairs = ["0000:01", "0000:02", "0000:01", "0000:02"].map(String::from);
        assert_eq!(ranks_on_gpu(Some("0000:02"), &pairs), 2);
        assert_eq!(ranks_on_gpu(None, &[String::new(), String::new()]), 1);
    }
}
