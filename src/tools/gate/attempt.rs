//! An attempt to pass a gate: what all gates have in common, from the order in which they run to the receipt.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::checks::{self, Expected};
use super::earlier_receipt::{self, Earlier, Kernels, Now, Opened};
use super::error::Error;
use crate::config::{Dtype, Gate, Gradient, Loaded, RunConfig};
use crate::model::spec::Spec;
use crate::report::{self, Receipt, say, write_receipt};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Bytes, Rank, as_index, from_index};
use crate::train::Run;
use crate::world::{World, stop_requested};

/// A gate that is being run.
pub(super) struct Attempt<'a> {
    pub(super) gate: &'a Gate,
    pub(super) loaded: &'a Loaded,
    /// Whether the gate may run out of order.
    pub(super) force: bool,
    /// Whether it does.
    pub(super) forced: bool,
}

/// The time in UTC, as receipts write it.
pub(super) fn finished() -> String {
    chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

pub(super) fn commit() -> &'static str {
    option_env!("LONGSTRAW_COMMIT").unwrap_or("unknown")
}

/// Moves an earlier receipt to `receipt.earlier.json`: a gate that ends in the middle must not have passed. An earlier
/// request to be started again is removed.
///
/// # Errors
/// When the system refuses.
pub fn move_away(dir: &Path) -> Result<(), Error> {
    let (file, wish) = (dir.join("receipt.json"), dir.join("requeue"));
    let gone = |file: PathBuf, outcome: io::Result<()>| match outcome {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::File { file, source }),
        _ => Ok(()),
    };
    let (moved, removed) = (fs::rename(&file, dir.join("receipt.earlier.json")), fs::remove_file(&wish));
    gone(file, moved)?;
    gone(wish, removed)
}

impl Attempt<'_> {
    /// Refuses the gate unless the gate before it has passed for the same thing. Compares model and adapters too once
    /// there is an opened `run`.
    pub(super) fn admit(&mut self, run: Option<&Run>, world: &World) -> Result<(), Failure> {
        let config = &self.loaded.run;
        let now = Now {
            ranks: world.all.size(),
            cp_size: as_index(config.cp_size(from_index(world.all.size()))),
            scale: config.gate.scale,
            dtype: config.model.dtype.to_string(),
            model: run.map(|run| Opened {
                digest: run.session.model_digest().to_owned(),
                adapter: run.session.adapter_form(),
                device: format!("{:?}", run.session.weights().device()),
                // A gate that asks for kernels that repeat may have other kernels than the gates before it.
                kernels: (!self.gate.is_deterministic()).then(|| Kernels {
                    attention: run.session.attention_kernel().to_owned(),
                    delta_rule: run.session.delta_rule().map(ToOwned::to_owned),
                }),
            }),
        };
        let found = match world.all.rank() {
            Rank(0) => earlier_receipt::check(self.gate, &self.loaded.rank.dir, &now),
            _ => Ok(None),
        };
        let broken = matches!(found, Err(Error::Order { .. }));
        let found = match found {
            Err(refusal @ Error::Order { .. }) if self.force => {
                if !self.forced {
                    world.warn_user(&format!("out of order, by force: {refusal}"));
                }
                Ok(None)
            }
            other => other,
        };
        let before = world.agree(found.map_err(Failure::from))?;
        self.forced |= world.any(broken);
        if let Some(earlier) = before.filter(|_| run.is_some()) {
            self.remark_on(&earlier, world);
        }
        Ok(())
    }

    /// Says what is allowed and yet worth knowing of the gate before.
    fn remark_on(&self, before: &Earlier, world: &World) {
        let name = self.gate.after().map_or("", |gate| gate.name());
        if before.commit != commit() {
            world.warn_user(&format!("{name} passed with commit {}, this is {}", before.commit, commit()));
        }
        if before.forced {
            world.warn_user(&format!("{name} passed out of order: it was forced, so the gates before it do not count"));
        }
    }

    /// The gate's configuration with another gradient mode, in a folder within the gate's.
    pub(super) fn within(&self, folder: &str, gradient: Gradient) -> Loaded {
        let mut loaded = self.loaded.clone();
        loaded.rank.dir = self.loaded.rank.dir.join(folder);
        loaded.run.grpo.gradient = gradient;
        loaded
    }

    /// What a run of the gate on the model of `spec` should have been.
    pub(super) fn expected(&self, spec: &Spec) -> Expected {
        let config = &self.loaded.run;
        Expected {
            updates: config.run.steps,
            pages: config.prompt_pages(),
            page_bytes: page_bytes(config, spec),
            advantages: self.gate.advantages(config.grpo.group_size),
        }
    }

    /// Writes the outcome, once all ranks have come here; every rank returns the same verdict.
    pub(super) fn end(&self, mut receipt: Receipt, world: &World) -> Result<Receipt, Failure> {
        world.agree(Ok(()))?;
        receipt.checks.push(checks::as_named(&receipt, self.gate));
        let passed = receipt.checks.iter().all(|check| check.passed);
        let here = world.all.rank() == Rank(0);
        receipt.gate = Some(self.gate.name());
        receipt.forced = self.forced;
        // Rank 0 alone has seen all of it.
        receipt.passed = world.any(here && passed);
        receipt.finished = finished();
        // A gate that is stopped before its end begins anew: it has saved nothing, and no check has said anything.
        receipt.stopped = !receipt.passed && world.any(stop_requested());
        if receipt.stopped {
            receipt.checks.clear();
            let file = self.loaded.rank.dir.join("requeue");
            let words = "asked to stop before its end; the gate begins anew\n";
            let written = if here { fs::write(&file, words) } else { Ok(()) };
            world.agree(written.map_err(|source| Error::File { file, source }.into()))?;
        }
        let written = if here { write_receipt(&self.loaded.rank.dir, &receipt) } else { Ok(()) };
        world.agree(written.map_err(Failure::from))?;
        if here {
            let verdict = match (receipt.passed, receipt.stopped) {
                (true, _) => "has passed",
                (false, true) => "was asked to stop before its end and begins anew",
                (false, false) => "has NOT passed",
            };
            let gradient = &receipt.gradient;
            say(&format!("{} {verdict}, gradient {gradient}\n{}", self.gate.name(), report::checks(&receipt)));
        }
        Ok(receipt)
    }
}

/// Bytes of one page over all layers: keys and values, or keys of latents, and index keys in layers that own an index.
fn page_bytes(config: &RunConfig, spec: &Spec) -> Bytes {
    let element = match config.model.dtype {
        Dtype::Bfloat16 => 2,
        Dtype::Float32 => 4,
        Dtype::Float64 => 8,
    };
    let layers = from_index(spec.layers);
    let elements = match &spec.latent {
        None => 2 * spec.kv_heads * spec.head_dim * layers,
        Some(latent) => {
            let owners = latent.index.owners.iter().filter(|&&owner| owner).count();
            (latent.latent + latent.rotated) * layers + latent.index.dim * from_index(owners)
        }
    };
    Bytes(config.context.page_size.0 * elements * element)
}
