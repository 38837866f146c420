//! What a run reads besides the model: data sets, the tokenizer, the tokens that end an answer, and what scores answers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tch::{Device, Kind};

use super::session::HeldOutSet;
use super::sources::{self, TrainSource};
use super::{progress, rewards, signal};
use crate::calls::Tools;
use crate::config::{HeldOutFiles, Loaded, RewardFn, RewardName, RunConfig};
use crate::data::{
    Answer, Answers, Dataset, Group, KEPT_TEXT_BYTES_MIN, Limits, ReplyMarks, Tokenizer, ToolMarks, end_ids,
    find_or_make,
};
use crate::model::spec::Spec;
use crate::reward::Scorer;
use crate::runtime::digest::sha256_hex;
use crate::runtime::failure::Failure;
use crate::runtime::file_state::FileState;
use crate::runtime::units::{Tokens, as_dim, as_index};
use crate::world::World;

/// The folder of the run directory for what can be made again.
const CACHE: &str = "cache";

/// What is done with the inputs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Work {
    Train,
    /// Evaluation alone: the training data are not read.
    Evaluate,
}

pub(super) struct Inputs {
    /// Empty where nothing is trained.
    pub(super) train: Dataset,
    /// The files of a mix; empty where there is one file.
    pub(super) sources: Vec<TrainSource>,
    pub(super) train_digest: String,
    pub(super) held_out: Vec<HeldOutSet>,
    /// Absent where the model's folder has none and nothing needs one.
    pub(super) tokenizer: Option<Tokenizer>,
    /// Tokens that end an answer; empty where no answer is sampled or judged by its text.
    pub(super) end_ids: Vec<i64>,
    /// Who answers the calls in sampled answers, where the configuration names a program.
    pub(super) tools: Option<Tools>,
    /// What answers are worth: as the configuration says, or as the data allow where no source names it.
    pub(super) reward_fn: RewardFn,
    /// Scores answers; on rank 0 only.
    pub(super) scorer: Option<Scorer>,
    /// Digests of the judges' rubrics on rank 0, by the names that checkpoints use; the same on every rank.
    pub(super) rubric_digests: BTreeMap<String, String>,
}

/// Reads the inputs on every rank and compares the data over ranks; opens the scorer on rank 0.
pub(super) fn read(loaded: &Loaded, world: &World, spec: &Spec, work: Work) -> Result<Inputs, Failure> {
    let mut config = loaded.run.clone();
    let limits = limits(&config, spec);
    let files = world.agree(read_files(&config, work))?;
    let open = |path: &Path| open_set(path, &files, &limits, &loaded.rank.dir, world);
    let mut held_out = Vec::new();
    // Without a file to train on a run has random tokens, and nothing is held out.
    let sets = config.data.held_out.iter().filter(|_| work == Work::Evaluate || config.data.names_files());
    for (name, file) in sets.clone().flat_map(HeldOutFiles::sets) {
        let named = sets.clone().any(HeldOutFiles::is_named);
        let key = if named { format!("data.held_out.{name}") } else { "data.held_out".to_owned() };
        held_out.push(HeldOutSet { name: name.to_owned(), key, data: open(file)? });
    }
    let (train, sources) = match (work, &config.data.path) {
        (Work::Evaluate, _) => (Dataset::from_groups(Vec::new()), Vec::new()),
        (Work::Train, Some(path)) => (open(path)?, Vec::new()),
        (Work::Train, None) if config.data.names_files() => sources::open(&config.data, open)?,
        (Work::Train, None) => (random_group(&config, spec), Vec::new()),
    };
    let reward_fn = match work {
        Work::Train => world.agree(signal::choose_reward(&config, &train).map_err(Failure::from))?,
        // Where the policy answers, the configuration names a reward.
        Work::Evaluate => config.grpo.reward_fn.clone().unwrap_or(RewardFn::only(RewardName::Data)),
    };
    config.grpo.reward_fn = Some(reward_fn.clone());
    if work == Work::Train {
        world.agree(signal::check_data(&config, &train).map_err(Failure::from))?;
        world.agree(progress::check_best(&config, &held_out).map_err(Failure::from))?;
    }
    let tools = world.agree(open_tools(&config, &files, spec, &train, &held_out))?;
    let mut inputs = Inputs {
        train_digest: train.digest().to_owned(),
        reward_fn,
        train,
        sources,
        held_out,
        tokenizer: files.tokenizer,
        end_ids: files.end_ids,
        tools,
        scorer: None,
        rubric_digests: BTreeMap::new(),
    };
    world.require_equal("the data (digest)", &inputs.train_digest)?;
    let digests: Vec<String> =
        inputs.held_out.iter().map(|set| format!("{} {}", set.name, set.data.digest())).collect();
    world.require_equal("the held-out data (digest)", &digests.join(", "))?;
    inputs.scorer = world.on_root(|| {
        // Held-out answers are scored only where they are sampled.
        let held_out = inputs.held_out.iter().map(|set| &set.data).filter(|_| config.rollout.sample);
        let sets: Vec<&Dataset> = [&inputs.train].into_iter().chain(held_out).collect();
        rewards::open_scorer(&config, &sets, inputs.tokenizer.is_some())
    })?;
    // Its name may change between two starts, its words may not.
    inputs.rubric_digests = world.from_root(|| Ok(rubric_digests(&config)))?;
    Ok(inputs)
}

/// Who answers calls; what stands around replies is checked in every record that answers are drawn for.
fn open_tools(
    config: &RunConfig,
    files: &Files,
    spec: &Spec,
    train: &Dataset,
    held_out: &[HeldOutSet],
) -> Result<Option<Tools>, Failure> {
    let tokenizer = files.tokenizer.as_ref();
    let tools = Tools::open(config, tokenizer, spec.vocabulary)?;
    if let Some((tools, tokenizer)) = tools.as_ref().zip(tokenizer) {
        tools.check_records(tokenizer, config.data.train_key(), train)?;
        let draws = config.eval_answers() > 0;
        held_out.iter().filter(|_| draws).try_for_each(|set| tools.check_records(tokenizer, &set.key, &set.data))?;
    }
    Ok(tools)
}

/// Digests of the rubrics that can be read, by the names that checkpoints and messages use.
fn rubric_digests(config: &RunConfig) -> BTreeMap<String, String> {
    let reward = &config.reward;
    let only = reward.rubric.iter().map(|file| ("the rubric".to_owned(), file));
    let judges = reward.judges.iter().flatten();
    let named =
        judges.filter_map(|(name, judge)| Some((format!("the rubric of judge:{name}"), judge.rubric.as_ref()?)));
    let digest = |(name, file)| Some((name, sha256_hex(fs::read(file).ok()?)));
    only.chain(named).filter_map(digest).collect()
}

fn limits(config: &RunConfig, spec: &Spec) -> Limits {
    let group_size = as_index(config.grpo.group_size);
    Limits {
        prompt_len_max: config.context.prompt_len,
        answer_len_max: config.context.answer_len,
        vocab_size: spec.vocabulary,
        answers: if config.rollout.sample { Answers::Sampled } else { Answers::Given(group_size) },
        too_long: config.data.too_long,
    }
}

/// What data sets are read with.
struct Files {
    tokenizer: Option<Tokenizer>,
    end_ids: Vec<i64>,
}

/// What data sets are read with; what is wrong with the configuration is said first.
fn read_files(config: &RunConfig, work: Work) -> Result<Files, Failure> {
    match work {
        Work::Train => signal::check_config(config)?,
        Work::Evaluate => signal::check_named(config)?,
    }
    let sampled = config.rollout.sample;
    let folder = config.model_path()?;
    // Random tokens have no text, so they need no tokenizer.
    let needs_text = config.data.names_files() || config.data.held_out.is_some() || sampled;
    let tokenizer =
        if needs_text && folder.join("tokenizer.json").is_file() { Some(Tokenizer::open(folder)?) } else { None };
    // Answers end with one of them, and what judges a text does not see it.
    let needs_ends = sampled || rewards::judge_of_texts(config).is_some();
    let end_ids = if needs_ends { end_ids(folder, tokenizer.as_ref())? } else { Vec::new() };
    Ok(Files { tokenizer, end_ids })
}

/// Opens a data set on every rank. A small one is read by every rank for itself. The tokens of a large one are made once on a
/// machine, in a file beside the data or in the run directory, that the machine's ranks read.
fn open_set(path: &Path, files: &Files, limits: &Limits, run_dir: &Path, world: &World) -> Result<Dataset, Failure> {
    let tokenizer = files.tokenizer.as_ref();
    let state = FileState::of(path).ok();
    let large = state.as_ref().is_some_and(|state| state.bytes >= KEPT_TEXT_BYTES_MIN);
    if !world.any(large) {
        return world.agree(Dataset::open(path, tokenizer, limits).map_err(Failure::from));
    }
    let beside = path.parent().map(Path::to_owned).unwrap_or_default();
    let folders = [beside, run_dir.join(CACHE)];
    let make = || {
        let alive = || world.tracker().report_alive();
        let kept = find_or_make(path, tokenizer, limits, &folders, &alive)?;
        let made = if kept.is_new { "made" } else { "found" };
        tracing::info!("token ids of {} were {made} in {}", path.display(), kept.file.display());
        Ok::<_, Failure>(kept)
    };
    // Ranks that see another file under the same path make their own tokens.
    let machine = world.machine();
    let states = machine.gather_texts(&format!("{state:?}"));
    let differ = world.any(states.iter().any(|other| *other != states[0]));
    let kept = if differ { world.agree(make())? } else { world.from_first_of_machine(&machine, make)? };
    world.agree(Dataset::open_kept(&kept.file).map_err(Failure::from))
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
    let (name, prompt_tokens) = ("random tokens".to_owned(), config.context.prompt_len);
    let reward_data = serde_json::Map::new();
    let (tool_marks, reply_marks) = (ToolMarks::default(), ReplyMarks::default());
    let group = Group { name, prompt_tokens, answers, reward_data, tool_marks, reply_marks, cut: None };
    Dataset::from_groups(vec![(group, prompt_ids)])
}
