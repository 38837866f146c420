//! Claims about any number of ranks; run under `mpirun -n N`.
#![expect(clippy::print_stdout, reason = "a test binary without a harness prints its own results")]

fn main() {
    let board = longstraw::watch::Board::default();
    let world = longstraw::world::World::start(None, board).expect("MPI starts");
    for case in ["qwen3", "qwen2", "llama", "mistral"] {
        for page in [64, 3] {
            for kind in [tch::Kind::Double, tch::Kind::Float] {
                for gradient in [
                    longstraw::parity::Gradient::Last(longstraw::units::Tokens(1)),
                    longstraw::parity::Gradient::Last(longstraw::units::Tokens(0)),
                    longstraw::parity::Gradient::Exact,
                ] {
                    let options = longstraw::parity::Options {
                        gradient,
                        kind,
                        page_size: longstraw::units::Tokens(page),
                        micro_block: longstraw::units::Tokens(5),
                    };
                    let report = longstraw::parity::run(
                        &world,
                        std::path::Path::new(&format!("tests/cases/{case}/base")),
                        &options,
                    )
                    .unwrap_or_else(|e| panic!("{e}"));
                    if world.all.rank().0 == 0 {
                        println!(
                            "{case} page {page} {} {}: {:.1e} {} ratio {} passed {}",
                            report.gradient,
                            report.dtype,
                            report.worst,
                            report.worst_tensor,
                            report.ratio_is_one,
                            report.passed
                        );
                    }
                }
            }
        }
    }
}
