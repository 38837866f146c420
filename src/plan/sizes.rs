//! The addends of a rank's memory.

use super::{Addend, Place};
use crate::config::{DeviceChoice, Dtype, RunConfig, When};
use crate::failure::Phase;
use crate::handoff::Keeping;
use crate::layout::TileSizes;
use crate::model::attention::KEYS_MAX;
use crate::model::pass::MIXED_ROWS;
use crate::model::spec::Spec;
use crate::pages::Residency;
use crate::units::{Bytes, from_dim};
use crate::watch::Purpose;

/// Bytes of an element in the model's dtype and in the dtype that sums are kept in.
fn widths(dtype: Dtype) -> (u64, u64) {
    match dtype {
        Dtype::Bfloat16 => (2, 4),
        Dtype::Float32 => (4, 4),
        Dtype::Float64 => (8, 8),
    }
}

/// Lengths and widths that addends are made of, per rank.
pub(super) struct Sizes<'a> {
    config: &'a RunConfig,
    spec: &'a Spec,
    keeping: Keeping,
    /// Bytes of an element in the model's dtype.
    model: u64,
    /// Bytes of an element in the dtype that sums are kept in.
    acc: u64,
    layers: u64,
    /// Ranks of the world.
    ranks: u64,
    /// Width of all query heads.
    heads: u64,
    /// Prompt positions on the rank that holds most.
    rows: u64,
    /// Answer rows.
    answer: u64,
    /// Prompt positions that carry gradient.
    tail: u64,
    /// Whether pages travel to the tail's rows.
    travels: bool,
    /// Bytes of one position's state in one layer.
    state: u64,
    /// Whether copies run beside the computation, so that what comes next and what has just left lie on the device too.
    beside: bool,
}

/// A product that stays at the largest number instead of wrapping round.
fn product(factors: &[u64]) -> Bytes {
    Bytes(factors.iter().fold(1u64, |all, &factor| all.saturating_mul(factor)))
}

/// Under which kinds a run's ledger counts an addend; none: it is scratch there.
fn counted(name: &str) -> &'static [Purpose] {
    match name {
        "weights" => &[Purpose::Weights],
        "adapters" => &[Purpose::Adapters, Purpose::Optimizer],
        "pages" => &[Purpose::Pages],
        "staged pages" => &[Purpose::Stage],
        "foreign page runs" | "messages between ranks" => &[Purpose::Foreign],
        "answers' hidden states" => &[Purpose::Hidden],
        "tail's block inputs" | "tail's attention outputs" => &[Purpose::Checkpoints],
        _ => &[],
    }
}

fn addend(name: &'static str, place: Place, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, counted: counted(name), place, phase: None, bytes, reason, knob }
}

/// The same, alive on the device in one phase only.
fn within(phase: Phase, name: &'static str, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, counted: counted(name), place: Place::Device, phase: Some(phase), bytes, reason, knob }
}

fn place_of(residency: Residency) -> Place {
    match residency {
        Residency::Host => Place::Host,
        Residency::Device => Place::Device,
    }
}

impl<'a> Sizes<'a> {
    pub(super) fn of(config: &'a RunConfig, ranks: u64, spec: &'a Spec, keeping: Keeping, gpu: bool) -> Sizes<'a> {
        let (model, acc) = widths(config.model.dtype);
        let cp_size = config.cp_size(ranks);
        let tail = config.tail(config.context.prompt_len);
        let rows = config.pages_per_rank(ranks).0 * config.context.page_size.0;
        Sizes {
            config,
            spec,
            keeping,
            model,
            acc,
            layers: spec.layers as u64,
            ranks,
            heads: spec.query_heads * spec.head_dim,
            rows,
            answer: config.context.answer_len.0.div_ceil(cp_size),
            // A tail of less than the prompt may lie on one rank.
            tail: if tail == config.context.prompt_len { tail.0.div_ceil(cp_size) } else { tail.0.min(rows) },
            travels: tail > config.memory.micro_block,
            state: 2 * spec.kv_heads * spec.head_dim * model,
            beside: gpu && config.run.device != DeviceChoice::Cpu,
        }
    }

    pub(super) fn addends(&self) -> Vec<Addend> {
        if !self.config.memory.prompt_no_grad {
            return [self.model(), self.conventional()].concat();
        }
        [self.model(), self.pages(), self.messages(), self.answers(), self.capture(), self.tail()].concat()
    }

    /// The conventional schedule: everything of one whole sequence on one rank.
    fn conventional(&self) -> Vec<Addend> {
        let (spec, model, acc, positions) = (self.spec, self.model, self.acc, self.config.context.max_seq_len.0);
        let knob = "set memory.prompt_no_grad = true, which needs neither";
        vec![
            addend(
                "layer inputs of a sequence",
                Place::Device,
                product(&[positions, spec.width, self.layers + 1, model]),
                format!("{positions} positions × {} × {} layers and the last output", spec.width, self.layers),
                knob,
            ),
            addend(
                "one layer's graph",
                Place::Device,
                product(&[
                    positions,
                    (3 * spec.ffn_width + 8 * spec.width + 6 * self.heads) * model + self.heads * acc,
                ]),
                format!("{positions} positions × one block's activations and their gradients"),
                knob,
            ),
            addend(
                "head scratch",
                Place::Device,
                product(&[self.config.context.answer_len.0, spec.vocabulary, 4 * acc]),
                format!("{} rows × vocabulary {}", self.config.context.answer_len, spec.vocabulary),
                "choose a shorter context.answer_len",
            ),
        ]
    }

    fn model(&self) -> Vec<Addend> {
        let (spec, lora) = (self.spec, &self.config.lora);
        let adapted = spec.adapted(lora.targets.as_deref()).unwrap_or_default();
        let (masters, kept) = if self.config.grpo.kl_coef > 0.0 {
            (5, "(master, the reference's, gradient, two moments)")
        } else {
            (4, "(master, gradient, two moments)")
        };
        // On a GPU the sum is formed in host memory.
        let on_their_way = if self.beside || self.ranks == 1 { 3 } else { 4 + self.ranks };
        let pairs: u64 = adapted.iter().map(|linear| lora.rank * (linear.inputs + linear.outputs)).sum();
        vec![
            addend(
                "weights",
                Place::Device,
                product(&[spec.parameter_count(), self.model]),
                format!("{} parameters × {} B", spec.parameter_count(), self.model),
                "choose a smaller model, or model.dtype = \"bfloat16\"",
            ),
            addend(
                "adapters",
                Place::Device,
                product(&[pairs, self.acc, masters]),
                format!("{pairs} values × {} B × {kept}", self.acc),
                "choose a smaller lora.rank, or fewer lora.targets",
            ),
            within(
                Phase::Finalize,
                "gradients on their way",
                product(&[pairs, self.acc, on_their_way]),
                format!(
                    "{pairs} values × {} B × {on_their_way} (own, summed, for the optimizer; rank 0 has all)",
                    self.acc
                ),
                "choose a smaller lora.rank, or fewer lora.targets",
            ),
        ]
    }

    /// What page state takes wherever it waits, and what phases that read it hold of it on the device.
    fn pages(&self) -> Vec<Addend> {
        let host = self.keeping.pages == Residency::Host;
        let mut sum = vec![addend(
            "pages",
            place_of(self.keeping.pages),
            product(&[self.rows, self.state, self.layers]),
            format!("{} positions × {} B × {} layers", self.rows, self.state, self.layers),
            "use more ranks (parallel.cp_size), or a shorter context.prompt_len",
        )];
        if host {
            // Beside the layer that computes lies the next one; while left-out layers are computed again, that and one more.
            let beside = if self.travels && self.keeping.every > 1 { 2 } else { 1 };
            let beside = if self.beside { beside } else { 0 };
            let layers = if self.config.memory.layer_wise_transfer { 1 + beside } else { self.layers };
            for phase in [Phase::Replay, Phase::Sweep] {
                sum.push(within(
                    phase,
                    "staged pages",
                    product(&[self.rows, self.state, layers]),
                    format!("{} positions × {} B × {layers} layers at a time", self.rows, self.state),
                    "use more ranks (parallel.cp_size)",
                ));
            }
        }
        sum
    }

    /// What waits in host memory to be sent, and what has arrived there, where ranks meet and the model is on a GPU.
    fn messages(&self) -> Vec<Addend> {
        if !self.beside || self.config.cp_size(self.ranks) == 1 {
            return Vec::new();
        }
        let sums = if self.travels { self.state / self.model * self.acc } else { 0 };
        vec![addend(
            "messages between ranks",
            Place::Host,
            product(&[self.rows, self.state + sums]),
            format!("two runs of half a rank's {} positions × {} B", self.rows, self.state + sums),
            "use more ranks (parallel.cp_size)",
        )]
    }

    /// Foreign page runs while they pass by; a rank that has a prompt for itself sees none.
    fn foreign(&self, phase: Phase, sums: u64) -> Vec<Addend> {
        if self.config.cp_size(self.ranks) == 1 {
            return Vec::new();
        }
        vec![within(
            phase,
            "foreign page runs",
            product(&[self.rows, self.state + sums]),
            format!("two runs of half a rank's {} positions × {} B", self.rows, self.state + sums),
            "use more ranks (parallel.cp_size)",
        )]
    }

    /// What a phase computes in besides its `rows`: a kernel's workspace for `queries` at one time, or one micro-block's
    /// intermediates of the larger segment, with its graph where there is one. The two are never alive at one time, and
    /// with the second `spared` bytes of each row are not alive either.
    fn scratch(&self, phase: Phase, rows: u64, queries: u64, graph: bool, spared: u64) -> Addend {
        let spec = self.spec;
        let micro = self.config.memory.micro_block.0.min(rows);
        let wide = if graph { 7 * spec.ffn_width + 8 * spec.width } else { 3 * spec.ffn_width + 4 * spec.width };
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

    /// What attention takes on a GPU for its own: a fused kernel outputs and, in backward, dk and dv of every query head;
    /// matrix products about six tiles of scores.
    fn workspace(&self, queries: u64, graph: bool) -> (u64, String) {
        let (spec, acc) = (self.spec, self.acc);
        if !self.beside {
            return (0, String::new());
        }
        let keys = self.rows.min(from_dim(KEYS_MAX));
        let outputs = product(&[queries, self.heads, self.model + if graph { acc } else { 0 }]).0;
        let gradients = if graph { product(&[keys, self.heads, 2 * acc]).0 } else { 0 };
        let plain = self.config.model.dtype != Dtype::Bfloat16 || spec.window.iter().any(Option::is_some);
        let tile = [queries.min(from_dim(TileSizes::PLAIN.rows)), keys.min(from_dim(TileSizes::PLAIN.keys))];
        let scores = if plain { product(&[spec.query_heads, tile[0], tile[1], acc, 6]).0 } else { 0 };
        let fused = outputs.saturating_add(gradients);
        if scores > fused {
            return (scores, format!("six tiles of scores, {} queries by {} keys", tile[0], tile[1]));
        }
        (fused, format!("attention of {queries} queries over {keys} keys"))
    }

    fn capture(&self) -> Vec<Addend> {
        let (width, heads, model) = (self.spec.width, self.heads, self.model);
        let lse = self.spec.query_heads * self.acc;
        // Slabs of this layer and, while they leave, those of the layer before; attention outputs likewise.
        let slabs = self.state * (1 + u64::from(self.beside && self.keeping.pages == Residency::Host));
        let row = width * model + heads * (model + self.acc) + lse + slabs;
        let mut sum = vec![within(
            Phase::Capture,
            "prompt rows",
            product(&[self.rows, row]),
            format!(
                "{} positions × (hidden state {width} wide; queries and merged outputs {heads} wide; page state)",
                self.rows
            ),
            "use more ranks (parallel.cp_size)",
        )];
        if self.beside && self.travels && self.keeping.attention && self.keeping.tail == Residency::Host {
            sum.push(within(
                Phase::Capture,
                "attention outputs that leave",
                product(&[self.tail, heads * model + lse]),
                format!("{} positions × (output, {heads} wide; log-sum-exp)", self.tail),
                "set memory.keep_attention = false",
            ));
        }
        sum.extend(self.foreign(Phase::Capture, 0));
        let spared = (heads * self.acc).saturating_sub(width * model);
        sum.push(self.scratch(Phase::Capture, self.rows, self.stretch(self.rows), false, spared));
        sum
    }

    fn answers(&self) -> Vec<Addend> {
        let (width, layers, model) = (self.spec.width, self.layers, self.model);
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
                "gathered answer rows",
                product(&[all, self.heads, 4 * model + 4 * self.acc]),
                format!("{all} rows of one answer × eight {} wide", self.heads),
                "choose a shorter context.answer_len",
            ),
            within(
                Phase::Replay,
                "head scratch",
                product(&[head, self.spec.vocabulary, 4 * self.acc]),
                format!("{head} rows × vocabulary {}", self.spec.vocabulary),
                "choose a smaller memory.head_block",
            ),
        ];
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
            product(&[self.tail, self.state / self.model, self.acc]),
            format!("{} positions × dk and dv", self.tail),
            "set grpo.gradient = \"response\"",
        )
    }

    fn tail(&self) -> Vec<Addend> {
        let (width, model, acc, tail, heads) = (self.spec.width, self.model, self.acc, self.tail, self.heads);
        if tail == 0 {
            return Vec::new();
        }
        let every = if self.travels { self.keeping.every as u64 } else { 1 };
        let kept = self.layers.div_ceil(every) + (every - 1);
        let lse = self.spec.query_heads * acc;
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
        let next_outputs = if coming && self.keeping.attention { heads * model + lse } else { 0 };
        sum.push(within(
            Phase::Sweep,
            "tail on its way back",
            product(&[tail, 3 * width * model + heads * (3 * model + acc) + lse + next + next_outputs]),
            format!("{tail} positions × (rows in, dy, dx; queries, outputs, dout, dq; what comes for the next layer)"),
            "set grpo.gradient = \"response\"",
        ));
        sum.push(self.state_gradient(Phase::Sweep));
        sum.extend(self.foreign(Phase::Sweep, self.state / model * acc));
        sum.push(self.scratch(Phase::Sweep, tail, self.stretch(tail), true, heads * acc));
        if self.keeping.attention {
            sum.push(addend(
                "tail's attention outputs",
                place_of(self.keeping.tail),
                product(&[tail, heads * model + lse, self.layers]),
                format!("{tail} positions × (output, {heads} wide; log-sum-exp) × {} layers", self.layers),
                "set memory.keep_attention = false",
            ));
        }
        sum
    }
}

/// What the configuration says of keeping where it leaves no choice; pages and inputs stay where "auto" puts them.
pub(super) fn stated(config: &RunConfig, pages: Residency) -> Keeping {
    let memory = &config.memory;
    Keeping {
        pages: match memory.cpu_offload_pages {
            When::Always => Residency::Host,
            When::Never => Residency::Device,
            When::Auto => pages,
        },
        tail: if memory.cpu_offload_inputs == When::Never { Residency::Device } else { Residency::Host },
        every: usize::try_from(memory.inputs_every.max(1)).unwrap_or(usize::MAX),
        attention: memory.keep_attention == When::Always,
    }
}
