//! The verb that writes a page about runs.

use std::path::PathBuf;

use clap::Args;
use longstraw::report::{page, print_result};
use longstraw::runtime::failure::{Exit, Failure};

use super::output::print_json;

#[derive(Args, Debug)]
pub(super) struct ReportFlags {
    /// Run directories, or folders of gates such as runs/gates
    #[arg(value_name = "RUN_DIR", required = true)]
    run_dirs: Vec<PathBuf>,
    /// The page (default: `report.html` in the run directory; for several runs, here)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn report(flags: &ReportFlags) -> Result<Exit, Failure> {
    let written = page::write(&flags.run_dirs, flags.out.as_deref())?;
    if flags.json {
        print_json(&written);
    } else {
        print_result(&written.text());
    }
    Ok(Exit::Done)
}
