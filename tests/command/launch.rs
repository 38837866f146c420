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
