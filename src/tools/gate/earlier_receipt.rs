//! The order of gates: each gate needs a passed receipt of the gate before it, for the same model, ranks, adapters, scale,
//! number format, kind of device and attention kernel, and not older than the receipts before that one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::checks::AS_NAMED;
use super::error::Error;
use crate::config::Gate;
use crate::report::{AdapterForm, Receipt};
use crate::runtime::units::{Bytes, Tokens};

/// What a later gate reads in the receipt of an earlier one.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Earlier {
    pub(super) gate: Option<String>,
    pub(super) passed: bool,
    pub(super) checks: Vec<EarlierCheck>,
    pub(super) scale: u64,
    pub(super) commit: String,
    pub(super) model_digest: String,
    pub(super) adapter: AdapterForm,
    pub(super) gradient: String,
    pub(super) dtype: String,
    pub(super) device: String,
    pub(super) attention_kernel: String,
    pub(super) delta_rule: Option<String>,
    pub(super) finished: String,
    pub(super) forced: bool,
    pub(super) ranks: usize,
    pub(super) cp_size: usize,
    pub(super) positions: Tokens,
    pub(super) group_size: u64,
    pub(super) seconds: EarlierSeconds,
    pub(super) peak_device_bytes: Vec<Bytes>,
    pub(super) peak_host_bytes: Vec<Bytes>,
    pub(super) plan_device_bytes: Bytes,
    pub(super) plan_host_bytes: Bytes,
    pub(super) micro_blocks: [Tokens; 2],
}

/// A check's name and outcome.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct EarlierCheck {
    pub(super) name: String,
    pub(super) passed: bool,
}

/// Seconds of all updates.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct EarlierSeconds {
    pub(super) total: f64,
}

/// What the earlier receipt is compared with, as far as it is known.
#[derive(Clone, Debug)]
pub(super) struct Now {
    pub(super) ranks: usize,
    pub(super) cp_size: usize,
    pub(super) scale: u64,
    pub(super) dtype: String,
    /// Known once the model is loaded.
    pub(super) model: Option<Opened>,
}

/// What is known of a run once its model is loaded.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub(super) digest: String,
    pub(super) adapter: AdapterForm,
    /// Where rank 0 computes, as receipts say it.
    pub(super) device: String,
    /// What computes its layers; `None` where the gate has its own kernels.
    pub(super) kernels: Option<Kernels>,
}

/// Names of what computes a run's layers.
#[derive(Clone, Debug)]
pub(super) struct Kernels {
    pub(super) attention: String,
    /// `None` where no layer has a gated delta rule.
    pub(super) delta_rule: Option<String>,
}

/// The receipt file of `gate`, for a gate that writes into `dir`: their folders stand side by side.
pub(super) fn receipt_of(gate: &Gate, dir: &Path) -> PathBuf {
    // "runs/x/" and "runs/x" have the same parent; a bare name has the working directory.
    dir.parent().unwrap_or(Path::new("")).join(gate.name()).join("receipt.json")
}

/// A receipt, if there is one.
pub(super) fn read(file: &Path) -> Result<Option<Earlier>, Error> {
    match fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::File { file: file.into(), source: io::Error::from(error) }),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::File { file: file.into(), source }),
    }
}

impl Earlier {
    /// Every reason why this is no receipt of a passed `gate` for the same thing as `now`.
    pub(super) fn against(&self, gate: &Gate, now: &Now) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.gate.as_deref() != Some(gate.name()) {
            reasons.push(format!("it is of {}", self.gate.as_deref().unwrap_or("a training run")));
        }
        if !self.passed {
            let failed: Vec<&str> =
                self.checks.iter().filter(|check| !check.passed).map(|check| check.name.as_str()).collect();
            let failed = if failed.is_empty() { "it was not ended".to_owned() } else { failed.join(", ") };
            reasons.push(format!("it has not passed ({failed})"));
        }
        // The endpoint's answer has neither ranks nor a model.
        if gate.is_endpoint() {
            return reasons;
        }
        let mut named = self.checks.iter().filter(|check| check.name == AS_NAMED).peekable();
        if named.peek().is_none() {
            reasons.push(format!("its check {AS_NAMED} is missing"));
        } else if self.passed && !named.all(|check| check.passed) {
            reasons.push(format!("its check {AS_NAMED} failed"));
        }
        reasons.extend(self.other_run(now));
        reasons
    }

    /// Every difference between the run of this receipt and `now`.
    pub(super) fn other_run(&self, now: &Now) -> Vec<String> {
        let mut reasons = Vec::new();
        let mut differs = |what: &str, earlier: String, now: String| {
            if earlier != now {
                reasons.push(format!("its {what} {earlier}, here {now}"));
            }
        };
        differs("ranks were", self.ranks.to_string(), now.ranks.to_string());
        differs("ranks on one prompt were", self.cp_size.to_string(), now.cp_size.to_string());
        differs("gate.scale was", self.scale.to_string(), now.scale.to_string());
        differs("model.dtype was", self.dtype.clone(), now.dtype.clone());
        if let Some(Opened { digest, adapter, device, kernels }) = &now.model {
            differs("model's digest was", self.model_digest.clone(), digest.clone());
            differs("adapters were", adapter_words(&self.adapter), adapter_words(adapter));
            differs("device was", device_kind(&self.device), device_kind(device));
            if let Some(Kernels { attention, delta_rule }) = kernels {
                let named = |rule: &Option<String>| rule.clone().unwrap_or_else(|| "none".to_owned());
                differs("attention kernel was", self.attention_kernel.clone(), attention.clone());
                differs("delta rule was", named(&self.delta_rule), named(delta_rule));
            }
        }
        reasons
    }

    /// Every reason why its numbers cannot be compared with those of `receipt`, which may differ in length or group.
    pub(super) fn comparable(&self, receipt: &Receipt) -> Vec<String> {
        let now = Now {
            ranks: receipt.ranks,
            cp_size: receipt.cp_size,
            scale: receipt.scale,
            dtype: receipt.dtype.clone(),
            model: Some(Opened {
                digest: receipt.model_digest.clone(),
                adapter: receipt.adapter.clone(),
                device: receipt.device.clone(),
                kernels: Some(Kernels {
                    attention: receipt.attention_kernel.to_owned(),
                    delta_rule: receipt.delta_rule.map(ToOwned::to_owned),
                }),
            }),
        };
        let mut reasons = self.other_run(&now);
        if self.gradient != receipt.gradient {
            reasons.push(format!("its gradient was {}, here {}", self.gradient, receipt.gradient));
        }
        if self.micro_blocks != receipt.micro_blocks {
            let words = |[block, head]: [Tokens; 2]| format!("{block} and {head}");
            let (earlier, here) = (words(self.micro_blocks), words(receipt.micro_blocks));
            reasons.push(format!("its micro-blocks were {earlier}, here {here}"));
        }
        reasons
    }
}

/// A device without its number.
fn device_kind(device: &str) -> String {
    device.split('(').next().unwrap_or_default().to_owned()
}

fn adapter_words(adapter: &AdapterForm) -> String {
    format!("rank {}, alpha {}, on {}", adapter.rank, adapter.alpha, adapter.targets.join(" "))
}

/// Whether `gate` may run in `dir`.
///
/// # Errors
/// [`Error::Order`] with everything that is wrong with the receipt of the gate before.
pub(super) fn check(gate: &Gate, dir: &Path, now: &Now) -> Result<Option<Earlier>, Error> {
    let Some(before) = gate.after() else { return Ok(None) };
    let file = receipt_of(&before, dir);
    let earlier = read(&file)?;
    let mut reasons =
        earlier.as_ref().map_or_else(|| vec!["it is not there".into()], |found| found.against(&before, now));
    if let Some(found) = &earlier {
        reasons.extend(older(dir, &before, found)?);
    }
    if reasons.is_empty() {
        return Ok(earlier);
    }
    Err(Error::Order { gate: gate.name(), before: before.name(), file, reasons })
}

/// The receipts before `gate` that are newer than its own `receipt`: what it stands on has been run again since. The
/// endpoint's answer says nothing about runs, so a key that is tried again makes no receipt old. A gate that stands beside
/// these makes none old either.
fn older(dir: &Path, gate: &Gate, receipt: &Earlier) -> Result<Vec<String>, Error> {
    let mut reasons = Vec::new();
    for lower in gate.all_before().iter().rev().filter(|lower| !lower.is_endpoint()) {
        let Some(under) = read(&receipt_of(lower, dir))? else { continue };
        // All times are UTC in one form, so their order is that of their texts.
        if receipt.finished < under.finished {
            let (own, newer, name) = (&receipt.finished, &under.finished, lower.name());
            reasons.push(format!("it is of {own}, older than that of {name}, {newer}"));
        }
    }
    Ok(reasons)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::gate;
    use super::*;

    fn form() -> AdapterForm {
        AdapterForm { rank: 4, alpha: 8.0, targets: vec!["q_proj".into(), "v_proj".into()] }
    }

    fn cudnn() -> Kernels {
        Kernels { attention: "cudnn".into(), delta_rule: None }
    }

    fn now() -> Now {
        let model = Opened { digest: "abc".into(), adapter: form(), device: "Cuda(0)".into(), kernels: Some(cudnn()) };
        Now { ranks: 8, cp_size: 8, scale: 64, dtype: "bfloat16".into(), model: Some(model) }
    }

    fn named(passed: bool) -> EarlierCheck {
        EarlierCheck { name: AS_NAMED.into(), passed }
    }

    fn earlier() -> Earlier {
        Earlier {
            gate: Some("gate4_g1".into()),
            passed: true,
            checks: vec![named(true)],
            dtype: "bfloat16".into(),
            device: "Cuda(3)".into(),
            attention_kernel: "cudnn".into(),
            scale: 64,
            model_digest: "abc".into(),
            adapter: form(),
            ranks: 8,
            cp_size: 8,
            ..Earlier::default()
        }
    }

    #[test]
    fn a_passed_receipt_of_the_same_thing_lets_the_next_gate_run() {
        assert_eq!(earlier().against(&gate("gate4_g1"), &now()), Vec::<String>::new());
    }

    /// A difference, and the words of the reason.
    type Different = (fn(&mut Earlier), &'static str);

    #[test]
    fn each_difference_stands_against_it_alone() {
        let rows: [Different; 13] = [
            (|e| e.gate = Some("gate3_2m".into()), "it is of gate3_2m"),
            (|e| e.passed = false, "it has not passed (it was not ended)"),
            (|e| e.scale = 1, "its gate.scale was 1, here 64"),
            (|e| e.model_digest = "def".into(), "its model's digest was def, here abc"),
            (|e| e.adapter.rank = 16, "its adapters were rank 16, alpha 8, on q_proj v_proj, here rank 4, alpha 8"),
            (|e| e.ranks = 4, "its ranks were 4, here 8"),
            (|e| e.checks.clear(), "its check as_named is missing"),
            (|e| e.checks = vec![named(false)], "its check as_named failed"),
            (|e| e.dtype = "float32".into(), "its model.dtype was float32, here bfloat16"),
            (|e| e.device = "Cpu".into(), "its device was Cpu, here Cuda"),
            (|e| e.attention_kernel = "plain".into(), "its attention kernel was plain, here cudnn"),
            (|e| e.delta_rule = Some("compiled".into()), "its delta rule was compiled, here none"),
            (|e| e.cp_size = 4, "its ranks on one prompt were 4, here 8"),
        ];
        for (change, words) in rows {
            let mut other = earlier();
            change(&mut other);
            let reasons = other.against(&gate("gate4_g1"), &now());
            assert!(reasons.len() == 1 && reasons[0].starts_with(words), "{reasons:?} for {words}");
        }
    }

    #[test]
    fn a_receipt_that_failed_names_the_checks() {
        let check = |name: &str, passed| EarlierCheck { name: name.into(), passed };
        let failed = Earlier {
            passed: false,
            checks: vec![named(true), check("finite", true), check("pages", false)],
            ..earlier()
        };
        assert_eq!(failed.against(&gate("gate4_g1"), &now()), ["it has not passed (pages)"]);
    }

    #[test]
    fn a_receipt_older_than_one_below_it_does_not_count_and_the_endpoints_makes_none_old() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("gate4_g1");
        let write = |name: &str, second: u64| {
            let receipt = folder.path().join(name);
            fs::create_dir_all(&receipt).expect("a folder");
            let text = format!("{{\"finished\": \"2026-01-02T03:04:{second:02}Z\"}}");
            fs::write(receipt.join("receipt.json"), text).expect("written");
        };
        let top = Earlier { finished: "2026-01-02T03:04:30Z".into(), ..earlier() };
        let reasons = || older(&dir, &gate("gate3_2m"), &top).expect("read");
        for (name, second) in [("gate1_key", 50), ("gate2_32k", 30), ("gate3_1m", 29), ("gate4_g1", 40)] {
            write(name, second);
        }
        assert_eq!(reasons(), Vec::<String>::new());
        write("gate3_128k", 31);
        assert_eq!(reasons(), ["it is of 2026-01-02T03:04:30Z, older than that of gate3_128k, 2026-01-02T03:04:31Z"]);
    }

    #[test]
    fn a_gate_with_kernels_of_its_own_is_not_compared_by_them() {
        let mut online = now();
        online.model.as_mut().expect("it is there").kernels = None;
        let flash = Earlier { attention_kernel: "flash".into(), ..earlier() };
        assert_eq!(flash.against(&gate("gate4_g1"), &online), Vec::<String>::new());
        assert_eq!(flash.against(&gate("gate4_g1"), &now()).len(), 1);
    }

    #[test]
    fn the_refusal_names_the_file_and_both_ways_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("gate5_g2");
        let refused = |now: &Now| check(&gate("gate5_g2"), &dir, now).expect_err("refused").to_string();
        let words = refused(&now());
        for part in ["gate5_g2 runs after gate4_g1", "gate4_g1/receipt.json: it is not there", "make gates", "--force"]
        {
            assert!(words.contains(part), "{words}");
        }
        fs::create_dir_all(folder.path().join("gate4_g1")).expect("a folder");
        fs::write(folder.path().join("gate4_g1/receipt.json"), "{\"gate\": \"gate4_g1\"}").expect("written");
        let words = refused(&now());
        assert!(words.contains("it has not passed") && words.contains("LONGSTRAW_FORCE=1"), "{words}");
        assert_eq!(check(&Gate::endpoint(), &dir, &now()).expect("the first gate asks for nothing"), None);
    }
}
