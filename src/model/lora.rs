//! LoRA adapters: y = W x + (alpha / rank) · B (A x).
//!
//! The tensors here are the masters, in the accumulation dtype; a forward casts them to the model's dtype inside its
//! graph, so gradients arrive and add up in the accumulation dtype. (Hu et al. 2021, arXiv 2106.09685.)

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

use super::spec::{Linear, expert_of};
use crate::prompt::pages::AdapterVersion;
use crate::runtime::digest::hex;
use crate::runtime::units::{LayerIndex, as_dim, float};
use crate::tensor::fused::{self, Layer};
use crate::tensor::views;

/// The pair of one linear layer.
#[derive(Debug)]
pub struct Adapter {
    /// The linear layer it adapts (`model.layers.0.self_attn.q_proj`).
    pub module: String,
    /// The down projection A, [rank, inputs].
    pub a_ri: Tensor,
    /// The up projection B, [outputs, rank].
    pub b_or: Tensor,
}

impl Adapter {
    /// A and B.
    pub fn pair(&self) -> [&Tensor; 2] {
        [&self.a_ri, &self.b_or]
    }
}

/// All adapters of one policy, in one fixed order on every rank.
#[derive(Debug)]
pub struct Adapters {
    entries: Vec<Adapter>,
    index: BTreeMap<String, usize>,
    scale: f64,
    stamp: AdapterVersion,
    /// Whether those of experts are a part, and other ranks have the rest.
    spread: bool,
}

impl Adapters {
    /// Adapters that change nothing yet: A uniform in ±1/√inputs from `seed`, B zero.
    #[must_use]
    pub fn starting(layers: &[Linear], rank: u64, alpha: f64, seed: i64, acc: Kind, device: Device) -> Self {
        Self::starting_where(|_| true, layers, rank, alpha, seed, acc, device)
    }

    /// Those of [`Adapters::starting`] for which `holds`, with the values that they have among all.
    #[must_use]
    pub fn starting_where(
        holds: impl Fn(&Linear) -> bool,
        layers: &[Linear],
        rank: u64,
        alpha: f64,
        seed: i64,
        acc: Kind,
        device: Device,
    ) -> Self {
        tch::manual_seed(seed);
        let entries = layers
            .iter()
            .filter_map(|linear| {
                let bound = 1.0 / (float(linear.inputs)).sqrt();
                // Sampled in float64 on the CPU, so that one seed gives one start whatever the dtype and device.
                let sampled = Tensor::empty([as_dim(rank), as_dim(linear.inputs)], (Kind::Double, Device::Cpu))
                    .uniform(-bound, bound);
                holds(linear).then(|| Adapter {
                    module: linear.module.clone(),
                    a_ri: sampled.to_kind(acc).to_device(device),
                    b_or: Tensor::zeros([as_dim(linear.outputs), as_dim(rank)], (acc, device)),
                })
            })
            .collect();
        Self::new(entries, alpha / float(rank), "policy")
    }

    /// Adapters with given tensors, in the accumulation dtype.
    #[must_use]
    pub fn new(entries: Vec<Adapter>, scale: f64, policy: &'static str) -> Self {
        let index = entries.iter().enumerate().map(|(at, adapter)| (adapter.module.clone(), at)).collect();
        let stamp = AdapterVersion { policy, version: 0 };
        let adapters = Adapters { entries, index, scale, stamp, spread: false };
        adapters.track(true);
        adapters
    }

    /// The same adapters, marked: those of experts are this rank's part, and other ranks have the rest.
    #[must_use]
    pub fn spread(self) -> Self {
        Adapters { spread: true, ..self }
    }

    /// Whether those of experts are a part, and other ranks have the rest.
    #[must_use]
    pub fn is_spread(&self) -> bool {
        self.spread
    }

    /// Of each tensor, in their fixed order, whether other ranks have others in its place.
    pub fn spread_tensors(&self) -> impl Iterator<Item = bool> {
        let spread = self.entries.iter().map(|entry| self.spread && expert_of(&entry.module).is_some());
        spread.flat_map(|spread| [spread; 2])
    }

    /// A frozen copy under another name: the reference policy of a KL term.
    #[must_use]
    pub fn frozen(&self, policy: &'static str) -> Self {
        let copy = |x: &Tensor| x.detach().copy();
        let entries = self
            .entries
            .iter()
            .map(|adapter| Adapter {
                module: adapter.module.clone(),
                a_ri: copy(&adapter.a_ri),
                b_or: copy(&adapter.b_or),
            })
            .collect();
        let adapters = Adapters {
            entries,
            index: self.index.clone(),
            scale: self.scale,
            stamp: AdapterVersion { policy, version: self.stamp.version },
            spread: self.spread,
        };
        adapters.track(false);
        adapters
    }

    /// The same values in dtype `kind`, with the scale in B: for many products with few rows, each of which would convert them
    /// again. The products have the same bits.
    #[must_use]
    pub fn applied(&self, kind: Kind) -> Self {
        self.applied_where(kind, |_| true)
    }

    /// [`Adapters::applied`] of one layer alone, for a pass without a graph through its blocks; `None` where experts have
    /// adapters, of which a pass may need few.
    #[must_use]
    pub fn applied_in(&self, layer: LayerIndex, kind: Kind) -> Option<Self> {
        let block = format!("model.layers.{layer}.");
        let of_experts = |entry: &Adapter| expert_of(&entry.module).is_some();
        let none = !self.entries.iter().any(of_experts);
        none.then(|| self.applied_where(kind, |module| module.starts_with(&block)))
    }

    fn applied_where(&self, kind: Kind, holds: impl Fn(&str) -> bool) -> Self {
        let pair = |adapter: &Adapter| Adapter {
            module: adapter.module.clone(),
            a_ri: adapter.a_ri.detach().to_kind(kind),
            b_or: (adapter.b_or.detach() * self.scale).to_kind(kind),
        };
        let entries: Vec<Adapter> = self.entries.iter().filter(|adapter| holds(&adapter.module)).map(pair).collect();
        let index = entries.iter().enumerate().map(|(at, adapter)| (adapter.module.clone(), at)).collect();
        Adapters { entries, index, scale: 1.0, stamp: self.stamp.clone(), spread: self.spread }
    }

    fn track(&self, gradient: bool) {
        for tensor in self.tensors() {
            let _ = tensor.set_requires_grad(gradient);
        }
    }

    /// Alpha over rank.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Which policy, and how many updates it has seen.
    #[must_use]
    pub fn stamp(&self) -> &AdapterVersion {
        &self.stamp
    }

    /// The pair of `module`; `None` where it is not adapted.
    #[must_use]
    pub fn of(&self, module: &str) -> Option<&Adapter> {
        self.index.get(module).map(|&at| &self.entries[at])
    }

    /// All pairs in their fixed order.
    #[must_use]
    pub fn entries(&self) -> &[Adapter] {
        &self.entries
    }

    /// All tensors in their fixed order: A then B of each pair.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.entries.iter().flat_map(|adapter| [&adapter.a_ri, &adapter.b_or])
    }

    /// Names of [`Adapters::tensors`]: `<module>.lora_A` and `<module>.lora_B`.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.entries.iter().flat_map(|adapter| ["A", "B"].map(|half| format!("{}.lora_{half}", adapter.module)))
    }

    /// Writes new values and counts one more update; state captured before is stale from here on.
    ///
    /// # Panics
    /// When there are not as many values as tensors.
    pub fn update(&mut self, values: &[Tensor]) {
        assert_eq!(values.len(), 2 * self.entries.len(), "one value for each tensor");
        tch::no_grad(|| {
            for (tensor, value) in self.tensors().zip(values) {
                tensor.shallow_clone().copy_(value);
            }
        });
        self.stamp.version += 1;
    }

    /// Lets `write` change all tensors in place, and counts one more update if it has; state captured before is stale from
    /// here on. Tensors come in their fixed order.
    pub fn write(&mut self, write: impl FnOnce(&[&Tensor]) -> bool) -> bool {
        let written = write(&self.tensors().collect::<Vec<_>>());
        self.stamp.version += u64::from(written);
        written
    }

    /// Writes values that were saved, and the number of updates that they had seen.
    ///
    /// # Panics
    /// When there are not as many values as tensors.
    pub fn restore(&mut self, values: &[Tensor], version: u64) {
        self.update(values);
        self.stamp.version = version;
    }

    /// SHA-256 over all values, in hexadecimal: equal on all ranks or something is wrong.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for tensor in self.tensors() {
            hash.update(views::view(&tensor.detach().to_device(Device::Cpu).contiguous()));
        }
        hex(hash)
    }

    /// SHA-256 of every B, in the order of [`Adapters::entries`], in hexadecimal.
    #[must_use]
    pub fn b_digests(&self) -> Vec<String> {
        let digest = |adapter: &Adapter| {
            let b_or = adapter.b_or.detach().to_device(Device::Cpu).contiguous();
            hex(Sha256::new_with_prefix(views::view(&b_or)))
        };
        self.entries.iter().map(digest).collect()
    }
}

/// Linear layers of one input with their adapters, if they have any: x Wᵀ + bias + scale · (x Aᵀ) Bᵀ, all in the dtype of
/// `x`. Layers are computed together where [`fused::adapted`] takes them, else one after another.
#[must_use]
pub fn linears(x_tw: &Tensor, layers: &[Layer], scale: f64) -> Vec<Tensor> {
    fused::adapted(x_tw, layers, scale)
        .unwrap_or_else(|| layers.iter().map(|layer| alone(x_tw, layer, scale)).collect())
}

/// One linear layer with its adapter, if it has one: x Wᵀ + bias + scale · (x Aᵀ) Bᵀ, all in the dtype of `x`.
pub fn linear(x_tw: &Tensor, weight_oi: &Tensor, bias_o: Option<&Tensor>, adapter: Option<(&Adapter, f64)>) -> Tensor {
    let pair = adapter.map(|(adapter, _)| adapter.pair());
    alone(x_tw, &Layer { weight_oi, bias_o, pair, valued: true }, adapter.map_or(1.0, |(_, scale)| scale))
}

fn alone(x_tw: &Tensor, layer: &Layer, scale: f64) -> Tensor {
    let mut y = x_tw.linear(layer.weight_oi, layer.bias_o);
    if let Some([a_ri, b_or]) = layer.pair {
        let kind = x_tw.kind();
        let low = x_tw.linear(&a_ri.to_kind(kind), None::<&Tensor>);
        // The product adds in place, so its result is neither written out nor scaled in a pass of its own.
        let b_or = if (scale - 1.0).abs() > 0.0 { b_or * scale } else { b_or.shallow_clone() };
        let _itself = y.addmm_(&low, &b_or.to_kind(kind).tr());
    }
    y
}
