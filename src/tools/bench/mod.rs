//! Bench: one update on random weights and tokens at given lengths, with the conventional schedule beside it.
//!
//! Every schedule runs once unmeasured: on a CPU on a short prompt, on a GPU at full length through the first layers, so that
//! libraries have chosen their kernels for every shape. Then once measured. Bytes are the allocators' own: what lies on a
//! device (weights, graphs, scratch, stages), and what waits in host pools.

mod kernels;
mod rates;

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::config::Gradient;
use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::{ExpertShare, Weights};
use crate::prompt::handoff::Keeping;
use crate::runtime::failure::{Classified, Exit, Failure, Phase};
use crate::runtime::memory::{MemorySpace, Purpose};
use crate::runtime::units::{Bytes, Tokens};
use crate::step::conventional::{self, Target};
use crate::step::finalize;
use crate::step::objective::Objective;
use crate::step::observer::Observer;
use crate::step::replay::TrainedAnswer;
use crate::step::transaction::Transaction;
use crate::tensor::boundary::{counted, forget_peaks, storage_bytes};
use crate::tensor::kernels::Kernel;
use crate::tensor::{accumulation, gpu};
use crate::tools::parity::distance::Distance;
use crate::tools::parity::dtype_name;
use crate::tools::parity::random::RandomAdapters;
use crate::world::World;
use crate::world::exchange;
use kernels::Kernels;
use rates::Rates;

/// Why a bench cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The conventional schedule knows no ranks.
    #[error("the conventional schedule holds a whole sequence on one rank: run it on 1 rank, not {ranks}")]
    Ranks {
        /// Ranks that were started.
        ranks: usize,
    },
}

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
    /// What is kept where for the way back.
    pub keeping: Keeping,
    /// Where the model computes.
    pub device: Device,
}

/// One schedule at one group size, on this rank.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Run {
    /// `paged` or `conventional`.
    pub schedule: &'static str,
    pub gradient: String,
    pub group: u64,
    /// The prompt without a graph.
    pub capture_seconds: f64,
    pub score_seconds: f64,
    /// Answers, forward and backward.
    pub answers_seconds: f64,
    /// Prompt rows that carry gradient, backward.
    pub tail_seconds: f64,
    pub total_seconds: f64,
    /// Of these: the computation stood still for copies between host and device.
    pub stage_wait_seconds: f64,
    /// Before the clock started: host memory was pinned.
    pub pinning_seconds: f64,
    /// Copied to the device.
    pub bytes_in: Bytes,
    /// Copied from it to host memory.
    pub bytes_out: Bytes,
    /// Matrix products, attention and delta rules of the capture, TFLOP/s; 0 without one.
    pub capture_rate: f64,
    /// Peak of graphs, scratch and stages above what lay there before the run.
    pub device_bytes: Bytes,
    /// Peak of everything that lay on the device.
    pub peak_device_bytes: Bytes,
    /// Peak of host pools.
    pub host_bytes: Bytes,
    /// The group's loss on this rank.
    pub loss: f64,
    #[serde(skip)]
    gradients: Vec<Tensor>,
}

/// What was measured on all ranks, one run for each group size and gradient mode.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Report {
    /// Parameters of the model.
    pub parameters: u64,
    /// The model's dtype.
    pub dtype: &'static str,
    pub ranks: usize,
    /// Threads of a rank.
    pub threads: i32,
    pub prompt: Tokens,
    /// Tokens of an answer.
    pub answer: Tokens,
    /// Where the model computed.
    pub device: String,
    /// Whether tensors went from GPU to GPU between ranks; else through host memory.
    pub direct: bool,
    /// What was kept where for the way back.
    pub keeping: Keeping,
    /// Rows of a segment.
    pub micro_block: Tokens,
    /// What the device can do.
    pub rates: Rates,
    /// Name of what computed attention.
    pub attention_kernel: &'static str,
    /// Name of what computed index scores; absent where no layer has an index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_scores: Option<&'static str>,
    /// Name of what computed gated delta rules; absent where no layer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_rule: Option<&'static str>,
    /// What one pass over the prompt asks of it, all ranks together.
    pub work: rates::Work,
    /// The source it was built from.
    pub commit: &'static str,
    pub runs: Vec<Run>,
    /// Largest relative L2 distance of an adapter gradient, exact against conventional, by group size.
    pub apart: Vec<(u64, f64)>,
}

impl Report {
    /// The report as a table.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = vec![
            format!(
                "{} parameters, {}, {} ranks × {} threads on {}, prompt {}, answer {}",
                self.parameters, self.dtype, self.ranks, self.threads, self.device, self.prompt, self.answer
            ),
            format!(
                "attention {:?}: {:.3} TFLOP/s forward, {:.3} backward; matrix products {:.3}; copies {:.1} GB/s in, {:.1} out; {:.1} us a launch",
                self.rates.kernel,
                self.rates.attention_forward,
                self.rates.attention_backward,
                self.rates.matrix,
                self.rates.copy_in,
                self.rates.copy_out,
                self.rates.launch_us
            ),
            format!(
                "{:<13} {:<9} {:>5} {:>9} {:>8} {:>9} {:>8} {:>9} {:>8} {:>12} {:>12}",
                "schedule",
                "gradient",
                "group",
                "capture",
                "score",
                "answers",
                "tail",
                "total s",
                "waits s",
                "device",
                "host"
            ),
        ];
        lines.extend(self.runs.iter().map(|run| {
            format!(
                "{:<13} {:<9} {:>5} {:>9.2} {:>8.2} {:>9.2} {:>8.2} {:>9.2} {:>8.2} {:>12} {:>12}",
                run.schedule,
                run.gradient,
                run.group,
                run.capture_seconds,
                run.score_seconds,
                run.answers_seconds,
                run.tail_seconds,
                run.total_seconds,
                run.stage_wait_seconds,
                run.peak_device_bytes.to_string(),
                run.host_bytes.to_string()
            )
        }));
        let share = |run: &Run| 100.0 * run.capture_rate / self.rates.attention_forward;
        // On a CPU matrix products are as much work as attention, and slower: a share of its rate would say nothing.
        let has_rate = |run: &&Run| run.capture_rate > 0.0 && self.rates.kernel != Kernel::Cpu;
        lines.extend(self.runs.iter().filter(has_rate).map(|run| {
            format!(
                "capture for {} at group {}: {:.3} TFLOP/s, {:.0} % of the attention kernel's rate",
                run.gradient,
                run.group,
                run.capture_rate,
                share(run)
            )
        }));
        lines.extend(
            self.apart
                .iter()
                .map(|(group, apart)| format!("group {group}: exact and conventional gradients are {apart:.1e} apart")),
        );
        lines.join("\n")
    }
}

struct Bench<'a> {
    world: &'a World,
    options: &'a Options,
    decoder: Box<dyn Decoder>,
    /// The same weights with a few layers only, for the warm-up.
    short: Box<dyn Decoder>,
    adapters: Adapters,
    head: Head,
    work: rates::Work,
}

/// Runs everything that was asked for.
///
/// # Errors
/// When the shape cannot be read, the conventional schedule is asked for on several ranks, or a phase fails.
pub fn run(world: &World, options: &Options) -> Result<Report, Failure> {
    if options.conventional && world.all.size() > 1 {
        return world.agree(Err(Error::Ranks { ranks: world.all.size() }.into()));
    }
    let spec = world.agree(Spec::read(&options.model, None).map_err(Failure::from))?;
    let weights = world.agree(
        Weights::random(&spec, 0, options.kind, options.device, ExpertShare::of(&world.ep)).map_err(Failure::from),
    )?;
    let ledger = world.ledger();
    let held_weights = ledger.hold(Purpose::Weights, MemorySpace::Device, weights.bytes());
    world.tracker().set_layers(spec.layers);
    let weights = Rc::new(weights);
    let measured = Rates::measure(&spec, options.kind, options.prompt, options.device);
    let rates = world.agree(measured)?;
    let decoder = spec.decoder(weights.clone(), options.kind);
    let kernels = Kernels::agreed(&*decoder, world)?;
    let short = spec.first_layers(kernels::warm_layers(&spec)).decoder(weights, options.kind);
    let acc = accumulation(options.kind);
    let random = RandomAdapters {
        rank: 16,
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
    let work = rates::Work::of(&spec, options.prompt);
    let bench = Bench { world, options, decoder, short, adapters, head, work };
    let (mut runs, mut apart) = (Vec::new(), Vec::new());
    bench.warm_up()?;
    for &group in &options.groups {
        let first = runs.len();
        for &gradient in &options.gradients {
            runs.push(bench.paged(&*bench.decoder, options.prompt, group, gradient)?);
        }
        if options.conventional {
            runs.push(bench.conventional(&*bench.decoder, options.prompt, group)?);
            let judged = runs.last().map_or(&[][..], |run| &run.gradients);
            let exact = runs[first..].iter().find(|run| run.schedule == "paged" && run.gradient == "exact");
            let distance = |run: &Run| Distance::between(bench.adapters.names(), &run.gradients, judged).worst;
            apart.extend(exact.map(|run| (group, distance(run))));
        }
    }
    drop((held_weights, held_adapters));
    Ok(Report {
        parameters: spec.parameter_count(),
        dtype: dtype_name(options.kind),
        ranks: world.all.size(),
        threads: tch::get_num_threads(),
        prompt: options.prompt,
        answer: options.answer,
        device: format!("{:?}", options.device),
        keeping: options.keeping,
        direct: exchange::is_direct(&world.cp, options.device),
        micro_block: options.micro_block,
        rates,
        work,
        attention_kernel: kernels.attention,
        index_scores: kernels.index_scores,
        delta_rule: kernels.delta_rule,
        commit: option_env!("LONGSTRAW_COMMIT").unwrap_or("unknown"),
        runs,
        apart,
    })
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

impl Bench<'_> {
    fn warm_up(&self) -> Result<(), Failure> {
        let (decoder, prompt) = match self.options.device {
            Device::Cpu => (&*self.decoder, Tokens(self.options.prompt.0.min(256))),
            _ => (&*self.short, self.options.prompt),
        };
        for &gradient in &self.options.gradients {
            self.paged(decoder, prompt, 1, gradient)?;
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

    fn paged(&self, decoder: &dyn Decoder, prompt: Tokens, answers: u64, gradient: Gradient) -> Result<Run, Failure> {
        let RandomGroup { prompt_ids, answer_ids, answers: trained } = self.group(prompt, answers);
        let cp_group = CpGroup { axis: &self.world.cp, ep: &self.world.ep, ledger: self.world.ledger() };
        let transaction = Transaction {
            policy: Pass { decoder, adapters: &self.adapters, cp_group, micro_block: self.options.micro_block },
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
            capture_rate: self.work.tera() / capture_seconds,
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
