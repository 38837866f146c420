//! What a run reads besides the model: data sets, the tokenizer, the tokens that end an answer, and what scores answers.

use std::fs;
use std::path::PathBuf;

use tch::{Device, Kind};

use super::{rewards, signal};
use crate::config::{RewardFn, RunConfig};
use crate::data::{Answer, Answers, Dataset, Group, Limits, Tokenizer, end_ids};
use crate::model::spec::Spec;
use crate::reward::Scorer;
use crate::runtime::digest::sha256_hex;
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, as_dim, as_index};
use crate::world::World;

pub(super) struct Inputs {
    pub(super) train: Dataset,
    pub(super) train_digest: String,
    pub(super) held_out: Option<Dataset>,
    /// Empty without held-out data.
    pub(super) held_out_digest: String,
    /// Absent where the model's folder has none and nothing needs one.
    pub(super) tokenizer: Option<Tokenizer>,
    /// Tokens that end an answer; empty where no answer is sampled or judged by its text.
    pub(super) end_ids: Vec<i64>,
    /// What answers are worth: as the configuration says, or as the data allow where no source names it.
    pub(super) reward_fn: RewardFn,
    /// Scores answers; on rank 0 only.
    pub(super) scorer: Option<Scorer>,
    /// Digest of the judge's rubric on rank 0, on every rank; absent without one.
    pub(super) rubric_digest: Option<String>,
}

/// Reads the inputs on every rank and compares the data over ranks; opens the scorer on rank 0.
pub(super) fn read(config: &RunConfig, world: &World, spec: &Spec) -> Result<Inputs, Failure> {
    let mut inputs = world.agree(read_files(config, spec))?;
    let mut config = config.clone();
    config.grpo.reward_fn = Some(inputs.reward_fn.clone());
    world.agree(signal::check_data(&config, &inputs.train).map_err(Failure::from))?;
    world.require_equal("the data (digest)", &inputs.train_digest)?;
    world.require_equal("the held-out data (digest)", &inputs.held_out_digest)?;
    inputs.scorer = world.on_root(|| {
        // Held-out answers are scored only where they are sampled.
        let held_out = inputs.held_out.iter().filter(|_| config.rollout.sample);
        let sets: Vec<&Dataset> = [&inputs.train].into_iter().chain(held_out).collect();
        rewards::open_scorer(&config, &sets, inputs.tokenizer.is_some())
    })?;
    // Its name may change between two starts, its words may not.
    inputs.rubric_digest = world.from_root(|| {
        let text = config.reward.rubric.as_ref().and_then(|file| fs::read(file).ok());
        Ok(text.map(sha256_hex))
    })?;
    Ok(inputs)
}

/// Training and held-out data; without a data file, random tokens at the planned lengths.
fn read_files(config: &RunConfig, spec: &Spec) -> Result<Inputs, Failure> {
    signal::check_config(config)?;
    let sampled = config.rollout.sample;
    let limits = Limits {
        prompt_len_max: config.context.prompt_len,
        answer_len_max: config.context.answer_len,
        vocab_size: spec.vocabulary,
        answers: if sampled { Answers::Sampled } else { Answers::Given(as_index(config.grpo.group_size)) },
        too_long: config.data.too_long,
    };
    let folder = config.model_path()?;
    // Random tokens have no text, so they need no tokenizer.
    let needs_text = config.data.path.is_some() || sampled;
    let tokenizer =
        if needs_text && folder.join("tokenizer.json").is_file() { Some(Tokenizer::open(folder)?) } else { None };
    // Answers end with one of them, and what judges a text does not see it.
    let needs_ends = sampled || rewards::judge_of_texts(config).is_some();
    let end_ids = if needs_ends { end_ids(folder, tokenizer.as_ref())? } else { Vec::new() };
    let open = |path: &PathBuf| Dataset::open(path, tokenizer.as_ref(), &limits);
    let (train, held_out) = match &config.data.path {
        Some(path) => {
            let held_out = config.data.held_out.as_ref().map(open).transpose()?;
            (open(path)?, held_out)
        }
        None => (random_group(config, spec), None),
    };
    Ok(Inputs {
        train_digest: train.digest(),
        held_out_digest: held_out.as_ref().map(Dataset::digest).unwrap_or_default(),
        reward_fn: signal::choose_reward(config, &train)?,
        train,
        held_out,
        tokenizer,
        end_ids,
        scorer: None,
        rubric_digest: None,
    })
}

/// One group of random tokens at the planned lengths: enough to measure a run, not to learn.
fn random_group(config: &RunConfig, spec: &Spec) -> Dataset {
    tch::manual_seed(i64::try_from(config.run.seed).unwrap_or(i64::MAX));
    let random_ids = |count: Tokens| -> Vec<i64> {
        let ids = tch::Tensor::randint(as_dim(spec.vocabulary), [count.dim()], (Kind::Int64, Device::Cpu));
        Vec::<i64>::try_from(ids).unwrap_or_default()
    };
    let prompt_ids = random_ids(config.context.prompt_len);
    let answer = |_| Answer { ids: random_ids(config.context.answer_len), reward: None, mask: None, logprobs: None };
    let answers = (0..config.grpo.group_size).map(answer).collect();
    let name = "random tokens".to_owned();
    Dataset::from_groups(vec![Group { name, prompt_ids, answers, reward_data: serde_json::Map::new(), cut: None }])
}
