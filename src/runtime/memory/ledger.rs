//! The ledger: bytes by purpose and memory space, now and at the peak, next to the allocator's numbers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::runtime::units::Bytes;

/// The memory in which bytes are counted. Without a GPU both spaces are the machine's memory, and only the count
/// separates them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemorySpace {
    /// Graphs, scratch, stages, weights: bytes on the device.
    Device = 0,
    /// Pages and saved hidden states: bytes that wait in host memory.
    Host = 1,
}

impl MemorySpace {
    /// Both memory spaces.
    pub const ALL: [MemorySpace; 2] = [MemorySpace::Device, MemorySpace::Host];

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MemorySpace::Device => "device",
            MemorySpace::Host => "host",
        }
    }
}

/// What bytes are used for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// The checkpoint's tensors.
    Weights,
    /// Adapters' master values, those of the reference policy, and gradients.
    Adapters,
    /// The optimizer's moments.
    Optimizer,
    /// Hidden states: prompt rows on the device, answers that wait for their next layer.
    Hidden,
    /// Slabs of pages of this rank.
    Pages,
    /// State of answers that are being sampled.
    Answers,
    /// Device memory of one layer: its pages while they are made, and copies of pages and hidden states from host
    /// memory.
    Stage,
    /// Block inputs and attention outputs of the tail, saved for backward.
    Checkpoints,
    /// What was chosen for rows and is used again: index sets, and experts.
    Choices,
    /// Page runs of other ranks that pass round the ring, and the gradient sums passed with them.
    Foreign,
}

impl Purpose {
    /// In the order of declaration, as `as usize` counts.
    pub const ALL: [Purpose; 10] = [
        Purpose::Weights,
        Purpose::Adapters,
        Purpose::Optimizer,
        Purpose::Hidden,
        Purpose::Pages,
        Purpose::Answers,
        Purpose::Stage,
        Purpose::Checkpoints,
        Purpose::Choices,
        Purpose::Foreign,
    ];

    /// The name in receipts and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Adapters => "adapters",
            Purpose::Optimizer => "optimizer",
            Purpose::Hidden => "hidden",
            Purpose::Answers => "answers",
            Purpose::Pages => "pages",
            Purpose::Stage => "stage",
            Purpose::Checkpoints => "checkpoints",
            Purpose::Choices => "choices",
            Purpose::Foreign => "foreign",
        }
    }
}

/// The numbers of an allocator for one memory space.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Measured {
    /// Bytes alive now.
    pub live: Bytes,
    /// Maximum of live bytes since peaks were reset.
    pub peak: Bytes,
    /// Bytes taken from the system; known for a GPU, which has its own memory.
    pub reserved: Option<Bytes>,
}

/// Reads the allocator's numbers. A function, because the ledger is below the tensor library.
pub type Meter = fn(MemorySpace) -> Measured;

#[derive(Debug, Default)]
struct Count {
    now: AtomicU64,
    most: AtomicU64,
}

impl Count {
    fn add(&self, bytes: Bytes) {
        let held = self.now.fetch_add(bytes.0, Ordering::Relaxed) + bytes.0;
        self.most.fetch_max(held, Ordering::Relaxed);
    }

    fn take(&self, bytes: Bytes) {
        self.now.fetch_sub(bytes.0, Ordering::Relaxed);
    }

    fn now(&self) -> Bytes {
        Bytes(self.now.load(Ordering::Relaxed))
    }

    fn most(&self) -> Bytes {
        Bytes(self.most.load(Ordering::Relaxed))
    }

    fn forget(&self) {
        self.most.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Counts {
    kinds: [[Count; MemorySpace::ALL.len()]; Purpose::ALL.len()],
    /// All kinds together: their peaks need not come at one moment.
    all: [Count; MemorySpace::ALL.len()],
    meter: OnceLock<Meter>,
}

/// Bytes by purpose and memory space, now and at the peak; clones share the same counts, also across threads.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Counts>);

impl Ledger {
    /// Adds bytes to the count, until the entry is dropped.
    #[must_use]
    pub fn hold(&self, purpose: Purpose, space: MemorySpace, bytes: Bytes) -> Held {
        self.of(purpose, space).add(bytes);
        self.0.all[space as usize].add(bytes);
        Held { ledger: self.clone(), purpose, space, bytes }
    }

    fn of(&self, purpose: Purpose, space: MemorySpace) -> &Count {
        &self.0.kinds[purpose as usize][space as usize]
    }

    /// Sets the meter; only the first one is kept.
    pub fn measure_with(&self, meter: Meter) {
        // Another run in this process has the same allocator.
        let _ = self.0.meter.set(meter);
    }

    /// Bytes held now, in both memory spaces.
    #[must_use]
    pub fn now(&self, purpose: Purpose) -> Bytes {
        MemorySpace::ALL.into_iter().map(|space| self.of(purpose, space).now()).sum()
    }

    /// Sum of the peaks of both memory spaces since [`Ledger::forget_peaks`].
    #[must_use]
    pub fn peak(&self, purpose: Purpose) -> Bytes {
        MemorySpace::ALL.into_iter().map(|space| self.peak_in(purpose, space)).sum()
    }

    /// Maximum in one memory space since [`Ledger::forget_peaks`].
    #[must_use]
    pub fn peak_in(&self, purpose: Purpose, space: MemorySpace) -> Bytes {
        self.of(purpose, space).most()
    }

    /// Maximum of the sum over all purposes in one memory space since [`Ledger::forget_peaks`].
    #[must_use]
    pub fn peak_of_all(&self, space: MemorySpace) -> Bytes {
        self.0.all[space as usize].most()
    }

    /// Resets peaks to the bytes that are held now.
    pub fn forget_peaks(&self) {
        self.0.kinds.iter().flatten().chain(&self.0.all).for_each(Count::forget);
    }

    /// The bytes that are held now.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        self.listed(Count::now, |measured| measured.live)
    }

    /// The peaks since [`Ledger::forget_peaks`]: what a failed phase had taken, for a report after its memory has been
    /// freed.
    #[must_use]
    pub fn holdings_at_most(&self) -> Holdings {
        self.listed(Count::most, |measured| measured.peak)
    }

    fn listed(&self, of: fn(&Count) -> Bytes, alive: fn(&Measured) -> Bytes) -> Holdings {
        let mut parts = Vec::new();
        for space in MemorySpace::ALL {
            for purpose in Purpose::ALL {
                parts.push(Holding { part: Part::Kind(purpose), space, bytes: of(self.of(purpose, space)) });
            }
            let live = self.0.meter.get().map_or(Bytes(0), |meter| alive(&meter(space)));
            let scratch = Bytes(live.0.saturating_sub(of(&self.0.all[space as usize]).0));
            parts.push(Holding { part: Part::Scratch, space, bytes: scratch });
        }
        parts.retain(|holding| holding.bytes > Bytes(0));
        parts.sort_by_key(|holding| std::cmp::Reverse(holding.bytes));
        let device = self.0.meter.get().map(|meter| meter(MemorySpace::Device)).unwrap_or_default();
        Holdings { parts, live: alive(&device), reserved: device.reserved }
    }
}

/// A purpose of the ledger, or the bytes that the allocator counts beyond the ledger.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Part {
    /// Bytes in the ledger.
    Kind(Purpose),
    /// Graphs and intermediates: alive and not in the ledger.
    Scratch,
}

impl Part {
    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Part::Kind(purpose) => purpose.name(),
            Part::Scratch => "scratch",
        }
    }
}

/// Bytes of one part in one memory space.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the fields' names say everything")]
pub struct Holding {
    pub part: Part,
    pub space: MemorySpace,
    pub bytes: Bytes,
}

/// All held bytes, largest part first.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Holdings {
    /// Parts that are not empty.
    pub parts: Vec<Holding>,
    /// Bytes alive on the device.
    pub live: Bytes,
    /// Bytes that the device's allocator has reserved; `None` if the device is the CPU.
    pub reserved: Option<Bytes>,
}

/// Bytes counted in a ledger as long as this exists.
#[derive(Debug)]
pub struct Held {
    ledger: Ledger,
    purpose: Purpose,
    space: MemorySpace,
    bytes: Bytes,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.of(self.purpose, self.space).take(self.bytes);
        self.ledger.0.all[self.space as usize].take(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_subtracts_what_is_dropped_and_keeps_the_peak() {
        let ledger = Ledger::default();
        let first = ledger.hold(Purpose::Foreign, MemorySpace::Device, Bytes(3));
        let second = ledger.hold(Purpose::Foreign, MemorySpace::Device, Bytes(4));
        drop(first);
        assert_eq!((ledger.now(Purpose::Foreign), ledger.peak(Purpose::Foreign)), (Bytes(4), Bytes(7)));
        drop(second);
        ledger.forget_peaks();
        assert_eq!(ledger.peak(Purpose::Foreign), Bytes(0));
    }

    #[test]
    fn memory_spaces_are_counted_separately_and_the_peak_of_all_is_not_the_sum_of_peaks() {
        let ledger = Ledger::default();
        drop(ledger.hold(Purpose::Stage, MemorySpace::Device, Bytes(10)));
        let pages = ledger.hold(Purpose::Pages, MemorySpace::Device, Bytes(7));
        let waiting = ledger.hold(Purpose::Pages, MemorySpace::Host, Bytes(5));
        assert_eq!(ledger.now(Purpose::Pages), Bytes(12));
        assert_eq!(ledger.peak_in(Purpose::Pages, MemorySpace::Host), Bytes(5));
        assert_eq!(
            (ledger.peak_of_all(MemorySpace::Device), ledger.peak_of_all(MemorySpace::Host)),
            (Bytes(10), Bytes(5))
        );
        drop((pages, waiting));
        assert_eq!(ledger.holdings(), Holdings::default());
    }

    #[test]
    fn scratch_is_what_is_alive_beyond_the_ledger() {
        let ledger = Ledger::default();
        ledger.measure_with(|space| match space {
            MemorySpace::Device => Measured { live: Bytes(100), peak: Bytes(300), reserved: Some(Bytes(400)) },
            MemorySpace::Host => Measured { live: Bytes(20), peak: Bytes(20), reserved: None },
        });
        let _weights = ledger.hold(Purpose::Weights, MemorySpace::Device, Bytes(30));
        let _pages = ledger.hold(Purpose::Pages, MemorySpace::Host, Bytes(20));
        let of = |part, space, bytes| Holding { part, space, bytes: Bytes(bytes) };
        let (weights, pages) = (Part::Kind(Purpose::Weights), Part::Kind(Purpose::Pages));
        let now = ledger.holdings();
        assert_eq!(
            now.parts,
            [
                of(Part::Scratch, MemorySpace::Device, 70),
                of(weights, MemorySpace::Device, 30),
                of(pages, MemorySpace::Host, 20)
            ]
        );
        assert_eq!((now.live, now.reserved), (Bytes(100), Some(Bytes(400))));
        assert_eq!(ledger.holdings_at_most().parts[0], of(Part::Scratch, MemorySpace::Device, 270));
    }
}
