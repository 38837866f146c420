//! Answers that the policy samples.

use longstraw::model::weights::ExpertShare;
use longstraw::prompt::handoff::{Answer, Keeping, Logprobs, PlacedGroup};
use longstraw::prompt::pages::{Choice, ChoicePool, Residency};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{LayerIndex, Tokens, from_index};
use longstraw::step::conventional;
use longstraw::step::replay::TrainedAnswer;
use longstraw::step::rollout::{self, DrawnChoices, SampleRequest, SampledAnswer, Sampling, Stream};
use longstraw::step::transaction::{Outcome, Scored, Verdict};
use longstraw::world::World;
use longstraw::world::exchange::gather_rows;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{
    Group, HEAD, How, Model, PLAIN, config, glm, hybrid, hybrid_mixture, mixture, observer, own, ratio_is_one, run,
    transaction,
};

/// Seldom enough that some answers end by themselves and some are cut off.
const ENDS: [i64; 2] = [3, 17];
const LONGEST: Tokens = Tokens(40);

fn request(pages_on_device: bool) -> SampleRequest<'static> {
    let sampling = Sampling { top_p: 0.95, top_k: 30 };
    let stream = Stream::of_seed(7).part(4);
    SampleRequest {
        answers: 5,
        greedy: 0,
        longest: LONGEST,
        ends: &ENDS,
        sampling,
        stream,
        resident: if pages_on_device { usize::MAX } else { 0 },
        fused: true,
        choices: DrawnChoices::Use,
        calls: None,
    }
}

/// A group's answers as they are sampled, and the score pass's log-probabilities of them, in order.
pub(crate) fn sample(
    world: &World,
    model: &Model,
    prompt: usize,
    how: How,
    request: &SampleRequest,
) -> (Vec<SampledAnswer>, Vec<Tensor>) {
    let (sampled, scored) = scored(world, model, prompt, how, request);
    let pairs = scored.scores.0.iter().zip(&scored.group.answers);
    let logprobs = pairs.map(|(one, answer)| whole(world, one, &scored.group, answer)).collect();
    (sampled, logprobs)
}

fn scored(
    world: &World,
    model: &Model,
    prompt: usize,
    how: How,
    request: &SampleRequest,
) -> (Vec<SampledAnswer>, Scored) {
    let ledger = Ledger::default();
    let prompt_ids = Group::random(2, 61, prompt, &[1]).prompt_ids;
    let mut sampled = Vec::new();
    let transaction = transaction(world, model, how, &ledger);
    let outcome = run(transaction.run(&prompt_ids, Some(request), &mut observer(world), |_, answers| {
        sampled = answers?;
        Ok(Verdict::Score(sampled.iter().map(|answer| answer.ids.clone()).collect()))
    }));
    let Outcome::Scored(scored) = outcome else { panic!("the answers are scored") };
    (sampled, *scored)
}

/// All ranks' log-probabilities of an answer, in the order of its tokens.
fn whole(world: &World, one: &Logprobs, group: &PlacedGroup, answer: &Answer) -> Tensor {
    let first = one.first.as_ref().map_or_else(|| one.rows.narrow(0, 0, 0), Tensor::shallow_clone);
    let first = gather_rows(&world.cp, &first, &group.layout.last_row_counts());
    let rows = gather_rows(&world.cp, &one.rows, &answer.span.counts());
    Tensor::cat(&[first, rows], 0)
}

pub(crate) fn worst_gap(sampled: &[SampledAnswer], scores: &[Tensor]) -> f64 {
    sampled.iter().zip(scores).map(|(answer, scored)| rollout::gap(&answer.logprobs, scored)).fold(0.0, f64::max)
}

/// Sampled log-probabilities are those of the score pass; answers are the same alone and on all ranks, with windows and
/// without, whatever the page size.
pub(crate) fn as_scored(world: &mut World) {
    let window = json!({ "sliding_window": 9, "num_hidden_layers": 2 });
    for shape in [config("qwen3", &json!({})), config("mistral", &window), hybrid(&json!({}))] {
        let family = &shape["model_type"];
        for (kind, most) in [(Kind::Double, 1e-12), (Kind::Float, 1e-4)] {
            let model = Model::random(&shape, kind);
            for (prompt, page_size) in [(50, 7), (20, 64), (1, 3)] {
                let how = How { page_size, ..PLAIN };
                let (all, scores) = sample(world, &model, prompt, how, &request(true));
                let gap = worst_gap(&all, &scores);
                assert!(gap <= most, "{family} {kind:?} prompt {prompt}: {gap}");
                let ranks = world.all.size();
                world.cut(1, 1).expect("every rank by itself");
                let (alone, _) = sample(world, &model, prompt, how, &request(true));
                world.cut(ranks, 1).expect("all of them");
                let ids =
                    |sampled: &[SampledAnswer]| sampled.iter().map(|answer| answer.ids.clone()).collect::<Vec<_>>();
                assert_eq!(ids(&all), ids(&alone), "{family} {kind:?} prompt {prompt}");
                let told = world.all.gather_texts(&format!("{:?}", ids(&all)));
                assert!(told.iter().all(|other| *other == told[0]), "all ranks have the same answers");
                for (one, other) in all.iter().zip(&alone) {
                    let apart = rollout::gap(&one.logprobs, &Tensor::from_slice(&other.logprobs));
                    assert!(apart <= most, "{apart}");
                }
            }
        }
    }
}

/// Each sampled token's log-probability is what a whole-sequence pass under autograd has for it.
pub(crate) fn as_conventional(world: &mut World) {
    let model = Model::random(&config("qwen2", &json!({})), Kind::Double);
    let (sampled, _) = sample(world, &model, 33, PLAIN, &request(true));
    let prompt_ids = Group::random(2, 61, 33, &[1]).prompt_ids;
    let answers: Vec<Vec<i64>> = sampled.iter().map(|answer| answer.ids.clone()).collect();
    let whole = conventional::Group {
        prompt_ids: &prompt_ids,
        answers: &answers,
        tail: Tokens(0),
        temperature: HEAD.temperature,
    };
    for (index, answer) in sampled.iter().enumerate() {
        let expected = tch::no_grad(|| whole.logprobs(&*model.decoder, &model.adapters, index));
        let gap = rollout::gap(&answer.logprobs, &expected.detach());
        assert!(gap <= 1e-12, "answer {index}: {gap}");
    }
}

/// Ends belong to answers, nothing follows them, and what has none is cut off at the longest length.
pub(crate) fn ends(world: &mut World) {
    let model = Model::random(&config("llama", &json!({})), Kind::Float);
    let longest = Tokens(12);
    let (sampled, _) = sample(world, &model, 50, PLAIN, &SampleRequest { longest, ..request(true) });
    for answer in &sampled {
        let end = answer.ids.iter().position(|id| ENDS.contains(id));
        let length = from_index(answer.ids.len());
        match end {
            Some(at) => assert!(at + 1 == answer.ids.len() && !answer.truncated),
            None => assert!(Tokens(length) == longest && answer.truncated),
        }
        assert_eq!(answer.logprobs.len(), answer.ids.len());
        assert!(answer.entropy > 0.0 && answer.entropy <= most_entropy(length));
    }
    assert!(
        sampled.iter().any(|answer| answer.truncated) && sampled.iter().any(|answer| !answer.truncated),
        "{sampled:?}"
    );
    let different: std::collections::BTreeSet<_> = sampled.iter().map(|answer| &answer.ids).collect();
    assert_eq!(different.len(), sampled.len(), "answers of a group have noise of their own");
    let one = SampleRequest { longest: Tokens(1), ..request(true) };
    let (short, scores) = sample(world, &model, 50, PLAIN, &one);
    assert!(short.iter().all(|answer| answer.ids.len() == 1) && worst_gap(&short, &scores) <= 1e-4);
}

/// A few short answers: every token of a deep model is many messages.
fn few(keep_choices: bool) -> SampleRequest<'static> {
    let choices = if keep_choices { DrawnChoices::Use } else { DrawnChoices::Compare };
    SampleRequest { answers: 3, longest: Tokens(14), choices, ..request(true) }
}

/// With the keys and experts that were drawn, scores are the drawn log-probabilities to rounding: whatever ranks share the
/// prompt or the experts, and where answers grow beyond what an index chooses.
pub(crate) fn with_choices(world: &mut World) {
    let size = world.all.size();
    for config in [glm(&json!({})), mixture(&json!({})), hybrid_mixture(&json!({}))] {
        for (prompt, page_size) in [(50, 7), (3, 3)] {
            let how = How { page_size, ..PLAIN };
            let mut answers = Vec::new();
            for (ranks, ep) in [(1, 1), (size, 1), (size, 2)] {
                if !ranks.is_multiple_of(ep) {
                    continue;
                }
                world.cut(ranks, ep).expect("a divisor of the world");
                let model = Model::of(&config, Kind::Double, ExpertShare::of(&world.ep), &|_| {});
                let (sampled, scores) = sample(world, &model, prompt, how, &few(true));
                let gap = worst_gap(&sampled, &scores);
                assert!(gap <= 1e-12, "{}, prompt {prompt}, {ranks} ranks, ep {ep}: {gap}", config["model_type"]);
                answers.push(sampled.into_iter().map(|answer| answer.ids).collect::<Vec<_>>());
            }
            assert!(answers.iter().all(|other| *other == answers[0]), "{}: the same answers", config["model_type"]);
        }
    }
}

/// Every answer's choices of both kinds in all layers.
fn all_choices(model: &Model, group: &PlacedGroup, pool: &ChoicePool) -> Vec<Tensor> {
    let mut found = Vec::new();
    for layer in (0..model.decoder.layers()).map(LayerIndex) {
        for choice in [Choice::Index, Choice::Experts] {
            for (answer, _) in group.with_rows() {
                let staged = run(pool.of(answer).stage(choice, layer).map_err(Into::into));
                found.extend(staged.map(|chosen| chosen.copy()));
            }
        }
    }
    found
}

/// In bfloat16, rows one by one and rows in blocks choose differently where scores are nearly equal. Kept choices are what
/// sampling drew, after the score pass too; without them, the share that differs is counted.
pub(crate) fn changed_choices(world: &mut World) {
    let size = world.all.size();
    let answer = |sampled: SampledAnswer, number: usize| TrainedAnswer {
        ids: sampled.ids,
        mask: None,
        given: None,
        advantage: Some([1.0, -1.0, 0.5][number]),
        weight: 0.2,
    };
    let ep = if size.is_multiple_of(2) { 2 } else { 1 };
    world.cut(size, ep).expect("a divisor of the world");
    for config in [glm(&json!({})), mixture(&json!({}))] {
        let model = Model::of(&config, Kind::BFloat16, ExpertShare::of(&world.ep), &|_| {});
        let (sampled, drawn) = scored(world, &model, 50, PLAIN, &few(false));
        let (again, kept) = scored(world, &model, 50, PLAIN, &few(true));
        assert_eq!(sampled, again, "the same noise");
        assert!(kept.captured.drawn.is_none(), "kept choices are used");
        let drawn = all_choices(&model, &drawn.group, drawn.captured.drawn.as_ref().expect("drawn to be compared"));
        let kept = all_choices(&model, &kept.group, &kept.captured.choices);
        assert!(!drawn.is_empty() && drawn.len() == kept.len());
        assert!(drawn.iter().zip(&kept).all(|(drawn, kept)| drawn.equal(kept)), "score uses what was drawn");
        let ledger = Ledger::default();
        let prompt_ids = Group::random(2, 61, 50, &[1]).prompt_ids;
        let transaction = transaction(world, &model, PLAIN, &ledger);
        let outcome = run(transaction.run(&prompt_ids, Some(&few(false)), &mut observer(world), |_, answers| {
            let numbered = answers?.into_iter().enumerate();
            Ok(Verdict::Train(numbered.map(|(number, sampled)| answer(sampled, number)).collect()))
        }));
        let Outcome::Trained(trained) = outcome else { panic!("the answers are trained") };
        assert!(ratio_is_one(&trained.replayed), "{:?}", trained.replayed.ratio);
        let _ = own(&model.adapters);
        let of_all = |own: u64| world.cp.gather_numbers(own).iter().sum::<u64>();
        let choices = of_all(trained.changed.choices);
        let changed = of_all(trained.changed.changed);
        assert!(choices > 0 && changed <= choices, "{changed} of {choices}");
        if world.all.rank().0 == 0 {
            println!("{}: {changed} of {choices} choices that bfloat16 makes anew differ", config["model_type"]);
        }
    }
}

fn most_entropy(tokens: u64) -> f64 {
    longstraw::runtime::units::float(tokens) * 61f64.ln()
}

/// Pages that stay on the device and pages that come layer by layer give the same bits, and nothing stays behind.
pub(crate) fn residency(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Float);
    let (resident, _) = sample(world, &model, 50, PLAIN, &request(true));
    let (by_layer, _) = sample(world, &model, 50, PLAIN, &request(false));
    let on_device = How { keeping: Keeping { pages: Residency::Device, ..Keeping::HOST }, ..PLAIN };
    let (there_anyhow, _) = sample(world, &model, 50, on_device, &request(false));
    assert_eq!(resident, by_layer);
    assert_eq!(resident, there_anyhow);
}
