//! Which judges of XFS this machine has. [`crate::judges`] has the rules.
//!
//! All of them are of the newest `xfsprogs` that are here: those of the system, or those that
//! `cargo xtask setup` keeps beside the build. A volume that only newer ones can make asks for them
//! with [`XfsJudges::must_be_new`].

use std::sync::OnceLock;

pub use offshoot_machine::xfsprogs::{XFSPROGS_AT_LEAST, XfsProgs};

use crate::judges::{JudgeVerdict, LoopTurn, SETUP, without_kernel};

/// The proof that the judges are there, and a place in the queue for loop devices.
#[derive(Debug)]
pub struct XfsJudges {
    progs: XfsProgs,
    _turn: LoopTurn,
}

/// The judges, or `None` and a line on standard error if this machine cannot have them.
///
/// Waits while as many tests as the machine bears are running with judges.
///
/// # Panics
/// When a judge is missing on a machine that could have it.
#[must_use]
pub fn require() -> Option<XfsJudges> {
    static VERDICT: OnceLock<JudgeVerdict> = OnceLock::new();
    let verdict = VERDICT.get_or_init(|| JudgeVerdict::of(missing_judge));
    let progs = newest().filter(|_| verdict.are_present())?;
    Some(XfsJudges { progs: progs.clone(), _turn: LoopTurn::queue() })
}

fn newest() -> Option<&'static XfsProgs> {
    static NEWEST: OnceLock<Option<XfsProgs>> = OnceLock::new();
    NEWEST.get_or_init(XfsProgs::newest).as_ref()
}

fn missing_judge() -> Option<String> {
    if newest().is_none() {
        return Some(format!("xfsprogs are missing: {SETUP} (Debian package `xfsprogs`)"));
    }
    without_kernel("xfs")
}

impl XfsJudges {
    /// The programs.
    #[must_use]
    pub fn progs(&self) -> &XfsProgs {
        &self.progs
    }

    /// Fails the test if the programs are too old for `what`.
    #[track_caller]
    pub fn must_be_new(&self, what: &str) {
        let ((major, minor), found) = (XFSPROGS_AT_LEAST, self.progs.version());
        assert!(
            found >= XFSPROGS_AT_LEAST,
            "{what} needs xfsprogs {major}.{minor} or newer, {}.{} is here: {SETUP}",
            found.0,
            found.1
        );
    }
}
