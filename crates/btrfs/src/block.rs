//! Verified tree blocks, and the cache of them.
//!
//! A [`TreeBlock`] is the proof that its bytes were verified. Blocks are shared by [`Arc`], so a
//! cache hit copies nothing. The cache holds at most its budget in bytes. It is sharded: a hit
//! takes the shared side of one shard's lock and marks the block as used with an atomic store. Two
//! threads that miss the same block read it once.

mod dirty;
#[cfg(debug_assertions)]
pub(crate) mod lock_order;

use std::ops::Deref;
use std::sync::Arc;

use offshoot_btrfs_format::block::{
    BlockHeader, HEADER_SIZE, LeafItem, NodePointer, items, pointers,
};
use offshoot_btrfs_format::check::{self, ExpectedBlock};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::Result;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::storage::Storage;
pub(crate) use dirty::{DirtyBlocks, Latch, ReadLatch, WriteLatch, changes_little, latch_shared};

/// A tree block that was verified, or that the running transaction has made.
#[derive(Clone, Debug)]
pub struct TreeBlock {
    bytes: Box<[u8]>,
}

/// The message for views of verified bytes, which cannot fail.
const VERIFIED: &str = "the block was verified";

impl TreeBlock {
    /// Wraps bytes that [`check::verify`] accepted.
    pub(crate) fn verified(bytes: Box<[u8]>) -> Self {
        Self { bytes }
    }

    /// The whole block, mutable for the transaction that owns it.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The whole block.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &BlockHeader {
        BlockHeader::view(&self.bytes).expect(VERIFIED)
    }

    /// The number of items of a leaf, or of pointers of a node.
    #[must_use]
    pub fn len(&self) -> usize {
        self.header().nritems.get() as usize
    }

    /// Whether it has no items: only the root of an empty tree.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is a leaf.
    #[must_use]
    pub fn is_leaf(&self) -> bool {
        self.header().level == 0
    }

    /// The items of a leaf.
    #[must_use]
    pub fn items(&self) -> &[LeafItem] {
        items(&self.bytes).expect(VERIFIED)
    }

    /// The pointers of a node.
    #[must_use]
    pub fn pointers(&self) -> &[NodePointer] {
        pointers(&self.bytes).expect(VERIFIED)
    }

    /// The key at `slot`, of an item or of a pointer.
    #[must_use]
    pub fn key(&self, slot: usize) -> Key {
        if self.is_leaf() { self.items()[slot].key.get() } else { self.pointers()[slot].key.get() }
    }

    /// The data of the item at `slot` of a leaf.
    #[must_use]
    pub fn data(&self, slot: usize) -> &[u8] {
        let item = &self.items()[slot];
        let start = HEADER_SIZE + item.offset.get() as usize;
        &self.bytes[start..start + item.size.get() as usize]
    }

    /// Searches the items from slot `low` on. Returns the slot of `key` and true, or the slot where
    /// the key belongs and false.
    pub(crate) fn search_from(&self, low: usize, key: Key) -> (usize, bool) {
        let items = &self.items()[low..];
        match items.binary_search_by(|item| item.key.get().cmp(&key)) {
            Ok(slot) => (low + slot, true),
            Err(slot) => (low + slot, false),
        }
    }

    /// As [`search_from`](Self::search_from), but faster when the key is close behind `low`.
    pub(crate) fn search_near(&self, low: usize, key: Key) -> (usize, bool) {
        let items = &self.items()[low..];
        // The key lies before `end`, or behind the last item.
        let mut end = 1;
        while end < items.len() && items[end - 1].key.get() < key {
            end *= 2;
        }
        let begin = end / 2;
        match items[begin..end.min(items.len())].binary_search_by(|item| item.key.get().cmp(&key)) {
            Ok(slot) => (low + begin + slot, true),
            Err(slot) => (low + begin + slot, false),
        }
    }

    /// The first slot of a leaf whose key is not less than `key`.
    pub(crate) fn first_at_least(&self, key: Key) -> usize {
        match self.items().first() {
            Some(first) if first.key.get() < key => self.search_from(1, key).0,
            _ => 0,
        }
    }

    /// The last slot whose key is at most `key`; `None` when all keys are greater.
    #[must_use]
    pub fn floor(&self, key: Key) -> Option<usize> {
        self.at_most_from(0, key).checked_sub(1)
    }

    /// As [`floor`](Self::floor), in a block whose first key is at most `key`.
    pub(crate) fn floor_behind_first(&self, key: Key) -> usize {
        self.at_most_from(1, key)
    }

    /// How many slots from `low` on have keys that are at most `key`.
    fn at_most_from(&self, low: usize, key: Key) -> usize {
        if self.is_leaf() {
            self.items()[low..].partition_point(|item| is_at_most(&item.key, key))
        } else {
            self.pointers()[low..].partition_point(|pointer| is_at_most(&pointer.key, key))
        }
    }

    /// What the header of the child at `slot` must say, in the tree `owner`.
    pub(crate) fn child_expected(&self, slot: usize, owner: TreeId) -> ExpectedBlock {
        let pointer = &self.pointers()[slot];
        ExpectedBlock {
            logical: pointer.logical(),
            level: self.header().level - 1,
            generation: Generation(pointer.generation.get()),
            owner,
            first_key: Some(pointer.key.get()),
        }
    }
}

/// A block that a reader goes through. A committed block never changes; the latch protects any
/// other block.
pub(crate) enum HeldBlock {
    Committed(Arc<TreeBlock>),
    Latched(ReadLatch),
}

impl Deref for HeldBlock {
    type Target = TreeBlock;

    fn deref(&self) -> &TreeBlock {
        match self {
            Self::Committed(block) => block,
            Self::Latched(latch) => latch,
        }
    }
}

impl HeldBlock {
    /// The block as it is now, without the latch.
    pub(crate) fn share(&self) -> Arc<TreeBlock> {
        match self {
            Self::Committed(block) => block.clone(),
            Self::Latched(latch) => Arc::clone(latch),
        }
    }
}

/// Whether a stored key is at most `key`.
#[expect(clippy::needless_bitwise_bool, reason = "in a search every branch is a guess")]
fn is_at_most(stored: &DiskKey, key: Key) -> bool {
    let low = |item_type: u8, offset: u64| u128::from(item_type) << 64 | u128::from(offset);
    let objectid = stored.objectid.get();
    let is_lower = low(stored.item_type, stored.offset.get()) <= low(key.item_type.0, key.offset);
    (objectid < key.objectid) | ((objectid == key.objectid) & is_lower)
}

/// Weighs a block by its bytes.
#[derive(Clone)]
struct ByBytes;

impl Weighter<u64, Arc<TreeBlock>> for ByBytes {
    fn weight(&self, _logical: &u64, block: &Arc<TreeBlock>) -> u64 {
        block.bytes.len() as u64
    }
}

/// Verified tree blocks by logical address, within a budget of bytes.
pub(crate) struct BlockCache {
    blocks: Cache<u64, Arc<TreeBlock>, ByBytes>,
}

impl BlockCache {
    /// A cache of at most `budget_bytes`, for blocks of `node_size` bytes.
    pub(crate) fn new(budget_bytes: u64, node_size: u32) -> Self {
        let blocks = usize::try_from(budget_bytes / u64::from(node_size)).unwrap_or(usize::MAX);
        Self { blocks: Cache::with_weighter(blocks, budget_bytes, ByBytes) }
    }

    /// From now on the cache has at most `budget_bytes`. It forgets blocks that are too many.
    pub(crate) fn set_budget(&self, budget_bytes: u64) {
        self.blocks.set_capacity(budget_bytes);
    }

    /// The committed block that `expected` describes, from the cache or else from the devices.
    pub(crate) fn committed(
        &self,
        storage: &Storage,
        expected: &ExpectedBlock,
    ) -> Result<Arc<TreeBlock>> {
        let read =
            || storage.read_block(expected).map(|bytes| Arc::new(TreeBlock::verified(bytes)));
        let mut loaded = false;
        let block = self.blocks.get_or_insert_with(&expected.logical.0, || {
            loaded = true;
            read()
        })?;
        if loaded || check::expect(block.bytes(), expected).is_ok() {
            return Ok(block);
        }
        // The cached block matched another pointer. Either one of the two pointers is wrong, or the
        // address was freed and used again meanwhile.
        let block = read()?;
        self.insert(block.clone());
        Ok(block)
    }

    /// Whether the cache has the block at `logical`.
    pub(crate) fn contains(&self, logical: Logical) -> bool {
        self.blocks.contains_key(&logical.0)
    }

    /// Adds a block that is on the devices.
    pub(crate) fn insert(&self, block: Arc<TreeBlock>) {
        self.blocks.insert(block.header().bytenr.get(), block);
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::ops::Range;

    use offshoot_device::BlockDevice;
    use offshoot_testkit::btrfs::checked::CheckedDevice;
    use offshoot_vfs::{
        EntryPlace, FileId, FileSystem as _, FileSystemMut as _, NewFile, Timestamp,
    };
    use parking_lot::Mutex;

    use super::*;
    use crate::test_volumes::in_memory;
    use crate::tree::Blocks as _;
    use crate::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};

    /// A device that records prefetch hints and reads.
    #[derive(Debug)]
    struct HintedDevice {
        device: Arc<CheckedDevice>,
        hints: Mutex<Vec<Range<u64>>>,
        reads: Mutex<Vec<u64>>,
    }

    impl HintedDevice {
        fn new() -> Arc<Self> {
            let (hints, reads) = (Mutex::default(), Mutex::default());
            Arc::new(Self { device: in_memory(4096), hints, reads })
        }
    }

    impl offshoot_device::Delegate for HintedDevice {
        fn inner(&self) -> &dyn BlockDevice {
            &*self.device
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            self.reads.lock().push(offset);
            self.inner().read_at(offset, buf)
        }

        fn prefetch(&self, offset: u64, len: u64) {
            self.hints.lock().push(offset..offset + len);
        }
    }

    /// Reads all leaves below `node`. Returns where those of the running transaction are on the
    /// device.
    fn read_leaves(volume: &BtrfsVolume, node: &TreeBlock, running: Generation) -> Vec<u64> {
        let mut new = Vec::new();
        for (slot, pointer) in node.pointers().iter().enumerate() {
            let child = volume.child(node, slot, TreeId::FS).unwrap();
            if !child.is_leaf() {
                new.extend(read_leaves(volume, &child, running));
            } else if pointer.generation.get() == running.0 {
                let places = volume.storage.write_places(pointer.logical(), 4096).unwrap();
                new.extend(places.iter().map(|(_, physical, _)| physical.0));
            }
        }
        new
    }

    fn open_without_cache(told: Arc<HintedDevice>) -> (Arc<BtrfsVolume>, Filesystem) {
        let options =
            EngineOptions { cache_bytes: 0, commit_interval: None, ..EngineOptions::default() };
        let volume = BtrfsVolume::open_writable(vec![told as Arc<_>], &options).unwrap();
        let fs = volume.filesystem(SubvolumeId::FS).unwrap();
        (volume, fs)
    }

    const NEW: NewFile = NewFile {
        permissions: 0o755,
        uid: 0,
        gid: 0,
        umask: None,
        at: Timestamp { secs: 0, nanos: 0 },
    };

    /// Makes files named by their numbers, and flushes the delayed items into the tree.
    fn make_files(fs: &Filesystem, dir: FileId, numbers: Range<u64>) {
        for number in numbers {
            let name = format!("file-{number}");
            fs.create(EntryPlace { dir, name: name.as_bytes() }, &NEW).unwrap();
        }
        fs.volume().delayed.flush(&fs.volume().base, u64::MAX).unwrap();
    }

    /// Before the mend, each leaf that received names was read from the device again at its first
    /// change after a commit.
    #[test]
    fn what_was_just_written_is_not_read_again_to_be_changed() {
        let told = HintedDevice::new();
        let (volume, fs) = open_without_cache(told.clone());
        let dir = fs.mkdir(EntryPlace { dir: fs.root(), name: b"dir" }, &NEW).unwrap();
        make_files(&fs, dir, 0..2000);
        fs.sync().unwrap();
        let copied = || volume.stats().copies;
        let (before, mut made) = (copied(), 2000);
        told.reads.lock().clear();
        for _ in 0..6 {
            make_files(&fs, dir, made..made + 20);
            made += 20;
        }
        let (reads, copied) = (told.reads.lock().len(), copied() - before);
        assert!(copied > 30 && reads as u64 * 5 < copied, "{reads} reads for {copied} copies");
    }

    /// The blocks of a written transaction that stay in memory are bounded by what the next
    /// transactions make. Full blocks do not stay.
    #[test]
    fn only_what_may_soon_be_changed_stays_in_memory() {
        let (volume, fs) = open_without_cache(HintedDevice::new());
        let dir = fs.mkdir(EntryPlace { dir: fs.root(), name: b"dir" }, &NEW).unwrap();
        make_files(&fs, dir, 0..2000);
        let live = volume.live().unwrap();
        let [_, made] = live.blocks_in_memory();
        fs.sync().unwrap();
        let [kept, _] = live.blocks_in_memory();
        assert!((1..made / 2).contains(&kept), "{kept} blocks of {made}");
        make_files(&fs, dir, 2000..2001);
        fs.sync().unwrap();
        let [after, _] = live.blocks_in_memory();
        assert!((1..kept / 2).contains(&after), "{after} blocks, and {kept} before");
    }

    /// Before the mend, making files sent read-ahead hints for blocks that were not written yet, so
    /// the device read the old contents of those places.
    #[test]
    fn what_was_not_written_yet_is_not_read_ahead() {
        let told = HintedDevice::new();
        let (volume, fs) = open_without_cache(told.clone());
        for (files, is_first) in [(0..2000, true), (2000..2030, false)] {
            make_files(&fs, fs.root(), files);
            let running = volume.live().unwrap().first_incomplete();
            let root = volume.block(&volume.tree(TreeId::FS).unwrap().expected()).unwrap();
            told.hints.lock().clear();
            let unwritten = read_leaves(&volume, &root, running);
            assert!(!unwritten.is_empty());
            let hints = told.hints.lock().clone();
            assert!(unwritten.iter().all(|at| !hints.iter().any(|hint| hint.contains(at))));
            assert_eq!(hints.is_empty(), is_first, "{hints:?}");
            fs.sync().unwrap();
        }
    }
}
