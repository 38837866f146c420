//! Rates that a plan follows, from a file of measurements.

use std::path::{Path, PathBuf};

use super::file::{Error, MeasuredGradient, Measurements, layer_kinds, layer_parameters};
use super::fit::{self, Drawing, LeastPairs, UpdateFit};
use crate::config::RunConfig;
use crate::model::shape::{Layer, Mix, Shape};
use crate::plan::drawing::drawer;
use crate::plan::seconds::Rates;
use crate::runtime::units::{Tokens, float};

/// Rates that a plan follows: measurements, and what follows from them.
#[derive(Clone, Debug)]
pub struct MeasuredRates {
    /// Where they come from, in words.
    pub(in crate::plan) source: String,
    /// What is measured one by one, with published values for the rest.
    pub(in crate::plan) rates: Rates,
    /// Whether attention outputs of the tail were kept.
    pub(super) attention_kept: bool,
    /// Rows of the answers that were measured.
    pub(super) answer_rows: f64,
    pub(super) exact: Option<UpdateFit>,
    pub(super) response: Option<UpdateFit>,
    /// The longest prompt of the updates, the rows of a micro-block and the tokens of an answer.
    measured_at: MeasuredAt,
    /// Values that the file lacks.
    lacks: Lacks,
    file: PathBuf,
}

/// Lengths of what was measured.
#[derive(Clone, Copy, Debug)]
struct MeasuredAt {
    longest: Tokens,
    micro_block: Tokens,
    answer: Tokens,
}

/// Values that are not from the file, so that published ones stand in.
#[derive(Clone, Copy, Debug)]
struct Lacks {
    host: bool,
    drawing: bool,
}

/// A prompt may be so many times the longest measured one before the plan says so.
const PROMPT_TIMES_MAX: u64 = 4;

impl MeasuredRates {
    /// Reads the file for a plan of `config` with this shape.
    ///
    /// # Errors
    /// When it cannot be read, is of another version or dtype, or lacks a kind of layer that the model has.
    pub fn read(file: &Path, config: &RunConfig, shape: &Shape) -> Result<MeasuredRates, Error> {
        let measured = Measurements::read(file)?;
        MeasuredRates::of(&measured, file, config, shape)
    }

    fn of(measured: &Measurements, file: &Path, config: &RunConfig, shape: &Shape) -> Result<MeasuredRates, Error> {
        let wanted = config.model.dtype;
        if measured.dtype != wanted.to_string() {
            return Err(Error::Dtype { file: file.to_owned(), found: measured.dtype.clone(), wanted });
        }
        if let Some(missing) = layer_kinds(&shape.layers).into_iter().find(|kind| !measured.layers.contains(kind)) {
            return Err(Error::Layers { file: file.to_owned(), missing, there: measured.layers.clone() });
        }
        let (found, wanted) = (measured.layer_parameters, layer_parameters(&shape.layers));
        if found != wanted {
            return Err(Error::Model { file: file.to_owned(), found, wanted });
        }
        let prompts = fit::prompts(&measured.updates);
        let longest = prompts.last().copied().unwrap_or_default();
        let prompts: Vec<String> = prompts.iter().map(ToString::to_string).collect();
        let drawing = measured.drawing(config, shape);
        Ok(MeasuredRates {
            source: format!(
                "rates measured on {} ({}: updates at prompts of {}, answers of {}, micro-blocks of {} rows)",
                measured.device,
                file.display(),
                prompts.join(" and "),
                measured.answer,
                measured.micro_block
            ),
            rates: measured.rates(config, shape, drawing.as_ref()),
            attention_kept: measured.attention_kept,
            answer_rows: float(measured.answer.0.saturating_sub(1)),
            exact: measured.fit(MeasuredGradient::Exact),
            response: measured.fit(MeasuredGradient::Response),
            measured_at: MeasuredAt { longest, micro_block: measured.micro_block, answer: measured.answer },
            lacks: Lacks {
                host: measured.copies.host_in.min(measured.copies.host_out) <= 0.0,
                drawing: drawing.is_none(),
            },
            file: file.to_owned(),
        })
    }

    /// Values behind a prediction that are published ones, since the file has none, each in words.
    pub(in crate::plan) fn published(&self, config: &RunConfig, ranks: u64, shape: &Shape) -> Vec<String> {
        let Rates { host, memory, layer, message, between, .. } = self.rates;
        let samples = config.rollout.sample;
        let mut values = Vec::new();
        if self.lacks.host {
            values.push(format!("{host} GB/s between host and device"));
        }
        if config.cp_size(ranks) > 1 {
            values.push(format!("{message} µs a message and {between} GB/s between ranks"));
        }
        if samples && self.lacks.drawing {
            let drawer = drawer(config, shape, config.grpo.group_size);
            values.push(format!(
                "{memory} GB/s of device memory and {layer} µs a layer of a token (it has no token drawn by {drawer})"
            ));
        }
        let mixes = |is: fn(&Layer) -> bool| samples && shape.layers.iter().any(is);
        if mixes(|layer| matches!(layer.mix, Mix::Delta { .. })) {
            values.push(format!("{} TFLOP/s of delta rules in a token", self.rates.delta_forward));
        }
        if mixes(|layer| matches!(layer.mix, Mix::Latent { .. })) {
            let Rates { gathered_forward, choosing, .. } = self.rates;
            values.push(format!(
                "{gathered_forward} TFLOP/s over gathered keys and {choosing} of index scores in a token"
            ));
        }
        if mixes(|layer| layer.experts > 0) {
            values.push(format!("{} TFLOP/s of experts in a token", self.rates.experts));
        }
        values
    }

    /// How far a plan lies outside of what was measured, a sentence each.
    pub(in crate::plan) fn outside(&self, config: &RunConfig) -> Vec<String> {
        let MeasuredAt { longest, micro_block, answer } = self.measured_at;
        let (prompt, rows, tokens) = (config.context.prompt_len, config.memory.micro_rows(), config.context.answer_len);
        let mut notes = Vec::new();
        if prompt.0 > longest.0.saturating_mul(PROMPT_TIMES_MAX) {
            notes.push(format!(
                "the prompt of {prompt} positions is more than {PROMPT_TIMES_MAX} times the longest measured one, {longest}: noise of \
                 the short ones grows with it; measure with a longer `bench --prompt`"
            ));
        }
        if rows != micro_block {
            notes.push(format!(
                "micro-blocks of {rows} rows, and {micro_block} were measured: launches weigh otherwise; give --device-gib or \
                 memory.micro_block = {micro_block}, or measure with `bench --micro-block {rows}`"
            ));
        }
        if tokens != answer {
            notes.push(format!(
                "answers of {tokens} tokens, and {answer} were measured; measure with `bench --answer {tokens}`"
            ));
        }
        notes
    }

    /// Refuses a plan of a gradient mode that was not measured; `exact` tells whether the tail is long.
    ///
    /// # Errors
    /// When there are no updates to follow.
    pub fn require(&self, exact: bool) -> Result<(), Error> {
        let (found, gradient) = if exact { (&self.exact, "exact") } else { (&self.response, "response") };
        if found.is_none() {
            return Err(Error::Updates { file: self.file.clone(), gradient });
        }
        Ok(())
    }

    /// The fit of updates whose tail is long (`exact`), or short.
    pub(super) fn updates(&self, exact: bool) -> Option<&UpdateFit> {
        if exact { self.exact.as_ref() } else { self.response.as_ref() }
    }
}

impl Measurements {
    /// The laws of updates of a gradient mode. Of layers that are not all alike no kernel's rate bounds the pace of pairs.
    fn fit(&self, gradient: MeasuredGradient) -> Option<UpdateFit> {
        let least = if self.layers.len() == 1 { LeastPairs::of(&self.attention) } else { LeastPairs::default() };
        UpdateFit::of(&self.updates, gradient, least, !self.attention_kept)
    }

    /// What sets the pace of a token, by what draws the answers of `config`.
    fn drawing(&self, config: &RunConfig, shape: &Shape) -> Option<Drawing> {
        Drawing::of(&self.draws, self.copies.device, drawer(config, shape, config.grpo.group_size))
    }

    /// What is measured one by one, in the form of published rates; these for the rest. A share of a rate is none.
    fn rates(&self, config: &RunConfig, shape: &Shape, drawing: Option<&Drawing>) -> Rates {
        let known = Rates::h200(config, shape);
        let best = |rates: Vec<f64>, known: f64| rates.into_iter().reduce(f64::max).unwrap_or(known);
        let measured = |rate: f64, known: f64| if rate > 0.0 { rate } else { known };
        Rates {
            matmul: best(self.products.iter().map(|product| product.tera).collect(), known.matmul),
            attention_forward: best(self.attention.iter().map(|of| of.forward).collect(), known.attention_forward),
            attention_backward: best(self.attention.iter().map(|of| of.backward).collect(), known.attention_backward),
            host: measured(self.copies.host_in.min(self.copies.host_out), known.host),
            memory: drawing.map_or(known.memory, |drawing| drawing.memory),
            layer: drawing.map_or(known.layer, |drawing| drawing.layer_us),
            efficiency: 1.0,
            ..known
        }
    }
}
