//! The reward of a program, with shell scripts that do well, fail, hang, flood, and leave processes behind.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use longstraw::config::{Environment, RewardFn, RewardName, RunConfig};
use longstraw::program::{Limits, Program};
use longstraw::reward::{Candidate, Rewarded, Scorer};
use longstraw::runtime::failure::Exit;
use serde_json::{Value, json};

use super::room::Room;

/// What a script gives for some answers.
struct Scripted {
    room: Room,
    config: RunConfig,
}

impl Scripted {
    /// A script that is started with its room's path as its argument.
    fn of(script: &str) -> Scripted {
        let room = Room::with(&[("score.sh", script)]);
        let path = |name: &str| room.path().join(name).display().to_string();
        let mut config = RunConfig::laptop();
        config.grpo.reward_fn = Some(RewardFn::only(RewardName::Command));
        config.reward.command = Some(vec!["/bin/sh".to_owned(), path("score.sh"), path("")]);
        config.reward.command_sec = 20;
        Scripted { room, config }
    }

    /// Scores answers of these texts in one run; also how long it took.
    fn score(&self, texts: &[&str]) -> (Vec<Rewarded>, Duration) {
        let scorer = Scorer::open(&self.config, &Environment::default()).unwrap();
        let data = json!({ "expected": "7" });
        let reward_data = data.as_object().unwrap();
        let asked = texts.iter().enumerate().map(|(answer, text)| Candidate {
            prompt: "one",
            answer,
            text,
            tokens: 3,
            tokens_max: 8,
            truncated: answer == 1,
            reward_data,
            given: None,
            prompt_text: "",
        });
        let (start, mut alive) = (Instant::now(), 0);
        let scored = scorer.score(&asked.collect::<Vec<_>>(), &mut || alive += 1).unwrap();
        let took = start.elapsed();
        assert!(alive > 0 || scored.iter().all(|rewarded| rewarded.value.is_none()), "no sign of life");
        (scored, took)
    }

    /// Both of two answers lack a reward for this reason.
    #[track_caller]
    fn fails(&self, kind: &str, words: &[&str]) {
        let (scored, _) = self.score(&["a", "b"]);
        assert_eq!(scored.len(), 2);
        for rewarded in scored {
            assert_eq!(rewarded.value, None);
            let missing = rewarded.failure().unwrap();
            assert_eq!(missing.kind(), kind, "{missing}");
            for word in words {
                assert!(missing.to_string().contains(word), "no {word:?} in {missing}");
            }
            assert!(missing.to_string().chars().count() < 700, "{missing}");
        }
    }

    /// The process whose number the script has written into `name` is gone.
    #[track_caller]
    fn is_gone(&self, name: &str) {
        let number = self.room.read(name);
        let stat = Path::new("/proc").join(number.trim()).join("stat");
        let end = Instant::now() + Duration::from_mins(15);
        // One that nobody has reaped yet is gone all the same.
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < end, "process {number} is still there");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn values(scored: &[Rewarded]) -> Vec<Option<f64>> {
    scored.iter().map(|rewarded| rewarded.value).collect()
}

#[test]
fn a_program_reads_every_answer_and_gives_each_its_reward() {
    let scripted = Scripted::of(
        "tee \"$1/told\" | while read -r line; do\n\
         case $line in *'\"answer\":0'*) echo 0.5 ;; *'\"answer\":1'*) echo '{\"reward\": -2, \"reason\": \"x\"}' ;;\n\
         *) echo null ;; esac; done",
    );
    let (scored, _) = scripted.score(&["it is\n7", "8", "9"]);
    assert_eq!(values(&scored), [Some(0.5), Some(-2.0), None]);
    assert_eq!(scored[2].failure().unwrap().kind(), "program_none");
    let told: Vec<Value> = scripted.room.read("told").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(told.len(), 3);
    let first = json!({ "prompt": "one", "answer": 0, "text": "it is\n7", "tokens": 3, "truncated": false,
                        "reward_data": { "expected": "7" } });
    assert_eq!((&told[0], &told[1]["truncated"]), (&first, &json!(true)));
    assert_eq!(values(&scripted.score(&[]).0), [], "without an answer no program is started");
}

#[test]
fn a_line_that_is_no_reward_costs_its_own_answer() {
    let (scored, _) = Scripted::of("cat > /dev/null; echo 1; echo yes; echo nan; echo 2").score(&["a", "b", "c", "d"]);
    assert_eq!(values(&scored), [Some(1.0), None, None, Some(2.0)]);
    let kinds = [1, 2].map(|index: usize| scored[index].failure().unwrap().kind());
    assert_eq!(kinds, ["program_line", "program_not_finite"]);
}

#[test]
fn too_few_or_too_many_lines_are_no_rewards() {
    Scripted::of("cat > /dev/null; echo 1").fails("program_lines", &["1 lines for 2 answers"]);
    Scripted::of("cat > /dev/null; echo 1; echo 1; echo 1").fails("program_lines", &["3 lines for 2 answers"]);
    Scripted::of("exit 0").fails("program_lines", &["0 lines"]);
}

#[test]
fn a_program_that_fails_says_why() {
    let script = "echo 1; echo 1; echo first >&2; echo 'no such file: key' >&2; exit 3";
    Scripted::of(script).fails("program_exit", &["exit status: 3", "it said: first / no such file: key"]);
    Scripted::of("kill -9 $$").fails("program_exit", &["signal: 9"]);
}

#[test]
fn a_program_that_hangs_is_ended_with_its_children() {
    let mut scripted =
        Scripted::of("sleep 60 & echo $! > \"$1/sleeper\"; echo $$ > \"$1/itself\"; echo stuck >&2; wait");
    scripted.config.reward.command_sec = 1;
    scripted.fails("program_time_out", &["ended after 1 s (reward.command_sec)", "it said: stuck"]);
    scripted.is_gone("sleeper");
    scripted.is_gone("itself");
    // One that does not listen to anything but a kill.
    let mut deaf = Scripted::of("trap '' TERM INT HUP PIPE; echo $$ > \"$1/itself\"; while :; do sleep 0.1; done");
    deaf.config.reward.command_sec = 1;
    deaf.fails("program_time_out", &[]);
    deaf.is_gone("itself");
}

#[test]
fn the_children_that_a_program_leaves_are_ended_and_not_waited_for() {
    let script = "for i in 1 2 3 4 5; do sleep 60 & done; echo $! > \"$1/sleeper\"; echo 1; echo 0; exit 0";
    let scripted = Scripted::of(script);
    let (scored, took) = scripted.score(&["a", "b"]);
    assert_eq!(values(&scored), [Some(1.0), Some(0.0)]);
    assert!(took < Duration::from_mins(1), "less than its children sleep: {took:?}");
    scripted.is_gone("sleeper");
    // One that has left the group holds the pipes for a minute.
    let (scored, took) = Scripted::of("setsid sleep 60 & sleep 0.2; echo 1; echo 0; exit 0").score(&["a", "b"]);
    assert_eq!(values(&scored), [Some(1.0), Some(0.0)]);
    assert!(took < Duration::from_mins(1), "less than it holds them: {took:?}");
}

#[test]
fn a_flood_of_words_is_bounded() {
    let flood = "head -c 20000000 /dev/zero | tr '\\0' 'x' >&2";
    let (scored, _) = Scripted::of(&format!("{flood}; echo 1; echo 0")).score(&["a", "b"]);
    assert_eq!(values(&scored), [Some(1.0), Some(0.0)]);
    Scripted::of(&format!("{flood}; exit 1")).fails("program_exit", &["xxx…"]);
    Scripted::of("yes 1").fails("program_too_long", &["wrote more than 8388608 bytes"]);
}

#[test]
fn long_answers_and_long_lines_pass_at_the_same_time() {
    let long = "a".repeat(200_000);
    let texts = [long.as_str(); 12];
    let script = "y=$(head -c 100000 /dev/zero | tr '\\0' 'y')\n\
                  while read -r line; do printf '{\"reward\": 1, \"reason\": \"%s\"}\\n' \"$y\"; done";
    assert_eq!(values(&Scripted::of(script).score(&texts).0), [Some(1.0); 12]);
    let unread = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo 1; done";
    assert_eq!(values(&Scripted::of(unread).score(&texts).0), [Some(1.0); 12], "a program need not read");
}

#[test]
fn the_key_is_not_in_a_programs_environment() {
    let script = "cat > /dev/null; if [ -n \"${CARGO_MANIFEST_DIR+x}\" ]; then echo 1; else echo 0; fi";
    let mut scripted = Scripted::of(script);
    assert_eq!(values(&scripted.score(&["a"]).0), [Some(1.0)], "a variable that tests are started with");
    scripted.config.endpoint.api_key_env = "CARGO_MANIFEST_DIR".to_owned();
    assert_eq!(values(&scripted.score(&["a"]).0), [Some(0.0)]);
}

/// The address of a proxy may hold a password as well; a test environment has none, so two other variables stand for them.
#[test]
fn every_secret_variable_is_absent_from_a_programs_environment() {
    let names = ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"];
    let script = format!("echo ${{{}+a}}${{{}+b}}.", names[0], names[1]);
    let command = ["sh".to_owned(), "-c".to_owned(), script];
    let limits = Limits { time: Duration::from_mins(1), stdout_bytes_max: 1000, ends_at_stop: false };
    let said = |secrets: &[&str]| {
        let program = Program::open(&command, secrets.iter().map(ToString::to_string).collect()).unwrap();
        String::from_utf8(program.run("", limits, &mut || ()).unwrap().stdout).unwrap()
    };
    assert_eq!(said(&[]), "ab.\n");
    assert_eq!(said(&names[..1]), "b.\n");
    assert_eq!(said(&names), ".\n");
}

#[test]
fn a_program_that_cannot_be_started_ends_the_run() {
    let mut scripted = Scripted::of("print(1)");
    let file = scripted.room.path().join("score.sh");
    let data = json!({});
    let asked = Candidate {
        prompt: "one",
        answer: 0,
        text: "",
        tokens: 1,
        tokens_max: 8,
        truncated: false,
        reward_data: data.as_object().unwrap(),
        given: None,
        prompt_text: "",
    };
    let mut refused = |program: &str, words: &str| {
        scripted.config.reward.command = Some(vec![program.to_owned()]);
        let scorer = Scorer::open(&scripted.config, &Environment::default()).unwrap();
        let failure = scorer.score(&[asked], &mut || {}).unwrap_err();
        assert_eq!(failure.exit(), Exit::Config);
        assert!(failure.to_string().contains(&format!("cannot start {program}: {words}")), "{failure}");
    };
    refused("no-such-program-of-ours", "No such file");
    refused(&file.display().to_string(), "Permission denied");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    refused(&file.display().to_string(), "Exec format error");
}
