//! Segments of blocks with attention over latents: absorbed queries, keys, the index's rows, and the heads' values.
//!
//! `kv_b_proj` is never applied to keys: its key half acts on queries and its value half on outputs, with their adapter's
//! halves beside them, so that what pages keep is the latent alone.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::index::{IndexProjected, row_positions};
use crate::model::formulas::Formulas;
use crate::model::lora::Adapters;
use crate::model::parts::LatentSpec;
use crate::model::rope::rotate_interleaved;
use crate::model::rotation::Rotation;
use crate::prompt::layout::Positions;
use crate::runtime::units::{LayerIndex, as_dim, float};
use crate::tensor::accumulation;
use crate::tensor::selection::IndexRows;

/// Epsilon of the index keys' norm.
const INDEX_NORM_EPS: f64 = 1e-6;

/// Which half of `kv_b_proj`.
#[derive(Clone, Copy)]
enum Half {
    Key,
    Value,
}

/// The projections of one block's attention over latents.
pub(in crate::model) struct LatentBlock<'a> {
    pub(in crate::model) formulas: &'a Formulas,
    pub(in crate::model) rotation: &'a Rotation,
    pub(in crate::model) latent: &'a LatentSpec,
    pub(in crate::model) layer: LayerIndex,
    pub(in crate::model) adapters: &'a Adapters,
}

impl LatentBlock<'_> {
    fn name(&self, part: &str) -> String {
        format!("model.layers.{}.self_attn.{part}", self.layer)
    }

    /// The rows that attention reads, [t, w].
    fn normed(&self, x_tw: &Tensor) -> Tensor {
        self.formulas.norm(x_tw, &format!("model.layers.{}.input_layernorm", self.layer))
    }

    /// Compressed queries, [t, `query_rank`].
    fn compressed(&self, normed_tw: &Tensor) -> Tensor {
        let low = self.formulas.linear(normed_tw, &self.name("q_a_proj"), self.adapters);
        self.formulas.norm_with(&low, &self.name("q_a_layernorm"), self.latent.norm_eps)
    }

    /// Absorbed queries with their rotated part, [t, h, c + r].
    pub(in crate::model) fn queries(&self, x_tw: &Tensor, positions: &Positions) -> Tensor {
        let rows = x_tw.size()[0];
        let compressed = self.compressed(&self.normed(x_tw));
        let q_tn = self.formulas.linear(&compressed, &self.name("q_b_proj"), self.adapters);
        let heads = as_dim(self.formulas.spec.query_heads);
        let (plain, rotated) = (as_dim(self.latent.plain), as_dim(self.latent.rotated));
        let q_thd = q_tn.view([rows, heads, plain + rotated]);
        let angles = self.rotation.angles(positions);
        let q_rope = rotate_interleaved(&q_thd.narrow(2, plain, rotated), &angles.cos_td, &angles.sin_td);
        let q_thc = self.by_head(&q_thd.narrow(2, 0, plain), Half::Key);
        Tensor::cat(&[q_thc, q_rope], 2)
    }

    /// Keys of rows, [t, c + r]: the latent after its norm, and the rotated part.
    pub(in crate::model) fn keys(&self, x_tw: &Tensor, positions: &Positions) -> Tensor {
        let (latent, rotated) = (as_dim(self.latent.latent), as_dim(self.latent.rotated));
        let both = self.formulas.linear(&self.normed(x_tw), &self.name("kv_a_proj_with_mqa"), self.adapters);
        let latent_tc =
            self.formulas.norm_with(&both.narrow(1, 0, latent), &self.name("kv_a_layernorm"), self.latent.norm_eps);
        let angles = self.rotation.angles(positions);
        let rope = rotate_interleaved(&both.narrow(1, latent, rotated).unsqueeze(1), &angles.cos_td, &angles.sin_td);
        Tensor::cat(&[latent_tc, rope.squeeze_dim(1)], 1)
    }

    /// The heads' values, [t, h · `value_dim`], of attention's output over latents, [t, h, c].
    pub(in crate::model) fn values(&self, mixed_thc: &Tensor) -> Tensor {
        self.by_head(mixed_thc, Half::Value).flatten(1, 2)
    }

    /// The rows of each head times that head's half of `kv_b_proj` with its adapter: the key half towards the latent, the value
    /// half from it. The adapter keeps its rank, since a weight in half precision would lose most of what an adapter adds to it.
    fn by_head(&self, x_thn: &Tensor, half: Half) -> Tensor {
        let module = self.name("kv_b_proj");
        let (plain, value) = (as_dim(self.latent.plain), as_dim(self.latent.value_dim));
        let heads = as_dim(self.formulas.spec.query_heads);
        let (first, rows) = match half {
            Half::Key => (0, plain),
            Half::Value => (plain, value),
        };
        let of_heads = |weight: &Tensor| {
            let columns = weight.size()[1];
            weight.view([heads, plain + value, columns]).narrow(1, first, rows)
        };
        let kind = self.formulas.kind;
        let weight_hdc = of_heads(&self.formulas.weights.get(&format!("{module}.weight")));
        let x_htn = x_thn.transpose(0, 1);
        let adapter = self.adapters.of(&module);
        let low_rank = adapter.map(|adapter| {
            let b_hdr = of_heads(&(&adapter.b_or * self.adapters.scale()).to_kind(kind));
            (adapter.a_ri.to_kind(kind), b_hdr)
        });
        let y_htn = match half {
            Half::Key => {
                let y = x_htn.matmul(&weight_hdc);
                match low_rank {
                    Some((a_rc, b_hdr)) => y + x_htn.matmul(&b_hdr).matmul(&a_rc),
                    None => y,
                }
            }
            Half::Value => {
                let y = x_htn.matmul(&weight_hdc.transpose(1, 2));
                match low_rank {
                    Some((a_rc, b_hdr)) => y + x_htn.matmul(&a_rc.transpose(0, 1)).matmul(&b_hdr.transpose(1, 2)),
                    None => y,
                }
            }
        };
        y_htn.transpose(0, 1)
    }

    /// Keys that the index of this layer leaves of rows, [t, i] in the model's dtype; a constant of every gradient.
    pub(in crate::model) fn index_keys(&self, x_tw: &Tensor, positions: Range<i64>) -> Tensor {
        tch::no_grad(|| self.index_keys_of(&self.normed(x_tw), positions))
    }

    fn index_keys_of(&self, normed_tw: &Tensor, positions: Range<i64>) -> Tensor {
        let weight = |name: &str| self.formulas.weights.get(&self.name(&format!("indexer.{name}")));
        let k = normed_tw.linear(&weight("wk.weight"), None::<&Tensor>);
        let (norm, bias) = (weight("k_norm.weight"), weight("k_norm.bias"));
        let k = k.layer_norm([as_dim(self.latent.index.dim)], Some(norm), Some(bias), INDEX_NORM_EPS, false);
        let angles = self.rotation.angles(&positions.into());
        let k = rotate_interleaved(&k.unsqueeze(1), &angles.cos_td, &angles.sin_td).squeeze_dim(1);
        k.to_kind(self.formulas.kind)
    }

    /// What the index of this layer reads and leaves of rows; a constant of every gradient.
    pub(in crate::model) fn index(&self, x_tw: &Tensor, positions: Range<i64>) -> IndexProjected {
        tch::no_grad(|| {
            let acc = accumulation(self.formulas.kind);
            let index = &self.latent.index;
            let (heads, dim) = (as_dim(index.heads), as_dim(index.dim));
            let weight = |name: &str| self.formulas.weights.get(&self.name(&format!("indexer.{name}")));
            let rows = x_tw.size()[0];
            let normed_tw = self.normed(x_tw);
            let angles = self.rotation.angles(&positions.clone().into());
            let q = self.compressed(&normed_tw).linear(&weight("wq_b.weight"), None::<&Tensor>);
            let q_tji = rotate_interleaved(&q.view([rows, heads, dim]), &angles.cos_td, &angles.sin_td);
            let key_ti = self.index_keys_of(&normed_tw, positions.clone());
            let scale = 1.0 / (float(index.heads) * float(index.dim)).sqrt();
            let weight_tj =
                normed_tw.to_kind(acc).matmul(&weight("weights_proj.weight").to_kind(acc).transpose(0, 1)) * scale;
            let position_t = row_positions(positions, x_tw.device());
            // One position may stand for several rows.
            let position_t = position_t.expand([rows], false).to_kind(Kind::Int64);
            IndexProjected { rows: IndexRows { q_tji, weight_tj, position_t }, key_ti }
        })
    }
}
