//! The reference cases: expected values are transformers' in float64.

use std::path::Path;

use longstraw::config::Gradient;
use longstraw::model::family::model_types;
use longstraw::runtime::units::Tokens;
use longstraw::tools::parity::distance::relative;
use longstraw::tools::parity::{self, Options, Report};
use longstraw::world::World;
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::fixture::{device, run};

const CASES: &str = "tests/cases";
const GRADIENTS: [Gradient; 3] = [Gradient::Response, Gradient::Last(Tokens(0)), Gradient::Exact];

/// Every `FAMILY/CASE` that is a folder of tests/cases and whose family is built, in the order of the alphabet.
fn cases() -> Vec<String> {
    let folders = |path: &Path| -> Vec<String> {
        let entries =
            path.read_dir().expect("a folder can be listed").map(|entry| entry.expect("an entry can be read"));
        let folders = entries.filter(|entry| entry.path().is_dir());
        folders.map(|folder| folder.file_name().into_string().expect("names are UTF-8")).collect()
    };
    let family_cases = |family: String| {
        let names = folders(&Path::new(CASES).join(&family));
        names.into_iter().map(move |case| format!("{family}/{case}"))
    };
    let mut cases: Vec<String> = folders(Path::new(CASES)).into_iter().flat_map(family_cases).collect();
    cases.sort();
    // A stored case of a family that is only planned waits for that family.
    cases.retain(|case| {
        let config = read_json(case, "config.json");
        // Of a vision-language checkpoint the text part alone is read.
        let text = config.get("text_config").unwrap_or(&config);
        let family = text["model_type"].as_str().expect("a config names its family");
        model_types().contains(&family)
    });
    assert!(!cases.is_empty(), "{CASES} holds no case");
    cases
}

fn read_json(case: &str, file: &str) -> Value {
    let text = std::fs::read_to_string(Path::new(CASES).join(case).join(file)).expect("a case is complete");
    serde_json::from_str(&text).expect("the file is JSON")
}

/// Gradients that a case expects: of A and B of every adapter that the case gives, for each of the two losses.
fn gradient_count(case: &str) -> usize {
    let file = Path::new(CASES).join(case).join("expected.safetensors");
    let tensors = Tensor::read_safetensors(file).expect("a case is complete");
    2 * tensors.iter().filter(|(name, _)| name.starts_with("lora.")).count()
}

fn report(world: &World, case: &str, options: &Options) -> Report {
    run(parity::run(world, &Path::new(CASES).join(case), options))
}

fn options(gradient: Gradient, kind: Kind, page_size: u64) -> Options {
    // Small pages in many small blocks, on a processor; on a GPU each costs more launches than work.
    let small = device() == tch::Device::Cpu && page_size < 64;
    let micro_block = Tokens(if small { 5 } else { 64 });
    Options { gradient, kind, page_size: Tokens(page_size), micro_block, device: device() }
}

/// A world whose ranks wait for each other's cores: there one case of a family stands for those that hold on fewer ranks, but
/// for families whose states go from rank to rank.
fn is_large(world: &World) -> bool {
    world.all.size() >= 3
}

fn has_state(case: &str) -> bool {
    case.starts_with("qwen3_5") || case.starts_with("qwen3_next")
}

/// Both losses, logits, log-probabilities and every adapter gradient, in float64 and float32, at pages of 64 and 3.
pub(crate) fn hold(world: &mut World) {
    let mut worst = [0.0f64; 2];
    let mut cases = cases();
    cases.retain(|case| !is_large(world) || has_state(case) || case.ends_with("/base"));
    for case in cases {
        for gradient in GRADIENTS {
            for (kind, limit, page_size) in
                [(Kind::Double, 1e-9, 64), (Kind::Double, 1e-9, 3), (Kind::Float, 5e-5, 64), (Kind::Float, 5e-5, 3)]
            {
                // Rounding is the same on any pages.
                if is_large(world) && !has_state(&case) && kind == Kind::Float && page_size == 64 {
                    continue;
                }
                let report = report(world, &case, &options(gradient, kind, page_size));
                let gradients = report.errors.keys().filter(|name| name.starts_with("grad.")).count();
                assert_eq!(gradients, gradient_count(&case), "{case}");
                assert!(report.worst <= limit, "{}", report.text());
                let seen = &mut worst[usize::from(kind == Kind::Float)];
                *seen = seen.max(report.worst);
                assert!(report.ratio_is_one, "{case}: replay and score differ");
            }
        }
    }
    if world.all.rank().0 == 0 {
        println!("reference cases: worst error {:.1e} in float64, {:.1e} in float32", worst[0], worst[1]);
    }
}

/// The sharp test: the same gradients on one rank and on all of them, to rounding of a sum in another order.
pub(crate) fn one_and_all(world: &mut World) {
    // The exact gradient has every path that the others have.
    let gradients = if world.all.size() == 2 { &GRADIENTS[..] } else { &[Gradient::Exact] };
    // One case of each family: all of them agree with the reference to more digits than this claim asks for.
    for case in cases().into_iter().filter(|case| case.ends_with("/base")) {
        for (kind, limit) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5)] {
            for &gradient in gradients {
                let options = options(gradient, kind, 3);
                let all = report(world, &case, &options);
                world.cut(1, 1).expect("one rank a prompt");
                let one = report(world, &case, &options);
                world.cut(world.all.size(), 1).expect("all ranks on one prompt");
                for ((name, all), (_, one)) in all.gradients.iter().zip(&one.gradients) {
                    let apart = relative(all, one);
                    assert!(apart <= limit, "{case} {} {kind:?} {name}: {apart:.1e}", options.gradient);
                }
            }
        }
    }
}

/// Experts over 2, 4, … ranks of the world: the reference's numbers, and those of one rank that has all experts.
pub(crate) fn spread(world: &mut World) {
    let size = world.all.size();
    let options = options(Gradient::Exact, Kind::Double, 3);
    for case in ["glm_moe_dsa/base", "qwen3_5_moe/base", "qwen3_moe/base", "qwen3_next/base"] {
        world.cut(1, 1).expect("one rank a prompt");
        let one = report(world, case, &options);
        for ep in [2, 4, 8].into_iter().filter(|ep| size.is_multiple_of(*ep)) {
            world.cut(size, ep).expect("a divisor of the world");
            let spread = report(world, case, &options);
            assert!(spread.worst <= 1e-9, "experts over {ep} ranks: {}", spread.text());
            assert!(spread.ratio_is_one, "{case}, experts over {ep} ranks: replay and score differ");
            assert_eq!(spread.gradients.len(), gradient_count(case), "{case}");
            for ((name, spread), (_, one)) in spread.gradients.iter().zip(&one.gradients) {
                let apart = relative(spread, one);
                assert!(apart <= 1e-12, "{case}, experts over {ep} ranks, {name}: {apart:.1e}");
            }
        }
    }
}

/// A mode without an expectation is judged by conventional autograd, so that it compares gradients too.
pub(crate) fn judged(world: &mut World) {
    let delta = ["qwen3_5/chunks", "qwen3_5_moe/composite", "qwen3_next/sparse_step"];
    for (case, tail, micro_block) in
        [("qwen2/base", 5, 2048), ("qwen2/base", 50, 7)].into_iter().chain(delta.map(|case| (case, 5, 7)))
    {
        let gradient = Gradient::Last(Tokens(tail));
        let options = Options { micro_block: Tokens(micro_block), ..options(gradient, Kind::Double, 3) };
        let report = report(world, case, &options);
        assert!(report.errors.keys().any(|name| name.starts_with("grad.")), "gradients are compared");
        assert!(report.passed, "{}", report.text());
    }
}

pub(crate) fn micro_blocks(world: &mut World) {
    let large = Options { micro_block: Tokens(4096), ..options(GRADIENTS[0], Kind::Double, 3) };
    let small = Options { micro_block: Tokens(1), ..large };
    let (large, small) = (report(world, "qwen3/base", &large), report(world, "qwen3/base", &small));
    for ((name, large), (_, small)) in large.gradients.iter().zip(&small.gradients) {
        assert!(relative(small, large) <= 1e-12, "{name}");
    }
}

/// Blocks longer than all rows, and blocks of five: windows, states that go from row to row, and experts.
pub(crate) fn blocks_of_families(world: &mut World) {
    for case in ["gemma3_text/base", "qwen3_5/base", "qwen3_moe/base"] {
        let large = Options { micro_block: Tokens(4096), ..options(GRADIENTS[0], Kind::Double, 3) };
        // Answers of a case have 12 and 7 tokens.
        let small = Options { micro_block: Tokens(5), ..large };
        let (large, small) = (report(world, case, &large), report(world, case, &small));
        assert_eq!(large.gradients.len(), gradient_count(case), "{case}");
        assert!(large.ratio_is_one && small.ratio_is_one, "{case}: replay and score differ");
        for ((name, large), (_, small)) in large.gradients.iter().zip(&small.gradients) {
            let apart = relative(small, large);
            assert!(apart <= 1e-12, "{case}, {name}: {apart:.1e}");
        }
    }
}
