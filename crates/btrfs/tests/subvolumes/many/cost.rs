//! What one snapshot writes, for trees of different sizes.
//!
//! After a snapshot, both trees refer to every block that the root of the source points to. Each of
//! these references is an item in the extent tree. So the cost depends on how full the root is, as
//! in the kernel. When a tree grows by a level, its root is almost empty again.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, MkfsOptions, SubvolumeId, mkfs};
use offshoot_device::{BlockDevice, CrashDevice, CrashEntry, MemoryDevice};
use offshoot_vfs::{FileSystem, FileSystemMut, Timestamp};
use uuid::Uuid;

use crate::common::{AT, NEW, at, place, top};

/// With small tree blocks, a few files already make a tree of several levels.
const NODE_BYTES: u32 = 4096;

/// The bytes that a snapshot of a subvolume with so many files writes: after no change, and after a
/// write to one file.
fn written(files: u64) -> [u64; 2] {
    let memory: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(1 << 30));
    let mut options = MkfsOptions::new(Uuid::from_u128(files.into()), Timestamp::default());
    options.node_size = Some(NODE_BYTES);
    mkfs(std::slice::from_ref(&memory), &options).expect("a volume");
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let open = |device| BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    let fs = top(&open(memory.clone()));
    fs.create_subvolume(place(fs.root(), "live"), &NEW).expect("a subvolume");
    let dir = at(&fs, "live");
    for number in 0..files {
        fs.create(place(dir, &name(number)), &NEW).expect("a file");
    }
    fs.sync().expect("a commit");
    drop(fs);

    let device = Arc::new(CrashDevice::new(memory));
    let volume = open(device.clone());
    let fs = top(&volume);
    let live = SubvolumeId { 0: at(&fs, "live").dev };
    let mut taken = 0;
    let mut snapshot = || {
        taken += 1;
        fs.snapshot(live, place(fs.root(), &format!("snapshot{taken}")), true, AT)
            .expect("a snapshot");
        fs.sync().expect("a commit");
        let log = device.log();
        let bytes = |entry: &CrashEntry| match entry {
            CrashEntry::Write { data, .. } => data.len() as u64,
            _ => 0,
        };
        log.entries().iter().map(bytes).sum::<u64>()
    };
    // The first snapshot makes the items that both of the others need.
    let before = snapshot();
    let unchanged = snapshot();
    let file = at(&fs, &format!("live/{}", name(files / 2)));
    fs.write(file, 0, b"changed", AT).expect("there is room");
    let changed = snapshot();
    [unchanged - before, changed - unchanged]
}

/// A long name, so that a file takes a good part of a leaf.
fn name(number: u64) -> String {
    format!("{number}-{}", "n".repeat(190))
}

#[test]
fn the_cost_of_a_snapshot_does_not_grow_with_the_tree() {
    /// For each pointer of a full node: two copies of a leaf of the extent tree. The other changes
    /// of two commits are included.
    const NODE: u64 = 2 * NODE_BYTES as u64 * ((NODE_BYTES as u64 - 101) / 33 + 40);
    /// A change copies one node on each level above the leaf, and shares the blocks that these
    /// point to.
    const LEVELS: u64 = 3;
    let all = [10, 100, 1000, 10_000, 40_000, 70_000].map(|files| {
        let bytes = written(files);
        println!("{files} files: {} bytes, {} with a change", bytes[0], bytes[1]);
        bytes
    });
    assert!(all.iter().all(|&[alone, changed]| alone < NODE && changed < LEVELS * NODE), "{all:?}");
    let [.., wide, high] = all;
    assert!(high[0] < wide[0], "a tree of one level more: {all:?}");
}
