//! stub
use super::lora::Adapters;
use super::lora::linear;
use super::parts::{ExpertSpec, Router};
use super::weights::Weights;
use crate::runtime::units::{LayerIndex, as_dim};
use crate::tensor;
use crate::world::Axis;
use std::rc::Rc;
use tch::{Kind, Tensor};
/// r
#[derive(Debug)]
pub struct Routed {
    /// x
    pub x_tw: Tensor,
    /// w
    pub weight_tk: Tensor,
    /// e
    pub expert_tk: Tensor,
}
/// g
#[derive(Debug)]
pub struct RoutedGradient {
    /// x
    pub dx_tw: Tensor,
    /// w
    pub dweight_tk: Tensor,
}
/// route
pub fn route(
    spec: &ExpertSpec,
    x_tw: &Tensor,
    gate_ew: &Tensor,
    bias_e: Option<&Tensor>,
    kept: Option<&Tensor>,
) -> Routed {
    let acc = tensor::accumulation(x_tw.kind());
    let logits = x_tw.to_kind(acc).matmul(&gate_ew.to_kind(acc).transpose(0, 1));
    let s = match spec.router {
        Router::Softmax => logits.softmax(-1, acc),
        Router::Sigmoid => logits.sigmoid(),
    };
    let expert_tk = kept.map_or_else(
        || {
            let mut choice = s.detach();
            if let Some(b) = bias_e {
                choice = choice + b.to_kind(acc);
            }
            if spec.groups > 1 {
                let g = choice.view([-1, as_dim(spec.groups), as_dim(spec.count / spec.groups)]);
                let score = g.topk(2, -1, true, true).0.sum_dim_intlist([-1i64].as_slice(), false, acc);
                let kept = score.sort_stable(true, -1, true).1.narrow(1, 0, as_dim(spec.kept_groups));
                let mask =
                    Tensor::ones([g.size()[0], g.size()[1]], (Kind::Bool, g.device())).scatter_value(1, &kept, 0);
                choice = g.masked_fill(&mask.unsqueeze(-1), f64::NEG_INFINITY).flatten(1, 2);
            }
            choice.sort_stable(true, -1, true).1.narrow(1, 0, as_dim(spec.chosen)).sort(-1, false).0
        },
        Tensor::shallow_clone,
    );
    let mut weight_tk = s.gather(1, &expert_tk, false);
    if spec.normalised {
        let eps = if spec.router == Router::Sigmoid { 1e-20 } else { 0.0 };
        let sum = weight_tk.sum_dim_intlist([-1i64].as_slice(), true, acc) + eps;
        weight_tk = weight_tk / sum;
    }
    weight_tk = weight_tk * spec.scaling;
    Routed { x_tw: x_tw.shallow_clone(), weight_tk, expert_tk }
}
/// experts
#[derive(Debug)]
pub struct Experts {
    spec: ExpertSpec,
    layer: LayerIndex,
    weights: Rc<Weights>,
}
impl Experts {
    /// new
    #[must_use]
    pub fn new(spec: &ExpertSpec, layer: LayerIndex, weights: Rc<Weights>) -> Self {
        Experts { spec: spec.clone(), layer, weights }
    }
    /// f
    pub fn forward(&self, _group: &Axis, routed: &Routed, adapters: &Adapters) -> Tensor {
        tch::no_grad(|| self.plain(routed, adapters))
    }
    /// b
    /// # Errors
    /// x
    pub fn backward(
        &self,
        _group: &Axis,
        routed: &Routed,
        dout_tw: &Tensor,
        adapters: &Adapters,
    ) -> Result<RoutedGradient, tensor::Error> {
        let x_tw = routed.x_tw.detach().set_requires_grad(true);
        let weight_tk = routed.weight_tk.detach().set_requires_grad(true);
        let leaf = Routed { x_tw, weight_tk, expert_tk: routed.expert_tk.shallow_clone() };
        let y = self.plain(&leaf, adapters);
        crate::tensor::boundary::backward(&[(&y, dout_tw)])?;
        let grad = |x: &Tensor| {
            let g = x.grad();
            if g.defined() { g } else { x.zeros_like() }
        };
        Ok(RoutedGradient { dx_tw: grad(&leaf.x_tw), dweight_tk: grad(&leaf.weight_tk) })
    }
    /// r
    pub fn replicated(&self, group: &Axis, routed: &Routed, adapters: &Adapters) -> Tensor {
        self.forward(group, routed, adapters)
    }
    /// p
    pub fn plain(&self, routed: &Routed, adapters: &Adapters) -> Tensor {
        let acc = routed.weight_tk.kind();
        let mut out: Tensor =
            (&routed.x_tw * 0.0).to_kind(acc) + 0.0 * routed.weight_tk.sum_dim_intlist([-1i64].as_slice(), true, acc);
        for e in 0..as_dim(self.spec.count) {
            let name = |p: &str| format!("model.layers.{}.mlp.experts.{e}.{p}_proj", self.layer);
            let here = routed.expert_tk.eq(e).nonzero();
            if here.size()[0] == 0 {
                continue;
            }
            let (row, slot) = (here.select(1, 0), here.select(1, 1));
            let x = routed.x_tw.index_select(0, &row);
            let w = routed.weight_tk.index_select(0, &row).gather(1, &slot.unsqueeze(1), false);
            let lin = |x: &Tensor, p: &str| {
                linear(
                    x,
                    self.weights.get(&format!("{}.weight", name(p))),
                    None,
                    adapters.of(&name(p)).map(|a| (a, adapters.scale())),
                )
            };
            let y = lin(&(lin(&x, "gate").silu() * lin(&x, "up")), "down");
            out = out.index_add(0, &row, &(y.to_kind(acc) * w));
        }
        out.to_kind(routed.x_tw.kind())
    }
}
