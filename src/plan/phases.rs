//! The addends of single phases: what capture, the answers and the tail hold while they run.

use super::sizes::{Sizes, addend, place_of, product, within};
use super::{Addend, Place};
use crate::config::Dtype;
use crate::model::attention::KEYS_MAX;
use crate::model::pass::MIXED_ROWS;
use crate::model::shape::{Layer, Mix};
use crate::prompt::layout::TileSizes;
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, from_dim};

impl Sizes<'_> {
    /// What a phase computes in besides its `rows`: a kernel's workspace for `queries` at one time, or one micro-block's
    /// intermediates of the larger segment, with its graph where there is one. The two are never alive at one time, and
    /// with the second `spared` bytes of each row are not alive either.
    fn scratch(&self, phase: Phase, rows: u64, queries: u64, graph: bool, spared: u64) -> Addend {
        let (ffn_width, width) = (self.ffn_width(), self.shape.width);
        let micro = self.config.memory.micro_block.0.min(rows);
        let wide = if graph { 7 * ffn_width + 8 * width } else { 3 * ffn_width + 4 * width };
        let segment = product(&[micro, wide, self.model]).0.saturating_sub(product(&[rows, spared]).0);
        let (kernel, reason) = self.workspace(queries, graph);
        if kernel > segment {
            return within(phase, "kernel workspace", Bytes(kernel), reason, "nothing: it is bounded");
        }
        let reason = format!("{micro} rows × one block's intermediates, less what is not alive beside them");
        within(phase, "segment scratch", Bytes(segment), reason, "choose a smaller memory.micro_block")
    }

    /// Rows that the mixer takes at one time.
    fn stretch(&self, rows: u64) -> u64 {
        rows.min(MIXED_ROWS.max(self.config.memory.micro_block.0))
    }

    /// Whether a GPU's attention is made of matrix products: no fused kernel has the dtype, or a window.
    pub(super) fn plain(&self) -> bool {
        let windowed = |layer: &Layer| matches!(layer.mix, Mix::Grouped { window: Some(_), .. });
        self.beside && (self.config.model.dtype != Dtype::Bfloat16 || self.shape.layers.iter().any(windowed))
    }

    /// What attention takes on a GPU for its own: a fused kernel outputs and, in backward, dk and dv of every query head;
    /// matrix products about six tiles of scores.
    fn workspace(&self, queries: u64, graph: bool) -> (u64, String) {
        let acc = self.acc;
        if !self.beside {
            return (0, String::new());
        }
        let of = |most: fn(u64, u64, Option<u64>) -> u64| {
            self.shape.most(|layer| match layer.mix {
                Mix::Grouped { query_heads, head_dim, window, .. } => most(query_heads, head_dim, window),
                _ => 0,
            })
        };
        let (query_heads, width) = (of(|heads, _, _| heads), of(|heads, dim, _| heads * dim));
        let keys = self.rows.min(from_dim(KEYS_MAX));
        let outputs = product(&[queries, width, self.model + if graph { acc } else { 0 }]).0;
        let gradients = if graph { product(&[keys, width, 2 * acc]).0 } else { 0 };
        let tile = [queries.min(from_dim(TileSizes::PLAIN.rows)), keys.min(from_dim(TileSizes::PLAIN.keys))];
        let scores = if self.plain() { product(&[query_heads, tile[0], tile[1], acc, 6]).0 } else { 0 };
        let fused = outputs.saturating_add(gradients);
        if scores > fused {
            return (scores, format!("six tiles of scores, {} queries by {} keys", tile[0], tile[1]));
        }
        (fused, format!("attention of {queries} queries over {keys} keys"))
    }

    /// Bytes of a prompt row in capture besides its hidden state: what it asks with, what goes past the mixer, its merged
    /// output, and its page state. Latents of all ranks are gathered, so rows of a latent layer pass block by block, and
    /// only the layer's input and output wait.
    fn captured_row(&self, layer: &Layer) -> u64 {
        // Slabs of this layer and, while they leave, those of the layer before; attention outputs likewise.
        let slabs = 1 + u64::from(self.beside && self.keeping.pages == Residency::Host);
        let widths = layer.mix.widths();
        let state = widths.state * self.model * slabs;
        match layer.mix {
            Mix::Latent { .. } => self.shape.width * self.model + state,
            _ => (widths.ask + widths.handed) * self.model + (widths.output + widths.beside) * self.acc + state,
        }
    }

    /// What one row keeps of a layer's mixer for its way back.
    fn kept_row(&self, layer: &Layer) -> u64 {
        let widths = layer.mix.widths();
        widths.output * self.model + widths.beside * self.acc
    }

    pub(super) fn capture(&self) -> Vec<Addend> {
        let (width, model) = (self.shape.width, self.model);
        let row = width * model + self.shape.most(|layer| self.captured_row(layer));
        let heads = self.shape.most(|layer| layer.mix.widths().output);
        let words = match self.shape.layers.iter().map(|layer| layer.mix).find(|mix| !mix.travels()) {
            None => format!("hidden state {width} wide; queries and merged outputs {heads} wide; page state"),
            Some(Mix::Latent { .. }) => format!("hidden states in and out, {width} wide; page state"),
            Some(_) => format!("hidden state {width} wide; what rows ask with, gates, outputs; page state: {row} B"),
        };
        let mut sum = vec![within(
            Phase::Capture,
            "prompt rows",
            product(&[self.rows, row]),
            format!("{} positions × ({words})", self.rows),
            "use more ranks (parallel.cp_size)",
        )];
        if self.beside && self.travels && self.keeping.attention && self.keeping.tail == Residency::Host {
            sum.push(within(
                Phase::Capture,
                "attention outputs that leave",
                product(&[self.tail, self.shape.most(|layer| self.kept_row(layer))]),
                format!("{} positions × (output, {heads} wide; log-sum-exp)", self.tail),
                "set memory.keep_attention = false",
            ));
        }
        sum.extend(self.foreign(Phase::Capture, 0));
        let output = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().output } else { 0 });
        let spared = (output * self.acc).saturating_sub(width * model);
        sum.push(self.scratch(Phase::Capture, self.rows, self.stretch(self.rows), false, spared));
        sum
    }

    pub(super) fn answers(&self) -> Vec<Addend> {
        let (width, layers, model) = (self.shape.width, self.layers, self.model);
        let gathered = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 });
        let (group, answer, all) = (self.config.grpo.group_size, self.answer, self.config.context.answer_len.0);
        let head = self.config.memory.head_block.0.min(answer.max(1));
        let mut sum = vec![
            addend(
                "answers' hidden states",
                Place::Host,
                product(&[group, answer, width, layers, model]),
                format!("{group} answers × {answer} rows × {width} × {layers} layers × {model} B"),
                "choose a smaller grpo.group_size, or a shorter context.answer_len",
            ),
            within(
                Phase::Replay,
                "head scratch",
                product(&[head, self.shape.vocabulary, 4 * self.acc]),
                format!("{head} rows × vocabulary {}", self.shape.vocabulary),
                "choose a smaller memory.head_block",
            ),
        ];
        if gathered > 0 {
            sum.push(within(
                Phase::Replay,
                "gathered answer rows",
                product(&[all, gathered, 4 * model + 4 * self.acc]),
                format!("{all} rows of one answer × eight {gathered} wide"),
                "choose a shorter context.answer_len",
            ));
        }
        sum.push(self.scratch(Phase::Replay, answer.max(1), all, true, 0));
        if self.travels {
            sum.push(self.state_gradient(Phase::Replay));
        }
        sum
    }

    /// dk and dv of the tail's state on this rank, in one layer.
    fn state_gradient(&self, phase: Phase) -> Addend {
        within(
            phase,
            "gradient of page state",
            product(&[self.tail, self.shape.most(|layer| layer.mix.widths().carries), self.acc]),
            format!("{} positions × dk and dv", self.tail),
            "set grpo.gradient = \"response\"",
        )
    }

    /// Bytes of a tail row on its way back through a layer's mixer: queries, output, its gradient and that of the queries.
    fn swept_row(&self, layer: &Layer) -> u64 {
        let widths = layer.mix.widths();
        if matches!(layer.mix, Mix::Latent { .. }) {
            return 0;
        }
        let model = widths.ask + 2 * widths.output + 2 * widths.handed;
        model * self.model + (widths.ask + widths.beside) * self.acc
    }

    pub(super) fn tail(&self) -> Vec<Addend> {
        let (width, model, acc, tail) = (self.shape.width, self.model, self.acc, self.tail);
        let heads = self.shape.most(|layer| layer.mix.widths().output);
        if tail == 0 {
            return Vec::new();
        }
        let every = if self.travels { self.keeping.every as u64 } else { 1 };
        let kept = self.layers.div_ceil(every) + (every - 1);
        let mut sum = vec![addend(
            "tail's block inputs",
            place_of(self.keeping.tail),
            product(&[tail, width, kept, model]),
            format!("{tail} positions that carry gradient × {width} × {kept} of {} layers × {model} B", self.layers),
            "set memory.inputs_every higher, or grpo.gradient = \"response\"",
        )];
        if !self.travels {
            return sum;
        }
        let coming = self.beside && self.keeping.tail == Residency::Host;
        let next = if coming { width * model } else { 0 };
        let most_kept = self.shape.most(|layer| self.kept_row(layer));
        let next_outputs = if coming && self.keeping.attention { most_kept } else { 0 };
        let back = self.shape.most(|layer| self.swept_row(layer));
        sum.push(within(
            Phase::Sweep,
            "tail on its way back",
            product(&[tail, 3 * width * model + back + next + next_outputs]),
            format!("{tail} positions × (rows in, dy, dx; queries, outputs, dout, dq; what comes for the next layer)"),
            "set grpo.gradient = \"response\"",
        ));
        sum.push(self.state_gradient(Phase::Sweep));
        sum.extend(self.foreign(Phase::Sweep, self.state / model * acc));
        let asked = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 });
        sum.push(self.scratch(Phase::Sweep, tail, self.stretch(tail), true, asked * acc));
        if self.keeping.attention {
            sum.push(addend(
                "tail's attention outputs",
                place_of(self.keeping.tail),
                product(&[tail, self.shape.sum(|layer| self.kept_row(layer))]),
                format!("{tail} positions × (output, {heads} wide; log-sum-exp) × {} layers", self.layers),
                "set memory.keep_attention = false",
            ));
        }
        sum
    }
}
