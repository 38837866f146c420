//! Weights of a layer in the order of their products, and buffers of one row of each answer.

use tch::{Device, Kind, Tensor};

use crate::model::decoder::Dense;
use crate::model::lora::Adapters;
use crate::model::parts::BlockNorms;
use crate::model::rope::{Rope, RopeSpec};
use crate::model::spec::Spec;
use crate::runtime::units::{LayerIndex, as_dim};
use crate::tensor::Error;
use crate::tensor::decode::{self, Kernels, Parts, Processors, Product, Raw, Up};

/// Inverse frequencies, [rotary / 2] float32, and the factor on cosine and sine.
pub(super) struct Rotating {
    pub(super) frequencies_d: Tensor,
    pub(super) gain: f64,
}

impl Rotating {
    pub(super) fn new(spec: &RopeSpec, device: Device) -> Rotating {
        let rope = Rope::new(spec);
        Rotating { frequencies_d: rope.frequencies(Kind::Float, device), gain: rope.gain }
    }
}

/// One linear layer.
pub(super) struct Linear {
    pub(super) weight_oi: Tensor,
    pub(super) bias_o: Option<Tensor>,
    /// Down and up projection of its adapter.
    pub(super) pair: Option<(Tensor, Tensor)>,
}

/// Linear layers with the same input: one product computes all of them and the down projections of their adapters.
pub(super) struct Joint {
    linears: Vec<Linear>,
    /// First column of each linear layer's outputs, and of its down projection's.
    columns: Vec<[i64; 2]>,
    width: i64,
    inputs: i64,
}

impl Joint {
    pub(super) fn new(linears: Vec<Linear>) -> Joint {
        let inputs = linears.first().map_or(0, |linear| linear.weight_oi.size()[1]);
        let mut end = 0;
        let mut place = |outputs: i64| {
            let column = end;
            end = decode::next_column(column, outputs);
            column
        };
        let mut columns: Vec<[i64; 2]> = linears.iter().map(|linear| [place(linear.weight_oi.size()[0]), 0]).collect();
        for (linear, column) in linears.iter().zip(&mut columns) {
            column[1] = linear.pair.as_ref().map_or(0, |(a_ri, _)| place(a_ri.size()[0]));
        }
        Joint { linears, columns, width: end, inputs }
    }

    fn splits(&self, processors: Processors) -> i64 {
        decode::splits(processors, self.inputs, self.width)
    }

    /// Elements of the raw sums.
    pub(super) fn raw_elements(&self, processors: Processors, answers: i64) -> i64 {
        self.splits(processors) * answers * self.width
    }

    /// Starts the product of `x_ai`; its sums lie in `flat`.
    pub(super) fn product(&self, kernels: &Kernels, x_ai: &Tensor, flat: &Tensor) -> Result<Raw, Error> {
        let raw = Raw::within(flat, self.splits(kernels.processors()), x_ai.size()[0], self.width);
        let pairs = || self.linears.iter().zip(&self.columns);
        let weights = pairs().map(|(linear, columns)| (&linear.weight_oi, columns[0]));
        let downs = pairs().filter_map(|(linear, columns)| linear.pair.as_ref().map(|(a_ri, _)| (a_ri, columns[1])));
        let weights: Vec<(&Tensor, i64)> = weights.chain(downs).collect();
        kernels.product(&Product { x_ai, weights: &weights, raw: &raw })?;
        Ok(raw)
    }

    /// Where the outputs of linear layer `at` begin.
    pub(super) fn column(&self, at: usize) -> i64 {
        self.columns[at][0]
    }

    pub(super) fn bias(&self, at: usize) -> Option<&Tensor> {
        self.linears[at].bias_o.as_ref()
    }

    pub(super) fn up(&self, at: usize) -> Option<Up<'_>> {
        let column = self.columns[at][1];
        self.linears[at].pair.as_ref().map(|(_, b_or)| Up { b_or, column })
    }
}

/// Weights of one layer.
pub(super) struct LayerParts {
    pub(super) input_norm_w: Tensor,
    /// Queries, keys, values.
    pub(super) heads: Joint,
    /// Of queries and keys.
    pub(super) head_norms: [Option<Tensor>; 2],
    pub(super) output: Joint,
    /// Norm of attention's output before it is added, where there is one.
    pub(super) output_norm_w: Option<Tensor>,
    pub(super) feed_forward_norm_w: Tensor,
    pub(super) gate_up: Joint,
    pub(super) down: Joint,
    /// Norm of the feed-forward's output before it is added, where there is one.
    pub(super) feed_forward_out_norm_w: Option<Tensor>,
}

impl LayerParts {
    /// `adapters` have the model's dtype, with their scale in the up projections.
    pub(super) fn new(dense: Dense, layer: LayerIndex, adapters: &Adapters) -> LayerParts {
        let Dense { spec, weights } = dense;
        let block = format!("model.layers.{layer}");
        let linear = |name: &str| {
            let module = format!("{block}.{name}_proj");
            let pair = |entry: &crate::model::lora::Adapter| (entry.a_ri.contiguous(), entry.b_or.contiguous());
            Linear {
                weight_oi: weights.get(&format!("{module}.weight")),
                bias_o: weights.try_get(&format!("{module}.bias")),
                pair: adapters.of(&module).map(pair),
            }
        };
        let joint = |names: &[&str]| Joint::new(names.iter().map(|name| linear(name)).collect());
        let norm = |name: &str| weights.get(&format!("{block}.{name}.weight"));
        let head_norm = |name: &str| spec.qk_norm.then(|| norm(&format!("self_attn.{name}_norm")));
        let four = spec.block_norms == BlockNorms::Four;
        let (after, before) = ("post_attention_layernorm", "pre_feedforward_layernorm");
        LayerParts {
            input_norm_w: norm("input_layernorm"),
            heads: joint(&["self_attn.q", "self_attn.k", "self_attn.v"]),
            head_norms: [head_norm("q"), head_norm("k")],
            output: joint(&["self_attn.o"]),
            output_norm_w: four.then(|| norm(after)),
            feed_forward_norm_w: norm(if four { before } else { after }),
            gate_up: joint(&["mlp.gate", "mlp.up"]),
            down: joint(&["mlp.down"]),
            feed_forward_out_norm_w: four.then(|| norm("post_feedforward_layernorm")),
        }
    }

    /// Every product of the layer.
    pub(super) fn joints(&self) -> impl Iterator<Item = &Joint> {
        [&self.heads, &self.output, &self.gate_up, &self.down].into_iter()
    }
}

/// One row of each answer on its way through the layers.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) x_aw: Tensor,
    pub(super) h_aw: Tensor,
    /// Raw sums of any product, float32.
    pub(super) raw: Tensor,
    pub(super) q_ahd: Tensor,
    pub(super) parts: Parts,
    /// This rank's part, [1, answers, …].
    pub(super) part: Parts,
    pub(super) attended_an: Tensor,
    pub(super) activated_af: Tensor,
    /// The row that is computed, [1] int64.
    pub(super) at: Tensor,
}

impl Default for Buffers {
    fn default() -> Buffers {
        let none = || Tensor::zeros([0], (Kind::Float, Device::Cpu));
        let no_parts = || Parts { out_pahd: none(), lse_pah: none() };
        Buffers {
            x_aw: none(),
            h_aw: none(),
            raw: none(),
            q_ahd: none(),
            parts: no_parts(),
            part: no_parts(),
            attended_an: none(),
            activated_af: none(),
            at: none(),
        }
    }
}

impl Buffers {
    /// For so many answers, raw sums and parts; the next row is `row`.
    pub(super) fn new(
        spec: &Spec,
        [answers, raw, parts]: [i64; 3],
        row: i64,
        (kind, device): (Kind, Device),
    ) -> Buffers {
        let (heads, dim) = (as_dim(spec.query_heads), as_dim(spec.head_dim));
        let of = |shape: &[i64]| Tensor::zeros(shape, (kind, device));
        let sums = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, device));
        let parts_of = |parts: i64| Parts {
            out_pahd: sums(&[parts, answers, heads, dim]),
            lse_pah: sums(&[parts, answers, heads]),
        };
        Buffers {
            x_aw: of(&[answers, as_dim(spec.width)]),
            h_aw: of(&[answers, as_dim(spec.width)]),
            raw: sums(&[raw]),
            q_ahd: of(&[answers, heads, dim]),
            parts: parts_of(parts),
            part: parts_of(1),
            attended_an: of(&[answers, heads * dim]),
            activated_af: of(&[answers, as_dim(spec.ffn_width)]),
            at: Tensor::full([1], row, (Kind::Int64, device)),
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let parts = [&self.parts, &self.part].into_iter().flat_map(|parts| [&parts.out_pahd, &parts.lse_pah]);
        let rows = [&self.x_aw, &self.h_aw, &self.raw, &self.q_ahd, &self.attended_an, &self.activated_af, &self.at];
        parts.chain(rows)
    }
}
