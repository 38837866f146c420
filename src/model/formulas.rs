//! What every block computes: linear layers with their adapters, norms, and the gated feed-forward.

use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::lora::{Adapters, linear};
use super::spec::{Activation, NormForm, Spec};
use super::weights::Weights;
use crate::tensor::accumulation;

/// Rows at least this wide are normalised by the library's fused kernel on a GPU, which takes one block of threads a row:
/// too many for the narrow rows of a head.
const FUSED_NORM_WIDTH: i64 = 512;
/// Elements up to which that does not matter, and fewer launches do: rows of one token.
const FUSED_NORM_FEW: usize = 1 << 18;

/// Frozen weights and the formulas that a spec prescribes for them.
pub(super) struct Formulas {
    pub(super) spec: Spec,
    pub(super) weights: Rc<Weights>,
    pub(super) kind: Kind,
}

impl Formulas {
    pub(super) fn linear(&self, x_tw: &Tensor, module: &str, adapters: &Adapters) -> Tensor {
        let bias = self.weights.try_get(&format!("{module}.bias"));
        let adapter = adapters.of(module).map(|adapter| (adapter, adapters.scale()));
        linear(x_tw, &self.weights.get(&format!("{module}.weight")), bias.as_ref(), adapter)
    }

    /// x / √(mean(x²) + eps), normalised in the accumulation dtype, times the weight `name` in the form of the spec.
    pub(super) fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        self.norm_in(x, name, self.spec.norm_eps, self.spec.norm)
    }

    /// As [`Formulas::norm`] with another epsilon.
    pub(super) fn norm_with(&self, x: &Tensor, name: &str, eps: f64) -> Tensor {
        self.norm_in(x, name, eps, self.spec.norm)
    }

    /// As [`Formulas::norm`] with the weight in another form.
    pub(super) fn norm_as(&self, x: &Tensor, name: &str, form: NormForm) -> Tensor {
        self.norm_in(x, name, self.spec.norm_eps, form)
    }

    fn norm_in(&self, x: &Tensor, name: &str, eps: f64, form: NormForm) -> Tensor {
        let weight = self.weights.get(&format!("{name}.weight"));
        match form {
            NormForm::Weight => self.normed(x, eps) * weight,
            NormForm::OnePlusWeight => {
                let acc = accumulation(self.kind);
                (self.normed(&x.to_kind(acc), eps) * (weight.to_kind(acc) + 1.0)).to_kind(self.kind)
            }
        }
    }

    /// x / √(mean(x²) + eps) in the dtype of `x`, computed in the accumulation dtype.
    fn normed(&self, x: &Tensor, eps: f64) -> Tensor {
        let acc = accumulation(self.kind);
        let width = x.size().last().copied().unwrap_or(0);
        let wide_or_few = width >= FUSED_NORM_WIDTH || x.numel() <= FUSED_NORM_FEW;
        if x.device() != Device::Cpu && wide_or_few && x.numel() > 0 {
            return x.internal_fused_rms_norm([width], None::<&Tensor>, eps).0;
        }
        let wide = x.to_kind(acc);
        let mean = (&wide * &wide).mean_dim(-1i64, true, acc);
        (wide * (mean + eps).rsqrt()).to_kind(x.kind())
    }

    /// down(activation(gate(x)) · up(x)).
    pub(super) fn feed_forward(&self, x_tw: &Tensor, part: &str, adapters: &Adapters) -> Tensor {
        let activated = |x: Tensor| match self.spec.activation {
            Activation::Silu => x.silu(),
            Activation::GeluTanh => x.gelu("tanh"),
        };
        let gate_tf = activated(self.linear(x_tw, &format!("{part}.gate_proj"), adapters));
        let up_tf = self.linear(x_tw, &format!("{part}.up_proj"), adapters);
        self.linear(&(gate_tf * up_tf), &format!("{part}.down_proj"), adapters)
    }
}
