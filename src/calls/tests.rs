//! Calls in texts, and programs that answer them well, hang, fail, flood or write no JSON.

use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::config::TooLong;
use crate::data::test_tokenizer;
use crate::data::{Answers, Limits, ToolMarks};
use crate::runtime::failure::Exit;

/// Tokens of the test's tokenizer.
const VOCABULARY: u64 = 259;

/// A folder with a tokenizer, and a shell script that is started with the folder's path as its argument.
struct Scripted {
    folder: TempDir,
    config: RunConfig,
}

impl Scripted {
    fn of(script: &str) -> Scripted {
        let folder = test_tokenizer::folder();
        let file = folder.path().join("tool.sh");
        std::fs::write(&file, script).unwrap();
        let path = |path: &Path| path.display().to_string();
        let mut config = RunConfig::laptop();
        config.context.answer_len = Tokens(400);
        config.model.path = Some(folder.path().to_owned());
        config.tools.command = Some(vec!["/bin/sh".to_owned(), path(&file), path(folder.path())]);
        config.tools.reply_sec = 30;
        Scripted { folder, config }
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::open(self.folder.path()).unwrap()
    }

    /// The replies to calls of these texts, each as text, and how the calls have ended.
    fn replies(&self, calls: &[&str]) -> Vec<(String, Replied)> {
        let tokenizer = self.tokenizer();
        let tools = Tools::open(&self.config, Some(&tokenizer), VOCABULARY).unwrap().unwrap();
        let group = group();
        let caller = tools.of(&tokenizer, &group);
        let written: Vec<Vec<i64>> =
            calls.iter().map(|call| tokenizer.encode(&format!("<tool_call>{call}</tool_call>")).unwrap()).collect();
        let call = |(answer, (text, ids)): (usize, (&&str, &'_ Vec<i64>))| (answer, (*text).to_owned(), ids.clone());
        let calls: Vec<(usize, String, Vec<i64>)> = calls.iter().zip(&written).enumerate().map(call).collect();
        let calls = calls.iter().map(|(answer, text, ids)| Call { answer: *answer, turn: 1, text: text.clone(), ids });
        let replies = caller.replies(&calls.collect::<Vec<_>>(), &mut || ()).unwrap();
        replies.into_iter().map(|reply| (tokenizer.decode(&reply.ids).unwrap(), reply.outcome)).collect()
    }

    /// Both of two calls fail for a reason with these words, and the policy reads `said`.
    #[track_caller]
    fn fails(&self, words: &str, said: &str) {
        for (text, outcome) in self.replies(&["1", "2"]) {
            let Replied::Failed(reason) = outcome else { panic!("{outcome:?}") };
            assert!(reason.contains(words), "no {words:?} in {reason}");
            assert_eq!(text, around(said));
        }
    }
}

fn group() -> Group {
    let reward_data = json!({ "expected": "7" }).as_object().unwrap().clone();
    let name = "one".to_owned();
    let (prompt_tokens, answers, tool_marks) = (Tokens(3), Vec::new(), ToolMarks::default());
    Group { name, prompt_tokens, answers, reward_data, tool_marks, reply_marks: ReplyMarks::Plain, cut: None }
}

/// A reply as the template of the test's tokenizer shows the turn of a tool.
fn around(reply: &str) -> String {
    format!("<|im_end|>\n<|im_start|>tool\n{reply}<|im_end|>\n<|im_start|>assistant\n")
}

#[test]
fn a_line_is_a_text_a_number_or_an_object_with_a_reply_or_an_error() {
    let reply = |text: &str| Ok(Said::Reply(text.to_owned()));
    for (line, expected) in [
        (r#""6""#, reply("6")),
        (" 6 ", reply("6")),
        ("-0.5", reply("-0.5")),
        (r#"{"reply": "a\nb"}"#, reply("a\nb")),
        (r#"{"reply": ""}"#, reply("")),
        (r#"{"error": "no such tool"}"#, Ok(Said::Error("no such tool".to_owned()))),
    ] {
        assert_eq!(said(line), expected, "{line}");
    }
    let both = r#"{"reply": "6", "error": "x"}"#;
    for line in ["", "six", "null", "[6]", "6 7", r#"{"reply": 6}"#, both, r#"{"say": "6"}"#] {
        assert_eq!(said(line), Err(Fault::Line { line: line.to_owned() }), "{line}");
    }
}

#[test]
fn a_call_is_closed_by_the_token_that_ends_its_mark() {
    let scripted = Scripted::of("");
    let tokenizer = scripted.tokenizer();
    let tools = Tools::open(&scripted.config, Some(&tokenizer), VOCABULARY).unwrap().unwrap();
    let group = group();
    let caller = tools.of(&tokenizer, &group);
    let closed = |text: &str| {
        let ids = tokenizer.encode(text).unwrap();
        let at = |end: usize| caller.closed(&ids[..end - 1], ids[end - 1]).unwrap();
        let earlier = (1..ids.len()).filter_map(at).count();
        (earlier, at(ids.len()))
    };
    assert_eq!(closed("so <tool_call>\n3 > 2 </tool_call>"), (0, Some("3 > 2".to_owned())));
    assert_eq!(closed("<tool_call>ü</tool_call>"), (0, Some("ü".to_owned())));
    for open in ["<tool_call>3", "3</tool_call>", "</tool_call><tool_call>3 >", "<tool_call>3</tool_cal>"] {
        assert_eq!(closed(open), (0, None), "{open}");
    }
}

#[test]
fn a_record_may_have_marks_of_its_own() {
    let scripted = Scripted::of("cat > /dev/null; echo 6");
    let tokenizer = scripted.tokenizer();
    let tools = Tools::open(&scripted.config, Some(&tokenizer), VOCABULARY).unwrap().unwrap();
    let mut group = group();
    group.tool_marks.call_start = Some("[".to_owned());
    group.tool_marks.call_end = Some("]".to_owned());
    group.tool_marks.reply_start = Some("=".to_owned());
    let caller = tools.of(&tokenizer, &group);
    let ids = tokenizer.encode("[2 * 3]").unwrap();
    let (last, before) = ids.split_last().unwrap();
    assert_eq!(caller.closed(before, *last).unwrap(), Some("2 * 3".to_owned()));
    let call = Call { answer: 0, turn: 1, text: "2 * 3".to_owned(), ids: &ids };
    let replies = caller.replies(&[call], &mut || ()).unwrap();
    assert_eq!(tokenizer.decode(&replies[0].ids).unwrap(), "=6<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn what_stands_around_a_reply_follows_from_the_tools_and_variables_of_the_record() {
    let mut scripted = Scripted::of("cat > /dev/null; echo 6");
    let template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if tools %}tools{% endif %}\
                    {% if add_generation_prompt %}{{ open }}{% endif %}";
    std::fs::write(scripted.folder.path().join("chat_template.jinja"), template).unwrap();
    let file = scripted.folder.path().join("data.jsonl");
    let turn = r#""messages": [{"role": "user", "content": "a"}]"#;
    let lines = [
        format!("{{{turn}}}"),
        format!(r#"{{{turn}, "chat_template_kwargs": {{"open": "think>"}}}}"#),
        format!(r#"{{{turn}, "tools": [{{"name": "t"}}], "tool_marks": {{"reply_start": "="}}}}"#),
    ];
    std::fs::write(&file, lines.join("\n")).unwrap();
    let tokenizer = scripted.tokenizer();
    let limits = Limits {
        prompt_len_max: Tokens(90),
        answer_len_max: Tokens(90),
        vocab_size: VOCABULARY,
        answers: Answers::Sampled,
        too_long: TooLong::Refuse,
    };
    let data = Dataset::open(&file, Some(&tokenizer), &limits).unwrap();
    let shown = |config: &RunConfig| {
        let tools = Tools::open(config, Some(&tokenizer), VOCABULARY).unwrap().unwrap();
        tools.check_records(&tokenizer, "data.path", &data).unwrap();
        let reply = |index: usize| {
            let call = Call { answer: 0, turn: 1, text: "2 * 3".to_owned(), ids: &[] };
            let replies = tools.of(&tokenizer, data.group(index)).replies(&[call], &mut || ()).unwrap();
            tokenizer.decode(&replies[0].ids).unwrap()
        };
        [0, 1, 2].map(reply)
    };
    assert_eq!(shown(&scripted.config), [";tool:6;", ";tool:6;think>", "=6;tools"]);
    // The configuration's own marks come before those of any template.
    scripted.config.tools.reply_start = Some("[".to_owned());
    scripted.config.tools.reply_end = Some("]".to_owned());
    assert_eq!(shown(&scripted.config), ["[6]", "[6]", "=6]"]);
}

#[test]
fn marks_of_a_record_that_leave_no_room_are_refused_with_its_name() {
    let scripted = Scripted::of("");
    let tokenizer = scripted.tokenizer();
    let tools = Tools::open(&scripted.config, Some(&tokenizer), VOCABULARY).unwrap().unwrap();
    let refused = |group: Group| {
        let data = Dataset::from_groups(vec![(group, vec![1, 2, 3])]);
        let failure = tools.check_records(&tokenizer, "data.path", &data).unwrap_err();
        assert_eq!(failure.exit(), Exit::Data);
        failure.to_string()
    };
    let tool_marks = ToolMarks { reply_start: Some("=".repeat(398)), ..ToolMarks::default() };
    let words = refused(Group { tool_marks, ..group() });
    assert!(words.starts_with("data.path, record one: ") && words.contains("at most 400"), "{words}");
    let reply_marks = ReplyMarks::Refused { reason: "no such turn".to_owned() };
    let words = refused(Group { reply_marks, ..group() });
    assert!(words.contains("record one: ") && words.contains("no such turn; set tools.reply_start"), "{words}");
}

/// A token that was added to the tokenizer alone was read by the embedding, which has no row for it.
#[test]
fn tokens_without_a_row_in_the_embedding_are_refused_in_marks_and_fail_in_a_reply() {
    let mut scripted = Scripted::of("cat > /dev/null; echo '\"so <|im_start|>\"'");
    let tokenizer = scripted.tokenizer();
    let added = tokenizer.encode("<|im_start|>").unwrap();
    let [start] = added[..] else { panic!("{added:?}") };
    let rows = u64::try_from(start).unwrap();
    let failure = Tools::open(&scripted.config, Some(&tokenizer), rows).err().unwrap();
    let words = failure.to_string();
    assert!(failure.exit() == Exit::Data && words.contains(&format!("has {rows} rows")), "{words}");
    scripted.config.tools.reply_start = Some("[".to_owned());
    scripted.config.tools.reply_end = Some("]".to_owned());
    let tools = Tools::open(&scripted.config, Some(&tokenizer), rows).unwrap().unwrap();
    let group = group();
    let call = Call { answer: 0, turn: 1, text: "1".to_owned(), ids: &[] };
    let replies = tools.of(&tokenizer, &group).replies(&[call], &mut || ()).unwrap();
    assert_eq!(tokenizer.decode(&replies[0].ids).unwrap(), "[error: the tool failed]");
    let Replied::Failed(reason) = &replies[0].outcome else { panic!("{replies:?}") };
    assert!(reason.contains(&format!("the reply has the token id {start}")), "{reason}");
}

#[test]
fn a_program_reads_every_call_and_gives_each_its_reply() {
    let scripted = Scripted::of(
        "tee \"$1/told\" | while read -r line; do case $line in *'\"call\":\"1\"'*) echo '{\"reply\": \"one\"}' ;;\n\
         *'\"call\":\"2\"'*) echo '{\"error\": \"not two\"}' ;; *) echo 3 ;; esac; done",
    );
    let replies = scripted.replies(&["1", "2", "3"]);
    let expected = [("one", Replied::Whole), ("not two", Replied::Refused), ("3", Replied::Whole)];
    assert_eq!(replies, expected.map(|(text, outcome)| (around(text), outcome)));
    let told = std::fs::read_to_string(scripted.folder.path().join("told")).unwrap();
    let first: Value = serde_json::from_str(told.lines().next().unwrap()).unwrap();
    let expected = json!({ "prompt": "one", "answer": 0, "turn": 1, "call": "1", "text": "<tool_call>1</tool_call>",
                           "reward_data": { "expected": "7" } });
    assert_eq!((told.lines().count(), first), (3, expected));
}

#[test]
fn a_program_that_hangs_fails_floods_or_writes_no_json_leaves_an_error_as_the_reply() {
    let mut hangs = Scripted::of("echo stuck >&2; sleep 60; echo 1; echo 1");
    hangs.config.tools.reply_sec = 1;
    hangs.fails("ended after 1 s (tools.reply_sec); it said: stuck", "error: the tool did not answer in time");
    let failed = "error: the tool failed";
    Scripted::of("echo 1; echo 1; echo 'no key' >&2; exit 3").fails("exit status: 3); it said: no key", failed);
    Scripted::of("kill -9 $$").fails("signal: 9", failed);
    Scripted::of("cat > /dev/null; echo six; echo seven").fails("is no text or number of JSON", failed);
    Scripted::of("cat > /dev/null; echo 1").fails("1 lines for 2 calls", failed);
    Scripted::of("exit 0").fails("0 lines for 2 calls", failed);
    Scripted::of("yes").fails("wrote more than", "error: the tool's answer was too long");
}

#[test]
fn a_slow_program_is_waited_for_and_a_long_reply_is_cut_and_says_so() {
    let mut scripted = Scripted::of("sleep 0.3; echo '\"0123456789\"'; echo '\"01234567\"'");
    scripted.config.tools.tokens = Tokens(8);
    scripted.config.tools.reply_start = Some("[".to_owned());
    scripted.config.tools.reply_end = Some("]".to_owned());
    let cut = ("[01234567… (cut off)]".to_owned(), Replied::Cut);
    assert_eq!(scripted.replies(&["1", "2"]), [cut, ("[01234567]".to_owned(), Replied::Whole)]);
}

#[test]
fn tools_that_cannot_work_are_refused_before_the_first_answer() {
    let refused = |scripted: &Scripted, tokenizer: Option<&Tokenizer>| {
        let failure = Tools::open(&scripted.config, tokenizer, VOCABULARY).err().unwrap();
        (failure.exit(), failure.to_string())
    };
    let mut scripted = Scripted::of("");
    let tokenizer = scripted.tokenizer();
    let (exit, words) = refused(&scripted, None);
    assert!(exit == Exit::Data && words.contains("there is no tokenizer.json"), "{words}");
    scripted.config.context.answer_len = Tokens(20);
    let (exit, words) = refused(&scripted, Some(&tokenizer));
    assert!(exit == Exit::Config && words.contains("and an answer has at most 20"), "{words}");
    scripted.config.tools.command = Some(vec!["/no/such/program".to_owned()]);
    let (exit, words) = refused(&scripted, Some(&tokenizer));
    assert!(exit == Exit::Config && words.contains("cannot start /no/such/program: No such file"), "{words}");
    let template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}";
    std::fs::write(scripted.folder.path().join("chat_template.jinja"), template).unwrap();
    scripted.config.tools.command = Some(vec!["sh".to_owned()]);
    let (exit, words) = refused(&scripted, Some(&scripted.tokenizer()));
    assert!(exit == Exit::Data && words.contains("does not show the turn of a tool; set tools.reply_start"), "{words}");
    scripted.config.tools.command = None;
    assert!(Tools::open(&scripted.config, None, VOCABULARY).unwrap().is_none());
}
