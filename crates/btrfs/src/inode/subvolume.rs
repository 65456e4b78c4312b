//! A subvolume that is changed: numbers for its new inodes, and whether it may be changed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};
use parking_lot::Mutex;

use super::orphans::remove_orphans;
use super::{PLACEHOLDER, ROOT_DIR, placeholder_in, tree_of};
use crate::inode::Rooms;
use crate::spread::{SpreadRwLock, SpreadWriteGuard};
use crate::sync::RwLockReadGuard;
use crate::transaction::ChangingTree;
use crate::tree::Cursor;

/// How many adjacent numbers a directory gets for its new files.
pub(crate) const GROUP: u64 = 64;

/// A subvolume that is changed.
#[derive(Debug)]
pub(crate) struct Subvolume {
    /// The rename lock: held while a directory moves (lock order of `in_use`).
    pub(super) rename: Mutex<()>,
    /// The lowest number that no directory has taken for its new files. It only grows, so no number
    /// is used twice while the volume is open.
    next_ino: AtomicU64,
    tree: Arc<ChangingTree>,
    /// A thread that buffers data of files holds it shared. A snapshot holds it exclusively, so
    /// that no data is buffered. It comes before 2 in the lock order of `in_use`.
    buffering: SpreadRwLock<()>,
}

impl Subvolume {
    /// Prepares the subvolume `id` for changes: removes the orphans of an earlier crash.
    fn load(volume: &Rooms, id: TreeId) -> Result<Self> {
        let tree = volume.live()?.tree(volume, id)?;
        remove_orphans(volume, id)?;
        // The highest number in use. Keys above it do not belong to inodes.
        let last = Key::new(TreeId::LAST_FREE.0, ItemType(u8::MAX), u64::MAX);
        let cursor = Cursor::seek_floor(volume, volume.tree(id)?, last)?;
        let highest = cursor.item().map_or(ROOT_DIR, |(key, _)| key.objectid.max(ROOT_DIR));
        Ok(Self {
            rename: Mutex::new(()),
            next_ino: AtomicU64::new(highest.saturating_add(1)),
            tree,
            buffering: SpreadRwLock::with_few_copies("buffering", || ()),
        })
    }

    /// Allows the caller to buffer data of files until the guard is dropped.
    ///
    /// # Errors
    /// `EROFS` when the subvolume became read-only, `ENOENT` when it was deleted.
    pub(super) fn buffering(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let buffering = self.buffering.read();
        self.tree.require_writable()?;
        Ok(buffering)
    }

    /// As [`buffering`](Self::buffering), for changes that files do not show, such as
    /// deduplication. A read-only subvolume allows them too.
    ///
    /// # Errors
    /// `ENOENT` when it was deleted.
    pub(super) fn sharing(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let sharing = self.buffering.read();
        self.tree.require_alive()?;
        Ok(sharing)
    }

    /// Keeps all threads from buffering data of files until the guard is dropped.
    pub(crate) fn still(&self) -> SpreadWriteGuard<'_, ()> {
        self.buffering.write()
    }

    /// Numbers that no inode of the subvolume has, or had since the volume was opened: up to the
    /// next multiple of [`GROUP`]. If the next number is 300 these are 300 to 319.
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

/// The subvolume of `file`, for a change.
///
/// # Errors
/// `EROFS` when the volume or the subvolume is read-only, `EPERM` for a placeholder, which is not
/// stored.
pub(crate) fn writable(volume: &Rooms, file: FileId) -> Result<Arc<Subvolume>> {
    let subvolume = shareable(volume, file)?;
    subvolume.tree.require_writable()?;
    Ok(subvolume)
}

/// The subvolume of `file`, for a change that files do not show. It may be read-only.
///
/// # Errors
/// `EROFS` when the volume is read-only, `EPERM` for a placeholder, which is not stored.
pub(super) fn shareable(volume: &Rooms, file: FileId) -> Result<Arc<Subvolume>> {
    volume.live()?.require_writing()?;
    if placeholder_in(file).is_some() {
        return Err(Error::posix(Errno::PERM, "the place of a subvolume that is elsewhere"));
    }
    loaded(volume, file)
}

/// The subvolume of `file`, whether or not it may be changed.
pub(crate) fn loaded(volume: &Rooms, file: FileId) -> Result<Arc<Subvolume>> {
    let id = TreeId(file.dev);
    if let Some(known) = volume.inodes.known_subvolume(id) {
        return Ok(known);
    }
    tree_of(volume, file)?;
    volume.inodes.subvolume(id, || Subvolume::load(volume, id))
}

/// Whether the subvolume of `file` was deleted.
pub(crate) fn is_deleted(volume: &Rooms, file: FileId) -> Result<bool> {
    match tree_of(volume, file) {
        Ok(_) => Ok(false),
        Err(Error::Posix { errno: Errno::NOENT, .. }) => Ok(true),
        Err(e) => Err(e),
    }
}

/// Prepares the subvolume `id` for changes, unless it is read-only.
pub(crate) fn prepare(volume: &Rooms, id: TreeId) -> Result<()> {
    match writable(volume, FileId { dev: id.0, ino: ROOT_DIR }) {
        Err(Error::Posix { errno: Errno::ROFS, .. }) => Ok(()),
        other => other.map(drop),
    }
}

/// Counts moves and deletions of subvolumes: up when one begins, and again at its end. A reader
/// needs it, because the place of a subvolume is stored in two trees.
#[derive(Default)]
pub(crate) struct SubvolumeMoves(AtomicU64);

impl SubvolumeMoves {
    /// Notes that a subvolume moves or is deleted until the guard is dropped.
    pub(crate) fn moving(&self) -> SubvolumeMoveGuard<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        SubvolumeMoveGuard(&self.0)
    }

    /// How often a move or a deletion began or ended.
    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Whether no subvolume has moved since `count` was read.
    pub(super) fn is_still(&self, count: u64) -> bool {
        count.is_multiple_of(2) && self.count() == count
    }
}

/// A subvolume is moving or being deleted.
pub(crate) struct SubvolumeMoveGuard<'m>(&'m AtomicU64);

impl Drop for SubvolumeMoveGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}
