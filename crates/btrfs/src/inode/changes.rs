//! The changes of one operation, gathered before any of them is applied.
//!
//! An operation reads and changes items in memory. It finds every error of the call while doing so,
//! and then nothing has changed. At the end it applies all changes together: items of names and
//! inodes are queued (`delayed`), others go to the tree. The order protects readers, which take no
//! locks: a new inode comes before its entries, and inode items are removed last. So a reader finds
//! no name that leads nowhere.
//!
//! The operation holds the locks of its inodes, so their items do not change meanwhile.

use std::sync::Arc;

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::inode::{InodeItem, Timespec, inode_flags};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, Timestamp};
use zerocopy::IntoBytes;

use super::evict::EvictBatch;
use super::{no_such_file, type_of, write_back};
use crate::delayed::{self, OperationQueue, is_delayed};
use crate::inode::{Rooms, RoomsHandle};
use crate::transaction::ChangingTree;
use crate::tree::TreeRoot;

/// A changed item of any type but INODE_ITEM.
struct ChangedItem {
    key: Key,
    /// Whether there was one before the operation.
    existed: bool,
    is_changed: bool,
    new: Option<Vec<u8>>,
}

/// A changed inode item. Inode items are never removed one by one, so `item` always exists.
struct ChangedInode {
    ino: u64,
    existed: bool,
    is_changed: bool,
    item: InodeItem,
}

/// When an item is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ApplyPhase {
    /// First everything that names lead to.
    Others,
    Entries,
    /// After the new entries, so that a file that moves always has an entry.
    RemovedEntries,
    RemovedOthers,
}

/// What an operation changes in one subvolume.
pub(crate) struct Changes<'h, 'v> {
    handle: &'h RoomsHandle<'v>,
    tree: Arc<ChangingTree>,
    /// There are few, so a linear search is enough.
    items: Vec<ChangedItem>,
    inodes: Vec<ChangedInode>,
    /// Items of one inode to remove, and the inode itself when these are all its items.
    removed: Option<EvictBatch>,
    /// The names that inodes lose: directory, index, inode.
    lost: Vec<(u64, u64, u64)>,
}

fn inode_key(ino: u64) -> Key {
    Key::new(ino, ItemType::INODE_ITEM, 0)
}

impl ChangedInode {
    fn edit(&self) -> (Key, Option<&[u8]>) {
        (inode_key(self.ino), Some(self.item.as_bytes()))
    }
}

impl ChangedItem {
    fn phase(&self) -> ApplyPhase {
        let is_entry = matches!(self.key.item_type, ItemType::DIR_ITEM | ItemType::DIR_INDEX);
        match (is_entry, &self.new) {
            (false, Some(_)) => ApplyPhase::Others,
            (true, Some(_)) => ApplyPhase::Entries,
            (true, None) => ApplyPhase::RemovedEntries,
            (false, None) => ApplyPhase::RemovedOthers,
        }
    }

    fn is_new_index(&self) -> bool {
        self.key.item_type == ItemType::DIR_INDEX && self.new.is_some()
    }

    fn set(&mut self, new: Option<Vec<u8>>) {
        self.is_changed |= self.new != new;
        self.new = new;
    }
}

impl<'h, 'v> Changes<'h, 'v> {
    /// No changes yet, to the subvolume of `file`.
    ///
    /// # Errors
    /// When there is no such subvolume, or when it is read-only.
    pub(crate) fn new(handle: &'h RoomsHandle<'v>, file: FileId) -> Result<Self> {
        let changes = Self::accepted(handle, file)?;
        changes.tree.require_writable()?;
        Ok(changes)
    }

    /// As [`new`](Self::new), for data that was accepted before. The subvolume may have become
    /// read-only since.
    pub(super) fn accepted(handle: &'h RoomsHandle<'v>, file: FileId) -> Result<Self> {
        let tree = handle.tree(TreeId(file.dev))?;
        tree.require_alive()?;
        let (items, inodes) = (Vec::with_capacity(6), Vec::with_capacity(4));
        Ok(Self { handle, tree, items, inodes, removed: None, lost: Vec::new() })
    }

    pub(crate) fn volume(&self) -> &'v Rooms {
        self.handle.volume()
    }

    pub(crate) fn generation(&self) -> Generation {
        self.handle.generation()
    }

    /// `ENOENT` when the subvolume has no name any more.
    pub(super) fn require_subvolume_name(&self) -> Result<()> {
        self.tree.require_name()
    }

    fn root(&self) -> TreeRoot {
        *self.tree.root.read()
    }

    /// Whether an item with `size` bytes of data fits into a leaf.
    pub(super) fn fits(&self, size: usize) -> bool {
        size + ITEM_SIZE <= leaf_capacity(self.volume().superblock().node_size)
    }

    fn item(&mut self, key: Key) -> Result<&mut ChangedItem> {
        debug_assert_ne!(key.item_type, ItemType::INODE_ITEM, "inode items have their own place");
        if let Some(at) = self.items.iter().position(|item| item.key == key) {
            return Ok(&mut self.items[at]);
        }
        let read = |data: &[u8]| Ok(data.to_vec());
        let new = delayed::with_item(self.volume(), self.root(), key, read)?;
        let (existed, is_changed) = (new.is_some(), false);
        self.items.push(ChangedItem { key, existed, is_changed, new });
        Ok(self.items.last_mut().expect("one was added"))
    }

    /// The item with this key, with the changes of the operation so far.
    pub(super) fn get(&mut self, key: Key) -> Result<Option<&[u8]>> {
        Ok(self.item(key)?.new.as_deref())
    }

    /// Sets the data of the item.
    pub(super) fn put(&mut self, key: Key, data: Vec<u8>) -> Result<()> {
        self.item(key)?.set(Some(data));
        Ok(())
    }

    /// Adds an item that cannot exist yet, because its key has a number that was never used.
    pub(super) fn put_new(&mut self, key: Key, data: Vec<u8>) {
        debug_assert!(self.items.iter().all(|item| item.key != key), "{key} was there");
        self.items.push(ChangedItem { key, existed: false, is_changed: true, new: Some(data) });
    }

    /// Removes the item, and returns whether it existed.
    pub(super) fn remove(&mut self, key: Key) -> Result<bool> {
        let item = self.item(key)?;
        let was_there = item.new.is_some();
        item.set(None);
        Ok(was_there)
    }

    /// Sets the data of the item, or removes the item if `data` is empty.
    pub(super) fn put_or_remove(&mut self, key: Key, data: Vec<u8>) -> Result<()> {
        self.item(key)?.set(Some(data).filter(|data| !data.is_empty()));
        Ok(())
    }

    /// Flushes the queued items of `file` if it is new, before data of it goes to the tree.
    pub(super) fn before_data(&self, file: FileId) -> Result<()> {
        self.volume().delayed.flush_inode(self.handle, &self.tree, file.ino)
    }

    /// Removes the inode and `all` its items, if no more items exist than `all` and those that the
    /// operation removes itself, and if they are few. Returns whether it does.
    pub(super) fn remove_inode(&mut self, mut all: EvictBatch) -> bool {
        let is_removed =
            |key: Key| self.items.iter().any(|item| item.key == key && item.new.is_none());
        all.leave_out(is_removed);
        let is_whole = all.inode_gone().is_some();
        if is_whole {
            self.remove_items(all);
        }
        is_whole
    }

    /// Removes these items of an inode, and the inode itself when these are all.
    pub(super) fn remove_items(&mut self, batch: EvictBatch) {
        debug_assert!(self.removed.is_none(), "an operation removes items of one inode");
        self.removed = Some(batch);
    }

    /// Makes the inode `ino`, whose number was never used.
    pub(super) fn new_inode(&mut self, ino: u64, item: InodeItem) {
        self.inodes.push(ChangedInode { ino, existed: false, is_changed: true, item });
    }

    fn inode_at(&mut self, file: FileId) -> Result<&mut ChangedInode> {
        if let Some(at) = self.inodes.iter().position(|inode| inode.ino == file.ino) {
            return Ok(&mut self.inodes[at]);
        }
        let item = super::inode_item(self.volume(), self.root(), file)?;
        let (existed, is_changed) = (true, false);
        self.inodes.push(ChangedInode { ino: file.ino, existed, is_changed, item });
        Ok(self.inodes.last_mut().expect("one was added"))
    }

    /// The inode item of `file`.
    pub(crate) fn inode(&mut self, file: FileId) -> Result<InodeItem> {
        Ok(self.inode_at(file)?.item)
    }

    /// The inode item of the directory `dir`, to which entries can be added.
    ///
    /// # Errors
    /// `ENOTDIR`; `ENOENT` when it was removed; `EPERM` when it is immutable.
    pub(crate) fn directory(&mut self, dir: FileId) -> Result<InodeItem> {
        let item = self.inode(dir)?;
        if type_of(&item)? != FileType::Directory {
            return Err(Error::posix(Errno::NOTDIR, dir.to_string()));
        }
        if item.nlink.get() == 0 {
            return Err(no_such_file(dir));
        }
        refuse_flags(&item, inode_flags::IMMUTABLE, dir)?;
        Ok(item)
    }

    /// Changes the inode item of `file`, whose change time becomes `at`.
    pub(crate) fn change_inode(
        &mut self,
        file: FileId,
        at: Timestamp,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        let ctime = timespec(at)?;
        self.adjust_inode(file, |item| {
            item.ctime = ctime;
            item.sequence = item.sequence.get().wrapping_add(1).into();
            change(item);
        })
    }

    /// Changes the inode item of `file`, without its times.
    pub(super) fn adjust_inode(
        &mut self,
        file: FileId,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        let generation = self.generation().0;
        let inode = self.inode_at(file)?;
        inode.is_changed = true;
        inode.item.transid = generation.into();
        change(&mut inode.item);
        Ok(())
    }

    /// Whether a changed inode has the flag SYNC or DIRSYNC, so that the changes must be durable
    /// before the operation returns.
    pub(crate) fn is_synchronous(&self) -> bool {
        let wants = inode_flags::SYNC | inode_flags::DIRSYNC;
        self.inodes.iter().any(|inode| inode.is_changed && inode.item.flags.get() & wants != 0)
    }

    /// Applies all changes.
    ///
    /// # Errors
    /// When the reservation is too small; then nothing has changed. Any other error ends all
    /// writing, because half of the changes may be applied.
    pub(crate) fn apply(mut self) -> Result<()> {
        self.items.retain(|item| item.is_changed && (item.existed || item.new.is_some()));
        let gone = self.removed.as_ref().and_then(EvictBatch::inode_gone);
        self.inodes.retain(|inode| inode.is_changed && gone != Some(inode.ino));
        self.items.sort_by_key(ChangedItem::phase);
        self.note_removals();
        // No other item that is removed is queued. Queued names of the inode wait in its own node,
        // and an empty directory can have only removals of its entries queued.
        let inodes = self.inodes.iter().map(|inode| inode.ino).chain(gone).map(inode_key);
        let keys = self.items.iter().map(|item| item.key).chain(inodes);
        let (volume, file) = (self.volume(), self.removed.as_ref().map(EvictBatch::file));
        if volume.delayed.queues(self.handle, &self.tree, keys) {
            self.queue_all()
        } else {
            self.put_all()
        }?;
        if let Some(file) = file.filter(|_| gone.is_some()) {
            write_back::discard(volume, file);
        }
        Ok(())
    }

    /// Notes that the inode loses the name with this index in the directory.
    pub(super) fn note_lost(&mut self, dir: u64, index: u64, ino: u64) {
        self.lost.push((dir, index, ino));
    }

    /// Notes the removed entries for the log.
    fn note_removals(&self) {
        let is_index = |item: &&ChangedItem| item.key.item_type == ItemType::DIR_INDEX;
        for item in self.items.iter().filter(is_index).filter(|item| item.new.is_none()) {
            let (dir, index) = (item.key.objectid, item.key.offset);
            let lost = self.lost.iter().find(|lost| (lost.0, lost.1) == (dir, index));
            let dir = FileId { dev: self.tree.id.0, ino: dir };
            self.handle.log().note_removal(dir, index, lost.map(|lost| lost.2));
        }
    }

    /// The handle of the transaction that the changes belong to.
    pub(super) fn handle(&self) -> &RoomsHandle<'_> {
        self.handle
    }

    /// Puts everything into the tree.
    fn put_all(self) -> Result<()> {
        let Self { handle, tree, items, inodes, removed, .. } = self;
        handle.all_or_stop(|| {
            put(
                handle,
                &tree,
                inodes.iter().map(ChangedInode::edit).chain(edits(&items, ApplyPhase::Others)),
            )?;
            for phase in [ApplyPhase::Entries, ApplyPhase::RemovedEntries] {
                put(handle, &tree, edits(&items, phase))?;
            }
            let inode = removed.as_ref().and_then(EvictBatch::inode_gone).map(inode_key);
            remove_others(handle, &tree, &items, removed, inode)
        })
    }

    /// Queues the items of delayed kinds, and puts the rest into the tree.
    fn queue_all(self) -> Result<()> {
        let Self { handle, tree, mut items, inodes, removed, .. } = self;
        let delayed = &handle.volume().delayed;
        let direct: Vec<_> = items.extract_if(.., |item| !is_delayed(item.key.item_type)).collect();
        let gone = removed.as_ref().and_then(EvictBatch::inode_gone);
        let count = items.len() + inodes.len() + usize::from(gone.is_some());
        let mut queue = OperationQueue::begin(handle, delayed, &tree, count)?;
        if let Some(new) = items.iter().find(|item| item.is_new_index())
            && let Some(dir) = inodes.iter().find(|inode| inode.ino == new.key.objectid)
        {
            queue.note_entries(new.key.offset, dir.item.size.get() / 2);
        }
        handle.all_or_stop(|| {
            for inode in &inodes {
                queue.put(inode_key(inode.ino), inode.item.as_bytes(), inode.existed);
            }
            for ChangedItem { key, existed, new, .. } in
                items.extract_if(.., |item| item.phase() == ApplyPhase::Others)
            {
                queue.put(key, new.unwrap_or_default(), existed);
            }
            for item in direct.iter().filter(|item| item.phase() == ApplyPhase::Others) {
                queue.settle();
                delayed.flush_inode(handle, &tree, item.key.objectid)?;
                queue.stands_apart(item.key.objectid);
            }
            put(handle, &tree, edits(&direct, ApplyPhase::Others))?;
            for ChangedItem { key, existed, new, .. } in items {
                match new {
                    Some(data) => queue.put(key, data, existed),
                    None => queue.remove(key),
                }
            }
            if let Some(ino) = gone {
                queue.remove(inode_key(ino));
            }
            queue.finish()?;
            remove_others(handle, &tree, &direct, removed, None)
        })
    }
}

/// The edits of the items in this phase.
fn edits(items: &[ChangedItem], phase: ApplyPhase) -> impl Iterator<Item = (Key, Option<&[u8]>)> {
    items
        .iter()
        .filter(move |item| item.phase() == phase)
        .map(|item| (item.key, item.new.as_deref()))
}

/// Removes from the tree what goes last: the removed items of `items`, the batch of an inode, and
/// `inode`.
fn remove_others(
    handle: &RoomsHandle<'_>,
    tree: &ChangingTree,
    items: &[ChangedItem],
    removed: Option<EvictBatch>,
    inode: Option<Key>,
) -> Result<()> {
    let gone = removed.map_or_else(Vec::new, |batch| batch.give_up(handle));
    let gone = gone.into_iter().chain(inode).map(|key| (key, None));
    put(handle, tree, edits(items, ApplyPhase::RemovedOthers).chain(gone))
}

/// Puts edits into the tree.
fn put<'i>(
    handle: &RoomsHandle<'_>,
    tree: &ChangingTree,
    edits: impl Iterator<Item = (Key, Option<&'i [u8]>)>,
) -> Result<()> {
    let mut edits: Vec<_> = edits.collect();
    if edits.is_empty() {
        return Ok(());
    }
    edits.sort_unstable_by_key(|(key, _)| *key);
    handle.change(tree.id, |tree| tree.apply_batch(&edits).map(drop))
}

/// A time in its stored form.
pub(crate) fn timespec(at: Timestamp) -> Result<Timespec> {
    if at.nanos >= 1_000_000_000 {
        return Err(Error::posix(Errno::INVAL, format!("{} nanoseconds", at.nanos)));
    }
    Ok(Timespec { sec: at.secs.cast_unsigned().into(), nsec: at.nanos.into() })
}

/// `EPERM` when the inode has one of `flags`.
pub(crate) fn refuse_flags(item: &InodeItem, flags: u64, file: FileId) -> Result<()> {
    let set = item.flags.get() & flags;
    if set == 0 {
        return Ok(());
    }
    let names = inode_flags::names(set).join(", ");
    Err(Error::posix(Errno::PERM, format!("{file}, which has the flag {names}")))
}
