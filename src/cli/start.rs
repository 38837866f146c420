//! Where the configuration comes from, and the start of MPI.

use std::path::PathBuf;

use clap::Args;
use longstraw::config::{Environment, Overrides, WithoutFile};
use longstraw::report::say;
use longstraw::runtime::failure::Failure;
use longstraw::runtime::liveness::Tracker;
use longstraw::tensor::boundary::count_allocations;
use longstraw::world::{Launcher, World};

#[derive(Args, Clone, Debug)]
pub(super) struct ConfigFlags {
    /// The configuration (default: ./config.toml where it exists; `train` without one takes the built-in laptop run)
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The settings (default: ./settings.json where it exists)
    #[arg(long, global = true, value_name = "FILE")]
    settings: Option<PathBuf>,
    /// One key's value; may be given again
    #[arg(long, global = true, value_name = "table.key=value")]
    pub(super) set: Vec<String>,
    /// Where the run writes (default: run.dir)
    #[arg(long, global = true, value_name = "DIR")]
    run_dir: Option<PathBuf>,
}

impl ConfigFlags {
    pub(super) fn is_given(&self) -> bool {
        let files = [&self.config, &self.settings, &self.run_dir];
        files.into_iter().any(Option::is_some) || !self.set.is_empty()
    }

    pub(super) fn overrides(self, without_file: WithoutFile) -> Overrides {
        let ConfigFlags { config, settings, set, run_dir } = self;
        Overrides { config, without_file, settings, set, run_dir, left_out: &[] }
    }
}

/// Starts MPI, and limits this process to its share of the machine's cores. Says so if a launcher has bound the ranks to
/// fewer cores than there are.
pub(super) fn start_world(environment: &Environment) -> Result<World, Failure> {
    count_allocations();
    let launcher = environment.launcher_tasks().map(|found| Launcher { variable: found.variable, tasks: found.tasks });
    let world = World::start(launcher, Tracker::default())?;
    // Every rank calls the collective, since the variable may differ from host to host.
    let ranks_here = world.machine().size();
    if environment.omp_num_threads().is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        tch::set_num_threads(i32::try_from((cores / ranks_here).max(1)).unwrap_or(1));
    }
    if let Some(note) = world.binding_note()
        && world.all.rank().0 == 0
    {
        say(&note);
    }
    Ok(world)
}
