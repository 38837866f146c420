//! `longstraw gate NAME`: a run of known lengths, held to checks with numbers, that leaves a receipt.
//!
//! A gate runs only behind a passed receipt of the one below it, for the same model, ranks, adapters and scale. Its own
//! receipt of an earlier time is moved away before anything else, and `passed` is written true only when all ranks have
//! come to the end and agreed on it. Rank 0 alone reads earlier receipts and judges; the others learn the outcome.
//!
//! What a gate runs is data (`configs/gates`); what it is held to is here: `checks` and `memory` look at one receipt,
//! `parity` at gradients beside plain autograd, `online` at a run that is stopped and resumed.

mod checks;
mod error;
mod memory;
mod online;
mod order;
mod parity;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use error::Error;

pub use crate::report::Check;

use crate::config::{Dtype, Gate, Gradient, Loaded, RunConfig};
use crate::model::spec::Spec;
use crate::report::{self, Receipt, open_log, say, write_receipt};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Bytes, Rank, from_index};
use crate::train::{Finished, Run, RunOptions};
use crate::world::{World, asked_to_stop};
use checks::Expected;
use order::{Earlier, Now, Opened};

/// A gate on its way.
struct Passage<'a> {
    gate: Gate,
    loaded: &'a Loaded,
    /// Whether the order may be broken.
    force: bool,
    /// Whether it has been.
    forced: bool,
}

/// Runs `gate` as `loaded` says (made by [`crate::config::load_gate`]) and judges it. The receipt is written; it says
/// whether the gate has passed, on every rank the same. `force` lets it run out of order.
///
/// # Errors
/// When the gate below has not passed, or the run fails.
pub fn run(gate: Gate, loaded: &Loaded, force: bool, world: &mut World) -> Result<Receipt, Failure> {
    if gate == Gate::Key {
        return world.agree(Err(Error::NoRanks { gate: gate.name() }.into()));
    }
    let mut passage = Passage { gate, loaded, force: world.any(force), forced: false };
    passage.behind(None, world)?;
    let dir = &loaded.rank.dir;
    let moved = if world.all.rank() == Rank(0) { move_away(dir) } else { Ok(()) };
    world.agree(moved.map_err(Failure::from))?;
    world.agree(open_log(dir, world.all.rank(), world.all.size(), &loaded.rank.log).map_err(Failure::from))?;
    let receipt = match gate {
        Gate::Short => passage.both_gradients(world)?,
        Gate::Online => passage.online(world)?,
        _ => passage.once(world)?,
    };
    passage.end(receipt, world)
}

/// The failure of a gate that has not passed, on every rank.
///
/// # Errors
/// [`Error::NotPassed`], unless it has or was asked to stop before its end.
pub fn verdict(receipt: &Receipt, dir: &Path) -> Result<(), Error> {
    if receipt.passed || receipt.stopped {
        return Ok(());
    }
    let failed = receipt.checks.iter().filter(|check| !check.passed);
    let failed = failed.map(|check| format!("{}: {}", check.name, check.means)).collect();
    Err(Error::NotPassed { gate: receipt.gate.unwrap_or_default(), file: dir.join("receipt.json"), failed })
}

/// The receipt of a gate that has no ranks and no model, written into `dir`; it passes where every check holds. An earlier
/// receipt there should have been moved away before the first check, with [`move_away`].
///
/// # Errors
/// When it cannot be written.
pub fn end_alone(gate: Gate, config: &RunConfig, dir: &Path, checks: Vec<Check>) -> Result<Receipt, Failure> {
    let receipt = Receipt {
        gate: Some(gate.name()),
        passed: !checks.is_empty() && checks.iter().all(|check| check.passed),
        checks,
        scale: config.gate.scale,
        finished: finished(),
        commit: commit(),
        config_digest: config.digest(),
        ..Receipt::default()
    };
    write_receipt(dir, &receipt)?;
    say(&report::checks(&receipt));
    Ok(receipt)
}

/// UTC, in the form that receipts have.
fn finished() -> String {
    chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

fn commit() -> &'static str {
    option_env!("LONGSTRAW_COMMIT").unwrap_or("unknown")
}

/// Moves the receipt of an earlier time to `receipt.earlier.json`: a gate that ends in the middle must not have passed.
/// A wish of that time to be started again is gone.
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

impl Passage<'_> {
    /// Compares with the receipt of the gate below; with the opened run's model and adapters once there is one.
    fn behind(&mut self, run: Option<&Run>, world: &World) -> Result<(), Failure> {
        let config = &self.loaded.run;
        let now = Now {
            ranks: world.all.size(),
            cp_size: crate::runtime::units::as_index(config.cp_size(from_index(world.all.size()))),
            scale: config.gate.scale,
            dtype: config.model.dtype.to_string(),
            model: run.map(|run| Opened {
                digest: run.session.model_digest().to_owned(),
                adapter: run.session.adapter_form(),
                device: format!("{:?}", run.session.weights().device()),
                // It has kernels that repeat, and the gates below may have others.
                kernel: (self.gate != Gate::Online).then(|| run.session.attention_kernel().to_owned()),
            }),
        };
        let found = match world.all.rank() {
            Rank(0) => order::check(self.gate, &self.loaded.rank.dir, &now),
            _ => Ok(None),
        };
        let broken = matches!(found, Err(Error::Order { .. }));
        let found = match found {
            Err(refusal @ Error::Order { .. }) if self.force => {
                if !self.forced {
                    world.remark(&format!("out of order, as asked: {refusal}"));
                }
                Ok(None)
            }
            other => other,
        };
        let below = world.agree(found.map_err(Failure::from))?;
        self.forced |= world.any(broken);
        if let Some(earlier) = below.filter(|_: &Earlier| run.is_some()) {
            let name = self.gate.below().map_or("", Gate::name);
            if earlier.commit != commit() {
                world.remark(&format!("{name} passed with commit {}, this is {}", earlier.commit, commit()));
            }
            if earlier.forced {
                world.remark(&format!("{name} passed out of order: it was forced, and nothing below it counts"));
            }
        }
        Ok(())
    }

    /// One run in the gate's own folder.
    fn once(&mut self, world: &mut World) -> Result<Receipt, Failure> {
        let run = Run::open(self.loaded, RunOptions::default(), world)?;
        self.behind(Some(&run), world)?;
        let Finished { mut receipt, session, .. } = run.train(world)?;
        let mut checks = checks::of_run(&receipt, &self.expected(session.spec()));
        checks.extend(memory::against_plan(&receipt));
        let compared = match world.all.rank() {
            Rank(0) => self.compared(&mut receipt),
            _ => Ok(Vec::new()),
        };
        checks.extend(world.agree(compared.map_err(Failure::from))?);
        receipt.checks = checks;
        Ok(receipt)
    }

    /// Both gradient modes, each in a folder of its own, and parity. The receipt is that of the run that later gates are
    /// compared with.
    fn both_gradients(&mut self, world: &mut World) -> Result<Receipt, Failure> {
        let run = Run::open(&self.within("response", Gradient::Response), RunOptions::default(), world)?;
        self.behind(Some(&run), world)?;
        let mut response = run.train(world)?;
        response.write(world)?;
        let Finished { mut receipt, session, .. } = response;
        let expected = self.expected(session.spec());
        drop(session);
        let exact = self.within("exact", Gradient::Exact);
        let mut exact = Run::open(&exact, RunOptions::default(), world)?.train(world)?;
        exact.write(world)?;
        let mut checks = Vec::new();
        for (mode, receipt) in [("response", &receipt), ("exact", &exact.receipt)] {
            let of_mode = checks::of_run(receipt, &expected).into_iter().chain(memory::against_plan(receipt));
            checks.extend(of_mode.map(|check| named(mode, check)));
        }
        checks.extend(parity::checks(&exact.session, &self.loaded.run, world)?);
        receipt.checks = checks;
        Ok(receipt)
    }

    /// The gate's configuration with another gradient mode, in a folder below the gate's.
    fn within(&self, folder: &str, gradient: Gradient) -> Loaded {
        let mut loaded = self.loaded.clone();
        loaded.rank.dir = self.loaded.rank.dir.join(folder);
        loaded.run.grpo.gradient = gradient;
        loaded
    }

    /// Checks against the receipts of earlier gates. What cannot be compared fails, unless a forced order is the reason.
    fn compared(&self, receipt: &mut Receipt) -> Result<Vec<Check>, Error> {
        let earlier = |gate: Gate| {
            let file: PathBuf = order::beside(&self.loaded.rank.dir, gate);
            let file = match (gate, receipt.gradient.as_str()) {
                // It runs both modes, and its own receipt is that of the other one.
                (Gate::Short, "exact") => file.with_file_name("exact").join("receipt.json"),
                _ => file,
            };
            order::read(&file).map(|found| found.ok_or_else(|| format!("{} is not there", file.display())))
        };
        let below = self.gate.below().unwrap_or(Gate::Key);
        let (what, outcome) = match self.gate {
            Gate::K128 | Gate::K256 | Gate::K512 | Gate::M1 | Gate::M2 => {
                ("growth with the length", earlier(below)?.and_then(|below| memory::growth(receipt, &below)))
            }
            Gate::Eight => {
                let outcome = earlier(Gate::Two)?.and_then(|two| {
                    let mut checks = memory::group(receipt, &two)?;
                    checks.push(memory::group_host(receipt, &two));
                    Ok(checks)
                });
                say(&memory::beside_the_guide(receipt));
                ("growth with the group", outcome)
            }
            _ => return Ok(Vec::new()),
        };
        Ok(outcome.unwrap_or_else(|reason| {
            let reason = format!("{what}: {reason}");
            if self.forced {
                receipt.not_checked.push(reason);
                return Vec::new();
            }
            vec![not_compared(&reason, below)]
        }))
    }

    fn expected(&self, spec: &Spec) -> Expected {
        let config = &self.loaded.run;
        Expected {
            updates: config.run.steps,
            pages: config.prompt_pages(),
            page_bytes: page_bytes(config, spec),
            advantages: match self.gate {
                Gate::One => Some(vec![1.0]),
                Gate::Two | Gate::Eight => {
                    Some((0..config.grpo.group_size).map(|answer| if answer % 2 == 0 { -1.0 } else { 1.0 }).collect())
                }
                _ => None,
            },
        }
    }

    /// All ranks have come here, so the outcome is written; every rank returns the same verdict.
    fn end(&self, mut receipt: Receipt, world: &World) -> Result<Receipt, Failure> {
        world.agree(Ok(()))?;
        receipt.checks.push(checks::as_named(&receipt, self.gate));
        let passed = receipt.checks.iter().all(|check| check.passed);
        let here = world.all.rank() == Rank(0);
        receipt.gate = Some(self.gate.name());
        receipt.forced = self.forced;
        // Rank 0 alone has seen all of it.
        receipt.passed = world.any(here && passed);
        receipt.finished = finished();
        // Asked to stop before its end, a gate has nothing to go on from: it begins anew, and no check has said anything.
        receipt.stopped = !receipt.passed && world.any(asked_to_stop());
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

/// The failed check of a gate that cannot be set against the one below it, although it stands in order.
fn not_compared(reason: &str, below: Gate) -> Check {
    let means = "this gate is about what it adds to the one below, and the two are not alike enough to tell: run both with the \
                 same grpo.gradient, memory.micro_block and memory.head_block";
    let limit = format!("comparable with the receipt of {}", below.name());
    checks::check("compared", serde_json::json!(reason), limit, false, means)
}

/// A check of one of a gate's runs.
fn named(run: &str, check: Check) -> Check {
    Check { name: format!("{run}.{}", check.name), ..check }
}

/// Bytes of one page's keys and values over all layers.
fn page_bytes(config: &RunConfig, spec: &Spec) -> Bytes {
    let element = match config.model.dtype {
        Dtype::Bfloat16 => 2,
        Dtype::Float32 => 4,
        Dtype::Float64 => 8,
    };
    let position = 2 * spec.kv_heads * spec.head_dim * element;
    Bytes(config.context.page_size.0 * position * from_index(spec.layers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::gate::checks::check;

    fn read(dir: &Path) -> serde_json::Value {
        let text = fs::read_to_string(dir.join("receipt.json")).expect("written");
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn a_gate_without_ranks_leaves_a_receipt_that_the_next_one_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("gate1_key");
        let config = RunConfig::laptop();
        let one = |passed| vec![check("endpoint", serde_json::json!(200), "200", passed, "the key is refused")];
        let failed = end_alone(Gate::Key, &config, &dir, one(false)).expect("written");
        assert!(verdict(&failed, &dir).expect_err("failed").to_string().contains("endpoint: the key is refused"));
        assert_eq!(read(&dir)["passed"], false);
        move_away(&dir).expect("moved");
        assert!(!dir.join("receipt.json").exists() && dir.join("receipt.earlier.json").exists());
        assert!(end_alone(Gate::Key, &config, &dir, one(true)).expect("written").passed);
        let now = Now { ranks: 8, cp_size: 8, scale: 64, dtype: "bfloat16".into(), model: None };
        assert!(order::check(Gate::Short, &folder.path().join("gate2_32k"), &now).is_ok());
        assert!(!end_alone(Gate::Key, &config, &dir, Vec::new()).expect("written").passed, "nothing was looked at");
    }
}
