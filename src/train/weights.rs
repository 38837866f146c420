//! Loads the model's weights on every rank; the ranks of a machine share the digests of the checkpoint's bytes.

use tch::{Device, Kind};

use crate::config::{self, Loaded, RunConfig};
use crate::model::digests::TensorDigests;
use crate::model::spec::Spec;
use crate::model::weights::{ExpertShare, Form, Opening, Share, Weights, ZeroWeights};
use crate::runtime::failure::Failure;
use crate::runtime::units::Rank;
use crate::world::World;

/// The run's folder for what can be made again.
const CACHE: &str = "cache";

/// Loads or makes the weights as `kind` on `device`; all ranks fail together.
///
/// # Errors
/// When the checkpoint is not whole, holds values that cannot be right, or memory does not suffice.
pub(super) fn open(
    loaded: &Loaded,
    world: &World,
    spec: &Spec,
    kind: Kind,
    device: Device,
) -> Result<Weights, Failure> {
    let config = &loaded.run;
    if config.model.random_init {
        let drawn = Weights::random_as(spec, config.run.seed, kind, device, ExpertShare::of(&world.ep), form(config));
        return world.agree(drawn.map_err(Failure::from));
    }
    let opened = config
        .model_path()
        .map_err(Failure::from)
        .and_then(|folder| Opening::open(folder, spec, Some(&loaded.rank.dir.join(CACHE))).map_err(Failure::from))
        .and_then(|opening| opening.held_as(form(config)).map_err(Failure::from));
    let opening = world.agree(opened)?;
    let machine = world.machine();
    // Ranks that see other files under the same path make all digests themselves.
    let identities = machine.gather_texts(&opening.identity());
    let same_files = identities.iter().all(|identity| *identity == identities[0]);
    let share = if same_files { Share { rank: machine.rank().0, ranks: machine.size() } } else { Share::ALL };
    let loading = world.agree(
        opening.load(spec, kind, device, zeros(config), share, ExpertShare::of(&world.ep)).map_err(Failure::from),
    )?;
    let own = serde_json::to_string(loading.own_digests()).unwrap_or_default();
    let shares = machine.gather_texts(&own);
    let shares = shares.iter().filter(|_| same_files);
    let shares: Vec<TensorDigests> = shares.filter_map(|share| serde_json::from_str(share).ok()).collect();
    Ok(loading.finish(shares, machine.rank() == Rank(0)))
}

fn zeros(config: &RunConfig) -> ZeroWeights {
    if config.model.allow_zero_weights { ZeroWeights::Allow } else { ZeroWeights::Refuse }
}

fn form(config: &RunConfig) -> Form {
    match config.model.weights {
        config::Weights::Checkpoint => Form::Plain,
        config::Weights::Fp8 => Form::Fp8,
    }
}
