//! The `longstraw` command: parse the arguments, run the verb, map the outcome to an exit code.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;
use longstraw::runtime::failure::{Exit, Failure};

#[expect(clippy::disallowed_methods, reason = "the one reader of the command line")]
fn main() -> ExitCode {
    let (arguments, set) = cli::take_set_flags(std::env::args_os());
    let outcome = match cli::Command::try_parse_from(arguments) {
        Ok(command) => cli::run(command, set),
        Err(usage) => {
            cli::print_usage(&usage);
            // Help and version are no failures.
            return if usage.use_stderr() { code(Exit::Config) } else { code(Exit::Done) };
        }
    };
    match outcome {
        Ok(exit) => code(exit),
        Err(error) => {
            longstraw::report::say(&format!("longstraw: {error:#}"));
            code(exit_of(&error))
        }
    }
}

/// The exit code of the typed failure below all context; an error without one is a bug.
fn exit_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(|cause| cause.downcast_ref::<Failure>()).map_or(Exit::Bug, Failure::exit)
}

fn code(exit: Exit) -> ExitCode {
    ExitCode::from(u8::try_from(exit.code()).unwrap_or(70))
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;
    use longstraw::world::Error;

    use super::*;

    #[test]
    fn the_exit_code_is_that_of_the_failure_below_all_context() {
        let failure = Failure::from(Error::Uneven { ranks: 3, cp_size: 2 });
        let error = Err::<(), _>(failure).context("inner").context("outer").unwrap_err();
        assert_eq!(exit_of(&error), Exit::Config);
        assert!(format!("{error:#}").starts_with("outer: inner: 3 ranks cannot be cut"));
        assert_eq!(exit_of(&anyhow::anyhow!("no failure")), Exit::Bug);
    }
}
