//! How many ranks share a prompt, where the configuration leaves it open: as a checkpoint to go on from was made, else the fastest
//! way that fits.

use tch::Device;

use super::run_folder::Begin;
use crate::checkpoint::Store;
use crate::config::{Loaded, RunConfig};
use crate::model::shape::Shape;
use crate::model::spec::Spec;
use crate::plan::{self, Room};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Bytes, from_index};
use crate::tensor::gpu;
use crate::world::World;
use crate::world::devices;

/// The configuration with the ranks of a prompt, and a sentence about them; `None` where all ranks share each, or somebody has
/// said how many. Every rank takes part and gets the same.
pub(super) fn share_out(
    loaded: &Loaded,
    begin: Begin,
    world: &World,
    spec: &Spec,
    device: Device,
) -> Result<Option<(RunConfig, String)>, Failure> {
    let config = &loaded.run;
    if !plan::is_open(config) {
        return Ok(None);
    }
    let ranks = from_index(world.all.size());
    let stored = if begin == Begin::Resume { world.from_root(|| Ok(stored(loaded, ranks)))? } else { None };
    let as_stored = stored.and_then(|cp_size| Some((cp_size, plan::shared_out(config, ranks, cp_size)?)));
    if let Some((cp_size, config)) = as_stored {
        let note = format!(
            "parallel.cp_size: {cp_size} of {ranks} ranks share a prompt, as in the checkpoint that the run goes on from"
        );
        return Ok(Some((config, note)).filter(|_| cp_size < ranks));
    }
    if device == Device::Cpu {
        return Ok(None);
    }
    // The tightest rank decides, so that all choose the same.
    let least = |bytes: Option<Bytes>| {
        let all = world.all.gather_numbers(bytes.map_or(u64::MAX, |bytes| bytes.0));
        all.into_iter().min().filter(|&bytes| bytes < u64::MAX).map(Bytes)
    };
    let here = world.all.gather_numbers(from_index(world.machine().size())).into_iter().max().unwrap_or(1);
    let room = Room {
        ranks_here: here,
        device: least(device_room(world, device)?),
        host_only: false,
        host: least(plan::available_memory()),
    };
    let total = devices::memory_least(world, device)?;
    let chosen = plan::choose(config, ranks, &Shape::of(spec), &room, total);
    world.require_equal("ranks that share a prompt", &format!("{:?}", chosen.as_ref().map(|(_, row)| row.cp_size)))?;
    let none = || {
        let groups = config.groups_per_update(ranks);
        let note = format!(
            "parallel.cp_size: all {ranks} ranks share a prompt; optimizer.grad_accum = {groups} is all of an update's groups"
        );
        (ranks > 1).then(|| (config.clone(), note))
    };
    Ok(chosen.map(|(config, row)| (config, row.note(ranks))).or_else(none))
}

/// Ranks that shared a prompt when the newest whole checkpoint was made, by rank 0; what is wrong with checkpoints is said where
/// they are opened.
fn stored(loaded: &Loaded, ranks: u64) -> Option<u64> {
    let store = Store::of(&loaded.rank.dir);
    let updates = store.newest().ok()?.updates?;
    // Earlier versions left it out, and all ranks shared a prompt.
    Some(store.state(updates).ok()?.cp_size.unwrap_or(ranks))
}

/// This rank's share of what its GPU can still give to tensors; `None` without a GPU.
pub(super) fn device_room(world: &World, device: Device) -> Result<Option<Bytes>, Failure> {
    let sharers = devices::sharers(world, device);
    if device == Device::Cpu {
        return Ok(None);
    }
    let (free, _) = world.agree(gpu::memory().map_err(Failure::from))?;
    // Some goes to what libraries load later, and to the gaps between tensors.
    Ok(Some(Bytes((free.0 - free.0 / 32) / sharers)))
}
