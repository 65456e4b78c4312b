//! The write engine on volumes that `mkfs.btrfs` made, judged by `btrfs check` and by the kernel.
//!
//! The test changes extended attributes of the root directory: items of one file with keys that
//! look random. A volume may have any number of them.

use offshoot_btrfs_format::{Key, TreeId};
use offshoot_testkit::btrfs::disks::{Disks, OLD_CACHE, UUID_TREE};
use offshoot_testkit::btrfs::judges;

use crate::BtrfsVolume;
use crate::test_volumes::{check, open, xattr};

fn item(number: u32) -> (Key, Vec<u8>) {
    let value = vec![b'a' + (number % 26) as u8; 20 + (number as usize * 7) % 300];
    xattr(format!("user.number-{number}").as_bytes(), &value)
}

fn insert(volume: &BtrfsVolume, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let handle = volume.join().unwrap();
        let (key, data) = item(number);
        handle.change(TreeId::FS, |tree| tree.insert(key, &data)).unwrap();
    }
}

fn remove(volume: &BtrfsVolume, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let handle = volume.join().unwrap();
        let (key, _) = item(number);
        assert!(handle.change(TreeId::FS, |tree| tree.remove(key)).unwrap(), "{number}");
    }
}

fn judge(mkfs: &[&str]) {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(mkfs);
    let volume = open(&disks);
    insert(&volume, 0..3000);
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    let volume = open(&disks);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let volume = &volume;
            scope.spawn(move || {
                insert(volume, (3000..9000).filter(|n| n % 4 == thread));
                remove(volume, (0..3000).filter(|n| n % 4 == thread));
                insert(volume, (0..1000).filter(|n| n % 4 == thread));
            });
        }
        for _ in 0..5 {
            volume.commit().unwrap();
        }
    });
    volume.commit().unwrap();
    check(&disks);
    remove(&volume, 0..1000);
    remove(&volume, 3000..8990);
    volume.commit().unwrap();
    eprintln!("{:?}", volume.stats());
    drop(volume);
    check(&disks);
    drop(disks.mount_watched("rw,noatime", &[UUID_TREE, OLD_CACHE]));
    check(&disks);
}

#[test]
fn defaults() {
    judge(&[]);
}

#[test]
fn small_nodes() {
    judge(&["-n", "4k"]);
}

#[test]
fn old_features() {
    judge(&["-O", "^skinny-metadata,^free-space-tree,^no-holes"]);
}

#[test]
fn block_group_tree() {
    judge(&["-O", "block-group-tree", "--csum", "xxhash", "-n", "64k"]);
}
