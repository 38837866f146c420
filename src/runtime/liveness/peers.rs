//! What a rank knows of the others from their heartbeats, and which rank has stalled.
//!
//! Times are measured by this rank: a heartbeat is old if its file has not changed while this rank read it, so clocks
//! of other machines do not matter. A round of reading that took too long, or did not show this rank's own heartbeat,
//! blames no rank: then the file system was slow or absent.

use std::time::Duration;

use super::deadline::Progress;
use super::heartbeat::{Heartbeat, Reading};
use super::stall::{Process, Stall, StallCause};
use crate::runtime::units::Rank;

/// Minimum time without any heartbeat after which the file system counts as absent and not as slow.
const BLIND_MIN: Duration = Duration::from_mins(10);

/// What is known of one rank.
#[derive(Clone, Debug, Default)]
struct Peer {
    heartbeat: Option<Heartbeat>,
    /// Time in which its heartbeat has not changed.
    silent: Duration,
    /// Time in which it has passed no border.
    time_here: Duration,
    /// It has ended in order.
    ended: bool,
}

impl Peer {
    fn present(&self) -> Option<&Heartbeat> {
        self.heartbeat.as_ref().filter(|_| !self.ended)
    }

    fn rank(&self) -> Rank {
        self.heartbeat.as_ref().map_or(Rank(0), |heartbeat| heartbeat.rank)
    }

    fn stall(&self, cause: StallCause) -> Option<Stall> {
        let heartbeat = self.heartbeat.as_ref()?;
        let process = Some(Process::new(heartbeat));
        Some(Stall { site: heartbeat.site(), process, time_here: self.time_here, cause })
    }
}

/// All ranks of a job, as one of them sees them.
#[derive(Clone, Debug)]
pub struct Peers {
    own: Rank,
    all: Vec<Peer>,
    /// After this time without a new heartbeat a rank counts as stopped.
    silence: Duration,
    /// Time since the last round that showed any heartbeat.
    blind: Duration,
    /// Time since the last [`Visibility::Current`] round.
    outdated: Duration,
    /// Whether the others' heartbeats can be read at all.
    reads_others: bool,
}

/// How far one round of reading all heartbeats can be trusted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Visibility {
    /// The round was quick and showed this rank's own last heartbeat.
    Current,
    /// The round was slow, or showed an old heartbeat of this rank: the files may have changed.
    Late,
    /// Not even this rank's own heartbeat could be read.
    None,
}

impl Peers {
    /// As rank `own` of `ranks` sees them; `silence` is the permitted time between two heartbeats.
    #[must_use]
    pub fn new(own: Rank, ranks: usize, silence: Duration) -> Peers {
        let all = vec![Peer::default(); ranks];
        Peers { own, all, silence, blind: Duration::ZERO, outdated: Duration::ZERO, reads_others: true }
    }

    /// The others' heartbeats cannot be read: from here on this rank watches only itself.
    pub fn watch_only_self(&mut self) {
        self.reads_others = false;
    }

    /// Takes in one round: readings in rank order, `elapsed` after the last round. After a round that is not current
    /// every silence starts at 0.
    pub fn record(&mut self, readings: Vec<Reading>, elapsed: Duration, visibility: Visibility) {
        if visibility != Visibility::None {
            self.blind = Duration::ZERO;
        }
        if visibility != Visibility::Current {
            self.all.iter_mut().for_each(|peer| peer.silent = Duration::ZERO);
            return;
        }
        self.outdated = Duration::ZERO;
        for (peer, reading) in self.all.iter_mut().zip(readings) {
            match reading {
                Reading::Present(heartbeat) => {
                    let last = peer.heartbeat.as_ref();
                    let same_count = last.is_some_and(|last| last.count == heartbeat.count);
                    let same_borders = last.is_some_and(|last| last.borders == heartbeat.borders);
                    peer.silent = if same_count { peer.silent + elapsed } else { Duration::ZERO };
                    peer.time_here = if same_borders { peer.time_here + elapsed } else { Duration::ZERO };
                    peer.heartbeat = Some(heartbeat);
                    peer.ended = false;
                }
                Reading::Removed => peer.ended = true,
                Reading::Unreadable => {}
            }
        }
    }

    /// Time passes, with or without a round.
    pub fn advance(&mut self, elapsed: Duration) {
        self.blind += elapsed;
        self.outdated += elapsed;
    }

    /// The stall that must end the job, as the rank with this progress sees it. A rank that moves finds none, and
    /// neither does a rank that waits for others which compute within their own deadlines.
    #[must_use]
    pub fn find_stall(&self, progress: &Progress) -> Option<Stall> {
        let time_here = progress.time_here();
        if self.reads_others
            && time_here >= self.silence
            && let Some(stall) = self.silent_rank()
        {
            return Some(stall);
        }
        let deadline = progress.deadline();
        if time_here <= deadline {
            return None;
        }
        let snapshot = progress.snapshot();
        if !snapshot.waits {
            let process = self.all[self.own.0].heartbeat.as_ref().map(Process::new);
            let cause = self.cause_without_wait(self.own, snapshot.linked, deadline);
            return Some(Stall { site: snapshot.site, process, time_here, cause });
        }
        if !self.reads_others {
            return None;
        }
        if self.blind > deadline.max(BLIND_MIN) {
            return Some(Stall { site: snapshot.site, process: None, time_here, cause: StallCause::Blind(self.blind) });
        }
        // Older readings may have changed since.
        if self.outdated > self.silence { None } else { self.stalled_rank(progress) }
    }

    /// Why a rank does not move that waits in no call of the host.
    fn cause_without_wait(&self, rank: Rank, linked: bool, deadline: Duration) -> StallCause {
        if !linked {
            return StallCause::Stuck { deadline };
        }
        let others = self.all.iter().filter_map(Peer::present).filter(|heartbeat| heartbeat.rank != rank);
        StallCause::GpuLink { deadline, others: others.map(Heartbeat::site).collect() }
    }

    /// The rank that has been silent for longest, if any has been silent for too long.
    fn silent_rank(&self) -> Option<Stall> {
        let is_silent = |peer: &&Peer| peer.present().is_some() && peer.silent >= self.silence;
        let silent: Vec<&Peer> = self.others().filter(is_silent).collect();
        let longest = silent.iter().max_by(|a, b| a.silent.cmp(&b.silent).then(b.rank().cmp(&a.rank())))?;
        let also = silent.iter().map(|peer| peer.rank()).filter(|&rank| rank != longest.rank()).collect();
        longest.stall(StallCause::Silent { silent: longest.silent, also })
    }

    /// The rank that computes beyond its deadline, or, if all ranks wait, the one that is furthest behind. Both are
    /// reported later than a silence would be, because a silence says more.
    fn stalled_rank(&self, progress: &Progress) -> Option<Stall> {
        let is_late = |time_here: Duration, deadline: Duration| time_here > deadline + 2 * self.silence;
        let busy = self.others().filter_map(|peer| Some((peer, peer.present().filter(|heartbeat| !heartbeat.waits)?)));
        if let Some((peer, heartbeat)) = busy.max_by_key(|(peer, _)| peer.time_here) {
            let deadline = Duration::try_from_secs_f64(heartbeat.deadline_seconds).unwrap_or(Duration::MAX / 4);
            let cause = || self.cause_without_wait(peer.rank(), heartbeat.linked, deadline);
            return if is_late(peer.time_here, deadline) { peer.stall(cause()) } else { None };
        }
        // All present ranks wait: the one with the fewest borders stopped first.
        let present = self.all.iter().filter(|peer| peer.present().is_some());
        let first = present.min_by_key(|peer| peer.heartbeat.as_ref().map(|heartbeat| heartbeat.borders))?;
        if is_late(progress.time_here(), progress.deadline()) { first.stall(StallCause::AllWait) } else { None }
    }

    fn others(&self) -> impl Iterator<Item = &Peer> {
        let own = self.own.0;
        self.all.iter().enumerate().filter(move |(rank, _)| *rank != own).map(|(_, peer)| peer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::deadline::StallLimits;
    use super::super::heartbeat::tests::heartbeat;
    use super::super::site::SiteSnapshot;
    use super::*;
    use crate::runtime::failure::{Phase, Site};
    use crate::runtime::units::LayerIndex;

    const SILENCE: Duration = Duration::from_mins(1);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Rank 0's progress after `here` in a layer of capture; earlier layers took a second.
    fn progress(here: Duration, waits: bool) -> Progress {
        let snapshot = |layer, borders| SiteSnapshot {
            site: Site { rank: Rank(0), phase: Phase::Capture, layer: Some(LayerIndex(layer)) },
            borders,
            waits,
            linked: false,
        };
        let mut progress = Progress::new(StallLimits::new(0), snapshot(0, 1));
        progress.observe(snapshot(1, 2), seconds(1));
        progress.observe(snapshot(1, 2), here);
        progress
    }

    /// Readings of three ranks in layer 1 of capture, `count` heartbeats later; rank 2 writes no more if it is
    /// `stopped`.
    fn readings(count: u64, stopped: bool, waits: [bool; 3]) -> Vec<Reading> {
        let reading = |rank: usize| {
            let count = if stopped && rank == 2 { 0 } else { count };
            Reading::Present(Heartbeat { count, waits: waits[rank], ..heartbeat(rank, Phase::Capture, Some(1)) })
        };
        (0..3).map(reading).collect()
    }

    /// What rank 0 knows after rounds of two seconds each.
    fn after_rounds(rounds: u64, stopped: bool, waits: [bool; 3]) -> Peers {
        let mut peers = Peers::new(Rank(0), 3, SILENCE);
        for count in 0..=rounds {
            peers.record(readings(count, stopped, waits), seconds(2), Visibility::Current);
        }
        peers
    }

    const RANK_1_COMPUTES: [bool; 3] = [true, false, true];

    #[test]
    fn a_rank_without_new_heartbeats_is_named_by_those_who_have_waited_as_long() {
        let peers = after_rounds(32, true, RANK_1_COMPUTES);
        assert_eq!(peers.find_stall(&progress(seconds(59), true)), None, "this rank moved a moment ago");
        let words = peers.find_stall(&progress(seconds(61), true)).unwrap().to_string();
        assert_eq!(
            words,
            "rank 2, capture, layer 1 (host node, process 102) has not moved for 64 s, since 2026-01-02T03:04:05Z; its \
             last heartbeat is 64 s old: it is stopped or dead, or its machine is"
        );
        assert_eq!(
            after_rounds(29, true, RANK_1_COMPUTES).find_stall(&progress(seconds(61), true)),
            None,
            "58 s are no silence"
        );
        assert_eq!(
            after_rounds(99, false, RANK_1_COMPUTES).find_stall(&progress(seconds(500), true)),
            None,
            "all files beat"
        );
    }

    #[test]
    fn a_slow_round_blames_no_rank_and_restarts_every_silence() {
        let mut peers = after_rounds(29, true, RANK_1_COMPUTES);
        peers.record(readings(0, false, RANK_1_COMPUTES), seconds(300), Visibility::Late);
        peers.record(readings(29, true, RANK_1_COMPUTES), seconds(2), Visibility::Current);
        assert_eq!(peers.find_stall(&progress(seconds(61), true)), None);
    }

    #[test]
    fn a_slow_file_system_ends_no_job_whose_ranks_rightly_wait() {
        let mut peers = after_rounds(1, false, [true; 3]);
        for count in 2..99 {
            peers.advance(seconds(20));
            peers.record(readings(count, false, [true; 3]), seconds(20), Visibility::Late);
            assert_eq!(peers.find_stall(&progress(seconds(20 * count), true)), None, "{count}");
        }
        peers.advance(seconds(601));
        assert_eq!(peers.find_stall(&progress(seconds(9000), true)).unwrap().cause, StallCause::Blind(seconds(601)));
    }

    #[test]
    fn a_rank_that_reads_no_heartbeats_watches_only_itself() {
        let mut peers = after_rounds(99, true, [true; 3]);
        peers.watch_only_self();
        peers.advance(seconds(9000));
        assert_eq!(peers.find_stall(&progress(seconds(9000), true)), None);
        let stall = peers.find_stall(&progress(seconds(601), false)).unwrap();
        assert_eq!((stall.site().rank, stall.cause), (Rank(0), StallCause::Stuck { deadline: seconds(600) }));
    }

    #[test]
    fn a_rank_with_a_linked_gpu_names_all_possible_causes() {
        let linked = |here| {
            let mut progress = progress(here, false);
            progress.observe(SiteSnapshot { linked: true, ..progress.snapshot() }, Duration::ZERO);
            progress
        };
        let stall = after_rounds(310, false, RANK_1_COMPUTES).find_stall(&linked(seconds(601))).unwrap();
        let words = stall.to_string();
        assert!(words.contains("it, one of the others, or the link between their GPUs hangs"), "{words}");
        assert!(words.ends_with("; the others: rank 1, capture, layer 1; rank 2, capture, layer 1"), "{words}");
        assert!(!words.contains("waits for no other rank"), "{words}");
    }

    #[test]
    fn outdated_heartbeats_blame_no_rank() {
        let mut peers = after_rounds(301, false, [true; 3]);
        peers.advance(seconds(61));
        assert_eq!(peers.find_stall(&progress(seconds(721), true)), None);
    }

    #[test]
    fn a_rank_that_has_ended_or_cannot_be_read_is_not_silent() {
        for unknown in [Reading::Removed, Reading::Unreadable] {
            let mut peers = after_rounds(1, true, RANK_1_COMPUTES);
            for count in 2..99 {
                let mut all = readings(count, true, RANK_1_COMPUTES);
                all[2] = unknown.clone();
                peers.record(all, seconds(2), Visibility::Current);
            }
            assert_eq!(peers.find_stall(&progress(seconds(190), true)), None, "{unknown:?}");
        }
    }

    #[test]
    fn a_rank_past_its_deadline_names_itself_unless_it_waits_for_one_that_computes() {
        let peers = after_rounds(310, false, RANK_1_COMPUTES);
        assert_eq!(peers.find_stall(&progress(seconds(599), false)), None);
        let stall = peers.find_stall(&progress(seconds(601), false)).unwrap();
        assert_eq!((stall.site().rank, stall.cause.clone()), (Rank(0), StallCause::Stuck { deadline: seconds(600) }));
        assert!(stall.to_string().contains("has not moved for 601 s"), "{stall}");
        assert_eq!(peers.find_stall(&progress(seconds(601), true)), None, "rank 1's own watchdog is not late yet");
        let stall = after_rounds(361, false, RANK_1_COMPUTES).find_stall(&progress(seconds(730), true)).unwrap();
        assert_eq!((stall.site().rank, stall.cause), (Rank(1), StallCause::Stuck { deadline: seconds(600) }));
    }

    #[test]
    fn if_all_wait_the_one_with_the_fewest_borders_is_named() {
        let mut peers = after_rounds(301, false, [true; 3]);
        assert_eq!(peers.find_stall(&progress(seconds(720), true)), None, "a silence would have been noticed by then");
        let mut all = readings(302, false, [true; 3]);
        if let Reading::Present(beat) = &mut all[1] {
            beat.borders = 4;
        }
        peers.record(all, seconds(2), Visibility::Current);
        let stall = peers.find_stall(&progress(seconds(721), true)).unwrap();
        assert_eq!((stall.site().rank, stall.cause), (Rank(1), StallCause::AllWait));
    }

    #[test]
    fn a_waiting_rank_gives_up_after_its_deadline_without_any_heartbeat() {
        let mut peers = after_rounds(1, false, RANK_1_COMPUTES);
        peers.advance(seconds(599));
        assert_eq!(peers.find_stall(&progress(seconds(900), true)), None);
        peers.advance(seconds(2));
        let stall = peers.find_stall(&progress(seconds(901), true)).unwrap();
        assert_eq!(stall.cause, StallCause::Blind(seconds(601)));
    }
}
