//! The plan: the rank layout and the memory budget of a rank, as a sum with a reason for each addend.
//!
//! No GPU and no MPI are needed. The sum is written here once; what a run measures is a second number, compared in the
//! receipt, never the same formula twice.

mod sizes;

use serde::Serialize;

use crate::config::{RunConfig, When};
use crate::failure::{Classified, Exit, Phase};
use crate::handoff::Keeping;
use crate::model::spec::Spec;
use crate::pages::Residency;
use crate::units::{Bytes, Pages, Tokens};
use crate::watch::{Purpose, Purse};

pub use crate::watch::available_memory;

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

impl From<Place> for Purse {
    fn from(place: Place) -> Purse {
        match place {
            Place::Device => Purse::Device,
            Place::Host => Purse::Host,
        }
    }
}

/// One addend of a rank's memory.
#[derive(Clone, Debug, Serialize)]
pub struct Addend {
    /// What it is.
    pub name: &'static str,
    /// Under which kinds a run's ledger counts it; none: it is scratch there.
    #[serde(skip)]
    pub counted: &'static [Purpose],
    /// Where it lies.
    pub place: Place,
    /// The phase that needs it; absent where it stays for the whole run.
    pub phase: Option<Phase>,
    /// How much.
    pub bytes: Bytes,
    /// How it comes about.
    pub reason: String,
    /// What brings it down.
    pub knob: &'static str,
}

/// Addends that a run measures as one.
#[derive(Clone, Debug)]
pub struct Group {
    /// Their names.
    pub names: Vec<&'static str>,
    /// Under which kinds a run's ledger counts them; none: they are scratch there.
    pub counted: &'static [Purpose],
    /// Where they lie.
    pub place: Place,
    /// How much they are together.
    pub bytes: Bytes,
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
    /// What is kept where for the way back.
    pub keeping: Keeping,
    /// A rank's memory; empty while the model is not known.
    pub addends: Vec<Addend>,
}

impl Plan {
    /// Bytes of a rank in one place: what stays, and the most that a phase adds.
    #[must_use]
    pub fn sum(&self, place: Place) -> Bytes {
        self.alive(&[place]).iter().map(|addend| addend.bytes).sum()
    }

    /// What is alive in the given places when most is.
    fn alive(&self, places: &[Place]) -> Vec<&Addend> {
        let peak = self.peak_phase(places);
        let counts =
            |addend: &&Addend| places.contains(&addend.place) && addend.phase.is_none_or(|phase| Some(phase) == peak);
        self.addends.iter().filter(counts).collect()
    }

    /// The phase that needs most in the given places.
    #[must_use]
    pub fn peak_phase(&self, places: &[Place]) -> Option<Phase> {
        let of = |phase: Phase| -> Bytes {
            let here = |addend: &&Addend| addend.phase == Some(phase) && places.contains(&addend.place);
            self.addends.iter().filter(here).map(|addend| addend.bytes).sum()
        };
        let phases = self.addends.iter().filter_map(|addend| addend.phase);
        phases.filter(|&phase| of(phase) > Bytes(0)).max_by_key(|&phase| of(phase))
    }

    /// What is alive when most is, by place and by the kinds that a run counts it under: names, where, and bytes.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let alive = [Place::Device, Place::Host].into_iter().flat_map(|place| self.alive(&[place]));
        for &Addend { name, counted, place, bytes, .. } in alive {
            match groups.iter_mut().find(|group| group.place == place && group.counted == counted) {
                Some(group) => {
                    group.names.push(name);
                    group.bytes += bytes;
                }
                None => groups.push(Group { names: vec![name], counted, place, bytes }),
            }
        }
        groups
    }

    /// Compares `ranks` ranks' memory in the given places with what there is.
    ///
    /// # Errors
    /// When it does not fit; names as many of the largest addends as stand in the way, and what brings each down.
    pub fn fits(&self, ranks: u64, what: &'static str, places: &[Place], available: Bytes) -> Result<(), Error> {
        let mut addends = self.alive(places);
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
        lines.push(self.choice(config));
        for (title, place) in [("device", Place::Device), ("host", Place::Host)] {
            let peak = self.peak_phase(&[place]);
            let at = peak.map(|phase| format!(", what stays and what {phase} adds")).unwrap_or_default();
            lines.push(format!("{title} memory of a rank: {}{at}", self.sum(place)));
            for addend in self.addends.iter().filter(|addend| addend.place == place) {
                let phase = addend.phase.map(|phase| format!("{phase}: ")).unwrap_or_default();
                let label = format!("{phase}{}", addend.name);
                lines.push(format!("  {:>12}  {label:<37}  {}", addend.bytes.to_string(), addend.reason));
            }
        }
        let node = Bytes(self.sum(Place::Host).0.saturating_mul(self.ranks));
        lines.push(format!("host memory of all {} ranks: {node}", self.ranks));
        lines.join("\n")
    }
}

impl Plan {
    /// What is kept where, and what it costs, in words.
    fn choice(&self, config: &RunConfig) -> String {
        let place = |residency| if residency == Residency::Host { "host" } else { "device" };
        if !config.memory.prompt_no_grad {
            return "the conventional schedule: whole sequences, each on one rank, answer by answer".into();
        }
        let Keeping { pages, tail, every, attention } = self.keeping;
        let pages = format!("pages in {} memory", place(pages));
        if config.tail(config.context.prompt_len) <= config.memory.micro_block {
            return pages;
        }
        let inputs = match every {
            1 => "every layer's tail inputs".into(),
            _ => format!("tail inputs of one layer in {every} (costs {}/{every} of a prompt forward)", every - 1),
        };
        let attention = match (attention, every) {
            (true, _) => "attention outputs kept",
            (false, 1) => "attention outputs computed again (costs one attention pass over the prompt)",
            (false, _) => "attention outputs computed again (costs two attention passes over the prompt)",
        };
        format!("{pages}, {inputs} in {} memory, {attention}", place(tail))
    }
}

/// Memory of a machine, where it is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// Ranks that share the host's memory.
    pub ranks_here: u64,
    /// Of one device, where it is known.
    pub device: Option<Bytes>,
    /// Whether there is no device, so that everything lies in the host's memory.
    pub host_only: bool,
    /// Of the host.
    pub host: Option<Bytes>,
}

impl Plan {
    /// Refuses a plan that does not stay within `room`.
    ///
    /// # Errors
    /// Names the parts of the sum, the largest first, each with what brings it down.
    pub fn refuse(&self, room: &Room) -> Result<(), Error> {
        let host: &[Place] = if room.host_only { &[Place::Device, Place::Host] } else { &[Place::Host] };
        room.device.map_or(Ok(()), |device| self.fits(1, "device", &[Place::Device], device))?;
        room.host.map_or(Ok(()), |memory| self.fits(room.ranks_here, "host", host, memory))
    }
}

/// The plan of `config` for a world of `ranks`, with what it leaves open chosen for `room`: pages on the device where
/// they fit, every layer's tail inputs kept or as few as must be, attention outputs kept where there is room. Without
/// room: what a configuration says, and otherwise the least memory on the device and no layer left out.
#[must_use]
pub fn of(config: &RunConfig, ranks: u64, spec: Option<&Spec>, room: &Room) -> Plan {
    let with = |keeping: Keeping| Plan {
        ranks,
        cp_size: config.cp_size(ranks),
        pages: config.prompt_pages(),
        pages_per_rank: config.pages_per_rank(ranks),
        keeping,
        addends: spec
            .map(|spec| sizes::Sizes::of(config, ranks, spec, keeping, !room.host_only).addends())
            .unwrap_or_default(),
    };
    let known = room.device.is_some() || room.host.is_some();
    let Some(spec) = spec.filter(|_| known) else { return with(sizes::stated(config, Residency::Host)) };
    let memory = &config.memory;
    let most = if memory.inputs_every == 0 { spec.layers.max(1) } else { 1 };
    let mut tried = Vec::new();
    for pages in [Residency::Device, Residency::Host] {
        for step in 1..=most {
            let stated = sizes::stated(config, pages);
            let every = if memory.inputs_every == 0 { step } else { stated.every };
            let attention = memory.keep_attention == When::Auto && step == 1;
            tried.extend(attention.then_some(Keeping { every, attention, ..stated }));
            tried.push(Keeping { every, ..stated });
        }
    }
    // Computing again costs more than bringing pages over, so the first choice that fits is taken in this order: fewer
    // layers left out, then attention kept, then pages on the device.
    tried.sort_by_key(|keeping| (keeping.every, !keeping.attention, keeping.pages == Residency::Host));
    let plans = || tried.iter().map(|&keeping| with(keeping));
    plans().find(|plan| plan.refuse(room).is_ok()).unwrap_or_else(|| {
        let sum = |plan: &Plan| plan.sum(Place::Host).0.saturating_add(plan.sum(Place::Device).0);
        plans().min_by_key(sum).unwrap_or_else(|| with(sizes::stated(config, Residency::Host)))
    })
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
