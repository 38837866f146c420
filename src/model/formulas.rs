//! What every block computes: linear layers with their adapters, norms, and the gated feed-forward.

use std::rc::Rc;

use tch::{Kind, Tensor};

use super::lora::{Adapter, Adapters, linears};
use super::rotation::Angles;
use super::spec::{Activation, NormForm, Spec};
use super::weights::Weights;
use crate::tensor::fused::{self, Layer, Scale};

/// Frozen weights and the formulas that a spec prescribes for them.
pub(super) struct Formulas {
    pub(super) spec: Spec,
    pub(super) weights: Rc<Weights>,
    pub(super) kind: Kind,
}

impl Formulas {
    pub(super) fn linear(&self, x_tw: &Tensor, module: &str, adapters: &Adapters) -> Tensor {
        let [y_tw] = self.linears(x_tw, [module], adapters);
        y_tw
    }

    /// Linear layers of one input.
    pub(super) fn linears<const N: usize>(
        &self,
        x_tw: &Tensor,
        modules: [&str; N],
        adapters: &Adapters,
    ) -> [Tensor; N] {
        self.linears_read(x_tw, modules, adapters, [true; N])
    }

    /// [`Formulas::linears`]; the output of one that is not `valued` may be NaN, where a gradient alone goes through it.
    pub(super) fn linears_read<const N: usize>(
        &self,
        x_tw: &Tensor,
        modules: [&str; N],
        adapters: &Adapters,
        valued: [bool; N],
    ) -> [Tensor; N] {
        let weights = modules.map(|module| self.weights.get(&format!("{module}.weight")));
        let biases = modules.map(|module| self.weights.try_get(&format!("{module}.bias")));
        let layers: [Layer; N] = std::array::from_fn(|at| Layer {
            weight_oi: &weights[at],
            bias_o: biases[at].as_ref(),
            pair: adapters.of(modules[at]).map(Adapter::pair),
            valued: valued[at],
        });
        let outputs = linears(x_tw, &layers, adapters.scale());
        outputs.try_into().unwrap_or_else(|_| unreachable!("each layer has an output"))
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
        fused::normed(x, &scale(&self.norm_weight(name), eps, form))
    }

    fn norm_weight(&self, name: &str) -> Tensor {
        self.weights.get(&format!("{name}.weight"))
    }

    /// x + other, and the norm `name` of that sum. `other_tw` is not held any longer than the sum takes.
    pub(super) fn sum_norm(&self, x_tw: &Tensor, other_tw: Tensor, name: &str) -> (Tensor, Tensor) {
        fused::sum_normed(x_tw, other_tw, &scale(&self.norm_weight(name), self.spec.norm_eps, self.spec.norm))
    }

    /// Queries and keys of the layer's `attention` by head, after their norms where the spec has them, rotated by `angles`.
    pub(super) fn turned(&self, heads: [&Tensor; 2], attention: &str, angles: &Angles) -> (Tensor, Tensor) {
        let names = ["q_norm", "k_norm"];
        let weights = self.spec.qk_norm.then(|| names.map(|name| self.norm_weight(&format!("{attention}.{name}"))));
        let of_spec = |weight| scale(weight, self.spec.norm_eps, self.spec.norm);
        let scales = weights.as_ref().map(|weights| weights.each_ref().map(of_spec));
        fused::turned(heads, scales, &angles.cos_td, &angles.sin_td)
    }

    /// down(activation(gate(x)) · up(x)).
    pub(super) fn feed_forward(&self, x_tw: &Tensor, part: &str, adapters: &Adapters, valued: bool) -> Tensor {
        let [gate, up] = ["gate_proj", "up_proj"].map(|name| format!("{part}.{name}"));
        let [gate_tf, up_tf] = self.linears(x_tw, [&gate, &up], adapters);
        let activation = match self.spec.activation {
            Activation::Silu => fused::Activation::Silu,
            Activation::GeluTanh => fused::Activation::GeluTanh,
        };
        let product_tf = fused::gated(&gate_tf, &up_tf, activation);
        drop((gate_tf, up_tf));
        let [y_tw] = self.linears_read(&product_tf, [&format!("{part}.down_proj")], adapters, [valued]);
        y_tw
    }
}

fn scale(weight: &Tensor, eps: f64, form: NormForm) -> Scale<'_> {
    Scale { weight, eps, one_plus: form == NormForm::OnePlusWeight }
}
