//! What a run reports about memory and time: the receipt's table by phase, the trace, and the report when memory runs
//! out.

use serde_json::{Value, json};

use super::checkpoints::case;
use super::room::{Call, LONGSTRAW, Room};
use super::training::{config, lines, record};

const SPACES: [&str; 2] = ["device", "host"];

/// A room with the tiny checkpoint and one group of three answers.
fn tiny() -> Room {
    Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &lines(&[record(96, [24, 1, 7])]))])
}

fn bytes(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

#[test]
fn the_receipt_has_memory_by_phase_rank_and_purpose() {
    let room = tiny();
    let sets = ["run.steps=2", "memory.cpu_offload_pages=true"].into_iter().flat_map(|set| ["--set", set]);
    let receipt = room.ranks(2, &["train", "--json"].into_iter().chain(sets).collect::<Vec<_>>()).json();
    let phases = receipt["memory"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|phase| phase["phase"].as_str().unwrap()).collect();
    assert_eq!(names, ["start", "capture", "reward", "score", "replay", "sweep", "finalize", "update", "save"]);
    let phase = |name: &str| phases.iter().find(|phase| phase["phase"] == name).unwrap();
    for space in SPACES {
        let most = |rank: usize| phases.iter().map(|phase| bytes(&phase[format!("{space}_peak")])[rank]).max().unwrap();
        assert_eq!(bytes(&receipt[format!("peak_{space}_bytes")]), [most(0), most(1)]);
        // No part is larger than the peak of all live bytes.
        for phase in phases {
            let peaks = bytes(&phase[format!("{space}_peak")]);
            for (kind, held) in phase["kinds"].as_object().unwrap() {
                let held = bytes(&held[space]);
                assert!(held.iter().zip(&peaks).all(|(held, peak)| held <= peak), "{}, {kind}", phase["phase"]);
            }
        }
    }
    let kind = |name: &str, kind: &str, space: &str| bytes(&phase(name)["kinds"][kind][space]);
    // 180,928 float32 weights. The pages of 4 layers wait in host memory, half of them on each rank.
    assert!(kind("start", "weights", "device").iter().all(|&held| held >= 180_928 * 4));
    assert_eq!(kind("capture", "pages", "host"), bytes(&receipt["page_bytes_per_rank"]));
    assert_eq!(kind("capture", "pages", "device"), [0, 0]);
    // Master weights, gradients and two moments have the same shapes.
    let masters = kind("capture", "optimizer", "device")[0] / 2;
    assert_eq!(kind("update", "adapters", "device"), [2 * masters; 2]);
    assert_eq!(kind("start", "optimizer", "device"), [2 * masters; 2]);
    assert!(kind("capture", "foreign", "device").iter().all(|&held| held > 0), "runs were passed round the ring");
    assert!(kind("replay", "hidden", "host").iter().all(|&held| held > 0), "answers waited");
    assert!(kind("capture", "hidden", "device").iter().all(|&held| held > 0), "prompt rows were there");
    assert!(bytes(&phase("sweep")["scratch"]).iter().all(|&scratch| scratch > 0), "graphs are scratch");
    assert_eq!((&receipt["device"], &receipt["reserved_device_bytes"]), (&json!("Cpu"), &json!([0, 0])));
    assert_eq!(receipt["stage_wait_seconds"], json!([0.0, 0.0]));
    let (plan, peak) = (receipt["plan_host_bytes"].as_u64().unwrap(), bytes(&receipt["peak_host_bytes"])[0]);
    assert!(plan >= peak && plan < 2 * peak, "the plan says {plan}, measured are {peak}");
    let log = room.read("run/logs/rank_0.log");
    for words in ["device memory, weights: plan", "host memory, pages: plan", "device memory, all: plan"] {
        assert!(log.contains(words), "{words}:\n{log}");
    }
}

/// So memory would run out at the same point in every run.
#[test]
fn two_runs_hold_the_same_bytes_in_every_phase() {
    let memory = || {
        let receipt = tiny().ranks(2, &["train", "--json", "--set", "run.steps=2"]).json();
        receipt["memory"].clone()
    };
    assert_eq!(memory(), memory());
}

/// Complete events of one row: name, start and end in microseconds, arguments.
fn row(trace: &[Value], row: u64) -> Vec<(&str, f64, f64, &Value)> {
    let events = trace.iter().filter(|event| event["ph"] == "X" && event["tid"] == row);
    let of = |event: &Value, key: &str| event[key].as_f64().unwrap();
    events
        .map(|event| {
            let start = of(event, "ts");
            (event["name"].as_str().unwrap(), start, start + of(event, "dur"), &event["args"])
        })
        .collect()
}

#[test]
fn a_trace_covers_updates_with_phases_and_phases_contain_layers() {
    let room = tiny();
    room.ranks(2, &["--set", "run.trace=true", "--set", "run.steps=2"]).ended(0, &[]);
    let files = room.files("run/trace");
    assert_eq!(files, ["rank_0.json", "rank_1.json"]);
    let metrics = room.read("run/metrics.jsonl");
    let total = |line: &str| serde_json::from_str::<Value>(line).unwrap()["seconds"]["total"].as_f64().unwrap();
    let steps: Vec<f64> = metrics.lines().map(total).collect();
    for (rank, file) in files.iter().enumerate() {
        let trace = room.read_json(&format!("run/trace/{file}"));
        let trace = trace.as_array().unwrap();
        assert!(trace.iter().all(|event| event["pid"] == rank), "one process a rank");
        let (phases, layers) = (row(trace, 0), row(trace, 1));
        for (step, seconds) in steps.iter().enumerate() {
            let of_step = phases.iter().filter(|(.., about)| about["step"] == step + 1);
            let covered: f64 = of_step.map(|(_, start, end, _)| (end - start) / 1e6).sum();
            // Rank 0's clock; all ranks leave an update together.
            assert!(covered >= 0.9 * seconds, "rank {rank}, update {}: {covered} of {seconds} s", step + 1);
        }
        let names: Vec<&str> = phases.iter().map(|(name, ..)| *name).collect();
        for phase in ["capture", "score", "replay", "sweep", "finalize", "update", "save"] {
            assert!(names.contains(&phase), "{phase} in {names:?}");
        }
        // Two updates of 4 layers: capture, score, and down; the top layer begins in replay, where the answers turn, and ends in
        // the sweep.
        assert_eq!(layers.len(), 2 * (4 + 4 + 1 + 4));
        for (name, start, end, about) in layers {
            assert_eq!(name, format!("layer {}", about["layer"]));
            // Microseconds as floats: a sum may differ in its last digit.
            let within = |phase: &&(&str, f64, f64, &Value)| phase.1 <= start + 1e-3 && end <= phase.2 + 1e-3;
            assert_eq!(phases.iter().filter(within).count(), 1, "{name} from {start} to {end}");
        }
    }
}

/// One layer's intermediates of a block of rows are 256 MiB each, three or four at a time, and all else is small: with
/// room for one or two a rank ends in its first layer.
#[test]
fn a_rank_without_memory_names_phase_layer_request_and_setting() {
    let shape = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 32768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
    });
    let config = "[context]\nmax_seq_len = 4160\nprompt_len = 4096\nanswer_len = 64\n\
                  [memory]\nmicro_block = 4096\n[grpo]\ngroup_size = 2\nreward_fn = \"synthetic\"\ngradient = \"response\"\n\
                  [model]\npath = \"shape\"\ndtype = \"float32\"\nrandom_init = true\n\
                  [run]\ndir = \"run\"\nsteps = 1\n";
    let room = Room::with(&[("shape/config.json", &shape.to_string()), ("config.toml", config)]);
    // KiB of addresses. The program and its libraries take about 750,000; a whole run would need 1,700,000.
    let script = room.script("start", &format!("ulimit -v 1200000 && exec {LONGSTRAW} \"$@\""));
    let said = room.run(&Call { ranks: 1, program: &script, arguments: &["train"], variables: &[] });
    said.refused(5, &["rank 0, capture, layer 0: out of host memory: 256.00 MiB were requested"]);
    said.ended(
        5,
        &["largest is scratch: set memory.micro_block smaller", "weights      device", "scratch      device"],
    );
    assert!(room.read("run/logs/rank_0.log").contains("can't allocate memory"), "{said}");
}
