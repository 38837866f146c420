//! Addends: the parts of a rank's memory, each with its reason.

use serde::Serialize;

use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::memory::{MemorySpace, Purpose};
use crate::runtime::units::Bytes;

/// The memory that an addend takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "host memory says itself")]
pub enum Place {
    /// The GPU's memory; without a GPU, the machine's.
    Device,
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

/// One part of a rank's memory.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Addend {
    /// Unique name within a phase.
    pub name: &'static str,
    /// The purposes under which a run's ledger counts it; empty for scratch, which the ledger does not see.
    #[serde(skip)]
    pub counted: &'static [Purpose],
    pub place: Place,
    /// The phase that needs it; absent where it stays for the whole run.
    pub phase: Option<Phase>,
    pub bytes: Bytes,
    /// The product behind `bytes`, in words.
    pub reason: String,
    /// The setting that makes it smaller.
    pub knob: &'static str,
}

/// Addends that a run measures together.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are those of an addend")]
pub struct Group {
    pub names: Vec<&'static str>,
    pub counted: &'static [Purpose],
    pub place: Place,
    pub bytes: Bytes,
}

/// The product of `factors`, or the largest number where it would overflow.
pub(super) fn product(factors: &[u64]) -> Bytes {
    Bytes(factors.iter().fold(1u64, |all, &factor| all.saturating_mul(factor)))
}

/// The purposes under which a run's ledger counts an addend; empty for scratch.
fn counted(name: &str) -> &'static [Purpose] {
    match name {
        "weights" => &[Purpose::Weights],
        "adapters" | "adapters of a reused capture" | "kept adapters" => &[Purpose::Adapters, Purpose::Optimizer],
        "pages" | "states at a border" => &[Purpose::Pages],
        "staged pages" | "pages of all layers" | "pages of resident layers" => &[Purpose::Stage],
        "foreign page runs" | "messages between ranks" | "gathered keys" | "gradient of gathered keys" => {
            &[Purpose::Foreign]
        }
        "answers' keys and values" | "answers' recurrent states" | "decode step" => &[Purpose::Answers],
        "answers' hidden states" => &[Purpose::Hidden],
        "tail's block inputs" | "tail's attention outputs" | "answers' attention outputs" => &[Purpose::Checkpoints],
        "answers' index sets" | "prompt's index sets" | "answers' chosen experts" | "tail's chosen experts" => {
            &[Purpose::Choices]
        }
        _ => &[],
    }
}

/// An addend for the whole run.
pub(super) fn addend(name: &'static str, place: Place, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, counted: counted(name), place, phase: None, bytes, reason, knob }
}

/// An addend on the device in one phase only.
pub(super) fn within(phase: Phase, name: &'static str, bytes: Bytes, reason: String, knob: &'static str) -> Addend {
    Addend { name, counted: counted(name), place: Place::Device, phase: Some(phase), bytes, reason, knob }
}

impl From<Residency> for Place {
    fn from(residency: Residency) -> Place {
        match residency {
            Residency::Host => Place::Host,
            Residency::Device => Place::Device,
        }
    }
}

/// The sum, or the largest number where it would overflow.
pub(super) fn total<'a>(addends: impl IntoIterator<Item = &'a Addend>) -> Bytes {
    Bytes(addends.into_iter().fold(0, |sum: u64, addend| sum.saturating_add(addend.bytes.0)))
}
