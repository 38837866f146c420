//! Log-probabilities of answer tokens, in chunks of rows: no tensor of all rows × vocabulary ever exists.

use tch::{Device, Kind, Tensor};

use super::decoder::Decoder;
use crate::tensor::accumulation;
use crate::tensor::boundary::backward;
use crate::tensor::{self};

/// Fewest rows of a product with the head's weight on a CPU. Below, the library sums over the vocabulary entry by entry in
/// backward, on some processors for up to eleven rows that are no multiple of four: their gradient is up to ten times less
/// accurate than that of any other row.
const PRODUCT_ROWS_MIN: i64 = 12;

/// Logits of the rows, [t, v], in the model's dtype. On a CPU few rows get copies of the last one as company.
fn logits(decoder: &dyn Decoder, x_tw: &Tensor) -> Tensor {
    let rows = x_tw.size()[0];
    let missing = PRODUCT_ROWS_MIN - rows;
    if x_tw.device() != Device::Cpu || rows == 0 || missing <= 0 {
        return decoder.logits(x_tw);
    }
    let company = x_tw.detach().narrow(0, rows - 1, 1).expand([missing, -1], false);
    decoder.logits(&Tensor::cat(&[x_tw, &company], 0)).narrow(0, 0, rows)
}

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
        let logits = logits(decoder, x_tw).to_kind(acc);
        let scaled = if (self.temperature - 1.0).abs() > 0.0 { logits / self.temperature } else { logits };
        scaled.log_softmax(-1, acc)
    }

    fn chosen(&self, logprobs_tv: &Tensor, targets: &Tensor) -> Tensor {
        let _ = self;
        logprobs_tv.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::rc::Rc;

    use super::*;
    use crate::model::spec::Spec;
    use crate::model::weights::{ExpertShare, Weights};

    /// SmolLM2's embedding and head over one layer, random float32 weights.
    fn decoder(folder: &Path) -> (Rc<Weights>, Box<dyn Decoder>, f64) {
        let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/shapes/smollm2-135m/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(published).unwrap()).unwrap();
        config["num_hidden_layers"] = 1.into();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let spec = Spec::read(folder, None).unwrap();
        let weights = Rc::new(Weights::random(&spec, 3, Kind::Float, Device::Cpu, ExpertShare::ALL).unwrap());
        (weights.clone(), spec.decoder(weights, Kind::Float), config["rms_norm_eps"].as_f64().unwrap())
    }

    /// Norm, tied head and softmax in float64 over the same weights, by autograd.
    fn in_float64(weights: &Weights, eps: f64, x_tw: &Tensor, dlogprobs_tv: &Tensor) -> Tensor {
        let wide = |name: &str| weights.get(name).to_kind(Kind::Double);
        let x = x_tw.to_kind(Kind::Double).set_requires_grad(true);
        let scale = (x.square().mean_dim(-1i64, true, Kind::Double) + eps).rsqrt();
        let logits = (&x * scale * wide("model.norm.weight")).matmul(&wide("model.embed_tokens.weight").tr());
        (logits.log_softmax(-1, Kind::Double) * dlogprobs_tv.to_kind(Kind::Double)).sum(Kind::Double).backward();
        x.grad()
    }

    #[test]
    fn the_gradient_of_few_rows_is_as_accurate_as_that_of_many() {
        let folder = tempfile::tempdir().unwrap();
        let (weights, decoder, eps) = decoder(folder.path());
        let head = Head { rows_max: 6, temperature: 1.0 };
        let (width, vocabulary) = (decoder.width(), decoder.vocabulary());
        tch::manual_seed(5);
        let error = |found: &Tensor, wanted: &Tensor| {
            let wanted = wanted.to_kind(Kind::Double);
            ((found.to_kind(Kind::Double) - &wanted).norm() / wanted.norm()).double_value(&[])
        };
        // Row P−1, whose logits predict the first token of every answer.
        let x_1w = Tensor::randn([1, width], (Kind::Float, Device::Cpu));
        let targets = Tensor::from_slice(&[7i64, 40_000, 7, 11]);
        let dlogprobs = Tensor::from_slice(&[0.5f32, -0.25, 0.125, -0.5]);
        let dlogprobs_1v =
            Tensor::zeros([1, vocabulary], (Kind::Float, Device::Cpu)).index_add(1, &targets, &dlogprobs.unsqueeze(0));
        let found = head.backward_of_row(&*decoder, &x_1w, &targets, &dlogprobs).unwrap();
        let off = error(&found, &in_float64(&weights, eps, &x_1w, &dlogprobs_1v));
        assert!(off < 1.5e-6, "row P−1: {off:e}");
        // Chunks of six rows; what is left over are one to five.
        for rows in [1, 2, 3, 7, 9, 11] {
            let x_tw = Tensor::randn([rows, width], (Kind::Float, Device::Cpu));
            let targets = Tensor::randint(vocabulary, [rows], (Kind::Int64, Device::Cpu));
            let dlogprobs = Tensor::ones([rows], (Kind::Float, Device::Cpu));
            let dlogprobs_tv = Tensor::zeros([rows, vocabulary], (Kind::Float, Device::Cpu)).scatter_value(
                1,
                &targets.unsqueeze(1),
                1.0,
            );
            let found = head.backward(&*decoder, &x_tw, &targets, &dlogprobs).unwrap();
            let off = error(&found, &in_float64(&weights, eps, &x_tw, &dlogprobs_tv));
            assert!(off < 1.5e-6, "{rows} rows: {off:e}");
            let wide = head.logprobs(&*decoder, &x_tw, &targets);
            assert_eq!(wide.size(), [rows]);
        }
    }
}
