//! The verbs that make data sets.

use std::io::{IsTerminal as _, stdin};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use longstraw::config::{self, Environment, WithoutFile};
use longstraw::data::{Tokenizer, keychain as notes};
use longstraw::report::{print_result, say};
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::runtime::terminal::is_terminal;
use longstraw::runtime::units::Tokens;
use longstraw::tools::generate::{self, ChunkSize, Options, PARALLEL_MAX, Ready, Summary};
use longstraw::world::install_signal_handlers;

use super::arguments::depth;
use super::mix::MixFlags;
use super::output::print_json;
use super::start::ConfigFlags;

#[derive(Debug, Subcommand)]
pub(super) enum DataVerb {
    /// Find one of many notes hidden in real text, or follow one to another; candidate answers have rewards
    Keychain(KeychainFlags),
    /// Let the endpoint's model write questions with a checkable answer about given texts; needs no MPI and no GPU
    Generate(GenerateFlags),
    /// Show what a run draws from its files: prompts, weights, shares of the groups, epochs; needs no MPI and no GPU
    Mix(MixFlags),
}

#[derive(Args, Clone, Debug)]
pub(super) struct KeychainFlags {
    /// The HF folder whose tokenizer and chat template are used
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// Folders of text (default: texts that every Debian machine has)
    #[arg(long, value_name = "FOLDER")]
    text: Vec<PathBuf>,
    /// Tokens of a prompt, exactly
    #[arg(long, default_value_t = 2000)]
    prompt_tokens: u64,
    /// Number of training prompts
    #[arg(long, default_value_t = 40)]
    train: usize,
    /// Number of held-out prompts
    #[arg(long, default_value_t = 8)]
    held_out: usize,
    /// Notes in a prompt
    #[arg(long, default_value_t = 8)]
    keys: usize,
    /// Notes on the way from the place in question to its code: each but the last refers to another place
    #[arg(long, default_value_t = 1, value_name = "N")]
    hops: usize,
    /// Depth of these notes in percent of the text, spread evenly over the range from the first prompt of a file to its
    /// last
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
    /// Texts; they are sent to the endpoint. In folders, other files are skipped
    #[arg(required = true, value_name = "FOLDER-OR-FILE")]
    texts: Vec<PathBuf>,
    /// The data set; FILE.state next to it records what is finished, and the same command continues from there
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Number of questions for each chunk of text
    #[arg(long, value_name = "N", default_value_t = 2)]
    questions: u64,
    /// Number of candidate answers for each question, one of them right
    #[arg(long, value_name = "N", default_value_t = 4)]
    answers: u64,
    /// Maximum number of characters of a chunk
    #[arg(long, value_name = "N", default_value_t = 12_000, conflicts_with = "chunk_tokens")]
    chunk_chars: u64,
    /// Maximum number of tokens of a chunk, instead of characters
    #[arg(long, value_name = "N", requires = "tokenizer")]
    chunk_tokens: Option<u64>,
    /// The model's folder with the tokenizer that counts the tokens
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Maximum number of requests of this run; the same command continues with the rest
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Maximum number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=PARALLEL_MAX))]
    parallel: u64,
    /// The endpoint's model (default: `endpoint.default_model`)
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Print the estimated cost and send nothing
    #[arg(long)]
    dry_run: bool,
    /// Continue without asking at the terminal
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

/// Prints the estimated cost, asks for consent at a terminal, and generates. A fault is reported after the summary.
pub(super) fn generate(config: ConfigFlags, flags: GenerateFlags) -> Result<Exit, Failure> {
    let environment = Environment::process();
    let loaded = config::load(&config.overrides(WithoutFile::DefaultsInPart))?;
    let (dry_run, yes, json) = (flags.dry_run, flags.yes, flags.json);
    if !dry_run {
        generate::allow(&loaded.run, &environment)?;
    }
    let ready = Ready::new(flags.options(), &loaded.run)?;
    say(&ready.estimate().text());
    if dry_run {
        print_summary(&ready.dry_run(), json);
        return Ok(Exit::Done);
    }
    let needs_consent = stdin().is_terminal() && is_terminal() && ready.estimate().requests > 0;
    if needs_consent && !yes && !consents() {
        say("nothing was sent");
        return Ok(Exit::Done);
    }
    install_signal_handlers()?;
    let mut summary = ready.run(&loaded.run, &environment)?;
    print_summary(&summary, json);
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

fn print_summary(summary: &Summary, json: bool) {
    match (json, summary.dry_run) {
        (true, _) => print_json(summary),
        (false, true) => {}
        (false, false) => print_result(&summary.text()),
    }
}

/// Whether the user at the terminal agrees.
fn consents() -> bool {
    say("go on? [y/N]");
    let mut line = String::new();
    stdin().read_line(&mut line).is_ok() && ["y", "yes"].contains(&line.trim().to_lowercase().as_str())
}
