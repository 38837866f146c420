//! The plan: the rank layout and the memory budget of a rank, as a sum with a reason for each addend, and the seconds of a
//! group by phase.
//!
//! No GPU and no MPI are needed. The sum is written here once; what a run measures is a second number, compared in the
//! receipt, never the same formula twice.

pub mod ladder;
mod phases;
pub mod seconds;
mod sizes;
mod special;
mod text;
mod work;

use serde::Serialize;

use crate::config::{RunConfig, When};
use crate::failure::{Classified, Exit, Phase};
use crate::handoff::Keeping;
use crate::model::shape::Shape;
use crate::model::spec::Spec;
use crate::pages::Residency;
use crate::units::{Bytes, Pages};
use crate::watch::{Purpose, Purse};

pub use crate::watch::available_memory;

/// Why a run is refused before it starts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// More memory than there is.
    #[error("{at}{who} {needed} of {what} memory and {available} are there; from the largest part down: {parts}")]
    DoesNotFit {
        /// The gate it is of, with a colon behind it; empty for a plan by itself.
        at: String,
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

impl Error {
    /// The same, said of a gate.
    fn of_gate(self, gate: &str) -> Error {
        let Error::DoesNotFit { who, what, needed, available, parts, .. } = self;
        Error::DoesNotFit { at: format!("{gate}: "), who, what, needed, available, parts }
    }
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

/// What a configuration leaves open.
#[derive(Clone, Copy, Debug)]
struct Choice {
    keeping: Keeping,
    /// Whether the prompt's index sets wait for the way back; otherwise keys are chosen again.
    index_sets: bool,
}

/// The layout, and the sum where the model is known.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Ranks of the world.
    pub ranks: u64,
    /// Ranks that share a machine's host memory.
    pub ranks_per_node: u64,
    /// Ranks that share a prompt.
    pub cp_size: u64,
    /// Pages of the longest prompt.
    pub pages: Pages,
    /// Pages on the rank that holds most.
    pub pages_per_rank: Pages,
    /// What is kept where for the way back.
    pub keeping: Keeping,
    /// Whether index sets of a prompt that is swept wait for the way back; absent where no layer chooses keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_sets: Option<bool>,
    /// A rank's memory; empty while the model is not known.
    pub addends: Vec<Addend>,
    /// Seconds of a group by phase, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<seconds::Seconds>,
}

/// A sum that stays at the largest number instead of wrapping round.
fn total<'a>(addends: impl IntoIterator<Item = &'a Addend>) -> Bytes {
    Bytes(addends.into_iter().fold(0, |sum: u64, addend| sum.saturating_add(addend.bytes.0)))
}

impl Plan {
    /// Bytes of a rank in one place: what stays, and the most that a phase adds.
    #[must_use]
    pub fn sum(&self, place: Place) -> Bytes {
        total(self.alive(&[place]))
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
            total(self.addends.iter().filter(here))
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
                    group.bytes = Bytes(group.bytes.0.saturating_add(bytes.0));
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
        let needed = all(total(addends.iter().copied()));
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
        Err(Error::DoesNotFit { at: String::new(), who, what, needed, available, parts: parts.join("; ") })
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
    of_shape(config, ranks, spec.map(Shape::of).as_ref(), room)
}

/// The same of any shape, be it trained or only planned. Where layers choose keys, the prompt's index sets are kept where
/// there is room.
#[must_use]
pub fn of_shape(config: &RunConfig, ranks: u64, shape: Option<&Shape>, room: &Room) -> Plan {
    let choosing = shape.is_some_and(|shape| shape.layers.iter().any(|layer| layer.mix.chooses().is_some()));
    let with = |choice: Choice| Plan {
        ranks,
        ranks_per_node: if room.ranks_here == 0 { ranks } else { room.ranks_here.min(ranks) },
        cp_size: config.cp_size(ranks),
        pages: config.prompt_pages(),
        pages_per_rank: config.pages_per_rank(ranks),
        keeping: choice.keeping,
        index_sets: choosing.then_some(choice.index_sets),
        addends: shape
            .map(|shape| sizes::Sizes::of(config, ranks, shape, choice, !room.host_only).addends())
            .unwrap_or_default(),
        seconds: None,
    };
    let known = room.device.is_some() || room.host.is_some();
    let least = || Choice { keeping: sizes::stated(config, Residency::Host), index_sets: false };
    let Some(shape) = shape.filter(|_| known) else { return with(least()) };
    let memory = &config.memory;
    let most = if memory.inputs_every == 0 { shape.layers.len().max(1) } else { 1 };
    let swept = choosing && config.tail(config.context.prompt_len) > memory.micro_block;
    let mut tried = Vec::new();
    for (pages, index_sets) in [Residency::Device, Residency::Host].into_iter().flat_map(|at| [(at, true), (at, false)])
    {
        if index_sets && !swept {
            continue;
        }
        for step in 1..=most {
            let stated = sizes::stated(config, pages);
            let every = if memory.inputs_every == 0 { step } else { stated.every };
            let attention = memory.keep_attention == When::Auto && step == 1;
            let choice = |keeping: Keeping| Choice { keeping, index_sets };
            tried.extend(attention.then_some(choice(Keeping { every, attention, ..stated })));
            tried.push(choice(Keeping { every, ..stated }));
        }
    }
    // Computing again costs more than bringing pages over, so the first choice that fits is taken in this order: index sets
    // kept, since choosing again takes a score of every pair of the prompt's positions; then fewer layers left out, then
    // attention kept, then pages on the device.
    tried.sort_by_key(|&Choice { keeping, index_sets }| {
        (!index_sets, keeping.every, !keeping.attention, keeping.pages == Residency::Host)
    });
    let plans = || tried.iter().map(|&choice| with(choice));
    plans().find(|plan| plan.refuse(room).is_ok()).unwrap_or_else(|| {
        let sum = |plan: &Plan| plan.sum(Place::Host).0.saturating_add(plan.sum(Place::Device).0);
        plans().min_by_key(sum).unwrap_or_else(|| with(least()))
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
    spec.context_note(config.context.max_seq_len)
}
