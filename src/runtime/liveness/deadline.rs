//! How long a rank may stay in one place: what is set, or what follows from how long it has taken so far.

use std::time::Duration;

use super::Moment;
use crate::runtime::failure::Phase;

/// The least that a layer may take which a rank has been through before in this phase.
const LAYER_FLOOR: Duration = Duration::from_mins(10);
/// The least for what has no known length: weights, memory that is pinned, the first layer of a phase, a whole phase
/// without layers.
const UNKNOWN_FLOOR: Duration = Duration::from_hours(1);
/// The least for phases that only sum, update or write adapters.
const SHORT_FLOOR: Duration = Duration::from_mins(30);
/// A place may take so many times the longest stay in its like.
const LONGEST_TIMES: u32 = 20;
/// A heart that has not beaten for so long has stopped, or is not heard.
const SILENCE: Duration = Duration::from_mins(1);
/// The most of it where the patience is set.
const SILENCE_SET_MAX: Duration = Duration::from_secs(30);

/// How patient a job is with ranks that do not move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Patience {
    /// The deadline as it was set; `None`: computed.
    set: Option<Duration>,
}

impl Patience {
    /// Of `run.stall_sec`: seconds in one place, or 0 to compute them.
    #[must_use]
    pub fn of(stall_sec: u64) -> Patience {
        Patience { set: (stall_sec > 0).then(|| Duration::from_secs(stall_sec)) }
    }

    /// After this time without a heartbeat a rank counts as stopped, if others wait as long.
    #[must_use]
    pub fn silence(self) -> Duration {
        self.set.map_or(SILENCE, |set| set.min(SILENCE_SET_MAX))
    }

    /// Time between two heartbeats: a silence is at least ten of them, but where it is shorter than a second.
    #[must_use]
    pub fn interval(self) -> Duration {
        (self.silence() / 12).clamp(Duration::from_millis(100), Duration::from_secs(2))
    }

    /// The most that a place may take, of which the longest stay so far is known.
    fn deadline(self, kind: Kind, longest: Duration) -> Duration {
        let computed = kind.floor(longest).max(longest * LONGEST_TIMES);
        match self.set {
            // What takes minutes by its nature is no stall, however short a layer is.
            Some(set) if kind == Kind::Unbounded => set.max(computed),
            Some(set) => set,
            None => computed,
        }
    }
}

/// What a place is like.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// Weights are loaded, memory is pinned, or whole sequences run under autograd beside the paged step.
    Unbounded,
    /// A layer.
    Layer,
    /// A whole phase that goes through no layers.
    Whole,
    /// Sums, updates, files.
    Short,
}

impl Kind {
    fn of(phase: Phase, layered: bool) -> Kind {
        match phase {
            _ if layered => Kind::Layer,
            Phase::Start | Phase::Capture | Phase::Reward | Phase::Evaluate => Kind::Unbounded,
            Phase::Finalize | Phase::Update | Phase::Save => Kind::Short,
            Phase::Rollout | Phase::Score | Phase::Replay | Phase::Sweep => Kind::Whole,
        }
    }

    fn floor(self, longest: Duration) -> Duration {
        match self {
            Kind::Layer if longest > Duration::ZERO => LAYER_FLOOR,
            Kind::Short => SHORT_FLOOR,
            Kind::Layer | Kind::Whole | Kind::Unbounded => UNKNOWN_FLOOR,
        }
    }
}

/// A rank's own pace: how long it has been where it is, and how long it has taken in places like that.
#[derive(Clone, Debug)]
pub struct Pace {
    patience: Patience,
    moment: Moment,
    here: Duration,
    /// By phase, without and with a layer.
    longest: [[Duration; 2]; Phase::ALL.len()],
}

impl Pace {
    /// Begins at `moment`.
    #[must_use]
    pub fn new(patience: Patience, moment: Moment) -> Pace {
        Pace { patience, moment, here: Duration::ZERO, longest: Default::default() }
    }

    /// The rank is seen at `moment`, `elapsed` after it was seen last.
    pub fn see(&mut self, moment: Moment, elapsed: Duration) {
        self.here += elapsed;
        if moment.borders != self.moment.borders {
            let place = &mut self.longest[self.moment.site.phase.index()][self.layered()];
            *place = self.here.max(*place);
            self.here = Duration::ZERO;
        }
        self.moment = moment;
    }

    fn layered(&self) -> usize {
        usize::from(self.moment.site.layer.is_some())
    }

    /// Where it was seen last.
    #[must_use]
    pub fn moment(&self) -> Moment {
        self.moment
    }

    /// How long it has been there.
    #[must_use]
    pub fn here(&self) -> Duration {
        self.here
    }

    /// How long it may be there.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        let (phase, layered) = (self.moment.site.phase, self.layered());
        self.patience.deadline(Kind::of(phase, layered == 1), self.longest[phase.index()][layered])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::failure::Site;
    use crate::runtime::units::{LayerIndex, Rank};

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn moment(phase: Phase, layer: Option<usize>, borders: u64) -> Moment {
        Moment {
            site: Site { rank: Rank(0), phase, layer: layer.map(LayerIndex) },
            borders,
            waits: false,
            linked: false,
        }
    }

    #[test]
    fn a_deadline_follows_the_longest_layer_of_its_phase_and_never_falls_below_its_floor() {
        let mut pace = Pace::new(Patience::of(0), moment(Phase::Start, None, 0));
        assert_eq!(pace.deadline(), seconds(3600), "weights");
        pace.see(moment(Phase::Capture, None, 1), seconds(500));
        assert_eq!(pace.deadline(), seconds(3600), "pinned memory");
        pace.see(moment(Phase::Capture, Some(0), 2), seconds(2));
        assert_eq!((pace.deadline(), pace.here()), (seconds(3600), seconds(0)), "no layer is known yet");
        pace.see(moment(Phase::Capture, Some(0), 2), seconds(60));
        pace.see(moment(Phase::Capture, Some(1), 3), seconds(13));
        assert_eq!(pace.deadline(), seconds(20 * 73));
        pace.see(moment(Phase::Score, Some(0), 4), seconds(1));
        assert_eq!(pace.deadline(), seconds(3600), "other phases have layers of their own");
        pace.see(moment(Phase::Score, Some(1), 5), seconds(1));
        assert_eq!(pace.deadline(), seconds(600));
        pace.see(moment(Phase::Finalize, None, 6), seconds(1));
        assert_eq!(pace.deadline(), seconds(1800));
        pace.see(moment(Phase::Capture, Some(0), 7), seconds(1));
        assert_eq!(pace.deadline(), seconds(20 * 73), "the next step knows the last one");
    }

    #[test]
    fn a_patience_that_is_set_holds_for_layers_and_short_phases_but_not_for_loading_pinning_and_judging() {
        let patience = Patience::of(5);
        let deadline = |phase, layer| Pace::new(patience, moment(phase, layer, 0)).deadline();
        for (phase, layer) in [(Phase::Capture, Some(3)), (Phase::Finalize, None), (Phase::Save, None)] {
            assert_eq!(deadline(phase, layer), seconds(5), "{phase}");
        }
        assert_eq!(deadline(Phase::Start, None), seconds(3600));
        assert_eq!(deadline(Phase::Capture, None), seconds(3600));
        assert_eq!(deadline(Phase::Evaluate, None), seconds(3600), "plain autograd, which knows no layers");
        assert_eq!(deadline(Phase::Evaluate, Some(0)), seconds(5));
        let long = Pace::new(Patience::of(9000), moment(Phase::Start, None, 0));
        assert_eq!(long.deadline(), seconds(9000), "a patience beyond the hour holds there too");
    }

    #[test]
    fn a_silence_is_at_least_ten_heartbeats_and_at_the_most_half_a_minute_where_patience_is_set() {
        for (stall, silence) in [(0, 60), (3, 3), (30, 30), (900, 30)] {
            let patience = Patience::of(stall);
            assert_eq!(patience.silence(), seconds(silence));
            assert!(patience.interval() * 10 <= patience.silence(), "{patience:?}");
            assert!(patience.interval() <= seconds(2), "{patience:?}");
        }
        assert_eq!(Patience::of(1).interval(), Duration::from_millis(100));
    }
}
