//! The index of sparse attention: which keys a query sees, chosen over the keys of all ranks.
//!
//! How it departs from the textbook:
//! 1. Scores are summed in the accumulation dtype, and ties are broken by the lowest position: negative products count as 0, so
//!    many scores are exactly 0, and only a rule makes the same choice on every run, rank and number of ranks.
//! 2. Keys never travel to answers' rows: each rank chooses the best of the keys that it holds, and the candidates meet.
//! 3. The choice is a constant of the gradient, and belongs to one pass over one span: see [`IndexSet`].

use tch::{Device, Kind, Tensor};

use crate::model::answers::AnswerState;
use crate::model::mixer::CpGroup;
use crate::model::past::Past;
use crate::prompt::layout::{Span, positions};
use crate::prompt::pages::StagedHidden;
use crate::runtime::units::{Tokens, as_dim, from_dim, from_index};
use crate::tensor::selection::{self, IndexKeys, IndexRows, Scoring, Selected};
use crate::world::exchange::{gather_rows, return_rows};

/// Positions of the keys that were chosen for rows in one pass.
///
/// Layers without an index of their own borrow it, for as long as the pass lives that made it. So no other answer, no other
/// capture and no later adapter version can use it by mistake:
///
/// ```compile_fail,E0505
/// use longstraw::model::latent::{IndexSet, LentIndex};
///
/// fn rows_after_the_pass(of_this_pass: IndexSet) -> i64 {
///     let lent: LentIndex = of_this_pass.lend();
///     drop(of_this_pass);
///     lent.rows()
/// }
/// ```
///
/// Within the pass it can be used as often as there are layers:
///
/// ```
/// use longstraw::model::latent::{IndexSet, LentIndex};
///
/// fn rows_within_the_pass(of_this_pass: IndexSet) -> i64 {
///     let lent: LentIndex = of_this_pass.lend();
///     lent.rows() + lent.rows()
/// }
/// ```
#[derive(Debug)]
pub struct IndexSet {
    /// [t, n] int32: ascending in a row, with −1 in the places at the end that are left over.
    position_tn: StagedHidden,
}

/// An index set of the pass `'pass`.
#[derive(Clone, Copy, Debug)]
pub struct LentIndex<'pass> {
    position_tn: &'pass Tensor,
}

impl IndexSet {
    /// A set that was kept for the rows of this pass.
    #[must_use]
    pub fn staged(position_tn: StagedHidden) -> IndexSet {
        IndexSet { position_tn }
    }

    fn of(position_tn: Tensor) -> IndexSet {
        IndexSet { position_tn: StagedHidden::of(position_tn) }
    }

    /// The set, for a layer of the same pass.
    #[must_use]
    pub fn lend(&self) -> LentIndex<'_> {
        LentIndex { position_tn: &self.position_tn }
    }

    /// The same rows with every key up to each row's own position: what an index chooses that may choose them all.
    fn all_visible(position_t: &Tensor, n: i64) -> IndexSet {
        let key_n = Tensor::arange(n, (Kind::Int, position_t.device())).unsqueeze(0);
        let row_t1 = position_t.to_kind(Kind::Int).unsqueeze(1);
        IndexSet::of(
            key_n.where_self(&key_n.le_tensor(&row_t1), &Tensor::full([1, 1], -1, (Kind::Int, position_t.device()))),
        )
    }

    /// The rows of all `parts`, one part after another; all have the same width.
    #[must_use]
    pub fn join(parts: &[IndexSet]) -> IndexSet {
        IndexSet::of(Tensor::cat(&parts.iter().map(|part| &*part.position_tn).collect::<Vec<_>>(), 0))
    }
}

impl LentIndex<'_> {
    /// How many rows it is for.
    #[must_use]
    pub fn rows(&self) -> i64 {
        self.position_tn.size()[0]
    }

    /// Positions of the keys of each row, [t, n] int32.
    pub fn positions(&self) -> &Tensor {
        self.position_tn
    }
}

/// What an index reads and leaves of some rows.
#[derive(Debug)]
pub struct IndexProjected {
    /// Queries, weights of their heads, and positions.
    pub rows: IndexRows,
    /// [t, i]: keys in the model's dtype.
    pub key_ti: Tensor,
}

impl IndexProjected {
    /// The rows of all `parts`, one part after another.
    #[must_use]
    pub fn join(parts: &[IndexProjected]) -> IndexProjected {
        let all = |of: fn(&IndexProjected) -> &Tensor| Tensor::cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
        let rows = IndexRows {
            q_tji: all(|part| &part.rows.q_tji),
            weight_tj: all(|part| &part.rows.weight_tj),
            position_t: all(|part| &part.rows.position_t),
        };
        IndexProjected { rows, key_ti: all(|part| &part.key_ti) }
    }
}

/// Chooses keys in the layers that own an index.
#[derive(Clone, Copy, Debug)]
pub struct Indexer {
    /// Most keys of a query.
    pub top: i64,
    /// How scores are computed.
    pub scoring: Scoring,
}

/// The plane of a page's state that holds index keys.
const KEY_PLANE: usize = 1;

impl Indexer {
    /// Keys that a set has room for where the last row stands at `last`.
    fn room(&self, last: i64) -> i64 {
        self.top.min(last + 1)
    }

    /// For prompt rows, whose keys of all positions from 0 on are here. `n` is the same for all rows of the prompt.
    #[must_use]
    pub fn choose_prompt(&self, rows: &IndexRows, key_si: &Tensor, last: i64, n: i64) -> IndexSet {
        if last < n {
            return IndexSet::all_visible(&rows.position_t, n);
        }
        let keys = IndexKeys { key_si: key_si.narrow(0, 0, last + 1), first: 0, step: 1 };
        IndexSet::of(selection::select(self.scoring, rows, &[keys], n).position_tn)
    }

    /// For a span's rows over the past and themselves; `own` is of this rank's rows. Every rank takes part, with or without
    /// rows.
    ///
    /// # Panics
    /// When the span is packed: answers choose one by one.
    #[must_use]
    pub fn choose(&self, cp_group: &CpGroup, span: &Span, own: &IndexProjected, past: &Past) -> IndexSet {
        assert!(!span.is_packed(), "index sets are of one sequence");
        let last = span.gathered().map(|piece| positions(piece).end - 1).max().unwrap_or(0);
        let n = self.room(last);
        if last < self.top {
            return IndexSet::all_visible(&own.rows.position_t, n);
        }
        let counts = span.counts();
        let gather = |x: &Tensor| gather_rows(cp_group.axis, x, &counts);
        let rows = IndexRows {
            q_tji: gather(&own.rows.q_tji),
            weight_tj: gather(&own.rows.weight_tj),
            position_t: gather(&own.rows.position_t),
        };
        let mut keys = past_keys(past);
        let mut first = 0;
        for piece in span.of(cp_group.axis.rank()) {
            let (start, count) = (positions(piece).start, piece.rows().dim());
            keys.push(IndexKeys { key_si: own.key_ti.narrow(0, first, count), first: start, step: 1 });
            first += count;
        }
        let part = selection::select(self.scoring, &rows, &keys, n);
        if cp_group.axis.size() == 1 {
            return IndexSet::of(part.position_tn);
        }
        let home = |x: &Tensor| return_rows(cp_group.axis, x, &counts);
        let parts = home(&part.score_tn).into_iter().zip(home(&part.position_tn));
        let parts: Vec<Selected> = parts.map(|(score_tn, position_tn)| Selected { score_tn, position_tn }).collect();
        IndexSet::of(selection::merge(&parts, n).position_tn)
    }

    /// For one new row of each of several answers, the same rows on every rank. Every rank gets the same set.
    #[must_use]
    pub fn choose_next(&self, cp_group: &CpGroup, rows: &IndexRows, prompt: &Past, own: &AnswerState) -> IndexSet {
        let last = as_dim(own.newest().0);
        let n = self.room(last);
        if last < self.top {
            return IndexSet::all_visible(&rows.position_t, n);
        }
        let mut keys = past_keys(prompt);
        let (first, step) = own.dealt();
        keys.push(IndexKeys { key_si: own.visible(None).tensors()[KEY_PLANE].shallow_clone(), first, step });
        let part = selection::select(self.scoring, rows, &keys, n);
        let ranks = cp_group.axis.size();
        if ranks == 1 {
            return IndexSet::of(part.position_tn);
        }
        let answers = rows.position_t.size()[0];
        let counts = vec![Tokens(from_dim(answers)); ranks];
        let score_rn = gather_rows(cp_group.axis, &part.score_tn, &counts);
        let position_rn = gather_rows(cp_group.axis, &part.position_tn, &counts);
        let part = |rank: usize| {
            let of = |x: &Tensor| x.narrow(0, as_dim(from_index(rank)) * answers, answers);
            Selected { score_tn: of(&score_rn), position_tn: of(&position_rn) }
        };
        IndexSet::of(selection::merge(&(0..ranks).map(part).collect::<Vec<_>>(), n).position_tn)
    }
}

fn past_keys(past: &Past) -> Vec<IndexKeys> {
    let key = |run: &crate::model::past::PastRun| IndexKeys {
        key_si: run.state.tensors()[KEY_PLANE].shallow_clone(),
        first: as_dim(run.start.0),
        step: 1,
    };
    past.runs.iter().map(key).collect()
}

/// Positions of rows, [t] int64.
pub(crate) fn row_positions(rows: std::ops::Range<i64>, device: Device) -> Tensor {
    Tensor::arange_start(rows.start, rows.end, (Kind::Int64, device))
}

/// Keys of each query, chosen by sorting all scores: the rule written out, for the reference that the paged schedule is judged
/// by. `rows` see the keys of all positions from 0 on.
#[must_use]
pub(crate) fn choose_plainly(rows: &IndexRows, key_si: &Tensor, top: i64) -> IndexSet {
    let acc = rows.weight_tj.kind();
    let (q_tji, key_si) = (rows.q_tji.to_kind(acc), key_si.to_kind(acc));
    let score_tjs = q_tji.matmul(&key_si.transpose(0, 1)).relu();
    let score_ts = (score_tjs * rows.weight_tj.unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, acc);
    let key_s = Tensor::arange(key_si.size()[0], (Kind::Int64, key_si.device())).unsqueeze(0);
    let future_ts = key_s.gt_tensor(&rows.position_t.unsqueeze(1));
    let (score_ts, order_ts) = score_ts.masked_fill(&future_ts, f64::NEG_INFINITY).sort_stable(true, -1, true);
    let n = top.min(key_si.size()[0]);
    let future_tn = order_ts.narrow(1, 0, n).gt_tensor(&rows.position_t.unsqueeze(1));
    drop(score_ts);
    let position_tn = order_ts.narrow(1, 0, n).masked_fill(&future_tn, i64::from(i32::MAX)).sort(-1, false).0;
    let left_over = position_tn.eq(i64::from(i32::MAX));
    IndexSet::of(position_tn.masked_fill(&left_over, -1).to_kind(Kind::Int))
}
