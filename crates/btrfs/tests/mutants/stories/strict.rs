//! Blocks that a reader can use and the kernel refuses.

use std::path::Path;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{Error, FileSystem, FileSystemMut};

use super::{AT, DamageStory, NEW, at, place};
use crate::devices;

fn files(root: &Path) {
    for number in 0..100 {
        fill::write(&root.join(format!("file-{number:03}")), &[b'd'; 5000]);
    }
}

/// The volume is shown when it is opened for reading.
#[track_caller]
fn assert_shown(story: &DamageStory) {
    let volume =
        BtrfsVolume::open(devices(&story.members), &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    let mut byte = [0];
    fs.read(at(&fs, "file-050"), 0, &mut byte).expect("it reads");
    assert_eq!(byte, *b"d");
}

/// Blocks were read before the volume was written, stayed in the cache, and ended all writing when
/// a commit checked them again.
#[test]
fn a_block_that_the_kernel_refuses_ends_opening_for_writing_and_no_commit() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, files);
    let keys = story.keys_while(TreeId::EXTENT, Key::MIN, |_| true);
    let extent = keys
        .iter()
        .filter(|key| key.item_type == ItemType::BLOCK_GROUP_ITEM)
        .find_map(|group| {
            let (leaf, _) = story.leaf(TreeId::EXTENT, *group);
            let is_data = |key: &&Key| {
                key.item_type == ItemType::EXTENT_ITEM
                    && story.leaf(TreeId::EXTENT, **key).0 == leaf
                    && story.item(TreeId::EXTENT, **key)[16] == 1
            };
            keys.iter().find(is_data).copied()
        })
        .expect("a leaf with a block group and an extent of data");
    story.edit(TreeId::EXTENT, extent, |items| {
        let item = items.iter_mut().find(|item| item.0 == extent).expect("it is there");
        // Behind the extent and the type of the reference, and the root of that: the inode.
        item.1[24 + 1 + 8..][..8].copy_from_slice(&12u64.to_le_bytes());
    });
    story.judge.kernel(&story.members).expect_err("the kernel does not mount it");
    let error = BtrfsVolume::open_writable(devices(&story.members), &EngineOptions::default());
    let error = error.err().expect("it is refused");
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    assert!(error.to_string().contains("a reference of the inode 12"), "{error}");
    assert_shown(&story);
}

/// A write that needs a leaf that the kernel refuses fails, and everything else goes on.
#[test]
fn a_leaf_that_the_kernel_refuses_is_not_written() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, files);
    let [damaged, other] = {
        let fs = story.open();
        ["file-050", "file-002"].map(|path| at(&fs, path))
    };
    let key = Key::new(damaged.ino, ItemType::INODE_ITEM, 0);
    story.edit(TreeId::FS, key, |items| {
        let item = items.iter_mut().find(|item| item.0 == key).expect("it is there");
        // The generation.
        item.1[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    });
    let before = story.check();
    let fs = story.open();
    let error = fs.write(damaged, 0, b"x", AT).expect_err("its leaf is refused");
    assert!(error.to_string().contains("generation at most"), "{error}");
    fs.write(other, 0, b"x", AT).expect("its leaf is sound");
    fs.create(place(fs.root(), "new"), &NEW).expect("there is room");
    fs.sync().expect("a commit");
    drop(fs);
    story.assert_no_worse_than(&before);
    assert_shown(&story);
}
