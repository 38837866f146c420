//! The gated delta rule and the convolution before it, over consecutive rows.
//!
//! Rows are an affine map of the state before them: `S_out = T S + B` and O = C S + O₀, so that states can be composed over
//! blocks and ranks. States are of the accumulation dtype whatever the model's. [`plain`] has the formulas.

pub mod compiled;
pub mod plain;
#[cfg(test)]
mod tests;

use tch::{Device, Kind, Tensor};

use crate::runtime::failure::out_of_memory;
use crate::runtime::terminal::say;
use crate::tensor;
use crate::tensor::selection_kernel::Instructions;

/// Heads and widths of a rule.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeltaHeads {
    /// How many heads queries and keys have.
    pub key_heads: i64,
    /// How many heads values have; value head n goes with key head n / (`value_heads` / `key_heads`).
    pub value_heads: i64,
    /// Width of a head's query and key.
    pub key_dim: i64,
    /// Width of a head's value.
    pub value_dim: i64,
}

impl DeltaHeads {
    /// Channels of a row: queries, then keys, then values.
    #[must_use]
    pub fn channels(&self) -> i64 {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Shape of the state.
    #[must_use]
    pub fn state(&self) -> [i64; 3] {
        [self.value_heads, self.key_dim, self.value_dim]
    }
}

/// What the rule reads of consecutive rows.
#[derive(Debug)]
pub struct DeltaRows {
    /// Queries, keys and values after the convolution, in the model's dtype; queries and keys are not yet normalised.
    pub y_tu: Tensor,
    /// Logarithm of the decay, at most 0, in the accumulation dtype.
    pub decay_th: Tensor,
    /// Strength of the correction, in the accumulation dtype.
    pub strength_th: Tensor,
}

/// Rows as a map of the state before them, in the accumulation dtype.
#[derive(Debug)]
pub struct Transition {
    /// T, [h, k, k].
    pub factor_hkk: Tensor,
    /// B, [h, k, v].
    pub increment_hkv: Tensor,
}

/// Gradient of what the rule read.
#[derive(Debug)]
pub struct DeltaGradient {
    /// That of the rows, in the dtypes of the rows.
    pub rows: DeltaRows,
    /// That of the state before the rows, [h, k, v] in the accumulation dtype.
    pub dstate_hkv: Tensor,
}

/// What computes the rule; must be equal on all ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Form {
    /// Operations of libtorch.
    Plain,
    /// CUDA kernels that are compiled at run time. Rows that they do not take are computed as with [`Form::Plain`].
    Compiled,
}

impl Form {
    /// The form for heads in dtype `kind` on a device, with a convolution of `taps` taps: kernels where a small trial gives
    /// what matrix products give. The first call compiles the kernels, which takes seconds; call it once a model, outside a
    /// recorded graph.
    ///
    /// # Panics
    /// When memory for the trial runs out: the result would differ between ranks.
    #[must_use]
    pub fn choose(device: Device, heads: &DeltaHeads, taps: i64, kind: Kind) -> Form {
        if !device.is_cuda() || !compiled::covers(heads, taps, kind) {
            return Form::Plain;
        }
        let load = || {
            let loaded = compiled::loaded(0) && compiled::loaded(taps);
            if loaded { Ok(()) } else { compiled::load(taps, Instructions::Native) }
        };
        // Tried for every model: kernels that are loaded need not be right for its heads.
        match load().and_then(|()| compiled::agrees(device, heads, taps)) {
            Ok(true) => Form::Compiled,
            Ok(false) => {
                say("warning: the compiled gated delta rule is wrong on this GPU; matrix products compute it");
                Form::Plain
            }
            Err(error) if out_of_memory(&error.to_string()) => panic!("{error}"),
            Err(error) => {
                tracing::warn!(
                    "matrix products compute gated delta rules, since their kernels cannot be used: {error}"
                );
                Form::Plain
            }
        }
    }

    /// Its name in receipts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Form::Plain => "matrix products",
            Form::Compiled => "compiled",
        }
    }

    /// Most rows of one call: what a call holds besides its input and output grows with them.
    #[must_use]
    pub fn rows_max(self, device: Device) -> i64 {
        match (self, device) {
            (Form::Plain, Device::Cpu) => 1_024,
            (Form::Plain, _) => 8_192,
            // 48 heads: 1.4 GB in the backward.
            (Form::Compiled, _) => 16_384,
        }
    }

    fn compiles(self, heads: &DeltaHeads, rows: &DeltaRows) -> bool {
        self == Form::Compiled && compiled::takes(heads, rows)
    }

    /// Output of rows, [t, h, v] in the model's dtype, and the state after them, [h, k, v] in the accumulation dtype.
    ///
    /// # Panics
    /// When memory runs out, or the GPU refuses.
    pub fn forward(self, heads: &DeltaHeads, rows: &DeltaRows, state_hkv: &Tensor) -> (Tensor, Tensor) {
        if self.compiles(heads, rows) {
            return compiled::forward(heads, rows, state_hkv).unwrap_or_else(|error| panic!("{error}"));
        }
        plain::forward(heads, rows, state_hkv)
    }

    /// Rows as a map of the state before them.
    ///
    /// # Panics
    /// When memory runs out, or the GPU refuses.
    #[must_use]
    pub fn transition(self, heads: &DeltaHeads, rows: &DeltaRows) -> Transition {
        if self.compiles(heads, rows) {
            return compiled::transition(heads, rows).unwrap_or_else(|error| panic!("{error}"));
        }
        plain::transition(heads, rows)
    }

    /// Gradient of the state before rows, [h, k, v] in the accumulation dtype, from that of their output, [t, h, v], and of
    /// the state after them: Cᵀ dO + Tᵀ dS. No other gradient is formed.
    ///
    /// # Panics
    /// When memory runs out, or the GPU refuses.
    pub fn pull(self, heads: &DeltaHeads, rows: &DeltaRows, dout_thv: &Tensor, dstate_hkv: &Tensor) -> Tensor {
        if self.compiles(heads, rows) {
            return compiled::pull(heads, rows, dout_thv, dstate_hkv).unwrap_or_else(|error| panic!("{error}"));
        }
        plain::pull(heads, rows, dout_thv, dstate_hkv)
    }

    /// Gradient of rows and of the state before them, from those of their output, [t, h, v] in the model's dtype, and of the
    /// state after them, [h, k, v] in the accumulation dtype.
    ///
    /// # Errors
    /// When libtorch or the GPU refuses.
    pub fn backward(
        self,
        heads: &DeltaHeads,
        rows: &DeltaRows,
        state_hkv: &Tensor,
        dout_thv: &Tensor,
        dstate_hkv: &Tensor,
    ) -> Result<DeltaGradient, tensor::Error> {
        let form = if self.compiles(heads, rows) { compiled::backward } else { plain::backward };
        form(heads, rows, state_hkv, dout_thv, dstate_hkv)
    }

    /// The causal convolution of each channel, then z · sigmoid(z): [t, u] in the dtype of `u_eu`, [taps − 1 + t, u], which
    /// begins with the rows before. `weight_uj` is [u, taps], its last column for the row itself.
    ///
    /// # Panics
    /// When memory runs out, or the GPU refuses.
    pub fn convolve(self, u_eu: &Tensor, weight_uj: &Tensor) -> Tensor {
        if self == Form::Compiled && compiled::convolves(u_eu, weight_uj) {
            return compiled::convolve(u_eu, weight_uj).unwrap_or_else(|error| panic!("{error}"));
        }
        plain::convolve(u_eu, weight_uj)
    }

    /// Gradient of the input of [`Form::convolve`] from that of its output: [taps − 1 + t, u] in the accumulation dtype.
    ///
    /// # Errors
    /// When libtorch or the GPU refuses.
    pub fn convolve_backward(self, u_eu: &Tensor, weight_uj: &Tensor, dy_tu: &Tensor) -> Result<Tensor, tensor::Error> {
        if self == Form::Compiled && compiled::convolves(u_eu, weight_uj) {
            return compiled::convolve_backward(u_eu, weight_uj, dy_tu);
        }
        plain::convolve_backward(u_eu, weight_uj, dy_tu)
    }
}
