//! One tree for benchmarks: insertions without an operation on files.

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;

use crate::filesystem::BtrfsVolume;
use crate::inode::RoomsHandle;

/// The inode number in the keys of the items, far above those of a new volume.
const OBJECT: u64 = 1 << 40;

/// A share in the running transaction, to insert items into the tree of files. The items have no
/// meaning, so the volume cannot be used for anything else.
pub struct Inserts<'v>(RoomsHandle<'v>);

impl<'v> Inserts<'v> {
    /// Joins the running transaction of `volume`, for a few dozen insertions.
    ///
    /// # Errors
    /// When the volume was opened for reading, or has no space.
    pub fn join(volume: &'v BtrfsVolume) -> Result<Self> {
        volume.join().map(Self)
    }

    /// Inserts an item, whose key must not exist.
    pub fn insert(&self, number: u64, data: &[u8]) -> Result<()> {
        let key = Key::new(OBJECT, ItemType::STRING_ITEM, number);
        self.0.change(TreeId::FS, |tree| tree.insert(key, data))
    }
}
