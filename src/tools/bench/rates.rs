//! What the device can do, measured in the same call, and what a phase asks of it.

use std::time::Instant;

use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::model::shape::{Layer, Mix, Segment, Shape};
use crate::model::spec::Spec;
use crate::plan::delta_row;
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, as_dim, float};
use crate::tensor::attention::{self, Merged, Visible};
use crate::tensor::gpu;
use crate::tensor::kernels::{Heads, Kernel};

/// Repetitions of a measurement; the median counts.
const REPEATS: usize = 5;

/// Positions of the attention that is measured, at most: enough to fill a GPU, over in a moment.
const POSITIONS_MAX: u64 = 32_768;

/// Rates of the device, TFLOP/s. A multiplication and an addition are two operations; attention is causal, and its
/// backward counts 2.5 times its forward.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rates {
    /// What computes a rectangle of attention.
    pub kernel: Kernel,
    pub attention_forward: f64,
    pub attention_backward: f64,
    /// A matrix product of the shape of the model's feed-forward.
    pub matrix: f64,
    /// A copy from pinned host memory to the device, GB/s; 0 on a CPU.
    pub copy_in: f64,
    /// A copy back.
    pub copy_out: f64,
    /// A copy on the device, bytes read and written together, GB/s; 0 on a CPU.
    pub copy_device: f64,
    /// Microseconds of the host for each small operation that it asks of the device.
    pub launch_us: f64,
}

/// Elements of two bytes of the copies that are measured: 0.5 GiB.
const COPIED: i64 = 1 << 28;

/// Microseconds of the host to ask the device for a small sum.
fn launches(device: Device) -> Result<f64, Failure> {
    let x = Tensor::zeros([64], (Kind::Float, device));
    let many = || (0..LAUNCHES).for_each(|_| drop(&x + 1.0));
    many();
    gpu::synchronize(device)?;
    let start = Instant::now();
    many();
    let seconds = start.elapsed().as_secs_f64();
    gpu::synchronize(device)?;
    Ok(seconds * 1e6 / float(LAUNCHES))
}

const LAUNCHES: u64 = 500;

/// Rates of copies to the device, back, and from one place on it to another, GB/s.
fn copies(device: Device) -> Result<[f64; 3], Failure> {
    if device == Device::Cpu {
        return Ok([0.0; 3]);
    }
    let here = Tensor::zeros([COPIED], (Kind::BFloat16, device));
    let held = gpu::pinned_like(&here)?;
    let rate = |seconds: f64| 2.0 * float(u64::try_from(COPIED).unwrap_or(0)) / seconds / 1e9;
    let into = median(device, || drop(gpu::copy_in(&here, &held)))?;
    let back = median(device, || drop(gpu::copy_out(&held, &here)))?;
    let mut there = here.empty_like();
    let on_device = median(device, || there.copy_(&here))?;
    Ok([rate(into), rate(back), 2.0 * rate(on_device)])
}

/// Operations of one pass over a prompt.
#[derive(Clone, Copy, Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "names carry their unit")]
pub struct Work {
    /// Of all layers' matrix products with weights, forward, 10¹².
    pub linear_tera: f64,
    /// Of all layers' attention, forward, causal, 10¹².
    pub attention_tera: f64,
    /// Of all layers' gated delta rules, forward, 10¹².
    pub delta_tera: f64,
}

impl Work {
    /// Of a prompt on one rank; of experts those that a row goes to, of an index the scores of all pairs.
    pub(super) fn of(spec: &Spec, prompt: Tokens) -> Work {
        let shape = Shape::of(spec);
        let products = |layer: &Layer| layer.products(Segment::A) + layer.products(Segment::B) + float(layer.constant);
        let linear: f64 = shape.layers.iter().map(products).sum();
        let attention: f64 = shape.layers.iter().map(|layer| attention_products(&layer.mix, float(prompt.0))).sum();
        let delta: f64 = shape.layers.iter().map(|layer| delta_row(&layer.mix).0).sum();
        Work {
            linear_tera: 2.0 * linear * float(prompt.0) / 1e12,
            attention_tera: 2.0 * attention / 1e12,
            delta_tera: delta * float(prompt.0) / 1e12,
        }
    }

    /// All of it.
    pub(super) fn tera(&self) -> f64 {
        self.linear_tera + self.attention_tera + self.delta_tera
    }
}

/// Multiply-adds of a mixer over `rows` causal rows.
fn attention_products(mix: &Mix, rows: f64) -> f64 {
    let pairs = |most: f64| if rows <= most { rows * (rows + 1.0) / 2.0 } else { most * (rows - (most - 1.0) / 2.0) };
    match *mix {
        Mix::Grouped { query_heads, head_dim, window, .. } => {
            2.0 * float(query_heads * head_dim) * pairs(window.map_or(f64::INFINITY, float))
        }
        Mix::Latent { heads, latent, rotated, index } => {
            let scores = if index.owner { float(index.heads * index.dim) * pairs(f64::INFINITY) } else { 0.0 };
            float(heads * (2 * latent + rotated)) * pairs(float(index.top)) + scores
        }
        // Counted as `delta_tera`.
        Mix::Delta { .. } => 0.0,
    }
}

impl Rates {
    /// Measures for the shape of `spec`.
    pub(super) fn measure(spec: &Spec, kind: Kind, prompt: Tokens, device: Device) -> Result<Rates, Failure> {
        let heads =
            Heads { query: as_dim(spec.query_heads), kv: as_dim(spec.kv_heads), dim: as_dim(spec.head_dim), kind };
        let kernel = Kernel::choose(device, &heads, gpu::repeats());
        let rows = as_dim(if device == Device::Cpu { prompt.0.min(1024) } else { prompt.0.min(POSITIONS_MAX) });
        let draw = |shape: [i64; 3]| Tensor::randn(shape, (kind, device));
        let (q, k, v) = (
            draw([rows, heads.query, heads.dim]),
            draw([rows, heads.kv, heads.dim]),
            draw([rows, heads.kv, heads.dim]),
        );
        let scale = float(spec.head_dim).powf(-0.5);
        // The plain form has no causal kernel; it is measured on what it would be given.
        let visible = if kernel == Kernel::Plain { Visible::Band { offset: 0, window: rows } } else { Visible::Causal };
        let (q, k, v) = if kernel == Kernel::Plain {
            let few = rows.min(1024);
            (q.narrow(0, 0, few), k.narrow(0, 0, few), v.narrow(0, 0, few))
        } else {
            (q, k, v)
        };
        let seen = float(u64::try_from(q.size()[0]).unwrap_or(0));
        let operations = 4.0 * float(spec.query_heads * spec.head_dim) * seen * (seen + 1.0) / 2.0 / 1e12;
        let part = attention::forward(kernel, &q, &k, &v, visible, scale);
        let merged = Merged { q_thd: &q, out_thd: &part.out_thd, lse_th: &part.lse_th, dout_thd: &part.out_thd };
        let forward = median(device, || drop(attention::forward(kernel, &q, &k, &v, visible, scale)))?;
        let backward = median(device, || drop(attention::backward(kernel, &merged, &k, &v, visible, scale)))?;
        let (tokens, width, ffn) = (rows.min(8192), as_dim(spec.width), as_dim(spec.ffn_width));
        let (x, w) = (Tensor::randn([tokens, width], (kind, device)), Tensor::randn([ffn, width], (kind, device)));
        let product = median(device, || drop(x.linear(&w, None::<&Tensor>)))?;
        let of_product = 2.0 * float(spec.width * spec.ffn_width) * float(u64::try_from(tokens).unwrap_or(0)) / 1e12;
        let [copy_in, copy_out, copy_device] = copies(device)?;
        Ok(Rates {
            kernel,
            attention_forward: operations / forward,
            attention_backward: 2.5 * operations / backward,
            matrix: of_product / product,
            copy_in,
            copy_out,
            copy_device,
            launch_us: launches(device)?,
        })
    }
}

/// Median seconds of `work`, after one run that is not counted.
pub(super) fn median(device: Device, mut work: impl FnMut()) -> Result<f64, Failure> {
    let mut seconds = Vec::with_capacity(REPEATS);
    for repeat in 0..=REPEATS {
        gpu::synchronize(device)?;
        let start = Instant::now();
        work();
        gpu::synchronize(device)?;
        if repeat > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[REPEATS / 2])
}
