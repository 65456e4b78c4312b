//! Which judges of XFS this machine has. [`crate::judges`] has the rules.
//!
//! All of them are of the newest `xfsprogs` that are here: those of the system, or those that
//! `cargo xtask setup` keeps beside the build. Older ones are no judges: `xfs_repair` 6.1 takes a
//! directory for damaged if names of one hash fill more than a block.

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
    let (major, minor) = XFSPROGS_AT_LEAST;
    let found = newest().map(XfsProgs::version);
    if found.is_some_and(|version| version >= XFSPROGS_AT_LEAST) {
        return without_kernel("xfs");
    }
    let found =
        found.map_or_else(|| "none".to_owned(), |(major, minor)| format!("{major}.{minor}"));
    Some(format!("xfsprogs {major}.{minor} or newer is needed, {found} is here: {SETUP}"))
}

impl XfsJudges {
    /// The programs.
    #[must_use]
    pub fn progs(&self) -> &XfsProgs {
        &self.progs
    }
}
