//! Study: how far the gradient of a mode lies from the exact one, on real text, by length and projection.
//!
//! For each length keychain prompts are made; each group's gradient is taken with the step's own phases, once in `exact`
//! mode and once in each mode asked for, under the same adapters, and compared projection by projection: the cosine of
//! the angle between the two, and the ratio of their norms. Nothing is learned. A length counts prompt and answers, with
//! [`ANSWER_TOKENS_MAX`] positions left to the answer.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use indexmap::IndexMap;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::config::{Gradient, TooLong};
use crate::data::{self, Answers, Dataset, Limits, Tokenizer, keychain};
use crate::model::adapter_file;
use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::{ExpertShare, Weights};
use crate::prompt::handoff::{Keeping, Scores};
use crate::report::say;
use crate::runtime::failure::{Classified, Exit, Failure, Phase};
use crate::runtime::memory::Ledger;
use crate::runtime::units::{Tokens, float, from_index};
use crate::step::finalize;
use crate::step::objective::{Objective, Scaling, advantages};
use crate::step::observer::Observer;
use crate::step::replay::TrainedAnswer;
use crate::step::transaction::Transaction;
use crate::tensor::accumulation;
use crate::tools::parity::dtype_name;
use crate::world::World;
use crate::world::exchange::sum_number;

/// Positions of a length that are left to an answer.
pub const ANSWER_TOKENS_MAX: Tokens = Tokens(64);

/// Standard deviation of B in drawn adapters: five times what the ten updates of the laptop run leave, so well away from
/// the start, while the model still answers as before (docs/numerics.md).
const DRAWN_B: f64 = 0.01;
const LORA_RANK: u64 = 16;
const LORA_ALPHA: f64 = 32.0;
/// The name under which all projections together are reported.
const TOGETHER: &str = "all";

/// Why a study cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The prompts are written to a file before they are read.
    #[error("cannot make a temporary folder for the prompts: {source}; set TMPDIR to a folder that can be written")]
    #[expect(missing_docs, reason = "a source")]
    Folder { source: std::io::Error },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}

/// The adapters under which gradients are taken.
#[derive(Clone, Debug)]
pub enum Start {
    /// As a run starts: B is zero, so that only B has a gradient.
    Start,
    /// A as a run starts, B normal with deviation 0.01: away from the start, in directions that no data chose.
    Drawn,
    /// Saved adapters, in PEFT's format.
    Folder(PathBuf),
}

impl Start {
    fn name(&self) -> String {
        match self {
            Start::Start => "start".into(),
            Start::Drawn => "drawn".into(),
            Start::Folder(folder) => folder.display().to_string(),
        }
    }
}

/// How many prompts of which length.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Length {
    /// Positions of prompt and answer.
    pub positions: Tokens,
    pub prompts: usize,
}

/// What to compare.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Options {
    /// An HF folder with weights and tokenizer.
    pub model: PathBuf,
    pub lengths: Vec<Length>,
    /// Gradient modes that are compared with the exact one.
    pub gradients: Vec<Gradient>,
    pub starts: Vec<Start>,
    /// Folders of text (empty: those that stand on any Debian machine).
    pub text: Vec<PathBuf>,
    /// Answers of a group, one of them right.
    pub group_size: usize,
    /// Seed of prompts and adapters.
    pub seed: u64,
    /// The model's dtype.
    pub kind: Kind,
    /// Positions in a page.
    pub page_size: Tokens,
    /// Most rows of a segment at one time.
    pub micro_block: Tokens,
    /// Where the model computes.
    pub device: Device,
}

/// One projection's gradient against the exact one, prompt by prompt. Not a number where either is zero.
#[derive(Debug, Default, Serialize)]
pub struct Agreement {
    /// ⟨mode, exact⟩ / (|mode| · |exact|).
    pub cosine: Vec<f64>,
    /// |mode| / |exact|.
    pub norm_ratio: Vec<f64>,
}

/// Which numbers of an agreement.
type Numbers = fn(&Agreement) -> &[f64];

/// One mode at one length under one set of adapters.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Run {
    /// Positions of prompt and answer.
    pub length: Tokens,
    /// Fewest and most tokens of a prompt.
    pub prompt_tokens: [Tokens; 2],
    pub prompts: usize,
    pub adapters: String,
    /// Mean log-probability of a token of the right and of the wrong answers.
    pub logprob: [f64; 2],
    pub gradient: String,
    /// Each projection, and all of them together.
    pub projections: IndexMap<&'static str, Agreement>,
}

/// All runs; the same on every rank.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Report {
    /// The model's folder.
    pub model: String,
    /// The model's dtype.
    pub dtype: &'static str,
    pub ranks: usize,
    /// Answers of a group.
    pub group_size: usize,
    pub runs: Vec<Run>,
}

impl Report {
    /// Two tables, cosines and norm ratios: means over prompts, and sample standard deviations where there are several.
    #[must_use]
    pub fn text(&self) -> String {
        let about = format!("{}, {}, {} ranks, groups of {}", self.model, self.dtype, self.ranks, self.group_size);
        let mut lines = vec![about];
        let tables: [(&str, Numbers); 2] =
            [("cosine to exact", |of| &of.cosine), ("norm / exact's norm", |of| &of.norm_ratio)];
        for (title, numbers) in tables {
            let Some(first) = self.runs.first() else { continue };
            let head = ["length", "prompts", "adapters", "gradient"].map(String::from);
            let names = first.projections.keys().map(|&name| name.to_owned());
            lines.extend([String::new(), title.to_owned(), row(&head, names)]);
            lines.extend(self.runs.iter().map(|run| {
                let head =
                    [run.length.to_string(), run.prompts.to_string(), run.adapters.clone(), run.gradient.clone()];
                row(&head, run.projections.values().map(|of| mean_and_spread(numbers(of))))
            }));
        }
        lines.push("\nmean log-probability of a token of the right and the wrong answers".into());
        let mut logprobs = IndexMap::new();
        for run in &self.runs {
            logprobs.insert((run.length, &run.adapters), run.logprob);
        }
        lines.extend(logprobs.iter().map(|((length, adapters), [right, wrong])| {
            format!("{length:>6} {adapters:<9} {right:>8.3} {wrong:>8.3}")
        }));
        lines.join("\n")
    }
}

/// One line of a table.
fn row([length, prompts, adapters, gradient]: &[String; 4], cells: impl Iterator<Item = String>) -> String {
    let start = format!("{length:>6} {prompts:>7} {adapters:<9} {gradient:<9}");
    cells.fold(start, |line, cell| format!("{line} {cell:>13}"))
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / float(from_index(numbers.len()))
}

fn mean_and_spread(numbers: &[f64]) -> String {
    let mean = mean(numbers);
    if numbers.len() < 2 {
        return format!("{mean:.3}");
    }
    let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
    format!("{mean:.3} ±{:.3}", (squares / float(from_index(numbers.len() - 1))).sqrt())
}

struct Study<'a> {
    world: &'a World,
    options: &'a Options,
    decoder: Box<dyn Decoder>,
    head: Head,
    ledger: Ledger,
}

/// Makes prompts, takes gradients, compares. Every rank takes part; rank 0 says how far it is.
///
/// # Errors
/// When model, adapters or text cannot be used, ranks do not hold the same, or a phase fails.
pub fn run(world: &World, options: &Options) -> Result<Report, Failure> {
    let spec = world.agree(Spec::read(&options.model, None).map_err(Failure::from))?;
    let mut data = Vec::new();
    for &length in &options.lengths {
        let made = world.agree(prompts(options, &spec, length))?;
        world.require_equal("the study's prompts (digest)", made.digest())?;
        data.push((length, made));
    }
    let mut policies = Vec::new();
    for start in &options.starts {
        let adapters = world.agree(adapters(options, &spec, start))?;
        world.require_equal("the study's adapters (digest)", &adapters.digest())?;
        policies.push((start.name(), adapters));
    }
    let weights =
        Weights::load(&options.model, &spec, options.kind, options.device, ExpertShare::ALL).map_err(Failure::from);
    let weights = world.agree(weights)?;
    world.require_equal("the checkpoint (digest)", weights.digest())?;
    let decoder = spec.decoder(Rc::new(weights), options.kind);
    world.require_equal("the attention kernel", decoder.attention_name())?;
    world.require_equal("what computes index scores", decoder.index_scores_name().unwrap_or("none"))?;
    world.require_equal("what computes delta rules", decoder.delta_rule_name().unwrap_or("none"))?;
    let head = Head { rows_max: 512, temperature: 1.0 };
    let study = Study { world, options, decoder, head, ledger: Ledger::default() };
    let mut runs = Vec::new();
    for (length, data) in &data {
        study.note(spec.context_note(length.positions));
        for (name, adapters) in &policies {
            runs.extend(study.length(&spec, *length, data, name, adapters)?);
        }
    }
    Ok(Report {
        model: options.model.display().to_string(),
        dtype: dtype_name(options.kind),
        ranks: world.all.size(),
        group_size: options.group_size,
        runs,
    })
}

/// Prompts of one length with their answers and rewards. Every rank makes its own: same text and seed, same prompts.
fn prompts(options: &Options, spec: &Spec, length: Length) -> Result<Dataset, Failure> {
    let tokenizer = Tokenizer::open(&options.model)?;
    let folder = tempfile::tempdir().map_err(|source| Error::Folder { source })?;
    let prompt_tokens = Tokens(length.positions.0.saturating_sub(ANSWER_TOKENS_MAX.0));
    let wanted = keychain::Options {
        folders: options.text.clone(),
        prompt_tokens,
        train: length.prompts,
        held_out: 0,
        answers: options.group_size,
        seed: options.seed,
        ..keychain::Options::default()
    };
    let made = keychain::write(&wanted, &tokenizer, folder.path())?;
    let limits = Limits {
        prompt_len_max: prompt_tokens,
        answer_len_max: ANSWER_TOKENS_MAX,
        vocab_size: spec.vocabulary,
        answers: Answers::Given(options.group_size),
        too_long: TooLong::Refuse,
    };
    Ok(Dataset::open(&made.train_file, Some(&tokenizer), &limits)?)
}

fn adapters(options: &Options, spec: &Spec, start: &Start) -> Result<Adapters, Failure> {
    let acc = accumulation(options.kind);
    let seed = i64::try_from(options.seed).unwrap_or(i64::MAX);
    let adapted = spec.adapted(None)?;
    let starting = || Adapters::starting(&adapted, LORA_RANK, LORA_ALPHA, seed, acc, options.device);
    match start {
        Start::Start => Ok(starting()),
        Start::Drawn => Ok(drawn(starting(), acc)),
        Start::Folder(folder) => saved(folder, spec, acc, options.device),
    }
}

/// The same A, and a B that is not zero; the generator goes on where A's values ended.
fn drawn(mut adapters: Adapters, acc: Kind) -> Adapters {
    let entries = adapters.entries().iter();
    let values: Vec<Tensor> = entries
        .flat_map(|pair| {
            let b_or = Tensor::randn(pair.b_or.size(), (Kind::Double, Device::Cpu)) * DRAWN_B;
            [pair.a_ri.detach().copy(), b_or.to_kind(acc).to_device(pair.b_or.device())]
        })
        .collect();
    adapters.update(&values);
    adapters
}

fn saved(folder: &Path, spec: &Spec, acc: Kind, device: Device) -> Result<Adapters, Failure> {
    let (shape, entries) = adapter_file::load(folder, spec, None, acc, device)?;
    let rank = float(shape.rank);
    Ok(Adapters::new(entries, shape.alpha / rank, "policy"))
}

/// What one group leaves: the summed gradient, and log-probabilities of a token of right and wrong answers.
struct Taken {
    gradients: Vec<Tensor>,
    logprob: [f64; 2],
}

impl Study<'_> {
    fn note(&self, line: Option<String>) {
        if let Some(line) = line.filter(|_| self.world.all.rank().0 == 0) {
            say(&line);
        }
    }

    /// All prompts of one length under one set of adapters, a run for each mode.
    fn length(
        &self,
        spec: &Spec,
        length: Length,
        data: &Dataset,
        name: &str,
        adapters: &Adapters,
    ) -> Result<Vec<Run>, Failure> {
        let counts = || (0..data.len()).map(|index| data.group(index).prompt_tokens);
        let prompt_tokens = [counts().min().unwrap_or_default(), counts().max().unwrap_or_default()];
        let mut agreements: Vec<_> = self.options.gradients.iter().map(|_| IndexMap::new()).collect();
        let mut logprobs = [Vec::new(), Vec::new()];
        for index in 0..data.len() {
            let start = Instant::now();
            let exact = self.gradient(adapters, data, index, Gradient::Exact)?;
            for (of, &gradient) in agreements.iter_mut().zip(&self.options.gradients) {
                let taken = self.gradient(adapters, data, index, gradient)?;
                compare(spec, adapters, &taken.gradients, &exact.gradients, of);
            }
            logprobs.iter_mut().zip(exact.logprob).for_each(|(all, one)| all.push(one));
            let seconds = start.elapsed().as_secs_f64();
            let of = data.len();
            self.note(Some(format!("{}, {name}: prompt {} of {of}, {seconds:.1} s", length.positions, index + 1)));
        }
        let runs = self.options.gradients.iter().zip(agreements).map(|(gradient, projections)| Run {
            length: length.positions,
            prompt_tokens,
            prompts: data.len(),
            adapters: name.to_owned(),
            logprob: [mean(&logprobs[0]), mean(&logprobs[1])],
            gradient: gradient.to_string(),
            projections,
        });
        Ok(runs.collect())
    }

    /// One group's gradient in one mode: a transaction, and finalize without a clip.
    fn gradient(
        &self,
        adapters: &Adapters,
        data: &Dataset,
        index: usize,
        gradient: Gradient,
    ) -> Result<Taken, Failure> {
        let group = data.group(index);
        let world = self.world;
        let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: &self.ledger };
        let transaction = Transaction {
            policy: Pass { decoder: &*self.decoder, adapters, cp_group, micro_block: self.options.micro_block },
            reference: None,
            head: self.head,
            objective: Objective::DEFAULT,
            gradient,
            page_size: self.options.page_size,
            keeping: Keeping::HOST,
            pins_memory: false,
        };
        let rewards: Vec<Option<f64>> = group.answers.iter().map(|answer| answer.reward).collect();
        let answer_ids: Vec<Vec<i64>> = group.answers.iter().map(|answer| answer.ids.clone()).collect();
        let aggregation = Objective::DEFAULT.aggregation;
        let answers = TrainedAnswer::whole_batch(&answer_ids, &advantages(&rewards, Scaling::DEFAULT), aggregation);
        let mut observer = Observer::new(world.tracker(), self.options.device);
        let done = transaction.train(&data.prompt_ids(index)?, None, &answers, None, &mut observer)?;
        let summed =
            observer.host_phase(Phase::Finalize, || finalize::run(&world.cp, finalize::take(adapters), adapters, 0.0));
        let gradients = world.agree(summed)?.gradients().iter().map(Tensor::shallow_clone).collect();
        Ok(Taken { gradients, logprob: self.logprob(group, &done.scores.old) })
    }

    /// Mean log-probability of a token of the right and of the wrong answers, over all ranks.
    fn logprob(&self, group: &data::Group, scores: &Scores) -> [f64; 2] {
        let (mut sums, mut tokens) = ([0.0; 2], [0; 2]);
        for (answer, scored) in group.answers.iter().zip(&scores.0) {
            let wrong = usize::from(answer.reward.is_none_or(|reward| reward <= 0.0));
            let parts = scored.first.iter().chain([&scored.rows]);
            sums[wrong] += parts.map(|part| part.sum(Kind::Double).double_value(&[])).sum::<f64>();
            tokens[wrong] += answer.ids.len();
        }
        [0, 1].map(|which| sum_number(&self.world.cp, sums[which]) / float(from_index(tokens[which])))
    }
}

/// Adds one prompt's cosines and norm ratios. `taken` and `exact` are in the adapters' order: A, then B of each pair.
fn compare(
    spec: &Spec,
    adapters: &Adapters,
    taken: &[Tensor],
    exact: &[Tensor],
    into: &mut IndexMap<&'static str, Agreement>,
) {
    let mut products: IndexMap<&'static str, [f64; 3]> = IndexMap::new();
    let product = |x: &Tensor, y: &Tensor| (x * y).sum(Kind::Double).double_value(&[]);
    let linears = spec.linear_layers();
    for (index, pair) in adapters.entries().iter().enumerate() {
        let projection = linears.iter().find(|linear| linear.module == pair.module).map(|linear| linear.projection);
        for half in 2 * index..2 * index + 2 {
            let (one, two) = (taken[half].to_kind(Kind::Double), exact[half].to_kind(Kind::Double));
            let added = [product(&one, &two), product(&one, &one), product(&two, &two)];
            for name in projection.into_iter().chain([TOGETHER]) {
                let sums = products.entry(name).or_default();
                sums.iter_mut().zip(added).for_each(|(sum, added)| *sum += added);
            }
        }
    }
    // "all" was met after the first projection, and is reported last.
    let together = products.shift_remove_entry(TOGETHER);
    for (name, [across, own, judge]) in products.into_iter().chain(together) {
        let agreement = into.entry(name).or_default();
        agreement.cosine.push(across / (own * judge).sqrt());
        agreement.norm_ratio.push((own / judge).sqrt());
    }
}
