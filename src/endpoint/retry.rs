//! How many attempts a request gets, and how long the waits between attempts are.

use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant, SystemTime};

use super::error::Fault;
use crate::runtime::units::float;

/// The longest wait that a service may request.
const REQUESTED_WAIT_MAX: Duration = Duration::from_mins(5);
/// The longest computed wait; the configuration refuses longer ones.
const BACKOFF_WAIT_SEC_MAX: f64 = 3600.0;
/// Waits vary by this share up and down, so that ranks that failed together do not retry together.
const JITTER: f64 = 0.25;
/// Interval at which a wait checks whether its caller has given up.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time-out of an attempt: a time-out of 0 would mean none.
const LEFT_MIN: Duration = Duration::from_millis(1);

/// Time-outs, waits and the number of attempts.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetryPolicy {
    /// Of one attempt, from the look-up of the host to the end of the answer.
    pub(super) timeout: Duration,
    /// Maximum number of attempts after the first one.
    pub(super) retries_max: u64,
    /// The wait after attempt n is this number to the power n, in seconds.
    pub(super) backoff: f64,
    pub(super) deadline: Option<Deadline>,
    /// Whether the caller has given up.
    pub(super) given_up: fn() -> bool,
}

/// The end of the caller's own time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    end: Instant,
    /// From the caller's start to `end`.
    whole: Duration,
}

impl Deadline {
    /// `whole` from now.
    pub(super) fn after(whole: Duration) -> Deadline {
        Deadline { end: Instant::now() + whole, whole }
    }
}

impl RetryPolicy {
    /// The wait after attempt number `attempts` ended in `fault`; `None` if no further attempt follows.
    pub(super) fn wait(&self, attempts: u64, fault: &Fault) -> Option<Duration> {
        if !fault.is_transient() || attempts > self.retries_max {
            return None;
        }
        let spread = 1.0 + JITTER * (2.0 * random() - 1.0);
        let requested = fault.requested_wait().unwrap_or_default().min(REQUESTED_WAIT_MAX);
        let wait = self.backoff_wait(attempts, spread).max(requested);
        let in_time = self.left().is_none_or(|left| wait < left);
        (in_time && !(self.given_up)()).then_some(wait)
    }

    /// Waits; returns false if the caller gives up meanwhile.
    pub(super) fn sleep(&self, wait: Duration) -> bool {
        let start = Instant::now();
        while let Some(left) = wait.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            if (self.given_up)() {
                return false;
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
        true
    }

    /// Time until the caller's deadline.
    fn left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.end.saturating_duration_since(Instant::now()))
    }

    /// The time-out of an attempt that starts now.
    pub(super) fn attempt_timeout(&self) -> Duration {
        self.left().map_or(self.timeout, |left| left.clamp(LEFT_MIN, self.timeout.max(LEFT_MIN)))
    }

    /// The fault of an attempt that has taken too long.
    pub(super) fn timeout_fault(&self) -> Fault {
        match self.deadline {
            Some(Deadline { end, whole }) if Instant::now() >= end => Fault::Late { seconds: whole.as_secs_f64() },
            _ => Fault::Timeout { seconds: self.timeout.as_secs() },
        }
    }

    fn backoff_wait(&self, attempts: u64, spread: f64) -> Duration {
        let seconds = self.backoff.powi(i32::try_from(attempts).unwrap_or(i32::MAX)) * spread;
        Duration::try_from_secs_f64(seconds.min(BACKOFF_WAIT_SEC_MAX)).unwrap_or_default()
    }

    /// The sum of all attempts and all waits at their longest.
    pub(super) fn time_max(&self) -> Duration {
        let waits =
            (1..=self.retries_max).map(|attempt| self.backoff_wait(attempt, 1.0 + JITTER).max(REQUESTED_WAIT_MAX));
        let tries = u32::try_from(self.retries_max.saturating_add(1)).unwrap_or(u32::MAX);
        let longest = waits.fold(self.timeout.saturating_mul(tries), Duration::saturating_add);
        self.left().map_or(longest, |left| longest.min(left))
    }
}

/// A number from 0 to 1, different in each process and call. It only decides when a request is made; no result of a run
/// depends on it.
fn random() -> f64 {
    let bits = RandomState::new().hash_one(SystemTime::now());
    float(bits >> 32) / float(u64::from(u32::MAX))
}

/// The wait that a `retry-after` header requests: seconds, or a date.
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

    const POLICY: RetryPolicy = RetryPolicy {
        timeout: Duration::from_secs(10),
        retries_max: 3,
        backoff: 2.0,
        deadline: None,
        given_up: || false,
    };

    fn busy(wait: Option<u64>) -> Fault {
        Fault::Busy { status: 429, said: String::new(), wait: wait.map(Duration::from_secs) }
    }

    #[test]
    fn waits_grow_by_the_backoff_within_the_jitter_and_end_with_the_retries() {
        for (attempt, seconds) in [(1, 2.0), (2, 4.0), (3, 8.0)] {
            let wait = POLICY.wait(attempt, &busy(None)).expect("one more follows").as_secs_f64();
            assert!((0.75 * seconds..=1.25 * seconds).contains(&wait), "after attempt {attempt}: {wait}");
        }
        assert_eq!(POLICY.wait(4, &busy(None)), None);
        assert_eq!(POLICY.wait(1, &Fault::WebPage), None);
    }

    #[test]
    fn the_service_may_request_a_longer_wait_up_to_a_maximum() {
        assert_eq!(POLICY.wait(1, &busy(Some(60))), Some(Duration::from_mins(1)));
        assert_eq!(POLICY.wait(1, &busy(Some(86_400))), Some(REQUESTED_WAIT_MAX));
        assert!(POLICY.wait(1, &busy(Some(0))).is_some_and(|wait| wait >= Duration::from_millis(1500)));
        assert_eq!(POLICY.time_max(), Duration::from_secs(40) + 3 * REQUESTED_WAIT_MAX);
    }

    #[test]
    fn a_caller_with_a_deadline_waits_for_nothing_beyond_it() {
        let whole = Duration::from_secs(5);
        let bounded = RetryPolicy { deadline: Some(Deadline::after(whole)), ..POLICY };
        assert!(bounded.attempt_timeout() <= whole && bounded.time_max() <= whole);
        assert!(bounded.wait(1, &busy(None)).is_some());
        assert_eq!(bounded.wait(1, &busy(Some(60))), None, "the service requests more than is left");
        assert_eq!(bounded.timeout_fault(), Fault::Timeout { seconds: 10 });
        let late = RetryPolicy { deadline: Some(Deadline { end: Instant::now(), whole }), ..POLICY };
        assert_eq!(late.wait(1, &busy(None)), None);
        assert_eq!(late.timeout_fault(), Fault::Late { seconds: 5.0 });
        assert!(late.attempt_timeout() > Duration::ZERO, "a time-out of nothing would be none");
    }

    #[test]
    fn a_caller_that_has_given_up_is_not_kept_waiting() {
        let given_up = RetryPolicy { given_up: || true, ..POLICY };
        assert_eq!(given_up.wait(1, &busy(None)), None);
        let start = Instant::now();
        let wait = Duration::from_mins(10);
        assert!(!given_up.sleep(wait) && start.elapsed() < wait);
        assert!(POLICY.sleep(Duration::from_millis(1)));
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
