//! Calls in sampled answers: who answers them, and how many updates and evaluations have had.

use super::session::Session;
use crate::calls::RecordCaller;
use crate::data::{Dataset, Group};
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::float;
use crate::step::rollout::{CallCounts, Caller, Calls};

/// Too many calls of an update, or of a held-out set, got no reply.
#[derive(Debug, thiserror::Error)]
#[error(
    "{failed} of the {calls} calls in {of} got no reply, more than tools.failed_share_max = {share_max} allows; the last: \
     {failure}"
)]
pub(super) struct TooManyFailed {
    failed: u64,
    calls: u64,
    of: String,
    share_max: f64,
    failure: String,
}

impl Classified for TooManyFailed {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}

/// Fewer failed calls end nothing: of a few calls one is a large share.
const FAILED_MIN: u64 = 4;

/// Checks that at most a share of `share_max` of the calls got no reply; `of` names the answers.
pub(super) fn check(counts: &CallCounts, share_max: f64, of: &str) -> Result<(), TooManyFailed> {
    let CallCounts { calls, failed, failure, .. } = counts;
    if *failed < FAILED_MIN || float(*failed) <= share_max * float(*calls) {
        return Ok(());
    }
    let failure = failure.clone().unwrap_or_default();
    Err(TooManyFailed { failed: *failed, calls: *calls, of: of.to_owned(), share_max, failure })
}

/// A sentence for the user where calls got no reply; `of` names the answers.
pub(super) fn warning(counts: &CallCounts, of: &str) -> Option<String> {
    let CallCounts { calls, failed, failure, .. } = counts;
    let failure = failure.as_deref().unwrap_or_default();
    (*failed > 0).then(|| format!("warning: {failed} of {calls} calls in {of} got no reply; the last: {failure}"))
}

impl Session {
    /// Who answers the calls in answers to `group`; `None` where nobody does.
    pub(super) fn caller<'a>(&'a self, group: &'a Group) -> Option<RecordCaller<'a>> {
        let tokenizer = self.data.tokenizer.as_ref()?;
        self.data.tools.as_ref().map(|tools| tools.of(tokenizer, group))
    }

    /// A sentence for the user where records of a data set have marks of calls, and nothing answers calls.
    pub(super) fn unused_marks_note(&self, key: &str, data: &Dataset) -> Option<String> {
        let is_train = key == self.config().data.train_key();
        let draws = if is_train { self.samples() } else { self.draws_held_out() };
        let given = (0..data.len()).filter(|&index| !data.group(index).tool_marks.is_empty()).count();
        let unused = given > 0 && draws && self.data.tools.is_none();
        unused.then(|| {
            format!(
                "{key}: {given} of {} records have \"tool_marks\", and nothing answers calls: tools.command names no program",
                data.len()
            )
        })
    }

    /// The calls that `caller` answers.
    pub(super) fn calls<'a>(&self, caller: Option<&'a RecordCaller<'a>>) -> Option<Calls<'a>> {
        let turns = self.config().tools.turns;
        caller.map(|caller| Calls { caller: caller as &dyn Caller, turns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_failed_calls_than_allowed_end_the_run_and_the_last_reason_is_named() {
        let counts =
            |calls, failed| CallCounts { calls, failed, failure: Some("it hung".to_owned()), ..CallCounts::default() };
        let of = "the answers of update 3";
        assert!(check(&counts(8, 2), 0.25, of).is_ok());
        assert!(check(&CallCounts::default(), 0.0, of).is_ok(), "no call, no failure");
        assert!(check(&counts(3, 3), 0.25, of).is_ok(), "three calls are no measure of a tool");
        let error = check(&counts(8, 4), 0.25, of).unwrap_err();
        assert_eq!(error.exit(), Exit::Data);
        let words = error.to_string();
        assert!(words.starts_with("4 of the 8 calls in the answers of update 3 got no reply"), "{words}");
        assert!(words.ends_with("the last: it hung"), "{words}");
        assert_eq!(warning(&counts(8, 0), "update 3"), None);
        assert!(warning(&counts(8, 1), "update 3").unwrap().contains("1 of 8 calls in update 3"));
    }
}
