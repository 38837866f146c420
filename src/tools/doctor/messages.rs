//! The transport that a run will find between ranks that share a prompt.

use std::collections::BTreeMap;

use super::facts::{Facts, Transport};
use super::finding::Finding;
use crate::runtime::failure::Failure;
use crate::world::devices;

/// The finding about the transport; `None` where ranks have no GPUs or share no prompts.
pub(super) fn finding(all: &[Facts]) -> Option<Finding> {
    let transports: Vec<&Transport> = all.iter().filter_map(|facts| facts.transport.as_ref()).collect();
    let transport = transports.first().filter(|transport| transport.cp_size > 1)?;
    if transports.len() < all.len() || all.iter().any(|facts| facts.gpu.is_none()) {
        return None;
    }
    if transport.direct == Some(false) {
        return Some(Finding::ok("messages", "through host memory, as run.direct = false asks"));
    }
    let without_nccl = transports.iter().position(|transport| !transport.nccl);
    let (obstacle, fix) = match (without_nccl, ranks_on_one_gpu(all, transport.cp_size)) {
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
    Some(match transport.direct {
        Some(true) => Finding::failed("messages", &Failure::from(devices::Error::NoTransport)),
        _ => Finding::warn("messages", format!("{obstacle}: through host memory, which is several times slower"), fix),
    })
}

/// Two ranks of one prompt that use one GPU.
fn ranks_on_one_gpu(all: &[Facts], cp_size: usize) -> Option<(usize, usize)> {
    all.chunks(cp_size).enumerate().find_map(|(group, ranks)| {
        let mut users = BTreeMap::new();
        ranks.iter().enumerate().find_map(|(index, facts)| {
            let second = group * cp_size + index;
            users.insert((&facts.host, &facts.gpu), second).map(|first| (first, second))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(gpu: &str) -> Facts {
        let transport = Transport { direct: None, cp_size: 2, nccl: true };
        Facts { transport: Some(transport), ..crate::tools::doctor::together::tests::rank("a", Some(gpu)) }
    }

    fn line(all: &[Facts]) -> String {
        finding(all).map(|finding| finding.to_string()).unwrap_or_default()
    }

    fn with(mut all: Vec<Facts>, change: impl Fn(usize, &mut Transport)) -> Vec<Facts> {
        for (rank, facts) in all.iter_mut().enumerate() {
            if let Some(transport) = &mut facts.transport {
                change(rank, transport);
            }
        }
        all
    }

    #[test]
    fn the_transport_between_gpus_is_named_with_its_obstacle() {
        assert_eq!(line(&[rank("1"), rank("2")]), "ok    messages        from GPU to GPU, by NCCL");
        let lacking = with(vec![rank("1"), rank("2")], |rank, transport| transport.nccl = rank == 0);
        assert!(line(&lacking).starts_with("warn  messages        NCCL is missing on rank 1: through host memory"));
        let wanted = with(lacking, |_, transport| transport.direct = Some(true));
        assert!(line(&wanted).starts_with("FAIL  messages        run.direct = true and there is no transport"));
        let crowded = line(&[rank("1"), rank("2"), rank("3"), rank("3")]);
        assert!(crowded.starts_with("warn  messages        ranks 2 and 3 share a GPU: through host"), "{crowded}");
        // Ranks of different prompts send each other no tensors.
        assert!(line(&[rank("1"), rank("2"), rank("1"), rank("2")]).ends_with("by NCCL"));
    }

    #[test]
    fn a_transport_that_is_turned_off_or_not_needed_is_no_warning() {
        let refused = with(vec![rank("1"), rank("1")], |_, transport| transport.direct = Some(false));
        assert_eq!(line(&refused), "ok    messages        through host memory, as run.direct = false asks");
        let alone = with(vec![rank("1"), rank("1")], |_, transport| transport.cp_size = 1);
        assert_eq!(finding(&alone), None);
        let mut uneven = vec![rank("1"), rank("2")];
        uneven[1].gpu = None;
        assert_eq!(finding(&uneven), None);
    }
}
