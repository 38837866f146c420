//! Rows of a long prompt on the route on which every rank gathers the state of all: attention over latents.
//!
//! ```text
//!   forward    1. the keys of all rows go to the pages    2. keys of all ranks are gathered
//!              3. micro-block by micro-block: queries, index, attention, segment B
//!   backward   1. keys are gathered    2. micro-block by micro-block: everything but the keys' own segment A; gradient of
//!              keys adds up for all positions    3. it goes to the rows' owners and is summed in rank order
//!              4. micro-block by micro-block: segment A of the keys
//! ```

use tch::Tensor;

use super::prompt::{PromptOutput, PromptRows, Tail};
use super::{BackwardRows, Finishing, MicroBlock, Pass, SpanRows, micro_blocks};
use crate::model::latent::{IndexSet, Indexer, LatentAttention, LentIndex, QueryGradient};
use crate::model::mixer::Mixed;
use crate::model::past::PastGradient;
use crate::model::planes::Planes;
use crate::prompt::layout::{Piece, PromptLayout, Run, Span, positions};
use crate::prompt::pages::{Choice, Slab};
use crate::runtime::memory::{MemorySpace, Purpose};
use crate::runtime::units::{LayerIndex, Rank, Tokens, as_dim};
use crate::tensor;
use crate::tensor::accumulation;
use crate::tensor::boundary::{backward as backward_graph, storage_bytes};
use crate::world::exchange::{gather_rows, return_rows, sum_in_order};

/// The plane of keys, and that of index keys, in a page's state.
const KEYS: usize = 0;
const INDEX_KEYS: usize = 1;

impl Pass<'_> {
    pub(super) fn gathered_pieces(&self, span: &Span) -> Vec<Piece> {
        micro_blocks(span, &self.cp_group, self.micro_block).into_iter().map(|micro| micro.piece()).collect()
    }

    /// One plane of all ranks' pages, [P, …], in order of position.
    fn gathered_plane(&self, layout: &PromptLayout, slabs: &[Slab], plane: usize) -> Tensor {
        let filled = |slab: &Slab| slab.filled().swap_remove(plane);
        let own = Tensor::cat(&slabs.iter().map(filled).collect::<Vec<_>>(), 0);
        let axis = self.cp_group.axis;
        if axis.size() == 1 {
            return own;
        }
        let counts = rows_by_rank(layout, axis.size(), Run::rows);
        let all = gather_rows(axis, &own, &counts);
        let mut first = 0;
        let mut runs = Vec::new();
        for run in (0..axis.size()).flat_map(|rank| layout.chunks_of(Rank(rank))) {
            let rows = run.rows().dim();
            runs.push((run.start, all.narrow(0, first, rows)));
            first += rows;
        }
        runs.sort_by_key(|(start, rows)| (*start, rows.size()[0]));
        Tensor::cat(&runs.into_iter().map(|(_, rows)| rows).collect::<Vec<_>>(), 0)
    }

    /// Gradient of the keys of all tail positions, [N, k] in order of position, to their owners: the sum over ranks of this
    /// rank's tail rows.
    fn return_keys(&self, layout: &PromptLayout, dkey_gk: &Tensor) -> Tensor {
        let axis = self.cp_group.axis;
        if axis.size() == 1 {
            return dkey_gk.shallow_clone();
        }
        let of_run = |run: Run| {
            let start = run.start.max(layout.cut()).min(run.stop);
            let first = start.0.saturating_sub(layout.cut().0).min(layout.end().since(layout.cut()).0);
            dkey_gk.narrow(0, as_dim(first), run.stop.since(start).dim())
        };
        let parts: Vec<Tensor> = (0..axis.size()).flat_map(|rank| layout.chunks_of(Rank(rank))).map(of_run).collect();
        let counts = rows_by_rank(layout, axis.size(), |run| run.stop.since(run.start.max(layout.cut()).min(run.stop)));
        sum_in_order(&return_rows(axis, &Tensor::cat(&parts, 0), &counts))
    }

    /// Keys of one micro-block's rows, chosen over the index keys of all positions.
    fn choose_rows(
        &self,
        layer: LayerIndex,
        indexer: &Indexer,
        micro: &MicroBlock,
        x_tw: &Tensor,
        index_si: &Tensor,
    ) -> IndexSet {
        let range = positions(&micro.piece());
        let last = (range.end - 1).max(0);
        let projected = self.decoder.project_index(layer, &micro.rows_of(x_tw), range, self.adapters);
        indexer.choose_prompt(&projected.rows, index_si, last, indexer.top.min(index_si.size()[0]))
    }

    /// [`Pass::prompt`] where keys are gathered.
    pub(super) fn gathered_prompt(
        &self,
        latent: &LatentAttention,
        layer: LayerIndex,
        rows: &PromptRows,
        lent: Option<LentIndex>,
        keep: &mut dyn FnMut(&Piece, &Mixed) -> Result<(), tensor::Error>,
    ) -> Result<PromptOutput, tensor::Error> {
        let blocks = micro_blocks(&rows.layout.span(), &self.cp_group, self.micro_block);
        let indexer = self.decoder.indexer(layer);
        // 1. Keys of all rows go to the pages.
        for micro in blocks.iter().filter(|micro| micro.piece().rows().0 > 0) {
            let x_tw = micro.rows_of(rows.x_pw);
            let state = self.decoder.project_state(layer, &x_tw, &micro.positions(), self.adapters);
            rows.store(&micro.piece(), KEYS, state.tensors());
            if indexer.is_some() {
                let key_ti = self.decoder.project_index_keys(layer, &x_tw, positions(&micro.piece()), self.adapters);
                rows.store(&micro.piece(), INDEX_KEYS, &[key_ti]);
            }
        }
        // 2. Keys of all ranks.
        let key_sk = self.gathered_plane(rows.layout, rows.slabs, KEYS);
        let index_si = indexer.map(|_| self.gathered_plane(rows.layout, rows.slabs, INDEX_KEYS));
        let _foreign = self.hold_foreign(&[Some(&key_sk), index_si.as_ref()]);
        (rows.settle)()?;
        // 3. Queries, index, attention, segment B.
        let y_pw = rows.x_pw.empty_like();
        let held = rows.hold(&y_pw);
        let mut finishing = Finishing::new(self, layer, None);
        let mut sets = Vec::new();
        for micro in &blocks {
            let x_tw = micro.rows_of(rows.x_pw);
            let chosen = match (indexer, &index_si) {
                (Some(indexer), Some(index_si)) => Some(self.choose_rows(layer, indexer, micro, rows.x_pw, index_si)),
                _ => None,
            };
            let position_tn = match (&chosen, lent) {
                (Some(chosen), _) => chosen.lend().positions().shallow_clone(),
                (None, Some(lent)) => micro.rows_of(lent.positions()),
                (None, None) => unreachable!("the first layer owns an index"),
            };
            let queries = self.decoder.project_queries(layer, &x_tw, &micro.positions(), self.adapters);
            let mixed = latent.prompt(&queries.tensors()[0], &key_sk, &position_tn);
            keep(&micro.piece(), &mixed)?;
            finishing.rows(micro, rows.x_pw, &mixed.out, &Planes::default(), &y_pw);
            sets.extend(chosen);
        }
        let index = (!sets.is_empty()).then(|| IndexSet::join(&sets));
        Ok(PromptOutput { y_pw, held, index, experts: finishing.end() })
    }

    fn hold_foreign(&self, planes: &[Option<&Tensor>]) -> crate::runtime::memory::Held {
        let bytes = planes.iter().flatten().map(|plane| storage_bytes(plane)).sum();
        self.cp_group.ledger.hold(Purpose::Foreign, MemorySpace::Device, bytes)
    }

    /// Chooses the keys of a tail's rows again, by the rule and from the numbers of capture, and keeps them. `layer` owns an
    /// index; `x_tw` is its input.
    ///
    /// # Errors
    /// When they cannot be kept.
    pub fn choose_tail(&self, layer: LayerIndex, x_tw: &Tensor, tail: &Tail) -> Result<(), tensor::Error> {
        let Some(indexer) = self.decoder.indexer(layer) else { return Ok(()) };
        tch::no_grad(|| {
            let index_si = self.gathered_plane(tail.layout, tail.staged.slabs(), INDEX_KEYS);
            let blocks = micro_blocks(tail.span, &self.cp_group, self.micro_block);
            let sets: Vec<IndexSet> =
                blocks.iter().map(|micro| self.choose_rows(layer, indexer, micro, x_tw, &index_si)).collect();
            tail.choices.put(Choice::Index, layer, IndexSet::join(&sets).lend().positions())
        })
    }

    /// The keys of a tail's rows, chosen before.
    fn tail_index(&self, layer: LayerIndex, tail: &Tail) -> Result<IndexSet, tensor::Error> {
        let owner = self.decoder.index_owner(layer).unwrap_or(layer);
        let kept = tail.choices.stage(Choice::Index, owner)?;
        Ok(IndexSet::staged(kept.expect("a tail's keys are chosen before its rows are computed again")))
    }

    /// The mixer's output of one micro-block of a tail, as it was kept or computed.
    fn tail_block(
        latent: &LatentAttention,
        number: usize,
        layer: LayerIndex,
        tail: &Tail,
        parts: &TailParts,
    ) -> Result<Mixed, tensor::Error> {
        match tail.kept {
            Some(pool) if parts.q_thk.size()[0] > 0 => {
                let (out, saved) = pool.get(layer, number)?.expect("output is kept for every block or for none");
                Ok(Mixed { out, saved: saved.into() })
            }
            _ => Ok(latent.prompt(parts.q_thk, parts.key_sk, parts.position_tn)),
        }
    }

    /// [`Pass::forward_tail`] where keys are gathered.
    pub(super) fn gathered_forward_tail(
        &self,
        latent: &LatentAttention,
        layer: LayerIndex,
        x_tw: &Tensor,
        tail: &Tail,
    ) -> Result<Tensor, tensor::Error> {
        let blocks = micro_blocks(tail.span, &self.cp_group, self.micro_block);
        let key_sk = self.gathered_plane(tail.layout, tail.staged.slabs(), KEYS);
        let _held = self.hold_foreign(&[Some(&key_sk)]);
        let index = self.tail_index(layer, tail)?;
        let kept = tail.choices.stage(Choice::Experts, layer)?;
        let y_tw = x_tw.empty_like();
        let mut finishing = Finishing::new(self, layer, kept.as_deref());
        for (number, micro) in blocks.iter().enumerate() {
            let x = micro.rows_of(x_tw);
            let queries = self.decoder.project_queries(layer, &x, &micro.positions(), self.adapters);
            let position_tn = micro.rows_of(index.lend().positions());
            let parts = TailParts { q_thk: &queries.tensors()[0], key_sk: &key_sk, position_tn: &position_tn };
            let mixed = Self::tail_block(latent, number, layer, tail, &parts)?;
            finishing.rows(micro, x_tw, &mixed.out, &Planes::default(), &y_tw);
        }
        Ok(y_tw)
    }

    /// [`Pass::backward_tail`] where keys are gathered.
    pub(super) fn gathered_backward_tail(
        &self,
        latent: &LatentAttention,
        layer: LayerIndex,
        rows: &SpanRows,
        tail: &Tail,
        later: PastGradient,
    ) -> Result<Tensor, tensor::Error> {
        let SpanRows { span, x_tw, .. } = *rows;
        let acc = accumulation(self.decoder.kind());
        let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
        // 1. Keys of all ranks.
        let key_sk = self.gathered_plane(tail.layout, tail.staged.slabs(), KEYS);
        let cut = as_dim(tail.layout.cut().0);
        let dkey_gk = Tensor::zeros([key_sk.size()[0] - cut, key_sk.size()[1]], (acc, key_sk.device()));
        let held = self.hold_foreign(&[Some(&key_sk), Some(&dkey_gk)]);
        let index = self.tail_index(layer, tail)?;
        let kept = rows.choices.stage(Choice::Experts, layer)?;
        // 2. Everything but the keys' own segment A.
        let dx_tw = x_tw.detach().empty_like();
        for (number, micro) in blocks.iter().enumerate() {
            let range = micro.positions();
            let x = micro.rows_of(x_tw);
            let position_tn = micro.rows_of(index.lend().positions());
            let queries = tch::no_grad(|| self.decoder.project_queries(layer, &x, &range, self.adapters));
            let q_thk = &queries.tensors()[0];
            let parts = TailParts { q_thk, key_sk: &key_sk, position_tn: &position_tn };
            let mixed = tch::no_grad(|| Self::tail_block(latent, number, layer, tail, &parts))?;
            let b = BackwardRows { micro, rows, kept: kept.as_deref() };
            let done = self.backward_finish(layer, &b, &mixed.out, &Planes::default())?;
            micro.rows_of(&dx_tw).copy_(&done.dx_tw);
            let rows_of =
                QueryGradient { q_thk, out_thc: &mixed.out, lse_th: &mixed.saved.tensors()[0], dout_thc: &done.dmixed };
            let dq_thk = tch::no_grad(|| latent.prompt_backward(&rows_of, &key_sk, &position_tn, cut, &dkey_gk));
            let leaf = x.detach().set_requires_grad(true);
            let again = self.decoder.project_queries(layer, &leaf, &range, self.adapters);
            backward_graph(&[(&again.tensors()[0], &dq_thk)])?;
            let _ = micro.rows_of(&dx_tw).g_add_(&leaf.grad());
        }
        drop(key_sk);
        // 3. Gradient of the keys goes to their owners.
        let mut dkey_tk = self.return_keys(tail.layout, &dkey_gk);
        drop((dkey_gk, held));
        if let Some(later) = later.into_tail() {
            dkey_tk += &later.tensors()[0];
        }
        let dkey_tk = dkey_tk.to_kind(self.decoder.kind());
        // 4. Segment A of the keys.
        for micro in blocks.iter().filter(|micro| micro.piece().rows().0 > 0) {
            let leaf = micro.rows_of(x_tw).detach().set_requires_grad(true);
            let state = self.decoder.project_state(layer, &leaf, &micro.positions(), self.adapters);
            backward_graph(&[(&state.tensors()[0], &micro.rows_of(&dkey_tk))])?;
            let _ = micro.rows_of(&dx_tw).g_add_(&leaf.grad());
        }
        Ok(dx_tw)
    }
}

/// What attention reads of one micro-block of a tail.
struct TailParts<'a> {
    q_thk: &'a Tensor,
    key_sk: &'a Tensor,
    position_tn: &'a Tensor,
}

/// How many rows of both its chunks each rank contributes.
fn rows_by_rank(layout: &PromptLayout, ranks: usize, rows: impl Fn(&Run) -> Tokens) -> Vec<Tokens> {
    (0..ranks).map(|rank| layout.chunks_of(Rank(rank)).iter().map(&rows).sum()).collect()
}
