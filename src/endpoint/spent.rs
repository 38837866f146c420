//! What a service was sent, in requests and tokens, and what that costs.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::config::EndpointConfig;
use crate::runtime::units::float;

/// Tokens that a price is of.
const PRICED: f64 = 1e6;

/// Requests and tokens, as far as the service counts them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct Spent {
    /// Requests, failed and repeated ones included.
    pub requests: u64,
    /// Tokens of the messages that were answered.
    pub tokens_in: u64,
    /// Tokens of the replies.
    pub tokens_out: u64,
    /// Replies that lack one count of tokens or both.
    pub uncounted: u64,
    /// In the currency of `endpoint.price_in` and `endpoint.price_out`; absent without prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

impl Spent {
    /// Adds what was spent elsewhere.
    pub fn add(&mut self, other: &Spent) {
        // What was spent without a price has no cost, and the sum has none then.
        let priced = |spent: &Spent| spent.cost.or((spent.requests == 0).then_some(0.0));
        let cost = priced(self).zip(priced(other)).map(|(one, two)| one + two);
        self.cost = cost.filter(|_| self.cost.is_some() || other.cost.is_some());
        self.requests += other.requests;
        self.tokens_in += other.tokens_in;
        self.tokens_out += other.tokens_out;
        self.uncounted += other.uncounted;
    }

    /// `None` where nothing was sent.
    #[must_use]
    pub fn if_any(self) -> Option<Spent> {
        (self.requests > 0).then_some(self)
    }

    /// Every number with its name; an absent one has no entry.
    #[must_use]
    pub fn numbers(&self) -> Vec<(&'static str, Option<f64>)> {
        vec![
            ("requests", Some(float(self.requests))),
            ("tokens_in", Some(float(self.tokens_in))),
            ("tokens_out", Some(float(self.tokens_out))),
            ("uncounted", Some(float(self.uncounted))),
            ("cost", self.cost),
        ]
    }

    /// All of it in one line.
    #[must_use]
    pub fn text(&self) -> String {
        let Spent { requests, tokens_in, tokens_out, uncounted, cost } = self;
        let rest = if *uncounted > 0 { format!("; {uncounted} replies had no count of tokens") } else { String::new() };
        let cost = cost.map(|cost| format!("; cost {cost:.4} at endpoint.price_in and price_out")).unwrap_or_default();
        format!("{requests} requests, {tokens_in} tokens in, {tokens_out} out{rest}{cost}")
    }
}

/// The price of tokens; `None` without prices.
#[must_use]
pub fn cost_of(config: &EndpointConfig, tokens_in: u64, tokens_out: u64) -> Option<f64> {
    let (price_in, price_out) = config.price_in.zip(config.price_out)?;
    Some((float(tokens_in) * price_in + float(tokens_out) * price_out) / PRICED)
}

/// Counts that several threads add to.
#[derive(Debug, Default)]
pub(super) struct Meter {
    requests: AtomicU64,
    tokens_in: AtomicU64,
    tokens_out: AtomicU64,
    uncounted: AtomicU64,
}

impl Meter {
    pub(super) fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a reply with its counts of tokens, where the service gives them.
    pub(super) fn reply(&self, tokens_in: Option<u64>, tokens_out: Option<u64>) {
        if tokens_in.is_none() || tokens_out.is_none() {
            self.uncounted.fetch_add(1, Ordering::Relaxed);
        }
        self.tokens_in.fetch_add(tokens_in.unwrap_or(0), Ordering::Relaxed);
        self.tokens_out.fetch_add(tokens_out.unwrap_or(0), Ordering::Relaxed);
    }

    /// The counts since the last time, without their cost.
    pub(super) fn take(&self) -> Spent {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        Spent {
            requests: take(&self.requests),
            tokens_in: take(&self.tokens_in),
            tokens_out: take(&self.tokens_out),
            uncounted: take(&self.uncounted),
            cost: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;

    #[test]
    fn a_price_is_of_a_million_tokens_and_no_money_is_named_without_one() {
        let mut endpoint = RunConfig::laptop().endpoint;
        assert_eq!(cost_of(&endpoint, 1000, 10), None);
        (endpoint.price_in, endpoint.price_out) = (Some(3.0), Some(15.0));
        assert!((cost_of(&endpoint, 2_000_000, 100_000).unwrap() - 7.5).abs() < 1e-12);
        (endpoint.price_in, endpoint.price_out) = (Some(0.0), Some(0.0));
        assert_eq!(cost_of(&endpoint, 1000, 10), Some(0.0));
    }

    #[test]
    fn counts_are_taken_once_and_a_reply_without_a_count_is_counted_as_one() {
        let meter = Meter::default();
        for (tokens_in, tokens_out) in [(Some(14), Some(3)), (None, None), (Some(6), None)] {
            meter.request();
            meter.reply(tokens_in, tokens_out);
        }
        meter.request();
        let spent = meter.take();
        let wanted = Spent { requests: 4, tokens_in: 20, tokens_out: 3, uncounted: 2, cost: None };
        assert_eq!((spent, meter.take().if_any()), (wanted, None));
        let mut sum = Spent { cost: Some(0.5), ..spent };
        sum.add(&Spent { cost: Some(0.25), ..spent });
        assert_eq!((sum.requests, sum.cost), (8, Some(0.75)));
        let mut unpriced = Spent { cost: Some(0.5), ..spent };
        unpriced.add(&spent);
        assert_eq!(unpriced.cost, None, "a part without a price has no cost");
        unpriced = Spent { cost: Some(0.5), ..spent };
        unpriced.add(&Spent::default());
        assert_eq!(unpriced.cost, Some(0.5), "nothing was sent");
        let mut first = Spent::default();
        first.add(&Spent { cost: Some(0.5), ..spent });
        assert_eq!(first.cost, Some(0.5), "nothing was sent before");
        assert_eq!(
            sum.text(),
            "8 requests, 40 tokens in, 6 out; 4 replies had no count of tokens; cost 0.7500 at endpoint.price_in and \
             price_out"
        );
    }
}
