//! The addends of a rank's memory.

use super::{Addend, Choice, Place};
use crate::config::{DeviceChoice, Dtype, RunConfig, When};
use crate::model::shape::{Layer, Segment, Shape};
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::memory::Purpose;
use crate::runtime::units::Bytes;

/// Bytes of an element in the model's dtype and in the dtype that sums are kept in.
pub(super) fn widths(dtype: Dtype) -> (u64, u64) {
    match dtype {
        Dtype::Bfloat16 => (2, 4),
        Dtype::Float32 => (4, 4),
        Dtype::Float64 => (8, 8),
    }
}

/// Lengths and widths that addends are made of, per rank.
pub(super) struct Sizes<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) shape: &'a Shape,
    pub(super) choice: Choice,
    pub(super) keeping: Keeping,
    /// Bytes of an element in the model's dtype.
    pub(super) model: u64,
    /// Bytes of an element in the dtype that sums are kept in.
    pub(super) acc: u64,
    pub(super) layers: u64,
    /// Ranks of the world.
    pub(super) ranks: u64,
    /// Prompt positions on the rank that holds most.
    pub(super) rows: u64,
    /// Answer rows.
    pub(super) answer: u64,
    /// Prompt positions of this rank that carry gradient.
    pub(super) tail: u64,
    /// Whether the tail is long: its rows stay, and state travels to them.
    pub(super) travels: bool,
    /// Bytes of one position's state in one layer that passes from rank to rank: the most of any layer.
    pub(super) state: u64,
    /// Whether copies run beside the computation, so that what comes next and what has just left lie on the device too.
    pub(super) beside: bool,
}

/// A product that stays at the largest number instead of wrapping round.
pub(super) fn product(factors: &[u64]) -> Bytes {
    Bytes(factors.iter().fold(1u64, |all, &factor| all.saturating_mul(factor)))
}

/// Under which kinds a run's ledger counts an addend; none: it is scratch there.
fn counted(name: &str) -> &'static [Purpose] {
    match name {
        "weights" => &[Purpose::Weights],
        "adapters" => &[Purpose::Adapters, Purpose::Optimizer],
        "pages" | "states at a border" => &[Purpose::Pages],
        "staged pages" | "pages of all layers" => &[Purpose::Stage],
        "foreign page runs" | "messages between ranks" => &[Purpose::Foreign],
        "answers' keys and values" | "answers' recurrent states" => &[Purpose::Answers],
        "answers' hidden states" | "answers' index sets" => &[Purpose::Hidden],
        "tail's block inputs" | "tail's attention outputs" | "prompt's index sets" => &[Purpose::Checkpoints],
        _ => &[],
    }
}

pub(super) fn addend(name: &'static str, place: Place, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, counted: counted(name), place, phase: None, bytes, reason, knob }
}

/// The same, alive on the device in one phase only.
pub(super) fn within(phase: Phase, name: &'static str, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, counted: counted(name), place: Place::Device, phase: Some(phase), bytes, reason, knob }
}

pub(super) fn place_of(residency: Residency) -> Place {
    match residency {
        Residency::Host => Place::Host,
        Residency::Device => Place::Device,
    }
}

impl<'a> Sizes<'a> {
    pub(super) fn of(config: &'a RunConfig, ranks: u64, shape: &'a Shape, choice: Choice, gpu: bool) -> Sizes<'a> {
        let (model, acc) = widths(config.model.dtype);
        let cp_size = config.cp_size(ranks);
        let tail = config.tail(config.context.prompt_len);
        let rows = config.pages_per_rank(ranks).0 * config.context.page_size.0;
        let passing = |layer: &Layer| if layer.mix.travels() { layer.mix.widths().state * model } else { 0 };
        Sizes {
            config,
            shape,
            choice,
            keeping: choice.keeping,
            model,
            acc,
            layers: shape.depth(),
            ranks,
            rows,
            answer: config.context.answer_len.0.div_ceil(cp_size),
            // A tail of less than the prompt may lie on one rank.
            tail: if tail == config.context.prompt_len { tail.0.div_ceil(cp_size) } else { tail.0.min(rows) },
            travels: tail > config.memory.micro_block,
            state: shape.most(passing),
            beside: gpu && config.run.device != DeviceChoice::Cpu,
        }
    }

    pub(super) fn addends(&self) -> Vec<Addend> {
        if !self.config.memory.prompt_no_grad {
            return [self.model(), self.conventional()].concat();
        }
        [
            self.model(),
            self.pages(),
            self.borders(),
            self.messages(),
            self.answers(),
            self.rollout(),
            self.capture(),
            self.tail(),
            self.index_sets(),
            self.latents(),
            self.experts(),
        ]
        .concat()
    }

    /// The conventional schedule: everything of one whole sequence on one rank.
    fn conventional(&self) -> Vec<Addend> {
        let (shape, model, acc, positions) = (self.shape, self.model, self.acc, self.config.context.max_seq_len.0);
        let heads = shape.most(|layer| layer.mix.widths().ask);
        let knob = "set memory.prompt_no_grad = true, which needs neither";
        vec![
            addend(
                "layer inputs of a sequence",
                Place::Device,
                product(&[positions, shape.width, self.layers + 1, model]),
                format!("{positions} positions × {} × {} layers and the last output", shape.width, self.layers),
                knob,
            ),
            addend(
                "one layer's graph",
                Place::Device,
                product(&[positions, (3 * self.ffn_width() + 8 * shape.width + 6 * heads) * model + heads * acc]),
                format!("{positions} positions × one block's activations and their gradients"),
                knob,
            ),
            addend(
                "head scratch",
                Place::Device,
                product(&[self.config.context.answer_len.0, shape.vocabulary, 4 * acc]),
                format!("{} rows × vocabulary {}", self.config.context.answer_len, shape.vocabulary),
                "choose a shorter context.answer_len",
            ),
        ]
    }

    fn model(&self) -> Vec<Addend> {
        let (masters, kept) = if self.config.grpo.kl_coef > 0.0 {
            (5, "(master, the reference's, gradient, two moments)")
        } else {
            (4, "(master, gradient, two moments)")
        };
        // On a GPU the sum is formed in host memory.
        let on_their_way = if self.beside || self.ranks == 1 { 3 } else { self.ranks.saturating_add(4) };
        let pairs = adapter_elements(self.config, self.shape);
        vec![
            self.weights(),
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

    /// Frozen weights of a rank. Experts are spread over the ranks of an expert group; all else is on every rank.
    fn weights(&self) -> Addend {
        let (all, experts, model) = (self.shape.parameter_count(), self.shape.experts(), self.model);
        if experts == 0 {
            let reason = format!("{all} parameters × {model} B");
            let knob = "choose a smaller model, or model.dtype = \"bfloat16\"";
            return addend("weights", Place::Device, product(&[all, model]), reason, knob);
        }
        let spread = self.config.parallel.ep_size.max(1);
        let here = all - experts + experts.div_ceil(spread);
        let reason = format!(
            "({} parameters, and {experts} of experts over {spread} ranks) × {model} B; held in fp8 they would be {}",
            all - experts,
            Bytes(here)
        );
        let knob = "spread experts over more ranks (parallel.ep_size), or hold weights in fp8 (model.weights = \"fp8\", \
                    which this build refuses)";
        addend("weights", Place::Device, product(&[here, model]), reason, knob)
    }

    /// The widest inner layer of a feed-forward, for one row.
    pub(super) fn ffn_width(&self) -> u64 {
        self.shape.most(|layer| layer.ffn_width)
    }

    /// The most bytes of state that a position has in `count` layers one after another.
    pub(super) fn state_of(&self, count: u64) -> u64 {
        let count = usize::try_from(count).unwrap_or(usize::MAX).clamp(1, self.shape.layers.len().max(1));
        let state = |layers: &[Layer]| layers.iter().map(|layer| layer.mix.widths().state).sum::<u64>() * self.model;
        self.shape.layers.windows(count).map(state).max().unwrap_or(0)
    }

    /// In words: the state of a position in `layers` layers.
    pub(super) fn state_words(&self, layers: u64, bytes: u64) -> String {
        let each = self.state_of(1);
        let all = if layers == self.layers { "all layers".to_owned() } else { format!("{layers} layers") };
        if each * layers == bytes { format!("{each} B × {layers} layers") } else { format!("{bytes} B in {all}") }
    }

    /// What page state takes wherever it waits, and what phases that read it hold of it on the device.
    fn pages(&self) -> Vec<Addend> {
        let host = self.keeping.pages == Residency::Host;
        let all = self.state_of(self.layers);
        let mut sum = vec![addend(
            "pages",
            place_of(self.keeping.pages),
            product(&[self.rows, all]),
            format!("{} positions × {}", self.rows, self.state_words(self.layers, all)),
            "use more ranks (parallel.cp_size), or a shorter context.prompt_len",
        )];
        if host {
            // Beside the layer that computes lies the next one; while left-out layers are computed again, that and one more.
            let further = if self.travels && self.keeping.every > 1 { 2 } else { 1 };
            sum.extend([Phase::Replay, Phase::Sweep].map(|phase| self.staged(phase, further)));
        }
        sum
    }

    /// Pages on the device while layers come one after another: of the one that computes and, where copies run beside it,
    /// of `further` ones.
    pub(super) fn staged(&self, phase: Phase, further: u64) -> Addend {
        let further = if self.beside { further } else { 0 };
        let layers = if self.config.memory.layer_wise_transfer { 1 + further } else { self.layers };
        let staged = self.state_of(layers);
        within(
            phase,
            "staged pages",
            product(&[self.rows, staged]),
            format!("{} positions × {} at a time", self.rows, self.state_words(layers, staged)),
            "use more ranks (parallel.cp_size)",
        )
    }

    /// Whether ranks with GPUs meet in host memory.
    pub(super) fn through_host(&self) -> bool {
        self.beside && self.config.cp_size(self.ranks) > 1 && self.config.run.direct == When::Never
    }

    /// What waits in host memory to be sent, and what has arrived there.
    fn messages(&self) -> Vec<Addend> {
        if !self.through_host() || self.state == 0 {
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
    pub(super) fn foreign(&self, phase: Phase, sums: u64) -> Vec<Addend> {
        if self.config.cp_size(self.ranks) == 1 || self.state == 0 {
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
}

/// Elements of all adapters.
pub(super) fn adapter_elements(config: &RunConfig, shape: &Shape) -> u64 {
    let targets = config.lora.targets.as_deref();
    let of = |layer: &Layer| [Segment::A, Segment::B].map(|segment| Shape::adapted(layer, segment, targets));
    config.lora.rank.saturating_mul(shape.sum(|layer| of(layer).iter().sum()))
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
