//! `cargo xtask test`: everything that has to pass.

use std::time::Instant;

use crate::shell::{Result, cargo};
use crate::{licences, setup};

/// The judges, the format, the lints, the tests and the licences, in this order.
pub(crate) fn test() -> Result {
    let started = Instant::now();
    setup::ready()?;
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])?;
    // The development profile compiles the engine with little and the checksums and
    // decompressors with full optimisation, which is the fastest way through both.
    cargo(&["test", "--workspace", "--quiet", "--no-fail-fast"])?;
    licences::check()?;
    println!("everything passed in {} s", started.elapsed().as_secs());
    Ok(())
}
