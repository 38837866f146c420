//! Rates of the machine: what `bench --rates` writes, and what `plan --rates` makes of it; and sampled tokens by `bench --draw`.

use serde_json::{Value, json};

use super::plan::{float, near, plan, room, seconds};
use super::room::{Room, Said};

/// A small dense model.
const SHAPE: &str = r#"{
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": false, "max_position_embeddings": 4096
}"#;

fn small() -> Room {
    Room::with(&[("model/config.json", SHAPE)])
}

fn bench(room: &Room, flags: &[&str]) -> Said {
    room.alone(&[&["bench", "model", "--device", "cpu", "--page-size", "16", "--micro-block", "32"], flags].concat())
}

#[test]
fn drawn_tokens_come_with_their_bytes_and_agree_with_their_scores() {
    let room = small();
    for resident in ["3", "0"] {
        let flags = ["--draw", "12", "--prompt", "100", "--group", "3", "--resident", resident, "--json"];
        let report = bench(&room, &flags).ended(0, &[]).json();
        let draws = report["draws"].as_array().unwrap();
        assert_eq!((draws.len(), &report["runs"]), (1, &json!([])));
        let draw = &draws[0];
        for (key, expected) in [("group", 3), ("prompt", 100), ("tokens", 12), ("layers", 3)] {
            assert_eq!(draw[key], json!(expected), "{key}");
        }
        assert_eq!(draw["resident_layers"].to_string(), resident);
        // All weights but the embedding, adapters of rank 16, the prompt's keys and values once and 9 rows of each answer, and
        // norms: of the block, of heads of 8, and none of the last one.
        let (q, kv, up) = (32 * 32, 32 * 16, 32 * 48);
        let layer = 2 * q + 2 * kv + 3 * up + 2 * 32 + 2 * 8;
        let adapters = 16 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48));
        let state = 2 * 2 * 8;
        let values = 3 * (layer + adapters) + 32 * 96 + (100 + 3 * 9) * state * 3;
        near(draw["token_bytes"].as_f64().unwrap(), f64::from(4 * values), 1e-12, "bytes of a token");
        let moved = if resident == "0" { 100 * state * 3 * 4 } else { 0 };
        assert_eq!(draw["moved_bytes"].as_f64(), Some(f64::from(moved)));
        // float32, other orders of sums.
        assert!(draw["largest_gap"].as_f64().unwrap() <= 1e-4, "{draw}");
        let (all, one) = (draw["token_ms_of_all"].as_f64().unwrap(), draw["token_ms_of_one"].as_f64().unwrap());
        near(all, 3.0 * one, 1e-12, "a third each");
    }
    let said = bench(&room, &["--draw", "4", "--prompt", "40", "--group", "2"]);
    said.ended(0, &[]);
    assert!(said.out.contains("2 answers of 4 tokens behind 40 positions, pages on the device"), "{said}");
}

#[test]
fn rates_that_bench_has_written_are_read_by_plan_and_named_in_its_text() {
    let room = small();
    let flags = ["--rates", "rates.json", "--prompt", "128", "--answer", "16", "--group", "2"];
    bench(&room, &flags).ended(0, &[]);
    let file = room.read_json("rates.json");
    assert_eq!(
        (&file["version"], &file["dtype"], &file["layers"]),
        (&json!(3), &json!("float32"), &json!(["attention, heads of 8"]))
    );
    let points = file["updates"].as_array().unwrap();
    let place = |point: &Value| (point["gradient"].clone(), point["layers"].clone(), point["prompt"].clone());
    let places: Vec<_> = points.iter().map(place).collect();
    assert_eq!(places.len(), 8, "two gradient modes, two depths, two prompts: {places:?}");
    assert!(places.contains(&(json!("response"), json!(2), json!(64))), "{places:?}");
    let sets = ["context.prompt_len=128", "context.answer_len=16", "context.max_seq_len=144", "grpo.group_size=2"];
    let sets = sets.iter().chain(&["context.page_size=16", "memory.micro_block=32", "model.dtype=float32"]);
    let sets = sets.chain(&["run.device=cpu", "grpo.reward_fn=synthetic"]).flat_map(|set| ["--set", *set]);
    let flags: Vec<&str> =
        ["plan", "--ranks", "1", "--model", "model", "--rates", "rates.json"].into_iter().chain(sets).collect();
    let said = room.alone(&flags);
    said.ended(0, &[]);
    assert!(said.out.contains("from rates measured on a CPU (rates.json: updates at prompts of 64 and 128"), "{said}");
    let planned = room.alone(&[&flags[..], &["--json"]].concat()).json();
    for phase in ["capture", "score", "replay"] {
        assert!(seconds(&planned, phase) > 0.0, "{phase}: {planned}");
    }
    // The published text says so.
    let published = plan(&super::plan::room(), "qwen3-8b", &[]);
    assert!(published.out.contains("at published rates: 80 % of 696 TFLOP/s"), "{published}");
}

/// A file of rates for Qwen3-8B's shape whose updates follow a law: 0.1 s once and 1 µs a position in capture and in the sweep;
/// for 10¹² operations of rows 2 ms, of pairs 1.5 ms, in a backward four times as much of both.
fn lawful() -> Value {
    let layer_rows = 2.0 * float(4096 * (2 * 4096 + 2 * 1024 + 3 * 12_288)) / 1e12;
    let amount = |layers: u64, start: f64, count: f64| {
        let pairs = count * start + count * (count + 1.0) / 2.0;
        let (rows, pairs) = (count * layer_rows, 4.0 * 4096.0 * pairs / 1e12);
        (float(layers) * rows, float(layers) * pairs)
    };
    let seconds = |(rows, pairs): (f64, f64)| 2e-3 * rows + 1.5e-3 * pairs;
    let point = |gradient: &str, layers: u64, prompt: u64| {
        let of_prompt = amount(layers, 0.0, float(prompt));
        let of_last_row = amount(layers, float(prompt - 1), 1.0);
        let of_answer = amount(layers, float(prompt), 1023.0);
        let value = |(rows, pairs): (f64, f64)| json!({ "rows_tera": rows, "pairs_tera": pairs });
        let once = 0.1 + 1e-6 * float(prompt);
        let tail =
            if gradient == "exact" { once + 4.0 * seconds(of_prompt) } else { 0.01 + 4.0 * seconds(of_last_row) };
        json!({
            "gradient": gradient, "layers": layers, "prompt": prompt, "of_prompt": value(of_prompt),
            "of_last_row": value(of_last_row), "of_answer": value(of_answer), "capture_seconds": once + seconds(of_prompt),
            "score_seconds": 0.02 + seconds(of_answer), "answer_seconds": 0.03 + 5.0 * seconds(of_answer), "tail_seconds": tail
        })
    };
    let mut updates = Vec::new();
    for gradient in ["exact", "response"] {
        for (layers, prompt) in [(2, 32_768), (6, 32_768), (2, 131_072), (6, 131_072)] {
            updates.push(point(gradient, layers, prompt));
        }
    }
    let draw = |prompt: u64, seconds: f64, bytes: f64| json!({ "drawn_by": "fused kernels", "layers": 36, "prompt": prompt, "answers": 8, "token_seconds": seconds, "token_bytes": bytes });
    json!({
        "version": 3, "layer_parameters": 192_937_984, "device": "a test", "commit": "unknown", "dtype": "bfloat16", "layers": ["attention, heads of 128"],
        "micro_block": 2048, "answer": 1024, "attention_kept": true,
        "copies": { "host_in": 5000.0, "host_out": 4000.0, "device": 4300.0 }, "launch_us": 5.0, "products": [], "attention": [],
        "updates": updates,
        // 4,000 GB/s, and 20 µs for each of 36 layers and the head.
        "draws": [draw(32_768, 20e9 / 4e12 + 37.0 * 20e-6, 20e9), draw(131_072, 36e9 / 4e12 + 37.0 * 20e-6, 36e9)]
    })
}

/// A plan of Qwen3-8B's shape on one GPU, with these rates.
fn planned(rates: &Value, sets: &[&str]) -> Said {
    let room = Room::with(&[("rates.json", &rates.to_string())]);
    let common = [
        "context.answer_len=1024",
        "parallel.cp_size=1",
        "model.dtype=bfloat16",
        "memory.keep_attention=true",
        "memory.micro_block=2048",
    ];
    let sets =
        common.iter().chain(&["memory.cpu_offload_pages=true", "grpo.group_size=2", "run.device=cuda"]).chain(sets);
    let sets = sets.flat_map(|set| ["--set", *set]);
    let flags: Vec<&str> = ["--rates", "rates.json", "--ranks", "1", "--json"].into_iter().chain(sets).collect();
    plan(&room, "qwen3-8b", &flags)
}

const LONG: [&str; 2] = ["context.prompt_len=262144", "context.max_seq_len=263168"];

#[test]
fn a_plan_extends_measured_layers_to_all_layers_and_a_longer_prompt() {
    let exact =
        planned(&lawful(), &[&LONG[..], &["grpo.gradient=exact"]].concat()).ended(0, &["native context"]).json();
    let prompt = 262_144.0;
    let rows = 36.0 * 2.0 * float(4096 * (2 * 4096 + 2 * 1024 + 3 * 12_288)) / 1e12;
    let pairs = |start: f64, count: f64| 36.0 * 4.0 * 4096.0 * (count * start + count * (count + 1.0) / 2.0) / 1e12;
    let layers = |start: f64, count: f64| 2e-3 * rows * count + 1.5e-3 * pairs(start, count);
    let once = 0.1 + 1e-6 * prompt;
    near(seconds(&exact, "capture"), once + layers(0.0, prompt), 1e-6, "capture");
    near(seconds(&exact, "score"), 2.0 * (0.02 + layers(prompt, 1023.0)), 1e-6, "score of two answers");
    near(seconds(&exact, "replay"), 2.0 * (0.03 + 5.0 * layers(prompt, 1023.0)), 1e-6, "two answers and back");
    near(seconds(&exact, "sweep"), once + 4.0 * layers(0.0, prompt), 1e-6, "sweep");
    // In a further update the answers go up again.
    let two = planned(&lawful(), &[&LONG[..], &["grpo.gradient=exact", "grpo.updates_per_group=2"]].concat()).json();
    let further = two["seconds"]["round"].as_f64().unwrap() - two["seconds"]["total"].as_f64().unwrap();
    let same = ["capture", "replay", "sweep", "finalize"].map(|phase| seconds(&exact, phase)).iter().sum::<f64>();
    near(further, same + 2.0 * layers(prompt, 1023.0), 1e-6, "a further update");
    // Attention that is not kept is computed once more, at the pace of capture.
    let again =
        planned(&lawful(), &[&LONG[..], &["grpo.gradient=exact", "memory.keep_attention=false"]].concat()).json();
    let more = 1.5e-3 * pairs(0.0, prompt);
    near(seconds(&again, "sweep"), once + 4.0 * layers(0.0, prompt) + more, 1e-6, "attention computed again");
    let response = planned(&lawful(), &[&LONG[..], &["grpo.gradient=response"]].concat()).json();
    near(seconds(&response, "sweep"), 0.01 + 4.0 * layers(prompt - 1.0, 1.0), 1e-6, "one row");
    // A token reads at the rate of the measured ones, and each layer takes 20 µs besides.
    let sampled = ["rollout.sample=true", "rollout.pages_on_device=true"];
    let sampled = planned(&lawful(), &[&LONG[..], &sampled].concat()).json();
    let weights = (8_190_735_360_u64 - 151_936 * 4096 - 4096) * 2 + 43_646_976 * 2;
    let reads = float(weights) + (prompt + 2.0 * 512.0) * 147_456.0;
    let token = sampled["rollout"]["seconds_per_token"].as_f64().unwrap();
    near(token, reads / 4e12 + 37.0 * 20e-6, 1e-6, "a token");
}

/// A line for each value that is not from the file, and for each length that lies outside of what was measured.
#[test]
fn a_plan_by_measured_rates_names_published_values_and_what_was_not_measured() {
    let notes = |rates: &Value, sets: &[&str], key: &str| -> Vec<String> {
        let plan = planned(rates, sets).json();
        let notes = plan["seconds"][key].as_array().cloned().unwrap_or_default();
        notes.iter().map(|note| note.as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(notes(&lawful(), &LONG, "published"), Vec::<String>::new());
    assert_eq!(notes(&lawful(), &LONG, "outside"), Vec::<String>::new());
    let mut bare = lawful();
    bare["copies"]["host_in"] = json!(0.0);
    let drawn = [&LONG[..], &["rollout.sample=true", "rollout.pages_on_device=true", "lora.rank=300"]].concat();
    let published = notes(&bare, &drawn, "published");
    assert_eq!(published.len(), 2, "{published:?}");
    assert!(published[0].contains("54.6 GB/s between host and device"), "{published:?}");
    assert!(published[1].contains("4800 GB/s") && published[1].contains("2000 µs a layer"), "{published:?}");
    assert!(published[1].contains("no token drawn by single operations"), "{published:?}");
    let far = [
        "context.prompt_len=524352",
        "context.answer_len=512",
        "context.max_seq_len=524864",
        "memory.micro_block=8192",
    ];
    let outside = notes(&lawful(), &far, "outside");
    assert_eq!(outside.len(), 3, "{outside:?}");
    assert!(
        outside[0].contains("524352 positions is more than 4 times the longest measured one, 131072"),
        "{outside:?}"
    );
    assert!(outside[1].contains("micro-blocks of 8192 rows, and 2048 were measured"), "{outside:?}");
    assert!(outside[2].contains("answers of 512 tokens, and 1024 were measured"), "{outside:?}");
}

#[test]
fn rates_of_another_version_dtype_or_model_are_refused_with_a_sentence() {
    let refused = |change: &dyn Fn(&mut Value), code: i32, words: &[&str]| {
        let mut rates = lawful();
        change(&mut rates);
        planned(&rates, &LONG).refused(code, words);
    };
    refused(
        &|rates| rates["version"] = json!(7),
        2,
        &["rates.json: version 7 of measured rates, and this build reads version 3"],
    );
    refused(&|rates| rates["dtype"] = json!("float32"), 2, &["measured in float32, and model.dtype is bfloat16"]);
    let other = json!(["attention, heads of 64"]);
    let words = ["has no layers with attention, heads of 128, only with attention, heads of 64"];
    refused(&|rates| rates["layers"] = other.clone(), 2, &words);
    let words = ["widest layer has 7 parameters in its projections, and this one's has 192937984"];
    refused(&|rates| rates["layer_parameters"] = json!(7), 2, &words);
    for (place, value) in [("capture_seconds", -5.0), ("answer_seconds", 0.0)] {
        refused(&|rates| rates["updates"][0][place] = json!(value), 2, &["which no machine measures"]);
    }
    refused(&|rates| rates["draws"][0]["token_seconds"] = json!(0.0), 2, &["which no machine measures"]);
    refused(&|rates| rates["updates"] = json!([]), 2, &["no updates of gradient"]);
    refused(&|rates| rates["speed"] = json!(1), 2, &["unknown field `speed`", "bench MODEL --rates FILE"]);
    let said = plan(&room(), "qwen3-8b", &["--rates", "absent.json"]);
    said.refused(2, &["absent.json: No such file"]);
    plan(&room(), "qwen3-8b", &["--rates", "rates.json", "--rate-host", "50"]).ended(2, &["--rate-host"]);
    let last = bench(&small(), &["--rates", "rates.json", "--gradient", "last=9"]);
    last.refused(2, &["leave last=9 out"]);
    let short = ["--rates", "rates.json", "--prompt", "64", "--gradient", "exact"];
    bench(&small(), &short)
        .refused(2, &["both longer than a micro-block of 32 rows", "--prompt 80", "--micro-block 16"]);
    let one = ["--rates", "rates.json", "--prompt", "16", "--gradient", "response"];
    bench(&small(), &one).refused(2, &["16 positions are one page of 16", "--prompt 64"]);
    let several = small().ranks(2, &["bench", "model", "--device", "cpu", "--rates", "rates.json"]);
    several.refused(2, &["--rates measures what one rank does: run it on 1 rank, not 2"]);
}
