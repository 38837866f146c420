//! The configuration as a user meets it: files in a folder, variables, flags, and what is said when something is wrong.

use std::path::{Path, PathBuf};

use longstraw::config::{
    DEFAULT_TOML, Dtype, Environment, Error, Gate, Gradient, Loaded, Overrides, Problem, RewardFn, RewardName,
    RunConfig, SUPPORTED, ScaleRewards, Source, WithoutFile, document, load_gate_in, load_in,
};
use longstraw::runtime::failure::{Classified, Exit, Failure};
use longstraw::runtime::units::{Pages, Tokens};

const USERS_CONFIG: &str = include_str!("../configs/config.toml");
const USERS_SETTINGS: &str = include_str!("../configs/settings.json");
const SENTINEL: &str = "sk-sentinel-0451";

/// A folder with these files.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("a file in it");
    }
    folder
}

fn set(flags: &[&str]) -> Overrides {
    let set = flags.iter().map(|f| (*f).to_owned()).collect();
    Overrides { set, without_file: WithoutFile::LaptopRun, ..Overrides::default() }
}

/// Loads these files with these variables and flags.
fn load(files: &[(&str, &str)], variables: &[(&str, &str)], flags: &[&str]) -> Result<Loaded, Error> {
    load_in(folder(files).path(), &Environment::of(variables.iter().copied()), &set(flags))
}

fn users(flags: &[&str]) -> Result<Loaded, Error> {
    load(&[("config.toml", USERS_CONFIG), ("settings.json", USERS_SETTINGS)], &[], flags)
}

/// The problems of a refusal, each as it is shown, without the temporary folder.
fn problems(result: Result<Loaded, Error>) -> Vec<String> {
    let error = result.expect_err("it is refused");
    assert_eq!(error.exit(), Exit::Config);
    let shown = |p: &Problem| match &p.source {
        Some(Source::Config(path) | Source::Settings(path)) => {
            let folder = path.parent().expect("a file in a folder").display().to_string();
            p.to_string().replace(&format!("{folder}/"), "")
        }
        _ => p.to_string(),
    };
    match error {
        Error::Refused { problems } => problems.iter().map(shown).collect(),
        other => panic!("another error: {other}"),
    }
}

/// The users' files with one line in place of another.
fn with_line(old: &str, new: &str) -> Vec<String> {
    assert!(USERS_CONFIG.contains(old), "{old}");
    problems(load(&[("config.toml", &USERS_CONFIG.replace(old, new))], &[], &[]))
}

#[test]
fn the_users_files_are_accepted_unchanged() {
    let Loaded { run, rank, sources, .. } = users(&[]).expect("accepted");
    assert_eq!((run.context.prompt_len, run.context.answer_len), (Tokens(2_088_960), Tokens(8192)));
    assert_eq!(run.prompt_pages(), Pages(32_640));
    assert_eq!((run.cp_size(8), run.dp_size(8), run.dp_size(16)), (8, 1, 2));
    assert_eq!(run.pages_per_rank(8), Pages(4080));
    assert_eq!(run.grpo.reward_fn, Some(RewardFn::only(RewardName::Synthetic)));
    assert_eq!(run.grpo.gradient, Gradient::Exact);
    assert_eq!(run.model.dtype, Dtype::Bfloat16);
    assert_eq!(run.endpoint.default_model.as_deref(), Some("claude-sonnet-4-20250514"));
    assert!(run.endpoint.usage.reward_scoring && run.api_base().is_ok());
    assert_eq!((rank.log.as_str(), rank.dir), ("info", PathBuf::from("runs/default")));
    assert_eq!(run.check(Some(8)), []);
    let files = sources.iter().filter(|s| matches!(s, Source::Config(_) | Source::Settings(_))).count();
    assert_eq!((files, sources.len()), (2, 3));
}

#[test]
fn without_files_the_laptop_run_is_loaded() {
    let loaded = load(&[], &[], &[]).expect("accepted");
    assert_eq!(loaded.run, RunConfig::laptop());
    assert_eq!(loaded.run.model_path().expect("it has a model"), Path::new("models/smollm2-135m-instruct"));
    assert_eq!(loaded.rank.dir, PathBuf::from("runs/laptop"));
    assert_eq!(loaded.run.grpo.gradient, Gradient::Exact);
    assert_eq!(loaded.run.tail(Tokens(100)), Tokens(100));
    for world in [1, 2, 3, 8] {
        assert_eq!(loaded.run.check(Some(world)), [], "{world} ranks");
    }
    assert_eq!(loaded.run.pages_per_rank(3), Pages(2));
}

/// An 8B model was planned in float32, and a gate drew its answers, since there was no config.toml.
#[test]
fn without_files_every_verb_but_train_starts_from_the_documented_defaults() {
    let empty = folder(&[]);
    let load = |without_file| {
        let overrides = Overrides { without_file, ..Overrides::default() };
        load_in(empty.path(), &Environment::default(), &overrides)
    };
    let found = problems(load(WithoutFile::Defaults));
    assert_eq!(found.len(), 3, "lengths and group size are asked for: {found:?}");
    let part = load(WithoutFile::DefaultsInPart).expect("its verb reads other keys");
    assert_eq!(part.unset.len(), 4, "{:?}", part.unset);
    assert!(part.run.check(Some(3)).is_empty() && !part.is_laptop_run());
    assert_eq!((part.run.model.dtype, part.run.model.path), (Dtype::Bfloat16, None));
    let laptop = load(WithoutFile::LaptopRun).expect("accepted");
    assert!(laptop.notes()[0].contains("this is the built-in laptop run"), "{:?}", laptop.notes());
    for gate in Gate::all() {
        let without_file = if gate.is_endpoint() { WithoutFile::DefaultsInPart } else { WithoutFile::Defaults };
        let overrides = Overrides { without_file, ..Overrides::default() };
        let run = load_gate_in(empty.path(), &Environment::default(), &overrides, &gate).expect("accepted").run;
        assert_eq!((run.model.dtype, run.rollout.sample), (Dtype::Bfloat16, gate.name() == "gate7_online"));
    }
}

#[test]
fn a_gate_decides_itself_whether_the_policy_answers_whatever_the_users_file_says() {
    let text = format!("{USERS_CONFIG}\n[rollout]\nsample = true\n").replace("\"synthetic\"", "\"contains\"");
    let files = folder(&[("config.toml", &text)]);
    for gate in Gate::all() {
        let run =
            load_gate_in(files.path(), &Environment::default(), &Overrides::default(), &gate).expect("accepted").run;
        assert_eq!(run.rollout.sample, gate.name() == "gate7_online", "{}", gate.name());
        assert!(run.grpo.rewards().iter().all(|part| part.name.is_for_validation()), "{}", gate.name());
    }
}

/// A gate refused the program that answers calls, or a divergence that it does not measure.
#[test]
fn a_gate_leaves_out_the_tools_and_the_stop_of_the_users_file() {
    for text in [include_str!("../configs/calculator.toml"), include_str!("../configs/documents-2x8.toml")] {
        let files = folder(&[("config.toml", text)]);
        for gate in Gate::all() {
            let loaded = load_gate_in(files.path(), &Environment::default(), &Overrides::default(), &gate);
            let run = loaded.unwrap_or_else(|error| panic!("{}: {error}", gate.name())).run;
            assert_eq!((&run.tools.command, run.alarm.kl_stop), (&None, None), "{}", gate.name());
        }
    }
}

#[test]
fn without_a_model_the_error_says_how_to_set_one() {
    let error = users(&[]).expect("accepted").run.model_path().map(Path::to_owned).expect_err("no model");
    assert!(error.to_string().contains("model.path is not set") && error.to_string().contains("--set model.path="));
    assert_eq!(Failure::from(error).exit().code(), 2);
}

#[test]
fn a_wrong_page_count_is_refused_with_the_correct_count() {
    let found = with_line("cp_pages_per_gpu = 4080", "cp_pages_per_gpu = 4000");
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("config.toml: "), "{found:?}");
    assert!(found[0].contains("cp_pages_per_gpu should be 4080: 32640 pages / 8 ranks"), "{found:?}");
}

#[test]
fn every_wrong_value_is_refused_with_the_correct_value() {
    for (flag, right) in [
        ("parallel.tp_size=2", "parallel.tp_size should be 1: "),
        ("parallel.pp_size=4", "parallel.pp_size should be 1: "),
        ("parallel.ep_size=3", "parallel.ep_size should be 2: it divides the 8 ranks"),
        ("parallel.ep_size=0", "parallel.ep_size should be 1: "),
        ("parallel.cp_size=0", "parallel.cp_size should be at least 1"),
        ("optimizer.name=adam", "optimizer.name should be \"adamw\", the only one there is, not \"adam\""),
        ("context.max_seq_len=2097153", "max_seq_len should be 2097152: prompt_len 2088960 + answer_len 8192"),
        ("context.page_size=0", "context.page_size should be 64: "),
        ("context.answer_len=0", "context.answer_len should be at least 1"),
        ("context.prompt_len=-1", "context.prompt_len should be a whole number from 0, not -1"),
        ("context.prompt_len=2088960.0", "context.prompt_len should be a whole number from 0, not 2088960.0"),
        ("grpo.group_size=0", "grpo.group_size should be at least 1"),
        ("grpo.clip_low=1.5", "grpo.clip_low should be above 0 and at most 1: it is 1.5"),
        ("grpo.clip_high=0", "grpo.clip_high should be above 0 and finite: it is 0.0"),
        ("grpo.kl_coef=-0.1", "grpo.kl_coef should be a finite number from 0: it is -0.1"),
        ("grpo.loss=ppo", "grpo.loss should be \"grpo\", \"gspo\" or \"cispo\", not \"ppo\""),
        ("grpo.clip_dual=1.0", "grpo.clip_dual should be a finite number above 1: it is 1.0"),
        ("grpo.kl_estimator=k4", "grpo.kl_estimator should be \"k1\", \"k2\", \"k3\" or \"k3_ratio\", not \"k4\""),
        ("grpo.kl_estimator=k2", "grpo.kl_estimator should be \"k3\": grpo.kl_coef = 0 leaves out the divergence"),
        ("grpo.mask_truncated=true", "grpo.mask_truncated should be false: answers of the data are taken as whole"),
        ("grpo.deviation=unbiased", "grpo.deviation should be \"population\" or \"sample\", not \"unbiased\""),
        ("grpo.std_min=-1", "grpo.std_min should be a finite number from 0: it is -1.0"),
        ("grpo.scale_rewards=all", "grpo.scale_rewards should be \"group\", \"batch\" or \"none\", not \"all\""),
        (
            "grpo.importance=answer",
            "grpo.importance should be \"none\", \"token\", \"sequence\", \"token_mask\" or \"sequence_mask\", not \"answer\"",
        ),
        (
            "grpo.importance_min=0.5",
            "grpo.importance_min should be left out: only grpo.importance = \"token_mask\" and \"sequence_mask\" have",
        ),
        (
            "grpo.importance_max=0.5",
            "grpo.importance_max should be left out: grpo.importance = \"none\" has no weights",
        ),
        ("grpo.normalize_adv=yes", "grpo.normalize_adv should be true or false, not \"yes\""),
        ("grpo.temperature=0", "grpo.temperature should be a finite number above 0: it is 0.0"),
        ("grpo.aggregation=constant", "grpo.constant_divisor should be set"),
        ("grpo.constant_divisor=8", "grpo.constant_divisor should be left out"),
        ("optimizer.schedule_steps=8", "optimizer.schedule_steps should be left out"),
        ("grpo.gradient={ last = 2088961 }", "grpo.gradient should be { last = 2088960 } at most"),
        ("grpo.gradient=full", "grpo.gradient should be \"exact\", \"response\" or { last = N }, not \"full\""),
        ("optimizer.lr=nan", "optimizer.lr should be a finite number from 0: it is NaN"),
        ("optimizer.lr=-1e-5", "optimizer.lr should be a finite number from 0: it is -1e-5"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas should be two numbers from 0 to below 1: it is [0.9, 1.0]"),
        ("optimizer.betas=[0.9]", "optimizer.betas should be a list of two numbers, not a list of 1"),
        ("optimizer.eps=0", "optimizer.eps should be a finite number above 0"),
        ("optimizer.grad_accum=0", "optimizer.grad_accum should be at least 1"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm should be above 0, or inf"),
        ("memory.head_block=0", "memory.head_block should be at least 1"),
        ("memory.cpu_offload_pages=yes", "should be true, false or \"auto\", not \"yes\""),
        (
            "memory.prompt_no_grad=false",
            "parallel.cp_size should be 1: memory.prompt_no_grad = false runs whole sequences",
        ),
        ("memory.activation_ckpt=none", "memory.activation_ckpt should be \"layer\": this build does not"),
        ("model.weights=fp4", "model.weights should be \"checkpoint\" or \"fp8\", not \"fp4\""),
        ("model.path=", "model.path should be a text that is not empty, not an empty text"),
        ("lora.rank=0", "lora.rank should be at least 1"),
        ("lora.targets=q_proj,q_proj", "lora.targets should be without repetition: q_proj is in it twice"),
        ("checkpoint.keep=0", "checkpoint.keep should be at least 1"),
        ("endpoint.max_retries=40", "endpoint.max_retries should be 11 or less"),
        ("endpoint.api_base=example.com", "endpoint.api_base should be an address"),
    ] {
        let found = problems(users(&[flag]));
        assert!(found.iter().any(|p| p.contains(right)), "{flag}: {found:?}");
    }
}

#[test]
fn every_wrong_value_of_rewards_answers_and_data_is_refused_with_the_correct_value() {
    for (flag, right) in [
        ("grpo.reward_fn=jury", "or \"judge\", or a list of { name, weight }, not \"jury\""),
        ("grpo.reward_fn=[]", "grpo.reward_fn should be \"synthetic\", \"data\","),
        ("grpo.reward_fn=[{ name = \"contains\" }]", "or a list of { name, weight }"),
        (
            "grpo.reward_fn=[{ name = \"contains\", weight = 0.0 }]",
            "grpo.reward_fn should be of finite weights that are not 0: the weight of contains is 0.0",
        ),
        (
            "grpo.reward_fn=[{ name = \"one\", weight = 1.0 }, { name = \"contains\", weight = 1.0 }]",
            "one is for validation runs and stands alone",
        ),
        (
            "grpo.reward_fn=[{ name = \"regex\", weight = 1.0 }, { name = \"regex\", weight = 2.0 }]",
            "grpo.reward_fn should be without repetition: regex is in it twice",
        ),
        ("grpo.reward_fn=judge", "data.path should be set to a file of JSON lines: grpo.reward_fn = \"judge\" reads"),
        ("grpo.reward_fn=json_field", "reward.field should be set to a field"),
        ("grpo.reward_fn=length", "reward.length_tokens should be set to a number of tokens"),
        ("grpo.reward_fn=command", "reward.command should be set to a program"),
        ("rollout.top_p=0", "rollout.top_p should be above 0 and at most 1: it is 0.0"),
        ("rollout.max_tokens=0", "rollout.max_tokens should be at least 1"),
        ("rollout.max_tokens=8193", "rollout.max_tokens should be at most 8192"),
        ("rollout.token_sec_max=0", "rollout.token_sec_max should be above 0, or inf"),
        ("reward.judge_scale=[10.0, 0.0]", "reward.judge_scale should be two finite numbers, the lower first"),
        ("reward.missing_share_max=1.5", "reward.missing_share_max should be from 0 to 1: it is 1.5"),
        (
            "reward.judge_temperature=-1",
            "reward.judge_temperature should be a finite number from 0, or \"none\": it is -1.0",
        ),
        ("reward.judge_temperature=hot", "reward.judge_temperature should be a number or \"none\", not \"hot\""),
        ("reward.judge_parallel=0", "reward.judge_parallel should be at least 1"),
        ("data.too_long=cut", "data.too_long should be \"refuse\", \"cut_middle\" or \"cut_left\", not \"cut\""),
        ("grpo.reward_fn=data", "data.path should be set to a file of JSON lines"),
        ("grpo.reward_fn=judge:", "or a list of { name, weight }, not \"judge:\""),
        ("grpo.reward_fn=judge:style", "reward.judges should be given a table style, as [reward.judges.style]"),
        (
            "grpo.reward_fn=[{ name = \"judge:a\", weight = 1.0 }, { name = \"judge:a\", weight = 2.0 }]",
            "grpo.reward_fn should be without repetition: judge:a is in it twice",
        ),
        (
            "reward.judges={ a = { rubrik = \"a.txt\" } }",
            "reward.judges should be a table of judges { NAME = { rubric,",
        ),
        ("reward.judges={ a = { scale = [5, 1] } }", "lower first: the scale of a is [5.0, 1.0]"),
        ("reward.judges={ a = { prompt_chars = 9999999 } }", "those of a go along with every answer"),
        ("reward.judge_prompt_chars=9999999", "reward.judge_prompt_chars should be at most 1048576"),
        ("endpoint.price_in=3.0", "endpoint.price_out should be set too: endpoint.price_in alone"),
        ("endpoint.price_out=-1", "endpoint.price_out should be a finite number from 0: it is -1.0"),
        ("data.sources=[]", "data.sources should be a list of { name, path, weight }, not a list of 0"),
        ("data.sources=[{ path = \"a\" }]", "data.sources should be a list of { name, path, weight }, not a list of 1"),
        (
            "data.sources=[{ name = \"a b\", path = \"a\" }]",
            "data.sources should be of names of letters, digits, _ and -",
        ),
        (
            "data.sources=[{ name = \"a\", path = \"a\" }, { name = \"a\", path = \"b\" }]",
            "data.sources should be without repetition: a is in it twice",
        ),
        (
            "data.sources=[{ name = \"a\", path = \"a\", weight = 0 }]",
            "data.sources should be of weights from 0.000001 to 1000000: the weight of a is 0.0; leave a source out",
        ),
        ("data.sources=[{ name = \"a\", path = \"a\", weight = nan }]", "the weight of a is NaN"),
        ("data.sources=[{ name = \"a\", path = \"a\", weight = inf }]", "the weight of a is inf"),
    ] {
        let found = problems(users(&[flag]));
        assert!(found.iter().any(|p| p.contains(right)), "{flag}: {found:?}");
    }
}

#[test]
fn every_value_this_build_does_not_support_has_a_refusal() {
    let flags = ["none", "false"];
    assert_eq!(SUPPORTED.len(), flags.len());
    for (row, flag) in SUPPORTED.iter().zip(flags) {
        let found = problems(users(&[&format!("{}={flag}", row.key)]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(row.what) && found[0].contains(row.key), "{found:?}");
    }
}

#[test]
fn a_world_that_is_no_multiple_of_cp_size_is_refused_with_one_that_is() {
    let run = users(&[]).expect("accepted").run;
    let found: Vec<String> = run.check(Some(6)).iter().map(ToString::to_string).collect();
    assert_eq!(found, ["parallel.cp_size should be 6: the job has 6 ranks, no multiple of 8; or start 8 ranks"]);
    let found: Vec<String> = run.check(Some(12)).iter().map(ToString::to_string).collect();
    assert_eq!(found, ["parallel.cp_size should be 6: the job has 12 ranks, no multiple of 8; or start 16 ranks"]);
    assert_eq!(run.check(Some(16)), []);
}

#[test]
fn pages_per_rank_are_checked_against_the_world_where_cp_size_is_absent() {
    let text = USERS_CONFIG.replace("cp_size = 8\n", "");
    let run = load(&[("config.toml", &text)], &[], &[]).expect("accepted while the world is unknown").run;
    assert_eq!(run.check(Some(8)), []);
    let found: Vec<String> = run.check(Some(4)).iter().map(ToString::to_string).collect();
    assert!(found.iter().any(|p| p.contains("cp_pages_per_gpu should be 8160: 32640 pages / 4 ranks")), "{found:?}");
}

#[test]
fn all_problems_are_listed_at_once_and_none_twice() {
    let text = USERS_CONFIG
        .replace("tp_size = 1", "tp_size = 2")
        .replace("lr = 1e-5", "lr = \"fast\"\nlearning_rate = 1e-5")
        .replace("cp_pages_per_gpu = 4080", "cp_pages_per_gpu = 1")
        .replace("group_size = 2", "group_size = 0\nlr = 1e-5")
        .replace("[grpo]", "[gprop]\nx = 1\n[grpo]");
    let settings = USERS_SETTINGS.replace("timeout_sec", "timeout");
    let files = [("config.toml", text.as_str()), ("settings.json", settings.as_str())];
    let found = problems(load(&files, &[("LONGSTRAW_RUN__SEEDS", "1")], &["run.steps=many", "seed"]));
    for part in [
        "config.toml: parallel.tp_size should be 1",
        "config.toml: optimizer.lr should be a number, not \"fast\"",
        "config.toml: unknown key optimizer.learning_rate; here it is optimizer.lr",
        "config.toml: context.cp_pages_per_gpu should be 4080",
        "config.toml: grpo.group_size should be at least 1",
        "config.toml: grpo.lr is in the wrong place: it belongs under [optimizer]",
        "config.toml: unknown table gprop; the nearest known name is grpo",
        "settings.json: unknown key timeout; the nearest known one is timeout_sec",
        "environment: unknown key LONGSTRAW_RUN__SEEDS; the nearest known one is LONGSTRAW_RUN__SEED",
        "--set: run.steps should be a whole number from 0, not \"many\"",
        "--set: seed is no table.key=value",
    ] {
        assert_eq!(found.iter().filter(|p| p.starts_with(part)).count(), 1, "{part}: {found:#?}");
    }
    let different: std::collections::BTreeSet<&String> = found.iter().collect();
    assert_eq!((different.len(), found.len()), (found.len(), 11), "{found:#?}");
}

#[test]
fn an_unknown_key_is_an_error_in_every_table_and_names_the_nearest() {
    for (table, wrong, nearest) in [
        ("parallel", "cp_sise", "parallel.cp_size"),
        ("context", "page_sizes", "context.page_size"),
        ("memory", "cpu_offload", "memory.cpu_offload_pages"),
        ("optimizer", "weigth_decay", "optimizer.weight_decay"),
        ("grpo", "groupsize", "grpo.group_size"),
        ("lora", "ranks", "lora.rank"),
        ("model", "dtypes", "model.dtype"),
        ("data", "heldout", "data.held_out"),
        ("run", "step", "run.steps"),
        ("rollout", "temperatur", "grpo.temperature"),
        ("reward", "reward_fun", "grpo.reward_fn"),
        ("checkpoint", "kept", "checkpoint.keep"),
        ("endpoint", "time_out_sec", "endpoint.timeout_sec"),
        ("endpoint.endpoints", "chats", "endpoint.endpoints.chat"),
        ("endpoint.usage", "reward_score", "endpoint.usage.reward_scoring"),
    ] {
        let text = format!("[{table}]\n{wrong} = 1\n");
        let given = ["context.max_seq_len=20", "context.prompt_len=10", "context.answer_len=10", "grpo.group_size=2"];
        let found = problems(load(&[("config.toml", &text)], &[], &given));
        let words = format!("config.toml: unknown key {table}.{wrong}; the nearest known one is {nearest}");
        assert_eq!(found, [words]);
    }
}

#[test]
fn a_misplaced_key_is_refused_with_its_table_as_its_source_spells_it() {
    let laptop = |flag: &str| problems(load(&[], &[], &[flag]));
    assert_eq!(
        laptop("group_size=2"),
        ["--set: group_size is in the wrong place: it is spelt --set grpo.group_size=VALUE"]
    );
    let found = problems(load(&[], &[("LONGSTRAW_LR", "1")], &[]));
    assert_eq!(found, ["environment: LONGSTRAW_LR is in the wrong place: it is spelt LONGSTRAW_OPTIMIZER__LR"]);
    let found = with_line("[optimizer]", "timeout_sec = 3\n[optimizer]");
    assert_eq!(
        found,
        ["config.toml: memory.timeout_sec is in the wrong place: \
          it belongs into settings.json or under [endpoint]"]
    );
    for (key, home) in [
        ("\"lr\": 1", "lr is in the wrong place: it belongs under [optimizer] of config.toml"),
        ("\"chat\": \"/x\"", "chat is in the wrong place: it belongs under \"endpoints\""),
        ("\"endpoint\": {}", "endpoint is in the wrong place: it is left out here: its keys need no table"),
        ("\"grpo\": {}", "grpo is in the wrong place: it belongs into config.toml, as [grpo]"),
        ("\"usage\": { \"max_retries\": 1 }", "usage.max_retries is in the wrong place: it belongs to the top level"),
    ] {
        let found = problems(load(&[("settings.json", &format!("{{ {key} }}"))], &[], &[]));
        assert_eq!(found, [format!("settings.json: {home}")]);
    }
    let found = with_line("[parallel]", "lr = 1e-5\n[parallel]");
    assert_eq!(found, ["config.toml: lr is in the wrong place: it belongs under [optimizer]"]);
    let found = with_line("[parallel]", "[grpo.lora]\nrank = 8\n[parallel]");
    assert_eq!(found, ["config.toml: grpo.lora is in the wrong place: it is a table at the top level, [lora]"]);
}

#[test]
fn lengths_and_group_size_have_no_defaults() {
    let found = problems(load(&[("config.toml", "[run]\nseed = 1\n")], &[], &[]));
    assert_eq!(found.len(), 3, "{found:?}");
    for key in ["context.prompt_len", "context.answer_len", "grpo.group_size"] {
        assert!(found.iter().any(|p| p.starts_with(&format!("{key} is missing and has no default"))), "{found:?}");
    }
    assert!(found[0].contains("LONGSTRAW_CONTEXT__PROMPT_LEN") && found[0].contains("--set context.prompt_len="));
    let text = USERS_CONFIG.replace("prompt_len =", "prompt_length =");
    let found = problems(load(&[("config.toml", &text)], &[], &[]));
    assert_eq!(found, ["config.toml: unknown key context.prompt_length; the nearest known one is context.prompt_len"]);
}

#[test]
fn the_longest_sequence_follows_from_prompt_and_answer_where_it_is_absent() {
    let text = "[context]\nprompt_len = 4032\nanswer_len = 64\n[grpo]\ngroup_size = 2\n";
    let loaded = load(&[("config.toml", text)], &[], &["context.answer_len=128"]).expect("it is whole");
    assert_eq!(loaded.run.context.max_seq_len.0, 4160);
    let wrong = problems(load(&[("config.toml", text)], &[], &["context.max_seq_len=9"]));
    assert!(wrong[0].contains("context.max_seq_len should be 4096"), "{wrong:?}");
    let half = problems(load(&[("config.toml", "[context]\nprompt_len = 4032\n[grpo]\ngroup_size = 2\n")], &[], &[]));
    assert!(half.len() == 1 && half[0].starts_with("context.answer_len is missing"), "{half:?}");
}

#[test]
fn later_sources_override_earlier_ones() {
    let files = [("config.toml", USERS_CONFIG), ("settings.json", USERS_SETTINGS)];
    let variables = [
        ("LONGSTRAW_GRPO__GROUP_SIZE", "4"),
        ("LONGSTRAW_OPTIMIZER__LR", "2e-5"),
        ("LONGSTRAW_ENDPOINT__ENDPOINTS__CHAT", "/v2/messages"),
        ("LONGSTRAW_LORA__TARGETS", "q_proj, v_proj"),
        ("LONGSTRAW_MODEL__PATH", "123"),
        ("LONGSTRAW_LOG", "longstraw=debug"),
        ("LONGSTRAW_FORCE", "1"),
        ("OTHER", "x"),
    ];
    let flags = ["grpo.group_size=8", "grpo.gradient={ last = 0 }", "memory.cpu_offload_pages=auto"];
    let Loaded { run, rank, sources, .. } = load(&files, &variables, &flags).expect("accepted");
    assert_eq!(run.grpo.group_size, 8);
    assert!((run.optimizer.lr - 2e-5).abs() < 1e-12);
    assert_eq!(run.endpoint.chat_path(), "/v2/messages");
    assert_eq!(run.endpoint.endpoints.models, "/v1/models");
    assert_eq!(run.lora.targets, Some(vec!["q_proj".to_owned(), "v_proj".to_owned()]));
    assert_eq!(run.model.path, Some(PathBuf::from("123")));
    assert_eq!(run.grpo.gradient, Gradient::Last(Tokens(0)));
    assert_eq!(rank.log, "longstraw=debug");
    assert_eq!(sources.len(), 3 + 5 + 3);
    let run = load(&files, &variables, &[]).expect("accepted").run;
    assert_eq!(run.grpo.group_size, 4);
}

/// The users' files with a gate's values in between.
fn gate(name: &str, variables: &[(&str, &str)], flags: &[&str]) -> Result<Loaded, Error> {
    let gate = Gate::named(name).expect("there is one");
    let files = folder(&[("config.toml", USERS_CONFIG), ("settings.json", USERS_SETTINGS)]);
    load_gate_in(files.path(), &Environment::of(variables.iter().copied()), &set(flags), &gate)
}

#[test]
fn each_gate_has_its_length_and_pages_at_every_scale() {
    let rows = [
        ("gate2_32k", 32_768, 384, 2),
        ("gate3_128k", 131_072, 1_920, 2),
        ("gate3_256k", 262_144, 3_968, 2),
        ("gate3_512k", 524_288, 8_064, 2),
        ("gate3_1m", 1_048_576, 16_256, 2),
        ("gate3_2m", 2_097_152, 32_640, 2),
        ("gate4_g1", 2_097_152, 32_640, 1),
        ("gate5_g2", 2_097_152, 32_640, 2),
        ("gate6_g8", 2_097_152, 32_640, 8),
        ("gate7_online", 32_768, 384, 2),
    ];
    for (name, length, pages, group) in rows {
        for scale in [1, 8, 64] {
            let Loaded { run, rank, .. } = gate(name, &[], &[&format!("gate.scale={scale}")]).expect("accepted");
            let context = &run.context;
            assert_eq!((context.max_seq_len, context.answer_len), (Tokens(length / scale), Tokens(8192 / scale)));
            assert_eq!(context.prompt_len, Tokens((length - 8192) / scale));
            assert_eq!((run.prompt_pages(), run.pages_per_rank(8)), (Pages(pages), Pages(pages / 8)), "{name}");
            assert_eq!((run.grpo.group_size, run.optimizer.grad_accum), (group, 1));
            assert_eq!(rank.dir, Path::new("runs/gates").join(name));
            // Each rank owns at least two pages in both its chunks.
            assert!(pages / 16 >= 2);
        }
    }
}

#[test]
fn a_gate_overrides_files_and_is_overridden_by_variables_and_flags() {
    let loaded = gate("gate5_g2", &[], &[]).expect("accepted");
    assert_eq!((loaded.run.grpo.gradient, loaded.run.run.steps), (Gradient::Response, 1));
    assert_eq!(loaded.run.context.cp_pages_per_gpu, None, "a file's count is of another length");
    let sources: Vec<String> = loaded.sources.iter().map(ToString::to_string).collect();
    assert!(sources.ends_with(&["built-in gates".into(), "built-in gate5_g2".into(), "built-in gate5_g2".into()]));
    let variables = [("LONGSTRAW_GRPO__GROUP_SIZE", "3"), ("LONGSTRAW_GRPO__GRADIENT", "exact")];
    let flags = ["grpo.group_size=4", "context.cp_pages_per_gpu=4080", "run.dir=elsewhere", "data.path=mine.jsonl"];
    let Loaded { run, rank, .. } = gate("gate5_g2", &variables, &flags).expect("accepted");
    assert_eq!((run.grpo.group_size, run.grpo.gradient), (4, Gradient::Exact));
    assert_eq!((rank.dir, run.data.path), (PathBuf::from("elsewhere"), Some(PathBuf::from("mine.jsonl"))));
    assert!(gate("gate4_g1", &[], &[]).expect("accepted").run.grpo.has_only(RewardName::One));
    let found = problems(gate("gate5_g2", &[], &["context.cp_pages_per_gpu=48"]));
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("context.cp_pages_per_gpu should be 4080"), "{found:?}");
}

/// The users' file has `normalize_adv = true`; a later source may say more than the old key could.
#[test]
fn the_earlier_key_of_the_scaling_is_read_and_later_sources_override_it() {
    let scaling = |flags: &[&str]| users(flags).expect("accepted").run.grpo.scale_rewards;
    assert_eq!(scaling(&[]), ScaleRewards::Group);
    assert_eq!(scaling(&["grpo.normalize_adv=false"]), ScaleRewards::None);
    assert_eq!(scaling(&["grpo.scale_rewards=batch"]), ScaleRewards::Batch);
    let none = load(&[("config.toml", USERS_CONFIG)], &[("LONGSTRAW_GRPO__NORMALIZE_ADV", "false")], &[]);
    assert_eq!(none.expect("accepted").run.grpo.scale_rewards, ScaleRewards::None);
    let found = with_line("normalize_adv = true", "normalize_adv = true\nscale_rewards = \"none\"");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("grpo.normalize_adv should be left out: grpo.scale_rewards says"), "{found:?}");
    let text = USERS_CONFIG.replace("normalize_adv = true", "scale_rewards = \"batch\"\nimportance = \"token\"");
    let gate = Gate::named("gate2_32k").expect("a gate");
    let files = folder(&[("config.toml", &format!("{text}importance_max = 2.0\n"))]);
    let run = load_gate_in(files.path(), &Environment::default(), &Overrides::default(), &gate).expect("accepted").run;
    assert_eq!((run.grpo.scale_rewards, run.grpo.importance_max), (ScaleRewards::Group, None));
}

#[test]
fn a_scale_that_does_not_divide_every_length_is_refused_with_one_that_does() {
    let found = problems(gate("gate2_32k", &[], &["gate.scale=100"]));
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("--set: gate.scale should be 64: it divides max_seq_len 32768"), "{found:?}");
    assert!(problems(gate("gate2_32k", &[], &["gate.scale=0"]))[0].contains("gate.scale should be at least 1"));
    // A run that is no gate is not scaled.
    assert_eq!(users(&["gate.scale=64"]).expect("accepted").run.context.page_size, Tokens(64));
}

#[test]
fn a_value_that_is_a_table_is_replaced_whole() {
    let text =
        format!("{USERS_CONFIG}\n[model]\nrope_scaling = {{ rope_type = \"yarn\", factor = 4.0, beta_fast = 32 }}\n");
    let flag = "model.rope_scaling={ type = \"linear\", factor = 2.0 }";
    let run = load(&[("config.toml", &text)], &[], &[flag]).expect("accepted").run;
    let keys: Vec<String> = run.model.rope_scaling.expect("it is set").into_keys().collect();
    assert_eq!(keys, ["factor", "type"]);
}

#[test]
fn named_files_and_run_dir_override_the_usual_ones() {
    let folder = folder(&[("config.toml", "nonsense"), ("mine.toml", USERS_CONFIG), ("mine.json", USERS_SETTINGS)]);
    let overrides = Overrides {
        config: Some(folder.path().join("mine.toml")),
        settings: Some(folder.path().join("mine.json")),
        set: vec!["run.dir=elsewhere".to_owned()],
        run_dir: Some(PathBuf::from("here")),
        ..Overrides::default()
    };
    let loaded = load_in(folder.path(), &Environment::default(), &overrides).expect("accepted");
    assert_eq!((loaded.run.parallel.cp_size, loaded.rank.dir), (Some(8), PathBuf::from("here")));
    let overrides = Overrides { config: Some(folder.path().join("absent.toml")), ..Overrides::default() };
    let found = problems(load_in(folder.path(), &Environment::default(), &overrides));
    assert!(found.len() == 1 && found[0].starts_with("absent.toml: cannot be read: "), "{found:?}");
}

#[test]
fn a_broken_file_is_named_with_line_and_column_and_hides_no_other_fault() {
    let broken = format!("[grpo]\ngroup_size = 2\napi_key = \"{SENTINEL}\n");
    let found =
        problems(load(&[("config.toml", &broken), ("settings.json", "{ \"timeout_sec\": 1, }")], &[], &["run.sed=1"]));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("config.toml: line 3, column "), "{found:?}");
    assert!(found[1].starts_with("settings.json: line 1, column "), "{found:?}");
    assert_eq!(found[2], "--set: unknown key run.sed; the nearest known one is run.seed");
    assert!(!found.iter().any(|p| p.contains(SENTINEL)), "{found:?}");
    let found = problems(load(&[("config.toml", "[run]\nseed = 1\nseed = 2\n")], &[], &[]));
    assert!(found.len() == 1 && found[0].contains("line 3"), "{found:?}");
}

#[test]
fn no_output_shows_the_key() {
    let key = [("TAOTOKEN_API_KEY", SENTINEL)];
    let files = [("config.toml", USERS_CONFIG), ("settings.json", USERS_SETTINGS)];
    let environment = Environment::of(key);
    let loaded = load(&files, &key, &[]).expect("accepted");
    let secret = environment.api_key(&loaded.run.endpoint).expect("it is set");
    assert_eq!(secret.expose(), SENTINEL);
    let mut shown = vec![
        format!("{loaded:?} {secret:?} {secret} {environment:?}"),
        loaded.run.to_toml(),
        serde_json::to_string(&loaded.run).expect("JSON"),
    ];
    // A key where none belongs, in each way a hand may slip.
    let slips = ["api_key", "api_key_env", "timeout_sec", "api_base", "usage"];
    for slip in slips {
        let settings = format!("{{ \"{slip}\": \"{SENTINEL}\" }}");
        let error = load(&[("settings.json", &settings)], &key, &[]).expect_err("refused");
        shown.push(format!("{error} {error:?}"));
        let flag = format!("endpoint.{slip}={SENTINEL}");
        let error = load(&[], &key, &[&flag]).expect_err("refused");
        shown.push(format!("{error} {error:?}"));
        let variable = format!("LONGSTRAW_ENDPOINT__{}", slip.to_uppercase());
        let error = load(&[], &[(&variable, SENTINEL)], &[]).expect_err("refused");
        shown.push(format!("{error} {error:?}"));
    }
    let bad = Environment::of([("TAOTOKEN_API_KEY", format!("{SENTINEL}\u{e9}"))]);
    shown.push(bad.api_key(&loaded.run.endpoint).expect_err("no header takes it").to_string());
    for text in shown {
        assert!(!text.contains(SENTINEL), "{text}");
    }
    let error = Environment::default().api_key(&loaded.run.endpoint).expect_err("not set");
    assert!(error.to_string().contains("TAOTOKEN_API_KEY"), "{error}");
}

#[test]
fn the_variable_of_the_key_may_begin_like_ours() {
    let variables = [("LONGSTRAW_JUDGE_KEY", SENTINEL)];
    let settings = [("settings.json", "{ \"api_key_env\": \"LONGSTRAW_JUDGE_KEY\" }")];
    let run = load(&settings, &variables, &[]).expect("accepted").run;
    assert_eq!(Environment::of(variables).api_key(&run.endpoint).expect("it is set").expose(), SENTINEL);
}

#[test]
fn the_digest_changes_with_every_shared_value_and_with_no_other() {
    let given = [
        "parallel.cp_size=8",
        "context.cp_pages_per_gpu=1",
        "grpo.aggregation=constant",
        "grpo.constant_divisor=8",
        "grpo.clip_dual=3.0",
        "lora.targets=q_proj",
        "lora.init_from=adapter",
        "endpoint.api_base=http://localhost",
        "endpoint.default_model=judge",
        "model.rope_scaling={ rope_type = \"yarn\", factor = 4.0 }",
        "optimizer.max_grad_norm=inf",
        "memory.cpu_offload_inputs=true",
        "memory.keep_attention=false",
        "run.direct=false",
        "rollout.pages_on_device=true",
    ];
    let loaded = load(&[], &[], &given).expect("accepted");
    let before = serde_json::to_value(&loaded.run).expect("JSON");
    let mut finite = before.clone();
    finite["optimizer"]["max_grad_norm"] = 1.0.into();
    let digest_of =
        |json: &serde_json::Value| serde_json::from_value::<RunConfig>(json.clone()).expect("the same shape").digest();
    let plain = digest_of(&finite);
    assert_eq!(plain.len(), 64);
    let mut leaves = Vec::new();
    pointers(&finite, String::new(), &mut leaves);
    assert!(leaves.len() > 60, "{}", leaves.len());
    for pointer in leaves {
        let mut changed = finite.clone();
        let leaf = changed.pointer_mut(&pointer).expect("it was found there");
        *leaf = match pointer.as_str() {
            "/optimizer/name" => continue, // There is one optimizer.
            "/grpo/aggregation" => "token_mean".into(),
            "/grpo/scale_rewards" => "batch".into(),
            "/grpo/importance" => "token".into(),
            "/grpo/loss" => "gspo".into(),
            "/grpo/kl_estimator" => "k2".into(),
            "/grpo/deviation" => "sample".into(),
            "/run/device" => "cpu".into(),
            "/endpoint/style" => "chat_completions".into(),
            _ => other_value(leaf),
        };
        assert_ne!(digest_of(&changed), plain, "{pointer}");
    }
    let digest = loaded.run.digest();
    let mut other: Vec<&str> = given.to_vec();
    other.extend(["run.dir=elsewhere", "run.share_device=true", "run.log_level=debug"]);
    let elsewhere = load(&[], &[("LONGSTRAW_LOG", "trace")], &other).expect("accepted");
    assert_ne!(elsewhere.rank, loaded.rank);
    assert_eq!(elsewhere.run.digest(), digest);
}

/// The JSON pointers of all leaves.
fn pointers(json: &serde_json::Value, at: String, leaves: &mut Vec<String>) {
    match json {
        serde_json::Value::Object(map) => map.iter().for_each(|(k, v)| pointers(v, format!("{at}/{k}"), leaves)),
        serde_json::Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| pointers(v, format!("{at}/{i}"), leaves));
        }
        _ => leaves.push(at),
    }
}

/// Another value of the same kind.
fn other_value(value: &serde_json::Value) -> serde_json::Value {
    let words = [
        ("layer", "none"),
        ("constant", "linear"),
        ("contains", "regex"),
        ("length", "json_field"),
        ("response", "exact"),
        ("exact", "response"),
        ("float32", "float64"),
        ("checkpoint", "fp8"),
        ("refuse", "cut_left"),
    ];
    match value {
        serde_json::Value::Bool(on) => (!on).into(),
        serde_json::Value::Number(n) if n.is_u64() => (n.as_u64().expect("whole") + 1).into(),
        serde_json::Value::Number(n) => (n.as_f64().expect("a number") + 0.5).into(),
        serde_json::Value::String(text) => words
            .iter()
            .find(|(old, _)| old == text)
            .map_or_else(|| format!("{text}x"), |(_, new)| (*new).to_owned())
            .into(),
        other => other.clone(),
    }
}

#[test]
fn answers_are_sampled_from_pages_only_and_the_judge_needs_its_switch() {
    let found = problems(load(&[], &[], &["memory.prompt_no_grad=false"]));
    assert!(found.iter().any(|p| p.contains("rollout.sample should be false")), "{found:?}");
    let found = problems(load(&[], &[], &["grpo.reward_fn=data"]));
    assert!(found.iter().any(|p| p.contains("grpo.reward_fn should be another one")), "{found:?}");
    let found = problems(load(&[], &[], &["grpo.reward_fn=judge"]));
    assert!(found.iter().any(|p| p.contains("endpoint.usage.reward_scoring should be true")), "{found:?}");
    let found = problems(load(&[], &[], &["grpo.reward_fn=judge", "endpoint.usage.reward_scoring=true"]));
    for key in ["endpoint.api_base", "endpoint.default_model"] {
        assert!(found.iter().any(|p| p.contains(&format!("{key} should be set"))), "{found:?}");
    }
}

#[test]
fn the_resolved_file_loads_to_the_same_run() {
    let flags = [
        "grpo.reward_fn=[{ name = \"contains\", weight = 1.0 }, { name = \"exact_match\", weight = 0.5 }]",
        "rollout.sample=true",
        "data.path=x.jsonl",
        "grpo.gradient={ last = 3 }",
        "model.rope_scaling={ rope_type = \"yarn\", factor = 4.0 }",
        "optimizer.max_grad_norm=inf",
    ];
    for files in [vec![("config.toml", USERS_CONFIG), ("settings.json", USERS_SETTINGS)], vec![]] {
        let run = load(&files, &[], &flags).expect("accepted").run;
        let resolved = run.to_toml();
        let again = load(&[("config.toml", &resolved)], &[], &[]).expect("accepted").run;
        assert_eq!(again, run, "{resolved}");
        assert_eq!(again.digest(), run.digest());
    }
}

#[test]
fn a_group_of_one_is_a_note_and_no_refusal() {
    let loaded = users(&["grpo.group_size=1"]).expect("accepted");
    assert!(loaded.notes()[0].contains("grpo.group_size = 1"), "{:?}", loaded.notes());
    assert_eq!(users(&[]).expect("accepted").notes(), Vec::<String>::new());
}

#[test]
fn the_default_file_gives_every_key_but_the_required_ones() {
    let found = problems(load(&[("config.toml", DEFAULT_TOML)], &[], &[]));
    assert_eq!(found.len(), 3, "{found:?}");
    let uncommented: String = DEFAULT_TOML
        .lines()
        .filter(|l| {
            let others = [
                "constant_divisor",
                "schedule_steps",
                "importance_m",
                "#reuse_drift_max =",
                "#samples =",
                "#keep_best =",
                "#kl_stop =",
                "#sources =",
                "scripts/calculator",
            ];
            !others.iter().any(|key| l.contains(key))
        })
        .map(|l| l.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(l).to_owned() + "\n")
        .collect();
    load(&[("config.toml", &uncommented)], &[], &[]).expect("the examples go together");
}

#[test]
fn a_wrong_key_hides_no_fault_of_the_nearest_key() {
    let found = with_line("lr = 1e-5", "lr = -1.0\nlrr = 1e-5");
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().any(|p| p.contains("unknown key optimizer.lrr")), "{found:?}");
    assert!(found.iter().any(|p| p.contains("optimizer.lr should be a finite number from 0: it is -1.0")), "{found:?}");
    // The file's value is of the wrong kind and the flag's is out of range: both are said.
    let text = USERS_CONFIG.replace("lr = 1e-5", "lr = \"fast\"");
    let found = problems(load(&[("config.toml", &text)], &[], &["optimizer.lr=-2"]));
    assert_eq!(
        found,
        [
            "config.toml: optimizer.lr should be a number, not \"fast\"",
            "--set: optimizer.lr should be a finite number from 0: it is -2.0"
        ]
    );
    // A misspelt table is one fault, not one for each key that it should have given.
    let text = USERS_CONFIG.replace("[context]", "[contxt]");
    let found = problems(load(&[("config.toml", &text)], &[], &[]));
    assert_eq!(found, ["config.toml: unknown table contxt; the nearest known name is context"]);
}

/// Names that people bring along from TRL and verl.
#[test]
fn a_name_of_another_trainer_is_answered_with_the_key_that_it_is_here() {
    let given = ["context.max_seq_len=20", "context.prompt_len=10", "context.answer_len=10", "grpo.group_size=2"];
    for (key, here) in [
        ("grpo.beta = 0.04", "unknown key grpo.beta; here it is grpo.kl_coef"),
        ("grpo.num_generations = 8", "unknown key grpo.num_generations; here it is grpo.group_size"),
        ("grpo.epsilon = 0.2", "grpo.epsilon; here it is grpo.clip_low and grpo.clip_high (optimizer.eps is AdamW's)"),
        (
            "grpo.loss_type = \"dapo\"",
            "here it is grpo.loss and grpo.aggregation (docs/other-trainers.md has each value)",
        ),
        ("run.save_steps = 20", "unknown key run.save_steps; here it is checkpoint.every (in updates)"),
        ("context.max_prompt_length = 9", "context.max_prompt_length; here it is context.prompt_len (in positions)"),
        ("model.bf16 = true", "unknown key model.bf16; here it is model.dtype (\"bfloat16\")"),
        ("grpo.lr = 1e-6", "grpo.lr is in the wrong place: it belongs under [optimizer]"),
    ] {
        let found = problems(load(&[("config.toml", key)], &[], &given));
        assert!(found.len() == 1 && found[0].contains(here), "{key}: {found:?}");
    }
    let said = problems(load(&[], &[("LONGSTRAW_GRPO__BETA", "0.1")], &["num-generations=4"]));
    assert_eq!(
        said,
        [
            "environment: unknown key LONGSTRAW_GRPO__BETA; here it is LONGSTRAW_GRPO__KL_COEF",
            "--set: unknown key num-generations; here it is grpo.group_size"
        ]
    );
}

#[test]
fn short_names_of_number_formats_are_taken_and_fp16_is_refused_with_the_reason() {
    let dtype = |flag: &str| load(&[], &[], &[flag]).expect("accepted").run.model.dtype;
    assert_eq!((dtype("model.dtype=bf16"), dtype("model.dtype=fp32")), (Dtype::Bfloat16, Dtype::Float32));
    assert_eq!(
        users(&["model.dtype=bf16"]).expect("accepted").run.digest(),
        users(&["model.dtype=bfloat16"]).expect("accepted").run.digest()
    );
    for flag in ["model.dtype=fp16", "model.dtype=float16"] {
        let found = problems(users(&[flag]));
        let words = "--set: model.dtype should be \"bfloat16\" or \"float32\": fp16 ends at 65504";
        assert!(found.len() == 1 && found[0].starts_with(words), "{found:?}");
    }
    let found = problems(users(&["model.dtype=int8"]));
    assert_eq!(found, ["--set: model.dtype should be \"bfloat16\", \"float32\" or \"float64\", not \"int8\""]);
}

#[test]
fn corrections_that_contradict_each_other_are_refused_and_odd_ones_are_noted() {
    let refused = |flags: &[&str], words: &str| {
        let found = problems(users(flags));
        assert!(found.iter().any(|problem| problem.contains(words)), "{flags:?}: {found:?}");
    };
    refused(
        &["grpo.loss=cispo", "grpo.clip_dual=3"],
        "grpo.clip_dual should be left out: grpo.loss = \"cispo\" bounds",
    );
    refused(
        &["grpo.scale_rewards=none", "grpo.deviation=sample"],
        "grpo.deviation should be \"population\": grpo.scale",
    );
    let notes = |flags: &[&str]| users(flags).expect("accepted").notes();
    assert!(notes(&["grpo.loss=gspo"])[0].starts_with("grpo.loss = \"gspo\" with a clip of 0.2"));
    assert_eq!(notes(&["grpo.loss=gspo", "grpo.clip_low=3e-4", "grpo.clip_high=4e-4"]), Vec::<String>::new());
    assert!(
        notes(&["grpo.kl_coef=0.1", "grpo.kl_estimator=k1"])[0].starts_with("grpo.kl_estimator = \"k1\": the mean")
    );
    assert_eq!(notes(&["grpo.kl_coef=0.1", "grpo.kl_estimator=k3_ratio", "grpo.clip_dual=3"]), Vec::<String>::new());
}

#[test]
fn duplicate_keys_in_settings_are_refused() {
    let found = problems(load(&[("settings.json", "{ \"timeout_sec\": 1, \"timeout_sec\": 2 }")], &[], &[]));
    assert!(found.len() == 1 && found[0].contains("duplicate key timeout_sec"), "{found:?}");
}

#[test]
fn settings_that_are_no_object_are_refused_and_not_shown() {
    for text in [format!("\"{SENTINEL}\""), format!("[\"{SENTINEL}\"]"), String::new()] {
        let found = problems(load(&[("settings.json", &text)], &[], &[]));
        assert!(found.len() == 1 && found[0].starts_with("settings.json: line "), "{found:?}");
        assert!(!found[0].contains(SENTINEL), "{found:?}");
    }
}

#[test]
fn a_number_beyond_its_limit_is_refused_with_the_limit() {
    for (key, limit) in [
        ("context.prompt_len", 1_u64 << 40),
        ("context.answer_len", 1 << 40),
        ("context.page_size", 1 << 40),
        ("parallel.cp_size", (1 << 31) - 1),
        ("lora.rank", 1 << 20),
        ("optimizer.grad_accum", 1 << 20),
        ("endpoint.timeout_sec", 86_400),
        ("endpoint.max_retries", 1000),
    ] {
        let said = problems(users(&[&format!("{key}={}", i64::MAX)]));
        // A key of settings.json is spelt as in the flag that has the last word.
        let words = format!("--set: {key} should be at most {limit}: ");
        assert!(said.iter().any(|problem| problem.starts_with(&words)), "{key}: {said:?}");
    }
    // The search for a divisor tried every number below, which took years.
    let ranks = (1_u64 << 61) - 1;
    let said = problems(users(&[&format!("parallel.cp_size={ranks}"), &format!("parallel.ep_size={}", ranks / 2)]));
    assert!(said.iter().any(|problem| problem.contains("parallel.ep_size should be 1: it divides")), "{said:?}");
    let said =
        gate("gate2_32k", &[], &[&format!("gate.scale={}", i64::MAX), &format!("context.page_size={}", 1_u64 << 40)]);
    assert!(problems(said).iter().any(|problem| problem.contains("gate.scale should be 8192: it divides")));
}

#[test]
fn a_name_is_repeated_in_bounded_length_and_without_control_characters() {
    // Nested as deep as it is dotted, it overflowed the stack.
    let said = problems(users(&[&format!("{}lr=1", "a.".repeat(60_000))]));
    assert!(said[0].starts_with("--set: unknown key a.a.a.") && said[0].len() < 400, "{}", said[0].len());
    let odd = "\"a\\u001b[2J\\nb\" = 1\n";
    let said = problems(load(&[("config.toml", &format!("{odd}{USERS_CONFIG}"))], &[], &[]));
    assert!(said[0].contains("unknown key a\\u{1b}[2J\\nb; the nearest"), "{}", said[0]);
    let said = problems(users(&["=5"]));
    assert_eq!(said, ["--set: \"\" is no table.key=value"]);
}

/// `nan` in a table that is handed on became a `null` there, and the resolved file could not be written.
#[test]
fn a_rope_scaling_that_is_not_finite_is_refused() {
    let said = problems(users(&["model.rope_scaling={ rope_type = \"yarn\", factor = [1.0, inf] }"]));
    assert_eq!(said, ["--set: model.rope_scaling should be of finite numbers: nan and inf stretch nothing"]);
}

fn document_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md")
}

#[test]
fn the_document_is_what_the_default_file_and_the_list_of_keys_say() {
    let there = std::fs::read_to_string(document_path()).expect("docs/configuration.md");
    assert!(there == document(), "make it anew: cargo test --release --test config -- --ignored");
}

#[test]
#[ignore = "writes docs/configuration.md"]
fn write_the_document() {
    std::fs::write(document_path(), document()).expect("docs/configuration.md");
}

#[test]
fn a_settings_file_that_does_not_fit_is_refused_with_the_cure() {
    let flags = ["endpoint.style=chat_completions"];
    let error =
        load(&[("config.toml", USERS_CONFIG), ("settings.json", USERS_SETTINGS)], &[], &flags).expect_err("refused");
    let words = error.to_string();
    assert!(
        words.contains("endpoint.style") && words.contains("a settings file of {} leaves the service to config.toml")
    );
    let error =
        load(&[("config.toml", USERS_CONFIG), ("settings.json", "{}")], &[], &["run.sed=1"]).expect_err("refused");
    assert!(!error.to_string().contains("settings file"), "{error}");
}
