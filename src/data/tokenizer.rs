//! The tokenizer of an HF folder, and its chat template.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};
use tokenizers::Tokenizer as Backend;

use super::chat::{Conversation, Refusal, Template};
use super::error::Error;
use crate::runtime::digest::sha256_hex;
use crate::runtime::reading;
use crate::runtime::units::from_index;

/// An assistant's text that marks where a rendered answer ends.
const ANSWER_MARK: &str = "longstraw-answer";

/// A tool's text that marks where a rendered reply stands.
const REPLY_MARK: &str = "longstraw-reply";

/// The tokenizer of an HF folder.
pub struct Tokenizer {
    file: PathBuf,
    /// SHA-256 of tokenizer.json.
    digest: String,
    backend: Backend,
    template: Result<Template, Refusal>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("file", &self.file).field("template", &self.template).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads tokenizer.json of `folder`, and its chat template if there is one.
    ///
    /// # Errors
    /// When tokenizer.json is absent or does not load. A missing or faulty chat template fails only the functions that
    /// need it.
    pub fn open(folder: &Path) -> Result<Tokenizer, Error> {
        let file = folder.join("tokenizer.json");
        let text = reading::text(&file).map_err(Error::io(&file, "read it"))?;
        let mut backend = Backend::from_bytes(&text)
            .map_err(|reason| refused(&file, "is not a tokenizer that can be loaded", &reason))?;
        // A file may configure truncation and padding; neither may happen here.
        let whole = backend.with_truncation(None).map(|backend| backend.with_padding(None));
        whole.map_err(|reason| refused(&file, "has a truncation that cannot be turned off", &reason))?;
        Ok(Tokenizer { file, digest: sha256_hex(&text), backend, template: Template::open(folder) })
    }

    /// Whether the chat template may write today's date, so that a conversation has other ids tomorrow.
    #[must_use]
    pub fn writes_the_date(&self) -> bool {
        self.template.as_ref().is_ok_and(Template::reads_the_date)
    }

    /// A digest of everything that decides the ids of a text or a conversation: 64 hexadecimal digits. Of a template that
    /// writes the date, the day is a part.
    pub(super) fn identity(&self) -> String {
        let template = self.template.as_ref().ok();
        let today = self.writes_the_date().then(|| chrono::Local::now().format("%Y-%m-%d").to_string());
        sha256_hex(serde_json::json!([self.digest, template.map(Template::identity), today]).to_string())
    }

    /// The ids of `text`. Adds nothing around it; recognises special tokens written in it.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, Error> {
        let encoding = self
            .backend
            .encode_fast(text, false)
            .map_err(|reason| refused(&self.file, "cannot encode a text", &reason))?;
        Ok(encoding.get_ids().iter().map(|id| i64::from(*id)).collect())
    }

    /// The text of `ids`, special tokens included.
    ///
    /// # Errors
    /// When an id is negative, or the tokenizer refuses.
    pub fn decode(&self, ids: &[i64]) -> Result<String, Error> {
        const ACTION: &str = "cannot decode ids";
        let ids: Vec<u32> = ids
            .iter()
            .map(|id| u32::try_from(*id).map_err(|_| refused(&self.file, ACTION, &format!("{id} is no token id"))))
            .collect::<Result<_, _>>()?;
        self.backend.decode(&ids, false).map_err(|reason| refused(&self.file, ACTION, &reason))
    }

    /// The text of an answer as the model wrote it: special tokens are shown, but for one of `ends` as the last token. An id
    /// without a token, which an embedding may have a row for, is shown as `<|id 151999|>`.
    ///
    /// # Errors
    /// When an id is negative, or the tokenizer refuses.
    pub fn answer_text(&self, ids: &[i64], ends: &[i64]) -> Result<String, Error> {
        let written = match ids.split_last() {
            Some((last, before)) if ends.contains(last) => before,
            _ => ids,
        };
        let has_token = |id: i64| u32::try_from(id).map_or(true, |id| self.backend.id_to_token(id).is_some());
        let mut text = String::new();
        for run in written.chunk_by(|one, next| has_token(*one) == has_token(*next)) {
            if has_token(run[0]) {
                text.push_str(&self.decode(run)?);
            } else {
                text.extend(run.iter().map(|id| format!("<|id {id}|>")));
            }
        }
        Ok(text)
    }

    /// Number of tokens, added ones included; the model's embedding may have more rows.
    #[must_use]
    pub fn vocabulary(&self) -> u64 {
        from_index(self.backend.get_vocab_size(true))
    }

    /// The id of the token with exactly this text.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<i64> {
        self.backend.token_to_id(token).map(i64::from)
    }

    /// The texts of all added tokens in id order; a corpus must not contain them by accident.
    #[must_use]
    pub fn added(&self) -> Vec<String> {
        let mut added: Vec<_> = self.backend.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        added.into_iter().map(|(_, token)| token.content).collect()
    }

    /// The conversation as the model's chat template writes it, open for the assistant's answer.
    pub(super) fn render(&self, conversation: &Conversation) -> Result<String, Refusal> {
        let template = self.template.as_ref().map_err(Clone::clone)?;
        template.check_reads(conversation)?;
        template.render(conversation, true)
    }

    /// One user turn as the model's chat template writes it, open for the assistant's answer. There is no system turn, so
    /// the template may add its default one.
    ///
    /// # Errors
    /// When the folder has no chat template, or the template refuses.
    pub fn chat_text(&self, user: &str) -> Result<String, Error> {
        let conversation = Conversation { messages: vec![turn("user", user)], ..Conversation::default() };
        self.render(&conversation).map_err(Error::from)
    }

    /// The ids of [`Tokenizer::chat_text`].
    ///
    /// # Errors
    /// When the folder has no chat template, the template refuses, or the tokenizer refuses the text.
    pub fn chat_prompt(&self, user: &str) -> Result<Vec<i64>, Error> {
        self.encode(&self.chat_text(user)?)
    }

    /// The token that ends an assistant's turn: the first special token that the chat template writes after an answer,
    /// else the folder's `eos_token`.
    ///
    /// # Errors
    /// When the folder has no chat template, the template refuses, or there is neither token.
    pub fn turn_end_text(&self) -> Result<String, Error> {
        let template = self.template.as_ref().map_err(|refusal| Error::from(refusal.clone()))?;
        self.end_of_turn(template)?.ok_or_else(|| {
            let reason = "no special token of tokenizer.json ends an answer, and there is no eos_token".to_owned();
            Error::from(Refusal { file: template.file.clone(), reason })
        })
    }

    /// The id of [`Tokenizer::turn_end_text`].
    ///
    /// # Errors
    /// As [`Tokenizer::turn_end_text`].
    pub fn turn_end(&self) -> Result<i64, Error> {
        let text = self.turn_end_text()?;
        self.id(&text).ok_or_else(|| refused(&self.file, "has no token for the end of a turn", &text))
    }

    /// What the chat template writes between an assistant's text and a tool's reply to it, and between the reply and the
    /// assistant's next text.
    ///
    /// # Errors
    /// When the folder has no chat template, the template refuses a tool's turn, or does not show it.
    pub fn reply_marks(&self) -> Result<(String, String), Error> {
        self.reply_marks_in(&Conversation::default()).map_err(Error::from)
    }

    /// [`Tokenizer::reply_marks`] with the tools and variables of a conversation.
    pub(super) fn reply_marks_in(&self, conversation: &Conversation) -> Result<(String, String), Refusal> {
        let template = self.template.as_ref().map_err(Clone::clone)?;
        let messages = vec![turn("user", "ask"), turn("assistant", ANSWER_MARK), turn("tool", REPLY_MARK)];
        let Conversation { tools, kwargs, .. } = conversation.clone();
        let text = template.render(&Conversation { messages, tools, kwargs }, true)?;
        let between = text.split_once(ANSWER_MARK).and_then(|(_, after)| after.split_once(REPLY_MARK));
        between.map(|(start, end)| (start.to_owned(), end.to_owned())).ok_or_else(|| {
            let reason = "it does not show the turn of a tool".to_owned();
            Refusal { file: template.file.clone(), reason }
        })
    }

    /// How a prompt that the chat template has written ends where the model thinks before it answers; `None` where the template
    /// leaves nothing to think, says nothing of it, or fails. What switches thinking off is `enable_thinking = false`, which
    /// writes an end of thinking into the prompt.
    #[must_use]
    pub fn thinking_prompt_end(&self) -> Option<String> {
        let template = self.template.as_ref().ok()?;
        let prompt_end = |thinks: bool| {
            let messages = vec![turn("user", ANSWER_MARK)];
            let kwargs = [("enable_thinking".to_owned(), Json::Bool(thinks))].into_iter().collect();
            let text = template.render(&Conversation { messages, kwargs, ..Conversation::default() }, true).ok()?;
            text.rsplit_once(ANSWER_MARK).map(|(_, end)| end.to_owned())
        };
        let (on, off) = (prompt_end(true)?, prompt_end(false)?);
        let has_ended = |end: &str| end.trim_end().ends_with("</think>");
        (!has_ended(&on) && (has_ended(&off) || on.trim_end().ends_with("<think>"))).then_some(on)
    }

    /// As [`Tokenizer::turn_end`]; `None` if there is no template, or the template fails or writes no end.
    pub(super) fn known_turn_end(&self) -> Option<i64> {
        let template = self.template.as_ref().ok()?;
        self.id(&self.end_of_turn(template).ok()??)
    }

    fn end_of_turn(&self, template: &Template) -> Result<Option<String>, Refusal> {
        let messages = vec![turn("user", "ask"), turn("assistant", ANSWER_MARK)];
        let text = template.render(&Conversation { messages, ..Conversation::default() }, false)?;
        let after = text.rsplit_once(ANSWER_MARK).map_or("", |(_, after)| after);
        let added = self.backend.get_added_tokens_decoder();
        let specials = added.values().filter(|token| token.special).map(|token| token.content.as_str());
        // If two begin at the same offset, the longer one counts, as it does in the tokenizer.
        let first = specials
            .filter_map(|token| Some((after.find(token)?, usize::MAX - token.len(), token)))
            .min()
            .map(|(.., token)| token);
        let eos = || template.special("eos_token").filter(|token| self.id(token).is_some());
        Ok(first.or_else(eos).map(str::to_owned))
    }
}

fn refused(file: &Path, action: &'static str, reason: &dyn fmt::Display) -> Error {
    Error::Tokenizer { file: file.to_owned(), action, reason: reason.to_string() }
}

fn turn(role: &str, content: &str) -> Map<String, Json> {
    [("role", role), ("content", content)].map(|(name, text)| (name.to_owned(), text.into())).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::test_tokenizer;
    use super::*;

    #[test]
    fn a_tokenizer_file_neither_truncates_nor_pads_a_text() {
        let folder = test_tokenizer::folder();
        let file = folder.path().join("tokenizer.json");
        let mut settings: Json = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        settings["truncation"] =
            serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
        settings["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
        fs::write(&file, settings.to_string()).unwrap();
        assert_eq!(Tokenizer::open(folder.path()).unwrap().encode("ten signs.").unwrap().len(), 10);
    }

    #[test]
    fn text_comes_back_from_its_ids() {
        let folder = test_tokenizer::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let text = "ünïcode\t and  digits 12\n<|im_end|>\n";
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.contains(&test_tokenizer::END));
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(tokenizer.vocabulary(), 259);
        assert!(tokenizer.decode(&[-1]).unwrap_err().to_string().contains("-1 is no token id"));
    }

    /// `<think>5</think>4` and `<think>4</think>5` were "54" and "45", and no reward could tell thought from answer.
    #[test]
    fn an_answer_is_shown_as_it_was_written_but_for_the_token_that_ends_its_turn() {
        let folder = test_tokenizer::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let ids = tokenizer.encode("a<|im_start|>b<|im_end|>c<|im_end|>").unwrap();
        let text = |ids: &[i64]| tokenizer.answer_text(ids, &[test_tokenizer::END]).unwrap();
        assert_eq!(text(&ids), "a<|im_start|>b<|im_end|>c");
        assert_eq!(text(&ids[..1]), "a", "an answer that was cut off has no end to leave out");
        assert_eq!(text(&[&ids[..], &[test_tokenizer::END]].concat()), "a<|im_start|>b<|im_end|>c<|im_end|>");
        assert_eq!(text(&[&ids[..1], &[999, 1000], &ids[..1]].concat()), "a<|id 999|><|id 1000|>a");
        assert_eq!(text(&[]), "");
        let broken = [0xc3, 0xa9].map(|byte| tokenizer.encode("é").unwrap()[usize::from(byte == 0xa9)]);
        assert_eq!(text(&broken), "é", "the bytes of one character stay together");
        assert!(tokenizer.answer_text(&[-1], &[]).unwrap_err().to_string().contains("-1 is no token id"));
    }

    #[test]
    fn a_chat_prompt_is_what_the_template_writes() {
        let folder = test_tokenizer::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(
            tokenizer.decode(&tokenizer.chat_prompt("hi").unwrap()).unwrap(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(tokenizer.turn_end().unwrap(), test_tokenizer::END);
    }

    #[test]
    fn a_prompt_after_which_the_model_thinks_is_known_by_its_end() {
        let folder = test_tokenizer::folder();
        let end = |open: &str| {
            let template = format!("{{% for m in messages %}}{{{{ m.content }}}}\n{{% endfor %}}A:\n{open}");
            fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
            Tokenizer::open(folder.path()).unwrap().thinking_prompt_end()
        };
        let off = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}";
        assert_eq!(end(off).as_deref(), Some("\nA:\n"), "it begins to think by itself");
        let both = "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}";
        assert_eq!(end(both).as_deref(), Some("\nA:\n<think>\n"));
        assert_eq!(end("<think>\n").as_deref(), Some("\nA:\n<think>"), "it always thinks");
        assert_eq!((end(""), end("<think></think>")), (None, None));
    }

    #[test]
    fn the_end_of_a_turn_is_found_in_any_template() {
        let folder = test_tokenizer::folder();
        let ends = |template: &str, config: &str| {
            fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
            fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
            Tokenizer::open(folder.path()).unwrap().turn_end_text().map_err(|error| error.to_string())
        };
        let turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{{ END }}{% endfor %}";
        let config = r#"{"eos_token": "<|endoftext|>", "END_token": "x"}"#;
        assert_eq!(ends(&turns.replace("END", "eos_token"), config).unwrap(), "<|endoftext|>");
        assert_eq!(ends(&turns.replace("END", "'<|im_end|><|endoftext|>'"), config).unwrap(), "<|im_end|>");
        assert_eq!(ends(&turns.replace("END", "''"), config).unwrap(), "<|endoftext|>");
        let message = ends(&turns.replace("END", "''"), "{}").unwrap_err();
        assert!(message.contains("chat_template.jinja: ") && message.contains("no special token"), "{message}");
    }

    #[test]
    fn a_missing_or_faulty_chat_template_is_refused() {
        let folder = test_tokenizer::folder();
        fs::write(folder.path().join("chat_template.jinja"), "[INST] {{ messages }").unwrap();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let message = tokenizer.chat_prompt("hi").unwrap_err().to_string();
        assert!(message.contains("chat_template.jinja: the chat template cannot be used: line 1: "), "{message}");
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
        let message = Tokenizer::open(folder.path()).unwrap().turn_end().unwrap_err().to_string();
        assert!(message.contains("there is no chat_template"), "{message}");
    }
}
