//! The dense decoder: grouped-query attention and a gated feed-forward.
//!
//! Norms are computed in the accumulation dtype and cast before the weight is applied, rotation tables are computed in
//! the accumulation dtype and applied in the model's, as the published models do.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::attention::{Attention, KeyValue, Queries};
use super::decoder::{Decoder, Projected};
use super::lora::{Adapters, linear};
use super::mixer::{Mixer, MixerInput};
use super::planes::Planes;
use super::rope::{Rope, rotate_half_split};
use super::spec::Spec;
use super::weights::Weights;
use crate::runtime::units::{LayerIndex, as_dim, float};
use crate::tensor::kernels::{Heads, Kernel};
use crate::tensor::{accumulation, gpu};

/// Rows at least this wide are normalised by the library's fused kernel on a GPU, which takes one block of threads a row:
/// too many for the narrow rows of a head.
const FUSED_NORM_WIDTH: i64 = 512;
/// Elements up to which that does not matter, and fewer launches do: rows of one token.
const FUSED_NORM_FEW: usize = 1 << 18;

/// A position, and the cosine and sine of its rotation.
type Table = (Range<i64>, Tensor, Tensor);

/// A dense decoder with frozen weights.
pub struct Dense {
    spec: Spec,
    weights: Rc<Weights>,
    rope: Rope,
    /// Inverse frequencies, where the model computes.
    frequencies_d: Tensor,
    /// Of one position: the last that was asked for alone.
    last_table: RefCell<Option<Table>>,
    mixers: Vec<Attention>,
    kernel: Kernel,
    kind: Kind,
}

impl Dense {
    /// A decoder of `spec` over `weights`, computing in `kind`.
    #[must_use]
    pub fn new(spec: &Spec, weights: Rc<Weights>, kind: Kind) -> Self {
        let head_dim = as_dim(spec.head_dim);
        let scale = float(spec.head_dim).powf(-0.5);
        let heads = Heads { query: as_dim(spec.query_heads), kv: as_dim(spec.kv_heads), dim: head_dim, kind };
        let kernel = Kernel::choose(weights.device(), &heads, gpu::repeats());
        let mixers = spec
            .window
            .iter()
            .map(|window| Attention {
                heads: as_dim(spec.query_heads),
                kv_heads: as_dim(spec.kv_heads),
                head_dim,
                window: window.map(as_dim),
                scale,
                kind,
                kernel,
            })
            .collect();
        let rope = Rope::new(&spec.rope);
        let frequencies_d = rope.frequencies(accumulation(kind), weights.device());
        Dense { rope, frequencies_d, last_table: RefCell::default(), spec: spec.clone(), weights, mixers, kernel, kind }
    }

    /// Rotation of rows at `positions`. All layers rotate a token that is drawn alike, so one position's is kept.
    fn tables(&self, positions: Range<i64>) -> (Tensor, Tensor) {
        let single = positions.end - positions.start == 1;
        if let Some((_, cos, sin)) = self.last_table.borrow().as_ref().filter(|(at, _, _)| *at == positions) {
            return (cos.shallow_clone(), sin.shallow_clone());
        }
        let (cos_td, sin_td) = self.rope.tables(positions.clone(), &self.frequencies_d, self.kind);
        if single {
            self.last_table.replace(Some((positions, cos_td.shallow_clone(), sin_td.shallow_clone())));
        }
        (cos_td, sin_td)
    }

    fn linear(&self, x_tw: &Tensor, module: &str, adapters: &Adapters) -> Tensor {
        let bias = self.weights.try_get(&format!("{module}.bias"));
        let adapter = adapters.of(module).map(|adapter| (adapter, adapters.scale()));
        linear(x_tw, self.weights.get(&format!("{module}.weight")), bias, adapter)
    }

    /// w · x / √(mean(x²) + eps), normalised in the accumulation dtype.
    fn rms(&self, x: &Tensor, name: &str) -> Tensor {
        let acc = accumulation(self.kind);
        let width = x.size().last().copied().unwrap_or(0);
        let wide_or_few = width >= FUSED_NORM_WIDTH || x.numel() <= FUSED_NORM_FEW;
        if x.device() != Device::Cpu && wide_or_few && x.numel() > 0 {
            let (normed, _) = x.internal_fused_rms_norm([width], None::<&Tensor>, self.spec.norm_eps);
            return normed * self.weights.get(&format!("{name}.weight"));
        }
        let wide = x.to_kind(acc);
        let mean = (&wide * &wide).mean_dim(-1i64, true, acc);
        (wide * (mean + self.spec.norm_eps).rsqrt()).to_kind(self.kind) * self.weights.get(&format!("{name}.weight"))
    }
}

impl Decoder for Dense {
    fn layers(&self) -> usize {
        self.spec.layers
    }

    fn width(&self) -> i64 {
        as_dim(self.spec.width)
    }

    fn vocabulary(&self) -> i64 {
        as_dim(self.spec.vocabulary)
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn device(&self) -> Device {
        self.weights.get("model.embed_tokens.weight").device()
    }

    fn embed(&self, ids: &[i64]) -> Tensor {
        let ids = Tensor::from_slice(ids).to_device(self.device());
        self.weights.get("model.embed_tokens.weight").index_select(0, &ids)
    }

    fn project(&self, layer: LayerIndex, x_tw: &Tensor, positions: Range<i64>, adapters: &Adapters) -> Projected {
        let block = format!("model.layers.{layer}");
        let attention = format!("{block}.self_attn");
        let t = x_tw.size()[0];
        let x = self.rms(x_tw, &format!("{block}.input_layernorm"));
        let heads = |name: &str, count: u64| {
            let y = self.linear(&x, &format!("{attention}.{name}_proj"), adapters);
            y.view([t, as_dim(count), as_dim(self.spec.head_dim)])
        };
        let (mut q, mut k) = (heads("q", self.spec.query_heads), heads("k", self.spec.kv_heads));
        let v = heads("v", self.spec.kv_heads);
        if self.spec.qk_norm {
            q = self.rms(&q, &format!("{attention}.q_norm"));
            k = self.rms(&k, &format!("{attention}.k_norm"));
        }
        let (cos_td, sin_td) = self.tables(positions);
        let q_thd = rotate_half_split(&q, &cos_td, &sin_td);
        let k_tgd = rotate_half_split(&k, &cos_td, &sin_td);
        let input = MixerInput { queries: Queries { q_thd }.into(), state: KeyValue { k_tgd, v_tgd: v }.into() };
        Projected { input, handed: Planes::default() }
    }

    fn mixer(&self, layer: LayerIndex) -> &dyn Mixer {
        &self.mixers[layer.0]
    }

    fn finish(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        mixed: &Tensor,
        _handed: &Planes,
        adapters: &Adapters,
    ) -> Tensor {
        let block = format!("model.layers.{layer}");
        let heads = mixed.reshape([x_tw.size()[0], as_dim(self.spec.query_heads * self.spec.head_dim)]);
        let x = x_tw + self.linear(&heads, &format!("{block}.self_attn.o_proj"), adapters);
        let y = self.rms(&x, &format!("{block}.post_attention_layernorm"));
        let gate = self.linear(&y, &format!("{block}.mlp.gate_proj"), adapters).silu();
        let up = self.linear(&y, &format!("{block}.mlp.up_proj"), adapters);
        x + self.linear(&(gate * up), &format!("{block}.mlp.down_proj"), adapters)
    }

    fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn logits(&self, x_tw: &Tensor) -> Tensor {
        let head = if self.spec.tied_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
        linear(&self.rms(x_tw, "model.norm"), self.weights.get(head), None, None)
    }
}
