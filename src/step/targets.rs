//! What a group's answers are trained on: advantages, weights, frozen scores, and the loss that follows from the answers'
//! log-probabilities.

use std::cell::RefCell;
use std::rc::Rc;

use tch::Tensor;

use crate::config::Loss;
use crate::prompt::handoff::{Logprobs, PlacedGroup, Scores};
use crate::prompt::pages::ChoicePool;
use crate::runtime::units::from_index;
use crate::step::objective::{
    self, Added, Aggregation, AnswerTokens, Batch, Counted, Objective, SequenceMeans, SequencePart,
};
use crate::world::Axis;

/// One answer as it is trained.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct TrainedAnswer {
    pub ids: Vec<i64>,
    /// Which of its tokens are trained; `None`: all.
    pub mask: Option<Vec<bool>>,
    /// Log-probabilities that came with it, nats, one for each token where there is one; `None`: none came.
    pub given: Option<Vec<Option<f64>>>,
    /// Its advantage; `None`: it takes no part.
    pub advantage: Option<f64>,
    /// Weight of each of its tokens in the loss.
    pub weight: f64,
}

/// Log-probabilities that stay the same for all updates of a round.
#[derive(Debug)]
pub struct FrozenScores {
    /// Of the old policy: as scored before the round's first update, or as they came with the answers.
    pub old: Scores,
    /// Of the reference policy, if there is a KL term.
    pub reference: Option<Scores>,
    /// No log-probabilities but the importance weights of the same tokens, if the objective has them.
    pub importance: Option<Scores>,
    /// What was chosen for this rank's rows when the answers were sampled, for the further updates of the round.
    pub choices: RefCell<Option<Rc<ChoicePool>>>,
}

impl TrainedAnswer {
    /// The answers of one group that is a whole batch by itself. An answer without an advantage takes no part.
    #[must_use]
    pub fn whole_batch(
        answers: &[Vec<i64>],
        advantages: &[Option<f64>],
        aggregation: Aggregation,
    ) -> Vec<TrainedAnswer> {
        let pairs = || answers.iter().zip(advantages);
        let batch = Batch::of(
            pairs().map(|(ids, advantage)| Counted { tokens: from_index(ids.len()), scored: advantage.is_some() }),
        );
        let answer = |(ids, &advantage): (&Vec<i64>, &Option<f64>)| TrainedAnswer {
            ids: ids.clone(),
            mask: None,
            given: None,
            advantage,
            weight: batch.weight(aggregation, from_index(ids.len())),
        };
        pairs().map(answer).collect()
    }
}

/// What the replay's loss reads besides the log-probabilities of the replay itself.
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct ReplayTargets<'a> {
    /// Advantage and weight of each answer of the group, in its order.
    pub answers: &'a [TrainedAnswer],
    pub scores: &'a FrozenScores,
    /// Loss of a token.
    pub objective: &'a Objective,
}

impl ReplayTargets<'_> {
    /// Means over a whole answer, where the ratio is the sequence's: `rows` and the `first` token are this rank's log-probabilities
    /// of it. Every rank takes part, with or without tokens.
    #[must_use]
    pub fn means(
        &self,
        work: &PlacedGroup,
        cp: &Axis,
        index: usize,
        rows: &Tensor,
        first: Option<&Tensor>,
    ) -> Option<SequenceMeans> {
        if self.objective.loss != Loss::Gspo {
            return None;
        }
        let answer = &work.answers[index];
        let FrozenScores { old, importance, .. } = self.scores;
        let weights = importance.as_ref().map(|scores| &scores.0[index]);
        let old = &old.0[index];
        let trained = work.trained(answer, cp.rank());
        let rows = SequencePart { logprobs: rows, old: &old.rows, importance: weights.map(|own| &own.rows), trained };
        let first = first.zip(old.first.as_ref()).map(|(logprobs, old)| SequencePart {
            logprobs,
            old,
            importance: weights.and_then(|own| own.first.as_ref()),
            trained: answer.first_is_trained(),
        });
        let parts: Vec<SequencePart> = std::iter::once(rows).chain(first).collect();
        Some(SequenceMeans::of(&parts, weights.is_some(), answer.trained_tokens(), cp))
    }

    /// Loss of some tokens of the answer at `index`, and its gradient with respect to their log-probabilities. `trained` is 1 for
    /// tokens that take part and 0 for others; `None`: all do. `part` picks these tokens from scores of the answer. `None` for an
    /// answer without an advantage.
    #[must_use]
    pub fn tokens(
        &self,
        index: usize,
        logprobs: &Tensor,
        trained: Option<Tensor>,
        means: Option<SequenceMeans>,
        part: impl Fn(&Logprobs) -> &Tensor,
    ) -> Option<Added> {
        let TrainedAnswer { advantage, weight, .. } = self.answers[index];
        let FrozenScores { old, reference, importance, .. } = self.scores;
        let trained = trained.map(|trained| trained.to_device(logprobs.device()));
        let tokens = AnswerTokens {
            logprobs,
            old: part(&old.0[index]),
            reference: reference.as_ref().map(|scores| part(&scores.0[index])),
            importance: importance.as_ref().map(|scores| part(&scores.0[index])),
            advantage: advantage?,
            weight,
            trained: trained.as_ref(),
            means,
        };
        Some(objective::tokens(&tokens, self.objective))
    }
}
