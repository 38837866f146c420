//! Tokens by the kernels of a decode step: where one rank holds all pages on its device, every token is one CUDA graph.
//!
//! ```text
//!   host     start token t+2 ─▶ read token t ─▶ start token t+3 ─▶ read token t+1 …
//!   device   … token t ─▶ token t+1 ─▶ token t+2 …
//! ```
//!
//! The device draws and goes on by itself; the host reads a token later and so learns a little late that an answer has ended.
//! What was drawn after its end is dropped, and its row stays until half of the rows are such; then those are taken out.

use std::collections::VecDeque;

use tch::{Kind, Tensor};

use super::answer::Origin;
use super::sampling::{self, Token};
use super::{Drawn, Rollout, SampledAnswer, Stream};
use crate::model::token::{self, TokenStep};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::{LayerIndex, Rank, as_dim, from_index};
use crate::tensor::boundary::storage_bytes;
use crate::tensor::decode::{DRAWN_NUMBERS, Drawing, Graph};
use crate::tensor::gpu::{self, Event};

/// Tokens that the device may be ahead of the host.
const AHEAD: usize = 3;

/// A decode step for the answers that go on, if there are kernels for it on every rank of the prompt. On a GPU every rank takes
/// part.
pub(super) fn begin<'a>(rollout: &Rollout<'a>) -> Option<TokenStep<'a>> {
    if !rollout.request.fused || rollout.calling.is_some() || !rollout.pass.decoder.device().is_cuda() {
        return None;
    }
    let drawn = token::Drawn { answers: rollout.live.len(), rows_max: rollout.request.longest, layout: rollout.layout };
    let step = TokenStep::new(rollout.pass, &drawn).unwrap_or_else(|error| {
        tracing::warn!("answers are drawn by single operations, several times slower: {error}");
        None
    });
    let axis = rollout.pass.cp_group.axis;
    let able = axis.all_gather(&[u8::from(step.is_some())], &vec![1; axis.size()]);
    step.filter(|_| able.iter().all(|&able| able == 1))
}

/// What is drawn, and how far the device and the host are.
struct Flight<'a> {
    step: TokenStep<'a>,
    drawing: Drawing,
    /// Bytes of it in the ledger.
    held: Held,
    /// Answer of each row; those that have ended stay until rows are taken out.
    rows: Vec<usize>,
    /// [tokens, rows, 3] in memory of the host.
    read_ta3: Tensor,
    graph: Option<Graph>,
    /// Whether graphs can be recorded.
    records: bool,
    /// Copies of tokens that have been started and not read, oldest first.
    open: VecDeque<Event>,
    /// Tokens that have been started, and read.
    started: usize,
    read: usize,
}

impl Drop for Flight<'_> {
    /// Tokens that nobody reads any more must end before their buffers are freed, also after a failure.
    fn drop(&mut self) {
        if let Err(error) = gpu::synchronize(self.drawing.tokens_a.device()) {
            tracing::warn!("tokens that were being drawn: {error}");
        }
    }
}

impl<'a> Rollout<'a> {
    /// All further tokens; `tokens` are the first ones, of the answers that go on.
    pub(super) fn all_fused(
        mut self,
        step: TokenStep<'a>,
        tokens: &[i64],
        tracker: &Tracker,
    ) -> Result<(Vec<SampledAnswer>, Option<Drawn>), Failure> {
        let rows = self.live.clone();
        let (drawing, held) = self.drawing(&rows);
        drawing.tokens_a.shallow_clone().copy_(&Tensor::from_slice(tokens));
        let read_ta3 = gpu::pinned_like(&drawing.drawn_ta3)?;
        // Beside other ranks or pages that come and go there is more in a token than kernels of the step.
        let records = self.pass.cp_group.axis.size() == 1 && self.staged.len() == self.pass.decoder.layers();
        let (open, graph) = (VecDeque::new(), None);
        let mut flight = Flight { step, drawing, held, rows, read_ta3, graph, records, open, started: 1, read: 1 };
        let ahead = if self.pass.cp_group.axis.size() == 1 { AHEAD } else { 1 };
        while !self.live.is_empty() {
            let crowded = 2 * self.live.len() <= flight.rows.len();
            if crowded && flight.open.is_empty() {
                self.take_out(&mut flight)?;
            }
            let more = !crowded || flight.open.is_empty();
            while more && flight.open.len() < ahead && from_index(flight.started) < self.request.longest.0 {
                tracker.layer(LayerIndex(0))?;
                self.start(&mut flight)?;
            }
            self.read(&mut flight)?;
        }
        // Tokens that nobody reads any more still run: what the device has to say of them is an error of this phase.
        gpu::synchronize(self.pass.decoder.device())?;
        drop(flight);
        Ok((self.sampled, self.drawn))
    }

    /// Noise and room for what is drawn for these rows.
    fn drawing(&self, rows: &[usize]) -> (Drawing, Held) {
        let device = self.pass.decoder.device();
        let sampled = self.request.answers.saturating_sub(self.request.greedy);
        let longest = self.request.longest.index();
        let root = |token: usize, answer: usize| {
            let stream: Stream = self.request.stream.part(from_index(answer)).part(from_index(token));
            stream.root().cast_signed()
        };
        let roots: Vec<i64> = (0..longest)
            .flat_map(|token| rows.iter().map(move |&answer| (token, answer)))
            .map(|(t, a)| root(t, a))
            .collect();
        let greedy: Vec<u8> = rows.iter().map(|&answer| u8::from(answer >= sampled)).collect();
        let shape = [longest, rows.len()].map(|size| as_dim(from_index(size)));
        let roots_ta = Tensor::from_slice(&roots).view(shape).to_device(device);
        let drawn = Tensor::zeros([shape[0], shape[1], DRAWN_NUMBERS], (Kind::Double, device));
        let greedy_a = Tensor::from_slice(&greedy).to_device(device);
        let drawing = Drawing::new(roots_ta, greedy_a, drawn, self.pass.decoder.vocabulary());
        let bytes = drawing.tensors().map(storage_bytes).sum();
        (drawing, self.pass.cp_group.ledger.hold(Purpose::Answers, MemorySpace::Device, bytes))
    }

    /// Starts one more token of every row.
    fn start(&self, flight: &mut Flight) -> Result<(), Failure> {
        if flight.step.is_full() {
            gpu::synchronize(self.pass.decoder.device())?;
            flight.graph = None;
            flight.step.grow();
        }
        if flight.records && flight.graph.is_none() {
            match flight.step.record(|| self.launches(flight).map_err(|failure| plain(&failure))) {
                Ok(graph) => flight.graph = Some(graph),
                Err(error) => {
                    tracing::warn!(
                        "a token cannot be recorded as a graph, its kernels are started one by one: {error}"
                    );
                    flight.records = false;
                }
            }
        }
        match &flight.graph {
            Some(graph) => graph.launch()?,
            None => self.launches(flight)?,
        }
        flight.step.advance();
        let token = as_dim(from_index(flight.started));
        let of = |x: &Tensor| x.narrow(0, token, 1);
        flight.open.push_back(gpu::copy_out(&of(&flight.read_ta3), &of(&flight.drawing.drawn_ta3))?);
        flight.started += 1;
        Ok(())
    }

    /// Every kernel of a token.
    fn launches(&self, flight: &Flight) -> Result<(), Failure> {
        let Flight { step, drawing, .. } = flight;
        step.begin(&drawing.tokens_a)?;
        for layer in 0..self.pass.decoder.layers() {
            let passing = self.passing(layer)?;
            step.layer(LayerIndex(layer), passing.as_ref().unwrap_or_else(|| &self.staged[layer]))?;
        }
        let sampling = &self.request.sampling;
        Ok(step.draw(self.head, sampling.top_p, sampling.top_k, drawing)?)
    }

    /// Reads the oldest token that was started.
    fn read(&mut self, flight: &mut Flight) -> Result<(), Failure> {
        let Some(done) = flight.open.pop_front() else { return Ok(()) };
        done.finish()?;
        let numbers = flight.read_ta3.get(as_dim(from_index(flight.read))).flatten(0, -1);
        flight.read += 1;
        let numbers = Vec::<f64>::try_from(numbers).unwrap_or_default();
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let axis = self.pass.cp_group.axis;
        if axis.size() > 1 {
            axis.broadcast(&mut bytes);
            let ids: Vec<i64> = sampling::tokens(&bytes).iter().map(|token| token.id).collect();
            if axis.rank() != Rank(0) {
                flight.drawing.tokens_a.shallow_clone().copy_(&Tensor::from_slice(&ids));
            }
        }
        let tokens: Vec<Token> = sampling::tokens(&bytes);
        for (&answer, token) in flight.rows.iter().zip(tokens) {
            let place = self.live.iter().position(|&other| other == answer);
            if let Some(place) = place
                && !self.take(answer, token, Origin::Drawn)?
            {
                self.live.remove(place);
            }
        }
        Ok(())
    }

    /// Takes the rows of answers that have ended out of all buffers. No token is open.
    fn take_out(&self, flight: &mut Flight) -> Result<(), Failure> {
        gpu::synchronize(self.pass.decoder.device())?;
        flight.graph = None;
        let places = flight.rows.iter().enumerate().filter(|(_, answer)| self.live.contains(answer));
        let places: Vec<i64> = places.map(|(row, _)| as_dim(from_index(row))).collect();
        let kept = Tensor::from_slice(&places).to_device(self.pass.decoder.device());
        flight.rows.clone_from(&self.live);
        let tokens_a = flight.drawing.tokens_a.index_select(0, &kept);
        (flight.drawing, flight.held) = self.drawing(&flight.rows);
        flight.drawing.tokens_a.shallow_clone().copy_(&tokens_a);
        flight.read_ta3 = gpu::pinned_like(&flight.drawing.drawn_ta3)?;
        flight.step.keep(&kept);
        Ok(())
    }
}

/// A recording knows errors of the boundary only; nothing else can fail while one runs.
fn plain(failure: &Failure) -> crate::tensor::Error {
    crate::tensor::Error::Torch { operation: "recording a token", message: failure.to_string() }
}
