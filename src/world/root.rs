//! Work of rank 0 alone, and typed values that ranks exchange.
//!
//! Every rank enters every function here. Values travel as JSON between the same types, and floats come back with the same
//! bits; a float that is not finite has no JSON form, so values must be finite.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Axis, World};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Rank, as_index, from_index};

impl World {
    /// Runs `work` on rank 0, then agrees on the outcome. Returns its value on rank 0, `None` elsewhere.
    ///
    /// # Errors
    /// On every rank, when `work` failed.
    pub fn on_root<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<Option<T>, Failure> {
        let own = (self.all.rank() == Rank(0)).then(work);
        self.agree(own.transpose())
    }

    /// Runs `work` on rank 0 and gives its value to every rank.
    ///
    /// # Errors
    /// On every rank, when `work` failed.
    pub fn from_root<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
    {
        let own = self.on_root(work)?;
        Ok(broadcast(&self.all, own))
    }

    /// [`World::from_root`] for work that takes long: the other ranks sleep meanwhile. `work` must end by itself, since no
    /// deadline but rank 0's own holds for it.
    ///
    /// # Errors
    /// On every rank, when `work` failed.
    pub fn from_root_while_others_sleep<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
    {
        let own = self.on_root_long(|| work().map(Some))?;
        Ok(broadcast(&self.all, own))
    }

    /// Runs `work` on the first rank of each machine and gives its value to the machine's other ranks, which sleep meanwhile.
    /// `machine` is [`World::machine`]. `work` calls [`crate::runtime::liveness::Tracker::report_alive`] every few seconds; it
    /// must end by itself.
    ///
    /// # Errors
    /// On every rank of the world, when `work` failed on any machine.
    pub fn from_first_of_machine<T>(
        &self,
        machine: &Axis,
        work: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
    {
        let own = if machine.rank() == Rank(0) {
            let outcome = work();
            machine.wake();
            outcome.map(Some)
        } else {
            // A stop is noticed by the first update.
            machine.sleep(|| self.tracker().report_alive(), || false);
            Ok(None)
        };
        Ok(broadcast(machine, self.agree(own)?))
    }

    /// Rank 0's answer on every rank; the others' do not count. For decisions by a clock, which differs from rank to rank.
    #[must_use]
    pub fn root_says(&self, yes: bool) -> bool {
        self.all.gather_numbers(u64::from(yes))[0] == 1
    }

    /// Every rank's value, in rank order, on every rank.
    ///
    /// # Panics
    /// When a value holds a float that is not finite.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Vec<T> {
        self.all.gather_texts(&to_wire(own)).iter().map(|text| from_wire(text.as_bytes())).collect()
    }
}

/// The value of the axis's rank 0 on each of its ranks; the others' are not read.
fn broadcast<T: Serialize + DeserializeOwned>(axis: &Axis, own: Option<T>) -> T {
    let mut bytes = own.as_ref().map(to_wire).unwrap_or_default().into_bytes();
    let length = axis.gather_numbers(from_index(bytes.len()))[0];
    bytes.resize(as_index(length), 0);
    axis.broadcast(&mut bytes);
    own.unwrap_or_else(|| from_wire(&bytes))
}

fn to_wire<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("keys of a message are texts, so there is a JSON form")
}

fn from_wire<T: DeserializeOwned>(bytes: &[u8]) -> T {
    serde_json::from_slice(bytes).expect("a message is read as the type that was sent, and its floats are finite")
}
