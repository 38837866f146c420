//! A run's inputs and outputs: configuration, model, memory, run directory, key.

use std::io;
use std::path::Path;

use super::devices::Gpu;
use super::facts::RankCounts;
use super::finding::Finding;
use crate::config::{Environment, Error, Loaded, RunConfig, When};
use crate::model::shape::Shape;
use crate::model::shards::Checkpoint;
use crate::model::spec::Spec;
use crate::plan::{self, Place, Room};
use crate::report::no_locks;
use crate::reward;
use crate::runtime::failure::{Exit, Failure};
use crate::runtime::file_lock::{Locked, lock};
use crate::runtime::memory::available_memory;
use crate::runtime::units::Bytes;

/// Less free disk space than this is a warning: a checkpoint of a small run has a few hundred MiB.
const DISK_BYTES_MIN: u64 = 1 << 30;

/// The configuration in a job of `ranks` ranks.
pub(super) fn configuration(loaded: Result<&Loaded, &Error>, ranks: u64) -> Finding {
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return Finding::fail("configuration", Exit::Config, error.to_string(), ""),
    };
    let problems = loaded.run.check(Some(ranks));
    if !problems.is_empty() {
        return Finding::fail("configuration", Exit::Config, Error::Refused { problems }.to_string(), "");
    }
    if !loaded.unset.is_empty() {
        let words = format!("there is no config.toml, and no source gives {}", loaded.unset.join(", "));
        return Finding::warn("configuration", words, "`longstraw train` alone takes the built-in laptop run here");
    }
    let sources: Vec<String> = loaded.sources.iter().skip(1).map(ToString::to_string).collect();
    Finding::ok("configuration", sources.join(", "))
}

/// The model's folder without the values of its weights, and the model's spec.
pub(super) fn model(loaded: &Loaded) -> (Finding, Option<Spec>) {
    let run = &loaded.run;
    let folder = match run.model_path() {
        Ok(folder) => folder,
        Err(unset) => return (Finding::warn("model", unset.to_string(), ""), None),
    };
    let scaling = run.model.rope_scaling.as_ref().map(|table| serde_json::json!(table));
    let spec = match Spec::read(folder, scaling.as_ref()) {
        Ok(spec) => spec,
        Err(error) => return (Finding::failed("model", &Failure::from(error)), None),
    };
    let weights = if run.model.random_init { Ok(None) } else { Checkpoint::open(folder, &spec).map(Some) };
    let finding = match weights {
        Ok(None) => Finding::ok("model", format!("{}: {} layers, random weights", folder.display(), spec.layers)),
        Ok(Some(checkpoint)) => {
            let there = format!("{}: {} layers, all tensors there", folder.display(), spec.layers);
            Finding::ok("model", [vec![there], checkpoint.notes()].concat().join("; "))
        }
        Err(error) => Finding::failed("model", &Failure::from(error)),
    };
    (finding, Some(spec))
}

/// The machine's memory, where there is no plan to compare it with.
pub(super) fn memory_alone() -> Finding {
    match available_memory() {
        Some(free) => Finding::ok("memory", format!("{free} of host memory for this job")),
        None => Finding::warn("memory", "the system does not say what host memory is there", "is /proc mounted?"),
    }
}

/// The plan's memory against the machine's.
pub(super) fn memory(loaded: &Loaded, spec: Option<&Spec>, gpu: Option<&Gpu>, ranks: RankCounts) -> Finding {
    let run = &loaded.run;
    let is_valid = loaded.unset.is_empty() && run.check(Some(ranks.world)).is_empty();
    let Some(spec) = spec.filter(|_| is_valid) else { return memory_alone() };
    let host = available_memory();
    let device = gpu.map(|gpu| {
        // As in a run: a part is left to libraries that load later and to gaps between tensors.
        Bytes((gpu.free.0 - gpu.free.0 / 32) / ranks.gpu)
    });
    let room = Room { ranks_here: ranks.machine, device, host_only: gpu.is_none(), host };
    let mut run = run.clone();
    // Messages take host memory if a run finds no transport from GPU to GPU.
    if run.run.direct == When::Auto && gpu.is_some_and(|gpu| !gpu.nccl || ranks.gpu > 1) {
        run.run.direct = When::Never;
    }
    let total = gpu.map(|gpu| Bytes(gpu.total.0 / ranks.gpu));
    if let Some((chosen, _)) = plan::choose(&run, ranks.world, &Shape::of(spec), &room, total) {
        run = chosen;
    }
    run.memory.micro_block = plan::micro_block(&run, ranks.world, Some(&Shape::of(spec)), total);
    let plan = plan::of(&run, ranks.world, Some(spec), &room);
    if let Err(error) = plan.refuse(&room) {
        return Finding::failed("memory", &Failure::from(error));
    }
    let there = host.map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string());
    let on_device = plan.sum(Place::Device);
    let on_host = plan.sum(Place::Host);
    let all = |bytes: Bytes| Bytes(bytes.0.saturating_mul(ranks.machine));
    let host = if device.is_none() { all(on_device + on_host) } else { all(on_host) };
    let here = ranks.machine;
    let device = device.map(|free| format!("{on_device} of {free} on each device, ")).unwrap_or_default();
    let detail = format!("{device}{host} of {there} of host memory; ranks on this machine: {here}");
    Finding::ok("memory", format!("the plan takes {detail}"))
}

/// Whether a run could write to the run directory. The check leaves no file.
pub(super) fn run_folder(folder: &Path) -> Finding {
    let name = "run directory";
    let exit = Exit::Data;
    let fix = "choose another place with --run-dir, or --set run.dir=FOLDER";
    let shown = folder.display();
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    // A run makes the missing folders in the first one that exists.
    let Some(there) = absolute.ancestors().find(|path| path.exists()) else {
        return Finding::fail(name, exit, format!("{shown}: no part of it exists"), fix);
    };
    let tried = if there.is_dir() {
        tempfile::tempfile_in(there).and_then(|file| lock(&file))
    } else {
        Err(io::Error::new(io::ErrorKind::NotADirectory, format!("{} is no folder", there.display())))
    };
    match tried {
        Err(error) => return Finding::fail(name, exit, format!("{shown}: {error}"), fix),
        Ok(Locked::Unsupported(error)) => {
            let fix = "mount it with locks (Lustre: the option flock), or never start two runs in one folder";
            return Finding::warn(name, format!("{shown} can be written; {}", no_locks(folder, &error)), fix);
        }
        Ok(Locked::Held | Locked::Busy) => {}
    }
    match rustix::fs::statvfs(there) {
        Ok(disk) => {
            let free = Bytes(disk.f_bavail.saturating_mul(disk.f_frsize));
            let detail = format!("{shown} can be written, {free} free");
            if free.0 < DISK_BYTES_MIN {
                Finding::warn(name, detail, "make room for checkpoints")
            } else {
                Finding::ok(name, detail)
            }
        }
        Err(error) => Finding::warn(name, format!("{shown} can be written; its free space is unknown: {error}"), ""),
    }
}

/// The rubrics of judges; `None` where the configuration names no file of one.
pub(super) fn rubrics(run: &RunConfig) -> Option<Finding> {
    let judges = run.named_judges();
    let files = judges.iter().filter(|(_, judge)| judge.rubric.is_some()).count();
    (files > 0).then(|| match reward::check_rubrics(run) {
        Ok(()) => {
            Finding::ok("rubrics", if files == 1 { "1 can be read".to_owned() } else { format!("{files} can be read") })
        }
        Err(error) => Finding::failed("rubrics", &Failure::from(error)),
    })
}

/// Whether the endpoint's key is set, if an endpoint is configured. The key is never shown.
pub(super) fn key(run: &RunConfig, environment: &Environment) -> Finding {
    let variable = &run.endpoint.api_key_env;
    match (run.api_base(), environment.api_key(&run.endpoint)) {
        (Err(_), _) => Finding::ok("key", "no endpoint is configured, so none is needed"),
        (Ok(_), Ok(_)) => Finding::ok("key", format!("{variable} is set; `longstraw ping` asks whether it is taken")),
        (Ok(_), Err(error)) => Finding::failed("key", &Failure::from(error)),
    }
}
