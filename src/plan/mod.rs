//! The plan: the rank layout and the memory budget of a rank, as a sum with a reason for each addend, and the seconds of a
//! group by phase.
//!
//! No GPU and no MPI are needed. The sum is written here once; what a run measures is a second number, compared in the
//! receipt, never the same formula twice.

pub mod ladder;
mod phases;
mod rollout;
pub mod seconds;
mod sizes;
mod special;
mod text;
mod work;

use serde::Serialize;

use crate::config::{RunConfig, When};
use crate::model::shape::Shape;
use crate::model::spec::Spec;
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;
use crate::runtime::failure::{Classified, Exit, Phase};
use crate::runtime::memory::{MemorySpace, Purpose};
use crate::runtime::units::{Bytes, Pages};
use seconds::Rates;

pub use crate::runtime::memory::available_memory;
pub use rollout::Rollout;

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
    /// Answers that would be drawn too slowly.
    #[error(
        "{at}a token of the sampled answers takes {seconds:.3} s by the plan, and rollout.token_sec_max is {most}: {why}; {how}"
    )]
    TooSlow {
        /// The gate it is of, with a colon behind it; empty for a plan by itself.
        at: String,
        /// Predicted seconds of a token.
        seconds: f64,
        /// The most that the configuration allows.
        most: f64,
        /// What takes so long.
        why: String,
        /// What brings it down.
        how: &'static str,
    },
}

impl Error {
    /// The same, said of a gate.
    fn of_gate(mut self, gate: &str) -> Error {
        let (Error::DoesNotFit { at, .. } | Error::TooSlow { at, .. }) = &mut self;
        *at = format!("{gate}: ");
        self
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

impl From<Place> for MemorySpace {
    fn from(place: Place) -> MemorySpace {
        match place {
            Place::Device => MemorySpace::Device,
            Place::Host => MemorySpace::Host,
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
    /// Whether pages of all layers are on the device while answers are drawn; otherwise they come layer by layer.
    all_pages: bool,
}

impl Choice {
    /// What the configuration says, where it leaves no choice; otherwise the least on the device but for pages.
    fn stated(config: &RunConfig, pages: Residency) -> Choice {
        let all_pages = config.rollout.pages_on_device == When::Always;
        Choice { keeping: sizes::stated(config, pages), index_sets: false, all_pages }
    }
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
    /// How answers are drawn; absent where they come with the data, and while the model is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
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
    /// Predicts seconds at some rates: of a group, phase by phase, and of a token that is drawn.
    pub fn time(&mut self, config: &RunConfig, shape: &Shape, rates: Rates) {
        self.time_answers(config, shape, &rates);
        self.seconds = seconds::predict(config, self, shape, rates);
    }

    /// Refuses a plan that does not stay within `room`, or whose answers are drawn too slowly as far as that is predicted.
    ///
    /// # Errors
    /// Names the parts of the sum, the largest first, each with what brings it down; or the seconds of a token, and why.
    pub fn refuse(&self, room: &Room) -> Result<(), Error> {
        let host: &[Place] = if room.host_only { &[Place::Device, Place::Host] } else { &[Place::Host] };
        room.device.map_or(Ok(()), |device| self.fits(1, "device", &[Place::Device], device))?;
        room.host.map_or(Ok(()), |memory| self.fits(room.ranks_here, "host", host, memory))?;
        self.rollout.map_or(Ok(()), Rollout::refuse)
    }
}

/// The plan of `config` for a world of `ranks`, with what it leaves open chosen for `room`: pages on the device where
/// they fit, every layer's tail inputs kept or as few as must be, attention outputs kept where there is room; and once that
/// is chosen, pages of all layers on the device while answers are drawn, where they fit. Without room: what a configuration
/// says, and otherwise the least memory on the device and no layer left out.
#[must_use]
pub fn of(config: &RunConfig, ranks: u64, spec: Option<&Spec>, room: &Room) -> Plan {
    of_shape(config, ranks, spec.map(Shape::of).as_ref(), room)
}

/// The same of any shape, be it trained or only planned. Where layers choose keys, the prompt's index sets are kept where
/// there is room. On a GPU a token of sampled answers is timed at an H200's rates; [`Plan::time`] takes others.
#[must_use]
pub fn of_shape(config: &RunConfig, ranks: u64, shape: Option<&Shape>, room: &Room) -> Plan {
    let choosing = shape.is_some_and(|shape| shape.layers.iter().any(|layer| layer.mix.chooses().is_some()));
    let with = |choice: Choice| {
        let sizes = shape.map(|shape| sizes::Sizes::of(config, ranks, shape, choice, !room.host_only));
        Plan {
            ranks,
            ranks_per_node: if room.ranks_here == 0 { ranks } else { room.ranks_here.min(ranks) },
            cp_size: config.cp_size(ranks),
            pages: config.prompt_pages(),
            pages_per_rank: config.pages_per_rank(ranks),
            keeping: choice.keeping,
            index_sets: choosing.then_some(choice.index_sets),
            rollout: sizes.as_ref().and_then(|sizes| Rollout::of(sizes)),
            addends: sizes.map(|sizes| sizes.addends()).unwrap_or_default(),
            seconds: None,
        }
    };
    let fits = |choice: Choice| with(choice).refuse(room).is_ok();
    let known = room.device.is_some() || room.host.is_some();
    let least = Choice::stated(config, Residency::Host);
    let Some(shape) = shape else { return with(least) };
    let mut choice = if known {
        let tried = tried(config, shape, choosing);
        let sum = |choice: &Choice| {
            let plan = with(*choice);
            plan.sum(Place::Host).0.saturating_add(plan.sum(Place::Device).0)
        };
        let first = tried.iter().copied().find(|&choice| fits(choice));
        first.unwrap_or_else(|| tried.into_iter().min_by_key(sum).unwrap_or(least))
    } else {
        least
    };
    // Whatever waits for the way back, a prompt that is there once for all tokens costs them nothing more.
    let all_pages = Choice { all_pages: true, ..choice };
    let roomy = room.device.is_some() || (room.host_only && room.host.is_some());
    if config.rollout.sample && config.rollout.pages_on_device == When::Auto && roomy && fits(all_pages) {
        choice = all_pages;
    }
    let mut plan = with(choice);
    if !room.host_only {
        plan.time_answers(config, shape, &Rates::h200(shape));
    }
    plan
}

/// What may be chosen, from the cheapest in time down.
fn tried(config: &RunConfig, shape: &Shape, choosing: bool) -> Vec<Choice> {
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
            let stated = Choice::stated(config, pages);
            let every = if memory.inputs_every == 0 { step } else { stated.keeping.every };
            let attention = memory.keep_attention == When::Auto && step == 1;
            let choice = |keeping: Keeping| Choice { keeping, index_sets, ..stated };
            tried.extend(attention.then_some(choice(Keeping { every, attention, ..stated.keeping })));
            tried.push(choice(Keeping { every, ..stated.keeping }));
        }
    }
    // Computing again costs more than bringing pages over, so the first choice that fits is taken in this order: index sets
    // kept, since choosing again takes a score of every pair of the prompt's positions; then fewer layers left out, then
    // attention kept, then pages on the device.
    tried.sort_by_key(|&Choice { keeping, index_sets, .. }| {
        (!index_sets, keeping.every, !keeping.attention, keeping.pages == Residency::Host)
    });
    tried
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
