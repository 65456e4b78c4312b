//! `cargo xtask campaign WHAT`: tests that run for as long as one likes, in release mode.

use crate::shell::{Result, cargo_with};

/// Runs the campaign `what`.
pub(crate) fn campaign(what: &str, options: &[&str]) -> Result {
    if what != "crash" {
        return Err(format!("there is no campaign {what}; there is: crash"));
    }
    let mut variables = Vec::new();
    for option in options.chunks(2) {
        match *option {
            ["--workloads", value] => variables.push(("OFFSHOOT_WORKLOADS", value)),
            ["--seed", value] => variables.push(("OFFSHOOT_SEED", value)),
            _ => return Err(format!("no option of a campaign: {}", option.join(" "))),
        }
    }
    let test = ["test", "--release", "--package", "offshoot-btrfs", "--test", "crash"];
    let only = ["--", "--ignored", "--nocapture", "--exact", "campaign::campaign"];
    cargo_with(&variables, &[&test[..], &only].concat())
}
