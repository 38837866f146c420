//! What a caller decides in the middle of a transaction, and what becomes of the group.

use std::rc::Rc;

use super::replay::{FrozenScores, Replayed, TrainedAnswer};
use super::rollout::ChangedChoices;
use crate::prompt::handoff::{Captured, PlacedGroup, Scores};
use crate::prompt::pages::ChoicePool;

/// What the caller decides once the answers are there.
pub enum Verdict {
    /// Nothing would be left of the group: no further phase runs.
    Skip,
    /// These answers are scored, and nothing is trained.
    Score(Vec<Vec<i64>>),
    /// These answers are scored and trained.
    Train(Vec<TrainedAnswer>),
}

/// What became of a group.
#[expect(missing_docs, reason = "each variant follows the verdict of its name")]
pub enum Outcome {
    Skipped,
    Scored(Box<Scored>),
    Trained(Box<Trained>),
}

/// A group whose answers were scored. Its prompt stays captured while this lives.
#[expect(missing_docs, reason = "the types say everything")]
pub struct Scored {
    pub group: PlacedGroup,
    pub captured: Captured,
    pub scores: Scores,
}

/// A group whose answers were replayed. `scores` are those that the replay was given or that were frozen before it.
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Trained {
    pub group: PlacedGroup,
    pub scores: Rc<FrozenScores>,
    pub replayed: Replayed,
    /// What was chosen for this rank's rows of the answers.
    pub choices: Rc<ChoicePool>,
    /// How many of the choices made in sampling were made differently here; nothing where they were used.
    pub changed: ChangedChoices,
    /// The prompt, which stays captured while this lives.
    pub captured: Option<Captured>,
}
