//! `cargo xtask campaign WHAT`: long tests in release mode. Options set how long each runs.

use crate::setup;
use crate::shell::{Result, cargo_with};

/// The campaigns: the tests that each runs, and its options with the variables that they set.
const CAMPAIGNS: [Campaign; 14] = [
    Campaign {
        what: "crash",
        package: "offshoot-btrfs",
        targets: &["--test", "crash"],
        test: Some("campaign::campaign"),
        options: &[
            ("--workloads", "OFFSHOOT_WORKLOADS"),
            ("--judged-every", "OFFSHOOT_JUDGED_EVERY"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
    Campaign {
        what: "enospc",
        package: "offshoot-btrfs",
        targets: &["--test", "enospc"],
        test: Some("campaign"),
        options: &[
            ("--seconds", "OFFSHOOT_SECONDS"),
            ("--threads", "OFFSHOOT_THREADS"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
    Campaign {
        what: "files",
        package: "offshoot-btrfs",
        targets: &["--test", "files"],
        test: Some("campaign"),
        options: &[("--files", "OFFSHOOT_FILES"), ("--seed", "OFFSHOOT_SEED")],
        always: &[],
    },
    Campaign {
        what: "fits",
        package: "offshoot-btrfs",
        targets: &["--test", "enospc"],
        test: Some("fits::campaign"),
        options: &[("--tib", "OFFSHOOT_TIB")],
        always: &[],
    },
    Campaign {
        what: "mount",
        package: "offshoot-cli",
        targets: &["--test", "mount"],
        test: Some("campaign::campaign"),
        options: &[
            ("--part", "OFFSHOOT_PART"),
            ("--seconds", "OFFSHOOT_SECONDS"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
    Campaign {
        what: "mutants",
        package: "offshoot-btrfs",
        targets: &["--test", "mutants"],
        test: Some("campaign"),
        options: &[
            ("--mutants", "OFFSHOOT_MUTANTS"),
            ("--structures", "OFFSHOOT_STRUCTURES"),
            ("--keep", "OFFSHOOT_KEEP"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
    Campaign {
        what: "pingpong",
        package: "offshoot-btrfs",
        targets: &["--test", "pingpong"],
        test: Some("rows::campaign"),
        options: &[("--rounds", "OFFSHOOT_ROUNDS"), ("--seed", "OFFSHOOT_SEED")],
        always: &[],
    },
    Campaign {
        what: "snapshots",
        package: "offshoot-btrfs",
        targets: &["--test", "subvolumes"],
        test: Some("many::campaign"),
        options: &[
            ("--snapshots", "OFFSHOOT_SNAPSHOTS"),
            ("--files", "OFFSHOOT_FILES"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
    Campaign {
        what: "volumes",
        package: "offshoot-btrfs",
        targets: &["--lib", "--test", "namespace"],
        test: None,
        options: &[],
        always: &[("OFFSHOOT_JUDGED_EVERY", "1")],
    },
    Campaign {
        what: "xfs-crash",
        package: "offshoot-xfs",
        targets: &["--test", "crash"],
        test: Some("campaign::campaign"),
        options: &[
            ("--workloads", "OFFSHOOT_WORKLOADS"),
            ("--shapes", "OFFSHOOT_SHAPES"),
            ("--judged-every", "OFFSHOOT_JUDGED_EVERY"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
    Campaign {
        what: "xfs-hostile",
        package: "offshoot-xfs",
        targets: &["--package", "offshoot-cli", "--test", "hostile"],
        test: Some("campaign"),
        options: &[("--cases", "OFFSHOOT_SWEEP"), ("--seed", "OFFSHOOT_SEED")],
        always: &[],
    },
    Campaign {
        what: "xfs-large",
        package: "offshoot-xfs",
        targets: &["--test", "large"],
        test: Some("campaign"),
        options: &[("--number", "OFFSHOOT_LARGE")],
        always: &[],
    },
    Campaign {
        what: "xfs-pingpong",
        package: "offshoot-xfs",
        targets: &["--test", "pingpong"],
        test: Some("campaign"),
        options: &[("--rounds", "OFFSHOOT_ROUNDS"), ("--seed", "OFFSHOOT_SEED")],
        always: &[],
    },
    Campaign {
        what: "xfs-recovery",
        package: "offshoot-xfs",
        targets: &["--test", "recovery"],
        test: Some("recorded::campaign"),
        options: &[
            ("--workloads", "OFFSHOOT_WORKLOADS"),
            ("--cuts", "OFFSHOOT_CUTS"),
            ("--seed", "OFFSHOOT_SEED"),
        ],
        always: &[],
    },
];

struct Campaign {
    what: &'static str,
    package: &'static str,
    /// The arguments of cargo that select the targets with the tests.
    targets: &'static [&'static str],
    /// The test that only this campaign runs. With `None` it runs all ordinary tests of the
    /// targets.
    test: Option<&'static str>,
    options: &'static [(&'static str, &'static str)],
    /// Variables that every run sets.
    always: &'static [(&'static str, &'static str)],
}

/// Runs the campaign `what`.
pub(crate) fn campaign(what: &str, options: &[&str]) -> Result {
    let Some(campaign) = CAMPAIGNS.iter().find(|campaign| campaign.what == what) else {
        let all = CAMPAIGNS.map(|campaign| campaign.what).join(", ");
        return Err(format!("there is no campaign {what}; there are: {all}"));
    };
    let mut variables = campaign.always.to_vec();
    for option in options.chunks(2) {
        let known = campaign.options.iter().find(|(name, _)| *name == option[0]);
        match (known, option) {
            (Some((_, variable)), [_, value]) => variables.push((*variable, *value)),
            _ => return Err(format!("no option of this campaign: {}", option.join(" "))),
        }
    }
    setup::ready()?;
    let tests = ["test", "--release", "--package", campaign.package];
    let only = campaign.test.map(|test| ["--", "--ignored", "--nocapture", "--exact", test]);
    let only = only.as_ref().map_or(&[][..], |only| &only[..]);
    cargo_with(&variables, &[&tests[..], campaign.targets, only].concat())
}
