//! One token from a distribution.

use tch::{Kind, Tensor};

use super::noise::{Stream, gumbel};

/// From which tokens one is sampled. The temperature is the head's, since scores share it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The most probable tokens that together reach this probability, at least one; 1: all.
    pub top_p: f64,
    /// So many of the most probable tokens; 0: all.
    pub top_k: u64,
}

/// A sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) id: i64,
    /// Under the whole distribution.
    pub(super) logprob: f64,
    /// Of the whole distribution, nats.
    pub(super) entropy: f64,
}

/// Bytes of a token on the wire.
pub(super) const TOKEN_BYTES: usize = 24;

/// One token from each row of log-probabilities [answers, v], as bytes. A row without a stream gets its most probable token.
pub(super) fn sample(logprobs_av: &Tensor, streams: &[Option<Stream>], sampling: &Sampling) -> Vec<u8> {
    let device = logprobs_av.device();
    let entries = Tensor::arange(logprobs_av.size()[1], (Kind::Int64, device));
    let wide = logprobs_av.to_kind(Kind::Double);
    let roots: Vec<Stream> = streams.iter().map(|stream| stream.unwrap_or(Stream::of_seed(0))).collect();
    let is_greedy: Vec<bool> = streams.iter().map(Option::is_none).collect();
    let is_greedy_a1 = Tensor::from_slice(&is_greedy).unsqueeze(1).to_device(device);
    let noise_av = gumbel(&roots, &entries).masked_fill(&is_greedy_a1, 0.0);
    let chosen = (candidates(&wide, sampling) + noise_av).argmax(-1, true);
    let logprobs = wide.gather(1, &chosen, false);
    // 0 · −∞ is no entropy; a NaN stays and shows itself.
    let terms = (wide.exp() * &wide).masked_fill(&wide.isneginf(), 0.0);
    let entropy = -terms.sum_dim_intlist(-1i64, true, Kind::Double);
    let numbers = |x: &Tensor| Vec::<f64>::try_from(x.squeeze_dim(1)).unwrap_or_default();
    let ids = Vec::<i64>::try_from(chosen.squeeze_dim(1)).unwrap_or_default();
    let rows = ids.into_iter().zip(numbers(&logprobs)).zip(numbers(&entropy));
    rows.flat_map(|((id, logprob), entropy)| [id.to_le_bytes(), logprob.to_le_bytes(), entropy.to_le_bytes()].concat())
        .collect()
}

/// The tokens that [`sample`] has written.
pub(super) fn tokens(bytes: &[u8]) -> Vec<Token> {
    let word = |token: &[u8], at: usize| -> [u8; 8] { std::array::from_fn(|byte| token[8 * at + byte]) };
    let token = |token: &[u8]| Token {
        id: i64::from_le_bytes(word(token, 0)),
        logprob: f64::from_le_bytes(word(token, 1)),
        entropy: f64::from_le_bytes(word(token, 2)),
    };
    bytes.chunks_exact(TOKEN_BYTES).map(token).collect()
}

/// The bytes of tokens, as [`sample`] writes them.
pub(super) fn bytes(tokens: &[Token]) -> Vec<u8> {
    let words = |token: &Token| [token.id.to_le_bytes(), token.logprob.to_le_bytes(), token.entropy.to_le_bytes()];
    tokens.iter().flat_map(|token| words(token).concat()).collect()
}

/// Log-probabilities of the tokens that may be sampled, −∞ for the others. Of two that are equally probable the one with the
/// lower id goes first.
fn candidates(logprobs_av: &Tensor, sampling: &Sampling) -> Tensor {
    let entries = logprobs_av.size()[1];
    let top_k = i64::try_from(sampling.top_k).unwrap_or(i64::MAX);
    let all_k = top_k == 0 || top_k >= entries;
    if all_k && sampling.top_p >= 1.0 {
        return logprobs_av.shallow_clone();
    }
    let (sorted, order) = logprobs_av.sort_stable(true, -1, true);
    let mut left = sorted.isfinite();
    if !all_k {
        let _ = left.narrow(1, top_k, entries - top_k).fill_(0);
    }
    if sampling.top_p < 1.0 {
        // A token stays while those before it have not reached the probability, so the first one always does. The sum is
        // taken over what the first rule leaves.
        let kept = sorted.masked_fill(&left.logical_not(), f64::NEG_INFINITY);
        let share = kept.softmax(-1, Kind::Double);
        let before = share.cumsum(-1, Kind::Double) - &share;
        left = left.logical_and(&before.lt(sampling.top_p));
    }
    let kept = sorted.masked_fill(&left.logical_not(), f64::NEG_INFINITY);
    logprobs_av.full_like(f64::NEG_INFINITY).scatter(1, &order, &kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sampling = Sampling { top_p: 1.0, top_k: 0 };

    fn row(probabilities: &[f64]) -> Tensor {
        Tensor::from_slice(probabilities).log().unsqueeze(0)
    }

    fn finite(logprobs: &Tensor, sampling: Sampling) -> Vec<i64> {
        let left = candidates(logprobs, &sampling).squeeze_dim(0).isfinite().nonzero().squeeze_dim(1);
        Vec::<i64>::try_from(left).unwrap()
    }

    #[test]
    fn a_row_without_a_stream_takes_the_most_probable_token_whatever_the_others_take() {
        let logprobs = Tensor::cat(&[row(&[0.3, 0.4, 0.3]), row(&[0.3, 0.4, 0.3])], 0);
        let root = Stream::of_seed(4);
        let both: Vec<Vec<Token>> =
            (0..50).map(|index| tokens(&sample(&logprobs, &[Some(root.part(index)), None], &ALL))).collect();
        assert!(both.iter().all(|tokens| tokens[1].id == 1));
        assert!([0, 1, 2].iter().all(|id| both.iter().any(|tokens| tokens[0].id == *id)));
        let alone = |index: u64| tokens(&sample(&row(&[0.3, 0.4, 0.3]), &[Some(root.part(index))], &ALL))[0];
        assert!((0..50).all(|index| both[usize::try_from(index).unwrap()][0].id == alone(index).id));
    }

    #[test]
    fn frequencies_are_the_probabilities() {
        let probabilities = [0.5, 0.3, 0.15, 0.05];
        let (logprobs, root) = (row(&probabilities), Stream::of_seed(11));
        let mut counts = [0.0; 4];
        for index in 0..4_000 {
            let token = tokens(&sample(&logprobs, &[Some(root.part(index))], &ALL))[0];
            counts[usize::try_from(token.id).unwrap()] += 1.0 / 4_000.0;
            assert!((token.logprob - probabilities[usize::try_from(token.id).unwrap()].ln()).abs() < 1e-15);
            let entropy: f64 = -probabilities.iter().map(|p| p * p.ln()).sum::<f64>();
            assert!((token.entropy - entropy).abs() < 1e-12);
        }
        // Four standard deviations.
        for (count, p) in counts.iter().zip(probabilities) {
            assert!((count - p).abs() < 4.0 * (p * (1.0 - p) / 4_000.0).sqrt(), "{counts:?}");
        }
    }

    #[test]
    fn top_k_and_top_p_leave_the_most_probable_and_at_least_one() {
        let logprobs = row(&[0.1, 0.4, 0.2, 0.3]);
        assert_eq!(finite(&logprobs, ALL), [0, 1, 2, 3]);
        assert_eq!(finite(&logprobs, Sampling { top_k: 2, ..ALL }), [1, 3]);
        assert_eq!(finite(&logprobs, Sampling { top_k: 9, ..ALL }), [0, 1, 2, 3]);
        assert_eq!(finite(&logprobs, Sampling { top_p: 0.5, ..ALL }), [1, 3]);
        assert_eq!(finite(&logprobs, Sampling { top_p: 0.71, ..ALL }), [1, 2, 3]);
        assert_eq!(finite(&logprobs, Sampling { top_p: 1e-9, ..ALL }), [1]);
        // Of the two that the first rule leaves, the first has 4/7.
        assert_eq!(finite(&logprobs, Sampling { top_p: 0.5, top_k: 2 }), [1]);
        assert_eq!(finite(&row(&[0.25; 4]), Sampling { top_k: 2, ..ALL }), [0, 1], "equals go by the lowest id");
    }

    #[test]
    fn a_token_that_may_not_be_sampled_never_is() {
        let logprobs = row(&[0.4, 0.35, 0.25]);
        for index in 0..500 {
            let sampled = sample(&logprobs, &[Some(Stream::of_seed(1).part(index))], &Sampling { top_k: 2, ..ALL });
            assert_ne!(tokens(&sampled)[0].id, 2);
        }
    }

    #[test]
    fn a_distribution_that_is_none_shows_itself() {
        let broken = Tensor::from_slice(&[0.0, f64::NAN]).unsqueeze(0);
        assert!(tokens(&sample(&broken, &[Some(Stream::of_seed(1))], &ALL))[0].entropy.is_nan());
    }
}
