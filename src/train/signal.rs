//! What a run learns from: the reward where no source names one, whether there is anything to learn, and the lines that tell a
//! user what is optimised. All of it is known once the data are read, before weights are loaded.

use crate::config::{
    Deviation, ImportanceWeights, KlEstimator, Loss, RewardFn, RewardName, RunConfig, ScaleRewards, WeightedReward,
};
use crate::data::{Dataset, Group};
use crate::runtime::failure::{Classified, Exit};
use crate::step::objective;

/// Why there is no reward, or nothing to learn from it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Neither the configuration nor the data say what answers are worth.
    #[error(
        "grpo.reward_fn is not set, and {why}: choose what answers are worth, with --set grpo.reward_fn=NAME or as reward_fn \
         under [grpo] in config.toml. NAME is one of {}, or a list of them with weights (docs/rewards.md explains each); \
         synthetic and one are for validation runs, whatever the answers say",
        RewardName::WORDS.join(", ")
    )]
    Unnamed { why: Unnamed },
    /// One answer has no others to be better than.
    #[error(
        "grpo.group_size should be at least 2: it is 1, so the advantage of every answer is 0 and nothing would be learnt (the \
         reward `one` gives a lone answer the advantage 1, and grpo.kl_coef above 0 a gradient without rewards)"
    )]
    GroupOfOne,
    /// Rewards of the data that say nothing.
    #[error(
        "{files}: none of its {groups} records has answers with different rewards, so every advantage is 0 and nothing would be \
         learnt: give \"reward\" in the data, or name another reward with grpo.reward_fn"
    )]
    EqualRewards { files: String, groups: usize },
    /// Importance weights of nothing.
    #[error(
        "{files}: no answer brings \"logprobs\", and grpo.importance asks for weights made of them: give them in the data, or set \
         grpo.importance = \"none\""
    )]
    NoLogprobs { files: String },
}

/// Why the data cannot say what answers are worth.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unnamed {
    #[error("there is no data.path whose answers could have rewards")]
    NoData,
    #[error("the policy samples its answers (rollout.sample = true), so the data set has no rewards of them")]
    Sampled,
    #[error("answers[{answer}] of record {record} in {files} has no reward")]
    Lacks { files: String, record: String, answer: usize },
}

/// A run that came to its end without having learnt anything.
#[derive(Debug, thiserror::Error)]
#[error(
    "nothing was trained: the gradient of all {updates} updates was 0, since no group had answers with different rewards \
     (groups_skipped and reward_mean in metrics.jsonl; answers.jsonl has the answers): the receipt says passed: false"
)]
pub(super) struct NothingTrained {
    pub(super) updates: u64,
}

impl Classified for NothingTrained {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Unnamed { .. } | Error::GroupOfOne => Exit::Config,
            Error::EqualRewards { .. } | Error::NoLogprobs { .. } => Exit::Data,
        }
    }
}

/// What can be refused before the data are read.
pub(super) fn check_config(config: &RunConfig) -> Result<(), Error> {
    let unnamed = |why| Err(Error::Unnamed { why });
    let grpo = &config.grpo;
    match (&grpo.reward_fn, config.data.names_files()) {
        (None, _) if config.rollout.sample => unnamed(Unnamed::Sampled),
        (None, false) => unnamed(Unnamed::NoData),
        _ if grpo.group_size == 1 && grpo.kl_coef <= 0.0 && !grpo.has_only(RewardName::One) => Err(Error::GroupOfOne),
        _ => Ok(()),
    }
}

/// Refuses sampled answers without a reward of theirs.
pub(super) fn check_named(config: &RunConfig) -> Result<(), Error> {
    match config.grpo.reward_fn {
        None if config.rollout.sample => Err(Error::Unnamed { why: Unnamed::Sampled }),
        _ => Ok(()),
    }
}

/// The reward that the configuration names, else `data` where every answer of the data has one.
pub(super) fn choose_reward(config: &RunConfig, train: &Dataset) -> Result<RewardFn, Error> {
    check_config(config)?;
    if let Some(named) = &config.grpo.reward_fn {
        return Ok(named.clone());
    }
    let files = config.data.train_files_text();
    for group in (0..train.len()).map(|index| train.group(index)) {
        if let Some(answer) = group.answers.iter().position(|answer| answer.reward.is_none()) {
            return Err(Error::Unnamed { why: Unnamed::Lacks { files, record: group.name.clone(), answer } });
        }
    }
    Ok(RewardFn::only(RewardName::Data))
}

/// Refuses a data set whose own rewards are all that counts and never differ within a group, and one without the
/// log-probabilities that weights are made of. `config` names its reward.
pub(super) fn check_data(config: &RunConfig, train: &Dataset) -> Result<(), Error> {
    let grpo = &config.grpo;
    let files = || config.data.train_files_text();
    if grpo.importance != ImportanceWeights::None && answers_with_logprobs(train).0 == 0 {
        return Err(Error::NoLogprobs { files: files() });
    }
    let only_data = grpo.rewards().iter().all(|part| part.name == RewardName::Data);
    if !only_data || grpo.kl_coef > 0.0 {
        return Ok(());
    }
    if (0..train.len()).any(|index| has_margin(train.group(index))) {
        return Ok(());
    }
    Err(Error::EqualRewards { files: files(), groups: train.len() })
}

/// One line about what is optimised. `config` names its reward; `is_named`: a source named it.
pub(super) fn objective_line(config: &RunConfig, is_named: bool) -> String {
    let grpo = &config.grpo;
    let reward = |part: &WeightedReward| {
        let word = part.word();
        let weight = if grpo.rewards().len() > 1 { format!(" × {}", part.weight) } else { String::new() };
        match part.name {
            RewardName::Synthetic => "synthetic (0 and 1 in turn, whatever the answers say)".to_owned(),
            RewardName::One => "one (1 for every answer, whatever it says)".to_owned(),
            RewardName::Data if !is_named => "data (grpo.reward_fn is not set, and every answer has one)".to_owned(),
            _ => format!("{word}{weight}"),
        }
    };
    let rewards: Vec<String> = grpo.rewards().iter().map(reward).collect();
    format!(
        "objective: reward {}; advantage {}; {}; {}; {} of token losses; gradient {}; temperature {}",
        rewards.join(" + "),
        advantage_words(config),
        ratio_words(config),
        kl_words(config),
        aggregation_words(config),
        grpo.gradient,
        grpo.temperature,
    )
}

/// A warning where the data have rewards that a validation reward, which somebody named, takes the place of.
pub(super) fn unused_rewards_line(config: &RunConfig, train: &Dataset) -> Option<String> {
    if config.rollout.sample || !config.data.names_files() {
        return None;
    }
    let validation = |name| config.grpo.has_only(name);
    let word = [RewardName::Synthetic, RewardName::One].into_iter().find(|&name| validation(name))?.word();
    let has_rewards = |index| train.group(index).answers.iter().any(|answer| answer.reward.is_some());
    (0..train.len()).any(has_rewards).then(|| {
        format!(
            "warning: the rewards in {} are not used: grpo.reward_fn is {word:?}, which is for validation runs; \"data\" takes them",
            config.data.train_files_text()
        )
    })
}

/// Whether a group has a better and a worse answer; an answer without a reward is neither.
pub(super) fn has_margin(group: &Group) -> bool {
    let rewards: Vec<Option<f64>> = group.answers.iter().map(|answer| answer.reward).collect();
    objective::spread(&rewards).is_some()
}

fn ratio_words(config: &RunConfig) -> String {
    let grpo = &config.grpo;
    let ratio = match grpo.loss {
        Loss::Grpo => "ratio clipped",
        Loss::Gspo => "ratio of the whole answer (gspo) clipped",
        Loss::Cispo => "log-probability weighted by the ratio (cispo) clipped",
    };
    let dual = grpo.clip_dual.map(|most| format!(", at most {most} where the advantage is negative"));
    let (least, most) = (1.0 - grpo.clip_low, 1.0 + grpo.clip_high);
    format!("{ratio} to {least} … {most}{}", dual.unwrap_or_default())
}

fn kl_words(config: &RunConfig) -> String {
    let grpo = &config.grpo;
    match grpo.kl_estimator {
        _ if grpo.kl_coef <= 0.0 => "no KL term".to_owned(),
        KlEstimator::K1 => format!("KL term (k1) × {}", grpo.kl_coef),
        KlEstimator::K2 => format!("KL term (k2) × {}", grpo.kl_coef),
        KlEstimator::K3 => format!("KL term × {}", grpo.kl_coef),
        KlEstimator::K3Ratio => format!("KL term (k3 times the ratio) × {}", grpo.kl_coef),
    }
}

fn advantage_words(config: &RunConfig) -> String {
    let grpo = &config.grpo;
    if grpo.has_only(RewardName::One) {
        return format!("+1{}", masked_words(config));
    }
    let deviation = match grpo.scale_rewards {
        ScaleRewards::Group => "deviation of the group",
        ScaleRewards::Batch => "deviation of all rewards of the update",
        ScaleRewards::None => return format!("reward − group mean{}", masked_words(config)),
    };
    let sample = if grpo.deviation == Deviation::Sample { "sample " } else { "" };
    let floor = if grpo.std_min > 0.0 { format!(", at least {}", grpo.std_min) } else { String::new() };
    format!("(reward − group mean) / {sample}{deviation}{floor}{}", masked_words(config))
}

fn masked_words(config: &RunConfig) -> &'static str {
    if config.grpo.mask_truncated { ", none for an answer that was cut off" } else { "" }
}

/// One line about the old policy of the ratio, where it is not the policy that drew the answers. Random tokens have none.
pub(super) fn old_policy_line(config: &RunConfig, train: &Dataset) -> Option<String> {
    let (grpo, rollout) = (&config.grpo, &config.rollout);
    if rollout.sample {
        let part = rollout.top_p < 1.0 || rollout.top_k > 0;
        return part.then(|| {
            format!(
                "old policy: answers are sampled with top_p {} and top_k {}, and the ratio is of the whole distribution: a token \
                 was drawn with a larger probability than the old policy gives it",
                rollout.top_p, rollout.top_k
            )
        });
    }
    if !config.data.names_files() {
        return None;
    }
    let (with, answers) = answers_with_logprobs(train);
    let rest = if with < answers { "; the others, and tokens with null, take this policy's scores" } else { "" };
    let clip = "1 in the first update of a group, so clipping acts only with grpo.updates_per_group above 1";
    let weights = match (grpo.importance, grpo.importance_max) {
        (ImportanceWeights::None, _) if with == 0 => {
            return Some(format!(
                "old policy: no answer of {} brings \"logprobs\", so the ratio is to this policy's own scores, {clip}",
                config.data.train_key()
            ));
        }
        (ImportanceWeights::None, _) => "are the old policy of the ratio".to_owned(),
        (kind, most) => {
            let word = if kind.is_of_tokens() { "token" } else { "sequence" };
            let (least, most) = (grpo.importance_min.unwrap_or(0.0), most.unwrap_or(1.0));
            let bounds =
                if kind.is_mask() { format!("0 outside {least} … {most}") } else { format!("at most {most}") };
            format!("give {word} importance weights, {bounds}; the ratio is to this policy's own scores")
        }
    };
    Some(format!("old policy: log-probabilities of {with} of {answers} answers came with the data and {weights}{rest}"))
}

/// Answers whose drawing policy is known, and all answers.
fn answers_with_logprobs(train: &Dataset) -> (usize, usize) {
    let answers = || (0..train.len()).flat_map(|index| &train.group(index).answers);
    (answers().filter(|answer| answer.logprobs.is_some()).count(), answers().count())
}

fn aggregation_words(config: &RunConfig) -> String {
    let aggregation = serde_json::to_value(config.grpo.aggregation).unwrap_or_default();
    let word = aggregation.as_str().unwrap_or_default().to_owned();
    config.grpo.constant_divisor.map_or(word.clone(), |divisor| format!("{word} ({divisor})"))
}
