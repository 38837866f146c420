//! The addends of a rank's memory.

use super::{Addend, Place};
use crate::config::{Dtype, RunConfig, When};
use crate::handoff::Keeping;
use crate::model::spec::Spec;
use crate::pages::Residency;
use crate::units::Bytes;
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
}

/// A product that stays at the largest number instead of wrapping round.
fn product(factors: &[u64]) -> Bytes {
    Bytes(factors.iter().fold(1u64, |all, &factor| all.saturating_mul(factor)))
}

/// Measured as scratch: the ledger has no entry for it.
const SCRATCH: &[Purpose] = &[];

fn addend(
    name: &'static str,
    counted: &'static [Purpose],
    place: Place,
    bytes: Bytes,
    reason: String,
    knob: &'static str,
) -> Addend {
    Addend { name, counted, place, bytes, reason, knob }
}

fn place_of(residency: Residency) -> Place {
    match residency {
        Residency::Host => Place::Host,
        Residency::Device => Place::Device,
    }
}

impl<'a> Sizes<'a> {
    pub(super) fn of(config: &'a RunConfig, ranks: u64, spec: &'a Spec, keeping: Keeping) -> Sizes<'a> {
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
            heads: spec.query_heads * spec.head_dim,
            rows,
            answer: config.context.answer_len.0.div_ceil(cp_size),
            // A tail of less than the prompt may lie on one rank.
            tail: if tail == config.context.prompt_len { tail.0.div_ceil(cp_size) } else { tail.0.min(rows) },
            travels: tail > config.memory.micro_block,
            state: 2 * spec.kv_heads * spec.head_dim * model,
        }
    }

    pub(super) fn addends(&self) -> Vec<Addend> {
        if !self.config.memory.prompt_no_grad {
            return [self.model(), self.conventional()].concat();
        }
        [self.model(), self.scratch(), self.pages(), self.answers(), self.tail()].concat()
    }

    /// The conventional schedule: everything of one whole sequence on one rank.
    fn conventional(&self) -> Vec<Addend> {
        let (spec, model, acc, positions) = (self.spec, self.model, self.acc, self.config.context.max_seq_len.0);
        let knob = "set memory.prompt_no_grad = true, which needs neither";
        vec![
            addend(
                "layer inputs of a sequence",
                SCRATCH,
                Place::Device,
                product(&[positions, spec.width, self.layers + 1, model]),
                format!("{positions} positions × {} × {} layers and the last output", spec.width, self.layers),
                knob,
            ),
            addend(
                "one layer's graph",
                SCRATCH,
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
                SCRATCH,
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
        let pairs: u64 = adapted.iter().map(|linear| lora.rank * (linear.inputs + linear.outputs)).sum();
        vec![
            addend(
                "weights",
                &[Purpose::Weights],
                Place::Device,
                product(&[spec.parameter_count(), self.model]),
                format!("{} parameters × {} B", spec.parameter_count(), self.model),
                "choose a smaller model, or model.dtype = \"bfloat16\"",
            ),
            addend(
                "adapters",
                &[Purpose::Adapters, Purpose::Optimizer],
                Place::Device,
                product(&[pairs, self.acc, 4]),
                format!("{pairs} values × {} B × (master, gradient, two moments)", self.acc),
                "choose a smaller lora.rank, or fewer lora.targets",
            ),
        ]
    }

    fn scratch(&self) -> Vec<Addend> {
        let (spec, memory) = (self.spec, &self.config.memory);
        let (width, heads) = (spec.width, self.heads);
        let (micro, head) = (memory.micro_block.0.min(self.rows), memory.head_block.0.min(self.answer.max(1)));
        vec![
            addend(
                "prompt hidden states",
                &[Purpose::Hidden],
                Place::Device,
                product(&[self.rows, width * self.model * 2 + heads * (self.model + self.acc)]),
                format!("{} positions × (in and out, {width} wide; queries and outputs, {heads} wide)", self.rows),
                "use more ranks (parallel.cp_size)",
            ),
            addend(
                "segment scratch",
                SCRATCH,
                Place::Device,
                product(&[micro, (3 * spec.ffn_width + 4 * width) * (self.model + self.acc)]),
                format!("{micro} rows × one block's intermediates"),
                "choose a smaller memory.micro_block",
            ),
            addend(
                "head scratch",
                SCRATCH,
                Place::Device,
                product(&[head, spec.vocabulary, 4 * self.acc]),
                format!("{head} rows × vocabulary {}", spec.vocabulary),
                "choose a smaller memory.head_block",
            ),
        ]
    }

    fn pages(&self) -> Vec<Addend> {
        let memory = &self.config.memory;
        let staged = if memory.layer_wise_transfer { 1 } else { self.layers };
        let mut sum = vec![
            addend(
                "pages",
                &[Purpose::Pages],
                place_of(self.keeping.pages),
                product(&[self.rows, self.state, self.layers]),
                format!("{} positions × {} B × {} layers", self.rows, self.state, self.layers),
                "use more ranks (parallel.cp_size), or a shorter context.prompt_len",
            ),
            addend(
                "foreign page runs",
                &[Purpose::Foreign],
                Place::Device,
                product(&[self.rows, self.state]),
                format!("two runs of half a rank's {} positions × {} B", self.rows, self.state),
                "use more ranks (parallel.cp_size)",
            ),
        ];
        if self.keeping.pages == Residency::Host {
            sum.push(addend(
                "staged pages",
                &[Purpose::Stage],
                Place::Device,
                product(&[self.rows, self.state, staged]),
                format!("{} positions × {} B × {staged} layers at a time", self.rows, self.state),
                "set memory.layer_wise_transfer = true",
            ));
        }
        sum
    }

    fn answers(&self) -> Vec<Addend> {
        let (width, layers, model) = (self.spec.width, self.layers, self.model);
        let (group, answer, all) = (self.config.grpo.group_size, self.answer, self.config.context.answer_len.0);
        vec![
            addend(
                "answers' hidden states",
                &[Purpose::Hidden],
                Place::Host,
                product(&[group, answer, width, layers, model]),
                format!("{group} answers × {answer} rows × {width} × {layers} layers × {model} B"),
                "choose a smaller grpo.group_size, or a shorter context.answer_len",
            ),
            addend(
                "gathered answer rows",
                SCRATCH,
                Place::Device,
                product(&[all, self.heads, 4 * model + 4 * self.acc]),
                format!("{all} rows of one answer × eight {} wide", self.heads),
                "choose a shorter context.answer_len",
            ),
        ]
    }

    fn tail(&self) -> Vec<Addend> {
        let (width, model, acc, tail, heads) = (self.spec.width, self.model, self.acc, self.tail, self.heads);
        if tail == 0 {
            return Vec::new();
        }
        let every = if self.travels { self.keeping.every as u64 } else { 1 };
        let kept = self.layers.div_ceil(every) + (every - 1);
        let mut sum = vec![addend(
            "tail's block inputs",
            &[Purpose::Checkpoints],
            place_of(self.keeping.tail),
            product(&[tail, width, kept, model]),
            format!("{tail} positions that carry gradient × {width} × {kept} of {} layers × {model} B", self.layers),
            "set memory.inputs_every higher, or grpo.gradient = \"response\"",
        )];
        if self.travels {
            sum.push(addend(
                "tail on its way back",
                SCRATCH,
                Place::Device,
                product(&[tail, 3 * width * model + heads * (3 * model + 2 * acc) + 2 * (self.state / model) * acc]),
                format!("{tail} positions × (three rows {width} wide, five {heads} wide, dk and dv twice)"),
                "set grpo.gradient = \"response\"",
            ));
        }
        if self.travels && self.keeping.attention {
            sum.push(addend(
                "tail's attention outputs",
                &[Purpose::Checkpoints],
                place_of(self.keeping.tail),
                product(&[tail, heads * model + self.spec.query_heads * acc, self.layers]),
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
