//! How often a request is made, and how long the waits between attempts are.

use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant, SystemTime};

use super::Fault;
use crate::runtime::units::float;

/// The longest wait that a service may ask for.
const ASKED_WAIT_MAX: Duration = Duration::from_mins(5);
/// The longest wait of our own; the configuration is refused before it exceeds it.
const OWN_WAIT_SEC_MAX: f64 = 3600.0;
/// Waits are spread by this share up and down, so that ranks that failed together do not come back together.
const JITTER: f64 = 0.25;
/// A wait looks so often whether its caller has given up.
const LOOK: Duration = Duration::from_millis(100);
/// A request that has less than this left would only find out that it is late.
const LEFT_MIN: Duration = Duration::from_millis(1);

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Of one request, from the look-up of the host to the end of the answer.
    pub(super) timeout: Duration,
    /// Further attempts after a failed one.
    pub(super) retries: u64,
    /// Attempt n + 1 waits this to the power n seconds.
    pub(super) backoff: f64,
    /// When the caller waits no longer, and how long that was from when it began.
    pub(super) end: Option<(Instant, Duration)>,
    /// Whether the caller has given up.
    pub(super) given_up: fn() -> bool,
}

impl Patience {
    /// How long to wait after attempt number `attempts` ended in `fault`; none where no further one follows.
    pub(super) fn wait(&self, attempts: u64, fault: &Fault) -> Option<Duration> {
        if !fault.passes() || attempts > self.retries {
            return None;
        }
        let spread = 1.0 + JITTER * (2.0 * draw() - 1.0);
        let asked = fault.asked_wait().unwrap_or_default().min(ASKED_WAIT_MAX);
        let wait = self.own(attempts, spread).max(asked);
        let in_time = self.left().is_none_or(|left| wait < left);
        (in_time && !(self.given_up)()).then_some(wait)
    }

    /// Waits; false where the caller gives up meanwhile.
    pub(super) fn sleep(&self, wait: Duration) -> bool {
        let start = Instant::now();
        while let Some(left) = wait.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            if (self.given_up)() {
                return false;
            }
            std::thread::sleep(left.min(LOOK));
        }
        true
    }

    /// How long the caller still waits, where that is bounded.
    fn left(&self) -> Option<Duration> {
        self.end.map(|(end, _)| end.saturating_duration_since(Instant::now()))
    }

    /// The longest that an attempt may take now.
    pub(super) fn attempt(&self) -> Duration {
        self.left().map_or(self.timeout, |left| left.clamp(LEFT_MIN, self.timeout.max(LEFT_MIN)))
    }

    /// What it is that an attempt has taken too long.
    pub(super) fn late(&self) -> Fault {
        match self.end {
            Some((end, whole)) if Instant::now() >= end => Fault::Late { seconds: whole.as_secs_f64() },
            _ => Fault::Timeout { seconds: self.timeout.as_secs() },
        }
    }

    fn own(&self, attempts: u64, spread: f64) -> Duration {
        let seconds = self.backoff.powi(i32::try_from(attempts).unwrap_or(i32::MAX)) * spread;
        Duration::try_from_secs_f64(seconds.min(OWN_WAIT_SEC_MAX)).unwrap_or_default()
    }

    /// All attempts and all waits at their longest.
    pub(super) fn longest(&self) -> Duration {
        let waits = (1..=self.retries).map(|attempt| self.own(attempt, 1.0 + JITTER).max(ASKED_WAIT_MAX));
        let tries = u32::try_from(self.retries.saturating_add(1)).unwrap_or(u32::MAX);
        let longest = waits.fold(self.timeout.saturating_mul(tries), Duration::saturating_add);
        self.left().map_or(longest, |left| longest.min(left))
    }
}

/// A number from 0 to 1 that differs from process to process and from call to call. It decides when a request is made
/// and nothing that a run computes.
fn draw() -> f64 {
    let bits = RandomState::new().hash_one(SystemTime::now());
    float(bits >> 32) / float(u64::from(u32::MAX))
}

/// The wait that a `retry-after` header asks for: seconds, or a date.
pub(super) fn retry_after(text: &str) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = chrono::DateTime::parse_from_rfc2822(text).ok()?;
    SystemTime::from(date).duration_since(SystemTime::now()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience =
        Patience { timeout: Duration::from_secs(10), retries: 3, backoff: 2.0, end: None, given_up: || false };

    fn busy(wait: Option<u64>) -> Fault {
        Fault::Busy { status: 429, said: String::new(), wait: wait.map(Duration::from_secs) }
    }

    #[test]
    fn waits_grow_by_the_backoff_within_the_jitter_and_end_with_the_retries() {
        for (attempt, seconds) in [(1, 2.0), (2, 4.0), (3, 8.0)] {
            let wait = PATIENCE.wait(attempt, &busy(None)).expect("one more follows").as_secs_f64();
            assert!((0.75 * seconds..=1.25 * seconds).contains(&wait), "after attempt {attempt}: {wait}");
        }
        assert_eq!(PATIENCE.wait(4, &busy(None)), None);
        assert_eq!(PATIENCE.wait(1, &Fault::WebPage), None);
    }

    #[test]
    fn the_service_may_ask_for_a_longer_wait_but_not_for_ever() {
        assert_eq!(PATIENCE.wait(1, &busy(Some(60))), Some(Duration::from_mins(1)));
        assert_eq!(PATIENCE.wait(1, &busy(Some(86_400))), Some(ASKED_WAIT_MAX));
        assert!(PATIENCE.wait(1, &busy(Some(0))).is_some_and(|wait| wait >= Duration::from_millis(1500)));
        assert_eq!(PATIENCE.longest(), Duration::from_secs(40) + 3 * ASKED_WAIT_MAX);
    }

    #[test]
    fn a_caller_with_an_end_waits_for_nothing_beyond_it() {
        let whole = Duration::from_secs(5);
        let hurried = Patience { end: Some((Instant::now() + whole, whole)), ..PATIENCE };
        assert!(hurried.attempt() <= whole && hurried.longest() <= whole);
        assert!(hurried.wait(1, &busy(None)).is_some());
        assert_eq!(hurried.wait(1, &busy(Some(60))), None, "the service asks for more than there is");
        assert_eq!(hurried.late(), Fault::Timeout { seconds: 10 });
        let late = Patience { end: Some((Instant::now(), whole)), ..PATIENCE };
        assert_eq!(late.wait(1, &busy(None)), None);
        assert_eq!(late.late(), Fault::Late { seconds: 5.0 });
        assert!(late.attempt() > Duration::ZERO, "a time-out of nothing would be none");
    }

    #[test]
    fn a_caller_that_has_given_up_is_not_kept_waiting() {
        let given_up = Patience { given_up: || true, ..PATIENCE };
        assert_eq!(given_up.wait(1, &busy(None)), None);
        let start = Instant::now();
        assert!(!given_up.sleep(Duration::from_mins(1)) && start.elapsed() < Duration::from_secs(5));
        assert!(PATIENCE.sleep(Duration::from_millis(1)));
    }

    #[test]
    fn a_wait_is_read_as_seconds_or_as_a_date() {
        assert_eq!(retry_after(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("soon"), None);
        let date = chrono::DateTime::<chrono::Utc>::from(SystemTime::now() + Duration::from_secs(100));
        let wait = retry_after(&date.format("%a, %d %b %Y %H:%M:%S GMT").to_string()).expect("a date");
        assert!((98..=100).contains(&wait.as_secs()), "{wait:?}");
        assert_eq!(retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), None);
    }
}
