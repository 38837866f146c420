//! What one phase hands to the next. The types carry the order: the optimizer takes only [`ReducedGrads`], which only
//! `finalize` makes, out of [`LocalGrads`] that it consumes.

use tch::Tensor;

use crate::layout::{PromptLayout, Span};
use crate::pages::{HiddenPool, PagePool};
use crate::units::{Rank, Tokens, from_index};

/// One group as the phases see it: a prompt's tokens and the answers behind it, dealt to ranks.
#[derive(Debug)]
pub struct Work {
    /// How the prompt lies.
    pub layout: PromptLayout,
    /// The prompt.
    pub prompt_ids: Vec<i64>,
    /// The answers.
    pub answers: Vec<Answer>,
}

/// One answer and the rows it has on each rank.
#[derive(Debug)]
pub struct Answer {
    /// Its tokens; never empty.
    pub ids: Vec<i64>,
    /// Its rows.
    pub span: Span,
}

impl Work {
    /// Deals a group to ranks.
    #[must_use]
    pub fn new(layout: PromptLayout, prompt_ids: Vec<i64>, answers: Vec<Vec<i64>>) -> Work {
        let answers =
            answers.into_iter().map(|ids| Answer { span: layout.answer(Tokens(from_index(ids.len()))), ids }).collect();
        Work { layout, prompt_ids, answers }
    }

    /// Answers that have rows on some rank, with their indices; one of a single token has none.
    pub fn with_rows(&self) -> impl Iterator<Item = (usize, &Answer)> {
        self.answers.iter().enumerate().filter(|(_, answer)| !answer.span.is_empty())
    }

    /// Tokens that this rank's rows of an answer read.
    #[must_use]
    pub fn inputs(&self, answer: &Answer, rank: Rank) -> Vec<i64> {
        answer.span.of(rank).flat_map(|piece| answer.ids[self.layout.inputs(piece)].iter().copied()).collect()
    }

    /// Tokens that this rank's rows of an answer predict, [rows].
    pub fn labels(&self, answer: &Answer, rank: Rank) -> Tensor {
        let labels: Vec<i64> =
            answer.span.of(rank).flat_map(|piece| answer.ids[self.layout.labels(piece)].iter().copied()).collect();
        Tensor::from_slice(&labels)
    }

    /// The first token of every answer, which row P−1 predicts, [answers].
    pub fn first_labels(&self) -> Tensor {
        Tensor::from_slice(&self.answers.iter().map(|answer| answer.ids[0]).collect::<Vec<i64>>())
    }
}

/// A captured prompt on one rank.
#[derive(Debug)]
pub struct Captured {
    /// State of the pages that this rank owns.
    pub pages: PagePool,
    /// Block inputs of this rank's tail rows, slot (0, layer).
    pub tail: HiddenPool,
    /// Last hidden state of row P−1, [1, w], on the rank that owns it.
    pub last_row: Option<Tensor>,
}

/// Log-probabilities of one answer's tokens on one rank, in the accumulation dtype.
#[derive(Debug)]
pub struct Logprobs {
    /// Of the tokens that this rank's rows predict, [rows].
    pub rows: Tensor,
    /// Of the first token, [1], on the rank that owns row P−1.
    pub first: Option<Tensor>,
}

/// Frozen log-probabilities of a group's answers.
#[derive(Debug)]
pub struct Scores(pub Vec<Logprobs>);

/// Adapter gradients of one rank, not summed yet.
#[derive(Debug)]
#[must_use = "gradients that are not finalized never reach the other ranks"]
pub struct LocalGrads(pub Vec<Tensor>);

/// Adapter gradients summed over all ranks and clipped: the same bits everywhere.
#[derive(Debug)]
pub struct ReducedGrads {
    pub(crate) gradients: Vec<Tensor>,
    pub(crate) norm: f64,
}

impl ReducedGrads {
    /// In the adapters' order.
    pub fn gradients(&self) -> &[Tensor] {
        &self.gradients
    }

    /// Euclidean norm before clipping.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.norm
    }
}
