//! The progress bar on a terminal: updates, the current phase, and the time that is left.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::forecast::{Forecast, words};
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::terminal::{is_terminal, on_one_line};

/// The bar, if standard error is a terminal, and the forecast.
#[derive(Debug, Default)]
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    forecast: Forecast,
}

impl Progress {
    /// Shows a bar on standard error if it is a terminal and this is rank 0 (`first`).
    pub(super) fn begin(first: bool) -> Progress {
        let shown = first && is_terminal();
        let bar = shown.then(|| {
            let bar = ProgressBar::new_spinner().with_style(style("{spinner} {prefix}{msg}"));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Progress { bar, forecast: Forecast::default() }
    }

    /// Sets the updates to come: `left` of them, up to update `steps`; `ahead` has prompt lengths as in [`Forecast`].
    pub(super) fn expect(&mut self, ahead: &[Vec<u64>], left: u64, steps: u64) {
        self.forecast.expect(ahead, left);
        if let Some(bar) = &self.bar {
            bar.set_style(style("{spinner} [{bar:24}] {pos}/{len} {prefix}{msg}"));
            bar.set_length(steps);
            bar.set_position(steps.saturating_sub(left));
        }
    }

    /// Counts an update and returns the time that is left in words, if it is known.
    pub(super) fn done(&mut self, step: u64, seconds: f64) -> Option<String> {
        self.forecast.done(seconds);
        if let Some(bar) = &self.bar {
            bar.set_position(step);
        }
        self.left()
    }

    fn left(&self) -> Option<String> {
        self.forecast.left_s().map(words)
    }

    /// Shows what is happening now, with the time that is left.
    pub(super) fn now(&self, text: &str) {
        if let Some(bar) = &self.bar {
            let text = on_one_line(text);
            bar.set_message(self.left().map_or_else(|| text.clone().into_owned(), |left| format!("{text}, {left}")));
        }
    }

    /// Runs `print` while the bar is hidden.
    pub(super) fn suspend(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Removes the bar.
    pub(super) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Receives phases for the bar, if there is a bar.
    pub(super) fn phases(&self) -> Option<Box<dyn Recorder>> {
        let bar = self.bar.clone()?;
        Some(Box::new(Phases(bar)))
    }
}

/// A wrong template falls back to indicatif's default.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// Shows the current phase before the bar's text.
#[derive(Debug)]
struct Phases(ProgressBar);

impl Recorder for Phases {
    fn pass(&mut self, border: Border) {
        match border {
            Border::Phase(phase) => self.0.set_prefix(format!("{phase}, ")),
            Border::StepEnd => self.0.set_prefix(""),
            Border::Layer(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::failure::Phase;

    #[test]
    fn the_bar_shows_updates_phase_and_time_left() {
        let bar = ProgressBar::hidden();
        let mut progress = Progress { bar: Some(bar.clone()), forecast: Forecast::default() };
        progress.expect(&[vec![10], vec![10], vec![10]], 3, 5);
        assert_eq!((bar.length(), bar.position()), (Some(5), 2));
        progress.now("step 3");
        assert_eq!(bar.message(), "step 3", "no forecast before the first update");
        assert_eq!(progress.done(3, 20.0), Some("about 40 s left".to_owned()));
        progress.now("step 4");
        assert_eq!((bar.position(), bar.message().as_str()), (3, "step 4, about 40 s left"));
        let mut phases = progress.phases().unwrap();
        phases.pass(Border::Phase(Phase::Capture));
        assert_eq!(bar.prefix(), "capture, ");
        phases.pass(Border::StepEnd);
        assert_eq!(bar.prefix(), "");
        assert!(Progress::begin(false).phases().is_none());
    }
}
