//! Finding a file: its tree and its inode item.

use offshoot_btrfs_format::inode::{InodeItem, Timespec};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, Structure, Timestamp};

use super::inferred::inferred;
use crate::delayed::{self, Queues};
use crate::storage::malformed;
use crate::transaction::{Base, tree_root};
use crate::tree::TreeRoot;

/// This bit is set in the inode number of a placeholder: the empty directory that stands for an
/// entry whose subvolume is elsewhere (see the essay of `subvolume`). The other bits are the number
/// of the directory with the entry, whose attributes the placeholder shows. No real file has so
/// high a number.
pub(crate) const PLACEHOLDER: u64 = 1 << 63;

/// The directory that holds the placeholder `file`; `None` when it is a real file.
pub(crate) fn placeholder_in(file: FileId) -> Option<FileId> {
    (file.ino & PLACEHOLDER != 0).then_some(FileId { ino: file.ino & !PLACEHOLDER, ..file })
}

pub(crate) fn no_such_file(file: FileId) -> Error {
    Error::posix(Errno::NOENT, file.to_string())
}

/// The tree that `file` is in.
pub(crate) fn tree_of(base: &Base, file: FileId) -> Result<TreeRoot> {
    let id = TreeId(file.dev);
    if !id.is_subvolume() {
        return Err(no_such_file(file));
    }
    tree_root(base, id)
}

/// The inode item of `file`.
pub(crate) fn inode_item(volume: &impl Queues, root: TreeRoot, file: FileId) -> Result<InodeItem> {
    let key = Key::new(file.ino, ItemType::INODE_ITEM, 0);
    let read = |data: &[u8]| InodeItem::view(data).copied().map_err(malformed);
    match delayed::with_item(volume, root, key, read)? {
        Some(item) => Ok(item),
        None => inferred(volume, root, file)?.ok_or_else(|| no_such_file(file)),
    }
}

/// The type of the file with this inode item.
pub(crate) fn type_of(item: &InodeItem) -> Result<FileType> {
    let mode = item.mode.get();
    FileType::from_mode(mode).ok_or_else(|| {
        Error::corrupt(Structure::InodeItem, format!("mode {mode:#o} has no file type"))
    })
}

/// A stored time. Damaged nanoseconds may be any number. They are limited to 999,999,999, so that
/// the file stays readable.
pub(crate) fn timestamp(time: &Timespec) -> Timestamp {
    Timestamp { secs: time.seconds(), nanos: time.nsec.get().min(999_999_999) }
}
