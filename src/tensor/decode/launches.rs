//! Each kernel of a decode step with its tensors. Sizes are checked here; shapes of launches stand in `shapes`.

use std::ffi::c_int;
use std::ptr::null_mut;

use tch::{Kind, Tensor};

use super::arguments::{self, Rows, Run};
use super::shapes::{self, AttendSizes, Shares};
use super::{
    ANSWERS_MAX, CHUNK_ENTRIES, CHUNK_PARTS, COLUMN, DRAWN_NUMBERS, Kernels, Norm, OwnRows, Parts, PromptRun, Raw, Up,
    count, pointer, pointer_or_null, single,
};
use crate::tensor::Error;

/// Most weights of one product.
const WEIGHTS_MAX: usize = 8;

/// Stops a program that would let a kernel read or write beyond its tensors.
fn require(fits: bool, what: &str) {
    assert!(fits, "a kernel of a decode step takes {what}");
}

impl Raw {
    /// Sums of `width` columns within `flat`, float32 of any size that suffices.
    #[must_use]
    pub fn within(flat: &Tensor, splits: i64, answers: i64, width: i64) -> Raw {
        Raw(flat.narrow(0, 0, splits * answers * width).view([splits, answers, width]))
    }

    fn answers(&self) -> i64 {
        self.0.size()[1]
    }

    fn width(&self) -> i64 {
        self.0.size()[2]
    }
}

/// The column after `outputs` columns from `column` on, where the next weight may begin.
#[must_use]
pub fn next_column(column: i64, outputs: i64) -> i64 {
    (column + outputs).div_euclid(COLUMN) * COLUMN + if (column + outputs) % COLUMN == 0 { 0 } else { COLUMN }
}

/// Input, weights and columns of a product: every weight is [outputs, inputs], and its outputs begin at a column.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the type's comment explains them")]
pub struct Product<'a> {
    pub x_ai: &'a Tensor,
    pub weights: &'a [(&'a Tensor, i64)],
    pub raw: &'a Raw,
}

/// What is added to the residual stream, and what is normed of it.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// Sums that are added, with their bias and adapter; `None`: nothing is.
    pub sums: Option<(&'a Raw, Option<&'a Tensor>, Option<Up<'a>>)>,
    /// The residual stream, [answers, w].
    pub x_aw: &'a Tensor,
    /// Its norm, [answers, w].
    pub h_aw: &'a Tensor,
    /// Norm of what is added.
    pub norm_out: Option<Norm<'a>>,
    /// Norm of the stream.
    pub norm: Norm<'a>,
}

/// From raw sums to rotated queries, and keys and values on the answers' planes.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// Raw sums of the three projections.
    pub raw: &'a Raw,
    /// Where queries, keys and values begin, their biases and adapters.
    pub parts: [(i64, Option<&'a Tensor>, Option<Up<'a>>); 3],
    /// Of queries and keys, by head.
    pub norms: [Option<Norm<'a>>; 2],
    /// Inverse frequencies, [rotary / 2] float32.
    pub frequencies_d: &'a Tensor,
    /// On cosine and sine.
    pub gain: f64,
    /// Queries, [answers, h, d].
    pub q_ahd: &'a Tensor,
    /// The answers' planes.
    pub own: &'a OwnRows,
    /// The row that is computed, [1] int64.
    pub at: &'a Tensor,
}

/// Partial attention over this rank's prompt rows and the answers' own.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// [answers, h, d]
    pub q_ahd: &'a Tensor,
    /// At most two, in position order.
    pub runs: &'a [PromptRun],
    /// The answers' planes.
    pub own: &'a OwnRows,
    /// Keys that a row sees, itself included; `None`: all.
    pub window: Option<i64>,
    /// Factor on the scores before the softmax.
    pub scale: f64,
    /// The row that is computed, [1] int64.
    pub at: &'a Tensor,
    /// Written; as many as `shares` says.
    pub parts: &'a Parts,
    /// How many are over the prompt, and over own rows.
    pub shares: Shares,
}

/// From raw sums of gate and up projection to the input of the down projection.
#[derive(Clone, Copy, Debug)]
pub struct Activate<'a> {
    /// Raw sums of both projections.
    pub raw: &'a Raw,
    /// Where gate and up projection begin, and their adapters.
    pub parts: [(i64, Option<Up<'a>>); 2],
    /// Whether the activation is gelu in its tanh form; else silu.
    pub gelu: bool,
    /// What the down projection reads, [answers, f].
    pub h_af: &'a Tensor,
}

/// From which tokens one is drawn.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say what is not described")]
pub struct Choice {
    /// Logits z become cap · tanh(z / cap).
    pub cap: Option<f64>,
    pub temperature: f64,
    /// Probability that the most probable tokens reach together; 1: all tokens.
    pub top_p: f64,
    /// So many of the most probable tokens; 0: all tokens.
    pub top_k: i64,
}

/// Scratch and output of drawing a token of each answer.
#[derive(Debug)]
pub struct Drawing {
    /// Noise of each token and answer, [tokens, answers] int64.
    pub roots_ta: Tensor,
    /// Which answers take the most probable token, [answers] uint8.
    pub greedy_a: Tensor,
    /// What the answers read next, [answers] int64.
    pub tokens_a: Tensor,
    /// Id as bits of an int64, log-probability, entropy: [tokens, answers, 3] float64.
    pub drawn_ta3: Tensor,
    logits_av: Tensor,
    parts: Tensor,
    best: Tensor,
}

impl Drawing {
    /// Room for a vocabulary of `vocabulary` entries.
    #[must_use]
    pub fn new(roots_ta: Tensor, greedy_a: Tensor, drawn_ta3: Tensor, vocabulary: i64) -> Drawing {
        let device = roots_ta.device();
        let answers = roots_ta.size()[1];
        let wide = (Kind::Double, device);
        Drawing {
            tokens_a: Tensor::zeros([answers], (Kind::Int64, device)),
            logits_av: Tensor::empty([answers, vocabulary], (Kind::Float, device)),
            parts: Tensor::empty([answers, chunks_of(vocabulary), CHUNK_PARTS], wide),
            best: Tensor::empty([answers, 2], wide),
            roots_ta,
            greedy_a,
            drawn_ta3,
        }
    }
}

impl Drawing {
    /// Every tensor of it.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let Drawing { roots_ta, greedy_a, tokens_a, drawn_ta3, logits_av, parts, best } = self;
        [roots_ta, greedy_a, tokens_a, drawn_ta3, logits_av, parts, best].into_iter()
    }
}

fn chunks_of(vocabulary: i64) -> i64 {
    vocabulary.div_euclid(CHUNK_ENTRIES) + i64::from(vocabulary % CHUNK_ENTRIES > 0)
}

impl Kernels {
    /// x = embedding[token], times `scale` where there is one.
    ///
    /// # Errors
    /// When the driver refuses; so it is below.
    pub fn embed(
        &self,
        tokens_a: &Tensor,
        embedding_vw: &Tensor,
        x_aw: &Tensor,
        scale: Option<f64>,
    ) -> Result<(), Error> {
        let (answers, width) = (x_aw.size()[0], x_aw.size()[1]);
        require(embedding_vw.size()[1] == width && tokens_a.size() == [answers], "one token and one row an answer");
        self.of_dtype(&[embedding_vw, x_aw]);
        let mut argument = arguments::Embed {
            tokens_a: pointer(tokens_a),
            embedding_vw: pointer(embedding_vw),
            x_aw: pointer(x_aw),
            scale: single(scale.unwrap_or(1.0)),
            answers: count(answers),
            width: count(width),
        };
        let shape = shapes::embed(answers, width);
        self.start(c"embed", &shape, &mut argument, &[tokens_a, embedding_vw, x_aw])
    }

    /// Raw sums of a product.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn product(&self, product: &Product) -> Result<(), Error> {
        let Product { x_ai, weights, raw } = *product;
        let (answers, inputs) = (x_ai.size()[0], x_ai.size()[1]);
        require(weights.len() <= WEIGHTS_MAX && raw.answers() == answers && answers <= ANSWERS_MAX, "a small product");
        let mut rows = [Rows::NONE; WEIGHTS_MAX];
        for (row, &(weight, column)) in rows.iter_mut().zip(weights) {
            let outputs = weight.size()[0];
            require(weight.size()[1] == inputs && column + outputs <= raw.width(), "a weight of these inputs");
            *row = Rows { weight: pointer(weight), outputs: count(outputs), column: count(column) };
        }
        let tensors: Vec<&Tensor> = weights.iter().map(|(weight, _)| *weight).chain([x_ai]).collect();
        self.of_dtype(&tensors);
        let mut argument = arguments::Product {
            x_ai: pointer(x_ai),
            raw: Kernels::raw(raw),
            answers: count(answers),
            inputs: count(inputs),
            parts: count(i64::try_from(weights.len()).unwrap_or(0)),
            rows,
        };
        let outputs: Vec<i64> = weights.iter().map(|(weight, _)| weight.size()[0]).collect();
        let shape = shapes::product(self.processors, self.kind, answers, inputs, &outputs, raw.0.size()[0]);
        self.start(c"product", &shape, &mut argument, &[&tensors[..], &[&raw.0]].concat())
    }

    /// Adds to the residual stream, and norms it.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn residual(&self, residual: &Residual) -> Result<(), Error> {
        let Residual { sums, x_aw, h_aw, norm_out, norm } = *residual;
        let (answers, width) = (x_aw.size()[0], x_aw.size()[1]);
        require(h_aw.size() == x_aw.size(), "as many normed rows");
        let no_sums = arguments::Raw { sums: null_mut(), splits: 0, width: 0 };
        let (raw, bias, up) = sums.map_or((None, None, None), |(raw, bias, up)| (Some(raw), bias, up));
        require(raw.is_none_or(|raw| raw.answers() == answers && raw.width() >= width), "sums of these rows");
        let norms = norm_out.iter().chain([&norm]).map(|norm| norm.weight_w);
        let mut tensors: Vec<&Tensor> = norms.chain(bias).chain(up.map(|up| up.b_or)).chain([x_aw, h_aw]).collect();
        self.of_dtype(&tensors);
        let mut argument = arguments::Residual {
            raw: raw.map_or(no_sums, Kernels::raw),
            adapter: Kernels::up(up),
            bias_w: pointer_or_null(bias),
            x_aw: pointer(x_aw),
            h_aw: pointer(h_aw),
            norm_out: Kernels::norm(norm_out),
            norm: Kernels::norm(Some(norm)),
            answers: count(answers),
            width: count(width),
        };
        tensors.extend(raw.map(|raw| &raw.0));
        let shape = shapes::residual(answers, self.clusters);
        self.start(c"residual", &shape, &mut argument, &tensors)
    }

    /// Queries, keys and values of the raw sums.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn heads(&self, heads: &Heads) -> Result<(), Error> {
        let Heads { raw, parts, norms, frequencies_d, gain, q_ahd, own, at } = *heads;
        let (answers, query_heads, dim) = (q_ahd.size()[0], q_ahd.size()[1], q_ahd.size()[2]);
        let groups = own.k_arg.size()[2];
        require(raw.answers() == answers && 2 * frequencies_d.size()[0] <= dim, "queries of these answers");
        own.fits(answers, dim);
        let optional = parts.iter().flat_map(|(_, bias, up)| [*bias, up.map(|up| up.b_or)]);
        let optional = optional.chain(norms.map(|norm| norm.map(|norm| norm.weight_w))).flatten();
        let mut tensors: Vec<&Tensor> = optional.chain([q_ahd, &own.k_arg, &own.v_arg]).collect();
        self.of_dtype(&tensors);
        let mut argument = arguments::Heads {
            raw: Kernels::raw(raw),
            columns: parts.map(|(column, ..)| count(column)),
            adapters: parts.map(|(.., up)| Kernels::up(up)),
            biases: parts.map(|(_, bias, _)| pointer_or_null(bias)),
            norms: norms.map(Kernels::norm),
            frequencies: pointer(frequencies_d),
            gain: single(gain),
            rotary: count(2 * frequencies_d.size()[0]),
            q_ahd: pointer(q_ahd),
            own_k: pointer(&own.k_arg),
            own_v: pointer(&own.v_arg),
            room: own.k_arg.size()[1],
            first: own.rank,
            step: own.ranks,
            prompt_end: own.prompt_end,
            at: pointer(at),
            answers: count(answers),
            queries: count(query_heads),
            groups: count(groups),
        };
        tensors.extend([frequencies_d, at, &raw.0]);
        let shape = shapes::heads(answers, query_heads, groups);
        self.start(c"heads", &shape, &mut argument, &tensors)
    }

    /// Attention of every part by itself, with its log-sum-exp.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn attend(&self, attend: &Attend) -> Result<(), Error> {
        let Attend { q_ahd, runs: prompt, own, window, scale, at, parts, shares } = *attend;
        let (answers, heads, dim) = (q_ahd.size()[0], q_ahd.size()[1], q_ahd.size()[2]);
        let groups = own.k_arg.size()[2];
        own.fits(answers, dim);
        require(parts.out_pahd.size() == [shares.all(), answers, heads, dim], "parts of these queries");
        let mut runs = [Run::NONE; 2];
        require(prompt.len() <= runs.len() && heads % groups == 0, "two runs at most, and whole groups of heads");
        for (run, rows) in runs.iter_mut().zip(prompt) {
            require(rows.k_sgd.size()[1..] == [groups, dim] && rows.v_sgd.size() == rows.k_sgd.size(), "prompt rows");
            let (k_sgd, v_sgd) = (pointer(&rows.k_sgd), pointer(&rows.v_sgd));
            *run = Run { k_sgd, v_sgd, start: rows.start, rows: rows.k_sgd.size()[0] };
        }
        let planes = prompt.iter().flat_map(|run| [&run.k_sgd, &run.v_sgd]);
        let mut tensors: Vec<&Tensor> = planes.chain([q_ahd, &own.k_arg, &own.v_arg]).collect();
        self.of_dtype(&tensors);
        let prompt_rows = prompt.iter().map(|run| run.k_sgd.size()[0]).sum();
        let room = own.k_arg.size()[1];
        let sizes = AttendSizes { heads_each: heads / groups, groups, head_dim: dim, prompt_rows, room, window };
        let mut argument = arguments::Attend {
            q_ahd: pointer(q_ahd),
            runs,
            prompt_parts: shares.prompt,
            own_parts: shares.own,
            own_k: pointer(&own.k_arg),
            own_v: pointer(&own.v_arg),
            room,
            first: own.rank,
            step: own.ranks,
            prompt_end: own.prompt_end,
            window: window.unwrap_or(0),
            at: pointer(at),
            scale: single(scale),
            answers: count(answers),
            heads: count(heads),
            groups: count(groups),
            out_pahd: pointer(&parts.out_pahd),
            lse_pah: pointer(&parts.lse_pah),
        };
        tensors.extend([at, &parts.out_pahd, &parts.lse_pah]);
        let shape = shapes::attend(answers, &sizes, self.kind, shares);
        self.start(c"attend", &shape, &mut argument, &tensors)
    }

    /// Merges parts in their order, to `whole_an` in the model's dtype, [answers, h · d].
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn merge(&self, parts: &Parts, whole_an: &Tensor) -> Result<(), Error> {
        self.of_dtype(&[whole_an]);
        let size = parts.out_pahd.size();
        require(whole_an.size() == [size[1], size[2] * size[3]], "one row an answer");
        self.merged(parts, Some(whole_an), None)
    }

    /// Merges parts in their order to one part.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn merge_own(&self, parts: &Parts, part: &Parts) -> Result<(), Error> {
        require(part.out_pahd.size()[1..] == parts.out_pahd.size()[1..], "one part of the same rows");
        self.merged(parts, None, Some(part))
    }

    fn merged(&self, parts: &Parts, whole_an: Option<&Tensor>, part: Option<&Parts>) -> Result<(), Error> {
        let (answers, heads) = (parts.out_pahd.size()[1], parts.out_pahd.size()[2]);
        let mut argument = arguments::Merge {
            out_pahd: pointer(&parts.out_pahd),
            lse_pah: pointer(&parts.lse_pah),
            parts: parts.out_pahd.size()[0],
            whole_an: pointer_or_null(whole_an),
            out_ahd: pointer_or_null(part.map(|part| &part.out_pahd)),
            lse_ah: pointer_or_null(part.map(|part| &part.lse_pah)),
            answers: count(answers),
            heads: count(heads),
        };
        let written = part.into_iter().flat_map(|part| [&part.out_pahd, &part.lse_pah]).chain(whole_an);
        let tensors: Vec<&Tensor> = written.chain([&parts.out_pahd, &parts.lse_pah]).collect();
        let shape = shapes::merge(answers, heads, parts.out_pahd.size()[3]);
        self.start(c"merge", &shape, &mut argument, &tensors)
    }

    /// The gated input of the down projection.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn activate(&self, activate: &Activate) -> Result<(), Error> {
        let Activate { raw, parts, gelu, h_af } = *activate;
        let (answers, width) = (h_af.size()[0], h_af.size()[1]);
        require(raw.answers() == answers, "sums of these answers");
        let ups = parts.iter().filter_map(|(_, up)| up.map(|up| up.b_or));
        let mut tensors: Vec<&Tensor> = ups.chain([h_af]).collect();
        self.of_dtype(&tensors);
        let mut argument = arguments::Activate {
            raw: Kernels::raw(raw),
            columns: parts.map(|(column, _)| count(column)),
            adapters: parts.map(|(_, up)| Kernels::up(up)),
            h_af: pointer(h_af),
            gelu: c_int::from(gelu),
            answers: count(answers),
            width: count(width),
        };
        tensors.push(&raw.0);
        let shape = shapes::activate(answers, width);
        self.start(c"activate", &shape, &mut argument, &tensors)
    }

    /// Draws a token of each answer from the head's raw sums, and goes to the next row.
    ///
    /// # Errors
    /// As [`Kernels::embed`].
    pub fn sample(&self, raw: &Raw, choice: &Choice, drawing: &Drawing, at: &Tensor) -> Result<(), Error> {
        let (answers, vocabulary) = (drawing.logits_av.size()[0], drawing.logits_av.size()[1]);
        require(raw.answers() == answers && raw.width() >= vocabulary, "sums of the whole vocabulary");
        require(
            drawing.drawn_ta3.size() == [&drawing.roots_ta.size()[..], &[DRAWN_NUMBERS]].concat()
                && drawing.drawn_ta3.size()[1] == answers,
            "as many tokens as noise",
        );
        let mut argument = arguments::Sample {
            raw: Kernels::raw(raw),
            cap: single(choice.cap.unwrap_or(0.0)),
            temperature: single(choice.temperature),
            top_p: choice.top_p,
            top_k: choice.top_k,
            roots: pointer(&drawing.roots_ta),
            greedy_a: pointer(&drawing.greedy_a),
            logits_av: pointer(&drawing.logits_av),
            parts: pointer(&drawing.parts),
            best: pointer(&drawing.best),
            tokens_a: pointer(&drawing.tokens_a),
            drawn: pointer(&drawing.drawn_ta3),
            at: pointer(at),
            answers: count(answers),
            vocabulary: count(vocabulary),
            chunks: count(chunks_of(vocabulary)),
        };
        let tensors: Vec<&Tensor> = drawing.tensors().chain([&raw.0, at]).collect();
        self.start(c"sample_scan", &shapes::scan(answers, chunks_of(vocabulary)), &mut argument, &tensors)?;
        if choice.top_k > 0 || choice.top_p < 1.0 {
            self.start(c"sample_restricted", &shapes::rows_of_1024(answers), &mut argument, &tensors)?;
        }
        self.start(c"sample_choose", &shapes::rows_of_1024(1), &mut argument, &tensors)
    }

    fn of_dtype(&self, tensors: &[&Tensor]) {
        require(tensors.iter().all(|x| x.kind() == self.kind), "tensors of the model's dtype");
    }
}

impl OwnRows {
    fn fits(&self, answers: i64, dim: i64) {
        let size = self.k_arg.size();
        require(size[0] == answers && size[3] == dim && self.v_arg.size() == size, "rows of these answers");
    }
}
