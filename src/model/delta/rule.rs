//! The rule over the rows of a span: calls, maps of pieces, and their backward.

use tch::{Kind, Tensor};

use super::border::Border;
use super::order::Order;
use crate::model::mixer::{Backward, CpGroup, MixerInput};
use crate::model::parts::DeltaSpec;
use crate::model::past::{Past, PastGradient};
use crate::model::planes::Planes;
use crate::prompt::layout::PromptLayout;
use crate::runtime::units::{as_dim, from_index};
use crate::tensor::boundary::backward as backward_graph;
use crate::tensor::delta::{DeltaHeads, DeltaRows, Form, Transition};
use crate::tensor::{self, accumulation};
use crate::world::exchange::gather_rows;

/// The frozen tensors of a layer that are no linear layers.
#[derive(Debug)]
pub struct DeltaWeights {
    /// Weights of the convolution, [u, taps].
    pub conv_uj: Tensor,
    /// Logarithm of the decay's rate, [h].
    pub log_rate_h: Tensor,
    /// Added to the decay's input, [h].
    pub bias_h: Tensor,
}

/// The gated delta rule of one layer.
#[derive(Debug)]
pub struct GatedDelta {
    pub(super) heads: DeltaHeads,
    pub(super) form: Form,
    pub(super) kind: Kind,
    /// Weights of the convolution, [u, taps].
    pub(super) conv_uj: Tensor,
    /// exp of the decay's logarithmic rate, [h], in the accumulation dtype.
    rate_h: Tensor,
    /// Added to the decay's input, [h], in the accumulation dtype.
    bias_h: Tensor,
}

/// What segment A gives for rows: inputs of the convolution, [t, u], of the strength and of the decay, [t, h].
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) u_tu: Tensor,
    pub(super) b_th: Tensor,
    pub(super) a_th: Tensor,
}

impl From<&Planes> for Inputs {
    fn from(planes: &Planes) -> Inputs {
        let [u_tu, b_th, a_th] = planes.tensors() else { unreachable!("segment A gives three planes") };
        Inputs { u_tu: u_tu.shallow_clone(), b_th: b_th.shallow_clone(), a_th: a_th.shallow_clone() }
    }
}

impl Inputs {
    fn rows(&self, first: i64, rows: i64) -> Inputs {
        let part = |x: &Tensor| x.narrow(0, first, rows);
        Inputs { u_tu: part(&self.u_tu), b_th: part(&self.b_th), a_th: part(&self.a_th) }
    }
}

/// Rows that are taken in one call: of one piece, in order.
#[derive(Clone, Debug)]
struct Block {
    /// Number of the piece among those of all ranks, in order of position.
    piece: usize,
    /// First row among this rank's.
    first: i64,
    rows: i64,
    /// Whether the piece begins with it.
    starts_piece: bool,
}

/// A span's rows on their way through the layer.
struct Walk<'a> {
    rule: &'a GatedDelta,
    input: Inputs,
    /// This rank's rows in calls, in order of position.
    blocks: Vec<Block>,
    /// Raw inputs of the convolution before each piece of all ranks, and after the last, [taps − 1, u].
    before: Vec<Tensor>,
}

/// What a span's forward finds out.
pub(super) struct Walked {
    /// Output of this rank's rows, [t, h, v].
    pub(super) out: Tensor,
    /// The state before each of this rank's blocks, [blocks, h, k, v].
    pub(super) starts: Tensor,
    /// T of every piece of all ranks, [pieces, h, k, k]; no pieces where there is one rank.
    pub(super) factors: Tensor,
    /// The state before each piece of all ranks, and after the last.
    states: Vec<Tensor>,
    /// Raw inputs of the convolution at the same borders, [taps − 1, u].
    before: Vec<Tensor>,
}

impl Walk<'_> {
    /// Convolved rows of a block, with decay and strength, without a graph.
    fn rows(&self, block: &Block) -> DeltaRows {
        let Inputs { b_th, a_th, .. } = self.input.rows(block.first, block.rows);
        let (decay_th, strength_th) = self.rule.gates(&b_th, &a_th);
        DeltaRows { y_tu: self.rule.form.convolve(&self.extended(block), &self.rule.conv_uj), decay_th, strength_th }
    }

    /// Raw inputs of a block with those of the rows before it in front, [taps − 1 + t, u].
    fn extended(&self, block: &Block) -> Tensor {
        let before_ju = &self.before[block.piece];
        if block.starts_piece {
            return Tensor::cat(&[before_ju, &self.input.u_tu.narrow(0, block.first, block.rows)], 0);
        }
        // Blocks but a piece's last are longer than the convolution.
        let short = before_ju.size()[0];
        self.input.u_tu.narrow(0, block.first - short, short + block.rows)
    }

    /// Of this rank's pieces, in order, what `map` makes of the piece's blocks.
    fn by_piece<T>(&self, order: &Order, map: impl Fn(&[Block]) -> T) -> Vec<T> {
        let blocks = |piece: usize| {
            let first = self.blocks.partition_point(|block| block.piece < piece);
            let end = self.blocks.partition_point(|block| block.piece <= piece);
            &self.blocks[first..end]
        };
        order.own().map(|piece| map(blocks(piece))).collect()
    }
}

impl GatedDelta {
    /// The rule of a layer over its frozen tensors, for rows of dtype `kind`, computed by `form`.
    #[must_use]
    pub fn new(spec: &DeltaSpec, weights: &DeltaWeights, kind: Kind, form: Form) -> GatedDelta {
        let heads = spec.heads();
        let acc = accumulation(kind);
        GatedDelta {
            heads,
            form,
            kind,
            conv_uj: weights.conv_uj.reshape([heads.channels(), as_dim(spec.taps)]),
            rate_h: weights.log_rate_h.to_kind(acc).exp(),
            bias_h: weights.bias_h.to_kind(acc),
        }
    }

    /// Name of what computes the rule, for receipts.
    #[must_use]
    pub fn form_name(&self) -> &'static str {
        self.form.name()
    }

    /// Raw inputs of earlier rows that the convolution of a row reads.
    pub(super) fn short(&self) -> i64 {
        self.conv_uj.size()[1] - 1
    }

    pub(super) fn acc(&self) -> Kind {
        accumulation(self.kind)
    }

    /// Logarithm of the decay, and strength, [t, h] each in the accumulation dtype. Differentiable.
    pub(super) fn gates(&self, b_th: &Tensor, a_th: &Tensor) -> (Tensor, Tensor) {
        let decay_th = -&self.rate_h * (a_th.to_kind(self.acc()) + &self.bias_h).softplus();
        (decay_th, b_th.sigmoid().to_kind(self.acc()))
    }

    /// Segment A's rows of a span, cut into calls, with the raw inputs before every piece. Every rank takes part.
    fn walk<'a>(&'a self, cp_group: &CpGroup, order: &Order, input: &MixerInput, past: &Border) -> Walk<'a> {
        let input = Inputs::from(&input.state);
        let rows_max = self.form.rows_max(self.conv_uj.device());
        let mut blocks = Vec::new();
        let mut first = 0;
        for piece in order.own() {
            let (start, end) = (first, first + order.rows(piece));
            while first < end {
                let rows = rows_max.min(end - first);
                blocks.push(Block { piece, first, rows, starts_piece: first == start });
                first += rows;
            }
        }
        let before = order.before(cp_group.axis, &input.u_tu, &past.inputs_ju);
        Walk { rule: self, input, blocks, before }
    }

    /// All rows of a span, no graph. Every rank takes part.
    pub(super) fn run(&self, cp_group: &CpGroup, order: &Order, input: &MixerInput, past: &Border) -> Walked {
        let walk = self.walk(cp_group, order, input, past);
        let Maps { factors, increments } = self.maps(cp_group, order, &walk);
        let mut states = vec![past.state_hkv.shallow_clone()];
        let mut starts = Vec::with_capacity(walk.blocks.len());
        let rows = walk.input.u_tu.size()[0];
        let DeltaHeads { value_heads, value_dim, .. } = self.heads;
        let out = Tensor::empty([rows, value_heads, value_dim], (self.kind, self.conv_uj.device()));
        // 1. With several ranks the state before every piece follows from the maps.
        for piece in 0..factors.size()[0] {
            let last = &states[states.len() - 1];
            states.push(factors.get(piece).matmul(last) + increments.get(piece));
        }
        // 2. This rank's rows.
        let alone = cp_group.axis.size() == 1;
        for piece in order.own() {
            let mut state = states[piece].shallow_clone();
            for block in walk.blocks.iter().filter(|block| block.piece == piece) {
                let (part, next) = self.form.forward(&self.heads, &walk.rows(block), &state);
                out.narrow(0, block.first, block.rows).copy_(&part);
                starts.push(state);
                state = next;
            }
            if alone {
                states.push(state);
            }
        }
        let starts =
            if starts.is_empty() { past.state_hkv.unsqueeze(0).narrow(0, 0, 0) } else { Tensor::stack(&starts, 0) };
        Walked { out, starts, factors, states, before: walk.before }
    }

    /// The maps of all pieces on every rank; none where there is one rank.
    fn maps(&self, cp_group: &CpGroup, order: &Order, walk: &Walk) -> Maps {
        let DeltaHeads { value_heads, key_dim, value_dim, .. } = self.heads;
        let empty =
            || Tensor::zeros([0, value_heads, key_dim, key_dim + value_dim], (self.acc(), self.conv_uj.device()));
        let all = if cp_group.axis.size() == 1 {
            empty()
        } else {
            let map = |blocks: &[Block]| {
                let parts = blocks.iter().map(|block| self.form.transition(&self.heads, &walk.rows(block)));
                let whole = parts.reduce(|before, after| Transition {
                    increment_hkv: after.factor_hkk.matmul(&before.increment_hkv) + &after.increment_hkv,
                    factor_hkk: after.factor_hkk.matmul(&before.factor_hkk),
                });
                let whole = whole.expect("a piece has rows");
                Tensor::cat(&[whole.factor_hkk, whole.increment_hkv], -1)
            };
            let own = walk.by_piece(order, map);
            let own = if own.is_empty() { empty() } else { Tensor::stack(&own, 0) };
            order.in_position_order(&gather_rows(cp_group.axis, &own, &order.pieces_by_rank()))
        };
        Maps { factors: all.narrow(-1, 0, key_dim).contiguous(), increments: all.narrow(-1, key_dim, value_dim) }
    }

    /// The rows of a prompt from position 0 on, no graph: the mixer's output, and the state at the tail's start and at the
    /// prompt's end, equal on all ranks. Every rank takes part.
    pub fn prompt(&self, cp_group: &CpGroup, layout: &PromptLayout, input: &MixerInput) -> (Tensor, [Border; 2]) {
        let order = Order::new(&layout.span(), cp_group.axis.rank());
        let Walked { out, states, before, .. } = self.run(cp_group, &order, input, &self.nothing_before());
        let border =
            |at: usize| Border { state_hkv: states[at].shallow_clone(), inputs_ju: before[at].shallow_clone() };
        (out, [border(order.first_from(layout.cut())), border(order.count())])
    }

    pub(super) fn nothing_before(&self) -> Border {
        let device = self.conv_uj.device();
        Border {
            state_hkv: Tensor::zeros(self.heads.state(), (self.acc(), device)),
            inputs_ju: Tensor::zeros([self.short(), self.heads.channels()], (self.kind, device)),
        }
    }

    pub(super) fn border_of(&self, past: &Past) -> Border {
        past.runs.first().map_or_else(|| self.nothing_before(), |run| Border::from(&run.state))
    }

    /// Gradient of the state after every piece of all ranks, and before the first, from that after the last.
    fn state_gradients(
        &self,
        cp_group: &CpGroup,
        order: &Order,
        walk: &Walk,
        factors: &Tensor,
        dout: &Tensor,
        dlast: Tensor,
    ) -> Vec<Tensor> {
        let options = (self.acc(), self.conv_uj.device());
        let pulled = walk.by_piece(order, |blocks| {
            blocks.iter().rev().fold(Tensor::zeros(self.heads.state(), options), |dstate, block| {
                let dout = dout.narrow(0, block.first, block.rows);
                self.form.pull(&self.heads, &walk.rows(block), &dout, &dstate)
            })
        });
        let no_piece = || Tensor::zeros([[0].as_slice(), &self.heads.state()].concat(), options);
        let own = if pulled.is_empty() { no_piece() } else { Tensor::stack(&pulled, 0) };
        let all = order.in_position_order(&gather_rows(cp_group.axis, &own, &order.pieces_by_rank()));
        let mut gradients = vec![dlast];
        for piece in (0..all.size()[0]).rev() {
            let after = &gradients[gradients.len() - 1];
            gradients.push(factors.get(piece).transpose(-1, -2).matmul(after) + all.get(piece));
        }
        gradients.reverse();
        gradients
    }

    /// Backward of one block: gradients of its raw inputs and of those before it, [taps − 1 + t, u] in the accumulation dtype,
    /// of its gates' inputs, and of the state before it.
    fn block_backward(
        &self,
        walk: &Walk,
        block: &Block,
        start: &Tensor,
        dout: &Tensor,
        dstate: &Tensor,
    ) -> Result<(Inputs, Tensor), tensor::Error> {
        let rows = walk.rows(block);
        let done = self.form.backward(&self.heads, &rows, start, dout, dstate)?;
        let u_tu = self.form.convolve_backward(&walk.extended(block), &self.conv_uj, &done.rows.y_tu)?;
        let own = walk.input.rows(block.first, block.rows);
        let leaf = |x: &Tensor| x.detach().set_requires_grad(true);
        let (b, a) = (leaf(&own.b_th), leaf(&own.a_th));
        let (decay, strength) = tch::with_grad(|| self.gates(&b, &a));
        backward_graph(&[(&decay, &done.rows.decay_th), (&strength, &done.rows.strength_th)])?;
        Ok((Inputs { u_tu, b_th: b.grad(), a_th: a.grad() }, done.dstate_hkv))
    }

    /// Backward of a span's rows. Every rank takes part.
    pub(super) fn run_backward(
        &self,
        cp_group: &CpGroup,
        backward: Backward,
        past_gradient: &mut PastGradient,
    ) -> Result<MixerInput, tensor::Error> {
        let Backward { span, input, past, mixed, dout, later, .. } = backward;
        let order = Order::new(span, cp_group.axis.rank());
        let walk = self.walk(cp_group, &order, input, &self.border_of(past));
        let [starts, factors] = mixed.saved.tensors() else { unreachable!("a forward saves two planes") };
        let zero = self.nothing_before();
        let later = later
            .map_or_else(|| Border { inputs_ju: zero.inputs_ju.to_kind(self.acc()), ..zero }, |later| (&later).into());
        // 1. Gradient of the state after every piece.
        let alone = cp_group.axis.size() == 1;
        let gradients = (!alone)
            .then(|| self.state_gradients(cp_group, &order, &walk, factors, dout, later.state_hkv.shallow_clone()));
        // 2. This rank's rows, last first.
        let short = self.short();
        let mut dinput = Inputs {
            u_tu: walk.input.u_tu.zeros_like(),
            b_th: walk.input.b_th.zeros_like(),
            a_th: walk.input.a_th.zeros_like(),
        };
        let mut dstate = later.state_hkv.shallow_clone();
        let mut dbefore = Vec::new();
        for (number, block) in walk.blocks.iter().enumerate().rev() {
            let ends_piece = walk.blocks.get(number + 1).is_none_or(|next| next.piece != block.piece);
            if let Some(gradients) = gradients.as_ref().filter(|_| ends_piece) {
                dstate = gradients[block.piece + 1].shallow_clone();
            }
            let dout = dout.narrow(0, block.first, block.rows);
            let start = starts.get(as_dim(from_index(number)));
            let (done, before) = self.block_backward(&walk, block, &start, &dout, &dstate)?;
            dstate = before;
            let _ = dinput.rows(block.first, block.rows).u_tu.g_add_(&done.u_tu.narrow(0, short, block.rows));
            dinput.rows(block.first, block.rows).b_th.copy_(&done.b_th);
            dinput.rows(block.first, block.rows).a_th.copy_(&done.a_th);
            let early = done.u_tu.narrow(0, 0, short);
            if block.starts_piece {
                // A copy, since a view would keep the gradient of the whole block alive.
                dbefore.push(early.copy());
            } else {
                let _ = dinput.u_tu.narrow(0, block.first - short, short).g_add_(&early);
            }
        }
        dbefore.reverse();
        // 3. Gradient of the raw inputs before every piece goes to their rows, or to the past.
        let dpast = order.return_before(cp_group.axis, &dbefore, &later.inputs_ju, &mut dinput.u_tu);
        let dstate = gradients.map_or(dstate, |gradients| gradients[0].shallow_clone());
        if let Some(Some(gradient)) = past_gradient.runs.first() {
            let gradient = Border::from(gradient);
            let _ = gradient.state_hkv.shallow_clone().g_add_(&dstate);
            let _ = gradient.inputs_ju.shallow_clone().g_add_(&dpast);
        }
        let Inputs { u_tu, b_th, a_th } = dinput;
        Ok(MixerInput { queries: Planes::default(), state: vec![u_tu, b_th, a_th].into() })
    }
}

/// The maps of all pieces, in order of position.
struct Maps {
    /// T of every piece, [pieces, h, k, k].
    factors: Tensor,
    /// B of every piece, [pieces, h, k, v].
    increments: Tensor,
}
