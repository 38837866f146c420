//! A prompt of an exact number of tokens: the passage is cut between words, and the gap is filled with padding whose
//! tokens are measured.

use super::super::error::Error;
use super::super::tokenizer::Tokenizer;
use super::notes::{DEPTH_MAX, Note, Task};
use super::options::Options;
use crate::runtime::units::{Tokens, as_index, from_index};

/// Tokens that the cut leaves free for a line of padding.
const PADDING_TOKENS_MIN: Tokens = Tokens(6);
/// The search for the cut ends when so few tokens are missing.
const SLACK: Tokens = Tokens(16);
/// Most measurements for the cut, and for the padding after one cut.
const CUT_ROUNDS_MAX: usize = 40;
const PAD_ROUNDS_MAX: usize = 24;
/// Cuts to try, in words before the one found: if padding cannot fill the gap of one, it may fill another's.
const CUTS_BACK: [usize; 4] = [0, 1, 3, 8];
/// Padding: words, then marks when no word fits any more.
const WORDS: [&str; 3] = ["and", "so", "on"];
const MARKS: [&str; 8] = [".", " -", "!", ";", " +", "?", " =", ":"];

pub(super) fn question(place: &str) -> String {
    format!("What is the access code of the {place}?")
}

/// The prompt, of exactly `options.prompt_tokens`.
pub(super) fn prompt(options: &Options, tokenizer: &Tokenizer, passage: &str, task: &Task) -> Result<String, Error> {
    let mut offsets = vec![0];
    offsets.extend(passage.match_indices([' ', '\n']).map(|(at, _)| at));
    let mut fit = Fit { options, tokenizer, passage, task, offsets, nearest: Tokens(0), tries: 0 };
    let found = fit.find_cut()?;
    let mut cuts: Vec<usize> = CUTS_BACK.iter().map(|back| found.saturating_sub(*back)).collect();
    cuts.dedup();
    for cut in cuts {
        if let Some(text) = fit.padded(cut)? {
            return Ok(text);
        }
    }
    Err(Error::NotExact { wanted: options.prompt_tokens, nearest: fit.nearest, tries: fit.tries })
}

/// One prompt under construction.
struct Fit<'a> {
    options: &'a Options,
    tokenizer: &'a Tokenizer,
    passage: &'a str,
    task: &'a Task,
    /// Byte offsets at which the passage may end.
    offsets: Vec<usize>,
    /// Most tokens of a prompt that was not too long.
    nearest: Tokens,
    tries: usize,
}

impl Fit<'_> {
    /// The prompt with this cut and padding, and its number of tokens.
    fn measured(&mut self, cut: usize, padding: &str) -> Result<(String, Tokens), Error> {
        let turn = user_turn(&self.passage[..self.offsets[cut]], self.task, padding, self.options.short);
        let text = self.tokenizer.chat_text(&turn)?;
        let tokens = Tokens(from_index(self.tokenizer.encode(&text)?.len()));
        self.tries += 1;
        if tokens <= self.options.prompt_tokens {
            self.nearest = self.nearest.max(tokens);
        }
        Ok((text, tokens))
    }

    /// Nearly the last cut at which the prompt leaves room for padding.
    ///
    /// The number of tokens grows with the cut, give or take a token at the seams. The search keeps a cut that fits and
    /// one that does not, and interpolates between them.
    fn find_cut(&mut self) -> Result<usize, Error> {
        let wanted = self.options.prompt_tokens;
        let least = self.measured(0, "")?.1;
        if least > wanted {
            let notes = self.task.notes.len();
            let least = format!("at least {least}, the length of {notes} notes and the question");
            return Err(Error::Option { option: "prompt_tokens", found: wanted.to_string(), wanted: least });
        }
        let bound = wanted.0.saturating_sub(PADDING_TOKENS_MIN.0);
        let (mut fits, mut exceeds) = (0, self.offsets.len());
        let (mut fitting, mut exceeding) = (least.0, least.0 + wanted.0);
        for round in 0..CUT_ROUNDS_MAX {
            if exceeds - fits <= 1 || fitting + SLACK.0 >= bound {
                break;
            }
            let gap = from_index(exceeds - fits);
            let even = gap * (bound - fitting) / (exceeding - fitting).max(1);
            let step = if round % 4 == 3 { gap / 2 } else { even };
            let cut = fits + as_index(step.clamp(1, gap - 1));
            let tokens = self.measured(cut, "")?.1.0;
            if tokens <= bound {
                (fits, fitting) = (cut, tokens);
            } else {
                (exceeds, exceeding) = (cut, tokens);
            }
        }
        Ok(fits)
    }

    /// The prompt with this cut, padded to the exact length; `None` if words and marks cannot fill the gap.
    fn padded(&mut self, cut: usize) -> Result<Option<String>, Error> {
        let wanted = self.options.prompt_tokens;
        let mut padding = String::new();
        let (mut text, mut tokens) = self.measured(cut, &padding)?;
        let (mut words, mut word_tokens) = (0, 1);
        let mut marks = MARKS.iter();
        for _ in 0..PAD_ROUNDS_MAX {
            if tokens == wanted {
                return Ok(Some(text));
            }
            if tokens > wanted {
                return Ok(None);
            }
            let count = as_index((wanted.0 - tokens.0) / word_tokens);
            let longer = if count > 0 {
                with_words(&padding, words, count)
            } else {
                match marks.next() {
                    Some(mark) => format!("{padding}{mark}"),
                    None => return Ok(None),
                }
            };
            let (longer_text, longer_tokens) = self.measured(cut, &longer)?;
            if longer_tokens <= wanted {
                words += count;
                (padding, text, tokens) = (longer, longer_text, longer_tokens);
            } else if count > 0 {
                // A word takes more tokens than assumed; the first one also starts a line.
                word_tokens = (longer_tokens.0 - tokens.0).div_ceil(from_index(count)).max(word_tokens + 1);
            }
        }
        Ok((tokens == wanted).then_some(text))
    }
}

/// Padding with `count` more words after the `words` it has.
fn with_words(padding: &str, words: usize, count: usize) -> String {
    let mut longer = padding.to_owned();
    for word in (words..words + count).map(|index| WORDS[index % WORDS.len()]) {
        longer.push_str(if longer.is_empty() { "" } else { " " });
        longer.push_str(word);
    }
    longer
}

/// The user's turn: the passage with its notes on lines of their own, padding, and the question.
fn user_turn(passage: &str, task: &Task, padding: &str, short: bool) -> String {
    let mut text = String::from("Read this text. Notes with access codes stand between its lines.\n\n");
    let end_line = |text: &mut String| {
        if text.ends_with(' ') {
            text.pop();
        }
        if !text.ends_with('\n') {
            text.push('\n');
        }
    };
    let mut from = 0;
    for Note { text: note, depth } in &task.notes {
        let at = note_offset(passage, *depth).max(from);
        text.push_str(&passage[from..at]);
        end_line(&mut text);
        text.push_str(note);
        text.push('\n');
        from = at;
    }
    text.push_str(&passage[from..]);
    end_line(&mut text);
    if !padding.is_empty() {
        text.push_str(padding);
        text.push('\n');
    }
    text.push_str("\nQuestion: ");
    text.push_str(&question(&task.place));
    text.push_str(if short { " Reply with the code alone." } else { " Answer in one sentence." });
    text
}

/// The byte offset of a note of this depth: the start of the nearest line, or of the nearest word if lines are long.
fn note_offset(passage: &str, depth: u64) -> usize {
    let bytes = passage.as_bytes();
    // A passage of 10^14 bytes would overflow.
    let target = as_index(from_index(bytes.len()) * depth / DEPTH_MAX);
    let nearest = |separator: u8| {
        let before = bytes[..target].iter().rposition(|byte| *byte == separator).map_or(0, |at| at + 1);
        let after =
            bytes[target..].iter().position(|byte| *byte == separator).map_or(bytes.len(), |at| target + at + 1);
        if target - before <= after - target { before } else { after }
    };
    let line = nearest(b'\n');
    let word = nearest(b' ');
    let far = line.abs_diff(target) > bytes.len() / 200;
    if far && word.abs_diff(target) < line.abs_diff(target) { word } else { line }
}
