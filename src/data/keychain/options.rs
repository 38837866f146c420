//! What `data keychain` makes.

use std::path::PathBuf;

use super::super::error::Error;
use crate::runtime::units::Tokens;

/// Most notes of a prompt: a quarter of all names.
pub(super) const KEYS_MAX: usize = 64;

/// Where in the passages the notes lie that lead to the answer, in percent: 0 is before the first line, 100 behind the
/// last. The code's own note goes evenly through this range, from the first prompt of a file to the last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Depth {
    /// The least deep.
    pub from: u64,
    /// The deepest, at most 100.
    pub to: u64,
}

/// What to make.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folders of text; empty: those that stand on any Debian machine.
    pub folders: Vec<PathBuf>,
    /// Tokens of a prompt, chat turns included: exactly so many.
    pub prompt_tokens: Tokens,
    /// Prompts of `train.jsonl`, at least one.
    pub train: usize,
    /// Prompts of `held_out.jsonl`.
    pub held_out: usize,
    /// Notes in a prompt: so many that each answer has a code of its own.
    pub keys: usize,
    /// Notes from the place that is asked for to its code, at least one.
    pub hops: usize,
    /// Where they lie.
    pub depth: Depth,
    /// Answers of a prompt, one of them right; 0: none, for a policy that answers for itself.
    pub answers: usize,
    /// The code alone is asked for and answered, instead of a sentence.
    pub short: bool,
    /// Of everything random.
    pub seed: u64,
}

impl Default for Options {
    /// The laptop run's data.
    fn default() -> Self {
        Options {
            folders: Vec::new(),
            prompt_tokens: Tokens(2_000),
            train: 40,
            held_out: 8,
            keys: 8,
            hops: 1,
            depth: Depth { from: 0, to: 100 },
            answers: 4,
            short: false,
            seed: 0,
        }
    }
}

/// Options that no text can mend.
pub(super) fn check(options: &Options) -> Result<(), Error> {
    let refuse = |option, found: String, wanted: String| Err(Error::Option { option, found, wanted });
    let Options { train, answers, hops, keys, depth, .. } = options;
    if *train == 0 {
        return refuse("train", "0".to_owned(), "at least 1".to_owned());
    }
    if *answers == 1 {
        let wanted = "0, or at least 2: one right answer and a wrong one".to_owned();
        return refuse("answers", answers.to_string(), wanted);
    }
    if !(1..=KEYS_MAX).contains(hops) {
        return refuse("hops", hops.to_string(), format!("from 1 to {KEYS_MAX}"));
    }
    // Every note of a chain but its last is without a code.
    let least = (*answers).max(1).saturating_add(hops - 1);
    if !(least..=KEYS_MAX).contains(keys) {
        let wanted = format!("from {least} (a code for each answer, and {} more hops) to {KEYS_MAX}", hops - 1);
        return refuse("keys", keys.to_string(), wanted);
    }
    if depth.from > depth.to || depth.to > 100 || (*hops > 1 && depth.from == depth.to) {
        let wanted = "FROM..TO within 0..100, FROM before TO where there are several hops".to_owned();
        return refuse("depth", format!("{}..{}", depth.from, depth.to), wanted);
    }
    Ok(())
}

