//! A subvolume that is changed: the numbers of its new inodes, and whether it may be changed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};
use parking_lot::Mutex;

use super::{PLACEHOLDER, ROOT_DIR, evict, placeholder_in, tree_of};
use crate::tree::Cursor;
use crate::volume::Engine;

/// How many adjacent numbers a directory gets for its new files.
pub(crate) const GROUP: u64 = 64;

/// A subvolume that is changed.
#[derive(Debug)]
pub(crate) struct Subvolume {
    /// Held while a directory moves (see the lock order of `in_use`).
    pub(super) rename: Mutex<()>,
    /// The first number that no directory got for its new files. It only grows, so a number is not used twice while
    /// the volume is open.
    next_ino: AtomicU64,
    is_read_only: bool,
}

impl Subvolume {
    /// Gets the subvolume `id` ready to be changed: what unlinked files an earlier crash left in it is removed.
    fn load(volume: &Engine, id: TreeId) -> Result<Self> {
        let is_read_only = volume.subvolume(id)?.read_only;
        if !is_read_only {
            evict::remove_orphans(volume, id)?;
        }
        // The highest number in use, as the tree has it: what lies above are no inodes.
        let last = Key::new(TreeId::LAST_FREE.0, ItemType(u8::MAX), u64::MAX);
        let cursor = Cursor::seek_floor(volume, volume.tree(id)?, last)?;
        let highest = cursor.item().map_or(ROOT_DIR, |(key, _)| key.objectid.max(ROOT_DIR));
        Ok(Self {
            rename: Mutex::new(()),
            next_ino: AtomicU64::new(highest.saturating_add(1)),
            is_read_only,
        })
    }

    /// Numbers that no inode of the subvolume has or had since the volume was opened: those up to the next
    /// multiple of [`GROUP`].
    pub(super) fn take_numbers(&self) -> Result<Range<u64>> {
        let end = |next: u64| (next / GROUP + 1) * GROUP;
        self.next_ino
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                (next < PLACEHOLDER).then(|| end(next))
            })
            .map(|next| next..end(next))
            .map_err(|_| Error::posix(Errno::NOSPC, "an inode number"))
    }
}

/// The subvolume of `file`, which is to be changed.
///
/// # Errors
/// `EROFS` when the volume or the subvolume is read-only, `EPERM` for what is not stored at all.
pub(super) fn writable(volume: &Engine, file: FileId) -> Result<Arc<Subvolume>> {
    volume.live()?.require_whole()?;
    if placeholder_in(file).is_some() {
        return Err(Error::posix(Errno::PERM, "the place of a subvolume that is elsewhere"));
    }
    let id = TreeId(file.dev);
    let subvolume = if let Some(known) = volume.inodes.known_subvolume(id) {
        known
    } else {
        tree_of(volume, file)?;
        volume.inodes.subvolume(id, || Subvolume::load(volume, id))?
    };
    if subvolume.is_read_only {
        return Err(Error::posix(Errno::ROFS, format!("subvolume {id}")));
    }
    Ok(subvolume)
}

/// Gets the subvolume `id` ready to be changed, if it may be.
pub(crate) fn prepare(volume: &Engine, id: TreeId) -> Result<()> {
    match writable(volume, FileId { dev: id.0, ino: ROOT_DIR }) {
        Err(Error::Posix { errno: Errno::ROFS, .. }) => Ok(()),
        other => other.map(drop),
    }
}
