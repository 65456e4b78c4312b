//! `cargo xtask campaign WHAT`: tests that run for as long as one likes, in release mode.

use crate::setup;
use crate::shell::{Result, cargo_with};

/// The campaigns: what runs them, and their options with the variables that they set.
const CAMPAIGNS: [Campaign; 6] = [
    Campaign {
        what: "crash",
        package: "offshoot-btrfs",
        test: ["crash", "campaign::campaign"],
        options: &[
            ("--workloads", "OFFSHOOT_WORKLOADS"),
            ("--judged-every", "OFFSHOOT_JUDGED_EVERY"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
    },
    Campaign {
        what: "enospc",
        package: "offshoot-btrfs",
        test: ["enospc", "campaign"],
        options: &[
            ("--seconds", "OFFSHOOT_SECONDS"),
            ("--threads", "OFFSHOOT_THREADS"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
    },
    Campaign {
        what: "files",
        package: "offshoot-btrfs",
        test: ["files", "campaign"],
        options: &[("--files", "OFFSHOOT_FILES"), ("--seed", "OFFSHOOT_SEED")],
    },
    Campaign {
        what: "mount",
        package: "offshoot",
        test: ["mount", "campaign::campaign"],
        options: &[("--seconds", "OFFSHOOT_SECONDS"), ("--seed", "OFFSHOOT_SEED")],
    },
    Campaign {
        what: "pingpong",
        package: "offshoot-btrfs",
        test: ["pingpong", "rows::campaign"],
        options: &[("--rounds", "OFFSHOOT_ROUNDS"), ("--seed", "OFFSHOOT_SEED")],
    },
    Campaign {
        what: "snapshots",
        package: "offshoot-btrfs",
        test: ["subvolumes", "many::campaign"],
        options: &[
            ("--snapshots", "OFFSHOOT_SNAPSHOTS"),
            ("--files", "OFFSHOOT_FILES"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
    },
];

struct Campaign {
    what: &'static str,
    package: &'static str,
    /// The target with the tests, and the test.
    test: [&'static str; 2],
    options: &'static [(&'static str, &'static str)],
}

/// Runs the campaign `what`.
pub(crate) fn campaign(what: &str, options: &[&str]) -> Result {
    let Some(campaign) = CAMPAIGNS.iter().find(|campaign| campaign.what == what) else {
        let all = CAMPAIGNS.map(|campaign| campaign.what).join(", ");
        return Err(format!("there is no campaign {what}; there are: {all}"));
    };
    let mut variables = Vec::new();
    for option in options.chunks(2) {
        let known = campaign.options.iter().find(|(name, _)| *name == option[0]);
        match (known, option) {
            (Some((_, variable)), [_, value]) => variables.push((*variable, *value)),
            _ => return Err(format!("no option of this campaign: {}", option.join(" "))),
        }
    }
    setup::ready()?;
    let [target, test] = campaign.test;
    let build = ["test", "--release", "--package", campaign.package, "--test", target];
    let only = ["--", "--ignored", "--nocapture", "--exact", test];
    cargo_with(&variables, &[&build[..], &only].concat())
}
