//! Page state in host memory, and its copies to the device and back.
//!
//! A layer's state of a rank's pages is stored in slabs: one independent allocation for each plane (keys, values, …) of
//! each run of pages, with exactly `pages × page_size` rows, never a view of a larger buffer. What stands at a border between
//! positions instead (`LayerState`) goes the same way. A phase stages one layer
//! at a time. When it drops the stage, the staging buffers are overwritten with NaN on the CPU, so that a tensor that
//! outlives its stage is noticed at once instead of having another layer's values.
//!
//! On a GPU, copies run concurrently with the computation:
//!
//! ```text
//!   computation   | layer l            | layer l+1          | layer l+2
//!   copies out      l−1's pages ▶ host   l's pages ▶ host     l+1's …        (capture)
//!   copies in       l+1's pages ▶ GPU    l+2's …                             (later phases; the sweep goes down)
//! ```

mod adapter_version;
mod choices;
mod hidden;
mod transit;

use std::cell::RefCell;

use serde::Serialize;
use tch::{Device, Kind, Tensor};

pub use adapter_version::AdapterVersion;
pub use choices::{Choice, ChoicePool, SpanChoices};
pub use hidden::{HiddenPool, Slot, StagedHidden};

use transit::{Arrival, Outbox};

use crate::prompt::layout::{PromptLayout, Run};
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::{Bytes, LayerIndex, Pages, Position, Rank, Tokens, as_dim, from_dim};
use crate::tensor::boundary::storage_bytes;
use crate::tensor::{self, element_bytes};

/// Errors of page state.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The state was captured under another adapter version.
    #[error("page state of {held} was requested as {wanted}: capture the prompt again after an update")]
    #[expect(missing_docs, reason = "the message says it")]
    Stale { held: AdapterVersion, wanted: AdapterVersion },
    /// The answers' states were left by a pass under another adapter version.
    #[error("the answers' states of {held} were requested as {wanted}: run the answers again after an update")]
    #[expect(missing_docs, reason = "the message says it")]
    StaleAnswers { held: AdapterVersion, wanted: AdapterVersion },
    /// A slab is larger or smaller than its pages.
    #[error("layer {layer}: page storage is {stored}, {pages} pages are {expected}")]
    #[expect(missing_docs, reason = "the message says it")]
    Storage { layer: LayerIndex, stored: Bytes, pages: Pages, expected: Bytes },
    /// A copy between host and device failed.
    #[error(transparent)]
    Torch(#[from] tensor::Error),
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Torch(error) => error.exit(),
            _ => Exit::Bug,
        }
    }
}

/// Where pages wait while another layer computes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// In host memory; a layer's pages are copied to the device while it computes.
    Host,
    /// On the device, where they were made.
    Device,
}

impl Residency {
    /// Where what waits there is counted.
    #[must_use]
    pub fn space(self) -> MemorySpace {
        match self {
            Residency::Host => MemorySpace::Host,
            Residency::Device => MemorySpace::Device,
        }
    }
}

/// One run of pages of one layer: a tensor for each plane of the mixer's state, `pages × page_size` rows long.
#[derive(Debug)]
pub struct Slab {
    /// The pages of the slab.
    pub run: Run,
    /// State planes, each with rows first.
    pub planes: Vec<Tensor>,
}

impl Slab {
    /// Empty planes for `run`, one for each shape of a row.
    #[must_use]
    pub fn zeros(run: Run, page_size: Tokens, rows: &[PlaneRow], device: tch::Device) -> Self {
        let rows_held = crate::runtime::units::as_dim(run.pages.0 * page_size.0);
        let planes = rows
            .iter()
            .map(|row| {
                let shape: Vec<i64> = std::iter::once(rows_held).chain(row.shape.iter().copied()).collect();
                Tensor::zeros(shape, (row.kind, device))
            })
            .collect();
        Slab { run, planes }
    }

    /// The planes' filled rows.
    #[must_use]
    pub fn filled(&self) -> Vec<Tensor> {
        self.planes.iter().map(|plane| plane.narrow(0, 0, self.run.rows().dim())).collect()
    }
}

/// Shape and dtype of one row of one plane.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the fields' names say everything")]
pub struct PlaneRow {
    pub shape: Vec<i64>,
    pub kind: Kind,
}

impl PlaneRow {
    /// Bytes of one row.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.shape.iter().map(|&dim| from_dim(dim)).product::<u64>() * element_bytes(self.kind))
    }
}

/// What a layer's state consists of: rows that positions leave on pages, and what stands at a border between positions.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StateRows {
    /// One plane for each kind of row.
    pub page: Vec<PlaneRow>,
    /// One plane for each part of a border.
    pub border: Vec<PlaneRow>,
}

impl StateRows {
    /// Bytes of what stands at both borders of a prompt.
    #[must_use]
    pub fn border_bytes(&self) -> Bytes {
        Bytes(BORDERS * self.border.iter().map(PlaneRow::bytes).sum::<Bytes>().0)
    }
}

/// Borders of a prompt at which state stands: before its tail, and its end.
pub const BORDERS: u64 = 2;

/// One layer's state of one prompt on one rank.
#[derive(Debug, Default)]
pub struct LayerState {
    /// The rank's runs of pages, in position order.
    pub slabs: Vec<Slab>,
    /// State at both borders, [2, …] each, the same on every rank; no planes where positions leave rows.
    pub borders: Vec<Tensor>,
}

impl LayerState {
    /// Zeros for the pages of `rank` and the borders of a prompt.
    #[must_use]
    pub fn zeros(rows: &StateRows, layout: &PromptLayout, rank: Rank, device: Device) -> LayerState {
        let slab = |run| Slab::zeros(run, layout.page_size(), &rows.page, device);
        let border = |plane: &PlaneRow| {
            let shape: Vec<i64> = std::iter::once(as_dim(BORDERS)).chain(plane.shape.iter().copied()).collect();
            Tensor::zeros(shape, (plane.kind, device))
        };
        LayerState { slabs: layout.chunks_of(rank).map(slab).into(), borders: rows.border.iter().map(border).collect() }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.slabs.iter().flat_map(|slab| &slab.planes).chain(&self.borders)
    }

    /// Bytes of its storage.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.tensors().map(storage_bytes).sum()
    }

    /// The same state with each tensor changed.
    fn map<E>(&self, mut change: impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<LayerState, E> {
        let mut all = |planes: &[Tensor]| planes.iter().map(&mut change).collect::<Result<Vec<_>, E>>();
        let slab = |slab: &Slab| Ok(Slab { run: slab.run, planes: all(&slab.planes)? });
        let slabs = self.slabs.iter().map(slab).collect::<Result<_, E>>()?;
        Ok(LayerState { slabs, borders: all(&self.borders)? })
    }

    fn poison(&self) {
        self.tensors().for_each(poison);
    }
}

/// The captured state of one prompt on one rank.
#[derive(Debug)]
pub struct PagePool {
    // First, because fields are dropped in order: copies must end before their memory is freed.
    outbox: RefCell<Outbox>,
    /// The prefetched layer.
    arriving: RefCell<Option<Arriving>>,
    layout: PromptLayout,
    rank: Rank,
    residency: Residency,
    device: Device,
    stamp: AdapterVersion,
    /// A later version that may use the pages too.
    lent: Option<AdapterVersion>,
    layers: Vec<LayerState>,
    ledger: Ledger,
    held: Vec<Held>,
}

/// One layer's pages while they are copied to the device.
#[derive(Debug)]
struct Arriving {
    layer: LayerIndex,
    // Before the state, because fields are dropped in order: copies must end before their targets are freed.
    arrivals: Vec<Arrival>,
    state: LayerState,
    held: Held,
}

impl PagePool {
    /// An empty pool; layers are pushed from the first one up.
    #[must_use]
    pub fn new(layout: PromptLayout, rank: Rank, residency: Residency, stamp: AdapterVersion, ledger: Ledger) -> Self {
        PagePool {
            layout,
            rank,
            residency,
            device: Device::Cpu,
            stamp,
            lent: None,
            layers: Vec::new(),
            ledger,
            held: Vec::new(),
            outbox: RefCell::default(),
            arriving: RefCell::default(),
        }
    }

    /// Takes the next layer's state, which was made on the device. Its copy to host memory runs during the next layer's
    /// computation.
    ///
    /// # Errors
    /// When no more host memory can be pinned.
    pub fn push(&mut self, state: LayerState) -> Result<(), Error> {
        self.device = state.tensors().map(Tensor::device).next().unwrap_or(Device::Cpu);
        let kept = match self.residency {
            Residency::Device => state,
            Residency::Host => self.to_host(&state)?,
        };
        self.held.push(self.ledger.hold(Purpose::Pages, self.residency.space(), kept.bytes()));
        self.layers.push(kept);
        Ok(())
    }

    /// Copies state to host memory of exact size.
    fn to_host(&self, state: &LayerState) -> Result<LayerState, Error> {
        let mut outbox = self.outbox.borrow_mut();
        outbox.settle()?;
        let kept = state.map(|plane| outbox.send(plane, None))?;
        state.poison();
        Ok(kept)
    }

    /// Makes the computation wait until the last layer's pages have left the device; then their memory there is free.
    ///
    /// # Errors
    /// When a copy has failed.
    pub fn settle(&self) -> Result<(), tensor::Error> {
        self.outbox.borrow_mut().settle()
    }

    /// One layer's pages on the device, until the stage is dropped. On a GPU the layer `next` is prefetched, so that it
    /// arrives while this one computes.
    ///
    /// # Errors
    /// When the pages were captured under other adapters than `wanted`.
    pub fn stage(&self, layer: LayerIndex, next: Option<LayerIndex>, wanted: &AdapterVersion) -> Result<Staged, Error> {
        if *wanted != self.stamp && self.lent.as_ref() != Some(wanted) {
            return Err(Error::Stale { held: self.stamp.clone(), wanted: wanted.clone() });
        }
        if self.residency == Residency::Device {
            let state = self.layers[layer.0].map(|plane| Ok::<_, Error>(plane.shallow_clone()))?;
            return Ok(Staged { state, poison: false, _held: None });
        }
        self.outbox.borrow_mut().settle()?;
        let here = match self.arriving.take() {
            Some(arriving) if arriving.layer == layer => arriving,
            // Another layer was prefetched: its memory is freed before this one's is allocated.
            other => {
                drop(other);
                self.fetch(layer)?
            }
        };
        let ahead = next.filter(|_| transit::is_concurrent(self.device));
        for arrival in &here.arrivals {
            arrival.wait()?;
        }
        let arriving = ahead.map(|next| self.fetch(next)).transpose()?;
        self.arriving.replace(arriving);
        Ok(Staged { state: here.state, poison: true, _held: Some(here.held) })
    }

    /// Lets a later version of the same policy use these pages, which stay as they were captured.
    pub fn lend(&mut self, to: &AdapterVersion) {
        self.lent = (to.policy == self.stamp.policy).then(|| to.clone());
    }

    /// Writes state of consecutive positions of this rank from `start` on, over what was captured there. `planes` have these
    /// rows first. The layer must not be staged.
    ///
    /// # Panics
    /// When the positions are not in one of this rank's runs of pages.
    pub fn write(&mut self, layer: LayerIndex, start: Position, planes: &[Tensor]) {
        let rows = planes.first().map_or(0, |plane| plane.size()[0]);
        if rows == 0 {
            return;
        }
        // A copy to the device that has begun would miss the new rows.
        self.arriving.replace(None);
        let holds = |slab: &&Slab| slab.run.start <= start && start < slab.run.stop;
        let slab = self.layers[layer.0].slabs.iter().find(holds).expect("a rank's rows lie in its own runs");
        for (plane, rows_of) in slab.planes.iter().zip(planes) {
            plane.narrow(0, start.since(slab.run.start).dim(), rows).copy_(rows_of);
        }
    }

    /// Starts to copy a layer's pages to the device.
    fn fetch(&self, layer: LayerIndex) -> Result<Arriving, Error> {
        let mut arrivals = Vec::new();
        let state = self.layers[layer.0].map(|plane| {
            let (here, arrival) = transit::fetch(plane, self.device)?;
            arrivals.push(arrival);
            Ok::<_, Error>(here)
        })?;
        let held = self.ledger.hold(Purpose::Stage, MemorySpace::Device, state.bytes());
        Ok(Arriving { layer, arrivals, state, held })
    }

    /// Compares the real storage of each layer with pages × page bytes and the borders' bytes, and returns the sum of all
    /// layers. `rows_of` gives what a layer's state consists of.
    ///
    /// # Errors
    /// When a layer's storage differs from the bytes of its pages and borders.
    pub fn audit(&self, rows_of: impl Fn(LayerIndex) -> StateRows) -> Result<Bytes, Error> {
        let pages = self.layout.pages_of(self.rank);
        let mut total = Bytes(0);
        for (index, state) in self.layers.iter().enumerate() {
            let rows = rows_of(LayerIndex(index));
            let page_bytes = rows.page.iter().map(PlaneRow::bytes).sum::<Bytes>().0;
            let expected = Bytes(pages.0 * page_bytes * self.layout.page_size().0 + rows.border_bytes().0);
            let stored = state.bytes();
            if stored != expected {
                return Err(Error::Storage { layer: LayerIndex(index), stored, pages, expected });
            }
            total += stored;
        }
        Ok(total)
    }

    /// Whether any plane is part of an autograd graph; none may be.
    #[must_use]
    pub fn has_graph(&self) -> bool {
        self.layers.iter().flat_map(LayerState::tensors).any(Tensor::requires_grad)
    }

    /// The adapters that the prompt was captured under.
    #[must_use]
    pub fn stamp(&self) -> &AdapterVersion {
        &self.stamp
    }
}

fn poison(plane: &Tensor) {
    if plane.device() != tch::Device::Cpu || plane.numel() == 0 {
        return;
    }
    if matches!(plane.kind(), tch::Kind::Int | tch::Kind::Int64) {
        // Beyond every position and expert: whoever reads it is refused.
        let _ = plane.detach().fill_(i64::from(i32::MAX));
    } else {
        let _ = plane.detach().fill_(f64::NAN);
    }
}

/// One layer's state on the device. Dropping it overwrites the buffers.
#[derive(Debug)]
pub struct Staged {
    state: LayerState,
    poison: bool,
    _held: Option<Held>,
}

impl Staged {
    /// The rank's runs of pages, in position order.
    #[must_use]
    pub fn slabs(&self) -> &[Slab] {
        &self.state.slabs
    }

    /// State at the prompt's borders, as in [`LayerState`].
    pub fn borders(&self) -> &[Tensor] {
        &self.state.borders
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.poison {
            self.state.poison();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(residency: Residency) -> (PagePool, StateRows) {
        let layout = PromptLayout::new(Tokens(130), Tokens(64), 1, Tokens(1));
        let rows =
            vec![PlaneRow { shape: vec![2, 4], kind: Kind::Float }, PlaneRow { shape: vec![3], kind: Kind::BFloat16 }];
        let stamp = AdapterVersion { policy: "policy", version: 3 };
        let mut pool = PagePool::new(layout.clone(), Rank(0), residency, stamp, Ledger::default());
        for layer in 0..2i64 {
            let slabs = layout.chunks_of(Rank(0)).map(|run| {
                let slab = Slab::zeros(run, Tokens(64), &rows, tch::Device::Cpu);
                slab.planes.iter().for_each(|plane| {
                    let _ = plane.shallow_clone().fill_(layer + 1);
                });
                slab
            });
            let borders = vec![Tensor::full([2, 5], layer + 1, (Kind::Float, tch::Device::Cpu))];
            pool.push(LayerState { slabs: slabs.into(), borders }).unwrap();
        }
        (pool, StateRows { page: rows, border: vec![PlaneRow { shape: vec![5], kind: Kind::Float }] })
    }

    #[test]
    fn page_storage_is_pages_times_bytes_exactly() {
        for residency in [Residency::Host, Residency::Device] {
            let (pool, rows) = pool(residency);
            assert_eq!(pool.audit(|_| rows.clone()).unwrap(), Bytes(2 * 3 * 64 * (2 * 4 * 4 + 3 * 2) + 2 * 2 * 5 * 4));
        }
    }

    #[test]
    fn a_view_of_a_larger_buffer_is_not_a_page() {
        let (mut pool, rows) = pool(Residency::Device);
        let larger = Tensor::zeros([400, 2, 4], (Kind::Float, tch::Device::Cpu));
        pool.layers[1].slabs[0].planes[0] = larger.narrow(0, 0, 128);
        assert!(matches!(pool.audit(|_| rows.clone()), Err(Error::Storage { layer: LayerIndex(1), .. })));
    }

    #[test]
    fn a_tensor_that_outlives_its_stage_turns_to_nan_and_the_pool_does_not() {
        let (pool, _) = pool(Residency::Host);
        let stamp = pool.stamp().clone();
        let staged = pool.stage(LayerIndex(0), None, &stamp).unwrap();
        let outlives = staged.slabs()[0].planes[0].shallow_clone();
        let border = staged.borders()[0].shallow_clone();
        assert!((outlives.sum(Kind::Float).double_value(&[]) - 128.0 * 8.0).abs() < 1e-6);
        drop(staged);
        assert!(outlives.sum(Kind::Float).double_value(&[]).is_nan());
        assert!(border.sum(Kind::Float).double_value(&[]).is_nan());
        let again = pool.stage(LayerIndex(0), None, &stamp).unwrap();
        assert!((again.slabs()[0].planes[0].sum(Kind::Float).double_value(&[]) - 128.0 * 8.0).abs() < 1e-6);
    }

    #[test]
    fn pages_of_another_adapter_version_are_refused() {
        let (pool, _) = pool(Residency::Host);
        let refused = pool.stage(LayerIndex(0), None, &AdapterVersion { policy: "policy", version: 4 });
        assert!(refused.unwrap_err().to_string().contains("policy version 3"));
        assert!(pool.stage(LayerIndex(0), None, &AdapterVersion { policy: "reference", version: 3 }).is_err());
    }

    #[test]
    fn lent_pages_serve_one_later_version_of_the_same_policy_and_new_rows_are_seen() {
        let version = |policy, version| AdapterVersion { policy, version };
        let (mut pool, _) = pool(Residency::Host);
        pool.lend(&version("reference", 4));
        assert!(pool.stage(LayerIndex(0), None, &version("reference", 4)).is_err());
        pool.lend(&version("policy", 4));
        assert!(pool.stage(LayerIndex(0), None, &version("policy", 5)).is_err());
        let rows = [Tensor::full([1, 2, 4], 9, (Kind::Float, tch::Device::Cpu))];
        pool.write(LayerIndex(1), Position(129), &rows);
        let staged = pool.stage(LayerIndex(1), None, &version("policy", 4)).unwrap();
        let sum: f64 = staged.slabs().iter().map(|slab| slab.filled()[0].sum(Kind::Float).double_value(&[])).sum();
        assert!((sum - (129.0 * 8.0 * 2.0 + 8.0 * 9.0)).abs() < 1e-6, "{sum}");
    }
}
