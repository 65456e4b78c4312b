//! What a crash left of files without names.
//!
//! An orphan item says that an inode has no name any more and is to be removed (`evict`). Those of
//! a subvolume go before anything else is changed in it. Those of subvolumes that nobody changes go
//! by and by: the thread of the volume *sweeps* all of them once. Read-only subvolumes are no
//! exception: nobody sees these files there either, and the kernel removes them when it looks such
//! a subvolume up.
//!
//! A sweep looks for orphan items in the last commit, since what unlinked files leave in later ones
//! is removed by who closes them. So a subvolume without any costs one way down its tree, and is
//! remembered nowhere. Each step looks at one subvolume, or removes of one inode what goes in one
//! transaction: neither a commit nor the end of the volume waits longer than that. What is left
//! then is found when the volume is opened again.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};

use super::evict::{evict_batch, orphan_key};
use super::inode_item;
use crate::engine::Engine;
use crate::report::Report;
use crate::storage::malformed;
use crate::transaction::root_of;
use crate::tree::{Cursor, TreeRoot, with_item};

/// Removes what is left of the unlinked files of the subvolume `tree`, but for those that are open.
/// What cannot be removed is reported, and stays: nobody sees it, and it is no reason to refuse
/// what is asked for.
///
/// # Errors
/// When nothing can be written any more.
pub(crate) fn remove_orphans(volume: &Engine, tree: TreeId) -> Result<()> {
    let mut orphans = Orphans::of(tree);
    loop {
        match orphans.step(volume) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => {
                volume.live()?.require_whole()?;
                volume.report(&Report::SweepFailed { problem: error.to_string() });
            }
        }
    }
}

/// The orphan items of a subvolume, one after the other.
struct Orphans {
    tree: TreeId,
    /// Where the next one is looked for; `None` behind the last.
    next: Option<Key>,
}

impl Orphans {
    fn of(tree: TreeId) -> Self {
        Self { tree, next: Some(orphan_key(0)) }
    }

    /// Removes what goes at once of the next one, and says whether there was one.
    ///
    /// # Errors
    /// When it cannot be removed: the next step goes on with the one behind it. When the next one
    /// cannot be found: then that is the end.
    fn step(&mut self, volume: &Engine) -> Result<bool> {
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

/// Removes what goes at once of the inode `file`, unless it is open, and says whether nothing is
/// left to do.
fn remove(volume: &Engine, file: FileId) -> Result<bool> {
    let (tree, key) = (TreeId(file.dev), orphan_key(file.ino));
    let mut locks = volume.inodes.lock(&[file]);
    let root = volume.tree(tree)?;
    // Who closed it may have removed it meanwhile.
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
        // Old kernels left such items for what they truncated, too.
        let handle = volume.join_to_remove()?;
        // A subvolume that was deleted meanwhile has no inodes either.
        handle.tree(tree)?.require_alive()?;
        handle.change(tree, |tree| tree.remove(key).map(drop))?;
        true
    };
    if is_done {
        volume.live()?.stats.orphan_removed();
    }
    Ok(is_done)
}

/// The removal of what a crash left in all subvolumes of a volume, a step at a time.
pub(crate) struct Sweep {
    /// Where the next subvolume is looked for; `None` behind the last.
    next: Option<TreeId>,
    /// What is being removed.
    orphans: Option<Orphans>,
}

impl Sweep {
    /// Nothing was looked at yet.
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
    /// When something cannot be read or removed: the next step goes on behind it.
    pub(crate) fn step(&mut self, volume: &Engine) -> Result<()> {
        let Some(mut orphans) = self.orphans.take() else { return self.look(volume) };
        match orphans.step(volume) {
            Ok(true) => self.orphans = Some(orphans),
            // It was deleted meanwhile.
            Ok(false) | Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
            Err(error) => {
                self.orphans = Some(orphans);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Looks at the next subvolume.
    fn look(&mut self, volume: &Engine) -> Result<()> {
        let Some(from) = self.next.take() else { return Ok(()) };
        // Nothing of the last commit is free before the handle is dropped.
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

/// The root of the first subvolume from `from` on that a committed root tree has, and that was not
/// deleted.
fn next_root(volume: &Engine, roots: TreeRoot, from: TreeId) -> Result<Option<TreeRoot>> {
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
