//! Layers with a gated delta rule: what they hold and compute in, phase by phase.
//!
//! A phase runs one layer at a time, so its addends are those of the kind of layer that takes most. Within a delta layer
//! bytes peak at one of a few moments; the plan takes the largest, in the order of `model::delta` and `model::pass`:
//!
//! ```text
//!   rule      one call of the rule: its scratch beside inputs, gates and outputs of all rows
//!   segment   segment B of one micro-block; in a backward with a graph, and gradients of outputs and gates of all rows
//!   pulled    one call of the rule's backward: its scratch, and gradients of all inputs too
//! ```

use tch::{Device, Kind};

use super::addend::{Addend, Place, addend, product, total, within};
use super::sizes::{Sizes, kind_of};
use crate::model::shape::{Layer, Mix};
use crate::prompt::pages::{BORDERS, Residency};
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, as_dim, from_dim};
use crate::tensor::delta::plain::CHUNK;
use crate::tensor::delta::{DeltaHeads, Form, compiled};

/// Float32 numbers that a kernel keeps of a row for each value head, and for each key head.
const SCALARS: u64 = 5;
const KEY_SCALARS: u64 = 2;
/// Values of the accumulation dtype of a row in a call of matrix products, for each element of a key and of a value of all
/// heads: as the counting allocator saw them. Those of backward are counted in halves.
const PLAIN_FORWARD: u64 = 6;
const PLAIN_BACKWARD_HALVES: u64 = 23;

/// Sizes of a layer's rule, in elements.
#[derive(Clone, Copy)]
pub(super) struct DeltaSizes {
    heads: u64,
    key_dim: u64,
    value_dim: u64,
    key_heads: u64,
    taps: u64,
    /// Inputs of the convolution of a row.
    channels: u64,
    /// Raw inputs of the convolution at a border.
    border_inputs: u64,
}

impl DeltaSizes {
    /// Those of a layer; `None` where no state goes from row to row.
    pub(super) fn of(layer: &Layer) -> Option<DeltaSizes> {
        match layer.mix {
            Mix::Delta { key_heads, value_heads, key_dim, value_dim, taps } => Some(DeltaSizes {
                heads: value_heads,
                key_heads,
                taps,
                key_dim,
                value_dim,
                channels: 2 * key_heads * key_dim + value_heads * value_dim,
                border_inputs: layer.mix.border().0,
            }),
            _ => None,
        }
    }

    /// Elements of a row's output, and of the gate z.
    fn values(self) -> u64 {
        self.heads * self.value_dim
    }

    /// Elements of a row that the rule reads: inputs of the convolution, of the strength and of the decay.
    fn inputs(self) -> u64 {
        self.channels + 2 * self.heads
    }

    /// Elements of the recurrent state.
    fn state(self) -> u64 {
        self.heads * self.key_dim * self.value_dim
    }

    /// Elements of the factor of a map of the state.
    fn factor(self) -> u64 {
        self.heads * self.key_dim * self.key_dim
    }

    /// Elements of a row of a chunk's scores.
    fn scores(self) -> u64 {
        self.heads * from_dim(CHUNK)
    }

    /// Whether there is a kernel for rows of dtype `kind` on a GPU.
    fn has_kernel(self, kind: Kind) -> bool {
        let heads = DeltaHeads {
            key_heads: as_dim(self.key_heads),
            value_heads: as_dim(self.heads),
            key_dim: as_dim(self.key_dim),
            value_dim: as_dim(self.value_dim),
        };
        compiled::covers(&heads, as_dim(self.taps), kind)
    }
}

/// What one call of the rule computes in.
struct Call {
    /// Most rows that one call takes.
    rows: u64,
    /// Bytes of a row in forward, the convolved row and its gates among them.
    forward: u64,
    /// The same in backward.
    backward: u64,
}

/// A moment of a layer's work.
struct Moment {
    /// Bytes of a row that live then.
    row: u64,
    /// What one call or one micro-block computes in.
    scratch: u64,
    name: &'static str,
    reason: String,
}

impl Moment {
    fn bytes(&self, rows: u64) -> u64 {
        product(&[rows, self.row]).0.saturating_add(self.scratch)
    }

    /// The moment of several at which `rows` rows take most.
    fn largest(moments: Vec<Moment>, rows: u64) -> Option<Moment> {
        moments.into_iter().max_by_key(|moment| moment.bytes(rows))
    }
}

/// A phase's rows, their names, and the setting that makes them fewer.
struct Span {
    phase: Phase,
    rows: u64,
    name: &'static str,
    words: &'static str,
    knob: &'static str,
}

/// The list that takes more.
pub(super) fn larger(one: Vec<Addend>, other: Vec<Addend>) -> Vec<Addend> {
    if total(&other) > total(&one) { other } else { one }
}

impl Sizes<'_> {
    /// The layer whose rule takes most.
    fn delta(&self) -> Option<(DeltaSizes, &Layer)> {
        let all = self.shape.layers.iter().filter_map(|layer| Some((DeltaSizes::of(layer)?, layer)));
        all.max_by_key(|(sizes, _)| sizes.channels + sizes.values())
    }

    /// One call of a rule. A kernel, if the GPU has one, keeps T and the scores of each chunk and a few scalars of each row, in
    /// backward also the states before each chunk and their gradients, corrected values and their gradients.
    fn call(&self, delta: DeltaSizes) -> Call {
        let (model, acc) = (self.model_bytes, self.acc_bytes);
        let gates = 2 * delta.heads * acc;
        let row = delta.channels * model + gates;
        if self.copies_overlap && delta.has_kernel(kind_of(self.config.model.dtype)) {
            let scalars = (SCALARS * delta.heads + KEY_SCALARS * delta.key_heads) * acc;
            let prepared = row + 2 * delta.scores() * model + scalars;
            let states = 2 * delta.state() / from_dim(CHUNK);
            let gradient = (delta.channels + states + 2 * delta.values()) * model + gates;
            let rows = from_dim(Form::Compiled.rows_max(Device::Cuda(0)));
            return Call { rows, forward: prepared + delta.values() * model, backward: prepared + gradient };
        }
        let device = if self.copies_overlap { Device::Cuda(0) } else { Device::Cpu };
        let wide = delta.heads * (delta.key_dim + delta.value_dim) * acc;
        Call {
            rows: from_dim(Form::Plain.rows_max(device)),
            forward: row + PLAIN_FORWARD * wide,
            backward: row + PLAIN_BACKWARD_HALVES * wide / 2,
        }
    }

    /// Ranks that share a prompt.
    fn sharers(&self) -> u64 {
        self.config.cp_size(self.ranks).max(1)
    }

    /// The state before every call of `rows` rows; before each of `pieces` of all ranks, and where there are several ranks their
    /// maps, gathered on every rank; and one gradient of a border.
    fn states_and_maps(&self, phase: Phase, rows: u64, pieces: u64) -> Vec<Addend> {
        let Some((delta, _)) = self.delta() else { return Vec::new() };
        let calls = rows.div_ceil(self.call(delta).rows) + 2;
        let maps = if self.sharers() > 1 { pieces * (2 * delta.factor() + delta.state()) } else { 0 };
        let states = (calls + pieces + 1) * delta.state();
        vec![within(
            phase,
            "recurrent states and maps",
            product(&[states.saturating_add(maps).saturating_add(delta.state() + delta.border_inputs), self.acc_bytes]),
            format!(
                "{calls} calls and {pieces} pieces of all ranks × {} elements, and the pieces' maps",
                delta.state()
            ),
            "nothing: it does not grow with the prompt of a rank, but for a state in many rows",
        )]
    }

    fn moment_addends(&self, of: &Span, moments: Vec<Moment>, pieces: u64) -> Vec<Addend> {
        let Span { phase, rows, name, words, knob } = *of;
        let Some(Moment { row, scratch, name: scratch_name, reason }) = Moment::largest(moments, rows) else {
            return Vec::new();
        };
        let mut sum = vec![
            within(phase, name, product(&[rows, row]), format!("{rows} {words}: {row} B each"), knob),
            within(phase, scratch_name, Bytes(scratch), reason, "choose a smaller memory.micro_block"),
        ];
        sum.extend(self.states_and_maps(phase, rows, pieces));
        sum
    }

    /// One call of the rule at a moment at which `row` bytes of each row live.
    fn in_call(&self, delta: DeltaSizes, row: u64, rows: u64, graph: bool) -> Moment {
        let call = self.call(delta);
        let rows = rows.min(call.rows);
        let bytes = if graph { call.backward } else { call.forward };
        Moment {
            row,
            scratch: product(&[rows, bytes]).0,
            name: "delta-rule scratch",
            reason: format!("{rows} rows of one call × {bytes} B, chunks of {CHUNK}"),
        }
    }

    /// Segment B of one micro-block.
    fn in_segment(&self, layer: &Layer, row: u64, rows: u64, graph: bool) -> Moment {
        let micro = self.config.memory.micro_rows().0.min(rows);
        Moment {
            row,
            scratch: self.block(layer, rows, graph),
            name: "segment scratch",
            reason: format!("{micro} rows × one block's intermediates"),
        }
    }

    /// What capture holds in a delta layer.
    pub(super) fn delta_capture(&self) -> Vec<Addend> {
        let Some((delta, layer)) = self.delta() else { return Vec::new() };
        let rows = self.prompt_rows;
        let model = self.model_bytes;
        let (x, inputs, values) = (self.shape.width * model, delta.inputs() * model, delta.values() * model);
        let leaving = self.leaving(|after| DeltaSizes::of(after).is_some());
        let moments = vec![
            self.in_call(delta, leaving + x + inputs + 2 * values, rows, false),
            self.in_segment(layer, leaving + 2 * x + 2 * values, rows, false),
        ];
        let of = Span {
            phase: Phase::Capture,
            rows,
            name: "prompt rows",
            words: "positions × (hidden state; inputs of convolution, decay and strength; gate; outputs)",
            knob: "use more ranks (parallel.cp_size)",
        };
        self.moment_addends(&of, moments, 2 * self.sharers() + 2)
    }

    /// What the backward of one answer holds in a delta layer, besides the block's input, output and gradients.
    pub(super) fn delta_answer(&self) -> Vec<Addend> {
        let Some((delta, layer)) = self.delta() else { return Vec::new() };
        let rows = self.answer_rows.max(1);
        let (inputs, values) = (delta.inputs() * self.model_bytes, delta.values() * self.model_bytes);
        let moments = vec![
            self.in_segment(layer, inputs + 4 * values, rows, true),
            self.in_call(delta, 2 * inputs + 4 * values, rows, true),
        ];
        let of = Span {
            phase: Phase::Replay,
            rows,
            name: "rows of a rule",
            words: "rows of one answer × (inputs of the rule, gate, output, and their gradients)",
            knob: "choose a shorter context.answer_len",
        };
        self.moment_addends(&of, moments, self.sharers())
    }

    /// What the sweep of a long tail holds in a delta layer; `next` are bytes of a row that come for the next layer.
    pub(super) fn delta_sweep(&self, next: u64) -> Vec<Addend> {
        let Some((delta, layer)) = self.delta() else { return Vec::new() };
        let rows = self.tail_rows;
        let model = self.model_bytes;
        let (x, inputs, values) = (self.shape.width * model, delta.inputs() * model, delta.values() * model);
        let (forward, backward) = (next + 2 * x, next + 3 * x);
        let moments = vec![
            self.in_call(delta, forward + inputs + 2 * values, rows, false),
            self.in_segment(layer, backward + inputs + 4 * values, rows, true),
            self.in_call(delta, backward + 2 * inputs + 4 * values, rows, true),
        ];
        let of = Span {
            phase: Phase::Sweep,
            rows,
            name: "tail on its way back",
            words: "positions × (rows in, dy, dx; inputs of the rule, gate, output and their gradients; what comes next)",
            knob: "set grpo.gradient = \"response\"",
        };
        self.moment_addends(&of, moments, 2 * self.sharers() + 2)
    }

    /// Bytes of a border's state in a layer: raw inputs of the convolution, and the recurrent state.
    pub(super) fn border_bytes(&self, layer: &Layer) -> u64 {
        let (inputs, state) = layer.mix.border();
        inputs * self.model_bytes + state * self.acc_bytes
    }

    /// States at both borders of the prompt in all layers, where they wait, and those of a layer on the device.
    pub(super) fn borders(&self) -> Vec<Addend> {
        let bytes = self.shape.sum(|layer| self.border_bytes(layer));
        let layers = self.shape.sum(|layer| u64::from(self.border_bytes(layer) > 0));
        if bytes == 0 {
            return Vec::new();
        }
        let nothing = "nothing: it does not grow with the prompt";
        let mut sum = vec![addend(
            "states at a border",
            self.keeping.pages.into(),
            product(&[bytes, BORDERS]),
            format!(
                "{BORDERS} × {bytes} B of recurrent states and convolution inputs of {layers} layers: before the tail, and \
                 at the prompt's end; the same on every rank"
            ),
            nothing,
        )];
        let most = self.shape.most(|layer| self.border_bytes(layer));
        let host = self.keeping.pages == Residency::Host;
        let beside = 1 + u64::from(self.copies_overlap && host);
        let phases = [(Phase::Capture, true), (Phase::Replay, host), (Phase::Sweep, host && self.tail_is_long)];
        for (phase, _) in phases.into_iter().filter(|(_, staged)| *staged) {
            let reason = format!("{BORDERS} × {most} B of a layer, {beside} layers at a time");
            sum.push(within(phase, "staged states", product(&[most, BORDERS, beside]), reason, nothing));
        }
        sum
    }

    /// States of all answers that are sampled.
    pub(super) fn answers_recurrent(&self, answers: u64, knob: &'static str) -> Vec<Addend> {
        let border = self.shape.sum(|layer| self.border_bytes(layer));
        if border == 0 {
            return Vec::new();
        }
        let state = self.shape.most(|layer| DeltaSizes::of(layer).map_or(0, DeltaSizes::state));
        let within =
            |name, bytes, reason| Addend { place: Place::Device, ..within(Phase::Rollout, name, bytes, reason, knob) };
        vec![
            within("answers' recurrent states", product(&[answers, border]), format!("{answers} answers × {border} B")),
            within(
                "a step of recurrent states",
                product(&[answers, state, self.acc_bytes, 3]),
                format!("{answers} answers × {state} elements of a layer × 3 (decayed, what is added, after the row)"),
            ),
        ]
    }
}
