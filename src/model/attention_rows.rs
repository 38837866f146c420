//! Rows of attention by name: queries, keys and values, the blocks that they form, and what is merged of them.

use std::cell::RefCell;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::mixer::Mixed;
use super::planes::Planes;
use crate::prompt::layout::{Piece, Tile, positions};
use crate::runtime::units::{Position, Tokens, as_dim, from_dim, from_index};
use crate::tensor::attention::Partial;
use crate::tensor::fused::{merge_into, merge_of};
use crate::tensor::{accumulation, fused};
use crate::world::Axis;
use crate::world::exchange::{gather_rows, nothing};

/// Queries of some rows after rotation: the one query plane.
#[derive(Debug)]
pub struct Queries {
    /// [t, h, d]
    pub q_thd: Tensor,
}

/// Keys and values of some rows after rotation, or their gradients: the two state planes.
#[derive(Debug)]
pub struct KeyValue {
    /// [t, g, d]
    pub k_tgd: Tensor,
    /// [t, g, d]
    pub v_tgd: Tensor,
}

impl From<Queries> for Planes {
    fn from(queries: Queries) -> Planes {
        vec![queries.q_thd].into()
    }
}

impl From<&Planes> for Queries {
    fn from(planes: &Planes) -> Queries {
        let [q_thd] = planes.tensors() else { unreachable!("attention has one query plane") };
        Queries { q_thd: q_thd.shallow_clone() }
    }
}

impl From<KeyValue> for Planes {
    fn from(kv: KeyValue) -> Planes {
        vec![kv.k_tgd, kv.v_tgd].into()
    }
}

impl From<&Planes> for KeyValue {
    fn from(planes: &Planes) -> KeyValue {
        KeyValue::from(planes.tensors())
    }
}

impl From<&[Tensor]> for KeyValue {
    fn from(planes: &[Tensor]) -> KeyValue {
        let [k_tgd, v_tgd] = planes else { unreachable!("attention has two state planes, keys and values") };
        KeyValue { k_tgd: k_tgd.shallow_clone(), v_tgd: v_tgd.shallow_clone() }
    }
}

impl KeyValue {
    /// The rows in `range`; a view.
    pub(super) fn rows(&self, range: &Range<i64>) -> KeyValue {
        KeyValue { k_tgd: rows(&self.k_tgd, range), v_tgd: rows(&self.v_tgd, range) }
    }
}

/// Rows of `x` in `range`; a view.
pub(super) fn rows(x: &Tensor, range: &Range<i64>) -> Tensor {
    x.narrow(0, range.start, range.end - range.start)
}

/// Keys and values at consecutive positions.
pub(super) struct KeyBlock {
    pub(super) positions: Range<i64>,
    pub(super) kv: KeyValue,
}

impl KeyBlock {
    pub(super) fn new(start: Position, kv: KeyValue) -> KeyBlock {
        let start = as_dim(start.0);
        KeyBlock { positions: start..start + kv.k_tgd.size()[0], kv }
    }
}

/// A visible rectangle of queries and keys, with the keys' own tensors.
pub(super) struct Rectangle {
    /// Rows of the gathered queries.
    pub(super) query_rows: Range<i64>,
    /// Rows of the key block.
    pub(super) key_rows: Range<i64>,
    pub(super) tile: Tile,
    pub(super) kv: KeyValue,
}

/// Queries at consecutive positions, with the offset of their first row in a gathered tensor.
pub(super) struct QueryRows {
    pub(super) first: i64,
    pub(super) positions: Range<i64>,
}

impl QueryRows {
    /// Rows of one piece, from the first row of a tensor on.
    pub(super) fn alone(piece: &Piece) -> QueryRows {
        QueryRows { first: 0, positions: positions(piece) }
    }

    /// The rows of `pieces`, one piece after another in a gathered tensor.
    pub(super) fn gathered<'a>(pieces: impl Iterator<Item = &'a Piece>) -> Vec<QueryRows> {
        let place = |first: &mut i64, piece: &Piece| {
            let rows = QueryRows { first: *first, positions: positions(piece) };
            *first += piece.rows().dim();
            Some(rows)
        };
        pieces.scan(0, place).collect()
    }
}

/// Some queries' output and log-sum-exp over the keys seen so far. A first part with all rows stays as it came until another one is
/// merged with it, as in a [`RowSum`].
pub(super) struct Merging {
    /// Of the output, [t, h, d].
    shape: [i64; 3],
    acc: Kind,
    device: Device,
    so_far: RefCell<Merged>,
}

#[derive(Default)]
enum Merged {
    #[default]
    Nothing,
    /// One part with all rows.
    Part(Partial),
    /// In the accumulation dtype. No part has been merged into row `untouched` yet, nor into any after it.
    Parts { out_thd: Tensor, lse_th: Tensor, untouched: i64 },
}

impl Merging {
    /// Queries that have seen no key yet; output of `shape` [t, h, d] in the accumulation dtype `acc`.
    pub(super) fn new(shape: [i64; 3], acc: Kind, device: Device) -> Merging {
        Merging { shape, acc, device, so_far: RefCell::default() }
    }

    /// Merges a part over further keys into the rows `range`. The first part of rows is copied.
    pub(super) fn add(&self, range: &Range<i64>, part: Partial) {
        let is_whole = *range == (0..self.shape[0]);
        let so_far = match (self.so_far.take(), is_whole) {
            (Merged::Nothing, true) => Merged::Part(part),
            (Merged::Part(first), true) => {
                let (out_thd, lse_th) = merge_of([&first.out_thd, &first.lse_th], [&part.out_thd, &part.lse_th]);
                Merged::Parts { out_thd, lse_th, untouched: range.end }
            }
            (before, _) => {
                let (out_thd, lse_th, untouched) = self.in_acc(before);
                let (mut out, mut lse) = (rows(&out_thd, range), rows(&lse_th, range));
                if range.start >= untouched {
                    out.copy_(&part.out_thd);
                    lse.copy_(&part.lse_th);
                } else {
                    merge_into(&mut out, &mut lse, &part.out_thd, &part.lse_th);
                }
                Merged::Parts { out_thd, lse_th, untouched: untouched.max(range.end) }
            }
        };
        self.so_far.replace(so_far);
    }

    /// Merges what the same rows have seen of other keys.
    pub(super) fn add_all(&self, other: Merging) {
        let all = 0..self.shape[0];
        let (out_thd, lse_th) = other.into_acc();
        self.add(&all, Partial { out_thd, lse_th });
    }

    /// The output of the same rows on every rank in the model's dtype: each rank merges the parts of all in rank order, so that
    /// all hold the same bits.
    pub(in crate::model) fn of_all_ranks(self, axis: &Axis, kind: Kind) -> Tensor {
        let Merging { shape, acc, device, .. } = self;
        let (out_thd, lse_th) = self.into_acc();
        if axis.size() == 1 {
            return out_thd.to_kind(kind);
        }
        let rows = shape[0];
        let counts = vec![Tokens(from_dim(rows)); axis.size()];
        let out_rhd = gather_rows(axis, &out_thd, &counts);
        let lse_rh = gather_rows(axis, &lse_th, &counts);
        let merged = Merging::new(shape, acc, device);
        for rank in (0..axis.size()).map(|rank| as_dim(from_index(rank))) {
            let part = |x: &Tensor| x.narrow(0, rank * rows, rows);
            merged.add(&(0..rows), Partial { out_thd: part(&out_rhd), lse_th: part(&lse_rh) });
        }
        merged.into_acc().0.to_kind(kind)
    }

    /// The output in the model's dtype, with the log-sum-exp as the one saved plane.
    pub(super) fn finish(self, kind: Kind) -> Mixed {
        let (out_thd, lse_th) = match self.so_far.take() {
            Merged::Part(Partial { out_thd, lse_th }) => (out_thd, lse_th),
            other => {
                let (out_thd, lse_th, _) = self.in_acc(other);
                (out_thd, lse_th)
            }
        };
        Mixed { out: out_thd.to_kind(kind).contiguous(), saved: vec![lse_th.contiguous()].into() }
    }

    /// Output and log-sum-exp in the accumulation dtype, without gaps.
    pub(super) fn into_acc(self) -> (Tensor, Tensor) {
        let so_far = self.so_far.take();
        let (out_thd, lse_th, _) = self.in_acc(so_far);
        (out_thd, lse_th)
    }

    /// Output and log-sum-exp in the accumulation dtype, without gaps, and the first row that no part has been merged into.
    fn in_acc(&self, so_far: Merged) -> (Tensor, Tensor, i64) {
        let [rows, heads, head_dim] = self.shape;
        match so_far {
            Merged::Nothing => {
                let (out_thd, lse_th) = nothing(rows, heads, head_dim, self.acc, self.device);
                (out_thd, lse_th, 0)
            }
            Merged::Part(Partial { out_thd, lse_th }) => {
                (out_thd.to_kind(self.acc).contiguous(), lse_th.to_kind(self.acc).contiguous(), rows)
            }
            Merged::Parts { out_thd, lse_th, untouched } => (out_thd, lse_th, untouched),
        }
    }
}

/// The saved plane of [`Merging::finish`].
pub(super) fn saved_lse(mixed: &Mixed) -> Tensor {
    let [lse_th] = mixed.saved.tensors() else { unreachable!("attention saves the log-sum-exp") };
    lse_th.shallow_clone()
}

/// Rows in backward: those of all ranks where queries are gathered, else this rank's.
pub(super) struct BackwardRows {
    pub(super) q_thd: Tensor,
    pub(super) out_thd: Tensor,
    pub(super) lse_th: Tensor,
    pub(super) dout_thd: Tensor,
    pub(super) dq_thd: RowSum,
}

/// Sum of parts of some rows in the accumulation dtype of theirs. A first part with all rows stays as it came until a second one
/// is added: no zeros are written and read, and a sum of one part takes half the memory.
pub(super) struct RowSum {
    shape: Vec<i64>,
    /// Dtype of the parts.
    kind: Kind,
    device: Device,
    so_far: RefCell<SoFar>,
}

#[derive(Default)]
enum SoFar {
    #[default]
    Nothing,
    /// One part with all rows.
    Part(Tensor),
    /// In the accumulation dtype.
    Sum(Tensor),
}

impl RowSum {
    /// A sum of parts like `x`, its first dimension rows.
    pub(super) fn like(x: &Tensor) -> RowSum {
        RowSum { shape: x.size(), kind: x.kind(), device: x.device(), so_far: RefCell::default() }
    }

    /// Adds a part of the rows in `range`, which nobody else reads.
    pub(super) fn add(&self, range: &Range<i64>, part: Tensor) {
        let is_whole = *range == (0..self.shape[0]);
        let so_far = match (self.so_far.take(), is_whole) {
            (SoFar::Nothing, true) => SoFar::Part(if part.is_contiguous() { part } else { part.contiguous() }),
            (SoFar::Part(first), true) => SoFar::Sum(fused::sum_of(&first, &part)),
            (before, _) => {
                let sum = self.in_kind(before, accumulation(self.kind));
                fused::add_into(&mut rows(&sum, range), &part);
                SoFar::Sum(sum)
            }
        };
        self.so_far.replace(so_far);
    }

    /// The sum of all parts in dtype `kind`.
    pub(super) fn finish(self, kind: Kind) -> Tensor {
        let so_far = self.so_far.take();
        self.in_kind(so_far, kind)
    }

    fn in_kind(&self, so_far: SoFar, kind: Kind) -> Tensor {
        match so_far {
            SoFar::Nothing => Tensor::zeros(&self.shape, (kind, self.device)),
            SoFar::Part(x) | SoFar::Sum(x) => x.to_kind(kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of the parts: some of them twice, and the last of no part.
    const RANGES: [Range<i64>; 4] = [0..2, 4..6, 2..4, 0..6];
    const SHAPE: [i64; 3] = [7, 3, 4];

    fn parts() -> Vec<Partial> {
        tch::manual_seed(3);
        let part = |range: &Range<i64>| {
            let rows = range.end - range.start;
            let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu));
            Partial { out_thd: random(&[rows, SHAPE[1], SHAPE[2]]), lse_th: random(&[rows, SHAPE[1]]) }
        };
        let parts: Vec<Partial> = RANGES.iter().map(part).collect();
        // One row of the second part sees no key.
        let _ = parts[1].out_thd.get(0).zero_();
        let _ = parts[1].lse_th.get(0).fill_(f64::NEG_INFINITY);
        parts
    }

    fn copy(part: &Partial) -> Partial {
        Partial { out_thd: part.out_thd.copy(), lse_th: part.lse_th.copy() }
    }

    /// All orders of the numbers below `count`.
    fn orders(count: usize) -> Vec<Vec<usize>> {
        let Some(last) = count.checked_sub(1) else { return vec![Vec::new()] };
        let with_last = |order: &Vec<usize>, at: usize| [&order[..at], &[last], &order[at..]].concat();
        orders(last).iter().flat_map(|order| (0..count).map(|at| with_last(order, at)).collect::<Vec<_>>()).collect()
    }

    /// Merged without a shortcut, into rows that have seen nothing.
    fn plainly(order: &[usize], parts: &[Partial]) -> (Tensor, Tensor) {
        let (out_thd, lse_th) = nothing(SHAPE[0], SHAPE[1], SHAPE[2], Kind::Double, Device::Cpu);
        for &number in order {
            let (mut out, mut lse) = (rows(&out_thd, &RANGES[number]), rows(&lse_th, &RANGES[number]));
            merge_into(&mut out, &mut lse, &parts[number].out_thd, &parts[number].lse_th);
        }
        (out_thd, lse_th)
    }

    #[test]
    fn parts_in_any_order_of_their_rows_merge_as_into_rows_that_have_seen_nothing() {
        let parts = parts();
        let all = orders(RANGES.len());
        assert_eq!(all.len(), 24);
        for order in all {
            let merging = Merging::new(SHAPE, Kind::Double, Device::Cpu);
            for &number in &order {
                merging.add(&RANGES[number], copy(&parts[number]));
            }
            let (found_thd, found_th) = merging.into_acc();
            let (out_thd, lse_th) = plainly(&order, &parts);
            assert!(found_thd.allclose(&out_thd, 1e-14, 1e-14, false), "outputs in the order {order:?}");
            assert!(found_th.allclose(&lse_th, 1e-14, 1e-14, false), "log-sum-exps in the order {order:?}");
            // No part has the last row.
            assert!(found_th.get(6).isneginf().all().int64_value(&[]) == 1, "{order:?}");
        }
    }

    #[test]
    fn a_row_sum_is_that_of_parts_added_to_zeros() {
        tch::manual_seed(4);
        for kind in [Kind::Float, Kind::BFloat16] {
            let like = Tensor::zeros(SHAPE, (kind, Device::Cpu));
            let part = |range: &Range<i64>| {
                // Laid out by heads, as kernels leave them.
                let shape = [SHAPE[1], range.end - range.start, SHAPE[2]];
                Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind).transpose(0, 1)
            };
            let all = 0..SHAPE[0];
            for ranges in [
                vec![],
                vec![all.clone()],
                vec![all.clone(); 3],
                vec![2..5, 1..3],
                vec![all.clone(), 0..2, all.clone()],
                vec![0..2, all.clone(), 6..7],
            ] {
                let (sum, zeros) = (RowSum::like(&like), like.to_kind(Kind::Float).copy());
                let parts: Vec<Tensor> = ranges.iter().map(part).collect();
                for (range, part) in ranges.iter().zip(parts) {
                    let _ = rows(&zeros, range).g_add_(&part);
                    sum.add(range, part);
                }
                assert!(sum.finish(Kind::Float).equal(&zeros), "{kind:?} {ranges:?}");
            }
        }
    }

    #[test]
    fn what_was_gathered_apart_merges_as_its_parts_do() {
        let parts = parts();
        let [merging, apart] = [(); 2].map(|()| Merging::new(SHAPE, Kind::Double, Device::Cpu));
        merging.add(&RANGES[3], copy(&parts[3]));
        for (range, part) in RANGES.iter().zip(&parts).take(3) {
            apart.add(range, copy(part));
        }
        merging.add_all(apart);
        let (found_thd, found_th) = merging.into_acc();
        let (out_thd, lse_th) = plainly(&[3, 0, 1, 2], &parts);
        assert!(found_thd.allclose(&out_thd, 1e-14, 1e-14, false));
        assert!(found_th.allclose(&lse_th, 1e-14, 1e-14, false));
    }

    #[test]
    fn parts_of_all_rows_merge_as_into_rows_that_have_seen_nothing() {
        tch::manual_seed(5);
        let [rows, heads, dim] = SHAPE;
        for kind in [Kind::Float, Kind::BFloat16] {
            // Heads first, as kernels leave them; one row of the second part sees no key.
            let part = || {
                let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
                let out_thd = random(&[heads, rows, dim]).to_kind(kind).transpose(0, 1);
                Partial { out_thd, lse_th: random(&[heads, rows]).transpose(0, 1) }
            };
            let parts = [part(), part(), part()];
            let _ = parts[1].out_thd.get(0).zero_();
            let _ = parts[1].lse_th.get(0).fill_(f64::NEG_INFINITY);
            for count in 0..=3 {
                let (mut out_thd, mut lse_th) = nothing(rows, heads, dim, Kind::Float, Device::Cpu);
                let [merging, finished] = [(); 2].map(|()| Merging::new(SHAPE, Kind::Float, Device::Cpu));
                for part in &parts[..count] {
                    merge_into(&mut out_thd, &mut lse_th, &part.out_thd, &part.lse_th);
                    merging.add(&(0..rows), copy(part));
                    finished.add(&(0..rows), copy(part));
                }
                let (found_thd, found_th) = merging.into_acc();
                assert!(found_thd.allclose(&out_thd, 1e-6, 1e-6, false), "{count} parts of {kind:?}");
                assert!(found_th.allclose(&lse_th, 1e-6, 1e-6, false), "{count} parts of {kind:?}");
                let mixed = finished.finish(kind);
                assert!(mixed.out.equal(&found_thd.to_kind(kind)) && saved_lse(&mixed).equal(&found_th));
            }
        }
    }
}
