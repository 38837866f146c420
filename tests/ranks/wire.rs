//! Bytes between ranks.

use longstraw::prompt::layout::PromptLayout;
use longstraw::prompt::ring::{visit_runs, visit_runs_with_sums};
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::runtime::memory::{Ledger, Purpose};
use longstraw::runtime::units::{Bytes, Rank, Tokens, as_dim, float, from_index};
use longstraw::world::World;
use longstraw::world::exchange::{gather_rows, return_rows, sum_over_ranks};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Uneven counts, some of them zero.
fn counts(size: usize) -> Vec<Tokens> {
    (0..size as u64).map(|rank| Tokens(if rank % 3 == 1 { 0 } else { 3 * rank + 1 })).collect()
}

fn rows(rank: usize, count: Tokens) -> Tensor {
    let start = as_dim(rank as u64 * 1000);
    let all = Tensor::arange_start(start, start + count.dim() * 6, (Kind::Double, Device::Cpu));
    all.view([count.dim(), 2, 3])
}

pub(crate) fn small_rounds(world: &mut World) {
    let axis = &world.all;
    let (me, size) = (axis.rank().0, axis.size());
    let counts = counts(size);
    let expected = Tensor::cat(&(0..size).map(|rank| rows(rank, counts[rank])).collect::<Vec<_>>(), 0);
    let whole = axis.round_bytes();
    for round in [1, 7, 48, whole] {
        axis.set_round_bytes(round);
        let all = gather_rows(axis, &rows(me, counts[me]), &counts);
        assert!(all.equal(&expected), "gathered in rounds of {round} bytes");
        // Every rank returns all rows times its number; what arrives is this rank's rows times each number.
        let parts = return_rows(axis, &(&expected * as_dim(me as u64 + 1)), &counts);
        assert_eq!(parts.len(), size);
        for (rank, part) in parts.iter().enumerate() {
            assert!(part.equal(&(rows(me, counts[me]) * as_dim(rank as u64 + 1))), "rank {rank}, round {round}");
        }
    }
    axis.set_round_bytes(whole);
}

/// Memory that runs out while a ring moves must lead to exit 5 and leave time to save.
pub(crate) fn panic_in_ring(world: &mut World) {
    let axis = &world.all;
    let (me, size) = (axis.rank().0, axis.size());
    let byte = |rank: usize| u8::try_from(rank % 251).expect("below 251");
    let sent = vec![byte(me); 1 << 20];
    let mut received = vec![255u8; 1 << 20];
    let caught = world.catch_panic(|| {
        axis.ring_step(&[&sent], vec![&mut received], || {
            assert_eq!(me, usize::MAX, "can't allocate memory: this rank and no other has asked for too much");
        });
    });
    let exit = Failure::from(caught.expect_err("the panic comes out")).exit();
    assert_eq!(exit, Exit::DoesNotFit, "the first panic is the one that counts");
    let previous = (me + size - 1) % size;
    assert!(received.iter().all(|&value| value == byte(previous)), "the buffers are no longer in use");
    axis.barrier();
}

pub(crate) fn ring(world: &mut World) {
    let axis = &world.all;
    for (prompt, page) in [(1, 3), (50, 7), (130, 3)] {
        let layout = PromptLayout::new(Tokens(prompt), Tokens(page), axis.size(), Tokens(1));
        let value = |start: u64, rows: i64| {
            Tensor::arange_start(as_dim(start), as_dim(start) + rows, (Kind::Double, Device::Cpu)).view([rows, 1])
        };
        let ledger = Ledger::default();
        let runs = |rank: Rank| layout.chunks_of(rank);
        let planes_of = |rank: Rank| -> Vec<Tensor> {
            runs(rank)
                .iter()
                .map(|run| value(run.start.0, run.rows().dim()))
                .flat_map(|x| [x.copy(), x * 2.0])
                .collect()
        };
        let mut seen = Vec::new();
        let outcome: Result<(), ()> = visit_runs(
            axis,
            &ledger,
            planes_of(axis.rank()),
            &|rank| planes_of(rank).iter().map(|plane| plane.size()[0]).collect(),
            |rank, planes| {
                let expected = planes_of(rank);
                assert!(planes.len() == 4 && planes.iter().zip(&expected).all(|(found, wanted)| found.equal(wanted)));
                seen.push(rank.0);
                Ok(())
            },
        );
        assert!(outcome.is_ok());
        let me = axis.rank().0;
        let order = (0..axis.size()).map(|step| (me + axis.size() - step) % axis.size());
        assert_eq!(seen, order.collect::<Vec<_>>(), "the state of every rank once, in ring order");
        let bytes = |rank| runs(Rank(rank)).iter().map(|run| run.rows().0 * 16).sum::<u64>();
        let largest = (0..axis.size()).map(bytes).max().unwrap_or(0);
        assert!(ledger.peak(Purpose::Foreign) <= Bytes(2 * largest), "the state of two ranks at most");
        assert_eq!(ledger.now(Purpose::Foreign), Bytes(0), "nothing foreign stays");
    }
}

/// Sums follow the state of every rank and come home complete, formed in ring order from the owner on.
pub(crate) fn ring_sums(world: &mut World) {
    let axis = &world.all;
    let size = axis.size();
    for (prompt, page, tail) in [(1, 3, 1), (50, 7, 50), (130, 3, 40)] {
        let layout = PromptLayout::new(Tokens(prompt), Tokens(page), size, Tokens(tail));
        let rows = |rank: Rank| layout.chunks_of(rank).map(|run| run.rows().dim());
        let tails = |rank: Rank| layout.chunks_of(rank).map(|run| run.stop.since(run.start.max(layout.cut())).dim());
        let state = |rank: Rank| rows(rank).map(|rows| Tensor::full([rows, 2], as_dim(from_index(rank.0)), FLOAT));
        // What `by` adds to the sums of `of`: the order of addition shows in the last bits.
        let part = |by: Rank, of: Rank| {
            let factor = 10f64.powi(i32::try_from(by.0 % 4).unwrap_or(0) * 3) * float(from_index(of.0 + 1));
            tails(of).map(|rows| (Tensor::arange(rows * 2, FLOAT) * 0.1 + 0.7).view([rows, 2]) * factor)
        };
        let ledger = Ledger::default();
        let own = part(axis.rank(), axis.rank());
        let found = visit_runs_with_sums(
            axis,
            &ledger,
            state(axis.rank()).into(),
            own.iter().map(Tensor::zeros_like).collect(),
            [&|rank| rows(rank).into(), &|rank| tails(rank).into()],
            |rank, planes, sums| {
                assert!(planes.iter().zip(state(rank)).all(|(found, wanted)| found.equal(&wanted)));
                for (sum, part) in sums.iter().zip(part(axis.rank(), rank)) {
                    let _ = sum.shallow_clone().g_add_(&part);
                }
            },
        );
        let me = axis.rank();
        let wanted = own;
        for by in (1..size).map(|step| Rank((me.0 + step) % size)) {
            for (sum, part) in wanted.iter().zip(part(by, me)) {
                let _ = sum.shallow_clone().g_add_(&part);
            }
        }
        assert!(found.len() == 2 && found.iter().zip(&wanted).all(|(found, wanted)| found.equal(wanted)));
        assert_eq!(ledger.now(Purpose::Foreign), Bytes(0), "nothing foreign stays");
    }
}

pub(crate) fn sum(world: &mut World) {
    let axis = &world.all;
    let part = |rank: usize| {
        // Values whose sum depends on the order of addition.
        let base = Tensor::arange(1001, (Kind::Float, Device::Cpu)) * 0.1 + as_dim(rank as u64 + 1);
        base * 10f64.powi(i32::try_from(rank % 4).unwrap_or(0) * 3)
    };
    let whole = axis.round_bytes();
    let mut expected = part(0);
    for rank in 1..axis.size() {
        expected += part(rank);
    }
    for round in [13, whole] {
        axis.set_round_bytes(round);
        let mut x = part(axis.rank().0).contiguous();
        sum_over_ranks(axis, &mut x);
        assert!(x.equal(&expected), "the same bits as adding in rank order, in rounds of {round}");
    }
    axis.set_round_bytes(whole);
}

pub(crate) fn alone(world: &mut World) {
    for round in 0..3u64 {
        let done = world.on_root_long(|| {
            std::thread::sleep(std::time::Duration::from_millis(30 * round));
            Ok(round + 7)
        });
        let expected = if world.all.rank().0 == 0 { round + 7 } else { 0 };
        assert_eq!(done.ok(), Some(expected));
    }
}

/// What rank 0 does, all ranks know of: its value with the same bits, or its failure.
pub(crate) fn root(world: &mut World) {
    let rank = world.all.rank().0;
    assert_eq!(world.on_root(|| Ok(7)).ok(), Some((rank == 0).then_some(7)));
    let sent = vec![Some(0.1 + 0.2), None, Some(f64::MIN_POSITIVE), Some(-0.0)];
    let bits = |values: &[Option<f64>]| values.iter().map(|value| value.map(f64::to_bits)).collect::<Vec<_>>();
    let received = world.from_root(|| Ok(sent.clone())).expect("nothing failed");
    assert_eq!(bits(&received), bits(&sent));
    let ranks: Vec<Option<usize>> = (0..world.all.size()).map(|rank| (rank > 0).then_some(rank)).collect();
    assert_eq!(world.gather(&(rank > 0).then_some(rank)), ranks);
    let failed = world.from_root(|| Err::<u64, Failure>(longstraw::world::Error::Start.into()));
    assert_eq!(failed.expect_err("on every rank").exit(), Exit::Disagree);
}
