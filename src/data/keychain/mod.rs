//! `data keychain`: long-context tasks with a checkable answer, made of real text.
//!
//! - **Notes.** A passage of real text contains short notes on their own lines. Each note is about the access code of one
//!   place: it gives the code, or says that the code is the same as another place's. The question at the end asks for
//!   the code of one place; a chain of `hops` notes leads from that place to its code. There are other chains too.
//! - **Depth.** The depth of the chain in the passage is chosen, not random, so that results can be compared by depth.
//! - **Answers.** One answer is right (reward 1). The wrong ones (reward 0) are codes of other places in the same prompt,
//!   so only reading tells them apart. An answer is the code alone, or a sentence that begins as the note does: a small
//!   model then already copies codes from the text, and has only to learn which one.
//! - **Splits.** Train and held-out prompts share neither passages nor codes.
//! - **Repeatability.** The same text, tokenizer, options and seed give the same files.

mod fit;
mod notes;
mod options;
mod prompts;

use std::path::{Path, PathBuf};

pub use options::{Depth, Options};
use prompts::{Split, SplitWriter};

use super::corpus;
use super::error::Error;
use super::random::Random;
use super::tokenizer::Tokenizer;
use crate::runtime::units::{Tokens, from_index};

/// Codes have four digits; one in five is for held-out prompts only.
const CODES: std::ops::Range<u32> = 1_000..10_000;
const HELD_OUT_CODES: usize = 1_800;

/// What was written.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Summary {
    pub train_file: PathBuf,
    pub held_out_file: PathBuf,
    /// Prompts in both files.
    pub prompts: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: Tokens,
    /// Files that the text comes from.
    pub text_files: usize,
    /// Tokens of that text; passages repeat if the train prompts together are longer.
    pub text_tokens: Tokens,
}

/// Writes `train.jsonl` and `held_out.jsonl` into the folder `out`, each whole or not at all.
///
/// # Errors
/// When an option cannot be met (exit 2); when there is too little text, no prompt of exactly that length can be made,
/// the folder has no usable chat template, or a file cannot be written (exit 3).
pub fn write(options: &Options, tokenizer: &Tokenizer, out: &Path) -> Result<Summary, Error> {
    options::check(options)?;
    let folders = folders(options)?;
    let end = tokenizer.turn_end_text()?;
    let writer = SplitWriter { options, tokenizer, folders: &folders, end: &end };
    let prompts = from_index(options.train + options.held_out);
    // A tenth more than the prompts need, and at least a few passages.
    let wanted = options.prompt_tokens.0.saturating_mul(prompts.max(4)).saturating_mul(11) / 10;
    let corpus = corpus::collect(&folders, tokenizer, options.seed, Tokens(wanted))?;
    let (held_out_text, train_text) = writer.divide(&corpus)?;
    let mut codes: Vec<u32> = CODES.collect();
    Random::new(options.seed, 0x636f_6465).shuffle(&mut codes);
    let (held_out_codes, train_codes) = codes.split_at(HELD_OUT_CODES);

    std::fs::create_dir_all(out).map_err(Error::io(out, "create the folder"))?;
    let train = Split { name: "train", stream: 1, prompts: options.train, text: train_text, codes: train_codes };
    let held_out =
        Split { name: "held-out", stream: 2, prompts: options.held_out, text: held_out_text, codes: held_out_codes };
    let train_temporary = writer.write(&train, out)?;
    let held_out_temporary = writer.write(&held_out, out)?;
    let train_file = out.join(train.file_name());
    let held_out_file = out.join(held_out.file_name());
    for (temporary, file) in [(train_temporary, &train_file), (held_out_temporary, &held_out_file)] {
        temporary.persist(file).map_err(|cause| Error::io(file, "rename a temporary file to it")(cause.error))?;
    }
    Ok(Summary {
        train_file,
        held_out_file,
        prompts: options.train + options.held_out,
        prompt_tokens: options.prompt_tokens,
        text_files: corpus.files,
        text_tokens: corpus.paragraphs.iter().map(|paragraph| paragraph.tokens).sum(),
    })
}

/// The given folders, or the default ones that exist.
fn folders(options: &Options) -> Result<Vec<PathBuf>, Error> {
    if !options.folders.is_empty() {
        return Ok(options.folders.clone());
    }
    let found: Vec<PathBuf> =
        corpus::DEFAULT_FOLDERS.iter().map(PathBuf::from).filter(|folder| folder.is_dir()).collect();
    if found.is_empty() {
        let wanted = "folders of text: this machine has none of the usual ones".to_owned();
        return Err(Error::Option { option: "folders", found: "empty".to_owned(), wanted });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::super::{Answers, Dataset, Limits, test_tokenizer};
    use super::*;
    use crate::config::TooLong;
    use crate::runtime::units::float;

    /// A folder with enough distinct text.
    fn library() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let alphabet: Vec<char> = ('a'..='z').collect();
        for file in 0..12 {
            let mut random = Random::new(file, 9);
            let mut text = String::new();
            for word in 0..600 {
                let letters: String = (0..3 + random.below(6)).map(|_| alphabet[random.below(26)]).collect();
                text.push_str(&letters);
                text.push_str(match word % 60 {
                    59 => "\n\n",
                    11 | 23 | 35 | 47 => "\n",
                    _ => " ",
                });
            }
            fs::write(folder.path().join(format!("{file}.txt")), text).unwrap();
        }
        folder
    }

    fn options(library: &Path) -> Options {
        Options {
            folders: vec![library.to_owned()],
            prompt_tokens: Tokens(2_100),
            train: 9,
            held_out: 5,
            keys: 6,
            answers: 3,
            seed: 4,
            ..Options::default()
        }
    }

    fn records(file: &Path) -> Vec<serde_json::Value> {
        fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Codes of the notes, and the lines of the passage that are no notes.
    fn parts(file: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
        let (mut codes, mut lines) = (BTreeSet::new(), BTreeSet::new());
        for record in records(file) {
            let prompt = record["prompt"].as_str().unwrap();
            for line in prompt.split("lines.\n\n").nth(1).unwrap().split("\nQuestion").next().unwrap().lines() {
                match line.strip_prefix("Note: the access code of the ") {
                    Some(note) => codes.insert(note.split(" is ").nth(1).unwrap().to_owned()),
                    None => line.len() > 30 && lines.insert(line.to_owned()),
                };
            }
        }
        (codes, lines)
    }

    fn limits(answers: Answers) -> Limits {
        Limits {
            prompt_len_max: Tokens(2_100),
            answer_len_max: Tokens(64),
            vocab_size: 259,
            answers,
            too_long: TooLong::Refuse,
        }
    }

    /// The place in the prompt's question.
    fn queried_place(prompt: &str) -> &str {
        prompt.split("Question: What is the access code of the ").nth(1).unwrap().split('?').next().unwrap()
    }

    #[test]
    fn prompts_have_the_exact_length_and_exactly_one_right_answer() {
        let (library, model, out) = (library(), test_tokenizer::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let summary = write(&options(library.path()), &tokenizer, out.path()).unwrap();
        assert_eq!(summary.prompts, 14);
        for (file, count) in [(&summary.train_file, 9), (&summary.held_out_file, 5)] {
            let data = Dataset::open(file, Some(&tokenizer), &limits(Answers::Given(3))).unwrap();
            assert_eq!(data.len(), count);
            for (index, record) in records(file).iter().enumerate() {
                let group = data.group(index);
                assert_eq!(group.prompt_tokens, Tokens(2_100));
                let prompt = record["prompt"].as_str().unwrap();
                let place = queried_place(prompt);
                for (answer, text) in group.answers.iter().zip(record["answers"].as_array().unwrap()) {
                    let code = text["text"].as_str().unwrap().strip_suffix(".<|im_end|>").unwrap();
                    let code = code.strip_prefix(&format!("The access code of the {place} is ")).unwrap();
                    let right = prompt.contains(&format!("Note: the access code of the {place} is {code}.\n"));
                    assert_eq!(answer.reward, Some(if right { 1.0 } else { 0.0 }));
                    assert_eq!(right, group.reward_data["expected"] == code);
                    assert!(prompt.contains(&format!(" is {code}.\n")), "wrong codes are in the text too");
                    assert_eq!(answer.ids.last(), Some(&test_tokenizer::END));
                }
                assert_eq!(group.answers.iter().filter(|answer| answer.reward == Some(1.0)).count(), 1);
                assert_eq!(group.reward_data["question"], format!("What is the access code of the {place}?"));
                assert_eq!(group.reward_data["hops"], 1);
            }
        }
    }

    #[test]
    fn the_codes_note_lies_as_deep_as_the_record_says() {
        let (library, model, out) = (library(), test_tokenizer::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let depth = Depth { from: 20, to: 60 };
        let options = Options { depth, hops: 2, prompt_tokens: Tokens(4_000), ..options(library.path()) };
        let summary = write(&options, &tokenizer, out.path()).unwrap();
        let depths: Vec<f64> = records(&summary.held_out_file)
            .iter()
            .map(|record| {
                let prompt = record["prompt"].as_str().unwrap();
                let body = prompt.split("lines.\n\n").nth(1).unwrap().split("\nQuestion").next().unwrap();
                let recorded = record["reward_data"]["depth_percent"].as_f64().unwrap();
                let code = record["reward_data"]["expected"].as_str().unwrap();
                let place = |note: &str| {
                    let at = body.find(note).unwrap_or_else(|| panic!("{note} in {body}"));
                    100.0 * float(from_index(at)) / float(from_index(body.len()))
                };
                let found = place(&format!(" is {code}.\n"));
                assert!((found - recorded).abs() < 6.0, "{found} for {recorded}");
                let first = place(&format!("code of the {} is the same as that of", queried_place(prompt)));
                assert!((14.0..66.0).contains(&first) && (first - found).abs() > 14.0, "{first} and {found}");
                recorded
            })
            .collect();
        assert_eq!(depths, [20.0, 30.0, 40.0, 50.0, 60.0]);
    }

    #[test]
    fn answers_may_be_left_out_or_be_the_code_alone() {
        let (library, model, out) = (library(), test_tokenizer::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let base = Options { short: true, ..options(library.path()) };
        let made = write(&Options { answers: 0, ..base.clone() }, &tokenizer, out.path()).unwrap();
        assert!(records(&made.train_file).iter().all(|record| record.get("answers").is_none()));
        assert!(Dataset::open(&made.train_file, Some(&tokenizer), &limits(Answers::Given(3))).is_err());
        let data = Dataset::open(&made.train_file, Some(&tokenizer), &limits(Answers::Sampled)).unwrap();
        assert!(data.group(0).reward_data["expected"].is_string());
        let made = write(&base, &tokenizer, out.path()).unwrap();
        for record in records(&made.train_file) {
            let prompt = record["prompt"].as_str().unwrap();
            assert!(prompt.contains("? Reply with the code alone.<|im_end|>"), "{prompt}");
            let right = record["answers"].as_array().unwrap().iter().find(|answer| answer["reward"] == 1.0).unwrap();
            assert_eq!(right["text"], format!("{}<|im_end|>", record["reward_data"]["expected"].as_str().unwrap()));
        }
    }

    #[test]
    fn a_tokenizer_that_counts_in_twos_cannot_make_an_odd_prompt() {
        let (library, model, out) = (library(), test_tokenizer::folder(), tempfile::tempdir().unwrap());
        let file = model.path().join("tokenizer.json");
        let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        // Every character becomes two, line ends too. Special tokens stay, the same number in every prompt.
        json["normalizer"] = serde_json::json!({"type": "Replace", "pattern": {"Regex": "(?m:.)"}, "content": "xx"});
        fs::write(&file, json.to_string()).unwrap();
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        assert_eq!(tokenizer.encode("\n").unwrap().len(), 2);
        let base = Options { train: 1, held_out: 0, ..options(library.path()) };
        let counts: Vec<String> = [4_000, 4_001]
            .into_iter()
            .filter_map(|tokens| {
                let options = Options { prompt_tokens: Tokens(tokens), ..base.clone() };
                write(&options, &tokenizer, out.path()).err().map(|error| error.to_string())
            })
            .collect();
        assert_eq!(counts.len(), 1, "{counts:?}");
        assert!(counts[0].contains("tokens could be made with this tokenizer; the nearest of "), "{}", counts[0]);
    }

    #[test]
    fn train_and_held_out_share_neither_passages_nor_codes() {
        let (library, model, out) = (library(), test_tokenizer::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let summary = write(&options(library.path()), &tokenizer, out.path()).unwrap();
        let (train, held_out) = (parts(&summary.train_file), parts(&summary.held_out_file));
        assert!(train.0.len() > 40 && held_out.0.len() > 20 && train.1.len() > 100 && held_out.1.len() > 50);
        assert!(train.0.is_disjoint(&held_out.0), "codes");
        assert!(train.1.is_disjoint(&held_out.1), "lines of text");
    }

    #[test]
    fn a_seed_fixes_every_byte_and_another_seed_changes_them() {
        let (library, model) = (library(), test_tokenizer::folder());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let made = |seed| {
            let out = tempfile::tempdir().unwrap();
            write(&Options { seed, ..options(library.path()) }, &tokenizer, out.path()).unwrap();
            assert_eq!(fs::read_dir(out.path()).unwrap().count(), 2, "no temporary file remains");
            (fs::read(out.path().join("train.jsonl")).unwrap(), fs::read(out.path().join("held_out.jsonl")).unwrap())
        };
        assert_eq!(made(1), made(1));
        assert_ne!(made(1), made(2));
    }

    #[test]
    fn what_cannot_be_made_is_refused_with_numbers() {
        let (library, model, out) = (library(), test_tokenizer::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let base = options(library.path());
        let depth = |from, to| Depth { from, to };
        for (options, words) in [
            (Options { keys: 2, ..base.clone() }, "keys is 2, it must be from 3 (a code for each answer, and 0 more"),
            (Options { hops: 5, ..base.clone() }, "keys is 6, it must be from 7 (a code for each answer, and 4 more"),
            (Options { hops: 0, ..base.clone() }, "hops is 0, it must be from 1 to 64"),
            (Options { answers: 1, ..base.clone() }, "answers is 1, it must be 0, or at least 2"),
            (Options { depth: depth(50, 101), ..base.clone() }, "depth is 50..101, it must be FROM..TO"),
            (Options { depth: depth(60, 50), ..base.clone() }, "depth is 60..50"),
            (Options { depth: depth(50, 50), hops: 2, ..base.clone() }, "depth is 50..50"),
            (Options { train: 0, ..base.clone() }, "train is 0, it must be at least 1"),
            (Options { prompt_tokens: Tokens(100), ..base.clone() }, "prompt_tokens is 100, it must be at least"),
            (
                Options { prompt_tokens: Tokens(1_000_000), ..base.clone() },
                "the train and held-out prompts need 2000000 tokens of text, but only ",
            ),
            (Options { folders: vec!["/absent".into()], ..base }, "/absent: cannot list it"),
        ] {
            let message = write(&options, &tokenizer, out.path()).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
            assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "nothing half-written remains");
        }
    }
}
