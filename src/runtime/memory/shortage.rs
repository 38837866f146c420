//! The report when memory has run out: bytes requested, free and held, and which setting to change.
//!
//! libtorch's allocators state the request in their error messages; the ledger knows what uses the rest. The report
//! suggests the setting of the largest part.

use std::fmt::Write as _;

use super::cgroup::job_memory;
use super::ledger::{Holding, Holdings, MemorySpace, Part, Purpose};
use crate::runtime::failure::{Phase, Site};
use crate::runtime::units::Bytes;

/// Free host memory of this machine, at most what this job's control group may still take; `None` if the system does
/// not say.
#[must_use]
pub fn available_memory() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    let machine = Bytes(kib * 1024);
    Some(job_memory().map_or(machine, |job| job.min(machine)))
}

/// The request that an allocator's message is about.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Request {
    bytes: Option<Bytes>,
    free: Option<Bytes>,
    capacity: Option<Bytes>,
}

impl Request {
    /// Reads "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free" (CUDA),
    /// "you tried to allocate 4096 bytes" (CPU), or "gives no 4096 bytes of host memory" (pinned).
    fn parse(message: &str) -> Request {
        let after = |mark: &str| message.split_once(mark).and_then(|(_, rest)| amount(rest));
        Request {
            bytes: after("ried to allocate ").or_else(|| after("gives no ")),
            free: after(" of which ").filter(|_| message.contains(" is free")),
            capacity: after("total capacity of "),
        }
    }
}

/// A size in bytes or binary units at the start of a text.
fn amount(text: &str) -> Option<Bytes> {
    let mut words = text.split_whitespace();
    let (number, unit) = (words.next()?, words.next()?.trim_end_matches(['.', ',', ';']));
    let shift = match unit {
        "bytes" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let hundredths: u64 = format!("{part:0<2}").get(..2)?.parse().ok()?;
    let all = u128::from(whole.parse::<u64>().ok()?) * 100 + u128::from(hundredths);
    // Rounded up, so that it is printed as it was read.
    u64::try_from((all << shift).div_ceil(100)).ok().map(Bytes)
}

/// A rank that did not get the memory it requested.
#[derive(Clone, Debug)]
pub struct Shortage {
    site: Site,
    in_top_layer: bool,
    request: Request,
    /// Whether the device has its own memory.
    gpu: bool,
    /// The memory that has run out.
    space: MemorySpace,
    held: Holdings,
}

impl Shortage {
    /// For the message of an allocator, when the rank was at `site` and had `held`. The head runs after the model's
    /// last layer, `in_top_layer`.
    #[must_use]
    pub fn new(message: &str, site: Site, in_top_layer: bool, held: Holdings) -> Shortage {
        let mut request = Request::parse(message);
        let of_host = ["can't allocate memory", "host memory"].iter().any(|words| message.contains(words));
        let gpu = held.reserved.is_some() || message.contains("CUDA");
        let space = if of_host || !gpu { MemorySpace::Host } else { MemorySpace::Device };
        if space == MemorySpace::Host {
            request.free = request.free.or_else(available_memory);
        }
        Shortage { site, in_top_layer, request, gpu, space, held }
    }

    /// The largest part in the memory that has run out. The requested bytes count as scratch.
    fn largest(&self) -> Holding {
        let requested = self.request.bytes.unwrap_or_default();
        let space = if self.gpu { self.space } else { MemorySpace::Device };
        let scratch = Holding { part: Part::Scratch, space, bytes: requested };
        let here = |holding: &&Holding| !self.gpu || holding.space == self.space;
        let parts = self.held.parts.iter().filter(here).copied();
        let parts = parts.map(|holding| match holding.part {
            Part::Scratch if holding.space == space => Holding { bytes: holding.bytes + requested, ..holding },
            _ => holding,
        });
        parts.chain([scratch]).max_by_key(|holding| holding.bytes).unwrap_or(scratch)
    }

    /// The setting that makes a part smaller, or moves it to the host.
    fn setting(&self, holding: &Holding) -> &'static str {
        const MODEL: &str = "model.dtype = \"bfloat16\", or a smaller model";
        const RANKS: &str = "more ranks to a prompt (parallel.cp_size)";
        let movable = self.gpu && holding.space == MemorySpace::Device;
        match holding.part {
            Part::Kind(Purpose::Weights) => MODEL,
            Part::Kind(Purpose::Adapters | Purpose::Optimizer) => "lora.rank smaller",
            Part::Kind(Purpose::Pages) if movable => "memory.cpu_offload_pages = true",
            Part::Kind(Purpose::Checkpoints) if movable => {
                "memory.cpu_offload_inputs = true, memory.inputs_every higher, or memory.keep_attention = false"
            }
            Part::Kind(Purpose::Checkpoints) => "memory.inputs_every higher, or memory.keep_attention = false",
            Part::Kind(_) => RANKS,
            Part::Scratch => match self.site.phase {
                Phase::Start => MODEL,
                Phase::Finalize | Phase::Update | Phase::Save => "lora.rank smaller",
                Phase::Score | Phase::Replay | Phase::Evaluate if self.in_top_layer => "memory.head_block smaller",
                _ => "memory.micro_block smaller",
            },
        }
    }

    /// Bytes that the device's allocator has reserved and no tensor uses, if they would have been enough or are many.
    fn idle(&self) -> Option<Bytes> {
        let reserved = self.held.reserved?;
        let idle = Bytes(reserved.0.saturating_sub(self.held.live.0));
        let enough = self.request.bytes.is_some_and(|requested| idle >= requested);
        (self.space == MemorySpace::Device && (enough || idle.0 > reserved.0 / 8)).then_some(idle)
    }

    /// Several lines; the first one is a complete message.
    #[must_use]
    pub fn report(&self) -> String {
        let Request { bytes, free, capacity } = self.request;
        let memory = if self.gpu { self.space.name() } else { "host" };
        let requested =
            bytes.map_or_else(|| "more was requested than is free".into(), |b| format!("{b} were requested"));
        let free = match (free, capacity) {
            (Some(free), Some(capacity)) => format!(", {free} of {capacity} were free"),
            (Some(free), None) => format!(", the system says that {free} were free"),
            _ => String::new(),
        };
        let largest = self.largest();
        let mut text = format!(
            "{}: out of {memory} memory: {requested}{free}; largest is {}: set {}",
            self.site,
            largest.part.name(),
            self.setting(&largest)
        );
        if let Some(idle) = self.idle() {
            let _ = write!(
                text,
                "; {idle} are reserved and unused: set the variable PYTORCH_ALLOC_CONF=expandable_segments:True"
            );
        }
        for Holding { part, space, bytes } in &self.held.parts {
            let _ = write!(text, "\n  {:>12}  {:<11}  {}", bytes.to_string(), part.name(), space.name());
        }
        if let Some(reserved) = self.held.reserved {
            let _ = write!(
                text,
                "\n  {:>12}  reserved on the device, {} of it alive",
                reserved.to_string(),
                self.held.live
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::units::{LayerIndex, Rank};

    const CUDA: &str = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of \
                        which 1.25 GiB is free. Including non-PyTorch memory, this process has 138.00 GiB in use.";
    const CPU: &str = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to \
                       allocate 536870912 bytes. Error code 12 (Cannot allocate memory)";
    const GIB: u64 = 1 << 30;

    fn held(parts: &[(Part, MemorySpace, u64)], reserved: Option<u64>) -> Holdings {
        let parts = parts.iter().map(|&(part, space, gib)| Holding { part, space, bytes: Bytes(gib * GIB) });
        let parts: Vec<Holding> = parts.collect();
        let on_device = parts.iter().filter(|holding| holding.space == MemorySpace::Device);
        let live = on_device.map(|holding| holding.bytes).sum();
        Holdings { parts, live, reserved: reserved.map(|gib| Bytes(gib * GIB)) }
    }

    /// A shortage of rank 3 in one of eight layers.
    fn shortage(message: &str, phase: Phase, layer: usize, held: Holdings) -> Shortage {
        let site = Site { rank: Rank(3), phase, layer: Some(LayerIndex(layer)) };
        Shortage::new(message, site, layer == 7, held)
    }

    /// The report of a GPU on which `part` is by far the largest.
    fn of(part: Part, space: MemorySpace, phase: Phase, layer: usize) -> String {
        let words = if space == MemorySpace::Device { CUDA } else { "out of memory: pinning host memory" };
        shortage(words, phase, layer, held(&[(part, space, 90)], Some(90))).report()
    }

    #[test]
    fn a_gpu_is_recognized_by_its_allocators_message_too() {
        let held = held(&[(Part::Kind(Purpose::Pages), MemorySpace::Device, 90)], None);
        let report = shortage(CUDA, Phase::Score, 2, held).report();
        assert!(report.contains("out of device memory") && report.contains("memory.cpu_offload_pages"), "{report}");
    }

    #[test]
    fn the_allocators_message_is_parsed() {
        let request = Request::parse(CUDA);
        assert_eq!(request.bytes, Some(Bytes(2 * GIB)));
        assert_eq!(request.free, Some(Bytes(GIB + GIB / 4)));
        assert_eq!(request.capacity, Some(Bytes((13980 * GIB).div_ceil(100))));
        assert_eq!(Request::parse(CPU), Request { bytes: Some(Bytes(GIB / 2)), ..Request::default() });
        assert_eq!(Request::parse("the machine gives no 4096 bytes of host memory").bytes, Some(Bytes(4096)));
        assert_eq!(Request::parse("CUDA out of memory."), Request::default());
        assert_eq!(amount("512 bytes. GPU"), Some(Bytes(512)));
        assert_eq!((amount("1.5 MiB"), amount("many"), amount("3 apples")), (Some(Bytes(3 << 19)), None, None));
    }

    #[test]
    fn the_setting_is_that_of_the_largest_part() {
        let device = [
            (Part::Kind(Purpose::Weights), "set model.dtype = \"bfloat16\""),
            (Part::Kind(Purpose::Adapters), "set lora.rank smaller"),
            (Part::Kind(Purpose::Optimizer), "set lora.rank smaller"),
            (Part::Kind(Purpose::Hidden), "set more ranks to a prompt (parallel.cp_size)"),
            (Part::Kind(Purpose::Foreign), "set more ranks to a prompt (parallel.cp_size)"),
            (Part::Kind(Purpose::Stage), "set more ranks to a prompt (parallel.cp_size)"),
            (Part::Kind(Purpose::Pages), "set memory.cpu_offload_pages = true"),
            (Part::Kind(Purpose::Checkpoints), "set memory.cpu_offload_inputs = true, memory.inputs_every higher"),
            (Part::Scratch, "set memory.micro_block smaller"),
        ];
        for (part, words) in device {
            let report = of(part, MemorySpace::Device, Phase::Capture, 7);
            assert!(report.contains(words) && report.contains(&format!("largest is {}", part.name())), "{report}");
        }
        let checkpoints = of(Part::Kind(Purpose::Checkpoints), MemorySpace::Host, Phase::Capture, 1);
        assert!(checkpoints.contains("set memory.inputs_every higher"), "what waits there already: {checkpoints}");
        assert!(of(Part::Kind(Purpose::Pages), MemorySpace::Host, Phase::Capture, 1).contains("parallel.cp_size"));
    }

    #[test]
    fn scratch_is_the_heads_in_the_top_layer_and_the_segments_below_it() {
        for (phase, layer, words) in [
            (Phase::Score, 7, "memory.head_block"),
            (Phase::Replay, 7, "memory.head_block"),
            (Phase::Replay, 6, "memory.micro_block"),
            (Phase::Sweep, 6, "memory.micro_block"),
            (Phase::Capture, 7, "memory.micro_block"),
            (Phase::Finalize, 7, "lora.rank"),
            (Phase::Start, 7, "model.dtype"),
        ] {
            let report = of(Part::Scratch, MemorySpace::Device, phase, layer);
            assert!(report.contains(words), "{phase}: {report}");
        }
    }

    #[test]
    fn the_report_names_rank_phase_layer_the_request_and_all_held_parts() {
        let (weights, pages) = (Part::Kind(Purpose::Weights), Part::Kind(Purpose::Pages));
        let parts = [
            (pages, MemorySpace::Host, 300),
            (Part::Scratch, MemorySpace::Device, 100),
            (weights, MemorySpace::Device, 15),
        ];
        let report = shortage(CUDA, Phase::Sweep, 4, held(&parts, Some(138))).report();
        assert_eq!(
            report,
            "rank 3, sweep, layer 4: out of device memory: 2.00 GiB were requested, 1.25 GiB of 139.80 GiB were free; \
             largest is scratch: set memory.micro_block smaller; 23.00 GiB are reserved and unused: set the \
             variable PYTORCH_ALLOC_CONF=expandable_segments:True\n\
             \x20   300.00 GiB  pages        host\n\
             \x20   100.00 GiB  scratch      device\n\
             \x20    15.00 GiB  weights      device\n\
             \x20   138.00 GiB  reserved on the device, 115.00 GiB of it alive"
        );
    }

    #[test]
    fn the_gpus_memory_has_run_out_unless_the_message_names_the_hosts() {
        let pages = (Part::Kind(Purpose::Pages), MemorySpace::Host, 90);
        let said = |words| shortage(words, Phase::Replay, 0, held(&[pages], Some(8))).report();
        assert!(said("CUDA error: out of memory").contains("out of device memory"));
        assert!(said(CUDA).contains("out of device memory"));
        assert!(said(CPU).contains("out of host memory") && said(CPU).contains("largest is pages"));
        assert!(said("out of memory: the machine gives no 4096 bytes of host memory").contains("out of host memory"));
    }

    #[test]
    fn without_a_gpu_all_parts_are_host_memory_and_the_request_counts_as_scratch() {
        let pages = (Part::Kind(Purpose::Pages), MemorySpace::Host, 2);
        let report = shortage(CPU, Phase::Capture, 0, held(&[pages], None)).report();
        assert!(
            report.starts_with("rank 3, capture, layer 0: out of host memory: 512.00 MiB were requested"),
            "{report}"
        );
        assert!(report.contains("largest is pages: set more ranks to a prompt"), "{report}");
        let report = shortage(CPU, Phase::Capture, 0, Holdings::default()).report();
        assert!(report.contains("largest is scratch: set memory.micro_block smaller"), "{report}");
    }
}
