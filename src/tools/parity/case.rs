//! A reference case: a folder with a checkpoint, `case.json` and `expected.safetensors` (tests/cases/README.md).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::config::Gradient;
use crate::model::lora::{Adapter, Adapters};
use crate::model::spec::Spec;
use crate::prompt::handoff::{Logprobs, PlacedGroup, Scores};
use crate::prompt::layout::Piece;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::reading;
use crate::runtime::units::{Rank, Tokens, as_dim, float, from_index};
use crate::step::objective::{Aggregation, Objective};
use crate::step::replay::{FrozenScores, TrainedAnswer};

/// What can be wrong with a case.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say everything")]
pub enum Error {
    #[error("{}: {message}", file.display())]
    Read { file: PathBuf, message: String },
    #[error("{}: no tensor {tensor}", file.display())]
    Missing { file: PathBuf, tensor: String },
    #[error("last={last} is more than the case's prompt of {prompt} positions")]
    Tail { last: Tokens, prompt: Tokens },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Tail { .. } => Exit::Config,
            _ => Exit::Data,
        }
    }
}

#[derive(Deserialize)]
struct CaseFile {
    answer_lens: Vec<usize>,
    clip: f64,
    kl_beta: f64,
    lora_rank: u64,
    lora_alpha: f64,
}

/// A loss of the cases, by its name in `expected.safetensors`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loss {
    Grpo,
    GrpoKl,
}

impl Loss {
    pub(super) const ALL: [Loss; 2] = [Loss::Grpo, Loss::GrpoKl];

    pub(super) fn name(self) -> &'static str {
        match self {
            Loss::Grpo => "grpo",
            Loss::GrpoKl => "grpo_kl",
        }
    }
}

pub(super) struct Case {
    file: PathBuf,
    about: CaseFile,
    expected: BTreeMap<String, Tensor>,
    pub(super) prompt_ids: Vec<i64>,
    pub(super) answers: Vec<Vec<i64>>,
}

impl Case {
    /// Reads a case and checks that every number that will be compared is there.
    pub(super) fn read(folder: &Path) -> Result<Case, Error> {
        let failed = |file: &Path, message: String| Error::Read { file: file.into(), message };
        let about_file = folder.join("case.json");
        let text = reading::text(&about_file).map_err(|error| failed(&about_file, error.to_string()))?;
        let about: CaseFile = serde_json::from_str(&text).map_err(|error| failed(&about_file, error.to_string()))?;
        let file = folder.join("expected.safetensors");
        let tensors = Tensor::read_safetensors(&file).map_err(|error| failed(&file, error.to_string()))?;
        let expected = tensors.into_iter().collect();
        let mut case = Case { file, about, expected, prompt_ids: Vec::new(), answers: Vec::new() };
        for name in ["prompt_ids", "advantages", "loss.grpo", "loss.grpo_kl"] {
            case.get(name)?;
        }
        for index in 0..case.about.answer_lens.len() {
            for name in ["answer_ids", "logits", "logprobs", "old_logprobs", "ref_logprobs"] {
                case.get(&format!("{name}.{index}"))?;
            }
            case.answers.push(case.ids(&format!("answer_ids.{index}"))?);
        }
        case.prompt_ids = case.ids("prompt_ids")?;
        Ok(case)
    }

    pub(super) fn get(&self, name: &str) -> Result<&Tensor, Error> {
        self.expected.get(name).ok_or_else(|| Error::Missing { file: self.file.clone(), tensor: name.into() })
    }

    fn ids(&self, name: &str) -> Result<Vec<i64>, Error> {
        Vec::<i64>::try_from(self.get(name)?)
            .map_err(|error| Error::Read { file: self.file.clone(), message: error.to_string() })
    }

    /// Expected gradients of every adapter tensor; zero where nothing is expected. `mode` is the cases' name of a gradient
    /// mode.
    pub(super) fn gradients(&self, adapters: &Adapters, mode: &str, loss: Loss) -> Vec<Tensor> {
        let expected = |(name, tensor): (String, &Tensor)| {
            let found = self.expected.get(&format!("grad.{mode}.{}.lora.{name}", loss.name()));
            found.map_or_else(|| tensor.detach().zeros_like(), Tensor::shallow_clone)
        };
        adapters.names().zip(adapters.tensors()).map(expected).collect()
    }

    pub(super) fn objective(&self, loss: Loss) -> Objective {
        let kl_coef = match loss {
            Loss::Grpo => 0.0,
            Loss::GrpoKl => self.about.kl_beta,
        };
        let clip = self.about.clip;
        Objective { clip_low: clip, clip_high: clip, kl_coef, ..Objective::DEFAULT }
    }

    /// The answers with advantage and weight.
    pub(super) fn trained(&self) -> Result<Vec<TrainedAnswer>, Error> {
        let given = self.get("advantages")?.to_kind(Kind::Double);
        let advantages: Vec<Option<f64>> =
            (0..given.size()[0]).map(|index| Some(given.double_value(&[index]))).collect();
        Ok(TrainedAnswer::whole_batch(&self.answers, &advantages, Aggregation::SequenceMean))
    }

    /// Old or reference log-probabilities of all tokens of an answer.
    pub(super) fn given_logprobs(
        &self,
        policy: &str,
        index: usize,
        acc: Kind,
        device: Device,
    ) -> Result<Tensor, Error> {
        Ok(self.get(&format!("{policy}_logprobs.{index}"))?.to_kind(acc).to_device(device))
    }

    /// The given log-probabilities of this rank's tokens.
    pub(super) fn given_scores(
        &self,
        group: &PlacedGroup,
        rank: Rank,
        acc: Kind,
        device: Device,
    ) -> Result<FrozenScores, Error> {
        let scores = |policy: &str| -> Result<Scores, Error> {
            let answers = group.answers.iter().enumerate().map(|(index, answer)| {
                let all = self.given_logprobs(policy, index, acc, device)?;
                let labels = |piece: &Piece| group.layout.labels(piece);
                let tokens: Vec<i64> =
                    answer.span.of(rank).flat_map(labels).map(|token| as_dim(from_index(token))).collect();
                let first = (group.layout.last_row_owner() == rank).then(|| all.narrow(0, 0, 1));
                Ok(Logprobs { rows: all.index_select(0, &Tensor::from_slice(&tokens).to_device(device)), first })
            });
            Ok(Scores(answers.collect::<Result<_, Error>>()?))
        };
        let (old, reference) = (scores("old")?, Some(scores("ref")?));
        Ok(FrozenScores { old, reference, importance: None, choices: RefCell::default() })
    }

    pub(super) fn adapters(&self, spec: &Spec, acc: Kind, device: Device) -> Adapters {
        let load = |x: &Tensor| x.to_kind(acc).to_device(device);
        let mut pairs = Vec::new();
        for linear in spec.linear_layers() {
            let half = |name: &str| self.expected.get(&format!("lora.{}.lora_{name}", linear.module));
            if let (Some(a_ri), Some(b_or)) = (half("A"), half("B")) {
                pairs.push(Adapter { module: linear.module, a_ri: load(a_ri), b_or: load(b_or) });
            }
        }
        Adapters::new(pairs, self.about.lora_alpha / float(self.about.lora_rank), "policy")
    }
}

/// The cases' name of a gradient mode, if they hold its gradients.
pub(super) fn expected_mode(gradient: Gradient, prompt: Tokens) -> Option<&'static str> {
    match gradient.tail(prompt) {
        rows if rows == prompt => Some("full"),
        Tokens(1) => Some("resp"),
        Tokens(0) => Some("resp_strict"),
        _ => None,
    }
}
