//! What `data keychain` makes.

use std::path::PathBuf;

use super::super::error::Error;
use crate::runtime::units::Tokens;

/// Most notes of a prompt: a quarter of all names.
pub(super) const KEYS_MAX: usize = 64;

/// Range of depths of the notes that lead to the answer, in percent of the passage: 0 is before the first line, 100
/// after the last. The depth of the note with the code grows evenly over this range, from a file's first prompt to its last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Depth {
    pub from: u64,
    /// Percent, at most 100.
    pub to: u64,
}

/// Options of `data keychain`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folders of text; empty: the default folders of a Debian machine.
    pub folders: Vec<PathBuf>,
    /// Exact number of tokens of a prompt, chat turns included.
    pub prompt_tokens: Tokens,
    /// Prompts of `train.jsonl`, at least one.
    pub train: usize,
    /// Prompts of `held_out.jsonl`.
    pub held_out: usize,
    /// Notes in a prompt, at least enough to give each answer its own code.
    pub keys: usize,
    /// Notes from the place in the question to its code, at least one.
    pub hops: usize,
    /// Depth of these notes.
    pub depth: Depth,
    /// Answers of a prompt, one of them right; 0 if the policy samples its own.
    pub answers: usize,
    /// Question and answers are about the code alone, instead of a sentence.
    pub short: bool,
    /// Seed of all random choices.
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

/// Refuses options that no text can satisfy.
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
    // Only the last note of a chain has a code.
    let least = (*answers).max(1).saturating_add(hops - 1);
    if !(least..=KEYS_MAX).contains(keys) {
        let wanted = format!("from {least} (a code for each answer, and {} more hops) to {KEYS_MAX}", hops - 1);
        return refuse("keys", keys.to_string(), wanted);
    }
    if depth.from > depth.to || depth.to > 100 || (*hops > 1 && depth.from == depth.to) {
        let wanted = "FROM..TO within 0..100, FROM below TO if there are several hops".to_owned();
        return refuse("depth", format!("{}..{}", depth.from, depth.to), wanted);
    }
    Ok(())
}
