//! The plan: the rank layout and the memory budget of a rank, as a sum with a reason for each addend.
//!
//! No GPU and no MPI are needed. The sum is written here once; what a run measures is a second number, compared in the
//! receipt, never the same formula twice.

use serde::Serialize;

use crate::config::{Dtype, Offload, RunConfig};
use crate::failure::{Classified, Exit};
use crate::model::spec::Spec;
use crate::units::{Bytes, Pages, Tokens};

/// Why a run is refused before it starts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// More memory than there is.
    #[error("{who} {needed} of {what} memory and {available} are there; from the largest part down: {parts}")]
    DoesNotFit {
        /// Who needs it.
        who: String,
        /// Which memory.
        what: &'static str,
        /// What they need.
        needed: Bytes,
        /// What there is.
        available: Bytes,
        /// The largest addends, each with what brings it down.
        parts: String,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::DoesNotFit
    }
}

/// Where an addend lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Where the model computes: the GPU's memory, or the machine's when there is none.
    Device,
    /// Host memory.
    Host,
}

/// One addend of a rank's memory.
#[derive(Clone, Debug, Serialize)]
pub struct Addend {
    /// What it is.
    pub name: &'static str,
    /// Where it lies.
    pub place: Place,
    /// How much.
    pub bytes: Bytes,
    /// How it comes about.
    pub reason: String,
    /// What brings it down.
    pub knob: &'static str,
}

/// The layout, and the sum where the model is known.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Ranks of the world.
    pub ranks: u64,
    /// Ranks that share a prompt.
    pub cp_size: u64,
    /// Pages of the longest prompt.
    pub pages: Pages,
    /// Pages on the rank that holds most.
    pub pages_per_rank: Pages,
    /// A rank's memory; empty while the model is not known.
    pub addends: Vec<Addend>,
}

impl Plan {
    /// Bytes of a rank in one place.
    #[must_use]
    pub fn sum(&self, place: Place) -> Bytes {
        self.addends.iter().filter(|addend| addend.place == place).map(|addend| addend.bytes).sum()
    }

    /// Compares `ranks` ranks' memory in the given places with what there is.
    ///
    /// # Errors
    /// When it does not fit; names as many of the largest addends as stand in the way, and what brings each down.
    pub fn fits(&self, ranks: u64, what: &'static str, places: &[Place], available: Bytes) -> Result<(), Error> {
        let mut addends: Vec<&Addend> = self.addends.iter().filter(|addend| places.contains(&addend.place)).collect();
        addends.sort_by_key(|addend| std::cmp::Reverse(addend.bytes));
        let all = |bytes: Bytes| Bytes(bytes.0.saturating_mul(ranks));
        let needed = all(addends.iter().map(|addend| addend.bytes).sum());
        if needed <= available {
            return Ok(());
        }
        let mut rest = needed;
        let mut parts = Vec::new();
        for addend in addends {
            if rest <= available {
                break;
            }
            rest = Bytes(rest.0.saturating_sub(all(addend.bytes).0));
            let Addend { name, bytes, reason, knob, .. } = addend;
            parts.push(format!("{name}, {bytes} a rank ({reason}): {knob}"));
        }
        let who = if ranks == 1 { "one rank needs".into() } else { format!("{ranks} ranks on this machine need") };
        Err(Error::DoesNotFit { who, what, needed, available, parts: parts.join("; ") })
    }

    /// The plan in words.
    #[must_use]
    pub fn text(&self, config: &RunConfig) -> String {
        let context = &config.context;
        let mut lines = vec![
            format!(
                "{} ranks, {} share a prompt, {} prompts side by side",
                self.ranks,
                self.cp_size,
                self.ranks / self.cp_size.max(1)
            ),
            format!(
                "prompt {} + answer {} = {} positions, pages of {}",
                context.prompt_len, context.answer_len, context.max_seq_len, context.page_size
            ),
            format!("{} pages, {} pages a rank", self.pages, self.pages_per_rank),
            format!("gradient {}, group of {}", config.grpo.gradient, config.grpo.group_size),
        ];
        if self.addends.is_empty() {
            lines.push(
                "memory unknown: no model is set; name its folder with --model FOLDER or --set model.path=FOLDER"
                    .into(),
            );
            return lines.join("\n");
        }
        for (title, place) in [("device", Place::Device), ("host", Place::Host)] {
            lines.push(format!("{title} memory of a rank: {}", self.sum(place)));
            for addend in self.addends.iter().filter(|addend| addend.place == place) {
                lines.push(format!("  {:>12}  {:<22} {}", addend.bytes.to_string(), addend.name, addend.reason));
            }
        }
        let node = Bytes(self.sum(Place::Host).0.saturating_mul(self.ranks));
        lines.push(format!("host memory of all {} ranks: {node}", self.ranks));
        lines.join("\n")
    }
}

/// The plan of `config` for a world of `ranks`.
#[must_use]
pub fn of(config: &RunConfig, ranks: u64, spec: Option<&Spec>) -> Plan {
    Plan {
        ranks,
        cp_size: config.cp_size(ranks),
        pages: config.prompt_pages(),
        pages_per_rank: config.pages_per_rank(ranks),
        addends: spec.map(|spec| addends(config, ranks, spec)).unwrap_or_default(),
    }
}

/// Bytes of an element in the model's dtype and in the dtype that sums are kept in.
fn widths(dtype: Dtype) -> (u64, u64) {
    match dtype {
        Dtype::Bfloat16 => (2, 4),
        Dtype::Float32 => (4, 4),
        Dtype::Float64 => (8, 8),
    }
}

/// Lengths and widths that addends are made of, per rank.
struct Sizes<'a> {
    config: &'a RunConfig,
    spec: &'a Spec,
    /// Bytes of an element in the model's dtype.
    model: u64,
    /// Bytes of an element in the dtype that sums are kept in.
    acc: u64,
    layers: u64,
    /// Prompt positions on the rank that holds most.
    rows: u64,
    /// Answer rows.
    answer: u64,
    /// Prompt positions that carry gradient.
    tail: u64,
    /// Bytes of one position's state in one layer.
    state: u64,
}

fn addends(config: &RunConfig, ranks: u64, spec: &Spec) -> Vec<Addend> {
    let (model, acc) = widths(config.model.dtype);
    let cp_size = config.cp_size(ranks);
    let sizes = Sizes {
        config,
        spec,
        model,
        acc,
        layers: spec.layers as u64,
        rows: config.pages_per_rank(ranks).0 * config.context.page_size.0,
        answer: config.context.answer_len.0.div_ceil(cp_size),
        tail: config.tail(config.context.prompt_len).0.div_ceil(cp_size),
        state: 2 * spec.kv_heads * spec.head_dim * model,
    };
    [sizes.model(), sizes.scratch(), sizes.pages(), sizes.hidden()].concat()
}

/// A product that stays at the largest number instead of wrapping round.
fn product(factors: &[u64]) -> Bytes {
    Bytes(factors.iter().fold(1u64, |all, &factor| all.saturating_mul(factor)))
}

fn addend(name: &'static str, place: Place, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, place, bytes, reason, knob }
}

impl Sizes<'_> {
    fn model(&self) -> Vec<Addend> {
        let (spec, lora) = (self.spec, &self.config.lora);
        let adapted = spec.adapted(lora.targets.as_deref()).unwrap_or_default();
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
                product(&[pairs, self.acc, 4]),
                format!("{pairs} values × {} B × (master, gradient, two moments)", self.acc),
                "choose a smaller lora.rank, or fewer lora.targets",
            ),
        ]
    }

    fn scratch(&self) -> Vec<Addend> {
        let (spec, memory) = (self.spec, &self.config.memory);
        let (width, heads) = (spec.width, spec.query_heads * spec.head_dim);
        let (micro, head) = (memory.micro_block.0.min(self.rows), memory.head_block.0.min(self.answer.max(1)));
        vec![
            addend(
                "prompt hidden states",
                Place::Device,
                product(&[self.rows, width * self.model * 2 + heads * (self.model + self.acc)]),
                format!("{} positions × (in and out, {width} wide; queries and outputs, {heads} wide)", self.rows),
                "use more ranks (parallel.cp_size)",
            ),
            addend(
                "segment scratch",
                Place::Device,
                product(&[micro, (3 * spec.ffn_width + 4 * width) * (self.model + self.acc)]),
                format!("{micro} rows × one block's intermediates"),
                "choose a smaller memory.micro_block",
            ),
            addend(
                "head scratch",
                Place::Device,
                product(&[head, spec.vocabulary, 4 * self.acc]),
                format!("{head} rows × vocabulary {}", spec.vocabulary),
                "choose a smaller memory.head_block",
            ),
        ]
    }

    fn pages(&self) -> Vec<Addend> {
        let memory = &self.config.memory;
        let offloaded = memory.cpu_offload_pages != Offload::Never;
        let staged = if memory.layer_wise_transfer { 1 } else { self.layers };
        let mut sum = vec![addend(
            "pages",
            if offloaded { Place::Host } else { Place::Device },
            product(&[self.rows, self.state, self.layers]),
            format!("{} positions × {} B × {} layers", self.rows, self.state, self.layers),
            "use more ranks (parallel.cp_size), or a shorter context.prompt_len",
        )];
        if offloaded {
            sum.push(addend(
                "staged pages",
                Place::Device,
                product(&[self.rows, self.state, staged]),
                format!("{} positions × {} B × {staged} layers at a time", self.rows, self.state),
                "set memory.layer_wise_transfer = true",
            ));
        }
        sum
    }

    fn hidden(&self) -> Vec<Addend> {
        let (width, layers, model) = (self.spec.width, self.layers, self.model);
        let (group, answer, tail) = (self.config.grpo.group_size, self.answer, self.tail);
        let mut sum = vec![addend(
            "answers' hidden states",
            Place::Host,
            product(&[group, answer, width, layers, model]),
            format!("{group} answers × {answer} rows × {width} × {layers} layers × {model} B"),
            "choose a smaller grpo.group_size, or a shorter context.answer_len",
        )];
        if tail > 0 {
            sum.push(addend(
                "tail's hidden states",
                Place::Host,
                product(&[tail, width, layers, model]),
                format!("{tail} positions that carry gradient × {width} × {layers} layers × {model} B"),
                "set grpo.gradient = \"response\"",
            ));
        }
        sum
    }
}

/// Memory that this machine can still give, if it says so.
#[must_use]
pub fn available_memory() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(Bytes(kib * 1024))
}

/// A number of GiB as bytes.
#[must_use]
pub fn gib(count: u64) -> Bytes {
    Bytes(count.saturating_mul(1 << 30))
}

/// The longest sequence, for a note about a context window that ends before it.
#[must_use]
pub fn context_note(config: &RunConfig, spec: &Spec) -> Option<String> {
    spec.context_note(Tokens(config.context.max_seq_len.0))
}
