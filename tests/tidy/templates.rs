//! Batch files: their `#SBATCH` lines cannot read the site's file, so they repeat its values.

use std::process::Command;

use crate::source::{Source, has_extension, root, sources};

pub(crate) fn template_sources() -> Vec<Source> {
    let found = sources(&["slurm"], &["sbatch"]);
    assert!(!found.is_empty(), "slurm/ holds no template");
    found
}

/// What `slurm/submit` prints at the site file's own values, a line each.
fn submit(arguments: &[&str]) -> Result<Vec<String>, String> {
    let mut command = Command::new("env");
    command.args(["-i", "PATH=/usr/bin:/bin", "bash", "slurm/submit"]).args(arguments).current_dir(root());
    let said = command.output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if said.status.success() {
        Ok(text(&said.stdout).lines().map(str::to_owned).collect())
    } else {
        Err(text(&said.stderr))
    }
}

/// Templates that ask Slurm for something else than the site's file says, or that run another job than they are named
/// after.
pub(crate) fn drifted(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| has_extension(&source.path, &["sbatch"])) {
        let name = source.path.trim_start_matches("slurm/").trim_end_matches(".sbatch");
        let wanted = match submit(&["--options", name]) {
            Ok(wanted) => wanted,
            Err(words) => {
                faults.push(format!("{}:1: {words}", source.path));
                continue;
            }
        };
        let found: Vec<&str> = source.text.lines().filter_map(|line| line.strip_prefix("#SBATCH ")).collect();
        if found != wanted {
            let lines = wanted.join("\n    #SBATCH ");
            faults.push(format!("{}:1: slurm/site.env asks for these lines:\n    #SBATCH {lines}", source.path));
        }
        if source.text.lines().last() != Some(format!("run_job {name}").as_str()) {
            faults.push(format!("{}:1: the last line is not `run_job {name}`", source.path));
        }
    }
    faults
}

/// Jobs of the site's file that are no gates, and gates that are no jobs. A job needs no batch file: `slurm/submit` makes one.
pub(crate) fn missing() -> Vec<String> {
    let jobs = submit(&["--jobs"]).expect("slurm/submit lists the jobs");
    let gates: Vec<String> = sources(&["configs/gates"], &["toml"])
        .iter()
        .map(|gate| gate.path.trim_start_matches("configs/gates/").trim_end_matches(".toml").to_owned())
        .filter(|name| name != "every")
        .collect();
    assert!(gates.len() > 1, "{gates:?}");
    let no_gates = jobs.iter().filter(|job| *job != "train" && !gates.contains(job));
    let no_jobs = gates.iter().filter(|gate| !jobs.contains(gate));
    let faults = no_gates.map(|job| format!("slurm/site.env:1: there is no configs/gates/{job}.toml"));
    faults
        .chain(no_jobs.map(|gate| format!("configs/gates/{gate}.toml:1: slurm/site.env has no line {gate}")))
        .collect()
}
