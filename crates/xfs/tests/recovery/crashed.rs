//! Volumes that were not unmounted, recovered by the kernel on one copy and by us on another.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::Random;
use offshoot_testkit::xfs::churn::{ChurnPlan, churn};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::fill::XfsFillShape;
use offshoot_testkit::xfs::judges::XfsJudges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_xfs::{XfsOptions, XfsPending, XfsRecovery, XfsReport, XfsVolume};
use offshoot_xfs_format::log::items::XfsItemType;

use crate::log_on_disk::LogOnDisk;

/// A volume that was not unmounted.
pub(crate) struct CrashedVolume {
    pub(crate) disk: XfsDisk,
    pub(crate) kernel_says: Vec<&'static str>,
}

/// Options whose reports are collected.
pub(crate) fn collecting() -> (XfsOptions, Arc<Mutex<Vec<XfsReport>>>) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let told = reports.clone();
    let reporter: offshoot_xfs::XfsReporter =
        Arc::new(move |report: &XfsReport| told.lock().unwrap().push(report.clone()));
    (XfsOptions { reporter: Some(reporter), ..XfsOptions::default() }, reports)
}

impl CrashedVolume {
    /// A volume of a kind, changed, and shut down as by a crash.
    ///
    /// What `change` returns, such as open files, lives until then.
    pub(crate) fn make<T>(
        judges: &XfsJudges,
        kind: &'static XfsVolumeKind,
        how: XfsShutdown,
        change: impl FnOnce(&Path, &XfsFillShape) -> T,
    ) -> Self {
        let disk = XfsDisk::create(judges, kind.mib);
        disk.mkfs(kind.mkfs);
        if !kind.changes.is_empty() {
            disk.change_with_xfs_db(kind.changes);
        }
        let shape = XfsFillShape::of(&disk);
        let mut mount = disk.mount("rw,noatime", kind.kernel_says);
        let held = change(mount.path(), &shape);
        disk.shut_down(&mut mount, how);
        drop(held);
        drop(mount);
        Self { disk, kernel_says: kind.kernel_says.to_vec() }
    }

    pub(crate) fn copy(&self) -> Self {
        Self { disk: self.disk.copy(), kernel_says: self.kernel_says.clone() }
    }

    /// Compares our recoveries, in memory and to disk, with the kernel's of a copy. Returns what
    /// ours to disk did.
    pub(crate) fn judge(&self, names_at_least: u64) -> XfsRecovery {
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        let by_kernel = self.disk.copy();
        drop(by_kernel.mount("rw,noatime", &recovering));
        let allowed = assert_checks_but_for(&by_kernel, None);
        let (options, reports) = collecting();
        let ours = XfsVolume::open(self.disk.device(), &options).unwrap();
        let reports = std::mem::take(&mut *reports.lock().unwrap());
        let pending = XfsPending::default();
        assert_eq!(reports, [XfsReport::LogReplayed { is_stored: false, pending }]);
        let by_us = self.disk.copy();
        let recovered = XfsVolume::recover(&by_us.writable_device(), &XfsOptions::default());
        let recovered = recovered.unwrap().expect("the log is not empty");
        let compare = self.compare_with_kernel(&recovered);
        {
            let mount = by_kernel.mount("ro,noatime", &self.kernel_says);
            compare.run(&*ours, mount.path()).assert_same(names_at_least);
        }
        assert_checks_but_for(&by_us, Some(&allowed));
        let (options, reports) = collecting();
        let ours = XfsVolume::open(by_us.device(), &options).unwrap();
        assert_eq!(*reports.lock().unwrap(), []);
        {
            let mount = by_kernel.mount("ro,noatime", &self.kernel_says);
            compare.run(&*ours, mount.path()).assert_same(names_at_least);
        }
        // Trees that were changed in another order may have another number of blocks.
        let counters = ["icount", "ifree", "fdblocks"];
        let is_replayed_alone = recovered.finished_intents + recovered.freed_inodes == 0;
        for counter in counters.iter().take(if is_replayed_alone { 3 } else { 2 }) {
            let value = |disk: &XfsDisk| disk.field(&["sb 0"], counter);
            assert_eq!(value(&by_us), value(&by_kernel), "{counter}");
        }
        {
            // A writable mount would give back preallocated space of files that are closed.
            let mount = by_us.mount("ro,noatime", &self.kernel_says);
            compare.run(&*ours, mount.path()).assert_same(names_at_least);
        }
        {
            let mount = by_us.mount("rw,noatime", &self.kernel_says);
            fs::write(mount.path().join("after"), "the recovery").unwrap();
        }
        assert_checks_but_for(&by_us, Some(&allowed));
        recovered
    }

    /// As [`compare_with_kernel`]. The kernel gives a file whose attribute an intent changes the
    /// time of the recovery.
    pub(crate) fn compare_with_kernel(&self, recovered: &XfsRecovery) -> Compare {
        let compare = compare_with_kernel(recovered);
        let attributes = LogOnDisk::of(&self.disk).intents_left(XfsItemType::Attri);
        if attributes > 0 { compare.without(Aspect::TimesOfNames) } else { compare }
    }
}

/// Compares a volume that was recovered so with what the kernel made of a copy. Trees of extents
/// that intents have changed may have another number of blocks, which a file counts as its own.
pub(crate) fn compare_with_kernel(recovered: &XfsRecovery) -> Compare {
    let compare = Compare::default().without(Aspect::StoredAcls);
    if recovered.finished_intents > 0 { compare.without(Aspect::Allocation) } else { compare }
}

/// Checks a volume. A crash may leave an attribute whose value was not written yet: `xfs_repair`
/// complains of it also behind a recovery by the kernel. Returns the lines about such attributes,
/// which must be the `allowed` ones if the caller has some.
#[track_caller]
pub(crate) fn assert_checks_but_for(disk: &XfsDisk, allowed: Option<&[String]>) -> Vec<String> {
    let Err(finding) = disk.check() else { return Vec::new() };
    let lines = finding.lines().filter(|line| line.contains("is INCOMPLETE"));
    let lines: Vec<_> = lines.map(str::to_owned).collect();
    let are_allowed = allowed.is_none_or(|allowed| lines == allowed);
    assert!(!lines.is_empty() && are_allowed, "{finding}");
    lines
}

/// Waits until the kernel has freed the inodes of removed files: until their number stays the same
/// for 300 ms, and at most 10 s.
pub(crate) fn settle(root: &Path) {
    let free = || rustix::fs::statvfs(root).unwrap().f_ffree;
    let (mut last, mut same) = (free(), 0);
    for _ in 0..200 {
        std::thread::sleep(std::time::Duration::from_millis(50));
        let now = free();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        if same == 6 {
            return;
        }
    }
}

/// Tries `attempt` up to five times. What a log of the kernel holds depends on the speed of the
/// machine, so one may not be what a test needs.
pub(crate) fn make_until<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let mut reason = String::new();
    for _ in 0..5 {
        match attempt() {
            Ok(made) => return made,
            Err(why) => reason = why,
        }
        eprintln!("made again: {reason}");
    }
    panic!("{reason}")
}

/// How many cases of a kind are tried: few, or those of a campaign.
pub(crate) fn rounds(few: u64) -> u64 {
    let given = std::env::var("OFFSHOOT_ROUNDS").ok();
    given.map_or(few, |rounds| few * rounds.parse::<u64>().expect("a number of rounds"))
}

/// A volume with a log of many records, each synced. The log can end with each of the last 30.
pub(crate) fn many_records(
    judges: &XfsJudges,
    plan: ChurnPlan,
    random: &mut Random,
) -> CrashedVolume {
    let kind = XfsVolumeKind::named("today");
    make_until(|| {
        let crashed = CrashedVolume::make(judges, kind, XfsShutdown::LogWritten, |root, _| {
            for round in 0..30 {
                let dir = root.join(format!("round {round}"));
                fs::create_dir(&dir).unwrap();
                churn(&dir, plan, 8, random);
                fs::File::open(&dir).unwrap().sync_all().unwrap();
            }
            settle(root);
        });
        let ends = LogOnDisk::of(&crashed.disk).possible_ends().len();
        if ends < 30 { Err(format!("only {ends} ends of the log")) } else { Ok(crashed) }
    })
}

/// With removals, most cuts leave unlinked inodes.
pub(crate) const REMOVING: ChurnPlan = ChurnPlan { has_clones: true, has_removals: true };
pub(crate) const ADDING: ChurnPlan = ChurnPlan { has_clones: false, has_removals: false };
