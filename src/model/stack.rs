//! The decoder as a stack of blocks, in the variants that a [`Spec`] describes: attention over keys and values of its own or over
//! latents, a gated feed-forward or experts.
//!
//! Norms are computed in the accumulation dtype; rotation tables are computed in the accumulation dtype and applied in the
//! model's, as the published models do.

use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::attention::Attention;
use super::attention_rows::{KeyValue, Queries};
use super::decoder::{Decoder, Dense, FinishRows, Finished, Projected, Values};
use super::delta::{DeltaWeights, GatedDelta};
use super::experts::{Experts, route};
use super::formulas::Formulas;
use super::latent::{IndexProjected, Indexer, LatentAttention, LatentBlock};
use super::lora::{Adapters, linear};
use super::mixer::{Mixer, MixerInput, Route};
use super::parts::{DeltaSpec, LatentSpec, NormForm};
use super::planes::Planes;
use super::rotation::Rotation;
use super::spec::{BlockNorms, EMBEDDING, HEAD, Spec};
use super::weights::Weights;
use crate::prompt::layout::Positions;
use crate::runtime::units::{LayerIndex, as_dim, float};
use crate::tensor::delta::Form;
use crate::tensor::kernels::{Heads, Kernel};
use crate::tensor::selection::Scoring;
use crate::tensor::{fused, gpu};

/// A decoder with frozen weights.
pub struct Stack {
    formulas: Formulas,
    rotation: Rotation,
    /// Of the layers with a window, where that is another.
    sliding_rotation: Option<Rotation>,
    /// √width in the model's dtype, where embedding rows are scaled.
    embedding_scale: Option<Tensor>,
    mixers: Vec<Box<dyn Mixer>>,
    indexers: Vec<Option<Indexer>>,
    experts: Vec<Option<Experts>>,
    kernel: Kernel,
}

impl Spec {
    /// A decoder of this spec over `weights`, computing in `kind`.
    #[must_use]
    pub fn decoder(&self, weights: Rc<Weights>, kind: Kind) -> Box<dyn Decoder> {
        Box::new(Stack::new(self, weights, kind))
    }
}

impl Stack {
    /// A decoder of `spec` over `weights`, computing in `kind`.
    #[must_use]
    pub fn new(spec: &Spec, weights: Rc<Weights>, kind: Kind) -> Self {
        let device = weights.device();
        let embedding_scale = || Tensor::from(float(spec.width).sqrt()).to_kind(kind).to_device(device);
        let kernel = kernel(spec, kind, device);
        fused::prepare(device, kind);
        let layers = || (0..spec.layers).map(LayerIndex);
        let experts = |layer| spec.experts_of(layer).map(|experts| Experts::new(experts, layer, Rc::clone(&weights)));
        Stack {
            rotation: Rotation::new(&spec.rope, kind, device),
            sliding_rotation: spec.sliding_rope.map(|rope| Rotation::new(&rope, kind, device)),
            embedding_scale: spec.scaled_embeddings.then(embedding_scale),
            mixers: mixers(spec, &weights, kind, kernel),
            indexers: indexers(spec, kind, device),
            experts: layers().map(experts).collect(),
            formulas: Formulas { spec: spec.clone(), weights, kind },
            kernel,
        }
    }

    fn rotation_of(&self, layer: LayerIndex) -> &Rotation {
        let sliding = self.sliding_rotation.as_ref().filter(|_| self.formulas.spec.window[layer.0].is_some());
        sliding.unwrap_or(&self.rotation)
    }

    /// Segment A of a layer with a gated delta rule: inputs of the convolution [t, u], of the strength and of the decay, [t, h]
    /// each; hands on the gate of the output, [t, h, v].
    fn project_delta(&self, layer: LayerIndex, delta: &DeltaSpec, x_tw: &Tensor, adapters: &Adapters) -> Projected {
        let block = format!("model.layers.{layer}");
        let x = self.formulas.norm(x_tw, &format!("{block}.input_layernorm"));
        let module = |name: &str| format!("{block}.linear_attn.in_proj_{name}");
        let rows = x_tw.size()[0];
        let (key_heads, key_dim) = (as_dim(delta.key_heads), as_dim(delta.key_dim));
        let (heads, value_dim) = (as_dim(delta.value_heads), as_dim(delta.value_dim));
        let (u_tu, z, b_th, a_th) = if delta.joined {
            // Rows of the joined weights are laid out by key head.
            let each = heads / key_heads;
            let parts = [key_dim, key_dim, each * value_dim, each * value_dim];
            let names = ["qkvz", "ba"].map(module);
            let [qkvz, ba] = self.formulas.linears(&x, names.each_ref().map(String::as_str), adapters);
            let joined = qkvz.view([rows, key_heads, parts.iter().sum()]).split_with_sizes(parts, 2);
            let flat = |x: &Tensor| x.flatten(1, 2);
            let gates = ba.view([rows, key_heads, 2 * each]).split(each, 2);
            let u_tu = Tensor::cat(&joined[..3].iter().map(flat).collect::<Vec<_>>(), 1);
            (u_tu, flat(&joined[3]), gates[0].reshape([rows, heads]), gates[1].reshape([rows, heads]))
        } else {
            let names = ["qkv", "z", "b", "a"].map(module);
            self.formulas.linears(&x, names.each_ref().map(String::as_str), adapters).into()
        };
        let handed = Planes::default().and(Some(z.view([rows, heads, value_dim])));
        Projected { input: MixerInput { queries: Planes::default(), state: vec![u_tu, b_th, a_th].into() }, handed }
    }

    /// Output of a gated delta rule, [t, h, v], normed by head and times silu of its gate: [t, h · v].
    fn gated_delta(&self, layer: LayerIndex, mixed: &Tensor, handed: &Planes) -> Tensor {
        let [z_thv] = handed.tensors() else { unreachable!("segment A hands a gate on") };
        let name = format!("model.layers.{layer}.linear_attn.norm");
        let normed = self.formulas.norm_as(mixed, &name, NormForm::Weight);
        fused::silu_gated(z_thv, &normed).flatten(1, 2)
    }

    /// The projections of a layer with attention over latents.
    fn latent<'a>(&'a self, layer: LayerIndex, latent: &'a LatentSpec, adapters: &'a Adapters) -> LatentBlock<'a> {
        LatentBlock { formulas: &self.formulas, rotation: &self.rotation, latent, layer, adapters }
    }
}

/// Output of attention, [t, h, d], times sigmoid of its gate where it has one: [t, h · d].
fn gated(mixed: &Tensor, handed: &Planes) -> Tensor {
    match handed.tensors() {
        [gate_thd] => (mixed * gate_thd.sigmoid()).flatten(1, 2),
        _ => mixed.flatten(1, 2),
    }
}

/// What computes attention where no window cuts it. Keys of latents are gathered for each query, by matrix products.
fn kernel(spec: &Spec, kind: Kind, device: Device) -> Kernel {
    match (&spec.latent, device) {
        (Some(_), Device::Cpu) => Kernel::Cpu,
        (Some(_), _) => Kernel::Plain,
        (None, _) => {
            let (query, kv, dim) = (as_dim(spec.query_heads), as_dim(spec.kv_heads), as_dim(spec.head_dim));
            Kernel::choose(device, &Heads { query, kv, dim, kind }, gpu::repeats())
        }
    }
}

fn mixers(spec: &Spec, weights: &Weights, kind: Kind, kernel: Kernel) -> Vec<Box<dyn Mixer>> {
    let form = spec
        .delta
        .as_ref()
        .map_or(Form::Plain, |delta| Form::choose(weights.device(), &delta.heads(), as_dim(delta.taps), kind));
    let of = |layer| match spec.delta_of(layer) {
        Some(delta) => delta_rule(delta, weights, layer, kind, form),
        None => attention(spec, layer, kind, kernel),
    };
    (0..spec.layers).map(LayerIndex).map(of).collect()
}

fn delta_rule(delta: &DeltaSpec, weights: &Weights, layer: LayerIndex, kind: Kind, form: Form) -> Box<dyn Mixer> {
    let frozen = |name: &str| weights.get(&format!("model.layers.{layer}.linear_attn.{name}"));
    let (conv_uj, log_rate_h, bias_h) = (frozen("conv1d.weight"), frozen("A_log"), frozen("dt_bias"));
    Box::new(GatedDelta::new(delta, &DeltaWeights { conv_uj, log_rate_h, bias_h }, kind, form))
}

fn attention(spec: &Spec, layer: LayerIndex, kind: Kind, kernel: Kernel) -> Box<dyn Mixer> {
    let (heads, kv_heads, head_dim) = (as_dim(spec.query_heads), as_dim(spec.kv_heads), as_dim(spec.head_dim));
    let scale = spec.score_scalar.unwrap_or_else(|| float(spec.head_dim)).powf(-0.5);
    match &spec.latent {
        None => {
            let window = spec.window[layer.0].map(as_dim);
            Box::new(Attention { heads, kv_heads, head_dim, window, scale, kind, kernel })
        }
        Some(latent) => Box::new(LatentAttention {
            heads,
            latent: as_dim(latent.latent),
            rotated: as_dim(latent.rotated),
            index_dim: latent.index.owners[layer.0].then(|| as_dim(latent.index.dim)),
            scale,
            kind,
        }),
    }
}

fn indexers(spec: &Spec, kind: Kind, device: Device) -> Vec<Option<Indexer>> {
    let Some(latent) = &spec.latent else { return vec![None; spec.layers] };
    let index = &latent.index;
    let (heads, dim, top) = (as_dim(index.heads), as_dim(index.dim), as_dim(index.top));
    let indexer = Indexer { top, scoring: Scoring::choose(device, heads, dim, kind, top) };
    index.owners.iter().map(|&owner| owner.then_some(indexer)).collect()
}

impl Decoder for Stack {
    fn layers(&self) -> usize {
        self.formulas.spec.layers
    }

    fn width(&self) -> i64 {
        as_dim(self.formulas.spec.width)
    }

    fn vocabulary(&self) -> i64 {
        as_dim(self.formulas.spec.vocabulary)
    }

    fn kind(&self) -> Kind {
        self.formulas.kind
    }

    fn device(&self) -> Device {
        self.formulas.weights.device()
    }

    fn embed(&self, ids: &[i64]) -> Tensor {
        let ids = Tensor::from_slice(ids).to_device(self.device());
        let x_tw = self.formulas.weights.get(EMBEDDING).index_select(0, &ids);
        match &self.embedding_scale {
            Some(scale) => x_tw * scale,
            None => x_tw,
        }
    }

    fn project(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        positions: &Positions,
        adapters: &Adapters,
        values: Values,
    ) -> Projected {
        let spec = &self.formulas.spec;
        if let Some(latent) = &spec.latent {
            let block = self.latent(layer, latent, adapters);
            let (queries, state) = (block.queries(x_tw, positions), block.keys(x_tw, positions));
            let input = MixerInput { queries: vec![queries].into(), state: vec![state].into() };
            return Projected { input, handed: Planes::default() };
        }
        if let Some(delta) = spec.delta_of(layer) {
            return self.project_delta(layer, delta, x_tw, adapters);
        }
        let block = format!("model.layers.{layer}");
        let attention = format!("{block}.self_attn");
        let x = self.formulas.norm(x_tw, &format!("{block}.input_layernorm"));
        // 1. Projections, a head apart; a head's gate follows its query.
        let names = ["q", "k", "v"].map(|name| format!("{attention}.{name}_proj"));
        let dim = as_dim(spec.head_dim);
        let heads = |y: Tensor, width: i64| y.view([x_tw.size()[0], y.size()[1] / width, width]);
        let valued = [true, values != Values::WithoutState, values == Values::All];
        let [q, k, v] = self.formulas.linears_read(&x, names.each_ref().map(String::as_str), adapters, valued);
        let (q_thd, gate) = if spec.gated_attention {
            let both = heads(q, 2 * dim);
            // A copy: a view would keep the queries alive beside it.
            (both.narrow(2, 0, dim), Some(both.narrow(2, dim, dim).contiguous()))
        } else {
            (heads(q, dim), None)
        };
        let (mut k_tgd, v_tgd) = (heads(k, dim), heads(v, dim));
        if values == Values::WithoutState {
            // No head is normed and rotated.
            k_tgd = k_tgd.narrow(1, 0, 0);
        }
        // 2. Norms by head, then rotation.
        let angles = self.rotation_of(layer).angles(positions);
        let (q_thd, k_tgd) = self.formulas.turned([&q_thd, &k_tgd], &attention, &angles);
        let input = MixerInput { queries: Queries { q_thd }.into(), state: KeyValue { k_tgd, v_tgd }.into() };
        Projected { input, handed: Planes::default().and(gate) }
    }

    fn project_queries(&self, layer: LayerIndex, x_tw: &Tensor, positions: &Positions, adapters: &Adapters) -> Planes {
        match &self.formulas.spec.latent {
            Some(latent) => vec![self.latent(layer, latent, adapters).queries(x_tw, positions)].into(),
            None => self.project(layer, x_tw, positions, adapters, Values::All).input.queries,
        }
    }

    fn project_state(&self, layer: LayerIndex, x_tw: &Tensor, positions: &Positions, adapters: &Adapters) -> Planes {
        match &self.formulas.spec.latent {
            Some(latent) => vec![self.latent(layer, latent, adapters).keys(x_tw, positions)].into(),
            None => self.project(layer, x_tw, positions, adapters, Values::All).input.state,
        }
    }

    fn index_owner(&self, layer: LayerIndex) -> Option<LayerIndex> {
        self.formulas.spec.latent.as_ref().map(|latent| latent.index.owner_of(layer))
    }

    fn indexer(&self, layer: LayerIndex) -> Option<&Indexer> {
        self.indexers[layer.0].as_ref()
    }

    fn project_index(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        positions: Range<i64>,
        adapters: &Adapters,
    ) -> IndexProjected {
        let latent = self.formulas.spec.latent.as_ref().expect("only layers that own an index are asked for its rows");
        self.latent(layer, latent, adapters).index(x_tw, positions)
    }

    fn project_index_keys(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        positions: Range<i64>,
        adapters: &Adapters,
    ) -> Tensor {
        let latent = self.formulas.spec.latent.as_ref().expect("only layers that own an index are asked for its keys");
        self.latent(layer, latent, adapters).index_keys(x_tw, positions)
    }

    fn experts(&self, layer: LayerIndex) -> Option<&Experts> {
        self.experts[layer.0].as_ref()
    }

    fn mixer(&self, layer: LayerIndex) -> &dyn Mixer {
        &*self.mixers[layer.0]
    }

    fn finish(&self, layer: LayerIndex, rows: &FinishRows, adapters: &Adapters, values: Values) -> Finished {
        let FinishRows { x_tw, mixed, handed, kept } = *rows;
        let (formulas, spec) = (&self.formulas, &self.formulas.spec);
        let block = format!("model.layers.{layer}");
        let norm = |x_tw: &Tensor, name: &str| formulas.norm(x_tw, &format!("{block}.{name}_layernorm"));
        let (heads_tn, output) = match (spec.delta_of(layer), &spec.latent) {
            (Some(_), _) => (self.gated_delta(layer, mixed, handed), "linear_attn.out_proj"),
            (None, Some(latent)) => (self.latent(layer, latent, adapters).values(mixed), "self_attn.o_proj"),
            (None, None) => (gated(mixed, handed), "self_attn.o_proj"),
        };
        let out_tw = formulas.linear(&heads_tn, &format!("{block}.{output}"), adapters);
        let mlp = format!("{block}.mlp");
        let is_read = values == Values::All;
        // What a feed-forward adds to the residual stream, or beside it where nobody reads the sum.
        let with =
            |h_tw: Tensor, added_tw: Tensor| if is_read { (h_tw + added_tw, None) } else { (h_tw, Some(added_tw)) };
        if let Some(experts) = spec.experts_of(layer) {
            let name = format!("{block}.post_attention_layernorm");
            let (h_tw, normed_tw) = formulas.sum_norm(x_tw, out_tw, &name);
            let gate_ew = formulas.weights.get(&format!("{block}.mlp.gate.weight"));
            let bias_e = formulas.weights.try_get(&format!("{block}.mlp.gate.e_score_correction_bias"));
            let routed = route(experts, &normed_tw, &gate_ew, bias_e.as_ref(), kept);
            let shared = |valued| {
                let part = format!("{block}.{}", experts.shared_name());
                formulas.feed_forward(&normed_tw, &part, adapters, valued)
            };
            let (y_tw, unread_tw) = match (experts.shared_width, experts.shared_gate) {
                (0, _) => (h_tw, None),
                (_, false) => with(h_tw, shared(is_read)),
                (_, true) => {
                    let gate_1w = formulas.weights.get(&format!("{block}.mlp.shared_expert_gate.weight"));
                    with(h_tw, linear(&normed_tw, &gate_1w, None, None).sigmoid() * shared(true))
                }
            };
            return Finished { y_tw, unread_tw, routed: Some(routed) };
        }
        let (y_tw, unread_tw) = match spec.block_norms {
            BlockNorms::Two => {
                let name = format!("{block}.post_attention_layernorm");
                let (h_tw, normed_tw) = formulas.sum_norm(x_tw, out_tw, &name);
                with(h_tw, formulas.feed_forward(&normed_tw, &mlp, adapters, is_read))
            }
            BlockNorms::Four => {
                let h_tw = x_tw + norm(&out_tw, "post_attention");
                let y_tw = formulas.feed_forward(&norm(&h_tw, "pre_feedforward"), &mlp, adapters, true);
                with(h_tw, norm(&y_tw, "post_feedforward"))
            }
        };
        Finished { y_tw, unread_tw, routed: None }
    }

    fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn attention_name(&self) -> &'static str {
        match &self.formulas.spec.latent {
            Some(_) => "gathered keys, matrix products",
            None => self.kernel.name(),
        }
    }

    fn index_scores_name(&self) -> Option<&'static str> {
        self.indexers.iter().flatten().next().map(|indexer| indexer.scoring.name())
    }

    fn delta_rule_name(&self) -> Option<&'static str> {
        let rule = |mixer: &dyn Mixer| match mixer.route() {
            Route::Recurrent(rule) => Some(rule.form_name()),
            _ => None,
        };
        self.mixers.iter().map(|mixer| &**mixer).find_map(rule)
    }

    fn dense(&self) -> Option<Dense<'_>> {
        let Formulas { spec, weights, .. } = &self.formulas;
        let other = spec.latent.is_some() || spec.experts.is_some() || spec.delta.is_some() || spec.gated_attention;
        (!other && !spec.biases.mlp && weights.is_plain()).then_some(Dense { spec, weights })
    }

    fn logits(&self, x_tw: &Tensor) -> Tensor {
        let head = if self.formulas.spec.tied_embeddings { EMBEDDING } else { HEAD };
        let logits_tv = linear(&self.formulas.norm(x_tw, "model.norm"), &self.formulas.weights.get(head), None, None);
        match self.formulas.spec.logit_cap {
            Some(cap) => (logits_tv / cap).tanh() * cap,
            None => logits_tv,
        }
    }
}
