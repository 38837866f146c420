//! Rows of a micro-block, where the configuration leaves them open.

use serde::Serialize;

use super::offload_choice::OffloadChoice;
use super::sizes::Sizes;
use crate::config::{MICRO_BLOCK_DEFAULT, RunConfig};
use crate::model::shape::Shape;
use crate::prompt::pages::Residency;
use crate::runtime::units::{Bytes, Tokens};

/// How often the smallest micro-block may be doubled: 2,048 to 32,768 rows.
const DOUBLINGS: u32 = 4;
/// The part of a device's memory that a micro-block's scratch may take: one in so many. Enough that launches no longer bind a
/// small model; a large model's products are long at 2,048 rows already, and its memory goes to pages.
const SCRATCH_PART: u64 = 64;

/// Rows of a micro-block, and what they follow from.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct MicroBlock {
    /// Rows of a segment, at most.
    pub rows: Tokens,
    /// Why so many.
    pub because: RowsBecause,
}

/// What the rows of a micro-block follow from.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowsBecause {
    /// The configuration names them.
    Configured,
    /// Chosen for a device and these lengths.
    Device,
    /// A CPU takes the default.
    Cpu,
    /// Nobody has told the device's memory, so the default stands in.
    UnknownDevice,
}

impl MicroBlock {
    /// The line about it.
    #[must_use]
    pub fn text(&self) -> String {
        let why = match self.because {
            RowsBecause::Configured => "as memory.micro_block says",
            RowsBecause::Device => "chosen for this device and these lengths",
            RowsBecause::Cpu => "the default of a CPU",
            RowsBecause::UnknownDevice => {
                "assumed: a run chooses them for its GPU, and so does the plan with --device-gib; seconds and memory follow them"
            }
        };
        format!("micro-blocks of {} rows, {why}", self.rows)
    }
}

/// [`micro_block`] of a plan, and what it follows from; without a `device` on a CPU (`host_only`) or on a GPU of unknown memory.
#[must_use]
pub fn planned_rows(
    config: &RunConfig,
    ranks: u64,
    shape: Option<&Shape>,
    device: Option<Bytes>,
    host_only: bool,
) -> MicroBlock {
    let because = match (config.memory.micro_block, host_only, device) {
        (Tokens(1..), ..) => RowsBecause::Configured,
        (_, true, _) => RowsBecause::Cpu,
        (_, false, Some(_)) => RowsBecause::Device,
        (_, false, None) => RowsBecause::UnknownDevice,
    };
    MicroBlock { rows: micro_block(config, ranks, shape, device.filter(|_| !host_only)), because }
}

/// Rows of a micro-block for a world of `ranks`: as configured, else on a GPU with `device` bytes in all the largest of 2,048,
/// 4,096, … 32,768 that is at most the prompt rows of a rank, less than a tail of more than 2,048 rows, which so stays a long
/// one, and whose scratch is at most 1/64 of the device's memory. Without a device 2,048.
#[must_use]
pub fn micro_block(config: &RunConfig, ranks: u64, shape: Option<&Shape>, device: Option<Bytes>) -> Tokens {
    let configured = config.memory.micro_block;
    let (Some(shape), Some(device), Tokens(0)) = (shape, device, configured) else {
        return config.memory.micro_rows();
    };
    let rank_rows = config.pages_per_rank(ranks).0.saturating_mul(config.context.page_size.0);
    let tail = config.tail(config.context.prompt_len);
    let fits = |rows: Tokens| {
        let is_long = tail > MICRO_BLOCK_DEFAULT;
        let mut config = config.clone();
        config.memory.micro_block = rows;
        let choice = OffloadChoice::stated(&config, Residency::Host);
        let sizes = Sizes::new(&config, ranks, shape, choice, true);
        let scratch = shape.most(|layer| sizes.block(layer, rank_rows, true));
        rows.0 <= rank_rows && (!is_long || rows < tail) && scratch <= device.0 / SCRATCH_PART
    };
    let sizes = (1..=DOUBLINGS).rev().map(|doublings| Tokens(MICRO_BLOCK_DEFAULT.0 << doublings));
    sizes.into_iter().find(|&rows| fits(rows)).unwrap_or(MICRO_BLOCK_DEFAULT)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{DeviceChoice, Gradient};
    use crate::plan::gib;

    fn rows(shape: &str, prompt: u64, ranks: u64, gradient: Gradient, device: Option<u64>) -> u64 {
        let mut config = RunConfig::laptop();
        config.run.device = DeviceChoice::Auto;
        config.context.prompt_len = Tokens(prompt);
        config.context.answer_len = Tokens(1024);
        config.context.max_seq_len = Tokens(prompt + 1024);
        config.model.dtype = crate::config::Dtype::Bfloat16;
        config.grpo.gradient = gradient;
        let folder = Path::new("configs/shapes").join(shape);
        let shape = Shape::read(&folder, None).unwrap_or_else(|error| panic!("{error}"));
        micro_block(&config, ranks, Some(&shape), device.map(gib)).0
    }

    #[test]
    fn a_small_model_takes_more_rows_than_a_large_one_and_a_cpu_takes_the_least() {
        let exact = |shape, prompt, ranks, device| rows(shape, prompt, ranks, Gradient::Exact, device);
        assert_eq!(exact("qwen3-8b", 131_072, 1, Some(139)), 8192);
        assert_eq!(exact("qwen3-0.6b", 131_072, 1, Some(139)), 32_768);
        assert_eq!(exact("qwen3-8b", 131_072, 1, Some(16)), 2048);
        assert_eq!(exact("qwen3-0.6b", 131_072, 1, None), 2048);
    }

    #[test]
    fn a_micro_block_is_no_more_than_a_ranks_rows_and_leaves_a_long_tail_long() {
        assert_eq!(
            rows("qwen3-0.6b", 16_384, 1, Gradient::Exact, Some(139)),
            8192,
            "all of 16,384 rows would be a short tail"
        );
        assert_eq!(rows("qwen3-0.6b", 16_384, 1, Gradient::Last(Tokens(0)), Some(139)), 16_384);
        assert_eq!(rows("qwen3-0.6b", 16_384, 4, Gradient::Exact, Some(139)), 4096);
        assert_eq!(rows("qwen3-0.6b", 16_384, 1, Gradient::Last(Tokens(2049)), Some(139)), 2048);
    }
}
