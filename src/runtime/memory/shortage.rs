//! Memory has run out: what was asked, what was free, what is held, and which setting to change.
//!
//! libtorch's allocators say in words what they could not give; the ledger says who has the rest. The setting is that of
//! the largest part which a setting can move.

use std::fmt::Write as _;

use super::cgroup::job_memory;
use super::ledger::{Holding, Holdings, MemorySpace, Part, Purpose};
use crate::runtime::failure::{Phase, Site};
use crate::runtime::liveness::Place;
use crate::runtime::units::Bytes;

/// Memory that this machine can still give to this process's job, if it says so.
#[must_use]
pub fn available_memory() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    let machine = Bytes(kib * 1024);
    Some(job_memory().map_or(machine, |job| job.min(machine)))
}

/// What an allocator's words say.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Asked {
    bytes: Option<Bytes>,
    free: Option<Bytes>,
    capacity: Option<Bytes>,
}

impl Asked {
    /// Of "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free" (CUDA), "you
    /// tried to allocate 4096 bytes" (CPU), or "gives no 4096 bytes of host memory" (pinned).
    fn of(words: &str) -> Asked {
        let behind = |mark: &str| words.split_once(mark).and_then(|(_, rest)| amount(rest));
        Asked {
            bytes: behind("ried to allocate ").or_else(|| behind("gives no ")),
            free: behind(" of which ").filter(|_| words.contains(" is free")),
            capacity: behind("total capacity of "),
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
    // Rounded up, so that it is written again as it was read.
    u64::try_from((all << shift).div_ceil(100)).ok().map(Bytes)
}

/// One rank that got no memory.
#[derive(Clone, Debug)]
pub struct Shortage {
    site: Site,
    in_top_layer: bool,
    asked: Asked,
    /// Whether the device's memory is another than the host's.
    apart: bool,
    /// Which memory has run out.
    space: MemorySpace,
    held: Holdings,
}

impl Shortage {
    /// The allocator said `words` when the rank was at `place` and held `held`.
    #[must_use]
    pub fn of(words: &str, place: &Place, held: Holdings) -> Shortage {
        let mut asked = Asked::of(words);
        let of_host = ["can't allocate memory", "host memory"].iter().any(|told| words.contains(told));
        let apart = held.reserved.is_some() || words.contains("CUDA");
        let space = if of_host || !apart { MemorySpace::Host } else { MemorySpace::Device };
        if space == MemorySpace::Host {
            asked.free = asked.free.or_else(available_memory);
        }
        Shortage { site: place.site(), in_top_layer: place.in_top_layer(), asked, apart, space, held }
    }

    /// The largest part in the memory that has run out. What was being asked for is scratch, as far as anybody knows.
    fn largest(&self) -> Holding {
        let asked = self.asked.bytes.unwrap_or_default();
        let space = if self.apart { self.space } else { MemorySpace::Device };
        let scratch = Holding { part: Part::Scratch, space, bytes: asked };
        let here = |holding: &&Holding| !self.apart || holding.space == self.space;
        let parts = self.held.parts.iter().filter(here).copied();
        let parts = parts.map(|holding| match holding.part {
            Part::Scratch if holding.space == space => Holding { bytes: holding.bytes + asked, ..holding },
            _ => holding,
        });
        parts.chain([scratch]).max_by_key(|holding| holding.bytes).unwrap_or(scratch)
    }

    /// The setting that makes a part smaller, or moves it.
    fn setting(&self, holding: &Holding) -> &'static str {
        const MODEL: &str = "model.dtype = \"bfloat16\", or a smaller model";
        const RANKS: &str = "more ranks to a prompt (parallel.cp_size)";
        let movable = self.apart && holding.space == MemorySpace::Device;
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

    /// What the device's allocator keeps and no tensor holds, if that would have been enough, or is much.
    fn idle(&self) -> Option<Bytes> {
        let reserved = self.held.reserved?;
        let idle = Bytes(reserved.0.saturating_sub(self.held.live.0));
        let enough = self.asked.bytes.is_some_and(|asked| idle >= asked);
        (self.space == MemorySpace::Device && (enough || idle.0 > reserved.0 / 8)).then_some(idle)
    }

    /// Several lines; the first says all that one line can.
    #[must_use]
    pub fn report(&self) -> String {
        let Asked { bytes, free, capacity } = self.asked;
        let memory = if self.apart { self.space.name() } else { "host" };
        let asked = bytes.map_or_else(|| "more was asked for than there is".into(), |b| format!("{b} were asked for"));
        let free = match (free, capacity) {
            (Some(free), Some(capacity)) => format!(", {free} of {capacity} were free"),
            (Some(free), None) => format!(", the system says that {free} were free"),
            _ => String::new(),
        };
        let largest = self.largest();
        let mut text = format!(
            "{}: out of {memory} memory: {asked}{free}; largest is {}: set {}",
            self.site,
            largest.part.name(),
            self.setting(&largest)
        );
        if let Some(idle) = self.idle() {
            let _ = write!(
                text,
                "; {idle} are reserved and hold nothing: set the variable PYTORCH_ALLOC_CONF=expandable_segments:True"
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
    use crate::runtime::liveness::Tracker;
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

    fn at(phase: Phase, layer: usize) -> Tracker {
        let tracker = Tracker::default();
        tracker.set_rank(Rank(3));
        tracker.set_layers(8);
        tracker.enter(phase);
        tracker.layer(LayerIndex(layer)).expect("nothing is asked");
        tracker
    }

    /// The report of a GPU on which `part` is by far the largest.
    fn of(part: Part, space: MemorySpace, phase: Phase, layer: usize) -> String {
        let words = if space == MemorySpace::Device { CUDA } else { "out of memory: pinning host memory" };
        Shortage::of(words, at(phase, layer).place(), held(&[(part, space, 90)], Some(90))).report()
    }

    #[test]
    fn a_gpu_is_known_by_its_allocators_words_too() {
        let held = held(&[(Part::Kind(Purpose::Pages), MemorySpace::Device, 90)], None);
        let report = Shortage::of(CUDA, at(Phase::Score, 2).place(), held).report();
        assert!(report.contains("out of device memory") && report.contains("memory.cpu_offload_pages"), "{report}");
    }

    #[test]
    fn the_allocators_words_are_read() {
        let asked = Asked::of(CUDA);
        assert_eq!(asked.bytes, Some(Bytes(2 * GIB)));
        assert_eq!(asked.free, Some(Bytes(GIB + GIB / 4)));
        assert_eq!(asked.capacity, Some(Bytes((13980 * GIB).div_ceil(100))));
        assert_eq!(Asked::of(CPU), Asked { bytes: Some(Bytes(GIB / 2)), ..Asked::default() });
        assert_eq!(Asked::of("the machine gives no 4096 bytes of host memory").bytes, Some(Bytes(4096)));
        assert_eq!(Asked::of("CUDA out of memory."), Asked::default());
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
    fn the_report_names_rank_phase_layer_the_bytes_and_who_holds_the_rest() {
        let (weights, pages) = (Part::Kind(Purpose::Weights), Part::Kind(Purpose::Pages));
        let parts = [
            (pages, MemorySpace::Host, 300),
            (Part::Scratch, MemorySpace::Device, 100),
            (weights, MemorySpace::Device, 15),
        ];
        let report = Shortage::of(CUDA, at(Phase::Sweep, 4).place(), held(&parts, Some(138))).report();
        assert_eq!(
            report,
            "rank 3, sweep, layer 4: out of device memory: 2.00 GiB were asked for, 1.25 GiB of 139.80 GiB were free; \
             largest is scratch: set memory.micro_block smaller; 23.00 GiB are reserved and hold nothing: set the \
             variable PYTORCH_ALLOC_CONF=expandable_segments:True\n\
             \x20   300.00 GiB  pages        host\n\
             \x20   100.00 GiB  scratch      device\n\
             \x20    15.00 GiB  weights      device\n\
             \x20   138.00 GiB  reserved on the device, 115.00 GiB of it alive"
        );
    }

    #[test]
    fn the_memory_that_has_run_out_is_the_gpus_unless_the_words_name_the_hosts() {
        let pages = (Part::Kind(Purpose::Pages), MemorySpace::Host, 90);
        let said = |words| Shortage::of(words, at(Phase::Replay, 0).place(), held(&[pages], Some(8))).report();
        assert!(said("CUDA error: out of memory").contains("out of device memory"));
        assert!(said(CUDA).contains("out of device memory"));
        assert!(said(CPU).contains("out of host memory") && said(CPU).contains("largest is pages"));
        assert!(said("out of memory: the machine gives no 4096 bytes of host memory").contains("out of host memory"));
    }

    #[test]
    fn without_a_gpu_all_that_is_held_is_the_machines_and_what_was_asked_counts_as_scratch() {
        let pages = (Part::Kind(Purpose::Pages), MemorySpace::Host, 2);
        let report = Shortage::of(CPU, at(Phase::Capture, 0).place(), held(&[pages], None)).report();
        assert!(
            report.starts_with("rank 3, capture, layer 0: out of host memory: 512.00 MiB were asked for"),
            "{report}"
        );
        assert!(report.contains("largest is pages: set more ranks to a prompt"), "{report}");
        let report = Shortage::of(CPU, at(Phase::Capture, 0).place(), Holdings::default()).report();
        assert!(report.contains("largest is scratch: set memory.micro_block smaller"), "{report}");
    }
}
