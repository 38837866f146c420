//! Where each rank is, for failures and panics to name; and the ledger of bytes by kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use crate::failure::{Phase, Site};
use crate::units::{Bytes, LayerIndex, Rank};

/// Where this rank is; clones share the same entry, so a panic hook can read what the trainer writes.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Entries>);

#[derive(Debug)]
struct Entries {
    rank: AtomicUsize,
    phase: AtomicUsize,
    layer: AtomicI64,
}

impl Default for Entries {
    fn default() -> Self {
        Entries { rank: AtomicUsize::new(0), phase: AtomicUsize::new(0), layer: AtomicI64::new(-1) }
    }
}

impl Board {
    /// Names the rank; done once, when the world is known.
    pub fn set_rank(&self, rank: Rank) {
        self.0.rank.store(rank.0, Ordering::Relaxed);
    }

    /// Enters a phase; no layer is current any more.
    pub fn enter(&self, phase: Phase) {
        self.0.layer.store(-1, Ordering::Relaxed);
        let index = Phase::ALL.iter().position(|&known| known == phase).unwrap_or(0);
        self.0.phase.store(index, Ordering::Relaxed);
        tracing::debug!("{phase}");
    }

    /// Enters a layer of the current phase.
    pub fn layer(&self, layer: LayerIndex) {
        self.0.layer.store(i64::try_from(layer.0).unwrap_or(-1), Ordering::Relaxed);
        tracing::debug!("{}, layer {layer}", self.site().phase);
    }

    /// Where this rank is now.
    #[must_use]
    pub fn site(&self) -> Site {
        let phase = self.0.phase.load(Ordering::Relaxed);
        Site {
            rank: Rank(self.0.rank.load(Ordering::Relaxed)),
            phase: Phase::ALL.get(phase).copied().unwrap_or(Phase::Start),
            layer: usize::try_from(self.0.layer.load(Ordering::Relaxed)).ok().map(LayerIndex),
        }
    }
}

/// What the ledger tells apart.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Page runs of other ranks that are on their way round the ring, and the sums of gradients that travel with them.
    Foreign,
    /// Page slabs in host memory.
    Pages,
    /// Hidden states of answers that wait for their next layer.
    Hidden,
    /// What was saved of the tail for its way back: block inputs, and attention outputs.
    Checkpoints,
    /// Staging buffers of a layer's pages.
    Stage,
}

const PURPOSES: usize = 5;

/// Bytes by purpose, now and at the most; clones share the same counts.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<[(AtomicU64, AtomicU64); PURPOSES]>);

impl Ledger {
    /// Counts bytes in; they are counted out when the entry is dropped.
    #[must_use]
    pub fn hold(&self, purpose: Purpose, bytes: Bytes) -> Held {
        let (now, most) = &self.0[purpose as usize];
        let held = now.fetch_add(bytes.0, Ordering::Relaxed) + bytes.0;
        most.fetch_max(held, Ordering::Relaxed);
        Held { ledger: self.clone(), purpose, bytes }
    }

    /// Bytes held now.
    #[must_use]
    pub fn now(&self, purpose: Purpose) -> Bytes {
        Bytes(self.0[purpose as usize].0.load(Ordering::Relaxed))
    }

    /// The most that was held since the last [`Ledger::forget_peaks`].
    #[must_use]
    pub fn peak(&self, purpose: Purpose) -> Bytes {
        Bytes(self.0[purpose as usize].1.load(Ordering::Relaxed))
    }

    /// Starts peaks anew from what is held now.
    pub fn forget_peaks(&self) {
        for (now, most) in self.0.iter() {
            most.store(now.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// Bytes counted in a ledger for as long as this lives.
#[derive(Debug)]
pub struct Held {
    ledger: Ledger,
    purpose: Purpose,
    bytes: Bytes,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.0[self.purpose as usize].0.fetch_sub(self.bytes.0, Ordering::Relaxed);
    }
}

/// Seconds spent, by name, in the order of first use.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    spent: Vec<(&'static str, f64)>,
}

impl Clock {
    /// Adds the time that `work` takes to `name`.
    pub fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.add(name, start.elapsed().as_secs_f64());
        result
    }

    /// Adds seconds to `name`.
    pub fn add(&mut self, name: &'static str, seconds: f64) {
        match self.spent.iter_mut().find(|(known, _)| *known == name) {
            Some((_, total)) => *total += seconds,
            None => self.spent.push((name, seconds)),
        }
    }

    /// Seconds by name.
    #[must_use]
    pub fn seconds(&self) -> &[(&'static str, f64)] {
        &self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_counts_out_what_is_dropped_and_remembers_the_peak() {
        let ledger = Ledger::default();
        let first = ledger.hold(Purpose::Foreign, Bytes(3));
        let second = ledger.hold(Purpose::Foreign, Bytes(4));
        drop(first);
        assert_eq!((ledger.now(Purpose::Foreign), ledger.peak(Purpose::Foreign)), (Bytes(4), Bytes(7)));
        drop(second);
        ledger.forget_peaks();
        assert_eq!(ledger.peak(Purpose::Foreign), Bytes(0));
    }

    #[test]
    fn a_site_names_rank_phase_and_layer() {
        let board = Board::default();
        board.set_rank(Rank(5));
        board.enter(Phase::Replay);
        board.layer(LayerIndex(17));
        assert_eq!(board.site().to_string(), "rank 5, replay, layer 17");
        board.enter(Phase::Finalize);
        assert_eq!(board.site().to_string(), "rank 5, finalize");
    }
}
