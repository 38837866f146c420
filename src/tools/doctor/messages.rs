//! By which transport tensors will go between ranks that share a prompt, as a run will find it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Facts, Finding};
use crate::config::{RunConfig, When};
use crate::runtime::failure::Failure;
use crate::world::devices;

/// What one rank knows of the transport.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Road {
    /// `run.direct`; nothing stands for "auto".
    wanted: Option<bool>,
    /// Ranks that share a prompt.
    sharers: usize,
    /// Whether NCCL is there; without a GPU it is not looked for.
    nccl: bool,
}

impl Road {
    /// Of a configuration that fits `ranks` ranks.
    pub(super) fn of(config: &RunConfig, ranks: u64, nccl: bool) -> Road {
        let wanted = match config.run.direct {
            When::Always => Some(true),
            When::Never => Some(false),
            When::Auto => None,
        };
        Road { wanted, sharers: usize::try_from(config.cp_size(ranks)).unwrap_or(usize::MAX), nccl }
    }
}

/// The transport of all ranks, where they have GPUs and share prompts.
pub(super) fn finding(all: &[Facts]) -> Option<Finding> {
    let transports: Vec<&Road> = all.iter().filter_map(|facts| facts.transport.as_ref()).collect();
    let transport = transports.first().filter(|transport| transport.sharers > 1)?;
    if transports.len() < all.len() || all.iter().any(|facts| facts.gpu.is_none()) {
        return None;
    }
    if transport.wanted == Some(false) {
        return Some(Finding::ok("messages", "through host memory, as run.direct = false asks"));
    }
    let missing = transports.iter().position(|transport| !transport.nccl);
    let (obstacle, fix) = match (missing, shared(all, transport.sharers)) {
        (Some(rank), _) => {
            let fix = "put libnccl.so.2 where libtorch's GPU build finds it (make gpu, or LD_LIBRARY_PATH); or plan with \
                       --set run.direct=false, which counts messages";
            (format!("NCCL is missing on rank {rank}"), fix)
        }
        (None, Some((first, second))) => {
            let fix = "give every rank a GPU of its own; or plan with --set run.direct=false, which counts messages";
            (format!("ranks {first} and {second} share a GPU"), fix)
        }
        (None, None) => return Some(Finding::ok("messages", "from GPU to GPU, by NCCL")),
    };
    Some(match transport.wanted {
        Some(true) => Finding::failed("messages", &Failure::from(devices::Error::NoTransport)),
        _ => Finding::warn("messages", format!("{obstacle}: through host memory, which is several times slower"), fix),
    })
}

/// Two ranks of one prompt that drive one GPU.
fn shared(all: &[Facts], sharers: usize) -> Option<(usize, usize)> {
    all.chunks(sharers).enumerate().find_map(|(group, ranks)| {
        let mut drivers = BTreeMap::new();
        ranks.iter().enumerate().find_map(|(index, facts)| {
            let second = group * sharers + index;
            drivers.insert((&facts.host, &facts.gpu), second).map(|first| (first, second))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(gpu: &str) -> Facts {
        let transport = Road { wanted: None, sharers: 2, nccl: true };
        Facts { transport: Some(transport), ..crate::tools::doctor::together::tests::rank("a", Some(gpu)) }
    }

    fn told(all: &[Facts]) -> String {
        finding(all).map(|finding| finding.to_string()).unwrap_or_default()
    }

    fn with(mut all: Vec<Facts>, change: impl Fn(usize, &mut Road)) -> Vec<Facts> {
        for (rank, facts) in all.iter_mut().enumerate() {
            if let Some(transport) = &mut facts.transport {
                change(rank, transport);
            }
        }
        all
    }

    #[test]
    fn the_road_from_gpu_to_gpu_is_told_with_what_stands_in_its_way() {
        assert_eq!(told(&[rank("1"), rank("2")]), "ok    messages        from GPU to GPU, by NCCL");
        let lacking = with(vec![rank("1"), rank("2")], |rank, transport| transport.nccl = rank == 0);
        assert!(told(&lacking).starts_with("warn  messages        NCCL is missing on rank 1: through host memory"));
        let wanted = with(lacking, |_, transport| transport.wanted = Some(true));
        assert!(told(&wanted).starts_with("FAIL  messages        run.direct = true and there is no transport"));
        let crowded = told(&[rank("1"), rank("2"), rank("3"), rank("3")]);
        assert!(crowded.starts_with("warn  messages        ranks 2 and 3 share a GPU: through host"), "{crowded}");
        // Ranks of different prompts send each other no tensors.
        assert!(told(&[rank("1"), rank("2"), rank("1"), rank("2")]).ends_with("by NCCL"));
    }

    #[test]
    fn a_road_that_is_not_wanted_or_not_needed_is_no_warning() {
        let refused = with(vec![rank("1"), rank("1")], |_, transport| transport.wanted = Some(false));
        assert_eq!(told(&refused), "ok    messages        through host memory, as run.direct = false asks");
        let alone = with(vec![rank("1"), rank("1")], |_, transport| transport.sharers = 1);
        assert_eq!(finding(&alone), None);
        let mut uneven = vec![rank("1"), rank("2")];
        uneven[1].gpu = None;
        assert_eq!(finding(&uneven), None);
    }
}
