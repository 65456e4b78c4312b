//! Regression tests for preallocation, on volumes in memory.

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Fallocate, FileSystem, FileSystemMut, NewFile, Timestamp};

use crate::data::{overlaps, stored_sums};
use crate::test_volumes::bare;
use crate::{BtrfsVolume, EngineOptions};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
const SECTOR: usize = 4096;

/// Regression: one step removed the stale checksums of a whole extent, however many leaves they
/// filled. It reserves for one.
#[test]
fn stale_checksums_are_removed_a_leaf_at_a_time() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![bare(4096)], &options).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
    let chunk =
        volume.chunks().find(|chunk| chunk.flags.has_data()).expect("there is one for data");
    let sectors = (chunk.start.0..chunk.start.0 + chunk.length).step_by(SECTOR);
    let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
    let stale: Vec<_> = sectors.map(|at| (key(at), Some(&[7; 4][..]))).collect();
    let handle = volume.join().expect("there is room");
    handle.change(TreeId::CSUM, |tree| tree.apply_batch(&stale)).expect("it goes through");
    drop(handle);
    let file = fs.create(EntryPlace { dir: fs.root(), name: b"file" }, &NEW).expect("a file");
    let what = Fallocate::Allocate { keeps_size: false };
    fs.fallocate(file, what, 0, chunk.length / 2, AT).expect("there is room");
    let extents = overlaps(&volume, file, 0..u64::MAX, usize::MAX).expect("they are read");
    for extent in &extents {
        let item = FileExtent::parse(&extent.data).expect("it is an extent");
        let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, .. } = item.body else {
            panic!("{item:?}");
        };
        let range = disk_bytenr.0..disk_bytenr.0 + disk_num_bytes;
        assert!(stored_sums(&volume, &range).expect("they are read").is_empty());
    }
    // A leaf holds no more than 140 such items.
    let least = usize::try_from(chunk.length).expect("small") / 2 / SECTOR / 140;
    assert!(extents.len() >= least, "{} extents, {least} leaves", extents.len());
}
