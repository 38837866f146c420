//! The gates as data: which there are, in the order in which they are passed, and what each changes in a configuration.

use super::check::divisor;
use super::problem::{Fault, Problem};
use super::source::Gathered;
use super::tables::{ContextConfig, MemoryConfig};
use crate::runtime::units::Tokens;

/// What all gates change.
pub(super) const EVERY_TOML: &str = include_str!("../../configs/gates/every.toml");

/// Keys of earlier sources that no gate reads: a gate's prompt is drawn at the gate's length, and counts of pages belong
/// to the length that they were written for.
pub(super) const LEFT_OUT: [&str; 3] = ["context.cp_pages_per_gpu", "data.path", "data.held_out"];

/// What a gate is by its name, whatever flags and the environment say: its own files' values, before a scale.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Own {
    /// Longest prompt and answer together.
    pub positions: Tokens,
    /// Longest prompt.
    pub prompt_len: Tokens,
    /// Longest answer.
    pub answer_len: Tokens,
    /// Answers of a group.
    pub group_size: u64,
    /// Updates.
    pub steps: u64,
}

/// The staged validation runs.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Gate {
    /// Endpoint and key answer.
    Key,
    /// 32,768 positions, both gradient modes, parity.
    Short,
    /// 131,072 positions.
    K128,
    /// 262,144 positions.
    K256,
    /// 524,288 positions.
    K512,
    /// 1,048,576 positions.
    M1,
    /// 2,097,152 positions.
    M2,
    /// One answer.
    One,
    /// Two answers.
    Two,
    /// Eight answers.
    Eight,
    /// Several updates, checkpoints, resume.
    Online,
}

impl Gate {
    /// All of them; each is passed before the next one.
    pub const ALL: [Gate; 11] = [
        Gate::Key,
        Gate::Short,
        Gate::K128,
        Gate::K256,
        Gate::K512,
        Gate::M1,
        Gate::M2,
        Gate::One,
        Gate::Two,
        Gate::Eight,
        Gate::Online,
    ];

    /// The name in commands, folders and receipts, and what the gate changes.
    fn file(self) -> (&'static str, &'static str) {
        match self {
            Gate::Key => ("gate1_key", ""),
            Gate::Short => ("gate2_32k", include_str!("../../configs/gates/gate2_32k.toml")),
            Gate::K128 => ("gate3_128k", include_str!("../../configs/gates/gate3_128k.toml")),
            Gate::K256 => ("gate3_256k", include_str!("../../configs/gates/gate3_256k.toml")),
            Gate::K512 => ("gate3_512k", include_str!("../../configs/gates/gate3_512k.toml")),
            Gate::M1 => ("gate3_1m", include_str!("../../configs/gates/gate3_1m.toml")),
            Gate::M2 => ("gate3_2m", include_str!("../../configs/gates/gate3_2m.toml")),
            Gate::One => ("gate4_g1", include_str!("../../configs/gates/gate4_g1.toml")),
            Gate::Two => ("gate5_g2", include_str!("../../configs/gates/gate5_g2.toml")),
            Gate::Eight => ("gate6_g8", include_str!("../../configs/gates/gate6_g8.toml")),
            Gate::Online => ("gate7_online", include_str!("../../configs/gates/gate7_online.toml")),
        }
    }

    /// The name in commands, folders and receipts.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.file().0
    }

    /// What the gate changes, as a config.toml.
    pub(super) fn toml(self) -> &'static str {
        self.file().1
    }

    /// What the gate is by its name; of [`Gate::Key`], which has no run, all is 0.
    #[must_use]
    pub fn own(self) -> Own {
        let files = self.files();
        // No run has the length 0, so a key that a gate's file lacks cannot be met.
        let of = |path: &str| files.extract_inner::<u64>(path).unwrap_or_default();
        Own {
            positions: Tokens(of("context.max_seq_len")),
            prompt_len: Tokens(of("context.prompt_len")),
            answer_len: Tokens(of("context.answer_len")),
            group_size: of("grpo.group_size"),
            steps: of("run.steps"),
        }
    }

    /// Whether the policy answers for itself in it; answers that come with the data are the rule.
    #[must_use]
    pub fn samples(self) -> bool {
        self.files().extract_inner("rollout.sample").unwrap_or_default()
    }

    /// Tokens of an answer that the policy gives in it; without an end of its own it is as long as others are.
    #[must_use]
    pub fn sampled_tokens(self) -> Option<Tokens> {
        self.files().extract_inner("rollout.max_tokens").ok().map(Tokens)
    }

    /// All gates' values and, before them, its own.
    fn files(self) -> figment::Figment {
        let mut gathered = Gathered::default();
        gathered.builtin("gates", EVERY_TOML);
        gathered.builtin(self.name(), self.toml());
        gathered.layers.iter().fold(figment::Figment::new(), |files, layer| files.merge(layer))
    }

    /// The gate of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Gate> {
        Gate::ALL.into_iter().find(|gate| gate.name() == name)
    }

    /// The gate that is passed before this one.
    #[must_use]
    pub fn below(self) -> Option<Gate> {
        Gate::ALL.into_iter().take_while(|gate| *gate != self).last()
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

    #[test]
    fn each_gate_stands_behind_the_one_below_and_has_a_name_of_its_own() {
        assert_eq!(Gate::Key.below(), None);
        for pair in Gate::ALL.windows(2) {
            assert_eq!(pair[1].below(), Some(pair[0]));
            assert_ne!(pair[0].name(), pair[1].name());
        }
        assert!(Gate::ALL.into_iter().all(|gate| Gate::named(gate.name()) == Some(gate)));
        assert_eq!(Gate::named("gate8"), None);
    }

    #[test]
    fn a_gates_own_values_are_those_of_its_files() {
        let own = |positions: u64, answers, steps| Own {
            positions: Tokens(positions),
            prompt_len: Tokens(positions - 8192),
            answer_len: Tokens(8192),
            group_size: answers,
            steps,
        };
        let rows = [(Gate::Short, 32_768, 2, 1), (Gate::K128, 131_072, 2, 1), (Gate::M2, 2_097_152, 2, 1)];
        let more = [(Gate::One, 2_097_152, 1, 1), (Gate::Eight, 2_097_152, 8, 1), (Gate::Online, 32_768, 2, 4)];
        for (gate, positions, answers, steps) in rows.into_iter().chain(more) {
            assert_eq!(gate.own(), own(positions, answers, steps), "{}", gate.name());
        }
    }
}
