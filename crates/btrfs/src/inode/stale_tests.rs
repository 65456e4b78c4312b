//! Regression tests: free space of a damaged volume has stale checksums, in many leaves. A step
//! that takes this space removes those of one leaf, because it reserves for one.

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::MemoryDevice;
use offshoot_testkit::random::Random;
use offshoot_vfs::{
    EntryPlace, Fallocate, FileFlags, FileId, FileSystem, FileSystemMut, NewFile, Timestamp,
};

use crate::data::{overlaps, stored_sums};
use crate::test_volumes::bare;
use crate::{BtrfsVolume, Compress, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
const SECTOR: usize = 4096;

/// A leaf holds no more checksums of single sectors than that.
const MOST_PER_LEAF: usize = 140;

/// A volume whose first data chunk has stale checksums of all sectors, each in an item of its own.
struct StaleVolume {
    device: Arc<MemoryDevice>,
    volume: Arc<BtrfsVolume>,
    fs: Filesystem,
    /// Half of the length of the chunk.
    half: usize,
}

impl StaleVolume {
    fn new(options: EngineOptions) -> Self {
        let device = bare(4096);
        let options = EngineOptions { commit_interval: None, ..options };
        let volume = BtrfsVolume::open_writable(vec![device.clone()], &options).expect("it opens");
        let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
        let chunk =
            volume.chunks().find(|chunk| chunk.flags.has_data()).expect("there is one for data");
        let half = usize::try_from(chunk.length / 2).expect("small");
        let sectors = (chunk.start.0..chunk.start.0 + chunk.length).step_by(SECTOR);
        let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
        let stale: Vec<_> = sectors.map(|at| (key(at), Some(&[7; 4][..]))).collect();
        let handle = volume.join().expect("there is room");
        handle.change(TreeId::CSUM, |tree| tree.apply_batch(&stale)).expect("it goes through");
        drop(handle);
        Self { device, volume, fs, half }
    }

    fn create(&self, name: &str) -> FileId {
        let place = EntryPlace { dir: self.fs.root(), name: name.as_bytes() };
        self.fs.create(place, &NEW).expect("a file")
    }

    /// The extents of `file`, as ranges of addresses.
    fn extents(&self, file: FileId) -> Vec<Range<u64>> {
        let items = overlaps(&self.volume, file, 0..u64::MAX, usize::MAX).expect("they are read");
        let place = |data: &[u8]| {
            let item = FileExtent::parse(data).expect("it is an extent");
            let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, .. } = item.body else {
                panic!("{item:?}");
            };
            disk_bytenr.0..disk_bytenr.0 + disk_num_bytes
        };
        items.iter().map(|item| place(&item.data)).collect()
    }

    /// Writes `bytes` to a new file, and requires that they become so many extents that none has
    /// checksums of two leaves.
    fn assert_writes_leaf_by_leaf(&self, bytes: &[u8]) {
        let file = self.create("file");
        self.fs.write(file, 0, bytes, AT).expect("there is room");
        self.fs.sync().expect("it is stored");
        self.assert_in_leaves(file, bytes.len());
        self.assert_reads("file", bytes);
    }

    fn assert_in_leaves(&self, file: FileId, len: usize) {
        let (extents, least) = (self.extents(file), len / SECTOR / MOST_PER_LEAF);
        assert!(least > 0, "{len} bytes are too few");
        assert!(extents.len() > least, "{} extents, {least} full leaves", extents.len());
    }

    fn assert_has_no_checksums(&self, file: FileId) {
        for extent in self.extents(file) {
            assert!(stored_sums(&self.volume, &extent).expect("they are read").is_empty());
        }
    }

    /// Requires that the file reads as `bytes` when the volume is opened anew. A stale checksum
    /// would be an error.
    fn assert_reads(&self, name: &str, bytes: &[u8]) {
        self.volume.commit().expect("there is room");
        let device = Arc::new(self.device.snapshot());
        let volume =
            BtrfsVolume::open(vec![device], &EngineOptions::default()).expect("it opens again");
        let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
        let file = fs.lookup(fs.root(), name.as_bytes()).expect("it is there");
        let mut found = vec![0; bytes.len()];
        assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), bytes.len());
        assert!(found == bytes, "{name} has other contents");
    }
}

#[test]
fn preallocated_a_leaf_at_a_time() {
    let stale = StaleVolume::new(EngineOptions::default());
    let file = stale.create("file");
    let what = Fallocate::Allocate { keeps_size: false };
    stale.fs.fallocate(file, what, 0, stale.half as u64, AT).expect("there is room");
    stale.assert_has_no_checksums(file);
    stale.assert_in_leaves(file, stale.half);
}

/// This much is written back under the lock of the file.
#[test]
fn short_data_is_stored_a_leaf_at_a_time() {
    let stale = StaleVolume::new(EngineOptions::default());
    stale.assert_writes_leaf_by_leaf(&vec![5; 200 * SECTOR]);
}

/// This much would be written ahead.
#[test]
fn long_data_is_stored_a_leaf_at_a_time() {
    let stale = StaleVolume::new(EngineOptions::default());
    stale.assert_writes_leaf_by_leaf(&vec![5; stale.half]);
}

#[test]
fn data_without_checksums_is_stored_a_leaf_at_a_time() {
    let stale = StaleVolume::new(EngineOptions::default());
    let file = stale.create("file");
    stale.fs.set_flags(file, FileFlags::NODATACOW, AT).expect("an empty file may have it");
    stale.fs.write(file, 0, &vec![5; stale.half], AT).expect("there is room");
    stale.fs.sync().expect("it is stored");
    stale.assert_has_no_checksums(file);
    stale.assert_in_leaves(file, stale.half);
}

/// Each compressed chunk has a place of its own.
#[test]
fn compressed_data_is_stored() {
    let compress = Compress { method: "zstd:1".parse().expect("a method"), is_forced: true };
    let stale =
        StaleVolume::new(EngineOptions { compress: Some(compress), ..EngineOptions::default() });
    let mut bytes = Random::new(1).bytes(stale.half);
    bytes.chunks_mut(64).for_each(|piece| piece[32..].fill(0));
    let file = stale.create("file");
    stale.fs.write(file, 0, &bytes, AT).expect("there is room");
    stale.fs.sync().expect("it is stored");
    stale.assert_reads("file", &bytes);
}

/// Small files are stored together where the checksums of all are in one leaf.
#[test]
fn small_files_are_stored_one_by_one() {
    const FILES: usize = 64;
    let stale = StaleVolume::new(EngineOptions::default());
    for number in 0..FILES {
        let file = stale.create(&format!("file{number}"));
        stale.fs.write(file, 0, &[5; 4 * SECTOR], AT).expect("there is room");
    }
    stale.fs.sync().expect("they are stored");
    assert_eq!(stale.volume.stats().files_stored_together, 0);
    for number in 0..FILES {
        stale.assert_reads(&format!("file{number}"), &[5; 4 * SECTOR]);
    }
}
