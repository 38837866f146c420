//! Random adapters for comparisons.

use tch::{Device, Kind, Tensor};

use crate::model::lora::{Adapter, Adapters};
use crate::model::spec::Linear;
use crate::runtime::units::{as_dim, float};

/// Normal adapters, neither half zero: with B = 0 the gradient of A would be 0 whatever the code does.
#[derive(Clone, Copy, Debug)]
pub struct RandomAdapters {
    /// Rows of A and columns of B.
    pub rank: u64,
    /// The product is scaled by alpha / rank.
    pub alpha: f64,
    /// Standard deviation of A.
    pub a_deviation: f64,
    /// Standard deviation of B.
    pub b_deviation: f64,
    /// Seed of libtorch's generator on the CPU.
    pub seed: i64,
    /// The dtype in which values are sampled.
    pub sampled_in: Kind,
    /// The dtype in which they are held.
    pub kind: Kind,
    /// Where they are held.
    pub device: Device,
}

impl RandomAdapters {
    /// Samples a pair for each linear layer, in order.
    #[must_use]
    pub fn sample(&self, linears: Vec<Linear>) -> Adapters {
        tch::manual_seed(self.seed);
        let normal = |rows: u64, columns: u64, deviation: f64| {
            let values = Tensor::randn([as_dim(rows), as_dim(columns)], (self.sampled_in, Device::Cpu)) * deviation;
            values.to_kind(self.kind).to_device(self.device)
        };
        let pair = |linear: Linear| Adapter {
            a_ri: normal(self.rank, linear.inputs, self.a_deviation),
            b_or: normal(linear.outputs, self.rank, self.b_deviation),
            module: linear.module,
        };
        Adapters::new(linears.into_iter().map(pair).collect(), self.alpha / float(self.rank), "policy")
    }
}
