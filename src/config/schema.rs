//! The list of keys: the tables, the keys in each table, and what a value must look like.
//!
//! The structs in `tables` say the same to serde, which stops at the first fault. With this list a source is read to its end,
//! so that one wrong key hides no other. Tests compare the list, the structs and `configs/default.toml`.

use figment::value::{Num, Value};

use super::rewards::{RewardName, is_reward};
use super::set_name::is_set_name;
use crate::runtime::names::likeness;

/// What a value must look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// `true` or `false`.
    Switch,
    /// A whole number from 0.
    Count,
    /// A number, `inf` and `nan` included.
    Number,
    /// Text that is not empty.
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of texts.
    Texts,
    /// A list of two numbers.
    Pair,
    /// A number, or `"none"`.
    Temperature,
    /// `true`, `false` or `"auto"`.
    When,
    /// `"exact"`, `"response"` or `{ last = N }`.
    Gradient,
    /// A reward's name, or a list of tables `{ name, weight }`.
    Reward,
    /// A file, or a table of files by name.
    Files,
    /// A list of tables `{ name, path, weight }`.
    Sources,
    /// A table of judges by name.
    Judges,
    /// A table whose keys belong to a model, not to longstraw.
    Free,
}

/// Where the value comes from when no source gives one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Need {
    /// The compiled-in default file.
    Default,
    /// Nowhere: a missing key has a meaning.
    Optional,
    /// Nowhere: it must be given.
    Required,
    /// From other keys: a prompt's and an answer's length.
    Derived,
}

/// A key within its table.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) need: Need,
}

/// One table; `path` is dotted for a table within a table.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) path: &'static str,
    pub(super) keys: &'static [Key],
}

const fn key(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, need: Need::Default }
}

const fn optional(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, need: Need::Optional }
}

const fn required(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, need: Need::Required }
}

const fn derived(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, need: Need::Derived }
}

/// All tables, in the order of the default file.
pub(super) const TABLES: &[Table] = &[
    Table {
        path: "parallel",
        keys: &[
            key("tp_size", Kind::Count),
            optional("cp_size", Kind::Count),
            key("ep_size", Kind::Count),
            key("pp_size", Kind::Count),
        ],
    },
    Table {
        path: "context",
        keys: &[
            derived("max_seq_len", Kind::Count),
            required("prompt_len", Kind::Count),
            required("answer_len", Kind::Count),
            key("page_size", Kind::Count),
            optional("cp_pages_per_gpu", Kind::Count),
        ],
    },
    Table {
        path: "memory",
        keys: &[
            key("prompt_no_grad", Kind::Switch),
            key("cpu_offload_pages", Kind::When),
            key("cpu_offload_inputs", Kind::When),
            key("inputs_every", Kind::Count),
            key("keep_attention", Kind::When),
            key("layer_wise_transfer", Kind::Switch),
            key("activation_ckpt", Kind::Choice(&["layer", "none"])),
            key("micro_block", Kind::Count),
            key("head_block", Kind::Count),
        ],
    },
    Table {
        path: "optimizer",
        keys: &[
            key("name", Kind::Choice(&["adamw"])),
            key("lr", Kind::Number),
            key("grad_accum", Kind::Count),
            key("betas", Kind::Pair),
            key("eps", Kind::Number),
            key("weight_decay", Kind::Number),
            key("max_grad_norm", Kind::Number),
            key("schedule", Kind::Choice(&["constant", "cosine", "linear"])),
            optional("schedule_steps", Kind::Count),
            key("warmup_steps", Kind::Count),
        ],
    },
    Table {
        path: "grpo",
        keys: &[
            required("group_size", Kind::Count),
            optional("reward_fn", Kind::Reward),
            key("scale_rewards", Kind::Choice(&["group", "batch", "none"])),
            key("deviation", Kind::Choice(&["population", "sample"])),
            key("std_min", Kind::Number),
            key("gradient", Kind::Gradient),
            key("loss", Kind::Choice(&["grpo", "gspo", "cispo"])),
            key("clip_low", Kind::Number),
            key("clip_high", Kind::Number),
            optional("clip_dual", Kind::Number),
            key("kl_coef", Kind::Number),
            key("kl_estimator", Kind::Choice(&["k1", "k2", "k3", "k3_ratio"])),
            key("mask_truncated", Kind::Switch),
            key("aggregation", Kind::Choice(&["sequence_mean", "token_mean", "constant"])),
            optional("constant_divisor", Kind::Number),
            key("temperature", Kind::Number),
            key("updates_per_group", Kind::Count),
            optional("reuse_drift_max", Kind::Number),
            key("importance", Kind::Choice(&["none", "token", "sequence", "token_mask", "sequence_mask"])),
            optional("importance_min", Kind::Number),
            optional("importance_max", Kind::Number),
        ],
    },
    Table {
        path: "lora",
        keys: &[
            key("rank", Kind::Count),
            key("alpha", Kind::Number),
            optional("targets", Kind::Texts),
            optional("init_from", Kind::Text),
        ],
    },
    Table {
        path: "model",
        keys: &[
            optional("path", Kind::Text),
            key("dtype", Kind::Choice(&["bfloat16", "float32", "float64"])),
            key("weights", Kind::Choice(&["checkpoint", "fp8"])),
            key("random_init", Kind::Switch),
            key("allow_zero_weights", Kind::Switch),
            optional("rope_scaling", Kind::Free),
        ],
    },
    Table {
        path: "data",
        keys: &[
            optional("path", Kind::Text),
            optional("sources", Kind::Sources),
            optional("held_out", Kind::Files),
            key("shuffle", Kind::Switch),
            key("too_long", Kind::Choice(&["refuse", "cut_middle", "cut_left"])),
        ],
    },
    Table {
        path: "run",
        keys: &[
            key("dir", Kind::Text),
            key("seed", Kind::Count),
            key("steps", Kind::Count),
            key("reuse_capture", Kind::Count),
            key("device", Kind::Choice(&["auto", "cpu", "cuda"])),
            key("share_device", Kind::Switch),
            key("direct", Kind::When),
            key("deterministic", Kind::Switch),
            key("trace", Kind::Switch),
            key("grace_sec", Kind::Count),
            key("stall_sec", Kind::Count),
            key("log_level", Kind::Choice(&["error", "warn", "info", "debug", "trace"])),
        ],
    },
    Table {
        path: "rollout",
        keys: &[
            key("sample", Kind::Switch),
            optional("max_tokens", Kind::Count),
            key("top_p", Kind::Number),
            key("top_k", Kind::Count),
            key("pages_on_device", Kind::When),
            key("keep_choices", Kind::Switch),
            key("token_sec_max", Kind::Number),
            optional("gap_warn", Kind::Number),
        ],
    },
    Table {
        path: "reward",
        keys: &[
            optional("after", Kind::Text),
            optional("pattern", Kind::Text),
            optional("field", Kind::Text),
            optional("length_tokens", Kind::Count),
            optional("command", Kind::Texts),
            key("command_sec", Kind::Count),
            optional("rubric", Kind::Text),
            key("judge_scale", Kind::Pair),
            key("judge_temperature", Kind::Temperature),
            key("judge_tokens", Kind::Count),
            key("judge_parallel", Kind::Count),
            key("judge_prompt_chars", Kind::Count),
            optional("judges", Kind::Judges),
            key("missing_share_max", Kind::Number),
        ],
    },
    Table {
        path: "tools",
        keys: &[
            optional("command", Kind::Texts),
            key("call_start", Kind::Text),
            key("call_end", Kind::Text),
            optional("reply_start", Kind::Text),
            optional("reply_end", Kind::Text),
            key("turns", Kind::Count),
            key("tokens", Kind::Count),
            key("reply_sec", Kind::Count),
            key("failed_share_max", Kind::Number),
        ],
    },
    Table {
        path: "eval",
        keys: &[key("every", Kind::Count), key("greedy", Kind::Switch), optional("samples", Kind::Count)],
    },
    Table {
        path: "checkpoint",
        keys: &[
            key("every", Kind::Count),
            key("every_sec", Kind::Count),
            key("keep", Kind::Count),
            optional("keep_best", Kind::Text),
        ],
    },
    Table {
        path: "alarm",
        keys: &[
            key("window", Kind::Count),
            key("kl_warn", Kind::Number),
            optional("kl_stop", Kind::Number),
            key("grad_norm_warn", Kind::Number),
            optional("grad_norm_stop", Kind::Number),
            key("entropy_low_warn", Kind::Number),
            optional("entropy_low_stop", Kind::Number),
            key("entropy_high_warn", Kind::Number),
            optional("entropy_high_stop", Kind::Number),
            key("truncated_warn", Kind::Number),
            optional("truncated_stop", Kind::Number),
            key("equal_rewards_warn", Kind::Number),
            optional("equal_rewards_stop", Kind::Number),
            key("reward_flat_warn", Kind::Count),
            optional("reward_flat_stop", Kind::Count),
            key("missing_rewards_warn", Kind::Number),
            optional("missing_rewards_stop", Kind::Number),
            key("reward_sec_warn", Kind::Number),
            optional("reward_sec_stop", Kind::Number),
            optional("sampled_gap_stop", Kind::Number),
            key("device_memory_warn", Kind::Number),
            optional("device_memory_stop", Kind::Number),
            key("zero_gradient_warn", Kind::Count),
            optional("zero_gradient_stop", Kind::Count),
        ],
    },
    Table { path: "gate", keys: &[key("scale", Kind::Count)] },
    Table {
        path: "endpoint",
        keys: &[
            key("style", Kind::Choice(&["messages", "chat_completions"])),
            optional("api_base", Kind::Text),
            key("allow_http", Kind::Switch),
            key("api_key_env", Kind::Text),
            optional("default_model", Kind::Text),
            key("timeout_sec", Kind::Count),
            key("max_retries", Kind::Count),
            key("retry_backoff", Kind::Number),
            optional("price_in", Kind::Number),
            optional("price_out", Kind::Number),
        ],
    },
    Table { path: "endpoint.endpoints", keys: &[optional("chat", Kind::Text), key("models", Kind::Text)] },
    Table {
        path: "endpoint.usage",
        keys: &[
            key("reward_scoring", Kind::Switch),
            key("log_summary", Kind::Switch),
            key("sample_replay", Kind::Switch),
            key("data_generation", Kind::Switch),
            key("prompt_text", Kind::Switch),
        ],
    },
];

/// `table.name`, or the name alone at the top.
pub(super) fn join(table: &str, name: &str) -> String {
    if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") }
}

/// The key at a dotted path.
pub(super) fn key_at(path: &str) -> Option<&'static Key> {
    let (table, name) = path.rsplit_once('.')?;
    TABLES.iter().find(|t| t.path == table)?.keys.iter().find(|k| k.name == name)
}

/// Whether a dotted path is a table.
pub(super) fn is_table(path: &str) -> bool {
    TABLES.iter().any(|t| t.path == path)
}

/// Every key with its dotted path.
pub(super) fn keys() -> impl Iterator<Item = (String, &'static Key)> {
    TABLES.iter().flat_map(|t| t.keys.iter().map(|k| (join(t.path, k.name), k)))
}

/// The paths of keys or tables called `name`, whatever table they stand in.
pub(super) fn homes(name: &str) -> Vec<String> {
    let tail = |path: &str| path.rsplit('.').next() == Some(name);
    let tables = TABLES.iter().map(|t| t.path.to_owned());
    keys().map(|(path, _)| path).chain(tables).filter(|p| tail(p)).collect()
}

/// The known key or table whose name is nearest to `name`: in `table` if one there is near, else anywhere.
pub(super) fn nearest(table: &str, name: &str) -> String {
    let likeness = |path: &str| likeness(name, path.rsplit('.').next().unwrap_or(path));
    let best = |paths: Vec<String>| {
        paths.into_iter().map(|p| (likeness(&p), p)).max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(&a.1)))
    };
    let all: Vec<String> = TABLES.iter().map(|t| t.path.to_owned()).chain(keys().map(|(p, _)| p)).collect();
    let parent = |path: &str| path.rsplit_once('.').map_or(String::new(), |(t, _)| t.to_owned());
    let here = best(all.iter().filter(|p| parent(p) == table).cloned().collect());
    let anywhere = best(all);
    match (here, anywhere) {
        (Some((near, path)), Some((far, _))) if near >= 0.7 || near >= far => path,
        (_, Some((_, path))) | (Some((_, path)), None) => path,
        (None, None) => String::new(),
    }
}

fn is_number(value: &Value) -> bool {
    matches!(value, Value::Num(..))
}

fn is_text(value: &Value) -> bool {
    matches!(value, Value::String(_, text) if !text.is_empty())
}

/// `{ name = "contains", weight = 0.5 }`.
fn is_weighted_reward(value: &Value) -> bool {
    let Value::Dict(_, dict) = value else { return false };
    let known = dict.get("name").and_then(Value::as_str).is_some_and(is_reward);
    dict.len() == 2 && known && dict.get("weight").is_some_and(is_number)
}

/// Whether a table has only these keys, each of its kind, and those that are needed.
fn is_table_of(value: &Value, keys: &[(&str, Kind, Need)]) -> bool {
    let Value::Dict(_, dict) = value else { return false };
    let of = |name: &str| keys.iter().find(|(known, ..)| *known == name);
    let fits = |(name, value): (&String, &Value)| of(name).is_some_and(|(_, kind, _)| kind.accepts(value));
    let is_there = |(name, _, need): &(&str, Kind, Need)| *need != Need::Required || dict.contains_key(*name);
    dict.iter().all(fits) && keys.iter().all(is_there)
}

/// `{ name = "codes", path = "a.jsonl", weight = 3.0 }`.
fn is_source(value: &Value) -> bool {
    let keys = [
        ("name", Kind::Text, Need::Required),
        ("path", Kind::Text, Need::Required),
        ("weight", Kind::Number, Need::Optional),
    ];
    is_table_of(value, &keys)
}

/// `{ clarity = { rubric = "clarity.txt" } }`.
fn is_judges(value: &Value) -> bool {
    let keys = [
        ("rubric", Kind::Text, Need::Optional),
        ("scale", Kind::Pair, Need::Optional),
        ("model", Kind::Text, Need::Optional),
        ("prompt_chars", Kind::Count, Need::Optional),
    ];
    let Value::Dict(_, judges) = value else { return false };
    !judges.is_empty() && judges.iter().all(|(name, judge)| is_set_name(name) && is_table_of(judge, &keys))
}

/// `"a.jsonl"`, or `{ codes = "a.jsonl", books = "b.jsonl" }`.
fn is_files(value: &Value) -> bool {
    match value {
        Value::Dict(_, files) => {
            !files.is_empty() && files.iter().all(|(name, file)| is_set_name(name) && is_text(file))
        }
        value => is_text(value),
    }
}

fn is_count(value: &Value) -> bool {
    match value {
        Value::Num(_, Num::F32(_) | Num::F64(_)) => false,
        Value::Num(_, number) => number.to_u128_lossy().is_some_and(|n| i64::try_from(n).is_ok()),
        _ => false,
    }
}

impl Kind {
    /// Whether a value looks as it must.
    pub(super) fn accepts(self, value: &Value) -> bool {
        match (self, value) {
            (Kind::Switch | Kind::When, Value::Bool(..)) | (Kind::Free, Value::Dict(..)) => true,
            (Kind::Count, value) => is_count(value),
            (Kind::Temperature, Value::String(_, text)) => text == "none",
            (Kind::Number | Kind::Temperature, value) => is_number(value),
            (Kind::Text, value) => is_text(value),
            (Kind::Files, value) => is_files(value),
            (Kind::Choice(words), Value::String(_, text)) => words.contains(&text.as_str()),
            (Kind::Reward, Value::String(_, text)) => is_reward(text),
            (Kind::Sources, Value::Array(_, items)) => !items.is_empty() && items.iter().all(is_source),
            (Kind::Judges, value) => is_judges(value),
            (Kind::Reward, Value::Array(_, items)) => !items.is_empty() && items.iter().all(is_weighted_reward),
            (Kind::Texts, Value::Array(_, items)) => items.iter().all(is_text),
            (Kind::Pair, Value::Array(_, items)) => items.len() == 2 && items.iter().all(is_number),
            (Kind::When, Value::String(_, text)) => text == "auto",
            (Kind::Gradient, Value::String(_, text)) => text == "exact" || text == "response",
            (Kind::Gradient, Value::Dict(_, dict)) => dict.len() == 1 && dict.get("last").is_some_and(is_count),
            _ => false,
        }
    }

    /// What a value must look like, in words.
    pub(super) fn expects(self) -> String {
        match self {
            Kind::Switch => "true or false".to_owned(),
            Kind::Count => "a whole number from 0".to_owned(),
            Kind::Number => "a number".to_owned(),
            Kind::Text => "a text that is not empty".to_owned(),
            Kind::Choice([one]) => format!("\"{one}\", the only one there is"),
            Kind::Choice(words) => {
                let (last, first) = words.split_last().map_or(("", &words[..0]), |(l, f)| (*l, f));
                let first: Vec<String> = first.iter().map(|w| format!("\"{w}\"")).collect();
                format!("{} or \"{last}\"", first.join(", "))
            }
            Kind::Reward => {
                format!("{}, or a list of {{ name, weight }}", Kind::Choice(RewardName::WORDS).expects())
            }
            Kind::Texts => "a list of texts".to_owned(),
            Kind::Pair => "a list of two numbers".to_owned(),
            Kind::Temperature => "a number or \"none\"".to_owned(),
            Kind::When => "true, false or \"auto\"".to_owned(),
            Kind::Gradient => "\"exact\", \"response\" or { last = N }".to_owned(),
            Kind::Files => "a file, or a table { name = file, … } with names of letters, digits, _ and -".to_owned(),
            Kind::Sources => "a list of { name, path, weight }".to_owned(),
            Kind::Judges => {
                "a table of judges { NAME = { rubric, scale, model, prompt_chars }, … }, each key optional, with names of \
                 letters, digits, _ and -"
                    .to_owned()
            }
            Kind::Free => "a table".to_owned(),
        }
    }
}
