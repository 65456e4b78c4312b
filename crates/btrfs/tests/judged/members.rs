//! Devices of a volume: missing, stale, foreign, seeds, in any order.

use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, ScrubEvent, ScrubOptions, VolumeReport};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::compare;
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, Error, FileSystemMut, Timestamp};

use crate::common::{
    assert_never_wrong, at, contents, default_filesystem, judge, open, open_degraded,
    reports_besides,
};

/// Reads the volume without each of the sets of members in `missing`.
#[track_caller]
fn judge_degraded(disks: &Disks, missing: &[&[usize]]) {
    let mount = disks.mount("ro,noatime");
    let count = disks.images().len();
    for gone in missing {
        let present: Vec<_> = (0..count).filter(|member| !gone.contains(member)).collect();
        let refused = open(disks.some_devices(&present)).err().expect("degraded was not asked for");
        assert_eq!(refused.errno(), Errno::NODEV, "{refused}");
        assert!(refused.to_string().contains("missing"), "{refused}");

        let (volume, reports) =
            open_degraded(disks.some_devices(&present)).expect("the profile allows it");
        compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
        reports.assert_said(&["missing"]);
        let others = reports_besides(&reports, &["is missing"]);
        assert!(others.is_empty(), "without {gone:?}: {others:?}");
    }
}

macro_rules! degraded {
    ($($name:ident: $devices:literal, $mkfs:literal, $missing:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let Some(judges) = judges::require() else { return };
                let disks = Recipe::new().devices($devices).mkfs($mkfs).make(&judges);
                judge_degraded(&disks, &$missing);
            }
        )*
    };
}

degraded! {
    raid1_without_1: 2, "-d raid1 -m raid1", [&[0], &[1]];
    raid1_of_3_without_1: 3, "-d raid1 -m raid1", [&[0], &[1], &[2]];
    raid1c3_without_2: 3, "-d raid1c3 -m raid1c3", [&[0, 1], &[0, 2], &[1, 2]];
    raid1c4_without_3: 4, "-d raid1c4 -m raid1c4", [&[0, 1, 2], &[1, 2, 3]];
    raid10_without_1: 4, "-d raid10 -m raid10", [&[0], &[1], &[2], &[3]];
    raid5_without_1: 3, "-d raid5 -m raid5", [&[0], &[1], &[2]];
    raid5_of_4_without_1: 4, "-d raid5 -m raid5 -n 64k", [&[0], &[3]];
    raid5_of_2_without_1: 2, "-d raid5 -m raid5", [&[0], &[1]];
    raid6_without_2: 4, "-d raid6 -m raid6", [&[0, 1], &[0, 2], &[0, 3], &[1, 2], &[1, 3], &[2, 3]];
    raid6_without_1: 4, "-d raid6 -m raid6", [&[0], &[1], &[2], &[3]];
    raid6_of_5_without_2: 5, "-d raid6 -m raid6 --csum sha256", [&[0, 4], &[1, 2]];
    raid6_of_3_without_2: 3, "-d raid6 -m raid6", [&[0, 1], &[1, 2]];
}

/// Some addresses lose every copy and others keep all. What can still be read is right, and the
/// rest is an error.
#[test]
fn more_missing_than_the_profile_allows() {
    let Some(judges) = judges::require() else { return };
    for profile in ["-d raid0 -m raid1c3", "-d raid5 -m raid1c3"] {
        let disks = Recipe::new().devices(4).mkfs(profile).make(&judges);
        let mount = disks.mount("ro,noatime");
        let (volume, reports) =
            open_degraded(disks.some_devices(&[1, 3])).expect("the metadata is complete");
        reports.assert_said(&["missing"]);
        reports.assert_said(&["too many devices"]);
        let seen = assert_never_wrong(&default_filesystem(&volume), mount.path());
        assert!(seen.failed > 0, "{profile}: nothing failed");
        assert!(seen.right > 0, "{profile}: inline files at least must be read");
    }
}

#[test]
fn a_volume_without_its_metadata_is_refused() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().devices(2).mkfs("-d raid0 -m raid0").fill(little).make(&judges);
    for present in [0, 1] {
        let Ok((volume, reports)) = open_degraded(disks.some_devices(&[present])) else {
            continue;
        };
        // In this case the member with the roots is missing: the rest is an error, and a report
        // says so.
        reports.assert_said(&["missing"]);
        let mount = disks.mount("ro,noatime");
        let _ = assert_never_wrong(&default_filesystem(&volume), mount.path());
    }
}

fn little(root: &Path) {
    fill::data::fill(root);
}

#[test]
fn the_order_of_devices_does_not_matter() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().devices(4).mkfs("-d raid10 -m raid6").fill(little).make(&judges);
    let mount = disks.mount("ro,noatime");
    for order in [[3, 2, 1, 0], [1, 3, 0, 2]] {
        let (volume, reports) = open(disks.some_devices(&order)).expect("the volume opens");
        compare(&default_filesystem(&volume), mount.path()).assert_same(100);
        reports.assert_silent();
    }
}

#[test]
fn devices_that_do_not_belong_together_are_refused() {
    let Some(judges) = judges::require() else { return };
    let one = Recipe::new().fill(little).make(&judges);
    let other = Recipe::new().fill(little).make(&judges);
    let foreign = one.devices().into_iter().chain(other.devices()).collect();
    let error = open(foreign).err().expect("two volumes are not one");
    assert!(matches!(error, Error::Posix { .. }), "{error}");

    let twice = one.devices().into_iter().chain(one.devices()).collect();
    let error = open(twice).err().expect("one device is not two");
    assert!(matches!(error, Error::Posix { .. }), "{error}");

    let error = open(Vec::new()).err().expect("no device is no volume");
    assert!(matches!(error, Error::Posix { .. }), "{error}");
}

/// A seed, and a sprout with changes over it.
#[test]
fn a_seed_and_its_sprout() {
    let Some(judges) = judges::require() else { return };
    let disks = sprouted(&judges);
    // The kernel finds the members of the sprout if it gets both.
    let mount = disks.mount_some(&[1, 0], "ro,noatime");
    for order in [[0, 1], [1, 0]] {
        let (volume, reports) = open(disks.some_devices(&order)).expect("the sprout opens");
        compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
        reports.assert_silent();
    }
    let error = open(disks.some_devices(&[1])).err().expect("the seed is missing");
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
}

#[test]
fn a_seed_alone_is_a_volume() {
    let Some(judges) = judges::require() else { return };
    let disks = sprouted(&judges);
    let mount = disks.mount_some(&[0], "ro,noatime");
    let (volume, reports) = open(disks.some_devices(&[0])).expect("the seed opens");
    compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    reports.assert_silent();
}

/// Member 0 is the seed. Member 1 was added to it and written to.
fn sprouted(judges: &Judges) -> Disks {
    let mut disks = Recipe::new().tune("-f -S 1").make(judges);
    disks.add(512);
    // A seed mounts read-only until it has a member that can be written.
    let mut mount = disks.mount_some(&[0], "ro,noatime");
    mount.add_device(&disks.images()[1]);
    mount.remount("rw,noatime");
    let grown = fill::directory(mount.path(), "written over the seed");
    fill::data::fill(&grown);
    fill::write(&mount.path().join("names/long/..."), b"changed over the seed");
    mount.sync();
    drop(mount);
    disks
}

/// A member was away while the others were written. What it holds is old, and only the generation
/// of its superblock shows that.
#[track_caller]
fn judge_stale(judges: &Judges, devices: usize, mkfs: &'static str, away: usize) {
    let disks = Recipe::new().devices(devices).mkfs(mkfs).fill(before).make(judges);
    let present: Vec<_> = (0..devices).filter(|member| *member != away).collect();
    let mount = disks.mount_some(&present, "rw,noatime,degraded");
    after(mount.path());
    mount.sync();
    drop(mount);
    let mount = disks.mount_some(&present, "ro,noatime,degraded");
    judge_all_orders(&disks.devices(), &mount);
}

/// The same in another way: all members were there, and then the test puts one back to its earlier
/// contents. This covers profiles that the kernel does not write without a member.
#[track_caller]
fn judge_put_back(judges: &Judges, devices: usize, mkfs: &'static str) {
    let disks = Recipe::new().devices(devices).mkfs(mkfs).fill(before).make(judges);
    let old = disks.copy(judges);
    let mount = disks.mount("rw,noatime");
    after(mount.path());
    mount.sync();
    drop(mount);
    let mount = disks.mount("ro,noatime");
    for member in 0..devices {
        let mut members = disks.devices();
        members[member] = old.devices().swap_remove(member);
        judge_all_orders(&members, &mount);
    }
}

#[track_caller]
fn judge_all_orders(members: &[Arc<dyn BlockDevice>], judge: &MountedMembers) {
    for backwards in [false, true] {
        let mut members = members.to_vec();
        if backwards {
            members.reverse();
        }
        let (volume, reports) = open(members).expect("the volume opens");
        compare(&default_filesystem(&volume), judge.path()).assert_same(200);
        reports.assert_said(&["missed commits"]);
    }
}

fn before(root: &Path) {
    fill::data::fill(root);
    // Overwritten in place and without checksums, so nothing distinguishes old from new.
    let nocow = fill::directory(root, "in-place");
    run("chattr", &["+C".as_ref(), nocow.as_os_str()]);
    for name in ["small", "large"] {
        let bytes = if name == "small" { 20_000 } else { 900_000 };
        fill::write(&nocow.join(name), &vec![b'o'; bytes]);
    }
}

fn after(root: &Path) {
    for (name, bytes) in [("small", 20_000), ("large", 900_000)] {
        let path = root.join("in-place").join(name);
        let file = std::fs::File::options().write(true).open(path).expect("it is there");
        file.write_all_at(&vec![b'n'; bytes], 0).expect("written in place");
        file.sync_all().expect("on the device");
    }
    fill::write(&root.join("data-plain/text-4096"), &vec![b'n'; 4096]);
    fill::write(&root.join("data-zstd/text-131072"), &vec![b'n'; 131_072]);
    std::fs::remove_file(root.join("data-lzo/text-100")).expect("a file goes");
    fill::data::fill(&fill::directory(root, "new"));
}

#[test]
fn a_stale_second_mirror() {
    let Some(judges) = judges::require() else { return };
    judge_stale(&judges, 2, "-d raid1 -m raid1", 1);
}

#[test]
fn a_stale_first_mirror() {
    let Some(judges) = judges::require() else { return };
    judge_stale(&judges, 2, "-d raid1 -m raid1", 0);
}

#[test]
fn a_stale_member_of_raid1c3() {
    let Some(judges) = judges::require() else { return };
    judge_stale(&judges, 3, "-d raid1c3 -m raid1c3", 1);
}

#[test]
fn a_stale_member_of_raid10() {
    let Some(judges) = judges::require() else { return };
    judge_stale(&judges, 4, "-d raid10 -m raid10", 2);
}

#[test]
fn members_that_were_put_back() {
    let Some(judges) = judges::require() else { return };
    judge_put_back(&judges, 2, "-d raid1 -m raid1");
    judge_put_back(&judges, 4, "-d raid1c4 -m raid1c3");
    judge_put_back(&judges, 4, "-d raid10 -m raid10");
}

#[test]
fn members_of_raid5_that_were_put_back() {
    let Some(judges) = judges::require() else { return };
    judge_put_back(&judges, 3, "-d raid5 -m raid5");
    judge_put_back(&judges, 4, "-d raid5 -m raid1");
}

#[test]
fn members_of_raid6_that_were_put_back() {
    let Some(judges) = judges::require() else { return };
    judge_put_back(&judges, 4, "-d raid6 -m raid6");
    judge_put_back(&judges, 5, "-d raid6 -m raid1c3");
}

/// Regression: a member was away for one commit. We took it for a member that a power cut had left
/// a generation behind, and wrote to it as if it were current. After that, nothing showed that data
/// on it was old.
#[test]
fn a_member_that_missed_one_whole_commit_is_not_written_on() {
    let Some(judges) = judges::require() else { return };
    let old = |root: &Path| {
        let file = root.join("f");
        fill::write(&file, b"");
        run("chattr", &["+C".as_ref(), file.as_os_str()]);
        fill::write(&file, &vec![b'A'; 1 << 20]);
    };
    for (devices, profile) in [(2, "-d raid1 -m raid1"), (3, "-d raid1c3 -m raid1c3")] {
        for away in 0..devices {
            let disks = Recipe::new().devices(devices).mkfs(profile).fill(old).make(&judges);
            let others: Vec<_> = (0..devices).filter(|member| *member != away).collect();
            let mount = disks.mount_some(&others, "rw,noatime,degraded");
            let file = std::fs::File::options().write(true).open(mount.path().join("f"));
            file.and_then(|file| file.write_all_at(&vec![b'B'; 1 << 20], 0)).expect("in place");
            drop(mount);
            let (volume, reports) = open(disks.devices()).expect("it opens for reading");
            let behind = reports.all().into_iter().find_map(|report| match report {
                VolumeReport::StaleMember { generation, newest, .. } => {
                    Some(newest.0 - generation.0)
                }
                _ => None,
            });
            assert_eq!(behind, Some(1), "the kernel commits once");
            let fs = default_filesystem(&volume);
            let found = contents(&fs, at(&fs, "f")).expect("it reads");
            assert!(found.iter().all(|&byte| byte == b'B'), "{profile} without {away}");
            drop((fs, volume));
            let before = std::fs::read(&disks.images()[away]).expect("an image");
            let options = EngineOptions::default();
            let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options);
            let volume = volume.expect("the others have everything");
            let fs = default_filesystem(&volume);
            fs.write(at(&fs, "f"), 0, &[b'C'; 4096], Timestamp::default()).expect("in place");
            fs.sync().expect("a commit");
            drop((fs, volume));
            assert!(std::fs::read(&disks.images()[away]).expect("an image") == before);
            require_f(&disks, b'C');
            // A scrub brings the member up to date. Then this member alone holds everything, and
            // the kernel confirms it.
            let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
            let volume = BtrfsVolume::open(disks.writable_devices(), &options).expect("it opens");
            let go_on = |_: &ScrubEvent<'_>| ControlFlow::Continue(());
            let counts = volume.scrub(&ScrubOptions::default(), &go_on).expect("a scrub");
            drop(volume);
            assert!(counts.corrected_errors > 0 && counts.left_errors == 0, "{counts:?}");
            let (_, reports) = open(disks.devices()).expect("it opens");
            reports.assert_silent();
            disks.assert_checks();
            let mount = disks.mount_some(&[away], "ro,noatime,degraded");
            let found = std::fs::read(mount.path().join("f")).expect("it reads");
            assert!(found[..4096].iter().all(|&byte| byte == b'C'), "{profile}: {away} alone");
            assert!(found[4096..].iter().all(|&byte| byte == b'B'), "{profile}: {away} alone");
        }
    }
}

/// Requires that the file begins with `byte`, in whatever order the devices come.
#[track_caller]
fn require_f(disks: &Disks, byte: u8) {
    let mut devices = disks.devices();
    for _ in 0..devices.len() {
        devices.rotate_left(1);
        let (volume, _) = open(devices.clone()).expect("it opens for reading");
        let fs = default_filesystem(&volume);
        let found = contents(&fs, at(&fs, "f")).expect("it reads");
        assert!(found[..4096].iter().all(|&one| one == byte), "an old copy is believed");
    }
}

/// A mirror that was cut short: the engine reads the missing part from the other mirror.
#[test]
fn a_member_that_was_cut_short() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().devices(2).mkfs("-d raid1 -m raid1").make(&judges);
    let mount = disks.mount("ro,noatime");
    let cut = disks.copy(&judges);
    let file = std::fs::File::options().write(true).open(&cut.images()[0]).expect("it opens");
    file.set_len(40 << 20).expect("a shorter image");
    let (volume, reports) = open(cut.devices()).expect("the volume opens");
    compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    reports.assert_said(&["bytes, but the volume was made on"]);
}

/// The kernel replaces a device: its number stays, its UUID changes.
#[test]
fn a_replaced_device() {
    let Some(judges) = judges::require() else { return };
    let mut disks = Recipe::new().devices(2).mkfs("-d raid1 -m raid1").make(&judges);
    disks.add(512);
    {
        let spare = offshoot_testkit::btrfs::disks::AttachedImages::new(&disks.images()[2..]);
        let mount = disks.mount_some(&[0, 1], "rw,noatime");
        let old = mount.devices()[1].to_owned();
        let args = ["replace", "start", "-B", "-f", &old, spare.devices()[0]];
        let mut args: Vec<&std::ffi::OsStr> = args.iter().map(AsRef::as_ref).collect();
        args.push(mount.path().as_os_str());
        run("btrfs", &args);
        drop(mount);
    }
    let mount = disks.mount_some(&[0, 2], "ro,noatime");
    let (volume, reports) = open(disks.some_devices(&[0, 2])).expect("the volume opens");
    compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    reports.assert_silent();
}

/// A control: with all members present every test function must find no difference. So the
/// differences in the other tests of this module come from the members.
#[test]
fn all_members_present() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().devices(3).mkfs("-d raid1 -m raid1c3").fill(before).make(&judges);
    judge(&disks, 150);
}

/// With one device of several, the error names a missing device before a read fails.
#[test]
fn one_device_of_several_names_a_missing_one() {
    let Some(judges) = judges::require() else { return };
    for profile in ["-d raid0 -m raid0", "-d single -m single", "-d raid1 -m raid1"] {
        let disks = Recipe::new().devices(3).mkfs(profile).fill(little).make(&judges);
        for device in disks.devices() {
            let Err(error) = open(vec![device]) else { panic!("{profile}: it opened") };
            assert_eq!(error.errno(), Errno::NODEV, "{profile}: {error}");
            assert!(error.to_string().contains("is missing"), "{profile}: {error}");
        }
    }
}
