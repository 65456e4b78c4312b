//! `cargo xtask test`: everything that has to pass.

use std::time::Instant;

use crate::setup;
use crate::shell::{Result, cargo, output};

/// The judges, the format, the lints, the tests and the licences, in this order.
pub(crate) fn test() -> Result {
    let started = Instant::now();
    setup::ready()?;
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])?;
    // The development profile compiles the engine with little and the checksums and
    // decompressors with full optimisation, which is the fastest way through both.
    cargo(&["test", "--workspace", "--quiet"])?;
    licences()?;
    println!("everything passed in {} s", started.elapsed().as_secs());
    Ok(())
}

/// Licences and sources of all dependencies, as `deny.toml` has them.
fn licences() -> Result {
    if output("cargo-deny", &["--version"]).is_none() {
        println!("skipped: licences; `cargo install --locked cargo-deny` brings the check");
        return Ok(());
    }
    cargo(&["deny", "--workspace", "check", "licenses", "bans", "sources"])
}
