//! The GPU of a rank: whether its libraries load, which GPU it is, and whether memory can be pinned for it.

use tch::{Device, Kind, Tensor};

use super::finding::Finding;
use crate::config::DeviceChoice;
use crate::runtime::failure::{Exit, Failure};
use crate::runtime::units::Bytes;
use crate::tensor::{gpu, link};
use crate::world::devices::{driver, libraries};

/// Bytes that are pinned as a trial.
const PIN_BYTES: i64 = 1 << 20;

/// The GPU that a rank would use.
#[derive(Clone, Debug)]
pub(super) struct Gpu {
    /// Address on the bus.
    pub(super) address: String,
    pub(super) free: Bytes,
    /// Free or not.
    pub(super) total: Bytes,
    /// Whether NCCL is available.
    pub(super) nccl: bool,
}

/// Checks the GPU that the rank with this index on its machine would use. With `device = "auto"` a run takes the CPU where
/// there is no GPU.
pub(super) fn check(wanted: DeviceChoice, index: usize) -> (Vec<Finding>, Option<Gpu>) {
    let absent = |detail: String, fix: &str| match wanted {
        DeviceChoice::Cuda => vec![Finding::fail("device", Exit::Config, detail, fix)],
        _ => vec![Finding::warn("device", format!("{detail}; the CPU computes"), fix)],
    };
    match wanted {
        DeviceChoice::Cpu => return (vec![Finding::ok("device", "the CPU, as run.device = \"cpu\" asks")], None),
        DeviceChoice::Auto if !driver() => {
            return (vec![Finding::ok("device", "no GPU driver on this machine: the CPU computes")], None);
        }
        _ => {}
    }
    let visible = match gpu::open(&libraries()) {
        Ok(0) => {
            let fix = "look at CUDA_VISIBLE_DEVICES, and ask Slurm for them with --gpus-per-node";
            return (absent("no GPU is visible".into(), fix), None);
        }
        Ok(visible) => visible,
        Err(error) => {
            let fix = "put the GPU build of libtorch 2.11 beside the CPU's (make gpu), or name it in LD_LIBRARY_PATH";
            return (absent(error.to_string(), fix), None);
        }
    };
    let index = index % visible;
    if let Err(error) = gpu::select(index, false) {
        return (vec![Finding::failed("device", &Failure::from(error))], None);
    }
    let address = gpu::identity(index).unwrap_or_else(|| format!("GPU {index}"));
    let (free, total) = match gpu::memory() {
        Ok(memory) => memory,
        Err(error) => return (vec![Finding::failed("device", &Failure::from(error))], None),
    };
    let name = gpu_model(&address).unwrap_or_else(|| "a GPU".into());
    let detail = format!("{name} at {address}, one of {visible} visible, {free} of {total} free");
    let mut findings = vec![Finding::ok("device", detail)];
    let like = Tensor::zeros([PIN_BYTES], (Kind::Uint8, Device::Cpu));
    if let Err(error) = gpu::pinned_like(&like) {
        let fix = "pages need pinned host memory: raise the locked-memory limit (ulimit -l), or the job's memory";
        findings.push(Finding::fail("pinning", Exit::DoesNotFit, error.to_string(), fix));
    }
    (findings, Some(Gpu { address, free, total, nccl: link::nccl_available() }))
}

/// The name of the GPU at `address` on the bus, as its driver reports it.
pub(crate) fn gpu_model(address: &str) -> Option<String> {
    let file = format!("/proc/driver/nvidia/gpus/{}/information", address.trim_matches('\0').to_lowercase());
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(line.trim().to_owned())
}
