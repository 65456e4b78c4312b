//! States judged from outside: by `xfs_repair`, and by the kernel, which recovers them too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges::XfsJudges;
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs};

use crate::engine::copy;

/// What the kernel says of a log whose last record is torn.
const TORN: &str = "Torn write";

/// The outside judges.
pub(crate) struct OutsideXfsJudges<'j> {
    judges: &'j XfsJudges,
    /// All states of a run have the same id, and few loop devices are enough.
    turn: Mutex<()>,
}

impl<'j> OutsideXfsJudges<'j> {
    pub(crate) fn new(judges: &'j XfsJudges) -> Self {
        Self { judges, turn: Mutex::default() }
    }

    /// Requires that the kernel recovers a state as we do:
    ///
    /// 1. The kernel mounts one copy, and does not complain. We recover another one.
    /// 2. `xfs_repair` finds nothing in either one.
    /// 3. What we show of ours is what the kernel shows of its own, and of ours.
    /// 4. The kernel changes our copy, and neither `xfs_repair` nor our check finds anything.
    pub(crate) fn judge(&self, devices: &[Arc<MemoryDevice>]) -> Result<(), String> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let judged = catch_unwind(AssertUnwindSafe(|| self.judge_one(&devices[0])));
        judged.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            Err(text.unwrap_or_else(|| "a judge panicked".to_owned()))
        })
    }

    fn judge_one(&self, state: &MemoryDevice) -> Result<(), String> {
        let by_kernel = XfsDisk::create(self.judges, state.size_bytes() >> 20);
        copy(state, &*by_kernel.writable_device());
        let by_us = by_kernel.copy();
        drop(by_kernel.mount("rw,noatime,nouuid", &[RECOVERY, TORN]));
        let options = XfsOptions::default();
        let recovered = XfsVolume::recover(&by_us.writable_device(), &options)
            .map_err(|error| format!("our recovery: {error}"))?;
        let allowed = incomplete(&by_kernel, "behind the kernel's recovery")?;
        if incomplete(&by_us, "behind our recovery")? != allowed {
            return Err("other attributes are incomplete behind our recovery".to_owned());
        }
        let has_intents = recovered.as_ref().is_some_and(|done| done.finished_intents > 0);
        let compare = Compare::default().without(Aspect::StoredAcls);
        let compare = if has_intents {
            // Trees that were changed in another order may have another number of blocks, and the
            // kernel gives a file whose attribute an intent changes the time of the recovery.
            compare.without(Aspect::Allocation).without(Aspect::TimesOfNames)
        } else {
            compare
        };
        let ours = XfsVolume::open(by_us.device(), &options).map_err(|error| error.to_string())?;
        for (disk, whose) in [(&by_kernel, "the kernel's"), (&by_us, "our")] {
            let mount = disk.mount("ro,noatime,nouuid", &[]);
            let outcome = compare.run(&*ours, mount.path());
            if !outcome.differences.is_empty() {
                return Err(format!("{whose} recovery: {outcome}"));
            }
        }
        drop(ours);
        {
            let mount = by_us.mount("rw,noatime,nouuid", &[]);
            // A full volume may have no room.
            let _ = std::fs::write(mount.path().join("by the kernel"), "contents");
        }
        incomplete(&by_us, "behind a change by the kernel")?;
        let found = check_xfs(&by_us.device(), &options).map_err(|error| error.to_string())?;
        match found.findings.first() {
            None => Ok(()),
            Some(finding) => Err(format!("our check behind a change by the kernel: {finding}")),
        }
    }
}

/// Checks a volume with `xfs_repair`. A crash may leave an attribute whose value was not written
/// yet: `xfs_repair` complains of it also behind a recovery by the kernel. Returns such complaints.
fn incomplete(disk: &XfsDisk, when: &str) -> Result<Vec<String>, String> {
    let Err(finding) = disk.check() else { return Ok(Vec::new()) };
    let lines = finding.lines().filter(|line| line.contains("is INCOMPLETE"));
    let lines: Vec<_> = lines.map(str::to_owned).collect();
    if lines.is_empty() { Err(format!("{when}: {finding}")) } else { Ok(lines) }
}
