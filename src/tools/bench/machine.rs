//! The machine's rates for a plan: updates on the first layers at two prompts, sampled tokens, and products, attention and
//! copies one by one.

use tch::{Device, Kind, Tensor};

use super::rates::median;
use super::{Bench, COMMIT, Error, Run, kernels};
use crate::config::Gradient;
use crate::model::shape::{Layer, Mix, Shape};
use crate::plan::Amount;
use crate::plan::measured::{
    AttentionRate, Copies, DrawPoint, MeasuredGradient, Measurements, ProductRate, UpdatePoint, VERSION, layer_kinds,
    layer_parameters,
};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, as_dim, float, from_index};
use crate::tensor::attention::{self, Merged, Visible};
use crate::tensor::gpu;
use crate::tensor::kernels::{Heads, Kernel};
use crate::tools::doctor::gpu_model;
use crate::tools::parity::dtype_name;

/// Longest prompt of the updates and tokens that are measured. The last layers of a model are not run, but its pages are made.
const PROMPT_MAX: Tokens = Tokens(1 << 20);

/// The longer of the two prompts is so many times the shorter one, where a micro-block allows; else so few.
const PROMPTS_APART: [u64; 2] = [4, 2];

/// Most runs of an update; the median of each phase counts.
const REPEATS: usize = 3;

/// Seconds of runs after which an update is not run again.
const SECONDS_ENOUGH: f64 = 3.0;

/// Tokens of a measured draw.
const TOKENS: Tokens = Tokens(160);

/// Rows of few products, and queries of a short rectangle.
const FEW_ROWS: u64 = 1024;

/// Queries and keys of a large rectangle.
const LARGE: u64 = 32_768;

impl Bench<'_> {
    /// Measures everything, the quickest first.
    pub(super) fn measured(&self) -> Result<Measurements, Failure> {
        let options = self.options;
        if let Some(&gradient) = options.gradients.iter().find(|gradient| matches!(gradient, Gradient::Last(_))) {
            return Err(Error::RatesGradient { gradient }.into());
        }
        let shape = Shape::of(&self.spec);
        let exact = options.gradients.contains(&Gradient::Exact);
        let prompts = prompts(options.prompt, options.page_size, options.micro_block, exact)?;
        let longest = prompts[1];
        let answers = options.groups.iter().copied().max().unwrap_or(1);
        let mut updates = Vec::new();
        for &gradient in &options.gradients {
            updates.extend(self.updates(&shape, prompts, gradient, answers)?);
        }
        let mut draws = Vec::new();
        for prompt in prompts {
            let drawn = self.drawn(prompt, answers, TOKENS)?;
            draws.push(DrawPoint {
                drawn_by: drawn.kernel.name().to_owned(),
                layers: from_index(drawn.layers),
                prompt,
                answers,
                token_seconds: drawn.token_ms_of_all / 1e3,
                token_bytes: drawn.token_bytes,
            });
        }
        Ok(Measurements {
            version: VERSION,
            device: device_name(options.device),
            commit: COMMIT.to_owned(),
            dtype: dtype_name(options.kind).to_owned(),
            layers: layer_kinds(&shape.layers),
            layer_parameters: layer_parameters(&shape.layers),
            micro_block: options.micro_block,
            answer: options.answer,
            attention_kept: options.keeping.attention,
            copies: Copies {
                host_in: self.rates.copy_in,
                host_out: self.rates.copy_out,
                device: self.rates.copy_device,
            },
            launch_us: self.rates.launch_us,
            products: self.products(&shape)?,
            attention: self.attention(&shape, longest)?,
            updates,
            draws,
        })
    }

    /// Updates on few and on more of the first layers, at both prompts: launches of many answers hide less behind the tail's work
    /// than those of few, so the group is the plan's.
    fn updates(
        &self,
        shape: &Shape,
        prompts: [Tokens; 2],
        gradient: Gradient,
        answers: u64,
    ) -> Result<Vec<UpdatePoint>, Failure> {
        let gradient_of = match gradient {
            Gradient::Exact => MeasuredGradient::Exact,
            Gradient::Response | Gradient::Last(_) => MeasuredGradient::Response,
        };
        let mut points = Vec::new();
        for layers in depths(kernels::warm_layers(&self.spec), self.spec.layers) {
            let decoder = self.spec.first_layers(layers).decoder(self.weights.clone(), self.options.kind);
            for prompt in prompts {
                // Kernels are chosen for these sizes, and host memory is pinned.
                self.paged(&*decoder, self.all_ranks(), prompt, answers, gradient)?;
                let mut runs: Vec<Run> = Vec::new();
                while runs.len() < REPEATS && runs.iter().map(|run| run.total_seconds).sum::<f64>() < SECONDS_ENOUGH {
                    runs.push(self.paged(&*decoder, self.all_ranks(), prompt, answers, gradient)?);
                }
                let of = |seconds: fn(&Run) -> f64| middle(runs.iter().map(seconds).collect());
                let first = &shape.layers[..layers];
                let rows = Tokens(self.options.answer.0.saturating_sub(1));
                points.push(UpdatePoint {
                    gradient: gradient_of,
                    layers: from_index(layers),
                    prompt,
                    of_prompt: Amount::of(first, Tokens(0), prompt),
                    of_last_row: Amount::of(first, Tokens(prompt.0 - 1), Tokens(1)),
                    of_answer: Amount::of(first, prompt, rows),
                    capture_seconds: of(|run| run.capture_seconds),
                    score_seconds: of(|run| run.score_seconds) / float(answers),
                    answer_seconds: of(|run| run.answers_seconds) / float(answers),
                    tail_seconds: of(|run| run.tail_seconds),
                });
            }
        }
        Ok(points)
    }

    /// Products with every size of weight that the layers have, with the rows of a micro-block and with few.
    fn products(&self, shape: &Shape) -> Result<Vec<ProductRate>, Failure> {
        let mut sizes: Vec<(u64, u64)> = Vec::new();
        for projection in shape.layers.iter().flat_map(|layer| &layer.projections) {
            if !sizes.contains(&(projection.inputs, projection.outputs)) {
                sizes.push((projection.inputs, projection.outputs));
            }
        }
        let mut rates = Vec::new();
        for rows in [self.options.micro_block.0, FEW_ROWS.min(self.options.micro_block.0)] {
            for &(inputs, outputs) in &sizes {
                let draw = |rows: u64, columns: u64| self.random([as_dim(rows), as_dim(columns)]);
                let (x, w) = (draw(rows, inputs), draw(outputs, inputs));
                let seconds = median(self.options.device, || drop(x.linear(&w, None::<&Tensor>)))?;
                let tera = 2.0 * float(rows) * float(inputs) * float(outputs) / seconds / 1e12;
                rates.push(ProductRate { rows, inputs, outputs, tera });
            }
        }
        Ok(rates)
    }

    /// Attention kernels on a causal square, on the rectangle beside it, and on few queries over the keys of a prompt as they
    /// are cut; of every head width, without windows.
    fn attention(&self, shape: &Shape, prompt: Tokens) -> Result<Vec<AttentionRate>, Failure> {
        let mut all: Vec<&Layer> = Vec::new();
        for layer in &shape.layers {
            let is_new = !all.iter().any(|other| other.mix == layer.mix);
            if matches!(layer.mix, Mix::Grouped { window: None, .. }) && is_new {
                all.push(layer);
            }
        }
        let large = if self.options.device == Device::Cpu { FEW_ROWS } else { LARGE }.min(prompt.0);
        let mut rates = Vec::new();
        for layer in all {
            for (queries, keys, causal) in
                [(large, large, true), (large, large, false), (FEW_ROWS.min(prompt.0), large, false)]
            {
                rates.extend(self.rectangle(&layer.mix, queries, keys, causal)?);
            }
        }
        Ok(rates)
    }

    /// One rectangle of attention, forward and backward; nothing where no fused kernel computes it.
    fn rectangle(&self, mix: &Mix, queries: u64, keys: u64, causal: bool) -> Result<Option<AttentionRate>, Failure> {
        let Mix::Grouped { query_heads, kv_heads, head_dim, .. } = *mix else { return Ok(None) };
        let (device, kind) = (self.options.device, self.options.kind);
        let heads = Heads { query: as_dim(query_heads), kv: as_dim(kv_heads), dim: as_dim(head_dim), kind };
        let kernel = Kernel::choose(device, &heads, gpu::repeats());
        if kernel == Kernel::Plain {
            return Ok(None);
        }
        let (t, s) = (as_dim(queries), as_dim(keys));
        let q_thd = self.random([t, heads.query, heads.dim]);
        let (k_sgd, v_sgd) = (self.random([s, heads.kv, heads.dim]), self.random([s, heads.kv, heads.dim]));
        let visible = if causal { Visible::Causal } else { Visible::All };
        let scale = float(head_dim).powf(-0.5);
        let part = attention::forward(kernel, &q_thd, &k_sgd, &v_sgd, visible, scale);
        let merged = Merged { q_thd: &q_thd, out_thd: &part.out_thd, lse_th: &part.lse_th, dout_thd: &part.out_thd };
        let forward = median(device, || drop(attention::forward(kernel, &q_thd, &k_sgd, &v_sgd, visible, scale)))?;
        let backward = median(device, || drop(attention::backward(kernel, &merged, &k_sgd, &v_sgd, visible, scale)))?;
        let pairs = if causal { float(queries) * (float(keys) + 1.0) / 2.0 } else { float(queries) * float(keys) };
        let tera = 4.0 * float(query_heads * head_dim) * pairs / 1e12;
        Ok(Some(AttentionRate {
            head_dim,
            queries,
            keys,
            causal,
            forward: tera / forward,
            backward: 2.5 * tera / backward,
        }))
    }

    fn random<const N: usize>(&self, shape: [i64; N]) -> Tensor {
        let kind: Kind = self.options.kind;
        Tensor::randn(shape, (kind, self.options.device))
    }
}

/// The shorter and the longer prompt of the updates, in whole pages. Where prompts carry gradient (`exact`), both are longer than
/// a micro-block: a tail that is no longer takes another route.
fn prompts(longest: Tokens, page_size: Tokens, micro_block: Tokens, exact: bool) -> Result<[Tokens; 2], Error> {
    let longest = longest.min(PROMPT_MAX);
    let shorter = |apart: u64| Tokens((longest.0 / apart).div_ceil(page_size.0) * page_size.0);
    let fits = |&shorter: &Tokens| shorter < longest && (!exact || shorter > micro_block);
    let found = PROMPTS_APART.map(shorter).into_iter().find(fits);
    found.map(|shorter| [shorter, longest]).ok_or(Error::RatesPrompt { longest, micro_block, page_size, exact })
}

/// The longest that the shorter of two prompts may be: rows of a micro-block are chosen for it.
#[must_use]
pub fn shorter_prompt(longest: Tokens) -> Tokens {
    let [.., apart] = PROMPTS_APART;
    Tokens(longest.min(PROMPT_MAX).0 / apart)
}

/// Two numbers of layers to time: those with every kind of mixer, or one, and six times as many.
fn depths(kinds: usize, layers: usize) -> Vec<usize> {
    let few = if kinds < layers { kinds } else { 1 };
    let more = (6 * few).clamp(few, layers);
    if more > few { vec![few, more] } else { vec![few] }
}

/// The median; of two values the larger one.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The name that the driver has for the GPU, or what else computes.
fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => gpu::identity(index).and_then(|address| gpu_model(&address)).unwrap_or("a GPU".into()),
        _ => "a CPU".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_prompts_of_an_exact_fit_are_longer_than_a_micro_block() {
        let of = |longest: u64, rows: u64, exact: bool| {
            prompts(Tokens(longest), Tokens(64), Tokens(rows), exact)
                .map(|[shorter, longest]| (shorter.0, longest.0))
                .ok()
        };
        assert_eq!(of(131_072, 8192, true), Some((32_768, 131_072)));
        assert_eq!(of(131_072, 32_768, true), Some((65_536, 131_072)), "a half where a quarter is a short tail");
        assert_eq!(of(16_384, 8192, true), None);
        assert_eq!(of(16_384, 8192, false), Some((4096, 16_384)), "one row is a short tail at any length");
        assert_eq!(of(4096, 2048, true), None);
        assert_eq!(of(64, 16, false), None, "one page is one prompt");
        let words = prompts(Tokens(4096), Tokens(64), Tokens(2048), true).unwrap_err().to_string();
        assert!(words.contains("--prompt 4160") && words.contains("--micro-block 1024"), "{words}");
    }

    #[test]
    fn two_depths_are_timed_where_a_model_has_layers_for_them() {
        assert_eq!(depths(2, 36), [2, 12]);
        assert_eq!(depths(4, 64), [4, 24]);
        assert_eq!(depths(4, 6), [4, 6]);
        assert_eq!(depths(2, 2), [1, 2]);
        assert_eq!(depths(1, 1), [1]);
    }
}
