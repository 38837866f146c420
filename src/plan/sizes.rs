//! Lengths and widths that the addends share, and the addends that stay for the whole run.

use std::ops::Range;

use tch::Kind;

use super::addend::{Addend, Place, addend, product, within};
use super::offload_choice::OffloadChoice;
use crate::config::{DeviceChoice, Dtype, RunConfig, When};
use crate::model::shape::{Layer, Mix, Segment, Shape};
use crate::model::spec::EXPERT_PROJECTIONS;
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, from_index};

/// Bytes that libtorch gives cuBLAS as workspace for each thread on a Hopper GPU; on older ones about a quarter.
const MATRIX_WORKSPACE: u64 = 32 << 20;

/// Bytes of an element in the model's dtype and in the accumulation dtype.
pub(super) fn element_bytes(dtype: Dtype) -> (u64, u64) {
    match dtype {
        Dtype::Bfloat16 => (2, 4),
        Dtype::Float32 => (4, 4),
        Dtype::Float64 => (8, 8),
    }
}

/// The libtorch name of a configured dtype.
pub(super) fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
    }
}

/// Lengths and widths of one rank under one choice.
pub(super) struct Sizes<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) shape: &'a Shape,
    pub(super) choice: OffloadChoice,
    pub(super) keeping: Keeping,
    /// Bytes of an element in the model's dtype.
    pub(super) model_bytes: u64,
    /// Bytes of an element in the accumulation dtype.
    pub(super) acc_bytes: u64,
    pub(super) layers: u64,
    /// Ranks in the world.
    pub(super) ranks: u64,
    /// Prompt positions on the rank that holds most.
    pub(super) prompt_rows: u64,
    /// Rows of one answer on a rank.
    pub(super) answer_rows: u64,
    /// Rows of a pack of answers on all ranks, and on this one.
    pub(super) pack: [u64; 2],
    /// Prompt positions of this rank that carry gradient.
    pub(super) tail_rows: u64,
    /// Whether the tail is long: its rows stay on their rank, and page state travels to them.
    pub(super) tail_is_long: bool,
    /// Bytes of a position's page state that travels from rank to rank: the most of any layer.
    pub(super) passing_bytes: u64,
    /// Whether copies overlap the computation: then the next layer's data and the last layer's are on the device too.
    pub(super) copies_overlap: bool,
}

/// Most rows of a pack of answers, on all ranks and on the rank with the most. A pack fills up with answers that are shorter than
/// the longest, and each is dealt to ranks by itself. Where a mixer takes one sequence at a time, they are those of one answer.
fn pack_rows(config: &RunConfig, shape: &Shape, cp_size: u64) -> [u64; 2] {
    let (answer, group) = (config.context.answer_len.0, config.grpo.group_size.max(1));
    let own = answer.div_ceil(cp_size);
    let together = shape.layers.iter().all(|layer| matches!(layer.mix, Mix::Grouped { .. }));
    let all = answer.max(config.memory.micro_rows().0.min(group.saturating_mul(answer)));
    if !together || all == answer {
        return [answer, own];
    }
    let dealt = all.saturating_add(group.min(all).saturating_mul(cp_size - 1)) / cp_size;
    [all, dealt.min(group.saturating_mul(own)).max(own)]
}

impl<'a> Sizes<'a> {
    pub(super) fn new(
        config: &'a RunConfig,
        ranks: u64,
        shape: &'a Shape,
        choice: OffloadChoice,
        gpu: bool,
    ) -> Sizes<'a> {
        let (model_bytes, acc_bytes) = element_bytes(config.model.dtype);
        let cp_size = config.cp_size(ranks);
        let tail = config.tail(config.context.prompt_len);
        let prompt_rows = config.pages_per_rank(ranks).0 * config.context.page_size.0;
        let passing = |layer: &Layer| if layer.mix.travels() { layer.mix.widths().state * model_bytes } else { 0 };
        Sizes {
            config,
            shape,
            choice,
            keeping: choice.keeping,
            model_bytes,
            acc_bytes,
            layers: shape.depth(),
            ranks,
            prompt_rows,
            answer_rows: config.context.answer_len.0.div_ceil(cp_size),
            pack: pack_rows(config, shape, cp_size.max(1)),
            // A tail shorter than the prompt may be on one rank.
            tail_rows: if tail == config.context.prompt_len {
                tail.0.div_ceil(cp_size)
            } else {
                tail.0.min(prompt_rows)
            },
            tail_is_long: tail > config.memory.micro_rows(),
            passing_bytes: shape.most(passing),
            copies_overlap: gpu && config.run.device != DeviceChoice::Cpu,
        }
    }

    /// Rows of a pack of answers on this rank, and what they are called.
    pub(super) fn pack_rows(&self) -> (u64, &'static str) {
        let [all, own] = self.pack;
        let several = all > self.config.context.answer_len.0;
        (own, if several { "rows of the answers of a pack" } else { "rows of one answer" })
    }

    /// Weights and adapters.
    pub(super) fn model(&self) -> Vec<Addend> {
        let (copies, kept) = if self.config.grpo.kl_coef > 0.0 {
            (5, "(master, the reference's, gradient, two moments)")
        } else {
            (4, "(master, gradient, two moments)")
        };
        // On a GPU the sum over ranks is made in host memory.
        let on_their_way = if self.copies_overlap || self.ranks == 1 { 3 } else { self.ranks.saturating_add(4) };
        let pairs = adapter_elements(self.config, self.shape);
        let mut sum = self.weights();
        sum.extend([
            addend(
                "adapters",
                Place::Device,
                product(&[pairs, self.acc_bytes, copies]),
                format!("{pairs} values × {} B × {kept}", self.acc_bytes),
                "choose a smaller lora.rank, or fewer lora.targets",
            ),
            within(
                Phase::Finalize,
                "gradients on their way",
                product(&[pairs, self.acc_bytes, on_their_way]),
                format!(
                    "{pairs} values × {} B × {on_their_way} (own, summed, for the optimizer; rank 0 has all)",
                    self.acc_bytes
                ),
                "choose a smaller lora.rank, or fewer lora.targets",
            ),
        ]);
        if self.config.run.reuse_capture > 1 {
            let bytes = product(&[pairs, self.acc_bytes]);
            let reason = |what: &str| format!("{pairs} values × {} B: {what}", self.acc_bytes);
            let knob = "set run.reuse_capture = 1, or choose a smaller lora.rank";
            let at_capture = reason("a prompt is captured again under them after an evaluation");
            sum.push(within(Phase::Capture, "adapters of a reused capture", bytes, at_capture, knob));
            sum.push(addend("kept adapters", Place::Host, bytes, reason("those of a reused capture"), knob));
        }
        if self.copies_overlap {
            sum.push(addend(
                "matrix library",
                Place::Device,
                Bytes(2 * MATRIX_WORKSPACE),
                "the workspace of cuBLAS, for the thread that computes and for the one that runs backward".to_owned(),
                "nothing: it does not grow",
            ));
        }
        sum
    }

    /// The largest inner width of a feed-forward layer.
    pub(super) fn ffn_width(&self) -> u64 {
        self.shape.most(|layer| layer.ffn_width)
    }

    /// Bytes of a position's page state in `count` consecutive layers: the most of any such run.
    pub(super) fn state_of(&self, count: u64) -> u64 {
        let count = usize::try_from(count).unwrap_or(usize::MAX).clamp(1, self.shape.layers.len().max(1));
        let state =
            |layers: &[Layer]| layers.iter().map(|layer| layer.mix.widths().state).sum::<u64>() * self.model_bytes;
        self.shape.layers.windows(count).map(state).max().unwrap_or(0)
    }

    /// Bytes of a position's page state in these layers.
    pub(super) fn state_in(&self, layers: Range<usize>) -> u64 {
        self.shape.layers[layers].iter().map(|layer| layer.mix.widths().state).sum::<u64>() * self.model_bytes
    }

    /// The page state of a position in `layers` layers, in words.
    pub(super) fn state_words(&self, layers: u64, bytes: u64) -> String {
        let each = self.state_of(1);
        let all = if layers == self.layers { "all layers".to_owned() } else { format!("{layers} layers") };
        if each * layers == bytes { format!("{each} B × {layers} layers") } else { format!("{bytes} B in {all}") }
    }

    /// Page state where it waits, and what the phases that read it stage on the device.
    pub(super) fn pages(&self) -> Vec<Addend> {
        let host = self.keeping.pages == Residency::Host;
        let all = self.state_of(self.layers);
        let mut sum = vec![addend(
            "pages",
            self.keeping.pages.into(),
            product(&[self.prompt_rows, all]),
            format!("{} positions × {}", self.prompt_rows, self.state_words(self.layers, all)),
            "use more ranks (parallel.cp_size), or a shorter context.prompt_len",
        )];
        if host {
            // The next layer's pages are staged ahead; where left-out layers are computed again, one more layer's.
            let further = if self.tail_is_long && self.keeping.every > 1 { 2 } else { 1 };
            sum.extend([Phase::Replay, Phase::Sweep].map(|phase| self.staged(phase, further)));
        }
        sum
    }

    /// Pages on the device while layers run one after another: those of the current layer and, where copies overlap the
    /// computation, of `further` layers.
    pub(super) fn staged(&self, phase: Phase, further: u64) -> Addend {
        let further = if self.copies_overlap { further } else { 0 };
        let layers = if self.config.memory.layer_wise_transfer { 1 + further } else { self.layers };
        let staged = self.state_of(layers);
        within(
            phase,
            "staged pages",
            product(&[self.prompt_rows, staged]),
            format!("{} positions × {} at a time", self.prompt_rows, self.state_words(layers, staged)),
            "use more ranks (parallel.cp_size)",
        )
    }

    /// Whether ranks with GPUs exchange tensors through host memory.
    pub(super) fn through_host(&self) -> bool {
        self.copies_overlap && self.config.cp_size(self.ranks) > 1 && self.config.run.direct == When::Never
    }

    /// Tensors in host memory that are sent or received.
    pub(super) fn messages(&self) -> Vec<Addend> {
        if !self.through_host() || self.passing_bytes == 0 {
            return Vec::new();
        }
        let sums = if self.tail_is_long { self.passing_bytes / self.model_bytes * self.acc_bytes } else { 0 };
        vec![addend(
            "messages between ranks",
            Place::Host,
            product(&[2, self.prompt_rows, self.passing_bytes + sums]),
            format!("two other ranks' {} positions × {} B", self.prompt_rows, self.passing_bytes + sums),
            "use more ranks (parallel.cp_size)",
        )]
    }

    /// Page runs of other ranks that pass through; none where a rank has a prompt alone.
    pub(super) fn foreign(&self, phase: Phase, sums: u64) -> Vec<Addend> {
        if self.config.cp_size(self.ranks) == 1 || self.passing_bytes == 0 {
            return Vec::new();
        }
        vec![within(
            phase,
            "foreign page runs",
            product(&[2, self.prompt_rows, self.passing_bytes + sums]),
            format!("two other ranks' {} positions × {} B", self.prompt_rows, self.passing_bytes + sums),
            "use more ranks (parallel.cp_size)",
        )]
    }
}

/// Elements of all adapter pairs of a rank, which holds those of its own experts only.
pub(super) fn adapter_elements(config: &RunConfig, shape: &Shape) -> u64 {
    let targets = config.lora.targets.as_deref();
    let adapted =
        |layer: &Layer| Shape::adapted(layer, Segment::A, targets) + Shape::adapted(layer, Segment::B, targets);
    let names = targets.unwrap_or_default().iter();
    let on_experts = from_index(names.filter(|name| EXPERT_PROJECTIONS.contains(&name.as_str())).count());
    let of_experts = |layer: &Layer| {
        let here = layer.expert_count.div_ceil(config.parallel.ep_size.max(1));
        here.saturating_mul(on_experts).saturating_mul(shape.width + layer.expert_width)
    };
    config.lora.rank.saturating_mul(shape.sum(adapted).saturating_add(shape.sum(of_experts)))
}
