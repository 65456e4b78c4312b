//! The base of all rooms above: the devices, the blocks, and the trees of a volume.

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result};

use super::{LiveVolume, RootCache, chunk_tree_root, newest, tree_root};
use crate::block::BlockCache;
use crate::report::{LostItems, VolumeReport};
use crate::rescue::AroundDamage;
use crate::space::Roots;
use crate::storage::{MappedChunk, Member, ReadSegment, Storage, StorageTrees};
use crate::tree::{Cursor, TreeRoot, recorded_segment};

/// The base of all rooms above: the devices, the blocks and the trees of a volume, as the last
/// commit and the transactions since left them.
pub struct Base {
    pub(crate) storage: Storage,
    pub(crate) cache: BlockCache,
    root_tree: TreeRoot,
    pub(crate) csum_tree: Option<TreeRoot>,
    /// How the volume is read around damage; `None` when damage is an error.
    pub(crate) around: Option<AroundDamage>,
    /// Whether data that no copy gives is read as zeros, and reported.
    pub(crate) replaces_bad_data: bool,
    /// Whether data is taken as it is read, without comparing its checksums.
    pub(crate) ignores_checksums: bool,
    /// The RAID stripe tree, which says where data is; `None` in a volume without it.
    pub(crate) stripe_tree: Option<TreeRoot>,
    pub(super) subvolume_roots: RootCache,
    /// The part that can change; `None` in a volume that was opened for reading.
    pub(crate) live: Option<LiveVolume>,
}

impl Base {
    /// The base over `storage`. It knows only the root tree yet.
    pub(crate) fn new(storage: Storage, cache_bytes: u64) -> Self {
        Self {
            cache: BlockCache::new(cache_bytes, storage.superblock().node_size),
            root_tree: TreeRoot::of_root_tree(&storage.superblock().item),
            csum_tree: None,
            around: None,
            replaces_bad_data: false,
            ignores_checksums: false,
            stripe_tree: None,
            subvolume_roots: RootCache::default(),
            live: None,
            storage,
        }
    }

    /// From now on refuses all blocks that the kernel refuses. The cache is emptied, because it may
    /// hold some.
    pub(crate) fn set_strict(&mut self, cache_bytes: u64) {
        self.storage.set_strict();
        self.cache = BlockCache::new(cache_bytes, self.superblock().node_size);
    }

    /// The superblock of the last commit.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        self.storage.superblock()
    }

    /// The devices of the volume, those of its seeds included, by their number.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        self.storage.members()
    }

    /// All chunks, by their logical address.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Chunk> {
        self.storage.chunks()
    }

    /// The tree of tree roots.
    #[must_use]
    pub fn root_tree(&self) -> TreeRoot {
        self.root_tree
    }

    /// The items of trees that could not be read so far, or may be missing, when the volume is read
    /// around damage.
    pub fn lost_items(&self) -> Vec<LostItems> {
        self.around.as_ref().map(AroundDamage::all_lost).unwrap_or_default()
    }

    /// Whether items of `tree` with keys from `from` to `to` may be lost.
    pub(crate) fn may_have_lost_between(&self, tree: TreeId, from: Key, to: Key) -> bool {
        let around = self.around.as_ref();
        around.is_some_and(|around| !around.lost_between(tree, from, to).is_empty())
    }

    /// Reads the volume through another root, of another commit or at another place. A pending log
    /// belongs to the newest one.
    pub(crate) fn use_root(&mut self, root: TreeRoot) {
        if root == self.root_tree {
            return;
        }
        self.subvolume_roots = RootCache::default();
        self.storage.superblock_mut().item.log_root = 0.into();
        self.root_tree = root;
    }

    /// The chunk tree.
    pub(crate) fn chunk_root(&self) -> TreeRoot {
        chunk_tree_root(self)
    }

    /// Reads the chunks from another chunk tree.
    pub(crate) fn use_chunk_root(&mut self, root: TreeRoot) {
        let item = &mut self.storage.superblock_mut().item;
        item.chunk_root = root.logical.0.into();
        item.chunk_root_level = root.level;
        item.chunk_root_generation = root.generation.0.into();
    }

    /// The checksum tree; `None` in a volume that has none.
    #[must_use]
    pub(crate) fn csum_tree(&self) -> Option<TreeRoot> {
        self.csum_tree
    }

    /// The root of the tree `id`.
    ///
    /// # Errors
    /// `ENOENT` when the volume has no such tree.
    pub fn tree(&self, id: TreeId) -> Result<TreeRoot> {
        tree_root(self, id)
    }

    /// Calls `visit` with every item of the tree `root` from `from` on, until it breaks. In a
    /// volume that is written, delayed items are not included.
    pub fn for_each_item(
        &self,
        root: TreeRoot,
        from: Key,
        mut visit: impl FnMut(Key, &[u8]) -> std::ops::ControlFlow<()>,
    ) -> Result<()> {
        let mut cursor = self.cursor(root, from)?;
        while let Some((key, data)) = cursor.item() {
            if visit(key, data).is_break() {
                break;
            }
            cursor.advance()?;
        }
        Ok(())
    }

    /// A cursor on the first item of the tree `root` whose key is `key` or greater.
    pub fn cursor(&self, root: TreeRoot, key: Key) -> Result<Cursor<'_>> {
        Cursor::seek(self, root, key)
    }

    /// The part that can change; `None` in a volume that was opened for reading.
    pub(crate) fn live_part(&self) -> Option<&LiveVolume> {
        self.live.as_ref()
    }

    /// The part of the volume that can change.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading.
    pub(crate) fn live(&self) -> Result<&LiveVolume> {
        self.live
            .as_ref()
            .ok_or_else(|| Error::posix(Errno::ROFS, "the volume was opened for reading"))
    }

    /// Tells the reporter, if there is one.
    pub(crate) fn report(&self, report: &VolumeReport) {
        self.storage.report(report);
    }

    /// Fills `buf`, whole sectors, with the data at `logical`: [`Storage::read_data`].
    pub(crate) fn read_data(
        &self,
        logical: Logical,
        buf: &mut [u8],
        checksums: Option<&[u8]>,
    ) -> Result<()> {
        self.storage.read_data(self, logical, buf, checksums)
    }
}

impl Roots for Base {
    fn storage(&self) -> &Storage {
        &self.storage
    }

    fn tree(&self, id: TreeId) -> Result<TreeRoot> {
        tree_root(self, id)
    }
}

impl StorageTrees for Base {
    fn recorded_segment(
        &self,
        mapped: &MappedChunk,
        logical: Logical,
        len: u64,
    ) -> Result<Option<ReadSegment>> {
        let tree = self.stripe_tree.filter(|_| mapped.chunk.flags.is_in_stripe_tree());
        tree.map(|tree| recorded_segment(self, tree, mapped, logical, len)).transpose()
    }

    fn has_newest_commit(&self, index: usize) -> Result<bool> {
        newest::has_newest_commit(self, index)
    }
}
