//! Answers that call a tool while they are drawn.

use std::cell::RefCell;

use longstraw::runtime::failure::Failure;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, float, from_index};
use longstraw::step::conventional;
use longstraw::step::objective::{Aggregation, Objective};
use longstraw::step::replay::TrainedAnswer;
use longstraw::step::rollout::{
    self, Call, Caller, Calls, DrawnChoices, Replied, Reply, SampleRequest, SampledAnswer, Sampling, Stream,
};
use longstraw::step::transaction::{Outcome, Transaction, Verdict};
use longstraw::world::World;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{
    Group, HEAD, Model, PLAIN, config, distance, hybrid, mixture, observer, own, ratio_is_one, reduced, run,
    transaction,
};
use crate::sampling::sample;

const ENDS: [i64; 2] = [3, 17];
const LONGEST: usize = 32;
const TURNS: u64 = 2;

/// Takes some tokens for the end of a call.
#[derive(Debug, Default)]
struct Tool {
    /// Answer, turn and length of the answer at each call.
    calls: RefCell<Vec<(usize, u64, usize)>>,
}

fn closes(id: i64) -> bool {
    id % 7 == 5
}

/// Replies of uneven lengths, with a token that ends an answer and one that closes a call among theirs.
fn reply(answer: usize, turn: u64) -> Vec<i64> {
    let number = i64::try_from(answer).expect("small") + 10 * i64::try_from(turn).expect("small");
    [&[ENDS[1], number, 12][..], &vec![60; answer % 3]].concat()
}

impl Caller for Tool {
    fn closed(&self, _: &[i64], last: i64) -> Result<Option<String>, Failure> {
        Ok(closes(last).then(|| last.to_string()))
    }

    fn replies(&self, calls: &[Call<'_>], _: &mut dyn FnMut()) -> Result<Vec<Reply>, Failure> {
        let answer = |call: &Call<'_>| {
            self.calls.borrow_mut().push((call.answer, call.turn, call.ids.len()));
            let outcome = if call.turn == 1 { Replied::Whole } else { Replied::Failed("it fell".to_owned()) };
            Reply { ids: reply(call.answer, call.turn), outcome }
        };
        Ok(calls.iter().map(answer).collect())
    }
}

fn request(tool: &Tool) -> SampleRequest<'_> {
    SampleRequest {
        answers: 5,
        greedy: 1,
        longest: Tokens(from_index(LONGEST)),
        ends: &ENDS,
        sampling: Sampling { top_p: 1.0, top_k: 0 },
        stream: Stream::of_seed(7).part(4),
        resident: usize::MAX,
        fused: true,
        choices: DrawnChoices::Use,
        calls: Some(Calls { caller: tool, turns: TURNS }),
    }
}

/// Which tokens of an answer must have been drawn, read off its tokens alone; and its calls.
fn expected(index: usize, answer: &SampledAnswer) -> (Vec<bool>, u64) {
    let (mut drawn, mut calls, mut at) = (Vec::new(), 0, 0);
    while at < answer.ids.len() {
        let id = answer.ids[at];
        drawn.push(true);
        at += 1;
        if ENDS.contains(&id) || !closes(id) || at >= LONGEST {
            continue;
        }
        let reply = reply(index, calls + 1);
        if calls == TURNS || at + reply.len() >= LONGEST {
            calls += u64::from(calls < TURNS);
            assert!(at == answer.ids.len() && answer.truncated, "without a reply the answer ends at its call");
            break;
        }
        calls += 1;
        assert_eq!(answer.ids[at..at + reply.len()], reply, "the reply follows the call");
        drawn.extend(vec![false; reply.len()]);
        at += reply.len();
    }
    (drawn, calls)
}

/// A reply stands behind its call in every answer and is not drawn; answers are the same alone and on all ranks; what was
/// drawn has the log-probabilities of the score pass, so the model has read the replies; and noise does not move.
pub(crate) fn replies_are_read(world: &mut World) {
    let mut calls_in_all = 0;
    for shape in [config("qwen3", &json!({})), hybrid(&json!({})), mixture(&json!({}))] {
        let model = Model::random(&shape, Kind::Double);
        let (tool, family) = (Tool::default(), &shape["model_type"]);
        let (all, scores) = sample(world, &model, 30, PLAIN, &request(&tool));
        for (index, (answer, scored)) in all.iter().zip(&scores).enumerate() {
            let (drawn, calls) = expected(index, answer);
            calls_in_all += calls;
            let mask = answer.mask.clone().unwrap_or(vec![true; answer.ids.len()]);
            assert_eq!((&mask, answer.calls.calls), (&drawn, calls), "{family}, answer {index}");
            assert_eq!(answer.calls.tokens, from_index(drawn.iter().filter(|drawn| !**drawn).count()));
            assert_eq!((answer.calls.failed, answer.calls.refused), (calls.saturating_sub(1), 0));
            let scored = Vec::<f64>::try_from(scored.to_kind(Kind::Double)).expect("numbers");
            let gap = rollout::gap(&answer.logprobs, &Tensor::from_slice(&answer.of_sampled(&scored)));
            assert!(gap <= 1e-12, "{family}, answer {index}: {gap}");
        }
        if world.all.rank().0 > 0 {
            assert!(tool.calls.borrow().is_empty(), "the first rank alone calls");
        }
        let ranks = world.all.size();
        world.cut(1, 1).expect("every rank by itself");
        let (alone, _) = sample(world, &model, 30, PLAIN, &request(&tool));
        world.cut(ranks, 1).expect("all of them");
        for (one, other) in all.iter().zip(&alone) {
            assert_eq!((&one.ids, &one.mask, &one.calls), (&other.ids, &other.mask, &other.calls), "{family}");
        }
        if family != "qwen3" {
            continue;
        }
        let (silent, _) = sample(world, &model, 30, PLAIN, &SampleRequest { calls: None, ..request(&tool) });
        for (one, without) in all.iter().zip(&silent) {
            let first = one.ids.iter().position(|&id| closes(id)).map_or(one.ids.len(), |at| at + 1);
            assert_eq!(one.ids[..first], without.ids[..first], "nothing differs before the first call");
            assert_eq!((&without.mask, without.calls.calls), (&None, 0));
        }
    }
    assert!(calls_in_all > 8, "{calls_in_all} calls show little");
}

/// What tokens of replies would be worth has no part in the gradient: it is that of plain autograd of the drawn tokens.
pub(crate) fn replies_are_not_trained(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    let (tool, ledger) = (Tool::default(), Ledger::default());
    let group = Group::random(2, 61, 30, &[1]);
    let objective = Objective { kl_coef: 0.0, aggregation: Aggregation::SequenceMean, ..Objective::DEFAULT };
    let transaction = Transaction { objective, ..transaction(world, &model, PLAIN, &ledger) };
    let advantages = [1.0, -1.0, 0.5, -0.25, 0.75];
    let mut drawn: Vec<SampledAnswer> = Vec::new();
    let trained = |index: usize, answer: &SampledAnswer| TrainedAnswer {
        ids: answer.ids.clone(),
        mask: answer.mask.clone(),
        given: None,
        advantage: Some(advantages[index]),
        weight: Aggregation::SequenceMean.share(from_index(answer.logprobs.len())),
    };
    let outcome = run(transaction.run(&group.prompt_ids, Some(&request(&tool)), &mut observer(world), |_, answers| {
        drawn = answers?;
        Ok(Verdict::Train(drawn.iter().enumerate().map(|(index, answer)| trained(index, answer)).collect()))
    }));
    let Outcome::Trained(done) = outcome else { panic!("the answers are trained") };
    assert!(ratio_is_one(&done.replayed), "{:?}", done.replayed.ratio);
    let tokens: u64 = world.cp.gather_numbers(done.replayed.stats.tokens).iter().sum();
    let replied: u64 = drawn.iter().map(|answer| answer.calls.tokens).sum();
    let all: usize = drawn.iter().map(|answer| answer.ids.len()).sum();
    assert!(replied > 5, "{replied} tokens of replies show little");
    assert_eq!(tokens, from_index(all) - replied, "what is drawn is trained, and nothing else");
    let found = reduced(world, &model.adapters);

    let answers: Vec<Vec<i64>> = drawn.iter().map(|answer| answer.ids.clone()).collect();
    let whole = conventional::Group {
        prompt_ids: &group.prompt_ids,
        answers: &answers,
        tail: Tokens(PLAIN.tail),
        temperature: HEAD.temperature,
    };
    for (index, answer) in drawn.iter().enumerate() {
        let (is_drawn, _) = expected(index, answer);
        let places: Vec<i64> = (0..).zip(&is_drawn).filter_map(|(at, drawn)| drawn.then_some(at)).collect();
        let logprobs = whole.logprobs(&*model.decoder, &model.adapters, index);
        let of_drawn = logprobs.index_select(0, &Tensor::from_slice(&places).to_device(logprobs.device()));
        // At a ratio of 1 a token's gradient is minus its advantage times that of its log-probability.
        let loss = -of_drawn.sum(Kind::Double) * (advantages[index] / float(from_index(places.len())));
        loss.backward();
    }
    let plain = own(&model.adapters);
    let apart = distance(&model.adapters, found.gradients(), &plain);
    assert!(apart.worst <= 1e-9, "{} of {}", apart.worst, apart.all);
}

/// The last token of a reply is read by nobody where the answer ends with it: another token there changes no bit.
pub(crate) fn a_replys_own_probability_is_nobodys(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    let ledger = Ledger::default();
    let objective = Objective { kl_coef: 0.0, ..Objective::DEFAULT };
    let group = Group::random(5, 61, 30, &[9, 7]);
    let gradient = |last: i64| {
        let answers = [0, 1].map(|index: usize| {
            let mut ids = group.answers[index].clone();
            *ids.last_mut().expect("an answer has a token") = last;
            let drawn = ids.len() - 3;
            let mask = (0..ids.len()).map(|at| at < drawn).collect();
            TrainedAnswer { ids, mask: Some(mask), given: None, advantage: Some([1.0, -1.0][index]), weight: 0.1 }
        });
        let transaction = Transaction { objective, ..transaction(world, &model, PLAIN, &ledger) };
        run(transaction.train(&group.prompt_ids, None, &answers, None, &mut observer(world)));
        reduced(world, &model.adapters)
    };
    let (one, other) = (gradient(11), gradient(48));
    assert!(one.gradients().iter().zip(other.gradients()).all(|(one, other)| one.equal(other)), "the same bits");
    assert!(one.gradients().iter().any(|tensor| tensor.abs().max().double_value(&[]) > 0.0), "there is a gradient");
}
