//! The dense decoder: grouped-query attention and a gated feed-forward, in the variants that a [`Spec`] describes.
//!
//! Norms are computed in the accumulation dtype; rotation tables are computed in the accumulation dtype and applied in the
//! model's, as the published models do.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::attention::Attention;
use super::attention_rows::{KeyValue, Queries};
use super::decoder::{Decoder, Projected};
use super::lora::{Adapters, linear};
use super::mixer::{Mixer, MixerInput};
use super::planes::Planes;
use super::rope::{Rope, RopeSpec, rotate_half_split};
use super::spec::{Activation, BlockNorms, EMBEDDING, HEAD, NormForm, Spec};
use super::weights::Weights;
use crate::runtime::units::{LayerIndex, as_dim, float};
use crate::tensor::kernels::{Heads, Kernel};
use crate::tensor::{accumulation, gpu};

/// Rows at least this wide are normalised by the library's fused kernel on a GPU, which takes one block of threads a row:
/// too many for the narrow rows of a head.
const FUSED_NORM_WIDTH: i64 = 512;
/// Elements up to which that does not matter, and fewer launches do: rows of one token.
const FUSED_NORM_FEW: usize = 1 << 18;

/// A dense decoder with frozen weights.
pub struct Dense {
    spec: Spec,
    weights: Rc<Weights>,
    rotation: Rotation,
    /// Of the layers with a window, where that is another.
    sliding_rotation: Option<Rotation>,
    /// √width in the model's dtype, where embedding rows are scaled.
    embedding_scale: Option<Tensor>,
    mixers: Vec<Attention>,
    kernel: Kernel,
    kind: Kind,
}

/// Cosine and sine of rows' rotations, [t, d/2] each, d the rotary width.
#[derive(Debug)]
struct Angles {
    positions: Range<i64>,
    cos_td: Tensor,
    sin_td: Tensor,
}

impl Angles {
    fn shallow_clone(&self) -> Angles {
        let (cos_td, sin_td) = (self.cos_td.shallow_clone(), self.sin_td.shallow_clone());
        Angles { positions: self.positions.clone(), cos_td, sin_td }
    }
}

/// One rotary embedding where the model computes.
struct Rotation {
    rope: Rope,
    inverse_frequencies_d: Tensor,
    kind: Kind,
    /// Of the last single position.
    last: RefCell<Option<Angles>>,
}

impl Rotation {
    fn new(spec: &RopeSpec, kind: Kind, device: Device) -> Rotation {
        let rope = Rope::new(spec);
        let inverse_frequencies_d = rope.frequencies(accumulation(kind), device);
        Rotation { rope, inverse_frequencies_d, kind, last: RefCell::default() }
    }

    /// Angles of rows at `positions`. All layers rotate a sampled token alike, so those of one position are kept.
    fn angles(&self, positions: Range<i64>) -> Angles {
        if let Some(last) = self.last.borrow().as_ref().filter(|last| last.positions == positions) {
            return last.shallow_clone();
        }
        let (cos_td, sin_td) = self.rope.tables(positions.clone(), &self.inverse_frequencies_d, self.kind);
        let angles = Angles { positions, cos_td, sin_td };
        if angles.positions.end - angles.positions.start == 1 {
            self.last.replace(Some(angles.shallow_clone()));
        }
        angles
    }
}

impl Spec {
    /// A decoder of this spec over `weights`, computing in `kind`.
    #[must_use]
    pub fn decoder(&self, weights: Rc<Weights>, kind: Kind) -> Box<dyn Decoder> {
        Box::new(Dense::new(self, weights, kind))
    }
}

impl Dense {
    /// A decoder of `spec` over `weights`, computing in `kind`.
    #[must_use]
    pub fn new(spec: &Spec, weights: Rc<Weights>, kind: Kind) -> Self {
        let (heads, kv_heads, head_dim) = (as_dim(spec.query_heads), as_dim(spec.kv_heads), as_dim(spec.head_dim));
        let device = weights.device();
        let scale = spec.score_scalar.unwrap_or_else(|| float(spec.head_dim)).powf(-0.5);
        let kernel = Kernel::choose(device, &Heads { query: heads, kv: kv_heads, dim: head_dim, kind }, gpu::repeats());
        let mixer = |window: &Option<u64>| {
            let window = window.map(as_dim);
            Attention { heads, kv_heads, head_dim, window, scale, kind, kernel }
        };
        let embedding_scale = || Tensor::from(float(spec.width).sqrt()).to_kind(kind).to_device(device);
        Dense {
            rotation: Rotation::new(&spec.rope, kind, device),
            sliding_rotation: spec.sliding_rope.map(|rope| Rotation::new(&rope, kind, device)),
            embedding_scale: spec.scaled_embeddings.then(embedding_scale),
            mixers: spec.window.iter().map(mixer).collect(),
            spec: spec.clone(),
            weights,
            kernel,
            kind,
        }
    }

    fn rotation_of(&self, layer: LayerIndex) -> &Rotation {
        let sliding = self.sliding_rotation.as_ref().filter(|_| self.spec.window[layer.0].is_some());
        sliding.unwrap_or(&self.rotation)
    }

    fn linear(&self, x_tw: &Tensor, module: &str, adapters: &Adapters) -> Tensor {
        let bias = self.weights.try_get(&format!("{module}.bias"));
        let adapter = adapters.of(module).map(|adapter| (adapter, adapters.scale()));
        linear(x_tw, &self.weights.get(&format!("{module}.weight")), bias.as_ref(), adapter)
    }

    /// x / √(mean(x²) + eps), normalised in the accumulation dtype, times the weight `name` in the form of the spec.
    fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        let weight = self.weights.get(&format!("{name}.weight"));
        match self.spec.norm {
            NormForm::Weight => self.normed(x) * weight,
            NormForm::OnePlusWeight => {
                let acc = accumulation(self.kind);
                (self.normed(&x.to_kind(acc)) * (weight.to_kind(acc) + 1.0)).to_kind(self.kind)
            }
        }
    }

    /// x / √(mean(x²) + eps) in the dtype of `x`, computed in the accumulation dtype.
    fn normed(&self, x: &Tensor) -> Tensor {
        let acc = accumulation(self.kind);
        let width = x.size().last().copied().unwrap_or(0);
        let wide_or_few = width >= FUSED_NORM_WIDTH || x.numel() <= FUSED_NORM_FEW;
        if x.device() != Device::Cpu && wide_or_few && x.numel() > 0 {
            return x.internal_fused_rms_norm([width], None::<&Tensor>, self.spec.norm_eps).0;
        }
        let wide = x.to_kind(acc);
        let mean = (&wide * &wide).mean_dim(-1i64, true, acc);
        (wide * (mean + self.spec.norm_eps).rsqrt()).to_kind(x.kind())
    }

    /// down(activation(gate(x)) · up(x)).
    fn feed_forward(&self, x_tw: &Tensor, block: &str, adapters: &Adapters) -> Tensor {
        let activated = |x: Tensor| match self.spec.activation {
            Activation::Silu => x.silu(),
            Activation::GeluTanh => x.gelu("tanh"),
        };
        let gate_tf = activated(self.linear(x_tw, &format!("{block}.mlp.gate_proj"), adapters));
        let up_tf = self.linear(x_tw, &format!("{block}.mlp.up_proj"), adapters);
        self.linear(&(gate_tf * up_tf), &format!("{block}.mlp.down_proj"), adapters)
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
        self.weights.device()
    }

    fn embed(&self, ids: &[i64]) -> Tensor {
        let ids = Tensor::from_slice(ids).to_device(self.device());
        let x_tw = self.weights.get(EMBEDDING).index_select(0, &ids);
        match &self.embedding_scale {
            Some(scale) => x_tw * scale,
            None => x_tw,
        }
    }

    fn project(&self, layer: LayerIndex, x_tw: &Tensor, positions: Range<i64>, adapters: &Adapters) -> Projected {
        let block = format!("model.layers.{layer}");
        let attention = format!("{block}.self_attn");
        let x = self.norm(x_tw, &format!("{block}.input_layernorm"));
        // 1. Projections, a head apart.
        let heads = |name: &str, count: u64| {
            let y = self.linear(&x, &format!("{attention}.{name}_proj"), adapters);
            y.view([x_tw.size()[0], as_dim(count), as_dim(self.spec.head_dim)])
        };
        let mut q_thd = heads("q", self.spec.query_heads);
        let mut k_tgd = heads("k", self.spec.kv_heads);
        let v_tgd = heads("v", self.spec.kv_heads);
        // 2. Norms by head.
        if self.spec.qk_norm {
            q_thd = self.norm(&q_thd, &format!("{attention}.q_norm"));
            k_tgd = self.norm(&k_tgd, &format!("{attention}.k_norm"));
        }
        // 3. Rotation.
        let angles = self.rotation_of(layer).angles(positions);
        q_thd = rotate_half_split(&q_thd, &angles.cos_td, &angles.sin_td);
        k_tgd = rotate_half_split(&k_tgd, &angles.cos_td, &angles.sin_td);
        let input = MixerInput { queries: Queries { q_thd }.into(), state: KeyValue { k_tgd, v_tgd }.into() };
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
        let norm = |x_tw: &Tensor, name: &str| self.norm(x_tw, &format!("{block}.{name}_layernorm"));
        let heads_tn = mixed.reshape([x_tw.size()[0], as_dim(self.spec.query_heads * self.spec.head_dim)]);
        let out_tw = self.linear(&heads_tn, &format!("{block}.self_attn.o_proj"), adapters);
        match self.spec.block_norms {
            BlockNorms::Two => {
                let h_tw = x_tw + out_tw;
                &h_tw + self.feed_forward(&norm(&h_tw, "post_attention"), &block, adapters)
            }
            BlockNorms::Four => {
                let h_tw = x_tw + norm(&out_tw, "post_attention");
                let y_tw = self.feed_forward(&norm(&h_tw, "pre_feedforward"), &block, adapters);
                h_tw + norm(&y_tw, "post_feedforward")
            }
        }
    }

    fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn logits(&self, x_tw: &Tensor) -> Tensor {
        let head = if self.spec.tied_embeddings { EMBEDDING } else { HEAD };
        let logits_tv = linear(&self.norm(x_tw, "model.norm"), &self.weights.get(head), None, None);
        match self.spec.logit_cap {
            Some(cap) => (logits_tv / cap).tanh() * cap,
            None => logits_tv,
        }
    }
}
