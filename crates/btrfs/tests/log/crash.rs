//! Power cuts while we replay. Afterwards the log is still pending, or the replay is complete.
//! `btrfs check` finds nothing after another replay.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::Compare;
use offshoot_testkit::random::seed_of_run;

use crate::cut::{SHAPES, cut, read_only, replay, shell};

/// Every state opens, and shows what the log holds: replayed on the devices, or in memory.
#[test]
fn a_replay_that_is_cut() {
    let Some(judges) = judges::require() else { return };
    for shape in [SHAPES[1], SHAPES[4]] {
        let cut = cut(
            &judges,
            shape,
            |path| shell(path, "mkdir a b; echo 1 > a/x; echo 1 > y; seq 9000 > d"),
            |path| shell(path, "mv a/x b/x; sync b/x; seq 9999 >> d; sync d; rm y; sync ."),
        );
        let expected = read_only(cut.devices());
        let devices: Vec<_> = CrashDevice::set(cut.devices()).into_iter().map(Arc::new).collect();
        let shared = || devices.iter().map(|one| one.clone() as Arc<dyn BlockDevice>).collect();
        let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        drop(BtrfsVolume::open_writable(shared(), &options).expect("it is replayed"));
        let plan = CrashPlan { seed: seed_of_run(), samples_per_epoch: 24, ..CrashPlan::default() };
        let mut seen = HashSet::new();
        let (mut pending, mut done) = (0, 0);
        for state in devices[0].log().states(&plan) {
            let state = state.expect("the images are there");
            let what = format!("state {} ({})", state.number, state.description);
            let members: Vec<_> = state.devices.into_iter().map(Arc::new).collect();
            let mut hasher = DefaultHasher::new();
            for member in &members {
                member.hash_changes(&mut hasher);
            }
            if !seen.insert(hasher.finish()) {
                continue;
            }
            let shared = || -> Vec<Arc<dyn BlockDevice>> {
                members.iter().map(|one: &Arc<MemoryDevice>| one.clone() as Arc<_>).collect()
            };
            let ignoring = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
            let volume =
                BtrfsVolume::open(shared(), &ignoring).unwrap_or_else(|e| panic!("{what}: {e}"));
            if volume.superblock().has_pending_log() {
                pending += 1;
            } else {
                done += 1;
            }
            drop(volume);
            let compare = Compare::default();
            let shown = compare.run_filesystems(&read_only(shared()), &expected);
            assert!(shown.differences.is_empty(), "{what}: {shown}");
            replay(shared());
            let shown = compare.run_filesystems(&read_only(shared()), &expected);
            assert!(shown.differences.is_empty(), "{what}, replayed: {shown}");
            let disks = Disks::create(&judges, members.len(), members[0].size_bytes() >> 20);
            let devices: Vec<_> = members.iter().map(|one| &**one as &dyn BlockDevice).collect();
            disks.fill(&devices).expect("a copy of the state");
            disks.assert_checks();
        }
        println!("{shape:?}: {pending} states with the log, {done} without");
        assert!(pending > 0 && done > 0, "{pending} with the log, {done} without");
    }
}
