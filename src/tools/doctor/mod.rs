//! What can be known before anything long is started: one line a thing, with what to do about it.
//!
//! Every rank looks at its own machine; the ranks of one machine tell each other which GPU they would drive, since those
//! of one GPU share its memory. Then all findings meet in one exchange, and what only shows side by side (two ranks on one
//! GPU, clocks, files that differ) is judged from there, alike on every rank.

mod devices;
mod finding;
mod inputs;
mod machine;
mod messages;
mod together;

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub use finding::{Finding, Verdict};

use crate::config::{DeviceChoice, Environment, Error, Loaded, RunConfig};
use crate::runtime::failure::{Exit, Failure};
use crate::runtime::units::{Rank, from_index};
use crate::world::{World, host, library};

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// No finding is a failure.
    pub healthy: bool,
    /// Ranks that looked.
    pub ranks: u64,
    /// What was found, in the order in which a run would meet it.
    pub findings: Vec<Finding>,
}

/// What one rank knows, and tells the others.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct Facts {
    host: String,
    /// Milliseconds since 1970, all ranks at the same moment.
    clock_ms: u64,
    library: String,
    /// The launcher's variable and what it says.
    launcher: Option<(String, u64)>,
    /// The cores that this rank may use, as the system lists them, and how many.
    cores: (String, u64),
    /// Threads that a computation of this rank uses.
    threads: u64,
    /// Whether this rank could read its configuration, and the digest of it.
    digest: Option<String>,
    /// The address of the GPU that this rank would drive.
    gpu: Option<String>,
    share_device: bool,
    /// How its tensors would reach other ranks; unknown where the configuration is refused.
    transport: Option<messages::Road>,
    findings: Vec<Finding>,
}

/// A rank's place.
#[derive(Clone, Copy, Debug)]
struct CpGroup {
    ranks: u64,
    /// Ranks of this machine.
    here: u64,
    /// Ranks that drive this rank's GPU, itself included; 1 without one.
    sharers: u64,
}

/// How many of a machine's ranks drive the GPU at `address`.
fn sharers(address: Option<&str>, taken: &[String]) -> u64 {
    address.map_or(1, |address| from_index(taken.iter().filter(|other| *other == address).count())).max(1)
}

/// Looks at everything, on every rank.
#[must_use]
pub fn examine(loaded: &Result<Loaded, Error>, environment: &Environment, world: &World) -> Report {
    let machine = world.machine();
    let Rank(index) = machine.rank();
    let wanted = loaded.as_ref().map_or(DeviceChoice::Auto, |loaded| loaded.run.run.device);
    let (device, gpu) = devices::look(wanted, index);
    let address = gpu.as_ref().map(|gpu| gpu.address.as_str());
    let sharers = sharers(address, &machine.gather_texts(address.unwrap_or_default()));
    let cp_group = CpGroup { ranks: from_index(world.all.size()), here: from_index(machine.size()), sharers };
    let mut facts = look(loaded.as_ref(), environment, cp_group, (device, gpu));
    // The clocks of ranks that leave a barrier together are read together.
    world.all.barrier();
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    facts.clock_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    let told = serde_json::to_string(&facts).unwrap_or_default();
    let all: Vec<Facts> =
        world.all.gather_texts(&told).iter().filter_map(|text| serde_json::from_str(text).ok()).collect();
    Report::of(cp_group.ranks, together::findings(&all))
}

/// What one rank finds by itself.
fn look(
    loaded: Result<&Loaded, &Error>,
    environment: &Environment,
    cp_group: CpGroup,
    (device, gpu): (Vec<Finding>, Option<devices::Gpu>),
) -> Facts {
    let run = loaded.ok().map(|loaded| &loaded.run);
    let mut findings = vec![inputs::configuration(loaded, cp_group.ranks)];
    findings.push(machine::libtorch());
    findings.extend(device);
    findings.push(machine::pinned(gpu.is_some(), machine::locked_memory()));
    match loaded {
        Ok(loaded) => {
            let (model, spec) = inputs::model(loaded);
            findings.push(model);
            findings.push(inputs::memory(loaded, spec.as_ref(), gpu.as_ref(), cp_group));
            findings.push(inputs::run_folder(&loaded.rank.dir));
            findings.push(inputs::key(&loaded.run, environment));
        }
        Err(_) => findings.push(inputs::memory_alone()),
    }
    Facts {
        host: host(),
        clock_ms: 0,
        library: library(),
        launcher: environment.launcher_tasks().map(|told| (told.variable.to_owned(), told.tasks)),
        cores: machine::cores(),
        threads: u64::try_from(tch::get_num_threads()).unwrap_or(1),
        digest: run.map(RunConfig::digest),
        transport: transport(run, cp_group, gpu.as_ref()),
        gpu: gpu.map(|gpu| gpu.address),
        share_device: loaded.is_ok_and(|loaded| loaded.rank.share_device),
        findings,
    }
}

/// The transport of a rank whose configuration fits the ranks that there are.
fn transport(run: Option<&RunConfig>, cp_group: CpGroup, gpu: Option<&devices::Gpu>) -> Option<messages::Road> {
    let run = run.filter(|run| run.check(Some(cp_group.ranks)).is_empty())?;
    Some(messages::Road::of(run, cp_group.ranks, gpu.is_some_and(|gpu| gpu.nccl)))
}

impl Report {
    fn of(ranks: u64, findings: Vec<Finding>) -> Report {
        let healthy = findings.iter().all(|finding| finding.verdict != Verdict::Fail);
        Report { healthy, ranks, findings }
    }

    /// The only finding there is where MPI does not start, or leaves each process alone.
    #[must_use]
    pub fn without_world(failure: &Failure) -> Report {
        Report::of(1, vec![Finding::failed("mpi", failure)])
    }

    /// How the command ends: as the first failure does.
    #[must_use]
    pub fn exit(&self) -> Exit {
        let failed = self.findings.iter().find(|finding| finding.verdict == Verdict::Fail);
        failed.map_or(Exit::Done, Finding::exit)
    }

    /// One line a finding.
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
    fn ranks_share_a_gpu_where_their_addresses_are_equal_however_many_are_visible_to_each() {
        let apart: Vec<String> = (0..8).map(|bus| format!("0000:0{bus}")).collect();
        assert_eq!(sharers(Some("0000:03"), &apart), 1, "one visible to each task, and all of them different");
        let pairs = ["0000:01", "0000:02", "0000:01", "0000:02"].map(String::from);
        assert_eq!(sharers(Some("0000:02"), &pairs), 2);
        assert_eq!(sharers(None, &[String::new(), String::new()]), 1, "the CPU's memory is the host's");
    }
}
