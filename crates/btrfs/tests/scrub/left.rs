//! Damage that a scrub cannot repair: it names the damage, leaves it as it is, and writes nowhere
//! else.

use std::collections::BTreeSet;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use offshoot_btrfs::{
    BtrfsVolume, Member, ScrubEvent, ScrubFinding, ScrubOptions, ScrubOutcome, ScrubOwner,
};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::damage::flip;
use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::fill::{self, subvolumes};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::progs::Progs;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::Errno;

use crate::{kernel_scrub, scrub, scrubs_clean, stored};

const VICTIM_INO: u64 = 257;

/// A file in a subvolume with two snapshots. One of the snapshots has changed so much that it
/// shares no leaf.
fn with_snapshots(root: &Path) {
    let home = root.join("home");
    subvolumes::create(&home);
    fill::write(&home.join("victim"), &Random::new(0xbad).bytes(2_000_000));
    fill::write(&home.join("other"), &Random::new(7).bytes(300_000));
    fill::sync(root);
    for name in ["monday", "tuesday"] {
        subvolumes::snapshot(&home, &root.join(name), false);
    }
    std::fs::rename(root.join("tuesday/victim"), root.join("tuesday/again")).expect("a name");
    fill::crowd(&root.join("tuesday"), 2000);
    fill::sync(root);
}

fn made(judges: &Judges, devices: usize, mkfs: &'static str) -> Disks {
    Recipe::new().devices(devices).mkfs(mkfs).fill(with_snapshots).make(judges)
}

fn paths(findings: &[ScrubFinding]) -> BTreeSet<String> {
    let owners = findings.iter().flat_map(|finding| &finding.owners);
    let path = |owner: &ScrubOwner| match owner {
        ScrubOwner::File { path: Some(path), .. } => {
            Some(String::from_utf8(path.clone()).expect("plain names"))
        }
        _ => None,
    };
    owners.filter_map(path).collect()
}

fn bytes_of(disks: &Disks) -> Vec<Vec<u8>> {
    disks.images().iter().map(|image| std::fs::read(image).expect("an image")).collect()
}

/// The only copy of some data is bad: the scrub names all files that have it, and writes nothing.
#[track_caller]
fn files_are_named(devices: usize, mkfs: &'static str) {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges, devices, mkfs);
    let extents = Progs::of(&disks).extents("256", VICTIM_INO);
    let at = extents[0].logical + 8192;
    let places = Progs::of(&disks).places(at, 4096);
    for place in &places {
        flip(&disks.images()[place.member], place.physical + 100, 1);
    }
    let before = bytes_of(&disks);
    let (counts, found) = scrub(&stored(disks.writable_devices(), false), false).expect("a scrub");
    assert!(before == bytes_of(&disks), "something was written");
    let copies = places.len() as u64;
    assert_eq!((counts.csum_errors, counts.uncorrectable_errors), (copies, copies), "{counts:?}");
    assert_eq!((counts.corrected_errors, counts.left_errors), (0, copies), "{counts:?}");
    let logical: BTreeSet<_> = found.iter().filter_map(|one| one.logical).map(|at| at.0).collect();
    assert_eq!(logical, BTreeSet::from([at]));
    let all = ["home/victim", "monday/victim", "tuesday/again"].map(str::to_owned);
    assert_eq!(paths(&found), BTreeSet::from(all), "{found:?}");
    let theirs = kernel_scrub(disks.mount("ro,noatime").path());
    assert_eq!(theirs["uncorrectable_errors"], copies, "{theirs:?}");
}

#[test]
fn files_of_single_data() {
    files_are_named(1, "-m dup -d single");
}

#[test]
fn files_when_both_copies_are_bad() {
    files_are_named(2, "-m raid1 -d raid1");
}

#[test]
fn files_of_striped_data() {
    files_are_named(3, "-m raid1 -d raid0");
}

/// All copies of a tree block are bad: the scrub names its tree, and repairs the rest.
#[test]
fn trees_are_named() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges, 1, "-m dup -d dup");
    let (leaf, extents) = {
        let progs = Progs::of(&disks);
        (*progs.blocks("9").first().expect("a block"), progs.extents("256", VICTIM_INO))
    };
    let places = Progs::of(&disks).places(leaf, 16_384);
    for place in &places {
        flip(&disks.images()[place.member], place.physical + 5000, 1);
    }
    let data = Progs::of(&disks).places(extents[0].logical, 4096);
    flip(&disks.images()[0], data[0].physical, 1);
    let (counts, found) = scrub(&stored(disks.writable_devices(), false), false).expect("a scrub");
    assert_eq!((counts.uncorrectable_errors, counts.corrected_errors), (8, 1), "{counts:?}");
    let (bad, corrected): (Vec<_>, Vec<_>) =
        found.iter().partition(|one| one.outcome == ScrubOutcome::Uncorrectable);
    assert_eq!((bad.len(), corrected.len()), (2, 1), "{found:?}");
    for one in bad {
        assert_eq!(one.logical.map(|at| at.0), Some(leaf));
        let is_uuid_tree = |owner: &ScrubOwner| matches!(owner, ScrubOwner::Tree { tree: Some(id), .. } if id.0 == 9);
        assert!(one.owners.iter().any(is_uuid_tree), "{one:?}");
    }
}

/// With parity, the scrub finds data that could be rebuilt, and wrong parity. It writes neither.
#[test]
fn parity_is_looked_at() {
    let Some(judges) = judges::require() else { return };
    for (devices, mkfs) in [(3, "-m raid1 -d raid5"), (4, "-m raid1c3 -d raid6")] {
        let disks = made(&judges, devices, mkfs);
        assert_eq!(scrubs_clean(&disks).parity_errors, 0);
        let extents = Progs::of(&disks).extents("256", VICTIM_INO);
        let at = extents[0].logical + 8192;
        let row = Progs::of(&disks).places(at, 4096);
        let [data, parity] = [0, 1].map(|index| &row[index]);
        for (place, expected) in [(data, [1, 0]), (parity, [0, 1])] {
            let image = &disks.images()[place.member];
            flip(image, place.physical + 9, 1);
            let before = bytes_of(&disks);
            let volume = stored(disks.writable_devices(), false);
            let (counts, found) = scrub(&volume, false).expect("a scrub");
            drop(volume);
            assert_eq!([counts.csum_errors, counts.parity_errors], expected, "{mkfs}: {counts:?}");
            assert_eq!((counts.left_errors, counts.uncorrectable_errors), (1, 0), "{counts:?}");
            assert!(found.iter().all(|one| one.outcome == ScrubOutcome::NotWritten), "{found:?}");
            assert!(before == bytes_of(&disks), "something was written");
            flip(image, place.physical + 9, 1);
        }
        scrubs_clean(&disks);
    }
}

/// One member is missing. The scrub repairs the others, and counts what is on the missing member
/// alone.
#[test]
fn a_member_is_missing() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges, 3, "-m raid1c3 -d raid1c3");
    let whole = scrubs_clean(&disks);
    let extents = Progs::of(&disks).extents("256", VICTIM_INO);
    let bad = Progs::of(&disks).places(extents[0].logical, 4096);
    let bad = bad.iter().find(|place| place.member == 1).expect("a copy");
    flip(&disks.images()[1], bad.physical, 1);
    let both = || disks.writable_devices().into_iter().take(2).collect();
    let (counts, _) = scrub(&stored(both(), true), false).expect("a scrub");
    assert_eq!((counts.corrected_errors, counts.left_errors), (1, 0), "{counts:?}");
    assert_eq!(counts.data_bytes_scrubbed * 3, whole.data_bytes_scrubbed * 2);
    assert_eq!(scrubs_clean(&disks), whole);
    let disks = made(&judges, 2, "-m raid1 -d raid0");
    let whole = scrubs_clean(&disks);
    let (counts, _) = scrub(&stored(disks.some_devices(&[0]), true), true).expect("a scrub");
    let lost = (whole.data_bytes_scrubbed - counts.data_bytes_scrubbed) / 4096;
    assert!(lost > 0, "{counts:?}");
    let errors = [counts.read_errors, counts.uncorrectable_errors, counts.left_errors];
    assert_eq!(errors, [lost; 3], "{counts:?}");
}

/// A device with sectors that cannot be read until they are written.
#[derive(Debug)]
struct WeakSectors {
    below: Arc<dyn BlockDevice>,
    bad: Mutex<Vec<Range<u64>>>,
}

impl offshoot_device::Delegate for WeakSectors {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        let touched = |bad: &Range<u64>| bad.start < end && bad.end > offset;
        if self.bad.lock().expect("no panic").iter().any(touched) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.inner().read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        let is_left = |bad: &Range<u64>| bad.start < offset || bad.end > end;
        self.bad.lock().expect("no panic").retain(is_left);
        self.inner().write_at(offset, buf)
    }
}

/// The scrub counts sectors that cannot be read. They can be read again after it has written them.
#[test]
fn what_cannot_be_read_is_written() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges, 1, "-m dup -d dup");
    let progs = Progs::of(&disks);
    let extents = progs.extents("256", VICTIM_INO);
    let data = progs.places(extents[0].logical + 12_288, 4096).swap_remove(1).physical;
    let leaf = progs.places(progs.blocks("5")[0], 16_384).swap_remove(0).physical;
    drop(progs);
    let memory: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(disks.devices().swap_remove(0)));
    let weak = Arc::new(WeakSectors { below: memory.clone(), bad: Mutex::default() });
    weak.bad.lock().expect("no panic").extend([
        data..data + 4096,
        data + 4096..data + 8192,
        leaf + 4096..leaf + 8192,
    ]);
    let (counts, found) = scrub(&stored(vec![weak.clone()], false), false).expect("a scrub");
    assert_eq!(counts.read_errors, 3, "{counts:?}");
    assert_eq!((counts.corrected_errors, counts.left_errors), (3, 0), "{counts:?} {found:?}");
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(weak.bad.lock().expect("no panic").is_empty());
    let (counts, _) = scrub(&stored(vec![memory], false), true).expect("a scrub");
    assert_eq!(counts.found_errors(), 0, "{counts:?}");
}

/// The caller's watch function can end the scrub.
#[test]
fn it_can_be_broken_off() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges, 1, "-m dup -d dup");
    let volume: Arc<BtrfsVolume> = stored(disks.devices(), false);
    let watch = |event: &ScrubEvent<'_>| match event {
        ScrubEvent::Progress(_) => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let ended = volume.scrub(&ScrubOptions { is_read_only: true }, &watch);
    assert_eq!(ended.err().map(|error| error.errno()), Some(Errno::INTR));
}

/// A scrub brings a member that missed commits up to date. It writes everything on it that differs:
/// data without checksums first, and its superblock last. If the scrub is interrupted, the member
/// still counts as one that missed commits.
#[test]
fn members_that_missed_commits() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges, 2, "-m raid1 -d raid1");
    let in_place = |mount: &MountedMembers, byte: u8| {
        let path = mount.path().join("in-place");
        if !path.exists() {
            fill::write(&path, b"");
            run("chattr", &["+C".as_ref(), path.as_os_str()]);
        }
        let file = std::fs::File::options().write(true).open(&path).expect("it is there");
        file.write_all_at(&vec![byte; 3 << 20], 0).expect("in place");
        fill::sync(mount.path());
    };
    in_place(&disks.mount("noatime"), b'o');
    let old = std::fs::read(&disks.images()[1]).expect("an image");
    {
        let mount = disks.mount("noatime");
        in_place(&mount, b'n');
        fill::write(&mount.path().join("later"), &vec![7; 100_000]);
        fill::sync(mount.path());
    }
    std::fs::write(&disks.images()[1], &old).expect("an image");
    let before = bytes_of(&disks);
    let volume = stored(disks.writable_devices(), false);
    let (counts, found) = scrub(&volume, true).expect("a scrub");
    assert!(before == bytes_of(&disks), "something was written");
    assert!(found.iter().any(|one| one.outcome == ScrubOutcome::NotWritten), "{found:?}");
    assert_eq!((counts.corrected_errors, counts.left_errors > 0), (0, true), "{counts:?}");
    // The watch function breaks it off when the data without checksums has been written.
    let stop = |event: &ScrubEvent<'_>| match event {
        ScrubEvent::Found(_) => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let ended = volume.scrub(&ScrubOptions::default(), &stop);
    assert_eq!(ended.err().map(|error| error.errno()), Some(Errno::INTR));
    drop(volume);
    let volume = stored(disks.writable_devices(), false);
    assert!(volume.members().iter().any(Member::is_stale), "a scrub that ended is believed");
    let (counts, found) = scrub(&volume, false).expect("a scrub");
    drop(volume);
    assert!(counts.corrected_errors > 0 && counts.left_errors == 0, "{counts:?} {found:?}");
    let is_superblock = |one: &&ScrubFinding| one.structure == "superblock";
    let superblocks: Vec<_> = found.iter().filter(is_superblock).collect();
    assert!(superblocks.iter().all(|one| one.outcome == ScrubOutcome::Corrected), "{found:?}");
    assert!(superblocks.len() > 1, "the primary one and a copy: {found:?}");
    scrubs_clean(&disks);
    disks.assert_checks();
    let mount = disks.mount_some(&[1], "ro,noatime,degraded");
    let found = std::fs::read(mount.path().join("in-place")).expect("it reads");
    assert!(found == vec![b'n'; 3 << 20], "an old copy was left");
    assert!(std::fs::read(mount.path().join("later")).expect("it reads") == vec![7; 100_000]);
}
