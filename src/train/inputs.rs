//! What a run reads besides the model: data sets, the tokenizer, and the tokens that end an answer.

use tch::{Device, Kind};

use super::rewards;
use crate::config::RunConfig;
use crate::data::{Answer, Answers, Dataset, Group, Limits, Tokenizer, end_ids};
use crate::model::spec::Spec;
use crate::reward::Scorer;
use crate::runtime::failure::Failure;
use crate::runtime::units::{Rank, Tokens, as_dim, as_index};
use crate::world::World;

/// All of it.
pub(super) struct Inputs {
    pub(super) data: Dataset,
    pub(super) held_out: Option<Dataset>,
    /// What makes texts of answers, where the model's folder has one.
    pub(super) tokenizer: Option<Tokenizer>,
    /// Empty where answers come with the data.
    pub(super) ends: Vec<i64>,
}

/// Training and held-out data; without a data file, random tokens at the planned lengths.
fn open(config: &RunConfig, spec: &Spec) -> Result<Inputs, Failure> {
    let sampled = config.rollout.sample;
    let limits = Limits {
        prompt_len_max: config.context.prompt_len,
        answer_len_max: config.context.answer_len,
        vocab_size: spec.vocabulary,
        answers: if sampled { Answers::Sampled } else { Answers::Given(as_index(config.grpo.group_size)) },
        too_long: config.data.too_long,
    };
    let folder = config.model_path()?;
    // Random tokens say nothing, so they need nothing that makes texts of them.
    let reads = (config.data.path.is_some() || sampled) && folder.join("tokenizer.json").is_file();
    let tokenizer = if reads { Some(Tokenizer::open(folder)?) } else { None };
    let ends = if sampled { end_ids(folder, tokenizer.as_ref())? } else { Vec::new() };
    let Some(path) = &config.data.path else {
        return Ok(Inputs { data: random_group(config, spec), held_out: None, tokenizer, ends });
    };
    let held_out = config.data.held_out.as_ref();
    let held_out = held_out.map(|path| Dataset::open(path, tokenizer.as_ref(), &limits)).transpose()?;
    Ok(Inputs { data: Dataset::open(path, tokenizer.as_ref(), &limits)?, held_out, tokenizer, ends })
}

/// Data, the same on all ranks, with their digests, and what rank 0 scores answers with.
pub(super) fn read(
    config: &RunConfig,
    world: &World,
    spec: &Spec,
) -> Result<(Inputs, [String; 2], Option<Scorer>), Failure> {
    let inputs = world.agree(open(config, spec))?;
    let sets = [Some(&inputs.data), inputs.held_out.as_ref()];
    let digests = sets.map(|data| data.map(Dataset::digest).unwrap_or_default());
    world.require_equal("the data (digest)", &digests[0])?;
    world.require_equal("the held-out data (digest)", &digests[1])?;
    let scorer = world.agree(scorer(config, world, sets, inputs.tokenizer.is_some()))?;
    Ok((inputs, digests, scorer))
}

/// What scores answers, on rank 0; data that are only compared by their own rewards need nothing more.
fn scorer(
    config: &RunConfig,
    world: &World,
    [data, held_out]: [Option<&Dataset>; 2],
    texts: bool,
) -> Result<Option<Scorer>, Failure> {
    if world.all.rank() != Rank(0) {
        return Ok(None);
    }
    // Held-out answers are scored only where they are drawn.
    let held_out = held_out.filter(|_| config.rollout.sample);
    let sets: Vec<&Dataset> = data.into_iter().chain(held_out).collect();
    rewards::open(config, &sets, texts).map(Some)
}

/// One group of random tokens at the planned lengths: what a run needs to be measured, not to learn.
fn random_group(config: &RunConfig, spec: &Spec) -> Dataset {
    tch::manual_seed(i64::try_from(config.run.seed).unwrap_or(i64::MAX));
    let draw = |count: Tokens| -> Vec<i64> {
        let drawn = tch::Tensor::randint(as_dim(spec.vocabulary), [count.dim()], (Kind::Int64, Device::Cpu));
        Vec::<i64>::try_from(drawn).unwrap_or_default()
    };
    let prompt_ids = draw(config.context.prompt_len);
    let answers =
        (0..config.grpo.group_size).map(|_| Answer { ids: draw(config.context.answer_len), reward: None, mask: None });
    let name = "random tokens".to_owned();
    let answers = answers.collect();
    Dataset::from_groups(vec![Group { name, prompt_ids, answers, reward_data: serde_json::Map::new(), cut: None }])
}
