//! Checks of memory: measured bytes against the plan, and against the receipt of an earlier gate.
//!
//! Measured bytes are the allocators' own peaks, the plan is a sum of formulas, and what a position or an answer adds is
//! a difference of two runs: three numbers that share no code.

use serde_json::json;

use super::checks::check;
use super::earlier_receipt::Earlier;
use crate::report::{Check, Receipt};
use crate::runtime::units::{Bytes, float, from_index};

/// A peak may be this factor of the plan: gaps between tensors, and small tensors that no addend names.
const ABOVE_PLAN: f64 = 1.05;
/// And not below this factor: a plan of twice what is needed would refuse what fits.
const BELOW_PLAN: f64 = 0.5;
/// Device bytes that are no part of a comparison: small tensors and gaps of any run, which decide only where a gate is
/// scaled down. Seen on a CPU: up to 260,000 away from the plan, where another phase becomes the largest.
const SMALL_CPU: f64 = 524_288.0;
/// On a GPU libraries take their workspace from the same allocator.
const SMALL_GPU: f64 = 33_554_432.0;
/// The same for host memory, of which the plan is a formula of few factors.
const SMALL_HOST: f64 = 65_536.0;
/// How far, as a share, the bytes that a position adds may differ from the plan's.
const GROWTH: f64 = 0.10;
/// Bytes that six further answers may add at full length.
const FURTHER_ANSWERS_BYTES: f64 = 0.21e9;

/// Device bytes that decide nothing.
fn small(receipt: &Receipt) -> f64 {
    if receipt.device.starts_with("Cuda") { SMALL_GPU } else { SMALL_CPU }
}

fn most(bytes: &[Bytes]) -> f64 {
    float(bytes.iter().map(|bytes| bytes.0).max().unwrap_or(0))
}

/// Peaks of device and host against the plan.
pub(super) fn against_plan(receipt: &Receipt) -> Vec<Check> {
    let device = "something is alive on the device that the plan does not know of, or much less than it says; the table \
                  by phase and kind in this receipt tells which: check memory.layer_wise_transfer and memory.micro_block";
    let host = "something waits in host memory that the plan does not know of, or much less than it says; the table by \
                phase and kind in this receipt tells which: check memory.cpu_offload_pages and memory.inputs_every";
    [
        ("device_memory", &receipt.peak_device_bytes, receipt.plan_device_bytes, small(receipt), device),
        ("host_memory", &receipt.peak_host_bytes, receipt.plan_host_bytes, SMALL_HOST, host),
    ]
    .into_iter()
    .map(|(name, peaks, plan, small, means)| {
        let (peak, planned) = (most(peaks), float(plan.0));
        let inside = peak <= planned * ABOVE_PLAN + small && peak >= planned * BELOW_PLAN - small;
        let limit = format!("{BELOW_PLAN} to {ABOVE_PLAN} times the plan's {} bytes, give or take {small:.0}", plan.0);
        check(name, json!(peaks), limit, inside && peaks.len() == receipt.ranks, means)
    })
    .collect()
}

/// What a further position adds, against an earlier gate's receipt at another length.
///
/// # Errors
/// Why the two cannot be compared.
pub(super) fn growth(receipt: &Receipt, earlier: &Earlier) -> Result<Vec<Check>, String> {
    let mut reasons = earlier.comparable(receipt);
    if earlier.group_size != receipt.group_size {
        reasons.push(format!("its group was {}, here {}", earlier.group_size, receipt.group_size));
    }
    if earlier.positions >= receipt.positions {
        reasons.push(format!("it had {} positions, here {}", earlier.positions, receipt.positions));
    }
    if !reasons.is_empty() {
        return Err(reasons.join(", "));
    }
    let positions = float(receipt.positions.0) - float(earlier.positions.0);
    let means = "a further position costs other bytes than planned: something lives that grows with the context, or pages do \
                 not wait where they should; check memory.cpu_offload_pages, memory.prompt_no_grad and parallel.cp_size";
    let checks = [
        (
            "device_growth",
            most(&receipt.peak_device_bytes) - most(&earlier.peak_device_bytes),
            float(receipt.plan_device_bytes.0) - float(earlier.plan_device_bytes.0),
            small(receipt),
        ),
        (
            "host_growth",
            most(&receipt.peak_host_bytes) - most(&earlier.peak_host_bytes),
            float(receipt.plan_host_bytes.0) - float(earlier.plan_host_bytes.0),
            SMALL_HOST,
        ),
    ];
    Ok(checks
        .into_iter()
        .map(|(name, measured, planned, small)| {
            let inside = (measured - planned).abs() <= GROWTH * planned.abs() + small;
            let limit = format!(
                "within {GROWTH} of the plan's {:.3} bytes a position, give or take {small:.0} in all",
                planned / positions
            );
            check(name, json!(measured / positions), limit, inside, means)
        })
        .collect())
}

/// What further answers add to the device, against the gate with fewer; the receipt gets seconds and bytes of one.
///
/// # Errors
/// Why the two cannot be compared.
pub(super) fn group(receipt: &mut Receipt, earlier: &Earlier) -> Result<Vec<Check>, String> {
    let mut reasons = earlier.comparable(receipt);
    if earlier.positions != receipt.positions {
        reasons.push(format!("it had {} positions, here {}", earlier.positions, receipt.positions));
    }
    if earlier.group_size >= receipt.group_size {
        reasons.push(format!("its group was {}, here {}", earlier.group_size, receipt.group_size));
    }
    if earlier.peak_device_bytes.len() != receipt.peak_device_bytes.len() {
        reasons.push(format!("it has the peaks of {} ranks", earlier.peak_device_bytes.len()));
    }
    if !reasons.is_empty() {
        return Err(reasons.join(", "));
    }
    let answers = float(receipt.group_size - earlier.group_size);
    let pairs = receipt.peak_device_bytes.iter().zip(&earlier.peak_device_bytes);
    let added: Vec<f64> = pairs.map(|(now, before)| float(now.0) - float(before.0)).collect();
    let worst = added.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    receipt.device_bytes_per_further_answer = Some(worst / answers);
    receipt.seconds_per_further_answer = Some((receipt.seconds.total - earlier.seconds.total) / answers);
    let planned = float(receipt.plan_device_bytes.0) - float(earlier.plan_device_bytes.0);
    // Answers are as much shorter as the gate is scaled, and so is what may be left of them; and a small model's answers
    // are so small that the same share of its whole sum says more.
    let left = FURTHER_ANSWERS_BYTES / float(receipt.scale.max(1));
    let share = (ABOVE_PLAN - 1.0) * float(receipt.plan_device_bytes.0) + SMALL_HOST;
    let allowed = planned.max(0.0) + left.min(share);
    let limit = format!("at most {allowed:.0} bytes more on any rank (the plan says {planned:.0} more)");
    let means = "memory grows with the group: further answers take more than one pack does: check prompt_no_grad and \
                 layer_wise_transfer";
    Ok(vec![check("group_memory", json!(added), limit, worst <= allowed, means)])
}

/// Host bytes that further answers wait in, exactly.
pub(super) fn group_host(receipt: &Receipt, earlier: &Earlier) -> Check {
    let (measured, planned) = (
        most(&receipt.peak_host_bytes) - most(&earlier.peak_host_bytes),
        float(receipt.plan_host_bytes.0) - float(earlier.plan_host_bytes.0),
    );
    let limit = format!("within {GROWTH} of the plan's {planned:.0} bytes, give or take {SMALL_HOST:.0}");
    let means = "further answers take other bytes in host memory than answers × rows × width × layers: check \
                 memory.prompt_no_grad and context.answer_len";
    let inside = (measured - planned).abs() <= GROWTH * planned.abs() + SMALL_HOST;
    check("group_host_memory", json!(measured), limit, inside, means)
}

/// Capture's share and the cost of a further answer, next to the users' guide's numbers at 2,097,152 positions.
pub(super) fn compared_with_guide(receipt: &Receipt) -> String {
    let shown = |value: Option<f64>, unit: f64| value.map_or("unknown".into(), |value| format!("{:.3}", value / unit));
    format!(
        "capture {:.1} % of the time (guide: about 90 %); a further answer: {} s (guide: about 265 s), {} GB on the device \
         (guide: tenths of a GB for six), on {} ranks",
        100.0 * receipt.capture_share,
        shown(receipt.seconds_per_further_answer, 1.0),
        shown(receipt.device_bytes_per_further_answer, 1e9),
        from_index(receipt.ranks)
    )
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{failed, good};
    use super::*;
    use crate::runtime::units::Tokens;

    const MB: u64 = 1_000_000;

    /// A check's name, and a fault that should fail it.
    type Planted = (&'static str, fn(&mut Receipt));
    /// A difference of the earlier receipt, and words of it.
    type Other = (fn(&mut Earlier), &'static str);

    /// At 512 positions: 300 MB of 310 planned on the device, 200 of 200 in host memory.
    fn measured() -> Receipt {
        Receipt {
            peak_device_bytes: vec![Bytes(300 * MB), Bytes(290 * MB)],
            plan_device_bytes: Bytes(310 * MB),
            peak_host_bytes: vec![Bytes(190 * MB), Bytes(200 * MB)],
            plan_host_bytes: Bytes(200 * MB),
            ..good()
        }
    }

    /// The gate before, of half the positions and bytes.
    fn shorter() -> Earlier {
        Earlier {
            scale: 1,
            gradient: "response".into(),
            ranks: 2,
            cp_size: 2,
            positions: Tokens(256),
            group_size: 2,
            peak_device_bytes: vec![Bytes(150 * MB), Bytes(145 * MB)],
            plan_device_bytes: Bytes(155 * MB),
            peak_host_bytes: vec![Bytes(95 * MB), Bytes(100 * MB)],
            plan_host_bytes: Bytes(100 * MB),
            ..Earlier::default()
        }
    }

    #[test]
    fn peaks_far_from_the_plan_fail_and_near_it_pass() {
        assert_eq!(failed(&against_plan(&measured())), Vec::<&str>::new());
        let rows: [Planted; 4] = [
            ("device_memory", |r| r.peak_device_bytes[1] = Bytes(330 * MB)),
            ("device_memory", |r| r.peak_device_bytes = vec![Bytes(150 * MB); 2]),
            ("host_memory", |r| r.peak_host_bytes[0] = Bytes(220 * MB)),
            ("host_memory", |r| r.peak_host_bytes = vec![Bytes(90 * MB); 2]),
        ];
        for (name, plant) in rows {
            let mut receipt = measured();
            plant(&mut receipt);
            assert_eq!(failed(&against_plan(&receipt)), [name]);
        }
    }

    #[test]
    fn a_position_that_costs_more_than_planned_fails() {
        assert_eq!(failed(&growth(&measured(), &shorter()).expect("comparable")), Vec::<&str>::new());
        let device = Receipt { peak_device_bytes: vec![Bytes(330 * MB), Bytes(0)], ..measured() };
        assert_eq!(failed(&growth(&device, &shorter()).expect("comparable")), ["device_growth"]);
        let host = Receipt { peak_host_bytes: vec![Bytes(120 * MB), Bytes(0)], ..measured() };
        let checks = growth(&host, &shorter()).expect("comparable");
        assert_eq!(failed(&checks), ["host_growth"]);
        assert!(checks[1].means.contains("grows with the context"));
        // 20 MB over 256 positions, where 100 are planned.
        assert_eq!(checks[1].value, json!(78_125.0));
    }

    #[test]
    fn receipts_of_other_runs_are_not_compared() {
        let mut receipt = measured();
        let rows: [Other; 5] = [
            (|e| e.gradient = "exact".into(), "its gradient was exact, here response"),
            (|e| e.group_size = 8, "its group was 8, here 2"),
            (|e| e.positions = Tokens(512), "it had 512 positions"),
            (|e| e.scale = 64, "its gate.scale was 64, here 1"),
            (|e| e.micro_blocks = [Tokens(1), Tokens(0)], "its micro-blocks were 1 and 0"),
        ];
        for (plant, words) in rows {
            let mut earlier = shorter();
            plant(&mut earlier);
            assert!(growth(&receipt, &earlier).expect_err("not comparable").contains(words), "{words}");
        }
        assert!(group(&mut receipt, &shorter()).expect_err("another length").contains("it had 256 positions"));
        assert_eq!(receipt.seconds_per_further_answer, None);
    }

    /// The gates with two and with eight answers at one length.
    fn groups() -> (Receipt, Earlier) {
        let mut eight = Receipt { group_size: 8, plan_host_bytes: Bytes(260 * MB), ..measured() };
        eight.peak_device_bytes = vec![Bytes(151 * MB), Bytes(145 * MB)];
        eight.plan_device_bytes = Bytes(155 * MB);
        eight.peak_host_bytes = vec![Bytes(155 * MB), Bytes(160 * MB)];
        eight.plan_host_bytes = Bytes(160 * MB);
        eight.seconds.total = 16.0;
        let mut two = Earlier { positions: Tokens(512), ..shorter() };
        two.seconds.total = 10.0;
        (eight, two)
    }

    #[test]
    fn memory_that_grows_with_the_group_fails_in_the_users_words() {
        let (mut eight, two) = groups();
        assert_eq!(failed(&group(&mut eight, &two).expect("comparable")), Vec::<&str>::new());
        assert_eq!(eight.seconds_per_further_answer, Some(1.0));
        assert_eq!(eight.device_bytes_per_further_answer, Some(1e6 / 6.0));
        assert!(group_host(&eight, &two).passed);
        eight.peak_device_bytes[1] = Bytes(145 * MB + 210 * MB + 1);
        let checks = group(&mut eight, &two).expect("comparable");
        assert_eq!(failed(&checks), ["group_memory"]);
        assert!(
            checks[0]
                .means
                .contains("further answers take more than one pack does: check prompt_no_grad and layer_wise_transfer")
        );
        // At full length six more answers may add 0.21 GB.
        let (mut eight, mut two) = groups();
        (eight.plan_device_bytes, two.plan_device_bytes) = (Bytes(100_000 * MB), Bytes(100_000 * MB));
        two.peak_device_bytes = vec![Bytes(97_500 * MB); 2];
        eight.peak_device_bytes = vec![Bytes(97_500 * MB), Bytes(97_710 * MB)];
        assert_eq!(failed(&group(&mut eight, &two).expect("comparable")), Vec::<&str>::new());
        eight.peak_device_bytes[0] = Bytes(97_711 * MB);
        assert_eq!(failed(&group(&mut eight, &two).expect("comparable")), ["group_memory"]);
        // A scaled gate allows as much less.
        let (mut eight, mut two) = groups();
        (eight.scale, two.scale) = (64, 64);
        eight.peak_device_bytes[0] = Bytes(154 * MB);
        assert_eq!(failed(&group(&mut eight, &two).expect("comparable")), ["group_memory"]);
    }

    #[test]
    fn answers_that_wait_in_more_host_memory_than_planned_fail() {
        let (mut eight, two) = groups();
        eight.peak_host_bytes[0] = Bytes(180 * MB);
        let found = group_host(&eight, &two);
        assert!(!found.passed && found.name == "group_host_memory");
    }

    #[test]
    fn a_further_answer_is_compared_with_the_guide() {
        let (mut eight, two) = groups();
        let _ = group(&mut eight, &two).expect("comparable");
        eight.capture_share = 0.875;
        let words = compared_with_guide(&eight);
        for part in ["capture 87.5 %", "about 90 %", "a further answer: 1.000 s", "about 265 s", "0.000 GB"] {
            assert!(words.contains(part), "{words}");
        }
    }
}
