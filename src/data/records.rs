//! JSON lines → checked groups.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde::Deserialize;
use serde::de::Error as _;
use serde_json::{Map, Value as Json};

use super::chat::{Conversation, RESERVED};
use super::error::{Error, Place};
use super::group::{Answer, Answers, Group, Limits, ReplyMarks, ToolMarks};
use super::tokenizer::Tokenizer;
use crate::config::TooLong;
use crate::runtime::reading::Lines;
use crate::runtime::units::{Tokens, from_index};

/// Logarithms of probabilities are at most 0; engines round them to a little above.
const LOGPROB_MAX: f64 = 1e-3;

/// One line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGroup {
    name: Option<String>,
    prompt: Option<String>,
    prompt_ids: Option<Vec<i64>>,
    messages: Option<Vec<Map<String, Json>>>,
    tools: Option<Vec<Json>>,
    chat_template_kwargs: Option<Map<String, Json>>,
    answers: Option<Vec<RawAnswer>>,
    reward_data: Option<Map<String, Json>>,
    tool_marks: Option<ToolMarks>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an answer such as {\"text\": \"4\"}")]
struct RawAnswer {
    text: Option<String>,
    ids: Option<Vec<i64>>,
    parts: Option<Vec<RawPart>>,
    reward: Option<f64>,
    mask: Option<Vec<Json>>,
    logprobs: Option<Vec<Option<f64>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a part such as {\"text\": \"4\"}")]
struct RawPart {
    text: Option<String>,
    ids: Option<Vec<i64>>,
    train: Option<bool>,
}

/// A parser's reason in words of JSON instead of Rust's; the text is one line.
fn json_reason(error: &serde_json::Error, text: &str) -> String {
    let words = error.to_string().replace(" at line 1 column ", " at column ");
    let words = words.replace("expected f64", "expected a number").replace("expected i64", "expected a whole number");
    let has_nan = words.starts_with("expected value") && (text.contains("NaN") || text.contains("Infinity"));
    if has_nan { format!("{words}; JSON has no NaN and no Infinity: write null") } else { words }
}

/// Reads and checks all records, one after another, and passes each with its prompt's token ids to `take`; skips blank lines.
pub(super) fn read(
    path: &Path,
    tokenizer: Option<&Tokenizer>,
    limits: &Limits,
    mut take: impl FnMut(Group, Vec<i64>) -> Result<(), Error>,
) -> Result<(), Error> {
    let file = File::open(path).map_err(Error::io(path, "open it"))?;
    let mut is_empty = true;
    let mut lines = Lines::new(BufReader::new(file));
    while let Some((line, text)) = lines.next_line().map_err(Error::io(path, "read it"))? {
        if !text.trim().is_empty() {
            let record = Record { path, line, tokenizer, limits };
            let (group, prompt_ids) = record.group(text)?;
            is_empty = false;
            take(group, prompt_ids)?;
        }
    }
    if is_empty { Err(Error::Empty { file: path.to_owned() }) } else { Ok(()) }
}

/// Where a record is, and what its checks need.
struct Record<'a> {
    path: &'a Path,
    line: u64,
    tokenizer: Option<&'a Tokenizer>,
    limits: &'a Limits,
}

impl Record<'_> {
    fn group(&self, text: &str) -> Result<(Group, Vec<i64>), Error> {
        let mut raw = self.parse(text)?;
        let (field, ids, reply_marks) = self.prompt(&mut raw)?;
        self.check_ids(field, &ids)?;
        let (prompt_ids, cut) = self.fit_prompt(field, ids)?;
        let answers = raw.answers.unwrap_or_default();
        self.check_answer_count(answers.len())?;
        let answers = answers.into_iter().enumerate().map(|(index, answer)| self.answer(index, answer));
        let answers = answers.collect::<Result<_, _>>()?;
        // As everywhere in a record, null means absent.
        let given = raw.reward_data.unwrap_or_default().into_iter().filter(|(_, value)| !value.is_null());
        let reward_data = given.collect();
        self.check_reward_data(&reward_data)?;
        let tool_marks = raw.tool_marks.unwrap_or_default();
        let is_blank = |mark: &Option<String>| mark.as_ref().is_some_and(String::is_empty);
        if let Some((key, _)) = tool_marks.entries().into_iter().find(|(_, mark)| is_blank(mark)) {
            return Err(self.wrong(&format!("tool_marks.{key}"), "empty", "a text that is not empty"));
        }
        let name = raw.name.unwrap_or_else(|| format!("line {}", self.line));
        let prompt_tokens = Tokens(from_index(prompt_ids.len()));
        Ok((Group { name, prompt_tokens, answers, reward_data, tool_marks, reply_marks, cut }, prompt_ids))
    }

    fn parse(&self, text: &str) -> Result<RawGroup, Error> {
        // serde would read a list as the fields in order, which nobody means.
        let parsed = if text.trim_start().starts_with('[') {
            Err(serde_json::Error::custom("a record is an object, {\"prompt\": …}, and no list"))
        } else {
            serde_json::from_str(text)
        };
        let reason = |error: serde_json::Error| json_reason(&error, text);
        parsed.map_err(|error| Error::Record { file: self.path.to_owned(), line: self.line, reason: reason(error) })
    }

    /// The field that holds the prompt, its token ids, and what stands around replies in it.
    fn prompt(&self, raw: &mut RawGroup) -> Result<(&'static str, Vec<i64>, ReplyMarks), Error> {
        for (field, given) in
            [("tools", raw.tools.is_some()), ("chat_template_kwargs", raw.chat_template_kwargs.is_some())]
        {
            if given && raw.messages.is_none() {
                let wanted = "absent without \"messages\": only a chat template reads it";
                return Err(self.wrong(field, "given", wanted));
            }
        }
        let given = [raw.prompt.is_some(), raw.prompt_ids.is_some(), raw.messages.is_some()];
        self.check_one_given("record", "\"prompt\", \"prompt_ids\" or \"messages\"", &given)?;
        if let Some(text) = &raw.prompt {
            return Ok(("prompt", self.encode("prompt", text)?, ReplyMarks::Plain));
        }
        if let Some(ids) = raw.prompt_ids.take() {
            return Ok(("prompt_ids", ids, ReplyMarks::Plain));
        }
        let conversation = Conversation {
            messages: raw.messages.take().unwrap_or_default(),
            tools: raw.tools.take(),
            kwargs: raw.chat_template_kwargs.take().unwrap_or_default(),
        };
        let ids = self.conversation(&conversation)?;
        Ok(("messages", ids, self.reply_marks(&conversation)))
    }

    /// What the chat template has around a reply, where the policy draws the answers, which may call.
    fn reply_marks(&self, conversation: &Conversation) -> ReplyMarks {
        let is_plain = conversation.tools.is_none() && conversation.kwargs.is_empty();
        let Some(tokenizer) = self.tokenizer.filter(|_| !is_plain && self.limits.answers == Answers::Sampled) else {
            return ReplyMarks::Plain;
        };
        match tokenizer.reply_marks_in(conversation) {
            Ok((start, end)) => ReplyMarks::Own { start, end },
            Err(refusal) => ReplyMarks::Refused { reason: refusal.reason },
        }
    }

    /// Renders a conversation with the chat template and tokenises the text as it is.
    fn conversation(&self, conversation: &Conversation) -> Result<Vec<i64>, Error> {
        const FIELD: &str = "messages";
        if conversation.messages.is_empty() {
            let wanted = "a list of at least one turn, as [{\"role\": \"user\", \"content\": …}]";
            return Err(self.wrong(FIELD, "[]", wanted));
        }
        for (index, message) in conversation.messages.iter().enumerate() {
            let role = message.get("role");
            if role.is_none_or(|role| !role.is_string()) {
                let found = role.map_or_else(|| "absent".to_owned(), Json::to_string);
                return Err(self.wrong(&format!("{FIELD}[{index}].role"), found, "a text, as \"user\""));
            }
        }
        if let Some(name) = RESERVED.into_iter().find(|name| conversation.kwargs.contains_key(*name)) {
            let wanted = "absent: the template gets this name from the record's own fields or from longstraw";
            return Err(self.wrong(&format!("chat_template_kwargs.{name}"), "given", wanted));
        }
        let tokenizer = self.tokenizer(FIELD)?;
        let text = tokenizer.render(conversation).map_err(|refusal| Error::Chat {
            place: self.place(FIELD),
            file: refusal.file,
            reason: refusal.reason,
        })?;
        tokenizer.encode(&text)
    }

    /// Cuts a prompt to the plan's length where `data.too_long` allows it; also returns the number of tokens left out.
    fn fit_prompt(&self, field: &str, ids: Vec<i64>) -> Result<(Vec<i64>, Option<Tokens>), Error> {
        let tokens = Tokens(from_index(ids.len()));
        let max = self.limits.prompt_len_max;
        if tokens <= max {
            return Ok((ids, None));
        }
        let keep = max.index();
        let (head, tail) = match self.limits.too_long {
            TooLong::CutMiddle => (keep.div_ceil(2), keep / 2),
            TooLong::CutLeft => (0, keep),
            TooLong::Refuse => {
                let further = ", or let data.too_long cut it";
                return Err(Error::TooLong {
                    place: self.place(field),
                    tokens,
                    limit: "context.prompt_len",
                    max,
                    further,
                });
            }
        };
        let kept = [&ids[..head], &ids[ids.len() - tail..]].concat();
        Ok((kept, Some(Tokens(tokens.0 - max.0))))
    }

    fn check_answer_count(&self, found: usize) -> Result<(), Error> {
        let place = || self.place("answers");
        match self.limits.answers {
            Answers::Given(group_size) if found == 0 => Err(Error::NoAnswers { place: place(), group_size }),
            Answers::Given(group_size) if found != group_size => {
                Err(Error::GroupSize { place: place(), found, group_size })
            }
            _ => Ok(()),
        }
    }

    fn answer(&self, index: usize, raw: RawAnswer) -> Result<Answer, Error> {
        let parent = format!("answers[{index}]");
        if let Some(reward) = raw.reward.filter(|reward| !reward.is_finite()) {
            return Err(Error::Reward { place: self.place(&format!("{parent}.reward")), reward });
        }
        if raw.mask.is_some() && raw.ids.is_none() {
            let wanted =
                "given with \"ids\" only: the number of tokens of a text is not known; write \"parts\" with \"train\"";
            return Err(self.wrong(&format!("{parent}.mask"), "given", wanted));
        }
        let given = [raw.text.is_some(), raw.ids.is_some(), raw.parts.is_some()];
        self.check_one_given(&parent, "\"text\", \"ids\" or \"parts\"", &given)?;
        let (field, ids, mask);
        if let Some(text) = raw.text {
            field = format!("{parent}.text");
            ids = self.encode(&field, &text)?;
            mask = None;
        } else if let Some(given_ids) = raw.ids {
            field = format!("{parent}.ids");
            mask = raw.mask.map(|mask| self.mask(&parent, &mask, given_ids.len())).transpose()?;
            ids = given_ids;
        } else {
            field = format!("{parent}.parts");
            let (part_ids, part_mask) = self.parts(&field, raw.parts.unwrap_or_default())?;
            ids = part_ids;
            mask = Some(part_mask);
        }
        self.check_ids(&field, &ids)?;
        let tokens = Tokens(from_index(ids.len()));
        let max = self.limits.answer_len_max;
        if tokens > max {
            let place = self.place(&field);
            return Err(Error::TooLong { place, tokens, limit: "context.answer_len", max, further: "" });
        }
        if mask.as_ref().is_some_and(|mask| !mask.contains(&true)) {
            return Err(Error::NothingTrained { place: self.place(&parent) });
        }
        let logprobs = raw.logprobs.map(|logprobs| self.logprobs(&parent, logprobs, ids.len())).transpose()?.flatten();
        // A mask that trains every token says nothing.
        Ok(Answer { ids, reward: raw.reward, mask: mask.filter(|mask| mask.contains(&false)), logprobs })
    }

    /// Flags, written as 0 and 1 or as booleans, one for each id.
    fn mask(&self, parent: &str, flags: &[Json], ids: usize) -> Result<Vec<bool>, Error> {
        if flags.len() != ids {
            let [flags, tokens] = [flags.len(), ids].map(|count| Tokens(from_index(count)));
            return Err(Error::MaskLength { place: self.place(&format!("{parent}.mask")), flags, tokens });
        }
        let flag = |(index, flag): (usize, &Json)| match (flag.as_bool(), flag.as_u64()) {
            (Some(flag), _) => Ok(flag),
            (_, Some(flag @ 0..=1)) => Ok(flag == 1),
            _ => Err(self.wrong(&format!("{parent}.mask[{index}]"), flag.to_string(), "0, 1, true or false")),
        };
        flags.iter().enumerate().map(flag).collect()
    }

    /// Log-probabilities, one or null for each token; `None` where all are null.
    fn logprobs(
        &self,
        parent: &str,
        logprobs: Vec<Option<f64>>,
        tokens: usize,
    ) -> Result<Option<Vec<Option<f64>>>, Error> {
        let field = format!("{parent}.logprobs");
        if logprobs.len() != tokens {
            let [numbers, tokens] = [logprobs.len(), tokens].map(|count| Tokens(from_index(count)));
            return Err(Error::LogprobCount { place: self.place(&field), numbers, tokens });
        }
        let is_one = |logprob: &f64| logprob.is_finite() && *logprob <= LOGPROB_MAX;
        if let Some(index) = logprobs.iter().position(|logprob| !logprob.as_ref().is_none_or(is_one)) {
            let found = logprobs[index].unwrap_or_default().to_string();
            return Err(self.wrong(
                &format!("{field}[{index}]"),
                found,
                "null or the logarithm of a probability, at most 0",
            ));
        }
        Ok(Some(logprobs).filter(|logprobs| logprobs.iter().any(Option::is_some)))
    }

    /// The ids of all parts, each tokenised by itself, and for each id whether it is trained.
    fn parts(&self, parent: &str, parts: Vec<RawPart>) -> Result<(Vec<i64>, Vec<bool>), Error> {
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for (index, part) in parts.into_iter().enumerate() {
            let field = format!("{parent}[{index}]");
            self.check_one_given(&field, "\"text\" or \"ids\"", &[part.text.is_some(), part.ids.is_some()])?;
            let part_ids = match part.text {
                Some(text) => self.encode(&format!("{field}.text"), &text)?,
                None => part.ids.unwrap_or_default(),
            };
            mask.extend(std::iter::repeat_n(part.train.unwrap_or(true), part_ids.len()));
            ids.extend(part_ids);
        }
        Ok((ids, mask))
    }

    /// Checks the kinds of those keys that rewards know.
    fn check_reward_data(&self, data: &Map<String, Json>) -> Result<(), Error> {
        let texts =
            |value: &Json| value.as_array().is_some_and(|all| !all.is_empty() && all.iter().all(Json::is_string));
        for (key, value) in data {
            let (fits, wanted) = match key.as_str() {
                "expected" => (
                    value.is_string() || value.is_number() || value.is_boolean() || texts(value),
                    "a text, a number, true, false, or a list of at least one text",
                ),
                "pattern" | "question" => (value.is_string(), "a text"),
                _ => (true, ""),
            };
            if !fits {
                return Err(self.wrong(&format!("reward_data.{key}"), value.to_string(), wanted));
            }
        }
        Ok(())
    }

    /// Exactly one of several fields is given.
    fn check_one_given(&self, field: &str, names: &'static str, given: &[bool]) -> Result<(), Error> {
        let found = match given.iter().filter(|given| **given).count() {
            0 => "none is given",
            1 => return Ok(()),
            _ => "more than one is given",
        };
        Err(Error::OneOf { place: self.place(field), names, found })
    }

    /// There is at least one id, and each has a row of the embedding.
    fn check_ids(&self, field: &str, ids: &[i64]) -> Result<(), Error> {
        if ids.is_empty() {
            return Err(Error::NoTokens { place: self.place(field) });
        }
        let vocab_size = self.limits.vocab_size;
        let outside = |id: &i64| u64::try_from(*id).map_or(true, |id| id >= vocab_size);
        match ids.iter().position(outside) {
            None => Ok(()),
            Some(index) => {
                Err(Error::OutsideVocabulary { place: self.place(field), index, id: ids[index], vocab_size })
            }
        }
    }

    fn tokenizer(&self, field: &str) -> Result<&Tokenizer, Error> {
        self.tokenizer.ok_or_else(|| Error::NoTokenizer { place: self.place(field) })
    }

    fn encode(&self, field: &str, text: &str) -> Result<Vec<i64>, Error> {
        self.tokenizer(field)?.encode(text)
    }

    fn place(&self, field: &str) -> Place {
        Place { file: self.path.to_owned(), line: self.line, field: field.to_owned() }
    }

    fn wrong(&self, field: &str, found: impl Into<String>, wanted: &'static str) -> Error {
        Error::Field { place: self.place(field), found: found.into(), wanted }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::super::dataset::Dataset;
    use super::super::test_tokenizer;
    use super::*;

    const LIMITS: Limits = Limits {
        prompt_len_max: Tokens(8),
        answer_len_max: Tokens(4),
        vocab_size: 300,
        answers: Answers::Given(2),
        too_long: TooLong::Refuse,
    };

    fn open(text: &str) -> Result<Dataset, String> {
        open_as(text, &LIMITS)
    }

    fn open_as(text: &str, limits: &Limits) -> Result<Dataset, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let folder = test_tokenizer::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let opened = Dataset::open(file.path(), Some(&tokenizer), limits);
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
        assert_eq!((one.prompt_tokens, data.prompt_ids(0).unwrap()), (Tokens(2), data.prompt_ids(1).unwrap()));
        assert_eq!(one.answers[0].reward, Some(1.0));
        assert_eq!((one.answers[1].reward, two.answers[0].reward), (None, None));
        assert_eq!(one.answers[1].ids[1], test_tokenizer::END);
    }

    #[test]
    fn every_broken_record_is_refused_with_file_line_field_and_numbers() {
        let good = r#"{"prompt_ids": [1], "answers": [{"ids": [1]}, {"ids": [2]}]}"#;
        refused("", "FILE: holds no record");
        for (line, words) in [
            (r#"["name", "a prompt", null]"#, "not a record: a record is an object"),
            ("{", "not a record: EOF"),
            (r#"{"prompt_ids": [1], "answers": [], "colour": 1}"#, "not a record: unknown field `colour`"),
            (
                r#"{"prompt_ids": [1], "answers": [{"ids": [1], "rewards": 1}]}"#,
                "not a record: unknown field `rewards`",
            ),
            (
                r#"{"prompt_ids": [1], "answers": [{"ids": [1], "reward": NaN}]}"#,
                "not a record: expected value at column 56; JSON has no NaN and no Infinity: write null",
            ),
            (
                r#"{"prompt_ids": [1], "answers": [{"ids": [1], "reward": "x"}]}"#,
                "string \"x\", expected a number at column",
            ),
            (r#"{"prompt_ids": [1], "answers": ["4"]}"#, "string \"4\", expected an answer such as {\"text\": \"4\"}"),
            (r#"{"prompt_ids": [1], "answers": [{"ids": [1], "reward": 1e999}]}"#, "not a record: number out of range"),
            (r#"{"answers": []}"#, r#"record: give one of "prompt", "prompt_ids" or "messages"; none is given"#),
            (r#"{"prompt": "a", "messages": [], "answers": []}"#, "; more than one is given"),
            (
                r#"{"prompt_ids": [1], "answers": [{"ids": [1], "text": "a"}, {"ids": [2]}]}"#,
                r#"answers[0]: give one of "text", "ids" or "parts"; more than one is given"#,
            ),
            (r#"{"prompt_ids": [1], "answers": [{"ids": [1]}, {"ids": []}]}"#, "answers[1].ids: is empty"),
            (r#"{"prompt": "", "answers": []}"#, "prompt: is empty"),
            (
                r#"{"prompt": "abcdefghi", "answers": []}"#,
                "prompt: 9 tokens, the plan's context.prompt_len is 8; shorten it or raise context.prompt_len, or let \
                 data.too_long cut it",
            ),
            (
                r#"{"prompt_ids": [1], "answers": [{"ids": [1]}, {"ids": [1, 2, 3, 4, 5]}]}"#,
                "answers[1].ids: 5 tokens, the plan's context.answer_len is 4",
            ),
            (
                r#"{"prompt_ids": [1, 300], "answers": []}"#,
                "prompt_ids: token 1 has id 300, outside the vocabulary of 300",
            ),
            (r#"{"prompt_ids": [-1], "answers": []}"#, "prompt_ids: token 0 has id -1, outside the vocabulary"),
            (r#"{"prompt_ids": [1], "answers": [{"ids": [1]}]}"#, "answers: 1 answers, but grpo.group_size is 2"),
        ] {
            let message = open(&format!("{good}\n{line}\n")).unwrap_err();
            assert!(message.starts_with("FILE, line 2") && message.contains(words), "{message}");
        }
    }

    /// A record with the given prompt and first answer, and a second answer.
    fn two(prompt: &str, first: &str) -> String {
        format!("{{{prompt}, \"answers\": [{first}, {{\"ids\": [1, 2]}}]}}")
    }

    #[test]
    fn messages_go_through_the_models_own_template() {
        let limits = Limits { prompt_len_max: Tokens(400), answers: Answers::Sampled, ..LIMITS };
        let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
        let data = open_as(&chat.to_string(), &limits).unwrap();
        let folder = test_tokenizer::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(*data.prompt_ids(0).unwrap(), tokenizer.chat_prompt("hi").unwrap());
        let refused = |record: Json, words: &str| {
            let message = open_as(&record.to_string(), &limits).unwrap_err();
            assert!(message.contains(words), "{message}");
        };
        refused(json!({"messages": []}), "line 1, messages: is []; it must be a list of at least one turn");
        refused(json!({"messages": [{"content": "hi"}]}), "messages[0].role: is absent; it must be a text");
        refused(json!({"messages": [{"role": 1}]}), "messages[0].role: is 1; it must be a text");
        refused(json!({"messages": ["hi"]}), "line 1: not a record: invalid type: string \"hi\", expected a map");
        refused(json!({"prompt": "hi", "tools": []}), "line 1, tools: is given; it must be absent without");
        let mut reserved = chat.clone();
        reserved["chat_template_kwargs"] = json!({"messages": 1});
        refused(reserved, "chat_template_kwargs.messages: is given; it must be absent");
    }

    #[test]
    fn a_template_gets_tools_and_kwargs_and_its_refusal_names_file_and_line() {
        let folder = test_tokenizer::folder();
        let template = "{% if loud is not defined %}{{ raise_exception('say how loud') }}{% endif %}\
                        {{ loud }}{{ tools | length }}{{ messages[0].content }}";
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let file = folder.path().join("train.jsonl");
        let limits = Limits { answers: Answers::Sampled, ..LIMITS };
        let opened = |record: &Json| {
            std::fs::write(&file, format!("\n{record}\n")).unwrap();
            Dataset::open(&file, Some(&tokenizer), &limits)
        };
        let mut record = json!({"messages": [{"role": "user", "content": "hi"}], "tools": [{}, {}]});
        let message = opened(&record).unwrap_err().to_string();
        for words in ["train.jsonl, line 2, messages: ", "chat_template.jinja says: line 1: say how loud"] {
            assert!(message.contains(words), "{message}");
        }
        record["chat_template_kwargs"] = json!({"loud": true});
        assert_eq!(tokenizer.decode(&opened(&record).unwrap().prompt_ids(0).unwrap()).unwrap(), "True2hi");
    }

    #[test]
    fn masks_and_parts_say_which_tokens_are_trained() {
        let prompt = r#""prompt_ids": [1]"#;
        let mask = |first: &str| open(&two(prompt, first)).unwrap().group(0).answers[0].clone();
        let masked = mask(r#"{"ids": [7, 8, 9], "mask": [1, false, 0]}"#);
        assert_eq!(masked.mask, Some(vec![true, false, false]));
        assert_eq!(mask(r#"{"ids": [7, 8], "mask": [1, true]}"#).mask, None, "every token is trained");
        let parts = mask(
            r#"{"parts": [{"ids": [9]}, {"text": "ab", "train": false}, {"text": "", "train": true}, {"text": "c", "train": true}]}"#,
        );
        let ids = mask(r#"{"text": "abc"}"#).ids;
        assert_eq!(parts.ids, [vec![9], ids].concat());
        assert_eq!(parts.mask, Some(vec![true, false, false, true]));
        for (first, words) in [
            (r#"{"ids": [1], "mask": [1, 0]}"#, "answers[0].mask: 2 flags for 1 ids; write one for each id"),
            (r#"{"ids": [1], "mask": [2]}"#, "answers[0].mask[0]: is 2; it must be 0, 1, true or false"),
            (r#"{"text": "a", "mask": [1]}"#, "answers[0].mask: is given; it must be given with \"ids\" only"),
            (r#"{"ids": [1, 2], "mask": [0, 0]}"#, "answers[0]: no token of the answer is trained"),
            (r#"{"parts": [{"text": "a", "train": false}]}"#, "answers[0]: no token of the answer is trained"),
            (r#"{"parts": []}"#, "answers[0].parts: is empty"),
            (r#"{"parts": [{"train": true}]}"#, "answers[0].parts[0]: give one of \"text\" or \"ids\"; none is given"),
            (
                r#"{"parts": [{"text": "abcde"}]}"#,
                "answers[0].parts: 5 tokens, the plan's context.answer_len is 4; shorten it or raise context.answer_len",
            ),
            (r#"{"parts": [{"ids": [300]}]}"#, "answers[0].parts: token 0 has id 300"),
        ] {
            refused(&two(prompt, first), words);
        }
    }

    #[test]
    fn log_probabilities_are_one_for_each_token_however_an_answer_is_written() {
        let prompt = r#""prompt_ids": [1]"#;
        let logprobs = |first: &str| open(&two(prompt, first)).unwrap().group(0).answers[0].logprobs.clone();
        assert_eq!(logprobs(r#"{"ids": [7, 8], "logprobs": [-0.5, null]}"#), Some(vec![Some(-0.5), None]));
        assert_eq!(
            logprobs(r#"{"text": "abc", "logprobs": [-1, 0, -2.5]}"#),
            Some([-1.0, 0.0, -2.5].map(Some).to_vec())
        );
        let parts = r#"{"parts": [{"text": "a"}, {"ids": [9], "train": false}], "logprobs": [-1, null]}"#;
        assert_eq!(logprobs(parts), Some(vec![Some(-1.0), None]));
        for nothing in [r#"{"ids": [7, 8], "logprobs": [null, null]}"#, r#"{"ids": [7], "logprobs": null}"#] {
            assert_eq!(logprobs(nothing), None, "{nothing}");
        }
        for (first, words) in [
            (
                r#"{"text": "ab", "logprobs": [-1]}"#,
                "line 1, answers[0].logprobs: 1 log-probabilities for the 2 tokens that this tokenizer makes of the answer",
            ),
            (r#"{"ids": [7], "logprobs": []}"#, "answers[0].logprobs: 0 log-probabilities for the 1 tokens"),
            (r#"{"ids": [7], "logprobs": [0.5]}"#, "answers[0].logprobs[0]: is 0.5; it must be null or the logarithm"),
            (r#"{"ids": [7], "logprobs": ["-1"]}"#, "line 1: not a record"),
        ] {
            refused(&two(prompt, first), words);
        }
        let digest = |first: &str| open(&two(prompt, first)).unwrap().digest().to_owned();
        assert_ne!(digest(r#"{"ids": [7]}"#), digest(r#"{"ids": [7], "logprobs": [-1]}"#));
        assert_ne!(digest(r#"{"ids": [7], "logprobs": [-1]}"#), digest(r#"{"ids": [7], "logprobs": [-2]}"#));
    }

    #[test]
    fn marks_of_tools_are_kept_and_are_texts() {
        let line = |marks: &str| two(&format!(r#""prompt_ids": [1], "tool_marks": {marks}"#), r#"{"ids": [1]}"#);
        let marks = |marks: &str| open(&line(marks)).unwrap().group(0).tool_marks.clone();
        assert_eq!(marks(r#"{"call_end": "]"}"#), ToolMarks { call_end: Some("]".to_owned()), ..ToolMarks::default() });
        assert_eq!(marks("null"), ToolMarks::default());
        refused(&line(r#"{"call_end": ""}"#), "tool_marks.call_end: is empty; it must be a text that is not empty");
        refused(&line(r#"{"end": "]"}"#), "unknown field `end`");
        let digest = |marks: &str| open(&line(marks)).unwrap().digest().to_owned();
        let absent = digest("null");
        assert_eq!(absent, open(&two(r#""prompt_ids": [1]"#, r#"{"ids": [1]}"#)).unwrap().digest());
        assert_ne!(digest(r#"{"call_end": "]"}"#), absent);
        assert_ne!(digest(r#"{"call_end": "]"}"#), digest(r#"{"call_start": "]"}"#));
    }

    #[test]
    fn reward_data_is_kept_and_its_well_known_keys_are_checked() {
        let line = |data: &str| two(&format!(r#""prompt_ids": [1], "reward_data": {data}"#), r#"{"ids": [1]}"#);
        let data = open(&line(r#"{"expected": ["a", "b"], "pattern": "x+", "question": "q?", "tests": [1]}"#)).unwrap();
        assert_eq!(data.group(0).reward_data["tests"], json!([1]));
        assert!(open(&two(r#""prompt_ids": [1]"#, r#"{"ids": [1]}"#)).unwrap().group(0).reward_data.is_empty());
        for value in ["\"a\"", "3.5", "true"] {
            open(&line(&format!(r#"{{"expected": {value}}}"#))).unwrap();
        }
        let absent = open(&line(r#"{"expected": null, "pattern": null, "question": null, "mine": null}"#)).unwrap();
        assert!(absent.group(0).reward_data.is_empty(), "null means absent");
        for value in ["[]", "[1]", "{}"] {
            let words = format!("line 1, reward_data.expected: is {value}; it must be a text, a number");
            refused(&line(&format!(r#"{{"expected": {value}}}"#)), &words);
        }
        refused(&line(r#"{"pattern": 1}"#), "reward_data.pattern: is 1; it must be a text");
        refused(&line(r#"{"question": []}"#), "reward_data.question: is []; it must be a text");
        refused(&line("[]"), "line 1: not a record: invalid type: sequence, expected a map");
    }

    #[test]
    fn a_long_prompt_is_cut_to_the_plans_length_and_counted() {
        let text = (0..13).map(|id| id.to_string()).collect::<Vec<_>>().join(", ");
        let text = format!(
            "{}\n{}",
            two(&format!("\"prompt_ids\": [{text}]"), r#"{"ids": [1]}"#),
            two("\"prompt_ids\": [1, 2, 3, 4, 5, 6, 7, 8]", r#"{"ids": [1]}"#)
        );
        refused(&text, "line 1, prompt_ids: 13 tokens, the plan's context.prompt_len is 8");
        for (too_long, prompt_len_max, kept) in [
            (TooLong::CutMiddle, 8, vec![0, 1, 2, 3, 9, 10, 11, 12]),
            (TooLong::CutMiddle, 9, vec![0, 1, 2, 3, 4, 9, 10, 11, 12]),
            (TooLong::CutMiddle, 1, vec![0]),
            (TooLong::CutLeft, 8, vec![5, 6, 7, 8, 9, 10, 11, 12]),
        ] {
            let data = open_as(&text, &Limits { too_long, prompt_len_max: Tokens(prompt_len_max), ..LIMITS }).unwrap();
            assert_eq!(*data.prompt_ids(0).unwrap(), kept);
            assert_eq!(data.group(0).cut, Some(Tokens(13 - prompt_len_max)));
        }
        let data = open_as(&text, &Limits { too_long: TooLong::CutLeft, ..LIMITS }).unwrap();
        assert_eq!(data.group(1).cut, None);
        assert_eq!(
            data.cuts().unwrap().to_string(),
            "1 of 2 prompts is longer than context.prompt_len and was cut as data.too_long says: 5 tokens left out, at most \
             5 of one prompt"
        );
        assert_eq!(open(&two("\"prompt\": \"a\"", r#"{"ids": [1]}"#)).unwrap().cuts(), None);
    }

    #[test]
    fn answers_may_be_left_out_only_if_the_policy_answers() {
        let limits = Limits { answers: Answers::Sampled, ..LIMITS };
        for answers in ["", r#", "answers": []"#, r#", "answers": [{"ids": [1]}]"#] {
            open_as(&format!(r#"{{"prompt_ids": [1]{answers}}}"#), &limits).unwrap();
        }
        for answers in ["", r#", "answers": []"#] {
            refused(
                &format!(r#"{{"prompt_ids": [1]{answers}}}"#),
                "line 1, answers: none is given, but grpo.group_size is 2; write as many, or set rollout.sample = true",
            );
        }
        let broken = open_as(r#"{"prompt_ids": [1], "answers": [{"ids": [300]}]}"#, &limits).unwrap_err();
        assert!(broken.contains("answers[0].ids: token 0 has id 300"), "{broken}");
    }

    #[test]
    fn the_digest_covers_masks_and_reward_data_but_not_the_order_of_keys() {
        let digest = |prompt: &str, first: &str| open(&two(prompt, first)).unwrap().digest().to_owned();
        let (prompt, answer) = (r#""prompt_ids": [1]"#, r#"{"ids": [1, 2]}"#);
        let plain = digest(prompt, answer);
        assert_eq!(plain, digest(prompt, r#"{"ids": [1, 2], "mask": [1, 1]}"#));
        let masked = digest(prompt, r#"{"ids": [1, 2], "mask": [1, 0]}"#);
        assert_ne!(plain, masked);
        assert_ne!(masked, digest(prompt, r#"{"ids": [1, 2], "mask": [0, 1]}"#));
        let judged = |data: &str| digest(&format!(r#"{prompt}, "reward_data": {data}"#), answer);
        assert_eq!(plain, judged("{}"));
        assert_ne!(plain, judged(r#"{"expected": "1"}"#));
        assert_ne!(judged(r#"{"expected": "1"}"#), judged(r#"{"expected": "2"}"#));
        assert_eq!(judged(r#"{"a": {"x": 1, "y": 2}, "b": 1}"#), judged(r#"{"b": 1, "a": {"y": 2, "x": 1}}"#));
    }

    #[test]
    fn a_byte_that_is_no_text_is_told_with_line_and_offset_and_a_byte_order_mark_is_passed_over() {
        let record = two(r#""prompt_ids": [1]"#, r#"{"ids": [1]}"#);
        assert_eq!(open(&format!("\u{feff}{record}\n")).unwrap().len(), 1);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(format!("{record}\n").as_bytes()).unwrap();
        file.write_all(b"{\"name\": \"caf\xe9\"}\n").unwrap();
        let message = Dataset::open(file.path(), None, &LIMITS).unwrap_err().to_string();
        let words = format!("line 2, byte 14 of the line (offset {} of the file): 0xe9 is no UTF-8", record.len() + 14);
        assert!(message.contains(&words), "{message}");
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
