//! Log-probabilities of answer tokens, in chunks of rows: no tensor of all rows × vocabulary ever exists.

use tch::{Kind, Tensor};

use super::decoder::Decoder;
use crate::tensor::accumulation;
use crate::tensor::boundary::backward;
use crate::tensor::{self};

/// How the head runs.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Rows whose logits exist at one time.
    pub rows_max: i64,
    /// Logits are divided by this before the softmax, alike for policy, old policy and reference.
    pub temperature: f64,
}

impl Head {
    /// Log-probability of `targets[i]` after row i, natural logarithm, in the accumulation dtype, [t]. No graph.
    pub fn logprobs(&self, decoder: &dyn Decoder, x_tw: &Tensor, targets: &Tensor) -> Tensor {
        let chunks: Vec<Tensor> = tch::no_grad(|| {
            self.chunks(x_tw, targets).map(|(x, target)| self.chosen(&self.log_softmax(decoder, &x), &target)).collect()
        });
        if chunks.is_empty() {
            return Tensor::zeros([0], (accumulation(decoder.kind()), x_tw.device()));
        }
        Tensor::cat(&chunks, 0)
    }

    /// Log-probability of several `targets` after one and the same row, in the accumulation dtype. No graph.
    pub fn logprobs_of_row(&self, decoder: &dyn Decoder, x_1w: &Tensor, targets: &Tensor) -> Tensor {
        tch::no_grad(|| self.log_softmax(decoder, x_1w).get(0).index_select(0, &targets.to_device(x_1w.device())))
    }

    /// Gradient of the rows, [t, w], from the gradient of their log-probabilities.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn backward(
        &self,
        decoder: &dyn Decoder,
        x_tw: &Tensor,
        targets: &Tensor,
        dlogprobs: &Tensor,
    ) -> Result<Tensor, tensor::Error> {
        let dx_tw = x_tw.detach().zeros_like();
        let mut first = 0;
        for (x, target) in self.chunks(x_tw, targets) {
            let leaf = x.detach().set_requires_grad(true);
            let logprobs = self.chosen(&self.log_softmax(decoder, &leaf), &target);
            let rows = leaf.size()[0];
            backward(&[(&logprobs, &dlogprobs.narrow(0, first, rows))])?;
            dx_tw.narrow(0, first, rows).copy_(&leaf.grad());
            first += rows;
        }
        Ok(dx_tw)
    }

    /// Gradient of one row, [1, w], that predicts several targets.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn backward_of_row(
        &self,
        decoder: &dyn Decoder,
        x_1w: &Tensor,
        targets: &Tensor,
        dlogprobs: &Tensor,
    ) -> Result<Tensor, tensor::Error> {
        let leaf = x_1w.detach().set_requires_grad(true);
        let logprobs = self.log_softmax(decoder, &leaf).get(0).index_select(0, &targets.to_device(leaf.device()));
        backward(&[(&logprobs, dlogprobs)])?;
        Ok(leaf.grad())
    }

    fn chunks(&self, x_tw: &Tensor, targets: &Tensor) -> impl Iterator<Item = (Tensor, Tensor)> {
        let (rows, step) = (x_tw.size()[0], self.rows_max.max(1));
        let (x_tw, targets) = (x_tw.shallow_clone(), targets.to_device(x_tw.device()));
        (0..rows).step_by(usize::try_from(step).unwrap_or(1)).map(move |first| {
            let count = step.min(rows - first);
            (x_tw.narrow(0, first, count), targets.narrow(0, first, count))
        })
    }

    /// Log-probabilities of the whole vocabulary after each row, in the accumulation dtype, [t, v]: for a few rows.
    pub fn log_softmax(&self, decoder: &dyn Decoder, x_tw: &Tensor) -> Tensor {
        let acc: Kind = accumulation(decoder.kind());
        let logits = decoder.logits(x_tw).to_kind(acc);
        let scaled = if (self.temperature - 1.0).abs() > 0.0 { logits / self.temperature } else { logits };
        scaled.log_softmax(-1, acc)
    }

    fn chosen(&self, logprobs_tv: &Tensor, targets: &Tensor) -> Tensor {
        let _ = self;
        logprobs_tv.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1)
    }
}
