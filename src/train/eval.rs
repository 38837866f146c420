//! Evaluation without training, of adapters or of the base model alone: each prompt is captured once, its answers are drawn,
//! judged and written down. What is finished is not done again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::evaluate::{Evaluator, check_calls, wanted};
use super::inputs::Work;
use super::open::{Prepared, read_spec};
use super::outcome::Outcome;
use super::run_folder::{Begin, RunFolder};
use super::session::Session;
use super::stop_policy::StopPolicy;
use crate::checkpoint::{self, Difference};
use crate::config::{Dtype, Gradient, ImportanceWeights, KlEstimator, Loaded, RunConfig};
use crate::model::adapter_file;
use crate::report::{EvalAnswer, EvalLine, EvalSummary, HeldOut, Reporter, Results, set_aside};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::units::{Rank, Tokens};
use crate::step::rollout::CallCounts;
use crate::world::World;

/// Names of what only a run writes.
const OF_A_RUN: [&str; 3] = ["metrics.jsonl", "checkpoints", "latest"];

/// Why nothing is evaluated.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(
        "data.held_out is not set: name the prompts to evaluate on, with --set data.held_out=FILE, with --set \
         'data.held_out={{ name = \"FILE\", … }}' or in config.toml"
    )]
    NoSets,
    #[error(
        "nothing can be measured on {sets}: rollout.sample = false, eval.samples or eval.greedy leave no answer of the policy, \
         and no prompt has a better and a worse answer of the data"
    )]
    Nothing { sets: String },
    #[error("{} is a run's directory: choose another place for the results with --out", folder.display())]
    IsRun { folder: PathBuf },
    #[error(
        "{} holds another evaluation: {}; evaluate elsewhere with --out, or begin anew here with --anew, which moves what is \
         there into a folder beside",
        folder.display(),
        differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    Other { folder: PathBuf, differences: Vec<Difference> },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::NoSets | Error::IsRun { .. } | Error::Other { .. } => Exit::Config,
            Error::Nothing { .. } => Exit::Data,
        }
    }
}

/// What is evaluated, and where the results go.
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// Folder of adapters or of a checkpoint, or a file of a run directory that names one; absent: the base model alone.
    pub adapters: Option<PathBuf>,
    /// Folder of the results; absent: `eval/NAME` in the adapters' run directory, with the name of their folder.
    pub out: Option<PathBuf>,
    /// Whether results that are there are moved aside.
    pub anew: bool,
}

/// How an evaluation has ended.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names and types say everything")]
pub enum EvalEnded {
    Finished {
        summary: Box<EvalSummary>,
        out: PathBuf,
    },
    /// On request; the same command goes on.
    Stopped,
}

/// Evaluates on the held-out sets of the configuration. Nothing is trained, and the data to train on are not read.
///
/// # Errors
/// When something cannot be loaded or written, does not fit, is not finite, or the results in the folder are of another
/// evaluation.
pub fn evaluate(loaded: &Loaded, options: &EvalOptions, world: &mut World) -> Result<EvalEnded, Failure> {
    let mut loaded = loaded.clone();
    // Rank 0 decides which checkpoint a name means: another rank may see another copy of it.
    let named = world.from_root(|| Ok(options.adapters.as_deref().map(checkpoint::folder_of).transpose()?))?;
    let options = &EvalOptions { adapters: named, ..options.clone() };
    let out = options.out.clone().unwrap_or_else(|| default_out(options.adapters.as_deref(), &loaded.rank.dir));
    loaded.rank.dir.clone_from(&out);
    world.agree(prepare(&mut loaded.run, options))?;
    let prepared = Prepared::new(&loaded, Begin::New, world)?;
    let is_run = OF_A_RUN.iter().any(|name| out.join(name).exists());
    world.on_root(|| if is_run { Err(Error::IsRun { folder: out.clone() }.into()) } else { Ok(()) })?;
    let _folder = RunFolder::take(&out, world)?;
    let aside = world.on_root(|| if options.anew { Ok(set_aside(&out)?) } else { Ok(None) })?.flatten();
    let mut session = Session::load(prepared, world, Work::Evaluate)?;
    restore_masters(&mut session, options, world)?;
    let reporter = Reporter::of_lines(&out, world.all.rank() == Rank(0));
    session.held_out_notes().iter().for_each(|note| reporter.line(note));
    if let Some(place) = aside {
        reporter.line(&format!("the results that were in {} are now in {}", out.display(), place.display()));
    }
    let adapters = session.policy.digest(world);
    let about = EvalSummary {
        adapters: options.adapters.clone(),
        commit: option_env!("LONGSTRAW_COMMIT").unwrap_or("unknown").to_owned(),
        of: identity(&session, options.adapters.as_ref().map(|_| adapters.as_str())),
        ..EvalSummary::default()
    };
    let opened = world.on_root(|| open_results(&out, &about))?;
    let (results, finished) = opened.unzip();
    let finished = world.from_root(|| Ok(finished.unwrap_or_default()))?;
    let stop = StopPolicy::open(&session.loaded, world);
    let mut alone = Alone { session: &session, world, reporter, stop: &stop, results, about };
    let ended = alone.run(finished, &out);
    // A communicator must not outlive MPI; after a failure that this rank has alone, the process ends without it.
    if ended.is_ok() || world.all_leave() {
        stop.close(world);
    }
    ended
}

/// `eval/NAME` in the directory of the run that has made the adapters, else in `run_dir`.
fn default_out(adapters: Option<&Path>, run_dir: &Path) -> PathBuf {
    let is_run = |folder: &&Path| folder.join("config.resolved.toml").is_file();
    let made = adapters.and_then(|folder| folder.ancestors().skip(1).take(2).find(is_run));
    let name = adapters.map_or(Some("base".as_ref()), Path::file_name).unwrap_or("adapters".as_ref());
    made.unwrap_or(run_dir).join("eval").join(name)
}

/// Sets what evaluation alone asks for: the adapters' own form, and none of training's memory.
fn prepare(config: &mut RunConfig, options: &EvalOptions) -> Result<(), Failure> {
    if config.data.held_out.is_none() {
        return Err(Error::NoSets.into());
    }
    config.grpo.gradient = Gradient::Last(Tokens(0));
    config.grpo.kl_coef = 0.0;
    config.alarm.kl_stop = None;
    config.grpo.kl_estimator = KlEstimator::K3;
    config.grpo.updates_per_group = 1;
    config.grpo.reuse_drift_max = None;
    config.run.reuse_capture = 1;
    config.grpo.importance = ImportanceWeights::None;
    config.grpo.importance_max = None;
    config.grpo.importance_min = None;
    config.memory.prompt_no_grad = true;
    config.checkpoint.keep_best = None;
    config.lora.init_from.clone_from(&options.adapters);
    if let Some(folder) = &options.adapters {
        let shape = adapter_file::shape_of(folder, &read_spec(config)?)?;
        config.lora.rank = shape.rank;
        config.lora.alpha = shape.alpha;
        config.lora.targets = Some(shape.targets);
    }
    Ok(())
}

/// A checkpoint is checked by its digest. Its masters are wider than the adapters' file in float64.
fn restore_masters(session: &mut Session, options: &EvalOptions, world: &World) -> Result<(), Failure> {
    // Rank 0 decides what the folder is: another rank may see another copy of it.
    let is_checkpoint = options.adapters.as_deref().is_some_and(checkpoint::is_checkpoint);
    let Some(folder) = options.adapters.as_deref().filter(|_| world.root_says(is_checkpoint)) else {
        return Ok(());
    };
    let state = world.agree(checkpoint::state_of(folder).map_err(Failure::from))?;
    let dtype = session.config().model.dtype;
    let wide = |value: &Value| value.pointer("/model/dtype") == Some(&json!(Dtype::Float64));
    if world.root_says(wide(&state.config) != (dtype == Dtype::Float64)) {
        return Ok(());
    }
    let saved = world.agree(checkpoint::read_folder(folder, &session.policy.adapters).map_err(Failure::from))?;
    session.policy.adapters.restore(&saved.masters, saved.state.adapter_version);
    world.require_equal("the adapters (digest)", &session.policy.digest(world))
}

/// Everything that the numbers follow from. `adapters`: their digest, absent for the base model alone.
fn identity(session: &Session, adapters: Option<&str>) -> Value {
    let config = session.config();
    let mut of = Map::new();
    let values = config.resumable();
    for table in ["context", "model", "rollout", "tools", "reward", "endpoint"] {
        of.insert(table.to_owned(), values[table].clone());
    }
    of.insert(
        "memory".to_owned(),
        json!({"micro_block": config.memory.micro_block, "head_block": config.memory.head_block}),
    );
    of.insert("data".to_owned(), json!({"too_long": config.data.too_long}));
    of.insert("grpo".to_owned(), json!({"temperature": config.grpo.temperature, "reward_fn": config.grpo.reward_fn}));
    of.insert("eval".to_owned(), json!({"samples": config.eval_samples(), "greedy": config.eval_greedy()}));
    of.insert("run".to_owned(), json!({"seed": config.run.seed, "deterministic": config.run.deterministic}));
    let own = ["the data", "the starting adapters"];
    let inputs = session.input_digests.iter().filter(|(name, _)| !own.contains(&name.as_str()));
    of.extend(inputs.map(|(name, digest)| (format!("{name} (digest)"), json!(digest))));
    of.insert("the adapters (digest)".to_owned(), json!(adapters.unwrap_or("none: the base model alone")));
    Value::Object(of)
}

/// How the calls in all answers of these lines have ended.
fn calls_in<'a>(lines: impl Iterator<Item = &'a EvalLine>) -> CallCounts {
    let mut counts = CallCounts::default();
    lines.flat_map(|line| &line.answers).filter_map(|answer| answer.calls.as_ref()).for_each(|calls| counts.add(calls));
    counts
}

/// The results in `out` with the prompts that are finished, on rank 0.
fn open_results(out: &Path, about: &EvalSummary) -> Result<(Results, Vec<EvalLine>), Failure> {
    if let Some(there) = Results::about(out)? {
        let differences = checkpoint::value_differences(&there.of, &about.of);
        if !differences.is_empty() {
            return Err(Error::Other { folder: out.to_owned(), differences }.into());
        }
    }
    Ok(Results::open(out, about)?)
}

/// An evaluation on its way.
struct Alone<'a> {
    session: &'a Session,
    world: &'a World,
    reporter: Reporter,
    stop: &'a StopPolicy,
    /// On rank 0.
    results: Option<Results>,
    about: EvalSummary,
}

impl Alone<'_> {
    /// Evaluates the prompts that are not among `finished`, and sums up all of them.
    fn run(&mut self, finished: Vec<EvalLine>, out: &Path) -> Result<EvalEnded, Failure> {
        let (session, world, stop) = (self.session, self.world, self.stop);
        let mut lines: BTreeMap<String, BTreeMap<usize, EvalLine>> = BTreeMap::new();
        // A prompt with an answer that nobody has scored, or with a call that got no reply, is asked about again.
        let is_complete = |answer: &EvalAnswer| {
            answer.failure.is_none() && answer.calls.as_ref().is_none_or(|calls| calls.failed == 0)
        };
        for line in finished.into_iter().filter(|line| line.answers.iter().all(is_complete)) {
            lines.entry(line.set.clone()).or_default().insert(line.index, line);
        }
        for set in &session.data.held_out {
            let done = lines.entry(set.name.clone()).or_default();
            let wanted = wanted(session, set);
            let left: Vec<usize> = wanted.iter().copied().filter(|index| !done.contains_key(index)).collect();
            if left.len() < wanted.len() {
                let (count, all) = (wanted.len() - left.len(), wanted.len());
                self.reporter.line(&format!("{}: {count} of {all} prompts are finished already", set.name));
            }
            let results = &mut self.results;
            let mut evaluator = Evaluator { session, world, reporter: &mut self.reporter, stop };
            let evaluated = stop.droppable(None, || {
                evaluator.prompts(set, &left, |more| {
                    world.on_root(|| Ok(results.iter_mut().try_for_each(|results| results.append(&more))?))?;
                    done.extend(more.into_iter().map(|line| (line.index, line)));
                    Ok(())
                })
            });
            match Outcome::of(evaluated)? {
                Outcome::Done(_) => {}
                Outcome::Dropped { .. } => {
                    let count = done.len();
                    self.reporter.line(&format!(
                        "stopped as requested: {count} of {} prompts of {} are finished; the same command goes on",
                        wanted.len(),
                        set.name
                    ));
                    return Ok(EvalEnded::Stopped);
                }
                Outcome::NoRewards { failure } => return Err(failure),
            }
            // Of the whole set: an earlier start may have drawn most of it.
            world.agree(check_calls(session, &set.name, &calls_in(done.values())))?;
        }
        self.sum_up(&lines, out)
    }

    fn sum_up(
        &mut self,
        lines: &BTreeMap<String, BTreeMap<usize, EvalLine>>,
        out: &Path,
    ) -> Result<EvalEnded, Failure> {
        let (session, world, stop) = (self.session, self.world, self.stop);
        let mut summary = self.about.clone();
        for (set, lines) in lines.iter().filter(|(_, lines)| !lines.is_empty()) {
            let in_order: Vec<EvalLine> = lines.values().cloned().collect();
            let held_out = HeldOut::of(&in_order);
            Evaluator { session, world, reporter: &mut self.reporter, stop }.warn_of_missing(set, &held_out);
            summary.sets.insert(set.clone(), held_out);
        }
        let sets = lines.keys().cloned().collect::<Vec<_>>().join(", ");
        world.agree(if summary.sets.is_empty() { Err(Error::Nothing { sets }.into()) } else { Ok(()) })?;
        summary.finished = Some(chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true));
        if let Some(spent) = session.take_spent() {
            self.reporter.line(&format!("judges: {}", spent.text()));
        }
        world.on_root(|| Ok(self.results.iter().try_for_each(|results| results.write(&summary))?))?;
        Ok(EvalEnded::Finished { summary: Box::new(summary), out: out.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A start that draws few prompts again must not be judged by them alone.
    #[test]
    fn the_calls_of_a_set_are_those_of_all_its_lines() {
        let answer = |calls, failed| EvalAnswer {
            calls: Some(CallCounts { calls, failed, ..CallCounts::default() }),
            ..EvalAnswer::default()
        };
        let line = |answers| EvalLine { answers, ..EvalLine::default() };
        let silent = EvalAnswer::default();
        let lines = [line(vec![answer(90, 0), silent]), line(vec![answer(6, 4)]), line(Vec::new())];
        let CallCounts { calls, failed, .. } = calls_in(lines.iter());
        assert_eq!((calls, failed), (96, 4));
    }
}
