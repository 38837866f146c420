//! How many ranks share a prompt and how many rows a micro-block has, where the configuration leaves it open: as a checkpoint to go
//! on from was made, else the fastest way that fits.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Device;

use super::run_folder::Begin;
use crate::checkpoint::Store;
use crate::config::{Loaded, RunConfig};
use crate::model::shape::Shape;
use crate::model::spec::Spec;
use crate::plan::{self, Room};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Bytes, Tokens, from_index};
use crate::tensor::gpu;
use crate::world::World;
use crate::world::devices;

/// What a checkpoint to go on from says of how its run was shared out.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Earlier {
    /// Ranks that shared a prompt; absent in checkpoints of earlier versions, in which all ranks did.
    cp_size: Option<u64>,
    /// Rows of a micro-block.
    rows: Option<u64>,
}

/// What the newest whole checkpoint says, as rank 0 finds it; `None` where no run goes on or the configuration leaves nothing open.
/// What is wrong with checkpoints is said where they are opened. Every rank takes part and gets the same.
pub(super) fn earlier(loaded: &Loaded, begin: Begin, world: &World) -> Result<Option<Earlier>, Failure> {
    let config = &loaded.run;
    let is_open = plan::is_open(config) || config.memory.micro_block == Tokens(0);
    if begin != Begin::Resume || !is_open {
        return Ok(None);
    }
    world.from_root(|| Ok(newest_state(loaded)))
}

/// The configuration with the ranks of a prompt, and a sentence about them; `None` where all ranks share each, or somebody has
/// said how many. Every rank takes part and gets the same.
pub(super) fn share_out(
    loaded: &Loaded,
    earlier: Option<Earlier>,
    world: &World,
    spec: &Spec,
    device: Device,
) -> Result<Option<(RunConfig, String)>, Failure> {
    let config = &loaded.run;
    if !plan::is_open(config) {
        return Ok(None);
    }
    let ranks = from_index(world.all.size());
    let stored = earlier.map(|earlier| earlier.cp_size.unwrap_or(ranks));
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

fn newest_state(loaded: &Loaded) -> Option<Earlier> {
    let store = Store::of(&loaded.rank.dir);
    let updates = store.newest().ok()?.updates?;
    let state = store.state(updates).ok()?;
    let rows = state.config.pointer("/memory/micro_block").and_then(Value::as_u64).filter(|&rows| rows > 0);
    Some(Earlier { cp_size: state.cp_size, rows })
}

/// Rows of a micro-block, where `memory.micro_block` is 0: those of the checkpoint to go on from, else as the configuration and the
/// smallest device allow; and a sentence about them. Every rank takes part and gets the same.
pub(super) fn choose_rows(
    loaded: &Loaded,
    earlier: Option<Earlier>,
    world: &World,
    spec: &Spec,
    device: Device,
) -> Result<(Tokens, Option<String>), Failure> {
    let config = &loaded.run;
    let total = devices::memory_least(world, device)?;
    let chosen = plan::micro_block(config, from_index(world.all.size()), Some(&Shape::of(spec)), total);
    if config.memory.micro_block != Tokens(0) {
        return Ok((chosen, None));
    }
    let stored = earlier.and_then(|earlier| earlier.rows);
    let rows = stored.map_or(chosen, Tokens);
    let why = match stored {
        Some(_) if rows != chosen => "as in the checkpoint that the run goes on from",
        _ if device == Device::Cpu => return Ok((rows, None)),
        _ => "chosen for this device and these lengths",
    };
    Ok((rows, Some(format!("memory.micro_block: {rows} rows, {why}"))))
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
