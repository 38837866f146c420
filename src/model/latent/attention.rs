//! Attention over latents in absorbed form: one key a position for all heads, whose leading part is the value too.
//!
//! How it departs from the textbook:
//! 1. Each query sees the keys of its index set and no others. They are gathered for some queries at a time, so no tensor of
//!    queries × keys outlives a micro-block.
//! 2. A query's output is merged from the parts of all ranks by log-sum-exp; backward per part with the merged output and
//!    log-sum-exp is exact. Gradient of keys is scattered to the rank that owns them and summed there.
//! 3. Answers' queries go to every rank, as in `attention`. For prompt rows the keys of all ranks are gathered instead: a key
//!    is 64 times smaller than a row's queries.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::index::LentIndex;
use super::keys::{Found, KeyRun, Keys};
use crate::model::answers::AnswerState;
use crate::model::attention_rows::{Merging, saved_lse};
use crate::model::mixer::{Backward, CpGroup, Mixed, MixedRow, Mixer, MixerInput, Route};
use crate::model::past::{Past, PastGradient};
use crate::model::planes::Planes;
use crate::prompt::layout::{Span, positions};
use crate::prompt::pages::PlaneRow;
use crate::runtime::units::{Tokens, as_dim, from_dim, from_index};
use crate::tensor::attention::Partial;
use crate::tensor::{self, accumulation};
use crate::world::exchange::{gather_rows, return_rows, sum_in_order};

/// Attention over latents, with a key of `latent + rotated` elements for all heads.
#[derive(Clone, Debug)]
pub struct LatentAttention {
    /// Query heads, h.
    pub heads: i64,
    /// Width of the latent, c: keys and values.
    pub latent: i64,
    /// Width of a key's rotated part.
    pub rotated: i64,
    /// Width of the index key that the layer leaves on its pages; `None` where it does not choose keys.
    pub index_dim: Option<i64>,
    /// Scores are multiplied by this.
    pub scale: f64,
    /// The model's dtype.
    pub kind: Kind,
}

/// Most elements of keys that are gathered at one time: 256 MiB in bfloat16.
pub const GATHERED_ELEMENTS_MAX: i64 = 1 << 27;
/// Rows of all ranks together whose queries meet on every rank at one time.
const ROUND_ROWS: u64 = 2048;

/// Queries of some rows, with what backward adds of them.
pub(crate) struct QueryGradient<'a> {
    pub(crate) q_thk: &'a Tensor,
    pub(crate) out_thc: &'a Tensor,
    pub(crate) lse_th: &'a Tensor,
    pub(crate) dout_thc: &'a Tensor,
}

/// The one query plane.
fn queries(planes: &Planes) -> &Tensor {
    let [q_thk] = planes.tensors() else { unreachable!("attention over latents has one query plane") };
    q_thk
}

/// The plane of keys.
fn key_plane(planes: &Planes) -> &Tensor {
    &planes.tensors()[0]
}

impl LatentAttention {
    fn key_width(&self) -> i64 {
        self.latent + self.rotated
    }

    /// a · b of batches of matrices in the accumulation dtype.
    fn product(&self, a: &Tensor, b: &Tensor) -> Tensor {
        let acc = accumulation(self.kind);
        match a.device() {
            Device::Cuda(_) if self.kind != acc => a.bmm_dtype(b, acc),
            _ => a.to_kind(acc).bmm(&b.to_kind(acc)),
        }
    }

    /// Queries that are gathered for at one time.
    fn rows_at_once(&self, width: i64) -> i64 {
        (GATHERED_ELEMENTS_MAX / (width.max(1) * self.key_width())).max(1)
    }

    /// Scores of gathered keys, [t, h, m] in the accumulation dtype, −∞ where there is none.
    fn scores(&self, q_thk: &Tensor, key_tmk: &Tensor, absent_tm: &Tensor) -> Tensor {
        // In place: each pass over the scores takes as long as a product.
        let mut score_thm = self.product(q_thk, &key_tmk.transpose(1, 2));
        let _ = score_thm.g_mul_scalar_(self.scale);
        score_thm.masked_fill_(&absent_tm.unsqueeze(1), f64::NEG_INFINITY)
    }

    /// Softmax weights under a log-sum-exp, [t, h, m], in the place of the scores; 0 where a row has no key at all.
    fn weights(mut score_thm: Tensor, lse_th: &Tensor) -> Tensor {
        let base = lse_th.masked_fill(&lse_th.isneginf(), 0.0).unsqueeze(-1);
        let _ = score_thm.g_sub_(&base);
        score_thm.exp_()
    }

    /// What queries see of their own gathered keys: output [t, h, c] and log-sum-exp [t, h], in the accumulation dtype.
    fn softmax(&self, mut score_thm: Tensor, value_tmc: &Tensor) -> Partial {
        let most_th1 = score_thm.amax([-1i64], true);
        let base = most_th1.masked_fill(&most_th1.isneginf(), 0.0);
        let _ = score_thm.g_sub_(&base);
        let weight_thm = score_thm.exp_();
        let sum_th1 = weight_thm.sum_dim_intlist([-1i64].as_slice(), true, weight_thm.kind());
        let mut out_thd = self.product(&weight_thm.to_kind(self.kind), value_tmc);
        let _ = out_thd.g_div_(&sum_th1.clamp_min(1e-30));
        Partial { out_thd, lse_th: (base + sum_th1.log()).squeeze_dim(-1) }
    }

    /// What `q_thk` see of the keys that were found for them.
    pub(super) fn attend(&self, q_thk: &Tensor, keys: &Keys, found: &Found) -> Merging {
        let (rows, width) = (q_thk.size()[0], found.width());
        let merging = Merging::new([rows, self.heads, self.latent], accumulation(self.kind), q_thk.device());
        if width > 0 && keys.rows() > 0 {
            for part in blocks(rows, self.rows_at_once(width)) {
                let gathered = keys.gather(found, &part);
                let q = q_thk.narrow(0, part.start, part.end - part.start);
                let score_thm = self.scores(&q, &gathered.key_tmk, &gathered.absent_tm);
                merging.add(&part, self.softmax(score_thm, &gathered.key_tmk.narrow(2, 0, self.latent)));
            }
        }
        merging
    }

    /// Backward of [`LatentAttention::attend`] with merged outputs: dq in the accumulation dtype. Gradient of keys adds up in
    /// `keys`.
    pub(super) fn backward_attend(&self, rows_of: &QueryGradient, keys: &Keys, found: &Found) -> Tensor {
        let acc = accumulation(self.kind);
        let (rows, width) = (rows_of.q_thk.size()[0], found.width());
        let dq_thk = Tensor::zeros(rows_of.q_thk.size(), (acc, rows_of.q_thk.device()));
        if width == 0 || keys.rows() == 0 {
            return dq_thk;
        }
        for part in blocks(rows, self.rows_at_once(width) / 2) {
            let of = |x: &Tensor| x.narrow(0, part.start, part.end - part.start);
            let (q, dout) = (of(rows_of.q_thk), of(rows_of.dout_thc));
            let gathered = keys.gather(found, &part);
            let value_tmc = gathered.key_tmk.narrow(2, 0, self.latent);
            let score_thm = self.scores(&q, &gathered.key_tmk, &gathered.absent_tm);
            let weight_thm = Self::weights(score_thm, &of(rows_of.lse_th));
            let dweight_thm = self.product(&dout, &value_tmc.transpose(1, 2));
            let shift_th1 =
                (of(rows_of.out_thc).to_kind(acc) * dout.to_kind(acc)).sum_dim_intlist([-1i64].as_slice(), true, acc);
            let mut dscore_thm = dweight_thm;
            let _ = dscore_thm.g_sub_(&shift_th1);
            let _ = dscore_thm.g_mul_(&weight_thm);
            let _ = dscore_thm.g_mul_scalar_(self.scale);
            let dscore_thm = dscore_thm.to_kind(self.kind);
            of(&dq_thk).copy_(&self.product(&dscore_thm, &gathered.key_tmk));
            if keys.carries_gradient() {
                let dkey_tmk = self.product(&dscore_thm.transpose(1, 2), &q);
                let dvalue_tmc = self.product(&weight_thm.to_kind(self.kind).transpose(1, 2), &dout);
                let _ = dkey_tmk.narrow(2, 0, self.latent).g_add_(&dvalue_tmc);
                keys.add_gradient(&gathered, &dkey_tmk);
            }
        }
        dq_thk
    }

    /// Prompt rows over the keys of all positions from 0 on, [P, k]: output in the model's dtype, and log-sum-exp.
    pub(crate) fn prompt(&self, q_thk: &Tensor, key_sk: &Tensor, position_tn: &Tensor) -> Mixed {
        let keys = all_keys(key_sk, None);
        let found = keys.find(position_tn);
        self.attend(q_thk, &keys, &found).finish(self.kind)
    }

    /// Backward of [`LatentAttention::prompt`]: dq in the model's dtype. Gradient of the keys at positions from `cut` on adds
    /// up in `gradient_gk`, in the accumulation dtype.
    pub(crate) fn prompt_backward(
        &self,
        rows_of: &QueryGradient,
        key_sk: &Tensor,
        position_tn: &Tensor,
        cut: i64,
        gradient_gk: &Tensor,
    ) -> Tensor {
        let keys = all_keys(key_sk, Some((cut, gradient_gk)));
        let found = keys.find(position_tn);
        self.backward_attend(rows_of, &keys, &found).to_kind(self.kind)
    }
}

/// Keys of all positions from 0 on; `tail` is where those that carry gradient begin, and their gradient.
fn all_keys(key_sk: &Tensor, tail: Option<(i64, &Tensor)>) -> Keys {
    let end = key_sk.size()[0];
    let run = |positions: Range<i64>, gradient_sk| KeyRun {
        key_sk: key_sk.narrow(0, positions.start, positions.end - positions.start),
        positions,
        gradient_sk,
    };
    let runs = match tail {
        Some((cut, gradient)) if cut < end => {
            vec![run(0..cut, None), run(cut..end, Some(gradient.shallow_clone()))]
        }
        _ => vec![run(0..end, None)],
    };
    Keys::of_one(runs, key_sk)
}

/// Keys that this rank holds for rows of a span: the past's, then the span's own. `gradients` are theirs.
fn held_keys(
    cp_group: &CpGroup,
    span: &Span,
    own_tk: &Tensor,
    past: &Past,
    gradients: Option<(&PastGradient, &Tensor)>,
) -> Vec<KeyRun> {
    let mut runs = Vec::new();
    for (number, run) in past.runs.iter().enumerate() {
        let key_sk = key_plane(&run.state).shallow_clone();
        let start = as_dim(run.start.0);
        let gradient = gradients.and_then(|(past, _)| past.runs[number].as_ref());
        runs.push(KeyRun {
            positions: start..start + key_sk.size()[0],
            key_sk,
            gradient_sk: gradient.map(|planes| key_plane(planes).shallow_clone()),
        });
    }
    let mut first = 0;
    for piece in span.of(cp_group.axis.rank()) {
        let rows = piece.rows().dim();
        let gradient_sk = gradients.map(|(_, own)| own.narrow(0, first, rows));
        runs.push(KeyRun { positions: positions(piece), key_sk: own_tk.narrow(0, first, rows), gradient_sk });
        first += rows;
    }
    runs
}

/// 0..rows in stretches of at most `most`.
fn blocks(rows: i64, most: i64) -> impl Iterator<Item = Range<i64>> {
    let most = most.max(1);
    let step = usize::try_from(most).unwrap_or(usize::MAX);
    (0..rows).step_by(step).map(move |start| start..(start + most).min(rows))
}

/// The rows of every rank in one round, and this rank's first of them.
fn rounds(counts: &[Tokens]) -> impl Iterator<Item = (u64, Vec<Tokens>)> {
    let most = counts.iter().map(|count| count.0).max().unwrap_or(0);
    let each = (ROUND_ROWS / from_index(counts.len().max(1))).max(1);
    (0..most.div_ceil(each)).map(move |round| {
        let first = round * each;
        (first, counts.iter().map(|count| Tokens(count.0.saturating_sub(first).min(each))).collect())
    })
}

/// This rank's rows of a round; a view.
fn of_round(x: &Tensor, first: u64, rows: Tokens) -> Tensor {
    let first = as_dim(first).min(x.size()[0]);
    x.narrow(0, first, rows.dim())
}

impl Mixer for LatentAttention {
    fn planes(&self) -> Vec<PlaneRow> {
        let widths = std::iter::once(self.key_width()).chain(self.index_dim);
        widths.map(|width| PlaneRow { shape: vec![width], kind: self.kind }).collect()
    }

    fn gradient_planes(&self) -> usize {
        1
    }

    fn mixed_row(&self) -> MixedRow {
        MixedRow { out: from_dim(self.heads * self.latent), saved: from_dim(self.heads) }
    }

    fn route(&self) -> Route<'_> {
        Route::Gathered(self)
    }

    fn plain(
        &self,
        rows: Range<i64>,
        planes: &Planes,
        state: &Planes,
        index: Option<LentIndex>,
        _fused: bool,
    ) -> Tensor {
        let (q_thk, key_sk) = (queries(planes), key_plane(state));
        let acc = accumulation(self.kind);
        let end = key_sk.size()[0];
        let position_tn = index.expect("attention over latents sees an index set").positions().to_kind(Kind::Int64);
        // One more column takes the places without a key.
        let column_tn =
            Tensor::full([1, 1], end, (Kind::Int64, key_sk.device())).where_self(&position_tn.lt(0), &position_tn);
        let seen = Tensor::zeros([rows.end - rows.start, end + 1], (Kind::Bool, key_sk.device()));
        let hidden_ts = seen.scatter_value(1, &column_tn, 1).narrow(1, 0, end).logical_not();
        let score_hts = q_thk.transpose(0, 1).matmul(&key_sk.transpose(0, 1)).to_kind(acc) * self.scale;
        let weight_hts = score_hts.masked_fill(&hidden_ts, f64::NEG_INFINITY).softmax(-1, acc).to_kind(self.kind);
        weight_hts.matmul(&key_sk.narrow(1, 0, self.latent)).transpose(0, 1)
    }

    fn forward(
        &self,
        cp_group: &CpGroup,
        span: &Span,
        input: &MixerInput,
        past: &Past,
        index: Option<LentIndex>,
    ) -> Mixed {
        let index = index.expect("attention over latents sees an index set");
        let own_q = queries(&input.queries);
        let (acc, device, rows) = (accumulation(self.kind), own_q.device(), own_q.size()[0]);
        let runs = held_keys(cp_group, span, key_plane(&input.state), past, None);
        let keys = Keys::new(runs, self.key_width(), self.kind, device);
        let all = Merging::new([rows, self.heads, self.latent], acc, device);
        for (first, counts) in rounds(&span.counts()) {
            let here = counts[cp_group.axis.rank().0];
            let q_thk = gather_rows(cp_group.axis, &of_round(own_q, first, here), &counts);
            let position_tn = gather_rows(cp_group.axis, &of_round(index.positions(), first, here), &counts);
            let (out_thd, lse_th) = self.attend(&q_thk, &keys, &keys.find(&position_tn)).into_acc();
            let home = |x: &Tensor| return_rows(cp_group.axis, x, &counts);
            let range = as_dim(first)..as_dim(first) + here.dim();
            if here.0 == 0 {
                let _ = (home(&out_thd), home(&lse_th));
                continue;
            }
            for (out_thd, lse_th) in home(&out_thd).into_iter().zip(home(&lse_th)) {
                all.add(&range, Partial { out_thd, lse_th });
            }
        }
        all.finish(self.kind)
    }

    fn decode(
        &self,
        cp_group: &CpGroup,
        rows: &MixerInput,
        prompt: &Past,
        own: &mut AnswerState,
        index: Option<LentIndex>,
    ) -> Tensor {
        let index = index.expect("attention over latents sees an index set");
        let q_ahk = queries(&rows.queries);
        let (acc, answers, device) = (accumulation(self.kind), q_ahk.size()[0], q_ahk.device());
        let merging = Merging::new([answers, self.heads, self.latent], acc, device);
        let all = 0..answers;
        // 1. The prompt's keys on this rank.
        for run in &prompt.runs {
            let key_sk = key_plane(&run.state).shallow_clone();
            let start = as_dim(run.start.0);
            let run = KeyRun { positions: start..start + key_sk.size()[0], key_sk, gradient_sk: None };
            let keys = Keys::new(vec![run], self.key_width(), self.kind, device);
            let (out_thd, lse_th) = self.attend(q_ahk, &keys, &keys.find(index.positions())).into_acc();
            merging.add(&all, Partial { out_thd, lse_th });
        }
        // 2. The answers' own keys on this rank, [answers, rows, k].
        let own_ark = key_plane(&own.visible(None)).shallow_clone();
        let held = own_ark.size()[1];
        if held > 0 {
            let (first, step) = own.dealt();
            let row_an = index.positions().to_kind(Kind::Int64) - first;
            let here = row_an.ge(0).logical_and(&row_an.remainder(step).eq(0));
            let row_an = row_an.divide_scalar_mode(step, "floor");
            let column_an = Tensor::full([1, 1], held, (Kind::Int64, device)).where_self(&here.logical_not(), &row_an);
            let seen = Tensor::zeros([answers, held + 1], (Kind::Bool, device)).scatter_value(1, &column_an, 1);
            let score_ahr = self.scores(q_ahk, &own_ark, &seen.narrow(1, 0, held).logical_not());
            merging.add(&all, self.softmax(score_ahr, &own_ark.narrow(2, 0, self.latent)));
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
        let Backward { span, input, past, mixed, dout, later, index } = backward;
        let index = index.expect("attention over latents sees an index set");
        let own_q = queries(&input.queries);
        let (acc, device) = (accumulation(self.kind), own_q.device());
        let lse_th = saved_lse(mixed);
        let own_gradient = later.unwrap_or_else(|| input.state.zero_gradient());
        let own_gradient_tk = key_plane(&own_gradient).shallow_clone();
        let held = |past_gradient: &PastGradient| {
            let gradients = Some((past_gradient, &own_gradient_tk));
            held_keys(cp_group, span, key_plane(&input.state), past, gradients)
        };
        let keys = Keys::new(held(past_gradient), self.key_width(), self.kind, device);
        let dq_thk = Tensor::zeros(own_q.size(), (acc, device));
        for (first, counts) in rounds(&span.counts()) {
            let here = counts[cp_group.axis.rank().0];
            let gather = |x: &Tensor| gather_rows(cp_group.axis, &of_round(x, first, here), &counts);
            let rows_of = QueryGradient {
                q_thk: &gather(own_q),
                out_thc: &gather(&mixed.out),
                lse_th: &gather(&lse_th),
                dout_thc: &gather(dout),
            };
            let found = keys.find(&gather(index.positions()));
            let part = self.backward_attend(&rows_of, &keys, &found);
            let parts = return_rows(cp_group.axis, &part, &counts);
            of_round(&dq_thk, first, here).copy_(&sum_in_order(&parts));
        }
        keys.return_gradient(&mut held(past_gradient));
        Ok(MixerInput {
            queries: vec![dq_thk.to_kind(self.kind)].into(),
            state: vec![own_gradient_tk.to_kind(self.kind)].into(),
        })
    }
}
