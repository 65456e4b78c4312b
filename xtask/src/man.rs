//! `cargo xtask man`: the man pages. The program writes them from the definitions that it parses
//! its command line with.

use crate::shell::{Result, cargo};

/// Writes them into `directory`.
pub(crate) fn man(directory: &str) -> Result {
    cargo(&["run", "--quiet", "--package", "offshoot-cli", "--", "man", directory])?;
    println!("the pages are there: man -l {directory}/offshoot.1");
    Ok(())
}
