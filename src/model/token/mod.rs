//! One new row of each answer of a group through a dense decoder, by the kernels of [`crate::tensor::decode`].
//!
//! What it computes is what [`Decoder::project`], [`super::mixer::Mixer::decode`] and [`Decoder::finish`] compute on a GPU, but
//! that product, bias and adapter are one float32 sum, rounded once. All buffers keep their addresses, so that the launches of a
//! token can be recorded once and repeated. Ranks hold the same bits where their GPUs have as many multiprocessors, over which
//! sums are split; the first rank draws for all in any case.
//!
//! The keys and values of the answers' own rows lie here: row j of every answer on rank j mod R, as in
//! [`super::answers::AnswerState`].

mod drawer;
mod parts;

use tch::Tensor;

pub use self::drawer::{Drawer, DrawnWith, Reason};
use self::parts::{Buffers, Joint, LayerParts, Rotating};
use super::decoder::{Decoder, Dense};
use super::head::Head;
use super::lora::Adapters;
use super::parts::{Activation, NormForm};
use super::pass::Pass;
use super::past::Past;
use super::spec::{EMBEDDING, HEAD, Spec};
use crate::prompt::layout::PromptLayout;
use crate::prompt::pages::Staged;
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::{LayerIndex, Tokens, as_dim, float, from_dim, from_index};
use crate::tensor::Error;
use crate::tensor::boundary::storage_bytes;
use crate::tensor::decode::{
    self, Activate, Attend, AttendSizes, Choice, Drawing, Graph, Heads, Kernels, Norm, OwnRows, Parts, PromptRun,
    Residual, Shares,
};
use crate::world::exchange::gather_rows;

/// Rows of an answer that memory is taken for at first.
const ROOM_MIN: i64 = 256;

/// Which answers are drawn, behind what prompt.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Drawn<'a> {
    pub answers: usize,
    /// Most rows of an answer.
    pub rows_max: Tokens,
    pub layout: &'a PromptLayout,
}

/// The rows of a group's answers that are computed together, and what they have left behind.
pub struct TokenStep<'a> {
    pass: Pass<'a>,
    spec: &'a Spec,
    kernels: Kernels,
    layers: Vec<LayerParts>,
    embedding_vw: Tensor,
    head: Joint,
    last_norm_w: Tensor,
    rotation: Rotating,
    sliding: Option<Rotating>,
    layout: &'a PromptLayout,
    rows_max: i64,
    /// Rows of an answer that lie on all ranks.
    rows: i64,
    own: Vec<OwnRows>,
    buffers: Buffers,
    held: Option<Held>,
}

/// Highest rank of an adapter.
#[must_use]
pub fn adapter_rank(adapters: &Adapters) -> u64 {
    adapters.entries().iter().map(|entry| from_dim(entry.a_ri.size()[0])).max().unwrap_or(0)
}

/// Who draws `answers` answers with this decoder and adapters of this `rank`; compiles the kernels where they do, unless this
/// process has, which takes seconds.
#[must_use]
pub fn drawer(decoder: &dyn Decoder, rank: u64, answers: u64) -> Drawer {
    let compiles = |dense: &Dense| Kernels::load(decoder.kind(), as_dim(dense.spec.head_dim)).is_ok();
    match Drawer::here(decoder, rank, answers) {
        Drawer::Kernels if !decoder.dense().as_ref().is_some_and(compiles) => Drawer::Operations(Reason::Compiler),
        drawer => drawer,
    }
}

impl<'a> TokenStep<'a> {
    /// No rows yet. `None` where [`Drawer::here`] names single operations.
    ///
    /// # Errors
    /// When the kernels cannot be compiled.
    pub fn new(pass: &Pass<'a>, drawn: &Drawn<'a>) -> Result<Option<TokenStep<'a>>, Error> {
        let answers = as_dim(from_index(drawn.answers));
        let drawer = Drawer::here(pass.decoder, adapter_rank(pass.adapters), from_index(drawn.answers));
        let Some(dense) = pass.decoder.dense().filter(|_| drawer == Drawer::Kernels) else { return Ok(None) };
        let Dense { spec, weights } = dense;
        let kernels = Kernels::load(pass.decoder.kind(), as_dim(spec.head_dim))?;
        let device = pass.decoder.device();
        let head = weights.get(if spec.tied_embeddings { EMBEDDING } else { HEAD });
        let layers = (0..spec.layers).map(|layer| LayerParts::new(dense, LayerIndex(layer), pass.adapters)).collect();
        let ranks = as_dim(from_index(pass.cp_group.axis.size()));
        let rows_max = as_dim(drawn.rows_max.0.div_ceil(from_dim(ranks)));
        let rotating = |rope| Rotating::new(rope, device);
        let mut step = TokenStep {
            pass: *pass,
            spec,
            layers,
            embedding_vw: weights.get(EMBEDDING),
            head: Joint::new(vec![parts::Linear { weight_oi: head, bias_o: None, pair: None }]),
            last_norm_w: weights.get("model.norm.weight"),
            rotation: rotating(&spec.rope),
            sliding: spec.sliding_rope.as_ref().map(rotating),
            layout: drawn.layout,
            rows_max,
            rows: 0,
            own: Vec::new(),
            buffers: Buffers::default(),
            held: None,
            kernels,
        };
        let room = ROOM_MIN.min(rows_max);
        step.own = (0..spec.layers).map(|_| step.own_rows(answers, room)).collect();
        step.make_buffers(answers);
        Ok(Some(step))
    }

    fn own_rows(&self, answers: i64, room: i64) -> OwnRows {
        let shape = [answers, room, as_dim(self.spec.kv_heads), as_dim(self.spec.head_dim)];
        let plane = || Tensor::zeros(shape, (self.pass.decoder.kind(), self.pass.decoder.device()));
        let axis = self.pass.cp_group.axis;
        OwnRows {
            k_arg: plane(),
            v_arg: plane(),
            rank: as_dim(from_index(axis.rank().0)),
            ranks: as_dim(from_index(axis.size())),
            prompt_end: as_dim(self.layout.end().0),
        }
    }

    fn make_buffers(&mut self, answers: i64) {
        self.held = None;
        let joints = self.layers.iter().flat_map(LayerParts::joints).chain([&self.head]);
        let raw = joints.map(|joint| joint.raw_elements(self.kernels.processors(), answers)).max().unwrap_or(0);
        let parts = self.spec.window.iter().map(|window| self.shares(*window).all()).max().unwrap_or(0);
        let where_to = (self.pass.decoder.kind(), self.pass.decoder.device());
        self.buffers = Buffers::new(self.spec, [answers, raw, parts], self.rows, where_to);
        let planes = self.own.iter().flat_map(|own| [&own.k_arg, &own.v_arg]).chain(self.buffers.tensors());
        let bytes = planes.map(storage_bytes).sum();
        self.held = Some(self.pass.cp_group.ledger.hold(Purpose::Answers, MemorySpace::Device, bytes));
    }

    /// Parts of attention in layers with this window.
    fn shares(&self, window: Option<u64>) -> Shares {
        let (groups, rank) = (as_dim(self.spec.kv_heads), self.pass.cp_group.axis.rank());
        let sizes = AttendSizes {
            heads_each: as_dim(self.spec.query_heads) / groups,
            groups,
            head_dim: as_dim(self.spec.head_dim),
            prompt_rows: self.layout.chunks_of(rank).iter().map(|run| run.rows().dim()).sum(),
            room: self.own.first().map_or(1, |own| own.k_arg.size()[1]),
            window: window.map(as_dim),
        };
        decode::shares(self.kernels.processors(), &sizes)
    }

    /// Whether the next row has no room yet: then addresses change in [`TokenStep::grow`].
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.own.first().is_some_and(|own| self.rows / own.ranks >= own.k_arg.size()[1])
    }

    /// Takes memory for twice as many rows.
    pub fn grow(&mut self) {
        let (answers, room) = self.own.first().map_or((0, 0), |own| (own.k_arg.size()[0], own.k_arg.size()[1]));
        let wider = (2 * room).min(self.rows_max.max(room + 1));
        for layer in 0..self.own.len() {
            let grown = self.own_rows(answers, wider);
            grown.k_arg.narrow(1, 0, room).copy_(&self.own[layer].k_arg);
            grown.v_arg.narrow(1, 0, room).copy_(&self.own[layer].v_arg);
            self.own[layer] = grown;
        }
        self.make_buffers(answers);
    }

    /// Keeps some of the answers, by their row: addresses change.
    pub fn keep(&mut self, answers: &Tensor) {
        for own in &mut self.own {
            own.k_arg = own.k_arg.index_select(0, answers);
            own.v_arg = own.v_arg.index_select(0, answers);
        }
        self.make_buffers(answers.size()[0]);
    }

    /// Another row of every answer has been computed.
    pub fn advance(&mut self) {
        self.rows += 1;
    }

    /// Records `work`, which launches nothing but parts of this step.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn record(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        self.kernels.record(work)
    }

    /// The rows of the tokens, [answers] int64, before the first layer.
    ///
    /// # Errors
    /// When the driver refuses; so it is below.
    pub fn begin(&self, tokens_a: &Tensor) -> Result<(), Error> {
        let Buffers { x_aw, h_aw, .. } = &self.buffers;
        // Rounded to the model's dtype, as the decoder has it.
        let root = || Tensor::from(float(self.spec.width).sqrt()).to_kind(self.pass.decoder.kind()).double_value(&[]);
        let scale = self.spec.scaled_embeddings.then(root);
        self.kernels.embed(tokens_a, &self.embedding_vw, x_aw, scale)?;
        let norm = self.norm(&self.layers[0].input_norm_w);
        self.kernels.residual(&Residual { sums: None, x_aw, h_aw, norm_out: None, norm })
    }

    /// One layer. With several ranks every rank takes part, outside a recording.
    ///
    /// # Errors
    /// As [`TokenStep::begin`].
    pub fn layer(&self, layer: LayerIndex, staged: &Staged) -> Result<(), Error> {
        let parts = &self.layers[layer.0];
        self.project(layer, parts)?;
        self.attend(layer, staged)?;
        self.finish(layer, parts)
    }

    fn norm<'b>(&self, weight_w: &'b Tensor) -> Norm<'b> {
        Norm { weight_w, eps: self.spec.norm_eps, one_plus: self.spec.norm == NormForm::OnePlusWeight }
    }

    fn project(&self, layer: LayerIndex, parts: &LayerParts) -> Result<(), Error> {
        let buffers = &self.buffers;
        let raw = parts.heads.product(&self.kernels, &buffers.h_aw, &buffers.raw)?;
        let sliding = self.sliding.as_ref().filter(|_| self.spec.window[layer.0].is_some());
        let rotating = sliding.unwrap_or(&self.rotation);
        let of = |at: usize| (parts.heads.column(at), parts.heads.bias(at), parts.heads.up(at));
        self.kernels.heads(&Heads {
            raw: &raw,
            parts: [of(0), of(1), of(2)],
            norms: [&parts.head_norms[0], &parts.head_norms[1]].map(|norm| norm.as_ref().map(|norm| self.norm(norm))),
            frequencies_d: &rotating.frequencies_d,
            gain: rotating.gain,
            q_ahd: &buffers.q_ahd,
            own: &self.own[layer.0],
            at: &buffers.at,
        })
    }

    fn attend(&self, layer: LayerIndex, staged: &Staged) -> Result<(), Error> {
        let buffers = &self.buffers;
        let past = Past::without_gradient(staged, self.layout);
        let run = |run: &super::past::PastRun| {
            let [k_sgd, v_sgd] = run.state.tensors() else { unreachable!("attention has two state planes") };
            PromptRun { start: as_dim(run.start.0), k_sgd: k_sgd.shallow_clone(), v_sgd: v_sgd.shallow_clone() }
        };
        let runs: Vec<PromptRun> = past.runs.iter().map(run).collect();
        let shares = self.shares(self.spec.window[layer.0]);
        let of = |all: &Tensor| all.narrow(0, 0, shares.all());
        let parts = Parts { out_pahd: of(&buffers.parts.out_pahd), lse_pah: of(&buffers.parts.lse_pah) };
        self.kernels.attend(&Attend {
            q_ahd: &buffers.q_ahd,
            runs: &runs,
            own: &self.own[layer.0],
            window: self.spec.window[layer.0].map(as_dim),
            scale: self.spec.score_scalar.unwrap_or_else(|| float(self.spec.head_dim)).powf(-0.5),
            at: &buffers.at,
            parts: &parts,
            shares,
        })?;
        let axis = self.pass.cp_group.axis;
        if axis.size() == 1 {
            return self.kernels.merge(&parts, &buffers.attended_an);
        }
        // Every rank merges the parts of all in rank order, so all hold the same bits.
        self.kernels.merge_own(&parts, &buffers.part)?;
        let ranks = as_dim(from_index(axis.size()));
        let gathered = |part: &Tensor| {
            let counts = vec![Tokens(from_dim(part.size()[1])); axis.size()];
            gather_rows(axis, &part.squeeze_dim(0), &counts).unflatten(0, [ranks, -1]).contiguous()
        };
        let all = Parts { out_pahd: gathered(&buffers.part.out_pahd), lse_pah: gathered(&buffers.part.lse_pah) };
        self.kernels.merge(&all, &buffers.attended_an)
    }

    fn finish(&self, layer: LayerIndex, parts: &LayerParts) -> Result<(), Error> {
        let Buffers { x_aw, h_aw, raw, attended_an, activated_af, .. } = &self.buffers;
        let kernels = &self.kernels;
        let out = parts.output.product(kernels, attended_an, raw)?;
        kernels.residual(&Residual {
            sums: Some((&out, parts.output.bias(0), parts.output.up(0))),
            x_aw,
            h_aw,
            norm_out: parts.output_norm_w.as_ref().map(|norm| self.norm(norm)),
            norm: self.norm(&parts.feed_forward_norm_w),
        })?;
        let gated = parts.gate_up.product(kernels, h_aw, raw)?;
        kernels.activate(&Activate {
            raw: &gated,
            parts: [0, 1].map(|at| (parts.gate_up.column(at), parts.gate_up.up(at))),
            gelu: self.spec.activation == Activation::GeluTanh,
            h_af: activated_af,
        })?;
        let down = parts.down.product(kernels, activated_af, raw)?;
        let next = self.layers.get(layer.0 + 1).map_or(&self.last_norm_w, |above| &above.input_norm_w);
        kernels.residual(&Residual {
            sums: Some((&down, None, parts.down.up(0))),
            x_aw,
            h_aw,
            norm_out: parts.feed_forward_out_norm_w.as_ref().map(|norm| self.norm(norm)),
            norm: self.norm(next),
        })
    }

    /// Draws the next token of every answer after the last layer, and goes to the next row.
    ///
    /// # Errors
    /// As [`TokenStep::begin`].
    pub fn draw(&self, head: &Head, top_p: f64, top_k: u64, drawing: &Drawing) -> Result<(), Error> {
        let raw = self.head.product(&self.kernels, &self.buffers.h_aw, &self.buffers.raw)?;
        let top_k = i64::try_from(top_k).unwrap_or(i64::MAX);
        let choice = Choice { cap: self.spec.logit_cap, temperature: head.temperature, top_p, top_k };
        self.kernels.sample(&raw, &choice, drawing, &self.buffers.at)
    }
}
