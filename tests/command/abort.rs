//! A failing rank ends the whole job at once, with its reason.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use super::checkpoints::Draft;
use super::job::{all_end, random_model};
use super::room::{Call, LONGSTRAW, Room, Running, Said};
use super::training::{config, lines, record};

/// A failed job ends within this time.
const END: Duration = Duration::from_mins(15);

/// A model of random weights that takes seconds for a prompt and six answers of these lengths.
fn slow(prompt: usize, answer: usize) -> Room {
    random_model(prompt, answer, 6, "steps = 100\n")
}

fn log(room: &Room, rank: usize) -> String {
    fs::read_to_string(room.path().join(format!("run/logs/rank_{rank}.log"))).unwrap_or_default()
}

/// The process of a rank, as its log names it.
fn process(room: &Room, rank: usize) -> Option<String> {
    let log = log(room, rank);
    let after = log.split("process ").nth(1)?;
    Some(after.lines().next()?.trim().to_owned())
}

/// The run ends within [`END`] from now.
#[track_caller]
fn ends_soon(running: Running) -> Said {
    let start = Instant::now();
    let said = running.end();
    assert!(start.elapsed() < END, "it took {:?}\n{said}", start.elapsed());
    said
}

/// Kills rank 2 of 4 as soon as its log contains `words`; the job ends, and no rank keeps running.
#[track_caller]
fn killed_at(room: &Room, words: &str, phase: &str) {
    room.write("run/receipt.json", "of an earlier run");
    let call = Call { ranks: 4, program: LONGSTRAW, arguments: &["train"], variables: &[] };
    let mut running = room.start(&call);
    running.until(words, || log(room, 2).contains(words).then_some(()));
    let processes: Vec<String> = (0..4).map(|rank| process(room, rank).unwrap()).collect();
    let status = std::process::Command::new("kill").args(["-9", &processes[2]]).status().unwrap();
    assert!(status.success());
    let said = ends_soon(running);
    assert!(said.code != 0 && said.err.contains("signal 9"), "{said}");
    let log = log(room, 2);
    assert!(log.lines().last().unwrap().contains(phase), "it was killed in another phase:\n{log}");
    all_end(&processes, Instant::now(), END);
    assert!(!room.path().join("run/receipt.json").exists(), "a killed job leaves no receipt");
}

#[test]
fn a_rank_killed_in_capture_ends_the_job() {
    killed_at(&slow(8192, 64), "capture, layer 1", "capture, layer");
}

#[test]
fn a_rank_killed_on_the_answers_way_down_ends_the_job() {
    killed_at(&slow(512, 2048), "sweep, layer 2", "sweep, layer");
}

/// A room in which each rank has its own folder and copy of the model, and a script that starts it
/// there.
fn own_folders(ranks: usize) -> (Room, String) {
    let draft = Draft::of("qwen3");
    draft.write();
    let room = Room::new();
    for rank in 0..ranks {
        room.write(&format!("{rank}/config.toml"), config("model".as_ref()));
        room.write(&format!("{rank}/train.jsonl"), lines(&[record(50, [1, 2, 3])]));
        for file in ["config.json", "model.safetensors"] {
            room.write(&format!("{rank}/model/{file}"), fs::read(draft.path().join(file)).unwrap());
        }
    }
    let script = room.script("start", &format!("cd $OMPI_COMM_WORLD_RANK && exec {LONGSTRAW} \"$@\""));
    (room, script)
}

/// Trains in these folders, with one run directory. A refusal comes soon after the first rank has started.
#[track_caller]
fn in_own_folders(room: &Room, script: &str, ranks: usize) -> Said {
    let run_dir = room.path().join("run").display().to_string();
    let arguments = ["train", "--run-dir", &run_dir];
    let mut running = room.start(&Call { ranks, program: script, arguments: &arguments, variables: &[] });
    while !running.has_ended() && !log(room, 0).contains("process") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let said = ends_soon(running);
    assert_eq!(room.files("run").iter().find(|file| !file.starts_with("logs/") && *file != ".lock"), None);
    said
}

#[test]
fn a_file_that_one_rank_cannot_read_ends_the_job_with_one_message() {
    let (room, script) = own_folders(4);
    let file = room.path().join("2/model/model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..1000]).unwrap();
    let said = in_own_folders(&room, &script, 4);
    said.refused(3, &["rank 2, start: model/model.safetensors: the header should take", "but the file has 1000"]);
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let said = in_own_folders(&room, &script, 4);
    said.refused(3, &["rank 2, start: model: there is neither model.safetensors nor"]);
    let log = room.read("run/logs/rank_0.log");
    assert!(log.contains("ERROR") && log.contains("rank 2 failed"), "{log}");
}

#[test]
fn ranks_with_different_configurations_data_or_models_report_what_differs() {
    let (room, script) = own_folders(3);
    let text = room.read("1/config.toml");
    room.write("1/config.toml", text.replace("lr = 1e-3", "lr = 2e-3"));
    let said = in_own_folders(&room, &script, 3);
    said.refused(4, &["ranks disagree about the configuration (digest): rank 0 has ", "rank 1 has "]);
    room.write("1/config.toml", text);
    room.write("2/train.jsonl", lines(&[record(51, [1, 2, 3])]));
    let said = in_own_folders(&room, &script, 3);
    said.refused(4, &["ranks disagree about the data (digest): rank 0 has ", "rank 2 has "]);
    room.write("2/train.jsonl", lines(&[record(50, [1, 2, 3])]));
    let mut draft = Draft::of("qwen3");
    // One value in the middle of a tensor, far from both ends.
    let name = "model.layers.1.mlp.down_proj.weight";
    let middle = draft.tensors[name].bytes.len() / 8;
    draft.tensor(name).set(middle, 0.75);
    draft.write();
    fs::copy(draft.path().join("model.safetensors"), room.path().join("1/model/model.safetensors")).unwrap();
    let said = in_own_folders(&room, &script, 3);
    said.refused(4, &["ranks disagree about the checkpoint (digest): rank 0 has ", "rank 1 has "]);
}

#[test]
fn a_gradient_that_is_not_finite_ends_with_exit_6_and_one_message() {
    let (room, _) = own_folders(1);
    let script = room.script("start", &format!("cd 0 && exec {LONGSTRAW} \"$@\""));
    let said =
        room.run(&Call { ranks: 2, program: &script, arguments: &["--set", "optimizer.lr=1e30"], variables: &[] });
    said.refused(6, &["rank 0, finalize: the gradient of model.layers.", "is not finite", "smaller optimizer.lr"]);
    assert_eq!(room.read("0/run/metrics.jsonl").lines().count(), 1, "the first update is finite");
    assert!(!room.path().join("0/run/receipt.json").exists());
}

#[test]
fn a_rank_that_fails_alone_between_steps_aborts_the_others() {
    let (room, _) = own_folders(1);
    room.write("0/run/logs/keep", "");
    symlink("/dev/full", room.path().join("0/run/metrics.jsonl")).unwrap();
    let script = room.script("start", &format!("cd 0 && exec {LONGSTRAW} \"$@\""));
    let mut running =
        room.start(&Call { ranks: 3, program: &script, arguments: &["--set", "run.steps=1000000"], variables: &[] });
    running.until("the first step", || {
        fs::read_to_string(room.path().join("0/run/logs/rank_0.log"))
            .is_ok_and(|log| log.contains("step 1/"))
            .then_some(())
    });
    let said = ends_soon(running);
    said.refused(3, &["rank 0, update: cannot write run/metrics.jsonl: No space left on device", "--run-dir"]);
}
