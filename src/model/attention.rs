//! Attention over blocks of keys that lie anywhere, merged by log-sum-exp.
//!
//! How it departs from the textbook:
//!
//! 1. A query's output is merged from partial attentions over page runs and its own rows' block, each with its own
//!    log-sum-exp; backward per block with the merged output and log-sum-exp is exact.
//! 2. Prompt rows stay and key/value runs travel the ring (capture, and the sweep of a long tail, where sums of dk and
//!    dv travel with them and come home); answers' rows and a short tail's go the other way: queries are gathered, each
//!    rank attends to the pages it owns, partial results return and are merged in rank order.
//! 3. Answer keys and values are never gathered: an answer's rows on a rank are one more block of that rank.

use std::cell::Cell;
use std::convert::Infallible;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::answers::AnswerState;
use super::mixer::{Backward, CpGroup, Mixed, Mixer, Past, PastGradient, Swept};
use crate::prompt::layout::{Piece, PromptLayout, Run, Span, Tile, TileSizes, positions, tiles};
use crate::prompt::pages::PlaneRow;
use crate::prompt::ring::{RingRuns, visit_runs, visit_runs_with_sums};
use crate::runtime::units::{Position, Tokens, as_dim, from_dim, from_index};
use crate::tensor::accumulation;
use crate::tensor::attention::{self, Merged};
use crate::tensor::kernels::Kernel;
use crate::world::exchange::{gather_rows, merge_into, nothing, return_rows, sum_in_order};

/// Grouped-query attention with an optional sliding window.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Query heads.
    pub heads: i64,
    /// Key and value heads.
    pub kv_heads: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// How many positions a query sees, itself included.
    pub window: Option<i64>,
    /// Scores are multiplied by this.
    pub scale: f64,
    /// The model's dtype.
    pub kind: Kind,
    /// What computes a rectangle.
    pub kernel: Kernel,
}

/// Most keys of a rectangle on a GPU: what a kernel takes as workspace grows with them (dk and dv of every query head),
/// and some index with 32 bits.
pub const KEYS_MAX: i64 = 32_768;

/// Keys and values at consecutive positions.
struct KeyBlock<'a> {
    at: Range<i64>,
    k_sgd: &'a Tensor,
    v_sgd: &'a Tensor,
}

fn key_block(start: Position, planes: &[Tensor]) -> KeyBlock<'_> {
    let start = as_dim(start.0);
    KeyBlock { at: start..start + planes[0].size()[0], k_sgd: &planes[0], v_sgd: &planes[1] }
}

/// Some queries' output and log-sum-exp over the keys seen so far, in the accumulation dtype.
struct Sum {
    out_thd: Tensor,
    lse_th: Tensor,
    /// Whether nothing has been merged in yet.
    empty: Cell<bool>,
}

impl Sum {
    /// Merges what the rows `here` see of further keys. Merging with nothing is a copy.
    fn add(&self, here: &Range<i64>, part: &attention::Partial) {
        let (mut out, mut lse) = (rows(&self.out_thd, here), rows(&self.lse_th, here));
        let first = self.empty.replace(false) && here.end - here.start == self.out_thd.size()[0];
        if first {
            out.copy_(&part.out_thd);
            lse.copy_(&part.lse_th);
        } else {
            merge_into(&mut out, &mut lse, &part.out_thd, &part.lse_th);
        }
    }

    fn mixed(self, kind: Kind) -> Mixed {
        Mixed { out: self.out_thd.to_kind(kind), saved: vec![self.lse_th] }
    }
}

/// Rows of `x` that a tile covers.
fn rows(x: &Tensor, range: &Range<i64>) -> Tensor {
    x.narrow(0, range.start, range.end - range.start)
}

/// Queries at consecutive positions, with the offset of their first row in a gathered tensor.
struct Queries {
    first: i64,
    at: Range<i64>,
}

/// The rows of `pieces`, one piece after another, as they lie in a gathered tensor.
fn queries<'a>(pieces: impl Iterator<Item = &'a Piece>) -> Vec<Queries> {
    pieces
        .scan(0, |first, piece| {
            let at = positions(piece);
            let here = Queries { first: *first, at };
            *first += piece.rows().dim();
            Some(here)
        })
        .collect()
}

impl Attention {
    /// Rectangles of `queries` and `keys` with the keys' own tensors, none too large for a kernel's indices.
    fn tiles(&self, queries: &Range<i64>, keys: &KeyBlock) -> Vec<(Tile, Tensor, Tensor)> {
        let most = if self.kernel == Kernel::Cpu { i64::MAX } else { KEYS_MAX };
        let (window, sizes) = match (self.kernel, self.window) {
            (Kernel::Plain, window) => (Some(window.unwrap_or(i64::MAX / 2)), TileSizes::PLAIN),
            (Kernel::Cpu, window) => (window, TileSizes::CPU),
            (_, window) => (window, TileSizes::PLAIN),
        };
        let starts = (keys.at.start..keys.at.end).step_by(usize::try_from(most).unwrap_or(usize::MAX));
        let part = |start: i64| {
            let at = start..start.saturating_add(most).min(keys.at.end);
            let local = start - keys.at.start..at.end - keys.at.start;
            let (k, v) = (rows(keys.k_sgd, &local), rows(keys.v_sgd, &local));
            tiles(queries.clone(), at, window, sizes).into_iter().map(move |tile| {
                let (k, v) = (rows(&k, &tile.keys), rows(&v, &tile.keys));
                (Tile { keys: tile.keys.start + local.start..tile.keys.end + local.start, ..tile }, k, v)
            })
        };
        starts.flat_map(part).collect()
    }

    /// Adds what `queries` see of `keys` to their merged output and log-sum-exp.
    fn attend(&self, queries: &Queries, keys: &KeyBlock, q_thd: &Tensor, sum: &Sum) {
        for (tile, k, v) in self.tiles(&queries.at, keys) {
            let here = queries.first + tile.rows.start..queries.first + tile.rows.end;
            sum.add(&here, &attention::forward(self.kernel, &rows(q_thd, &here), &k, &v, tile.visible, self.scale));
        }
    }

    fn unseen(&self, rows: i64, like: &Tensor) -> Sum {
        let (out_thd, lse_th) = nothing(rows, self.heads, self.head_dim, accumulation(self.kind), like.device());
        Sum { out_thd, lse_th, empty: Cell::new(true) }
    }

    /// Adds dq of `queries` to `dq_thd`, and dk and dv of `keys` to `dkv` if they carry gradient.
    fn pull(&self, queries: &Queries, keys: &KeyBlock, all: &Gathered, dkv: Option<&[Tensor]>) {
        for (tile, k, v) in self.tiles(&queries.at, keys) {
            let here = queries.first + tile.rows.start..queries.first + tile.rows.end;
            let (q, out, lse) = (rows(&all.q_thd, &here), rows(&all.out_thd, &here), rows(&all.lse_th, &here));
            let dout = rows(&all.dout_thd, &here);
            let merged = Merged { q_thd: &q, out_thd: &out, lse_th: &lse, dout_thd: &dout };
            let gradients = attention::backward(self.kernel, &merged, &k, &v, tile.visible, self.scale);
            // Added in the accumulation dtype, read in the kernel's.
            let _ = rows(&all.dq_thd, &here).g_add_(&gradients.dq_thd);
            if let Some([dk, dv]) = dkv {
                let _ = rows(dk, &tile.keys).g_add_(&gradients.dk_sgd);
                let _ = rows(dv, &tile.keys).g_add_(&gradients.dv_sgd);
            }
        }
    }

    /// Key blocks of a span's own rows on this rank, as ranges of its local rows.
    fn own_blocks<'a>(
        span: &Span,
        cp_group: &CpGroup,
        k: &'a Tensor,
        v: &'a Tensor,
    ) -> Vec<(Range<i64>, [Tensor; 2], Piece)> {
        queries(span.of(cp_group.axis.rank()))
            .into_iter()
            .zip(span.of(cp_group.axis.rank()))
            .map(|(at, piece)| {
                let local = at.first..at.first + piece.rows().dim();
                (local.clone(), [rows(k, &local), rows(v, &local)], *piece)
            })
            .collect()
    }
}

/// What every rank knows of all rows of a span during backward.
struct Gathered {
    q_thd: Tensor,
    out_thd: Tensor,
    lse_th: Tensor,
    dout_thd: Tensor,
    dq_thd: Tensor,
}

impl Mixer for Attention {
    fn planes(&self) -> Vec<PlaneRow> {
        vec![PlaneRow { shape: vec![self.kv_heads, self.head_dim], kind: self.kind }; 2]
    }

    fn kept_row(&self) -> (u64, u64) {
        (from_dim(self.heads * self.head_dim), from_dim(self.heads))
    }

    fn split(&self, mut mix: Vec<Tensor>) -> (Vec<Tensor>, Vec<Tensor>) {
        let state = mix.split_off(1);
        (mix, state)
    }

    fn capture(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: &[(Piece, Vec<Tensor>)],
        own: [Vec<Tensor>; 2],
    ) -> Vec<Mixed> {
        let merged: Vec<_> = blocks.iter().map(|(_, mix)| self.unseen(mix[0].size()[0], &mix[0])).collect();
        for (pass, travelling) in own.into_iter().enumerate() {
            let outcome: Result<(), Infallible> = visit_runs(
                cp_group.axis,
                cp_group.ledger,
                travelling,
                |rank| layout.chunks_of(rank)[pass],
                |run, planes| {
                    let keys = key_block(run.start, planes);
                    for ((piece, mix), so_far) in blocks.iter().zip(&merged) {
                        self.attend(&Queries { first: 0, at: positions(piece) }, &keys, &mix[0], so_far);
                    }
                    Ok(())
                },
            );
            let Ok(()) = outcome;
        }
        merged.into_iter().map(|sum| sum.mixed(self.kind)).collect()
    }

    fn nothing(&self, blocks: &[(Piece, Vec<Tensor>)]) -> Vec<Mixed> {
        let unseen = |(_, ask): &(Piece, Vec<Tensor>)| self.unseen(ask[0].size()[0], &ask[0]);
        blocks.iter().map(unseen).map(|sum| sum.mixed(self.kind)).collect()
    }

    fn sweep(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: Vec<Swept>,
        own: [Vec<Tensor>; 2],
        own_gradient: &mut [Vec<Tensor>; 2],
    ) -> Vec<Vec<Tensor>> {
        let acc = accumulation(self.kind);
        let rows_of: Vec<(Range<i64>, Gathered)> = blocks
            .into_iter()
            .map(|mut block| {
                let q_thd = block.ask.swap_remove(0);
                let dq_thd = Tensor::zeros(q_thd.size(), (acc, q_thd.device()));
                let lse_th = block.mixed.saved.swap_remove(0);
                (
                    positions(&block.piece),
                    Gathered { q_thd, out_thd: block.mixed.out, lse_th, dout_thd: block.dout, dq_thd },
                )
            })
            .collect();
        let tail_of = |run: &Run| (run.start.max(layout.cut()), run.stop.since(run.start.max(layout.cut())).dim());
        for (pass, travelling) in own.into_iter().enumerate() {
            let travel = RingRuns {
                run_of: &|rank| layout.chunks_of(rank)[pass],
                sum_rows: &|rank| tail_of(&layout.chunks_of(rank)[pass]).1,
            };
            let home = std::mem::take(&mut own_gradient[pass]);
            own_gradient[pass] =
                visit_runs_with_sums(cp_group.axis, cp_group.ledger, travelling, home, &travel, |run, planes, sums| {
                    let (tail_start, tail_rows) = tail_of(run);
                    let constants = run.rows().dim() - tail_rows;
                    let before: Vec<Tensor> = planes.iter().map(|plane| plane.narrow(0, 0, constants)).collect();
                    let tail: Vec<Tensor> = planes.iter().map(|plane| plane.narrow(0, constants, tail_rows)).collect();
                    for (at, all) in &rows_of {
                        let queries = Queries { first: 0, at: at.clone() };
                        self.pull(&queries, &key_block(run.start, &before), all, None);
                        self.pull(&queries, &key_block(tail_start, &tail), all, Some(sums));
                    }
                });
        }
        rows_of.into_iter().map(|(_, all)| vec![all.dq_thd.to_kind(self.kind)]).collect()
    }

    fn plain(&self, positions: Range<i64>, ask: &[Tensor], state: &[Tensor], fused: bool) -> Tensor {
        let (acc, device) = (accumulation(self.kind), ask[0].device());
        let heads_each = self.heads / self.kv_heads;
        let all_heads = |x: &Tensor| x.repeat_interleave_self_int(heads_each, 1, None).transpose(0, 1);
        if fused && positions.start == 0 && self.window.is_none() {
            let heads_first = |x: &Tensor| x.transpose(0, 1).unsqueeze(0);
            // On a GPU the library has a float32 kernel for equal heads only, and would else write all scores out.
            let grouped = self.heads != self.kv_heads && (device == Device::Cpu || self.kind != Kind::Float);
            let of_state = |x: &Tensor| if grouped { heads_first(x) } else { all_heads(x).unsqueeze(0) };
            let (q, k, v) = (heads_first(&ask[0]), of_state(&state[0]), of_state(&state[1]));
            let out = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, self.scale, grouped);
            return out.squeeze_dim(0).transpose(0, 1);
        }
        let (k_hsd, v_hsd) = (all_heads(&state[0]), all_heads(&state[1]));
        let scores = ask[0].transpose(0, 1).matmul(&k_hsd.transpose(1, 2)).to_kind(acc) * self.scale;
        let row = Tensor::arange_start(positions.start, positions.end, (Kind::Int64, device)).unsqueeze(1);
        let ahead = row - Tensor::arange(positions.end, (Kind::Int64, device)).unsqueeze(0);
        let hidden = ahead.lt(0).logical_or(&ahead.ge(self.window.unwrap_or(i64::MAX)));
        let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, acc).to_kind(self.kind);
        weights.matmul(&v_hsd).transpose(0, 1)
    }

    fn forward(&self, cp_group: &CpGroup, span: &Span, mix: &[Tensor], past: &Past) -> Mixed {
        let counts = span.counts();
        let q_thd = gather_rows(cp_group.axis, &mix[0], &counts);
        let merged = self.unseen(q_thd.size()[0], &q_thd);
        let own = Self::own_blocks(span, cp_group, &mix[1], &mix[2]);
        for queries in queries(span.gathered()) {
            for run in &past.runs {
                self.attend(&queries, &key_block(run.start, &run.planes), &q_thd, &merged);
            }
            for (_, planes, piece) in &own {
                self.attend(&queries, &key_block(piece.start, planes), &q_thd, &merged);
            }
        }
        let home = |x: &Tensor| return_rows(cp_group.axis, x, &counts);
        let sum = self.unseen(mix[0].size()[0], &mix[0]);
        let here = 0..mix[0].size()[0];
        for (out_thd, lse_th) in home(&merged.out_thd).into_iter().zip(home(&merged.lse_th)) {
            sum.add(&here, &attention::Partial { out_thd, lse_th });
        }
        sum.mixed(self.kind)
    }

    fn draw(&self, cp_group: &CpGroup, ask: &[Tensor], prompt: &Past, own: &AnswerState) -> Tensor {
        let q_ahd = ask[0].contiguous();
        let answers = q_ahd.size()[0];
        let sum = self.unseen(answers, &q_ahd);
        let all = 0..answers;
        let few = |k: &Tensor, v: &Tensor| attention::few(self.kernel, &q_ahd, k, v, self.scale);
        // The first position that the rows' window reaches.
        let first = self.window.map_or(0, |window| as_dim(own.newest().0) + 1 - window);
        for run in &prompt.runs {
            let (start, rows) = (as_dim(run.start.0), run.planes[0].size()[0]);
            let cut = (first - start).clamp(0, rows);
            if cut < rows {
                let seen = |plane: &Tensor| plane.narrow(0, cut, rows - cut);
                sum.add(&all, &few(&seen(&run.planes[0]), &seen(&run.planes[1])));
            }
        }
        let rows = own.seen(self.window);
        if rows[0].size()[1] > 0 {
            sum.add(&all, &few(&rows[0], &rows[1]));
        }
        if cp_group.axis.size() == 1 {
            return sum.out_thd.to_kind(self.kind);
        }
        // Every rank merges all parts in rank order, so that all hold the same bits.
        let counts = vec![Tokens(from_dim(answers)); cp_group.axis.size()];
        let (out_rhd, lse_rh) =
            (gather_rows(cp_group.axis, &sum.out_thd, &counts), gather_rows(cp_group.axis, &sum.lse_th, &counts));
        let merged = self.unseen(answers, &q_ahd);
        for rank in (0..cp_group.axis.size()).map(|rank| as_dim(from_index(rank))) {
            let part = |x: &Tensor| x.narrow(0, rank * answers, answers);
            merged.add(&all, &attention::Partial { out_thd: part(&out_rhd), lse_th: part(&lse_rh) });
        }
        merged.out_thd.to_kind(self.kind)
    }

    fn backward(&self, cp_group: &CpGroup, backward: Backward, past_gradient: &mut PastGradient) -> Vec<Tensor> {
        let Backward { span, mix, past, mixed, dout, later } = backward;
        let (acc, counts) = (accumulation(self.kind), span.counts());
        let gather = |x: &Tensor| gather_rows(cp_group.axis, x, &counts);
        let q_thd = gather(&mix[0]);
        let all = Gathered {
            dq_thd: Tensor::zeros(q_thd.size(), (acc, q_thd.device())),
            q_thd,
            out_thd: gather(&mixed.out),
            lse_th: gather(&mixed.saved[0]),
            dout_thd: gather(dout),
        };
        let own = Self::own_blocks(span, cp_group, &mix[1], &mix[2]);
        let own_gradient =
            later.unwrap_or_else(|| mix[1..].iter().map(|plane| plane.zeros_like().to_kind(acc)).collect());
        for queries in queries(span.gathered()) {
            for (run, gradient) in past.runs.iter().zip(&past_gradient.runs) {
                let gradient = run.carries.then_some(&gradient[..]);
                self.pull(&queries, &key_block(run.start, &run.planes), &all, gradient);
            }
            for (local, planes, piece) in &own {
                let gradient: Vec<_> = own_gradient.iter().map(|plane| rows(plane, local)).collect();
                self.pull(&queries, &key_block(piece.start, planes), &all, Some(&gradient));
            }
        }
        let dq = sum_in_order(&return_rows(cp_group.axis, &all.dq_thd, &counts));
        std::iter::once(dq).chain(own_gradient).map(|gradient| gradient.to_kind(self.kind)).collect()
    }
}
