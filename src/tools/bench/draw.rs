//! Sampled tokens: how long one of all answers takes, beside the bytes that it must read.

use serde::Serialize;
use tch::Tensor;

use super::{Bench, Meter};
use crate::model::shape::Shape;
use crate::model::token::Drawer;
use crate::plan::{TokenReads, token_bytes};
use crate::prompt::handoff::{Captured, Keeping, Leaves, PlacedGroup};
use crate::prompt::layout::PromptLayout;
use crate::prompt::pages::Residency;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::memory::MemorySpace;
use crate::runtime::units::{Bytes, Tokens, as_index, float, from_index};
use crate::step::rollout::{self, DrawnChoices, SampleRequest, SampledAnswer, Sampling, Stream};
use crate::step::{capture, score};
use crate::tensor::boundary::counted;
use crate::tensor::{accumulation, element_bytes};

/// Most tokens of the run that the measured one is compared with.
const FEW_TOKENS: u64 = 8;

/// Tokens of a group's answers, sampled in step from the whole distribution, without an end.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Draw {
    pub group: u64,
    pub prompt: Tokens,
    /// Of each answer.
    pub tokens: Tokens,
    pub layers: usize,
    /// How many layers, the first ones, had their pages on the device; those of the others came for every token.
    pub resident_layers: usize,
    /// What computed a token.
    pub kernel: Drawer,
    pub capture_seconds: f64,
    /// All tokens of the longer run, with what is done once: staged pages, a graph that is made.
    pub draw_seconds: f64,
    /// Milliseconds of one token of all answers: the difference of a long run and a short one, by token.
    pub token_ms_of_all: f64,
    /// The same by answer.
    pub token_ms_of_one: f64,
    /// Bytes that must be read for a token of all, on one rank: weights of all layers and of the head, adapters, the prompt's
    /// keys and values once, those of the answers' own rows on average.
    pub token_bytes: f64,
    /// Bytes of pages that came from host memory for a token, on one rank.
    pub moved_bytes: f64,
    /// The memory's rate as a copy on the device has it, bytes read and written together, GB/s; 0 on a CPU.
    pub memory_rate: f64,
    /// `token_bytes` in the time of a token, GB/s.
    pub reached_rate: f64,
    /// Share of the memory's rate that was reached; 0 on a CPU.
    pub share: f64,
    /// Peak of everything that lay on the device.
    pub peak_device_bytes: Bytes,
    /// Largest distance between a token's log-probability when it was sampled and when it was scored, nats.
    pub largest_gap: f64,
}

impl Draw {
    /// The line of the table that describes it.
    pub(super) fn text(&self) -> String {
        let pages = if self.resident_layers == self.layers {
            "pages on the device".to_owned()
        } else {
            format!(
                "pages of {} of {} layers on the device, {:.1} GB a token over the bus",
                self.resident_layers,
                self.layers,
                self.moved_bytes / 1e9
            )
        };
        let share = if self.share > 0.0 {
            format!(", {:.0} % of the memory's rate", 100.0 * self.share)
        } else {
            String::new()
        };
        format!(
            "{} answers of {} tokens behind {} positions, {pages}, {}: {:.2} ms a token of all, {:.2} of one; {:.1} GB at {:.0} \
             GB/s{share}; device peak {}; sampled and scored log-probabilities at most {:.1e} apart",
            self.group,
            self.tokens,
            self.prompt,
            self.kernel,
            self.token_ms_of_all,
            self.token_ms_of_one,
            self.token_bytes / 1e9,
            self.reached_rate,
            self.peak_device_bytes,
            self.largest_gap
        )
    }
}

/// A captured prompt from which answers are sampled.
struct Prompt {
    layout: PromptLayout,
    ids: Vec<i64>,
    captured: Captured,
}

impl Bench<'_> {
    /// Captures a random prompt, samples `tokens` tokens of `answers` answers, and scores them.
    pub(super) fn drawn(&self, prompt: Tokens, answers: u64, tokens: Tokens) -> Result<Draw, Failure> {
        let ids = self.group(prompt, 0).prompt_ids;
        // Every layer's pages, and the last row: answers need nothing else of the prompt.
        let layout = PromptLayout::new(prompt, self.options.page_size, self.world.cp.size(), Tokens(1).min(prompt));
        let group = PlacedGroup::new(layout.clone(), ids.clone(), Vec::new());
        let pass = self.pass(&*self.decoder, self.all_ranks());
        let keeping = Keeping { every: 1, attention: false, ..self.options.keeping };
        capture::make_room(&pass, &group, keeping)?;
        let meter = Meter::start(self.options.device)?;
        self.world.tracker().enter(Phase::Capture);
        let captured = capture::run(&pass, &group, keeping, self.world.tracker())?;
        let capture_seconds = meter.seconds()?;
        let mut prompt_of = Prompt { layout, ids, captured };
        let few = Tokens(FEW_TOKENS.min(tokens.0 / 2).max(1));
        // Kernels are chosen and loaded.
        self.sampled(&mut prompt_of, answers, few)?;
        let (_, short_seconds) = self.sampled(&mut prompt_of, answers, few)?;
        let (sampled, draw_seconds) = self.sampled(&mut prompt_of, answers, tokens)?;
        let peak_device_bytes = counted(MemorySpace::Device).peak;
        let further = tokens.0.saturating_sub(few.0);
        let seconds = if further > 0 { (draw_seconds - short_seconds) / float(further) } else { draw_seconds };
        let layers = self.decoder.layers();
        let resident_layers = self.resident(layers);
        let token_bytes = self.token_bytes(prompt, answers, float(few.0 + tokens.0) / 2.0);
        let memory_rate = self.rates.copy_device;
        let reached_rate = token_bytes / seconds / 1e9;
        Ok(Draw {
            group: answers,
            prompt,
            tokens,
            layers,
            resident_layers,
            kernel: rollout::computed_by(&*self.decoder, &self.adapters, as_index(answers)),
            capture_seconds,
            draw_seconds,
            token_ms_of_all: 1e3 * seconds,
            token_ms_of_one: 1e3 * seconds / float(answers),
            token_bytes,
            moved_bytes: self.moved_bytes(prompt, resident_layers),
            memory_rate,
            reached_rate,
            share: if memory_rate > 0.0 { reached_rate / memory_rate } else { 0.0 },
            peak_device_bytes,
            largest_gap: self.gap(&prompt_of, &sampled)?,
        })
    }

    /// How many of `layers` layers have their pages on the device while tokens are sampled.
    fn resident(&self, layers: usize) -> usize {
        match self.options.keeping.pages {
            Residency::Device => layers,
            Residency::Host => self.options.resident.unwrap_or(layers).min(layers),
        }
    }

    /// Samples answers, and returns the seconds of it.
    fn sampled(&self, prompt: &mut Prompt, answers: u64, tokens: Tokens) -> Result<(Vec<SampledAnswer>, f64), Failure> {
        let layers = self.decoder.layers();
        let request = SampleRequest {
            answers: as_index(answers),
            greedy: 0,
            longest: tokens,
            ends: &[],
            sampling: Sampling { top_p: 1.0, top_k: 0 },
            stream: Stream::of_seed(2),
            resident: self.resident(layers),
            fused: true,
            choices: DrawnChoices::Use,
            calls: None,
        };
        let pass = self.pass(&*self.decoder, self.all_ranks());
        let meter = Meter::start(self.options.device)?;
        self.world.tracker().enter(Phase::Rollout);
        let tracker = self.world.tracker();
        let sampled = rollout::run(&pass, &self.head, &prompt.layout, &mut prompt.captured, &request, tracker)?;
        Ok((sampled, meter.seconds()?))
    }

    /// Bytes that a token of all answers reads on one rank, each with `own_rows` rows of its own.
    pub(super) fn token_bytes(&self, prompt: Tokens, answers: u64, own_rows: f64) -> f64 {
        let sharers = float(from_index(self.world.cp.size()));
        let bytes = |kind| float(element_bytes(kind));
        let of = TokenReads {
            prompt_rows: float(prompt.0) / sharers,
            answers: float(answers),
            own_rows: own_rows / sharers,
            sharers,
            expert_share: 1.0 / float(from_index(self.world.ep.size())),
            adapters: self.adapters.tensors().map(|tensor| from_index(tensor.numel())).sum(),
            model_bytes: bytes(self.options.kind),
            acc_bytes: bytes(accumulation(self.options.kind)),
        };
        token_bytes(&Shape::of(&self.spec), &of)
    }

    /// Bytes of pages that come to a rank's device for a token.
    fn moved_bytes(&self, prompt: Tokens, resident_layers: usize) -> f64 {
        let state: u64 =
            Shape::of(&self.spec).layers[resident_layers..].iter().map(|layer| layer.mix.widths().state).sum();
        let rows = float(prompt.0) / float(from_index(self.world.cp.size()));
        rows * float(state) * float(element_bytes(self.options.kind))
    }

    /// Largest distance between sampled and scored log-probabilities, on any rank.
    fn gap(&self, prompt: &Prompt, sampled: &[SampledAnswer]) -> Result<f64, Failure> {
        let answers = sampled.iter().map(|answer| answer.ids.clone()).collect();
        let group = PlacedGroup::new(prompt.layout.clone(), prompt.ids.clone(), answers);
        let pass = self.pass(&*self.decoder, self.all_ranks());
        let tracker = self.world.tracker();
        tracker.enter(Phase::Score);
        let (scores, _) = score::run(&pass, &self.head, &group, &prompt.captured, Leaves::Nothing, tracker)?;
        let mut largest: f64 = 0.0;
        for ((answer, sampled), scored) in group.answers.iter().zip(sampled).zip(&scores.0) {
            let own = group.own_tokens(answer, self.world.cp.rank(), &sampled.logprobs);
            largest = largest.max(rollout::gap(&own, &scored.rows));
            let first = |scored: &Tensor| rollout::gap(&sampled.logprobs[..1], scored);
            largest = largest.max(scored.first.as_ref().map_or(0.0, first));
        }
        Ok(self.world.cp.gather_floats(largest).into_iter().fold(0.0, f64::max))
    }
}
