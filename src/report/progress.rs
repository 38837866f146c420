//! How far a run is: a bar over its updates on a terminal, with the phase that goes on and the time that is left.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::forecast::{Forecast, words};
use crate::runtime::liveness::{Border, Recorder};

/// The bar, where there is a terminal, and the forecast.
#[derive(Debug, Default)]
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    forecast: Forecast,
}

impl Progress {
    /// Shown on standard error if it is a terminal and `first` says that this rank may.
    pub(super) fn begin(first: bool) -> Progress {
        let shown = first && std::io::stderr().is_terminal();
        let bar = shown.then(|| {
            let bar = ProgressBar::new_spinner().with_style(style("{spinner} {prefix}{msg}"));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Progress { bar, forecast: Forecast::default() }
    }

    /// Updates are to come, `ahead` the prompt lengths of the first of them, up to update `steps`.
    pub(super) fn expect(&mut self, ahead: &[Vec<u64>], left: u64, steps: u64) {
        self.forecast.expect(ahead, left);
        if let Some(bar) = &self.bar {
            bar.set_style(style("{spinner} [{bar:24}] {pos}/{len} {prefix}{msg}"));
            bar.set_length(steps);
            bar.set_position(steps.saturating_sub(left));
        }
    }

    /// An update is done; returns what is known of the rest.
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

    /// What goes on now, with the time that is left.
    pub(super) fn now(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(self.left().map_or_else(|| text.to_owned(), |left| format!("{text}, {left}")));
        }
    }

    /// Runs `print` with the bar out of the way.
    pub(super) fn beside(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// The bar is taken away.
    pub(super) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// What tells the bar of phases, if there is a bar.
    pub(super) fn phases(&self) -> Option<Box<dyn Recorder>> {
        let bar = self.bar.clone()?;
        Some(Box::new(Phases(bar)))
    }
}

/// A template that is wrong falls back to indicatif's own.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// Writes the phase in front of the bar's text.
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
    fn the_bar_tells_updates_phase_and_time_left() {
        let bar = ProgressBar::hidden();
        let mut progress = Progress { bar: Some(bar.clone()), forecast: Forecast::default() };
        progress.expect(&[vec![10], vec![10], vec![10]], 3, 5);
        assert_eq!((bar.length(), bar.position()), (Some(5), 2));
        progress.now("step 3");
        assert_eq!(bar.message(), "step 3", "nothing is said before an update is done");
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
