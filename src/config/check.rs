//! The rules of a configuration that need no model. Every rule says what the value should be, and no rule hides another.

use std::collections::BTreeSet;

use super::address::{self, NoScheme};
use super::choices::{EndpointStyle, Gradient, Schedule};
use super::problem::{Fault, Problem};
use super::rewards::RewardName;
use super::supported::SUPPORTED;
use super::{Loaded, RunConfig};

/// The longest wait between two attempts, in seconds.
const RETRY_WAIT_SEC_MAX: f64 = 3600.0;
/// The most attempts after the first.
const RETRIES_MAX: u64 = 1000;
/// The longest request, in seconds: a day.
const TIMEOUT_SEC_MAX: u64 = 86_400;
/// The longest prompt, answer and page. Sums and products of them with a few small numbers stay within 64 bits.
const POSITIONS_MAX: u64 = 1 << 40;
/// The most ranks: MPI counts them in 31 bits.
const RANKS_MAX: u64 = (1 << 31) - 1;
/// The widest adapter; no layer is as wide.
const LORA_RANK_MAX: u64 = 1 << 20;
/// The most groups of an update on one replica: a list of them is made before it begins.
const GROUPS_MAX: u64 = 1 << 20;
/// Divisors up to here are tried, and what each leaves.
const DIVISORS_TRIED: u64 = 1 << 16;

impl RunConfig {
    /// Every problem of this configuration. `world` is the number of ranks; without it the rules that need it are left out.
    #[must_use]
    pub fn check(&self, world: Option<u64>) -> Vec<Problem> {
        let mut check = Check { run: self, world, problems: Vec::new() };
        check.parallel();
        check.conventional();
        check.context();
        check.pages();
        check.memory();
        check.optimizer();
        check.objective();
        check.advantages();
        check.truncated();
        check.reuse();
        check.tools();
        check.importance();
        check.sampling();
        check.adapters();
        check.rotary();
        check.saved();
        check.evaluation();
        check.sources();
        check.rollout();
        check.alarm();
        check.rewards();
        check.judges();
        check.at_least_one("gate.scale", self.gate.scale, "1 runs the gates at their full lengths");
        check.endpoint();
        check.supported();
        check.problems
    }
}

impl Loaded {
    /// Values that are allowed and yet are most likely a mistake, one sentence each.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let (grpo, optimizer, steps) = (&self.run.grpo, &self.run.optimizer, self.run.run.steps);
        let mut notes = Vec::new();
        if self.is_laptop_run() {
            notes.push("there is no ./config.toml and no --config: this is the built-in laptop run".to_owned());
        }
        if grpo.group_size == 1 && grpo.kl_coef <= 0.0 && !grpo.has_only(RewardName::One) {
            notes.push("grpo.group_size = 1: the advantage of a lone answer is 0, so nothing is learnt".to_owned());
        }
        notes.extend(self.run.objective_notes());
        if optimizer.warmup_steps >= steps && steps > 0 {
            let warmup = optimizer.warmup_steps;
            notes.push(format!("optimizer.warmup_steps = {warmup} reaches to the end of run.steps = {steps}"));
        }
        if let Some(last) = optimizer.schedule_steps.filter(|&last| last < steps) {
            notes.push(format!(
                "optimizer.schedule_steps = {last}: the learning rate is 0 from update {} of {steps} on",
                last + 1
            ));
        }
        if optimizer.lr == 0.0 {
            notes.push("optimizer.lr = 0: no update changes anything".to_owned());
        }
        notes
    }
}

pub(super) struct Check<'a> {
    pub(super) run: &'a RunConfig,
    world: Option<u64>,
    problems: Vec<Problem>,
}

impl Check<'_> {
    /// Adds the problem that `key` should `be` otherwise; the rule reads the keys in `with` too.
    pub(super) fn should(&mut self, key: &str, with: &[&'static str], be: impl Into<String>, why: impl Into<String>) {
        let fault = Fault::Should { be: be.into(), why: why.into() };
        self.problems.push(Problem { key: key.to_owned(), source: None, fault, with: with.to_vec() });
    }

    /// Adds a problem for a number outside its range; `inside` is the test of the range, false for NaN.
    pub(super) fn range(&mut self, key: &str, value: f64, inside: bool, be: &str) {
        if !inside {
            self.should(key, &[], be, format!("it is {value:?}"));
        }
    }

    pub(super) fn at_least_one(&mut self, key: &str, value: u64, why: &str) {
        if value == 0 {
            self.should(key, &[], "at least 1", why);
        }
    }

    pub(super) fn at_most(&mut self, key: &str, value: u64, most: u64, why: &str) {
        if value > most {
            self.should(key, &[], format!("at most {most}"), format!("{why} (it is {value})"));
        }
    }

    fn parallel(&mut self) {
        let parallel = &self.run.parallel;
        let (tp, pp, ep) = (parallel.tp_size, parallel.pp_size, parallel.ep_size);
        if tp != 1 {
            self.should("parallel.tp_size", &[], "1", format!("a layer's weights are never split (it is {tp})"));
        }
        if pp != 1 {
            self.should("parallel.pp_size", &[], "1", format!("every rank holds every layer (it is {pp})"));
        }
        if parallel.cp_size == Some(0) {
            self.should("parallel.cp_size", &[], "at least 1", "or leave it out: all ranks share the prompt then");
        }
        self.at_most("parallel.cp_size", parallel.cp_size.unwrap_or(1), RANKS_MAX, "no MPI has more ranks");
        self.world();
        if ep == 0 {
            self.should("parallel.ep_size", &[], "1", "an expert lives on at least one rank");
        }
        if let Some(cp) = self.cp_size()
            && ep > 0
            && cp % ep != 0
        {
            let be = divisor(cp, ep).to_string();
            let why = format!("it divides the {cp} ranks that share a prompt (it is {ep})");
            self.should("parallel.ep_size", &["parallel.cp_size"], be, why);
        }
    }

    /// The world is a multiple of the ranks that share a prompt.
    fn world(&mut self) {
        let (Some(world), Some(cp)) = (self.world, self.run.parallel.cp_size) else { return };
        if cp == 0 || (world > 0 && world.is_multiple_of(cp)) {
            return;
        }
        let up = world.div_ceil(cp).max(1).saturating_mul(cp);
        let why = format!("the job has {world} ranks, no multiple of {cp}; or start {up} ranks");
        self.should("parallel.cp_size", &[], divisor(world.max(1), cp).to_string(), why);
    }

    /// Ranks that share a prompt, as far as known and not 0.
    fn cp_size(&self) -> Option<u64> {
        self.run.parallel.cp_size.or(self.world).filter(|cp| *cp > 0)
    }

    /// The conventional schedule holds a whole sequence on one rank and knows one gradient.
    fn conventional(&mut self) {
        if self.run.memory.prompt_no_grad {
            return;
        }
        if self.cp_size().is_some_and(|cp| cp > 1) {
            let why = "memory.prompt_no_grad = false runs whole sequences, each on one rank";
            self.should("parallel.cp_size", &["memory.prompt_no_grad"], "1", why);
        }
        if self.run.grpo.gradient != Gradient::Exact {
            let why = "memory.prompt_no_grad = false has the gradient of the whole sequence";
            self.should("grpo.gradient", &["memory.prompt_no_grad"], "\"exact\"", why);
        }
    }

    fn context(&mut self) {
        let context = &self.run.context;
        let (longest, prompt, answer) = (context.max_seq_len.0, context.prompt_len.0, context.answer_len.0);
        self.at_least_one("context.prompt_len", prompt, "a prompt has a position");
        self.at_least_one("context.answer_len", answer, "an answer has a token");
        for (key, positions) in
            [("context.prompt_len", prompt), ("context.answer_len", answer), ("context.page_size", context.page_size.0)]
        {
            self.at_most(key, positions, POSITIONS_MAX, "no memory holds a longer one");
        }
        if context.page_size.0 == 0 {
            self.should("context.page_size", &[], "64", "a page holds at least one position (it is 0)");
        }
        let sum = prompt.saturating_add(answer);
        if sum != longest {
            let why = format!("prompt_len {prompt} + answer_len {answer} (it is {longest})");
            self.should("context.max_seq_len", &["context.prompt_len", "context.answer_len"], sum.to_string(), why);
        }
    }

    fn pages(&mut self) {
        let context = &self.run.context;
        let (Some(claimed), Some(cp)) = (context.cp_pages_per_gpu, self.cp_size()) else { return };
        if context.page_size.0 == 0 {
            return;
        }
        let pages = self.run.prompt_pages().0;
        let each = pages.div_ceil(cp);
        if claimed.0 != each {
            let ranks = if cp == 1 { "rank" } else { "ranks" };
            let why = format!("{pages} pages / {cp} {ranks} (it is {claimed})");
            let with = ["context.prompt_len", "context.page_size", "parallel.cp_size"];
            self.should("context.cp_pages_per_gpu", &with, each.to_string(), why);
        }
    }

    fn memory(&mut self) {
        let memory = &self.run.memory;
        self.at_least_one("memory.head_block", memory.head_block.0, "a block has a row; 512 is the default");
    }

    fn optimizer(&mut self) {
        let o = &self.run.optimizer;
        let not_negative = |x: f64| x.is_finite() && x >= 0.0;
        self.range("optimizer.lr", o.lr, not_negative(o.lr), "a finite number from 0");
        let inside = |beta: &f64| (0.0..1.0).contains(beta);
        if !o.betas.iter().all(inside) {
            let why = format!("it is {:?}", o.betas);
            self.should("optimizer.betas", &[], "two numbers from 0 to below 1", why);
        }
        self.range("optimizer.eps", o.eps, o.eps.is_finite() && o.eps > 0.0, "a finite number above 0");
        self.range("optimizer.weight_decay", o.weight_decay, not_negative(o.weight_decay), "a finite number from 0");
        self.range("optimizer.max_grad_norm", o.max_grad_norm, o.max_grad_norm > 0.0, "above 0, or inf");
        self.at_least_one("optimizer.grad_accum", o.grad_accum, "an update needs a group");
        self.at_most("optimizer.grad_accum", o.grad_accum, GROUPS_MAX, "an update has all its groups in a list");
    }

    fn sampling(&mut self) {
        let g = &self.run.grpo;
        let inside = g.temperature.is_finite() && g.temperature > 0.0;
        self.range("grpo.temperature", g.temperature, inside, "a finite number above 0");
        self.at_least_one("grpo.updates_per_group", g.updates_per_group, "a group that is scored is trained on");
    }

    fn adapters(&mut self) {
        let lora = &self.run.lora;
        self.at_least_one("lora.rank", lora.rank, "an adapter has a width; 16 is the default");
        self.at_most("lora.rank", lora.rank, LORA_RANK_MAX, "an adapter is narrower than its layer");
        self.range("lora.alpha", lora.alpha, lora.alpha.is_finite() && lora.alpha > 0.0, "a finite number above 0");
        let Some(targets) = &lora.targets else { return };
        if targets.is_empty() {
            self.should(
                "lora.targets",
                &[],
                "left out",
                "an empty list trains nothing; absent means all linear layers",
            );
        }
        let mut seen = BTreeSet::new();
        if let Some(again) = targets.iter().find(|target| !seen.insert(*target)) {
            self.should("lora.targets", &[], "without repetition", format!("{again} is in it twice"));
        }
    }

    /// The table is passed on as JSON, which has no value for a number that is not finite.
    fn rotary(&mut self) {
        let unsaid = self.run.model.rope_scaling.iter().flatten().any(|(_, value)| holds_null(value));
        if unsaid {
            self.should("model.rope_scaling", &[], "of finite numbers", "nan and inf stretch nothing");
        }
    }

    fn saved(&mut self) {
        let o = &self.run.optimizer;
        if let Some(steps) = o.schedule_steps {
            let key = "optimizer.schedule_steps";
            if o.schedule == Schedule::Constant {
                self.should(key, &["optimizer.schedule"], "left out", "a constant learning rate has no end");
            } else if steps <= o.warmup_steps {
                let why = format!("the decay follows optimizer.warmup_steps = {} (it is {steps})", o.warmup_steps);
                self.should(key, &["optimizer.warmup_steps"], format!("at least {}", o.warmup_steps + 1), why);
            }
        }
        self.at_least_one("checkpoint.keep", self.run.checkpoint.keep, "the newest checkpoint always stays");
    }

    fn endpoint(&mut self) {
        let e = &self.run.endpoint;
        if !is_variable_name(&e.api_key_env) {
            let why = "capital letters, digits and _; the value is not shown, it may be a key";
            self.should("endpoint.api_key_env", &[], "the name of an environment variable", why);
        }
        if let Some(base) = &e.api_base {
            self.base(base);
        }
        for (key, path) in
            [("endpoint.endpoints.chat", e.chat_path()), ("endpoint.endpoints.models", &e.endpoints.models)]
        {
            if !address::is_path(path) {
                self.should(
                    key,
                    &[],
                    "a path that begins with /, without query",
                    "it is appended to endpoint.api_base",
                );
            }
        }
        let other = match e.style {
            EndpointStyle::Messages => "/chat/completions",
            EndpointStyle::ChatCompletions => "/messages",
        };
        if e.chat_path().ends_with(other) {
            let be = format!("absent, or a path that does not end with {other}");
            self.should(
                "endpoint.endpoints.chat",
                &["endpoint.style"],
                be,
                "that path is of another interface than endpoint.style",
            );
        }
        self.at_least_one("endpoint.timeout_sec", e.timeout_sec, "a request takes time; 120 is the default");
        self.at_most("endpoint.timeout_sec", e.timeout_sec, TIMEOUT_SEC_MAX, "an answer does not take more than a day");
        self.at_most("endpoint.max_retries", e.max_retries, RETRIES_MAX, "what fails so often does not pass");
        let inside = e.retry_backoff.is_finite() && e.retry_backoff > 0.0;
        self.range("endpoint.retry_backoff", e.retry_backoff, inside, "a finite number above 0");
        let wait_sec = e.retry_backoff.powi(i32::try_from(e.max_retries).unwrap_or(i32::MAX));
        if inside && wait_sec > RETRY_WAIT_SEC_MAX {
            let most = (RETRY_WAIT_SEC_MAX.ln() / e.retry_backoff.ln()).floor();
            let why = format!("the last wait, {:?} to the power {}, exceeds an hour", e.retry_backoff, e.max_retries);
            self.should("endpoint.max_retries", &["endpoint.retry_backoff"], format!("{most} or less"), why);
        }
    }

    /// The base address is an address, and does not end with what its paths begin with.
    fn base(&mut self, base: &str) {
        match address::without_scheme(base) {
            Some(NoScheme::Local(with)) => {
                let why = "it has no scheme; http:// is for a service on this machine, https:// for any other";
                return self.should("endpoint.api_base", &[], with, why);
            }
            Some(NoScheme::Other) => {
                let be = "an address that begins with https:// (http:// for a service on this machine)";
                return self.should(
                    "endpoint.api_base",
                    &[],
                    be,
                    "it has no scheme; it is not shown, it may hold a key",
                );
            }
            None => {}
        }
        if !address::is_plain(base) {
            let why = "it is not shown, it may hold a key";
            self.should("endpoint.api_base", &[], "an address https://… without user or password", why);
            return;
        }
        let allowed = self.run.endpoint.allow_http && address::is_private(base);
        if address::is_clear(base) && !allowed {
            let why = if address::is_private(base) {
                "the key would cross the network in clear; endpoint.allow_http = true permits it for a private address"
            } else {
                "the key would cross the network in clear; http:// is for a service on this machine, or with endpoint.allow_http = true for \
                 an address of a private range or a name without dots"
            };
            self.should("endpoint.api_base", &[], format!("https://{}", base.trim_start_matches("http://")), why);
            return;
        }
        let endpoint = &self.run.endpoint;
        let (clean, twice) = address::cleaned(base, [endpoint.chat_path(), &endpoint.endpoints.models]);
        let with = ["endpoint.endpoints.chat", "endpoint.endpoints.models"];
        if let Some(path) = twice {
            let why = format!("the path {path} begins with what the address ends with, and would follow it");
            self.should("endpoint.api_base", &with, clean, why);
        } else if clean != base.trim_end_matches('/') {
            self.should(
                "endpoint.api_base",
                &with,
                clean,
                "paths are appended to it, so a query or a fragment has no place",
            );
        }
    }

    fn supported(&mut self) {
        for row in SUPPORTED {
            if (row.lacks)(self.run) {
                self.should(row.key, &[], row.be, format!("this build does not {} yet", row.what));
            }
        }
    }
}

fn holds_null(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Null => true,
        Value::Array(items) => items.iter().any(holds_null),
        Value::Object(table) => table.values().any(holds_null),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// The largest divisor of `whole` that is at most `most`, both at least 1. Of a whole beyond 32 bits it may be a smaller
/// one: trying all would take years.
pub(super) fn divisor(whole: u64, most: u64) -> u64 {
    let small = (1..=DIVISORS_TRIED).take_while(|d| d * d <= whole).filter(|d| whole.is_multiple_of(*d));
    small.flat_map(|d| [d, whole / d]).filter(|d| *d <= most).max().unwrap_or(1)
}

fn is_variable_name(name: &str) -> bool {
    let plain = name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
    plain && !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::units::Tokens;

    #[test]
    fn the_nearest_smaller_divisor_is_proposed() {
        assert_eq!(divisor(6, 8), 6);
        assert_eq!(divisor(6, 4), 3);
        assert_eq!(divisor(7, 4), 1);
        assert_eq!(divisor(12, 5), 4);
        for whole in 1..=200 {
            for most in 1..=210 {
                assert_eq!(Some(divisor(whole, most)), (1..=most).rev().find(|d| whole.is_multiple_of(*d)));
            }
        }
    }

    #[test]
    fn a_divisor_of_any_number_is_found_at_once() {
        assert_eq!(divisor((1 << 62) + 1, 1 << 61), 922_337_203_685_477_581);
        assert_eq!(divisor((1 << 61) - 1, 1 << 60), 1, "a prime");
    }

    #[test]
    fn a_key_pasted_instead_of_a_name_is_no_name() {
        for name in ["sk-abc", "", "1KEY", "Key", "A KEY"] {
            assert!(!is_variable_name(name), "{name}");
        }
        assert!(is_variable_name("TAOTOKEN_API_KEY"));
    }

    #[test]
    fn a_tail_is_never_longer_than_the_prompt() {
        assert_eq!(Gradient::Exact.tail(Tokens(5)), Tokens(5));
        assert_eq!(Gradient::Response.tail(Tokens(5)), Tokens(1));
        assert_eq!(Gradient::Last(Tokens(9)).tail(Tokens(5)), Tokens(5));
        assert_eq!(Gradient::Last(Tokens(0)).tail(Tokens(5)), Tokens(0));
    }
}
