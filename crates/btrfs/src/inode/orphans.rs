//! Removing files without names that a crash left behind.
//!
//! An orphan item marks an inode that has no name and is to be removed (`evict`). The first change
//! of a subvolume removes all of its orphans before anything else. For subvolumes that are not
//! changed, the thread of the volume *sweeps* through all of them once. Read-only subvolumes are
//! included: the removed files were not visible there, and the kernel removes them too when it
//! looks up such a subvolume.
//!
//! A sweep looks for orphan items in the last commit only. An orphan of a later transaction is an
//! unlinked file that is still open, and closing it removes it. So a subvolume without orphans
//! costs one search in its tree, and nothing about it is stored. One step looks at one subvolume,
//! or removes as much of one inode as fits into a transaction, so a commit or the end of the volume
//! waits for no more than that. The sweep starts again when the volume is opened again.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};
use tracing::debug;

use super::evict::{evict_batch, orphan_key};
use super::inode_item;
use crate::events::ORPHANS;
use crate::inode::Rooms;
use crate::report::VolumeReport;
use crate::storage::malformed;
use crate::transaction::root_of;
use crate::tree::{Cursor, TreeRoot, with_item};

/// Removes the orphans of the subvolume `tree`, except open files. An orphan that cannot be removed
/// is reported and stays. It is not visible, so it is no reason to fail the operation of the
/// caller.
///
/// # Errors
/// When all writing has ended.
pub(crate) fn remove_orphans(volume: &Rooms, tree: TreeId) -> Result<()> {
    let mut orphans = Orphans::of(tree);
    loop {
        match orphans.step(volume) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => {
                volume.live()?.require_writing()?;
                volume.report(&VolumeReport::SweepFailed { problem: error.to_string() });
            }
        }
    }
}

/// The orphans of a subvolume, removed one after the other.
struct Orphans {
    tree: TreeId,
    /// Where the search for the next one starts; `None` behind the last.
    next: Option<Key>,
}

impl Orphans {
    fn of(tree: TreeId) -> Self {
        Self { tree, next: Some(orphan_key(0)) }
    }

    /// Removes one batch of the next orphan, and returns whether there was one.
    ///
    /// # Errors
    /// When the orphan cannot be removed; the next step continues with the one after it. When the
    /// search for the next orphan fails; then no more steps follow.
    fn step(&mut self, volume: &Rooms) -> Result<bool> {
        let Some(from) = self.next.take() else { return Ok(false) };
        let cursor = Cursor::seek(volume, volume.tree(self.tree)?, from)?;
        let found = cursor.item_of(objectid::ORPHAN, ItemType::ORPHAN_ITEM).map(|(key, _)| key);
        drop(cursor);
        let Some(key) = found else { return Ok(false) };
        let file = FileId { dev: self.tree.0, ino: key.offset };
        self.next = key.successor();
        if !remove(volume, file).map_err(|error| error.in_file_if_unnamed(file))? {
            self.next = Some(key);
        }
        Ok(true)
    }
}

/// Removes one batch of the inode `file`, unless it is open. Returns whether nothing more is to do.
fn remove(volume: &Rooms, file: FileId) -> Result<bool> {
    let (tree, key) = (TreeId(file.dev), orphan_key(file.ino));
    let mut locks = volume.inodes.lock(&[file]);
    let root = volume.tree(tree)?;
    // The thread that closed the file may have removed it meanwhile.
    let is_orphan = with_item(volume, root, key, |_| Ok(()))?.is_some();
    if !is_orphan || *locks.opens(file) > 0 {
        return Ok(true);
    }
    let links = match inode_item(volume, root, file) {
        Ok(item) => Some(item.nlink.get()),
        Err(Error::Posix { .. }) => None,
        Err(e) => return Err(e),
    };
    let is_done = if links == Some(0) {
        evict_batch(volume, file)?
    } else {
        // Old kernels left orphan items for truncated files too.
        let handle = volume.join_to_remove()?;
        // A subvolume that was deleted meanwhile has no inodes either.
        handle.tree(tree)?.require_alive()?;
        handle.change(tree, |tree| tree.remove(key).map(drop))?;
        true
    };
    if is_done {
        debug!(target: ORPHANS, subvolume = file.dev, inode = file.ino, "an orphan is removed");
        volume.live()?.stats.orphan_removed();
    }
    Ok(is_done)
}

/// The removal of orphans in all subvolumes of a volume, a step at a time.
pub(crate) struct Sweep {
    /// Where the search for the next subvolume starts; `None` behind the last.
    next: Option<TreeId>,
    /// The orphans of the subvolume at which the sweep is.
    orphans: Option<Orphans>,
}

impl Sweep {
    /// A sweep at its start.
    pub(crate) fn new() -> Self {
        Self { next: Some(TreeId::FS), orphans: None }
    }

    /// Whether all subvolumes were looked at.
    pub(crate) fn is_done(&self) -> bool {
        self.next.is_none() && self.orphans.is_none()
    }

    /// Does one step.
    ///
    /// # Errors
    /// When an item cannot be read or removed. The next step continues behind it.
    pub(crate) fn step(&mut self, volume: &Rooms) -> Result<()> {
        let Some(mut orphans) = self.orphans.take() else { return self.look(volume) };
        match orphans.step(volume) {
            Ok(true) => self.orphans = Some(orphans),
            // The subvolume was deleted meanwhile.
            Ok(false) | Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
            Err(error) => {
                self.orphans = Some(orphans);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Looks at the next subvolume.
    fn look(&mut self, volume: &Rooms) -> Result<()> {
        let Some(from) = self.next.take() else { return Ok(()) };
        // No block of the last commit is freed before the handle is dropped.
        let _handle = volume.enter_committed()?;
        let live = volume.live()?;
        let roots = TreeRoot::of_root_tree(&live.last_superblock());
        let Some(root) = next_root(volume, roots, from)? else { return Ok(()) };
        self.next = Some(TreeId(root.id.0 + 1));
        let cursor = Cursor::seek_committed(volume, root, orphan_key(0))?;
        if cursor.item_of(objectid::ORPHAN, ItemType::ORPHAN_ITEM).is_some() {
            self.orphans = Some(Orphans::of(root.id));
        }
        Ok(())
    }
}

/// The root of the first subvolume with an id of at least `from` in a committed root tree, without
/// deleted ones.
fn next_root(volume: &Rooms, roots: TreeRoot, from: TreeId) -> Result<Option<TreeRoot>> {
    let mut cursor = Cursor::seek_committed(volume, roots, Key::new(from.0, ItemType(0), 0))?;
    while let Some((key, data)) = cursor.item() {
        let id = TreeId(key.objectid);
        if id > TreeId::LAST_FREE {
            break;
        }
        if key.item_type == ItemType::ROOT_ITEM && id.is_subvolume() {
            let item = RootItem::parse(data).map_err(malformed)?;
            if !item.is_dead() {
                return Ok(Some(root_of(id, &item)));
            }
        }
        cursor.advance()?;
    }
    Ok(None)
}
