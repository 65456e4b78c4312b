//! Damaged copies: the engine survives and reports one bad copy. If the last copy is bad, it
//! returns an error that names the object and its place. It never returns wrong bytes as data.

use std::collections::BTreeSet;
use std::path::Path;

use offshoot_device::Fault;
use offshoot_testkit::btrfs::damage::{FaultyMembers, SUPERBLOCK_BYTES, SUPERBLOCKS, flip};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::progs::{MirrorPlace, Progs};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::compare;
use offshoot_testkit::random::Random;
use offshoot_vfs::{Error, FileSystem};

use crate::common::{CollectedReports, assert_never_wrong, at, contents, default_filesystem, open};

const FAULTS: [Fault; 2] = [Fault::Garbage, Fault::Error];
const NODE_BYTES: u64 = 16_384;
const VICTIM_BYTES: usize = 900_000;

/// A volume with many files. The test damages the extents of one of them, the victim.
fn victim(judges: &Judges, devices: usize, mkfs: &'static str) -> Disks {
    Recipe::new().devices(devices).mkfs(mkfs).fill(with_victim).make(judges)
}

fn with_victim(root: &Path) {
    fill::write(&root.join("victim"), &Random::new(0xbad).bytes(VICTIM_BYTES));
    fill::sync(root);
    fill::crowd(root, 300);
}

/// The inode number of the first file that a volume gets.
const VICTIM_INO: u64 = 257;

/// Where the copies of the victim's data are: members and offsets.
fn data_places(disks: &Disks) -> Vec<MirrorPlace> {
    let progs = Progs::of(disks);
    let extents = progs.extents("5", VICTIM_INO);
    extents.iter().flat_map(|extent| progs.places(extent.logical, extent.disk_bytes)).collect()
}

/// For each of `sets`, damages these copies of every stripe of the victim. The other copies must be
/// enough to read the file. The sets cover all copies, so they include the ones that are read
/// first; the reports show that.
#[track_caller]
fn data_is_survived(devices: usize, mkfs: &'static str, sets: &[&[u32]]) {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, devices, mkfs);
    let places = data_places(&disks);
    let mount = disks.mount("ro,noatime");
    for fault in FAULTS {
        let all = CollectedReports::default();
        for mirrors in sets {
            let faulty = FaultyMembers::over(&disks);
            // One sector of every stripe. It is not the first, so that the damage splits runs.
            for place in places.iter().filter(|place| mirrors.contains(&place.mirror)) {
                faulty.strike_at(place.member, place.physical + 8192, 4096, fault);
            }
            let volume = all.open(faulty.devices()).expect("the volume opens");
            compare(&default_filesystem(&volume), mount.path()).assert_same(300);
        }
        all.assert_said(&["bad copy", "data"]);
    }
}

#[test]
fn data_on_dup() {
    data_is_survived(1, "-d dup -m dup", &[&[1], &[2]]);
}

#[test]
fn data_on_raid1() {
    data_is_survived(2, "-d raid1 -m raid1", &[&[1], &[2]]);
}

#[test]
fn data_on_raid1c3() {
    data_is_survived(3, "-d raid1c3 -m raid1c3", &[&[1, 2], &[2, 3], &[1, 3]]);
}

#[test]
fn data_on_raid1c4() {
    data_is_survived(4, "-d raid1c4 -m raid1c4", &[&[1, 2, 4], &[1, 2, 3], &[2, 3, 4]]);
}

#[test]
fn data_on_raid10() {
    data_is_survived(4, "-d raid10 -m raid10", &[&[1], &[2]]);
}

/// Damages one column only: with parity, a row survives the loss of as many columns as it has
/// parities.
#[track_caller]
fn column_is_survived(devices: usize, mkfs: &'static str, members: &[usize]) {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, devices, mkfs);
    let places = data_places(&disks);
    let mount = disks.mount("ro,noatime");
    for fault in FAULTS {
        let faulty = FaultyMembers::over(&disks);
        for place in places.iter().filter(|place| members.contains(&place.member)) {
            faulty.strike_at(place.member, place.physical, 65_536, fault);
        }
        let (volume, reports) = open(faulty.devices()).expect("the volume opens");
        compare(&default_filesystem(&volume), mount.path()).assert_same(300);
        reports.assert_said(&["bad copy", "data"]);
    }
}

#[test]
fn data_on_raid5() {
    for member in 0..3 {
        column_is_survived(3, "-d raid5 -m raid1", &[member]);
    }
}

#[test]
fn data_on_raid6() {
    for members in [[0, 1], [1, 2], [0, 3], [2, 3]] {
        column_is_survived(4, "-d raid6 -m raid1", &members);
    }
}

/// Every copy is bad. The error names the object, its place and its owner, and no data is returned.
#[track_caller]
fn lost_data_is_an_error(devices: usize, mkfs: &'static str) {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, devices, mkfs);
    let places = data_places(&disks);
    let mount = disks.mount("ro,noatime");
    for fault in FAULTS {
        let faulty = FaultyMembers::over(&disks);
        let logical = places[0].logical + 8192;
        // With parity, the rest of the row must not give the sector back either. Bytes that are
        // inverted in two columns cancel out, so each column is damaged elsewhere.
        let parity = mkfs.contains("raid5") || mkfs.contains("raid6");
        // All columns of a row share the parity, and a parity that is inverted twice is sound
        // again.
        let hit: BTreeSet<_> = places
            .iter()
            .filter(|place| parity || place.logical == places[0].logical)
            .map(|place| (place.member, place.physical))
            .collect();
        for (member, physical) in hit {
            let shift = if parity { member as u64 * 64 } else { 0 };
            faulty.strike_at(member, physical + 8192 + shift, 200, fault);
        }
        let (volume, _) = open(faulty.devices()).expect("the volume opens");
        let fs = default_filesystem(&volume);
        let file = at(&fs, "victim");
        let error = contents(&fs, file).expect_err("every copy of a sector is bad");
        names_the_loss(&error, fault, logical);
        let mut reached = 0;
        let error = fs
            .read_data(file, 0..VICTIM_BYTES as u64, &mut |offset, bytes| {
                reached = offset + bytes.len() as u64;
                Ok(())
            })
            .expect_err("every copy of a sector is bad");
        names_the_loss(&error, fault, logical);
        assert!(reached <= 8192, "{reached} bytes were shown, past the bad sector");
        let seen = assert_never_wrong(&fs, mount.path());
        assert_eq!(seen.failed, 1, "one file lost data");
    }
}

#[track_caller]
fn names_the_loss(error: &Error, fault: Fault, logical: u64) {
    let text = error.to_string();
    match error {
        Error::Corrupt(corrupt) => {
            assert_eq!(fault, Fault::Garbage, "{text}");
            assert_eq!(corrupt.logical, Some(logical), "{text}");
            assert!(corrupt.file.is_some(), "{text}");
            assert!(corrupt.structure.contains("data"), "{text}");
        }
        Error::Io { file, .. } => {
            assert_eq!(fault, Fault::Error, "{text}");
            assert!(file.is_some(), "{text}");
            assert!(text.contains(&logical.to_string()), "{text}");
        }
        _ => panic!("{text}"),
    }
}

#[test]
fn lost_data_on_single() {
    lost_data_is_an_error(1, "-d single -m dup");
}

#[test]
fn lost_data_on_dup() {
    lost_data_is_an_error(1, "-d dup -m dup");
}

#[test]
fn lost_data_on_raid1() {
    lost_data_is_an_error(2, "-d raid1 -m raid1");
}

#[test]
fn lost_data_on_raid5() {
    lost_data_is_an_error(3, "-d raid5 -m raid1");
}

#[test]
fn lost_data_on_raid6() {
    lost_data_is_an_error(4, "-d raid6 -m raid1");
}

/// Compressed extents have checksums of the stored, compressed bytes.
#[test]
fn lost_compressed_data() {
    let Some(judges) = judges::require() else { return };
    for method in ["zlib", "lzo", "zstd"] {
        let options: &'static str = match method {
            "zlib" => "compress-force=zlib",
            "lzo" => "compress-force=lzo",
            _ => "compress-force=zstd",
        };
        let disks = Recipe::new().mount(options).fill(with_text).make(&judges);
        let places = data_places(&disks);
        let mount = disks.mount("ro,noatime");
        let faulty = FaultyMembers::over(&disks);
        faulty.strike_at(places[0].member, places[0].physical, 1, Fault::Garbage);
        let (volume, _) = open(faulty.devices()).expect("the volume opens");
        let seen = assert_never_wrong(&default_filesystem(&volume), mount.path());
        assert_eq!(seen.failed, 1, "{method}: one file lost data");
    }
}

fn with_text(root: &Path) {
    fill::write(&root.join("victim"), &Random::new(0xbad).text(VICTIM_BYTES));
    fill::sync(root);
    fill::crowd(root, 20);
}

/// Every block of every tree that a reader needs has one bad copy.
#[track_caller]
fn blocks_are_survived(devices: usize, mkfs: &'static str) {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, devices, mkfs);
    let places: Vec<MirrorPlace> = {
        let progs = Progs::of(&disks);
        ["root", "chunk", "5", "csum"]
            .iter()
            .flat_map(|tree| progs.blocks(tree))
            .flat_map(|logical| progs.places(logical, NODE_BYTES))
            .collect()
    };
    let mount = disks.mount("ro,noatime");
    // By turns, so that every second block is bad in the copy that is read first.
    for parity in [0, 1] {
        for fault in FAULTS {
            let faulty = FaultyMembers::over(&disks);
            let mut last = (0, 0);
            for place in &places {
                if last.1 != place.logical {
                    last = (last.0 + 1, place.logical);
                }
                if place.mirror == 1 + (last.0 + parity) % 2 {
                    faulty.strike_at(place.member, place.physical + 100, 50, fault);
                }
            }
            let (volume, reports) = open(faulty.devices()).expect("the volume opens");
            compare(&default_filesystem(&volume), mount.path()).assert_same(300);
            reports.assert_said(&["bad copy", "tree block"]);
        }
    }
}

#[test]
fn tree_blocks_on_dup() {
    blocks_are_survived(1, "-d single -m dup");
}

#[test]
fn tree_blocks_on_raid1() {
    blocks_are_survived(2, "-d raid1 -m raid1");
}

#[test]
fn tree_blocks_on_raid10() {
    blocks_are_survived(4, "-d raid10 -m raid10");
}

/// One member after the other holds only garbage beside its superblocks.
#[track_caller]
fn rotten_members_are_survived(devices: usize, mkfs: &'static str) {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, devices, mkfs);
    let mount = disks.mount("ro,noatime");
    for fault in FAULTS {
        let all = CollectedReports::default();
        for rotten in 0..devices {
            let faulty = FaultyMembers::over(&disks);
            let (start, end) = (1 << 20, SUPERBLOCKS[1]);
            faulty.strike_at(rotten, start, end - start, fault);
            faulty.strike_at(rotten, end + SUPERBLOCK_BYTES, 400 << 20, fault);
            let volume = all.open(faulty.devices()).expect("the volume opens");
            compare(&default_filesystem(&volume), mount.path()).assert_same(300);
        }
        all.assert_said(&["bad copy"]);
    }
}

#[test]
fn a_rotten_member_of_raid1() {
    rotten_members_are_survived(2, "-d raid1 -m raid1");
}

#[test]
fn a_rotten_member_of_raid5() {
    rotten_members_are_survived(3, "-d raid5 -m raid5");
}

#[test]
fn a_rotten_member_of_raid6() {
    rotten_members_are_survived(4, "-d raid6 -m raid6");
}

/// The only copy of a block of the subvolume is bad, in every way that a check can detect.
#[test]
fn lost_tree_blocks_are_errors() {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, 1, "-d single -m dup");
    let (blocks, places) = {
        let progs = Progs::of(&disks);
        let blocks = progs.blocks("5");
        let places: Vec<_> = blocks.iter().map(|block| progs.places(*block, NODE_BYTES)).collect();
        (blocks, places)
    };
    let mount = disks.mount("ro,noatime");
    for (logical, places) in blocks.iter().zip(places) {
        for fault in FAULTS {
            let faulty = FaultyMembers::over(&disks);
            for place in &places {
                faulty.strike(place, NODE_BYTES, fault);
            }
            let (volume, _) = open(faulty.devices()).expect("the roots are sound");
            let fs = match volume.default_subvolume().and_then(|id| volume.filesystem(id)) {
                Ok(fs) => fs,
                Err(error) => {
                    assert!(error.to_string().contains(&logical.to_string()), "{error}");
                    continue;
                }
            };
            let seen = assert_never_wrong(&fs, mount.path());
            assert!(seen.failed > 0, "the block at {logical} was not needed");
            let named = seen.errors.iter().any(|text| text.contains(&logical.to_string()));
            assert!(named, "no error names {logical}: {:?}", seen.errors);
        }
    }
}

/// Single bits flip in the header and the items of a block.
#[test]
fn flipped_bits_in_a_tree_block_are_found() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mkfs("-m single").mib(128).fill(small).make(&judges);
    let place = {
        let progs = Progs::of(&disks);
        let root = progs.blocks("5")[0];
        progs.places(root, NODE_BYTES)[0].clone()
    };
    let seed = u64::from(std::process::id());
    let mut random = Random::new(seed);
    for _ in 0..200 {
        // A CRC-32C uses the first four bytes of its field, and no check reads the rest.
        let byte = [random.below(4), 32 + random.below(NODE_BYTES - 32)];
        let offset = place.physical + byte[usize::from(random.below(50) > 0)];
        let mask = 1 << random.below(8);
        flip(&disks.images()[0], offset, mask);
        let (volume, _) = open(disks.devices()).expect("the roots are sound");
        let listed = volume
            .filesystem(crate::common::TOP)
            .and_then(|fs| fs.lookup(fs.root(), b"victim").map(drop));
        let error = listed.expect_err("a flipped bit was not found");
        assert!(matches!(error, Error::Corrupt(_)), "seed {seed}, {offset}: {error}");
        flip(&disks.images()[0], offset, mask);
    }
}

fn small(root: &Path) {
    fill::write(&root.join("victim"), b"inline");
    fill::write(&root.join("data"), &Random::new(1).bytes(20_000));
}

/// Damaged superblocks: any one copy is enough, and the engine reports the damage.
#[test]
fn superblocks() {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, 1, "");
    let mount = disks.mount("ro,noatime");
    for fault in FAULTS {
        let faulty = FaultyMembers::over(&disks);
        faulty.strike_at(0, SUPERBLOCKS[0], SUPERBLOCK_BYTES, fault);
        let (volume, reports) = open(faulty.devices()).expect("the copy is used");
        compare(&default_filesystem(&volume), mount.path()).assert_same(300);
        reports.assert_said(&["superblock", &SUPERBLOCKS[1].to_string()]);

        let faulty = FaultyMembers::over(&disks);
        faulty.strike_at(0, SUPERBLOCKS[0], SUPERBLOCK_BYTES, fault);
        faulty.strike_at(0, SUPERBLOCKS[1], SUPERBLOCK_BYTES, fault);
        let error = open(faulty.devices()).err().expect("no superblock is left");
        assert!(error.to_string().contains("superblock"), "{error}");
    }
    // One flipped bit anywhere must be noticed.
    let mut random = Random::new(0x5b);
    for _ in 0..50 {
        let copy_of_primary = SUPERBLOCKS[0] + random.below(SUPERBLOCK_BYTES);
        let faulty = FaultyMembers::over(&disks);
        faulty.strike_at(0, copy_of_primary, 1, Fault::Garbage);
        let (_, reports) = open(faulty.devices()).expect("the copy is used");
        reports.assert_said(&["superblock"]);
    }
}

/// One of two members has a damaged primary superblock.
#[test]
fn a_superblock_of_one_member() {
    let Some(judges) = judges::require() else { return };
    let disks = victim(&judges, 2, "-d raid1 -m raid1");
    let mount = disks.mount("ro,noatime");
    for member in [0, 1] {
        let faulty = FaultyMembers::over(&disks);
        faulty.strike_at(member, SUPERBLOCKS[0], SUPERBLOCK_BYTES, Fault::Garbage);
        let (volume, reports) = open(faulty.devices()).expect("the copy is used");
        compare(&default_filesystem(&volume), mount.path()).assert_same(300);
        reports.assert_said(&["superblock"]);
    }
}
