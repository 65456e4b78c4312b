//! Volumes with block groups that this engine never makes: of several profiles for one purpose, at
//! logical address 0, and at addresses that are not multiples of the node size. The engine writes
//! them. The tests look up new extents in the extent tree, and `btrfs check` and the kernel judge
//! the rest.

use std::sync::Arc;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, Profile, Stripe};
use offshoot_btrfs_format::{ItemType, Key, Logical, Physical, TreeId};
use offshoot_testkit::btrfs::disks::{Disks, OLD_CACHE, UUID_TREE};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, NewFile, Timestamp};

use super::{BlockGroup, Claim, Purpose, chunk_plan};
use crate::engine::Engine;
use crate::{BtrfsVolume, EngineOptions};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
const MIB: u64 = 1 << 20;
const WINDOW: u64 = 64 << 10;

/// Opens the volume without background work.
fn open(disks: &Disks) -> Arc<BtrfsVolume> {
    let quiet = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    BtrfsVolume::open_writable(disks.writable_devices(), &quiet).expect("the volume opens")
}

/// Adds a chunk of at most 8 stripes of 1 MiB, or of the one MiB that is free there at address 0,
/// and returns its empty block group.
fn add_group(volume: &Engine, start: u64, kind: u64, profile: Profile) -> Arc<BlockGroup> {
    let handle = volume.join_for(20, Claim::Work).expect("there is room");
    let live = volume.live().expect("it is writable");
    let _chunks = live.space.chunk_lock.lock();
    // The allocator of chunks needs to know the free space of the chunk tree.
    while live.space.load_one(&volume.base, Purpose::System).expect("it reads") {}
    let flags = BlockGroupFlags(kind | profile.bits());
    let plan = volume.with_member_spaces(|all| chunk_plan::plan(all, flags, profile, 9));
    let mut plan = plan.expect("it reads").expect("there is place for one");
    plan.stripe_bytes = if start == 0 { MIB } else { 8 * MIB };
    let member = |index: usize| &volume.members()[index];
    let stripes = plan.stripes.iter().map(|&(index, at)| Stripe {
        device: member(index).id,
        physical: Physical(at),
        device_uuid: member(index).uuid,
    });
    let (start, stripes) = (Logical(start), stripes.collect());
    let mut chunk = Chunk { start, length: plan.stripe_bytes, flags, profile, stripes };
    chunk.length *= chunk.data_stripes();
    plan.bytes = chunk.length;
    handle.add_chunk(chunk, &plan).expect("there is room");
    live.space.group_of(start).expect("it was just added")
}

/// Where the last chunk ends.
fn end(volume: &Engine) -> u64 {
    volume.chunks().last().expect("every volume has chunks").end().0
}

/// Adds empty block groups of these kinds behind the others, and closes the volume.
fn leave_groups(disks: &Disks, kinds: &[u64], profile: Profile) {
    let volume = open(disks);
    for &kind in kinds {
        let group = add_group(&volume, end(&volume), kind, profile);
        // A commit would remove an empty block group. So the test takes a piece of it, and never
        // uses that.
        let space = &volume.live().expect("it is writable").space;
        assert!(space.take_range(&volume.base, &group, group.start, WINDOW).expect("it reads"));
    }
    volume.commit().expect("a commit");
}

/// Every kind of block group.
const KINDS: [u64; 3] = [BlockGroupFlags::SYSTEM, BlockGroupFlags::METADATA, BlockGroupFlags::DATA];

/// Changes names, data and the chunk tree, in several commits.
fn work(volume: &Arc<BtrfsVolume>, round: usize) {
    let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
    let names: Vec<_> = (0..400).map(|number| format!("ours-{round}-{number}")).collect();
    for (number, name) in names.iter().enumerate() {
        let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
        let file = fs.create(place, &NEW).expect("there is room");
        let bytes = vec![u8::try_from(number % 251).expect("it is less"); 100 * number];
        fs.write(file, 0, &bytes, AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    for name in names.iter().step_by(2) {
        fs.unlink(EntryPlace { dir: fs.root(), name: name.as_bytes() }, AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    for purpose in [Purpose::Data, Purpose::Metadata] {
        crate::upkeep::try_grow(volume, purpose, || true).expect("no device fails");
        fs.sync().expect("a commit");
    }
    let name = format!("ours-{round}-large");
    let file = fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW);
    let (file, piece) = (file.expect("there is room"), vec![7; 1 << 20]);
    for mib in 0..24 {
        fs.write(file, mib << 20, &piece, AT).expect("there is room");
    }
    fs.sync().expect("a commit");
}

/// An extent, and the generation in which it was made.
struct Extent {
    at: u64,
    len: u64,
    generation: u64,
}

fn extents(volume: &BtrfsVolume) -> Vec<Extent> {
    let node_size = u64::from(volume.superblock().node_size);
    let mut all = Vec::new();
    let root = volume.tree(TreeId::EXTENT).expect("every volume has one");
    let visit = |key: Key, data: &[u8]| {
        let len = match key.item_type {
            ItemType::EXTENT_ITEM => Some(key.offset),
            ItemType::METADATA_ITEM => Some(node_size),
            _ => None,
        };
        if let Some(len) = len {
            let generation = u64::from_le_bytes(data[8..16].try_into().expect("eight bytes"));
            all.push(Extent { at: key.objectid, len, generation });
        }
        std::ops::ControlFlow::Continue(())
    };
    volume.for_each_item(root, Key::MIN, visit).expect("it reads");
    all
}

fn flags_at(volume: &BtrfsVolume, at: u64) -> BlockGroupFlags {
    let space = &volume.live().expect("it is writable").space;
    space.group_of(Logical(at)).expect("it is in a block group").flags
}

/// The profiles of all chunks of this kind.
fn profiles(volume: &BtrfsVolume, kind: u64) -> Vec<Profile> {
    let mut all: Vec<_> =
        volume.chunks().filter(|c| c.flags.0 & kind != 0).map(|c| c.profile).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// `btrfs check` finds nothing, nor do the kernel and its scrub; then the kernel writes too.
fn judge(disks: &Disks) {
    disks.assert_checks();
    let mount = disks.mount_watched("rw,noatime", &[UUID_TREE, OLD_CACHE, "relocating", "found "]);
    let path = mount.path().to_str().expect("it is plain");
    let said = run("btrfs", &["scrub", "start", "-B", path]);
    assert!(said.contains("no errors found"), "{said}");
    fill::write(&mount.path().join("the kernel's"), &vec![3; 100_000]);
    mount.sync();
    drop(mount);
    disks.assert_checks();
}

/// Writes the volume twice. All new extents must lie in block groups of these profiles, for system,
/// metadata and data.
fn assert_written_to(disks: &Disks, expected: [Profile; 3]) {
    let volume = open(disks);
    let before = volume.superblock().item.generation.get();
    work(&volume, 0);
    drop(volume);
    let volume = open(disks);
    work(&volume, 1);
    let mut counts = [0; 3];
    for Extent { at, generation, .. } in extents(&volume) {
        let flags = flags_at(&volume, at);
        let kind = KINDS.iter().position(|kind| flags.0 & kind != 0).expect("it has a type");
        if generation > before {
            assert_eq!(flags.profile().expect("it is one"), expected[kind], "{at}: {flags:?}");
            counts[kind] += 1;
        }
    }
    assert!(counts.iter().all(|&count| count > 0), "{counts:?} new extents");
    drop(volume);
    judge(disks);
}

/// What `mkfs.btrfs` left in 2014: an empty `single` block group beside each intended one.
#[test]
fn empty_groups_of_one_copy_are_not_filled() {
    let Some(judges) = judges::require() else { return };
    for (count, profile, option) in [(1, Profile::Dup, "dup"), (2, Profile::Raid1, "raid1")] {
        let disks = Disks::create(&judges, count, 600);
        disks.mkfs_and_settle(&["-m", option, "-d", option]);
        leave_groups(&disks, &KINDS, Profile::Single);
        let volume = open(&disks);
        for kind in KINDS {
            assert_eq!(profiles(&volume, kind), [Profile::Single, profile], "of {kind}");
        }
        drop(volume);
        disks.assert_checks();
        assert_written_to(&disks, [profile; 3]);
        // A group from which nothing is taken is removed when it is empty, even if it is the last
        // of its kind.
        for kind in KINDS {
            assert_eq!(profiles(&open(&disks), kind), [profile], "of {kind}");
        }
    }
}

/// A conversion that made the first new block groups, and was stopped.
#[test]
fn old_groups_of_a_conversion_that_was_stopped_are_not_filled() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 900);
    disks.mkfs_and_settle(&["-m", "single", "-d", "single"]);
    let mount = disks.mount("rw,noatime");
    fill::bulk(mount.path(), 20);
    drop(mount);
    leave_groups(&disks, &KINDS, Profile::Dup);
    assert_written_to(&disks, [Profile::Dup; 3]);
    let volume = open(&disks);
    let found = profiles(&volume, BlockGroupFlags::DATA);
    assert_eq!(found, [Profile::Single, Profile::Dup], "the old ones are in use");
    let left = volume.space_stats().kinds.iter().map(|kind| kind.other_profile_bytes).sum::<u64>();
    assert!(left > 0, "there was room in the old ones");
}

/// The same, left by the kernel.
#[test]
fn a_balance_of_the_kernel_with_a_limit_leaves_groups_that_are_not_filled() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 2, 700);
    disks.mkfs_and_settle(&["-m", "raid1", "-d", "single"]);
    let mount = disks.mount("rw,noatime");
    fill::bulk(mount.path(), 300);
    mount.sync();
    let path = mount.path().to_str().expect("it is plain");
    run("btrfs", &["balance", "start", "-dconvert=raid1,limit=1", path]);
    drop(mount);
    let volume = open(&disks);
    let found = profiles(&volume, BlockGroupFlags::DATA);
    assert_eq!(found, [Profile::Single, Profile::Raid1], "it converted one");
    drop(volume);
    assert_written_to(&disks, [Profile::Raid1; 3]);
}

/// Without a free-space tree. With one, `btrfs check` expects the left-out ranges there, which the
/// kernel and this engine leave out.
const OLD_LAYOUT: [&str; 6] =
    ["-m", "single", "-d", "single", "-O", "^free-space-tree,^block-group-tree"];

/// A block group at logical address 0, as old `mkfs.btrfs` and `btrfs-convert` make them. The range
/// below 64 KiB stays free.
#[test]
fn the_lowest_addresses_stay_free() {
    let Some(judges) = judges::require() else { return };
    for kind in KINDS {
        let disks = Disks::create(&judges, 1, 600);
        disks.mkfs_and_settle(&OLD_LAYOUT);
        let volume = open(&disks);
        let group = add_group(&volume, 0, kind, Profile::Single);
        assert_eq!(group.known_free(), MIB - WINDOW);
        let space = &volume.live().expect("it is writable").space;
        assert!(!space.take_range(&volume.base, &group, Logical(0), 4096).expect("it reads"));
        assert!(space.take_range(&volume.base, &group, Logical(WINDOW), WINDOW).expect("it reads"));
        volume.commit().expect("a commit");
        drop(volume);
        disks.assert_checks();

        let volume = open(&disks);
        let is_used = || {
            let group = volume.live().expect("it is writable").space.group_of(Logical(0));
            group.is_ok_and(|group| group.used_bytes() > 0)
        };
        let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
        let file = fs.create(EntryPlace { dir: fs.root(), name: b"first" }, &NEW);
        fs.write(file.expect("there is room"), 0, &vec![5; 100_000], AT).expect("there is room");
        fs.sync().expect("a commit");
        let mut was_used = is_used();
        crate::upkeep::try_grow(&volume, Purpose::Data, || true).expect("no device fails");
        fs.sync().expect("a commit");
        was_used |= is_used();
        assert!(was_used, "nothing of it was used, of the kind {kind}");
        work(&volume, 0);
        let lowest = extents(&volume).iter().map(|extent| extent.at).min().expect("there are some");
        assert!(lowest >= WINDOW, "an extent lies at {lowest}");
        drop(volume);
        let image = disks.images()[0].to_str().expect("it is plain");
        let shown = run("btrfs", &["inspect-internal", "dump-tree", "-t", "chunk", image]);
        assert!(shown.contains("CHUNK_ITEM"), "{shown}");
        judge(&disks);
    }
}

/// A block group of tree blocks that begins at an odd address, as `btrfs-convert` makes them. The
/// blocks lie side by side from its start on, as the kernel puts them.
#[test]
fn tree_blocks_cross_no_border_in_groups_that_begin_anywhere() {
    let Some(judges) = judges::require() else { return };
    for (node_size, beyond) in [("16k", 20 << 10), ("32k", 52 << 10), ("4k", 4 << 10)] {
        let disks = Disks::create(&judges, 1, 600);
        disks.mkfs_and_settle(&["-m", "single", "-n", node_size]);
        let volume = open(&disks);
        let first = end(&volume) + beyond;
        let group = add_group(&volume, first, BlockGroupFlags::METADATA, Profile::Single);
        let space = &volume.live().expect("it is writable").space;
        // This makes the freed ranges join in other ways.
        let odd = Logical(first + (128 << 10) + 4096);
        assert!(space.take_range(&volume.base, &group, odd, 8192).expect("it reads"));
        space.last[0].store(first, std::sync::atomic::Ordering::Relaxed);
        for round in 0..2 {
            work(&volume, round);
        }
        assert!(group.used_bytes() > 0, "nothing of it was used");
        for Extent { at, len, .. } in extents(&volume) {
            let group = space.group_of(Logical(at)).expect("it is in a block group");
            if group.flags.has_metadata() {
                let within = (at - group.start.0) % WINDOW;
                assert!(within + len <= WINDOW, "the tree block at {at} crosses a border");
            }
        }
        let last = volume.chunks().last().expect("it has chunks").start.0;
        assert!(last > first && last.is_multiple_of(WINDOW), "a new chunk begins at {last}");
        drop(volume);
        // `btrfs check` warns of the chunk, and reports a tree block that crosses a border as an
        // error.
        let image = disks.images()[0].to_str().expect("it is plain");
        let said = run("btrfs", &["check", "--readonly", "--check-data-csum", image]);
        assert!(said.contains("no error found"), "{said}");
        let mount = disks.mount("rw,noatime");
        fill::write(&mount.path().join("the kernel's"), &vec![3; 100_000]);
        let path = mount.path().to_str().expect("it is plain");
        let said = run("btrfs", &["scrub", "start", "-B", path]);
        assert!(said.contains("no errors found"), "{said}");
    }
}
