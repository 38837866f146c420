//! Keys of attention over latents where they lie: runs of positions in several tensors, and the rows of an index set in them.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

/// A stretch of keys at consecutive positions.
pub(super) struct KeyRun {
    pub(super) positions: Range<i64>,
    /// Keys in order of position, [s, k].
    pub(super) key_sk: Tensor,
    /// [s, k] in the accumulation dtype: where gradient of the keys adds up; `None` for constants.
    pub(super) gradient_sk: Option<Tensor>,
}

/// Runs of keys in order of position, and one tensor of all their rows.
pub(super) struct Keys {
    runs: Vec<Range<i64>>,
    /// [s, k]: one run after another.
    all_sk: Tensor,
    /// [g, k] in the accumulation dtype: gradient of the runs that carry it, one after another.
    gradient_gk: Option<Tensor>,
    /// First row in `gradient_gk` of each run that carries gradient.
    gradient_rows: Vec<Option<i64>>,
}

/// The keys of an index set that lie here, row by row.
pub(super) struct Found {
    /// [t, m] int64: rows of the keys; −1 where there is none.
    row_tm: Tensor,
}

impl Keys {
    /// The keys of `runs`, sorted here by position.
    pub(super) fn new(mut runs: Vec<KeyRun>, width: i64, kind: Kind, device: Device) -> Keys {
        runs.retain(|run| run.positions.start < run.positions.end);
        runs.sort_by_key(|run| run.positions.start);
        let all_sk = match runs.as_slice() {
            [] => Tensor::zeros([0, width], (kind, device)),
            [one] => one.key_sk.shallow_clone(),
            several => Tensor::cat(&several.iter().map(|run| &run.key_sk).collect::<Vec<_>>(), 0),
        };
        Self::over(runs, all_sk)
    }

    /// The keys of `runs`, which follow one another, and are views of `all_sk`.
    pub(super) fn of_one(mut runs: Vec<KeyRun>, all_sk: &Tensor) -> Keys {
        runs.retain(|run| run.positions.start < run.positions.end);
        Self::over(runs, all_sk.shallow_clone())
    }

    fn over(runs: Vec<KeyRun>, all_sk: Tensor) -> Keys {
        let (width, device) = (all_sk.size()[1], all_sk.device());
        let mut next = 0;
        let gradient_rows = runs.iter().map(|run| {
            let carries = run.gradient_sk.is_some().then_some(next);
            next += if carries.is_some() { run.positions.end - run.positions.start } else { 0 };
            carries
        });
        let gradient_rows = gradient_rows.collect();
        let carried: Vec<&Tensor> = runs.iter().filter_map(|run| run.gradient_sk.as_ref()).collect();
        let gradient_gk = match carried.as_slice() {
            [] => None,
            [one] => Some(one.shallow_clone()),
            several => Some(Tensor::zeros([next, width], (several[0].kind(), device))),
        };
        let runs = runs.into_iter().map(|run| run.positions).collect();
        Keys { runs, all_sk, gradient_gk, gradient_rows }
    }

    /// Adds what [`Keys::add_gradient`] has collected to the runs' own tensors, given again in the order of [`Keys::new`].
    pub(super) fn return_gradient(&self, runs: &mut [KeyRun]) {
        let Some(all_gk) = &self.gradient_gk else { return };
        let mut carrying: Vec<&mut KeyRun> = runs
            .iter_mut()
            .filter(|run| run.positions.start < run.positions.end && run.gradient_sk.is_some())
            .collect();
        if carrying.len() < 2 {
            return;
        }
        carrying.sort_by_key(|run| run.positions.start);
        let mut first = 0;
        for run in carrying {
            let rows = run.positions.end - run.positions.start;
            let own = run.gradient_sk.as_ref().map(Tensor::shallow_clone);
            if let Some(mut own) = own {
                let _ = own.g_add_(&all_gk.narrow(0, first, rows));
            }
            first += rows;
        }
    }

    /// Which keys of a set lie here. Every rank holds other keys; a row's are moved to the front, so that what is gathered is
    /// as wide as the fullest row needs.
    pub(super) fn find(&self, position_tn: &Tensor) -> Found {
        let device = position_tn.device();
        // Keys of all positions from 0 on: a position is a row.
        let whole = self.runs.iter().try_fold(0, |end, run| (run.start == end).then_some(run.end));
        let position_tn = position_tn.to_kind(Kind::Int64);
        let none = Tensor::full([1, 1], -1, (Kind::Int64, device));
        if let Some(end) = whole {
            let beyond = position_tn.ge(end);
            return Found { row_tm: position_tn.masked_fill(&beyond, -1) };
        }
        let mut row_tn = Tensor::full(position_tn.size(), -1, (Kind::Int64, device));
        let mut first = 0;
        for run in &self.runs {
            let inside = position_tn.ge(run.start).logical_and(&position_tn.lt(run.end));
            row_tn = (&position_tn - (run.start - first)).where_self(&inside, &row_tn);
            first += run.end - run.start;
        }
        if row_tn.numel() == 0 {
            return Found { row_tm: row_tn };
        }
        let here_tn = row_tn.ge(0);
        let fullest = here_tn.sum_dim_intlist([1i64].as_slice(), false, Kind::Int64).max().int64_value(&[]);
        let sorted_tn = row_tn.masked_fill(&here_tn.logical_not(), i64::MAX).sort(-1, false).0;
        let row_tm = sorted_tn.narrow(1, 0, fullest);
        let absent = row_tm.eq(i64::MAX);
        Found { row_tm: none.where_self(&absent, &row_tm) }
    }

    /// Whether any key carries gradient.
    pub(super) fn carries_gradient(&self) -> bool {
        self.gradient_gk.is_some()
    }

    /// Rows of all keys.
    pub(super) fn rows(&self) -> i64 {
        self.all_sk.size()[0]
    }

    /// The keys of some rows of queries.
    pub(super) fn gather(&self, found: &Found, queries: &Range<i64>) -> Gathered {
        let row_tm = found.row_tm.narrow(0, queries.start, queries.end - queries.start);
        let (rows, width) = (row_tm.size()[0], row_tm.size()[1]);
        let absent_tm = row_tm.lt(0);
        // Places without a key read keys that lie apart: all of one key would wait for each other in backward.
        let apart = Tensor::arange(width, (Kind::Int64, row_tm.device())).remainder(self.rows().max(1)).unsqueeze(0);
        let row_tm = apart.where_self(&absent_tm, &row_tm);
        let key_tmk = self.all_sk.index_select(0, &row_tm.flatten(0, -1)).view([rows, width, self.all_sk.size()[1]]);
        Gathered { row_tm, absent_tm, key_tmk }
    }

    /// Adds gradient of gathered keys, [t, m, k], to the keys that carry it.
    pub(super) fn add_gradient(&self, gathered: &Gathered, dkey_tmk: &Tensor) {
        let Some(gradient_gk) = &self.gradient_gk else { return };
        let mut target = gradient_gk.shallow_clone();
        let acc = target.kind();
        let dkey_nk = dkey_tmk.flatten(0, 1);
        if self.gradient_rows.iter().all(Option::is_some) {
            let _ = target.index_add_(0, &gathered.row_tm.flatten(0, -1), &dkey_nk.to_kind(acc));
            return;
        }
        let row_n = gathered.row_tm.flatten(0, -1);
        let mut target_n = Tensor::full(row_n.size(), -1, (Kind::Int64, row_n.device()));
        let mut first = 0;
        for (run, gradient) in self.runs.iter().zip(&self.gradient_rows) {
            let stop = first + run.end - run.start;
            if let Some(gradient) = gradient {
                let inside = row_n.ge(first).logical_and(&row_n.lt(stop));
                target_n = (&row_n - (first - gradient)).where_self(&inside, &target_n);
            }
            first = stop;
        }
        let carried = target_n.ge(0).logical_and(&gathered.absent_tm.flatten(0, -1).logical_not());
        let carried = carried.nonzero().squeeze_dim(1);
        let dkey = dkey_nk.index_select(0, &carried).to_kind(acc);
        let _ = target.index_add_(0, &target_n.index_select(0, &carried), &dkey);
    }
}

impl Found {
    /// How many keys of a row are gathered.
    pub(super) fn width(&self) -> i64 {
        self.row_tm.size()[1]
    }
}

/// Keys of some queries' rows, [t, m, k].
pub(super) struct Gathered {
    row_tm: Tensor,
    /// Where a place has no key.
    pub(super) absent_tm: Tensor,
    pub(super) key_tmk: Tensor,
}
