//! What `bench --rates` has measured of one machine with one model's layers, and the seconds that follow from it.
//!
//! Updates on the first few layers are timed as wholes, at two numbers of layers and two prompts. Their differences are the
//! seconds of a layer at each prompt, without what a phase does once; these two are split into what grows with the rows and what
//! grows with pairs of rows. So products, elementwise work, launches and attention are counted at the pace and in the blocks that
//! a run has, and no share of a rate is assumed. A token of sampled answers is timed with all layers at the same two prompts.

mod fit;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(super) use fit::phase_seconds;

use self::fit::{Drawing, Fit, UpdateFit};
use super::operations::Amount;
use super::seconds::Rates;
use crate::config::Dtype;
use crate::model::shape::{Layer, Mix, Shape};
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::reading;
use crate::runtime::saved::save_whole;
use crate::runtime::units::{Tokens, float};

/// Version of the file. Another one is refused.
pub const VERSION: u32 = 1;

/// Why a file of rates is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its variant and its fields are")]
pub enum Error {
    #[error("{}: {reason}; write it anew with `longstraw bench MODEL --rates FILE`", file.display())]
    Unreadable { file: PathBuf, reason: String },
    #[error("{}: the rates cannot be written: {reason}", file.display())]
    Unwritable { file: PathBuf, reason: String },
    #[error(
        "{}: version {found} of measured rates, and this build reads version {VERSION}; write it anew with `longstraw bench MODEL \
         --rates FILE`",
        file.display()
    )]
    Version { file: PathBuf, found: u64 },
    #[error(
        "{}: measured in {found}, and model.dtype is {wanted}; measure again with `bench --dtype {wanted}`, or leave --rates out",
        file.display()
    )]
    Dtype { file: PathBuf, found: String, wanted: Dtype },
    #[error(
        "{}: has no layers with {missing}, only with {}; measure this model, or leave --rates out",
        file.display(),
        there.join(", ")
    )]
    Layers { file: PathBuf, missing: String, there: Vec<String> },
    #[error(
        "{}: no updates of gradient {gradient} at two prompts were measured; measure again with `bench --gradient {gradient}`",
        file.display()
    )]
    Updates { file: PathBuf, gradient: &'static str },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Config
    }
}

/// The file: everything measured in one call, on one rank.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Measurements {
    pub version: u32,
    /// The device's name.
    pub device: String,
    /// The source that measured.
    pub commit: String,
    /// The model's dtype, as `model.dtype` names it.
    pub dtype: String,
    /// Kinds of layers, as [`layer_kinds`] names them.
    pub layers: Vec<String>,
    /// Rows of a segment.
    pub micro_block: Tokens,
    /// Tokens of an answer.
    pub answer: Tokens,
    /// Whether attention outputs of the tail were kept in updates of gradient `exact`.
    pub attention_kept: bool,
    pub copies: Copies,
    /// Microseconds of the host for each small operation that it asks of the device.
    pub launch_us: f64,
    /// Matrix products with the model's weights.
    pub products: Vec<ProductRate>,
    /// Attention kernels on the rectangles that a run has.
    pub attention: Vec<AttentionRate>,
    /// Updates on the first layers.
    pub updates: Vec<UpdatePoint>,
    /// Sampled tokens, all layers.
    pub draws: Vec<DrawPoint>,
}

/// Rates of copies, GB/s; 0 without a GPU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Copies {
    /// From pinned host memory to the device.
    pub host_in: f64,
    /// Back.
    pub host_out: f64,
    /// From one place on the device to another, bytes read and written together.
    pub device: f64,
}

/// The rate of one matrix product.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the sizes say everything")]
pub struct ProductRate {
    pub rows: u64,
    pub inputs: u64,
    pub outputs: u64,
    /// 10¹² operations a second.
    pub tera: f64,
}

/// The rate of attention on one rectangle.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the sizes say everything")]
pub struct AttentionRate {
    pub head_dim: u64,
    pub queries: u64,
    pub keys: u64,
    pub causal: bool,
    /// 10¹² operations a second.
    pub forward: f64,
    /// The same of its backward, counted as 2.5 forwards.
    pub backward: f64,
}

/// One update on the first layers of the model. Seconds of answers are those of one answer.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct UpdatePoint {
    pub gradient: MeasuredGradient,
    pub layers: u64,
    pub prompt: Tokens,
    /// Operations of the prompt's rows in these layers, forward.
    pub of_prompt: Amount,
    /// The same of the last prompt row alone.
    pub of_last_row: Amount,
    /// The same of the rows of one answer.
    pub of_answer: Amount,
    pub capture_seconds: f64,
    pub score_seconds: f64,
    /// Forward and backward.
    pub answer_seconds: f64,
    /// Backward of the prompt rows that carry gradient.
    pub tail_seconds: f64,
}

/// Gradient modes that are measured.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are those of the configuration")]
pub enum MeasuredGradient {
    Exact,
    Response,
}

/// Tokens that were sampled with the prompt's pages on the device.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct DrawPoint {
    pub layers: u64,
    pub prompt: Tokens,
    pub answers: u64,
    /// Seconds of one token of all answers.
    pub token_seconds: f64,
    /// Bytes that such a token reads.
    pub token_bytes: f64,
}

/// The kinds of layers that a measurement must have for a plan of these: what mixes rows, how wide its heads are, and whether
/// there are experts.
#[must_use]
pub fn layer_kinds(layers: &[Layer]) -> Vec<String> {
    let mut kinds: Vec<String> = Vec::new();
    for layer in layers {
        let mix = match layer.mix {
            Mix::Grouped { head_dim, window: None, .. } => format!("attention, heads of {head_dim}"),
            Mix::Grouped { head_dim, window: Some(window), .. } => {
                format!("attention in a window of {window}, heads of {head_dim}")
            }
            Mix::Delta { key_dim, value_dim, .. } => format!("delta rules of {key_dim} × {value_dim}"),
            Mix::Latent { latent, rotated, .. } => format!("attention over latents of {latent} + {rotated}"),
        };
        let kind = if layer.experts > 0 { format!("{mix}, and experts") } else { mix };
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

/// Rates that a plan follows: measurements, and what follows from them.
#[derive(Clone, Debug)]
pub struct MeasuredRates {
    /// Where they come from, in words.
    pub(super) source: String,
    /// What is measured one by one, with published values for the rest.
    pub(super) rates: Rates,
    /// Whether attention outputs of the tail were kept.
    pub(super) attention_kept: bool,
    /// Rows of the answers that were measured.
    pub(super) answer_rows: f64,
    pub(super) exact: Option<UpdateFit>,
    pub(super) response: Option<UpdateFit>,
    file: PathBuf,
}

impl MeasuredRates {
    /// Reads the file for a plan of `shape` in `dtype`.
    ///
    /// # Errors
    /// When it cannot be read, is of another version or dtype, or lacks a kind of layer that the model has.
    pub fn read(file: &Path, dtype: Dtype, shape: &Shape) -> Result<MeasuredRates, Error> {
        let unreadable = |reason: String| Error::Unreadable { file: file.to_owned(), reason };
        let text = reading::text(file).map_err(|error| unreadable(error.to_string()))?;
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
        let found = value["version"].as_u64().ok_or_else(|| unreadable("has no version".to_owned()))?;
        if found != u64::from(VERSION) {
            return Err(Error::Version { file: file.to_owned(), found });
        }
        let measured: Measurements = serde_json::from_value(value).map_err(|error| unreadable(error.to_string()))?;
        MeasuredRates::of(&measured, file, dtype, shape)
    }

    fn of(measured: &Measurements, file: &Path, dtype: Dtype, shape: &Shape) -> Result<MeasuredRates, Error> {
        let wanted = dtype;
        if measured.dtype != wanted.to_string() {
            return Err(Error::Dtype { file: file.to_owned(), found: measured.dtype.clone(), wanted });
        }
        if let Some(missing) = layer_kinds(&shape.layers).into_iter().find(|kind| !measured.layers.contains(kind)) {
            return Err(Error::Layers { file: file.to_owned(), missing, there: measured.layers.clone() });
        }
        let prompts: Vec<String> = fit::prompts(&measured.updates).iter().map(ToString::to_string).collect();
        Ok(MeasuredRates {
            source: format!(
                "rates measured on {} ({}: updates at prompts of {}, answers of {}, micro-blocks of {} rows)",
                measured.device,
                file.display(),
                prompts.join(" and "),
                measured.answer,
                measured.micro_block
            ),
            rates: measured.rates(shape),
            attention_kept: measured.attention_kept,
            answer_rows: float(measured.answer.0.saturating_sub(1)),
            exact: UpdateFit::of(&measured.updates, MeasuredGradient::Exact),
            response: UpdateFit::of(&measured.updates, MeasuredGradient::Response),
            file: file.to_owned(),
        })
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
    /// Writes the file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), Error> {
        let reason = |reason: String| Error::Unwritable { file: file.to_owned(), reason };
        let text = serde_json::to_string_pretty(self).map_err(|error| reason(error.to_string()))?;
        let whole = std::path::absolute(file).map_err(|error| reason(error.to_string()))?;
        save_whole(&whole, format!("{text}\n").as_bytes()).map_err(|error| reason(error.to_string()))
    }

    /// What was measured, in a few lines.
    #[must_use]
    pub fn text(&self, file: &Path) -> String {
        let mut lines = vec![format!(
            "{}: {}, {}, {}; copies {:.1} GB/s in, {:.1} out, {:.0} on the device; {:.1} us a launch",
            file.display(),
            self.device,
            self.dtype,
            self.layers.join("; "),
            self.copies.host_in,
            self.copies.host_out,
            self.copies.device,
            self.launch_us
        )];
        lines.extend(self.updates.iter().map(|point| {
            format!(
                "{:?}, {} layers, prompt {}: capture {:.4} s, score {:.4} and forward and backward {:.4} of an answer, tail {:.4}",
                point.gradient,
                point.layers,
                point.prompt,
                point.capture_seconds,
                point.score_seconds,
                point.answer_seconds,
                point.tail_seconds
            )
        }));
        lines.extend(self.draws.iter().map(|point| {
            format!(
                "{} answers behind {}: {:.2} ms a token of all, {:.1} GB",
                point.answers,
                point.prompt,
                1e3 * point.token_seconds,
                point.token_bytes / 1e9
            )
        }));
        lines.join("\n")
    }

    /// What is measured one by one, in the form of published rates; these for the rest. A share of a rate is none.
    fn rates(&self, shape: &Shape) -> Rates {
        let known = Rates::h200(shape);
        let best = |rates: Vec<f64>, known: f64| rates.into_iter().reduce(f64::max).unwrap_or(known);
        let measured = |rate: f64, known: f64| if rate > 0.0 { rate } else { known };
        let drawing = Drawing::of(&self.draws, self.copies.device);
        Rates {
            matmul: best(self.products.iter().map(|product| product.tera).collect(), known.matmul),
            attention_forward: best(self.attention.iter().map(|of| of.forward).collect(), known.attention_forward),
            attention_backward: best(self.attention.iter().map(|of| of.backward).collect(), known.attention_backward),
            host: measured(self.copies.host_in.min(self.copies.host_out), known.host),
            memory: drawing.as_ref().map_or(known.memory, |drawing| drawing.memory),
            layer: drawing.as_ref().map_or(known.layer, |drawing| drawing.layer_us),
            efficiency: 1.0,
            ..known
        }
    }
}

/// A phase's seconds by `fit`, for one rank's `share` of an amount.
fn of_fit(fit: &Fit, positions: f64, amount: Amount) -> [f64; 3] {
    [fit.once + fit.position * positions, fit.rows * amount.rows_tera, fit.pairs * amount.pairs_tera]
}
