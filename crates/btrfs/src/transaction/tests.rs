//! The write engine on volumes that `mkfs.btrfs` made, judged by `btrfs check` and by the kernel.
//!
//! What is changed are extended attributes of the root directory: items of one file at keys
//! that look random, which any volume may have in any number.

use std::sync::Arc;

use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::FileDevice;
use offshoot_testkit::disks::Disks;
use offshoot_testkit::judges;
use offshoot_testkit::run::run;

use crate::{OpenOptions, Volume};

fn open(disks: &Disks) -> Arc<Volume> {
    let devices = disks
        .images()
        .iter()
        .map(|image| Arc::new(FileDevice::open_writable(image).unwrap()) as Arc<_>)
        .collect();
    Volume::open_writable(devices, &OpenOptions::default()).unwrap()
}

fn xattr(number: u32) -> (Key, Vec<u8>) {
    let name = format!("user.number-{number}");
    let value = vec![b'a' + (number % 26) as u8; 20 + (number as usize * 7) % 300];
    let key = Key::new(256, ItemType::XATTR_ITEM, name_hash(name.as_bytes()));
    let mut data = Vec::new();
    data.extend_from_slice(&[0; 17]);
    data.extend_from_slice(&1u64.to_le_bytes());
    data.extend_from_slice(&u16::try_from(value.len()).unwrap().to_le_bytes());
    data.extend_from_slice(&u16::try_from(name.len()).unwrap().to_le_bytes());
    data.push(8);
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&value);
    (key, data)
}

fn insert(volume: &Volume, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let handle = volume.join().unwrap();
        let (key, data) = xattr(number);
        handle.change(TreeId::FS, |tree| tree.insert(key, &data)).unwrap();
    }
}

fn remove(volume: &Volume, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let handle = volume.join().unwrap();
        let (key, _) = xattr(number);
        assert!(handle.change(TreeId::FS, |tree| tree.remove(key)).unwrap(), "{number}");
    }
}

fn check(disks: &Disks) {
    run("btrfs", &["check", "--readonly", disks.images()[0].to_str().unwrap()]);
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
    drop(disks.mount("rw,noatime"));
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
