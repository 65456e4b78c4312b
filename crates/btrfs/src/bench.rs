//! One tree for benchmarks: insertions that no operation on files stands behind.

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;

use crate::engine::Handle;
use crate::handle::Volume;

/// The inode number that the items pretend to be about: far above those of a new volume.
const OBJECT: u64 = 1 << 40;

/// A share in the running transaction, to insert items into the tree of files. Such items mean
/// nothing, so the volume is of no use for anything else.
pub struct Inserts<'v>(Handle<'v>);

impl<'v> Inserts<'v> {
    /// Joins the running transaction of `volume`, for a few dozen insertions.
    ///
    /// # Errors
    /// When the volume was opened for reading, or has no space.
    pub fn join(volume: &'v Volume) -> Result<Self> {
        volume.join().map(Self)
    }

    /// Inserts an item, which must not be there.
    pub fn insert(&self, number: u64, data: &[u8]) -> Result<()> {
        let key = Key::new(OBJECT, ItemType::STRING_ITEM, number);
        self.0.change(TreeId::FS, |tree| tree.insert(key, data))
    }
}
