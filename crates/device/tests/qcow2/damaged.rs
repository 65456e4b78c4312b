//! Images that are damaged, or have features that this crate does not know.

use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryDevice, Qcow2Header, Qcow2Options, open_qcow2};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;
use offshoot_testkit::scratch_dir;

use super::cuts::small;
use super::qemu::{made, qemu_img, qemu_io};

const CLUSTER: u64 = 4096;
pub(super) const COPIED: u64 = 1 << 63;

fn opened(file: Arc<dyn BlockDevice>, is_writable: bool) -> std::io::Result<Arc<dyn BlockDevice>> {
    let header = Qcow2Header::read(&*file)?;
    open_qcow2(file, &header, Qcow2Options { is_writable, ..Qcow2Options::default() })
}

pub(super) fn number(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[small(at)..small(at) + 8].try_into().expect("eight bytes"))
}

pub(super) fn put(bytes: &mut [u8], at: u64, number: u64) {
    bytes[small(at)..small(at) + 8].copy_from_slice(&number.to_be_bytes());
}

/// Makes an image with one cluster of data. Returns its bytes, with 1 MiB of room behind them.
fn image(dir: &Path, options: &str) -> Vec<u8> {
    made(dir, "qcow2", "1M", options);
    qemu_io(&dir.join("made"), "qcow2", &["write -P 7 0 4k".to_owned()]);
    let mut bytes = std::fs::read(dir.join("made")).expect("an image");
    bytes.resize(bytes.len() + (1 << 20), 0);
    bytes
}

/// The offsets of the L1 table, the reference count table, the first L2 table and the first block
/// of counts.
fn tables(image: &[u8]) -> [u64; 4] {
    let (l1, count_table) = (number(image, 40), number(image, 48));
    [l1, count_table, number(image, l1) & !COPIED, number(image, count_table)]
}

/// Whatever an entry says, no write goes to metadata, and no count falls below zero.
#[test]
fn entries_that_lead_to_metadata_are_refused() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = image(dir.path(), "-o cluster_size=4k");
    let [l1, count_table, l2, block] = tables(&image);
    let behind = image.len() as u64 * 2 / CLUSTER * CLUSTER;
    let not_counted = image.len() as u64 / CLUSTER * CLUSTER - CLUSTER;
    for place in [l1, count_table, l2, block, 512, behind, not_counted] {
        for flags in [0, COPIED] {
            let mut bytes = image.clone();
            put(&mut bytes, l2, place | flags);
            let device = Arc::new(MemoryDevice::new(bytes.clone()));
            let disk = opened(device.clone(), true).expect("it opens");
            let error = disk.write_at(0, &[1; 512]).expect_err("it is damaged");
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{place} {flags}: {error}");
            let error = disk.discard(0, CLUSTER).expect_err("it is damaged");
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{place} {flags}: {error}");
            disk.flush().expect("a flush");
            drop(disk);
            let mut now = vec![0; bytes.len()];
            device.read_at(0, &mut now).expect("memory is read");
            assert!(now == bytes, "{place} {flags}: it was changed");
        }
    }
    // Damage the L1 entry of an L2 table, and the entry of a block of counts.
    for (entry, places) in [(l1, [count_table, block, l1, 512]), (count_table, [l1, l2, 0, behind])]
    {
        for place in places {
            let mut bytes = image.clone();
            put(&mut bytes, entry, if entry == l1 { place | COPIED } else { place });
            let disk = opened(Arc::new(MemoryDevice::new(bytes)), true);
            let written = disk.and_then(|disk| disk.write_at(8192, &[1; 512]));
            let error = written.expect_err("it is damaged");
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{entry} {place}: {error}");
        }
    }
}

/// A cluster that holds a table is not allocated for data, even if its count is 0.
#[test]
fn a_table_that_counts_as_free_is_not_written_over() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = image(dir.path(), "-o cluster_size=4k");
    let [l1, count_table, l2, block] = tables(&image);
    for table in [0, l1, count_table, l2, block] {
        let mut bytes = image.clone();
        let count = small(block + table / CLUSTER * 2);
        bytes[count..count + 2].fill(0);
        let disk = opened(Arc::new(MemoryDevice::new(bytes)), true).expect("it opens");
        let error = disk.write_at(64 << 10, &[1; 512]).expect_err("it is damaged").to_string();
        assert!(error.contains("its reference counts are wrong: qemu-img check"), "{error}");
    }
}

/// The error names an unknown feature. An image that was not closed is only read. Opening an image
/// for writing clears the autoclear features, on which other programs would rely.
#[test]
fn the_features_of_an_image_are_heeded() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = image(dir.path(), "-o cluster_size=4k");
    for (bit, is_writable, what) in [
        (0, true, "was not closed"),
        (1, true, "marked as corrupt"),
        (2, false, "its data in another file"),
        (5, false, "features that are not known"),
        (63, false, "features that are not known"),
    ] {
        let mut bytes = image.clone();
        let features = number(&bytes, 72) | 1 << bit;
        put(&mut bytes, 72, features);
        let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(bytes));
        let error = opened(device.clone(), is_writable).expect_err("refused").to_string();
        assert!(error.contains(what), "{bit}: {error}");
        assert_eq!(opened(device, false).is_ok(), is_writable, "{bit}");
    }
    let mut bytes = image;
    put(&mut bytes, 88, u64::MAX);
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(bytes));
    let autoclear = |device: &dyn BlockDevice| {
        let mut found = [0; 8];
        device.read_at(88, &mut found).expect("memory is read");
        u64::from_be_bytes(found)
    };
    opened(device.clone(), false).expect("it opens");
    assert_eq!(autoclear(&*device), u64::MAX);
    opened(device.clone(), true).expect("it opens");
    assert_eq!(autoclear(&*device), 0);
}

/// Clusters without a block of counts are free, also between clusters that have one.
#[test]
fn a_table_of_counts_may_have_holes() {
    const CLUSTER: u64 = 512;
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let mut bytes = made(dir.path(), "qcow2", "1M", "-o cluster_size=512,refcount_bits=64");
    let count_table = number(&bytes, 48);
    let block = number(&bytes, count_table);
    // A block that counts the fourth part of the file, in a cluster of the first part.
    let free = (0..64).find(|at| number(&bytes, block + at * 8) == 0).expect("one is free");
    put(&mut bytes, block + free * 8, 1);
    put(&mut bytes, count_table + 24, free * CLUSTER);
    bytes.resize(2 << 20, 0);
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(bytes));
    let disk = opened(device.clone(), true).expect("it opens");
    let data = Random::new(3).bytes(1 << 20);
    disk.write_at(0, &data).expect("a write");
    drop(disk);
    let mut bytes = vec![0; 2 << 20];
    device.read_at(0, &mut bytes).expect("memory is read");
    std::fs::write(dir.path().join("made"), &bytes).expect("a file");
    qemu_img(dir.path(), &["check", "made"]);
    qemu_img(dir.path(), &["convert", "-O", "raw", "made", "plain"]);
    assert!(std::fs::read(dir.path().join("plain")).expect("a file") == data);
}
