//! What an open run holds: configuration, model, policy, data and plan.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Tensor;

use super::answer::{Answer, RewardedGroup};
use super::round::{FrozenGroup, Round};
use super::signal::{self, has_margin};
use super::sources::{self, TrainSource, file_notes};
use crate::calls::{RecordCaller, Tools};
use crate::config::{
    Aggregation as Rule, Dtype, GrpoConfig, ImportanceWeights, Loaded, RewardName, RunConfig, ScaleRewards,
};
use crate::data::{Dataset, Group, GroupOrder, Tokenizer};
use crate::endpoint::Spent;
use crate::model::adapter_file::{self, AdapterShape};
use crate::model::decoder::Decoder;
use crate::model::experts;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::token::{Drawer, Reason};
use crate::model::weights::Weights;
use crate::plan::{self, Plan};
use crate::prompt::handoff::{Keeping, Moments, PlacedGroup};
use crate::report::AdapterForm;
use crate::reward::Scorer;
use crate::runtime::failure::Failure;
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::{Rank, Tokens, as_index, from_index};
use crate::step::objective::{self, Aggregation, Importance, Objective, Scaling};
use crate::step::optimizer::AdamW;
use crate::step::rollout::{self, DrawnChoices, SampleRequest, Sampling, Stream};
use crate::step::transaction::Transaction;
use crate::tensor::boundary::storage_bytes;
use crate::world::World;

/// How many updates ahead prompt lengths are looked up.
const UPDATES_AHEAD_MAX: u64 = 1000;
/// The branch of the run's sampling noise for held-out prompts: no group of the run has this number.
const HELD_OUT_BRANCH: u64 = u64::MAX;

/// A run that is ready to step.
pub struct Session {
    pub(super) loaded: Loaded,
    pub(super) model: Model,
    pub(super) policy: Policy,
    pub(super) data: TrainingData,
    pub(super) plan: RunPlan,
    /// Digests of what the run reads, by name: a checkpoint is of this run where the digests are the same.
    pub(super) input_digests: BTreeMap<String, String>,
}

/// The frozen model.
pub(super) struct Model {
    pub(super) spec: Spec,
    pub(super) weights: Rc<Weights>,
    pub(super) decoder: Box<dyn Decoder>,
    /// Digest of the model's checkpoint.
    pub(super) digest: String,
    /// Entry of the weights in the ledger.
    pub(super) _held: Held,
}

/// What is trained, and how.
pub(super) struct Policy {
    pub(super) adapters: Adapters,
    pub(super) shape: AdapterShape,
    /// The starting policy, where there is a KL term.
    pub(super) reference: Option<Adapters>,
    pub(super) optimizer: AdamW,
    /// Entries of adapters and optimizer in the ledger.
    pub(super) _held: [Held; 2],
    /// Entry of the adapters' gradients, which the first backward makes and which stay.
    pub(super) gradients: OnceCell<Held>,
}

impl Policy {
    /// Digest of all adapters, also of those on other ranks. Every rank takes part.
    pub(super) fn digest(&self, world: &World) -> String {
        experts::adapters::digest(&self.adapters, &world.ep)
    }

    /// All adapters and their moments in the order of the spec, on rank 0, where experts' are spread over ranks; else `None`,
    /// for each rank has them all. Every rank takes part.
    pub(super) fn gathered(&self, world: &World) -> Option<Gathered> {
        let adapters = &self.adapters;
        let gather = |tensors: &[&Tensor]| {
            experts::adapters::gathered(adapters, tensors, &world.ep, world.all.rank() == Rank(0))
        };
        let moment = |tensors: &[Tensor]| {
            let pairs = gather(&tensors.iter().collect::<Vec<_>>());
            pairs.into_iter().flat_map(|pair| [pair.a_ri, pair.b_or]).collect()
        };
        adapters.is_spread().then(|| {
            let masters = gather(&adapters.tensors().collect::<Vec<_>>());
            let Moments { steps, mean, square } = self.optimizer.moments();
            let moments = Moments { steps: *steps, mean: moment(mean), square: moment(square) };
            Gathered { adapters: Adapters::new(masters, adapters.scale(), adapters.stamp().policy), moments }
        })
    }
}

/// The adapters of all ranks with their moments.
pub(super) struct Gathered {
    pub(super) adapters: Adapters,
    pub(super) moments: Moments,
}

/// What the policy learns from, and where the run stands in it.
pub(super) struct TrainingData {
    pub(super) train: Dataset,
    /// The files of a mix; empty where there is one file.
    pub(super) sources: Vec<TrainSource>,
    pub(super) held_out: Vec<HeldOutSet>,
    /// Absent where the model's folder has none and nothing needs one.
    pub(super) tokenizer: Option<Tokenizer>,
    /// Tokens that end an answer; empty where no answer is sampled or judged by its text.
    pub(super) end_ids: Vec<i64>,
    /// Who answers the calls in sampled answers, where the configuration names a program.
    pub(super) tools: Option<Tools>,
    /// Whether a source named the reward; otherwise the data decided.
    pub(super) reward_is_named: bool,
    /// Scores answers; on rank 0 only.
    pub(super) scorer: Option<Scorer>,
    pub(super) cursor: GroupOrder,
    /// The groups of the current round, between two of its updates.
    pub(super) round: Option<Round>,
}

/// Prompts that are evaluated and never trained on.
pub(super) struct HeldOutSet {
    pub(super) name: String,
    /// The key that names its file.
    pub(super) key: String,
    pub(super) data: Dataset,
}

/// The plan of this rank, and what all ranks have agreed on.
pub(super) struct RunPlan {
    pub(super) plan: Plan,
    pub(super) keeping: Keeping,
    /// Whether tensors go from GPU to GPU between ranks; otherwise through host memory.
    pub(super) direct: bool,
    /// Why a micro-block has so many rows, where the configuration leaves it open.
    pub(super) rows_note: Option<String>,
    /// Why so many ranks share a prompt, where the configuration leaves it open.
    pub(super) split_note: Option<String>,
}

impl TrainingData {
    /// The groups of the next update: those of the current round, or the next `groups` of the data.
    pub(super) fn take_round(&mut self, groups: usize) -> Round {
        self.round.take().unwrap_or_else(|| Round::take(&mut self.cursor, groups))
    }

    /// Notes that an update of `round` was made; the round stays until it has given `updates` of them.
    /// The next update captures its prompts itself unless `reuses` says so.
    pub(super) fn update_made(&mut self, mut round: Round, updates: u64, reuses: bool) {
        round.made += 1;
        round.earlier = round.earlier.filter(|_| reuses);
        (round.saved_s, round.measured_s) = (0.0, 0.0);
        self.round = Some(round).filter(|round| round.made < updates);
    }

    /// Lets go of a captured prompt that waits for a further update, which will capture it again.
    pub(super) fn release_prompts(&mut self) {
        self.round.iter_mut().flat_map(|round| &mut round.mine).for_each(|group| group.held = None);
    }

    /// Takes back the groups of an update that was not made. Groups with an earlier update stay frozen; others run again from
    /// the start.
    pub(super) fn give_back(&mut self, round: Round) {
        if round.made == 0 {
            // Nothing is held: no update has left pages.
            self.cursor = round.cursor_before;
        } else {
            self.round = Some(round);
        }
    }
}

impl Session {
    pub(super) fn config(&self) -> &RunConfig {
        &self.loaded.run
    }

    /// What the model is.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.model.spec
    }

    /// The model's frozen weights.
    #[must_use]
    pub fn weights(&self) -> &Rc<Weights> {
        &self.model.weights
    }

    /// Name of the kernel that computes attention.
    #[must_use]
    pub fn attention_kernel(&self) -> &'static str {
        self.model.decoder.attention_name()
    }

    /// Name of what computes gated delta rules, in a model that has them.
    #[must_use]
    pub fn delta_rule(&self) -> Option<&'static str> {
        self.model.decoder.delta_rule_name()
    }

    /// Digest of the model's checkpoint.
    #[must_use]
    pub fn model_digest(&self) -> &str {
        &self.model.digest
    }

    /// What is trained.
    #[must_use]
    pub fn adapter_form(&self) -> AdapterForm {
        let AdapterShape { rank, alpha, targets, .. } = &self.policy.shape;
        AdapterForm { rank: *rank, alpha: *alpha, targets: targets.clone() }
    }

    /// The first group of the data.
    #[must_use]
    pub fn first_group(&self) -> &Group {
        self.data.train.group(0)
    }

    /// Token ids of the first group's prompt.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn first_prompt_ids(&self) -> Result<Vec<i64>, Failure> {
        Ok(self.data.train.prompt_ids(0)?.into_owned())
    }

    /// Where `parallel.ep_size` is given and there are no experts to spread.
    fn unused_ranks_line(&self) -> Option<String> {
        let (ep, spec) = (self.config().parallel.ep_size, self.spec());
        let unused = ep > 1 && spec.experts.is_none();
        unused.then(|| format!("parallel.ep_size = {ep} has no effect: {} has no experts", spec.model_type))
    }

    /// Where single operations draw although the run is on a GPU: for groups, or for held-out ones with their greedy answer.
    fn drawing_notes(&self) -> Option<String> {
        let config = self.config();
        if self.data.tools.is_some() && self.model.decoder.device().is_cuda() {
            return Drawer::Operations(Reason::Calls).note();
        }
        let by = |answers| rollout::computed_by(&*self.model.decoder, &self.policy.adapters, as_index(answers)).note();
        let held_out = || Some(format!("held-out groups: {}", by(config.eval_answers())?));
        let of_groups = self.samples().then(|| by(config.grpo.group_size))?;
        of_groups.or_else(|| if self.data.held_out.is_empty() { None } else { held_out() })
    }

    /// What a user should know before the first step.
    pub(super) fn notes(&self) -> Vec<String> {
        let endless = self.samples() && self.data.end_ids.is_empty();
        let endless = endless.then(|| {
            "the model's folder names no token that ends an answer (eos_token_id of generation_config.json or config.json, \
             eos_token of tokenizer_config.json): every answer runs to its longest length"
                .to_owned()
        });
        let dated = self.data.tokenizer.as_ref().filter(|tokenizer| tokenizer.writes_the_date()).map(|_| {
            "the chat template writes today's date: records without a date in \"chat_template_kwargs\" are other data tomorrow, \
             and --resume refuses other data (docs/data.md)"
                .to_owned()
        });
        let mut notes = self.loaded.notes();
        notes.extend(self.plan.split_note.iter().chain(&self.plan.rows_note).cloned());
        notes.extend(self.drawing_notes());
        notes.extend(self.data.tools.as_ref().map(Tools::note));
        notes.extend(self.unused_marks_note(self.config().data.train_key(), &self.data.train));
        notes.push(signal::objective_line(self.config(), self.data.reward_is_named));
        notes.extend(self.config().judges_notes());
        notes.extend(signal::unused_rewards_line(self.config(), &self.data.train));
        notes.extend(signal::old_policy_line(self.config(), &self.data.train));
        notes.extend(self.unused_ranks_line());
        notes.extend(plan::context_note(self.config(), self.spec()));
        notes.extend(self.model.weights.notes().iter().cloned());
        let adapted = self.spec().adapted(self.config().lora.targets.as_deref());
        notes.extend(adapted.ok().and_then(|adapted| adapter_file::readers_note(self.spec(), &adapted)));
        notes.extend(sources::notes(&self.data.train, &self.data.sources));
        notes.extend(self.held_out_notes());
        notes.extend(endless);
        notes.extend(dated);
        notes
    }

    /// What a user should know of the held-out sets.
    pub(super) fn held_out_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for HeldOutSet { key, data, .. } in &self.data.held_out {
            notes.extend(file_notes(key, data).into_iter().chain(self.unused_marks_note(key, data)));
            let without = data.len() - (0..data.len()).filter(|&index| has_margin(data.group(index))).count();
            if without > 0 && !self.draws_held_out() {
                notes.push(format!("{key}: {without} of {} prompts have no better and worse answer", data.len()));
            }
        }
        notes
    }

    /// What the judges were sent since the last time that this was asked; rank 0 alone knows.
    pub(super) fn take_spent(&self) -> Option<Spent> {
        self.data.scorer.as_ref().map(Scorer::take_spent).and_then(Spent::if_any)
    }

    /// Groups of an update: one turn after another, side by side on all prompt groups of ranks.
    pub(super) fn groups_per_update(&self, world: &World) -> usize {
        world.dp_size * as_index(self.config().optimizer.grad_accum)
    }

    /// Prompt lengths of the next `updates` updates, at most [`UPDATES_AHEAD_MAX`], one entry each; takes nothing.
    pub(super) fn prompt_tokens_ahead(&self, world: &World, updates: u64) -> Vec<Vec<u64>> {
        let prompt_tokens = |index: usize| self.data.train.group(index).prompt_tokens.0;
        let updates_per_group = self.config().grpo.updates_per_group;
        let mut ahead = Vec::new();
        if let Some(round) = &self.data.round {
            let current: Vec<u64> = round.places.iter().map(|place| prompt_tokens(place.index)).collect();
            ahead.extend((round.made..updates_per_group).map(|_| current.clone()));
        }
        let mut cursor = self.data.cursor.clone();
        let count = updates.min(UPDATES_AHEAD_MAX);
        while from_index(ahead.len()) < count {
            let next: Vec<u64> = cursor.take(self.groups_per_update(world)).into_iter().map(prompt_tokens).collect();
            ahead.extend((0..updates_per_group).map(|_| next.clone()));
        }
        ahead.truncate(as_index(count));
        ahead
    }

    /// What every group of an update goes through, under the run's settings.
    pub(super) fn transaction<'a>(&'a self, world: &'a World) -> Transaction<'a> {
        let config = self.config();
        let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: world.ledger() };
        let Policy { adapters, reference, .. } = &self.policy;
        let micro_block = config.memory.micro_block;
        Transaction {
            policy: Pass { decoder: &*self.model.decoder, adapters, cp_group, micro_block },
            reference: reference.as_ref(),
            head: self.head(),
            objective: self.objective(),
            gradient: config.grpo.gradient,
            page_size: config.context.page_size,
            keeping: self.plan.keeping,
            pins_memory: true,
        }
    }

    /// Where the rows of an answered group are on the ranks of this prompt group. The prompt's ids play no part in that, and
    /// zeros stand in their place.
    pub(super) fn place_frozen(&self, frozen: &FrozenGroup, world: &World) -> PlacedGroup {
        let prompt_tokens = self.data.train.group(frozen.place.index).prompt_tokens;
        self.transaction(world).placed(&vec![0; prompt_tokens.index()], frozen.ids())
    }

    pub(super) fn head(&self) -> Head {
        let config = self.config();
        Head { rows_max: config.memory.head_block.dim(), temperature: config.grpo.temperature }
    }

    pub(super) fn objective(&self) -> Objective {
        let grpo = &self.config().grpo;
        let aggregation = match grpo.aggregation {
            Rule::SequenceMean => Aggregation::SequenceMean,
            Rule::TokenMean => Aggregation::TokenMean,
            Rule::Constant => Aggregation::Constant(grpo.constant_divisor.unwrap_or(1.0)),
        };
        let most = grpo.importance_max.unwrap_or(f64::INFINITY);
        let least = grpo.importance_min.unwrap_or(0.0);
        let importance = match grpo.importance {
            ImportanceWeights::None => Importance::Ratio,
            ImportanceWeights::Token => Importance::Token { most },
            ImportanceWeights::Sequence => Importance::Sequence { most },
            ImportanceWeights::TokenMask => Importance::TokenMask { least, most },
            ImportanceWeights::SequenceMask => Importance::SequenceMask { least, most },
        };
        let GrpoConfig { loss, clip_low, clip_high, clip_dual, kl_coef, kl_estimator, .. } = *grpo;
        Objective { loss, clip_low, clip_high, clip_dual, kl_coef, kl_estimator, aggregation, importance }
    }

    /// Whether the policy gives the answers; otherwise they come with the data.
    pub(super) fn samples(&self) -> bool {
        self.plan.plan.rollout.is_some()
    }

    /// What is sampled for the group with this ordinal in the run; `None` where answers come with the data.
    pub(super) fn sample_request<'a>(
        &'a self,
        group: u64,
        caller: Option<&'a RecordCaller<'a>>,
    ) -> Option<SampleRequest<'a>> {
        let request = self.sample_request_from(Stream::of_seed(self.config().run.seed).part(group))?;
        Some(SampleRequest { calls: self.calls(caller), ..request })
    }

    /// Whether the policy answers held-out prompts.
    pub(super) fn draws_held_out(&self) -> bool {
        self.samples() && self.config().eval_answers() > 0
    }

    /// [`Session::sample_request`] for the held-out group at `index`: its sampled answers, and the greedy one last.
    pub(super) fn sample_held_out_request<'a>(
        &'a self,
        index: usize,
        caller: Option<&'a RecordCaller<'a>>,
    ) -> Option<SampleRequest<'a>> {
        let stream = Stream::of_seed(self.config().run.seed).part(HELD_OUT_BRANCH);
        let request = self.sample_request_from(stream.part(from_index(index)))?;
        let greedy = as_index(self.config().eval_greedy());
        let answers = as_index(self.config().eval_answers());
        let calls = self.calls(caller);
        (answers > 0).then_some(SampleRequest { answers, greedy, choices: DrawnChoices::Drop, calls, ..request })
    }

    /// Whether what is chosen in sampling is used by later passes over the same answers.
    pub(super) fn keeps_choices(&self) -> bool {
        let chooses = self.spec().experts.is_some() || self.spec().latent.is_some();
        chooses && self.samples() && self.config().rollout.keep_choices
    }

    fn sample_request_from(&self, stream: Stream) -> Option<SampleRequest<'_>> {
        let rollout = self.plan.plan.rollout.as_ref()?;
        let config = self.config();
        Some(SampleRequest {
            answers: as_index(config.grpo.group_size),
            greedy: 0,
            longest: config.sampled_len(),
            ends: &self.data.end_ids,
            sampling: Sampling { top_p: config.rollout.top_p, top_k: config.rollout.top_k },
            stream,
            resident: rollout.resident_layers,
            fused: true,
            choices: if config.rollout.keep_choices { DrawnChoices::Use } else { DrawnChoices::Compare },
            calls: None,
        })
    }

    /// Most tokens of an answer.
    pub(super) fn answer_tokens_max(&self) -> Tokens {
        if self.samples() { self.config().sampled_len() } else { self.config().context.answer_len }
    }

    /// Advantages of a group under the run's rule; `None` for an answer that takes no part: one without a reward, or one that
    /// was cut off where those are masked. The reward of a masked answer counts for mean and deviation.
    pub(super) fn advantages(&self, group: &RewardedGroup) -> Vec<Option<f64>> {
        let grpo = &self.config().grpo;
        let rewards = group.values();
        // A reward of 1 for every answer is plain likelihood training: no mean is subtracted.
        let advantages = if grpo.has_only(RewardName::One) {
            rewards
        } else {
            let (std_min, deviation) = (grpo.std_min, grpo.deviation);
            let is_of_group = grpo.scale_rewards == ScaleRewards::Group;
            let scaling = if is_of_group { Scaling::Group { std_min, deviation } } else { Scaling::None };
            objective::advantages(&rewards, scaling)
        };
        let masked = |answer: &Answer| grpo.mask_truncated && answer.truncated;
        let pairs = advantages.into_iter().zip(&group.answers);
        pairs.map(|(advantage, answer)| advantage.filter(|_| !masked(answer))).collect()
    }

    /// What the advantages of a whole batch with these `rewards` are divided by, where they are scaled by the batch.
    pub(super) fn batch_scale(&self, rewards: &[Option<f64>]) -> Option<f64> {
        let grpo = &self.config().grpo;
        let scales = grpo.scale_rewards == ScaleRewards::Batch && !grpo.has_only(RewardName::One);
        scales.then(|| objective::batch_deviation(rewards, grpo.std_min, grpo.deviation))
    }

    /// Whether a group with these advantages has no gradient: all are 0 and there is no KL term.
    pub(super) fn has_no_gradient(&self, advantages: &[Option<f64>]) -> bool {
        self.policy.reference.is_none() && advantages.iter().flatten().all(|&advantage| advantage == 0.0)
    }

    /// Distance in nats between a token's log-probabilities at sampling and at scoring beyond which a user is warned.
    pub(super) fn gap_warn(&self) -> f64 {
        let config = self.config();
        config.rollout.gap_warn.unwrap_or(match config.model.dtype {
            Dtype::Float64 => 1e-8,
            Dtype::Float32 => 1e-4,
            Dtype::Bfloat16 => 0.5,
        })
    }

    /// Counts the adapters' gradients in the ledger; they exist after the first backward.
    pub(super) fn count_gradients(&self, world: &World) {
        let gradients = self.policy.adapters.tensors().map(Tensor::grad).filter(Tensor::defined);
        let _ = self.policy.gradients.get_or_init(|| {
            let bytes = gradients.map(|gradient| storage_bytes(&gradient)).sum();
            world.ledger().hold(Purpose::Adapters, MemorySpace::Device, bytes)
        });
    }
}
