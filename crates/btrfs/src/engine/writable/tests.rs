//! Every reason not to write. For each of them opening for writing fails with the reason, nothing
//! is written, and the volume reads as the kernel shows it.

use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs_format::U64;
use offshoot_btrfs_format::chunk::{Chunk, ChunkItem, DevExtent, StripeItem};
use offshoot_btrfs_format::edit::data_mut;
use offshoot_btrfs_format::encode::{chunk_key, seal_block};
use offshoot_btrfs_format::quota::STATUS_KEY;
use offshoot_btrfs_format::root::RootItem;
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_testkit::btrfs::damage::{Features, edit_superblocks, set_features};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::compare;
use offshoot_testkit::run::run;
use offshoot_vfs::Errno;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::test_volumes::{edit, edit_root, in_memory, patch_leaf, xattr};

/// The fewest entries that a comparison must have covered.
const AT_LEAST: u64 = 40;

/// A volume that must be refused for writing.
struct Refused {
    disks: Disks,
    /// The indexes of the members that are opened.
    present: Vec<usize>,
    options: EngineOptions,
    /// The volume that the kernel mounts for comparison, with its members and mount options. It is
    /// the volume itself, or, if the kernel refuses to mount that, the volume that it was made
    /// from.
    shown: Option<Disks>,
    mounted: Vec<usize>,
    mount: &'static str,
    /// Whether its trees contradict each other, so that the error is [`Error::Corrupt`].
    is_corrupt: bool,
}

impl Refused {
    /// A volume with all its members, which the kernel mounts.
    fn whole(disks: Disks) -> Self {
        let present: Vec<_> = (0..disks.images().len()).collect();
        let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        Self {
            mounted: present.clone(),
            disks,
            present,
            options,
            shown: None,
            mount: "",
            is_corrupt: false,
        }
    }

    /// A volume that the kernel filled and `change` then modified.
    fn changed(judges: &Judges, change: impl FnOnce(&Disks)) -> Self {
        let disks = Recipe::new().fill(little).make(judges);
        change(&disks);
        Self::whole(disks)
    }

    fn devices(&self, open: fn(&Path) -> std::io::Result<FileDevice>) -> Vec<Arc<dyn BlockDevice>> {
        let images = self.present.iter().map(|&member| &self.disks.images()[member]);
        images.map(|image| Arc::new(open(image).expect("nobody else has it")) as Arc<_>).collect()
    }

    /// Requires that opening for writing fails with `name`, and that reading works.
    #[track_caller]
    fn judge(&self, judges: &Judges, name: &str) {
        let before = self.disks.copy(judges);
        let devices = self.devices(FileDevice::open_writable);
        let refused = crate::BtrfsVolume::open_writable(devices, &self.options).err();
        let said = refused.as_ref().map(ToString::to_string).unwrap_or_default();
        println!("{said}");
        let is_it = match &refused {
            Some(Error::Corrupt(_)) => self.is_corrupt,
            Some(Error::Unsupported { .. }) => !self.is_corrupt,
            _ => false,
        };
        assert!(is_it, "{name}: {refused:?}");
        assert!(said.contains(name), "{said} does not name {name}");
        for (image, copy) in self.disks.images().iter().zip(before.images()) {
            run("cmp", &[image, copy]);
        }
        let shown = self.shown.as_ref().unwrap_or(&self.disks);
        let mount = shown.mount_some(&self.mounted, &format!("ro,noatime,{}", self.mount));
        let devices = self.devices(FileDevice::open);
        let volume = crate::BtrfsVolume::open(devices, &self.options).expect("it is read");
        let fs = volume.filesystem(volume.default_subvolume().expect("it has one"));
        compare(&fs.expect("it opens"), mount.path()).assert_same(AT_LEAST);
    }
}

fn little(root: &Path) {
    fill::names::fill(&fill::directory(root, "names"));
    fill::data::plain_files(&fill::directory(root, "data"));
    fill::sync(root);
}

/// A volume as `mkfs.btrfs` makes it with these options, filled by the kernel.
fn made(judges: &Judges, devices: usize, mkfs: &'static str) -> Refused {
    Refused::whole(Recipe::new().devices(devices).mkfs(mkfs).fill(little).make(judges))
}

/// A volume with quotas for which the kernel does `calls`, which set limits.
fn limited(judges: &Judges, mkfs: &'static str, calls: &str) -> Refused {
    let refused = made(judges, 1, mkfs);
    let mount = refused.disks.mount("rw,noatime");
    let path = mount.path().display();
    run("sh", &["-ec", &format!("cd '{path}'; {calls}")]);
    drop(mount);
    refused
}

/// Puts an item into a tree, with a commit.
fn insert(disks: &Disks, tree: TreeId, key: Key, data: &[u8]) {
    let volume = crate::test_volumes::open(disks);
    volume.join().unwrap().change(tree, |tree| tree.insert(key, data)).unwrap();
    volume.commit().unwrap();
}

/// Sets a 64-bit field of all superblocks to a function of its old value.
fn set_field(disks: &Disks, at: usize, change: impl Fn(u64) -> u64) {
    for image in disks.images() {
        edit_superblocks(image, |block| {
            let field = &mut block[at..at + 8];
            let old = u64::from_le_bytes(field.try_into().expect("eight bytes"));
            field.copy_from_slice(&change(old).to_le_bytes());
        });
    }
}

/// The offset of `compat_ro_flags` in a superblock.
const COMPAT_RO_AT: usize = 0xb4;

macro_rules! refused {
    ($($(#[$doc:meta])* $test:ident, $name:literal: $make:expr;)*) => {
        $(
            $(#[$doc])*
            #[test]
            fn $test() {
                let Some(judges) = judges::require() else { return };
                let make: fn(&Judges) -> Refused = $make;
                make(&judges).judge(&judges, $name);
            }
        )*
    };
}

refused! {
    limited_quotas, "limit quota group 0/5": |judges| {
        limited(judges, "-O quota", "btrfs qgroup limit 1G .")
    };
    limited_simple_quotas, "limit quota group 1/7": |judges| {
        limited(judges, "-O squota", "btrfs qgroup create 1/7 .; btrfs qgroup limit -e 2G 1/7 .")
    };
    quotas_of_another_version, "quotas of version 2": |judges| {
        let disks = Recipe::new().mkfs("-O quota").fill(little).make(judges);
        let volume = crate::test_volumes::open(&disks);
        let handle = volume.join().unwrap();
        let newer = |old: Option<&[u8]>| {
            let mut data = old.expect("quotas are on").to_vec();
            data[0] = 2;
            Ok(data)
        };
        handle.change(TreeId::QUOTA, |tree| tree.modify(STATUS_KEY, 0, newer)).unwrap();
        drop(handle);
        volume.commit().unwrap();
        drop(volume);
        Refused::whole(disks)
    };
    data_in_raid5, "RAID5": |judges| made(judges, 3, "-d raid5 -m raid1c3");
    metadata_in_raid5, "RAID5": |judges| made(judges, 3, "-d raid1 -m raid5");
    data_in_raid6, "RAID6": |judges| made(judges, 4, "-d raid6 -m raid1c4");
    metadata_in_raid6, "RAID6": |judges| made(judges, 4, "-d single -m raid6");
    zoned, "a zoned volume": |judges| {
        // The kernel emulates zones of 256 MiB on a device without zones.
        Refused::whole(Recipe::new().mib(4096).mkfs("-O zoned").fill(little).make(judges))
    };
    seed, "a seed": |judges| {
        Refused::whole(Recipe::new().fill(little).tune("-f -S 1").make(judges))
    };
    sprout, "belongs to a seed": |judges| {
        let mut disks = Recipe::new().fill(little).tune("-f -S 1").make(judges);
        disks.add(512);
        let mut mount = disks.mount_some(&[0], "ro,noatime");
        mount.add_device(&disks.images()[1]);
        mount.remount("rw,noatime");
        fill::write(&mount.path().join("over the seed"), b"new");
        drop(mount);
        // The kernel finds the seed when it is given the sprout first.
        Refused { mounted: vec![1, 0], ..Refused::whole(disks) }
    };
    metadata_only, "holds metadata only": |judges| {
        let names = |root: &Path| {
            fill::names::hard_links(&fill::directory(root, "links"));
            fill::xattrs::fill(&fill::directory(root, "xattrs"));
            // A metadata dump has zeros for inline data, and so for the targets of symbolic links.
            // The kernel shows nothing then, and our reader reports it.
            for link in ["links/symlink", "links/other/symlink", "xattrs/symlink"] {
                std::fs::remove_file(root.join(link)).expect("it is there");
            }
        };
        let source = Recipe::new().fill(names).make(judges);
        let disks = Disks::create(judges, 1, 512);
        let dump = disks.images()[0].with_extension("dump");
        run("btrfs-image", &[source.images()[0].as_os_str(), dump.as_os_str()]);
        run("btrfs-image", &["-r".as_ref(), dump.as_os_str(), disks.images()[0].as_os_str()]);
        Refused::whole(disks)
    };
    free_space_tree_that_is_not_valid, "free-space tree is not valid": |judges| {
        Refused::changed(judges, |disks| {
            set_field(disks, COMPAT_RO_AT, |flags| flags & !CompatRo::FREE_SPACE_TREE_VALID.0);
        })
    };
    unknown_feature, "the feature bit 40": |judges| {
        Refused::changed(judges, |disks| {
            set_features(&disks.images()[0], Features::ReadOnlyCompatible, 1 << 40);
        })
    };
    verity, "the feature VERITY": |judges| {
        Refused::changed(judges, |disks| {
            set_features(&disks.images()[0], Features::ReadOnlyCompatible, CompatRo::VERITY.0);
        })
    };
    unfinished_balance, "unfinished balance": |judges| {
        let balance = Key::new(objectid::BALANCE, ItemType::TEMPORARY_ITEM, 0);
        let refused =
            Refused::changed(judges, |disks| insert(disks, TreeId::ROOT, balance, &[0; 448]));
        Refused { mount: "skip_balance", ..refused }
    };
    unfinished_relocation, "unfinished relocation": |judges| {
        Refused::changed(judges, |disks| {
            // The key of the relocation tree of the top level subvolume has that subvolume's id as
            // its offset.
            let volume = crate::test_volumes::open(disks);
            let root = volume.tree(TreeId::FS).unwrap();
            drop(volume);
            let mut item = RootItem::new_zeroed();
            (item.bytenr, item.level) = (root.logical.0.into(), root.level);
            item.generation = root.generation.0.into();
            item.generation_v2 = item.generation;
            item.refs = 1.into();
            let key = Key::new(TreeId::TREE_RELOC.0, ItemType::ROOT_ITEM, TreeId::FS.0);
            insert(disks, TreeId::ROOT, key, item.as_bytes());
        })
    };
    device_that_is_being_replaced, "a device is being replaced": |judges| replacing(judges, 1);
    suspended_replacement, "a device is being replaced": |judges| replacing(judges, 4);
    missing_member, "is missing": |judges| {
        let refused = made(judges, 2, "-d raid1 -m raid1");
        let options = EngineOptions { is_degraded: true, ..refused.options.clone() };
        Refused { present: vec![1], mounted: vec![1], mount: "degraded", options, ..refused }
    };
    /// A member that has data without another copy. Without such data it would be left out.
    stale_member, "missed commits": |judges| {
        let disks = Recipe::new().devices(2).mkfs("-d raid0 -m raid1").fill(little).make(judges);
        let old = std::fs::read(&disks.images()[1]).expect("an image");
        let mount = disks.mount("rw,noatime");
        for number in 0..3 {
            let _ = fill::directory(mount.path(), &format!("later-{number}"));
            mount.sync();
        }
        drop(mount);
        let whole = disks.copy(judges);
        std::fs::write(&disks.images()[1], old).expect("an image");
        Refused { shown: Some(whole), ..Refused::whole(disks) }
    };
}

/// A volume in which one item contradicts the others. The kernel refuses nearly all such volumes,
/// so it is given the volume before that change.
fn contradicting(judges: &Judges, mkfs: &'static str, change: fn(&Disks)) -> Refused {
    let disks = Recipe::new().mkfs(mkfs).fill(little).make(judges);
    let before = disks.copy(judges);
    change(&disks);
    Refused { shown: Some(before), is_corrupt: true, ..Refused::whole(disks) }
}

macro_rules! contradictions {
    ($($(#[$doc:meta])* $test:ident, $mkfs:literal, $name:literal: $change:expr;)*) => {
        $(
            $(#[$doc])*
            #[test]
            fn $test() {
                let Some(judges) = judges::require() else { return };
                contradicting(&judges, $mkfs, $change).judge(&judges, $name);
            }
        )*
    };
}

/// The first chunk of this kind.
fn chunk_of(disks: &Disks, flag: u64) -> Chunk {
    let volume = crate::BtrfsVolume::open(disks.devices(), &EngineOptions::default()).unwrap();
    volume.chunks().find(|chunk| chunk.flags.0 & flag != 0).expect("there is one")
}

/// The item with this key of a tree.
fn stored(disks: &Disks, tree: TreeId, key: Key) -> Vec<u8> {
    let volume = crate::BtrfsVolume::open(disks.devices(), &EngineOptions::default()).unwrap();
    let root = volume.tree(tree).unwrap();
    with_item(&volume.rooms, root, key, |data| Ok(data.to_vec())).unwrap().expect("it is there")
}

/// Moves the device extent of the data chunk to another key, or replaces it.
fn change_device_extent(disks: &Disks, change: impl FnOnce(&mut Key, &mut DevExtent)) {
    let chunk = chunk_of(disks, BlockGroupFlags::DATA);
    let old = Key::new(1, ItemType::DEV_EXTENT, chunk.stripes[0].physical.0);
    let data = stored(disks, TreeId::DEV, old);
    let mut extent = *DevExtent::ref_from_prefix(&data).unwrap().0;
    let mut key = old;
    change(&mut key, &mut extent);
    edit(disks, TreeId::DEV, &[(key, Some(extent.as_bytes().to_vec()))]);
}

/// The key of the block group of the data chunk.
fn group_key(disks: &Disks) -> Key {
    let chunk = chunk_of(disks, BlockGroupFlags::DATA);
    Key::new(chunk.start.0, ItemType::BLOCK_GROUP_ITEM, chunk.length)
}

/// Replaces the block group of the data chunk.
fn change_group(disks: &Disks, tree: TreeId, change: impl FnOnce(&mut Key, &mut BlockGroupItem)) {
    let old = group_key(disks);
    let mut item = *BlockGroupItem::view(&stored(disks, tree, old)).unwrap();
    let mut key = old;
    change(&mut key, &mut item);
    let mut edits = vec![(key, Some(item.as_bytes().to_vec()))];
    if key != old {
        edits.push((old, None));
    }
    edit(disks, tree, &edits);
}

/// Adds a block group where no chunk is.
fn add_group(disks: &Disks, tree: TreeId) {
    let item = BlockGroupItem { flags: 1.into(), ..BlockGroupItem::new_zeroed() };
    let key = Key::new(8 << 30, ItemType::BLOCK_GROUP_ITEM, 8 << 20);
    edit(disks, tree, &[(key, Some(item.as_bytes().to_vec()))]);
}

/// Moves the stripe of the second copy of metadata to another place of the device.
fn move_copy(disks: &Disks, place: u64) {
    move_copy_of(disks, BlockGroupFlags::METADATA, place);
}

/// Moves the stripe of the second copy of the first chunk of this kind to another place of the
/// device.
fn move_copy_of(disks: &Disks, kind: u64, place: u64) {
    patch_leaf(disks, TreeId::CHUNK, chunk_key(&chunk_of(disks, kind)), |leaf, slot| {
        let at = size_of::<ChunkItem>() + size_of::<StripeItem>() + size_of::<U64>();
        data_mut(leaf, slot)[at..at + 8].copy_from_slice(&place.to_le_bytes());
    });
}

contradictions! {
    /// The next commit would write an empty list of system chunks, and the volume could not be
    /// opened.
    system_chunk_that_only_the_superblock_has, "-m dup", "different system chunks": |disks| {
        let system = chunk_of(disks, BlockGroupFlags::SYSTEM);
        let flags = system.flags.0 & !BlockGroupFlags::SYSTEM | BlockGroupFlags::METADATA;
        patch_leaf(disks, TreeId::CHUNK, chunk_key(&system), |leaf, slot| {
            data_mut(leaf, slot)[24..32].copy_from_slice(&flags.to_le_bytes());
        });
    };
    system_chunk_that_is_elsewhere_in_the_superblock, "-m dup", "different system chunks": |disks| {
        move_copy_of(disks, BlockGroupFlags::SYSTEM, 400 << 20);
    };
    device_extent_that_is_missing, "", "has no device extent": |disks| {
        let chunk = chunk_of(disks, BlockGroupFlags::DATA);
        let key = Key::new(1, ItemType::DEV_EXTENT, chunk.stripes[0].physical.0);
        edit(disks, TreeId::DEV, &[(key, None)]);
    };
    device_extent_of_another_length, "", "are a stripe of": |disks| {
        change_device_extent(disks, |_, extent| extent.length -= 65536);
    };
    device_extent_of_another_chunk, "", "are a stripe of the chunk at": |disks| {
        let other = chunk_of(disks, BlockGroupFlags::METADATA).start.0;
        change_device_extent(disks, |_, extent| extent.chunk_offset = other.into());
    };
    device_extent_without_a_chunk, "", "are no stripe of any chunk": |disks| {
        change_device_extent(disks, |key, extent| {
            key.offset = 400 << 20;
            extent.length = (1 << 20).into();
        });
    };
    /// Block groups of one leaf do not even read.
    device_extents_that_overlap, "", "overlaps the extent before it": |disks| {
        let chunk = chunk_of(disks, BlockGroupFlags::DATA);
        let key = Key::new(1, ItemType::DEV_EXTENT, chunk.stripes[0].physical.0);
        let longer = chunk.stripe_bytes() + 65536;
        patch_leaf(disks, TreeId::DEV, key, |leaf, slot| {
            data_mut(leaf, slot)[24..32].copy_from_slice(&longer.to_le_bytes());
        });
    };
    /// The second copy of metadata overlaps data.
    chunks_that_overlap, "-m dup", "overlaps one of the chunk at": |disks| {
        move_copy(disks, chunk_of(disks, BlockGroupFlags::DATA).stripes[0].physical.0);
    };
    /// The stripes begin at different places, but one reaches into the other.
    chunk_that_reaches_into_another, "-m dup", "are no stripe of any chunk": |disks| {
        move_copy(disks, chunk_of(disks, BlockGroupFlags::DATA).stripes[0].physical.0 + 65536);
    };
    chunk_behind_the_end_of_its_device, "-m dup", "end behind": |disks| {
        let metadata = chunk_of(disks, BlockGroupFlags::METADATA);
        let (old, new) = (metadata.stripes[1].physical.0, 500 << 20);
        let key = |at| Key::new(1, ItemType::DEV_EXTENT, at);
        let extent = stored(disks, TreeId::DEV, key(old));
        edit(disks, TreeId::DEV, &[(key(old), None), (key(new), Some(extent))]);
        move_copy(disks, new);
    };
    superblock_that_counts_too_few_bytes, "", "it counts 1 bytes as used": |disks| {
        edit_superblocks(&disks.images()[0], |block| {
            block[120..128].copy_from_slice(&1u64.to_le_bytes());
        });
    };
    /// The engine once wrote a copy of the superblock beyond the end of the device, which ended
    /// writing.
    device_that_is_longer_in_its_item, "", "is to have 18446744073709551615 bytes": |disks| {
        patch_leaf(disks, TreeId::CHUNK, Key::new(1, ItemType::DEV_ITEM, 1), |leaf, slot| {
            data_mut(leaf, slot)[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        });
    };
    /// A block that one of them dropped was lost for the other.
    deleted_subvolume_with_the_root_of_another, "", "is a block of tree 5": |disks| {
        let root = stored(disks, TreeId::ROOT, Key::new(5, ItemType::ROOT_ITEM, 0));
        let copy = Key::new(300, ItemType::ROOT_ITEM, 0);
        let orphan = Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, 300);
        edit(disks, TreeId::ROOT, &[(copy, Some(root)), (orphan, Some(vec![]))]);
    };
    chunk_without_a_block_group, "-O block-group-tree", "has no block group": |disks| {
        edit(disks, TreeId::BLOCK_GROUP, &[(group_key(disks), None)]);
    };
    chunk_without_a_group_among_extents, "-O ^block-group-tree", "has no block group": |disks| {
        edit(disks, TreeId::EXTENT, &[(group_key(disks), None)]);
    };
    block_group_without_a_chunk, "-O block-group-tree", "are those of no chunk": |disks| {
        add_group(disks, TreeId::BLOCK_GROUP);
    };
    group_without_a_chunk_among_extents, "-O ^block-group-tree", "are those of no chunk": |disks| {
        add_group(disks, TreeId::EXTENT);
    };
    block_group_of_another_length, "-O block-group-tree", "are those of no chunk": |disks| {
        change_group(disks, TreeId::BLOCK_GROUP, |key, _| key.offset /= 2);
    };
    group_of_another_length_among_extents, "-O ^block-group-tree", "are those of no chunk": |disks| {
        change_group(disks, TreeId::EXTENT, |key, _| key.offset /= 2);
    };
    block_group_of_another_kind, "-O block-group-tree", "its flags are": |disks| {
        change_group(disks, TreeId::BLOCK_GROUP, |_, item| item.flags = 4.into());
    };
    block_group_that_uses_more_than_it_has, "-O block-group-tree", "bytes used of": |disks| {
        let key = group_key(disks);
        patch_leaf(disks, TreeId::BLOCK_GROUP, key, |leaf, slot| {
            data_mut(leaf, slot)[..8].copy_from_slice(&(key.offset + 4096).to_le_bytes());
        });
    };
}

/// Volumes of many shapes that the kernel made pass the check of chunks and are writable.
#[test]
fn sound_chunks_of_every_profile_are_written() {
    let Some(judges) = judges::require() else { return };
    for (devices, mkfs) in [
        (1, "-m dup -d single"),
        (1, "-m single -d dup -O ^block-group-tree"),
        (1, "--mixed"),
        (2, "-m raid1 -d raid0"),
        (3, "-m raid1c3 -d raid0 -O ^block-group-tree"),
        (4, "-m raid10 -d raid10"),
        (4, "-m raid1c4 -d raid1"),
    ] {
        let disks = Recipe::new().devices(devices).mkfs(mkfs).fill(little).make(&judges);
        let (key, data) = xattr(b"user.written", b"on");
        insert(&disks, TreeId::FS, key, &data);
        disks.assert_checks();
    }
}

/// A device replacement in this state. The kernel mounts the volume only with the device that
/// replaces the other one, so it is given the volume before that change.
fn replacing(judges: &Judges, state: u64) -> Refused {
    let disks = Recipe::new().fill(little).make(judges);
    let before = disks.copy(judges);
    let mut item = DevReplaceItem::new_zeroed();
    (item.src_devid, item.replace_state) = (1.into(), state.into());
    insert(&disks, TreeId::DEV, Key::new(0, ItemType::DEV_REPLACE, 0), item.as_bytes());
    Refused { shown: Some(before), ..Refused::whole(disks) }
}

/// The item of a finished replacement, or of one that never began, does not prevent writing.
#[test]
fn a_replacement_that_is_over_is_written_on() {
    let Some(judges) = judges::require() else { return };
    for state in [0, 2, 3] {
        let disks = replacing(&judges, state).disks;
        let (key, data) = xattr(b"user.written", b"on");
        insert(&disks, TreeId::FS, key, &data);
    }
}

/// With `ignore_log` the next commit would lose the tree log.
#[test]
fn a_log_that_is_ignored() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(little).make(&judges);
    let mount = disks.mount("rw,noatime,commit=300");
    let file = std::fs::File::create(mount.path().join("fsynced")).expect("a file");
    file.sync_all().expect("into the log");
    let cut = disks.copy(&judges);
    drop((file, mount));
    let before = cut.copy(&judges);
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    let refused = crate::BtrfsVolume::open_writable(cut.writable_devices(), &options).err();
    let said = refused.as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(matches!(refused, Some(Error::Posix { errno: Errno::INVAL, .. })), "{refused:?}");
    assert!(said.contains("pending tree log is ignored"), "{said}");
    run("cmp", &[&cut.images()[0], &before.images()[0]]);
}

/// Such a volume once opened, and its first commit failed with `ENOENT` and ended all writing.
#[test]
fn a_volume_without_a_checksum_tree_is_not_written() {
    let device = in_memory(16384);
    let devices = || vec![device.clone() as Arc<dyn BlockDevice>];
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = crate::BtrfsVolume::open(devices(), &options).unwrap();
    let key = [&TreeId::CSUM.0.to_le_bytes()[..], &[ItemType::ROOT_ITEM.0]].concat();
    let forget = |bytes: &mut [u8]| {
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
        // An unknown item type that keeps the order of the keys.
        bytes[at + 8] = 250;
        seal_block(bytes, volume.superblock().checksum);
    };
    edit_root(&device, &volume, volume.root_tree(), forget);
    drop(volume);
    crate::BtrfsVolume::open(devices(), &options).expect("it can be read");
    let refused = crate::BtrfsVolume::open_writable(devices(), &options).err();
    let said = refused.as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(matches!(refused, Some(Error::Unsupported { .. })), "{refused:?}");
    assert!(said.contains("without a checksum tree"), "{said}");
}
