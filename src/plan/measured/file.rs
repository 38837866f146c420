//! The file that `bench --rates` writes, and why one is refused.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::Dtype;
use crate::model::shape::{Layer, Mix};
use crate::plan::operations::Amount;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::reading;
use crate::runtime::saved::save_whole;
use crate::runtime::units::Tokens;

/// Version of the file. Another one is refused.
pub const VERSION: u32 = 3;

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
        "{}: measured on a model whose widest layer has {found} parameters in its projections, and this one's has {wanted}; measure \
         this model, or leave --rates out",
        file.display()
    )]
    Model { file: PathBuf, found: u64, wanted: u64 },
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
    /// Parameters of the widest layer, as its projections have them: tells models of one kind apart.
    pub layer_parameters: u64,
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
    /// From the device back to it.
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
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct DrawPoint {
    /// Who drew, as [`crate::model::token::Drawer::name`] names it.
    pub drawn_by: String,
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

/// Parameters of the widest layer's projections.
#[must_use]
pub fn layer_parameters(layers: &[Layer]) -> u64 {
    let of = |layer: &Layer| layer.projections.iter().map(|projection| projection.inputs * projection.outputs).sum();
    layers.iter().map(of).max().unwrap_or(0)
}

impl Measurements {
    /// Reads the file.
    ///
    /// # Errors
    /// When it cannot be read, or is of another version.
    pub(super) fn read(file: &Path) -> Result<Measurements, Error> {
        let unreadable = |reason: String| Error::Unreadable { file: file.to_owned(), reason };
        let text = reading::text(file).map_err(|error| unreadable(error.to_string()))?;
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
        let found = value["version"].as_u64().ok_or_else(|| unreadable("has no version".to_owned()))?;
        if found != u64::from(VERSION) {
            return Err(Error::Version { file: file.to_owned(), found });
        }
        let read: Measurements = serde_json::from_value(value).map_err(|error| unreadable(error.to_string()))?;
        if let Some(what) = read.impossible() {
            return Err(unreadable(format!("has {what}, which no machine measures")));
        }
        Ok(read)
    }

    /// A value that no measurement gives.
    fn impossible(&self) -> Option<&'static str> {
        let takes_time = |seconds: f64| seconds.is_finite() && seconds > 0.0;
        let may_take_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        let update = |point: &UpdatePoint| {
            let forward = [point.capture_seconds, point.score_seconds, point.answer_seconds];
            let sizes = point.layers > 0 && point.prompt.0 > 0;
            sizes && forward.into_iter().all(takes_time) && may_take_time(point.tail_seconds)
        };
        let draw =
            |point: &DrawPoint| point.layers > 0 && takes_time(point.token_seconds) && takes_time(point.token_bytes);
        let copies = [self.copies.host_in, self.copies.host_out, self.copies.device, self.launch_us];
        if !self.updates.iter().all(update) {
            return Some("an update without layers, positions or seconds");
        }
        if !self.draws.iter().all(draw) {
            return Some("a sampled token without layers, bytes or seconds");
        }
        (!copies.into_iter().all(may_take_time)).then_some("a negative rate")
    }

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
}
