//! A model's own chat template, run as the `transformers` library runs it.
//!
//! A template is a Jinja program in the model's folder: `chat_template.jinja`, or `"chat_template"` of
//! `tokenizer_config.json`. For conversations with tools there may be another one:
//! `additional_chat_templates/tool_use.jinja`, or the one that the list in `tokenizer_config.json` names `tool_use`. Where minijinja and `transformers` differ, this follows `transformers`: blocks leave no blank
//! line, values print as in Python, `tojson` is `json.dumps`, Python's string methods exist, `raise_exception` refuses the
//! conversation, and `strftime_now` prints the time.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error as Failed, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use super::python;
use crate::runtime::reading;

/// Names that `chat_template_kwargs` may not set: they have fields of their own.
pub(super) const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// What a template renders.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversation {
    /// The turns, each with a role.
    pub(super) messages: Vec<Map<String, Json>>,
    pub(super) tools: Option<Vec<Json>>,
    /// More variables of the template, as `enable_thinking`.
    pub(super) kwargs: Map<String, Json>,
}

/// Why a template gives no text.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    /// The file that holds the template, or should.
    pub(super) file: PathBuf,
    /// The template's own message, or what is wrong with it.
    pub(super) reason: String,
}

/// A folder's chat template and the special tokens that it may name.
#[derive(Debug)]
pub(super) struct Template {
    pub(super) file: PathBuf,
    source: String,
    /// Another template for conversations with tools, and its file.
    with_tools: Option<(PathBuf, String)>,
    specials: Map<String, Json>,
}

impl Template {
    pub(super) fn open(folder: &Path) -> Result<Template, Refusal> {
        let jinja = folder.join("chat_template.jinja");
        let file = folder.join("tokenizer_config.json");
        let config = object(&file)?;
        let mut specials = special_tokens(object(&folder.join("special_tokens_map.json"))?.as_ref());
        specials.extend(special_tokens(config.as_ref()));
        let tool_use = folder.join("additional_chat_templates/tool_use.jinja");
        let with_tools = text_of(&tool_use)?.map(|source| (tool_use, source));
        if let Some(source) = text_of(&jinja)? {
            return Ok(Template { file: jinja, source, with_tools, specials });
        }
        let refused = |reason: &str| Refusal { file: file.clone(), reason: reason.to_owned() };
        let found = config.as_ref().and_then(|config| config.get("chat_template"));
        let (source, listed) = match found {
            Some(Json::String(source)) => (source.clone(), None),
            Some(Json::Array(named)) => {
                let template = |name: &str| named.iter().find(|entry| entry["name"] == name)?["template"].as_str();
                let default =
                    template("default").ok_or_else(|| refused("none of its chat templates is named default"))?;
                (default.to_owned(), template("tool_use").map(str::to_owned))
            }
            None | Some(Json::Null) => return Err(refused("there is no chat_template")),
            Some(_) => return Err(refused("chat_template is neither a text nor a list of named texts")),
        };
        let with_tools = with_tools.or_else(|| Some((file.clone(), listed?)));
        Ok(Template { file, source, with_tools, specials })
    }

    /// The template for a conversation, and its file.
    fn chosen(&self, conversation: &Conversation) -> (&Path, &str) {
        match (&conversation.tools, &self.with_tools) {
            (Some(_), Some((file, source))) => (file, source),
            _ => (&self.file, &self.source),
        }
    }

    /// Refuses a conversation with something that the template passes over in silence: tools, calls of tools, variables.
    pub(super) fn check_reads(&self, conversation: &Conversation) -> Result<(), Refusal> {
        let (file, source) = self.chosen(conversation);
        let refused = |reason: String| Err(Refusal { file: file.to_owned(), reason });
        if let Some(name) = conversation.kwargs.keys().find(|name| !source.contains(name.as_str())) {
            return refused(format!("it does not read the variable {name} of \"chat_template_kwargs\"; leave it out"));
        }
        let calls = |message: &Map<String, Json>| {
            message.get("tool_calls").and_then(Json::as_array).is_some_and(|calls| !calls.is_empty())
        };
        if !source.contains("tool_calls") && conversation.messages.iter().any(calls) {
            return refused("it does not read \"tool_calls\"; write the calls as the turn's text".to_owned());
        }
        if conversation.tools.as_ref().is_none_or(Vec::is_empty) {
            return Ok(());
        }
        let variables = self.variables(conversation, true);
        let with = render_source((file, source), &variables)?;
        let without = render_source((file, source), &{
            let mut variables = variables;
            variables.insert("tools".to_owned(), Json::Null);
            variables
        });
        match without {
            Ok(without) if without == with => refused(
                "it does not read \"tools\"; use a model whose template does, or describe the tools in a turn"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    /// The text of the special token `name`, as `eos_token`.
    pub(super) fn special(&self, name: &str) -> Option<&str> {
        self.specials.get(name).and_then(Json::as_str)
    }

    /// The conversation as text; `open_answer` adds the beginning of the assistant's turn.
    pub(super) fn render(&self, conversation: &Conversation, open_answer: bool) -> Result<String, Refusal> {
        render_source(self.chosen(conversation), &self.variables(conversation, open_answer))
    }

    /// What the template may name.
    fn variables(&self, conversation: &Conversation, open_answer: bool) -> Map<String, Json> {
        let Conversation { messages, tools, kwargs } = conversation;
        let mut variables = self.specials.clone();
        variables.insert("documents".to_owned(), Json::Null);
        variables.extend(kwargs.clone());
        variables.insert("messages".to_owned(), messages.iter().cloned().map(Json::Object).collect());
        variables.insert("tools".to_owned(), tools.clone().map_or(Json::Null, Json::Array));
        variables.insert("add_generation_prompt".to_owned(), open_answer.into());
        variables
    }
}

/// Runs a template, which messages call by its file.
fn render_source((file, source): (&Path, &str), variables: &Map<String, Json>) -> Result<String, Refusal> {
    environment()
        .render_named_str("chat_template", &without_generation(source), Value::from_serialize(variables))
        .map_err(|failed| Refusal { file: file.to_owned(), reason: reason(&failed) })
}

impl Template {
    /// Whether what the template writes depends on the day.
    pub(super) fn reads_the_date(&self) -> bool {
        let sources =
            std::iter::once(self.source.as_str()).chain(self.with_tools.iter().map(|(_, source)| source.as_str()));
        sources.into_iter().any(|source| source.contains("strftime_now"))
    }

    /// Everything that decides what the template writes, as one text.
    pub(super) fn identity(&self) -> String {
        let with_tools = self.with_tools.as_ref().map(|(_, source)| source);
        serde_json::json!([self.source, with_tools, self.specials]).to_string()
    }
}

/// The text in a file; `None` if there is no file.
fn text_of(file: &Path) -> Result<Option<String>, Refusal> {
    match reading::text(file) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(Refusal { file: file.to_owned(), reason: cause.to_string() }),
        Ok(text) => Ok(Some(text)),
    }
}

/// The JSON object in a file; `None` if there is no file.
fn object(file: &Path) -> Result<Option<Map<String, Json>>, Refusal> {
    let Some(text) = text_of(file)? else { return Ok(None) };
    let refused = |cause| Refusal { file: file.to_owned(), reason: format!("no JSON object: {cause}") };
    serde_json::from_str(&text).map(Some).map_err(refused)
}

/// All `…_token` entries. A value is a text, or an object whose "content" is one.
fn special_tokens(config: Option<&Map<String, Json>>) -> Map<String, Json> {
    let text = |value: &Json| value.as_str().or_else(|| value["content"].as_str()).map(Json::from);
    let entries = config.into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    entries.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
}

/// A Jinja environment set up as `transformers` does it.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, _, value| {
        let text = python::display(value)?;
        out.write_str(&text).map_err(|_| Failed::from(ErrorKind::WriteFailure))
    });
    environment
        .add_filter("tojson", |value: &Value, options: minijinja::value::Kwargs| python::to_json(value, &options));
    environment.add_filter("string", |value: &Value| python::display(value));
    environment.add_filter("trim", |value: &Value, characters: Option<String>| {
        let text = python::display(value)?;
        let trimmed = characters.map_or(text.trim(), |set| text.trim_matches(|character| set.contains(character)));
        Ok::<_, Failed>(trimmed.to_owned())
    });
    // In Jinja a text and a mapping are sequences too, and a text is iterable.
    let sequence = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map);
    environment.add_test("sequence", sequence);
    environment.add_test("iterable", move |value: &Value| sequence(value) || value.kind() == ValueKind::Iterable);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Failed> {
        Err(Failed::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| {
        let mut text = String::new();
        write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
            Failed::new(ErrorKind::InvalidOperation, format!("strftime_now: {format:?} is no format of a time"))
        })?;
        Ok(text)
    });
    environment
}

/// The message of the innermost error, with the template's line.
fn reason(failed: &Failed) -> String {
    let mut inner = failed;
    while let Some(cause) = std::error::Error::source(inner).and_then(|cause| cause.downcast_ref::<Failed>()) {
        inner = cause;
    }
    let message = inner.detail().map_or_else(|| inner.kind().to_string(), str::to_owned);
    match inner.line().or(failed.line()) {
        Some(line) => format!("line {line}: {message}"),
        None => message,
    }
}

/// Replaces `{% generation %}`, a tag of `transformers` that marks the assistant's text and prints nothing, by a condition
/// that is always true. White-space marks stay.
fn without_generation(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        plain.push_str(before);
        plain.push_str("{%");
        let Some((inside, after)) = tag.split_once("%}") else {
            rest = tag;
            continue;
        };
        let name = inside.trim_matches(['-', '+', ' ', '\n', '\t']);
        match name {
            "generation" => plain.push_str(&inside.replace(name, "if true")),
            "endgeneration" => plain.push_str(&inside.replace(name, "endif")),
            _ => plain.push_str(inside),
        }
        plain.push_str("%}");
        rest = after;
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    /// A ChatML model's template with a system text of its own.
    const CHAT_ML: &str = "{% for message in messages %}\n    {% if loop.first and message['role'] != 'system' %}\n\
        {{ '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}\n    {% endif %}\n\
        {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\n\
        {% if add_generation_prompt %}\n{{ '<|im_start|>assistant\\n' -}}\n{% endif %}";
    /// In the manner of Llama 3: a first token, ids of roles, a date, tools as indented JSON.
    const HEADERS: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;
    /// In the manner of Mistral: turns must alternate, or the template refuses.
    const ALTERNATING: &str = "{{ bos_token }}{% for message in messages %}\
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
        {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
        {% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
        {% else %}{{ raise_exception('Only user and assistant are roles, not ' ~ message.role) }}{% endif %}{% endfor %}";
    /// In the manner of Qwen3: a macro, a namespace, a loop from the end, Python's methods.
    const THINKING: &str = r#"{%- macro tagged(name, text) -%}
<{{ name }}>
{{ text }}
</{{ name }}>
{%- endmacro -%}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}
                {%- continue %}
            {%- endif %}
            {%- set content = content ~ part.text %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\n' + tagged('think', reasoning.strip('\n')) + '\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"#;

    fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn template(source: &str) -> Template {
        let config =
            json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "add_bos_token": true});
        let files = [("chat_template.jinja", source.to_owned()), ("tokenizer_config.json", config.to_string())];
        Template::open(folder(&files).path()).unwrap()
    }

    fn chat(messages: &Json) -> Conversation {
        Conversation { messages: serde_json::from_value(messages.clone()).unwrap(), ..Conversation::default() }
    }

    #[test]
    fn a_chat_ml_template_writes_its_own_system_text_and_leaves_no_blank_line() {
        let template = template(CHAT_ML);
        assert_eq!(
            template.render(&chat(&json!([{"role": "user", "content": "hi"}])), true).unwrap(),
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        );
        let given = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]);
        assert_eq!(
            template.render(&chat(&given), false).unwrap(),
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        );
    }

    #[test]
    fn headers_get_special_tokens_tools_and_kwargs() {
        let template = template(HEADERS);
        let mut talk = chat(&json!([
            {"role": "system", "content": " Be exact. "},
            {"role": "user", "content": "add"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": [2.5, true]}}}]},
        ]));
        talk.tools = Some(vec![json!({"name": "add", "ü": {}})]);
        talk.kwargs.insert("date_string".into(), "26 Jul 2024".into());
        assert_eq!(
            template.render(&talk, true).unwrap(),
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n\
             {\n    \"name\": \"add\",\n    \"ü\": {}\n}\n\nBe exact.<|eot_id|>\
             <|start_header_id|>user<|end_header_id|>\n\nadd<|eot_id|>\
             {\"name\": \"add\", \"parameters\": {\"a\": 1, \"b\": [2.5, true]}}<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\n"
        );
        let today = template.render(&chat(&json!([{"role": "user", "content": "hi"}])), false).unwrap();
        let date = today.split("Today Date: ").nth(1).unwrap().split('\n').next().unwrap();
        assert!(chrono::NaiveDate::parse_from_str(date, "%d %b %Y").is_ok(), "{date}");
    }

    #[test]
    fn a_template_that_refuses_is_quoted_with_its_line() {
        let template = template(ALTERNATING);
        let user = json!({"role": "user", "content": "hi"});
        let talk = json!([user, {"role": "assistant", "content": "yes"}, user]);
        assert_eq!(template.render(&chat(&talk), true).unwrap(), "<s>[INST] hi [/INST]yes</s>[INST] hi [/INST]");
        let refusal = template.render(&chat(&json!([user, user])), true).unwrap_err();
        assert_eq!(refusal.reason, "line 1: Roles must alternate user/assistant/user/assistant/...");
        assert!(refusal.file.ends_with("chat_template.jinja"));
        let refusal = template.render(&chat(&json!([user, {"role": "tool", "content": "4"}])), true).unwrap_err();
        assert_eq!(refusal.reason, "line 1: Only user and assistant are roles, not tool");
    }

    #[test]
    fn macros_namespaces_reversed_loops_and_pythons_methods_work() {
        let template = template(THINKING);
        let mut talk = chat(&json!([
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "<think>\nolder\n</think>\n\nfirst"},
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image"}]},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsecond"},
            {"role": "user", "content": "<tool_response>4</tool_response>"},
        ]));
        let before = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n\
                      two<|im_start|>user\n<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n\
                      <|im_start|>assistant\n<think>\nwhy\n</think>\n\nsecond<|im_end|>\n\
                      <|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(template.render(&talk, true).unwrap(), before);
        talk.kwargs.insert("enable_thinking".into(), false.into());
        assert_eq!(template.render(&talk, true).unwrap(), format!("{before}<think>\n\n</think>\n\n"));
    }

    #[test]
    fn values_and_tests_are_pythons() {
        let rendered =
            |source: &str| template(source).render(&chat(&json!([{"role": "user", "content": "a-b-c"}])), true);
        let text = |source: &str| rendered(source).unwrap();
        assert_eq!(
            text("{{ true }} {{ none }} {{ 1.0 }} {{ messages }} {{ tools }} {{ absent }}."),
            "True None 1.0 [{'role': 'user', 'content': 'a-b-c'}] None ."
        );
        assert_eq!(
            text("{{ messages[0].content.rsplit('-', 1) }}{{ 'abc'.removeprefix('a').removesuffix('c') }}"),
            "['a-b', 'c']b"
        );
        assert_eq!(text("{{ 'a=b=c'.partition('=')[2] }} {{ 'a=b=c'.rpartition('=')[0] }}"), "b=c a=b");
        assert_eq!(
            text("{{ 'ab' is sequence and 'ab' is iterable and {} is sequence and 1 is not iterable }}"),
            "True"
        );
        assert_eq!(text("{{ (1.5 | string) + (true | string) }}{{ messages[0].get('name', 'x') }}"), "1.5Truex");
        assert_eq!(
            text("{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"),
            "role=user;content=a-b-c;"
        );
        assert_eq!(text("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}<&>"), "1<&>");
        assert_eq!(text("{{ [' a '] | trim }}{{ ' a ' | trim }}{{ 'xay' | trim('yx') }}"), "[' a ']aa");
        let refusal = rendered("\n{{ messages[0].name.first }}").unwrap_err();
        assert!(refusal.reason.starts_with("line 2: "), "{}", refusal.reason);
        let refusal = rendered("{% if %}").unwrap_err();
        assert!(refusal.reason.starts_with("line 1: "), "{}", refusal.reason);
        assert!(rendered("{{ strftime_now('%Q') }}").unwrap_err().reason.contains("\"%Q\" is no format of a time"));
    }

    #[test]
    fn a_list_of_named_templates_has_a_default_and_one_for_tools() {
        let named = json!({"chat_template": [
            {"name": "default", "template": "plain{{ unk_token }}{{ eos_token }}"},
            {"name": "tool_use", "template": "tools {{ tools | length }}"},
        ], "eos_token": null});
        let map = json!({"unk_token": "<unk>", "eos_token": {"content": "<e>"}});
        let model =
            folder(&[("tokenizer_config.json", named.to_string()), ("special_tokens_map.json", map.to_string())]);
        let template = Template::open(model.path()).unwrap();
        let mut talk = chat(&json!([]));
        assert_eq!(template.render(&talk, true).unwrap(), "plain<unk><e>");
        talk.tools = Some(vec![json!({})]);
        assert_eq!(template.render(&talk, true).unwrap(), "tools 1");
        for (config, words) in [
            ("{", "no JSON object: EOF"),
            ("{}", "there is no chat_template"),
            (r#"{"chat_template": 1}"#, "neither a text nor a list"),
            (r#"{"chat_template": [{"name": "rag", "template": ""}]}"#, "none of its chat templates is named default"),
        ] {
            let refusal = Template::open(folder(&[("tokenizer_config.json", config.to_owned())]).path()).unwrap_err();
            assert!(refusal.reason.contains(words), "{}", refusal.reason);
        }
    }

    #[test]
    fn tools_have_a_template_of_their_own_in_the_folder_of_additional_ones() {
        let files = [
            ("chat_template.jinja", "plain".to_owned()),
            ("tokenizer_config.json", json!({"chat_template": "of the config"}).to_string()),
        ];
        let folder = folder(&files);
        fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        let file = folder.path().join("additional_chat_templates/tool_use.jinja");
        fs::write(&file, "tools {{ tools | length }}").unwrap();
        let mut conversation = chat(&json!([{"role": "user", "content": "hi"}]));
        let opened = || Template::open(folder.path()).unwrap();
        assert_eq!(opened().render(&conversation, true).unwrap(), "plain");
        conversation.tools = Some(vec![json!({}), json!({})]);
        assert_eq!(opened().render(&conversation, true).unwrap(), "tools 2");
        opened().check_reads(&conversation).unwrap();
        // The default one may stand in the config.
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        assert_eq!(opened().render(&conversation, true).unwrap(), "tools 2");
        fs::write(&file, "{{ tools").unwrap();
        let refusal = opened().render(&conversation, true).unwrap_err();
        assert_eq!(refusal.file, file, "the file of the template that was chosen is named");
        fs::write(&file, b"caf\xe9").unwrap();
        let refusal = Template::open(folder.path()).unwrap_err();
        assert!(refusal.reason.contains("line 1, byte 4 of the line"), "{}", refusal.reason);
    }

    #[test]
    fn what_a_template_passes_over_is_refused() {
        let user = json!([{"role": "user", "content": "hi"}]);
        let with_tools = |source: &str, tools: Json| {
            let tools = serde_json::from_value(tools).unwrap();
            let conversation = Conversation { tools: Some(tools), ..chat(&user) };
            template(source).check_reads(&conversation).map_err(|refusal| refusal.reason)
        };
        let refusal = with_tools(CHAT_ML, json!([{"name": "add"}])).unwrap_err();
        assert!(refusal.starts_with("it does not read \"tools\""), "{refusal}");
        assert_eq!(with_tools(CHAT_ML, json!([])), Ok(()), "no tool is left out");
        assert_eq!(with_tools(HEADERS, json!([{"name": "add"}])), Ok(()));
        // The word alone is not enough.
        assert!(with_tools("{% if tools and false %}{{ tools }}{% endif %}", json!([{"name": "add"}])).is_err());
        let kwargs = json!({"enable_thinking": false}).as_object().unwrap().clone();
        let conversation = Conversation { kwargs, ..chat(&user) };
        template(THINKING).check_reads(&conversation).unwrap();
        let refusal = template(CHAT_ML).check_reads(&conversation).unwrap_err();
        assert!(refusal.reason.contains("the variable enable_thinking"), "{}", refusal.reason);
        let call = json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]);
        assert!(template(CHAT_ML).check_reads(&chat(&call)).unwrap_err().reason.contains("tool_calls"));
        template(HEADERS).check_reads(&chat(&call)).unwrap();
    }
}
