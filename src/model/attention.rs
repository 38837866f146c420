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

use std::convert::Infallible;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::answers::AnswerState;
use super::attention_rows::{
    BackwardRows, KeyBlock, KeyValue, Merging, Queries, QueryRows, Rectangle, RowSum, rows, saved_lse,
};
use super::latent::LentIndex;
use super::mixer::{
    Backward, BlockBackward, BlockQueries, CaptureGradient, CpGroup, Mixed, MixedRow, Mixer, MixerInput, RingMixer,
    Route,
};
use super::past::{ChunkState, Past, PastGradient};
use super::planes::Planes;
use crate::prompt::layout::{PromptLayout, Run, Span, TileSizes, tiles};
use crate::prompt::pages::PlaneRow;
use crate::prompt::ring::{visit_runs, visit_runs_with_sums};
use crate::runtime::units::{Rank, as_dim, from_dim};
use crate::tensor::attention::{self, Merged, Partial};
use crate::tensor::kernels::Kernel;
use crate::tensor::{self, accumulation, fused};
use crate::world::exchange::{gather_rows, return_rows, sum_in_order};

/// Grouped-query attention with an optional sliding window.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Query heads, h.
    pub heads: i64,
    /// Key and value heads, g.
    pub kv_heads: i64,
    /// Width of a head, d.
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

/// Least multiply-adds of a forward rectangle of answers for which cuDNN's kernel makes a plan (0.15 s): answers have other lengths
/// in every update, and a plan serves one pair of sizes. The sizes of the prompt's blocks repeat.
const PLANNED_MIN: i64 = 1 << 37;

/// Whether later updates have rectangles of the same sizes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sizes {
    Repeat,
    Vary,
}

impl Attention {
    /// The kernel of a rectangle.
    fn kernel_of(&self, rectangle: &Rectangle, sizes: Sizes) -> Kernel {
        let rows = rectangle.query_rows.end - rectangle.query_rows.start;
        let keys = rectangle.key_rows.end - rectangle.key_rows.start;
        let is_small = rows.saturating_mul(keys).saturating_mul(self.heads * self.head_dim) < PLANNED_MIN;
        if self.kernel == Kernel::Cudnn && sizes == Sizes::Vary && is_small { Kernel::Flash } else { self.kernel }
    }

    /// Visible rectangles of `queries` and `keys`, none too large for a kernel's indices.
    fn rectangles(&self, queries: &QueryRows, keys: &KeyBlock) -> Vec<Rectangle> {
        let keys_max = if self.kernel == Kernel::Cpu { i64::MAX } else { KEYS_MAX };
        let window = match (self.kernel, self.window) {
            (Kernel::Plain, window) => Some(window.unwrap_or(i64::MAX / 2)),
            (_, window) => window,
        };
        let sizes = if self.kernel == Kernel::Cpu { TileSizes::CPU } else { TileSizes::PLAIN };
        let starts = keys.positions.clone().step_by(usize::try_from(keys_max).unwrap_or(usize::MAX));
        let part = |start: i64| {
            let part = start..start.saturating_add(keys_max).min(keys.positions.end);
            let part_first = start - keys.positions.start;
            tiles(queries.positions.clone(), part, window, sizes).into_iter().map(move |tile| {
                let key_rows = part_first + tile.keys.start..part_first + tile.keys.end;
                let query_rows = queries.first + tile.rows.start..queries.first + tile.rows.end;
                Rectangle { query_rows, kv: keys.kv.rows(&key_rows), key_rows, tile }
            })
        };
        starts.flat_map(part).collect()
    }

    /// Merges what `queries` see of `keys` into their output.
    fn attend(&self, sizes: Sizes, queries: &QueryRows, keys: &KeyBlock, q_thd: &Tensor, merging: &Merging) {
        for rectangle in self.rectangles(queries, keys) {
            let kernel = self.kernel_of(&rectangle, sizes);
            let Rectangle { query_rows, kv, tile, .. } = rectangle;
            let q_thd = rows(q_thd, &query_rows);
            let part = attention::forward(kernel, &q_thd, &kv.k_tgd, &kv.v_tgd, tile.visible, self.scale);
            merging.add(&query_rows, part);
        }
    }

    /// `rows` queries that have seen no key yet.
    fn no_keys_yet(&self, rows: i64, device: Device) -> Merging {
        Merging::new([rows, self.heads, self.head_dim], accumulation(self.kind), device)
    }

    /// Backward of [`Attention::attend`] with the merged output: adds dq of `queries`, and dk and dv of `keys` to
    /// `key_gradient` if they carry gradient.
    fn backward_attend(
        &self,
        sizes: Sizes,
        queries: &QueryRows,
        keys: &KeyBlock,
        all: &BackwardRows,
        key_gradient: Option<&KeyValue>,
    ) {
        for rectangle in self.rectangles(queries, keys) {
            let kernel = self.kernel_of(&rectangle, sizes);
            let Rectangle { query_rows, key_rows, kv, tile } = rectangle;
            let merged = Merged {
                q_thd: &rows(&all.q_thd, &query_rows),
                out_thd: &rows(&all.out_thd, &query_rows),
                lse_th: &rows(&all.lse_th, &query_rows),
                dout_thd: &rows(&all.dout_thd, &query_rows),
            };
            let part = attention::backward(kernel, &merged, &kv.k_tgd, &kv.v_tgd, tile.visible, self.scale);
            all.dq_thd.add(&query_rows, part.dq_thd);
            if let Some(gradient) = key_gradient {
                fused::add_into(&mut rows(&gradient.k_tgd, &key_rows), &part.dk_sgd);
                fused::add_into(&mut rows(&gradient.v_tgd, &key_rows), &part.dv_sgd);
            }
        }
    }

    /// Key blocks of a span's own rows on this rank.
    fn own_blocks(span: &Span, cp_group: &CpGroup, kv: &KeyValue) -> Vec<OwnBlock> {
        let rank = cp_group.axis.rank();
        let block = |(QueryRows { first, positions }, sequence): (QueryRows, usize)| {
            let local = first..first + positions.end - positions.start;
            OwnBlock { sequence, keys: KeyBlock { positions, kv: kv.rows(&local) }, local }
        };
        QueryRows::gathered(span.of(rank)).into_iter().zip(span.sequences_of(rank)).map(block).collect()
    }

    /// The gathered rows of a span, and the number of each one's sequence.
    fn own_queries(span: &Span) -> Vec<(QueryRows, usize)> {
        QueryRows::gathered(span.gathered()).into_iter().zip(span.gathered_sequences()).collect()
    }

    /// The gathered rows of a span as queries of keys that end before all of them. Only a window needs their own positions;
    /// without one every row sees every key, so that all are one stretch.
    fn behind(&self, span: &Span, keys: &KeyBlock) -> Vec<QueryRows> {
        if self.window.is_some() {
            return QueryRows::gathered(span.gathered());
        }
        let end = keys.positions.end;
        vec![QueryRows { first: 0, positions: end..end + span.rows().dim() }]
    }
}

/// Keys and values.
const STATE_PLANES: usize = 2;

/// Rows of the planes of both chunks of a rank, which have these rows.
fn rows_of_planes(chunks: [i64; 2]) -> Vec<i64> {
    chunks.iter().flat_map(|&rows| [rows; STATE_PLANES]).collect()
}

/// Keys of a span's own rows on this rank.
struct OwnBlock {
    sequence: usize,
    keys: KeyBlock,
    /// Their rows among this rank's.
    local: Range<i64>,
}

impl Mixer for Attention {
    fn planes(&self) -> Vec<PlaneRow> {
        vec![PlaneRow { shape: vec![self.kv_heads, self.head_dim], kind: self.kind }; 2]
    }

    fn mixed_row(&self) -> MixedRow {
        MixedRow { out: from_dim(self.heads * self.head_dim), saved: from_dim(self.heads) }
    }

    fn route(&self) -> Route<'_> {
        Route::Ring(self)
    }

    fn tells_sequences_apart(&self) -> bool {
        true
    }

    fn plain(
        &self,
        positions: Range<i64>,
        queries: &Planes,
        state: &Planes,
        _index: Option<LentIndex>,
        fused: bool,
    ) -> Tensor {
        let Queries { q_thd } = queries.into();
        let KeyValue { k_tgd, v_tgd } = state.into();
        let (acc, device) = (accumulation(self.kind), q_thd.device());
        let heads_each = self.heads / self.kv_heads;
        let all_heads = |x_tgd: &Tensor| x_tgd.repeat_interleave_self_int(heads_each, 1, None).transpose(0, 1);
        if fused && positions.start == 0 && self.window.is_none() {
            let heads_first = |x: &Tensor| x.transpose(0, 1).unsqueeze(0);
            // On a GPU the library has a float32 kernel for equal heads only, and would else write all scores out.
            let grouped = self.heads != self.kv_heads && (device == Device::Cpu || self.kind != Kind::Float);
            let of_state = |x: &Tensor| if grouped { heads_first(x) } else { all_heads(x).unsqueeze(0) };
            let (q, k, v) = (heads_first(&q_thd), of_state(&k_tgd), of_state(&v_tgd));
            let out = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, self.scale, grouped);
            return out.squeeze_dim(0).transpose(0, 1);
        }
        let k_hsd = all_heads(&k_tgd);
        let v_hsd = all_heads(&v_tgd);
        let scores_hts = q_thd.transpose(0, 1).matmul(&k_hsd.transpose(1, 2)).to_kind(acc) * self.scale;
        let row = Tensor::arange_start(positions.start, positions.end, (Kind::Int64, device)).unsqueeze(1);
        let ahead_ts = row - Tensor::arange(positions.end, (Kind::Int64, device)).unsqueeze(0);
        let hidden_ts = ahead_ts.lt(0).logical_or(&ahead_ts.ge(self.window.unwrap_or(i64::MAX)));
        let weights_hts = scores_hts.masked_fill(&hidden_ts, f64::NEG_INFINITY).softmax(-1, acc).to_kind(self.kind);
        weights_hts.matmul(&v_hsd).transpose(0, 1)
    }

    fn forward(
        &self,
        cp_group: &CpGroup,
        span: &Span,
        input: &MixerInput,
        past: &Past,
        _index: Option<LentIndex>,
    ) -> Mixed {
        let own_q = Queries::from(&input.queries);
        let own_kv = KeyValue::from(&input.state);
        // 1. Every rank gets the queries of all rows.
        let counts = span.counts();
        let q_thd = gather_rows(cp_group.axis, &own_q.q_thd, &counts);
        // 2. All rows attend to the pages and the span's rows of this rank.
        let merging = self.no_keys_yet(q_thd.size()[0], q_thd.device());
        for run in &past.runs {
            let keys = KeyBlock::new(run.start, KeyValue::from(&run.state));
            for queries in self.behind(span, &keys) {
                self.attend(Sizes::Vary, &queries, &keys, &q_thd, &merging);
            }
        }
        let own_blocks = Self::own_blocks(span, cp_group, &own_kv);
        // What sequences see of themselves is gathered and merged at once.
        let of_themselves = span.is_packed().then(|| self.no_keys_yet(q_thd.size()[0], q_thd.device()));
        for (queries, sequence) in Self::own_queries(span) {
            for block in own_blocks.iter().filter(|block| block.sequence == sequence) {
                self.attend(Sizes::Vary, &queries, &block.keys, &q_thd, of_themselves.as_ref().unwrap_or(&merging));
            }
        }
        if let Some(own) = of_themselves {
            merging.add_all(own);
        }
        // 3. Parts return to their rows' rank and are merged in rank order.
        if cp_group.axis.size() == 1 {
            return merging.finish(self.kind);
        }
        let home = |x: &Tensor| return_rows(cp_group.axis, x, &counts);
        let own_rows = own_q.q_thd.size()[0];
        let merged = self.no_keys_yet(own_rows, q_thd.device());
        let (out_thd, lse_th) = merging.into_acc();
        for (out_thd, lse_th) in home(&out_thd).into_iter().zip(home(&lse_th)) {
            merged.add(&(0..own_rows), Partial { out_thd, lse_th });
        }
        merged.finish(self.kind)
    }

    fn decode(
        &self,
        cp_group: &CpGroup,
        rows: &MixerInput,
        prompt: &Past,
        own: &mut AnswerState,
        _index: Option<LentIndex>,
    ) -> Tensor {
        let q_ahd = Queries::from(&rows.queries).q_thd.contiguous();
        let answers = q_ahd.size()[0];
        let all = 0..answers;
        let few = |kv: &KeyValue| attention::few(self.kernel, &q_ahd, &kv.k_tgd, &kv.v_tgd, self.scale);
        let merging = self.no_keys_yet(answers, q_ahd.device());
        // 1. The prompt rows of this rank from the first position on that the window reaches.
        let first = self.window.map_or(0, |window| as_dim(own.newest().0) + 1 - window);
        for run in &prompt.runs {
            let kv = KeyValue::from(&run.state);
            let rows = kv.k_tgd.size()[0];
            let hidden = (first - as_dim(run.start.0)).clamp(0, rows);
            if hidden < rows {
                merging.add(&all, few(&kv.rows(&(hidden..rows))));
            }
        }
        // 2. The answers' own rows on this rank, [answers, rows, g, d].
        let own_kv = KeyValue::from(&own.visible(self.window));
        if own_kv.k_tgd.size()[1] > 0 {
            merging.add(&all, few(&own_kv));
        }
        // 3. Parts of all ranks.
        merging.of_all_ranks(cp_group.axis, self.kind)
    }

    fn backward(
        &self,
        cp_group: &CpGroup,
        backward: Backward,
        past_gradient: &mut PastGradient,
    ) -> Result<MixerInput, tensor::Error> {
        let Backward { span, input, past, mixed, dout, later, .. } = backward;
        // 1. Every rank gets queries, merged outputs and output gradients of all rows.
        let counts = span.counts();
        let gather = |x: &Tensor| gather_rows(cp_group.axis, x, &counts);
        let q_thd = gather(&Queries::from(&input.queries).q_thd);
        let all = BackwardRows {
            dq_thd: RowSum::like(&q_thd),
            q_thd,
            out_thd: gather(&mixed.out),
            lse_th: gather(&saved_lse(mixed)),
            dout_thd: gather(dout),
        };
        // 2. dk and dv stay on the rank that holds the keys.
        let own_blocks = Self::own_blocks(span, cp_group, &KeyValue::from(&input.state));
        let own_gradient = later.unwrap_or_else(|| input.state.zero_gradient());
        let own_key_gradient = KeyValue::from(&own_gradient);
        for (run, gradient) in past.runs.iter().zip(&past_gradient.runs) {
            let keys = KeyBlock::new(run.start, KeyValue::from(&run.state));
            let gradient = gradient.as_ref().map(KeyValue::from);
            for queries in self.behind(span, &keys) {
                self.backward_attend(Sizes::Vary, &queries, &keys, &all, gradient.as_ref());
            }
        }
        for (queries, sequence) in Self::own_queries(span) {
            for block in own_blocks.iter().filter(|block| block.sequence == sequence) {
                let gradient = own_key_gradient.rows(&block.local);
                self.backward_attend(Sizes::Vary, &queries, &block.keys, &all, Some(&gradient));
            }
        }
        // 3. dq returns to the rows' rank and is summed in rank order.
        let q_thd = if cp_group.axis.size() == 1 {
            all.dq_thd.finish(self.kind)
        } else {
            let dq_thd = all.dq_thd.finish(accumulation(self.kind));
            sum_in_order(&return_rows(cp_group.axis, &dq_thd, &counts)).to_kind(self.kind)
        };
        Ok(MixerInput { queries: Queries { q_thd }.into(), state: own_gradient.to_kind(self.kind) })
    }
}

impl RingMixer for Attention {
    /// Keys and values of both chunks travel the ring together.
    fn capture(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: &[BlockQueries],
        own: ChunkState,
    ) -> Vec<Mixed> {
        let queries: Vec<(QueryRows, Queries)> =
            blocks.iter().map(|block| (QueryRows::alone(&block.piece), Queries::from(&block.queries))).collect();
        let merging: Vec<Merging> =
            queries.iter().map(|(_, q)| self.no_keys_yet(q.q_thd.size()[0], q.q_thd.device())).collect();
        let outcome: Result<(), Infallible> = visit_runs(
            cp_group.axis,
            cp_group.ledger,
            own.into_tensors(),
            &|rank| rows_of_planes(layout.chunks_of(rank).map(|run| run.rows().dim())),
            |rank, planes| {
                for (run, planes) in layout.chunks_of(rank).iter().zip(planes.chunks(STATE_PLANES)) {
                    let keys = KeyBlock::new(run.start, KeyValue::from(planes));
                    for ((rows, q), merging) in queries.iter().zip(&merging) {
                        self.attend(Sizes::Repeat, rows, &keys, &q.q_thd, merging);
                    }
                }
                Ok(())
            },
        );
        let Ok(()) = outcome;
        merging.into_iter().map(|merging| merging.finish(self.kind)).collect()
    }

    fn capture_no_rows(&self, blocks: &[BlockQueries]) -> Vec<Mixed> {
        let no_rows = |block: &BlockQueries| {
            let Queries { q_thd } = Queries::from(&block.queries);
            self.no_keys_yet(q_thd.size()[0], q_thd.device()).finish(self.kind)
        };
        blocks.iter().map(no_rows).collect()
    }

    /// Keys and values travel the ring as in capture, with float32 sums of dk and dv of their tail rows, which come home.
    fn capture_backward(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: Vec<BlockBackward>,
        own: ChunkState,
        later: ChunkState,
    ) -> CaptureGradient {
        let backward_rows = |backward: BlockBackward| {
            let Queries { q_thd } = Queries::from(&backward.block.queries);
            let dq_thd = RowSum::like(&q_thd);
            let lse_th = saved_lse(&backward.mixed);
            let out_thd = backward.mixed.out;
            let all = BackwardRows { q_thd, out_thd, lse_th, dout_thd: backward.dout, dq_thd };
            (QueryRows::alone(&backward.block.piece), all)
        };
        let blocks: Vec<(QueryRows, BackwardRows)> = blocks.into_iter().map(backward_rows).collect();
        let tail_start = |run: &Run| run.start.max(layout.cut());
        let tail_rows = |run: &Run| run.stop.since(tail_start(run)).dim();
        let visit = |rank: Rank, planes: &[Tensor], sums: &[Tensor]| {
            let chunks = planes.chunks(STATE_PLANES).zip(sums.chunks(STATE_PLANES));
            for (run, (planes, sums)) in layout.chunks_of(rank).iter().zip(chunks) {
                let kv = KeyValue::from(planes);
                let constant_rows = run.rows().dim() - tail_rows(run);
                let constants = KeyBlock::new(run.start, kv.rows(&(0..constant_rows)));
                let tail = KeyBlock::new(tail_start(run), kv.rows(&(constant_rows..run.rows().dim())));
                let tail_gradient = KeyValue::from(sums);
                for (rows, all) in &blocks {
                    self.backward_attend(Sizes::Repeat, rows, &constants, all, None);
                    self.backward_attend(Sizes::Repeat, rows, &tail, all, Some(&tail_gradient));
                }
            }
        };
        let sums = visit_runs_with_sums(
            cp_group.axis,
            cp_group.ledger,
            own.into_tensors(),
            later.into_tensors(),
            [&|rank| rows_of_planes(layout.chunks_of(rank).map(|run| run.rows().dim())), &|rank| {
                rows_of_planes(layout.chunks_of(rank).map(|run| tail_rows(&run)))
            }],
            visit,
        );
        let queries = blocks.into_iter().map(|(_, all)| Queries { q_thd: all.dq_thd.finish(self.kind) }.into());
        CaptureGradient { queries: queries.collect(), state: ChunkState::from_tensors(sums) }
    }
}
