//! What a rank hears of the others, and who lags when the job stands still.
//!
//! Times are this rank's own: a heartbeat is old when its file has not changed for so long while this rank looked, so
//! clocks of other machines do not matter. Looks that took too long, or in which this rank did not see its own heartbeat,
//! accuse nobody: then it is the file system that was slow or away.

use std::fmt;
use std::time::Duration;

use super::{Beat, Heard, Pace};
use crate::runtime::failure::Site;
use crate::runtime::units::Rank;

/// What is known of one rank.
#[derive(Clone, Debug, Default)]
struct Peer {
    beat: Option<Beat>,
    /// Time in which its heartbeat has not changed.
    silent: Duration,
    /// Time in which it has passed no border.
    here: Duration,
    gone: bool,
}

impl Peer {
    fn present(&self) -> Option<&Beat> {
        self.beat.as_ref().filter(|_| !self.gone)
    }
}

/// All ranks of a job, as one of them hears them.
#[derive(Clone, Debug)]
pub struct Peers {
    own: Rank,
    all: Vec<Peer>,
    silence: Duration,
    /// Time without a look that showed anything.
    blind: Duration,
    /// Time without a clear look.
    unclear: Duration,
    /// Whether the others' heartbeats can be heard at all.
    listens: bool,
}

/// The least time without heartbeats after which the file system counts as away and not as slow.
const BLIND_MIN: Duration = Duration::from_mins(10);
/// The most places of other ranks that a verdict lists.
const SITES_MAX: usize = 8;

/// What a look at all heartbeats is worth.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sight {
    /// It was quick and showed this rank's own last heartbeat.
    Clear,
    /// It took long, or showed an old heartbeat of this rank: what it shows may have changed.
    Late,
    /// Not even this rank's own heartbeat could be read.
    Nothing,
}

impl Peers {
    /// As rank `own` of `ranks` hears them; `silence` is how long a heartbeat may stay away.
    #[must_use]
    pub fn new(own: Rank, ranks: usize, silence: Duration) -> Peers {
        let all = vec![Peer::default(); ranks];
        Peers { own, all, silence, blind: Duration::ZERO, unclear: Duration::ZERO, listens: true }
    }

    /// The others cannot be heard: from here on this rank judges itself alone.
    pub fn ignore_others(&mut self) {
        self.listens = false;
    }

    /// All heartbeats were read, in rank order, `elapsed` after the last look. After a look that is not clear every
    /// silence begins anew.
    pub fn look(&mut self, heard: Vec<Heard>, elapsed: Duration, sight: Sight) {
        if sight != Sight::Nothing {
            self.blind = Duration::ZERO;
        }
        if sight != Sight::Clear {
            self.all.iter_mut().for_each(|peer| peer.silent = Duration::ZERO);
            return;
        }
        self.unclear = Duration::ZERO;
        for (peer, heard) in self.all.iter_mut().zip(heard) {
            match heard {
                Heard::Beat(beat) => {
                    let same = |of: fn(&Beat) -> u64| peer.beat.as_ref().is_some_and(|last| of(last) == of(&beat));
                    peer.silent = if same(|beat| beat.count) { peer.silent + elapsed } else { Duration::ZERO };
                    peer.here = if same(|beat| beat.borders) { peer.here + elapsed } else { Duration::ZERO };
                    (peer.beat, peer.gone) = (Some(beat), false);
                }
                Heard::Gone => peer.gone = true,
                Heard::Unclear => {}
            }
        }
    }

    /// So much time has passed, with or without a look.
    pub fn pass(&mut self, elapsed: Duration) {
        self.blind += elapsed;
        self.unclear += elapsed;
    }

    /// Whether the job must end, as the rank with this pace sees it, and because of whom. A rank that moves, or that
    /// waits for others who still compute within their own deadlines, finds nothing.
    #[must_use]
    pub fn judge(&self, pace: &Pace) -> Option<Verdict> {
        let moment = pace.moment();
        if self.listens
            && pace.here() >= self.silence
            && let Some(verdict) = self.silent()
        {
            return Some(verdict);
        }
        if pace.here() <= pace.deadline() {
            return None;
        }
        let deadline = pace.deadline();
        if !moment.waits {
            let who = self.all[self.own.0].beat.as_ref().map(Who::of);
            let why = self.stands(self.own, moment.linked, deadline);
            return Some(Verdict { site: moment.site, who, here: pace.here(), why });
        }
        if !self.listens {
            return None;
        }
        if self.blind > deadline.max(BLIND_MIN) {
            return Some(Verdict { site: moment.site, who: None, here: pace.here(), why: Why::Blind(self.blind) });
        }
        // What was seen longer ago may have changed since.
        if self.unclear > self.silence { None } else { self.halted(pace) }
    }

    /// Why a rank that waits in no call of the host does not move.
    fn stands(&self, rank: Rank, linked: bool, deadline: Duration) -> Why {
        if !linked {
            return Why::Stuck { deadline };
        }
        let others = self.all.iter().filter_map(Peer::present).filter(|beat| beat.rank != rank);
        Why::Linked { deadline, others: others.map(Beat::site).collect() }
    }

    /// The rank that has been silent for longest, if any has been for too long.
    fn silent(&self) -> Option<Verdict> {
        let of = |peer: &Peer| peer.present().is_some() && peer.silent >= self.silence;
        let silent: Vec<&Peer> = self.others().filter(|peer| of(peer)).collect();
        let first =
            silent.iter().max_by(|one, two| one.silent.cmp(&two.silent).then(two.number().cmp(&one.number())))?;
        let also = silent.iter().map(|peer| peer.number()).filter(|&rank| rank != first.number()).collect();
        first.verdict(Why::Silent { silent: first.silent, also })
    }

    /// Every rank waits, or whoever does not has been at it for longer than its own watchdog should have allowed. Both are
    /// found later than a silence could be, which says more.
    fn halted(&self, pace: &Pace) -> Option<Verdict> {
        let late = |here: Duration, deadline: Duration| here > deadline + 2 * self.silence;
        let busy = self.others().filter(|peer| peer.present().is_some_and(|beat| !beat.waits));
        if let Some(peer) = busy.max_by_key(|peer| peer.here) {
            let deadline = peer.beat.as_ref().map_or(0.0, |beat| beat.deadline_seconds);
            let deadline = Duration::try_from_secs_f64(deadline).unwrap_or(Duration::MAX / 4);
            let linked = peer.beat.as_ref().is_some_and(|beat| beat.linked);
            let why = || self.stands(peer.number(), linked, deadline);
            return if late(peer.here, deadline) { peer.verdict(why()) } else { None };
        }
        // All that are there wait: the one that is furthest behind was the first to halt.
        let present = self.all.iter().filter(|peer| peer.present().is_some());
        let first = present.min_by_key(|peer| peer.beat.as_ref().map(|beat| beat.borders))?;
        if late(pace.here(), pace.deadline()) { first.verdict(Why::AllWait) } else { None }
    }

    fn others(&self) -> impl Iterator<Item = &Peer> {
        let own = self.own.0;
        self.all.iter().enumerate().filter(move |(rank, _)| *rank != own).map(|(_, peer)| peer)
    }
}

impl Peer {
    fn number(&self) -> Rank {
        self.beat.as_ref().map_or(Rank(0), |beat| beat.rank)
    }

    fn verdict(&self, why: Why) -> Option<Verdict> {
        let beat = self.beat.as_ref()?;
        Some(Verdict { site: beat.site(), who: Some(Who::of(beat)), here: self.here, why })
    }
}

/// Whom to look for.
#[derive(Clone, Debug, PartialEq)]
struct Who {
    host: String,
    pid: u32,
    entered: String,
}

impl Who {
    fn of(beat: &Beat) -> Who {
        Who { host: beat.host.clone(), pid: beat.pid, entered: beat.entered.clone() }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Why {
    /// Its heart does not beat.
    Silent { silent: Duration, also: Vec<Rank> },
    /// Its heart beats, it waits for nobody, and it does not move.
    Stuck { deadline: Duration },
    /// Its heart beats and it does not move; it may wait for a message inside its GPU.
    Linked { deadline: Duration, others: Vec<Site> },
    /// Everybody waits for somebody.
    AllWait,
    /// Nothing was heard of the others.
    Blind(Duration),
}

/// Why a job must end: who lags, and what is known of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    site: Site,
    who: Option<Who>,
    here: Duration,
    why: Why,
}

impl Verdict {
    /// The rank that lags, and where it is.
    #[must_use]
    pub fn site(&self) -> Site {
        self.site
    }
}

impl fmt::Display for Verdict {
    /// One sentence: who, where, since when, and what it looks like.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = self.here.as_secs();
        write!(f, "{}", self.site)?;
        if let Some(Who { host, pid, entered }) = &self.who {
            write!(f, " (host {host}, process {pid}) has not moved for {here} s, since {entered}")?;
        } else {
            write!(f, " has not moved for {here} s")?;
        }
        match &self.why {
            Why::Silent { silent, also } => {
                write!(
                    f,
                    "; its last heartbeat is {} s old: it is stopped or dead, or its machine is",
                    silent.as_secs()
                )?;
                if !also.is_empty() {
                    let ranks: Vec<String> = also.iter().map(ToString::to_string).collect();
                    write!(f, "; the same is true of rank {}", ranks.join(", "))?;
                }
                Ok(())
            }
            Why::Stuck { deadline } => write!(
                f,
                "; {} s were allowed. It runs and waits for no other rank: its disk, its GPU or the machine holds it, or \
                 run.stall_sec is too small",
                deadline.as_secs()
            ),
            Why::Linked { deadline, others } => {
                write!(
                    f,
                    "; {} s were allowed. It may wait for a message from another rank's GPU: it, one of the others, or the \
                     link between their GPUs hangs, or run.stall_sec is too small",
                    deadline.as_secs()
                )?;
                let sites: Vec<String> = others.iter().take(SITES_MAX).map(ToString::to_string).collect();
                let more = if others.len() > SITES_MAX { "; …" } else { "" };
                if sites.is_empty() { Ok(()) } else { write!(f, "; the others: {}{more}", sites.join("; ")) }
            }
            Why::AllWait => {
                f.write_str("; every rank waits for the others, and this one came least far: look at the network")
            }
            Why::Blind(blind) => write!(
                f,
                ": it waits for others, and the run directory has shown no heartbeat of theirs for {} s",
                blind.as_secs()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::heartbeat::tests::beat;
    use super::super::{Moment, Patience};
    use super::*;
    use crate::runtime::failure::Phase;
    use crate::runtime::units::LayerIndex;

    const SILENCE: Duration = Duration::from_mins(1);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Rank 0's pace after `here` in a layer of capture, of which it knows that they take a second.
    fn pace(here: Duration, waits: bool) -> Pace {
        let moment = |layer, borders| Moment {
            site: Site { rank: Rank(0), phase: Phase::Capture, layer: Some(LayerIndex(layer)) },
            borders,
            waits,
            linked: false,
        };
        let mut pace = Pace::new(Patience::of(0), moment(0, 1));
        pace.see(moment(1, 2), seconds(1));
        pace.see(moment(1, 2), here);
        pace
    }

    /// Heartbeats of three ranks in layer 1 of capture, as they are after `count` beats; rank 2's stay what they were
    /// if it is `stopped`.
    fn heard(count: u64, stopped: bool, waits: [bool; 3]) -> Vec<Heard> {
        let heard = |rank: usize| {
            let count = if stopped && rank == 2 { 0 } else { count };
            Heard::Beat(Beat { count, waits: waits[rank], ..beat(rank, Phase::Capture, Some(1)) })
        };
        (0..3).map(heard).collect()
    }

    /// What rank 0 knows after looks of two seconds each.
    fn listened(looks: u64, stopped: bool, waits: [bool; 3]) -> Peers {
        let mut peers = Peers::new(Rank(0), 3, SILENCE);
        for count in 0..=looks {
            peers.look(heard(count, stopped, waits), seconds(2), Sight::Clear);
        }
        peers
    }

    const RANK_1_COMPUTES: [bool; 3] = [true, false, true];

    #[test]
    fn a_rank_whose_heart_stops_is_named_by_those_who_wait_as_long() {
        let peers = listened(32, true, RANK_1_COMPUTES);
        assert_eq!(peers.judge(&pace(seconds(59), true)), None, "this rank moved a moment ago");
        let words = peers.judge(&pace(seconds(61), true)).unwrap().to_string();
        assert_eq!(
            words,
            "rank 2, capture, layer 1 (host node, process 102) has not moved for 64 s, since 2026-01-02T03:04:05Z; its \
             last heartbeat is 64 s old: it is stopped or dead, or its machine is"
        );
        assert_eq!(listened(29, true, RANK_1_COMPUTES).judge(&pace(seconds(61), true)), None, "58 s are no silence");
        assert_eq!(listened(99, false, RANK_1_COMPUTES).judge(&pace(seconds(500), true)), None, "all hearts beat");
    }

    #[test]
    fn a_look_that_took_too_long_accuses_nobody_and_begins_every_silence_anew() {
        let mut peers = listened(29, true, RANK_1_COMPUTES);
        peers.look(heard(0, false, RANK_1_COMPUTES), seconds(300), Sight::Late);
        peers.look(heard(29, true, RANK_1_COMPUTES), seconds(2), Sight::Clear);
        assert_eq!(peers.judge(&pace(seconds(61), true)), None);
    }

    #[test]
    fn a_slow_file_system_ends_no_job_whose_ranks_rightly_wait() {
        let mut peers = listened(1, false, [true; 3]);
        for count in 2..99 {
            peers.pass(seconds(20));
            peers.look(heard(count, false, [true; 3]), seconds(20), Sight::Late);
            assert_eq!(peers.judge(&pace(seconds(20 * count), true)), None, "{count}");
        }
        peers.pass(seconds(601));
        assert_eq!(peers.judge(&pace(seconds(9000), true)).unwrap().why, Why::Blind(seconds(601)));
    }

    #[test]
    fn a_rank_that_hears_nobody_judges_itself_alone() {
        let mut peers = listened(99, true, [true; 3]);
        peers.ignore_others();
        peers.pass(seconds(9000));
        assert_eq!(peers.judge(&pace(seconds(9000), true)), None);
        let verdict = peers.judge(&pace(seconds(601), false)).unwrap();
        assert_eq!((verdict.site().rank, verdict.why), (Rank(0), Why::Stuck { deadline: seconds(600) }));
    }

    #[test]
    fn a_rank_whose_gpu_is_linked_names_nobody_for_sure() {
        let linked = |here| {
            let mut pace = pace(here, false);
            pace.see(Moment { linked: true, ..pace.moment() }, Duration::ZERO);
            pace
        };
        let verdict = listened(310, false, RANK_1_COMPUTES).judge(&linked(seconds(601))).unwrap();
        let words = verdict.to_string();
        assert!(words.contains("it, one of the others, or the link between their GPUs hangs"), "{words}");
        assert!(words.ends_with("; the others: rank 1, capture, layer 1; rank 2, capture, layer 1"), "{words}");
        assert!(!words.contains("waits for no other rank"), "{words}");
    }

    #[test]
    fn heartbeats_that_were_seen_long_ago_accuse_nobody() {
        let mut peers = listened(301, false, [true; 3]);
        peers.pass(seconds(61));
        assert_eq!(peers.judge(&pace(seconds(721), true)), None);
    }

    #[test]
    fn a_rank_that_has_ended_or_cannot_be_read_is_not_silent() {
        for nothing in [Heard::Gone, Heard::Unclear] {
            let mut peers = listened(1, true, RANK_1_COMPUTES);
            for count in 2..99 {
                let mut all = heard(count, true, RANK_1_COMPUTES);
                all[2] = nothing.clone();
                peers.look(all, seconds(2), Sight::Clear);
            }
            assert_eq!(peers.judge(&pace(seconds(190), true)), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_rank_past_its_deadline_names_itself_unless_it_waits_for_one_that_computes() {
        let peers = listened(310, false, RANK_1_COMPUTES);
        assert_eq!(peers.judge(&pace(seconds(599), false)), None);
        let verdict = peers.judge(&pace(seconds(601), false)).unwrap();
        assert_eq!((verdict.site().rank, verdict.why.clone()), (Rank(0), Why::Stuck { deadline: seconds(600) }));
        assert!(verdict.to_string().contains("has not moved for 601 s"), "{verdict}");
        assert_eq!(peers.judge(&pace(seconds(601), true)), None, "rank 1's own watchdog is not late yet");
        let verdict = listened(361, false, RANK_1_COMPUTES).judge(&pace(seconds(730), true)).unwrap();
        assert_eq!((verdict.site().rank, verdict.why), (Rank(1), Why::Stuck { deadline: seconds(600) }));
    }

    #[test]
    fn when_all_wait_the_one_that_came_least_far_is_named() {
        let mut peers = listened(301, false, [true; 3]);
        assert_eq!(peers.judge(&pace(seconds(720), true)), None, "a silence would have been noticed by then");
        let mut all = heard(302, false, [true; 3]);
        if let Heard::Beat(beat) = &mut all[1] {
            beat.borders = 4;
        }
        peers.look(all, seconds(2), Sight::Clear);
        let verdict = peers.judge(&pace(seconds(721), true)).unwrap();
        assert_eq!((verdict.site().rank, verdict.why), (Rank(1), Why::AllWait));
    }

    #[test]
    fn without_a_look_for_longer_than_its_deadline_a_rank_that_waits_gives_up() {
        let mut peers = listened(1, false, RANK_1_COMPUTES);
        peers.pass(seconds(599));
        assert_eq!(peers.judge(&pace(seconds(900), true)), None);
        peers.pass(seconds(2));
        let verdict = peers.judge(&pace(seconds(901), true)).unwrap();
        assert_eq!(verdict.why, Why::Blind(seconds(601)));
    }
}
