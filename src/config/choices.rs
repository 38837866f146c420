//! Values that are one of a few words.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::runtime::units::Tokens;

/// The update rules.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    Adamw,
}

/// What the backward pass starts from.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationCkpt {
    /// The input of a layer is kept, and the rest is recomputed.
    Layer,
    /// Everything is kept.
    None,
}

/// Where the model computes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// On GPUs where every rank has one, else on the CPU.
    Auto,
    /// On the CPU.
    Cpu,
    /// On GPUs, or not at all.
    Cuda,
}

/// The learning rate after the warm-up.
#[expect(missing_docs, reason = "a constant rate is constant")]
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    Constant,
    /// Falls along half a cosine, to 0 after the last step.
    Cosine,
    /// Falls linearly, to 0 after the last step.
    Linear,
}

/// The interface that a service of models speaks.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndpointStyle {
    /// Messages with blocks of content.
    Messages,
    /// Chat completions, as most servers of open models speak.
    ChatCompletions,
}

impl EndpointStyle {
    pub(super) fn words(self) -> &'static str {
        match self {
            EndpointStyle::Messages => "by messages",
            EndpointStyle::ChatCompletions => "by chat completions",
        }
    }
}

/// What to do with a prompt that is longer than the plan's.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// The run is refused.
    Refuse,
    /// Tokens in the middle are left out; beginning and end are kept.
    CutMiddle,
    /// Tokens at the beginning are left out.
    CutLeft,
}

/// How token losses become one number.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over answers of their token means.
    SequenceMean,
    /// Mean over all tokens of the update.
    TokenMean,
    /// Sum divided by `constant_divisor`.
    Constant,
}

/// What is improved.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// The clipped ratio of each token.
    Grpo,
    /// The clipped ratio of the whole answer, by the mean over its tokens.
    Gspo,
    /// The log-probability of each token, weighted by its clipped ratio.
    Cispo,
}

/// How the divergence from the starting policy is estimated from one token.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// logprob − ref.
    K1,
    /// (logprob − ref)² / 2.
    K2,
    /// e^(ref − logprob) − (ref − logprob) − 1.
    K3,
    /// [`KlEstimator::K3`] times the token's ratio to the old policy.
    K3Ratio,
}

/// What the squares of a standard deviation are divided by.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Deviation {
    /// The count of rewards.
    Population,
    /// The count of rewards less one.
    Sample,
}

/// What advantages are divided by.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The deviation of the group's rewards.
    Group,
    /// The deviation of all rewards of the update.
    Batch,
    /// Advantages stay in units of the reward.
    None,
}

/// What log-probabilities that come with the answers are for.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceWeights {
    /// There are no weights: they are the old policy of the ratio.
    None,
    /// A weight for each token.
    Token,
    /// A weight for each answer.
    Sequence,
    /// A weight for each token, 0 outside its bounds.
    TokenMask,
    /// A weight for each answer, 0 outside its bounds.
    SequenceMask,
}

impl ImportanceWeights {
    /// Whether weights outside the bounds are 0.
    #[must_use]
    pub fn is_mask(self) -> bool {
        matches!(self, ImportanceWeights::TokenMask | ImportanceWeights::SequenceMask)
    }

    /// Whether each token has a weight of its own.
    #[must_use]
    pub fn is_of_tokens(self) -> bool {
        matches!(self, ImportanceWeights::Token | ImportanceWeights::TokenMask)
    }
}

/// A temperature that a request states or leaves out: a number or `"none"` in a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SentTemperature {
    /// The number that the request states.
    Sent(f64),
    /// The request has none, for services that refuse it; the service takes its own.
    LeftOut,
}

impl SentTemperature {
    /// The number that is sent.
    #[must_use]
    pub fn number(self) -> Option<f64> {
        match self {
            SentTemperature::Sent(temperature) => Some(temperature),
            SentTemperature::LeftOut => None,
        }
    }
}

impl Serialize for SentTemperature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            SentTemperature::Sent(temperature) => serializer.serialize_f64(*temperature),
            SentTemperature::LeftOut => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for SentTemperature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TemperatureVisitor;
        impl Visitor<'_> for TemperatureVisitor {
            type Value = SentTemperature;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or \"none\"")
            }

            fn visit_f64<E: de::Error>(self, temperature: f64) -> Result<SentTemperature, E> {
                Ok(SentTemperature::Sent(temperature))
            }

            fn visit_i64<E: de::Error>(self, temperature: i64) -> Result<SentTemperature, E> {
                // A temperature is a small number; what 32 bits do not hold is refused as too large all the same.
                Ok(SentTemperature::Sent(i32::try_from(temperature).map_or(f64::INFINITY, f64::from)))
            }

            fn visit_u64<E: de::Error>(self, temperature: u64) -> Result<SentTemperature, E> {
                self.visit_i64(i64::try_from(temperature).unwrap_or(i64::MAX))
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<SentTemperature, E> {
                match word {
                    "none" => Ok(SentTemperature::LeftOut),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }
        }
        deserializer.deserialize_any(TemperatureVisitor)
    }
}

/// Number format of weights and activations.
#[expect(missing_docs, reason = "the formats of IEEE 754 have their usual names")]
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 8 bits of exponent, 7 bits of fraction.
    Bfloat16,
    Float32,
    Float64,
}

impl fmt::Display for Dtype {
    /// As configurations and receipts name it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Bfloat16 => "bfloat16",
            Dtype::Float32 => "float32",
            Dtype::Float64 => "float64",
        })
    }
}

/// How the frozen weights are held.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// In the run's number format, as read from the checkpoint.
    Checkpoint,
    /// In blocks of fp8, as an fp8 checkpoint holds them.
    Fp8,
}

/// Which prompt positions carry gradient: the last N, all earlier ones are constants.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gradient {
    /// N = the prompt's length: the gradient of the full sequence.
    Exact,
    /// N = 1: the last prompt position, which predicts the first answer token.
    Response,
    /// N as given.
    Last(Tokens),
}

impl Gradient {
    /// N for a prompt of `prompt_len` positions; never more than that.
    #[must_use]
    pub fn tail(self, prompt_len: Tokens) -> Tokens {
        match self {
            Gradient::Exact => prompt_len,
            Gradient::Response => prompt_len.min(Tokens(1)),
            Gradient::Last(tail) => prompt_len.min(tail),
        }
    }
}

impl FromStr for Gradient {
    type Err = &'static str;

    /// From the name that [`fmt::Display`] writes; `last=1` is `response`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "exact" => Ok(Gradient::Exact),
            "response" => Ok(Gradient::Response),
            other => match other.strip_prefix("last=").and_then(|rows| rows.parse().ok()) {
                Some(1) => Ok(Gradient::Response),
                Some(rows) => Ok(Gradient::Last(Tokens(rows))),
                None => Err("should be exact, response or last=N"),
            },
        }
    }
}

impl fmt::Display for Gradient {
    /// As metrics and receipts name it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Gradient::Exact => f.write_str("exact"),
            Gradient::Response => f.write_str("response"),
            Gradient::Last(tail) => write!(f, "last={tail}"),
        }
    }
}

/// A switch that may be left to the plan: `true`, `false` or `"auto"` in a file.
#[expect(missing_docs, reason = "two of the three are said by their names")]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum When {
    Always,
    Never,
    /// The plan decides, by the memory that there is.
    Auto,
}

impl Serialize for When {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            When::Always => serializer.serialize_bool(true),
            When::Never => serializer.serialize_bool(false),
            When::Auto => serializer.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for When {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WhenVisitor;
        impl Visitor<'_> for WhenVisitor {
            type Value = When;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false or \"auto\"")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<When, E> {
                Ok(if on { When::Always } else { When::Never })
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<When, E> {
                match word {
                    "auto" => Ok(When::Auto),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }
        }
        deserializer.deserialize_any(WhenVisitor)
    }
}
