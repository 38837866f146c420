//! A prompt of exactly so many tokens: the passage is cut between words, and what is then missing is filled with words
//! and marks whose tokens are measured.

use super::super::error::Error;
use super::super::tokenizer::Tokenizer;
use super::notes::{DEEPEST, Note, Task};
use super::options::Options;
use crate::runtime::units::{Tokens, as_index, from_index};

/// The cut is sought this far below the bound, so that a line of padding has room.
const ROOM: Tokens = Tokens(6);
/// A cut this close below what is sought is not improved further.
const SLACK: Tokens = Tokens(16);
/// Most measurements for the cut, and for the padding behind one cut.
const CUT_ROUNDS_MAX: usize = 40;
const PAD_ROUNDS_MAX: usize = 24;
/// Cuts that are tried, in words before the one that was found: where one leaves a gap that padding cannot fill, another
/// may not.
const CUTS_BACK: [usize; 4] = [0, 1, 3, 8];
/// Padding: words, and marks where no word fits any more.
const WORDS: [&str; 3] = ["and", "so", "on"];
const MARKS: [&str; 8] = [".", " -", "!", ";", " +", "?", " =", ":"];

/// The question about a place.
pub(super) fn question(asked: &str) -> String {
    format!("What is the access code of the {asked}?")
}

/// The prompt, of exactly the tokens that were asked for.
pub(super) fn exactly(options: &Options, tokenizer: &Tokenizer, passage: &str, task: &Task) -> Result<String, Error> {
    let mut cuts = vec![0];
    cuts.extend(passage.match_indices([' ', '\n']).map(|(at, _)| at));
    let mut fit = Fit { options, tokenizer, passage, task, cuts, nearest: Tokens(0), tries: 0 };
    let found = fit.cut()?;
    let mut before = None;
    for back in CUTS_BACK {
        let cut = found.saturating_sub(back);
        if before.replace(cut) == Some(cut) {
            continue;
        }
        if let Some(text) = fit.padded(cut)? {
            return Ok(text);
        }
    }
    Err(Error::NotExact { wanted: options.prompt_tokens, nearest: fit.nearest, tries: fit.tries })
}

/// One prompt in the making.
struct Fit<'a> {
    options: &'a Options,
    tokenizer: &'a Tokenizer,
    passage: &'a str,
    task: &'a Task,
    /// Where the passage may end.
    cuts: Vec<usize>,
    /// Most tokens of a prompt that was no longer than it should be.
    nearest: Tokens,
    tries: usize,
}

impl Fit<'_> {
    /// The prompt that ends at a cut, and its tokens.
    fn measured(&mut self, cut: usize, padding: &str) -> Result<(String, Tokens), Error> {
        let turn = user_turn(&self.passage[..self.cuts[cut]], self.task, padding, self.options.short);
        let text = self.tokenizer.chat_text(&turn)?;
        let tokens = Tokens(from_index(self.tokenizer.encode(&text)?.len()));
        self.tries += 1;
        if tokens <= self.options.prompt_tokens {
            self.nearest = self.nearest.max(tokens);
        }
        Ok((text, tokens))
    }

    /// The last cut, nearly, at which the prompt leaves room for padding.
    ///
    /// The number of tokens grows with the cut but for a token or so at the seams, so the cut is searched between one that
    /// fits and one that does not, by interpolation.
    fn cut(&mut self) -> Result<usize, Error> {
        let wanted = self.options.prompt_tokens;
        let least = self.measured(0, "")?.1;
        if least > wanted {
            let notes = self.task.notes.len();
            let wanted_words = format!("at least {least}, what {notes} notes and the question take");
            return Err(Error::Option { option: "prompt_tokens", found: wanted.to_string(), wanted: wanted_words });
        }
        let bound = wanted.0.saturating_sub(ROOM.0);
        let (mut fits, mut exceeds) = (0, self.cuts.len());
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

    /// The prompt that ends at a cut, filled up to the token, where words and marks can do that.
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
                // A word takes more tokens than was thought, and the first one takes a line as well.
                word_tokens = (longer_tokens.0 - tokens.0).div_ceil(from_index(count)).max(word_tokens + 1);
            }
        }
        Ok((tokens == wanted).then_some(text))
    }
}

/// Padding with `count` further words behind the `words` it has.
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
        let at = border(passage, *depth).max(from);
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
    text.push_str(&question(&task.asked));
    text.push_str(if short { " Reply with the code alone." } else { " Answer in one sentence." });
    text
}

/// Where a note of this depth goes: the start of the nearest line, or of the nearest word where lines are long.
fn border(passage: &str, depth: u64) -> usize {
    let bytes = passage.as_bytes();
    // A passage of 10^14 bytes would overflow.
    let target = as_index(from_index(bytes.len()) * depth / DEEPEST);
    let nearest = |sign: u8| {
        let before = bytes[..target].iter().rposition(|byte| *byte == sign).map_or(0, |at| at + 1);
        let after = bytes[target..].iter().position(|byte| *byte == sign).map_or(bytes.len(), |at| target + at + 1);
        if target - before <= after - target { before } else { after }
    };
    let line = nearest(b'\n');
    let word = nearest(b' ');
    let far = line.abs_diff(target) > bytes.len() / 200;
    if far && word.abs_diff(target) < line.abs_diff(target) { word } else { line }
}
