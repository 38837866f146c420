//! The plan in words.

use super::addend::Place;
use super::budget::Plan;
use super::seconds::Seconds;
use crate::config::RunConfig;
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;
use crate::runtime::units::Bytes;

impl Plan {
    /// The lines that the command prints.
    #[must_use]
    pub fn text(&self, config: &RunConfig) -> String {
        let context = &config.context;
        let mut lines = vec![
            format!(
                "{} ranks, {} share a prompt, {} prompts side by side",
                self.ranks,
                self.cp_size,
                self.ranks / self.cp_size.max(1)
            ),
            format!(
                "prompt {} + answer {} = {} positions, pages of {}",
                context.prompt_len, context.answer_len, context.max_seq_len, context.page_size
            ),
            format!("{} pages, {} pages a rank", self.pages, self.pages_per_rank),
            format!("gradient {}, group of {}", config.grpo.gradient, config.grpo.group_size),
        ];
        if self.addends.is_empty() {
            lines.push(
                "memory unknown: no model is set; name its folder with --model FOLDER or --set model.path=FOLDER"
                    .into(),
            );
            return lines.join("\n");
        }
        lines.push(self.choice(config));
        lines.extend(self.micro_block.map(|rows| rows.text()));
        lines.extend(self.rollout.map(|rollout| rollout.text(config.grpo.group_size)));
        for (title, place) in [("device", Place::Device), ("host", Place::Host)] {
            let peak = self.peak_phase(&[place]);
            let at = peak.map(|phase| format!(", what stays and what {phase} adds")).unwrap_or_default();
            lines.push(format!("{title} memory of a rank: {}{at}", self.sum(place)));
            for addend in self.addends.iter().filter(|addend| addend.place == place) {
                let phase = addend.phase.map(|phase| format!("{phase}: ")).unwrap_or_default();
                let label = format!("{phase}{}", addend.name);
                lines.push(format!("  {:>12}  {label:<37}  {}", addend.bytes.to_string(), addend.reason));
            }
        }
        let host_bytes = |ranks: u64| Bytes(self.sum(Place::Host).0.saturating_mul(ranks));
        if self.ranks_per_node < self.ranks {
            let here = self.ranks_per_node;
            lines.push(format!("host memory of a node of {here} ranks: {}", host_bytes(here)));
        }
        lines.push(format!("host memory of all {} ranks: {}", self.ranks, host_bytes(self.ranks)));
        lines.extend(self.seconds.as_ref().map(Seconds::text));
        lines.join("\n")
    }

    /// What is kept, where, and what it costs.
    fn choice(&self, config: &RunConfig) -> String {
        let place = |residency| if residency == Residency::Host { "host" } else { "device" };
        if !config.memory.prompt_no_grad {
            return "the conventional schedule: whole sequences, each on one rank, answer by answer".into();
        }
        let Keeping { pages, tail, every, attention, answer_attention, .. } = self.keeping;
        let answers =
            if answer_attention { "kept" } else { "computed again (costs one attention pass of the answers)" };
        let answers = format!("answers' attention outputs {answers}");
        let pages = format!("pages in {} memory", place(pages));
        if config.tail(config.context.prompt_len) <= config.memory.micro_rows() {
            return format!("{pages}; {answers}");
        }
        let inputs = match every {
            1 => "every layer's tail inputs".into(),
            _ => format!("tail inputs of one layer in {every} (costs {}/{every} of a prompt forward)", every - 1),
        };
        let attention = match (attention, every) {
            (true, _) => "attention outputs kept",
            (false, 1) => "attention outputs computed again (costs one attention pass over the prompt)",
            (false, _) => "attention outputs computed again (costs two attention passes over the prompt)",
        };
        let sets = match self.index_sets {
            Some(true) => ", index sets of the prompt kept",
            Some(false) => ", index sets of the prompt chosen again (costs one pass of the index over the prompt)",
            None => "",
        };
        format!("{pages}, {inputs} in {} memory, {attention}{sets}; {answers}", place(tail))
    }
}
