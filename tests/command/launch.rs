//! Processes that a launcher started without MPI's knowledge.

use super::room::{Call, LONGSTRAW, Room};

fn started_as(tasks: (&str, &str), arguments: &[&str]) -> super::room::Said {
    Room::new().run(&Call { ranks: 0, program: LONGSTRAW, arguments, variables: &[tasks] })
}

#[test]
fn processes_that_each_believe_they_are_alone_are_refused_with_the_right_start() {
    for variable in ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"] {
        for arguments in [&["train"] as &[&str], &[], &["parity", "absent"]] {
            let said = started_as((variable, "4"), arguments);
            said.refused(4, &["rank 0 of 1", &format!("{variable} says that 4 were started"), "srun --mpi=pmix"]);
        }
    }
}

#[test]
fn one_process_may_run_alone() {
    let said = started_as(("SLURM_STEP_NUM_TASKS", "1"), &["parity", "absent"]);
    said.refused(3, &["absent/case.json"]);
    // An allocation of four tasks of which the step uses one.
    started_as(("SLURM_NTASKS", "4"), &["parity", "absent"]).refused(3, &["absent/case.json"]);
}

#[test]
fn verbs_without_mpi_ignore_the_launcher() {
    let four = ("SLURM_STEP_NUM_TASKS", "4");
    started_as(four, &["plan"]).refused(2, &["context.prompt_len is missing and has no default"]);
    started_as(four, &["convert", "absent.gguf", "there"]).refused(3, &["absent.gguf"]);
    started_as(four, &["data", "keychain", "--model", "absent", "--out", "there"]).refused(3, &["absent"]);
}

#[test]
fn a_rank_that_its_launcher_has_bound_to_one_core_is_told_so_by_every_verb_that_computes() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let with = |binding: &[&str]| {
        let arguments = [&["-n", "1"], binding, &[LONGSTRAW, "parity", "absent"]].concat();
        Room::new().run(&Call { ranks: 0, program: "mpirun", arguments: &arguments, variables: &[] })
    };
    let words = format!("1 rank is bound to 1 core of {cores} by the launcher");
    // On a machine of one core there is nothing that a launcher could keep from a rank.
    let expected: &[&str] = if cores > 1 { &[&words] } else { &[] };
    with(&["--bind-to", "core"]).ended(3, expected);
    let free = with(&["--bind-to", "none"]);
    assert!(!free.ended(3, &["absent/case.json"]).err.contains("by the launcher"), "{free}");
}
