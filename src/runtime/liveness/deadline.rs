//! How long a rank may stay at one site: the configured limit, or one computed from its longest stays so far.

use std::time::Duration;

use super::site::SiteSnapshot;
use crate::runtime::failure::{Phase, Site};

/// Minimum for a layer, once the rank has completed a layer in this phase.
const LAYER_FLOOR: Duration = Duration::from_mins(10);
/// Minimum for work of unknown length: loading weights, pinning memory, the first layer of a phase, a phase without
/// layers.
const UNKNOWN_FLOOR: Duration = Duration::from_hours(1);
/// Minimum for phases that only sum, update or write adapters.
const SHORT_FLOOR: Duration = Duration::from_mins(30);
/// A stay may take this many times the longest stay of its kind.
const LONGEST_FACTOR: u32 = 20;
/// After this time without a new heartbeat a rank counts as stopped.
const SILENCE: Duration = Duration::from_mins(1);
/// Maximum of the silence if a limit is configured.
const SILENCE_SET_MAX: Duration = Duration::from_secs(30);

/// Limits after which a rank that does not move counts as stalled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StallLimits {
    /// `None`: the limit is computed.
    configured: Option<Duration>,
}

impl StallLimits {
    /// From `run.stall_sec`: seconds at one site, or 0 to compute the limit.
    #[must_use]
    pub fn new(stall_sec: u64) -> StallLimits {
        StallLimits { configured: (stall_sec > 0).then(|| Duration::from_secs(stall_sec)) }
    }

    /// After this time without a heartbeat a rank counts as stopped, if others have waited as long.
    #[must_use]
    pub fn silence(self) -> Duration {
        self.configured.map_or(SILENCE, |limit| limit.min(SILENCE_SET_MAX))
    }

    /// Time between two heartbeats: at most a tenth of the silence, if that is a second or more.
    #[must_use]
    pub fn interval(self) -> Duration {
        (self.silence() / 12).clamp(Duration::from_millis(100), Duration::from_secs(2))
    }

    /// The longest permitted stay, given the longest stay of its kind so far.
    fn deadline(self, kind: StayKind, longest: Duration) -> Duration {
        let computed = kind.minimum(longest).max(longest * LONGEST_FACTOR);
        match self.configured {
            // Loading and pinning take minutes, however short a layer is.
            Some(limit) if kind == StayKind::Unbounded => limit.max(computed),
            Some(limit) => limit,
            None => computed,
        }
    }
}

/// What a rank does at a site, as far as its duration is concerned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum StayKind {
    /// Weights are loaded, memory is pinned, or whole sequences run under autograd next to the paged step.
    Unbounded,
    Layer,
    /// A whole phase without layers.
    WholePhase,
    /// Sums, updates, files.
    Short,
}

impl StayKind {
    fn of(phase: Phase, layered: bool) -> StayKind {
        match phase {
            _ if layered => StayKind::Layer,
            Phase::Start | Phase::Capture | Phase::Reward | Phase::Evaluate => StayKind::Unbounded,
            Phase::Finalize | Phase::Update | Phase::Save => StayKind::Short,
            Phase::Rollout | Phase::Score | Phase::Replay | Phase::Sweep => StayKind::WholePhase,
        }
    }

    fn minimum(self, longest: Duration) -> Duration {
        match self {
            StayKind::Layer if longest > Duration::ZERO => LAYER_FLOOR,
            StayKind::Short => SHORT_FLOOR,
            StayKind::Layer | StayKind::WholePhase | StayKind::Unbounded => UNKNOWN_FLOOR,
        }
    }
}

/// Longest stays of one phase.
#[derive(Clone, Copy, Debug, Default)]
struct LongestStays {
    /// In one layer.
    layer: Duration,
    /// In the phase, outside its layers.
    phase: Duration,
}

impl LongestStays {
    fn of_site(&mut self, site: Site) -> &mut Duration {
        if site.layer.is_some() { &mut self.layer } else { &mut self.phase }
    }
}

/// A rank's own progress: how long it has been at its site, and its longest stays so far.
#[derive(Clone, Debug)]
pub struct Progress {
    limits: StallLimits,
    last: SiteSnapshot,
    time_here: Duration,
    longest: [LongestStays; Phase::ALL.len()],
}

impl Progress {
    /// Begins at `snapshot`.
    #[must_use]
    pub fn new(limits: StallLimits, snapshot: SiteSnapshot) -> Progress {
        Progress { limits, last: snapshot, time_here: Duration::ZERO, longest: Default::default() }
    }

    /// Takes in a new snapshot, `elapsed` after the last one.
    pub fn observe(&mut self, snapshot: SiteSnapshot, elapsed: Duration) {
        self.time_here += elapsed;
        if snapshot.borders != self.last.borders {
            let longest = self.longest[self.last.site.phase.index()].of_site(self.last.site);
            *longest = self.time_here.max(*longest);
            self.time_here = Duration::ZERO;
        }
        self.last = snapshot;
    }

    /// The last snapshot.
    #[must_use]
    pub fn snapshot(&self) -> SiteSnapshot {
        self.last
    }

    /// How long the rank has been at its site.
    #[must_use]
    pub fn time_here(&self) -> Duration {
        self.time_here
    }

    /// How long the rank may be at its site.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        let site = self.last.site;
        let longest = *{ self.longest[site.phase.index()] }.of_site(site);
        self.limits.deadline(StayKind::of(site.phase, site.layer.is_some()), longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::units::{LayerIndex, Rank};

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn at(phase: Phase, layer: Option<usize>, borders: u64) -> SiteSnapshot {
        SiteSnapshot {
            site: Site { rank: Rank(0), phase, layer: layer.map(LayerIndex) },
            borders,
            waits: false,
            linked: false,
        }
    }

    #[test]
    fn a_deadline_follows_the_longest_layer_of_its_phase_and_never_falls_below_its_floor() {
        let mut progress = Progress::new(StallLimits::new(0), at(Phase::Start, None, 0));
        assert_eq!(progress.deadline(), seconds(3600), "weights");
        progress.observe(at(Phase::Capture, None, 1), seconds(500));
        assert_eq!(progress.deadline(), seconds(3600), "pinned memory");
        progress.observe(at(Phase::Capture, Some(0), 2), seconds(2));
        assert_eq!((progress.deadline(), progress.time_here()), (seconds(3600), seconds(0)), "no layer is known yet");
        progress.observe(at(Phase::Capture, Some(0), 2), seconds(60));
        progress.observe(at(Phase::Capture, Some(1), 3), seconds(13));
        assert_eq!(progress.deadline(), seconds(20 * 73));
        progress.observe(at(Phase::Score, Some(0), 4), seconds(1));
        assert_eq!(progress.deadline(), seconds(3600), "other phases have layers of their own");
        progress.observe(at(Phase::Score, Some(1), 5), seconds(1));
        assert_eq!(progress.deadline(), seconds(600));
        progress.observe(at(Phase::Finalize, None, 6), seconds(1));
        assert_eq!(progress.deadline(), seconds(1800));
        progress.observe(at(Phase::Capture, Some(0), 7), seconds(1));
        assert_eq!(progress.deadline(), seconds(20 * 73), "the next step knows the last one");
    }

    #[test]
    fn a_configured_limit_holds_for_layers_and_short_phases_but_not_for_loading_pinning_and_judging() {
        let limits = StallLimits::new(5);
        let deadline = |phase, layer| Progress::new(limits, at(phase, layer, 0)).deadline();
        for (phase, layer) in [(Phase::Capture, Some(3)), (Phase::Finalize, None), (Phase::Save, None)] {
            assert_eq!(deadline(phase, layer), seconds(5), "{phase}");
        }
        assert_eq!(deadline(Phase::Start, None), seconds(3600));
        assert_eq!(deadline(Phase::Capture, None), seconds(3600));
        assert_eq!(deadline(Phase::Evaluate, None), seconds(3600), "plain autograd, which knows no layers");
        assert_eq!(deadline(Phase::Evaluate, Some(0)), seconds(5));
        let long = Progress::new(StallLimits::new(9000), at(Phase::Start, None, 0));
        assert_eq!(long.deadline(), seconds(9000), "a limits beyond the hour holds there too");
    }

    #[test]
    fn a_silence_is_at_least_ten_heartbeats_and_at_most_half_a_minute_if_a_limit_is_configured() {
        for (stall, silence) in [(0, 60), (3, 3), (30, 30), (900, 30)] {
            let limits = StallLimits::new(stall);
            assert_eq!(limits.silence(), seconds(silence));
            assert!(limits.interval() * 10 <= limits.silence(), "{limits:?}");
            assert!(limits.interval() <= seconds(2), "{limits:?}");
        }
        assert_eq!(StallLimits::new(1).interval(), Duration::from_millis(100));
    }
}
