//! Rows of attention by name: queries, keys and values, the blocks that they form, and what is merged of them.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::mixer::Mixed;
use super::planes::Planes;
use crate::prompt::layout::{Piece, Tile, positions};
use crate::runtime::units::{Position, Tokens, as_dim, from_dim, from_index};
use crate::tensor::attention::Partial;
use crate::tensor::{accumulation, fused};
use crate::world::Axis;
use crate::world::exchange::{gather_rows, merge_into, nothing};

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

/// Some queries' output and log-sum-exp over the keys seen so far, in the accumulation dtype.
pub(super) struct Merging {
    pub(super) out_thd: Tensor,
    pub(super) lse_th: Tensor,
    /// The first of the rows that no part has been merged into yet, nor into any after it.
    untouched: Cell<i64>,
}

impl Merging {
    /// Queries that have seen no key yet; output of `shape` [t, h, d] in the accumulation dtype `acc`.
    pub(super) fn new([rows, heads, head_dim]: [i64; 3], acc: Kind, device: Device) -> Merging {
        let (out_thd, lse_th) = nothing(rows, heads, head_dim, acc, device);
        Merging { out_thd, lse_th, untouched: Cell::new(0) }
    }

    /// Merges a part over further keys into the rows `range`. The first part of rows is copied.
    pub(super) fn add(&self, range: &Range<i64>, part: &Partial) {
        let mut out_thd = rows(&self.out_thd, range);
        let mut lse_th = rows(&self.lse_th, range);
        let untouched = self.untouched.replace(self.untouched.get().max(range.end));
        if range.start >= untouched {
            out_thd.copy_(&part.out_thd);
            lse_th.copy_(&part.lse_th);
        } else {
            merge_into(&mut out_thd, &mut lse_th, &part.out_thd, &part.lse_th);
        }
    }

    /// Merges what the same rows have seen of other keys.
    pub(super) fn add_all(&self, other: Merging) {
        let all = 0..self.out_thd.size()[0];
        self.add(&all, &Partial { out_thd: other.out_thd, lse_th: other.lse_th });
    }

    /// The output of the same rows on every rank in the model's dtype: each rank merges the parts of all in rank order, so that
    /// all hold the same bits.
    pub(in crate::model) fn of_all_ranks(self, axis: &Axis, kind: Kind) -> Tensor {
        if axis.size() == 1 {
            return self.out_thd.to_kind(kind);
        }
        let (rows, heads, width) = self.out_thd.size3().expect("output is laid out as [t, h, d]");
        let counts = vec![Tokens(from_dim(rows)); axis.size()];
        let out_rhd = gather_rows(axis, &self.out_thd, &counts);
        let lse_rh = gather_rows(axis, &self.lse_th, &counts);
        let merged = Merging::new([rows, heads, width], self.out_thd.kind(), self.out_thd.device());
        for rank in (0..axis.size()).map(|rank| as_dim(from_index(rank))) {
            let part = |x: &Tensor| x.narrow(0, rank * rows, rows);
            merged.add(&(0..rows), &Partial { out_thd: part(&out_rhd), lse_th: part(&lse_rh) });
        }
        merged.out_thd.to_kind(kind)
    }

    /// The output in the model's dtype, with the log-sum-exp as the one saved plane.
    pub(super) fn finish(self, kind: Kind) -> Mixed {
        Mixed { out: self.out_thd.to_kind(kind), saved: vec![self.lse_th].into() }
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
                merging.add(&RANGES[number], &parts[number]);
            }
            let (out_thd, lse_th) = plainly(&order, &parts);
            assert!(merging.out_thd.allclose(&out_thd, 1e-14, 1e-14, false), "outputs in the order {order:?}");
            assert!(merging.lse_th.allclose(&lse_th, 1e-14, 1e-14, false), "log-sum-exps in the order {order:?}");
            // No part has the last row.
            assert!(merging.lse_th.get(6).isneginf().all().int64_value(&[]) == 1, "{order:?}");
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
        merging.add(&RANGES[3], &parts[3]);
        for (range, part) in RANGES.iter().zip(&parts).take(3) {
            apart.add(range, part);
        }
        merging.add_all(apart);
        let (out_thd, lse_th) = plainly(&[3, 0, 1, 2], &parts);
        assert!(merging.out_thd.allclose(&out_thd, 1e-14, 1e-14, false));
        assert!(merging.lse_th.allclose(&lse_th, 1e-14, 1e-14, false));
    }
}
