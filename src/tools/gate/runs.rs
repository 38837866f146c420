//! Gates of one run, and of one run in each gradient mode.

use std::path::PathBuf;

use serde_json::json;

use super::attempt::Attempt;
use super::checks;
use super::error::Error;
use super::{earlier_receipt, memory, parity};
use crate::config::{Gate, Gradient, Growth, Runs};
use crate::report::{Check, Receipt, say};
use crate::runtime::failure::Failure;
use crate::runtime::units::Rank;
use crate::train::{Begin, Finished, Run, RunFolder, RunOptions};
use crate::world::World;

/// A measurement: it saves nothing, and checkpoints that lie in its folder are no obstacle and stay as they are.
const MEASURED: RunOptions = RunOptions { begin: Begin::Anew, stop_after: None, keeps_progress: false };

/// One run in the gate's own folder, which comes back still locked.
pub(super) fn once(
    attempt: &mut Attempt<'_>,
    folder: RunFolder,
    world: &mut World,
) -> Result<(Receipt, RunFolder), Failure> {
    let run = Run::open_in(folder, attempt.loaded, MEASURED, world)?;
    attempt.admit(Some(&run), world)?;
    let Finished { mut receipt, session, folder, .. } = run.train(world)?;
    let mut checks = checks::of_run(&receipt, &attempt.expected(session.spec()));
    checks.extend(memory::against_plan(&receipt));
    let compared = match world.all.rank() {
        Rank(0) => compared(attempt, &mut receipt),
        _ => Ok(Vec::new()),
    };
    checks.extend(world.agree(compared.map_err(Failure::from))?);
    receipt.checks = checks;
    Ok((receipt, folder))
}

/// A run in each gradient mode, in folders of their own, and parity. The receipt is that of mode `response`, which later
/// gates are compared with.
pub(super) fn both_gradients(attempt: &mut Attempt<'_>, world: &mut World) -> Result<Receipt, Failure> {
    let loaded = attempt.within("response", Gradient::Response);
    let run = Run::open(&loaded, MEASURED, world)?;
    attempt.admit(Some(&run), world)?;
    let mut response = run.train(world)?;
    response.write(world)?;
    let Finished { mut receipt, session, .. } = response;
    let expected = attempt.expected(session.spec());
    drop(session);
    let loaded = attempt.within("exact", Gradient::Exact);
    let mut exact = Run::open(&loaded, MEASURED, world)?.train(world)?;
    exact.write(world)?;
    let mut checks = Vec::new();
    for (mode, receipt) in [("response", &receipt), ("exact", &exact.receipt)] {
        let of_mode = checks::of_run(receipt, &expected).into_iter().chain(memory::against_plan(receipt));
        checks.extend(of_mode.map(|check| checks::prefixed(mode, check)));
    }
    checks.extend(parity::checks(&exact.session, &attempt.loaded.run, world)?);
    receipt.checks = checks;
    Ok(receipt)
}

/// Checks against the receipt of the gate that this one is compared with. A comparison that cannot be made fails, unless
/// the order was broken by force.
fn compared(attempt: &Attempt<'_>, receipt: &mut Receipt) -> Result<Vec<Check>, Error> {
    let Some((other, growth)) = attempt.gate.comparison() else { return Ok(Vec::new()) };
    let mut file: PathBuf = earlier_receipt::receipt_of(&other, &attempt.loaded.rank.dir);
    if other.runs() == Runs::BothGradients && receipt.gradient == "exact" {
        // Its own receipt is that of the other mode.
        file = file.with_file_name("exact").join("receipt.json");
    }
    let earlier = earlier_receipt::read(&file)?.ok_or_else(|| format!("{} is not there", file.display()));
    let (what, outcome) = match growth {
        Growth::Length => ("growth with the length", earlier.and_then(|other| memory::growth(receipt, &other))),
        Growth::Group => {
            let outcome = earlier.and_then(|other| {
                let mut checks = memory::group(receipt, &other)?;
                checks.push(memory::group_host(receipt, &other));
                Ok(checks)
            });
            say(&memory::compared_with_guide(receipt));
            ("growth with the group", outcome)
        }
    };
    Ok(outcome.unwrap_or_else(|reason| {
        let reason = format!("{what}: {reason}");
        if attempt.forced {
            receipt.not_checked.push(reason);
            return Vec::new();
        }
        vec![not_compared(&reason, &other)]
    }))
}

/// The failed check of a gate that stands in order and cannot be compared with the gate that measures its growth.
fn not_compared(reason: &str, other: &Gate) -> Check {
    let means = "this gate is about what it adds to an earlier one, and the two are not alike enough to tell: run both with \
                 the same grpo.gradient, memory.micro_block and memory.head_block";
    let limit = format!("comparable with the receipt of {}", other.name());
    checks::check("compared", json!(reason), limit, false, means)
}
