//! JSON lines → checked groups.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use super::{Answer, Error, Group, Limits, Place, Tokenizer};
use crate::units::{Tokens, from_index};

/// A line as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGroup {
    name: Option<String>,
    prompt: Option<String>,
    prompt_ids: Option<Vec<i64>>,
    answers: Vec<RawAnswer>,
}

/// An answer as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAnswer {
    text: Option<String>,
    ids: Option<Vec<i64>>,
    reward: Option<f64>,
}

/// Reads and checks all records; blank lines are passed over.
pub(super) fn read(path: &Path, tokenizer: Option<&Tokenizer>, limits: &Limits) -> Result<Vec<Group>, Error> {
    let io = |action| move |source| Error::Io { file: path.to_owned(), action, source };
    let file = File::open(path).map_err(io("open it"))?;
    let mut groups = Vec::new();
    for (line, text) in (1..).zip(BufReader::new(file).lines()) {
        let text = text.map_err(io("read it"))?;
        if !text.trim().is_empty() {
            let record = Record { path, line, tokenizer, limits };
            groups.push(record.group(&text)?);
        }
    }
    if groups.is_empty() {
        return Err(Error::Empty { file: path.to_owned() });
    }
    Ok(groups)
}

/// One line and what it is judged by.
struct Record<'a> {
    path: &'a Path,
    line: u64,
    tokenizer: Option<&'a Tokenizer>,
    limits: &'a Limits,
}

/// A field that is either text or ids, and how long it may be.
struct Source {
    names: (&'static str, &'static str),
    text: Option<String>,
    ids: Option<Vec<i64>>,
    max: (&'static str, Tokens),
}

impl Record<'_> {
    fn group(&self, text: &str) -> Result<Group, Error> {
        let raw: RawGroup = serde_json::from_str(text).map_err(|source| Error::Record {
            file: self.path.to_owned(),
            line: self.line,
            source,
        })?;
        let prompt = Source {
            names: ("prompt", "prompt_ids"),
            text: raw.prompt,
            ids: raw.prompt_ids,
            max: ("context.prompt_len", self.limits.prompt_len_max),
        };
        let prompt_ids = self.ids("", prompt)?;
        if raw.answers.len() != self.limits.group_size {
            let (found, group_size) = (raw.answers.len(), self.limits.group_size);
            return Err(Error::GroupSize { place: self.place("answers"), found, group_size });
        }
        let answers = raw.answers.into_iter().enumerate();
        let answers = answers.map(|(index, answer)| self.answer(index, answer)).collect::<Result<_, _>>()?;
        let name = raw.name.unwrap_or_else(|| format!("line {}", self.line));
        Ok(Group { name, prompt_ids, answers })
    }

    fn answer(&self, index: usize, raw: RawAnswer) -> Result<Answer, Error> {
        let before = format!("answers[{index}].");
        if let Some(reward) = raw.reward.filter(|reward| !reward.is_finite()) {
            return Err(Error::Reward { place: self.place(&format!("{before}reward")), reward });
        }
        let source = Source {
            names: ("text", "ids"),
            text: raw.text,
            ids: raw.ids,
            max: ("context.answer_len", self.limits.answer_len_max),
        };
        Ok(Answer { ids: self.ids(&before, source)?, reward: raw.reward })
    }

    /// The ids of a field, within the limits; `before` is the path of its parent.
    fn ids(&self, before: &str, source: Source) -> Result<Vec<i64>, Error> {
        let (one, other) = source.names;
        let (field, ids) = match (source.text, source.ids) {
            (Some(text), None) => {
                let place = self.place(&format!("{before}{one}"));
                let tokenizer = self.tokenizer.ok_or(Error::NoTokenizer { place })?;
                (one, tokenizer.encode(&text)?)
            }
            (None, Some(ids)) => (other, ids),
            (text, _) => {
                let found = if text.is_some() { "not both" } else { "neither stands there" };
                let parent = before.trim_end_matches('.');
                let place = self.place(if parent.is_empty() { "record" } else { parent });
                return Err(Error::Either { place, one, other, found });
            }
        };
        let place = || self.place(&format!("{before}{field}"));
        let (limit, max) = source.max;
        let tokens = Tokens(from_index(ids.len()));
        if ids.is_empty() {
            return Err(Error::NoTokens { place: place() });
        }
        if tokens > max {
            return Err(Error::TooLong { place: place(), tokens, limit, max });
        }
        let vocab_size = self.limits.vocab_size;
        let outside = |id: &i64| u64::try_from(*id).map_or(true, |id| id >= vocab_size);
        match ids.iter().position(outside) {
            None => Ok(ids),
            Some(index) => Err(Error::OutsideVocabulary { place: place(), index, id: ids[index], vocab_size }),
        }
    }

    fn place(&self, field: &str) -> Place {
        Place { file: self.path.to_owned(), line: self.line, field: field.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::{Dataset, sample};
    use super::*;

    const LIMITS: Limits =
        Limits { prompt_len_max: Tokens(8), answer_len_max: Tokens(4), vocab_size: 300, group_size: 2 };

    fn open(text: &str) -> Result<Dataset, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let folder = sample::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let opened = Dataset::open(file.path(), Some(&tokenizer), &LIMITS);
        opened.map_err(|error| error.to_string().replace(&file.path().display().to_string(), "FILE"))
    }

    fn refused(text: &str, words: &str) {
        let message = open(text).unwrap_err();
        assert!(message.contains(words), "{message}");
    }

    #[test]
    fn text_and_ids_give_the_same_group() {
        let text = concat!(
            r#"{"prompt": "ab", "answers": [{"text": "c", "reward": 1}, {"text": "d<|im_end|>"}]}"#,
            "\n\n",
            r#"{"name": "two", "prompt_ids": [97, 98], "answers": [{"ids": [99], "reward": null}, {"ids": [100, 2]}]}"#,
        );
        let data = open(text).unwrap();
        assert_eq!((data.len(), data.prompt_len_max()), (2, Tokens(2)));
        let (one, two) = (data.group(0), data.group(1));
        assert_eq!((one.name.as_str(), two.name.as_str()), ("line 1", "two"));
        assert_eq!(one.prompt_ids.len(), 2);
        assert_eq!(one.answers[0].reward, Some(1.0));
        assert_eq!((one.answers[1].reward, two.answers[0].reward), (None, None));
        assert_eq!(one.answers[1].ids[1], sample::END);
    }

    #[test]
    fn every_broken_record_is_refused_with_file_line_field_and_numbers() {
        let good = r#"{"prompt_ids": [1], "answers": [{"ids": [1]}, {"ids": [2]}]}"#;
        let second = |line: &str| format!("{good}\n{line}\n");
        refused("", "FILE: holds no record");
        refused(&second("{"), "FILE, line 2: not a record: EOF");
        refused(&second(r#"{"prompt_ids": [1], "answers": [], "colour": 1}"#), "unknown field `colour`");
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1], "rewards": 1}, {"ids": [2]}]}"#),
            "line 2: not a record: unknown field `rewards`",
        );
        refused(&second(r#"{"answers": []}"#), r#"line 2, record: give either "prompt" or "prompt_ids", neither"#);
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1], "text": "a"}, {"ids": [2]}]}"#),
            r#"line 2, answers[0]: give either "text" or "ids", not both"#,
        );
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1]}, {"ids": []}]}"#),
            "FILE, line 2, answers[1].ids: is empty",
        );
        refused(&second(r#"{"prompt": "", "answers": []}"#), "line 2, prompt: is empty");
        refused(
            &second(r#"{"prompt": "abcdefghi", "answers": []}"#),
            "line 2, prompt: 9 tokens, the plan's context.prompt_len is 8",
        );
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1]}, {"ids": [1, 2, 3, 4, 5]}]}"#),
            "line 2, answers[1].ids: 5 tokens, the plan's context.answer_len is 4",
        );
        refused(
            &second(r#"{"prompt_ids": [1, 300], "answers": []}"#),
            "line 2, prompt_ids: token 1 has id 300, outside the vocabulary of 300",
        );
        refused(&second(r#"{"prompt_ids": [-1], "answers": []}"#), "token 0 has id -1, outside the vocabulary");
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1]}]}"#),
            "line 2, answers: 1 answers, but grpo.group_size is 2",
        );
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1], "reward": NaN}, {"ids": [1]}]}"#),
            "line 2: not a record: expected value",
        );
        refused(
            &second(r#"{"prompt_ids": [1], "answers": [{"ids": [1], "reward": 1e999}, {"ids": [1]}]}"#),
            "line 2: not a record: number out of range",
        );
    }

    #[test]
    fn text_without_a_tokenizer_is_refused() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(br#"{"prompt": "a", "answers": []}"#).unwrap();
        let error = Dataset::open(file.path(), None, &LIMITS).unwrap_err();
        assert!(error.to_string().contains("line 1, prompt: is text, but no tokenizer"), "{error}");
    }

    #[test]
    fn an_absent_file_is_named() {
        let error = Dataset::open(Path::new("absent.jsonl"), None, &LIMITS).unwrap_err();
        assert!(error.to_string().starts_with("absent.jsonl: cannot open it"), "{error}");
    }
}
