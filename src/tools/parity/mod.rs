//! Parity: a reference case run at whatever world size this process was started with, every number compared.
//!
//! A case is a folder with a checkpoint, `case.json` and `expected.safetensors` (tests/cases/README.md tells what each
//! tensor means). Errors are relative L2, ‖x − y‖ / ‖y‖ over all rows of all ranks; a loss is compared absolutely, and
//! where nothing is expected (‖y‖ < 1e-12) the error is ‖x‖.

mod judged;
mod mode;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub use mode::Gradient;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::{Adapter, Adapters};
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::Weights;
use crate::prompt::handoff::{Captured, Keeping, Logprobs, PlacedGroup, ReducedGrads, Scores};
use crate::prompt::layout::PromptLayout;
use crate::prompt::pages::Slot;
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::Ledger;
use crate::runtime::units::{LayerIndex, Tokens, as_dim, float, from_index};
use crate::step::objective::{Aggregation, Batch, Counted, Objective};
use crate::step::replay::{self, ReplayTargets};
use crate::step::{capture, finalize, score};
use crate::tensor::accumulation;
use crate::world::World;
use crate::world::exchange::sum_number;

/// What can be wrong with a case.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {message}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        message: String,
    },
    /// A tensor is missing.
    #[error("{}: no tensor {tensor}", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// More tail rows than the prompt has.
    #[error("last={last} is more than the case's prompt of {prompt} positions")]
    Tail {
        /// Rows asked for.
        last: Tokens,
        /// Rows there are.
        prompt: Tokens,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Tail { .. } => Exit::Config,
            _ => Exit::Data,
        }
    }
}

/// How a case is run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Which prompt rows carry gradient.
    pub gradient: Gradient,
    /// The model's dtype.
    pub kind: Kind,
    /// Positions in a page.
    pub page_size: Tokens,
    /// Most rows of a segment at one time.
    pub micro_block: Tokens,
    /// Where the model computes.
    pub device: Device,
}

/// The outcome, the same on every rank.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The case's folder.
    pub case: String,
    /// Ranks that shared the prompt.
    pub ranks: usize,
    /// Gradient mode.
    pub gradient: String,
    /// The model's dtype.
    pub dtype: &'static str,
    /// Positions in a page.
    pub page_size: Tokens,
    /// The largest error.
    pub worst: f64,
    /// What it belongs to.
    pub worst_tensor: String,
    /// The limit for this dtype.
    pub limit: f64,
    /// Whether every error is within the limit.
    pub passed: bool,
    /// Whether the replay's log-probabilities were the frozen scores, bit for bit, on every rank.
    pub ratio_is_one: bool,
    /// Error of each number, worst first.
    pub errors: serde_json::Map<String, serde_json::Value>,
    /// Summed adapter gradients, for comparisons between worlds.
    #[serde(skip)]
    pub gradients: Vec<(String, Tensor)>,
}

impl Report {
    /// The report in words, worst error first.
    #[must_use]
    pub fn text(&self) -> String {
        let verdict = if self.passed { "passed" } else { "FAILED" };
        let mut lines = vec![format!(
            "{}: {verdict}, gradient {}, {}, {} ranks, pages of {}: worst {:.1e} ({}), limit {}, ratio {}",
            self.case,
            self.gradient,
            self.dtype,
            self.ranks,
            self.page_size,
            self.worst,
            self.worst_tensor,
            self.limit,
            if self.ratio_is_one { "exactly 1" } else { "NOT 1" }
        )];
        lines.extend(
            self.errors.iter().map(|(name, error)| format!("  {:9.2e}  {name}", error.as_f64().unwrap_or(f64::NAN))),
        );
        lines.join("\n")
    }
}

#[derive(Deserialize)]
struct CaseFile {
    answer_lens: Vec<usize>,
    clip: f64,
    kl_beta: f64,
    lora_rank: u64,
    lora_alpha: f64,
}

struct Case {
    file: PathBuf,
    about: CaseFile,
    expected: BTreeMap<String, Tensor>,
}

/// The objective, the advantage of each answer, and the weight of each answer's tokens.
type CaseGoal = (Objective, Vec<Option<f64>>, Vec<f64>);

impl Case {
    fn read(folder: &Path) -> Result<Case, Error> {
        let about_file = folder.join("case.json");
        let failed = |file: &Path, message: String| Error::Read { file: file.into(), message };
        let text = std::fs::read_to_string(&about_file).map_err(|error| failed(&about_file, error.to_string()))?;
        let about = serde_json::from_str(&text).map_err(|error| failed(&about_file, error.to_string()))?;
        let file = folder.join("expected.safetensors");
        let tensors = Tensor::read_safetensors(&file).map_err(|error| failed(&file, error.to_string()))?;
        Ok(Case { file, about, expected: tensors.into_iter().collect() })
    }

    /// Whether every number that will be compared is there.
    fn check(&self) -> Result<(), Error> {
        let of_answers = ["answer_ids", "logits", "logprobs", "old_logprobs", "ref_logprobs"];
        let answers = 0..self.about.answer_lens.len();
        let each = answers.flat_map(|index| of_answers.map(|name| format!("{name}.{index}")));
        let of_group = ["prompt_ids", "advantages", "loss.grpo", "loss.grpo_kl"].map(String::from);
        of_group.into_iter().chain(each).try_for_each(|name| self.get(&name).map(|_| ()))
    }

    fn get(&self, name: &str) -> Result<&Tensor, Error> {
        self.expected.get(name).ok_or_else(|| Error::Missing { file: self.file.clone(), tensor: name.into() })
    }

    fn ids(&self, name: &str) -> Result<Vec<i64>, Error> {
        Vec::<i64>::try_from(self.get(name)?)
            .map_err(|error| Error::Read { file: self.file.clone(), message: error.to_string() })
    }

    /// Expected gradients of every adapter tensor; `None` where nothing is expected, which is zero.
    fn gradients(&self, adapters: &Adapters, prefix: &str) -> Vec<Option<Tensor>> {
        let of = |tensor: String| self.expected.get(&format!("{prefix}.lora.{tensor}"));
        adapters.names().map(|tensor| of(tensor).map(Tensor::shallow_clone)).collect()
    }

    /// The objective, the advantage of each answer, and the weight of each answer's tokens.
    fn goal(&self, work: &PlacedGroup, kl_coef: f64) -> Result<CaseGoal, Error> {
        let aggregation = Aggregation::SequenceMean;
        let terms = Objective { clip_low: self.about.clip, clip_high: self.about.clip, kl_coef, aggregation };
        let given = self.get("advantages")?.to_kind(Kind::Double);
        let advantages = (0..given.size()[0]).map(|index| Some(given.double_value(&[index]))).collect();
        let counts = work.answers.iter().map(|answer| from_index(answer.ids.len()));
        let batch = Batch::of(counts.clone().map(|tokens| Counted { tokens, scored: true }));
        Ok((terms, advantages, counts.map(|tokens| batch.weight(aggregation, tokens)).collect()))
    }

    fn adapters(&self, spec: &Spec, acc: Kind, device: Device) -> Adapters {
        let load = |x: &Tensor| x.to_kind(acc).to_device(device);
        let mut pairs = Vec::new();
        for linear in spec.linear_layers() {
            let of = |half: &str| self.expected.get(&format!("lora.{}.lora_{half}", linear.module));
            if let (Some(a_ri), Some(b_or)) = (of("A"), of("B")) {
                pairs.push(Adapter { module: linear.module, a_ri: load(a_ri), b_or: load(b_or) });
            }
        }
        Adapters::new(pairs, self.about.lora_alpha / float(self.about.lora_rank), "policy")
    }
}

/// Runs the case in `folder`. Every rank of the world takes part and returns the same report.
///
/// # Errors
/// When the case or its checkpoint cannot be read, or a phase fails.
pub fn run(world: &World, folder: &Path, options: &Options) -> Result<Report, Failure> {
    let (case, decoder, adapters, work) = world.agree(open(folder, options, world.cp.size()))?;
    let tracker = world.tracker();
    let ledger = Ledger::default();
    let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
    let pass = Pass { decoder: &*decoder, adapters: &adapters, cp_group, micro_block: options.micro_block };
    let captured = capture::run(&pass, &work, Keeping::HOST, tracker)?;
    let mut compare = Compare { world, errors: Vec::new() };
    compare_logits(&mut compare, &case, &pass, &work, &captured)?;
    let head = Head { rows_max: 5, temperature: 1.0 };
    let frozen = score::run(&pass, &head, &work, &captured, tracker)?;
    let given = given_scores(&case, &pass, &work)?;
    let mut ratio_is_one = true;
    let mut gradients = Vec::new();
    for (name, kl_coef) in [("grpo", 0.0), ("grpo_kl", case.about.kl_beta)] {
        let done = replayed(&case, &pass, &head, &work, &captured, &given, kl_coef, tracker)?;
        ratio_is_one &= same_bits(world, &done.logprobs, &frozen);
        compare_logprobs(&mut compare, &case, &work, world, &done.logprobs)?;
        let loss = sum_number(&world.cp, done.loss);
        let expected = case.get(&format!("loss.{name}"))?.double_value(&[]);
        compare.errors.push((format!("loss.{name}"), (loss - expected).abs()));
        let reduced = finalize::run(&world.cp, finalize::take(&adapters), &adapters, 0.0)?;
        let wanted = match options.gradient.expected(work.layout.prompt()) {
            Some(way) => case.gradients(&adapters, &format!("grad.{way}.{name}")),
            None => judged::gradients(&case, &pass, &head, &work, options.gradient, kl_coef)?,
        };
        compare_gradients(&mut compare, &adapters, &reduced, &wanted, name);
        let named = adapters.names().map(|tensor| format!("{name}.{tensor}"));
        gradients.extend(named.zip(reduced.gradients().iter().map(Tensor::copy)));
    }
    Ok(report(folder, options, world.cp.size(), ratio_is_one, compare.errors, gradients))
}

/// The case with everything that can be wrong with it: what fails here fails on all ranks with one message.
fn open(
    folder: &Path,
    options: &Options,
    ranks: usize,
) -> Result<(Case, Box<dyn Decoder>, Adapters, PlacedGroup), Failure> {
    let case = Case::read(folder)?;
    case.check()?;
    let prompt_ids = case.ids("prompt_ids")?;
    let prompt = Tokens(from_index(prompt_ids.len()));
    let last = options.gradient.tail(prompt);
    if last > prompt {
        return Err(Error::Tail { last, prompt }.into());
    }
    let layout = PromptLayout::new(prompt, options.page_size, ranks, last);
    let answers = (0..case.about.answer_lens.len()).map(|index| case.ids(&format!("answer_ids.{index}")));
    let work = PlacedGroup::new(layout, prompt_ids, answers.collect::<Result<_, _>>()?);
    let spec = Spec::read(folder, None)?;
    let weights = Rc::new(Weights::load(folder, &spec, options.kind, options.device)?);
    let adapters = case.adapters(&spec, accumulation(options.kind), options.device);
    Ok((case, spec.decoder(weights, options.kind), adapters, work))
}

/// The case's old and reference log-probabilities, cut to this rank's tokens.
fn given_scores(case: &Case, pass: &Pass, work: &PlacedGroup) -> Result<[Scores; 2], Error> {
    let rank = pass.cp_group.axis.rank();
    let acc = accumulation(pass.decoder.kind());
    let cut = |prefix: &str| -> Result<Scores, Error> {
        let answers = work.answers.iter().enumerate().map(|(index, answer)| {
            let all = case.get(&format!("{prefix}_logprobs.{index}"))?.to_kind(acc).to_device(pass.decoder.device());
            let at: Vec<i64> = answer
                .span
                .of(rank)
                .flat_map(|piece| work.layout.labels(piece))
                .map(|token| as_dim(from_index(token)))
                .collect();
            let first = (work.layout.last_row_owner() == rank).then(|| all.narrow(0, 0, 1));
            Ok(Logprobs { rows: all.index_select(0, &Tensor::from_slice(&at).to_device(all.device())), first })
        });
        Ok(Scores(answers.collect::<Result<_, Error>>()?))
    };
    Ok([cut("old")?, cut("ref")?])
}

#[expect(clippy::too_many_arguments, reason = "one call site; the names are the phases' own")]
fn replayed(
    case: &Case,
    pass: &Pass,
    head: &Head,
    work: &PlacedGroup,
    captured: &Captured,
    given: &[Scores; 2],
    kl_coef: f64,
    tracker: &Tracker,
) -> Result<replay::Replayed, Failure> {
    let (terms, advantages, weights) = case.goal(work, kl_coef)?;
    let reference = (kl_coef > 0.0).then_some(&given[1]);
    let goal = ReplayTargets { old: &given[0], reference, advantages: &advantages, weights: &weights, terms: &terms };
    replay::run(pass, head, work, captured, goal, tracker)
}

/// Whether two sets of log-probabilities are the same bits on every rank.
fn same_bits(world: &World, one: &Scores, two: &Scores) -> bool {
    let same = one.0.iter().zip(&two.0).all(|(one, two)| {
        let firsts = match (&one.first, &two.first) {
            (Some(one), Some(two)) => one.equal(two),
            (None, None) => true,
            _ => false,
        };
        one.rows.equal(&two.rows) && firsts
    });
    world.cp.gather_numbers(u64::from(same)).iter().all(|&same| same == 1)
}

/// Errors so far; parts of one tensor on several ranks make one error.
struct Compare<'a> {
    world: &'a World,
    errors: Vec<(String, f64)>,
}

impl Compare<'_> {
    /// `parts` are this rank's rows of a tensor beside what is expected there.
    fn rows(&mut self, name: String, parts: &[(Tensor, Tensor)]) {
        let square = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
        let apart =
            parts.iter().map(|(got, want)| square(&(got.to_device(Device::Cpu).to_kind(Kind::Double) - want))).sum();
        let size = parts.iter().map(|(_, want)| square(want)).sum();
        let (apart, size) = (sum_number(&self.world.cp, apart).sqrt(), sum_number(&self.world.cp, size).sqrt());
        self.errors.push((name, if size < 1e-12 { apart } else { apart / size }));
    }
}

fn compare_logits(
    compare: &mut Compare,
    case: &Case,
    pass: &Pass,
    work: &PlacedGroup,
    captured: &Captured,
) -> Result<(), Failure> {
    let rank = pass.cp_group.axis.rank();
    let pool = score::hidden(pass, work, captured, compare.world.tracker())?;
    for (index, answer) in work.answers.iter().enumerate() {
        let expected = case.get(&format!("logits.{index}"))?;
        let mut parts = Vec::new();
        if let Some(x_1w) = &captured.last_row {
            parts.push((pass.decoder.logits(x_1w), expected.narrow(0, 0, 1)));
        }
        let logits_rv = pass.decoder.logits(&*pool.stage(Slot { span: index, layer: LayerIndex(0) })?);
        let mut first = 0;
        for piece in answer.span.of(rank) {
            let rows = piece.rows().dim();
            let at = as_dim(from_index(work.layout.labels(piece).start));
            parts.push((logits_rv.narrow(0, first, rows), expected.narrow(0, at, rows)));
            first += rows;
        }
        compare.rows(format!("logits.{index}"), &parts);
    }
    Ok(())
}

fn compare_logprobs(
    compare: &mut Compare,
    case: &Case,
    work: &PlacedGroup,
    world: &World,
    got: &Scores,
) -> Result<(), Failure> {
    for (index, (answer, got)) in work.answers.iter().zip(&got.0).enumerate() {
        let expected = case.get(&format!("logprobs.{index}"))?;
        let mut parts: Vec<(Tensor, Tensor)> =
            got.first.iter().map(|first| (first.copy(), expected.narrow(0, 0, 1))).collect();
        let mut first = 0;
        for piece in answer.span.of(world.cp.rank()) {
            let rows = piece.rows().dim();
            let at = as_dim(from_index(work.layout.labels(piece).start));
            parts.push((got.rows.narrow(0, first, rows), expected.narrow(0, at, rows)));
            first += rows;
        }
        let name = format!("logprobs.{index}");
        compare.errors.retain(|(known, _)| *known != name);
        compare.rows(name, &parts);
    }
    Ok(())
}

/// Gradients are summed already and equal on all ranks, so they are compared without another sum.
fn compare_gradients(
    compare: &mut Compare,
    adapters: &Adapters,
    reduced: &ReducedGrads,
    wanted: &[Option<Tensor>],
    loss: &str,
) {
    for ((tensor, got), want) in adapters.names().zip(reduced.gradients()).zip(wanted) {
        let got = got.to_device(Device::Cpu).to_kind(Kind::Double);
        let want = want.as_ref().map_or_else(|| got.zeros_like(), |want| want.to_kind(Kind::Double));
        let norm = |x: &Tensor| x.square().sum(Kind::Double).sqrt().double_value(&[]);
        let (apart, size) = (norm(&(&got - &want)), norm(&want));
        compare.errors.push((format!("grad.{loss}.{tensor}"), if size < 1e-12 { apart } else { apart / size }));
    }
}

fn report(
    folder: &Path,
    options: &Options,
    ranks: usize,
    ratio_is_one: bool,
    mut errors: Vec<(String, f64)>,
    gradients: Vec<(String, Tensor)>,
) -> Report {
    // A NaN is the worst of all: it must not win a comparison by losing every one.
    let rank_of = |error: f64| if error.is_nan() { f64::INFINITY } else { error };
    errors.sort_by(|one, two| rank_of(two.1).total_cmp(&rank_of(one.1)));
    let (worst_tensor, worst) =
        errors.first().map_or((String::new(), f64::INFINITY), |(name, error)| (name.clone(), rank_of(*error)));
    let limit = limit(options.kind);
    Report {
        case: folder.display().to_string(),
        ranks,
        gradient: options.gradient.name(),
        dtype: dtype_name(options.kind),
        page_size: options.page_size,
        worst,
        worst_tensor,
        limit,
        passed: worst <= limit && ratio_is_one,
        ratio_is_one,
        errors: errors.into_iter().map(|(name, error)| (name, error.into())).collect(),
        gradients,
    }
}

/// Largest error that passes. float64 is held to rounding; float32 to a little above what whole-sequence float32 shows
/// on the same cases (3e-5); bfloat16 has 8 bits, and its own autograd is 0.04 to 0.1 off (docs/numerics.md).
fn limit(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-9,
        Kind::Float => 5e-5,
        _ => 0.15,
    }
}

/// The config's name of a dtype.
#[must_use]
pub fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Double => "float64",
        Kind::Float => "float32",
        _ => "bfloat16",
    }
}
