//! The `longstraw` command: parse the verb, build configuration and world, map a failure to an exit code.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let (arguments, set) = cli::hoist(std::env::args_os());
    let outcome = match cli::Command::try_parse_from(arguments) {
        Ok(command) => cli::run(command, set),
        Err(usage) => {
            cli::say_once(&usage);
            // Help and version are no failures.
            return if usage.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    match outcome {
        Ok(exit) => ExitCode::from(u8::try_from(exit.code()).unwrap_or(70)),
        Err(failure) => {
            longstraw::report::say(&format!("longstraw: {failure}"));
            ExitCode::from(u8::try_from(failure.exit().code()).unwrap_or(70))
        }
    }
}
