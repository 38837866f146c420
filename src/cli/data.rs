//! The verbs that make data sets.

use std::io::{IsTerminal as _, stderr, stdin};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use longstraw::config::{self, Environment};
use longstraw::data::{Tokenizer, keychain as notes};
use longstraw::report::{print_result, say};
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::runtime::units::Tokens;
use longstraw::tools::generate::{self, ChunkSize, Options, PARALLEL_MAX, Ready, Summary};
use longstraw::world::heed_signals;

use super::arguments::depth;
use super::{ConfigFlags, overrides, print_json};

#[derive(Debug, Subcommand)]
pub(super) enum DataVerb {
    /// Find one of many notes hidden in real text, or follow one to another; candidate answers carry rewards
    Keychain(KeychainFlags),
    /// Questions with a checkable answer over given texts, by the endpoint's model; needs no MPI and no GPU
    Generate(GenerateFlags),
}

#[derive(Args, Clone, Debug)]
pub(super) struct KeychainFlags {
    /// The HF folder whose tokenizer and chat template are used
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// Folders of text (default: texts that stand on any Debian machine)
    #[arg(long, value_name = "FOLDER")]
    text: Vec<PathBuf>,
    /// Tokens of a prompt, exactly
    #[arg(long, default_value_t = 2000)]
    prompt_tokens: u64,
    /// Training prompts
    #[arg(long, default_value_t = 40)]
    train: usize,
    /// Held-out prompts
    #[arg(long, default_value_t = 8)]
    held_out: usize,
    /// Notes in a prompt
    #[arg(long, default_value_t = 8)]
    keys: usize,
    /// Notes from the place that is asked for to its code: each but the last says that the code is another place's
    #[arg(long, default_value_t = 1, value_name = "N")]
    hops: usize,
    /// Where these notes lie, in percent of the text: evenly through the range, from a file's first prompt to its last
    #[arg(long, default_value = "0..100", value_name = "FROM..TO", value_parser = depth)]
    depth: notes::Depth,
    /// Answers of a prompt, one of them right; 0 leaves them out, for `rollout.sample = true`
    #[arg(long, default_value_t = 4, alias = "group-size", value_name = "N")]
    answers: usize,
    /// Ask for the code alone, and answer so, instead of a sentence
    #[arg(long)]
    short: bool,
    /// Seed of everything random
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The folder for `train.jsonl` and `held_out.jsonl`
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

#[derive(Args, Debug)]
pub(super) struct GenerateFlags {
    /// Texts; they are sent to the endpoint. In folders, what is no text is passed over
    #[arg(required = true, value_name = "FOLDER-OR-FILE")]
    texts: Vec<PathBuf>,
    /// The data set; FILE.state beside it says what is finished, and the same command goes on from there
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Questions of a chunk of text
    #[arg(long, value_name = "N", default_value_t = 2)]
    questions: u64,
    /// Candidate answers of a question, one of them right
    #[arg(long, value_name = "N", default_value_t = 4)]
    answers: u64,
    /// Characters of a chunk, at most
    #[arg(long, value_name = "N", default_value_t = 12_000, conflicts_with = "chunk_tokens")]
    chunk_chars: u64,
    /// Tokens of a chunk, at most, in place of characters
    #[arg(long, value_name = "N", requires = "tokenizer")]
    chunk_tokens: Option<u64>,
    /// The model's folder, whose tokenizer counts them
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Requests of this run, at most; the same command goes on with the rest
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Requests that are under way at one time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=PARALLEL_MAX))]
    parallel: u64,
    /// The model that is asked (default: `endpoint.default_model`)
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Say what it will cost, and send nothing
    #[arg(long)]
    dry_run: bool,
    /// Do not ask at the terminal whether to go on
    #[arg(long)]
    yes: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn keychain(flags: KeychainFlags) -> Result<Exit, Failure> {
    let tokenizer = Tokenizer::open(&flags.model)?;
    let options = notes::Options {
        folders: flags.text,
        prompt_tokens: Tokens(flags.prompt_tokens),
        train: flags.train,
        held_out: flags.held_out,
        keys: flags.keys,
        hops: flags.hops,
        depth: flags.depth,
        answers: flags.answers,
        short: flags.short,
        seed: flags.seed,
    };
    let made = notes::write(&options, &tokenizer, &flags.out)?;
    say(&format!(
        "{}: {} prompts of {} tokens from {} text files",
        flags.out.display(),
        made.prompts,
        made.prompt_tokens,
        made.text_files
    ));
    Ok(Exit::Done)
}

/// Says what it will cost, and then asks; what ended it comes after what it has come to.
pub(super) fn generate(config: ConfigFlags, flags: GenerateFlags) -> Result<Exit, Failure> {
    let environment = Environment::process();
    let loaded = config::load(&overrides(config))?;
    let (dry_run, yes, json) = (flags.dry_run, flags.yes, flags.json);
    if !dry_run {
        generate::allow(&loaded.run, &environment)?;
    }
    let ready = Ready::new(flags.options(), &loaded.run)?;
    say(&ready.estimate().text());
    if dry_run {
        tell(&ready.dry_run(), json);
        return Ok(Exit::Done);
    }
    let asks = stdin().is_terminal() && stderr().is_terminal() && ready.estimate().requests > 0;
    if asks && !yes && !agreed() {
        say("nothing was sent");
        return Ok(Exit::Done);
    }
    heed_signals()?;
    let mut summary = ready.run(&loaded.run, &environment)?;
    tell(&summary, json);
    summary.error.take().map_or(Ok(Exit::Done), Err)
}

impl GenerateFlags {
    fn options(self) -> Options {
        let chunk =
            self.chunk_tokens.map_or(ChunkSize::Chars(self.chunk_chars), |most| ChunkSize::Tokens(Tokens(most)));
        Options {
            texts: self.texts,
            out: self.out,
            questions: self.questions,
            answers: self.answers,
            chunk,
            tokenizer: self.tokenizer,
            limit: self.limit,
            parallel: self.parallel,
            model: self.model,
        }
    }
}

fn tell(summary: &Summary, json: bool) {
    match (json, summary.dry_run) {
        (true, _) => print_json(summary),
        (false, true) => {}
        (false, false) => print_result(&summary.text()),
    }
}

/// Whether the person at the terminal says yes.
fn agreed() -> bool {
    say("go on? [y/N]");
    let mut line = String::new();
    stdin().read_line(&mut line).is_ok() && ["y", "yes"].contains(&line.trim().to_lowercase().as_str())
}
