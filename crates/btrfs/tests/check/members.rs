//! Damage to superblocks, members, chunks and device extents.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsFindingCode, BtrfsFindingPlace, CheckOptions, CheckOutcome, CheckWatch, check_btrfs,
};
use offshoot_btrfs_format::chunk::{ChunkItem, DevExtent, DevItem, StripeItem};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SuperblockItem};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::{BlockDevice, Delegate};
use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::fill::{self, handful};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::loops::AttachedLoop;
use offshoot_testkit::run::run;
use parking_lot::Mutex;
use zerocopy::FromBytes;

use crate::common::{DamagedVolume, ProgsVerdict, require_sound, show, view};

/// An empty volume.
fn empty(judges: &Judges, members: usize, mkfs: &str) -> Disks {
    let disks = Disks::create(judges, members, 256);
    disks.mkfs(&mkfs.split_whitespace().collect::<Vec<_>>());
    disks
}

fn superblock(bytes: &mut [u8]) -> &mut SuperblockItem {
    view(bytes)
}

/// Makes a superblock older by some commits.
fn age(bytes: &mut [u8], commits: u64) {
    let superblock = superblock(bytes);
    superblock.generation -= commits;
    superblock.chunk_root_generation -= commits;
}

#[track_caller]
fn require_places(outcome: &CheckOutcome, places: &[BtrfsFindingPlace]) {
    let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
    assert_eq!(found, places, "{}", show(outcome));
}

macro_rules! damaged_superblocks {
    ($($name:ident: $code:ident $progs:ident at $place:expr, $damage:expr;)*) => {$(
        #[test]
        fn $name() {
            let Some(judges) = judges::require() else { return };
            let volume = DamagedVolume::of(empty(&judges, 2, "-d raid1 -m raid1"));
            let damage: fn(&DamagedVolume) = $damage;
            damage(&volume);
            let outcome = volume.require(BtrfsFindingCode::$code, ProgsVerdict::$progs);
            require_places(&outcome, &[$place]);
        }
    )*};
}

const FIRST: BtrfsFindingPlace = BtrfsFindingPlace::Member(1);
const SECOND: BtrfsFindingPlace = BtrfsFindingPlace::Member(2);
const WHOLE: BtrfsFindingPlace = BtrfsFindingPlace::Volume;

damaged_superblocks! {
    a_primary_without_its_checksum: Superblock SeesNothing at SECOND, |volume| {
        volume.write(1, SUPERBLOCK_OFFSETS[0] + 299, b"another label");
    };
    a_copy_without_its_checksum: SuperblockCopy SeesNothing at FIRST, |volume| {
        volume.write(0, SUPERBLOCK_OFFSETS[1] + 299, b"another label");
    };
    a_copy_with_another_label: SuperblockCopy SeesNothing at SECOND, |volume| {
        let edit = |bytes: &mut [u8]| superblock(bytes).label[0] = b'x';
        volume.edit_superblock(1, SUPERBLOCK_OFFSETS[1], edit);
    };
    an_older_copy: SuperblockCopy SeesNothing at FIRST, |volume| {
        let edit = |bytes: &mut [u8]| superblock(bytes).generation -= 1;
        volume.edit_superblock(0, SUPERBLOCK_OFFSETS[1], edit);
    };
    a_member_one_commit_behind: Superblock SeesNothing at SECOND, |volume| {
        volume.edit_superblocks(1, |bytes| age(bytes, 1));
    };
    a_member_several_commits_behind: MissingMember SeesNothing at SECOND, |volume| {
        volume.edit_superblocks(1, |bytes| age(bytes, 3));
    };
    a_primary_that_contradicts_the_other: Superblock SeesNothing at FIRST, |volume| {
        // Both are of the last commit, so either could describe the volume.
        volume.edit_superblocks(1, |bytes| superblock(bytes).cache_generation = 3.into());
    };
    a_device_item_in_a_superblock: Member SeesNothing at SECOND, |volume| {
        volume.edit_superblocks(1, |bytes| superblock(bytes).dev_item.bytes_used += 65_536);
    };
    a_count_of_members: SuperblockCounter Agrees at WHOLE, |volume| {
        for member in [0, 1] {
            volume.edit_superblocks(member, |bytes| superblock(bytes).num_devices += 1);
        }
    };
    a_size_of_all_members: SuperblockCounter SeesNothing at WHOLE, |volume| {
        for member in [0, 1] {
            volume.edit_superblocks(member, |bytes| superblock(bytes).total_bytes += 65_536);
        }
    };
}

/// A member that is shorter than the volume says. The cut-off end holds no chunk.
#[test]
fn a_short_member() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(empty(&judges, 2, "-d raid1 -m raid1"));
    let file = File::options().write(true).open(&volume.disks().images()[1]);
    file.expect("an image opens").set_len(240 << 20).expect("it is cut");
    let outcome = volume.require(BtrfsFindingCode::Member, ProgsVerdict::Agrees);
    require_places(&outcome, &[SECOND]);
}

/// A backup of the newest commit with another root of the top level.
#[test]
fn a_backup_root() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(Recipe::new().fill(handful::fill).make(&judges));
    volume.edit_superblocks(0, |bytes| {
        let superblock = superblock(bytes);
        let newest = superblock.generation;
        let mut backups = superblock.super_roots.iter_mut();
        let backup = backups.find(|backup| backup.tree_root_gen == newest);
        backup.expect("the kernel stores one at each commit").fs_root_level += 1;
    });
    let outcome = volume.require(BtrfsFindingCode::BackupRoot, ProgsVerdict::SeesNothing);
    require_places(&outcome, &[WHOLE]);
}

/// Changes an item with an edit that gets its data, in a volume of two mirrored members. Requires
/// findings of one code. Returns the key of the item, and the findings.
fn damaged_item(
    tree: TreeId,
    is_wanted: impl Fn(Key, &[u8]) -> bool,
    edit: impl FnOnce(&mut Vec<u8>),
    code: BtrfsFindingCode,
    progs: ProgsVerdict,
) -> Option<(Key, CheckOutcome)> {
    let judges = judges::require()?;
    let volume = DamagedVolume::of(empty(&judges, 2, "-d raid1 -m raid1"));
    let mut wanted = Key::MIN;
    volume.edit(tree, is_wanted, |items, slot| {
        let (key, data) = &mut items[slot];
        wanted = *key;
        edit(data);
        if data.is_empty() {
            items.remove(slot);
        }
    });
    Some((wanted, volume.require(code, progs)))
}

/// Whether an item is that of a chunk of data.
fn is_data_chunk(key: Key, data: &[u8]) -> bool {
    key.item_type == ItemType::CHUNK_ITEM
        && ChunkItem::read_from_prefix(data).is_ok_and(|(item, _)| item.chunk_type.get() & 1 != 0)
}

/// Changes the second stripe of a chunk of data.
fn damaged_stripe(edit: impl FnOnce(&mut StripeItem), code: BtrfsFindingCode, progs: ProgsVerdict) {
    let edit = |data: &mut Vec<u8>| {
        edit(view(&mut data[size_of::<ChunkItem>() + size_of::<StripeItem>()..]));
    };
    let damaged = damaged_item(TreeId::CHUNK, is_data_chunk, edit, code, progs);
    if let Some((key, outcome)) = damaged {
        let place = BtrfsFindingPlace::Logical(Logical(key.offset));
        assert!(outcome.findings.iter().any(|found| found.place == place), "{}", show(&outcome));
    }
}

#[test]
fn a_stripe_with_another_uuid() {
    damaged_stripe(|stripe| stripe.dev_uuid[3] ^= 1, BtrfsFindingCode::Chunk, ProgsVerdict::Agrees);
}

#[test]
fn a_stripe_at_another_place() {
    let code = BtrfsFindingCode::DeviceExtent;
    damaged_stripe(|stripe| stripe.offset += 1 << 20, code, ProgsVerdict::SeesNothing);
}

/// Whether an item is a range of the second member.
fn is_extent_of_second(key: Key, _: &[u8]) -> bool {
    key.item_type == ItemType::DEV_EXTENT && key.objectid == 2
}

macro_rules! damaged_extents {
    ($($name:ident: $progs:ident, $edit:expr;)*) => {$(
        #[test]
        fn $name() {
            let edit: fn(&mut Vec<u8>) = $edit;
            let (tree, code) = (TreeId::DEV, BtrfsFindingCode::DeviceExtent);
            let damaged = damaged_item(tree, is_extent_of_second, edit, code, ProgsVerdict::$progs);
            if let Some((_, outcome)) = damaged {
                assert_eq!(outcome.findings.len(), 1, "{}", show(&outcome));
            }
        }
    )*};
}

damaged_extents! {
    a_missing_extent: Agrees, |data| data.clear();
    an_extent_of_another_chunk: SeesNothing, |data| view::<DevExtent>(data).chunk_offset += 1 << 20;
    a_shorter_extent: Agrees, |data| view::<DevExtent>(data).length -= 65_536;
    an_extent_of_another_tree: SeesNothing, |data| view::<DevExtent>(data).chunk_tree += 1;
}

/// The bytes used in the item of a member are neither those of its superblock nor those of its
/// chunks.
#[test]
fn bytes_used_of_a_member() {
    let is_second = |key: Key, _: &[u8]| key.item_type == ItemType::DEV_ITEM && key.offset == 2;
    let edit = |data: &mut Vec<u8>| view::<DevItem>(data).bytes_used += 65_536;
    let (tree, code) = (TreeId::CHUNK, BtrfsFindingCode::Member);
    if let Some((_, outcome)) = damaged_item(tree, is_second, edit, code, ProgsVerdict::Agrees) {
        require_places(&outcome, &[SECOND, SECOND]);
    }
}

/// A system chunk of the superblock with another UUID in its second stripe.
#[test]
fn a_system_chunk() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(empty(&judges, 2, "-d raid1 -m raid1"));
    for member in [0, 1] {
        volume.edit_superblocks(member, |bytes| {
            let array = &mut superblock(bytes).sys_chunk_array;
            let stripes = size_of::<DiskKey>() + size_of::<ChunkItem>();
            view::<StripeItem>(&mut array[stripes + size_of::<StripeItem>()..]).dev_uuid[5] ^= 1;
        });
    }
    volume.require(BtrfsFindingCode::SystemChunk, ProgsVerdict::Agrees);
}

fn btrfs(mount: &MountedMembers, command: &str) {
    let words = command.split_whitespace().map(OsStr::new);
    run("btrfs", &words.chain([mount.path().as_os_str()]).collect::<Vec<_>>());
}

#[test]
fn a_member_that_was_added() {
    let Some(judges) = judges::require() else { return };
    let mut disks = empty(&judges, 2, "-d raid1 -m raid1");
    disks.add(300);
    let mut mount = disks.mount_some(&[0, 1], "rw,noatime");
    handful::fill(mount.path());
    mount.add_device(&disks.images()[2]);
    btrfs(&mount, "balance start --full-balance");
    btrfs(&mount, "filesystem resize 3:260m");
    drop(mount);
    require_sound(&disks);
}

#[test]
fn a_member_that_was_replaced() {
    let Some(judges) = judges::require() else { return };
    let mut disks = empty(&judges, 2, "-d raid0 -m raid1");
    disks.add(300);
    let mut mount = disks.mount_some(&[0, 1], "rw,noatime");
    handful::fill(mount.path());
    let new = AttachedLoop::attach(&disks.images()[2], 512).before_detach(|device| {
        run("btrfs", &["device", "scan", "--forget", device]);
    });
    btrfs(&mount, &format!("replace start -B -f 1 {}", new.device()));
    mount.add_loop(new);
    drop(mount);
    let watch: &CheckWatch<'_> = &|_| ControlFlow::Continue(());
    let outcome = check_btrfs(disks.some_devices(&[1, 2]), &CheckOptions::default(), watch);
    let outcome = outcome.expect("the old member is not needed");
    assert!(outcome.findings.is_empty(), "{}", show(&outcome));
}

/// A sprout and its seed.
#[test]
fn a_seed() {
    let Some(judges) = judges::require() else { return };
    let mut disks = Recipe::new().fill(handful::fill).tune("-S 1 -f").make(&judges);
    require_sound(&disks);
    disks.add(300);
    let mut mount = disks.mount_some(&[0], "ro,noatime");
    mount.add_device(&disks.images()[1]);
    mount.remount("rw,noatime");
    handful::fill(&fill::directory(mount.path(), "over the seed"));
    drop(mount);
    require_sound(&disks);
}

/// Without a member of a mirror only that is found, and after a mount without it that it is behind.
#[test]
fn a_degraded_volume() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().devices(2).mkfs("-d raid1 -m raid1").make(&judges);
    let options =
        CheckOptions { is_degraded: true, verifies_data: true, ..CheckOptions::default() };
    let watch: &CheckWatch<'_> = &|_| ControlFlow::Continue(());
    assert!(check_btrfs(disks.some_devices(&[0]), &CheckOptions::default(), watch).is_err());
    let outcome = check_btrfs(disks.some_devices(&[0]), &options, watch).expect("it is checked");
    let codes: Vec<_> = outcome.findings.iter().map(|finding| finding.code).collect();
    assert_eq!(codes, [BtrfsFindingCode::MissingMember], "{}", show(&outcome));
    require_places(&outcome, &[SECOND]);
}

/// A device that records the long ranges that it is told of, and the long reads.
#[derive(Debug)]
struct AnnouncedDevice {
    device: Arc<dyn BlockDevice>,
    told: Mutex<Vec<Range<u64>>>,
    /// Each with the bytes that the device was told of before.
    reads: Mutex<Vec<(Range<u64>, u64)>>,
}

/// Longer than a tree block, so it is data.
const LONG: u64 = 64 << 10;

impl Delegate for AnnouncedDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.device
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        if range.end - range.start >= LONG {
            let told = self.told.lock();
            assert!(told.iter().any(|told| told.start <= range.start && range.end <= told.end));
            let told_bytes = told.iter().map(|told| told.end - told.start).sum();
            self.reads.lock().push((range, told_bytes));
        }
        self.inner().read_at(offset, buf)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        if len >= LONG {
            self.told.lock().push(offset..offset + len);
        }
        self.inner().prefetch(offset, len);
    }
}

/// Each copy of all data is announced to its device some pieces before it is read.
#[test]
fn devices_are_told_of_data_before_it_is_read() {
    const FILE: usize = 24 << 20;
    let Some(judges) = judges::require() else { return };
    for profile in ["raid1", "raid0"] {
        let disks = empty(&judges, 2, &format!("-m raid1 -d {profile}"));
        let mount = disks.mount("noatime");
        fs::write(mount.path().join("file"), vec![7; FILE]).expect("there is room");
        drop(mount);
        let told = disks.devices().into_iter().map(|device| {
            Arc::new(AnnouncedDevice { device, told: Mutex::default(), reads: Mutex::default() })
        });
        let told: Vec<_> = told.collect();
        let devices = told.iter().map(|device| Arc::clone(device) as Arc<dyn BlockDevice>);
        let options = CheckOptions { verifies_data: true, ..CheckOptions::default() };
        let outcome = check_btrfs(devices.collect(), &options, &|_| ControlFlow::Continue(()));
        assert!(outcome.expect("it is checked").findings.is_empty());
        let copies = if profile == "raid1" { 2 } else { 1 };
        let mut read = 0;
        for device in &told {
            let reads = device.reads.lock();
            read += reads.iter().map(|(range, _)| range.end - range.start).sum::<u64>();
            let (first, ahead) = reads.first().expect("data is read");
            assert!(*ahead >= 3 * (first.end - first.start), "{profile}: {ahead} bytes ahead");
        }
        assert!(read >= copies * FILE as u64, "{profile}: {read} bytes");
    }
}
