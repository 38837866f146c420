//! Rotary position embedding: inverse frequencies and gain (default, linear, llama3, YaRN), tables, and the half-split
//! rotation.
//!
//! The formulas are those of the published configs' readers: Llama 3.1's frequency blend, and YaRN (arXiv 2309.00071) with
//! its static attention factor. Frequencies are float64 here; the angle is formed in the accumulation dtype.

use std::f64::consts::PI;
use std::ops::Range;

use serde::Serialize;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::config_reader::{ConfigReader, Problem};
use super::planes::join_rows;
use crate::prompt::layout::Positions;
use crate::runtime::units::float;

pub use crate::tensor::fused::plain::rotate_half_split;

/// How inverse frequencies depend on the context length the model is stretched to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub enum Scaling {
    Default,
    /// All frequencies are divided by `factor`.
    #[expect(missing_docs, reason = "the name says everything")]
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones stay, with a linear blend between.
    Llama3 {
        /// Stretch of the low frequencies.
        factor: f64,
        /// Turns over the original context below which a frequency is low.
        low_turns: f64,
        /// Turns over the original context above which a frequency is high.
        high_turns: f64,
        /// Positions of the original context.
        original_positions: u64,
    },
    /// YaRN: a ramp over the frequency index between no division and division by `factor`.
    Yarn {
        /// Stretch of the low frequencies.
        factor: f64,
        /// Turns over the original context at which the ramp begins.
        fast_turns: f64,
        /// Turns over the original context at which the ramp ends.
        slow_turns: f64,
        /// Whether the ramp's ends are rounded outwards to whole indices.
        whole_edges: bool,
        /// Factor on cosine and sine.
        gain: f64,
        /// Positions of the original context.
        original_positions: u64,
    },
}

/// A rotary embedding as a checkpoint states it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading dimensions of a head that rotate (even).
    pub rotary_dim: u64,
    /// How the context is stretched.
    pub scaling: Scaling,
}

/// The keys of one rotary embedding in a published config.
#[derive(Clone, Copy, Debug)]
pub struct RopeKeys {
    /// Base of the frequencies, at the top level.
    theta_key: &'static str,
    theta_default: f64,
    /// Table within `rope_parameters`; `None`: `rope_parameters` is the table itself.
    layer_kind: Option<&'static str>,
    /// Whether `rope_scaling` belongs to it.
    scaled: bool,
    /// Share of a head's dimensions that rotates where no key says so; `None`: all, and no key may say otherwise.
    partial: Option<f64>,
}

impl RopeKeys {
    /// The one embedding of all layers.
    pub const ONE: RopeKeys =
        RopeKeys { theta_key: "rope_theta", theta_default: 10_000.0, layer_kind: None, scaled: true, partial: None };

    /// The one embedding of all layers, which rotates the first dimensions of a head, by default this share of them.
    #[must_use]
    pub fn partial(share: f64) -> RopeKeys {
        RopeKeys { partial: Some(share), ..RopeKeys::ONE }
    }

    /// The embedding of the layers without a window, where those with one have their own.
    #[must_use]
    pub fn full_layers(theta_default: f64) -> RopeKeys {
        RopeKeys { theta_default, layer_kind: Some("full_attention"), ..RopeKeys::ONE }
    }

    /// The embedding of the layers with a window, where they have their own.
    #[must_use]
    pub fn sliding_layers(theta_default: f64) -> RopeKeys {
        let (theta_key, layer_kind) = ("rope_local_base_freq", Some("sliding_attention"));
        RopeKeys { theta_key, theta_default, layer_kind, scaled: false, partial: None }
    }
}

impl RopeSpec {
    /// Positions that the stretched embedding was made for, where the config says so: the original context times the factor.
    #[must_use]
    pub fn stretched_positions(&self) -> Option<f64> {
        match self.scaling {
            Scaling::Default | Scaling::Linear { .. } => None,
            Scaling::Llama3 { factor, original_positions, .. } | Scaling::Yarn { factor, original_positions, .. } => {
                Some(factor * float(original_positions))
            }
        }
    }

    /// Reads both spellings of the published configs: `rope_parameters`, or a top-level base with `rope_scaling` (a
    /// non-empty one replaces the table in `rope_parameters`). `replacement` takes the place of the file's scaling; `null` or
    /// an empty table in it means none. `width` is that of a head, or of its part that may rotate. Problems are left in `keys`.
    #[must_use]
    pub fn read(
        keys: &mut ConfigReader<'_>,
        replacement: Option<&Value>,
        own: &RopeKeys,
        width: u64,
        positions: u64,
    ) -> RopeSpec {
        let no_keys = Map::new();
        let parameters = keys.value("rope_parameters");
        if let (Some(_), Some(Value::Object(table))) = (own.layer_kind, parameters)
            && !["full_attention", "sliding_attention"].iter().all(|kind| table.contains_key(*kind))
            && !table.is_empty()
        {
            let found = Value::Object(table.clone());
            keys.unsupported("rope_parameters", &found, "a table for each kind of layers in this family");
        }
        let (parameters_name, parameters) = match own.layer_kind {
            None => ("rope_parameters.".to_owned(), parameters),
            Some(kind) => (format!("rope_parameters.{kind}."), parameters.and_then(|table| table.get(kind))),
        };
        let scaling = keys
            .value("rope_scaling")
            .filter(|value| own.scaled && value.as_object().is_none_or(|table| !table.is_empty()));
        let (name, found) = match (replacement, scaling) {
            (Some(value), _) => ("[model] rope_scaling.", Some(value).filter(|value| !value.is_null())),
            (None, Some(value)) => ("rope_scaling.", Some(value)),
            (None, None) => (&*parameters_name, parameters),
        };
        let table = found.map_or(Some(&no_keys), Value::as_object).unwrap_or_else(|| {
            let key = name.trim_end_matches('.').to_owned();
            let found = found.map_or_else(String::new, Value::to_string);
            keys.problems.push(Problem::Value { key, found, wanted: "a table such as {\"rope_type\": \"default\"}" });
            &no_keys
        });
        let mut rope = ConfigReader::within(table, name);
        let replaced = match (replacement, parameters) {
            (Some(_), Some(Value::Object(file))) => Some(ConfigReader::within(file, &parameters_name)),
            _ => None,
        };
        let theta = outside(keys, replaced.as_ref(), (own.theta_key, "rope_theta"), own.theta_default);
        let theta = rope.positive("rope_theta", Some(theta));
        let rotary_dim = match own.partial {
            None => whole(keys, &mut rope, width),
            Some(share) => {
                let share = outside(keys, replaced.as_ref(), (PARTIAL, PARTIAL), share);
                leading(&mut rope, share, width)
            }
        };
        let scaling = read_scaling(&mut rope, rotary_dim, positions);
        keys.problems.append(&mut rope.problems);
        RopeSpec { theta, rotary_dim, scaling }
    }
}

/// The key of the share of dimensions that rotates.
const PARTIAL: &str = "partial_rotary_factor";

/// A number that the embedding's own table may lack: the first of `names` at the top level, else the second in the table that
/// was `replaced`.
fn outside(keys: &mut ConfigReader<'_>, replaced: Option<&ConfigReader<'_>>, names: (&str, &str), default: f64) -> f64 {
    let number = keys.positive(names.0, Some(default));
    match replaced {
        Some(table) if keys.value(names.0).is_none() => {
            table.value(names.1).and_then(Value::as_f64).filter(|x| x.is_finite() && *x > 0.0).unwrap_or(number)
        }
        _ => number,
    }
}

/// All dimensions rotate; a key that says otherwise is refused.
fn whole(keys: &ConfigReader<'_>, rope: &mut ConfigReader<'_>, width: u64) -> u64 {
    for partial in [rope.value(PARTIAL), keys.value(PARTIAL)].into_iter().flatten() {
        if partial.as_f64() != Some(1.0) {
            rope.unsupported(PARTIAL, partial, "1.0 for this family: every dimension rotates");
        }
    }
    width
}

/// The whole number of leading dimensions that a share of `width` is, rounded down; it must be even and not 0.
fn leading(rope: &mut ConfigReader<'_>, default: f64, width: u64) -> u64 {
    let share = rope.positive(PARTIAL, Some(default));
    let product = float(width) * share;
    let rotary_dim = (0..=width).rev().find(|&dims| float(dims) <= product).unwrap_or(0);
    if share > 1.0 || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        let wanted = "at most 1, and such that an even number of a head's dimensions rotates";
        rope.refuse(PARTIAL, &Value::from(share), wanted);
    }
    rotary_dim
}

fn read_scaling(rope: &mut ConfigReader<'_>, rotary_dim: u64, positions: u64) -> Scaling {
    const SUPPORTED: &str = "\"default\", \"linear\", \"llama3\" and \"yarn\"";
    if let Some((layer_kind, inner)) =
        ["full_attention", "sliding_attention"].into_iter().find_map(|kind| rope.value(kind).map(|value| (kind, value)))
    {
        rope.unsupported(layer_kind, inner, "one rotary embedding for all layers");
    }
    let type_key = if rope.value("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = rope.word(type_key, "default");
    let original_positions = rope.count("original_max_position_embeddings", Some(positions));
    match kind {
        "default" => Scaling::Default,
        "linear" => Scaling::Linear { factor: rope.positive("factor", None) },
        "llama3" => {
            let factor = rope.positive("factor", None);
            let low_turns = rope.positive("low_freq_factor", None);
            let high_turns = rope.positive("high_freq_factor", None);
            if high_turns <= low_turns && rope.problems.is_empty() {
                let found = Value::from(high_turns);
                rope.refuse("high_freq_factor", &found, "above `low_freq_factor`");
            }
            Scaling::Llama3 { factor, low_turns, high_turns, original_positions }
        }
        "yarn" => {
            let factor = rope.positive("factor", Some(float(positions) / float(original_positions)));
            let fast_turns = rope.positive("beta_fast", Some(32.0));
            let slow_turns = rope.positive("beta_slow", Some(1.0));
            let whole_edges = rope.flag("truncate", true);
            let gain = yarn_gain(rope, factor);
            if rotary_dim < 4 {
                let found = Value::from(rotary_dim);
                rope.refuse("rope_type", &found, "used with at least 4 rotating dimensions");
            }
            Scaling::Yarn { factor, fast_turns, slow_turns, whole_edges, gain, original_positions }
        }
        other => {
            rope.unsupported(type_key, &Value::from(other), SUPPORTED);
            Scaling::Default
        }
    }
}

/// YaRN's factor on cosine and sine: stated, or the ratio of two mscale terms, or the one of mscale 1.
fn yarn_gain(rope: &mut ConfigReader<'_>, factor: f64) -> f64 {
    let term = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
    if rope.value("attention_factor").is_some() {
        return rope.positive("attention_factor", None);
    }
    let stated = [rope.number("mscale"), rope.number("mscale_all_dim")];
    match stated.map(|scale| scale.filter(|s| *s != 0.0)) {
        [Some(scale), Some(all_dims)] => term(scale) / term(all_dims),
        _ => term(1.0),
    }
}

/// The factor that a stretched embedding puts on attention scores beside that on cosine and sine: (0.1 · `mscale_all_dim` · ln
/// factor + 1)², in families that read `mscale_all_dim` so; `None` where there is none.
#[must_use]
pub fn yarn_score_gain(keys: &ConfigReader<'_>, replacement: Option<&Value>, rope: &RopeSpec) -> Option<f64> {
    let scaling = keys.value("rope_scaling").filter(|value| value.as_object().is_some_and(|table| !table.is_empty()));
    let table = replacement.or(scaling).or_else(|| keys.value("rope_parameters"))?.as_object()?;
    let all_dims = table.get("mscale_all_dim").and_then(Value::as_f64).filter(|scale| *scale != 0.0)?;
    let factor = match rope.scaling {
        Scaling::Default => return None,
        Scaling::Linear { factor } | Scaling::Llama3 { factor, .. } | Scaling::Yarn { factor, .. } => factor,
    };
    let factor = Some(factor).filter(|factor| *factor > 1.0)?;
    Some((0.1 * all_dims * factor.ln() + 1.0).powi(2))
}

/// Inverse frequencies and gain, ready to make tables.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians per position of each pair of dimensions; `rotary_dim / 2` of them.
    pub inverse_frequencies: Vec<f64>,
    /// Factor on cosine and sine (1 but for YaRN), so scores grow with its square.
    pub gain: f64,
    /// What both follow from.
    spec: RopeSpec,
}

impl Rope {
    /// The frequencies that `spec` describes.
    #[must_use]
    pub fn new(spec: &RopeSpec) -> Rope {
        let width = float(spec.rotary_dim);
        let pairs = (0..spec.rotary_dim / 2).map(|j| (float(j), spec.theta.powf(-2.0 * float(j) / width)));
        let (inverse_frequencies, gain) = match spec.scaling {
            Scaling::Default => (pairs.map(|(_, inv)| inv).collect(), 1.0),
            Scaling::Linear { factor } => (pairs.map(|(_, inv)| inv / factor).collect(), 1.0),
            Scaling::Llama3 { factor, low_turns, high_turns, original_positions } => {
                let blend = |inv: f64| {
                    let turns = float(original_positions) * inv / (2.0 * PI);
                    let keep = ((turns - low_turns) / (high_turns - low_turns)).clamp(0.0, 1.0);
                    inv * (keep + (1.0 - keep) / factor)
                };
                (pairs.map(|(_, inv)| blend(inv)).collect(), 1.0)
            }
            Scaling::Yarn { factor, fast_turns, slow_turns, whole_edges, gain, original_positions } => {
                let (start, length) = yarn_ramp(spec, original_positions, [fast_turns, slow_turns], whole_edges);
                let stretch = |(j, inv): (f64, f64)| {
                    let ramp = ((j - start) / length).clamp(0.0, 1.0);
                    inv * (1.0 - ramp) + inv / factor * ramp
                };
                (pairs.map(stretch).collect(), gain)
            }
        };
        Rope { inverse_frequencies, gain, spec: *spec }
    }

    /// The inverse frequencies, [`rotary_dim` / 2], in dtype `acc` (the accumulation dtype), for [`Rope::tables`]: those of
    /// [`Rope::inverse_frequencies`] in float64, those of [`single_precision`] in float32. Made once: bringing it to a GPU
    /// for every table would make the host wait for the device.
    ///
    /// # Panics
    /// When `acc` is coarser than float32: an angle in half precision loses whole turns.
    pub fn frequencies(&self, acc: Kind, device: Device) -> Tensor {
        let frequencies_d = match acc {
            Kind::Float => single_precision(&self.spec),
            Kind::Double => Tensor::from_slice(&self.inverse_frequencies),
            other => panic!("angles are formed in float32 or float64, not {other:?}"),
        };
        frequencies_d.to_device(device)
    }

    /// Cosine and sine, each [t, `rotary_dim` / 2] in dtype `out`, of rows at `positions`.
    ///
    /// The angle is position times inverse frequency in the dtype of `frequencies_d`, where the gain is applied too.
    pub fn tables(&self, positions: &Positions, frequencies_d: &Tensor, out: Kind) -> (Tensor, Tensor) {
        let (acc, device) = (frequencies_d.kind(), frequencies_d.device());
        let run_t = |run: &Range<i64>| Tensor::arange_start(run.start, run.end, (Kind::Int64, device));
        let position_t = join_rows(positions.runs().iter().map(run_t).collect()).to_kind(acc);
        let angle_td = position_t.unsqueeze(1) * frequencies_d.unsqueeze(0);
        ((angle_td.cos() * self.gain).to_kind(out), (angle_td.sin() * self.gain).to_kind(out))
    }
}

/// First index and length of YaRN's ramp over the frequency index. `turns` are those at which it begins and ends.
fn yarn_ramp(spec: &RopeSpec, original_positions: u64, turns: [f64; 2], whole_edges: bool) -> (f64, f64) {
    let width = float(spec.rotary_dim);
    let edge = |turns: f64| width * (float(original_positions) / (2.0 * PI * turns)).ln() / (2.0 * spec.theta.ln());
    let [start, stop] = turns.map(edge);
    let (start, stop) = if whole_edges { (start.floor(), stop.ceil()) } else { (start, stop) };
    let (start, stop) = (start.max(0.0), stop.min(width - 1.0));
    (start, if stop - start == 0.0 { 0.001 } else { stop - start })
}

/// The inverse frequencies in float32, [`rotary_dim` / 2], with every operation in float32 and in the order of the published
/// models' own code (transformers, `modeling_rope_utils`): their weights were trained with these numbers. Rounding the float64
/// values once gives other bits for many pairs: at base 1e6 and width 128 for 25 of 64, and near position 2,000,000 the angle
/// then differs by up to 0.125 radians.
fn single_precision(spec: &RopeSpec) -> Tensor {
    let pairs = i64::try_from(spec.rotary_dim / 2).unwrap_or(0);
    let on_cpu = (Kind::Float, Device::Cpu);
    let exponent_d = Tensor::arange_start_step(0, 2 * pairs, 2, on_cpu) / float(spec.rotary_dim);
    let power_d = Tensor::pow_scalar(spec.theta, &exponent_d);
    let inverse_d = power_d.reciprocal();
    match spec.scaling {
        Scaling::Default => inverse_d,
        Scaling::Linear { factor } => inverse_d / factor,
        Scaling::Llama3 { factor, low_turns, high_turns, original_positions } => {
            let original = float(original_positions);
            let wavelength_d = inverse_d.reciprocal() * (2.0 * PI);
            let is_long = wavelength_d.gt(original / low_turns);
            let is_short = wavelength_d.lt(original / high_turns);
            let stretched_d = (&inverse_d / factor).where_self(&is_long, &inverse_d);
            let keep_d = (wavelength_d.reciprocal() * original - low_turns) / (high_turns - low_turns);
            let blended_d = (1.0 - &keep_d) * &stretched_d / factor + &keep_d * &stretched_d;
            stretched_d.where_self(&is_long.logical_or(&is_short), &blended_d)
        }
        Scaling::Yarn { factor, fast_turns, slow_turns, whole_edges, original_positions, .. } => {
            let (start, length) = yarn_ramp(spec, original_positions, [fast_turns, slow_turns], whole_edges);
            let ramp_d = ((Tensor::arange(pairs, on_cpu) - start) / length).clamp(0.0, 1.0);
            let extrapolated_d = 1.0 - ramp_d;
            let interpolated_d = (power_d * factor).reciprocal();
            interpolated_d * (1.0 - &extrapolated_d) + inverse_d * extrapolated_d
        }
    }
}

/// Rotates pairs (2j, 2j + 1) of the first 2n dimensions of each head; the rest pass unchanged. The first of all pairs come
/// first in the result, then the second of all pairs: products of two rows that are rotated so do not depend on the order.
///
/// Shapes as in [`rotate_half_split`].
///
/// # Panics
/// When `x_thd` has not three dimensions.
pub fn rotate_interleaved(x_thd: &Tensor, cos_tn: &Tensor, sin_tn: &Tensor) -> Tensor {
    let (_, _, head_dim) = x_thd.size3().expect("heads are laid out as [t, heads, d]");
    let pairs = *cos_tn.size().last().expect("tables are laid out as [t, n]");
    let (cos, sin) = (cos_tn.unsqueeze(1), sin_tn.unsqueeze(1));
    let rotated = x_thd.narrow(2, 0, 2 * pairs);
    let (first, second) = (rotated.slice(2, 0, None, 2), rotated.slice(2, 1, None, 2));
    let mut parts = vec![&first * &cos - &second * &sin, &second * &cos + &first * &sin];
    if head_dim > 2 * pairs {
        parts.push(x_thd.narrow(2, 2 * pairs, head_dim - 2 * pairs));
    }
    Tensor::cat(&parts, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(config: &Value, replacement: Option<&Value>) -> (RopeSpec, Vec<Problem>) {
        let mut keys = ConfigReader::of_text_model(config.as_object().unwrap());
        let rotary_dim = config["head_dim"].as_u64().unwrap();
        let positions = config["max_position_embeddings"].as_u64().unwrap();
        (RopeSpec::read(&mut keys, replacement, &RopeKeys::ONE, rotary_dim, positions), keys.problems)
    }

    fn assert_close(found: &[f64], wanted: &[f64]) {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() <= 1e-14 * wanted.abs(), "{found} is not {wanted}");
        }
    }

    /// The expected numbers below are those of the published implementation (transformers 5.24.0), run in float64.
    fn check(config: &Value, frequencies: &[f64], gain: f64) {
        let (spec, problems) = read(config, None);
        assert_eq!(problems, []);
        let rope = Rope::new(&spec);
        assert_close(&rope.inverse_frequencies, frequencies);
        assert_close(&[rope.gain], &[gain]);
    }

    #[test]
    fn llama3_frequencies_are_the_published_ones() {
        let config = serde_json::json!({"head_dim": 16, "max_position_embeddings": 512, "rope_parameters": {
            "rope_theta": 500_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}});
        let frequencies = [
            1.0,
            0.079_403_009_179_208_2,
            0.004_700_753_866_357_992,
            0.000_911_583_092_152_138_6,
            0.000_176_776_695_296_636_88,
            3.428_102_195_952_591e-5,
            6.647_869_871_181_236e-6,
            1.289_173_172_151_557_4e-6,
        ];
        check(&config, &frequencies, 1.0);
    }

    #[test]
    fn yarn_frequencies_and_gain_are_the_published_ones() {
        let config = serde_json::json!({"head_dim": 16, "max_position_embeddings": 40_960, "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}});
        let frequencies = [
            1.0,
            0.177_827_941_003_892_26,
            0.031_622_776_601_683_79,
            0.004_217_559_938_927_618,
            0.0005,
            4.445_698_525_097_307e-5,
            7.905_694_150_420_949e-6,
            1.405_853_312_975_872_8e-6,
        ];
        check(&config, &frequencies, 1.138_629_436_111_989);
    }

    #[test]
    fn yarn_with_untruncated_edges_and_two_mscales_is_the_published_one() {
        let config = serde_json::json!({"head_dim": 12, "max_position_embeddings": 1024, "rope_parameters": {
            "rope_theta": 10_000.0, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64,
            "beta_fast": 16, "beta_slow": 2, "truncate": false, "mscale": 0.7, "mscale_all_dim": 1.2}});
        let frequencies = [
            1.0,
            0.024_979_733_366_231_743,
            0.002_900_993_021_007_987_6,
            0.000_625,
            0.000_134_652_168_126_992_77,
            2.900_993_021_007_985_5e-5,
        ];
        check(&config, &frequencies, 0.895_979_343_709_375);
    }

    // Bits of the published implementation's own frequencies (transformers 5.24.0, torch 2.15.0, on a CPU).
    const DEFAULT: [u32; 64] = [
        0x3f80_0000,
        0x3f4e_4bad,
        0x3f26_3de0,
        0x3f05_f6ef,
        0x3ed7_e89b,
        0x3ead_fcff,
        0x3e8c_3504,
        0x3e61_f835,
        0x3e36_1887,
        0x3e12_bd91,
        0x3dec_7fd6,
        0x3dbe_94c6,
        0x3d99_940d,
        0x3d77_8513,
        0x3d47_763f,
        0x3d20_bc1d,
        0x3d01_86e3,
        0x3cd0_c1a8,
        0x3ca8_398b,
        0x3c87_9008,
        0x3c5a_7bf2,
        0x3c30_1052,
        0x3c0d_e12d,
        0x3be4_aa46,
        0x3bb8_449c,
        0x3b94_7dae,
        0x3b6f_520e,
        0x3b40_dac5,
        0x3b1b_690d,
        0x3afa_78f0,
        0x3ac9_d75c,
        0x3aa2_a6f7,
        0x3a83_126f,
        0x3a53_3f28,
        0x3a2a_3b44,
        0x3a09_2e02,
        0x39dd_1725,
        0x39b2_29fb,
        0x398f_9272,
        0x3967_6492,
        0x393a_7753,
        0x3916_4324,
        0x38f2_2ce2,
        0x38c3_27b5,
        0x389d_43a4,
        0x387d_75d4,
        0x384c_3fbe,
        0x3824_97ab,
        0x3804_a2b2,
        0x37d5_c441,
        0x37ac_431d,
        0x378a_d0ed,
        0x375f_ba4f,
        0x3734_4a0e,
        0x3711_48e3,
        0x36ea_2732,
        0x36bc_b0c1,
        0x3698_0e02,
        0x3675_1070,
        0x3645_7bab,
        0x361f_23e4,
        0x3600_3dec,
        0x35ce_af79,
        0x35a6_8e4c,
    ];

    const LLAMA3: [u32; 32] = [
        0x3f80_0000,
        0x3f29_e1c6,
        0x3ee1_77bc,
        0x3e95_9ee3,
        0x3e46_93b0,
        0x3e03_c6a0,
        0x3dae_e4ad,
        0x3d68_1e67,
        0x3d1a_08c8,
        0x3ccc_6f49,
        0x3c87_a9c3,
        0x3c34_0d6d,
        0x3bee_f74f,
        0x3b9e_9402,
        0x3b52_7720,
        0x3ab3_d11d,
        0x3a09_95d2,
        0x393b_2dd2,
        0x38a3_418d,
        0x3858_ac81,
        0x380f_c8f8,
        0x37be_d4f4,
        0x377d_45c3,
        0x3728_126b,
        0x36df_10c4,
        0x3694_06cb,
        0x3644_7610,
        0x3602_5f34,
        0x35ad_07a7,
        0x3565_a54d,
        0x3518_64a7,
        0x34ca_41b0,
    ];

    const YARN: [u32; 32] = [
        0x3f80_0000,
        0x3f26_3de0,
        0x3ed7_e89b,
        0x3e8c_3504,
        0x3e36_1887,
        0x3dec_7fd6,
        0x3d99_940d,
        0x3d47_763f,
        0x3d01_86e3,
        0x3ca8_398b,
        0x3c5a_7bf2,
        0x3c0d_e12d,
        0x3ba8_e98f,
        0x3b47_6f0b,
        0x3ae9_1d93,
        0x3a86_8f93,
        0x3a18_ead7,
        0x39aa_3b44,
        0x3938_3df4,
        0x38bf_6ded,
        0x383a_7753,
        0x37f2_2ce2,
        0x379d_43a4,
        0x374c_3fbe,
        0x3704_a2b2,
        0x36ac_431d,
        0x365f_ba4f,
        0x3611_48e3,
        0x35bc_b0c1,
        0x3575_1070,
        0x351f_23e4,
        0x34ce_af79,
    ];

    const LINEAR: [u32; 32] = [
        0x3eaa_aaab,
        0x3e7f_f6c1,
        0x3e3f_f223,
        0x3e0f_f067,
        0x3dd7_e0cf,
        0x3da1_e2c2,
        0x3d72_cb5f,
        0x3d36_11f4,
        0x3d08_8889,
        0x3ccc_c567,
        0x3c99_8e81,
        0x3c66_4d71,
        0x3c2c_b3d9,
        0x3c01_8235,
        0x3bc2_3c4c,
        0x3b91_a7f7,
        0x3b5a_740d,
        0x3b23_d120,
        0x3af5_b0d0,
        0x3ab8_3df4,
        0x3a8a_297b,
        0x3a4f_36bc,
        0x3a1b_6370,
        0x39e9_0cbd,
        0x39ae_c33f,
        0x3983_0db3,
        0x3944_8d73,
        0x3913_64c3,
        0x38dd_0f2b,
        0x38a5_c563,
        0x3878_9f19,
        0x383a_7098,
    ];

    #[test]
    fn float32_frequencies_are_the_published_ones_operation_by_operation() {
        let spec = |theta: f64, rotary_dim: u64, scaling: Scaling| RopeSpec { theta, rotary_dim, scaling };
        let llama3 = Scaling::Llama3 { factor: 8.0, low_turns: 1.0, high_turns: 4.0, original_positions: 8192 };
        let yarn = Scaling::Yarn {
            factor: 4.0,
            fast_turns: 32.0,
            slow_turns: 1.0,
            whole_edges: true,
            gain: 1.0,
            original_positions: 32_768,
        };
        let rows: [(RopeSpec, &[u32]); 4] = [
            (spec(1e6, 128, Scaling::Default), &DEFAULT),
            (spec(5e5, 64, llama3), &LLAMA3),
            (spec(1e6, 64, yarn), &YARN),
            (spec(1e4, 64, Scaling::Linear { factor: 3.0 }), &LINEAR),
        ];
        for (spec, published) in rows {
            let rope = Rope::new(&spec);
            let found: Vec<f32> = Vec::try_from(rope.frequencies(Kind::Float, Device::Cpu)).unwrap();
            let differ =
                |found: &[f32]| found.iter().zip(published).filter(|(one, other)| one.to_bits() != **other).count();
            // Another machine's power function may round one or two of them to the other side.
            assert!(found.len() == published.len() && differ(&found) <= 2, "{spec:?}: {} differ", differ(&found));
            #[expect(clippy::cast_possible_truncation, reason = "what is compared is this rounding")]
            let rounded: Vec<f32> = rope.inverse_frequencies.iter().map(|&inverse| inverse as f32).collect();
            assert!(differ(&rounded) > 2, "{spec:?}: rounding once gives the same");
            let wide: Vec<f64> = Vec::try_from(rope.frequencies(Kind::Double, Device::Cpu)).unwrap();
            assert_eq!(wide, rope.inverse_frequencies);
        }
    }

    #[test]
    fn a_replacement_keeps_the_files_base_and_null_removes_the_scaling() {
        let config = serde_json::json!({"head_dim": 16, "max_position_embeddings": 1000,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}});
        let yarn = serde_json::json!({"rope_type": "yarn", "original_max_position_embeddings": 250});
        let (spec, problems) = read(&config, Some(&yarn));
        assert_eq!(problems, []);
        assert_close(&[spec.theta], &[1e6]);
        assert!(matches!(spec.scaling, Scaling::Yarn { factor: 4.0, original_positions: 250, .. }), "{spec:?}");
        let scaled = serde_json::json!({"head_dim": 16, "max_position_embeddings": 1000, "rope_theta": 7.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0}});
        let (spec, problems) = read(&scaled, Some(&Value::Null));
        assert_eq!((problems, spec.scaling), (vec![], Scaling::Default));
        assert_close(&[spec.theta], &[7.0]);
    }

    #[test]
    fn rope_types_that_are_not_computed_are_refused_by_name() {
        for kind in ["dynamic", "longrope", "mrope"] {
            let config = serde_json::json!({"head_dim": 16, "max_position_embeddings": 1000,
                "rope_scaling": {"type": kind, "factor": 2.0}});
            let (_, problems) = read(&config, None);
            let [problem] = &problems[..] else { panic!("{problems:?}") };
            let words = problem.to_string();
            assert!(words.contains("`rope_scaling.type`") && words.contains(kind) && words.contains("yarn"), "{words}");
        }
    }

    #[test]
    fn incomplete_scaling_names_every_missing_key() {
        let config = serde_json::json!({"head_dim": 16, "max_position_embeddings": 1000,
            "rope_scaling": {"rope_type": "llama3", "factor": -2.0}, "partial_rotary_factor": 0.5});
        let (_, problems) = read(&config, None);
        let words: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(words.len(), 4, "{words:?}");
        let all = words.join("\n");
        for key in ["partial_rotary_factor", "`rope_scaling.factor` is -2.0", "low_freq_factor", "high_freq_factor"] {
            assert!(all.contains(key), "{all}");
        }
    }

    #[test]
    fn tables_hold_the_angles_of_their_own_positions() {
        let spec = RopeSpec { theta: 100.0, rotary_dim: 4, scaling: Scaling::Default };
        let rope = Rope { gain: 1.5, ..Rope::new(&spec) };
        let frequencies = |acc| rope.frequencies(acc, Device::Cpu);
        let (cos_td, sin_td) = rope.tables(&(2_000_003..2_000_005).into(), &frequencies(Kind::Double), Kind::Double);
        assert_eq!(cos_td.size(), [2, 2]);
        for (row, position) in [2_000_003.0_f64, 2_000_004.0].into_iter().enumerate() {
            for (pair, inverse) in [1.0, 0.1].into_iter().enumerate() {
                let at = [i64::try_from(row).unwrap(), i64::try_from(pair).unwrap()];
                let angle: f64 = position * inverse;
                assert!((cos_td.double_value(&at) - 1.5 * angle.cos()).abs() < 1e-9);
                assert!((sin_td.double_value(&at) - 1.5 * angle.sin()).abs() < 1e-9);
            }
        }
        let (cos_td, _) = rope.tables(&(0..3).into(), &frequencies(Kind::Float), Kind::BFloat16);
        assert_eq!((cos_td.kind(), cos_td.size()), (Kind::BFloat16, vec![3, 2]));
        assert_eq!(rope.tables(&(5..5).into(), &frequencies(Kind::Float), Kind::Float).0.size(), [0, 2]);
    }

    #[test]
    fn rotation_turns_each_pair_and_leaves_the_rest() {
        let x_thd = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0, 9.0, -1.0, 0.5, 2.0, 1.0, 7.0]).view([1, 2, 5]);
        let angles = [0.3_f64, -1.1];
        let (cos, sin) = (angles.map(f64::cos), angles.map(f64::sin));
        let turned =
            rotate_half_split(&x_thd, &Tensor::from_slice(&cos).view([1, 2]), &Tensor::from_slice(&sin).view([1, 2]));
        let turned: Vec<f64> = Vec::try_from(turned.view([-1])).unwrap();
        let x: Vec<f64> = Vec::try_from(x_thd.view([-1])).unwrap();
        for head in [0, 5] {
            for pair in 0..2 {
                // The same rotation as a product of complex numbers in polar form.
                let (a, b) = (x[head + pair], x[head + pair + 2]);
                let (radius, angle) = (a.hypot(b), b.atan2(a) + angles[pair]);
                assert!((turned[head + pair] - radius * angle.cos()).abs() < 1e-14);
                assert!((turned[head + pair + 2] - radius * angle.sin()).abs() < 1e-14);
            }
            assert!((turned[head + 4] - x[head + 4]).abs() < f64::EPSILON);
        }
    }
}
