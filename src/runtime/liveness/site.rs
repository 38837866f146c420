//! The site of this rank, shared with other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

use crate::runtime::failure::{Phase, Site};
use crate::runtime::units::{LayerIndex, Rank};

/// Where this rank is. Clones share one value, also across threads: a panic hook and a watchdog read what the training
/// thread writes.
#[derive(Clone, Debug, Default)]
pub struct SharedSite(Arc<Fields>);

#[derive(Debug)]
struct Fields {
    rank: AtomicUsize,
    phase: AtomicUsize,
    /// Negative between layers.
    layer: AtomicI64,
    /// The model's last layer; negative while no model is known.
    top_layer: AtomicI64,
    /// Borders passed so far.
    borders: AtomicU64,
    /// Nested calls in which this rank waits for other ranks.
    waits: AtomicUsize,
    /// Whether messages go from this rank's GPU to others'.
    linked: AtomicBool,
}

impl Default for Fields {
    fn default() -> Self {
        Fields {
            rank: AtomicUsize::new(0),
            phase: AtomicUsize::new(0),
            layer: AtomicI64::new(-1),
            top_layer: AtomicI64::new(-1),
            borders: AtomicU64::new(0),
            waits: AtomicUsize::new(0),
            linked: AtomicBool::new(false),
        }
    }
}

/// The state of a rank at one moment, as its watchdog reads it from another thread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SiteSnapshot {
    /// Where the rank is.
    pub site: Site,
    /// Borders passed so far: while the number stays the same, the rank has not moved.
    pub borders: u64,
    /// Whether it waits for other ranks.
    pub waits: bool,
    /// Whether it may wait for other ranks inside its GPU, which `waits` does not show.
    pub linked: bool,
}

/// The rank waits for other ranks as long as this guard exists.
#[derive(Debug)]
pub struct Waiting(SharedSite);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.waits.fetch_sub(1, Ordering::Relaxed);
    }
}

impl SharedSite {
    /// Where the rank is now.
    #[must_use]
    pub fn site(&self) -> Site {
        let phase = self.0.phase.load(Ordering::Relaxed);
        Site {
            rank: Rank(self.0.rank.load(Ordering::Relaxed)),
            phase: Phase::ALL.get(phase).copied().unwrap_or(Phase::Start),
            layer: usize::try_from(self.0.layer.load(Ordering::Relaxed)).ok().map(LayerIndex),
        }
    }

    /// The state now. Its parts are read one after another; the next snapshot corrects a mixed one.
    #[must_use]
    pub fn snapshot(&self) -> SiteSnapshot {
        let borders = self.0.borders.load(Ordering::Acquire);
        let waits = self.0.waits.load(Ordering::Relaxed) > 0;
        SiteSnapshot { site: self.site(), borders, waits, linked: self.0.linked.load(Ordering::Relaxed) }
    }

    /// From here on messages go from this rank's GPU to others': every wait for the GPU may be a wait for other ranks.
    pub fn set_gpu_linked(&self) {
        self.0.linked.store(true, Ordering::Relaxed);
    }

    /// Marks that the rank enters a call that ends only when other ranks take part.
    #[must_use]
    pub fn begin_wait(&self) -> Waiting {
        self.0.waits.fetch_add(1, Ordering::Relaxed);
        Waiting(self.clone())
    }

    /// Whether the rank is in the last layer, which the head follows.
    #[must_use]
    pub fn in_top_layer(&self) -> bool {
        let layer = self.0.layer.load(Ordering::Relaxed);
        layer >= 0 && layer == self.0.top_layer.load(Ordering::Relaxed)
    }

    pub(super) fn set_rank(&self, rank: Rank) {
        self.0.rank.store(rank.0, Ordering::Relaxed);
    }

    pub(super) fn set_layers(&self, layers: usize) {
        self.0.top_layer.store(i64::try_from(layers).unwrap_or(0) - 1, Ordering::Relaxed);
    }

    pub(super) fn enter_phase(&self, phase: Phase) {
        self.0.layer.store(-1, Ordering::Relaxed);
        self.0.phase.store(phase.index(), Ordering::Relaxed);
        self.count_border();
    }

    pub(super) fn enter_layer(&self, layer: LayerIndex) {
        self.0.layer.store(i64::try_from(layer.0).unwrap_or(-1), Ordering::Relaxed);
        self.count_border();
    }

    /// Called after the site is written, so that a reader of the new count sees the new site.
    pub(super) fn count_border(&self) {
        self.0.borders.fetch_add(1, Ordering::Release);
    }
}
