//! Plans of answers that the policy draws for itself: what a rank holds meanwhile, where pages are, and what a token
//! takes.

use serde_json::{Value, json};

use super::plan::{bytes, float, gates, near, plan, room, seconds};
use super::room::Said;

/// Prompt positions of the rank that holds most, of 2,097,152 on 8 ranks.
const POSITIONS: u64 = 261_120;
/// Keys and values of a position in all layers of Qwen3-8B, bfloat16.
const STATE: u64 = 36 * 2 * 8 * 128 * 2;

/// A plan of eight answers of 8,192 tokens on eight ranks, from the users' own file.
fn sampled(flags: &[&str]) -> Said {
    let sample = ["--set", "rollout.sample=true", "--set", "grpo.group_size=8", "--set", "grpo.gradient=response"];
    plan(&room(), "qwen3-8b", &[&sample, flags].concat())
}

fn sampled_json(flags: &[&str]) -> Value {
    sampled(&[&["--json"], flags].concat()).ended(0, &["native context"]).json()
}

#[track_caller]
fn of_rollout(plan: &Value, name: &str) -> u64 {
    let mut addends = plan["addends"].as_array().unwrap().iter().filter(|addend| addend["phase"] == "rollout");
    addends.find(|addend| addend["name"] == name).unwrap_or_else(|| panic!("no {name} in {plan}"))["bytes"]
        .as_u64()
        .unwrap()
}

#[test]
fn a_plan_whose_answers_come_with_the_data_has_no_rollout() {
    let given = plan(&room(), "qwen3-8b", &["--json"]).json();
    assert_eq!(given.get("rollout"), None);
    assert!(given["addends"].as_array().unwrap().iter().all(|addend| addend["phase"] != "rollout"));
    assert!(given["seconds"]["phases"].as_array().unwrap().iter().all(|phase| phase["phase"] != "rollout"));
    assert_eq!(given["seconds"]["round"], given["seconds"]["total"]);
}

#[test]
fn memory_of_a_rank_while_it_samples_is_the_arithmetic_of_the_config() {
    let resident = sampled_json(&["--device-gib", "131"]);
    let vocabulary = 151_936;
    for (name, expected) in [
        ("pages of all layers", POSITIONS * STATE),
        // 1,024 of 8,192 rows of each answer, and one layer's once more while it grows.
        ("answers' keys and values", 8 * 1024 * (STATE + STATE / 36)),
        ("logits", 8 * vocabulary * (2 + 2 * 4 + 48)),
        ("partial outputs", 8 * 8 * (32 * 128 + 32) * 4),
        // The graph; raw logits, logits, attention in 33 parts of the prompt and 4 of 1,024 own rows, and four numbers of each token.
        ("decode step", (64 << 20) + 8 * ((2 * vocabulary + (33 + 4) * 32 * 129) * 4 + 8192 * 32)),
        // Residual, norm and what leaves them; the feed-forward's three; queries, keys and values, output.
        ("token rows", 8 * (4 * 4096 + 3 * 12_288 + 4096 + 2048 + 4096) * 2),
    ] {
        assert_eq!(of_rollout(&resident, name), expected, "{name}");
    }
    assert_eq!(resident["rollout"]["tokens"], json!(8192));
    // Shorter answers, and fewer.
    let short = sampled_json(&["--set", "rollout.max_tokens=800", "--set", "grpo.group_size=3"]);
    assert_eq!(of_rollout(&short, "answers' keys and values"), 3 * 100 * (STATE + STATE / 36));
    assert_eq!(of_rollout(&short, "logits"), 3 * vocabulary * 58);
    // float32 has no fused kernel on a GPU.
    let plain = sampled_json(&["--set", "model.dtype=float32"]);
    assert_eq!(of_rollout(&plain, "scores of the answers"), 8 * 32 * 32_768 * 4 * 3);
    assert!(!resident["addends"].to_string().contains("scores of the answers"));
    // What is not dense, or has no GPU, is computed operation by operation.
    let mixture = plan(&room(), "qwen3-30b-a3b", &["--json", "--set", "rollout.sample=true"]).json();
    let cpu = sampled_json(&["--set", "run.device=cpu"]);
    for plan in [mixture, cpu] {
        assert!(!plan["addends"].to_string().contains("decode step"), "{plan}");
    }
}

#[test]
fn pages_of_as_many_layers_as_fit_are_on_the_device_and_the_others_are_staged_layer_by_layer() {
    let never: &[&str] = &["--set", "rollout.pages_on_device=false", "--device-gib", "131"];
    for (flags, resident) in [
        (&["--device-gib", "54"][..], 36),
        // Two layers' pages are staged beside.
        (&["--device-gib", "53"], 33),
        (&["--device-gib", "40"], 20),
        (&[], 0),
        (&["--host-gib", "521"], 0),
        (never, 0),
        (&["--set", "rollout.pages_on_device=true"], 36),
    ] {
        let plan = sampled_json(flags);
        assert_eq!(plan["rollout"]["pages_on_device"], json!(resident == 36), "{flags:?}");
        assert_eq!(plan["rollout"]["resident_layers"], json!(resident), "{flags:?}");
        let layer = POSITIONS * STATE / 36;
        assert_eq!(plan["rollout"]["bytes_moved_per_token"], json!((36 - resident) * layer), "{flags:?}");
        let bus = plan["rollout"].get("bus_seconds").map(|seconds| seconds.as_f64().unwrap());
        assert_eq!(bus.is_some(), resident < 36, "{flags:?}");
        if let Some(bus) = bus {
            near(bus, float((36 - resident) * layer) / 54.6e9, 1e-9, "pages over the bus");
            assert_eq!(of_rollout(&plan, "staged pages"), 2 * layer, "this layer's and the next one's");
        }
        if (1..36).contains(&resident) {
            assert_eq!(of_rollout(&plan, "pages of resident layers"), resident * layer, "{flags:?}");
        }
    }
    let said = sampled(&["--device-gib", "53"]);
    let words = "pages of 33 layers on the device, those of the others layer by layer for every token, 3.2 GB to a rank, 58.8 ms \
                 a token on the bus";
    assert!(said.out.contains(words), "{said}");
    // Pages that live on the device are there for the answers too, and are counted once.
    let living = sampled_json(&["--set", "memory.cpu_offload_pages=false"]);
    assert_eq!((&living["rollout"]["pages_on_device"], bytes(&living, "pages")), (&json!(true), POSITIONS * STATE));
    assert!(!living["addends"].to_string().contains("pages of all layers"));
}

#[test]
fn pages_forced_onto_a_device_without_room_are_refused_with_the_key() {
    let said = sampled(&["--set", "rollout.pages_on_device=true", "--device-gib", "48"]);
    said.refused(5, &["one rank needs 53.29 GiB of device memory and 48.00 GiB are there", "pages of all layers"]);
    said.ended(5, &["set rollout.pages_on_device = false, or use more ranks (parallel.cp_size)"]);
}

#[test]
fn without_a_gpu_pages_of_all_layers_are_a_second_copy_in_the_machines_memory() {
    let cpu = |flags: &[&str]| sampled_json(&[&["--set", "run.device=cpu"], flags].concat());
    let (roomy, tight) = (cpu(&["--host-gib", "4000"]), cpu(&["--host-gib", "550"]));
    assert_eq!(of_rollout(&roomy, "pages of all layers"), POSITIONS * STATE);
    assert_eq!(bytes(&roomy, "pages"), POSITIONS * STATE);
    assert_eq!(roomy["rollout"]["pages_on_device"], json!(true));
    assert_eq!(tight["rollout"]["pages_on_device"], json!(false));
    assert_eq!(of_rollout(&tight, "staged pages"), POSITIONS * STATE / 36, "copies do not run beside the computation");
    // The known rates are a GPU's: nothing is predicted, so nothing is too slow, unless rates are given.
    assert_eq!(roomy["rollout"].get("seconds_per_token"), None);
    let slow = ["--set", "run.device=cpu", "--set", "rollout.token_sec_max=0.001"];
    sampled(&slow).ended(0, &[]);
    sampled(&[&slow[..], &["--rate-memory", "100"]].concat()).refused(5, &["rollout.token_sec_max is 0.001"]);
}

#[test]
fn a_token_takes_the_time_of_its_bytes_and_is_refused_above_the_limit() {
    let token = |plan: &Value| plan["rollout"]["seconds_per_token"].as_f64().unwrap();
    // 38.5 GB over a link of 54.6 GB/s.
    let staged = sampled_json(&[]);
    near(token(&staged), float(POSITIONS * STATE) / 54.6e9, 1e-9, "pages over the link");
    near(staged["rollout"]["seconds"].as_f64().unwrap(), 8192.0 * token(&staged), 1e-9, "8,192 tokens");
    assert_eq!(staged["rollout"]["seconds"], json!(seconds(&staged, "rollout")));
    // Weights without the embedding, adapters, pages, and half of the answers' rows, at 80 % of 4.8 TB/s; 40 µs for each
    // of 36 layers and the head; 37 × 7 messages of 4 µs; partial outputs of seven ranks at 450 GB/s.
    let resident = sampled_json(&["--device-gib", "131"]);
    let weights = (8_190_735_360_u64 - 151_936 * 4096 - 4096) * 2 + 43_646_976 * 2;
    let reads = float(weights + POSITIONS * STATE + 8 * 512 * STATE) / (0.8 * 4.8e12);
    let waits = 37.0 * 40e-6 + 37.0 * 7.0 * 4e-6 + float(7 * 8 * 36 * 4128 * 4) / 450e9;
    near(token(&resident), reads + waits, 1e-9, "a token from the device's own memory");
    let slower = sampled_json(&["--device-gib", "131", "--rate-memory", "2400"]);
    near(token(&slower), 2.0 * reads + waits, 1e-9, "half the memory's rate");
    let said = sampled(&["--set", "rollout.token_sec_max=0.7"]);
    said.refused(5, &["a token of the sampled answers takes 0.705 s by the plan, and rollout.token_sec_max is 0.7"]);
    said.ended(5, &["each brings 38.5 GB of pages to every device", "set rollout.pages_on_device = true"]);
    said.ended(5, &["use more ranks (parallel.cp_size)", "set rollout.token_sec_max higher"]);
    let said = sampled(&["--set", "rollout.token_sec_max=0.01", "--device-gib", "131"]);
    said.refused(5, &["takes 0.017 s", "each reads all weights and the prompt's keys and values on every device"]);
    sampled(&["--set", "rollout.token_sec_max=0.71"]).ended(0, &[]);
}

/// The policy is captured before sampling, the reference replaces its pages, and the policy is captured again.
#[test]
fn with_sampling_a_reference_costs_one_more_capture_and_later_updates_cost_no_score() {
    let of = |flags: &[&str]| sampled_json(&[&["--device-gib", "131"], flags].concat());
    let (alone, beside) = (of(&[]), of(&["--set", "grpo.kl_coef=0.1"]));
    let times = |phase: &str, by: f64| near(seconds(&beside, phase), by * seconds(&alone, phase), 1e-9, phase);
    for (phase, by) in [("capture", 3.0), ("rollout", 1.0), ("score", 2.0), ("replay", 1.0)] {
        times(phase, by);
    }
    let again = of(&["--set", "grpo.kl_coef=0.1", "--set", "grpo.updates_per_group=3"]);
    let total = |plan: &Value, key: &str| plan["seconds"][key].as_f64().unwrap();
    assert_eq!((&again["seconds"]["updates"], &again["seconds"]["total"]), (&json!(3), &beside["seconds"]["total"]));
    let further: f64 = ["capture", "replay", "sweep", "finalize"].map(|phase| seconds(&alone, phase)).iter().sum();
    // A further replay brings the answers up again first, which takes no longer than their score.
    let each = (total(&again, "round") - total(&again, "total")) / 2.0;
    assert!(
        further < each && each <= further + seconds(&alone, "score"),
        "{each} for a further update, {further} without"
    );
    let said = sampled(&["--set", "grpo.updates_per_group=3"]);
    let words = "predicted seconds of a group's 3 updates: ";
    assert!(said.out.contains(words) && said.out.contains("a further one captures, replays and sweeps"), "{said}");
}

#[test]
fn only_the_gate_that_samples_has_a_rollout_in_its_row() {
    let (_, table) = gates("qwen3-8b", "521", &["--set", "rollout.sample=true"]);
    let rows = table["gates"].as_array().unwrap();
    let (online, others) = rows.split_last().unwrap();
    assert_eq!((&online["gate"], &online["rollout"]["pages_on_device"]), (&json!("gate7_online"), &json!(true)));
    assert!(online["seconds"].as_f64() > online["rollout"]["seconds"].as_f64());
    assert!(others.iter().all(|row| row.get("rollout").is_none()), "{table}");
    let slow = ["--gates", "--set", "rollout.token_sec_max=0.001"];
    let said = plan(&room(), "qwen3-8b", &slow);
    said.refused(5, &["gate7_online: a token of the sampled answers takes"]);
    let row = said.out.lines().find(|line| line.starts_with("gate7_online")).unwrap();
    assert!(row.contains("s a token: "), "{row}");
}

/// docs/memory.md has these lines.
#[test]
fn the_documents_show_the_time_of_a_token_at_both_lengths() {
    let document = include_str!("../../docs/memory.md");
    let short = ["context.max_seq_len=131072", "context.prompt_len=122880", "context.cp_pages_per_gpu=240"];
    let short: Vec<&str> = short.into_iter().flat_map(|set| ["--set", set]).collect();
    for length in [&short[..], &[]] {
        for transport in ["rollout.pages_on_device=auto", "rollout.pages_on_device=false"] {
            let flags = [length, &["--device-gib", "131", "--set", transport]].concat();
            let said = sampled(&flags);
            said.ended(0, &[]);
            let sum = said.out.lines().find_map(|line| line.strip_prefix("device memory of a rank: ")).unwrap();
            let rollout = &sampled_json(&flags)["rollout"];
            let [token, all] = ["seconds_per_token", "seconds"].map(|key| rollout[key].as_f64().unwrap());
            let (size, phase) = sum.strip_suffix(" adds").unwrap().split_once(", what stays and what ").unwrap();
            let row = format!("| {size}, {phase} adding most | {token:.4} | {all:.1} s |");
            assert!(document.contains(&row), "docs/memory.md lacks this row of {length:?}, {transport}:\n{row}");
            let shown = |line: &&str| line.contains("sampled together") || line.contains("rollout: ");
            let shown: Vec<&str> = said.out.lines().filter(shown).collect();
            assert!(shown.len() > 5, "{said}");
            for line in shown {
                assert!(document.contains(line), "docs/memory.md lacks this line of {length:?}, {transport}:\n{line}");
            }
        }
    }
}
