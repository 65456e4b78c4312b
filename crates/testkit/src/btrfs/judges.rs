//! Which judges of btrfs this machine has. [`crate::judges`] has the rules.

use std::sync::OnceLock;

use offshoot_machine::progs_version;
pub use offshoot_machine::{PROGS_AT_LEAST, SKIPPED_FILE, may_mount};

pub use crate::judges::skip;
use crate::judges::{JudgeVerdict, LoopTurn, SETUP, without_kernel};
use crate::run::try_run;

/// The proof that the judges are there, and a place in the queue for loop devices.
#[derive(Debug)]
pub struct Judges {
    _turn: LoopTurn,
}

/// The judges, or `None` and a line on standard error if this machine cannot have them.
///
/// Waits while as many tests as the machine bears are running with judges.
///
/// # Panics
/// When a judge is missing on a machine that could have it.
#[must_use]
pub fn require() -> Option<Judges> {
    are_present().then(|| Judges { _turn: LoopTurn::queue() })
}

/// Whether there are judges. For a test that needs `btrfs check` of an image and no loop device,
/// and so no place in the queue. If the machine cannot have judges, prints so, like [`require`].
///
/// # Panics
/// When a judge is missing on a machine that could have it.
#[must_use]
pub fn are_present() -> bool {
    static VERDICT: OnceLock<JudgeVerdict> = OnceLock::new();
    VERDICT.get_or_init(|| JudgeVerdict::of(missing_judge)).are_present()
}

fn missing_judge() -> Option<String> {
    let Ok(found) = try_run("btrfs", &["--version"]) else {
        return Some(format!("btrfs-progs is missing: {SETUP} (Debian package `btrfs-progs`)"));
    };
    if progs_version(&found).is_none_or(|version| version < PROGS_AT_LEAST) {
        let (major, minor) = PROGS_AT_LEAST;
        let found = found.lines().next().unwrap_or("nothing");
        return Some(format!(
            "btrfs-progs {major}.{minor} or newer is needed, `{found}` is installed: {SETUP} \
             (on Debian 12 from the suite `bookworm-backports`)"
        ));
    }
    without_kernel("btrfs")
}
