//! The addends of single phases: what capture, replay and the sweep hold while they run.

use super::addend::{Addend, Place, addend, product, within};
use super::sizes::Sizes;
use crate::config::Dtype;
use crate::model::attention::KEYS_MAX;
use crate::model::pass::MIXED_ROWS;
use crate::model::shape::{Layer, Mix};
use crate::prompt::layout::TileSizes;
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, from_dim};

impl Sizes<'_> {
    /// What a phase computes in besides its `rows`. This is the larger of two addends that are never alive together: a
    /// kernel's workspace for `queries`, and one micro-block's intermediates of a segment, with its graph if there is one.
    /// `spared` bytes of each row are not alive together with the second.
    fn scratch(&self, phase: Phase, rows: u64, queries: u64, graph: bool, spared: u64) -> Addend {
        let ffn_width = self.ffn_width();
        let width = self.shape.width;
        let micro = self.config.memory.micro_block.0.min(rows);
        let wide = if graph { 7 * ffn_width + 8 * width } else { 3 * ffn_width + 4 * width };
        let segment = product(&[micro, wide, self.model_bytes]).0.saturating_sub(product(&[rows, spared]).0);
        let (kernel, reason) = self.workspace(queries, graph);
        if kernel > segment {
            return within(phase, "kernel workspace", Bytes(kernel), reason, "nothing: it is bounded");
        }
        let reason = format!("{micro} rows × one block's intermediates, less what is not alive beside them");
        within(phase, "segment scratch", Bytes(segment), reason, "choose a smaller memory.micro_block")
    }

    /// Rows of one call of the mixer.
    fn stretch(&self, rows: u64) -> u64 {
        rows.min(MIXED_ROWS.max(self.config.memory.micro_block.0))
    }

    /// Whether attention on a GPU is computed by matrix products, since no fused kernel has the dtype or a window.
    pub(super) fn plain(&self) -> bool {
        let windowed = |layer: &Layer| matches!(layer.mix, Mix::Grouped { window: Some(_), .. });
        self.copies_overlap && (self.config.model.dtype != Dtype::Bfloat16 || self.shape.layers.iter().any(windowed))
    }

    /// The most query heads of any layer.
    pub(super) fn query_heads(&self) -> u64 {
        self.shape.most(|layer| match layer.mix {
            Mix::Grouped { query_heads, .. } => query_heads,
            _ => 0,
        })
    }

    /// Bytes of attention's workspace on a GPU, and the reason. A fused kernel takes outputs and, in backward, dk and dv of
    /// every query head. Matrix products take about six tiles of scores.
    fn workspace(&self, queries: u64, graph: bool) -> (u64, String) {
        let acc = self.acc_bytes;
        if !self.copies_overlap {
            return (0, String::new());
        }
        let query_heads = self.query_heads();
        let width = self.shape.most(|layer| match layer.mix {
            Mix::Grouped { query_heads, head_dim, .. } => query_heads * head_dim,
            _ => 0,
        });
        let keys = self.prompt_rows.min(from_dim(KEYS_MAX));
        let outputs = product(&[queries, width, self.model_bytes + if graph { acc } else { 0 }]).0;
        let gradients = if graph { product(&[keys, width, 2 * acc]).0 } else { 0 };
        let tile = [queries.min(from_dim(TileSizes::PLAIN.rows)), keys.min(from_dim(TileSizes::PLAIN.keys))];
        let scores = if self.plain() { product(&[query_heads, tile[0], tile[1], acc, 6]).0 } else { 0 };
        let fused = outputs.saturating_add(gradients);
        if scores > fused {
            return (scores, format!("six tiles of scores, {} queries by {} keys", tile[0], tile[1]));
        }
        (fused, format!("attention of {queries} queries over {keys} keys"))
    }

    /// Bytes of a prompt row in capture besides its hidden state: its queries, what bypasses the mixer, its merged output,
    /// and its page state. A latent layer gathers the latents of all ranks, so its rows pass block by block, and only the
    /// layer's input and output are held.
    fn captured_row(&self, layer: &Layer) -> u64 {
        // Slabs of this layer, and those of the layer before while they are copied to the host.
        let slabs = 1 + u64::from(self.copies_overlap && self.keeping.pages == Residency::Host);
        let widths = layer.mix.widths();
        let state = widths.state * self.model_bytes * slabs;
        match layer.mix {
            Mix::Latent { .. } => self.shape.width * self.model_bytes + state,
            _ => {
                (widths.ask + widths.handed) * self.model_bytes
                    + (widths.output + widths.beside) * self.acc_bytes
                    + state
            }
        }
    }

    /// Bytes of a row that are kept of a layer's mixer for its backward.
    fn kept_row(&self, layer: &Layer) -> u64 {
        let widths = layer.mix.widths();
        widths.output * self.model_bytes + widths.beside * self.acc_bytes
    }

    /// What capture holds and computes in.
    pub(super) fn capture(&self) -> Vec<Addend> {
        let width = self.shape.width;
        let model = self.model_bytes;
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
            product(&[self.prompt_rows, row]),
            format!("{} positions × ({words})", self.prompt_rows),
            "use more ranks (parallel.cp_size)",
        )];
        if self.copies_overlap && self.tail_is_long && self.keeping.attention && self.keeping.tail == Residency::Host {
            sum.push(within(
                Phase::Capture,
                "attention outputs that leave",
                product(&[self.tail_rows, self.shape.most(|layer| self.kept_row(layer))]),
                format!("{} positions × (output, {heads} wide; log-sum-exp)", self.tail_rows),
                "set memory.keep_attention = false",
            ));
        }
        sum.extend(self.foreign(Phase::Capture, 0));
        let output = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().output } else { 0 });
        let spared = (output * self.acc_bytes).saturating_sub(width * model);
        sum.push(self.scratch(Phase::Capture, self.prompt_rows, self.stretch(self.prompt_rows), false, spared));
        sum
    }

    /// Saved inputs of the answers, and what replay computes in.
    pub(super) fn answers(&self) -> Vec<Addend> {
        let Sizes { layers, model_bytes: model, .. } = *self;
        let width = self.shape.width;
        let gathered = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 });
        let group = self.config.grpo.group_size;
        let answer = self.answer_rows;
        let all = self.config.context.answer_len.0;
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
                product(&[head, self.shape.vocabulary, 4 * self.acc_bytes]),
                format!("{head} rows × vocabulary {}", self.shape.vocabulary),
                "choose a smaller memory.head_block",
            ),
        ];
        if gathered > 0 {
            sum.push(within(
                Phase::Replay,
                "gathered answer rows",
                product(&[all, gathered, 4 * model + 4 * self.acc_bytes]),
                format!("{all} rows of one answer × eight {gathered} wide"),
                "choose a shorter context.answer_len",
            ));
        }
        sum.push(self.scratch(Phase::Replay, answer.max(1), all, true, 0));
        if self.tail_is_long {
            sum.push(self.state_gradient(Phase::Replay));
        }
        sum
    }

    /// dk and dv of this rank's tail rows, in one layer.
    fn state_gradient(&self, phase: Phase) -> Addend {
        within(
            phase,
            "gradient of page state",
            product(&[self.tail_rows, self.shape.most(|layer| layer.mix.widths().carries), self.acc_bytes]),
            format!("{} positions × dk and dv", self.tail_rows),
            "set grpo.gradient = \"response\"",
        )
    }

    /// Bytes of a tail row in the backward of a layer's mixer: queries, output, and their gradients.
    fn swept_row(&self, layer: &Layer) -> u64 {
        let widths = layer.mix.widths();
        if matches!(layer.mix, Mix::Latent { .. }) {
            return 0;
        }
        let model = widths.ask + 2 * widths.output + 2 * widths.handed;
        model * self.model_bytes + (widths.ask + widths.beside) * self.acc_bytes
    }

    /// Saved inputs of the tail, and what the sweep computes in.
    pub(super) fn tail(&self) -> Vec<Addend> {
        let Sizes { model_bytes: model, acc_bytes: acc, tail_rows: tail, .. } = *self;
        let width = self.shape.width;
        let heads = self.shape.most(|layer| layer.mix.widths().output);
        if tail == 0 {
            return Vec::new();
        }
        let kept = self.keeping.layer_inputs(self.layers, self.tail_is_long);
        let mut sum = vec![addend(
            "tail's block inputs",
            self.keeping.tail.into(),
            product(&[tail, width, kept, model]),
            format!("{tail} positions that carry gradient × {width} × {kept} of {} layers × {model} B", self.layers),
            "set memory.inputs_every higher, or grpo.gradient = \"response\"",
        )];
        if !self.tail_is_long {
            return sum;
        }
        let coming = self.copies_overlap && self.keeping.tail == Residency::Host;
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
        sum.extend(self.foreign(Phase::Sweep, self.passing_bytes / model * acc));
        let asked = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 });
        sum.push(self.scratch(Phase::Sweep, tail, self.stretch(tail), true, asked * acc));
        if self.keeping.attention {
            sum.push(addend(
                "tail's attention outputs",
                self.keeping.tail.into(),
                product(&[tail, self.shape.sum(|layer| self.kept_row(layer))]),
                format!("{tail} positions × (output, {heads} wide; log-sum-exp) × {} layers", self.layers),
                "set memory.keep_attention = false",
            ));
        }
        sum
    }
}
