//! Superblocks that a power cut tears, or leaves a generation behind. The explorer found both
//! faults.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Member};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_device::{BlockDevice, CrashDevice, CrashEntry, MemoryDevice};
use offshoot_testkit::crash::{MemberDevices, TestedEngine};
use offshoot_vfs::{Error, SetAttr, Timestamp};

use crate::engine::{ONE, OURS, SETS, VolumeShape, volume};

fn commit(devices: MemberDevices, number: i64) {
    let fs = OURS.open_writable(devices).expect("it opens");
    let at = Timestamp { secs: number, nanos: 0 };
    fs.set_attr(fs.root(), &SetAttr::default(), at).expect("a change");
    fs.sync().expect("a commit");
}

fn superblock(device: &dyn BlockDevice) -> [u8; SUPERBLOCK_SIZE] {
    let mut bytes = [0; SUPERBLOCK_SIZE];
    device.read_at(SUPERBLOCK_OFFSETS[0], &mut bytes).expect("memory is read");
    bytes
}

/// A device that begins with the contents of `device`. Writes do not reach `device`.
fn over(device: &Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::over(device.clone()))
}

/// Requires that the volume can be written without the member `behind`. The engine does not change
/// that member, and still sees that it missed commits.
#[track_caller]
fn require_left_out(devices: MemberDevices, behind: usize) {
    let hash = |device: &Arc<dyn BlockDevice>| {
        let mut hasher = DefaultHasher::new();
        let mut bytes = vec![0; 1 << 20];
        for at in (0..device.size_bytes()).step_by(bytes.len()) {
            device.read_at(at, &mut bytes).expect("memory is read");
            hasher.write(&bytes);
        }
        hasher.finish()
    };
    let before = hash(&devices[behind]);
    commit(devices.clone(), 9);
    assert!(hash(&devices[behind]) == before, "the member was written");
    let volume = BtrfsVolume::open(devices.clone(), &EngineOptions::default()).expect("it opens");
    let stale: Vec<_> = volume.members().iter().map(Member::is_stale).collect();
    let expected: Vec<_> = (0..devices.len()).map(|member| member == behind).collect();
    assert_eq!(stale, expected);
    OURS.check(devices).expect("it is in order");
}

/// Regression: we wrote a superblock and its copies between the same two barriers. One power cut
/// could tear all of them, and the volume was lost.
#[test]
fn a_superblock_and_its_copies_are_never_pending_together() {
    let base = volume(1, ONE);
    let device = Arc::new(CrashDevice::new(base[0].clone()));
    for number in 0..3 {
        commit(vec![device.clone()], number);
    }
    let log = device.log();
    let (mut pending, mut primaries, mut copies) = (Vec::new(), 0, 0);
    for entry in log.entries() {
        match entry {
            CrashEntry::Write { offset, .. } if SUPERBLOCK_OFFSETS.contains(offset) => {
                let is_primary = *offset == SUPERBLOCK_OFFSETS[0];
                *(if is_primary { &mut primaries } else { &mut copies }) += 1;
                pending.push(is_primary);
                assert!(!pending.contains(&true) || !pending.contains(&false), "{log:?}");
            }
            CrashEntry::Barrier { .. } => pending.clear(),
            _ => {}
        }
    }
    assert_eq!((primaries, copies), (3, 3), "the device is too small for more than one copy");
}

/// Regression: a power cut between the superblocks of two members left one member a generation
/// behind. We took it for a member that had been away, and refused to write the volume.
#[test]
fn a_commit_that_was_cut_between_the_superblocks_of_its_members_can_be_written_on() {
    let devices = volume(2, SETS[0]);
    let old = superblock(&*devices[1]);
    for missed in 1..3 {
        commit(devices.clone(), missed);
        let cut: MemberDevices = devices.iter().map(over).collect();
        cut[1].write_at(SUPERBLOCK_OFFSETS[0], &old).expect("memory is written");
        if missed == 1 {
            commit(cut.clone(), 9);
            assert_eq!(superblock(&*cut[0])[72..80], superblock(&*cut[1])[72..80], "generations");
            OURS.check(cut).expect("it is in order");
        } else {
            // The engine leaves out a member that was away for a while.
            require_left_out(cut, 1);
        }
    }
}

/// Each member that has blocks of the newest commit shows that, whether or not it has the root of
/// the root tree.
#[test]
fn a_cut_before_any_one_superblock_is_told_from_a_missed_commit() {
    let (mut left_out, mut refusals) = (0, 0);
    for set in SETS {
        let old = volume(3, set);
        commit(old.clone(), 1);
        let new: MemberDevices = old.iter().map(over).collect();
        commit(new.clone(), 2);
        for behind in 0..set.members {
            let cut: MemberDevices = new.iter().map(over).collect();
            let superblock = superblock(&*old[behind]);
            cut[behind].write_at(SUPERBLOCK_OFFSETS[0], &superblock).expect("memory is written");
            commit(cut.clone(), 9);
            OURS.check(cut).expect("it is in order");
            let mut away: MemberDevices = new.iter().map(over).collect();
            away[behind] = over(&old[behind]);
            // If other members have all that is on this member, the engine leaves it out. Otherwise
            // the engine refuses the volume.
            let Err(refused) = OURS.open_writable(away.iter().map(over).collect()) else {
                assert!(set.profiles[1] != Profile::Raid0, "{set} without {behind}");
                require_left_out(away, behind);
                left_out += 1;
                continue;
            };
            let said = refused.to_string();
            assert!(matches!(refused, Error::Unsupported { .. }), "{set}: {refused:?}");
            assert!(said.contains("missed commits"), "{set} without {behind}: {refused:?}");
            let has_alone = matches!(set.profiles[1], Profile::Raid0 | Profile::Single);
            assert!(has_alone, "{set} without {behind}: {refused:?}");
            refusals += 1;
        }
    }
    assert!(left_out >= 6 && refusals >= 2, "{left_out} left out, {refusals} refused");
}

/// Regression: a commit put no block on one member. So nothing there told a power cut from a missed
/// commit, and we refused to write the volume.
#[test]
fn a_member_that_a_commit_put_nothing_on_can_be_behind() {
    // One stripe has room for all blocks of a small commit.
    let devices = volume(4, VolumeShape { node_size: 4096, ..SETS[2] });
    let is_superblock = |entry: &CrashEntry| match entry {
        CrashEntry::Write { offset, .. } => SUPERBLOCK_OFFSETS.contains(offset),
        _ => true,
    };
    let mut found = 0;
    for number in 1..20 {
        let logged = |device: &Arc<dyn BlockDevice>| Arc::new(CrashDevice::new(device.clone()));
        let members: Vec<_> = devices.iter().map(logged).collect();
        let new: MemberDevices = members.iter().map(|member| member.clone() as _).collect();
        commit(new.clone(), number);
        for (behind, member) in members.iter().enumerate() {
            if !member.log().entries().iter().all(is_superblock) {
                continue;
            }
            let cut: MemberDevices = new.iter().map(over).collect();
            let superblock = superblock(&*devices[behind]);
            cut[behind].write_at(SUPERBLOCK_OFFSETS[0], &superblock).expect("memory is written");
            commit(cut.clone(), 99);
            OURS.check(cut).expect("it is in order");
            found += 1;
        }
        commit(devices.clone(), number);
    }
    assert!(found > 0, "every commit put blocks on all members");
}
