//! `AdamW` on the adapters' master weights, in the accumulation dtype. (Loshchilov & Hutter 2019, arXiv 1711.05101.)

use tch::Tensor;

use crate::model::lora::Adapters;
use crate::prompt::handoff::{Moments, ReducedGrads};
use crate::runtime::units::Bytes;
use crate::tensor::boundary::storage_bytes;
use crate::tensor::fused::{self, AdamNumbers, AdamTensors};

/// Settings that do not change during a run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Decay of the mean and of the mean square.
    pub betas: [f64; 2],
    /// Added to the root of the mean square.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
}

/// `AdamW` with its two moments.
#[derive(Debug)]
pub struct AdamW {
    settings: Settings,
    moments: Moments,
}

impl AdamW {
    /// An optimizer that has made no step.
    #[must_use]
    pub fn new(adapters: &Adapters, settings: Settings) -> Self {
        let zeros = || adapters.tensors().map(|tensor| tensor.detach().zeros_like()).collect();
        AdamW { settings, moments: Moments { steps: 0, mean: zeros(), square: zeros() } }
    }

    /// Goes on with the moments of an earlier run.
    pub fn restore(&mut self, moments: Moments) {
        self.moments = moments;
    }

    /// Both moments, and the steps made.
    #[must_use]
    pub fn moments(&self) -> &Moments {
        &self.moments
    }

    /// One step. The adapters' version moves on, so state captured before is refused from here on.
    ///
    /// Gradients come here by way of `finalize`, which sums them over all ranks:
    ///
    /// ```no_run
    /// use longstraw::step::{finalize, optimizer::AdamW};
    /// use longstraw::{model::lora::Adapters, prompt::handoff::LocalGrads, world::World};
    ///
    /// fn step(world: &World, optimizer: &mut AdamW, adapters: &mut Adapters, own: LocalGrads) {
    ///     if let Ok(summed) = finalize::run(&world.all, own, adapters, 1.0) {
    ///         optimizer.update(adapters, &summed, 1e-5);
    ///     }
    /// }
    /// ```
    ///
    /// One rank's own are of another type, so a sum that was forgotten does not compile:
    ///
    /// ```compile_fail,E0308
    /// use longstraw::{model::lora::Adapters, prompt::handoff::LocalGrads, step::optimizer::AdamW};
    ///
    /// fn step(optimizer: &mut AdamW, adapters: &mut Adapters, own: LocalGrads) {
    ///     optimizer.update(adapters, &own, 1e-5);
    /// }
    /// ```
    pub fn update(&mut self, adapters: &mut Adapters, gradients: &ReducedGrads, learning_rate: f64) {
        let Moments { steps, mean, square } = &mut self.moments;
        *steps += 1;
        let Settings { betas: [beta_1, beta_2], eps, weight_decay } = self.settings;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(*steps));
        let (first, second) = (correction(beta_1), correction(beta_2));
        let kept = 1.0 - learning_rate * weight_decay;
        let numbers = AdamNumbers { betas: [beta_1, beta_2], corrections: [first, second], eps, kept, learning_rate };
        let stepped = adapters.write(|weights| {
            fused::adam_step(
                &AdamTensors { weights, gradients: gradients.gradients(), means: mean, squares: square },
                &numbers,
            )
        });
        if stepped {
            return;
        }
        let values: Vec<Tensor> = tch::no_grad(|| {
            adapters
                .tensors()
                .zip(gradients.gradients())
                .zip(mean.iter_mut().zip(square.iter_mut()))
                .map(|((weight, gradient), (mean, square))| {
                    *mean = &*mean * beta_1 + gradient * (1.0 - beta_1);
                    *square = &*square * beta_2 + gradient * gradient * (1.0 - beta_2);
                    let step = (&*mean / first) / ((&*square / second).sqrt() + eps);
                    weight * kept - step * learning_rate
                })
                .collect()
        });
        adapters.update(&values);
    }

    /// Bytes of both moments.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.moments.mean.iter().chain(&self.moments.square).map(storage_bytes).sum()
    }

    /// Updates made so far, those before a resume included.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.moments.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lora::Adapter;
    use tch::{Device, Kind};

    fn single(value: f64, kind: Kind) -> Adapters {
        let tensor = |value: f64| Tensor::full([1, 1], value, (kind, Device::Cpu));
        let pair = Adapter { module: "m".into(), a_ri: tensor(value), b_or: tensor(0.0) };
        Adapters::new(vec![pair], 1.0, "policy")
    }

    fn reduced(adapters: &Adapters, value: f64) -> ReducedGrads {
        let gradients = adapters.tensors().map(|tensor| tensor.detach().full_like(value)).collect();
        ReducedGrads { gradients, norm: value }
    }

    const SETTINGS: Settings = Settings { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0 };

    #[test]
    fn a_float32_master_moves_at_a_small_learning_rate() {
        let mut adapters = single(1.0, Kind::Float);
        let mut optimizer = AdamW::new(&adapters, SETTINGS);
        for _ in 0..1000 {
            let gradients = reduced(&adapters, 1.0);
            optimizer.update(&mut adapters, &gradients, 1e-6);
        }
        let moved = 1.0 - adapters.entries()[0].a_ri.double_value(&[0, 0]);
        assert!((moved - 1e-3).abs() < 5e-5, "moved by {moved}");
        assert_eq!((adapters.stamp().version, optimizer.steps()), (1000, 1000));
    }

    #[test]
    fn two_steps_follow_the_formula() {
        let mut adapters = single(0.5, Kind::Double);
        let settings = Settings { weight_decay: 0.1, ..SETTINGS };
        let mut optimizer = AdamW::new(&adapters, settings);
        let (mut weight, mut mean, mut square) = (0.5f64, 0.0f64, 0.0f64);
        for (step, gradient) in [0.3f64, -0.7].into_iter().enumerate() {
            let given = reduced(&adapters, gradient);
            optimizer.update(&mut adapters, &given, 0.01);
            mean = 0.9 * mean + 0.1 * gradient;
            square = 0.999 * square + 0.001 * gradient * gradient;
            let power = i32::try_from(step + 1).unwrap();
            let hat = (mean / (1.0 - 0.9f64.powi(power))) / ((square / (1.0 - 0.999f64.powi(power))).sqrt() + 1e-8);
            weight = weight * (1.0 - 0.01 * 0.1) - 0.01 * hat;
        }
        assert!((adapters.entries()[0].a_ri.double_value(&[0, 0]) - weight).abs() < 1e-14);
    }
}
