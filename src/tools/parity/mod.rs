//! Parity: a reference case run at whatever world size this process was started with, every number compared.
//!
//! A case is a folder with a checkpoint, `case.json` and `expected.safetensors` (tests/cases/README.md tells what each
//! tensor means). Errors are relative L2, ‖x − y‖ / ‖y‖ over all rows of all ranks; a loss is compared absolutely, and
//! where nothing is expected (‖y‖ < 1e-12) the error is ‖x‖.

mod autograd_reference;
mod case;
mod choices;
pub mod distance;
pub mod random;

use std::path::Path;
use std::rc::Rc;

use serde::Serialize;
use tch::{Device, Kind, Tensor};

pub use case::Error;
use case::{Case, Loss};
use distance::{Squares, comparable, relative};

use crate::config::Gradient;
use crate::model::decoder::Decoder;
use crate::model::experts;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::{ExpertShare, Weights};
use crate::prompt::handoff::{Keeping, PlacedGroup, ReducedGrads, Scores};
use crate::prompt::pages::Slot;
use crate::runtime::failure::Failure;
use crate::runtime::memory::Ledger;
use crate::runtime::units::{LayerIndex, Tokens, as_dim, from_index};
use crate::step::observer::Observer;
use crate::step::transaction::{Scored, Trained, Transaction};
use crate::step::{finalize, score};
use crate::tensor::accumulation;
use crate::world::World;
use crate::world::exchange::sum_number;

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
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Report {
    /// The case's folder.
    pub case: String,
    /// Ranks that shared the prompt.
    pub ranks: usize,
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

/// Runs the case in `folder`. Every rank of the world takes part and returns the same report.
///
/// # Errors
/// When the case or its checkpoint cannot be read, or a phase fails.
pub fn run(world: &World, folder: &Path, options: &Options) -> Result<Report, Failure> {
    let Opened { case, decoder, adapters } = world.agree(open(world, folder, options))?;
    let ledger = Ledger::default();
    let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: &ledger };
    let transaction = Transaction {
        policy: Pass { decoder: &*decoder, adapters: &adapters, cp_group, micro_block: options.micro_block },
        reference: None,
        head: Head { rows_max: 5, temperature: 1.0 },
        objective: case.objective(Loss::Grpo),
        gradient: options.gradient,
        page_size: options.page_size,
        keeping: Keeping::HOST,
        pins_memory: false,
    };
    let mut observer = Observer::new(world.tracker(), options.device);
    let mut errors = Errors { world, found: Vec::new() };
    let scored = transaction.score(&case.prompt_ids, None, case.answers.clone(), &mut observer)?;
    errors.of_logits(&case, &transaction.policy, &scored)?;
    if options.kind != Kind::BFloat16 {
        errors.found.extend(choices::differing(world, &case, &transaction.policy, &scored)?);
    }
    let (acc, rank) = (accumulation(options.kind), world.cp.rank());
    let given = Rc::new(case.given_scores(&scored.group, rank, acc, options.device)?);
    let frozen = scored.scores;
    drop(scored.captured);
    let answers = case.trained()?;
    let mut ratio_is_one = true;
    let mut gradients = Vec::new();
    for loss in Loss::ALL {
        let transaction = Transaction { objective: case.objective(loss), ..transaction };
        let done = transaction.train(&case.prompt_ids, None, &answers, Some(given.clone()), &mut observer)?;
        ratio_is_one &= same_bits(world, &done.replayed.logprobs, &frozen);
        errors.of_logprobs(&case, &done)?;
        errors.of_loss(&case, loss, done.replayed.loss)?;
        let reduced = finalize::run(&world.cp, finalize::take(&adapters), &adapters, 0.0)?;
        let expected = match case::expected_mode(options.gradient, done.group.layout.prompt()) {
            Some(mode) => case.gradients(&adapters, mode, loss),
            None => autograd_reference::gradients(&case, &transaction, &answers)?,
        };
        errors.of_gradients(&adapters, loss, &reduced, &expected);
        let named = adapters.names().map(|tensor| format!("{}.{tensor}", loss.name()));
        gradients.extend(named.zip(reduced.gradients().iter().map(Tensor::copy)));
    }
    Ok(report(folder, options, world.cp.size(), ratio_is_one, errors.found, gradients))
}

struct Opened {
    case: Case,
    decoder: Box<dyn Decoder>,
    adapters: Adapters,
}

/// The case with everything that can be wrong with it: what fails here fails on all ranks with one message.
fn open(world: &World, folder: &Path, options: &Options) -> Result<Opened, Failure> {
    let case = Case::read(folder)?;
    let prompt = Tokens(from_index(case.prompt_ids.len()));
    if let Gradient::Last(last) = options.gradient
        && last > prompt
    {
        return Err(Error::Tail { last, prompt }.into());
    }
    let spec = Spec::read(folder, None)?;
    if let Some(experts) = &spec.experts {
        experts::check_spread(experts, spec.model_type, from_index(world.ep.size()))?;
    }
    let weights = Rc::new(Weights::load(folder, &spec, options.kind, options.device, ExpertShare::of(&world.ep))?);
    let adapters = case.adapters(&spec, accumulation(options.kind), options.device);
    Ok(Opened { case, decoder: spec.decoder(weights, options.kind), adapters })
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
    !world.cp.gather_numbers(u64::from(same)).contains(&0)
}

/// The error of each number, by its name. Parts of one tensor on several ranks make one error.
struct Errors<'a> {
    world: &'a World,
    found: Vec<(String, f64)>,
}

impl Errors<'_> {
    fn add(&mut self, name: String, own: Squares) {
        let error = sum_number(&self.world.cp, own.error);
        let expected = sum_number(&self.world.cp, own.expected);
        self.found.push((name, Squares { error, expected }.relative()));
    }

    fn of_logits(&mut self, case: &Case, pass: &Pass, scored: &Scored) -> Result<(), Failure> {
        let Scored { group, captured, .. } = scored;
        let hidden = score::hidden(pass, group, captured, self.world.tracker())?;
        for index in 0..group.answers.len() {
            let name = format!("logits.{index}");
            let first = captured.last_row.as_ref().map(|x_1w| pass.decoder.logits(x_1w));
            let rows = pass.decoder.logits(&*hidden.stage(Slot { span: index, layer: LayerIndex(0) })?);
            let own = self.own_squares(group, index, first.as_ref(), &rows, case.get(&name)?);
            self.add(name, own);
        }
        Ok(())
    }

    /// Later losses replace the errors of earlier ones, which have the same log-probabilities.
    fn of_logprobs(&mut self, case: &Case, done: &Trained) -> Result<(), Failure> {
        for (index, found) in done.replayed.logprobs.0.iter().enumerate() {
            let name = format!("logprobs.{index}");
            let own = self.own_squares(&done.group, index, found.first.as_ref(), &found.rows, case.get(&name)?);
            self.found.retain(|(known, _)| *known != name);
            self.add(name, own);
        }
        Ok(())
    }

    /// This rank's rows of an answer, and its first token's where this rank has row P−1, against those expected.
    fn own_squares(
        &self,
        group: &PlacedGroup,
        index: usize,
        first: Option<&Tensor>,
        rows: &Tensor,
        expected: &Tensor,
    ) -> Squares {
        let mut own = Squares::default();
        if let Some(first) = first {
            own.add(Squares::between(first, &expected.narrow(0, 0, 1)));
        }
        let mut start = 0;
        for piece in group.answers[index].span.of(self.world.cp.rank()) {
            let count = piece.rows().dim();
            let token = as_dim(from_index(group.layout.labels(piece).start));
            own.add(Squares::between(&rows.narrow(0, start, count), &expected.narrow(0, token, count)));
            start += count;
        }
        own
    }

    /// A loss is compared absolutely.
    fn of_loss(&mut self, case: &Case, loss: Loss, own: f64) -> Result<(), Failure> {
        let name = format!("loss.{}", loss.name());
        let expected = case.get(&name)?.double_value(&[]);
        self.found.push((name, (sum_number(&self.world.cp, own) - expected).abs()));
        Ok(())
    }

    /// Gradients are summed already and equal on all ranks, so they are compared without another sum.
    fn of_gradients(&mut self, adapters: &Adapters, loss: Loss, reduced: &ReducedGrads, expected: &[Tensor]) {
        for ((tensor, found), expected) in adapters.names().zip(reduced.gradients()).zip(expected) {
            let error = relative(found, expected);
            self.found.push((format!("grad.{}.{tensor}", loss.name()), error));
        }
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
    errors.sort_by(|one, two| comparable(two.1).total_cmp(&comparable(one.1)));
    let (worst_tensor, worst) =
        errors.first().map_or((String::new(), f64::INFINITY), |(name, error)| (name.clone(), comparable(*error)));
    let limit = limit(options.kind);
    Report {
        case: folder.display().to_string(),
        ranks,
        gradient: options.gradient.to_string(),
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
