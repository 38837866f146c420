//! Which device a rank uses.
//!
//! The ranks of a machine take its visible GPUs in turn, whatever the launcher made visible: one GPU to each task, or
//! all to every task, in any order. Two ranks share a GPU only on request. Addresses on the PCI bus identify GPUs,
//! since indices differ between processes.

use std::path::{Path, PathBuf};

use tch::{Device, Kind};

use crate::config::DeviceChoice as Wanted;
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::units::{Bytes, from_index};
use crate::tensor::boundary::measured;
use crate::tensor::{fused, gpu};
use crate::world::World;

/// Why ranks get no devices.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say everything")]
pub enum Error {
    #[error(
        "device \"cuda\" was requested and no rank has a GPU ({why}); the GPU build of libtorch 2.11 must be next to the \
         CPU build or be found through LD_LIBRARY_PATH; without a GPU set device \"cpu\""
    )]
    None { why: String },
    #[error("{with} of {ranks} ranks have a GPU: give every rank one, or set device \"cpu\"")]
    Uneven { with: usize, ranks: usize },
    /// `first` and `second` are indices on this machine.
    #[error(
        "ranks {first} and {second} of this machine drive the same GPU ({gpu}): start as many ranks as there are GPUs, \
         or set share_device = true"
    )]
    Shared { first: usize, second: usize, gpu: String },
    #[error(
        "run.direct = true and there is no transport from GPU to GPU: every rank needs a GPU of its own, and libnccl.so.2 \
         must be where libtorch's GPU build finds it; with \"auto\" tensors go through host memory"
    )]
    NoTransport,
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Config
    }
}

/// Selects the device of this rank. All ranks get the same kind of device, or all fail with one message. Must be called
/// before the first tensor.
///
/// # Errors
/// When ranks would have different kinds of device, share a GPU without `share`, or have no device of the requested
/// kind.
pub fn choose(world: &World, wanted: Wanted, share: bool, repeatable: bool) -> Result<Device, Failure> {
    world.ledger().measure_with(measured);
    let found = match wanted {
        Wanted::Cpu => Ok(0),
        // Opening the library takes seconds, in vain without a driver.
        Wanted::Auto if !driver() => Ok(0),
        _ => gpu::open(&libraries()).map_err(|error| error.to_string()),
    };
    let count = *found.as_ref().unwrap_or(&0);
    let with = world.all.gather_numbers(u64::from(count > 0)).into_iter().filter(|&one| one == 1).count();
    if with < world.all.size() {
        let none = found.err().unwrap_or_else(|| "no GPU is visible".into());
        let ranks = world.all.size();
        return match (wanted, with) {
            (Wanted::Cuda, 0) => world.agree(Err(Error::None { why: none }.into())),
            (Wanted::Auto, 0) if driver() => {
                world.warn_user(&format!("this machine has a GPU driver, and the CPU is used: {none}"));
                Ok(Device::Cpu)
            }
            (_, 0) => Ok(Device::Cpu),
            _ => world.agree(Err(Error::Uneven { with, ranks }.into())),
        };
    }
    let machine = world.machine();
    let index = machine.rank().0 % count;
    let device = world.agree(gpu::select(index, repeatable).map_err(Failure::from))?;
    let here = gpu::identity(index).unwrap_or_else(|| format!("GPU {index}"));
    let taken = machine.gather_texts(&here);
    let apart = match taken.iter().position(|other| *other == here) {
        Some(first) if first < machine.rank().0 && !share => {
            Err(Error::Shared { first, second: machine.rank().0, gpu: here }.into())
        }
        _ => Ok(()),
    };
    world.agree(apart)?;
    tracing::info!("device {device:?} at {}, one of {count}", taken[machine.rank().0]);
    Ok(device)
}

/// Whether this machine has an NVIDIA driver.
#[must_use]
pub fn driver() -> bool {
    ["/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia"].iter().any(|path| Path::new(path).exists())
}

/// Ranks that share this rank's GPU, itself included; 1 on a CPU.
#[must_use]
pub fn sharers(world: &World, device: Device) -> u64 {
    let machine = world.machine();
    let here = match device {
        Device::Cuda(index) => gpu::identity(index).unwrap_or_default(),
        _ => return 1,
    };
    from_index(machine.gather_texts(&here).iter().filter(|other| **other == here).count())
}

/// A rank's share of its GPU's whole memory, free or not: the least of all ranks, the same on each. `None` without GPUs.
///
/// # Errors
/// When a rank's runtime does not say.
pub fn memory_least(world: &World, device: Device) -> Result<Option<Bytes>, Failure> {
    if device == Device::Cpu {
        return Ok(None);
    }
    let sharers = sharers(world, device);
    let (_, total) = world.agree(gpu::memory().map_err(Failure::from))?;
    let all = world.all.gather_numbers(total.0 / sharers.max(1));
    Ok(all.into_iter().min().map(Bytes))
}

/// The folder of this process's libtorch. The GPU library is in the same folder, if the machine has one.
#[must_use]
pub fn libraries() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let cpu = maps.split_whitespace().find(|word| word.ends_with("/libtorch_cpu.so"));
    cpu.and_then(|path| Path::new(path).parent()).map(Path::to_path_buf).unwrap_or_default()
}

/// Elementwise kernels are used on all ranks or on none, since their roundings are not those of operators: adapters that every rank
/// holds would drift apart. Every rank takes part once it has made its decoder.
pub fn agree_on_kernels(world: &World, kind: Kind) {
    let used = world.all.gather_numbers(u64::from(fused::is_used(kind)));
    if fused::is_used(kind) && used.contains(&0) {
        fused::forgo();
        tracing::warn!(
            "another rank cannot use the compiled elementwise kernels; libtorch's operators are used on all"
        );
    }
}
