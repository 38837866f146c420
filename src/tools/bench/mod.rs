//! Bench: one update on random weights and tokens at given lengths, with the conventional schedule beside it; or sampled tokens;
//! or the rates of the machine that a plan reads.
//!
//! Every schedule runs once unmeasured: on a CPU on a short prompt, on a GPU at full length through the first layers, so that
//! libraries have chosen their kernels for every shape. Then once measured. Bytes are the allocators' own: what lies on a
//! device (weights, graphs, scratch, stages), and what waits in host pools.

mod draw;
mod kernels;
mod machine;
mod rates;
mod report;
mod scaling;

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use crate::config::Gradient;
use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::{ExpertShare, Weights};
use crate::plan::measured::Measurements;
use crate::prompt::handoff::Keeping;
use crate::runtime::failure::{Classified, Exit, Failure, Phase};
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::{Bytes, Tokens};
use crate::step::conventional::{self, Target};
use crate::step::finalize;
use crate::step::objective::Objective;
use crate::step::observer::Observer;
use crate::step::replay::TrainedAnswer;
use crate::step::transaction::Transaction;
use crate::tensor::boundary::{counted, forget_peaks, storage_bytes};
use crate::tensor::{accumulation, gpu};
use crate::tools::parity::distance::Distance;
use crate::tools::parity::dtype_name;
use crate::tools::parity::random::RandomAdapters;
use crate::world::World;
use crate::world::devices;
use crate::world::exchange;
use kernels::Kernels;
use rates::Rates;

pub use draw::Draw;
pub use machine::shorter_prompt;
pub use report::{Report, Run};
pub use scaling::{Row, Scaling};

/// Why a bench cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The conventional schedule knows no ranks.
    #[error("the conventional schedule holds a whole sequence on one rank: run it on 1 rank, not {ranks}")]
    Ranks {
        /// Ranks that were started.
        ranks: usize,
    },
    /// Only two gradient modes have rates.
    #[error(
        "--rates measures updates of gradient exact and response, from which a plan follows every N: leave {gradient} out"
    )]
    RatesGradient {
        /// The mode that was asked for.
        gradient: Gradient,
    },
    /// Two prompts of one route are needed.
    #[error("{}", rates_prompt(*longest, *micro_block, *page_size, *exact))]
    RatesPrompt {
        /// The longer prompt.
        longest: Tokens,
        /// Rows of a micro-block.
        micro_block: Tokens,
        /// Positions in a page.
        page_size: Tokens,
        /// Whether prompts carry gradient.
        exact: bool,
    },
    /// A part of the ranks has no part of the experts.
    #[error(
        "--ranks-sweep runs parts of the ranks, and experts are spread over {ep_size} of them: leave --ep-size out"
    )]
    SweepExperts {
        /// Ranks that hold the experts together.
        ep_size: usize,
    },
    /// Rates are those of one rank.
    #[error("--rates measures what one rank does: run it on 1 rank, not {ranks}")]
    RatesRanks {
        /// Ranks that were started.
        ranks: usize,
    },
}

/// Why the two prompts of measured updates cannot be chosen, and what to do.
fn rates_prompt(longest: Tokens, micro_block: Tokens, page_size: Tokens, exact: bool) -> String {
    if !exact || longest <= page_size {
        let more = 4 * page_size.0;
        return format!(
            "--rates times updates at two prompts of whole pages, and {longest} positions are one page of {page_size}: choose a \
             longer one (--prompt {more}), or a smaller --page-size"
        );
    }
    let longer = (2 * micro_block.0 / page_size.0 + 1) * page_size.0;
    let fewer = (longest.0 / 4).max(1);
    format!(
        "--rates times updates of gradient exact at two prompts, both longer than a micro-block of {micro_block} rows (a tail that \
         is no longer takes another route), and half of {longest} is not: choose a longer prompt (--prompt {longer}), fewer rows \
         (--micro-block {fewer}), or leave exact out (--gradient response)"
    )
}

/// Rank of the random adapters.
const ADAPTER_RANK: u64 = 16;

/// The source it was built from.
const COMMIT: &str = match option_env!("LONGSTRAW_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Config
    }
}

/// What to run.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Options {
    /// An HF folder or its config.json.
    pub model: PathBuf,
    pub prompt: Tokens,
    /// Tokens of an answer.
    pub answer: Tokens,
    pub groups: Vec<u64>,
    pub gradients: Vec<Gradient>,
    /// The model's dtype.
    pub kind: Kind,
    /// Positions in a page.
    pub page_size: Tokens,
    /// Most rows of a segment at one time.
    pub micro_block: Tokens,
    /// Whether the conventional schedule runs too.
    pub conventional: bool,
    /// Tokens to sample of every answer, in the place of an update.
    pub draw: Option<Tokens>,
    /// How many layers, the first ones, have their pages on the device while tokens are sampled; `None`: all.
    pub resident: Option<usize>,
    /// Whether the update runs on 1, 2, 4 … ranks, one number after another.
    pub ranks_sweep: bool,
    /// Whether tensors go through host memory between GPUs even if there is a transport from GPU to GPU.
    pub through_host: bool,
    /// What is kept where for the way back.
    pub keeping: Keeping,
    /// Where the model computes.
    pub device: Device,
}

struct Bench<'a> {
    world: &'a World,
    options: &'a Options,
    spec: Spec,
    weights: Rc<Weights>,
    decoder: Box<dyn Decoder>,
    /// The same weights with a few layers only, for the warm-up.
    short: Box<dyn Decoder>,
    adapters: Adapters,
    head: Head,
    kernels: Kernels,
    rates: Rates,
    /// Bytes of weights and adapters in the ledger.
    _held: [Held; 2],
}

/// Runs everything that was asked for.
///
/// # Errors
/// When the shape cannot be read, the conventional schedule is asked for on several ranks, or a phase fails.
pub fn run(world: &World, options: &Options) -> Result<Report, Failure> {
    if options.conventional && world.all.size() > 1 {
        return world.agree(Err(Error::Ranks { ranks: world.all.size() }.into()));
    }
    let bench = Bench::open(world, options)?;
    let (mut runs, mut apart, mut draws, mut scaling) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    if options.ranks_sweep {
        scaling = scaling::sweep(&bench)?;
    } else if let Some(tokens) = options.draw {
        for &group in &options.groups {
            draws.push(bench.drawn(options.prompt, group, tokens)?);
        }
    } else {
        bench.warm_up()?;
        for &group in &options.groups {
            let first = runs.len();
            for &gradient in &options.gradients {
                runs.push(bench.paged(&*bench.decoder, bench.all_ranks(), options.prompt, group, gradient)?);
            }
            if options.conventional {
                runs.push(bench.conventional(&*bench.decoder, options.prompt, group)?);
                let judged = runs.last().map_or(&[][..], |run| &run.gradients);
                let exact = runs[first..].iter().find(|run| run.schedule == "paged" && run.gradient == "exact");
                let distance = |run: &Run| Distance::between(bench.adapters.names(), &run.gradients, judged).worst;
                apart.extend(exact.map(|run| (group, distance(run))));
            }
        }
    }
    Ok(Report { scaling, ..bench.report(runs, draws, apart) })
}

/// Measures this machine's rates for the model's layers, on one rank.
///
/// # Errors
/// When there are several ranks, the shape cannot be read, or a phase fails.
pub fn measure(world: &World, options: &Options) -> Result<Measurements, Failure> {
    if world.all.size() > 1 {
        return world.agree(Err(Error::RatesRanks { ranks: world.all.size() }.into()));
    }
    Bench::open(world, options)?.measured()
}

/// Bytes and time from here on.
struct Meter {
    on: Device,
    start: Instant,
    device: Bytes,
    waited: f64,
    moved: (Bytes, Bytes),
}

impl Meter {
    fn start(on: Device) -> Result<Meter, Failure> {
        gpu::synchronize(on)?;
        gpu::empty_cache();
        forget_peaks();
        let waited = gpu::stage_wait_seconds();
        let (device, moved) = (counted(MemorySpace::Device).live, gpu::copied_bytes());
        Ok(Meter { on, start: Instant::now(), device, waited, moved })
    }

    /// Since the start, with all that was asked of the device done.
    fn seconds(&self) -> Result<f64, Failure> {
        gpu::synchronize(self.on)?;
        Ok(self.start.elapsed().as_secs_f64())
    }

    /// Bytes copied in and out.
    fn moved(&self) -> [Bytes; 2] {
        let (into, out) = gpu::copied_bytes();
        [Bytes(into.0 - self.moved.0.0), Bytes(out.0 - self.moved.1.0)]
    }

    fn waited(&self) -> f64 {
        gpu::stage_wait_seconds() - self.waited
    }

    fn device(&self) -> Bytes {
        Bytes(counted(MemorySpace::Device).peak.0.saturating_sub(self.device.0))
    }
}

impl<'a> Bench<'a> {
    fn open(world: &'a World, options: &'a Options) -> Result<Bench<'a>, Failure> {
        let spec = world.agree(Spec::read(&options.model, None).map_err(Failure::from))?;
        let weights = world.agree(
            Weights::random(&spec, 0, options.kind, options.device, ExpertShare::of(&world.ep)).map_err(Failure::from),
        )?;
        let ledger = world.ledger();
        let held_weights = ledger.hold(Purpose::Weights, MemorySpace::Device, weights.bytes());
        world.tracker().set_layers(spec.layers);
        let weights = Rc::new(weights);
        let rates = world.agree(Rates::measure(&spec, options.kind, options.prompt, options.device))?;
        let decoder = spec.decoder(weights.clone(), options.kind);
        devices::agree_on_kernels(world, options.kind);
        let kernels = Kernels::agreed(&*decoder, world)?;
        let short = spec.first_layers(kernels::warm_layers(&spec)).decoder(weights.clone(), options.kind);
        let acc = accumulation(options.kind);
        let random = RandomAdapters {
            rank: ADAPTER_RANK,
            alpha: 32.0,
            a_deviation: 0.02,
            b_deviation: 0.01,
            seed: 1,
            sampled_in: acc,
            kind: acc,
            device: options.device,
        };
        let adapters = random.sample(spec.adapted(None)?);
        let masters = adapters.tensors().map(storage_bytes).sum::<Bytes>();
        let held_adapters = ledger.hold(Purpose::Adapters, MemorySpace::Device, masters);
        let head = Head { rows_max: 512, temperature: 1.0 };
        Ok(Bench {
            world,
            options,
            spec,
            weights,
            decoder,
            short,
            adapters,
            head,
            kernels,
            rates,
            _held: [held_weights, held_adapters],
        })
    }

    fn report(&self, runs: Vec<Run>, draws: Vec<Draw>, apart: Vec<(u64, f64)>) -> Report {
        let options = self.options;
        Report {
            parameters: self.spec.parameter_count(),
            dtype: dtype_name(options.kind),
            ranks: self.world.all.size(),
            threads: tch::get_num_threads(),
            prompt: options.prompt,
            answer: options.answer,
            device: format!("{:?}", options.device),
            keeping: options.keeping,
            direct: exchange::is_direct(&self.world.cp, options.device),
            micro_block: options.micro_block,
            rates: self.rates,
            work: rates::Work::of(&self.spec, options.prompt),
            attention_kernel: self.kernels.attention,
            index_scores: self.kernels.index_scores,
            delta_rule: self.kernels.delta_rule,
            commit: COMMIT,
            runs,
            draws,
            apart,
            scaling: Vec::new(),
        }
    }

    /// All ranks of the job, which share the prompt.
    fn all_ranks(&self) -> CpGroup<'_> {
        CpGroup { axis: &self.world.cp, ep: &self.world.ep, ledger: self.world.ledger() }
    }

    fn pass<'b>(&'b self, decoder: &'b dyn Decoder, cp_group: CpGroup<'b>) -> Pass<'b> {
        Pass { decoder, adapters: &self.adapters, cp_group, micro_block: self.options.micro_block }
    }

    fn warm_up(&self) -> Result<(), Failure> {
        let (decoder, prompt) = match self.options.device {
            Device::Cpu => (&*self.decoder, Tokens(self.options.prompt.0.min(256))),
            _ => (&*self.short, self.options.prompt),
        };
        // Answers go through the layers in packs, whose sizes depend on the group.
        let groups = if self.options.device == Device::Cpu { &[1][..] } else { &self.options.groups };
        for &group in groups {
            for &gradient in &self.options.gradients {
                self.paged(decoder, self.all_ranks(), prompt, group, gradient)?;
            }
        }
        if self.options.conventional {
            self.conventional(decoder, prompt, 1)?;
        }
        Ok(())
    }

    /// What a run has left in the adapters: kept beside the device, and only where there is something to compare it with.
    fn taken(&self) -> Vec<Tensor> {
        let gradients = finalize::take(&self.adapters).0;
        if !self.options.conventional {
            return Vec::new();
        }
        gradients.iter().map(|gradient| gradient.to_device(Device::Cpu)).collect()
    }

    /// Prompt and answers of random tokens, with advantages −1 and +1 in turn.
    fn group(&self, prompt: Tokens, answers: u64) -> RandomGroup {
        tch::manual_seed(2);
        let draw = |count: Tokens| {
            let ids = Tensor::randint(self.decoder.vocabulary(), [count.dim()], (Kind::Int64, Device::Cpu));
            Vec::<i64>::try_from(ids).unwrap_or_default()
        };
        let prompt_ids = draw(prompt);
        let answer_ids: Vec<Vec<i64>> = (0..answers).map(|_| draw(self.options.answer)).collect();
        let advantages: Vec<Option<f64>> =
            (0..answers).map(|answer| Some(if answer % 2 == 0 { -1.0 } else { 1.0 })).collect();
        let answers = TrainedAnswer::whole_batch(&answer_ids, &advantages, Objective::DEFAULT.aggregation);
        RandomGroup { prompt_ids, answer_ids, answers }
    }

    /// One update of the paged schedule on the ranks of `cp_group`, all of which take part.
    fn paged(
        &self,
        decoder: &dyn Decoder,
        cp_group: CpGroup,
        prompt: Tokens,
        answers: u64,
        gradient: Gradient,
    ) -> Result<Run, Failure> {
        let RandomGroup { prompt_ids, answer_ids, answers: trained } = self.group(prompt, answers);
        let transaction = Transaction {
            policy: self.pass(decoder, cp_group),
            reference: None,
            head: self.head,
            objective: Objective::DEFAULT,
            gradient,
            page_size: self.options.page_size,
            keeping: self.options.keeping,
            pins_memory: false,
        };
        let mut observer = Observer::new(self.world.tracker(), self.options.device);
        transaction.pin(&transaction.placed(&prompt_ids, answer_ids), &mut observer)?;
        let meter = Meter::start(self.options.device)?;
        let done = transaction.train(&prompt_ids, None, &trained, None, &mut observer)?;
        let (seconds, replayed) = (observer.seconds(), done.replayed);
        let capture_seconds = seconds[Phase::Capture];
        Ok(Run {
            schedule: "paged",
            gradient: gradient.to_string(),
            group: answers,
            capture_seconds,
            score_seconds: seconds[Phase::Score],
            answers_seconds: seconds[Phase::Replay] + seconds[Phase::Sweep] - replayed.seconds.tail,
            tail_seconds: replayed.seconds.tail,
            total_seconds: meter.seconds()?,
            stage_wait_seconds: meter.waited(),
            bytes_in: meter.moved()[0],
            bytes_out: meter.moved()[1],
            pinning_seconds: seconds.pinning,
            capture_rate: rates::Work::of(&self.spec, prompt).tera() / capture_seconds,
            device_bytes: meter.device(),
            peak_device_bytes: counted(MemorySpace::Device).peak,
            host_bytes: counted(MemorySpace::Host).peak,
            loss: replayed.loss,
            gradients: self.taken(),
        })
    }

    fn conventional(&self, decoder: &dyn Decoder, prompt: Tokens, answers: u64) -> Result<Run, Failure> {
        let RandomGroup { prompt_ids, answer_ids, answers: trained } = self.group(prompt, answers);
        let whole = conventional::Group {
            prompt_ids: &prompt_ids,
            answers: &answer_ids,
            tail: prompt,
            temperature: self.head.temperature,
        };
        let meter = Meter::start(self.options.device)?;
        let score = |(index, answer)| Target::new(answer, whole.score(decoder, &self.adapters, index));
        let targets: Vec<Target> = trained.iter().enumerate().map(score).collect();
        let score_seconds = meter.seconds()?;
        let loss = whole.backward_checkpointed(decoder, &self.adapters, &targets, &Objective::DEFAULT)?;
        let total_seconds = meter.seconds()?;
        Ok(Run {
            schedule: "conventional",
            gradient: "exact".into(),
            group: answers,
            capture_seconds: 0.0,
            score_seconds,
            answers_seconds: total_seconds - score_seconds,
            tail_seconds: 0.0,
            total_seconds,
            stage_wait_seconds: 0.0,
            bytes_in: Bytes(0),
            bytes_out: Bytes(0),
            pinning_seconds: 0.0,
            capture_rate: 0.0,
            device_bytes: meter.device(),
            peak_device_bytes: counted(MemorySpace::Device).peak,
            host_bytes: Bytes(0),
            loss,
            gradients: self.taken(),
        })
    }
}

struct RandomGroup {
    prompt_ids: Vec<i64>,
    answer_ids: Vec<Vec<i64>>,
    answers: Vec<TrainedAnswer>,
}
