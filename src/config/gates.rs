//! The gates, each as its file in `configs/gates` says: which gate comes before it, what it runs, what judges it, and
//! which values of a configuration it changes. A new file there is a new gate; nothing here names one.

use figment::Figment;
use figment::value::Dict;
use serde::Deserialize;

use super::check::divisor;
use super::problem::{Fault, Problem};
use super::source::Gathered;
use super::tables::{ContextConfig, MemoryConfig};
use crate::runtime::units::Tokens;

/// The values that all gates share.
pub(super) const EVERY_TOML: &str = include_str!("../../configs/gates/every.toml");

/// Name and text of every other file of `configs/gates`, in the order of the names; `build.rs` makes the list.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/gates.rs"));

/// Keys of earlier sources that no gate reads: a gate samples its own prompt and answers, and counts of pages belong to
/// the length that they were written for.
pub(super) const LEFT_OUT: [&str; 13] = [
    "context.cp_pages_per_gpu",
    "data.path",
    "data.sources",
    "data.held_out",
    "eval.samples",
    "checkpoint.keep_best",
    "grpo.importance_max",
    "grpo.importance_min",
    "grpo.reuse_drift_max",
    "alarm.kl_stop",
    "tools.command",
    "tools.reply_start",
    "tools.reply_end",
];

/// What a gate runs.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Runs {
    /// A request to the endpoint; no ranks and no model.
    Endpoint,
    /// One run in the gate's folder.
    Once,
    /// One run in each of two gradient modes, and parity with plain autograd.
    BothGradients,
    /// One run to its end, and the same run again with a stop in the middle.
    StoppedAndResumed,
}

/// What grows from the compared gate to this one.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Growth {
    /// The number of positions.
    Length,
    /// The number of answers.
    Group,
}

/// The table `[gate]` of a gate's file; `configs/gates/every.toml` explains the keys.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    after: Option<String>,
    runs: Runs,
    #[serde(default)]
    advantages: Vec<f64>,
    growth: Option<Growth>,
    compare_with: Option<String>,
    #[serde(default)]
    any_length: bool,
}

/// What a gate is by its name, whatever flags and variables say: the values of its own file, before a scale.
#[expect(missing_docs, reason = "the names of the configuration's keys")]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Own {
    /// `context.max_seq_len`: longest prompt and answer together.
    pub positions: Tokens,
    pub prompt_len: Tokens,
    pub answer_len: Tokens,
    pub group_size: u64,
    pub steps: u64,
}

/// A staged validation run.
#[derive(Clone, Debug)]
pub struct Gate {
    name: &'static str,
    description: Description,
    /// The values that it changes in a configuration.
    values: Dict,
}

impl Gate {
    /// Every gate, each one after the gate that must have passed before it.
    #[must_use]
    pub fn all() -> Vec<Gate> {
        let mut gates: Vec<Gate> = FILES.iter().map(|(name, text)| Gate::read(name, text)).collect();
        gates.sort_by_cached_key(|gate| gate.all_before().len());
        gates
    }

    /// The gate of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Gate> {
        FILES.iter().find(|(known, _)| *known == name).map(|(name, text)| Gate::read(name, text))
    }

    /// The gate that asks the endpoint.
    ///
    /// # Panics
    /// Never: a test finds exactly one.
    #[must_use]
    pub fn endpoint() -> Gate {
        Gate::all().into_iter().find(Gate::is_endpoint).expect("one gate asks the endpoint")
    }

    fn read(name: &'static str, text: &str) -> Gate {
        let mut values: Dict = toml::from_str(text).expect("a test reads every gate's file");
        let description = values.remove("gate").expect("every gate's file has a table [gate]");
        let description = description.deserialize().expect("a test reads every table [gate]");
        Gate { name, description, values }
    }

    /// The name in commands, folders and receipts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The gate that must have passed before this one.
    #[must_use]
    pub fn after(&self) -> Option<Gate> {
        self.description.after.as_deref().and_then(Gate::named)
    }

    /// Every gate that must have passed before this one, the nearest first. A gate that none of them names stands beside
    /// them and is optional.
    #[must_use]
    pub fn all_before(&self) -> Vec<Gate> {
        std::iter::successors(self.after(), Gate::after).take(FILES.len()).collect()
    }

    /// What it runs.
    #[must_use]
    pub fn runs(&self) -> Runs {
        self.description.runs
    }

    /// Whether it asks the endpoint and has neither ranks nor a model.
    #[must_use]
    pub fn is_endpoint(&self) -> bool {
        self.runs() == Runs::Endpoint
    }

    /// The advantages that a group of `answers` must have, where the gate is about them. One stated advantage is that of a
    /// group of one; several repeat over the group.
    #[must_use]
    pub fn advantages(&self, answers: u64) -> Option<Vec<f64>> {
        let in_turn = &self.description.advantages;
        if let [only] = in_turn[..] {
            return Some(vec![only]);
        }
        let all = (0..answers).zip(in_turn.iter().copied().cycle()).map(|(_, advantage)| advantage);
        (!in_turn.is_empty()).then(|| all.collect())
    }

    /// The gate that this one is compared with, and what grows from that one to this one.
    #[must_use]
    pub fn comparison(&self) -> Option<(Gate, Growth)> {
        Some((Gate::named(self.description.compare_with.as_deref()?)?, self.description.growth?))
    }

    /// Whether the user may choose its length.
    #[must_use]
    pub fn has_any_length(&self) -> bool {
        self.description.any_length
    }

    /// What the gate is by its name; all is 0 where it has no run.
    #[must_use]
    pub fn own(&self) -> Own {
        let files = self.files();
        // No run has the length 0, so a run cannot be taken for a gate whose file lacks a length.
        let count = |path: &str| files.extract_inner::<u64>(path).unwrap_or_default();
        Own {
            positions: Tokens(count("context.max_seq_len")),
            prompt_len: Tokens(count("context.prompt_len")),
            answer_len: Tokens(count("context.answer_len")),
            group_size: count("grpo.group_size"),
            steps: count("run.steps"),
        }
    }

    /// Whether the policy samples its answers; otherwise they come with the data.
    #[must_use]
    pub fn samples(&self) -> bool {
        self.value("rollout.sample").unwrap_or_default()
    }

    /// Tokens of a sampled answer, at most; absent where the gate leaves it to the configuration.
    #[must_use]
    pub fn sampled_tokens(&self) -> Option<Tokens> {
        self.value("rollout.max_tokens").map(Tokens)
    }

    /// Whether the gate itself asks for kernels that repeat bit for bit.
    #[must_use]
    pub fn is_deterministic(&self) -> bool {
        self.value("run.deterministic").unwrap_or_default()
    }

    fn value<T: for<'de> Deserialize<'de>>(&self, path: &str) -> Option<T> {
        self.files().extract_inner(path).ok()
    }

    /// The shared values, overridden by the gate's own.
    fn files(&self) -> Figment {
        let mut gathered = Gathered::default();
        self.add_to(&mut gathered);
        gathered.layers.iter().fold(Figment::new(), |files, layer| files.merge(layer))
    }

    /// Adds the shared values and the gate's own as two sources.
    pub(super) fn add_to(&self, gathered: &mut Gathered) {
        gathered.builtin("gates", EVERY_TOML);
        gathered.values(self.name, self.values.clone());
    }
}

/// Divides lengths, page size and micro-blocks by `scale`, so that counts of pages stay and what grows with the length at
/// full scale grows here. Returns the problem of a scale that does not divide all lengths; a scale of 0 is another rule's.
pub(super) fn scale_down(context: &mut ContextConfig, memory: &mut MemoryConfig, scale: u64) -> Option<Problem> {
    if scale <= 1 {
        return None;
    }
    let ContextConfig { max_seq_len, prompt_len, answer_len, page_size, .. } = context;
    let lengths = [max_seq_len, prompt_len, answer_len, page_size];
    // What divides all of them divides their greatest common divisor.
    let common = lengths.iter().fold(0, |common, length| greatest_common_divisor(common, length.0));
    if !common.is_multiple_of(scale) {
        let be = divisor(common, scale);
        let [longest, prompt, answer, page] = lengths.map(|length| *length);
        let why = format!(
            "it divides max_seq_len {longest}, prompt_len {prompt}, answer_len {answer} and page_size {page} (it is {scale})"
        );
        let with = vec!["context.max_seq_len", "context.prompt_len", "context.answer_len", "context.page_size"];
        let fault = Fault::Should { be: be.to_string(), why };
        return Some(Problem { key: "gate.scale".into(), source: None, fault, with });
    }
    for length in lengths {
        *length = Tokens(length.0 / scale);
    }
    for rows in [&mut memory.micro_block, &mut memory.head_block] {
        *rows = Tokens(rows.0.div_ceil(scale));
    }
    None
}

/// Of two numbers; of 0 and another it is the other.
fn greatest_common_divisor(one: u64, two: u64) -> u64 {
    let (mut one, mut two) = (one, two);
    while two > 0 {
        (one, two) = (two, one % two);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gates that must have passed before the last one, and the last one.
    const LADDER: [&str; 11] = [
        "gate1_key",
        "gate2_32k",
        "gate3_128k",
        "gate3_256k",
        "gate3_512k",
        "gate3_1m",
        "gate3_2m",
        "gate4_g1",
        "gate5_g2",
        "gate6_g8",
        "gate7_online",
    ];

    fn gate(name: &str) -> Gate {
        Gate::named(name).expect("there is one")
    }

    #[test]
    fn the_last_gate_stands_on_the_whole_ladder() {
        let mut ladder: Vec<&str> = gate("gate7_online").all_before().iter().map(Gate::name).collect();
        ladder.reverse();
        assert_eq!(ladder, LADDER[..10]);
        assert!(Gate::named("gate8").is_none());
    }

    #[test]
    fn every_file_says_what_a_gate_is() {
        let all = Gate::all();
        let names: Vec<&str> = all.iter().map(Gate::name).collect();
        assert_eq!(all.iter().filter(|gate| gate.is_endpoint()).count(), 1);
        assert!(all[0].is_endpoint() && all[0].after().is_none(), "the endpoint is asked first");
        for (place, gate) in all.iter().enumerate() {
            let Description { after, compare_with, growth, .. } = &gate.description;
            for other in [after, compare_with].into_iter().flatten() {
                assert!(names[..place].contains(&other.as_str()), "{}: {other} is no gate before it", gate.name);
            }
            assert_eq!(after.is_none(), place == 0, "{}", gate.name);
            assert_eq!(compare_with.is_some(), growth.is_some(), "{}", gate.name);
            let mut gathered = Gathered::default();
            gate.add_to(&mut gathered);
            assert!(gathered.problems.is_empty(), "{}: {:?}", gate.name, gathered.problems);
        }
    }

    #[test]
    fn every_gate_has_a_row_in_the_document_and_the_document_no_other() {
        let document = include_str!("../../docs/gates.md");
        let rows = document.lines().filter_map(|line| line.strip_prefix("| `gate"));
        let rows: Vec<String> = rows.filter_map(|row| Some(format!("gate{}", row.split_once('`')?.0))).collect();
        assert_eq!(rows, Gate::all().iter().map(Gate::name).collect::<Vec<_>>());
    }

    #[test]
    fn a_gates_own_values_are_those_of_its_files() {
        for (name, positions, group_size, steps) in [
            ("gate2_32k", 32_768, 2, 1),
            ("gate3_128k", 131_072, 2, 1),
            ("gate3_2m", 2_097_152, 2, 1),
            ("gate4_g1", 2_097_152, 1, 1),
            ("gate6_g8", 2_097_152, 8, 1),
            ("gate7_online", 32_768, 2, 4),
        ] {
            let own = Own {
                positions: Tokens(positions),
                prompt_len: Tokens(positions - 8192),
                answer_len: Tokens(8192),
                group_size,
                steps,
            };
            assert_eq!(gate(name).own(), own, "{name}");
        }
        assert_eq!(gate("gate6_g8").advantages(3), Some(vec![-1.0, 1.0, -1.0]));
        assert_eq!(gate("gate7_online").advantages(2), None);
        let (two, growth) = gate("gate6_g8").comparison().expect("it is compared");
        assert_eq!((two.name(), growth), ("gate5_g2", Growth::Group));
    }

    #[test]
    fn one_stated_advantage_is_that_of_a_group_of_one_and_several_repeat() {
        let advantages = |name: &str, answers| Gate::named(name).expect("a gate").advantages(answers);
        assert_eq!(advantages("gate4_g1", 1), Some(vec![1.0]));
        assert_eq!(advantages("gate4_g1", 2), Some(vec![1.0]), "a larger group is not what the gate is about");
        assert_eq!(advantages("gate6_g8", 4), Some(vec![-1.0, 1.0, -1.0, 1.0]));
        assert_eq!(advantages("gate2_32k", 2), None);
    }
}
