//! The products of the experts on this rank, over rows that are sorted by expert.

use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use crate::model::lora::{Adapter, Adapters, linear};
use crate::runtime::units::{LayerIndex, from_dim};
use crate::tensor::boundary::backward;
use crate::tensor::{self, accumulation};

/// The library's grouped product wants rows of so many bytes, or a multiple.
const ALIGNED_BYTES: u64 = 16;

/// Consecutive rows of each expert.
pub(super) struct Segments {
    /// Rows up to and with those of each expert, [experts] int32, on the rows' device.
    ends_e: Tensor,
    rows: i64,
    on_host: OnceCell<Vec<Segment>>,
}

/// Rows of one expert that has some.
#[derive(Clone, Copy)]
struct Segment {
    /// Counted from the first expert of this rank.
    expert: i64,
    first: i64,
    rows: i64,
}

impl Segment {
    /// These rows of `x`.
    fn of(self, x: &Tensor) -> Tensor {
        x.narrow(0, self.first, self.rows)
    }
}

impl Segments {
    /// Of rows whose expert, counted from 0 among `experts`, is `expert_n`, [n] int64, ascending. Rows of higher numbers belong
    /// to none.
    pub(super) fn new(expert_n: &Tensor, experts: i64) -> Segments {
        let numbers = Tensor::arange(experts, (Kind::Int64, expert_n.device()));
        let ends_e = numbers.searchsorted(expert_n, true, true, "right", None::<&Tensor>);
        Segments { ends_e, rows: expert_n.size()[0], on_host: OnceCell::new() }
    }

    /// The experts that have rows. Waits for the device the first time.
    fn on_host(&self) -> &[Segment] {
        self.on_host.get_or_init(|| {
            let ends_e = self.ends_e.to_device(Device::Cpu).to_kind(Kind::Int64);
            let ends: Vec<i64> = Vec::try_from(&ends_e).unwrap_or_default();
            let starts = std::iter::once(0).chain(ends.iter().copied());
            let all = (0..).zip(starts.zip(&ends));
            let all = all.map(|(expert, (first, &end))| Segment { expert, first, rows: end - first });
            all.filter(|segment| segment.rows > 0).collect()
        })
    }
}

/// Experts of one layer that lie on this rank.
pub(super) struct Held<'a> {
    /// [experts, 2 · f, w], gate rows first.
    gate_up: Tensor,
    /// [experts, w, f].
    down: Tensor,
    /// Where these experts are adapted.
    adapted: Option<Adapted<'a>>,
    grouped: bool,
}

/// Adapters of the experts on this rank.
struct Adapted<'a> {
    adapters: &'a Adapters,
    layer: LayerIndex,
    /// The number in the layer of the first expert here.
    first: i64,
}

impl Adapted<'_> {
    fn pair(&self, expert: i64, projection: &str) -> Option<(&Adapter, f64)> {
        let module = format!("model.layers.{}.mlp.experts.{}.{projection}", self.layer, self.first + expert);
        self.adapters.of(&module).map(|adapter| (adapter, self.adapters.scale()))
    }
}

/// What the backward of the products gives; rows as its input has them.
pub(super) struct RowGradient {
    /// [n, w], the model's dtype.
    pub(super) dx_nw: Tensor,
    /// [n], the accumulation dtype.
    pub(super) dweight_n: Tensor,
}

impl<'a> Held<'a> {
    pub(super) fn new(gate_up: Tensor, down: Tensor, layer: LayerIndex, first: i64, adapters: &'a Adapters) -> Self {
        let all = Adapted { adapters, layer, first };
        // One expert of a layer is adapted like the other.
        let any = ["gate_proj", "up_proj", "down_proj"].iter().any(|projection| all.pair(0, projection).is_some());
        let adapted = any.then_some(all);
        let aligned = |size: i64| (2 * from_dim(size)).is_multiple_of(ALIGNED_BYTES);
        let on_gpu = gate_up.device() != Device::Cpu && gate_up.kind() == Kind::BFloat16;
        let grouped = on_gpu && adapted.is_none() && down.size()[1..].iter().all(|&size| aligned(size));
        Held { gate_up, down, adapted, grouped }
    }

    /// Each expert's output for its rows `x_nw`, in the model's dtype; no graph. Rows of no expert have any value.
    pub(super) fn forward(&self, x_nw: &Tensor, segments: &Segments) -> Tensor {
        if self.adapted.is_some() {
            let y_nw = x_nw.zeros_like();
            for segment in segments.on_host() {
                segment.of(&y_nw).copy_(&self.adapted_forward(segment.expert, &segment.of(x_nw)));
            }
            return y_nw;
        }
        let inner_nf = self.inner(x_nw, segments);
        let (gate_nf, up_nf) = halves(&inner_nf);
        let act_nf = gate_nf.silu() * up_nf;
        self.product(&act_nf, &self.down.transpose(1, 2), segments)
    }

    /// Backward of Σ weight · expert(x) from `dout_nw`, the gradient of the sum at each row; the inner layer is computed again.
    /// `weight_n` is in the accumulation dtype. Gradients of adapters add up in their `.grad`.
    pub(super) fn backward(
        &self,
        x_nw: &Tensor,
        weight_n: &Tensor,
        dout_nw: &Tensor,
        segments: &Segments,
    ) -> Result<RowGradient, tensor::Error> {
        if self.adapted.is_some() {
            return self.adapted_backward(x_nw, weight_n, dout_nw, segments);
        }
        let kind = x_nw.kind();
        let acc = accumulation(kind);
        // 1. the inner layer again
        let inner_nf = self.inner(x_nw, segments);
        let (gate_nf, up_nf) = halves(&inner_nf);
        let silu_nf = gate_nf.silu();
        // 2. through the down projection, before the weight: its dot product with the activation is the weight's gradient
        let dact_nf = self.product(dout_nw, &self.down, segments).to_kind(acc);
        let dweight_n = (&dact_nf * (&silu_nf * &up_nf)).sum_dim_intlist(-1i64, false, acc);
        // 3. through the weight, the product and the activation
        let dact_nf = (dact_nf * weight_n.unsqueeze(-1)).to_kind(kind);
        let dgate_nf = gate_nf.silu_backward(&(&dact_nf * &up_nf));
        let dinner_nf = Tensor::cat(&[dgate_nf, dact_nf * silu_nf], -1);
        // 4. through gate and up
        let dx_nw = self.product(&dinner_nf, &self.gate_up, segments);
        Ok(RowGradient { dx_nw, dweight_n })
    }

    /// Gate and up of each row beside each other, [n, 2 · f].
    fn inner(&self, x_nw: &Tensor, segments: &Segments) -> Tensor {
        self.product(x_nw, &self.gate_up.transpose(1, 2), segments)
    }

    /// Each row times its expert's matrix: [n, i] and [experts, i, o] to [n, o].
    fn product(&self, x_ni: &Tensor, weight_eio: &Tensor, segments: &Segments) -> Tensor {
        if self.grouped && segments.rows > 0 {
            return x_ni.internal_grouped_mm(weight_eio, Some(&segments.ends_e), None, None);
        }
        let y_no = Tensor::zeros([segments.rows, weight_eio.size()[2]], (x_ni.kind(), x_ni.device()));
        for segment in segments.on_host() {
            segment.of(&y_no).copy_(&segment.of(x_ni).matmul(&weight_eio.get(segment.expert)));
        }
        y_no
    }

    /// One expert with its adapters: down(silu(gate(x)) · up(x)).
    fn adapted_forward(&self, expert: i64, x_nw: &Tensor) -> Tensor {
        let pair = |projection| self.adapted.as_ref().and_then(|adapted| adapted.pair(expert, projection));
        let gate_up = self.gate_up.get(expert);
        let width = self.down.size()[2];
        let gate_nf = linear(x_nw, &gate_up.narrow(0, 0, width), None, pair("gate_proj"));
        let up_nf = linear(x_nw, &gate_up.narrow(0, width, width), None, pair("up_proj"));
        linear(&(gate_nf.silu() * up_nf), &self.down.get(expert), None, pair("down_proj"))
    }

    /// [`Held::backward`] expert by expert, each with a small graph of its own.
    fn adapted_backward(
        &self,
        x_nw: &Tensor,
        weight_n: &Tensor,
        dout_nw: &Tensor,
        segments: &Segments,
    ) -> Result<RowGradient, tensor::Error> {
        let (kind, acc) = (x_nw.kind(), accumulation(x_nw.kind()));
        let (dx_nw, dweight_n) = (x_nw.zeros_like(), weight_n.zeros_like());
        for segment in segments.on_host() {
            let part = |x: &Tensor| segment.of(x);
            let x = part(x_nw).detach().copy().set_requires_grad(true);
            let y = tch::with_grad(|| self.adapted_forward(segment.expert, &x));
            let dout = part(dout_nw).to_kind(acc);
            part(&dweight_n).copy_(&(y.detach().to_kind(acc) * &dout).sum_dim_intlist(-1i64, false, acc));
            let dy = (dout * part(weight_n).unsqueeze(-1)).to_kind(kind);
            backward(&[(&y, &dy)])?;
            part(&dx_nw).copy_(&x.grad());
        }
        Ok(RowGradient { dx_nw, dweight_n })
    }
}

/// The two halves of the last dimension.
fn halves(x: &Tensor) -> (Tensor, Tensor) {
    let half = x.size().last().map_or(0, |size| size / 2);
    (x.narrow(-1, 0, half), x.narrow(-1, half, half))
}
