//! Rates that a plan follows, from a file of measurements.

use std::path::{Path, PathBuf};

use super::file::{Error, MeasuredGradient, Measurements, layer_kinds, layer_parameters};
use super::fit::{self, Drawing, UpdateFit};
use crate::config::Dtype;
use crate::model::shape::Shape;
use crate::plan::seconds::Rates;
use crate::runtime::units::float;

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
    file: PathBuf,
}

impl MeasuredRates {
    /// Reads the file for a plan of `shape` in `dtype`.
    ///
    /// # Errors
    /// When it cannot be read, is of another version or dtype, or lacks a kind of layer that the model has.
    pub fn read(file: &Path, dtype: Dtype, shape: &Shape) -> Result<MeasuredRates, Error> {
        let measured = Measurements::read(file)?;
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
        let (found, wanted) = (measured.layer_parameters, layer_parameters(&shape.layers));
        if found != wanted {
            return Err(Error::Model { file: file.to_owned(), found, wanted });
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
