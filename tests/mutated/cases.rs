//! One case: files, flags and variables, all drawn from its number.

use std::fmt;
use std::path::Path;

use longstraw::config::{DEFAULT_TOML, LAPTOP_TOML, Overrides, variable_of};

use crate::changes::{self, VALUES};
use crate::draw::Draw;

const CONFIG: &str = include_str!("../../configs/config.toml");
const SETTINGS: &str = include_str!("../../configs/settings.json");
const SEED: u64 = 20_260_711;
/// Flags that are none, or that say more than there is.
const ODD_FLAGS: [&str; 16] = [
    "",
    "=",
    "=5",
    "context",
    "context.prompt_len",
    "grpo.=1",
    ".lr=1",
    "grpo..kl_coef=1",
    "context.prompt_len==5",
    "grpo={}",
    "grpo=5",
    "grpo.gradient.last=5",
    "grpo.gradient={ last = 1, first = 2 }",
    "endpoint.usage=[]",
    "endpoint.endpoints.chat.x=1",
    "model.rope_scaling={ rope_type = \"yarn\", factor = nan }",
];
/// Values that are right, most of them at an edge, so that plans are made of them.
const PLAUSIBLE: [&str; 26] = [
    "grpo.gradient=response",
    "grpo.gradient={ last = 100000 }",
    "grpo.gradient={ last = 0 }",
    "grpo.kl_coef=0.1",
    "grpo.group_size=65536",
    "grpo.group_size=9223372036854775807",
    "memory.cpu_offload_pages=auto",
    "memory.cpu_offload_pages=false",
    "memory.cpu_offload_inputs=false",
    "memory.inputs_every=3",
    "memory.inputs_every=9223372036854775807",
    "memory.keep_attention=auto",
    "memory.keep_attention=true",
    "memory.micro_block=1",
    "memory.micro_block=9223372036854775807",
    "memory.head_block=9223372036854775807",
    "lora.rank=1048576",
    "lora.targets=q_proj",
    "model.dtype=float64",
    "model.rope_scaling={ rope_type = \"yarn\", factor = 4.0 }",
    "run.device=cpu",
    "optimizer.schedule=cosine",
    "optimizer.schedule_steps=9223372036854775807",
    "checkpoint.every_sec=9223372036854775807",
    "endpoint.max_retries=10",
    "run.steps=9223372036854775807",
];
const ODD_VARIABLES: [&str; 8] = [
    "LONGSTRAW_",
    "LONGSTRAW___",
    "LONGSTRAW_GRPO",
    "LONGSTRAW_GRPO__",
    "LONGSTRAW_GRPO____LR",
    "LONGSTRAW_grpo__Lr",
    "LONGSTRAW_CONTEXT__PROMPT_LEN__X",
    "LONGSTRAW_STEPS",
];
/// Lengths, pages and ranks at the edges of what 64 bits hold.
const LENGTHS: [u64; 14] = [
    1,
    2,
    63,
    64,
    65,
    4096,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    (1 << 40) + 1,
    (1 << 53) + 1,
    1 << 61,
    1 << 62,
    i64::MAX.unsigned_abs(),
];

pub(crate) struct Case {
    pub(crate) number: usize,
    config: Vec<u8>,
    settings: Option<Vec<u8>>,
    flags: Vec<String>,
    pub(crate) variables: Vec<(String, String)>,
}

/// Every key of the default file as a line that counts, also those that are only examples there.
fn opened() -> String {
    let open = |line: &str| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line).to_owned();
    DEFAULT_TOML.lines().map(open).collect::<Vec<_>>().join("\n")
}

/// The same as a configuration: some of its examples do not go with a default.
fn whole() -> String {
    let tool = "command = [\"python3\", \"scripts/calculator";
    let keys = [
        "constant_divisor",
        "schedule_steps",
        "importance_max",
        "importance_min",
        "reuse_drift_max",
        "samples",
        "keep_best",
        "kl_stop",
        "sources",
        tool,
    ];
    keys.iter().fold(opened(), |text, key| text.replace(&format!("\n{key}"), &format!("\n#{key}")))
}

/// Dotted paths of all keys.
fn keys() -> Vec<String> {
    let mut table = String::new();
    let mut keys = Vec::new();
    for line in opened().lines() {
        if let Some(path) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            path.clone_into(&mut table);
        } else if let Some((name, _)) = line.split_once(" = ").filter(|_| !line.starts_with('#')) {
            keys.push(format!("{table}.{name}"));
        }
    }
    keys
}

/// A value that a shell or a flag can carry.
fn value(draw: &mut Draw) -> String {
    draw.one(&VALUES).replace('\0', "")
}

/// Lengths that go together, so that it is their size that is judged; the count of pages goes with them.
fn lengths(draw: &mut Draw) -> Vec<String> {
    let [prompt, answer, page] = [draw.one(&LENGTHS), draw.one(&LENGTHS), draw.one(&LENGTHS)].map(|n| *n);
    let ranks = *draw.one(&[1, 2, 3, 8, 1 << 20, 1 << 40, i64::MAX.unsigned_abs() - 1]);
    let answer = answer.min(i64::MAX.unsigned_abs().saturating_sub(prompt)).max(1);
    let pages = prompt.div_ceil(page).div_ceil(ranks);
    let longest = prompt.saturating_add(answer);
    [
        ("context.prompt_len", prompt),
        ("context.answer_len", answer),
        ("context.max_seq_len", longest),
        ("context.page_size", page),
        ("context.cp_pages_per_gpu", pages),
        ("parallel.cp_size", ranks),
        ("parallel.ep_size", *draw.one(&[1, 1, ranks, ranks / 2 + 1, (1 << 40) + 1])),
    ]
    .map(|(key, value)| format!("{key}={value}"))
    .to_vec()
}

impl Case {
    pub(crate) fn of(number: usize) -> Case {
        let mut draw = Draw::new(SEED + u64::try_from(number).expect("few"));
        let mut config = match number % 4 {
            0 | 1 => CONFIG.to_owned(),
            2 => LAPTOP_TOML.to_owned(),
            _ => whole(),
        }
        .into_bytes();
        // A file that is wrong is refused, whatever later sources say; they need some that are right.
        let plausible = draw.percent(40);
        for _ in 0..*draw.one(if plausible { &[0, 0, 0, 1] } else { &[1, 1, 2, 4] }) {
            changes::toml(&mut draw, &mut config);
        }
        let mut settings = draw.percent(60).then(|| SETTINGS.as_bytes().to_vec());
        if let Some(settings) = settings.as_mut().filter(|_| draw.percent(if plausible { 15 } else { 50 })) {
            for _ in 0..*draw.one(&[1, 1, 2]) {
                changes::json(&mut draw, settings);
            }
        }
        let keys = keys();
        let mut flags = Vec::new();
        if draw.percent(15) {
            flags.extend(lengths(&mut draw));
        }
        if plausible {
            flags.extend([draw.one(&PLAUSIBLE), draw.one(&PLAUSIBLE)].map(|flag| (*flag).to_owned()));
        }
        if draw.percent(if plausible { 10 } else { 40 }) {
            for _ in 0..2 {
                flags.push(if draw.percent(15) {
                    (*draw.one(&ODD_FLAGS)).to_owned()
                } else {
                    format!("{}={}", draw.one(&keys), value(&mut draw))
                });
            }
        }
        let mut variables = Vec::new();
        if draw.percent(if plausible { 10 } else { 25 }) {
            for _ in 0..2 {
                let odd = draw.percent(15);
                let name = if odd {
                    (*draw.one(&ODD_VARIABLES)).to_owned()
                } else {
                    variable_of(draw.one(&keys[..]).as_str())
                };
                variables.push((name, value(&mut draw)));
            }
        }
        if draw.percent(1) {
            flags.push(format!("{}=1", "a.".repeat(50_000)));
        }
        Case { number, config, settings, flags, variables }
    }

    /// Writes the files; what the command line would say of them.
    pub(crate) fn write(&self, folder: &Path) -> Overrides {
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, bytes).unwrap();
            Some(path)
        };
        Overrides {
            config: file("config.toml", &self.config),
            settings: self.settings.as_ref().and_then(|bytes| file("settings.json", bytes)),
            set: self.flags.clone(),
            run_dir: None,
            ..Overrides::default()
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |text: &str| text.chars().take(3000).collect::<String>();
        writeln!(f, "case {}: config.toml:", self.number)?;
        // Of the default file only what differs.
        let usual = whole();
        let same: Vec<&str> = usual.lines().collect();
        for line in String::from_utf8_lossy(&self.config).lines() {
            if self.number % 4 != 3 || !same.contains(&line) {
                writeln!(f, "    {}", short(line))?;
            }
        }
        if let Some(settings) = &self.settings {
            writeln!(f, "  settings.json: {}", short(&String::from_utf8_lossy(settings)))?;
        }
        let flags: Vec<String> = self.flags.iter().map(|flag| short(flag)).collect();
        write!(f, "  flags {flags:?}, variables {:?}", self.variables)
    }
}
