//! The addends of single phases: what capture, replay and the sweep hold while they run.

use super::addend::{Addend, Place, addend, product, within};
use super::block::LatentSizes;
use super::delta::{DeltaSizes, larger};
use super::sizes::Sizes;
use crate::config::Dtype;
use crate::model::attention::KEYS_MAX;
use crate::model::pass::MIXED_ROWS;
use crate::model::shape::{Layer, Mix};
use crate::prompt::layout::TileSizes;
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, from_dim};
use crate::tensor::gpu::KERNEL_COPY_BYTES_MAX;

impl Sizes<'_> {
    /// What a phase computes in besides its `rows`. This is the larger of two addends that are never alive together: a
    /// kernel's workspace for `queries`, and one micro-block's intermediates of a segment, with its graph if there is one.
    /// `spared` bytes of each row are not alive together with the second.
    fn scratch(&self, phase: Phase, rows: u64, queries: u64, graph: bool, spared: u64) -> Addend {
        let micro = self.config.memory.micro_rows().0.min(rows);
        let block = self.most_attending(|layer| self.block(layer, rows, graph));
        let segment = block.saturating_sub(product(&[rows, spared]).0);
        let (kernel, reason) = self.workspace(queries, self.run_keys(), graph);
        if kernel > segment {
            return within(phase, "kernel workspace", Bytes(kernel), reason, "nothing: it is bounded");
        }
        let reason =
            format!("{micro} rows × one block's intermediates{}, less what is not alive beside them", self.parts());
        within(phase, "segment scratch", Bytes(segment), reason, "choose a smaller memory.micro_block")
    }

    /// What a micro-block's intermediates hold in families other than dense ones.
    fn parts(&self) -> &'static str {
        let gathers = self.shape.layers.iter().any(|layer| matches!(layer.mix, Mix::Latent { .. }));
        match (gathers, self.shape.experts() > 0) {
            (true, _) => " (queries and outputs, attention over gathered keys, rows at experts)",
            (false, true) => " (rows at experts among them)",
            (false, false) => "",
        }
    }

    /// Rows of one call of the mixer, which takes each half of a rank's pages by itself.
    fn stretch(&self, rows: u64) -> u64 {
        rows.min(self.prompt_rows.div_ceil(2)).min(MIXED_ROWS.max(self.config.memory.micro_rows().0))
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

    /// Keys of one call of attention: a run holds at most half of this rank's pages.
    fn run_keys(&self) -> u64 {
        let run = self.prompt_rows.div_ceil(2);
        if self.copies_overlap { run.min(from_dim(KEYS_MAX)) } else { run }
    }

    /// Bytes that attention takes for `queries` over `keys`, and the reason: its output, or with `graph` what its backward
    /// makes. A fused kernel on a GPU then also takes dk and dv of every query head, and dq in the accumulation dtype; matrix
    /// products take about six tiles of scores.
    fn workspace(&self, queries: u64, keys: u64, graph: bool) -> (u64, String) {
        let Sizes { model_bytes: model, acc_bytes: acc, .. } = *self;
        if !self.copies_overlap {
            return (0, String::new());
        }
        let query_heads = self.query_heads();
        let width = self.shape.most(query_width);
        let tile = [queries.min(from_dim(TileSizes::PLAIN.rows)), keys.min(from_dim(TileSizes::PLAIN.keys))];
        let scores = if self.plain() { product(&[query_heads, tile[0], tile[1], acc, 6]).0 } else { 0 };
        let fused = if graph {
            let state = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().state } else { 0 });
            product(&[queries, width, model + acc]).0.saturating_add(product(&[keys, state + 2 * width, model]).0)
        } else {
            product(&[queries, width, model]).0
        };
        if scores > fused {
            return (scores, format!("six tiles of scores, {} queries by {} keys", tile[0], tile[1]));
        }
        (fused, format!("attention of {queries} queries over {keys} keys"))
    }

    /// Bytes of a prompt row in capture besides its hidden state: its queries, what bypasses the mixer, its merged output,
    /// and its page state. A latent layer gathers the keys of all ranks, so its rows pass block by block, and only the
    /// layer's input and output are held.
    fn captured_row(&self, layer: &Layer) -> u64 {
        let widths = layer.mix.widths();
        // What the layer before sends to host memory has left before rows attend.
        let state = widths.state * self.model_bytes;
        match layer.mix {
            Mix::Latent { .. } => self.shape.width * self.model_bytes + state,
            _ => {
                (widths.ask + widths.handed) * self.model_bytes
                    + (widths.output + widths.beside) * self.acc_bytes
                    + state
            }
        }
    }

    /// Bytes of page state of a position that leave for host memory while a layer of some kind runs: those of the layer before
    /// it, where copies are so large that they run beside the computation.
    pub(super) fn leaving(&self, kind: impl Fn(&Layer) -> bool) -> u64 {
        if !self.copies_overlap || self.keeping.pages == Residency::Device {
            return 0;
        }
        let row = |before: &Layer| before.mix.widths().state * self.model_bytes;
        let plane = |row: u64| product(&[self.prompt_rows.div_ceil(2), row]).0 / 2;
        let pairs = self.shape.layers.windows(2).filter(|pair| kind(&pair[1]));
        pairs.map(|pair| row(&pair[0])).filter(|&row| plane(row) > KERNEL_COPY_BYTES_MAX).max().unwrap_or(0)
    }

    /// The largest of a number of every layer in which rows meet other rows, and no state goes from row to row.
    fn most_attending(&self, of: impl Fn(&Layer) -> u64) -> u64 {
        self.shape.most(|layer| if DeltaSizes::of(layer).is_some() { 0 } else { of(layer) })
    }

    /// Bytes of a row that are kept of a layer's mixer for its backward.
    fn kept_row(&self, layer: &Layer) -> u64 {
        if DeltaSizes::of(layer).is_some() {
            return 0;
        }
        let widths = layer.mix.widths();
        widths.output * self.model_bytes + widths.beside * self.acc_bytes
    }

    /// What capture holds and computes in, in the kind of layer that takes most.
    pub(super) fn capture(&self) -> Vec<Addend> {
        larger(self.attending_capture(), self.delta_capture())
    }

    fn attending_capture(&self) -> Vec<Addend> {
        let width = self.shape.width;
        let model = self.model_bytes;
        let row = width * model + self.most_attending(|layer| self.captured_row(layer));
        let heads = self.most_attending(|layer| layer.mix.widths().output);
        let is = |mix: fn(&Mix) -> bool| self.shape.layers.iter().any(|layer| mix(&layer.mix));
        let words = if is(|mix| matches!(mix, Mix::Latent { .. })) {
            format!("hidden states in and out, {width} wide; page state")
        } else if is(|mix| matches!(mix, Mix::Grouped { gated: true, .. })) {
            format!("hidden state {width} wide; queries, gates and merged outputs {heads} wide; page state")
        } else {
            format!("hidden state {width} wide; queries and merged outputs {heads} wide; page state")
        };
        let mut sum = vec![within(
            Phase::Capture,
            "prompt rows",
            product(&[self.prompt_rows, row]),
            format!("{} positions × ({words})", self.prompt_rows),
            "use more ranks (parallel.cp_size)",
        )];
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
        let group = self.config.grpo.group_size;
        let answer = self.answer_rows;
        let (rows, called) = self.pack_rows();
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
                "answer rows",
                product(&[rows, 4 * width, model]),
                format!("{rows} {called} × (block's input and output, and their gradients)"),
                "choose a shorter context.answer_len, or a smaller memory.micro_block",
            ),
        ];
        if self.tail_is_long {
            let copies = 1 + u64::from(self.copies_overlap);
            sum.push(within(
                Phase::Sweep,
                "answers' rows that wait",
                product(&[rows, copies * width, model]),
                format!(
                    "{rows} {called} × (gradient of the block's input{})",
                    if copies > 1 { ", next layer's input" } else { "" }
                ),
                "choose a shorter context.answer_len, or a smaller memory.micro_block",
            ));
        }
        if self.keeping.answer_attention {
            sum.push(self.answers_mixed());
        }
        let mut attending = vec![self.answer_scratch()];
        if self.tail_is_long {
            attending.push(self.state_gradient(Phase::Replay));
        }
        sum.extend(larger(attending, self.delta_answer()));
        sum
    }

    /// Mixer outputs of all answers in the layers below the top one, from their way up to their way down.
    fn answers_mixed(&self) -> Addend {
        let group = self.config.grpo.group_size;
        let below = self.shape.layers.split_last().map_or(&[][..], |(_, below)| below);
        let kept = || below.iter().map(|layer| self.kept_row(layer)).filter(|&bytes| bytes > 0);
        addend(
            "answers' attention outputs",
            Place::Host,
            product(&[group, self.answer_rows, kept().sum()]),
            format!("{group} answers × {} rows × (output; log-sum-exp) × {} layers", self.answer_rows, kept().count()),
            "set memory.keep_attention = false",
        )
    }

    /// What replay computes in for a pack of answers besides its rows: the larger of two addends that are never alive together, the
    /// head's backward for one block of rows and the backward of a block.
    fn answer_scratch(&self) -> Addend {
        let answer = self.answer_rows;
        let rows = self.config.memory.head_block.0.min(answer.max(1));
        let head = product(&[rows, self.shape.vocabulary, 3 * self.acc_bytes]);
        let block = Bytes(self.most_attending(|layer| self.answer_block(layer)));
        if head >= block {
            let reason =
                format!("{rows} rows × vocabulary {} × (log-probabilities, two gradients)", self.shape.vocabulary);
            return within(Phase::Replay, "head scratch", head, reason, "choose a smaller memory.head_block");
        }
        let keys = self.run_keys();
        let (rows, called) = self.pack_rows();
        let reason = format!(
            "{rows} {called} × (q, k, v, outputs, gradients); a micro-block's graph, or attention over {keys} keys"
        );
        let knob = "choose a shorter context.answer_len, or a smaller memory.micro_block";
        within(Phase::Replay, "block scratch", block, reason, knob)
    }

    /// Bytes in a block's backward for a pack of answers besides block inputs and outputs: what segment A and the mixer made, and the
    /// larger of a micro-block's graph and the mixer's backward, to which ranks that share a prompt bring all rows.
    fn answer_block(&self, layer: &Layer) -> u64 {
        let Sizes { model_bytes: model, acc_bytes: acc, .. } = *self;
        let widths = layer.mix.widths();
        let rows = self.pack_rows().0.max(1);
        let segment = self.block(layer, rows, true);
        if let Some(sizes) = LatentSizes::of(layer) {
            return segment.max(self.latent_answer(layer, sizes));
        }
        if !layer.mix.travels() {
            return segment;
        }
        let made = widths.ask + widths.state + 2 * widths.handed + 2 * widths.output;
        let held = product(&[rows, made * model + widths.beside * acc]).0;
        let [all, _] = self.pack;
        let gathered = if self.config.cp_size(self.ranks) > 1 { (widths.ask + 2 * widths.output) * model } else { 0 };
        let (kernel, _) = self.workspace(all, self.run_keys(), true);
        let mixing = product(&[all, gathered + widths.ask * acc])
            .0
            .saturating_add(product(&[rows, widths.state, acc]).0)
            .saturating_add(kernel);
        held.saturating_add(segment.max(mixing))
    }

    /// The same of the mixer's backward where queries attend to latents: rows of all ranks meet with this rank's keys, which
    /// are joined, as is their gradient.
    fn latent_answer(&self, layer: &Layer, sizes: LatentSizes) -> u64 {
        let Sizes { model_bytes: model, acc_bytes: acc, .. } = *self;
        let widths = layer.mix.widths();
        let all = self.config.context.answer_len.0;
        let made = product(&[self.answer_rows, (widths.ask + 2 * widths.output) * model]).0;
        let shared = self.config.cp_size(self.ranks) > 1;
        let gathered =
            if shared { product(&[all, (widths.ask + 2 * widths.output) * model + widths.ask * acc]).0 } else { 0 };
        let gradient = if self.tail_is_long { widths.carries * acc } else { 0 };
        let keys = product(&[self.prompt_rows, widths.carries * model + gradient]).0;
        [made, gathered, keys, self.attending(sizes, all, true)].into_iter().fold(0, u64::saturating_add)
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

    /// The largest of a number of the layers that lie below one of some kind.
    fn below(&self, kind: &dyn Fn(&Layer) -> bool, of: impl Fn(&Layer) -> u64) -> u64 {
        let pairs = self.shape.layers.windows(2).filter(|pair| kind(&pair[1]));
        pairs.map(|pair| of(&pair[0])).max().unwrap_or(0)
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

    /// Hidden states of a tail row in the sweep, and what they are beside the row: where state travels, dx takes the place of dy.
    fn hidden_of_tail(&self) -> (u64, &'static str) {
        let gathered = self.shape.layers.iter().any(|layer| matches!(layer.mix, Mix::Latent { .. }));
        if gathered { (3, "dy, dx") } else { (2, "dy or dx") }
    }

    /// Saved inputs of the tail, and what the sweep computes in.
    pub(super) fn tail(&self) -> Vec<Addend> {
        let Sizes { model_bytes: model, acc_bytes: acc, tail_rows: tail, .. } = *self;
        let width = self.shape.width;
        let heads = self.most_attending(|layer| layer.mix.widths().output);
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
        let back = self.most_attending(|layer| self.swept_row(layer));
        let next_outputs = |kind: &dyn Fn(&Layer) -> bool| {
            if coming && self.keeping.attention { self.below(kind, |layer| self.kept_row(layer)) } else { 0 }
        };
        let is_delta = |layer: &Layer| DeltaSizes::of(layer).is_some();
        let delta = self.delta_sweep(next + next_outputs(&is_delta));
        let (hidden, hidden_words) = self.hidden_of_tail();
        let mut attending = vec![within(
            Phase::Sweep,
            "tail on its way back",
            product(&[tail, hidden * width * model + back + next + next_outputs(&|layer| !is_delta(layer))]),
            format!(
                "{tail} positions × (rows in, {hidden_words}; queries, outputs, dout, dq; what comes for the next layer)"
            ),
            "set grpo.gradient = \"response\"",
        )];
        attending.push(self.state_gradient(Phase::Sweep));
        attending.extend(self.foreign(Phase::Sweep, self.passing_bytes / model * acc));
        let asked = self.shape.most(|layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 });
        attending.push(self.scratch(Phase::Sweep, tail, self.stretch(tail), true, asked * acc));
        sum.extend(larger(attending, delta));
        if self.keeping.attention {
            let kept_layers = self.shape.sum(|layer| u64::from(!is_delta(layer)));
            sum.push(addend(
                "tail's attention outputs",
                self.keeping.tail.into(),
                product(&[tail, self.shape.sum(|layer| self.kept_row(layer))]),
                format!("{tail} positions × (output, {heads} wide; log-sum-exp) × {kept_layers} layers"),
                "set memory.keep_attention = false",
            ));
        }
        sum
    }
}

/// Width of a layer's queries; 0 where its rows meet in another way.
fn query_width(layer: &Layer) -> u64 {
    match layer.mix {
        Mix::Grouped { query_heads, head_dim, .. } => query_heads * head_dim,
        _ => 0,
    }
}
