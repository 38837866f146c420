//! Two thousand mutated configurations: each is accepted, or refused in words that name key and source. None panics, and
//! none takes for ever.
//!
//! Every case follows from its number alone, so a failure names the one to look at.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by its panic")]

mod cases;
mod changes;
mod draw;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use longstraw::config::{Environment, Error, Fault, Gate, Loaded, Overrides, Problem, Source, load_gate_in, load_in};
use longstraw::model::shape::Shape;
use longstraw::plan::seconds::Rates;
use longstraw::plan::{self, Pace, Place, Room};
use longstraw::runtime::failure::{Classified as _, Exit};

use cases::Case;

const CASES: usize = 2000;
/// Of these, so many go through the command.
const RUNS: usize = 60;
/// What takes longer hangs: in this process a case takes milliseconds.
const CASE_MAX: Duration = Duration::from_mins(10);
const RUN_MAX: Duration = Duration::from_mins(10);
const SHAPES: [&str; 7] =
    ["qwen3-8b", "qwen3-0.6b", "qwen2.5-0.5b", "llama-3.1-8b", "smollm2-135m", "qwen3.6-27b", "glm-5.2"];

/// What became of a case.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Outcome {
    /// Every source and the whole are right, and every shape has a plan.
    Accepted,
    /// The same, and refused for another number of ranks than it asks for.
    RefusedForAWorld,
    /// A source or the whole is wrong.
    Refused,
}

fn shape_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/shapes").join(name)
}

/// The message is a line for each problem, of bounded length, in characters that a terminal shows and does not obey.
fn check_words(text: &str) {
    assert!(text.lines().all(|line| line.len() < 4000), "a line without end: {} bytes", text.len());
    let odd = text.chars().find(|c| c.is_control() && *c != '\n');
    assert!(odd.is_none(), "{odd:?} in {text}");
}

/// A problem names what is wrong and where that was said.
fn check_problem(problem: &Problem, folder: &Path) {
    let text = problem.to_string();
    assert!(!text.contains('\n') && text.len() > 10, "{text:?}");
    match &problem.source {
        Some(Source::Config(path) | Source::Settings(path)) => {
            assert!(path.starts_with(folder) && text.contains(&path.display().to_string()), "{text}");
        }
        Some(source) => assert!(text.starts_with(&source.to_string()), "{text}"),
        // Of what no source says there is only the key to name.
        None => assert!(matches!(problem.fault, Fault::Missing | Fault::Should { .. }), "{text}"),
    }
    let whole_file = matches!(problem.fault, Fault::Unreadable { .. } | Fault::Syntax { .. } | Fault::FlagForm);
    if !whole_file {
        let last = problem.key.rsplit('.').next().unwrap_or_default();
        let start: String = last.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').take(40).collect();
        assert!(text.to_lowercase().contains(&start.to_lowercase()), "{start} is not in {text}");
    }
    if let Fault::Should { be, why } = &problem.fault {
        assert!(!be.is_empty() && !why.is_empty(), "{text}");
    }
}

fn check_refusal(error: &Error, folder: &Path) {
    assert_eq!(error.exit(), Exit::Config, "{error}");
    check_words(&error.to_string());
    let Error::Refused { problems } = error else { panic!("a configuration is refused as a whole: {error}") };
    assert!(!problems.is_empty(), "refused without a reason");
    for problem in problems {
        check_problem(problem, folder);
    }
}

/// Whatever a run does with its configuration before it has a world.
fn check_accepted(loaded: &Loaded, folder: &Path) {
    let run = &loaded.run;
    assert_eq!(run.digest().len(), 64);
    assert!(run.resumable().is_object());
    loaded.notes().iter().for_each(|note| check_words(note));
    // In a folder without settings.json, which would go before the file.
    let aside = folder.join("resolved");
    std::fs::create_dir(&aside).unwrap();
    std::fs::write(aside.join("config.toml"), run.to_toml()).unwrap();
    let again = load_in(&aside, &Environment::default(), &Overrides::default());
    let again = again.unwrap_or_else(|error| panic!("the resolved file is refused: {error}"));
    assert_eq!(again.run, *run, "the resolved file is another configuration");
}

/// The plan of every shape, with and without room.
fn check_plans(loaded: &Loaded, ranks: u64, shapes: &[&Shape]) {
    let run = &loaded.run;
    let users = Room { ranks_here: 8, device: Some(plan::gib(141)), host: Some(plan::gib(560)), host_only: false };
    let laptop = Room { ranks_here: 2, device: None, host: Some(plan::gib(8)), host_only: true };
    for shape in shapes {
        if shape.check_targets(run.lora.targets.as_deref()).is_err() {
            continue;
        }
        for room in [Room::default(), users, laptop] {
            let mut plan = plan::of_shape(run, ranks, Some(shape), &room);
            plan.time(run, shape, &Pace::Published(Rates::h200(run, shape)));
            check_words(&plan.text(run));
            assert!(plan.sum(Place::Device) > plan::gib(0), "a model takes memory");
            assert!(!plan.groups().is_empty());
            if let Err(error) = plan.refuse(&room) {
                assert_eq!(error.exit(), Exit::DoesNotFit);
                check_words(&error.to_string());
            }
            if let Some(seconds) = &plan.seconds {
                assert!(seconds.total.is_finite() && seconds.total >= 0.0, "{} s", seconds.total);
            }
        }
    }
    check_words(&plan::of_shape(run, ranks, None, &Room::default()).text(run));
}

/// A case from its files to its plans, in a folder of its own.
fn judge(case: &Case, folder: &Path, shapes: &[Shape]) -> Outcome {
    let overrides = case.write(folder);
    let environment = Environment::of(case.variables.iter().cloned());
    let gates = Gate::all();
    let gate = &gates[case.number % gates.len()];
    if let Err(error) = load_gate_in(folder, &environment, &overrides, gate) {
        check_refusal(&error, folder);
    }
    let loaded = match load_in(folder, &environment, &overrides) {
        Ok(loaded) => loaded,
        Err(error) => {
            check_refusal(&error, folder);
            return Outcome::Refused;
        }
    };
    check_accepted(&loaded, folder);
    let own = loaded.run.parallel.cp_size.unwrap_or([1, 8, 3][case.number % 3]);
    // A number of pages for each rank without a number of ranks goes with some number that only the world knows.
    let asks = loaded.run.parallel.cp_size.is_some() || loaded.run.context.cp_pages_per_gpu.is_none();
    // Two shapes a case: in two thousand cases each is met many times.
    let shapes = [&shapes[case.number % shapes.len()], &shapes[(case.number / 3 + 1) % shapes.len()]];
    let mut outcome = Outcome::Accepted;
    for ranks in [own, 8, 3] {
        let problems = loaded.run.check(Some(ranks));
        for problem in &problems {
            check_problem(problem, folder);
        }
        if !problems.is_empty() {
            assert!(!asks || ranks != own, "what is loaded goes with the ranks that it asks for: {problems:?}");
            outcome = Outcome::RefusedForAWorld;
        }
    }
    check_plans(&loaded, own, &shapes);
    outcome
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_owned()
}

/// In this process, on a thread of its own, so that one that takes for ever is noticed and named.
#[test]
fn two_thousand_mutated_configurations_are_accepted_or_refused_in_words() {
    let (done, judged) = mpsc::channel();
    std::thread::spawn(move || {
        let shapes: Vec<Shape> = SHAPES.iter().map(|name| Shape::read(&shape_folder(name), None).unwrap()).collect();
        for number in 0..CASES {
            let folder = tempfile::tempdir().unwrap();
            let case = Case::of(number);
            let judged = catch_unwind(AssertUnwindSafe(|| judge(&case, folder.path(), &shapes)));
            if done.send(judged.map_err(|panic| words_of(&*panic))).is_err() {
                return;
            }
        }
    });
    let start = Instant::now();
    let mut outcomes: BTreeMap<Outcome, usize> = BTreeMap::new();
    let mut faults = Vec::new();
    for number in 0..CASES {
        let judged = judged.recv_timeout(CASE_MAX);
        let judged = judged.unwrap_or_else(|_| panic!("it takes for ever: {}", Case::of(number)));
        match judged {
            Ok(outcome) => *outcomes.entry(outcome).or_default() += 1,
            Err(words) => faults.push(format!("{words}\n  of {}", Case::of(number))),
        }
    }
    let said = format!("{outcomes:?}, {} faults, {:.1} s", faults.len(), start.elapsed().as_secs_f64());
    println!("{CASES} mutated configurations: {said}");
    let few: Vec<&String> = faults.iter().take(20).collect();
    assert!(faults.is_empty(), "{said}\n{}", few.iter().map(|f| f.as_str()).collect::<Vec<_>>().join("\n"));
    // Mutations that were all refused, or all let pass, would show nothing.
    let count = |outcome| outcomes.get(&outcome).copied().unwrap_or_default();
    let (accepted, elsewhere) = (count(Outcome::Accepted), count(Outcome::RefusedForAWorld));
    assert!(accepted + elsewhere >= CASES / 6 && accepted >= 50 && elsewhere >= 50, "{said}");
    assert!(count(Outcome::Refused) >= CASES / 4, "{said}");
}

/// The command's exit code and words; -1 where it was ended for its time.
fn run(case: &Case, folder: &Path) -> (i32, String) {
    let overrides = case.write(folder);
    let mut command = Command::new(env!("CARGO_BIN_EXE_longstraw"));
    command.arg("plan").current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
    for (flag, file) in [("--config", &overrides.config), ("--settings", &overrides.settings)] {
        if let Some(file) = file {
            command.arg(flag).arg(file);
        }
    }
    command.arg("--model").arg(shape_folder(SHAPES[case.number % SHAPES.len()]));
    command.args(["--device-gib", "141", "--host-gib", "560"]);
    command.args(overrides.set.iter().map(|text| format!("--set={text}")));
    #[expect(clippy::disallowed_methods, reason = "the test decides what the command inherits")]
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LONGSTRAW_") {
            command.env_remove(name);
        }
    }
    let said = folder.join("said");
    command.envs(case.variables.iter().cloned()).stderr(std::fs::File::create(&said).unwrap());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let code = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code().unwrap_or(-1);
        }
        if start.elapsed() > RUN_MAX {
            child.kill().unwrap();
            child.wait().unwrap();
            break -1;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    (code, String::from_utf8_lossy(&std::fs::read(said).unwrap()).into_owned())
}

#[test]
fn the_command_ends_a_mutated_configuration_with_0_2_or_5_and_says_why() {
    let mut codes: BTreeMap<i32, usize> = BTreeMap::new();
    let mut faults = Vec::new();
    for number in (0..CASES).step_by(CASES / RUNS).take(RUNS) {
        let (case, folder) = (Case::of(number), tempfile::tempdir().unwrap());
        let (code, said) = run(&case, folder.path());
        *codes.entry(code).or_default() += 1;
        let ours = said.lines().filter(|line| line.starts_with("longstraw: ")).count();
        let in_words = if code == 0 { ours == 0 || !said.contains("refused") } else { ours == 1 };
        let odd = said.contains("panicked") || said.contains("bug:");
        if ![0, 2, 5].contains(&code) || !in_words || odd {
            faults.push(format!("exit {code}: {said}\n  of {case}"));
        }
    }
    println!("{RUNS} runs of the command by exit code: {codes:?}");
    assert!(faults.is_empty(), "{codes:?}\n{}", faults.join("\n"));
    let seen = |code: i32| codes.get(&code).copied().unwrap_or_default();
    assert!(seen(0) > 0 && seen(2) > 0 && seen(5) > 0, "{codes:?}");
}
